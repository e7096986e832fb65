// The kernels' plain interface: one table of functions per instruction set, chosen at run time.
// No standard library types: files compiled for one instruction set must not share inline functions with the others.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace offload {

enum class Dtype : uint8_t { kFloat32, kBFloat16, kFloat16, kNone };

// Elements per float64 partial sum of squares.
constexpr size_t kNormBlock = 16384;

// What one update needs besides its arrays, each rounded once from double to float. See Note [One formula].
struct AdamScalars {
  float grad_scale;  // unscale and clip factor in one; negative to maximize
  float decay;       // 1 - lr * weight_decay when decoupled, else 1
  float l2;          // weight_decay when it is added to the gradient, else 0
  float lerp;        // 1 - beta1, or beta1 with lerp_from_grad
  float beta2;
  float one_minus_beta2;
  float correction2_sqrt;  // sqrt(1 - beta2^step)
  float eps;
  float negative_step_size;  // -lr / (1 - beta1^step)
  bool lerp_from_grad;       // beta1 <= 0.5: interpolate from the gradient's side, as torch does
};

// A run of elements with the same scalars. Arrays may start at any element. The outputs are the inputs themselves
// (an update in place) or memory of their own.
struct AdamRun {
  const float* master;
  const float* exp_avg;
  const float* exp_avg_sq;
  const void* grad;
  Dtype grad_dtype;
  float* master_out;
  float* exp_avg_out;
  float* exp_avg_sq_out;
  void* working_out;  // ignored when working_dtype is kNone
  Dtype working_dtype;
  size_t numel;
  AdamScalars scalars;
  bool stream;            // write what is not read past the caches
  size_t prefetch_numel;  // elements ahead that are fetched into the cache; 0 for none
};

struct Kernels {
  const char* isa;
  void (*adam)(const AdamRun&);
  // Adam's byte streams with next to no arithmetic: the bandwidth ceiling of the benchmark.
  void (*adam_bytes)(const AdamRun&);
  void (*convert)(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, size_t numel);
  void (*accumulate)(float* acc, const void* src, Dtype src_dtype, size_t numel);
  // Sum of squares of at most kNormBlock elements, in an order that is the same for every instruction set.
  double (*square_sum)(const void* src, Dtype src_dtype, size_t numel);
};

#if defined(__x86_64__)
extern const Kernels kScalarKernels, kAvx2Kernels, kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kScalarKernels, kNeonKernels;
#else
extern const Kernels kScalarKernels;
#endif

}  // namespace offload
