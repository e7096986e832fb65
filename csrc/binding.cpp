// The Python module offload_engine.kernels._native: checks arguments under the interpreter lock and submits jobs.
// Contract: offload_engine/kernels/api.py; types: offload_engine/kernels/_native.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "dispatch.h"
#include "tensors.h"

namespace py = pybind11;

namespace offload {
namespace {

using EventPtr = std::shared_ptr<Event>;

constexpr Dtype kFloat32 = Dtype::kFloat32, kBFloat16 = Dtype::kBFloat16, kFloat16 = Dtype::kFloat16,
                kInt16 = Dtype::kInt16, kInt8 = Dtype::kInt8, kUInt8 = Dtype::kUInt8;
constexpr int64_t kSliceNs = 50'000'000;  // how often a wait looks for Ctrl-C

// Calls step(ns) without the interpreter lock until it returns true or the time is over. Ctrl-C throws.
template <class Step>
bool wait_in_slices(std::optional<double> timeout_s, Step step) {
  const int64_t deadline = timeout_s ? now_ns() + int64_t(std::min(*timeout_s, 1e9) * 1e9) : INT64_MAX;
  while (true) {
    const int64_t left = deadline == INT64_MAX ? kSliceNs : std::max<int64_t>(0, deadline - now_ns());
    bool ended;
    {
      py::gil_scoped_release unlocked;
      ended = step(std::min(left, kSliceNs));
    }
    if (ended) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (left <= kSliceNs && deadline != INT64_MAX) return false;
  }
}

bool wait(Event& event, std::optional<double> timeout_s) {
  if (timeout_s && std::isnan(*timeout_s)) throw py::value_error("timeout_s is not a number; give seconds, or None.");
  if (!event.done() && event.made_in != getpid())
    throw KernelError(
        "this process was forked while the work was going on, and its threads are not in it: what it writes is lost "
        "here. Call engine.synchronize() before the fork (a DataLoader's workers, say), or start processes by spawn.");
  const bool ended = event.done() || wait_in_slices(timeout_s, [&](int64_t ns) { return event.wait_for(ns); });
  free_retired();
  if (event.state() == Event::State::kFailed) throw KernelError(event.message());
  return ended;
}

void manual_only(const Event& event) {
  if (!event.manual)
    throw KernelError("this event belongs to a lane's job, which ends it. Signal one of Event.manual().");
}

class PyLane {
 public:
  PyLane(std::string name, double gbps, std::shared_ptr<Pool> pool, const std::string& isa, bool ordered)
      : pid_(getpid()),
        kernels_(find_kernels(isa)),
        lane_(std::make_unique<Lane>(check(name, gbps, kernels_, isa), gbps, pool, retire, ordered)),
        pool_(pool) {}
  ~PyLane() {
    if (getpid() != pid_) (void)lane_.release();  // a forked child has no such thread to stop
  }

  const std::string& name() const { return lane_->name(); }

  EventPtr copy(const py::sequence& dsts, const py::sequence& srcs, const py::iterable& after) {
    Tensors tensors("copy");
    size_t nbytes = 0;
    const std::vector<CopySpan> spans = pairs(tensors, dsts, srcs, &nbytes, false);
    return submit(tensors, nbytes, after,
                  [pool = pool_, spans](Throttle& throttle) { run_copy(pool.get(), throttle, spans); });
  }

  EventPtr move(const py::sequence& dsts, const py::sequence& srcs, bool pages, const py::iterable& after,
                int64_t rank) {
    Tensors tensors("move");
    size_t nbytes = 0;
    const std::vector<CopySpan> spans = pairs(tensors, dsts, srcs, &nbytes, true);
    const auto event = std::make_shared<Event>();
    return submit(
        tensors, nbytes, after,
        [pool = pool_, spans, pages, event = event.get()](Throttle& throttle) {
          event->nbytes = int64_t(run_move(pool.get(), throttle, spans, pages));
        },
        event, rank);
  }

  EventPtr convert(py::handle dst, py::handle src, const py::iterable& after) {
    Tensors tensors("convert");
    const Array to = tensors.array(dst, "dst", {kFloat32, kBFloat16, kFloat16});
    const Array from = tensors.array(src, "src", {kFloat32, kBFloat16, kFloat16});
    tensors.expect_numel(from, "src", to.numel);
    tensors.refuse_overlaps({use("dst", to, true), use("src", from, false)});
    return submit(
        tensors, to.numel * (itemsize(to.dtype) + itemsize(from.dtype)), after,
        [kernels = kernels_, pool = pool_, to, from](Throttle&) { run_convert(*kernels, pool.get(), to, from); });
  }

