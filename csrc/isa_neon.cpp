// Every aarch64 CPU has what this file needs.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "update-inl.h"

namespace offload {
namespace {

struct Neon : Lanes<float32x4_t, uint32x4_t, int32x4_t> {
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

  static U max(U a, U b) { return vmaxq_u32(a, b); }
  static U min(U a, U b) { return vminq_u32(a, b); }
  static void store_u32(U x, uint32_t* p) { vst1q_u32(p, x); }
  static bool any(U x) { return vmaxvq_u32(x) != 0; }
  static S round(F x) { return vcvtnq_s32_f32(x); }
  static U load_u32(const uint32_t* p) { return vld1q_u32(p); }
  static uint8x8_t load_bytes(const char* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vcreate_u8(four);
  }
  static U load_u8(const char* p) { return vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p)))); }
  static U load_i8(const char* p) {
    return U(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(p))))));
  }
  static U load_u16(const char* p) { return vmovl_u16(load_bits(p)); }
  static U load_i16(const char* p) { return U(vmovl_s16(vreinterpret_s16_u16(load_bits(p)))); }
  static void store_u16(const U* x, char* p) {
    for (int k = 0; k < 4; ++k) store_bits(vmovn_u32(x[k]), p + 8 * k);
  }
  static uint8x8_t eight(U a, U b) { return vmovn_u16(vcombine_u16(vmovn_u32(a), vmovn_u32(b))); }
  static void store_i8(const U* x, char* p) {
    for (int k = 0; k < 4; k += 2) vst1_u8(reinterpret_cast<uint8_t*>(p + 4 * k), eight(x[k], x[k + 1]));
  }
  static void store_codes(const U* x, char* p) {
    store_i8(x, p);
    store_i8(x + 4, p + 16);
  }
  static void store_signed_codes(const U* x, char* p) {
    for (int k = 0; k < 8; k += 2)
      vst1_u8(reinterpret_cast<uint8_t*>(p + 4 * k), veor_u8(eight(x[k], x[k + 1]), vdup_n_u8(128)));
  }
  static void stream_u16(const U* x, char* p) { store_u16(x, p); }

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
