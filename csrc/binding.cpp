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

constexpr Dtype kFloat32 = Dtype::kFloat32, kBFloat16 = Dtype::kBFloat16, kFloat16 = Dtype::kFloat16;
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
    const std::vector<CopySpan> spans = pairs(tensors, dsts, srcs, &nbytes);
    return submit(tensors, nbytes, after,
                  [pool = pool_, spans](Throttle& throttle) { run_copy(pool.get(), throttle, spans); });
  }

  EventPtr move(const py::sequence& dsts, const py::sequence& srcs, bool pages, const py::iterable& after,
                int64_t rank) {
    Tensors tensors("move");
    size_t nbytes = 0;
    const std::vector<CopySpan> spans = pairs(tensors, dsts, srcs, &nbytes);
    for (const CopySpan& span : spans)
      if (std::less<>()(span.dst, span.src + span.nbytes) && std::less<>()(span.src, span.dst + span.nbytes))
        tensors.refuse("dst and src overlap", "Pass separate slabs.");
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
    const Array to = tensors.floats(dst, "dst", {kFloat32, kBFloat16, kFloat16});
    const Array from = tensors.floats(src, "src", {kFloat32, kBFloat16, kFloat16});
    tensors.expect_numel(from, "src", to.numel);
    return submit(
        tensors, to.numel * (itemsize(to.dtype) + itemsize(from.dtype)), after,
        [kernels = kernels_, pool = pool_, to, from](Throttle&) { run_convert(*kernels, pool.get(), to, from); });
  }

  EventPtr accumulate(py::handle acc, py::handle src, const py::iterable& after) {
    Tensors tensors("accumulate");
    const Array to = tensors.floats(acc, "acc_fp32", {kFloat32});
    const Array from = tensors.floats(src, "src", {kFloat32, kBFloat16, kFloat16});
    tensors.expect_numel(from, "src", to.numel);
    return submit(
        tensors, to.numel * (8 + itemsize(from.dtype)), after,
        [kernels = kernels_, pool = pool_, to, from](Throttle&) { run_accumulate(*kernels, pool.get(), to, from); });
  }

  EventPtr square_sums(py::handle src, const py::sequence& spans, py::handle out, const py::iterable& after) {
    Tensors tensors("square_sums");
    const Array from = tensors.floats(src, "src", {kFloat32, kBFloat16, kFloat16});
    std::vector<Span> parsed;
    size_t numel = 0, blocks = 0;
    for (py::handle span : spans) {
      const auto [offset, n] = span.cast<std::pair<int64_t, int64_t>>();
      check_range(tensors, "span", offset, n, from.numel);
      parsed.push_back({size_t(offset), size_t(n)});
      numel += size_t(n);
      blocks += (size_t(n) + kNormBlock - 1) / kNormBlock;
    }
    double* const sums = tensors.doubles(out, "out_f64", blocks);
    return submit(tensors, numel * itemsize(from.dtype), after,
                  [kernels = kernels_, pool = pool_, from, parsed, sums](Throttle&) {
                    run_square_sums(*kernels, pool.get(), from, parsed, sums);
                  });
  }

  EventPtr update(const std::string& rule, py::handle master, const py::sequence& states, py::handle grad,
                  py::handle working, const py::sequence& segments, double grad_scale, const py::iterable& after,
                  const py::object& out, int64_t rank) {
    return submit_update(kernels_->adam, {}, rule, master, states, grad, working, segments, grad_scale, after, out,
                         rank);
  }

  EventPtr update_bytes(const std::string& rule, py::handle master, const py::sequence& states, py::handle grad,
                        py::handle working, const py::sequence& segments, double grad_scale, const py::iterable& after,
                        const py::object& out, int64_t rank, bool prefetch) {
    return submit_update(kernels_->adam_bytes, prefetch, rule, master, states, grad, working, segments, grad_scale,
                         after, out, rank);
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
                                     size_t* nbytes) {
    if (dsts.size() != srcs.size())
      tensors.refuse(std::to_string(dsts.size()) + " destinations, " + std::to_string(srcs.size()) + " sources",
                     "Pass pairs.");
    std::vector<CopySpan> spans;
    for (size_t i = 0; i < dsts.size(); ++i) {
      spans.push_back(tensors.pair(dsts[i], srcs[i]));
      *nbytes += spans.back().nbytes;
    }
    return spans;
  }

  static void check_range(const Tensors& tensors, const char* what, int64_t offset, int64_t n, size_t numel) {
    if (offset < 0 || n < 0 || size_t(offset) > numel || size_t(n) > numel - size_t(offset))
      tensors.refuse(std::string(what) + " [" + std::to_string(offset) + ", +" + std::to_string(n) +
                         ") leaves the tensor's " + std::to_string(numel) + " elements",
                     "Offsets and sizes are in elements.");
  }

  static std::vector<UpdateSegment> parse(const Tensors& tensors, const py::sequence& segments, size_t numel) {
    std::vector<UpdateSegment> parsed;
    for (py::handle item : segments) {
      if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 13)
        tensors.refuse("a segment is not an UpdateSegment", "Pass kernels.UpdateSegment tuples.");
      // Straight from the tuple: a thousand segments would take longer through casts than their update.
      const auto integer = [&](int i) { return int64_t(PyLong_AsLongLong(PyTuple_GET_ITEM(item.ptr(), i))); };
      const auto number = [&](int i) { return PyFloat_AsDouble(PyTuple_GET_ITEM(item.ptr(), i)); };
      const auto truth = [&](int i) { return PyObject_IsTrue(PyTuple_GET_ITEM(item.ptr(), i)) > 0; };
      const int64_t offset = integer(0), n = integer(1);
      const UpdateSegment one{size_t(offset), size_t(n), number(2),  number(3), number(4),
                            number(5),      number(6), integer(7), truth(8),  truth(9)};
      if (PyErr_Occurred()) throw py::error_already_set();
      check_range(tensors, "segment", offset, n, numel);
      if (one.step < 1) tensors.refuse("step is " + std::to_string(one.step), "It counts this step: 1 for the first.");
      if (!(one.beta1 >= 0 && one.beta1 < 1 && one.beta2 >= 0 && one.beta2 < 1))
        tensors.refuse("betas are " + std::to_string(one.beta1) + ", " + std::to_string(one.beta2),
                       "They must be in [0, 1).");
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

  EventPtr submit_update(void (*kernel)(const AdamRun&), std::optional<bool> prefetch, const std::string& rule,
                         py::handle master, const py::sequence& states, py::handle grad, py::handle working,
                         const py::sequence& segments, double grad_scale, const py::iterable& after,
                         const py::object& out, int64_t rank) {
    Tensors tensors("update");
    if (rule != "adam") tensors.refuse("the rule is '" + rule + "'", "It must be 'adam'.");
    if (states.size() != 2) tensors.refuse(std::to_string(states.size()) + " states", "Pass 2 for adam.");
    const py::object exp_avg = states[0], exp_avg_sq = states[1];
    AdamArrays arrays;
    arrays.master = tensors.floats(master, "master", {kFloat32});
    arrays.exp_avg = tensors.floats(exp_avg, "exp_avg", {kFloat32});
    arrays.exp_avg_sq = tensors.floats(exp_avg_sq, "exp_avg_sq", {kFloat32});
    arrays.grad = tensors.floats(grad, "grad", {kFloat32, kBFloat16, kFloat16});
    if (!working.is_none()) arrays.working = tensors.floats(working, "working", {kFloat32, kBFloat16, kFloat16});
    const size_t numel = arrays.master.numel;
    tensors.expect_numel(arrays.exp_avg, "exp_avg", numel);
    tensors.expect_numel(arrays.exp_avg_sq, "exp_avg_sq", numel);
    tensors.expect_numel(arrays.grad, "grad", numel);
    if (!working.is_none()) tensors.expect_numel(arrays.working, "working", numel);
    std::optional<UpdateOut> outputs;
    if (!out.is_none()) outputs = parse_out(tensors, arrays, out);
    auto parsed = parse(tensors, segments, numel);
    const size_t nbytes = ::offload::adam_bytes(arrays, parsed, outputs.has_value());
    return submit(tensors, nbytes, after,
                  [kernel, prefetch, pool = pool_, arrays, parsed = std::move(parsed), grad_scale, outputs](Throttle&) {
                    run_adam(kernel, pool.get(), arrays, parsed, grad_scale, prefetch, outputs);
                  },
                  std::make_shared<Event>(), rank);
  }

  static UpdateOut parse_out(Tensors& tensors, const AdamArrays& arrays, const py::object& out) {
    if (!PyTuple_Check(out.ptr()) || PyTuple_GET_SIZE(out.ptr()) != 3)
      tensors.refuse("out is not a tuple of three", "Pass (master_out, states_out, working_out).");
    const py::tuple three = py::reinterpret_borrow<py::tuple>(out);
    const py::sequence states = three[1];
    if (states.size() != 2)
      tensors.refuse(std::to_string(states.size()) + " outputs for 2 states", "Pass one for each.");
    const auto one = [&](const py::object& tensor, const char* name, const Array& like) {
      const Array found = tensors.floats(tensor, name, {like.dtype});
      tensors.expect_numel(found, name, like.numel);
      return found;
    };
    UpdateOut outputs{one(three[0], "master_out", arrays.master),
                      one(states[0], "exp_avg_out", arrays.exp_avg),
                      one(states[1], "exp_avg_sq_out", arrays.exp_avg_sq),
                      {}};
    if (three[2].is_none() != (arrays.working.dtype == Dtype::kNone))
      tensors.refuse(three[2].is_none() ? "working_out is None, working is not" : "working is None, working_out is not",
                     "Pass both or neither.");
    if (!three[2].is_none()) outputs.working = one(three[2], "working_out", arrays.working);
    return outputs;
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
           py::arg("rank") = 0)
      .def("update_bytes", &PyLane::update_bytes, py::arg("rule"), py::arg("master"), py::arg("states"),
           py::arg("grad"), py::arg("working"), py::arg("segments"), py::arg("grad_scale") = 1.0, after,
           py::arg("out") = py::none(), py::arg("rank") = 0, py::kw_only(), py::arg("prefetch"))
      .def("close", &PyLane::close);
}

}  // namespace
}  // namespace offload
