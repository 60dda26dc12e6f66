// AVX-512 and AMX on a CPU that has AVX2, FMA and F16C, so that tests run the units of newer instruction sets:
// `python -m baton.native.build --emulate tests/emulation` compiles these units with this header in place of the
// compiler's.
//
// AVX-512 is SIMDe's (https://github.com/simd-everywhere/simde), which gives the bits of a CPU. The dot products of
// bfloat16 (dot_products.h) and the tiles (tiles.h) are our own, after the pseudo-code of Intel's manual: a CPU may
// differ from them in the last bit of a sum, and in numbers below 2^-126.
#pragma once

#include_next <immintrin.h>

#include <cmath>

#define SIMDE_ENABLE_NATIVE_ALIASES
// Vectors of 64 bytes are passed in memory; nothing outside a unit takes one.
#pragma GCC diagnostic ignored "-Wpsabi"
#include <simde/x86/avx512.h>  // SIMDe 0.7.4 or newer: apt-get install libsimde-dev

#include "dot_products.h"
#include "tiles.h"

namespace emulation {
namespace {

// Intrinsics that SIMDe 0.7.4 lacks.
inline __m512i convert_epu16_epi32(__m256i from) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(from)),
              _mm256_cvtepu16_epi32(_mm256_extracti128_si256(from, 1)));
}

inline __m256i convert_epi32_epi16(__m512i from) {
  uint32_t wide[16];
  uint16_t narrow[16];
  __m256i out;
  __builtin_memcpy(wide, &from, sizeof from);
  for (int i = 0; i < 16; ++i) narrow[i] = uint16_t(wide[i]);
  __builtin_memcpy(&out, narrow, sizeof out);
  return out;
}

inline __m512i convert_ps_epi32(__m512 from) {
  const Halves halves = split(from);
  return join(_mm256_cvtps_epi32(halves.low), _mm256_cvtps_epi32(halves.high));
}

// Of the rounding modes only the one to negative infinity.
inline __m512 reduce_ps(__m512 from, int) {
  const Halves halves = split(from);
  const auto reduce = [](__m256 x) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    const __m256 infinite = _mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_EQ_OQ);
    return _mm256_andnot_ps(infinite, _mm256_sub_ps(x, _mm256_floor_ps(x)));
  };
  return join(reduce(halves.low), reduce(halves.high));
}

}  // namespace
}  // namespace emulation

// Intrinsics that have a name in SIMDe only.
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 simde_mm512_shuffle_f32x4

#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtps_epi32
#define _mm512_cvtepu16_epi32 emulation::convert_epu16_epi32
#define _mm512_cvtepi32_epi16 emulation::convert_epi32_epi16
#define _mm512_cvtps_epi32 emulation::convert_ps_epi32
#define _mm512_reduce_ps emulation::reduce_ps