  EventPtr accumulate(py::handle acc, py::handle src, const py::iterable& after) {
    Tensors tensors("accumulate");
    const Array to = tensors.array(acc, "acc_fp32", {kFloat32});
    const Array from = tensors.array(src, "src", {kFloat32, kBFloat16, kFloat16});
    tensors.expect_numel(from, "src", to.numel);
    tensors.refuse_overlaps({use("acc_fp32", to, true), use("src", from, false)});
    return submit(
        tensors, to.numel * (8 + itemsize(from.dtype)), after,
        [kernels = kernels_, pool = pool_, to, from](Throttle&) { run_accumulate(*kernels, pool.get(), to, from); });
  }

  EventPtr square_sums(py::handle src, const py::sequence& spans, py::handle out, const py::iterable& after) {
    Tensors tensors("square_sums");
    const Array from = tensors.array(src, "src", {kFloat32, kBFloat16, kFloat16});
    std::vector<Span> parsed;
    size_t numel = 0, blocks = 0;
    for (py::handle span : spans) {
      const auto [offset, n] = span.cast<std::pair<int64_t, int64_t>>();
      check_range(tensors, "span", offset, n, from.numel);
      parsed.push_back({size_t(offset), size_t(n)});
      numel += size_t(n);
      blocks += (size_t(n) + kNormBlock - 1) / kNormBlock;
    }
    const Array out_f64 = tensors.doubles(out, "out_f64", blocks);
    double* const sums = static_cast<double*>(out_f64.data);
    tensors.refuse_overlaps({use("src", from, false), {"out_f64", sums, out_f64.numel * sizeof(double), true}});
    return submit(tensors, numel * itemsize(from.dtype), after,
                  [kernels = kernels_, pool = pool_, from, parsed, sums](Throttle&) {
                    run_square_sums(*kernels, pool.get(), from, parsed, sums);
                  });
  }

  EventPtr update(const std::string& rule, py::handle master, const py::sequence& states, py::handle grad,
                  py::handle working, const py::sequence& segments, double grad_scale, const py::iterable& after,
                  const py::object& out, int64_t rank, std::optional<bool> prefetch, std::optional<bool> stream) {
    Tensors tensors("update");
    UpdateJob job = update_job(tensors, rule, master, states, grad, working, segments, out);
    job.update = kernels_->update[size_t(job.rule)];
    job.grad_scale = grad_scale;
    job.prefetch = prefetch;
    job.stream = stream;
    return submit_update(tensors, std::move(job), after, rank);
  }

  EventPtr update_bytes(const std::string& rule, py::handle master, const py::sequence& states, py::handle grad,
                        py::handle working, const py::sequence& segments, double, const py::iterable& after,
                        const py::object& out, int64_t rank, bool prefetch) {
    Tensors tensors("update_bytes");
    UpdateJob job = update_job(tensors, rule, master, states, grad, working, segments, out);
    job.update = kernels_->update_bytes;
    job.prefetch = prefetch;
    return submit_update(tensors, std::move(job), after, rank);
  }

  void close() {
    if (getpid() != pid_) return;
    lane_->close();
    const auto ended = [&](int64_t ns) { return lane_->wait_ended(ns); };
    try {
      wait_in_slices({}, ended);
    } catch (py::error_already_set&) {  // Ctrl-C: what has not started fails, then it is passed on
      lane_->abandon();
      py::gil_scoped_release unlocked;
      lane_->wait_ended(INT64_MAX / 2);
      throw;
    }
    free_retired();
  }

 private:
  static std::string check(const std::string& name, double gbps, const Kernels* kernels, const std::string& isa) {
    if (!kernels)
      throw KernelError("lane '" + name + "': isa '" + isa +
                        "' is not available. See offload_engine.kernels.available_isas().");
    if (!(gbps >= 0) || std::isinf(gbps))
      throw KernelError("lane '" + name + "': gbps is " + std::to_string(gbps) +
                        ". It must be 0 (no limit) or positive.");
    return name;
  }

