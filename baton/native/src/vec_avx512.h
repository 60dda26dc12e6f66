// Vectors of sixteen floats, for AVX-512 (F, BW, VL, DQ).
#pragma once

// GCC 12 takes the undefined operands of its own intrinsics for mistakes (https://gcc.gnu.org/PR105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include "kernels.h"

namespace baton {
namespace {

struct Vec {
  using F = __m512;
  static constexpr int kLanes = 16, kRows = 12, kSums = 24;

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, F value) { _mm512_storeu_ps(to, value); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // The second one if either is NaN.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  // Of lanes: their sum, and their largest (any number if one is NaN).
  static float sum(F x) {
    x = x + _mm512_shuffle_f32x4(x, x, 0x4E);
    __m128 quarter = _mm512_castps512_ps128(x + _mm512_shuffle_f32x4(x, x, 0xB1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static float largest(F x) {
    x = max(x, _mm512_shuffle_f32x4(x, x, 0x4E));
    __m128 quarter = _mm512_castps512_ps128(max(x, _mm512_shuffle_f32x4(x, x, 0xB1)));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // 2^n for a whole n from -127 (which gives 0) to 127.
  static F power(F n) {
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  static F load(const Bf16* from) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(Bf16* to, F value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
  }
  // The first and the second of each pair.
  static F load_first(const Bf16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16));
  }
  static F load_second(const Bf16* from) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(int(0xFFFF0000))));
  }
  static void transpose(F* r) {
    F a[16], b[16];
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // b[4 i + j]: column 4 * lane + j, for each of the four 128-bit lanes, of rows 4 i to 4 i + 3.
    for (int i = 0; i < 4; ++i) {
      b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
      b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
      b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
      b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
    }
    for (int j = 0; j < 4; ++j) {
      F even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
      F even2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), odd2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
      r[j] = _mm512_shuffle_f32x4(even, even2, 0x88);
      r[4 + j] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
      r[8 + j] = _mm512_shuffle_f32x4(even, even2, 0xDD);
      r[12 + j] = _mm512_shuffle_f32x4(odd, odd2, 0xDD);
    }
  }
};

}  // namespace
}  // namespace baton
