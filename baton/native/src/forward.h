// A forward pass in one parallel region: every thread runs `Forward::work`, whose phases end in barriers.
//
// The residual stream is float32. A task of a product is a panel of 32 columns and some rows. A task of attention is a
// few tokens of a sequence, a KV head and, of long contexts, a split of the keys.
//
// With tensor-parallel ranks, products whose inputs are split leave partial sums in this rank's part of an exchange, some
// rows at a time; the first thread exchanges, and then all threads add the ranks' parts.

#pragma once

#include <climits>
#include <cmath>
#include <cstring>
#include <vector>

#include "collective.h"
#include "model.h"
#include "thread_pool.h"
#include "workspace.h"

namespace baton {
namespace {

constexpr int64_t kSplitKeys = 1024;  // keys of a split; splits are merged in order, by one thread or by many
constexpr int64_t kSlotBytes = 256;   // of a slot's heads that one thread reads together
constexpr int64_t kRowGroup = 512;    // rows whose activations stay in the caches while all panels pass
constexpr int64_t kSlice = 1024;      // inputs of an MLP's last product at a time, for the same reason

// Between 0 and `most`.
inline int64_t clamp(int64_t size, int64_t most) { return size < 0 ? 0 : size < most ? size : most; }

struct Forward {
  const BatonModel& m;
  const BatonKv* kv;
  const BatonBatch* batch;
  const BatonCall& call;
  const Kernels& k;
  BatonWorkspace& workspace;
  int64_t tokens;
  int64_t samples = call.sampled ? call.samples : tokens;  // rows of hidden states that come out
  const BatonRanks* ranks = m.ranks && m.ranks->size > 1 ? m.ranks : nullptr;
  mutable bool aborted = false;  // written by the first thread before a barrier

  int64_t group = m.heads / m.kv_heads, query_width = m.heads * m.head_dim;
  int64_t qkv_width = (m.heads + 2 * m.kv_heads) * m.head_dim, head_width = padded(m.head_dim, kPanel);
  int64_t vocab_share = ranks ? (m.vocab + ranks->size - 1) / ranks->size : m.vocab;
  int64_t vocab_first = ranks ? ranks->rank * vocab_share : 0, vocab_rows = clamp(m.vocab - vocab_first, vocab_share);
  int64_t element = k.rows == kFloat32 ? 4 : 2;
  int64_t hidden_stride = padded(m.hidden, kInputs), query_stride = padded(query_width, kInputs);
  int64_t inner_stride = padded(m.inner, kInputs);
  int64_t task_rows = padded(group > k.query_rows ? group : k.query_rows, kRowTile);
  int64_t state_size = task_rows * (head_width + 2);  // floats of a Partial
  int64_t split_rows = padded(group, kRowTile), split_size = split_rows * (head_width + 2);

  bool angles_ready = false;
  char *normed, *attended, *inner;
  float *qkv, *angles, *partials;
  Argmax* maxima;
  float* scratch;
  int64_t scratch_size = 2 * kRowBlock * kPanel + (task_rows + 2 * kKeys) * head_width + task_rows * kKeys +
                         2 * state_size;

  void reserve() {
    const int64_t rows = tokens + kRowTile;
    normed = workspace.normed.reserve_of<char>(rows * hidden_stride * element);
    scratch_size = padded(scratch_size, 1024);
    scratch = workspace.threads.reserve_of(scratch_size * call.threads);
    if (call.argmax) maxima = workspace.maxima.reserve_of<Argmax>(samples * call.threads);
    if (!batch) return;
    attended = workspace.attended.reserve_of<char>(rows * query_stride * element);
    inner = workspace.inner.reserve_of<char>(rows * inner_stride * element);
    qkv = workspace.qkv.reserve_of(tokens * qkv_width);
    angles_ready = lengths() == workspace.angles_of;
    if (!angles_ready) workspace.angles_of.clear();
    angles = workspace.angles.reserve_of(tokens * m.head_dim);
    plan();
  }

  // Lengths that the angles of a model follow from. The calls of a pass, one for each layer, share them.
  std::vector<int32_t> lengths() const {
    std::vector<int32_t> all(batch->query_lens, batch->query_lens + batch->sequences);
    all.insert(all.end(), batch->context_lens, batch->context_lens + batch->sequences);
    return all;
  }