  static std::vector<CopySpan> pairs(Tensors& tensors, const py::sequence& dsts, const py::sequence& srcs,
                                     size_t* nbytes, bool moves) {
    if (dsts.size() != srcs.size())
      tensors.refuse(std::to_string(dsts.size()) + " destinations, " + std::to_string(srcs.size()) + " sources",
                     "Pass pairs.");
    std::vector<CopySpan> spans;
    std::vector<Tensors::Use> uses;
    for (size_t i = 0; i < dsts.size(); ++i) {
      spans.push_back(tensors.pair(dsts[i], srcs[i]));
      *nbytes += spans.back().nbytes;
      uses.push_back({"dst", spans.back().dst, spans.back().nbytes, true});
      uses.push_back({"src", spans.back().src, spans.back().nbytes, moves});
    }
    tensors.refuse_overlaps(std::move(uses));
    return spans;
  }

  static void check_range(const Tensors& tensors, const char* what, int64_t offset, int64_t n, size_t numel) {
    if (offset < 0 || n < 0 || size_t(offset) > numel || size_t(n) > numel - size_t(offset))
      tensors.refuse(std::string(what) + " [" + std::to_string(offset) + ", +" + std::to_string(n) +
                         ") leaves the tensor's " + std::to_string(numel) + " elements",
                     "Offsets and sizes are in elements.");
  }

  static Tensors::Use use(const char* name, const Array& array, bool written) {
    return {name, array.data, array.numel * itemsize(array.dtype), written};
  }

  struct RuleNames {
    const char* rule;
    std::vector<const char*> states, outputs;
    bool needs_states;
  };
  static const RuleNames& names_of(Rule rule) {
    static const RuleNames all[kRules] = {
        {"adam", {"exp_avg", "exp_avg_sq"}, {"exp_avg_out", "exp_avg_sq_out"}, true},
        {"lion", {"exp_avg"}, {"exp_avg_out"}, true},
        {"sgd", {"momentum_buffer"}, {"momentum_buffer_out"}, false},
        {"adagrad", {"sum"}, {"sum_out"}, true},
        {"sign", {"momentum_buffer"}, {"momentum_buffer_out"}, false},
    };
    return all[size_t(rule)];
  }

  static Rule rule_of(const Tensors& tensors, const std::string& name) {
    std::string list;
    for (size_t i = 0; i < kRules; ++i) {
      if (name == names_of(Rule(i)).rule) return Rule(i);
      list += std::string(i ? " or " : "") + names_of(Rule(i)).rule;
    }
    tensors.refuse("the rule is '" + name + "'", "It must be " + list + ".");
  }

  static UpdateJob update_job(Tensors& tensors, const std::string& rule, py::handle master, const py::sequence& states,
                              py::handle grad, py::handle working, const py::sequence& segments,
                              const py::object& out) {
    UpdateJob job = {};
    job.rule = rule_of(tensors, rule);
    job.grad = tensors.array(grad, "grad", {kFloat32, kBFloat16, kFloat16});
    job.state = parse_state(tensors, job, master, states, working);
    if (!out.is_none()) job.out = parse_out(tensors, job, out);
    std::vector<Tensors::Use> uses{use("grad", job.grad, false)};
    const auto add = [&](const UpdateState& state, const char* of_master, const std::vector<const char*>& of_states,
                         const char* of_working, bool written) {
      uses.push_back(use(of_master, state.master, written));
      for (size_t k = 0; k < state.count; ++k) uses.push_back(use(of_states[k], state.states[k], written));
      uses.push_back(use(of_working, state.working, written));
    };
    const RuleNames& names = names_of(job.rule);
    add(job.state, "master", names.states, "working", !job.out);
    if (job.out) add(*job.out, "master_out", names.outputs, "working_out", true);
    tensors.refuse_overlaps(std::move(uses));
    job.segments = parse_segments(tensors, job, segments);
    return job;
  }

