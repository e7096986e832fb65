// Threads that split one job into small chunks, handed out dynamically, so that a core taken away costs one chunk.
#pragma once

#include <stddef.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

// Owns: threads - 1 helpers. The thread that calls `run` works as well, so one thread means no hand-off at all.
// Several threads may call `run` at once; helpers take the oldest job first.
class Pool {
 public:
  // The threads may run on `cpus` only, as far as the system agrees; anywhere when it is empty.
  explicit Pool(int threads, std::vector<int> cpus = {});
  ~Pool() { close(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Puts the calling thread, which is going to call `run`, on the pool's CPUs.
  void bind_caller() const;

  // Calls body(chunk) once for every chunk below `chunks`; returns when all are done. `body` must not throw.
  void run(size_t chunks, const std::function<void(size_t)>& body);

  // Joins the helpers; `run` goes on working on the caller's thread alone. Idempotent.
  void close();

 private:
  struct Work {
    const std::function<void(size_t)>& body;
    const size_t chunks;
    std::atomic<size_t> next{0};
    std::atomic<int> helpers{0};  // incremented under mutex_, while the work is listed
    void drain() {
      for (size_t i; (i = next.fetch_add(1)) < chunks;) body(i);
    }
  };

  void help();
  Work* take();  // needs mutex_

  const int threads_;
  const std::vector<int> cpus_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Work*> works_;
  std::atomic<size_t> posted_{0};  // counts works, so that helpers can spin without the mutex
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

// Runs body(chunk) on the pool, or here when there is none.
inline void run_chunks(Pool* pool, size_t chunks, const std::function<void(size_t)>& body) {
  if (pool) return pool->run(chunks, body);
  for (size_t i = 0; i < chunks; ++i) body(i);
}

}  // namespace offload
