#include "vec_avx512.h"

#include "attend_bf16.h"

namespace baton {
namespace {

constexpr int kFewRows = 4;  // up to so many, dot products read weights as fast as memory gives them

// Eight tiles of 16 rows of 64 bytes, as LDTILECFG reads it. A constant: GCC before 12.4 and 13.3 believes that the
// instruction reads 8 bytes only, and leaves out what a function writes into the others (https://gcc.gnu.org/PR114098).
struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kRowTile, kRowTile, kRowTile, kRowTile, kRowTile, kRowTile, kRowTile, kRowTile};
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");
alignas(64) constexpr TileConfig kTileConfig;

void begin_thread() { _tile_loadconfig(&kTileConfig); }

void end_thread() { _tile_release(); }

// One or two tiles of 16 rows; `x` and `out` have room for whole tiles.
template <bool kTwo>
inline void tiles(const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out) {
  constexpr int kBytes = kPanel * 4;  // of a pair of inputs, and of a row of sums
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < inputs; k += kInputs, w += kInputs * kPanel) {
    for (int line = 0; line < kInputs * kPanel * 2; line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + line);
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(6, w, kBytes);
    _tile_loadd(7, w + kPanel, kBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, x + kRowTile * stride + k, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kBytes);
  _tile_stored(1, out + 16, kBytes);
  if (kTwo) {
    _tile_stored(2, out + kRowTile * kPanel, kBytes);
    _tile_stored(3, out + kRowTile * kPanel + 16, kBytes);
  }
}

void tile_product(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, float* out) {
  if (count <= kFewRows) return dot_product(rows, stride, count, panel, inputs, out);
  const Bf16 *x = static_cast<const Bf16*>(rows), *w = static_cast<const Bf16*>(panel);
  for (int row = 0; row < count; row += 2 * kRowTile) {
    if (count - row > kRowTile) tiles<true>(x + row * stride, stride, w, inputs, out + row * kPanel);
    else tiles<false>(x + row * stride, stride, w, inputs, out + row * kPanel);
  }
}

}  // namespace

const Kernels& amx_bfloat16() {
  static const Kernels table = [] {
    Kernels made = table_of<Bf16Panel, Bf16, Pairs>(tile_product);
    made.begin_thread = begin_thread;
    made.end_thread = end_thread;
    return made;
  }();
  return table;
}

}  // namespace baton
