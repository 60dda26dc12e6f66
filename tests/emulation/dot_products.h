// VDPBF16PS as in Intel's manual (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): of each pair
// first the second elements are multiplied and added, then the first ones, each rounded once; denormal numbers are
// zeros before and after. SIMDe's own takes the pairs in the other order and keeps denormal numbers.
#pragma once

#include <cstdint>

namespace emulation {
namespace {

struct Halves {
  __m256 low, high;
};

inline Halves split(__m512 from) {
  Halves out;
  __builtin_memcpy(&out, &from, sizeof out);
  return out;
}

inline __m512 join(__m256 low, __m256 high) {
  const Halves halves{low, high};
  __m512 out;
  __builtin_memcpy(&out, &halves, sizeof out);
  return out;
}

inline __m512i join(__m256i low, __m256i high) {
  const __m256i halves[2] = {low, high};
  __m512i out;
  __builtin_memcpy(&out, halves, sizeof out);
  return out;
}

// Denormal numbers become zeros of their sign.
inline __m256 flush(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), least = _mm256_set1_ps(1.17549435e-38f);
  const __m256 small = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), least, _CMP_LT_OQ);
  return _mm256_blendv_ps(x, _mm256_and_ps(x, sign), small);
}

inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) {
  return flush(_mm256_fmadd_ps(flush(a), flush(b), flush(c)));
}

inline __m256 first_of_pairs(__m256 pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}

inline __m256 second_of_pairs(__m256 pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(int(0xFFFF0000))));
}

inline __m256 dot_half(__m256 sums, __m256 a, __m256 b) {
  sums = multiply_add(second_of_pairs(a), second_of_pairs(b), sums);
  return multiply_add(first_of_pairs(a), first_of_pairs(b), sums);
}

inline __m512 dot_pairs(__m512 sums, __m512bh a, __m512bh b) {
  const Halves old = split(sums), left = split((__m512)a), right = split((__m512)b);
  return join(dot_half(old.low, left.low, right.low), dot_half(old.high, left.high, right.high));
}

// VCVTNE2PS2BF16: rounds to nearest, ties to even; denormal numbers become zeros.
inline __m512bh convert_pairs(__m512 upper, __m512 lower) {
  uint32_t from[32];
  uint16_t to[32];
  __m512bh out;
  __builtin_memcpy(from, &lower, sizeof lower);
  __builtin_memcpy(from + 16, &upper, sizeof upper);
  for (int i = 0; i < 32; ++i) {
    const uint32_t size = from[i] & 0x7FFFFFFF;
    if (size > 0x7F800000) to[i] = uint16_t(from[i] >> 16 | 0x40);
    else if (size < 0x00800000) to[i] = uint16_t(from[i] >> 16 & 0x8000);
    else to[i] = uint16_t((from[i] + 0x7FFF + (from[i] >> 16 & 1)) >> 16);
  }
  __builtin_memcpy(&out, to, sizeof to);
  return out;
}

}  // namespace
}  // namespace emulation

#undef _mm512_dpbf16_ps
#undef _mm512_cvtne2ps_pbh
#define _mm512_dpbf16_ps emulation::dot_pairs
#define _mm512_cvtne2ps_pbh emulation::convert_pairs
