#include "lane.h"

#include <pthread.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>

namespace offload {

// How often a wait looks whether its lane was abandoned.
constexpr int64_t kSliceNs = 20'000'000;

void prepare_thread(const std::string& name) {
  const std::string shown = name.substr(0, 15);
#if defined(__linux__)
  pthread_setname_np(pthread_self(), shown.c_str());
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // throttled copies sleep to the microsecond
#elif defined(__APPLE__)
  pthread_setname_np(shown.c_str());
#endif
#if defined(__x86_64__)
  _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
  uint64_t zero = 0;
  __asm__ volatile("msr fpcr, %0" : : "r"(zero));
#endif
}

// Wakes the lane's thread; below, where a lane's state is known.
static void notify(LaneState& lane);

bool Event::end(State state, const std::string& why, int64_t t_start_ns, int64_t t_end_ns) {
  std::vector<std::weak_ptr<LaneState>> watchers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done()) return false;
    message_ = why;
    start_ns.store(t_start_ns);
    end_ns.store(t_end_ns);
    state_.store(state, std::memory_order_release);
    changed_.notify_all();
    watchers.swap(watchers_);
  }
  for (const auto& watcher : watchers)
    if (const auto lane = watcher.lock()) notify(*lane);
  return true;
}

void Event::watch(const std::shared_ptr<LaneState>& lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!done()) watchers_.push_back(lane);
}

bool Event::finish(int64_t t_start_ns, int64_t t_end_ns) { return end(State::kDone, "", t_start_ns, t_end_ns); }

bool Event::fail(const std::string& why) {
  const int64_t now = now_ns(), started = start_ns.load();
  return end(State::kFailed, why, started ? started : now, now);
}

bool Event::wait_for(int64_t timeout_ns) {
  if (done()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return done(); });
}

std::string Event::message() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

size_t Throttle::chunk_bytes() const {
  // About 0.5 ms of the link, so that a transfer's bytes arrive evenly.
  return std::clamp<size_t>(size_t(gbps_ * 500'000), 4096, 4 << 20);
}

void Throttle::pay(size_t nbytes) {
  const int64_t began_ns = now_ns();
  paid_until_ns_ = std::max(paid_until_ns_, began_ns - kCreditNs) + int64_t(double(nbytes) / gbps_);
  int64_t now = began_ns;
  for (; now < paid_until_ns_; now = now_ns()) {
    if (abandoned_.load()) throw std::runtime_error("the lane was shut down during the copy");
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(paid_until_ns_ - now, kSliceNs)));
  }
  slept_ns_ += now - began_ns;
}

struct LaneState {
  std::string name;
  double gbps;
  std::shared_ptr<Pool> pool;
  void (*retire)(std::vector<void*>&&);
  bool ordered = true;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> queue;
  bool ended = false;
  std::atomic<bool> closed{false}, abandoned{false};  // set under the mutex
  std::shared_ptr<Event> waits_for;                   // what the current job waits for

  std::deque<Job>::iterator next();  // the job to do now, or the queue's end; called with the mutex held
  void wait_for(const std::shared_ptr<Event>& event);
  void run(Job& job, Throttle& throttle);
  void run_or_throw(Job& job, Throttle& throttle);
};

static void notify(LaneState& lane) {
  { std::lock_guard<std::mutex> lock(lane.mutex); }  // its thread is either waiting, or yet to look
  lane.changed.notify_all();
}

namespace {

// Whether the event can only end by a manual event that nobody has ended.
bool stuck(std::shared_ptr<Event> event) {
  while (event && !event->done()) {
    if (event->manual) return true;
    const auto lane = event->lane.lock();
    if (!lane) return false;
    std::lock_guard<std::mutex> lock(lane->mutex);
    event = lane->waits_for;
  }
  return false;
}

// Every lane whose thread may still live. Never destroyed: threads may outlast static destructors.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<void>> states;
};

Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

}  // namespace

