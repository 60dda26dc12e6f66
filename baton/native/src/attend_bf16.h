// Attention over pages of bfloat16 by AVX512-BF16's dot products of pairs. Include after vec_avx512.h.
//
// Queries and weights are rounded to bfloat16, as flash-attention does; sums are float32.
#pragma once

#include "attend.h"
#include "dot_bf16.h"

namespace baton {
namespace {

struct Pairs {
  using T = Bf16;
  using X = Bf16;
  static constexpr int kPadding = 32;
  static constexpr int kCache = 3;

  // Keys as columns of pairs of dimensions: out[panel][padded head_dim / 2][32][2].
  static void load_keys(const Bf16* const* slots, int size, Bf16* out) {
    for (int k = 0; k < kKeys; k += kLanes) {
      Bf16* panel = out + k / kPanel * padded(size, kPadding) * kPanel + k % kPanel * 2;
      for (int d = 0; d < size; d += kPadding) {
        F rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = _mm512_castsi512_ps(load_pairs(slots[k + i], d, size));
        Vec::transpose(rows);
        for (int i = 0; i < kLanes; ++i)
          _mm512_storeu_ps(panel + (d + 2 * i) * kPanel, rows[i]);
      }
    }
  }

  // Values as panels of 32 dimensions, two keys side by side: out[panel][64 / 2][32][2].
  static void load_values(const Bf16* const* slots, int size, Bf16* out) {
    alignas(64) static constexpr Bf16 kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(kFirst), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (int k = 0; k < kKeys; k += 2)
      for (int d = 0; d < size; d += kPanel) {
        const __m512i left = load_pairs(slots[k], d, size), right = load_pairs(slots[k + 1], d, size);
        Bf16* pairs = out + (d * kKeys + k * kPanel);
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(left, first, right));
        _mm512_storeu_si512(pairs + kPanel, _mm512_permutex2var_epi16(left, second, right));
      }
  }

  static void multiply(const Bf16* x, int64_t stride, int rows, const Bf16* w, int64_t inputs, float* out,
                       int64_t out_stride, bool add) {
    dot_rows(x, stride, rows, w, inputs, out, out_stride, add, FromCaches());
  }

  // 2^x for x <= 0, with a relative error of 8e-5, a fiftieth of bfloat16's own. The polynomial is minimax on [0, 1).
  static F exp2(F x) {
    x = Vec::max(Vec::set(-127.0f), x);
    constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const F fraction = x - _mm512_roundscale_ps(x, kFloor);
    F sum = Vec::fma(Vec::set(0.078024194f), fraction, Vec::set(0.22606722f));
    sum = Vec::fma(sum, fraction, Vec::set(0.69583374f));
    return _mm512_scalef_ps(Vec::fma(sum, fraction, Vec::set(0.9999252f)), x);
  }

  // The sum is that of rounded weights, so that together they still weigh 1.
  static float keep(const F* weights, Bf16* to) {
    F total = Vec::zero();
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (int i = 0; i < kKeys / kLanes; i += 2) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(weights[i + 1], weights[i]);
      _mm512_storeu_si512(to + i * kLanes, (__m512i)pairs);
      total = _mm512_dpbf16_ps(total, pairs, ones);
    }
    return Vec::sum(total);
  }
};

}  // namespace
}  // namespace baton
