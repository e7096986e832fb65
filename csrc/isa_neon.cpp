// Every aarch64 CPU has what this file needs.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels-inl.h"

namespace offload {
namespace {

struct Neon {
  using F = float32x4_t;
  static constexpr size_t kLanes = 4;
  static constexpr bool kPrefetch = true;

  static F set1(float x) { return vdupq_n_f32(x); }
  static F sqrt(F x) { return vsqrtq_f32(x); }
  static void fence() {}

  static uint16x4_t load_bits(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
  static F load(const float* p) { return vld1q_f32(p); }
  static F load(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_bits(p))); }
  static F load(const BF16* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_bits(p), 16)); }

  static uint16x4_t half(F x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
  static uint16x4_t bfloat(F x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t number = vceqq_f32(x, x);
    return vmovn_u32(vbslq_u32(number, vshrq_n_u32(sum, 16), vdupq_n_u32(0x7FC0)));
  }

  static void store_bits(uint16x4_t x, void* p) { vst1_u16(static_cast<uint16_t*>(p), x); }
  static void store(F x, float* p) { vst1q_f32(p, x); }
  static void store(F x, F16* p) { store_bits(half(x), p); }
  static void store(F x, BF16* p) { store_bits(bfloat(x), p); }
  static void store(F, None*) {}

  // No intrinsic stores past the caches here; cores detect a written stream themselves.
  template <class T>
  static void stream(F x, T* p) {
    store(x, p);
  }

  struct Squares {
    float64x2_t sums[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};
    template <class T>
    void add8(const T* p) {
      for (int half = 0; half < 2; ++half) {
        const F x = load(p + 4 * half);
        const float64x2_t a = vcvt_f64_f32(vget_low_f32(x)), b = vcvt_high_f64_f32(x);
        sums[2 * half] = vaddq_f64(sums[2 * half], vmulq_f64(a, a));
        sums[2 * half + 1] = vaddq_f64(sums[2 * half + 1], vmulq_f64(b, b));
      }
    }
    void read(double* out) const {
      for (int i = 0; i < 4; ++i) vst1q_f64(out + 2 * i, sums[i]);
    }
  };
};

}  // namespace

extern const Kernels kNeonKernels = make_kernels<Neon>("neon");

}  // namespace offload
#endif
