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
};

AdamScalars adam_scalars(const UpdateSegment& segment, double grad_scale);

struct AdamArrays {
  Array master, exp_avg, exp_avg_sq, grad, working;
};

// Where the new state goes when it must not replace the old one. `working` is as empty as AdamArrays::working.
struct UpdateOut {
  Array master, exp_avg, exp_avg_sq, working;
};

// `update` is Kernels::adam or Kernels::adam_bytes. Segments are in ascending order and do not overlap. With `out`,
// what lies outside of them is copied there. Whether to prefetch follows from the job's size unless it is said.
void run_adam(void (*update)(const AdamRun&), Pool* pool, const AdamArrays& arrays,
              const std::vector<UpdateSegment>& segments, double grad_scale, std::optional<bool> prefetch = {},
              const std::optional<UpdateOut>& out = {});
size_t adam_bytes(const AdamArrays& arrays, const std::vector<UpdateSegment>& segments, bool out_of_place = false);

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
