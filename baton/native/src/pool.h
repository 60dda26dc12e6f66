// The threads that compute: one pool in the process. Between regions they park, and inside a region a thread that waits
// for the others spins for some microseconds only, so that other processes get the cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// Waits that spin first and then park.
class Gate {
 public:
  // Wait until the gate's number is no longer `seen`.
  void wait(uint32_t seen);
  // Raise the number; all that was written before is visible to those who waited.
  void open();
  uint32_t number() const { return number_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint32_t> number_{0};
  std::atomic<int> parked_{0};
  std::mutex mutex_;
  std::condition_variable opened_;
};

// Units of work that were handed out; any thread may look while others compute.
struct UnitCount {
  alignas(64) std::atomic<int64_t> next{0};  // of the running phase
  alignas(64) std::atomic<int64_t> before{0};

  int64_t total() const { return before.load(std::memory_order_relaxed) + next.load(std::memory_order_relaxed); }
  void begin_phase() { before.fetch_add(next.exchange(0, std::memory_order_relaxed), std::memory_order_relaxed); }
};

// What the threads of a region share: work is handed out by number, and `barrier` ends a phase.
class Region {
 public:
  Region(int threads, UnitCount& units) : threads_(threads), units_(units) { units.begin_phase(); }

  int threads() const { return threads_; }

  // The next unit of this phase, from 0 on.
  int64_t take() { return units_.next.fetch_add(1, std::memory_order_relaxed); }

  // Count a part of a unit that takes long.
  void count_part() { units_.before.fetch_add(1, std::memory_order_relaxed); }

  // Wait for all threads; then the units of the next phase begin at 0.
  void barrier();

 private:
  const int threads_;
  UnitCount& units_;
  alignas(64) std::atomic<int> arrived_{0};
  Gate gate_;
};

class Pool {
 public:
  using Work = void (*)(void* context, Region& region, int thread);

  static Pool& shared();

  // Start what is missing for regions of so many threads, the caller's included.
  void start(int threads);
  // Pin thread i, the caller's is 0, to cores[i]; later ones stay free.
  void pin(const int32_t* cores, int count);
  // Run `work` on so many threads, this one included; one region at a time.
  void run(int threads, Work work, void* context);
  // Units and parts of units so far.
  int64_t units() const { return units_.total(); }
  ~Pool();

 private:
  void loop(int thread, uint32_t seen);

  std::mutex regions_;
  std::vector<std::thread> threads_;
  Gate begun_;
  std::atomic<int> running_{0};
  Gate ended_;
  Region* region_ = nullptr;
  Work work_ = nullptr;
  void* context_ = nullptr;
  bool closing_ = false;
  UnitCount units_;
};

}  // namespace baton
