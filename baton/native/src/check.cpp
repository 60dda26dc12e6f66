#include "check.h"

#include <cstdarg>
#include <cstdio>

#include "kernels.h"

namespace baton {
namespace {

thread_local char message[160];

using Long = long long;

}  // namespace

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return 1;
}

namespace {

bool check_ranks(const BatonRanks& ranks, int64_t hidden) {
  if (ranks.size < 1 || ranks.rank < 0 || ranks.rank >= ranks.size || !ranks.buffer || !ranks.exchange || !ranks.part)
    return !fail("rank %lld of %lld, or a function of its exchanges is missing", Long(ranks.rank), Long(ranks.size));
  const int64_t floats = baton_native_rank_floats(hidden);
  if (ranks.floats < floats)
    return !fail("ranks exchange %lld floats at once, the model needs %lld", Long(ranks.floats), Long(floats));
  return true;
}

}  // namespace

bool check_model(const BatonModel& m, const BatonCall& call) {
  if (m.head_dim % 2 || m.head_dim < 2 || m.head_dim > kMaxHeadDim)
    return !fail("head_dim %lld is not a multiple of 2 up to %d", Long(m.head_dim), kMaxHeadDim);
  if (m.kv_heads < 1 || m.heads < 1 || m.heads % m.kv_heads)
    return !fail("%lld heads are not a multiple of %lld KV heads", Long(m.heads), Long(m.kv_heads));
  if (m.layers < 1 || m.hidden < 1 || m.inner < 1 || m.vocab < 1)
    return !fail("a model of %lld layers, %lld hidden, %lld inner and %lld tokens", Long(m.layers), Long(m.hidden),
                 Long(m.inner), Long(m.vocab));
  if (call.token_ids && !m.embedding) return !fail("token ids for a stage without an embedding");
  if ((call.logits || call.argmax) && !(m.head && m.norm)) return !fail("a stage without a head was asked for it");
  return !m.ranks || check_ranks(*m.ranks, m.hidden);
}

int64_t check_batch(const BatonModel& model, const BatonKv& kv, const BatonBatch& batch, const BatonCall& call) {
  if (call.first < 0 || call.first > call.last || call.last > model.layers)
    return fail("layers %lld to %lld of %lld", Long(call.first), Long(call.last), Long(model.layers)), -1;
  if (batch.sequences < 1 || kv.page_size < 1) return fail("%lld sequences", Long(batch.sequences)), -1;
  int64_t tokens = 0;
  for (int64_t s = 0; s < batch.sequences; ++s) {
    const int64_t query = batch.query_lens[s], context = batch.context_lens[s];
    if (query < 1 || query > context || context > batch.width * kv.page_size)
      return fail("sequence %lld: query length %lld and context length %lld with %lld pages of %lld", Long(s),
                  Long(query), Long(context), Long(batch.width), Long(kv.page_size)),
             -1;
    tokens += query;
    const int32_t* table = batch.tables + s * batch.stride;
    for (int64_t page = 0; page * kv.page_size < context; ++page)
      if (table[page] < 0 || table[page] >= kv.pages)
        return fail("sequence %lld: page %d of %lld", Long(s), table[page], Long(kv.pages)), -1;
  }
  if (call.token_ids)
    for (int64_t t = 0; t < tokens; ++t)
      if (call.token_ids[t] < 0 || call.token_ids[t] >= model.vocab)
        return fail("token id %lld of %lld", Long(call.token_ids[t]), Long(model.vocab)), -1;
  for (int64_t row = 0; call.sampled && row < call.samples; ++row)
    if (call.sampled[row] < 0 || call.sampled[row] >= tokens || (row && call.sampled[row] <= call.sampled[row - 1]))
      return fail("row %lld is sampled after token %d of %lld, tokens must ascend", Long(row), call.sampled[row],
                  Long(tokens)),
             -1;
  return tokens;
}

}  // namespace baton

const char* baton_native_error() { return baton::message; }
