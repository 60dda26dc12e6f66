// Kernels of one instruction set for the driver (forward.h): one table for each element type of weights.
//
// Weights lie in panels of 32 output columns. A panel of bfloat16 has pairs of inputs side by side, as dot-product
// instructions and AMX tiles want them: [inputs / 2][32 columns][2]; one of float32 is [inputs][32 columns]. Inputs are
// padded with zeros to a multiple of 32, columns to whole panels.
//
// Sums are float32. Where rows are float32, each output is one chain of fused multiply-adds in the order of the inputs,
// for any number of rows: so the result of a row does not depend on the rows beside it.
#pragma once

#include <cstdint>

namespace baton {

using Bf16 = uint16_t;  // the upper half of a float's bits

constexpr int kPanel = 32;       // columns of a panel
constexpr int kInputs = 32;      // inputs are padded to a multiple of this
constexpr int kRowTile = 16;     // rows of an AMX tile; buffers of rows are padded to whole ones
constexpr int kRowBlock = 256;   // maximum of rows of one call of `product`
constexpr int kKeys = 64;        // keys of a block of attention, aligned to its multiples
constexpr int kMaxHeadDim = 256;

enum Type : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Softmax over some of the keys: for each row the score whose weight is 1, the sum of weights, and weighted values
// [head_dim]. A row that sees no key has the sum 0.
struct Partial {
  float* top;
  float* sum;
  float* out;  // rows of `padded` floats
};

// Queries of consecutive tokens of one sequence that share a KV head, over the keys [low, high).
struct Attention {
  const float* queries;  // first query head of the group, first token; heads are head_dim floats apart
  int64_t query_stride;  // floats from token to token
  int tokens, group, head_dim;
  int64_t position;      // of the first token
  int64_t window;        // positions that a token sees, its own included
  int64_t low, high;
  float scale;
  const void* keys;      // pages of this KV head: its first element in slot 0
  const void* values;
  int64_t slot_stride;   // elements from slot to slot
  Type type;
  const int32_t* table;
  int64_t page_size;
};

// Memory that attention needs beside its result, for `kKeys` keys and values and for scores. Queries, scores and the
// result have space for whole row tiles.
struct AttentionWorkspace {
  float *queries, *keys, *values, *scores;
};

// One token's query, key and value heads, and where key and value go.
struct Append {
  float* heads;  // [heads + 2 * kv_heads][head_dim]; queries are changed in place
  const float *cos, *sin;  // [head_dim / 2]
  const float *q_norm, *k_norm;  // or null
  float eps;
  int num_heads, num_kv_heads, head_dim;
  void *keys, *values;  // of the token's slot
  Type type;
};

// Token of a row with the largest logit so far; `finite` is NaN or infinite from the first logit on that is.
struct Argmax {
  float value, finite;
  int64_t id;
};

struct Kernels {
  Type rows;  // element type of the rows that `product` reads and that `norm`, `silu`, `finish` write
  int row_block;   // how many rows of many make calls of `product` quickest
  int query_rows;  // of one call of `attend`, unless a token has more: tokens times query group
  void (*begin_thread)();  // around the work of a thread in a parallel region; may be null
  void (*end_thread)();
  // out[r][0..32) = rows[r] * panel. `out` and `rows` have space for whole row tiles. `next`: the panel that this thread
  // reads after this one, or null.
  void (*product)(const void* rows, int64_t stride, int count, const void* panel, int64_t inputs, const void* next,
                  float* out);
  // `weight` as in the checkpoint.
  void (*norm)(const float* x, const float* weight, float eps, int64_t size, void* out);
  void (*copy)(const float* x, int64_t size, void* out);
  // out[r][c] = sums[r][c] + bias[c] for `columns` of a panel; `bias` may be null.
  void (*store)(const float* sums, const float* bias, int count, int columns, float* out, int64_t stride);
  void (*add)(const float* sums, const float* bias, int count, int columns, float* out, int64_t stride);
  void (*silu)(float* gate, float* up, const float* gate_bias, const float* up_bias, int count, int columns, void* out,
               int64_t stride);
  // The first of the largest; columns of a row come in ascending order.
  void (*argmax)(const float* sums, int count, int columns, int64_t first, Argmax* found);
  // One column of a packed weight.
  void (*embed)(const void* panel, int column, int64_t inputs, float* out);
  void (*append)(const Append& token);
  void (*attend)(const Attention& query, const AttentionWorkspace& workspace, Partial result);
  void (*merge)(Partial into, Partial from, int rows, int head_dim);
  // The smallest 31 bits of noise of `count` tokens from `first` on.
  int32_t (*lowest_noise)(uint32_t first, int count, uint32_t key, uint32_t second);
  void (*finish)(Partial result, int tokens, int group, int head_dim, void* out, int64_t stride);
};

static inline constexpr int64_t padded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// The kernels of the selected instruction set.
const Kernels& kernels(Type weights);

#define BATON_ISA_TABLES(isa) \
  const Kernels& isa##_float32(); \
  const Kernels& isa##_bfloat16();
BATON_ISA_TABLES(scalar)
BATON_ISA_TABLES(avx2)
BATON_ISA_TABLES(avx512)
BATON_ISA_TABLES(avx512_bf16)
BATON_ISA_TABLES(amx)
#undef BATON_ISA_TABLES

}  // namespace baton
