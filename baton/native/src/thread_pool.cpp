#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

namespace baton {

void Gate::wait(uint32_t seen) {
  for (int i = 0; i < kSpins; ++i) {
    if (number() != seen) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  parked_.fetch_add(1);
  opened_.wait(lock, [&] { return number_.load() != seen; });
  parked_.fetch_sub(1);
}

void Gate::open() {
  // Sequentially consistent, as are the other side's: either this sees who parked, or that sees the new number.
  number_.fetch_add(1);
  if (parked_.load() == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  opened_.notify_all();
}

void Region::barrier() {
  if (threads_ == 1) {
    tasks_.begin_phase();
    return;
  }
  const uint32_t seen = gate_.number();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) return gate_.wait(seen);
  arrived_.store(0, std::memory_order_relaxed);
  tasks_.begin_phase();
  gate_.open();
}

ThreadPool& ThreadPool::shared() {
  // Never destroyed: threads of the interpreter may be computing when the process exits.
  static ThreadPool* pool = [] {
    // A forked child has none of the threads, so it needs a pool of its own.
    pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });
    return new ThreadPool;
  }();
  return *pool;
}

ThreadPool::~ThreadPool() {
  closing_ = true;
  begun_.open();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::start(int threads) {
  std::lock_guard<std::mutex> lock(regions_);
  while (int(threads_.size()) + 1 < threads) {
    const int number = int(threads_.size()) + 1;
    threads_.emplace_back([this, number, seen = begun_.number()] { loop(number, seen); });
  }
}

void ThreadPool::pin(const int32_t* cores, int count) {
  std::lock_guard<std::mutex> lock(regions_);
  for (int i = 0; i < count && i <= int(threads_.size()); ++i) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[i], &set);
    pthread_setaffinity_np(i ? threads_[i - 1].native_handle() : pthread_self(), sizeof set, &set);
  }
}

void ThreadPool::run(int threads, Work work, void* context) {
  start(threads);
  std::lock_guard<std::mutex> lock(regions_);
  Region region(threads, tasks_);
  if (threads > 1) {
    region_ = &region;
    work_ = work;
    context_ = context;
    running_.store(int(threads_.size()), std::memory_order_relaxed);
    const uint32_t seen = ended_.number();
    begun_.open();
    work(context, region, 0);
    ended_.wait(seen);
  } else {
    work(context, region, 0);
  }
}

void ThreadPool::loop(int thread, uint32_t seen) {
  for (;; ++seen) {
    begun_.wait(seen);
    if (closing_) return;
    if (thread < region_->threads()) work_(context_, *region_, thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) ended_.open();
  }
}

}  // namespace baton
