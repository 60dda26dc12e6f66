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

alignas(64) const float kZeros[kMaxHeadDim] = {};

// The next vector of `size` elements from `at` on, zeros after its end.
template <class T>
inline F load_at(const T* from, int at, int size) {
  if (at + kLanes <= size) return Vec::load(from + at);
  T lanes[kLanes] = {};
  for (int i = at; i < size; ++i) lanes[i - at] = from[i];
  return Vec::load(lanes);
}

// Addresses of the keys and values of block [first, first + 64); rows of zeros for those outside [low, high).
template <class T>
struct Slots {
  const T *keys[kKeys], *values[kKeys];

  Slots(const Attention& a, int64_t first) {
    for (int i = 0; i < kKeys; ++i) keys[i] = values[i] = reinterpret_cast<const T*>(kZeros);
    const int64_t end = first + kKeys < a.high ? first + kKeys : a.high;
    int64_t key = first > a.low ? first : a.low, page = key / a.page_size, offset = key % a.page_size;
    for (; key < end; ++page, offset = 0) {
      int64_t slot = (a.table[page] * a.page_size + offset) * a.slot_stride;
      for (int64_t n = a.page_size - offset; n && key < end; --n, ++key, slot += a.slot_stride) {
        keys[key - first] = static_cast<const T*>(a.keys) + slot;
        values[key - first] = static_cast<const T*>(a.values) + slot;
      }
    }
  }
};

// Prefetches of rows of a block that will be read, `step` at a time: a core drops prefetches while about
// 24 are under way. GCC 12 leaves out calls of a function that does nothing but prefetch; this one counts too.
template <class T, int kCache>
class Prefetcher {
 public:
  Prefetcher(const T* const* rows, int head_dim, int step) : rows_(rows), head_dim_(head_dim), step_(step) {}

  void fetch() {
    for (const int end = next_ + step_; next_ < end && next_ < kKeys; ++next_)
      for (int d = 0; d < head_dim_; d += 64 / int(sizeof(T))) __builtin_prefetch(rows_[next_] + d, 0, kCache);
  }

 private:
  const T* const* rows_;
  const int head_dim_, step_;
  int next_ = 0;
};

// Attention in float32 over pages of T.
template <class Page>
struct Exact {
  using T = Page;
  using X = float;                        // of queries, and of keys, values and weights as they are multiplied
  static constexpr int kPadding = 16;     // queries and keys are padded to a multiple of this
  static constexpr int kCache = 3;        // to which keys and values are fetched ahead, as __builtin_prefetch counts

  // Keys as columns: out[panel][padded head_dim][32].
  static void load_keys(const T* const* slots, int size, X* out) {
    for (int k = 0; k < kKeys; k += kLanes) {
      float* panel = out + k / kPanel * padded(size, kPadding) * kPanel + k % kPanel;
      for (int d = 0; d < size; d += kLanes) {
        F rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = load_at(slots[k + i], d, size);
        Vec::transpose(rows);
        for (int i = 0; i < kLanes; ++i) Vec::store(panel + (d + i) * kPanel, rows[i]);
      }
    }
  }

  // Values as panels of 32 dimensions: out[panel][64 keys][32].
  static void load_values(const T* const* slots, int size, X* out) {
    for (int k = 0; k < kKeys; ++k)
      for (int d = 0; d < size; d += kLanes)
        Vec::store(out + (d / kPanel * kKeys + k) * kPanel + d % kPanel, load_at(slots[k], d, size));
  }

  // out[r][0..32) = (add ? out : 0) + x[r] w
  static void multiply(const X* x, int64_t stride, int rows, const X* w, int64_t inputs, float* out, int64_t out_stride,
                       bool add) {
    baton::multiply<Float32Panel>(x, stride, rows, w, kPanel, inputs, out, out_stride, add, FromCaches());
  }

  static F exp2(F x) { return baton::exp2(x); }

  // Weights as they are multiplied, and their sum.
  static float keep(const F* weights, X* to) {
    F total = Vec::zero();
    for (int i = 0; i < kKeys / kLanes; ++i) {
      Vec::store(to + i * kLanes, weights[i]);
      total = total + weights[i];
    }
    return Vec::sum(total);
  }
};

// Infinities whose minimum with a block's scores leaves those of keys [low, high).
struct Limits {
  float values[3 * kKeys];

  constexpr Limits() : values() {
    for (int i = 0; i < 3 * kKeys; ++i) values[i] = i / kKeys == 1 ? __builtin_inff() : -__builtin_inff();
  }
};
alignas(64) constexpr Limits kLimits;

// Scores of a row to weights in their place; returns what earlier sums must be multiplied by.
template <class Math>
inline float weigh(float* row, int low, int high, float& top, float& sum) {
  F scores[kKeys / kLanes];
  for (int i = 0; i < kKeys / kLanes; ++i) scores[i] = Vec::load(row + i * kLanes);
  if (low > 0 || high < kKeys) {
    const float *from = kLimits.values + kKeys - low, *to = kLimits.values + 2 * kKeys - high;
    for (int i = 0; i < kKeys / kLanes; ++i)
      scores[i] = Vec::min(Vec::min(scores[i], Vec::load(from + i * kLanes)), Vec::load(to + i * kLanes));
  }
  F maxima = scores[0];
  for (int i = 1; i < kKeys / kLanes; ++i) maxima = Vec::max(maxima, scores[i]);
  const float found = Vec::largest(maxima);
  float factor = 1;
  if (!(found <= top)) {
    float factors[kLanes];
    Vec::store(factors, exp2(Vec::set(top - found)));
    factor = factors[0];
    top = found;
  }
  for (F& each : scores) each = Math::exp2(each - Vec::set(top));
  sum = sum * factor + Math::keep(scores, reinterpret_cast<typename Math::X*>(row));
  return factor;
}