  static UpdateState parse_state(Tensors& tensors, const UpdateJob& job, py::handle master, const py::sequence& states,
                                 py::handle working) {
    const RuleNames& names = names_of(job.rule);
    const size_t numel = job.grad.numel;
    const char* const why = "for the gradient's elements in this layout";
    UpdateState state;
    state.master = tensors.array(master, "master", {kFloat32, kBFloat16, kInt16, kInt8});
    tensors.expect_numel(state.master, "master", master_numel(state.master.dtype, numel), why);
    state.count = states.size();
    if (state.count != names.states.size() && (state.count != 0 || names.needs_states))
      tensors.refuse(std::to_string(state.count) + " states", "Pass " + std::to_string(names.states.size()) + " for " +
                                                                  names.rule +
                                                                  (names.needs_states ? "." : ", or none without momentum."));
    for (size_t k = 0; k < state.count; ++k) {
      const py::object one = states[k];
      state.states[k] = k ? tensors.array(one, names.states[k], {state.states[0].dtype})
                          : tensors.array(one, names.states[k], {kFloat32, kBFloat16, kUInt8});
      tensors.expect_numel(state.states[k], names.states[k], state_numel(state.states[k].dtype, numel), why);
    }
    const bool split = state.master.dtype == kInt16 || state.master.dtype == kInt8;
    if (!working.is_none()) {
      if (state.master.dtype == kBFloat16)
        tensors.refuse("master is bfloat16 and there is a working copy", "A bfloat16 master is one: pass None.");
      state.working = split ? tensors.array(working, "working", {kBFloat16})
                            : tensors.array(working, "working", {kFloat32, kBFloat16, kFloat16});
      tensors.expect_numel(state.working, "working", numel, why);
    } else if (split) {
      tensors.refuse("master is a remainder and working is None", "Pass the bfloat16 working copy that it completes.");
    }
    return state;
  }

  static UpdateState parse_out(Tensors& tensors, const UpdateJob& job, const py::object& out) {
    if (!PyTuple_Check(out.ptr()) || PyTuple_GET_SIZE(out.ptr()) != 3)
      tensors.refuse("out is not a tuple of three", "Pass (master_out, states_out, working_out).");
    const UpdateState& state = job.state;
    const py::tuple three = py::reinterpret_borrow<py::tuple>(out);
    const py::sequence states = three[1];
    if (states.size() != state.count)
      tensors.refuse(std::to_string(states.size()) + " outputs for " + std::to_string(state.count) + " states",
                     "Pass one for each.");
    const auto one = [&](const py::object& tensor, const char* name, const Array& like) {
      const Array found = tensors.array(tensor, name, {like.dtype});
      tensors.expect_numel(found, name, like.numel, "as its input");
      return found;
    };
    UpdateState outputs;
    outputs.count = state.count;
    outputs.master = one(three[0], "master_out", state.master);
    for (size_t k = 0; k < state.count; ++k)
      outputs.states[k] = one(states[k], names_of(job.rule).outputs[k], state.states[k]);
    if (three[2].is_none() != (state.working.dtype == Dtype::kNone))
      tensors.refuse(three[2].is_none() ? "working_out is None, working is not" : "working is None, working_out is not",
                     "Pass both or neither.");
    if (!three[2].is_none()) outputs.working = one(three[2], "working_out", state.working);
    return outputs;
  }

  // What must hold of a segment's numbers, whatever the rule.
  static void check_settings(const Tensors& tensors, const UpdateJob& job, const UpdateSegment& one, int64_t seed) {
    const auto shown = [](double x) { return py::str(py::float_(x)).cast<std::string>(); };
    if (one.step < 1) tensors.refuse("step is " + std::to_string(one.step), "It counts this step: 1 for the first.");
    if (job.rule == Rule::kSgd) {
      if (!(one.beta1 >= 0 && std::isfinite(one.beta1)))
        tensors.refuse("momentum is " + shown(one.beta1), "It must be a number from 0 up.");
    } else if (!(one.beta1 >= 0 && one.beta1 < 1 && one.beta2 >= 0 && one.beta2 < 1)) {
      tensors.refuse("betas are " + shown(one.beta1) + ", " + shown(one.beta2), "They must be in [0, 1).");
    }
    if (job.state.count == 0 && one.beta1 != 0)
      tensors.refuse("momentum is " + shown(one.beta1) + " and there is no momentum_buffer", "Pass one.");
    if (!(one.eps >= 0 && std::isfinite(one.eps)))
      tensors.refuse("eps is " + shown(one.eps), "It must be a number from 0 up.");
    const std::pair<const char*, double> numbers[] = {
        {"lr", one.lr}, {"weight_decay", one.weight_decay}, {"dampening", one.dampening}};
    for (const auto& [name, value] : numbers)
      if (!std::isfinite(value)) tensors.refuse(std::string(name) + " is " + shown(value), "It must be finite.");
    if (seed < 0 || seed > 0xFFFFFFFF)
      tensors.refuse("seed is " + std::to_string(seed), "It must be 0 (to nearest even) to 2**32 - 1.");
  }

