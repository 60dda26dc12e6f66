#include "vec_avx512.h"

#include "attend_amx.h"

namespace baton {
namespace {

constexpr int kFewRows = 4;  // up to so many, dot products read weights as fast as memory gives them

// Measured on a Xeon: a core has more misses of its second cache under way than of its first.
using Weights = FromMemory<3072, 2>;

// Many rows leave time to fetch the next panel while they multiply this one: an equal part in each step.
class NextPanel {
 public:
  NextPanel(const void* next, int64_t bytes, int rows)
      : at_(static_cast<const char*>(next)), end_(at_ + bytes), part_(padded(kStep * 2 * kRowTile / rows, 64)) {}

  inline __attribute__((always_inline)) void fetch(const void*, int) {
    for (const char* to = at_ + part_; at_ < to && at_ < end_; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr int64_t kStep = kInputs * kPanel * sizeof(Bf16);  // bytes that a step of two tiles of rows reads
  const char *at_, *end_;
  const int64_t part_;
};

// Inputs of a block of many rows: its weights stay in the first cache from tile to tile.
constexpr int kTileInputs = 256;

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

// out[r][0..32) = (add ? out : 0) + x[r] w, for one or two tiles of 16 rows.
template <bool kTwo, class From>
inline void tiles(const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out, int64_t out_stride,
                  bool add, From& from) {
  constexpr int kPairs = kPanel * 4;  // bytes of a pair of inputs
  const int64_t line = out_stride * 4;
  float* const second = out + kRowTile * out_stride;
  if (add) {
    _tile_loadd(0, out, line);
    _tile_loadd(1, out + 16, line);
    if (kTwo) {
      _tile_loadd(2, second, line);
      _tile_loadd(3, second + 16, line);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < inputs; k += kInputs, w += kInputs * kPanel) {
    from.fetch(w, kInputs * kPanel * int(sizeof(*w)));
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(6, w, kPairs);
    _tile_loadd(7, w + kPanel, kPairs);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, x + kRowTile * stride + k, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, line);
  _tile_stored(1, out + 16, line);
  if (kTwo) {
    _tile_stored(2, second, line);
    _tile_stored(3, second + 16, line);
  }
}

// The same for any number of rows; whole tiles of rows are read and written.
template <class From>
inline void tile_rows(const Bf16* x, int64_t stride, int rows, const Bf16* w, int64_t inputs, float* out,
                      int64_t out_stride, bool add, From& from) {
  const int64_t block = rows > 2 * kRowTile ? kTileInputs : inputs;
  for (int64_t k = 0; k < inputs; k += block) {
    const int64_t count = inputs - k < block ? inputs - k : block;
    for (int row = 0; row < rows; row += 2 * kRowTile) {
      const Bf16 *from_rows = x + row * stride + k, *weights = w + k * kPanel;
      float* to = out + row * out_stride;
      if (rows - row > kRowTile) tiles<true>(from_rows, stride, weights, count, to, out_stride, add || k > 0, from);
      else tiles<false>(from_rows, stride, weights, count, to, out_stride, add || k > 0, from);
    }
  }
}

void tile_product(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, const void* next,
                  float* out) {
  const int64_t bytes = inputs * kPanel * int64_t(sizeof(Bf16));
  const Bf16 *x = static_cast<const Bf16*>(rows), *w = static_cast<const Bf16*>(panel);
  if (count <= kFewRows) return dot_product<Weights>(rows, stride, count, panel, inputs, next, out);
  if (count <= 2 * kRowTile) {
    Weights from(panel, bytes, next);
    return tile_rows(x, stride, count, w, inputs, out, kPanel, false, from);
  }
  NextPanel from(next, next && next != panel ? bytes : 0, count);
  tile_rows(x, stride, count, w, inputs, out, kPanel, false, from);
}

}  // namespace

const Kernels& amx_bfloat16() {
  static const Kernels table = [] {
    Kernels made = table_of<Bf16Panel, Bf16, attend_tiles>(tile_product);
    made.row_block = 256;
    made.query_rows = 192;
    made.begin_thread = begin_thread;
    made.end_thread = end_thread;
    return made;
  }();
  return table;
}

}  // namespace baton
