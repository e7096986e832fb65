// The kernels, pool and lanes without Python, for builds with sanitizers: `python setup.py sanitize`.
// Arrays are allocated to the exact element, so that one byte read or written too far is found.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <random>

#include "../dispatch.h"
#include "../jobs.h"
#include "../pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace offload;

namespace {

int failures = 0;

#define CHECK(condition, ...)                                \
  do {                                                       \
    if (!(condition) && ++failures < 20) {                   \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                   \
      printf("\n");                                          \
    }                                                        \
  } while (0)

// `numel` elements that start `shift` elements into an allocation which ends with the last of them.
class Buffer {
 public:
  Buffer(Dtype dtype, size_t numel, size_t shift)
      : bytes_(new char[(numel + shift) * itemsize(dtype)]()),
        array{bytes_.get() + shift * itemsize(dtype), dtype, numel} {}
  float* floats() const { return static_cast<float*>(array.data); }

 private:
  std::unique_ptr<char[]> bytes_;

 public:
  const Array array;
};

struct State {
  Buffer master, exp_avg, exp_avg_sq, grad, working;

  State(size_t numel, size_t shift, Dtype grad_dtype, Dtype working_dtype, bool fresh)
      : master(Dtype::kFloat32, numel, shift),
        exp_avg(Dtype::kFloat32, numel, shift),
        exp_avg_sq(Dtype::kFloat32, numel, shift),
        grad(grad_dtype, numel, shift),
        working(working_dtype, numel, shift) {
    std::mt19937 random(unsigned(numel + shift));
    std::normal_distribution<float> normal;
    std::vector<float> gradient(numel);
    for (size_t i = 0; i < numel; ++i) {
      master.floats()[i] = 0.1f * normal(random);
      exp_avg.floats()[i] = fresh ? 0 : 0.01f * normal(random);
      exp_avg_sq.floats()[i] = fresh ? 0 : fabsf(1e-3f * normal(random));
      gradient[i] = 0.02f * normal(random);
    }
    kScalarKernels.convert(grad.array.data, grad_dtype, gradient.data(), Dtype::kFloat32, numel);
  }

