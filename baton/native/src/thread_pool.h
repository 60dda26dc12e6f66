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

constexpr int kSpins = 2000;  // of a wait: about 20 microseconds to 80, by CPU

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits that spin first and then park.
class Gate {
 public:
  // Wait until the gate's number is no longer `seen`.
  void wait(uint32_t seen);
  // Raise the number; all that was written before is visible to the threads that waited.
  void open();
  uint32_t number() const { return number_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint32_t> number_{0};
  std::atomic<int> parked_{0};
  std::mutex mutex_;
  std::condition_variable opened_;
};

// Number of tasks that threads have taken; any thread may read it while others compute.
struct TaskCount {
  alignas(64) std::atomic<int64_t> next{0};  // of the running phase
  alignas(64) std::atomic<int64_t> before{0};

  int64_t total() const { return before.load(std::memory_order_relaxed) + next.load(std::memory_order_relaxed); }
  void begin_phase() { before.fetch_add(next.exchange(0, std::memory_order_relaxed), std::memory_order_relaxed); }
};

// State that the threads of a region share: they take tasks by number, and `barrier` ends a phase.
class Region {
 public:
  Region(int threads, TaskCount& tasks) : threads_(threads), tasks_(tasks) { tasks.begin_phase(); }

  int threads() const { return threads_; }

  // The next task of this phase, from 0 on.
  int64_t take() { return tasks_.next.fetch_add(1, std::memory_order_relaxed); }

  // Count a split of a task that takes long.
  void count_split() { tasks_.before.fetch_add(1, std::memory_order_relaxed); }

  // Wait for all threads; then the tasks of the next phase begin at 0.
  void barrier();

 private:
  const int threads_;
  TaskCount& tasks_;
  alignas(64) std::atomic<int> arrived_{0};
  Gate gate_;
};

class ThreadPool {
 public:
  using Work = void (*)(void* context, Region& region, int thread);

  static ThreadPool& shared();

  // Start missing threads for regions of so many, the caller's included.
  void start(int threads);
  // Pin thread i, the caller's is 0, to cores[i]; later ones stay free.
  void pin(const int32_t* cores, int count);
  // Run `work` on so many threads, this one included; one region at a time.
  void run(int threads, Work work, void* context);
  // Tasks and splits of tasks so far.
  int64_t tasks() const { return tasks_.total(); }
  ~ThreadPool();

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
  TaskCount tasks_;
};

}  // namespace baton
