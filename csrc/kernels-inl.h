// Every kernel, written once on a small vector type `V` that the including file defines for its instruction set.
// Everything here is in an unnamed namespace: nothing compiled for AVX-512 may be linked into the scalar path.
//
// V has: type F (arithmetic by operators), kLanes, kPrefetch, set1, sqrt, load and store for float, BF16 and F16,
//        stream (a store past the caches, to an address aligned to the vector stored), fence, and
//        class Squares (8 double sums). `One` below is V with one lane: it does the tails, by the same formula.
//
// Note [One formula]. Adam and AdamW as torch's single-tensor path orders them, one rounding per operation, built with
// -ffp-contract=off: so every instruction set, the numba kernel and an update in torch operations agree bit for bit.
//   g = float(grad) * grad_scale;   p = p * decay;   g = g + l2 * p   (L2 only)
//   m = m + (g - m) * (1 - beta1);  v = v * beta2 + ((1 - beta2) * g) * g
//   p = p + ((-lr / (1 - beta1^t)) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// Such a device update takes the root in float64: torch.sqrt of float32 on the CPU comes from MKL, an ulp off for one
// value in six. torch's own optimizer differs by that, and by the fused multiply-adds in its lerp, add and addcmul.
#pragma once

#include <string.h>

#include "kernels.h"

namespace offload {
namespace {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct None {};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BF16 x) { return float_of(uint32_t(x.bits) << 16); }

inline float to_float(F16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31, mantissa = x.bits & 0x3FF;
  if (exponent == 31) return float_of(sign | 0x7F800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = float(int32_t(mantissa)) * 0x1p-24f;  // subnormal: exact
  return float_of(sign | bits_of(magnitude));
}

inline void from_float(float x, float* out) { *out = x; }

inline void from_float(float x, BF16* out) {
  const uint32_t bits = bits_of(x);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out->bits = nan ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float x, F16* out) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {  // NaN keeps its upper bits and turns quiet, as the F16C instruction does
    out->bits = uint16_t(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  } else if (magnitude >= 0x47800000) {  // 65536 and more
    out->bits = uint16_t(sign | 0x7C00);
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits
    out->bits = uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000));
  } else {
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23);
    out->bits = uint16_t(sign | (rounded >> 13));  // a carry out of 65504 makes infinity
  }
}

// One lane: the scalar build's vector and every build's tail.
struct One {
  using F = float;
  static constexpr size_t kLanes = 1;
  static constexpr bool kPrefetch = false;
  static F set1(float x) { return x; }
  static F sqrt(F x) { return __builtin_sqrtf(x); }
  template <class T>
  static F load(const T* p) {
    return to_float(*p);
  }
  template <class T>
  static void store(F x, T* p) {
    from_float(x, p);
  }
  template <class T>
  static void stream(F x, T* p) {
    from_float(x, p);
  }
  static void store(F, None*) {}
  static void stream(F, None*) {}
  static void fence() {}

  struct Squares {
    double sums[8] = {};
    template <class T>
    void add8(const T* p) {
      for (int i = 0; i < 8; ++i) {
        const double x = to_float(p[i]);
        sums[i] += x * x;
      }
    }
    void read(double* out) const { memcpy(out, sums, sizeof sums); }
  };
};

template <class T>
constexpr bool kWritten = sizeof(T) != sizeof(None);
template <class T>
inline T* offset(void* p, size_t i) {
  return static_cast<T*>(p) + i;
}
template <class T>
inline const T* offset(const void* p, size_t i) {
  return static_cast<const T*>(p) + i;
}
template <>
inline None* offset<None>(void*, size_t) {
  return nullptr;
}

// Adam's scalars in every lane, as a local copy: stores to the arrays cannot alias it.
template <class V>
struct AdamMath {
  using F = typename V::F;
  F grad_scale, decay, l2, lerp, beta2, one_minus_beta2, correction2_sqrt, eps, negative_step_size;
  bool lerp_from_grad, has_l2;