  // Tasks of attention: of all tokens, and of those to be sampled after, which the last layer alone needs.
  void plan() {
    workspace.all.clear();
    workspace.sampled.clear();
    int64_t token = 0, sample = 0;
    for (int64_t s = 0; s < batch->sequences; ++s) {
      const int64_t query = batch->query_lens[s], position = batch->context_lens[s] - query, end = token + query;
      add_run(workspace.all, s, token, token, query, position);
      while (call.sampled && sample < samples && call.sampled[sample] < end) {
        const int64_t row = sample, first = call.sampled[sample];
        while (++sample < samples && call.sampled[sample] < end && call.sampled[sample] == first + sample - row) {
        }
        add_run(workspace.sampled, s, first, row, sample - row, position + first - token);
      }
      token = end;
    }
    const int64_t all = workspace.all.partials, sampled = workspace.sampled.partials;
    partials = workspace.partials.fit_of((all > sampled ? all : sampled) * m.kv_heads * split_size);
  }

  // Tasks of `count` consecutive new tokens of a sequence, from `token` on, whose results go to rows from `row` on.
  void add_run(Queries& queries, int64_t sequence, int64_t token, int64_t row, int64_t count, int64_t position) const {
    const int64_t together = group >= k.query_rows ? 1 : k.query_rows / group;
    const int64_t splits = (position + count + kSplitKeys - 1) / kSplitKeys;
    if (count == 1 && splits > 1) {
      queries.merges.push_back({row, queries.partials, splits});
      for (int64_t split = 0; split < splits; ++split)
        queries.tasks.push_back({sequence, token, row, 1, position, split, split + 1, queries.partials++});
      return;
    }
    for (int64_t i = 0; i < count; i += together) {
      const int64_t each = count - i < together ? count - i : together;
      const int64_t last = (position + i + each - 1) / kSplitKeys + 1;
      queries.tasks.push_back({sequence, token + i, row + i, each, position + i, 0, last, -1});
    }
  }

  Partial partial_at(float* memory, int64_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
  }
  Partial split_at(int64_t partial, int64_t head) const {
    return partial_at(partials + (partial * m.kv_heads + head) * split_size, split_rows);
  }

  // f(panel, first row, rows, next panel) for all panels and the first `rows` rows; then a barrier. The next panel is that
  // of this thread's next call, or -1.
  template <class Function>
  void each_product(Region& region, int64_t columns, int64_t rows, Function f) const {
    const int64_t panels = (columns + kPanel - 1) / kPanel;
    int64_t done = 0, task = region.take(), next;
    for (int64_t group_begin = 0; group_begin < rows; group_begin += kRowGroup) {
      const int64_t group_rows = rows - group_begin < kRowGroup ? rows - group_begin : kRowGroup;
      const int64_t blocks = (group_rows + k.row_block - 1) / k.row_block;
      for (; task < done + panels * blocks; task = next) {
        next = region.take();
        const int64_t panel = (task - done) / blocks, block = (task - done) % blocks, after = (next - done) / blocks;
        const int64_t low = group_rows * block / blocks, high = group_rows * (block + 1) / blocks;
        f(panel, group_begin + low, int(high - low), after < panels ? after : -1);
      }
      done += panels * blocks;
    }
    region.barrier();
  }

  // From input `from` on.
  const void* panel_of(const void* weight, int64_t panel, int64_t inputs, int64_t from = 0) const {
    const int64_t at = panel * padded(inputs, kInputs) + from;
    return static_cast<const char*>(weight) + at * kPanel * (m.type == kFloat32 ? 4 : 2);
  }

  // `next` of `next_weight` is the panel that this thread reads after this one, or -1.
  void multiply(const char* rows, int64_t stride, int64_t row, int count, const void* weight, int64_t panel,
                const void* next_weight, int64_t next, float* out) const {
    k.product(rows + row * stride * element, stride, count, panel_of(weight, panel, stride), stride,
              next < 0 ? nullptr : panel_of(next_weight, next, stride), out);
  }

  static int columns_of(int64_t panel, int64_t columns) {
    return columns - panel * kPanel < kPanel ? int(columns - panel * kPanel) : kPanel;
  }

  static const float* bias_of(const float* bias, int64_t panel) { return bias ? bias + panel * kPanel : nullptr; }

