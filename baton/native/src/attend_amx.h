// Attention over pages of bfloat16 by AMX tiles, with scores transposed: keys by queries. Include after vec_avx512.h.
//
// A tile has 16 queries as its columns, so that the lanes of a vector are queries: their maxima, sums and factors need no
// shuffles. While the weights of 16 queries are computed, tiles multiply the scores of the next 16 and the values of the
// 16 before. Queries are rounded to bfloat16, weights are cut to it; sums are float32.
#pragma once

#include "attend.h"
#include "dot_bf16.h"

namespace baton {
namespace {

constexpr int kTileKeys = 32;  // keys of a tile of weights
constexpr int kTileSteps = kKeys / kTileKeys;
constexpr int kTileSize = 512;  // elements of a tile of bfloat16
constexpr __mmask32 kOdd = 0xAAAAAAAA;
constexpr int kCache = 2;  // to which keys and values are fetched ahead

// Make stores reach memory before the tile loads that follow: GCC 12 does not know that these read it.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// Tiles of queries as the second operand: out[tile][dims / 32][16 pairs of dims][16 queries][2].
inline void load_queries(const Attention& a, int tiles, int dims, Bf16* out) {
  const F scale = Vec::set(a.scale * 1.44269504f);  // weights are powers of 2
  const int rows = a.tokens * a.group;
  for (int first = 0; first < tiles * kLanes; first += kLanes)
    for (int d = 0; d < dims; d += 32, out += kTileSize) {
      F pairs[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        // Columns without a query repeat the first one: memory that nobody has written could hold NaN.
        const int row = first + i < rows ? first + i : 0;
        const float* query = a.queries + row / a.group * a.query_stride + row % a.group * a.head_dim;
        const F low = load_at(query, d, a.head_dim) * scale, high = load_at(query, d + kLanes, a.head_dim) * scale;
        pairs[i] = _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      Vec::transpose(pairs);
      for (int i = 0; i < kLanes; ++i) Vec::store(reinterpret_cast<float*>(out) + i * kLanes, pairs[i]);
    }
}

// Keys as rows of the first operand: out[key][dims].
inline void load_keys(const Slots<Bf16>& slots, int size, int dims, Bf16* out) {
  for (int k = 0; k < kKeys; ++k)
    for (int d = 0; d < dims; d += 32) {
      // Values are read next. Some were not fetched during the block before.
      __builtin_prefetch(slots.values[k] + d, 0, kCache);
      _mm512_storeu_si512(out + k * dims + d, load_pairs(slots.keys[k], d, size));
    }
}

// Dimensions as rows of the first operand: out[dims / 16][block / 32][16 dims][32 keys], where key i and i + 16 of a tile
// lie side by side.
inline void load_values(const Bf16* const* slots, int size, int dims, Bf16* out) {
  for (int k = 0; k < kKeys; k += kTileKeys)
    for (int d = 0; d < dims; d += 32) {
      F even[kLanes], odd[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const __m512i left = load_pairs(slots[k + i], d, size), right = load_pairs(slots[k + kLanes + i], d, size);
        even[i] = _mm512_castsi512_ps(_mm512_mask_mov_epi16(left, kOdd, _mm512_slli_epi32(right, 16)));
        odd[i] = _mm512_castsi512_ps(_mm512_mask_mov_epi16(_mm512_srli_epi32(left, 16), kOdd, right));
      }
      Vec::transpose(even);
      Vec::transpose(odd);
      float* to = reinterpret_cast<float*>(out + (d / 16 * kTileSteps + k / kTileKeys) * kTileSize);
      for (int i = 0; i < kLanes; ++i, to += 2 * kLanes) {
        if (i == kLanes / 2) to += (kTileSteps - 1) * kTileSize / 2;
        Vec::store(to, even[i]);
        Vec::store(to + kLanes, odd[i]);
      }
    }
}

// out[32 keys][16 queries] = keys * queries
inline void score(const Bf16* keys, const Bf16* queries, int dims, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (int d = 0; d < dims; d += 32) {
    _tile_loadd(4, queries + d * kLanes, 64);
    _tile_loadd(5, keys + d, dims * 2);
    _tile_loadd(6, keys + kRowTile * dims + d, dims * 2);
    _tile_dpbf16ps(0, 5, 4);
    _tile_dpbf16ps(1, 6, 4);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + kRowTile * kLanes, 64);
}

// out[32 dims][16 queries] += values * weights
inline void add_values(const Bf16* values, const Bf16* weights, int steps, float* out) {
  _tile_loadd(2, out, 64);
  _tile_loadd(3, out + kRowTile * kLanes, 64);
  for (int step = 0; step < steps; ++step) {
    _tile_loadd(7, weights + step * kTileSize, 64);
    _tile_loadd(5, values + step * kTileSize, 64);
    _tile_loadd(6, values + (kTileSteps + step) * kTileSize, 64);
    _tile_dpbf16ps(2, 5, 7);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(2, out, 64);
  _tile_stored(3, out + kRowTile * kLanes, 64);
}

// 2^x with a relative error of 8e-5, a fiftieth of bfloat16's own. The polynomial is minimax on [0, 1).
inline F weight(F x) {
  const F fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  F sum = Vec::fma(Vec::set(0.078024194f), fraction, Vec::set(0.22606722f));
  sum = Vec::fma(sum, fraction, Vec::set(0.69583374f));
  return _mm512_scalef_ps(Vec::fma(sum, fraction, Vec::set(0.9999252f)), x);
}

// Scores of 16 queries to weights, a tile at a time.
class Softmax {
 public:
  // Of the queries from `first` on.
  Softmax(const Attention& a, Partial result, int first)
      : a_(a), row_(first), tops_(result.top + first), sums_(result.sum + first) {}

  // Hide unseen keys of scores[keys][16 queries], whose first is `block`, and bring earlier sums to their scale. `out` is
  // [dims][16 queries].
  void begin(int64_t block, int keys, float* scores, float* out, int64_t dims) {
    mask(block, keys, scores);
    F maxima[4] = {Vec::load(scores), Vec::load(scores), Vec::load(scores), Vec::load(scores)};
    for (int k = 0; k < keys; k += 4)
      for (int i = 0; i < 4; ++i) maxima[i] = Vec::max(maxima[i], Vec::load(scores + (k + i) * kLanes));
    const F found = Vec::max(Vec::max(maxima[0], maxima[1]), Vec::max(maxima[2], maxima[3]));
    const F old = Vec::load(tops_);
    sum_ = Vec::load(sums_);
    // Weights above 1 are as exact as those below, and sums are seldom brought to another scale.
    const __mmask16 above = _mm512_cmp_ps_mask(found, old + Vec::set(kMargin), _CMP_GT_OQ);
    top_ = old;
    if (!above) return;
    constexpr int kCeiling = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
    top_ = _mm512_mask_mov_ps(old, above, _mm512_roundscale_ps(found, kCeiling));
    const F factor = _mm512_scalef_ps(Vec::set(1.0f), old - top_);
    sum_ = sum_ * factor;
    for (int64_t d = 0; d < dims; ++d) Vec::store(out + d * kLanes, Vec::load(out + d * kLanes) * factor);
  }

  // Weights of 32 keys as the second operand: to[16 keys][16 queries][2], with key i + 16 beside key i. They lose the bits
  // that bfloat16 lacks, and so does their sum: together they still weigh 1.
  void weigh(const float* scores, Bf16* to) {
    for (int i = 0; i < kLanes; ++i) {
      const __m512i high = _mm512_set1_epi32(int(0xFFFF0000));
      const __m512i left = _mm512_castps_si512(weight(Vec::load(scores + i * kLanes) - top_));
      const __m512i right = _mm512_castps_si512(weight(Vec::load(scores + (kLanes + i) * kLanes) - top_));
      _mm512_storeu_si512(to + i * 2 * kLanes, _mm512_mask_mov_epi16(_mm512_srli_epi32(left, 16), kOdd, right));
      sum_ = sum_ + _mm512_castsi512_ps(_mm512_and_si512(left, high));
      sum_ = sum_ + _mm512_castsi512_ps(_mm512_and_si512(right, high));
    }
  }

  void end() {
    Vec::store(tops_, top_);
    Vec::store(sums_, sum_);
  }

 private:
  static constexpr float kMargin = 8;  // by how much a score may exceed `top`

  // The last key that the query of a row sees, and the first.
  int64_t last_key(int row) const {
    const int64_t own = a_.position + row / a_.group;
    return own < a_.high ? own : a_.high - 1;
  }
  int64_t first_key(int row) const {
    const int64_t oldest = a_.position + row / a_.group - a_.window + 1;
    return oldest > a_.low ? oldest : a_.low;
  }

  // Scores of keys that a query does not see become minus infinity.
  void mask(int64_t block, int keys, float* scores) {
    if (last_key(row_) >= block + keys - 1 && first_key(row_ + kLanes - 1) <= block) return;
    int32_t lows[kLanes], highs[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      lows[i] = int32_t(first_key(row_ + i) - block);
      highs[i] = int32_t(last_key(row_ + i) - block);
    }
    const __m512i low = _mm512_loadu_si512(lows), high = _mm512_loadu_si512(highs);
    for (int k = 0; k < keys; ++k, scores += kLanes) {
      const __m512i key = _mm512_set1_epi32(k);
      const __mmask16 unseen = _mm512_cmpgt_epi32_mask(low, key) | _mm512_cmpgt_epi32_mask(key, high);
      Vec::store(scores, _mm512_mask_mov_ps(Vec::load(scores), unseen, Vec::set(-__builtin_inff())));
    }
  }

  const Attention& a_;
  const int row_;
  float *const tops_, *const sums_;
  F top_, sum_;
};

// Of a row that has seen no score. Minus infinity would be NaN, subtracted from itself.
constexpr float kLowest = -3.40282347e38f;

struct TileWorkspace {
  Bf16 *queries, *keys, *values;
  alignas(64) float scores[2][kKeys * kLanes];
  alignas(64) Bf16 weights[2][kKeys * kLanes];
};

// One block of keys for all queries. In each turn of the loop scores of a tile of queries are multiplied, those of the
// tile before are weighed, and values of the one before that are added.
inline void attend_block(const Attention& a, TileWorkspace& workspace, Partial result, int64_t block, int dims,
                         int tiles, const Slots<Bf16>& next) {
  const int64_t rest = a.high - block;
  const int keys = rest < kKeys ? int(padded(rest, kTileKeys)) : kKeys, steps = keys / kTileKeys;
  const int panels = dims / 32, prefetched = kKeys / ((tiles + 2) * steps) + 1;
  Prefetcher<Bf16, kCache> keys_ahead(next.keys, a.head_dim, prefetched),
      values_ahead(next.values, a.head_dim, prefetched);
  for (int turn = 0; turn < tiles + 2; ++turn) {
    const bool multiplies = turn < tiles, weighs = turn > 0 && turn <= tiles, adds = turn > 1;
    const int weighed = weighs ? turn - 1 : 0;
    float *to = workspace.scores[turn % 2], *from = workspace.scores[weighed % 2];
    Softmax softmax(a, result, weighed * kLanes);
    if (weighs) softmax.begin(block, keys, from, result.out + weighed * kLanes * dims, dims);
    for (int step = 0, panel = 0; step < steps; ++step) {
      keys_ahead.fetch();
      values_ahead.fetch();
      compiler_barrier();
      if (multiplies)
        score(workspace.keys + step * kTileKeys * dims, workspace.queries + turn * kLanes * dims, dims,
              to + step * kTileKeys * kLanes);
      if (adds)
        for (; panel < panels * (step + 1) / steps; ++panel)
          add_values(workspace.values + panel * 2 * kTileSteps * kTileSize, workspace.weights[turn % 2], steps,
                     result.out + ((turn - 2) * dims + panel * 32) * kLanes);
      if (weighs)
        softmax.weigh(from + step * kTileKeys * kLanes, workspace.weights[weighed % 2] + step * kTileSize);
    }
    if (weighs) softmax.end();
  }
}

inline void attend_tiles(const Attention& a, const AttentionWorkspace& workspace, Partial result) {
  const int rows = a.tokens * a.group, tiles = (rows + kLanes - 1) / kLanes, dims = int(padded(a.head_dim, 32));
  TileWorkspace own;
  own.queries = reinterpret_cast<Bf16*>(workspace.queries);
  own.keys = reinterpret_cast<Bf16*>(workspace.keys);
  own.values = reinterpret_cast<Bf16*>(workspace.values);
  load_queries(a, tiles, dims, own.queries);
  for (int64_t i = 0; i < int64_t(tiles) * kLanes * dims; i += kLanes) Vec::store(result.out + i, Vec::zero());
  for (int r = 0; r < tiles * kLanes; ++r) result.top[r] = kLowest, result.sum[r] = 0;
  using Slots = baton::Slots<Bf16>;
  const int64_t first = a.low / kKeys * kKeys;
  Slots slots(a, first);
  for (int64_t block = first; block < a.high; block += kKeys) {
    load_keys(slots, a.head_dim, dims, own.keys);
    load_values(slots.values, a.head_dim, dims, own.values);
    if (block + kKeys < a.high) slots = Slots(a, block + kKeys);
    attend_block(a, own, result, block, dims, tiles, slots);
  }
  // To a row for each query.
  for (int tile = 0; tile < tiles; ++tile) {
    alignas(64) float columns[kMaxHeadDim * kLanes];
    float* out = result.out + tile * kLanes * dims;
    __builtin_memcpy(columns, out, kLanes * dims * sizeof(float));
    for (int d = 0; d < dims; d += kLanes) {
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = Vec::load(columns + (d + i) * kLanes);
      Vec::transpose(square);
      for (int i = 0; i < kLanes; ++i) Vec::store(out + i * dims + d, square[i]);
    }
  }
}

}  // namespace
}  // namespace baton
