// Rows of float32 times a panel of 32 columns, summed in registers. Include after a `Vec`.
#pragma once

#include <climits>

#include "kernels.h"

namespace baton {
namespace {

using F = Vec::F;
constexpr int kLanes = Vec::kLanes;

// Weights on their way from memory to the caches, because memory answers late and hardware prefetchers stop at pages:
// those kAhead bytes ahead in the panel and, at its end, the first ones of the panel that this thread reads next. Other
// threads read the weights behind a panel. kCache: the cache that they go to, as __builtin_prefetch counts.
template <int kAhead = 12288, int kCache = 3>
struct FromMemory {
  const char* end;  // of the panel
  int64_t jump;     // from there to the next one

  FromMemory(const void* panel, int64_t bytes, const void* next)
      : end(static_cast<const char*>(panel) + bytes), jump(next ? static_cast<const char*>(next) - end : 0) {}

  // `bytes` are read at `at`.
  inline __attribute__((always_inline)) void fetch(const void* at, int bytes) const {
    const char* ahead = static_cast<const char*>(at) + kAhead;
    if (ahead >= end) ahead += jump;
#pragma GCC unroll 32
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, kCache);
  }
};

// Weights that are in the caches already.
struct FromCaches {
  inline __attribute__((always_inline)) void fetch(const void*, int) const {}
};

// With 32 registers there is room for the weights of pairs beside all sums, and a tile has enough rows to hide that they
// are unpacked. When weights were unpacked once for all tiles, 24 rows took a third longer than 22.
constexpr bool kManyRegisters = Vec::kSums >= 24;

// Inputs of a block of many rows, and how many rows make it worth to unpack its weights once for all of them.
constexpr int kInputBlock = 256, kUnpackedRows = kManyRegisters ? INT_MAX : 2 * Vec::kRows;

struct Float32Panel {
  using T = float;
  static constexpr int kStep = 1;         // inputs a step
  static constexpr int kColumn = 1;       // elements from column to column

  template <int M, int N>
  static inline __attribute__((always_inline)) void step(F (&sums)[M][N], const float* x, int64_t stride,
                                                         const float* w) {
    F weights[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) weights[n] = Vec::load(w + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      F value = Vec::set(x[m * stride]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = Vec::fma(value, weights[n], sums[m][n]);
    }
  }
};

struct Bf16Panel {
  using T = Bf16;
  static constexpr int kStep = 2;
  static constexpr int kColumn = 2;

