// Weights into panels (kernels.h).

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

float element(const void* from, int64_t type, int64_t at) {
  if (type == kFloat32) return static_cast<const float*>(from)[at];
  const uint16_t half = static_cast<const uint16_t*>(from)[at];
  return type == kBfloat16 ? from_bf16(half) : from_half(half);
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_native_packed_size(int64_t rows, int64_t columns) {
  return padded(rows, kPanel) * padded(columns, kInputs);
}

void baton_native_pack(const void* from, int64_t from_type, int64_t count, int64_t columns, int64_t row, void* packed,
                       int64_t packed_type) {
  const int64_t panel_size = padded(columns, kInputs) * kPanel;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t panel = (row + r) / kPanel * panel_size, column = (row + r) % kPanel;
    if (packed_type == kFloat32) {
      float* to = static_cast<float*>(packed) + panel + column;
      for (int64_t k = 0; k < columns; ++k) to[k * kPanel] = element(from, from_type, r * columns + k);
      continue;
    }
    Bf16* to = static_cast<Bf16*>(packed) + panel + column * 2;
    for (int64_t k = 0; k < columns; ++k) {
      const int64_t at = r * columns + k;
      to[k / 2 * kPanel * 2 + k % 2] =
          from_type == kBfloat16 ? static_cast<const Bf16*>(from)[at] : to_bf16(element(from, from_type, at));
    }
  }
}