  UpdateState arrays() const {
    UpdateState all{master.array, {exp_avg.array, exp_avg_sq.array}, working.array, 2};
    if (working.array.dtype == Dtype::kNone) all.working = {};
    return all;
  }
  void update(void (*kernel)(const UpdateRun&), Pool* pool, const std::vector<UpdateSegment>& segments, double scale,
              const State* out = nullptr, std::optional<bool> prefetch = {}) const {
    UpdateJob job{kernel, Rule::kAdam, arrays(), grad.array, segments, scale, prefetch, {}, {}};
    if (out) job.out = out->arrays();
    run_update(pool, job);
  }
};

bool same(const Array& a, const Array& b) { return memcmp(a.data, b.data, a.numel * itemsize(a.dtype)) == 0; }

bool same(const State& a, const State& b) {
  return same(a.master.array, b.master.array) && same(a.exp_avg.array, b.exp_avg.array) &&
         same(a.exp_avg_sq.array, b.exp_avg_sq.array) && same(a.working.array, b.working.array);
}

double ulps(float found, double exact, double scale) {
  const float size = fabsf(float(scale));
  return fabs(double(found) - exact) / (double(nextafterf(size, INFINITY)) - double(size));
}

const UpdateSegment kSegment{0, 0, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, true, false};

// The first step, element by element in double.
void check_accuracy(const Kernels& kernels, size_t numel, size_t shift) {
  State before(numel, shift, Dtype::kBFloat16, Dtype::kBFloat16, true),
      after(numel, shift, Dtype::kBFloat16, Dtype::kBFloat16, true);
  UpdateSegment s = kSegment;
  s.numel = numel;
  after.update(kernels.update[0], nullptr, {s}, 0.37);
  std::vector<float> gradient(numel);
  kernels.convert(gradient.data(), Dtype::kFloat32, before.grad.array.data, Dtype::kBFloat16, numel);
  double worst = 0;
  for (size_t i = 0; i < numel; ++i) {
    const double old = before.master.floats()[i], g = gradient[i] * 0.37, m = (1 - s.beta1) * g,
                 v = (1 - s.beta2) * g * g;
    const double step = s.lr / (1 - s.beta1) * m / (sqrt(v) / sqrt(1 - s.beta2) + s.eps);
    const double p = old * (1 - s.lr * s.weight_decay) - step;
    worst = fmax(worst, ulps(after.master.floats()[i], p, fmax(fabs(p), fabs(p - old))));
    worst = fmax(worst, ulps(after.exp_avg.floats()[i], m, m));
    worst = fmax(worst, ulps(after.exp_avg_sq.floats()[i], v, v));
  }
  CHECK(worst <= 4, "%s, %zu elements from %zu: %g ulp", kernels.isa, numel, shift, worst);
}

void check_bits(const Kernels& kernels, Pool* pool, size_t numel, size_t shift, Dtype grad, Dtype working) {
  State ours(numel, shift, grad, working, false), scalar(numel, shift, grad, working, false);
  std::vector<UpdateSegment> segments(3, kSegment);
  segments[0].numel = numel / 3;
  segments[1].offset_numel = segments[0].numel;
  segments[1].decoupled = false;
  segments[1].beta1 = 0.4;
  segments[2] = {numel / 2, numel - numel / 2, 1e-2, 0.8, 0.99, 1e-6, 0.1, 1000, true, true};
  ours.update(kernels.update[0], pool, segments, 0.7);
  scalar.update(kScalarKernels.update[0], nullptr, segments, 0.7);
  CHECK(same(ours, scalar), "%s, %zu elements from %zu", kernels.isa, numel, shift);

  const State old(numel, shift, grad, working, false), untouched(numel, shift, grad, working, false);
  for (size_t out_shift : {shift, shift + 1}) {
    State apart(numel, out_shift, grad, working, true);
    old.update(kernels.update[0], pool, segments, 0.7, &apart);
    CHECK(same(apart, scalar) && same(old, untouched), "out of place, %s, %zu elements from %zu", kernels.isa, numel,
          out_shift);
  }

  run_accumulate(kernels, pool, ours.master.array, ours.grad.array);
  run_accumulate(kScalarKernels, nullptr, scalar.master.array, scalar.grad.array);
  CHECK(same(ours.master.array, scalar.master.array), "accumulate, %s, %zu elements", kernels.isa, numel);

  const std::vector<Span> spans{{0, numel / 3}, {numel / 3, numel - numel / 3}};
  std::vector<double> sums(2 + numel / kNormBlock), right(sums.size());
  sums.resize((numel / 3 + kNormBlock - 1) / kNormBlock + (numel - numel / 3 + kNormBlock - 1) / kNormBlock);
  right.resize(sums.size());
  run_square_sums(kernels, pool, ours.grad.array, spans, sums.data());
  run_square_sums(kScalarKernels, nullptr, ours.grad.array, spans, right.data());
  CHECK(sums == right, "square_sums, %s, %zu elements", kernels.isa, numel);

  for (Dtype to : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    Buffer ours_out(to, numel, shift), scalar_out(to, numel, shift);
    run_convert(kernels, pool, ours_out.array, ours.grad.array);
    run_convert(kScalarKernels, nullptr, scalar_out.array, ours.grad.array);
    CHECK(same(ours_out.array, scalar_out.array), "convert, %s, %zu elements", kernels.isa, numel);
  }
  ours.update(kernels.update_bytes, pool, segments, 1.0, nullptr, numel % 2 == 0);  // for its accesses alone
}

struct Layout {
  Dtype master, working, state;
};

// The arrays of one update in any layout, from one seed; any bytes make a remainder or a code.
struct Encoded {
  std::vector<std::unique_ptr<Buffer>> buffers;
  UpdateState state;
  Array grad;