  static std::vector<UpdateSegment> parse_segments(const Tensors& tensors, const UpdateJob& job,
                                                   const py::sequence& segments) {
    const size_t numel = job.grad.numel;
    const size_t multiple = job.state.count && job.state.states[0].dtype == kUInt8 ? kScaleBlock
                            : job.state.master.dtype == kInt16                     ? 16
                                                                                   : 1;
    std::vector<UpdateSegment> parsed;
    for (py::handle item : segments) {
      if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 13)
        tensors.refuse("a segment is not an UpdateSegment", "Pass kernels.UpdateSegment tuples.");
      // Straight from the tuple: a thousand segments would take longer through casts than their update.
      const auto integer = [&](int i) { return int64_t(PyLong_AsLongLong(PyTuple_GET_ITEM(item.ptr(), i))); };
      const auto number = [&](int i) { return PyFloat_AsDouble(PyTuple_GET_ITEM(item.ptr(), i)); };
      const auto truth = [&](int i) { return PyObject_IsTrue(PyTuple_GET_ITEM(item.ptr(), i)) > 0; };
      const int64_t offset = integer(0), n = integer(1), seed = integer(12);
      const UpdateSegment one{size_t(offset), size_t(n),  number(2), number(3), number(4),  number(5),     number(6),
                              integer(7),     truth(8),   truth(9),  number(10), truth(11), uint32_t(seed)};
      if (PyErr_Occurred()) throw py::error_already_set();
      check_range(tensors, "segment", offset, n, numel);
      check_settings(tensors, job, one, seed);
      if (n > 0 && one.offset_numel % multiple != 0)
        tensors.refuse("a segment starts at element " + std::to_string(offset),
                       "In this layout it must start at a multiple of " + std::to_string(multiple) + ".");
      if (n > 0) parsed.push_back(one);
    }
    std::sort(parsed.begin(), parsed.end(),
              [](const UpdateSegment& a, const UpdateSegment& b) { return a.offset_numel < b.offset_numel; });
    for (size_t i = 1; i < parsed.size(); ++i)
      if (parsed[i - 1].offset_numel + parsed[i - 1].numel > parsed[i].offset_numel)
        tensors.refuse("two segments overlap at element " + std::to_string(parsed[i].offset_numel),
                       "Each element is updated once.");
    return parsed;
  }

  EventPtr submit_update(Tensors& tensors, UpdateJob job, const py::iterable& after, int64_t rank) {
    const size_t nbytes = ::offload::update_bytes(job);
    return submit(
        tensors, nbytes, after, [pool = pool_, job = std::move(job)](Throttle&) { run_update(pool.get(), job); },
        std::make_shared<Event>(), rank);
  }

  EventPtr submit(Tensors& tensors, size_t nbytes, const py::iterable& after, std::function<void(Throttle&)> run,
                  EventPtr ends = std::make_shared<Event>(), int64_t rank = 0) {
    if (getpid() != pid_)
      throw KernelError("lane '" + name() +
                        "' was made before a fork and its thread is not in this process. Make the engine in the "
                        "process that uses it.");
    free_retired();
    Job job;
    job.event = std::move(ends);
    job.what = tensors.job();
    for (py::handle event : after) {
      if (!py::isinstance<Event>(event))
        tensors.refuse(std::string("after has a ") + Py_TYPE(event.ptr())->tp_name, "Pass events of this backend.");
      job.after.push_back(event.cast<EventPtr>());
    }
    job.run = std::move(run);
    job.rank = rank;
    job.event->nbytes = int64_t(nbytes);
    job.keep = tensors.take_keep();
    const EventPtr event = job.event;
    if (!lane_->submit(job)) {
      Tensors::release(job.keep);
      throw KernelError(tensors.job() + ": lane '" + name() + "' is closed. Submit before close().");
    }
    return event;
  }