  explicit AdamMath(const AdamScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        decay(V::set1(s.decay)),
        l2(V::set1(s.l2)),
        lerp(V::set1(s.lerp)),
        beta2(V::set1(s.beta2)),
        one_minus_beta2(V::set1(s.one_minus_beta2)),
        correction2_sqrt(V::set1(s.correction2_sqrt)),
        eps(V::set1(s.eps)),
        negative_step_size(V::set1(s.negative_step_size)),
        lerp_from_grad(s.lerp_from_grad),
        has_l2(s.l2 != 0) {}

  inline void operator()(F& p, F& m, F& v, F g) const {
    g = g * grad_scale;
    p = p * decay;
    if (has_l2) g = g + l2 * p;
    m = lerp_from_grad ? g - (g - m) * lerp : m + (g - m) * lerp;
    v = v * beta2 + (one_minus_beta2 * g) * g;
    p = p + (negative_step_size * m) / (V::sqrt(v) / correction2_sqrt + eps);
  }
};

// The same bytes for the bandwidth ceiling.
template <class V>
struct BytesMath {
  using F = typename V::F;
  F scale;
  explicit BytesMath(const AdamScalars& s) : scale(V::set1(s.grad_scale)) {}
  inline void operator()(F& p, F& m, F& v, F g) const {
    m = m + g;
    v = v + g;
    p = p + g * scale;
  }
};

// Which outputs go past the caches: those that nobody reads here.
enum class Stream { kNothing, kWorking, kAll };

template <class V, bool kStream, class T>
inline void put(typename V::F x, T* p) {
  if (kStream)
    V::stream(x, p);
  else
    V::store(x, p);
}

// Vectors done at a time. Several streams of states are written line by line: AVX2's half lines in turn are a fifth
// slower than not streaming at all (Zen 4), whole ones a quarter faster.
template <class V, Stream kStream>
constexpr size_t kBlock = kStream == Stream::kAll && V::kLanes < 16 ? 16 / V::kLanes : 1;

template <class V, class Math, class G, class W, Stream kStream, size_t kVectors = kBlock<V, kStream>>
inline void update_at(const AdamRun& run, const Math& math, size_t i) {
  typename V::F p[kVectors], m[kVectors], v[kVectors];
  for (size_t k = 0; k < kVectors; ++k) {
    const size_t at = i + k * V::kLanes;
    p[k] = V::load(run.master + at), m[k] = V::load(run.exp_avg + at), v[k] = V::load(run.exp_avg_sq + at);
    math(p[k], m[k], v[k], V::load(offset<G>(run.grad, at)));
  }
  constexpr bool kAll = kStream == Stream::kAll;
  for (size_t k = 0; k < kVectors; ++k) put<V, kAll>(p[k], run.master_out + i + k * V::kLanes);
  for (size_t k = 0; k < kVectors; ++k) put<V, kAll>(m[k], run.exp_avg_out + i + k * V::kLanes);
  for (size_t k = 0; k < kVectors; ++k) put<V, kAll>(v[k], run.exp_avg_sq_out + i + k * V::kLanes);
  for (size_t k = 0; k < kVectors; ++k)
    put<V, kStream != Stream::kNothing>(p[k], offset<W>(run.working_out, i + k * V::kLanes));
}

template <size_t kNumel, class T>
inline bool aligned_to(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (kNumel * sizeof(T)) == 0;
}
template <size_t kNumel>
inline bool aligned_to(const None*) {
  return true;
}

// Whether every output of this element, and so of those a block further, is aligned for streaming.
template <class V, class W, Stream kStream>
inline bool streams_at(const AdamRun& run, size_t i) {
  constexpr size_t kNumel = kBlock<V, kStream> * V::kLanes;
  return aligned_to<kNumel>(offset<W>(run.working_out, i)) &&
         (kStream != Stream::kAll ||
          (aligned_to<kNumel>(run.master_out + i) && aligned_to<kNumel>(run.exp_avg_out + i) &&
           aligned_to<kNumel>(run.exp_avg_sq_out + i)));
}

template <class V, template <class> class Math, class G, class W, Stream kStream>
void update(const AdamRun& run_in) {
  const AdamRun run = run_in;
  const Math<V> math(run.scalars);
  const Math<One> math_one(run.scalars);
  constexpr bool kFence = kStream == Stream::kAll || (kStream == Stream::kWorking && kWritten<W>);
  size_t i = 0;
  if (kFence)
    while (i < run.numel && !streams_at<V, W, kStream>(run, i))
      update_at<One, Math<One>, G, W, Stream::kNothing>(run, math_one, i++);
  constexpr size_t kNumel = kBlock<V, kStream> * V::kLanes;
  for (; i + kNumel <= run.numel; i += kNumel) {
    if (V::kPrefetch && run.prefetch_numel) {
      const size_t ahead = i + run.prefetch_numel;
      __builtin_prefetch(run.master + ahead, kStream != Stream::kAll);
      __builtin_prefetch(run.exp_avg + ahead, kStream != Stream::kAll);
      __builtin_prefetch(run.exp_avg_sq + ahead, kStream != Stream::kAll);
      __builtin_prefetch(offset<G>(run.grad, ahead), 0);
    }
    update_at<V, Math<V>, G, W, kStream>(run, math, i);
  }
  for (; i < run.numel; ++i) update_at<One, Math<One>, G, W, Stream::kNothing>(run, math_one, i);
  if (kFence) V::fence();
}

template <class V, template <class> class Math, class G, class W>
void update_with(const AdamRun& run) {
  if (!run.stream || V::kLanes == 1) return update<V, Math, G, W, Stream::kNothing>(run);
  if (run.master_out == run.master) return update<V, Math, G, W, Stream::kWorking>(run);
  // Outputs that are never aligned for the same element cannot be streamed together.
  for (size_t i = 0; i < kBlock<V, Stream::kAll> * V::kLanes; ++i)
    if (streams_at<V, W, Stream::kAll>(run, i)) return update<V, Math, G, W, Stream::kAll>(run);
  update<V, Math, G, W, Stream::kNothing>(run);
}

template <class V, template <class> class Math, class G>
void update_to(const AdamRun& run) {
  switch (run.working_dtype) {
    case Dtype::kFloat32: return update_with<V, Math, G, float>(run);
    case Dtype::kBFloat16: return update_with<V, Math, G, BF16>(run);
    case Dtype::kFloat16: return update_with<V, Math, G, F16>(run);
    case Dtype::kNone: return update_with<V, Math, G, None>(run);
  }
}

template <class V, template <class> class Math>
void update_from(const AdamRun& run) {
  switch (run.grad_dtype) {
    case Dtype::kBFloat16: return update_to<V, Math, BF16>(run);
    case Dtype::kFloat16: return update_to<V, Math, F16>(run);
    default: return update_to<V, Math, float>(run);
  }
}

template <class V, class D, class S>
void convert_from(void* dst, const void* src, size_t numel) {
  size_t i = 0;
  for (; i + V::kLanes <= numel; i += V::kLanes) V::store(V::load(offset<S>(src, i)), offset<D>(dst, i));
  for (; i < numel; ++i) One::store(One::load(offset<S>(src, i)), offset<D>(dst, i));
}

template <class V, class D>
void convert_to(void* dst, const void* src, Dtype src_dtype, size_t numel) {
  switch (src_dtype) {
    case Dtype::kBFloat16: return convert_from<V, D, BF16>(dst, src, numel);
    case Dtype::kFloat16: return convert_from<V, D, F16>(dst, src, numel);
    default: return convert_from<V, D, float>(dst, src, numel);
  }
}

template <class V>
void convert(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, size_t numel) {
  switch (dst_dtype) {
    case Dtype::kBFloat16: return convert_to<V, BF16>(dst, src, src_dtype, numel);
    case Dtype::kFloat16: return convert_to<V, F16>(dst, src, src_dtype, numel);
    default: return convert_to<V, float>(dst, src, src_dtype, numel);
  }
}

template <class V, class S>
void accumulate_from(float* acc, const void* src, size_t numel) {
  size_t i = 0;
  for (; i + V::kLanes <= numel; i += V::kLanes) V::store(V::load(acc + i) + V::load(offset<S>(src, i)), acc + i);
  for (; i < numel; ++i) acc[i] += to_float(*offset<S>(src, i));
}

template <class V>
void accumulate(float* acc, const void* src, Dtype src_dtype, size_t numel) {
  switch (src_dtype) {
    case Dtype::kBFloat16: return accumulate_from<V, BF16>(acc, src, numel);
    case Dtype::kFloat16: return accumulate_from<V, F16>(acc, src, numel);
    default: return accumulate_from<V, float>(acc, src, numel);
  }
}

// Element i goes to sum i % 8; the eight sums are added as a fixed tree.
template <class V, class S>
double square_sum_from(const void* src, size_t numel) {
  typename V::Squares squares;
  size_t i = 0;
  for (; i + 8 <= numel; i += 8) squares.add8(offset<S>(src, i));
  double s[8];
  squares.read(s);
  for (; i < numel; ++i) {
    const double x = to_float(*offset<S>(src, i));
    s[i % 8] += x * x;
  }
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

template <class V>
double square_sum(const void* src, Dtype src_dtype, size_t numel) {
  switch (src_dtype) {
    case Dtype::kBFloat16: return square_sum_from<V, BF16>(src, numel);
    case Dtype::kFloat16: return square_sum_from<V, F16>(src, numel);
    default: return square_sum_from<V, float>(src, numel);
  }
}

template <class V>
constexpr Kernels make_kernels(const char* isa) {
  return {isa, update_from<V, AdamMath>, update_from<V, BytesMath>, convert<V>, accumulate<V>, square_sum<V>};
}

}  // namespace
}  // namespace offload
