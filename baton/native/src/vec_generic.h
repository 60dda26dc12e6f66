// Vectors of four floats in the compiler's own notation: for any CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace baton {
namespace {

struct Vec {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kRows = 6, kSums = 12;

  static F zero() { return F{}; }
  static F set(float value) { return F{value, value, value, value}; }
  static F load(const float* from) {
    F value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void store(float* to, F value) { std::memcpy(to, &value, sizeof value); }
  static F fma(F a, F b, F c) { return a * b + c; }
  // The second one if either is NaN.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  // Of lanes: their sum, and their largest (any number if one is NaN).
  static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float largest(F x) {
    const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }
  static F round(F x) {
    const F magic = set(12582912.0f);  // 1.5 * 2^23: a number added to it is rounded to a whole one
    F moved = x + magic;
    return moved - magic;
  }
  // 2^n for a whole n from -127 (which gives 0) to 127.
  static F power(F n) {
    I bits = (__builtin_convertvector(n, I) + 127) << 23;
    return (F)bits;
  }
  static F load(const Bf16* from) {
    I bits{};
    for (int lane = 0; lane < kLanes; ++lane) bits[lane] = int32_t(uint32_t(from[lane]) << 16);
    return (F)bits;
  }
  static void store(Bf16* to, F value) {
    for (int lane = 0; lane < kLanes; ++lane) {
      float one = value[lane];
      uint32_t bits;
      std::memcpy(&bits, &one, sizeof bits);
      to[lane] = one == one ? Bf16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : Bf16(0x7FC0);
    }
  }
  // The first and the second of each pair.
  static F load_first(const Bf16* from) { return (F)(load_bits(from) << 16); }
  static F load_second(const Bf16* from) { return (F)(load_bits(from) & int32_t(0xFFFF0000)); }
  static I load_bits(const Bf16* from) {
    I bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  }
  static void transpose(F* rows) {
    F copy[4] = {rows[0], rows[1], rows[2], rows[3]};
    for (int i = 0; i < 4; ++i) rows[i] = F{copy[0][i], copy[1][i], copy[2][i], copy[3][i]};
  }
};

}  // namespace
}  // namespace baton
