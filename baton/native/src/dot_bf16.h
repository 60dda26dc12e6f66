// Products of bfloat16 rows by AVX512-BF16's dot products of pairs. Include after vec_avx512.h.
#pragma once

#include "gemm.h"

namespace baton {
namespace {

// The next 32 elements from `at` on, zeros after the end of the row.
inline __m512i load_pairs(const Bf16* from, int at, int size) {
  if (at + 32 <= size) return _mm512_loadu_si512(from + at);
  Bf16 lanes[32] = {};
  for (int i = at; i < size; ++i) lanes[i - at] = from[i];
  return _mm512_loadu_si512(lanes);
}

template <class From, int M>
inline void dot_tile(const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out, int64_t out_stride,
                     bool add, From from) {
  __m512 sums[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) sums[m][n] = add ? _mm512_loadu_ps(out + m * out_stride + n * 16) : _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2, w += 2 * kPanel) {
    from.fetch(w, 2 * kPanel * int(sizeof(*w)));
    const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + kPanel);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, x + m * stride + k, sizeof pair);
      const __m512bh values = (__m512bh)_mm512_set1_epi32(pair);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], values, left);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], values, right);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    _mm512_storeu_ps(out + m * out_stride, sums[m][0]);
    _mm512_storeu_ps(out + m * out_stride + 16, sums[m][1]);
  }
}

template <class From, int M = 1>
inline void dot_tile_of(int rows, const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out,
                        int64_t out_stride, bool add, From from) {
  if constexpr (M < Vec::kRows)
    if (rows > M) return dot_tile_of<From, M + 1>(rows, x, stride, w, inputs, out, out_stride, add, from);
  dot_tile<From, M>(x, stride, w, inputs, out, out_stride, add, from);
}

// out[r][0..32) = (add ? out : 0) + x[r] w, for any number of rows.
template <class From>
inline void dot_rows(const Bf16* x, int64_t stride, int rows, const Bf16* w, int64_t inputs, float* out,
                     int64_t out_stride, bool add, From from) {
  const int tiles = (rows + Vec::kRows - 1) / Vec::kRows;
  for (int i = 0; i < tiles; ++i) {
    const int begin = rows * i / tiles, end = rows * (i + 1) / tiles;
    dot_tile_of(end - begin, x + begin * stride, stride, w, inputs, out + begin * out_stride, out_stride, add, from);
  }
}

template <class From>
void dot_product(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, const void* next,
                 float* out) {
  dot_rows(static_cast<const Bf16*>(rows), stride, count, static_cast<const Bf16*>(panel), inputs, out, kPanel, false,
           From(panel, inputs * kPanel * int64_t(sizeof(Bf16)), next));
}

}  // namespace
}  // namespace baton
