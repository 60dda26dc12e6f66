// Weights into panels (kernels.h).

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "model.h"

namespace baton {
namespace {

float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
  uint32_t bits;
  float value;
  if (rest >= 0x7C00) {
    bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest + (112 << 10)) << 13);
  } else {
    value = float(rest) * 5.9604645e-8f;  // 2^-24
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_bf16(Bf16 upper) {
  const uint32_t bits = uint32_t(upper) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

Bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7FC0;
  return Bf16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Fills a part of one panel at a time, kInputs columns of it, so that all its lines are in the cache until they are full.
template <typename To, typename From, typename Convert>
void fill(const From* from, int64_t count, int64_t columns, int64_t row, To* packed, int64_t panel_size,
          Convert convert) {
  constexpr int64_t kGroup = sizeof(To) == 2 ? 2 : 1;  // inputs that lie side by side
  for (int64_t first = 0, rows; first < count; first += rows) {
    const int64_t column = (row + first) % kPanel;
    rows = std::min(kPanel - column, count - first);
    To* panel = packed + (row + first) / kPanel * panel_size + column * kGroup;
    for (int64_t begin = 0; begin < columns; begin += kInputs) {
      const int64_t end = std::min(begin + kInputs, columns);
      for (int64_t r = 0; r < rows; ++r) {
        const From* of = from + (first + r) * columns;
        for (int64_t k = begin; k < end; ++k) {
          panel[k / kGroup * kPanel * kGroup + r * kGroup + k % kGroup] = convert(of[k]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_native_packed_size(int64_t rows, int64_t columns) {
  return padded(rows, kPanel) * padded(columns, kInputs);
}

void baton_native_pack(const void* from, int64_t from_type, int64_t count, int64_t columns, int64_t row, void* packed,
                       int64_t packed_type) {
  const auto same = [](auto value) { return value; };
  const int64_t panel_size = padded(columns, kInputs) * kPanel;
  const auto half = static_cast<const uint16_t*>(from);
  const auto single = static_cast<const float*>(from);
  if (packed_type == kFloat32) {
    const auto to = static_cast<float*>(packed);
    if (from_type == kFloat32) return fill(single, count, columns, row, to, panel_size, same);
    if (from_type == kBfloat16) return fill(half, count, columns, row, to, panel_size, from_bf16);
    return fill(half, count, columns, row, to, panel_size, from_half);
  }
  const auto to = static_cast<Bf16*>(packed);
  if (from_type == kBfloat16 && columns % 2 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
    // Two inputs that lie side by side are one word.
    return fill(static_cast<const uint32_t*>(from), count, columns / 2, row, static_cast<uint32_t*>(packed),
                panel_size / 2, same);
  }
  if (from_type == kBfloat16) return fill(half, count, columns, row, to, panel_size, same);
  if (from_type == kFloat32) return fill(single, count, columns, row, to, panel_size, to_bf16);
  fill(half, count, columns, row, to, panel_size, [](uint16_t value) { return to_bf16(from_half(value)); });
}
