// The kernels' plain interface: one table of functions per instruction set, chosen at run time.
// No standard library types: files compiled for one instruction set must not share inline functions with the others.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace offload {

enum class Dtype : uint8_t { kFloat32, kBFloat16, kFloat16, kInt16, kInt8, kUInt8, kNone };
enum class Rule : uint8_t { kAdam, kLion, kSgd, kAdagrad, kSign };
constexpr size_t kRules = 5;
constexpr size_t kMostStates = 2;

// Elements per float64 partial sum of squares.
constexpr size_t kNormBlock = 16384;
// Elements of an 8-bit state that share a scale.
constexpr size_t kScaleBlock = 256;

// What one update needs besides its arrays, each rounded once from double to float. See Note [One formula].
struct UpdateScalars {
  float grad_scale;  // unscale and clip factor in one; negative to maximize
  float decay;       // 1 - lr * weight_decay where that is decoupled, else 1
  float l2;          // weight_decay where it is added to the gradient, else 0
  float lerp;        // 1 - beta1, or beta1 with lerp_from_grad
  float lerp2;       // the same of beta2: Lion's state
  float momentum;    // beta1: SGD's
  float one_minus_dampening;
  float beta2;
  float one_minus_beta2;
  float correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float negative_step_size;  // -lr / (1 - beta1^step) for Adam, else -lr
  uint32_t seed;             // of the stochastic rounding of bfloat16 states; 0 for none
  bool lerp_from_grad;       // beta1 <= 0.5: interpolate from the gradient's side, as torch does
  bool lerp2_from_grad;
  bool has_momentum;  // SGD and SignSGD: beta1 is not 0
  bool first_step;    // SGD: the buffer starts as the gradient
  bool nesterov;
};

// Where a run's first element is in each array. `working` is null where there is none, and so is what a layout lacks.
struct UpdateArrays {
  char* master;
  char* working;
  char* ties;  // int16 masters: one bit per element
  char* states[kMostStates];
  char* scales[kMostStates];  // 8-bit states: one float per block, anywhere in memory
};

// A run of elements with the same scalars. Arrays may start at any element, but for int16 masters at a multiple of 16
// and for 8-bit states at the first element of a block; only the last run of a segment ends elsewhere. The outputs are
// the inputs themselves (an update in place) or memory of their own.
struct UpdateRun {
  UpdateArrays in, out;
  const char* grad;
  Dtype master_dtype, working_dtype, state_dtype, grad_dtype;
  size_t states;       // how many; they have one dtype
  size_t numel;
  size_t first_numel;  // index of the first element in its segment: numbers the random bits
  UpdateScalars scalars;
  bool stream;           // write what is not read past the caches
  size_t prefetch_bytes;  // bytes ahead, in every array, that are fetched into the cache; 0 for none
};

struct Kernels {
  const char* isa;
  void (*update[kRules])(const UpdateRun&);
  // The same byte streams without arithmetic: the bandwidth ceiling of the benchmark. Outputs become their inputs.
  void (*update_bytes)(const UpdateRun&);
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
