// Memory for the intermediate results of the calls of one model.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"

namespace baton {

// Zeroed memory that grows, on boundaries of cache lines. Its content is lost when its size changes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void* reserve(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = padded(bytes, 4096);
      data_ = std::aligned_alloc(4096, size_);
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
      std::memset(data_, 0, size_);
    }
    return data_;
  }
  template <class T = float>
  T* reserve_of(int64_t count) {
    return static_cast<T*>(reserve(count * int64_t(sizeof(T))));
  }
  // As `reserve_of`, for memory that grows with contexts: frees large memory that many calls in a row hardly used.
  template <class T = float>
  T* fit_of(int64_t count) {
    const int64_t bytes = count * int64_t(sizeof(T));
    idle_ = size_ > kKept && bytes < size_ / 4 ? idle_ + 1 : 0;
    if (idle_ > kIdleCalls) {
      std::free(data_);
      data_ = nullptr;
      size_ = idle_ = 0;
    }
    return reserve_of<T>(count);
  }
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kKept = 16 << 20, kIdleCalls = 256;

  void* data_ = nullptr;
  int64_t size_ = 0, idle_ = 0;
};

// Tokens of one sequence that attend together, or one token over one split of its keys. `row` is that of the first
// token's result.
struct AttentionTask {
  int64_t sequence, token, row, count, position;
  int64_t first_split, last_split;
  int64_t partial;  // number of its partial result, or -1
};

// A row whose partial results are merged, one of each split of its keys.
struct Merge {
  int64_t row, partial, splits;
};

// Attention of a layer.
struct Queries {
  std::vector<AttentionTask> tasks;
  std::vector<Merge> merges;
  int64_t partials;

  void clear() {
    tasks.clear();
    merges.clear();
    partials = 0;
  }
};

}  // namespace baton

struct BatonWorkspace {
  baton::Buffer normed, qkv, attended, inner;  // of all rows
  baton::Buffer angles, partials, maxima;
  baton::Buffer threads;  // scratch of each
  baton::Queries all, sampled;
  std::vector<int32_t> angles_of;  // query and context lengths that `angles` are for

  int64_t size() const {
    int64_t bytes = 0;
    for (const baton::Buffer* each : {&normed, &qkv, &attended, &inner, &angles, &partials, &maxima, &threads})
      bytes += each->size();
    return bytes;
  }
};
