// The hash behind the sampler's noise (baton/model/gumbel.py). Plain integer code, which compilers turn into vectors.
#pragma once

#include "kernels.h"

namespace baton {
namespace {

// MurmurHash3's 32-bit finalizer (Appleby, public domain).
inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ x >> 16;
}

int32_t lowest_noise(uint32_t first, int count, uint32_t key, uint32_t second) {
  int32_t lowest = INT32_MAX;
  for (int i = 0; i < count; ++i) {
    const uint32_t token = first + uint32_t(i);
    const int32_t bits = int32_t(mix(mix(token * 0x9E3779B1u + key) ^ second) & 0x7FFFFFFFu);
    lowest = bits < lowest ? bits : lowest;
  }
  return lowest;
}

}  // namespace
}  // namespace baton
