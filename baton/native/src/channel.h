// A channel from one process to another of a host, such as between two stages of a pipeline, over memory that both map.
//
// It has two buffers: piece n of the messages, counted over all of them, lies in buffer n % 2. The sender writes a piece
// when the receiver has taken the one before the last; so it may be two pieces ahead. Both sides know the length of each
// message, of which longer ones than a buffer go in pieces, the last one with the rest.
#pragma once

#include "abi.h"

#include <cstdint>

// One end. One thread at a time sends or receives; `abort` is for any thread.
struct BatonChannel;

// Bytes of the memory, which starts as zeros, with buffers of `capacity` bytes.
BATON_API int64_t baton_native_channel_bytes(int64_t capacity);

// Map the memory of a file descriptor, which may be closed afterwards. Null after an error that `baton_native_error`
// describes.
BATON_API BatonChannel* baton_native_channel_open(int fd, int64_t capacity);
BATON_API void baton_native_channel_close(BatonChannel* channel);

// Both return 0, or an error after an abort; then a part may have been sent, or received. A message that is sent has
// been copied.
BATON_API int baton_native_channel_send(BatonChannel* channel, const void* data, int64_t bytes);
BATON_API int baton_native_channel_receive(BatonChannel* channel, void* out, int64_t bytes);

// End all waits of both ends, now and later, with an error.
BATON_API void baton_native_channel_abort(BatonChannel* channel);
// 1 from an abort until a reset, else 0.
BATON_API int baton_native_channel_aborted(const BatonChannel* channel);

// Make the channel empty and usable again, while neither end is inside a call.
BATON_API void baton_native_channel_reset(BatonChannel* channel);

// Time that this end has waited for the other; never set back.
BATON_API int64_t baton_native_channel_waited_ns(const BatonChannel* channel);