  Encoded(const Layout& layout, size_t states, Dtype grad_dtype, size_t numel, size_t shift) {
    std::mt19937 random(unsigned(numel + shift));
    std::normal_distribution<float> normal;
    const auto make = [&](Dtype dtype, size_t size) {
      buffers.push_back(std::make_unique<Buffer>(dtype, size, shift));
      const Array array = buffers.back()->array;
      for (size_t i = 0; i < size; ++i) {
        const float x = fabsf(0.1f * normal(random));
        char* const at = static_cast<char*>(array.data) + i * itemsize(dtype);
        if (dtype <= Dtype::kFloat16)
          kScalarKernels.convert(at, dtype, &x, Dtype::kFloat32, 1);
        else
          for (size_t k = 0; k < itemsize(dtype); ++k) at[k] = char(random());
      }
      return array;
    };
    grad = make(grad_dtype, numel);
    state.master = make(layout.master, master_numel(layout.master, numel));
    if (layout.working != Dtype::kNone) state.working = make(layout.working, numel);
    state.count = states;
    for (size_t k = 0; k < states; ++k) {
      state.states[k] = make(layout.state, state_numel(layout.state, numel));
      const float scale = 0x1p-10f;
      for (size_t at = numel; layout.state == Dtype::kUInt8 && at < state.states[k].numel; at += sizeof scale)
        memcpy(static_cast<char*>(state.states[k].data) + at, &scale, sizeof scale);
    }
  }
  void update(void (*kernel)(const UpdateRun&), Pool* pool, Rule rule, const UpdateSegment& segment,
              const Encoded* out = nullptr) const {
    UpdateJob job{kernel, rule, state, grad, {segment}, 0.7, {}, {}, {}};
    if (out) job.out = out->state;
    run_update(pool, job);
  }
};

bool same(const Encoded& a, const Encoded& b) {
  for (size_t i = 0; i < a.buffers.size(); ++i)
    if (!same(a.buffers[i]->array, b.buffers[i]->array)) return false;
  return true;
}

void check_layouts(const Kernels& kernels, Pool* pool, size_t numel, size_t shift) {
  const Dtype f32 = Dtype::kFloat32, bf16 = Dtype::kBFloat16, none = Dtype::kNone;
  const std::pair<Dtype, Dtype> masters[] = {
      {f32, none}, {f32, bf16}, {bf16, none}, {Dtype::kInt16, bf16}, {Dtype::kInt8, bf16}};
  for (size_t rule = 0; rule < kRules; ++rule)
    for (const auto& [master, working] : masters)
      for (Dtype state : {f32, bf16, Dtype::kUInt8})
        for (uint32_t seed : {0u, 77u}) {
          const Layout layout{master, working, state};
          const size_t states = Rule(rule) == Rule::kAdam ? 2 : 1;
          UpdateSegment s = kSegment;
          s.numel = numel, s.step = 3, s.seed = seed;
          const Encoded ours(layout, states, bf16, numel, shift), scalar(layout, states, bf16, numel, shift),
              old(layout, states, bf16, numel, shift), apart(layout, states, bf16, numel, shift);
          old.update(kernels.update[rule], pool, Rule(rule), s, &apart);
          ours.update(kernels.update[rule], pool, Rule(rule), s);
          scalar.update(kScalarKernels.update[rule], nullptr, Rule(rule), s);
          CHECK(same(ours, scalar) && same(apart, scalar), "%s, rule %zu, master %d, state %d, seed %u, %zu elements",
                kernels.isa, rule, int(master), int(state), seed, numel);
          ours.update(kernels.update_bytes, pool, Rule(rule), s);
          const bool written_only = master == f32 && working != none;  // and the rest of a block becomes 0
          CHECK(same(ours, scalar) || written_only || numel % kScaleBlock != 0, "the bytes of %s stay", kernels.isa);
        }
}

// Random bits: NaNs, infinities and subnormals among them.
void check_conversions(const Kernels& kernels) {
  std::mt19937 random(1);
  const size_t numel = 100'003;
  Buffer source(Dtype::kFloat32, numel, 1);
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t bits = uint32_t(random());
    memcpy(source.floats() + i, &bits, 4);
  }
  for (Dtype half : {Dtype::kBFloat16, Dtype::kFloat16}) {
    Buffer ours(half, numel, 1), scalar(half, numel, 1), ours_wide(Dtype::kFloat32, numel, 0),
        scalar_wide(Dtype::kFloat32, numel, 0);
    run_convert(kernels, nullptr, ours.array, source.array);
    run_convert(kScalarKernels, nullptr, scalar.array, source.array);
    CHECK(same(ours.array, scalar.array), "to half, %s", kernels.isa);
    for (size_t i = 0; i < numel; ++i) static_cast<uint16_t*>(ours.array.data)[i] = uint16_t(i);
    run_convert(kernels, nullptr, ours_wide.array, ours.array);
    run_convert(kScalarKernels, nullptr, scalar_wide.array, ours.array);
    for (size_t i = 0; i < numel; ++i) {  // a float16 signalling NaN may or may not turn quiet: both are NaN
      const float a = ours_wide.floats()[i], b = scalar_wide.floats()[i];
      CHECK(memcmp(&a, &b, 4) == 0 || (a != a && b != b), "from half 0x%04x, %s", unsigned(uint16_t(i)), kernels.isa);
    }
  }
}

