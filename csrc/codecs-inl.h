// How masters and states are stored in fewer bytes, a pack or a block at a time. The same bits as the torch operations
// of offload_engine/kernels/codecs.py, whose docstrings have the formats, their errors and their source.
#pragma once

#include "kernels-inl.h"

namespace offload {
namespace {

template <class V>
OFFLOAD_INLINE typename V::S signed_of(typename V::U x) {
  return (typename V::S)x;
}

// bfloat16, to nearest even.
template <class V>
OFFLOAD_INLINE typename V::U bf16_of(typename V::F x) {
  using U = typename V::U;
  const U bits = V::bits(x), nan = U{} + 0x7FC0;
  const U rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16;
  return x != x ? nan : rounded;
}

template <class V>
OFFLOAD_INLINE void load_bf16(const char* from, size_t i, typename V::F* x) {
  for (size_t k = 0; k < V::kVectors; ++k) x[k] = V::load(offset<BF16>(from, i + k * V::kLanes));
}

template <class V>
OFFLOAD_INLINE void bf16_words(const typename V::F* x, typename V::U* words) {
  for (size_t k = 0; k < V::kVectors; ++k) words[k] = bf16_of<V>(x[k]);
}

template <class V>
OFFLOAD_INLINE void store_bf16(const typename V::F* x, char* to, size_t i) {
  typename V::U words[V::kVectors];
  bf16_words<V>(x, words);
  V::store_u16(words, to + 2 * i);
}

// Random bits of a pack: murmur3's finaliser of seed + index.
template <class V>
OFFLOAD_INLINE void random_bits(uint32_t first, typename V::U* h) {
  static const uint32_t kIota[kPack] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (size_t k = 0; k < V::kVectors; ++k) {
    typename V::U x = V::load_u32(kIota + k * V::kLanes) + first;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    h[k] = x ^ (x >> 16);
  }
}

// bfloat16, rounded up with the probability of what lies above: `h` has 16 random bits for a first state in its lower
// half, and 16 for a second one in its upper half.
template <class V, bool kSecond>
OFFLOAD_INLINE void store_stochastic(const typename V::F* x, const typename V::U* h, char* to, size_t i) {
  using U = typename V::U;
  U words[V::kVectors];
  const U nan = U{} + 0x7FC0;
  for (size_t k = 0; k < V::kVectors; ++k) {
    const U random = kSecond ? h[k] >> 16 : h[k] & 0xFFFF;
    const U rounded = (V::bits(x[k]) + random) >> 16;
    words[k] = x[k] != x[k] ? nan : rounded;
  }
  V::store_u16(words, to + 2 * i);
}

// Masters that complete the bfloat16 working copy: bits(master) = bits(working) + what is missing.

// Missing are 16 bits, from -32768 to 32767, and 32768 for one of the two ties around an even working value: stored as
// -32768, with a bit of the bitmap set.
struct Split {
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateArrays& from, size_t i, typename V::F* p) {
    using U = typename V::U;
    uint16_t ties;
    memcpy(&ties, from.ties + i / 8, 2);
    U bits[V::kVectors];
    for (size_t k = 0; k < V::kVectors; ++k) {
      const size_t at = 2 * (i + k * V::kLanes);
      bits[k] = (V::load_u16(from.working + at) << 16) + V::load_i16(from.master + at);
    }
    for (size_t k = 0; k < V::kVectors; ++k) p[k] = V::floats(bits[k]);
    if (__builtin_expect(ties != 0, 0)) {
      uint32_t above[kPack];
      spread_ties(ties, above);
      for (size_t k = 0; k < V::kVectors; ++k) p[k] = V::floats(bits[k] + V::load_u32(above + k * V::kLanes));
    }
  }

  template <class V>
  static OFFLOAD_INLINE void store(const typename V::F* p, const UpdateArrays& to, size_t i) {
    using U = typename V::U;
    U words[V::kVectors], low[V::kVectors], tied = U{};
    const U none = U{}, all = ~none;
    bf16_words<V>(p, words);
    for (size_t k = 0; k < V::kVectors; ++k) {
      const U bits = V::bits(p[k]);
      low[k] = bits & 0xFFFF;
      tied = tied | (bits - (words[k] << 16) == none + 0x8000 ? all : none);
    }
    V::store_u16(words, to.working + 2 * i);
    V::store_u16(low, to.master + 2 * i);
    uint16_t ties = 0;
    if (__builtin_expect(V::any(tied), 0)) {
      uint32_t bits[kPack], high[kPack];
      for (size_t k = 0; k < V::kVectors; ++k) {
        V::store_u32(V::bits(p[k]), bits + k * V::kLanes);
        V::store_u32(words[k], high + k * V::kLanes);
      }
      ties = find_ties(bits, high);
    }
    memcpy(to.ties + i / 8, &ties, 2);
  }

