// The lanes' jobs over raw arrays: how each is cut into chunks for the pool. No Python, no checks: the binding has made
// them.
#pragma once

#include <optional>

#include "kernels.h"
#include "lane.h"

namespace offload {

struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::kNone;
  size_t numel = 0;
};

size_t itemsize(Dtype dtype);

// One param group's settings over [offset_numel, offset_numel + numel). `step` counts this step.
struct UpdateSegment {
  size_t offset_numel, numel;
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  bool decoupled, maximize;
  double dampening = 0;
  bool nesterov = false;
  uint32_t seed = 0;
};

UpdateScalars update_scalars(Rule rule, const UpdateSegment& segment, double grad_scale);

// What an update changes. Dtypes say the layout, as in api.Lane.update; `working` may be empty.
struct UpdateState {
  Array master, states[kMostStates], working;
  size_t count = 0;  // of states
};

// The elements of an array of this dtype for `numel` parameters.
size_t master_numel(Dtype dtype, size_t numel);
size_t state_numel(Dtype dtype, size_t numel);

// Kernels::update of a rule, or Kernels::update_bytes. Segments are in ascending order and do not overlap. With `out`,
// what lies outside of them is copied there. Whether to prefetch, and to store past the caches what is only written,
// follows from the job's size unless it is said.
struct UpdateJob {
  void (*update)(const UpdateRun&);
  Rule rule;
  UpdateState state;
  Array grad;
  std::vector<UpdateSegment> segments;
  double grad_scale = 1;
  std::optional<bool> prefetch = {}, stream = {};
  std::optional<UpdateState> out = {};
};
void run_update(Pool* pool, const UpdateJob& job);
size_t update_bytes(const UpdateJob& job);

struct CopySpan {
  char* dst;
  const char* src;
  size_t nbytes;
};
void run_copy(Pool* pool, Throttle& throttle, const std::vector<CopySpan>& spans);
// Makes every dst hold what its src holds, by exchanging their pages where `pages` allows and the kernel does it, else
// by copying; returns the bytes copied. What src holds afterwards is undefined.
size_t run_move(Pool* pool, Throttle& throttle, const std::vector<CopySpan>& spans, bool pages);

void run_convert(const Kernels& kernels, Pool* pool, Array dst, Array src);
void run_accumulate(const Kernels& kernels, Pool* pool, Array acc, Array src);

struct Span {
  size_t offset_numel, numel;
};
void run_square_sums(const Kernels& kernels, Pool* pool, Array src, const std::vector<Span>& spans, double* out);

}  // namespace offload