Job copy_job(Pool* pool, std::vector<char>& dst, const std::vector<char>& src,
             std::vector<std::shared_ptr<Event>> after = {}) {
  Job job;
  job.what = "copy";
  job.after = std::move(after);
  job.run = [pool, span = CopySpan{dst.data(), src.data(), src.size()}](Throttle& throttle) {
    run_copy(pool, throttle, {span});
  };
  return job;
}

#if defined(__linux__)
int refused_call = 0;        // counts down to the call that fails
bool leaves_a_hole = false;  // as the kernel does when it refuses late
Remap real_remap = nullptr;

bool refuse_one(char* from, char* to, size_t nbytes, bool keep_from_mapped) {
  if (--refused_call != 0) return real_remap(from, to, nbytes, keep_from_mapped);
  if (leaves_a_hole) munmap(to, nbytes);
  return false;
}

// Every kernel call of a page move refused in turn: dst must be right, and both ranges usable.
void check_moves() {
  real_remap = remap_pages;
  Pool pool(3);
  const std::atomic<bool> never{false};
  for (size_t nbytes : {size_t(0), size_t(4095), size_t(300 * 1024), size_t((5 << 20) + 7)}) {
    for (int failing = 0; failing <= 3; ++failing) {
      for (bool hole : {false, true}) {
        const size_t mapped = nbytes + (2 << 20);
        void* const both[] = {mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                              mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)};
        char *const dst = static_cast<char*>(both[0]), *const src = static_cast<char*>(both[1]);
        memset(dst, 1, nbytes);
        std::vector<char> values(nbytes);
        std::mt19937 random(unsigned(nbytes + 1));
        for (char& value : values) value = char(random());
        if (nbytes) memcpy(src, values.data(), nbytes);
        refused_call = failing;
        leaves_a_hole = hole;
        remap_pages = refuse_one;
        Throttle throttle(0, never);
        const size_t copied = run_move(&pool, throttle, {{dst, src, nbytes}}, true);
        remap_pages = real_remap;
        CHECK(nbytes == 0 || memcmp(dst, values.data(), nbytes) == 0, "%zu bytes, call %d refused", nbytes, failing);
        const bool small = nbytes < kLeastMovedBytes;
        CHECK(copied == (small || failing == 1 || failing == 2 ? nbytes : nbytes % 4096) ||
                  (failing == 0 && copied == nbytes),
              "%zu bytes copied of %zu, call %d refused", copied, nbytes, failing);
        memset(src, 2, nbytes);
        CHECK(nbytes == 0 || (memcmp(dst, values.data(), nbytes) == 0 && src[nbytes - 1] == 2), "%zu bytes", nbytes);
        munmap(dst, mapped);
        munmap(src, mapped);
      }
    }
  }
}
#else
void check_moves() {}
#endif

