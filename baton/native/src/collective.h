// Exchanges between the tensor-parallel ranks of one host, over memory that all of them map.
//
// Each rank has two buffers in it. Exchange n uses the buffers n % 2: a rank writes its own, arrives, waits until all
// have arrived, and then reads all of them. A rank arrives at exchange n + 1 only after it has read the buffers of
// exchange n, and nobody passes n + 1 before all have arrived there; so a rank is at most one exchange ahead, and the
// buffers that it writes for n + 2 are read by nobody any more.
#pragma once

#include "model.h"

// One rank's end. Its process may compute on many threads, but one thread at a time calls; `abort` is for any thread.
struct BatonCollective;

// Bytes of the memory of `size` ranks, which starts as zeros, for `floats` floats of a rank in one exchange.
BATON_API int64_t baton_native_collective_bytes(int64_t size, int64_t floats);

// Map the memory of a file descriptor, which may be closed afterwards. Null after an error that `baton_native_error`
// describes.
BATON_API BatonCollective* baton_native_collective_open(int fd, int64_t rank, int64_t size, int64_t floats);
BATON_API void baton_native_collective_close(BatonCollective* collective);

// The same exchanges for `BatonModel`; they live as long as the collective.
BATON_API const BatonRanks* baton_native_collective_ranks(const BatonCollective* collective);

// All return 0, or an error after an abort: then arrays may have been changed in part. All ranks make the same calls
// in the same order.
//
// Sum in place, in rank order, so that all ranks get the same bits.
BATON_API int baton_native_all_reduce(BatonCollective* collective, float* data, int64_t count);
// out = `bytes` bytes of each rank, in rank order.
BATON_API int baton_native_all_gather(BatonCollective* collective, const void* data, int64_t bytes, void* out);
BATON_API int baton_native_barrier(BatonCollective* collective);

// End all waits of all ranks, now and later, with an error.
BATON_API void baton_native_collective_abort(BatonCollective* collective);
// 1 from an abort until a reset, else 0.
BATON_API int baton_native_collective_aborted(const BatonCollective* collective);

// Make the memory as it was at first, while no rank is inside a call.
BATON_API void baton_native_collective_reset(BatonCollective* collective);

// Time that this rank has waited for others, and exchanges that it has made; of this end, and never set back.
BATON_API int64_t baton_native_collective_waited_ns(const BatonCollective* collective);
BATON_API int64_t baton_native_collective_calls(const BatonCollective* collective);

namespace baton {

// out = (add ? out : 0) + the sum of the ranks' parts from `offset` on, each element in rank order.
void sum_parts(const BatonRanks& ranks, int64_t offset, int64_t count, bool add, float* out);

}  // namespace baton
