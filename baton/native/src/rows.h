// Kernels between products, a row at a time: norms, rotary embeddings, activations, residuals, argmax.
// Include after a `Vec`.
#pragma once

#include "gemm.h"

namespace baton {
namespace {

// 2^x with a relative error of 2e-7, 0 below -126; NaN stays NaN. After Cephes' exp2f (https://netlib.org/cephes).
inline F exp2(F x) {
  x = Vec::max(Vec::set(-127.0f), x);
  F whole = Vec::round(x), f = x - whole;
  F sum = Vec::set(1.535336188319500e-4f);
  sum = Vec::fma(sum, f, Vec::set(1.339887440266574e-3f));
  sum = Vec::fma(sum, f, Vec::set(9.618437357674640e-3f));
  sum = Vec::fma(sum, f, Vec::set(5.550332471162809e-2f));
  sum = Vec::fma(sum, f, Vec::set(2.402264791363012e-1f));
  sum = Vec::fma(sum, f, Vec::set(6.931472028550421e-1f));
  sum = Vec::fma(sum, f, Vec::set(1.0f));
  return sum * Vec::power(whole);
}

inline void put(float* to, float value) { *to = value; }
inline void put(Bf16* to, float value) {
  Bf16 lanes[kLanes];
  Vec::store(lanes, Vec::set(value));
  *to = lanes[0];
}

// 1 / sqrt(mean(x^2) + eps)
inline float scale_of(const float* x, int64_t size, float eps) {
  F sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int n = 0; n < 4; ++n) {
      F value = Vec::load(x + i + n * kLanes);
      sums[n] = Vec::fma(value, value, sums[n]);
    }
  float sum = Vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; ++i) sum += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(sum / float(size) + eps);
}

template <class T>
void norm(const float* x, const float* weight, float eps, int64_t size, void* out) {
  T* to = static_cast<T*>(out);
  const float scale = scale_of(x, size, eps);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    Vec::store(to + i, Vec::load(x + i) * Vec::set(scale) * Vec::load(weight + i));
  for (; i < size; ++i) put(to + i, x[i] * scale * weight[i]);
}

template <class T>
void copy(const float* x, int64_t size, void* out) {
  for (int64_t i = 0; i < size; ++i) put(static_cast<T*>(out) + i, x[i]);
}

// Call `whole` for each vector of columns, and `single` for each column that fills none.
template <class Whole, class Single>
inline void columns_of(int columns, Whole whole, Single single) {
  int c = 0;
  for (; c + kLanes <= columns; c += kLanes) whole(c);
  for (; c < columns; ++c) single(c);
}

inline void add_bias(float* sums, const float* bias, int count, int columns) {
  if (!bias) return;
  for (int r = 0; r < count; ++r, sums += kPanel)
    columns_of(
        columns, [&](int c) { Vec::store(sums + c, Vec::load(sums + c) + Vec::load(bias + c)); },
        [&](int c) { sums[c] += bias[c]; });
}

void store(const float* sums, const float* bias, int count, int columns, float* out, int64_t stride) {
  add_bias(const_cast<float*>(sums), bias, count, columns);
  for (int r = 0; r < count; ++r, sums += kPanel, out += stride)
    columns_of(
        columns, [&](int c) { Vec::store(out + c, Vec::load(sums + c)); }, [&](int c) { out[c] = sums[c]; });
}

void add(const float* sums, const float* bias, int count, int columns, float* out, int64_t stride) {
  add_bias(const_cast<float*>(sums), bias, count, columns);
  for (int r = 0; r < count; ++r, sums += kPanel, out += stride)
    columns_of(
        columns, [&](int c) { Vec::store(out + c, Vec::load(out + c) + Vec::load(sums + c)); },
        [&](int c) { out[c] += sums[c]; });
}

// x / (1 + e^-x); e^-x is bounded, so that a large negative x gives a tiny number and not 0 / inf.
inline F silu_of(F x) {
  F power = Vec::min(Vec::set(126.0f), x * Vec::set(-1.44269504f));
  return x / (Vec::set(1.0f) + exp2(power));
}