  void normalize(Region& region, int thread, const float* weight, int64_t rows) const {
    for (int64_t t = thread; t < rows; t += region.threads())
      k.norm(call.hidden + t * m.hidden, weight, float(m.eps), m.hidden, normed + t * hidden_stride * element);
    region.barrier();
  }

  // The same calls by all threads: false for all of them if the exchange was aborted.
  bool exchange(Region& region, int thread) const {
    if (!thread) aborted = ranks->exchange(ranks->context) != 0;
    region.barrier();
    return !aborted;
  }

  // hidden[first + r] = (add ? it : 0) + the sum of the ranks' rows r. A thread has the rows that it normalizes.
  void sum_rows(Region& region, int thread, int64_t first, int64_t rows, bool add) const {
    const int64_t threads = region.threads();
    for (int64_t r = (thread + threads - first % threads) % threads; r < rows; r += threads)
      sum_parts(*ranks, r * m.hidden, m.hidden, add, call.hidden + (first + r) * m.hidden);
  }

  // hidden += x w^T + bias, with so many inputs at a time. `x` is `normed` or the like, of `stride` inputs a row.
  bool add_product(Region& region, int thread, int64_t rows, const char* x, int64_t stride, const void* weight,
                   const float* bias, int64_t slice, float* sums) const {
    const auto each_slice = [&](int64_t first, int64_t count_of_rows, bool fresh, float* out) {
      for (int64_t from = 0; from < stride; from += slice) {
        const int64_t inputs = stride - from < slice ? stride - from : slice;
        each_product(region, m.hidden, count_of_rows, [&](int64_t panel, int64_t row, int count, int64_t next) {
          k.product(x + ((first + row) * stride + from) * element, stride, count, panel_of(weight, panel, stride, from),
                    inputs, next < 0 ? nullptr : panel_of(weight, next, stride, from), sums);
          (fresh && !from ? k.store : k.add)(sums, from ? nullptr : bias_of(bias, panel), count,
                                             columns_of(panel, m.hidden), out + row * m.hidden + panel * kPanel,
                                             m.hidden);
        });
      }
    };
    if (!ranks) return each_slice(0, rows, false, call.hidden), true;
    for (int64_t first = 0; first < rows; first += kRowGroup) {
      const int64_t part = clamp(rows - first, kRowGroup);
      each_slice(first, part, true, ranks->buffer(ranks->context));
      if (!exchange(region, thread)) return false;
      sum_rows(region, thread, first, part, true);
    }
    return true;
  }

  // `id` is one of this rank's.
  void embed_token(int64_t id, float* out) const {
    k.embed(panel_of(m.embedding, id / kPanel, m.hidden), int(id % kPanel), m.hidden, out);
  }

  bool embed(Region& region, int thread) const {
    if (!ranks) {
      for (int64_t t = thread; t < tokens; t += region.threads())
        embed_token(call.token_ids[t], call.hidden + t * m.hidden);
      return true;
    }
    for (int64_t first = 0; first < tokens; first += kRowGroup) {
      const int64_t rows = clamp(tokens - first, kRowGroup);
      float* part = ranks->buffer(ranks->context);
      for (int64_t r = thread; r < rows; r += region.threads()) {
        const int64_t id = call.token_ids[first + r] - vocab_first;
        if (id >= 0 && id < vocab_rows) embed_token(id, part + r * m.hidden);
        else std::memset(part + r * m.hidden, 0, m.hidden * sizeof(float));
      }
      region.barrier();
      if (!exchange(region, thread)) return false;
      sum_rows(region, thread, first, rows, false);
    }
    return true;
  }

  void compute_angles(Region& region, int thread) const {
    const int64_t half = m.head_dim / 2;
    int64_t token = 0;
    for (int64_t s = 0; s < batch->sequences; ++s)
      for (int64_t i = 0; i < batch->query_lens[s]; ++i, ++token) {
        if (token % region.threads() != thread) continue;
        // Float32 would be off by 0.03 rad at position 2^20.
        const double position = double(batch->context_lens[s] - batch->query_lens[s] + i);
        float* out = angles + token * m.head_dim;
        for (int64_t d = 0; d < half; ++d) {
          const double angle = position * m.frequencies[d];
          out[d] = float(std::cos(angle) * m.rotary_factor);
          out[half + d] = float(std::sin(angle) * m.rotary_factor);
        }
      }
  }

