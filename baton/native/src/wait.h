// Waits of processes for each other, through words in memory that all of them map.
#pragma once

#include <atomic>
#include <cstdint>

namespace baton {

constexpr int64_t kPage = 4096;

// Words of one end, which others read: on two cache lines, which prefetchers fetch together.
struct alignas(128) Words {
  std::atomic<uint32_t> arrived;   // number of the last step that this end has made; it may wrap
  std::atomic<uint32_t> sleepers;  // that wait for this end
  std::atomic<uint32_t> bell;      // they sleep until it changes

  bool has_arrived(uint32_t number) const { return int32_t(arrived.load() - number) >= 0; }

  void arrive(uint32_t number) {
    // Sequentially consistent, as are a sleeper's accesses: either this sees it, or it sees the new number.
    arrived.store(number);
    if (sleepers.load()) ring();
  }

  // Wake the sleepers, to look again.
  void ring();

  // As at first; of an end that was killed, sleepers may be left.
  void reset() {
    arrived.store(0);
    sleepers.store(0);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "a futex is a word");

// Wait until the end of these words has arrived at `number`, for a while awake and then asleep; the time is added to
// `waited_ns`. False if `aborted` is no longer 0; who sets it rings.
bool wait_for(Words& words, uint32_t number, const std::atomic<uint32_t>& aborted, std::atomic<int64_t>& waited_ns);

// Map so many bytes of a file descriptor. Null after `fail`, whose message begins with `name`.
char* map_shared(int fd, int64_t bytes, const char* name);
void unmap_shared(char* memory, int64_t bytes);

}  // namespace baton
