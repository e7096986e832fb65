// Built with -mavx2 -mf16c; chosen when CPU and operating system have both.
#if defined(__x86_64__)
#include <immintrin.h>

#include "update-inl.h"

namespace offload {
namespace {

typedef float Float256 __attribute__((vector_size(32)));
typedef uint32_t Uint256 __attribute__((vector_size(32)));
typedef int32_t Int256 __attribute__((vector_size(32)));

struct Avx2 : Lanes<Float256, Uint256, Int256> {
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

  static void stream_bits(__m128i x, void* p) { _mm_stream_si128(static_cast<__m128i*>(p), x); }
  static void stream(F x, float* p) { _mm256_stream_ps(p, x); }
  static void stream(F x, F16* p) { stream_bits(half(x), p); }
  static void stream(F x, BF16* p) { stream_bits(bfloat(x), p); }

  static U max(U a, U b) { return U(_mm256_max_epu32(__m256i(a), __m256i(b))); }
  static U min(U a, U b) { return U(_mm256_min_epu32(__m256i(a), __m256i(b))); }
  static void store_u32(U x, uint32_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), __m256i(x)); }
  static bool any(U x) { return !_mm256_testz_si256(__m256i(x), __m256i(x)); }
  static S round(F x) { return S(_mm256_cvtps_epi32(x)); }
  static U load_u32(const uint32_t* p) { return U(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m128i load_bytes(const char* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static U load_u8(const char* p) { return U(_mm256_cvtepu8_epi32(load_bytes(p))); }
  static U load_i8(const char* p) { return U(_mm256_cvtepi8_epi32(load_bytes(p))); }
  static U load_u16(const char* p) { return U(_mm256_cvtepu16_epi32(load_bits(p))); }
  static U load_i16(const char* p) { return U(_mm256_cvtepi16_epi32(load_bits(p))); }
  static __m256i words(const U* x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(x[0]), __m256i(x[1])), 0xD8);
  }
  static void store_u16(const U* x, char* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words(x)); }
  static void stream_u16(const U* x, char* p) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), words(x)); }
  // Each half of x has four elements of x[0], then four of x[1], and the same again.
  static void store_bytes(__m256i x, char* p) {
    store_bits(_mm_unpacklo_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)), p);
  }
  static __m256i in_order(__m256i x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void store_codes(const U* x, char* p) {
    const __m256i a = _mm256_packus_epi32(__m256i(x[0]), __m256i(x[1]));
    const __m256i b = _mm256_packus_epi32(__m256i(x[2]), __m256i(x[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(_mm256_packus_epi16(a, b)));
  }
  static void store_signed_codes(const U* x, char* p) {
    const __m256i a = _mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]));
    const __m256i b = _mm256_packs_epi32(__m256i(x[2]), __m256i(x[3]));
    const __m256i codes = _mm256_xor_si256(_mm256_packs_epi16(a, b), _mm256_set1_epi8(-128));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(codes));
  }
  static void store_i8(const U* x, char* p) {
    const __m256i packed = _mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]));
    store_bytes(_mm256_packs_epi16(packed, packed), p);
  }

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
