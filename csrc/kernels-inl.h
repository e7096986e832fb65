// Every kernel, written once on a small vector type `V` that the including file defines for its instruction set.
// Everything here is in an unnamed namespace: nothing compiled for AVX-512 may be linked into the scalar path.
//
// V has: types F, U and S (float, uint32_t, int32_t: arithmetic by operators, `a < b ? x : y` by lane), kLanes,
//        kVectors (vectors in a pack of kPack elements), kPrefetch, set1, sqrt, max and min (of U), any (of U: a bit is
//        set), bits and floats (between F and U), to_float (of S), round (to S, to nearest even), load and store for
//        float, BF16 and F16, load_u8, load_i8, load_u16 and load_i16 (widened to U), load_u32, store_u32, store_i8 and
//        store_u16 (a pack of U whose values fit), store_codes and store_signed_codes (two packs as bytes, the latter
//        with 128 added), stream and stream_u16 (past the caches, to an address aligned to what is stored), fence, and
//        class Squares (8 double sums). `One` below is V with one lane: it does the tails of conversions, and is the
//        scalar kernels' vector.
#pragma once

#include <string.h>

#include "kernels.h"

namespace offload {
namespace {

// What a loop's body is made of must be in it: a call would take its vectors through memory.
#define OFFLOAD_INLINE inline __attribute__((always_inline))

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

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

inline float to_float_of(float x) { return x; }

inline float to_float_of(BF16 x) { return float_of(uint32_t(x.bits) << 16); }

inline float to_float_of(F16 x) {
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

// Elements that the codecs and the update work on at a time: a cache line of float32, two bytes of a bitmap.
constexpr size_t kPack = 16;

// What GCC's and Clang's vector types give alike for every instruction set.
template <class F_, class U_, class S_>
struct Lanes {
  using F = F_;
  using U = U_;
  using S = S_;
  static constexpr size_t kLanes = sizeof(F) / 4, kVectors = kPack / kLanes;
  static constexpr bool kPrefetch = true;
  static U bits(F x) { return (U)x; }
  static F floats(U x) { return (F)x; }
  static F to_float(S x) { return __builtin_convertvector(x, F); }
};

// One lane: the scalar build's vector.
struct One {
  using F = float;
  using U = uint32_t;
  using S = int32_t;
  static constexpr size_t kLanes = 1, kVectors = kPack;
  static constexpr bool kPrefetch = false;
  static F set1(float x) { return x; }
  static F sqrt(F x) { return __builtin_sqrtf(x); }
  static U max(U a, U b) { return a < b ? b : a; }
  static U min(U a, U b) { return a < b ? a : b; }
  static bool any(U x) { return x != 0; }
  static U bits(F x) { return bits_of(x); }
  static F floats(U x) { return float_of(x); }
  static F to_float(S x) { return F(x); }
  static S round(F x) { return S(__builtin_lrintf(x)); }
  static U load_u32(const uint32_t* p) { return *p; }
  static U load_u8(const char* p) { return uint8_t(*p); }
  static U load_i8(const char* p) { return U(int8_t(*p)); }
  static U load_u16(const char* p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
  }
  static U load_i16(const char* p) { return U(int16_t(load_u16(p))); }
  static void store_u32(U x, uint32_t* p) { *p = x; }
  static void store_i8(const U* x, char* p) {
    for (size_t k = 0; k < kPack; ++k) p[k] = char(x[k]);
  }
  static void store_codes(const U* x, char* p) {
    for (size_t k = 0; k < 2 * kPack; ++k) p[k] = char(x[k]);
  }
  static void store_signed_codes(const U* x, char* p) {
    for (size_t k = 0; k < 2 * kPack; ++k) p[k] = char(x[k] + 128);
  }
  static void store_u16(const U* x, char* p) {
    for (size_t k = 0; k < kPack; ++k) {
      const uint16_t low = uint16_t(x[k]);
      memcpy(p + 2 * k, &low, 2);
    }
  }
  static void stream_u16(const U* x, char* p) { store_u16(x, p); }
  template <class T>
  static F load(const T* p) {
    return to_float_of(*p);
  }
  template <class T>
  static void store(F x, T* p) {
    from_float(x, p);
  }
  template <class T>
  static void stream(F x, T* p) {
    from_float(x, p);
  }
  static void fence() {}

  struct Squares {
    double sums[8] = {};
    template <class T>
    void add8(const T* p) {
      for (int i = 0; i < 8; ++i) {
        const double x = to_float_of(p[i]);
        sums[i] += x * x;
      }
    }
    void read(double* out) const { memcpy(out, sums, sizeof sums); }
  };
};

template <class T>
inline T* offset(void* p, size_t i) {
  return static_cast<T*>(p) + i;
}
template <class T>
inline const T* offset(const void* p, size_t i) {
  return static_cast<const T*>(p) + i;
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
  for (; i < numel; ++i) acc[i] += to_float_of(*offset<S>(src, i));
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
    const double x = to_float_of(*offset<S>(src, i));
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

}  // namespace
}  // namespace offload