  template <int M, int N>
  static inline __attribute__((always_inline)) void step(F (&sums)[M][N], const float* x, int64_t stride,
                                                         const Bf16* w) {
    F weights[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) weights[n] = Vec::load_first(w + n * kLanes * 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      F value = Vec::set(x[m * stride]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = Vec::fma(value, weights[n], sums[m][n]);
    }
    // Both halves of all pairs at once would need more registers than AVX2 has: make the compiler load them again.
    asm("" : "+r"(w));
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) weights[n] = Vec::load_second(w + n * kLanes * 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      F value = Vec::set(x[m * stride + 1]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[m][n] = Vec::fma(value, weights[n], sums[m][n]);
    }
  }
};

// M rows times N vectors of columns over `inputs`, a multiple of kStep; w_stride: elements from step to step. Not
// inlined, so that what callers keep takes none of its registers.
template <class Panel, class From, int M, int N>
__attribute__((noinline)) void tile(const float* x, int64_t x_stride, const typename Panel::T* w, int64_t w_stride,
                                    int64_t inputs, float* out, int64_t out_stride, bool add, From from) {
  F sums[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sums[m][n] = add ? Vec::load(out + m * out_stride + n * kLanes) : Vec::zero();
  for (int64_t k = 0; k < inputs; k += Panel::kStep, w += w_stride) {
    from.fetch(w, N * kLanes * Panel::kColumn * int(sizeof(*w)));
    Panel::template step<M, N>(sums, x + k, x_stride, w);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) Vec::store(out + m * out_stride + n * kLanes, sums[m][n]);
}

template <class Panel, int N, class From, int M = 1>
inline void tile_of(int rows, const float* x, int64_t x_stride, const typename Panel::T* w, int64_t w_stride,
                    int64_t inputs, float* out, int64_t out_stride, bool add, From from) {
  if constexpr (M < Vec::kRows && M * N < Vec::kSums)
    if (rows > M)
      return tile_of<Panel, N, From, M + 1>(rows, x, x_stride, w, w_stride, inputs, out, out_stride, add, from);
  tile<Panel, From, M, N>(x, x_stride, w, w_stride, inputs, out, out_stride, add, from);
}

// Columns of a panel of pairs as float32: out[input][N vectors].
template <int N, class From>
inline void unpack(const Bf16* w, int64_t w_stride, int64_t inputs, float* out, From from) {
  for (int64_t k = 0; k < inputs; k += 2, w += w_stride, out += 2 * N * kLanes) {
    from.fetch(w, N * kLanes * 4);
    for (int n = 0; n < N; ++n) {
      Vec::store(out + n * kLanes, Vec::load_first(w + n * kLanes * 2));
      Vec::store(out + (N + n) * kLanes, Vec::load_second(w + n * kLanes * 2));
    }
  }
}

// out[r][0..32) = (add ? out : 0) + x[r] w, for any number of rows. Each output is one chain over the inputs.
template <class Panel, class From>
inline void multiply(const float* x, int64_t x_stride, int rows, const typename Panel::T* w, int64_t w_stride,
                     int64_t inputs, float* out, int64_t out_stride, bool add, From from) {
  constexpr int kWide = kPanel / kLanes, kNarrow = kWide < 2 ? kWide : 2;
  // Pairs need registers for both halves of the weights.
  constexpr int kHalves = kManyRegisters ? 0 : Panel::kColumn - 1, kSpare = kHalves * kWide;
  if (rows * kWide + kSpare <= Vec::kSums && rows <= Vec::kRows)
    return tile_of<Panel, kWide>(rows, x, x_stride, w, w_stride, inputs, out, out_stride, add, from);
  // Tiles of like heights: one that is low leaves multipliers idle.
  const bool unpacks = Panel::kColumn == 2 && rows >= kUnpackedRows;
  const int height = unpacks ? Vec::kRows : Vec::kRows - kHalves, tiles = (rows + height - 1) / height;
  // As many inputs at a time as leave weights and rows in the first cache from tile to tile.
  const int64_t block = tiles > 1 || kNarrow < kWide ? kInputBlock : inputs;
  for (int64_t k = 0; k < inputs; k += block) {
    const int64_t count = inputs - k < block ? inputs - k : block;
    for (int column = 0; column < kPanel; column += kNarrow * kLanes) {
      const auto* weights = w + k / Panel::kStep * w_stride + column * Panel::kColumn;
      if constexpr (Panel::kColumn == 2) {
        if (unpacks) {
          alignas(64) float unpacked[kInputBlock * kNarrow * kLanes];
          unpack<kNarrow>(weights, w_stride, count, unpacked, from);
          for (int i = 0; i < tiles; ++i) {
            const int begin = rows * i / tiles, end = rows * (i + 1) / tiles;
            tile_of<Float32Panel, kNarrow>(end - begin, x + begin * x_stride + k, x_stride, unpacked, kNarrow * kLanes,
                                           count, out + begin * out_stride + column, out_stride, add || k > 0,
                                           FromCaches());
          }
          continue;
        }
      }
      for (int i = 0; i < tiles; ++i) {
        const int begin = rows * i / tiles, end = rows * (i + 1) / tiles;
        tile_of<Panel, kNarrow>(end - begin, x + begin * x_stride + k, x_stride, weights, w_stride, count,
                                out + begin * out_stride + column, out_stride, add || k > 0, from);
      }
    }
  }
}

template <class Panel>
void product(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, const void* next,
             float* out) {
  multiply<Panel>(static_cast<const float*>(rows), stride, count, static_cast<const typename Panel::T*>(panel),
                  kPanel * Panel::kColumn, inputs, out, kPanel, false,
                  FromMemory<>(panel, inputs * kPanel * int64_t(sizeof(typename Panel::T)), next));
}

}  // namespace
}  // namespace baton
