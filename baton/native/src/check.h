// Checks of what callers give, before anything is read through it.
#pragma once

#include "model.h"

namespace baton {

// New tokens of the batch; -1 after `fail` if something would be read or written outside its memory.
int64_t check_batch(const BatonModel& model, const BatonKv& kv, const BatonBatch& batch, const BatonCall& call);

// False after `fail` if there are no kernels for the model's shape, or it lacks what the call wants of it.
bool check_model(const BatonModel& model, const BatonCall& call);

constexpr const char* kAborted = "the ranks' collective was aborted";

// Keep a message for `baton_native_error`; returns 1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace baton