  void append(Region& region, int thread, int64_t layer) const {
    const BatonLayer& weights = m.layer[layer];
    const int64_t token_size = m.kv_heads * m.head_dim * (kv->type == kFloat32 ? 4 : 2);
    int64_t token = 0;
    for (int64_t s = 0; s < batch->sequences; ++s)
      for (int64_t i = 0; i < batch->query_lens[s]; ++i, ++token) {
        if (token % region.threads() != thread) continue;
        const int64_t position = batch->context_lens[s] - batch->query_lens[s] + i;
        const int64_t page = batch->tables[s * batch->stride + position / kv->page_size];
        const int64_t offset = (page * kv->page_size + position % kv->page_size) * token_size;
        const float* cos = angles + token * m.head_dim;
        k.append({qkv + token * qkv_width, cos, cos + m.head_dim / 2, weights.q_norm, weights.k_norm, float(m.eps),
                  int(m.heads), int(m.kv_heads), int(m.head_dim), static_cast<char*>(kv->keys[layer]) + offset,
                  static_cast<char*>(kv->values[layer]) + offset, Type(kv->type)});
      }
    region.barrier();
  }

  void attend(Region& region, const Queries& queries, int64_t layer, float* memory) const {
    const int64_t tasks = int64_t(queries.tasks.size()), merges = int64_t(queries.merges.size());
    const int64_t together = heads_together(region.threads(), tasks), head_groups = m.kv_heads / together;
    for (int64_t each; (each = region.take()) < tasks * head_groups;)
      for (int64_t head = 0; head < together; ++head)
        attend_task(region, queries.tasks[each / head_groups], each % head_groups * together + head, layer, memory);
    region.barrier();
    if (!merges) return;
    for (int64_t each; (each = region.take()) < merges * m.kv_heads;) {
      const Merge& merge = queries.merges[each / m.kv_heads];
      const int64_t head = each % m.kv_heads;
      Partial whole = split_at(merge.partial, head);
      for (int64_t split = 1; split < merge.splits; ++split)
        k.merge(whole, split_at(merge.partial + split, head), int(group), int(m.head_dim));
      finish(whole, merge.row, 1, head);
    }
    region.barrier();
  }

  // KV heads of a task that one thread takes, one after the other. Where heads are small, hardware prefetchers also
  // fetch the lines beside those that are read: the next head's.
  int64_t heads_together(int threads, int64_t tasks) const {
    const int64_t head_bytes = m.head_dim * (kv->type == kFloat32 ? 4 : 2);
    int64_t heads = kSlotBytes / head_bytes;
    while (heads > 1 && (m.kv_heads % heads || tasks * m.kv_heads < 4 * heads * threads)) --heads;
    return heads < 1 ? 1 : heads;
  }

  void attend_task(Region& region, const AttentionTask& task, int64_t head, int64_t layer, float* memory) const {
    const int64_t position = task.position, count = task.count;
    const int64_t window = m.layer[layer].window ? m.layer[layer].window : INT_MAX;
    const int64_t first = position - window + 1 > 0 ? position - window + 1 : 0, rows = count * group;
    const int64_t head_bytes = head * m.head_dim * (kv->type == kFloat32 ? 4 : 2);
    AttentionWorkspace space{memory, memory + task_rows * head_width, nullptr, nullptr};
    space.values = space.keys + kKeys * head_width;
    space.scores = space.values + kKeys * head_width;
    float* states = space.scores + task_rows * kKeys;
    Partial whole = task.partial < 0 ? partial_at(states, task_rows) : split_at(task.partial, head);
    bool empty = true;
    for (int64_t split = task.first_split; split < task.last_split; ++split) {
      const int64_t low = split * kSplitKeys > first ? split * kSplitKeys : first, end = position + count;
      const int64_t high = (split + 1) * kSplitKeys < end ? (split + 1) * kSplitKeys : end;
      if (low >= high) continue;
      const Attention query{qkv + task.token * qkv_width + head * group * m.head_dim, qkv_width, int(count), int(group),
                            int(m.head_dim), position, window, low, high, 1.0f / std::sqrt(float(m.head_dim)),
                            static_cast<const char*>(kv->keys[layer]) + head_bytes,
                            static_cast<const char*>(kv->values[layer]) + head_bytes, m.kv_heads * m.head_dim,
                            Type(kv->type), batch->tables + task.sequence * batch->stride, kv->page_size};
      Partial result = empty ? whole : partial_at(states + state_size, task_rows);
      k.attend(query, space, result);
      if (!empty) k.merge(whole, result, int(rows), int(m.head_dim));
      if (!empty) region.count_split();
      empty = false;
    }
    if (task.partial < 0) return finish(whole, task.row, count, head);
    if (empty)
      for (int64_t r = 0; r < rows; ++r) whole.top[r] = -INFINITY, whole.sum[r] = 0;
    if (empty) std::memset(whole.out, 0, rows * head_width * sizeof(float));
  }