Lane::Lane(std::string name, double gbps, std::shared_ptr<Pool> pool, void (*retire)(std::vector<void*>&&),
           bool ordered)
    : state_(std::make_shared<LaneState>()) {
  state_->name = std::move(name);
  state_->gbps = gbps;
  state_->pool = std::move(pool);
  state_->retire = retire;
  state_->ordered = ordered;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto& states = registry().states;
    states.erase(std::remove_if(states.begin(), states.end(), [](auto& state) { return state.expired(); }),
                 states.end());
    states.push_back(state_);
  }
  std::thread(work, state_).detach();
}

const std::string& Lane::name() const { return state_->name; }

Pool* Lane::pool() const { return state_->pool.get(); }

bool Lane::submit(Job& job) {
  job.event->lane = state_;
  if (!state_->ordered)
    for (const auto& event : job.after) event->watch(state_);
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->closed) return false;
    state_->queue.push_back(std::move(job));
  }
  state_->changed.notify_all();
  return true;
}

void Lane::close() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_all();
}

void Lane::abandon() {
  state_->abandoned.store(true);
  close();
}

bool Lane::wait_ended(int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return state_->ended; });
}

void Lane::abandon_all() {
  std::vector<std::shared_ptr<LaneState>> states;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (auto& weak : registry().states)
      if (auto state = std::static_pointer_cast<LaneState>(weak.lock())) states.push_back(state);
  }
  for (auto& state : states) {
    state->abandoned.store(true);
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->closed = true;
    }
    state->changed.notify_all();
  }
  for (auto& state : states) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->ended; });
  }
}

std::deque<Job>::iterator LaneState::next() {
  if (ordered || closed.load()) return queue.begin();  // a closing lane waits for each job in turn, see wait_for
  auto best = queue.end();
  for (auto job = queue.begin(); job != queue.end(); ++job) {
    if (best != queue.end() && job->rank >= best->rank) continue;
    if (std::all_of(job->after.begin(), job->after.end(), [](auto& event) { return event->done(); })) best = job;
  }
  return best;
}

void LaneState::wait_for(const std::shared_ptr<Event>& event) {
  const auto announce = [this](std::shared_ptr<Event> now) {
    std::lock_guard<std::mutex> lock(mutex);
    waits_for.swap(now);
  };
  if (!event->done()) {
    announce(event);
    while (!event->wait_for(kSliceNs) && !abandoned.load() && !(closed.load() && stuck(event))) {
    }
    announce(nullptr);
  }
  if (event->state() == Event::State::kFailed)
    throw std::runtime_error("what it had to wait for failed: " + event->message());
  if (!event->done())
    throw std::runtime_error("the lane was closed, and nobody had ended the event that it had to wait for");
}

void LaneState::run_or_throw(Job& job, Throttle& throttle) {
  for (const auto& event : job.after) wait_for(event);
  if (abandoned.load()) throw std::runtime_error("the lane was shut down before the job started");
  throttle.take_slept_ns();  // a job that failed may have left some
  job.event->start(now_ns());
  job.run(throttle);
  job.event->paced_ns.store(throttle.take_slept_ns());
}

void LaneState::run(Job& job, Throttle& throttle) {
  std::string failure;
  try {
    run_or_throw(job, throttle);
  } catch (const std::exception& error) {
    failure = job.what + " on lane '" + name + "': " + error.what();
  }
  const int64_t end_ns = now_ns();
  retire(std::move(job.keep));
  if (failure.empty())
    job.event->finish(job.event->start_ns.load(), end_ns);
  else
    job.event->fail(failure);
}

void Lane::work(std::shared_ptr<LaneState> state) {
  prepare_thread("oe-" + state->name);
  if (state->pool) state->pool->bind_caller();
  Throttle throttle(state->gbps, state->abandoned);
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    auto chosen = state->queue.end();
    state->changed.wait(lock, [&] {
      chosen = state->next();
      return chosen != state->queue.end() || state->closed;
    });
    if (chosen == state->queue.end()) break;
    Job job = std::move(*chosen);
    state->queue.erase(chosen);
    lock.unlock();
    state->run(job, throttle);
    lock.lock();
  }
  state->ended = true;
  state->changed.notify_all();
}

}  // namespace offload