// Scores of all rows over a block to weights, and what was summed before to their scale.
template <class Math>
inline void weigh_rows(const Attention& a, int64_t block, float* scores, Partial result) {
  const int64_t width = padded(a.head_dim, kPanel);
  for (int r = 0; r < a.tokens * a.group; ++r, scores += kKeys) {
    const int64_t position = a.position + r / a.group;
    const int64_t from = (position - a.window + 1 > a.low ? position - a.window + 1 : a.low) - block;
    const int64_t to = (position + 1 < a.high ? position + 1 : a.high) - block;
    const int low = from < 0 ? 0 : int(from), high = to > kKeys ? kKeys : int(to);
    if (low >= high) {
      for (int k = 0; k < kKeys; k += kLanes) Vec::store(scores + k, Vec::zero());
      continue;
    }
    const float factor = weigh<Math>(scores, low, high, result.top[r], result.sum[r]);
    if (factor == 1.0f) continue;
    for (int64_t d = 0; d < width; d += kLanes) {
      float* out = result.out + r * width + d;
      Vec::store(out, Vec::load(out) * Vec::set(factor));
    }
  }
}

template <class Math>
inline void attend_to(const Attention& a, const AttentionWorkspace& workspace, Partial result) {
  using X = typename Math::X;
  constexpr int kQuarter = kKeys / 4;
  constexpr int kStride = kKeys * sizeof(float) / sizeof(X);  // of weights, which lie in the rows of scores
  const int rows = a.tokens * a.group, size = a.head_dim;
  const int64_t inputs = padded(size, Math::kPadding), width = padded(size, kPanel), first = a.low / kKeys * kKeys;
  X *queries = reinterpret_cast<X*>(workspace.queries), *keys = reinterpret_cast<X*>(workspace.keys);
  X *values = reinterpret_cast<X*>(workspace.values), *weights = reinterpret_cast<X*>(workspace.scores);
  // Weights are powers of 2.
  const F scale = Vec::set(a.scale * 1.44269504f);
  for (int r = 0; r < rows; ++r) {
    const float* query = a.queries + r / a.group * a.query_stride + r % a.group * size;
    for (int d = 0; d < inputs; d += kLanes) Vec::store(queries + r * inputs + d, load_at(query, d, size) * scale);
    for (int64_t d = 0; d < width; d += kLanes) Vec::store(result.out + r * width + d, Vec::zero());
    result.top[r] = -__builtin_inff();
    result.sum[r] = 0;
  }
  using Slots = baton::Slots<typename Math::T>;
  Slots slots(a, first), next = slots;
  for (int64_t block = first; block < a.high; block += kKeys, slots = next) {
    if (block + kKeys < a.high) next = Slots(a, block + kKeys);
    Prefetcher<typename Math::T, Math::kCache> values_ahead(slots.values, size, kQuarter),
        keys_ahead(next.keys, size, kQuarter);
    values_ahead.fetch();
    Math::load_keys(slots.keys, size, keys);
    values_ahead.fetch();
    for (int panel = 0; panel < kKeys; panel += kPanel) {
      Math::multiply(queries, inputs, rows, keys + panel * inputs, inputs, workspace.scores + panel, kKeys, false);
      values_ahead.fetch();
    }
    weigh_rows<Math>(a, block, workspace.scores, result);
    keys_ahead.fetch();
    Math::load_values(slots.values, size, values);
    keys_ahead.fetch();
    for (int64_t panel = 0; panel < width; panel += kPanel) {
      Math::multiply(weights, kStride, rows, values + panel * kKeys, kKeys, result.out + panel, width, true);
      keys_ahead.fetch();
    }
  }
}

template <decltype(Kernels::attend) kAttendBf16>
void attend(const Attention& query, const AttentionWorkspace& workspace, Partial result) {
  if (query.type == kFloat32) attend_to<Exact<float>>(query, workspace, result);
  else kAttendBf16(query, workspace, result);
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
    const float scale = 1.0f / result.sum[r], *from = result.out + r * width;
    columns_of(
        head_dim, [&](int d) { Vec::store(to + d, Vec::load(from + d) * Vec::set(scale)); },
        [&](int d) { put(to + d, from[d] * scale); });
  }
}

template <class Panel, class Row, decltype(Kernels::attend) kAttendBf16 = attend_to<Exact<Bf16>>>
Kernels table_of(decltype(Kernels::product) multiply_rows) {
  Kernels table{};
  table.row_block = 128;
  table.query_rows = 96;
  table.rows = sizeof(Row) == 4 ? kFloat32 : kBfloat16;
  table.product = multiply_rows;
  table.norm = norm<Row>;
  table.copy = copy<Row>;
  table.store = store;
  table.add = add;
  table.silu = silu<Row>;
  table.argmax = argmax;
  table.embed = embed<typename Panel::T>;
  table.append = append;
  table.attend = attend<kAttendBf16>;
  table.merge = merge;
  table.lowest_noise = lowest_noise;
  table.finish = finish<Row>;
  return table;
}

}  // namespace
}  // namespace baton
