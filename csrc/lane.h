// Events and lanes: a lane is one thread that does its jobs in order, each job ends one event, done or failed, never
// neither.
#pragma once

#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "pool.h"

namespace offload {

// CLOCK_MONOTONIC, Python's time.monotonic_ns and time.perf_counter_ns.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Names the calling thread and gives it the standard floating-point mode: a thread inherits its creator's, which
// another library may have set to flush subnormals.
void prepare_thread(const std::string& name);

struct LaneState;

class Event {
 public:
  enum class State { kPending, kDone, kFailed };

  explicit Event(bool manual = false) : manual(manual), made_in(getpid()) {}

  void start(int64_t t_ns) { start_ns.store(t_ns); }
  // The first of finish and fail wins; later calls change nothing and return false.
  bool finish(int64_t t_start_ns, int64_t t_end_ns);
  bool fail(const std::string& why);

  State state() const { return state_.load(std::memory_order_acquire); }
  bool done() const { return state() != State::kPending; }
  bool wait_for(int64_t timeout_ns);  // true when done or failed
  std::string message() const;        // why it failed

  const bool manual;
  const pid_t made_in;  // nobody ends it in a forked child
  // Has the lane look at its queue again when the event ends; nothing if it has ended.
  void watch(const std::shared_ptr<LaneState>& lane);

  std::weak_ptr<LaneState> lane;  // whose job ends it; set before anybody else sees the event
  std::atomic<int64_t> start_ns{0}, end_ns{0};
  std::atomic<int64_t> nbytes{0};
  std::atomic<int64_t> paced_ns{0};  // of the job's time, what it slept to hold its link's rate; set before it ends

 private:
  bool end(State state, const std::string& why, int64_t t_start_ns, int64_t t_end_ns);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{State::kPending};
  std::string message_;
  std::vector<std::weak_ptr<LaneState>> watchers_;
};

// Token bucket: pay() returns when the bytes fit the rate. Up to kCreditNs of idle time is kept as credit, which makes
// up for late wake-ups. A rate of 0 never waits.
class Throttle {
 public:
  Throttle(double gbps, const std::atomic<bool>& abandoned) : gbps_(gbps), abandoned_(abandoned) {}
  bool active() const { return gbps_ > 0; }
  size_t chunk_bytes() const;
  void pay(size_t nbytes);  // throws when the lane is abandoned
  int64_t take_slept_ns() { return std::exchange(slept_ns_, 0); }  // since the last call

 private:
  static constexpr int64_t kCreditNs = 200'000;
  const double gbps_;
  const std::atomic<bool>& abandoned_;
  int64_t paid_until_ns_ = 0;
  int64_t slept_ns_ = 0;
};

struct Job {
  std::string what;  // "adam of 4096 elements", for messages
  std::vector<std::shared_ptr<Event>> after;
  std::function<void(Throttle&)> run;
  int64_t rank = 0;  // of several that could start, a lane that is not ordered takes the lowest
  // Memory that the job uses. Given to Lane's `retire` before the event ends, and never touched by the lane itself.
  std::vector<void*> keep;
  std::shared_ptr<Event> event = std::make_shared<Event>();
};

// Owns: one thread, which ends after close() or abandon(). The thread shares ownership of all that it touches, so the
// Lane itself may go at any time; jobs already submitted are still done.
class Lane {
 public:
  // `retire` takes a finished job's memory; it is called on the lane's thread and must not block. An ordered lane does
  // its jobs in the order of submission; another one takes, of the jobs that need not wait, the one of the lowest rank.
  Lane(std::string name, double gbps, std::shared_ptr<Pool> pool, void (*retire)(std::vector<void*>&&),
       bool ordered = true);
  ~Lane() { close(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::string& name() const;
  Pool* pool() const;
  // Takes the job and returns true, or leaves it as it is when the lane is closed.
  bool submit(Job& job);

  // No more jobs; the thread ends when the queue is empty. From now on a job fails when it would wait, itself or
  // through other lanes' jobs, for a manual event that nobody has ended: otherwise an error before signal() would hang
  // close().
  void close();
  void abandon();                       // close, and fail all that has not started
  bool wait_ended(int64_t timeout_ns);  // true once the thread has ended

  // At the interpreter's exit: abandons every lane and waits for the threads.
  static void abandon_all();

 private:
  static void work(std::shared_ptr<LaneState> state);
  std::shared_ptr<LaneState> state_;
};

}  // namespace offload
