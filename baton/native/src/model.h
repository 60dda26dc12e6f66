// The structs that callers fill (baton/native/abi.py has the same), and the functions that compute with them.
#pragma once

#include <cstdint>

#include "abi.h"

// Weights are packed (kernels.h), biases and norms float32; a pointer may be null where the model has no such weight.
struct BatonLayer {
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;
  const void *qkv, *o, *gate, *up, *down;
  const float *qkv_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
  int64_t window;  // positions that a token sees, its own included; 0: all
};

// Exchanges between the tensor-parallel ranks of a model, over any transport (collective.h has that of one host). All
// ranks make the same calls of this library, with the same batches, in the same order. Any thread may ask for buffers
// and parts, but none while the first one exchanges.
struct BatonRanks {
  int64_t rank, size;
  int64_t floats;  // of a rank's part, at least `baton_native_rank_floats`
  void* context;
  float* (*buffer)(void* context);  // where this rank writes its part of the next exchange
  int (*exchange)(void* context);   // wait until all ranks have written theirs; not 0 if the wait was aborted
  const float* (*part)(void* context, int64_t rank);  // of the last exchange
};

// A stage of a pipeline is a model of its own layers, which takes and gives hidden states: only the first one has the
// embedding, and only the last one the norm and the head.
//
// With `ranks`, heads, KV heads and `inner` are this rank's, and so are the weights. The vocabulary is the whole one, of
// which each rank has the next ceil(vocab / size) rows of `embedding` and `head`, and the last ones fewer or none.
// Biases of `o` and `down` are on the first rank alone.
struct BatonModel {
  int64_t layers, hidden, inner, vocab, heads, kv_heads, head_dim;
  int64_t type;  // of weights: 0 float32, 1 bfloat16
  double eps;
  const BatonLayer* layer;
  const void* embedding;  // packed, as is `head`; the same where they are tied; null where calls give no token ids
  const void* head;       // this and `norm` are null where calls ask for no head
  const float* norm;
  const double* frequencies;  // [head_dim / 2], radians a position
  double rotary_factor;       // of cosines and sines
  const BatonRanks* ranks;    // or null
};

// Pages of all layers: keys[layer] and values[layer] are [pages][page_size][kv_heads][head_dim].
struct BatonKv {
  void* const* keys;
  void* const* values;
  int64_t pages, page_size;
  int64_t type;
};

// New tokens, sequence by sequence; a sequence's new tokens are the last of its context.
struct BatonBatch {
  int64_t sequences;
  const int32_t* query_lens;
  const int32_t* context_lens;
  const int32_t* tables;  // [sequences][stride], of which `width` entries may be read
  int64_t width, stride;
};

// Inputs and outputs of one call: it computes layers [first, last) of `hidden`, with the embedding before and the head
// after them if asked.
struct BatonCall {
  int64_t threads;
  const int64_t* token_ids;  // or null: `hidden` holds the states before layer `first`
  int64_t first, last;
  // New tokens, ascending, that the last layer computes whole; for others only keys and values. Null: all.
  const int32_t* sampled;
  int64_t samples;
  float* hidden;    // [tokens][hidden]; after the last layer the first `samples` rows are those of `sampled`
  float* logits;    // [samples][vocab], or null
  int64_t* argmax;  // [samples]: the first of the largest logits, -1 where logits are not finite; or null
};

// Memory for intermediate results, which grows with the largest call; for one model, and one call at a time.
struct BatonWorkspace;

BATON_API BatonWorkspace* baton_native_workspace_new();
BATON_API void baton_native_workspace_free(BatonWorkspace* workspace);

// Bytes that it has now.
BATON_API int64_t baton_native_workspace_size(const BatonWorkspace* workspace);

// 0, or an error that `baton_native_error` describes; then nothing was read or written, unless the ranks' exchange was
// aborted. When it returns, the keys and values of all ranks are in their pages.
BATON_API int baton_native_forward(const BatonModel* model, const BatonKv* kv, const BatonBatch* batch,
                                   const BatonCall* call, BatonWorkspace* workspace);

// One layer's rotary embeddings, append and attention alone, for tests: `qkv` [tokens][heads + 2 * kv_heads][head_dim]
// is changed, `out` is [tokens][heads][head_dim].
BATON_API int baton_native_attend(const BatonModel* model, const BatonKv* kv, const BatonBatch* batch, int64_t layer,
                                  int64_t threads, float* qkv, float* out, BatonWorkspace* workspace);

// Final norm and head of `count` rows of hidden states; `call` names threads, hidden, logits and argmax, and samples
// nothing.
BATON_API int baton_native_head(const BatonModel* model, int64_t count, const BatonCall* call,
                                BatonWorkspace* workspace);

// Floats of a rank's part that models with this hidden size need.
BATON_API int64_t baton_native_rank_floats(int64_t hidden);

// The last error of this thread.
BATON_API const char* baton_native_error();

// Elements of a packed weight of `rows` outputs and `columns` inputs.
BATON_API int64_t baton_native_packed_size(int64_t rows, int64_t columns);

// Put `count` rows [count][columns] of 0 float32, 1 bfloat16 or 2 float16 into rows from `row` on of a packed weight,
// which was zeroed before.
BATON_API void baton_native_pack(const void* from, int64_t from_type, int64_t count, int64_t columns, int64_t row,
                                 void* packed, int64_t packed_type);

// out[count][rows] = x[count][columns] w^T (+ bias), for tests and for linears outside `baton_native_forward`.
BATON_API void baton_native_linear(const float* x, int64_t count, int64_t columns, const void* packed, int64_t type,
                                   int64_t rows, const float* bias, float* out, int64_t threads);

// 0, or an error; out[tiles] = the smallest noise bits (see sample.h) of the tokens first[i] to first[i] + width, with
// the two words of keys[i].
BATON_API int baton_native_lowest_noise(const int32_t* first, const int32_t* keys, int64_t tiles, int64_t width,
                                        int32_t* out, int64_t threads);

// Start the threads for calls of so many; 0, or an error that `baton_native_error` describes.
BATON_API int baton_native_start(int64_t threads);

// Tasks that the threads have taken so far, and splits of long ones; from any thread, while others compute.
BATON_API int64_t baton_native_tasks();

// Pin the calling thread to cores[0] and the others to the next ones.
BATON_API void baton_native_pin(const int32_t* cores, int64_t count);
