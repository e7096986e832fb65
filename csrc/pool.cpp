#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "lane.h"

namespace offload {
namespace {

// Longer than a chunk takes and than the gap between two small jobs, far shorter than a scheduler's slice.
constexpr int64_t kSpinNs = 30'000;

template <class Condition>
bool spin_until(Condition condition) {
  const int64_t deadline = now_ns() + kSpinNs;
  do {
    for (int i = 0; i < 64; ++i) {
      if (condition()) return true;
      cpu_relax();
    }
  } while (now_ns() < deadline);
  return condition();
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
}

void Pool::bind_caller() const {
#if defined(__linux__)
  if (cpus_.empty()) return;
  const int count = *std::max_element(cpus_.begin(), cpus_.end()) + 1;
  cpu_set_t* const set = CPU_ALLOC(count);
  if (!set) return;
  const size_t size = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(size, set);
  for (int cpu : cpus_) CPU_SET_S(cpu, size, set);
  pthread_setaffinity_np(pthread_self(), size, set);
  CPU_FREE(set);
#endif
}

void Pool::run(size_t chunks, const std::function<void(size_t)>& body) {
  Work work{body, chunks};
  if (threads_ == 1 || chunks < 2) return work.drain();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(&work);
    posted_.fetch_add(1);
  }
  wake_.notify_all();
  work.drain();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.erase(std::find(works_.begin(), works_.end(), &work));
  }
  // Helpers that are still inside finish a chunk each.
  const auto left = [&] { return work.helpers.load() == 0; };
  if (spin_until(left)) {
    // The last helper may still hold the mutex on which it left; `work` must outlive that.
    std::lock_guard<std::mutex> lock(mutex_);
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, left);
}

Pool::Work* Pool::take() {
  for (Work* work : works_)
    if (work->next.load() < work->chunks) return work;
  return nullptr;
}

void Pool::help() {
  prepare_thread("oe-pool");
  bind_caller();
  size_t seen = 0;
  while (true) {
    spin_until([&] { return posted_.load() != seen || stop_.load(); });
    std::unique_lock<std::mutex> lock(mutex_);
    Work* work = nullptr;
    wake_.wait(lock, [&] { return (work = take()) || stop_.load(); });
    if (!work) return;
    seen = posted_.load();
    work->helpers.fetch_add(1);
    lock.unlock();
    work->drain();
    lock.lock();
    if (work->helpers.fetch_sub(1) == 1) idle_.notify_all();
  }
}

void Pool::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_)
    if (helper.joinable()) helper.join();
}

}  // namespace offload