template <class T>
void silu(float* gate, float* up, const float* gate_bias, const float* up_bias, int count, int columns, void* out,
          int64_t stride) {
  T* to = static_cast<T*>(out);
  add_bias(gate, gate_bias, count, columns);
  add_bias(up, up_bias, count, columns);
  for (int r = 0; r < count; ++r, gate += kPanel, up += kPanel, to += stride)
    columns_of(
        columns, [&](int c) { Vec::store(to + c, silu_of(Vec::load(gate + c)) * Vec::load(up + c)); },
        [&](int c) {
          float lanes[kLanes];
          Vec::store(lanes, silu_of(Vec::set(gate[c])));
          put(to + c, lanes[0] * up[c]);
        });
}

void argmax(const float* sums, int count, int columns, int64_t first, Argmax* found) {
  for (int r = 0; r < count; ++r, sums += kPanel, ++found) {
    float largest = sums[0], finite = 0;
    int c = 0;
    if (columns == kPanel) {
      F top = Vec::load(sums), zeros = top * Vec::zero();
      for (c = kLanes; c < kPanel; c += kLanes) {
        F value = Vec::load(sums + c);
        top = Vec::max(top, value);
        zeros = Vec::fma(value, Vec::zero(), zeros);
      }
      largest = Vec::largest(top);
      finite = Vec::sum(zeros);
    }
    for (; c < columns; ++c) {
      if (sums[c] > largest) largest = sums[c];
      finite += sums[c] * 0.0f;
    }
    found->finite += finite;
    if (largest > found->value) {
      int at = 0;
      while (at < columns - 1 && sums[at] != largest) ++at;
      found->value = largest;
      found->id = first + at;
    }
  }
}

template <class T>
void embed(const void* panel, int column, int64_t inputs, float* out) {
  if constexpr (sizeof(T) == 4) {
    const float* from = static_cast<const float*>(panel) + column;
    for (int64_t k = 0; k < inputs; ++k) out[k] = from[k * kPanel];
  } else {
    const Bf16* from = static_cast<const Bf16*>(panel) + column * 2;
    for (int64_t k = 0; k < inputs; ++k) {
      uint32_t bits = uint32_t(from[k / 2 * kPanel * 2 + k % 2]) << 16;
      __builtin_memcpy(out + k, &bits, sizeof bits);
    }
  }
}

// Normalise (if there is a weight) and rotate one head in the half-split layout of Hugging Face checkpoints.
template <class T>
inline void rotate(const float* x, const float* weight, const Append& token, T* out) {
  const int half = token.head_dim / 2;
  const float scale = weight ? scale_of(x, token.head_dim, token.eps) : 1.0f;
  const auto normed = [&](int i) { return weight ? x[i] * scale * weight[i] : x[i]; };
  const auto normed_vec = [&](int i) {
    F value = Vec::load(x + i);
    return weight ? value * Vec::set(scale) * Vec::load(weight + i) : value;
  };
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    F a = normed_vec(i), b = normed_vec(half + i), cos = Vec::load(token.cos + i), sin = Vec::load(token.sin + i);
    Vec::store(out + i, a * cos - b * sin);
    Vec::store(out + half + i, Vec::fma(b, cos, a * sin));
  }
  for (; i < half; ++i) {
    float a = normed(i), b = normed(half + i), cos = token.cos[i], sin = token.sin[i];
    put(out + i, a * cos - b * sin);
    put(out + half + i, b * cos + a * sin);
  }
}

template <class T>
inline void append_to(const Append& token) {
  const int size = token.head_dim;
  T *keys = static_cast<T*>(token.keys), *values = static_cast<T*>(token.values);
  const float *key = token.heads + token.num_heads * size, *value = key + token.num_kv_heads * size;
  for (int head = 0; head < token.num_heads; ++head)
    rotate(token.heads + head * size, token.q_norm, token, token.heads + head * size);
  for (int head = 0; head < token.num_kv_heads; ++head)
    rotate(key + head * size, token.k_norm, token, keys + head * size);
  columns_of(
      token.num_kv_heads * size, [&](int i) { Vec::store(values + i, Vec::load(value + i)); },
      [&](int i) { put(values + i, value[i]); });
}

void append(const Append& token) {
  if (token.type == kFloat32) append_to<float>(token);
  else append_to<Bf16>(token);
}

}  // namespace
}  // namespace baton