  void finish(Partial whole, int64_t row, int64_t count, int64_t head) const {
    char* out = attended + (row * query_stride + head * group * m.head_dim) * element;
    k.finish(whole, int(count), int(group), int(m.head_dim), out, query_stride);
  }

  // False if an exchange was aborted.
  bool layer(Region& region, int thread, int64_t index, float* memory) const {
    const BatonLayer& w = m.layer[index];
    float *sums = memory, *more = memory + kRowBlock * kPanel, *rest = more + kRowBlock * kPanel;
    normalize(region, thread, w.attention_norm, tokens);
    each_product(region, qkv_width, tokens, [&](int64_t panel, int64_t row, int count, int64_t next) {
      multiply(normed, hidden_stride, row, count, w.qkv, panel, w.qkv, next, sums);
      k.store(sums, bias_of(w.qkv_bias, panel), count, columns_of(panel, qkv_width),
              qkv + row * qkv_width + panel * kPanel, qkv_width);
    });
    append(region, thread, index);
    const bool last = call.sampled && index == m.layers - 1;
    const int64_t rows = last ? samples : tokens;
    // The caller may send this layer's keys and values of all ranks.
    if (!rows) return !ranks || exchange(region, thread);
    if (last && !thread) gather_sampled();
    attend(region, last ? workspace.sampled : workspace.all, index, rest);
    if (!add_product(region, thread, rows, attended, query_stride, w.o, w.o_bias, query_stride, sums)) return false;
    normalize(region, thread, w.mlp_norm, rows);
    each_product(region, m.inner, rows, [&](int64_t panel, int64_t row, int count, int64_t next) {
      multiply(normed, hidden_stride, row, count, w.gate, panel, w.up, panel, sums);
      multiply(normed, hidden_stride, row, count, w.up, panel, w.gate, next, more);
      k.silu(sums, more, bias_of(w.gate_bias, panel), bias_of(w.up_bias, panel), count, columns_of(panel, m.inner),
             inner + (row * inner_stride + panel * kPanel) * element, inner_stride);
    });
    return add_product(region, thread, rows, inner, inner_stride, w.down, w.down_bias, slice_of_inner(rows), sums);
  }

  // The hidden states of the tokens to be sampled after become the first rows; each moves forward, or stays.
  void gather_sampled() const {
    for (int64_t row = 0; row < samples; ++row)
      if (call.sampled[row] != row)
        std::memcpy(call.hidden + row * m.hidden, call.hidden + call.sampled[row] * m.hidden, m.hidden * sizeof(float));
  }

  // Sums in float32 are one chain each, so that they do not depend on the number of rows.
  int64_t slice_of_inner(int64_t rows) const {
    return k.rows == kFloat32 || rows <= k.row_block ? inner_stride : kSlice;
  }

  bool head(Region& region, int thread, float* sums) const {
    normalize(region, thread, m.norm, samples);
    Argmax* own = call.argmax ? maxima + thread * samples : nullptr;
    for (int64_t t = 0; own && t < samples; ++t) own[t] = {-INFINITY, 0, -1};
    if (ranks && call.logits) {
      if (!gather_logits(region, thread, own, sums)) return false;
    } else {
      each_product(region, vocab_rows, samples, [&](int64_t panel, int64_t row, int count, int64_t next) {
        multiply(normed, hidden_stride, row, count, m.head, panel, m.head, next, sums);
        const int columns = columns_of(panel, vocab_rows);
        if (own) k.argmax(sums, count, columns, vocab_first + panel * kPanel, own + row);
        if (call.logits) k.store(sums, nullptr, count, columns, call.logits + row * m.vocab + panel * kPanel, m.vocab);
      });
    }
    return !own || thread || choose(region.threads());
  }

