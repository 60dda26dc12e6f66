#include "collective.h"

#include <cstring>
#include <new>

#include "check.h"
#include "kernels.h"
#include "wait.h"

namespace baton {
namespace {

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kMaxFloats = int64_t(1) << 32;

struct Header {
  alignas(128) std::atomic<uint32_t> aborted;
  Words of[kMaxRanks];
};

constexpr int64_t kHeader = padded(sizeof(Header), kPage);

int64_t buffer_bytes(int64_t floats) { return padded(floats * int64_t(sizeof(float)), kPage); }

}  // namespace
}  // namespace baton

using namespace baton;

struct BatonCollective {
  const BatonRanks ranks;
  char* const memory;
  std::atomic<int64_t> waited_ns{0}, calls{0};

  BatonCollective(int64_t rank, int64_t size, int64_t floats, char* mapped)
      : ranks{rank, size, floats, this, next_buffer, exchange_of, part}, memory(mapped) {}

  Header& header() const { return *reinterpret_cast<Header*>(memory); }
  Words& own() const { return header().of[ranks.rank]; }
  bool aborted() const { return header().aborted.load() != 0; }

  float* buffer(int64_t rank, uint32_t exchange) const {
    const int64_t number = rank * 2 + exchange % 2;
    return reinterpret_cast<float*>(memory + kHeader + number * buffer_bytes(ranks.floats));
  }

  int exchange() {
    if (aborted()) return 1;
    const uint32_t number = own().arrived.load(std::memory_order_relaxed) + 1;
    own().arrive(number);
    for (int64_t rank = 0; rank < ranks.size; ++rank) {
      Words& other = header().of[rank];
      if (rank != ranks.rank && !other.has_arrived(number) && !wait_for(other, number, header().aborted, waited_ns))
        return 1;
    }
    calls.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }

  // The next exchange's number is that of the one before it, plus 1.
  static float* next_buffer(void* context) {
    const BatonCollective& c = *static_cast<BatonCollective*>(context);
    return c.buffer(c.ranks.rank, c.own().arrived.load(std::memory_order_relaxed) + 1);
  }
  static const float* part(void* context, int64_t rank) {
    const BatonCollective& c = *static_cast<BatonCollective*>(context);
    return c.buffer(rank, c.own().arrived.load(std::memory_order_relaxed));
  }
  static int exchange_of(void* context) { return static_cast<BatonCollective*>(context)->exchange(); }
};

namespace baton {

void sum_parts(const BatonRanks& ranks, int64_t offset, int64_t count, bool add, float* out) {
  constexpr int64_t kBlock = 512;
  float sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock, out += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    std::memcpy(sums, ranks.part(ranks.context, 0) + offset + begin, size * sizeof(float));
    for (int64_t rank = 1; rank < ranks.size; ++rank) {
      const float* part = ranks.part(ranks.context, rank) + offset + begin;
      for (int64_t i = 0; i < size; ++i) sums[i] += part[i];
    }
    if (add)
      for (int64_t i = 0; i < size; ++i) out[i] += sums[i];
    else std::memcpy(out, sums, size * sizeof(float));
  }
}

}  // namespace baton

int64_t baton_native_collective_bytes(int64_t size, int64_t floats) { return kHeader + 2 * size * buffer_bytes(floats); }

BatonCollective* baton_native_collective_open(int fd, int64_t rank, int64_t size, int64_t floats) {
  using Long = long long;
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size || floats < 1 || floats > kMaxFloats)
    return fail("rank %lld of %lld, up to %lld, with %lld floats", Long(rank), Long(size), Long(kMaxRanks),
                Long(floats)),
           nullptr;
  const int64_t bytes = baton_native_collective_bytes(size, floats);
  char* memory = map_shared(fd, bytes, "the ranks' memory");
  if (!memory) return nullptr;
  auto* made = new (std::nothrow) BatonCollective(rank, size, floats, memory);
  if (made) return made;
  unmap_shared(memory, bytes);
  return fail("no memory for a collective"), nullptr;
}

void baton_native_collective_close(BatonCollective* collective) {
  unmap_shared(collective->memory, baton_native_collective_bytes(collective->ranks.size, collective->ranks.floats));
  delete collective;
}

const BatonRanks* baton_native_collective_ranks(const BatonCollective* collective) { return &collective->ranks; }

int baton_native_all_reduce(BatonCollective* collective, float* data, int64_t count) {
  const BatonRanks& ranks = collective->ranks;
  for (int64_t done = 0; done < count; done += ranks.floats) {
    const int64_t size = count - done < ranks.floats ? count - done : ranks.floats;
    std::memcpy(ranks.buffer(ranks.context), data + done, size * sizeof(float));
    if (collective->exchange()) return fail("%s", kAborted);
    sum_parts(ranks, 0, size, false, data + done);
  }
  return 0;
}

int baton_native_all_gather(BatonCollective* collective, const void* data, int64_t bytes, void* out) {
  const BatonRanks& ranks = collective->ranks;
  const int64_t most = ranks.floats * int64_t(sizeof(float));
  for (int64_t done = 0; done < bytes; done += most) {
    const int64_t size = bytes - done < most ? bytes - done : most;
    std::memcpy(ranks.buffer(ranks.context), static_cast<const char*>(data) + done, size);
    if (collective->exchange()) return fail("%s", kAborted);
    for (int64_t rank = 0; rank < ranks.size; ++rank)
      std::memcpy(static_cast<char*>(out) + rank * bytes + done, ranks.part(ranks.context, rank), size);
  }
  return 0;
}

int baton_native_barrier(BatonCollective* collective) {
  return collective->exchange() ? fail("%s", kAborted) : 0;
}

void baton_native_collective_abort(BatonCollective* collective) {
  collective->header().aborted.store(1);
  for (int64_t rank = 0; rank < collective->ranks.size; ++rank) collective->header().of[rank].ring();
}

int baton_native_collective_aborted(const BatonCollective* collective) { return collective->aborted(); }

void baton_native_collective_reset(BatonCollective* collective) {
  for (Words& words : collective->header().of) words.reset();
  collective->header().aborted.store(0);
}

int64_t baton_native_collective_waited_ns(const BatonCollective* collective) {
  return collective->waited_ns.load(std::memory_order_relaxed);
}

int64_t baton_native_collective_calls(const BatonCollective* collective) {
  return collective->calls.load(std::memory_order_relaxed);
}