  const pid_t pid_;
  const Kernels* kernels_;
  std::unique_ptr<Lane> lane_;
  std::shared_ptr<Pool> pool_;
};

std::shared_ptr<Pool> make_pool(int threads, std::vector<int> cpus) {
  for (int cpu : cpus)
    if (cpu < 0) throw KernelError("a pool on CPU " + std::to_string(cpu) + ". CPUs are numbered from 0.");
  if (threads < 1) throw KernelError("a pool of " + std::to_string(threads) + " threads. It needs at least 1.");
  // A forked child has no helpers to join: it leaks the pool instead.
  return {new Pool(threads, std::move(cpus)), [pid = getpid()](Pool* pool) {
            if (getpid() == pid) delete pool;
          }};
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Update and copy kernels, lanes and their thread pool; see offload_engine.kernels.";
  m.attr("NORM_BLOCK") = kNormBlock;

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const KernelError& error) {
      py::set_error(py::module_::import("offload_engine.errors").attr("KernelError"), error.what());
    }
  });

  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.push_back(kernels->isa);
    return names;
  });
  const pid_t pid = getpid();
  m.def("_abandon_all", [pid] {
    if (getpid() != pid) return;
    {
      py::gil_scoped_release unlocked;
      Lane::abandon_all();
    }
    free_retired();
  });

  py::class_<Event, EventPtr>(m, "Event")
      .def_static("manual", [] { return std::make_shared<Event>(true); })
      .def("done",
           [](const Event& event) {
             if (!event.done()) return false;
             free_retired();
             return true;
           })
      .def("wait", &wait, py::arg("timeout_s") = py::none())
      .def(
          "signal",
          [](Event& event, int64_t start_ns, int64_t end_ns) {
            manual_only(event);
            event.finish(start_ns, end_ns);
          },
          py::arg("start_ns"), py::arg("end_ns"))
      .def(
          "fail",
          [](Event& event, const std::string& why) {
            manual_only(event);
            event.fail(why);
          },
          py::arg("message"))
      .def_property_readonly("start_ns", [](const Event& event) { return event.start_ns.load(); })
      .def_property_readonly("end_ns", [](const Event& event) { return event.end_ns.load(); })
      .def_property_readonly("paced_ns", [](const Event& event) { return event.paced_ns.load(); })
      .def_property(
          "nbytes", [](const Event& event) { return event.nbytes.load(); },
          [](Event& event, int64_t nbytes) { event.nbytes.store(nbytes); });

  py::class_<Pool, std::shared_ptr<Pool>>(m, "WorkerPool")
      .def(py::init(&make_pool), py::arg("threads"), py::arg("cpus") = py::tuple())
      .def_property_readonly("threads", &Pool::threads)
      .def("close", &Pool::close, py::call_guard<py::gil_scoped_release>());

  const auto after = py::arg("after") = py::tuple();
  py::class_<PyLane>(m, "Lane")
      .def(py::init<std::string, double, std::shared_ptr<Pool>, const std::string&, bool>(), py::arg("name"),
           py::kw_only(), py::arg("gbps") = 0.0, py::arg("pool") = py::none(), py::arg("isa") = "scalar",
           py::arg("ordered") = true)
      .def_property_readonly("name", &PyLane::name)
      .def("copy", &PyLane::copy, py::arg("dsts"), py::arg("srcs"), after)
      .def("move", &PyLane::move, py::arg("dsts"), py::arg("srcs"), py::kw_only(), py::arg("pages") = true, after,
           py::arg("rank") = 0)
      .def("convert", &PyLane::convert, py::arg("dst"), py::arg("src"), after)
      .def("accumulate", &PyLane::accumulate, py::arg("acc_fp32"), py::arg("src"), after)
      .def("square_sums", &PyLane::square_sums, py::arg("src"), py::arg("spans"), py::arg("out_f64"), after)
      .def("update", &PyLane::update, py::arg("rule"), py::arg("master"), py::arg("states"), py::arg("grad"),
           py::arg("working"), py::arg("segments"), py::arg("grad_scale") = 1.0, after, py::arg("out") = py::none(),
           py::arg("rank") = 0, py::kw_only(), py::arg("prefetch") = py::none(), py::arg("stream") = py::none())
      .def("update_bytes", &PyLane::update_bytes, py::arg("rule"), py::arg("master"), py::arg("states"),
           py::arg("grad"), py::arg("working"), py::arg("segments"), py::arg("grad_scale") = 1.0, after,
           py::arg("out") = py::none(), py::arg("rank") = 0, py::kw_only(), py::arg("prefetch"))
      .def("close", &PyLane::close);
}

}  // namespace
}  // namespace offload