 private:
  static __attribute__((noinline)) void spread_ties(uint32_t ties, uint32_t* above) {
    for (size_t k = 0; k < kPack; ++k) above[k] = (ties >> k & 1) << 16;
  }
  static __attribute__((noinline)) uint16_t find_ties(const uint32_t* bits, const uint32_t* high) {
    uint32_t ties = 0;
    for (size_t k = 0; k < kPack; ++k) ties |= uint32_t(bits[k] - (high[k] << 16) == 0x8000) << k;
    return uint16_t(ties);
  }
};

// Missing are 8 bits of 2^8, clamped to -127 and 127 so that the working copy stays the rounding of the master.
struct Split24 {
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateArrays& from, size_t i, typename V::F* p) {
    for (size_t k = 0; k < V::kVectors; ++k) {
      const size_t at = i + k * V::kLanes;
      p[k] = V::floats((V::load_u16(from.working + 2 * at) << 16) + (V::load_i8(from.master + at) << 8));
    }
  }

  template <class V>
  static OFFLOAD_INLINE void store(const typename V::F* p, const UpdateArrays& to, size_t i) {
    using U = typename V::U;
    using S = typename V::S;
    U words[V::kVectors], low[V::kVectors];
    const S least = S{} - 127, most = S{} + 127;
    bf16_words<V>(p, words);
    for (size_t k = 0; k < V::kVectors; ++k) {
      const U missing = V::bits(p[k]) - (words[k] << 16);
      const S rounded = signed_of<V>(missing + 127 + ((missing >> 8) & 1)) >> 8;
      const S above = rounded < least ? least : rounded;
      low[k] = (U)(most < above ? most : above);
    }
    V::store_u16(words, to.working + 2 * i);
    V::store_i8(low, to.master + i);
  }
};

// 8-bit blocks: codes times a scale. A first state has signed codes, stored with 128 added; a second one, or one that
// is a sum of squares, has the codes of its roots.

inline float load_scale(const char* from) {
  float scale;
  memcpy(&scale, from, 4);
  return scale;
}

template <class V>
OFFLOAD_INLINE typename V::F signed8(const char* codes, typename V::F scale) {
  return (V::to_float(signed_of<V>(V::load_u8(codes))) - V::set1(128)) * scale;
}

template <class V>
OFFLOAD_INLINE typename V::F root8(const char* codes, typename V::F scale) {
  const typename V::F root = V::to_float(signed_of<V>(V::load_u8(codes))) * scale;
  return root * root;
}

// The greatest magnitude's bits; those of a NaN are greater than any number's.
template <class V>
inline uint32_t greatest(typename V::U magnitudes) {
  uint32_t lanes[V::kLanes], most = 0;
  memcpy(lanes, &magnitudes, sizeof lanes);
  for (uint32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}

// 16 significant bits, so that code * scale is exact; 0 for tiny ones, NaN for a block with a NaN.
inline float scale_of(uint32_t greatest_bits, float per_step) {
  if (greatest_bits > 0x7F800000) return float_of(0x7FC00000);
  const float scale = float_of((bits_of(float_of(greatest_bits) * per_step) + 0x80) & ~0xFFu);
  return scale < 0x1p-60f ? 0.0f : scale;
}

// Writes the scale; returns its reciprocal, or 0 when it is no number to divide by and the codes are settled.
inline float begin_block(float scale, char* codes, char* scale_at) {
  memcpy(scale_at, &scale, 4);
  if (scale > 0 && scale <= 0x1.fffffep127f) return 1.0f / scale;
  memset(codes, scale == 0 ? 0 : 128, kScaleBlock);
  return 0;
}

// A block of values whose greatest magnitude is given by its bits. The greatest code is within 0.01 of 127 or 255
// before it is rounded, as 16 bits of scale are: nothing is left to clamp.
template <class V>
inline void store_signed8(const float* x, uint32_t greatest_bits, char* codes, char* scale_at) {
  const float inverse = begin_block(scale_of(greatest_bits, 1.0f / 127.0f), codes, scale_at);
  if (inverse == 0) return;
  const typename V::F factor = V::set1(inverse);
  for (size_t i = 0; i < kScaleBlock; i += 2 * kPack) {
    typename V::U q[2 * V::kVectors];
    for (size_t k = 0; k < 2 * V::kVectors; ++k)
      q[k] = (typename V::U)V::round(V::load(x + i + k * V::kLanes) * factor);
    V::store_signed_codes(q, codes + i);
  }
}

template <class V>
inline void store_root8(const float* roots, uint32_t greatest_bits, char* codes, char* scale_at) {
  using U = typename V::U;
  const float inverse = begin_block(scale_of(greatest_bits, 1.0f / 255.0f), codes, scale_at);
  if (inverse == 0) return;
  const typename V::F factor = V::set1(inverse);
  const U one = U{} + 1;
  for (size_t i = 0; i < kScaleBlock; i += 2 * kPack) {
    U q[2 * V::kVectors];
    for (size_t k = 0; k < 2 * V::kVectors; ++k) {
      const typename V::F root = V::load(roots + i + k * V::kLanes);
      // Never 0 for a positive value: a zero under the root would blow the step up.
      q[k] = V::max((U)V::round(root * factor), V::min(V::bits(root), one));
    }
    V::store_codes(q, codes + i);
  }
}

}  // namespace
}  // namespace offload