std::atomic<int> retired{0};
void retire(std::vector<void*>&& keep) { retired += int(keep.size()); }

void check_lanes() {
  auto pool = std::make_shared<Pool>(3);
  std::vector<char> a(3'000'000, 1), b(a.size()), c(a.size());
  auto gate = std::make_shared<Event>(true);
  {
    Lane first("first", 1.0, pool, retire), second("second", 0, pool, retire), third("third", 0, nullptr, retire);
    Job one = copy_job(first.pool(), b, a, {gate});
    one.keep = {nullptr, nullptr};
    Job two = copy_job(second.pool(), c, b, {one.event});
    Job bad = copy_job(nullptr, c, b, {std::make_shared<Event>(true)});
    bad.after[0]->fail("no");
    const auto copied = two.event, started = one.event, failed = bad.event;
    CHECK(first.submit(one) && second.submit(two) && third.submit(bad), "submit");
    CHECK(!copied->wait_for(10'000'000), "must wait for the gate");
    gate->finish(1, 2);
    while (!copied->wait_for(1'000'000'000)) {
    }
    CHECK(c == a && retired == 2 && started->end_ns - started->start_ns > 2'700'000, "copied, retired, throttled");
    while (!failed->wait_for(1'000'000'000)) {
    }
    CHECK(failed->state() == Event::State::kFailed && failed->message().find("no") != std::string::npos, "%s",
          failed->message().c_str());

    std::shared_ptr<Event> last;
    for (int i = 0; i < 300; ++i) {
      Lane& lane = i % 2 ? first : second;
      Job job =
          copy_job(lane.pool(), i % 2 ? b : c, a, last ? std::vector{last} : std::vector<std::shared_ptr<Event>>{});
      job.run = [](Throttle&) {};
      last = job.event;
      CHECK(lane.submit(job), "submit");
    }
    while (!last->wait_for(1'000'000'000)) {
    }
    Job stuck = copy_job(nullptr, b, a, {std::make_shared<Event>(true)});
    const auto never = stuck.event;
    CHECK(third.submit(stuck), "submit");
    third.close();
    while (!third.wait_ended(1'000'000'000)) {
    }
    Job late = copy_job(nullptr, b, a);
    CHECK(never->state() == Event::State::kFailed && !third.submit(late), "a closed lane gives up");
  }
  // Lanes that nobody closed or drained: a slow copy, jobs that wait for ever.
  Lane slow("slow", 1e-6, pool, retire), waiting("waiting", 0, pool, retire);
  Job copy = copy_job(slow.pool(), b, a), wait = copy_job(waiting.pool(), c, a, {std::make_shared<Event>(true)});
  const auto copied = copy.event, waited = wait.event;
  CHECK(slow.submit(copy) && waiting.submit(wait), "submit");
  Lane::abandon_all();
  CHECK(copied->state() == Event::State::kFailed && waited->state() == Event::State::kFailed, "abandoned");
}

}  // namespace

int main() {
  Pool pool(3);
  const Dtype dtypes[] = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kNone};
  std::vector<size_t> sizes{4097, 1'000'003};
  for (size_t n = 1; n <= 70; ++n) sizes.push_back(n);
  for (const Kernels* kernels : available_kernels()) {
    for (size_t numel : sizes)
      for (size_t shift : {0, 1, 3}) check_accuracy(*kernels, numel, shift);
    for (size_t numel : sizes) {
      if (numel > 1'000'000) numel = 200'003;
      for (int grad = 0; grad < 3; ++grad)
        for (int working = 0; working < 4; ++working)
          check_bits(*kernels, numel % 2 ? &pool : nullptr, numel, numel % 4, dtypes[grad], dtypes[working]);
    }
    for (size_t numel : {1, 15, 16, 17, 31, 255, 256, 257, 512, 5000, 40'000})
      check_layouts(*kernels, numel % 2 ? &pool : nullptr, numel, numel % 4);
    check_conversions(*kernels);
    printf("%s done\n", kernels->isa);
  }
  check_moves();
  check_lanes();
  printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures != 0;
}
