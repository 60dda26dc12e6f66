// Products of bfloat16 rows by AVX512-BF16's dot products of pairs. Include after vec_avx512.h.
#pragma once

#include "gemm.h"

namespace baton {
namespace {

template <int M>
inline void dot_tile(const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out) {
  __m512 sums[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2, w += 2 * kPanel) {
    __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead);
    __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64);
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
    _mm512_storeu_ps(out + m * kPanel, sums[m][0]);
    _mm512_storeu_ps(out + m * kPanel + 16, sums[m][1]);
  }
}

template <int M = 1>
inline void dot_tile_of(int rows, const Bf16* x, int64_t stride, const Bf16* w, int64_t inputs, float* out) {
  if constexpr (M < Vec::kRows)
    if (rows > M) return dot_tile_of<M + 1>(rows, x, stride, w, inputs, out);
  dot_tile<M>(x, stride, w, inputs, out);
}

void dot_product(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, float* out) {
  const Bf16 *x = static_cast<const Bf16*>(rows), *w = static_cast<const Bf16*>(panel);
  const int tiles = (count + Vec::kRows - 1) / Vec::kRows;
  for (int i = 0; i < tiles; ++i) {
    const int begin = count * i / tiles, end = count * (i + 1) / tiles;
    dot_tile_of(end - begin, x + begin * stride, stride, w, inputs, out + begin * kPanel);
  }
}

}  // namespace
}  // namespace baton
