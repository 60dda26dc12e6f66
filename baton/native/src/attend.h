// Attention of a few query rows over the keys of one KV head, read from the pages where they lie. Include after a `Vec`.
//
// A row is a query head of a token: those that share the KV head come together. Keys are taken in blocks of 64 that
// begin at multiples of 64, whatever the queries, and softmax is computed as they come (Milakov and Gimelshein 2018,
// arXiv:1805.02867). So a row's result does not depend on the rows beside it.
#pragma once

#include "rows.h"
#include "sample.h"

namespace baton {
namespace {

alignas(64) const float kNothing[kMaxHeadDim] = {};

// The next vector of `size` elements from `at` on, zeros after its end.
template <class T>
inline F load_at(const T* from, int at, int size) {
  if (at + kLanes <= size) return Vec::load(from + at);
  T lanes[kLanes] = {};
  for (int i = at; i < size; ++i) lanes[i - at] = from[i];
  return Vec::load(lanes);
}

// Where the keys or values of block [first, first + 64) lie; a row of zeros for those outside [low, high).
template <class T>
inline void find_slots(const Attention& a, const void* pages, int64_t first, const T** slots) {
  for (int i = 0; i < kKeys; ++i) slots[i] = reinterpret_cast<const T*>(kNothing);
  const int64_t begin = first > a.low ? first : a.low, end = first + kKeys < a.high ? first + kKeys : a.high;
  for (int64_t key = begin; key < end;) {
    const int64_t offset = key % a.page_size, rest = a.page_size - offset;
    const T* slot = static_cast<const T*>(pages) + (a.table[key / a.page_size] * a.page_size + offset) * a.slot_stride;
    for (int64_t n = end - key < rest ? end - key : rest; n; --n, ++key, slot += a.slot_stride) slots[key - first] = slot;
  }
}

template <class T>
inline void prefetch_slots(const Attention& a, const void* pages, int64_t first) {
  if (first >= a.high) return;
  const T* slots[kKeys];
  find_slots(a, pages, first, slots);
  for (int i = 0; i < kKeys; ++i)
    for (int d = 0; d < a.head_dim; d += 64 / int(sizeof(T))) __builtin_prefetch(slots[i] + d);
}

// Keys as columns: out[panel][padded head_dim][32].
template <class T>
inline void load_keys(const Attention& a, int64_t first, float* out) {
  const T* slots[kKeys];
  find_slots(a, a.keys, first, slots);
  for (int k = 0; k < kKeys; k += kLanes) {
    float* panel = out + k / kPanel * padded(a.head_dim, kDimUnit) * kPanel + k % kPanel;
    for (int d = 0; d < a.head_dim; d += kLanes) {
      F rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = load_at(slots[k + i], d, a.head_dim);
      Vec::transpose(rows);
      for (int i = 0; i < kLanes; ++i) Vec::store(panel + (d + i) * kPanel, rows[i]);
    }
  }
}

// Values as panels of 32 dimensions: out[panel][64 keys][32].
template <class T>
inline void load_values(const Attention& a, int64_t first, float* out) {
  const T* slots[kKeys];
  find_slots(a, a.values, first, slots);
  for (int k = 0; k < kKeys; ++k)
    for (int d = 0; d < a.head_dim; d += kLanes)
      Vec::store(out + (d / kPanel * kKeys + k) * kPanel + d % kPanel, load_at(slots[k], d, a.head_dim));
}

// Scores of a row to weights; returns what earlier sums must be multiplied by.
inline float weigh(float* scores, int low, int high, float& top, float& sum) {
  for (int k = 0; k < low; ++k) scores[k] = -__builtin_inff();
  for (int k = high; k < kKeys; ++k) scores[k] = -__builtin_inff();
  F most = Vec::load(scores);
  for (int k = kLanes; k < kKeys; k += kLanes) most = Vec::max(most, Vec::load(scores + k));
  const float found = max_of(most), next = found <= top ? top : found;
  F total = Vec::zero(), shift = Vec::set(next);
  for (int k = 0; k < kKeys; k += kLanes) {
    F weight = exp2(Vec::load(scores + k) - shift);
    Vec::store(scores + k, weight);
    total = total + weight;
  }
  float factor[kLanes];
  Vec::store(factor, exp2(Vec::set(top - next)));
  sum = sum * factor[0] + sum_of(total);
  top = next;
  return factor[0];
}

template <class T>
inline void attend_to(const Attention& a, const AttentionRoom& room, Partial result) {
  const int rows = a.tokens * a.group, size = a.head_dim;
  const int64_t inputs = padded(size, kDimUnit), width = padded(size, kPanel), first = a.low / kKeys * kKeys;
  // Weights are powers of 2.
  const F scale = Vec::set(a.scale * 1.44269504f);
  for (int r = 0; r < rows; ++r) {
    const float* query = a.queries + r / a.group * a.query_stride + r % a.group * size;
    for (int d = 0; d < inputs; d += kLanes) Vec::store(room.queries + r * inputs + d, load_at(query, d, size) * scale);
    for (int64_t d = 0; d < width; d += kLanes) Vec::store(result.out + r * width + d, Vec::zero());
    result.top[r] = -__builtin_inff();
    result.sum[r] = 0;
  }
  for (int64_t block = first; block < a.high; block += kKeys) {
    prefetch_slots<T>(a, a.keys, block + kKeys);
    prefetch_slots<T>(a, a.values, block);
    load_keys<T>(a, block, room.keys);
    for (int panel = 0; panel < kKeys; panel += kPanel)
      multiply<CachedPanel>(room.queries, inputs, rows, room.keys + panel * inputs, kPanel, inputs, room.scores + panel,
                            kKeys, false);
    for (int r = 0; r < rows; ++r) {
      const int64_t position = a.position + r / a.group;
      const int64_t from = (position - a.window + 1 > a.low ? position - a.window + 1 : a.low) - block;
      const int64_t to = (position + 1 < a.high ? position + 1 : a.high) - block;
      const int low = from < 0 ? 0 : int(from), high = to > kKeys ? kKeys : int(to);
      float* scores = room.scores + r * kKeys;
      if (low >= high) {
        for (int k = 0; k < kKeys; k += kLanes) Vec::store(scores + k, Vec::zero());
        continue;
      }
      const float factor = weigh(scores, low, high, result.top[r], result.sum[r]);
      if (factor != 1.0f)
        for (int64_t d = 0; d < width; d += kLanes) {
          float* out = result.out + r * width + d;
          Vec::store(out, Vec::load(out) * Vec::set(factor));
        }
    }
    load_values<T>(a, block, room.values);
    for (int64_t panel = 0; panel < width; panel += kPanel)
      multiply<CachedPanel>(room.scores, kKeys, rows, room.values + panel * kKeys, kPanel, kKeys, result.out + panel,
                            width, true);
  }
}

void attend(const Attention& query, const AttentionRoom& room, Partial result) {
  if (query.type == kFloat32) attend_to<float>(query, room, result);
  else attend_to<Bf16>(query, room, result);
}

void merge(Partial into, Partial from, int rows, int head_dim) {
  const int64_t width = padded(head_dim, kPanel);
  for (int r = 0; r < rows; ++r) {
    if (from.sum[r] == 0) continue;
    const float top = from.top[r] <= into.top[r] ? into.top[r] : from.top[r];
    const F old = exp2(Vec::set(into.top[r] - top)), added = exp2(Vec::set(from.top[r] - top));
    for (int64_t d = 0; d < width; d += kLanes) {
      float* out = into.out + r * width + d;
      Vec::store(out, Vec::fma(Vec::load(out), old, Vec::load(from.out + r * width + d) * added));
    }
    float factors[2][kLanes];
    Vec::store(factors[0], old);
    Vec::store(factors[1], added);
    into.sum[r] = into.sum[r] * factors[0][0] + from.sum[r] * factors[1][0];
    into.top[r] = top;
  }
}

template <class T>
void finish(Partial result, int tokens, int group, int head_dim, void* out, int64_t stride) {
  const int64_t width = padded(head_dim, kPanel);
  for (int r = 0; r < tokens * group; ++r) {
    T* to = static_cast<T*>(out) + r / group * stride + r % group * head_dim;
    const float share = 1.0f / result.sum[r], *from = result.out + r * width;
    columns_of(
        head_dim, [&](int d) { Vec::store(to + d, Vec::load(from + d) * Vec::set(share)); },
        [&](int d) { put(to + d, from[d] * share); });
  }
}

template <class Panel, class Row>
Kernels table_of(void (*multiply_rows)(const void*, int64_t, int, const void*, int64_t, float*)) {
  Kernels table{};
  table.rows = sizeof(Row) == 4 ? kFloat32 : kBfloat16;
  table.product = multiply_rows;
  table.norm = norm<Row>;
  table.copy = copy<Row>;
  table.store = store;
  table.add = add;
  table.silu = silu<Row>;
  table.best = best;
  table.embed = embed<typename Panel::T>;
  table.append = append;
  table.attend = attend;
  table.merge = merge;
  table.lowest_noise = lowest_noise;
  table.finish = finish<Row>;
  return table;
}

}  // namespace
}  // namespace baton
