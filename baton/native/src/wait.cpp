#include "wait.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

#include "check.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr long kSleep = 100'000'000;  // nanoseconds, after which a sleeper looks again

// Not FUTEX_PRIVATE: the word lies in memory that processes share.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec most{0, kSleep};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &most, nullptr, 0);
}

bool spin(const Words& words, uint32_t number, const std::atomic<uint32_t>& aborted) {
  for (int i = 0; i < kSpins && !aborted.load(); ++i) {
    if (words.has_arrived(number)) return true;
    relax();
  }
  return false;
}

bool sleep(Words& words, uint32_t number, const std::atomic<uint32_t>& aborted) {
  words.sleepers.fetch_add(1);
  bool arrived = false;
  for (;;) {
    const uint32_t seen = words.bell.load();
    arrived = words.has_arrived(number);
    if (arrived || aborted.load()) break;
    sleep_on(words.bell, seen);
  }
  words.sleepers.fetch_sub(1);
  return arrived;
}

}  // namespace

void Words::ring() {
  bell.fetch_add(1);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool wait_for(Words& words, uint32_t number, const std::atomic<uint32_t>& aborted, std::atomic<int64_t>& waited_ns) {
  const auto began = std::chrono::steady_clock::now();
  const bool arrived = spin(words, number, aborted) || sleep(words, number, aborted);
  const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - began;
  waited_ns.fetch_add(waited.count(), std::memory_order_relaxed);
  return arrived;
}

char* map_shared(int fd, int64_t bytes, const char* name) {
  struct stat file;
  if (fstat(fd, &file)) return fail("%s: %s", name, std::strerror(errno)), nullptr;
  if (file.st_size < bytes)
    return fail("%s has %lld bytes, not %lld", name, static_cast<long long>(file.st_size),
                static_cast<long long>(bytes)),
           nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return fail("%s can't be mapped: %s", name, std::strerror(errno)), nullptr;
  return static_cast<char*>(memory);
}

void unmap_shared(char* memory, int64_t bytes) { munmap(memory, bytes); }

}  // namespace baton