  // Logits of all ranks; those of this one's are looked at for `own`. An exchange has some columns of some rows, so that
  // weights are read once for many rows.
  bool gather_logits(Region& region, int thread, Argmax* own, float* sums) const {
    for (int64_t first = 0; first < samples; first += kRowGroup) {
      const int64_t rows = clamp(samples - first, kRowGroup), width = ranks->floats / rows / kPanel * kPanel;
      for (int64_t begin = 0; begin < vocab_share; begin += width) {
        const int64_t columns = clamp(vocab_rows - begin, width), before = begin / kPanel;
        float* part = ranks->buffer(ranks->context);
        each_product(region, columns, rows, [&](int64_t panel, int64_t row, int count, int64_t next) {
          multiply(normed, hidden_stride, first + row, count, m.head, before + panel, m.head,
                   next < 0 ? next : before + next, sums);
          const int size = columns_of(panel, columns);
          if (own) k.argmax(sums, count, size, vocab_first + begin + panel * kPanel, own + first + row);
          k.store(sums, nullptr, count, size, part + row * width + panel * kPanel, width);
        });
        if (!exchange(region, thread)) return false;
        for (int64_t rank = 0; rank < ranks->size; ++rank) {
          const int64_t token = rank * vocab_share + begin;
          const int64_t size = clamp(m.vocab - token, clamp(vocab_share - begin, width));
          const float* from = ranks->part(ranks->context, rank);
          for (int64_t row = thread; row < rows && size; row += region.threads())
            std::memcpy(call.logits + (first + row) * m.vocab + token, from + row * width, size * sizeof(float));
        }
      }
    }
    // The parts are read before the next exchange.
    region.barrier();
    return true;
  }

  static void merge(const Argmax& from, Argmax& found) {
    found.finite += from.finite;
    const bool wins = from.value > found.value || (from.value == found.value && from.id < found.id);
    if (from.id >= 0 && (found.id < 0 || wins)) found.value = from.value, found.id = from.id;
  }

  // The choices of all threads, and of all ranks.
  bool choose(int threads) const {
    for (int64_t t = 0; t < samples; ++t) {
      for (int other = 1; other < threads; ++other) merge(maxima[other * samples + t], maxima[t]);
      if (!ranks) call.argmax[t] = chosen(maxima[t]);
    }
    static_assert(sizeof(Argmax) == 4 * sizeof(float), "ranks exchange them as floats");
    for (int64_t first = 0; ranks && first < samples; first += kRowGroup) {
      const int64_t rows = clamp(samples - first, kRowGroup), bytes = rows * int64_t(sizeof(Argmax));
      std::memcpy(ranks->buffer(ranks->context), maxima + first, bytes);
      aborted = ranks->exchange(ranks->context) != 0;
      if (aborted) return false;
      for (int64_t row = 0; row < rows; ++row) {
        Argmax found{-INFINITY, 0, -1}, each;
        for (int64_t rank = 0; rank < ranks->size; ++rank) {
          std::memcpy(&each, ranks->part(ranks->context, rank) + row * 4, sizeof each);
          merge(each, found);
        }
        call.argmax[first + row] = chosen(found);
      }
    }
    return true;
  }

  static int64_t chosen(const Argmax& found) { return found.finite == 0 ? found.id : -1; }

  bool compute(Region& region, int thread) const {
    float* memory = scratch + thread * scratch_size;
    if (batch) {
      if (call.token_ids && !embed(region, thread)) return false;
      if (!angles_ready) compute_angles(region, thread);
      region.barrier();
      for (int64_t index = call.first; index < call.last; ++index)
        if (!layer(region, thread, index, memory)) return false;
    }
    return (!call.logits && !call.argmax) || head(region, thread, memory);
  }

  static void work(void* context, Region& region, int thread) {
    const Forward& f = *static_cast<const Forward*>(context);
    if (f.k.begin_thread) f.k.begin_thread();
    f.compute(region, thread);
    if (f.k.end_thread) f.k.end_thread();
  }
};

}  // namespace
}  // namespace baton
