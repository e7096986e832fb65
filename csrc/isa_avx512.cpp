// Built with -mavx512f -mf16c; chosen when CPU and operating system have both.
#if defined(__x86_64__)
#include <immintrin.h>

#include "update-inl.h"

namespace offload {
namespace {

typedef float Float512 __attribute__((vector_size(64)));
typedef uint32_t Uint512 __attribute__((vector_size(64)));
typedef int32_t Int512 __attribute__((vector_size(64)));

struct Avx512 : Lanes<Float512, Uint512, Int512> {
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F sqrt(F x) { return _mm512_sqrt_ps(x); }
  static void fence() { _mm_sfence(); }

  static __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const F16* p) { return _mm512_cvtph_ps(load_bits(p)); }
  static F load(const BF16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_bits(p)), 16));
  }

  static __m256i half(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m256i bfloat(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0)));
  }

  static void store_bits(__m256i x, void* p) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static void store(F x, float* p) { _mm512_storeu_ps(p, x); }
  static void store(F x, F16* p) { store_bits(half(x), p); }
  static void store(F x, BF16* p) { store_bits(bfloat(x), p); }

  static void stream_bits(__m256i x, void* p) { _mm256_stream_si256(static_cast<__m256i*>(p), x); }
  static void stream(F x, float* p) { _mm512_stream_ps(p, x); }
  static void stream(F x, F16* p) { stream_bits(half(x), p); }
  static void stream(F x, BF16* p) { stream_bits(bfloat(x), p); }

  static U max(U a, U b) { return U(_mm512_max_epu32(__m512i(a), __m512i(b))); }
  static U min(U a, U b) { return U(_mm512_min_epu32(__m512i(a), __m512i(b))); }
  static void store_u32(U x, uint32_t* p) { _mm512_storeu_si512(p, __m512i(x)); }
  static bool any(U x) { return _mm512_test_epi32_mask(__m512i(x), __m512i(x)) != 0; }
  static S round(F x) { return S(_mm512_cvtps_epi32(x)); }
  static U load_u32(const uint32_t* p) { return U(_mm512_loadu_si512(p)); }
  static __m128i load_bytes(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static U load_u8(const char* p) { return U(_mm512_cvtepu8_epi32(load_bytes(p))); }
  static U load_i8(const char* p) { return U(_mm512_cvtepi8_epi32(load_bytes(p))); }
  static U load_u16(const char* p) { return U(_mm512_cvtepu16_epi32(load_bits(p))); }
  static U load_i16(const char* p) { return U(_mm512_cvtepi16_epi32(load_bits(p))); }
  static void store_u16(const U* x, char* p) { store_bits(_mm512_maskz_cvtepi32_epi16(0xFFFF, __m512i(x[0])), p); }
  static void stream_u16(const U* x, char* p) { stream_bits(_mm512_maskz_cvtepi32_epi16(0xFFFF, __m512i(x[0])), p); }
  static void store_i8(const U* x, char* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xFFFF, __m512i(x[0])));
  }
  static void store_codes(const U* x, char* p) {
    store_i8(x, p);
    store_i8(x + 1, p + 16);
  }
  static void store_signed_codes(const U* x, char* p) {
    const U codes[] = {x[0] + 128, x[1] + 128};
    store_codes(codes, p);
  }

  struct Squares {
    __m512d sums = _mm512_setzero_pd();
    static __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
    static __m256 load8(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static __m256 load8(const BF16* p) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    template <class T>
    void add8(const T* p) {
      const __m512d x = _mm512_cvtps_pd(load8(p));
      sums = sums + x * x;
    }
    void read(double* out) const { _mm512_storeu_pd(out, sums); }
  };
};

}  // namespace

extern const Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace offload
#endif
