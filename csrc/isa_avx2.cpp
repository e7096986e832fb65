// Built with -mavx2 -mf16c; chosen when CPU and operating system have both.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels-inl.h"

namespace offload {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr size_t kLanes = 8;
  static constexpr bool kPrefetch = true;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F sqrt(F x) { return _mm256_sqrt_ps(x); }
  static void fence() { _mm_sfence(); }

  static __m128i load_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const F16* p) { return _mm256_cvtph_ps(load_bits(p)); }
  static F load(const BF16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bits(p)), 16));
  }

  static __m128i half(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m128i bfloat(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7FC0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  }

  static void store_bits(__m128i x, void* p) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static void store(F x, float* p) { _mm256_storeu_ps(p, x); }
  static void store(F x, F16* p) { store_bits(half(x), p); }
  static void store(F x, BF16* p) { store_bits(bfloat(x), p); }
  static void store(F, None*) {}

  static void stream_bits(__m128i x, void* p) { _mm_stream_si128(static_cast<__m128i*>(p), x); }
  static void stream(F x, float* p) { _mm256_stream_ps(p, x); }
  static void stream(F x, F16* p) { stream_bits(half(x), p); }
  static void stream(F x, BF16* p) { stream_bits(bfloat(x), p); }
  static void stream(F, None*) {}

  struct Squares {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    template <class T>
    void add8(const T* p) {
      const __m256 x = load(p);
      const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
      low = low + a * a;
      high = high + b * b;
    }
    void read(double* out) const {
      _mm256_storeu_pd(out, low);
      _mm256_storeu_pd(out + 4, high);
    }
  };
};

}  // namespace

extern const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace offload
#endif
