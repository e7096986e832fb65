// The update rules, one pass over all arrays of a run. Included by each instruction set's file.
#pragma once

#include "codecs-inl.h"
#include "rules-inl.h"

namespace offload {
namespace {

constexpr size_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return 4;
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
    case Dtype::kInt16: return 2;
    case Dtype::kInt8:
    case Dtype::kUInt8: return 1;
    case Dtype::kNone: return 0;
  }
  return 0;
}

inline bool is_split(Dtype master) { return master == Dtype::kInt16 || master == Dtype::kInt8; }

// Any rule in any layout, a block at a time: decoded into the first-level cache, updated and encoded. Plain float32
// arrays are used where they are.

// Copies a partial pack's arrays, so that whole packs can be read and written.
struct PartialPack {
  char master[2 * kPack] = {}, working[2 * kPack] = {}, ties[2] = {};
  UpdateArrays arrays{master, working, ties, {}, {}};
};

template <class V, class M>
void read_split(const UpdateRun& run, size_t begin, size_t numel, float* out) {
  typename V::F p[V::kVectors];
  const auto put = [&](size_t i) {
    for (size_t k = 0; k < V::kVectors; ++k) V::store(p[k], out + i + k * V::kLanes);
  };
  size_t i = 0;
  for (; i + kPack <= numel; i += kPack) {
    M::template load<V>(run.in, begin + i, p);
    put(i);
  }
  if (i == numel) return;
  PartialPack rest;
  const size_t size = bytes_of(run.master_dtype);
  memcpy(rest.master, run.in.master + (begin + i) * size, (numel - i) * size);
  memcpy(rest.working, run.in.working + (begin + i) * 2, (numel - i) * 2);
  if (run.in.ties) memcpy(rest.ties, run.in.ties + (begin + i) / 8, 2);
  M::template load<V>(rest.arrays, 0, p);
  put(i);
}

template <class V, class M>
void write_split(const UpdateRun& run, size_t begin, size_t numel, const float* in) {
  typename V::F p[V::kVectors];
  const auto get = [&](size_t i) {
    for (size_t k = 0; k < V::kVectors; ++k) p[k] = V::load(in + i + k * V::kLanes);
  };
  size_t i = 0;
  for (; i + kPack <= numel; i += kPack) {
    get(i);
    M::template store<V>(p, run.out, begin + i);
  }
  if (i == numel) return;
  PartialPack rest;
  get(i);
  M::template store<V>(p, rest.arrays, 0);
  const size_t size = bytes_of(run.master_dtype);
  memcpy(run.out.master + (begin + i) * size, rest.master, (numel - i) * size);
  memcpy(run.out.working + (begin + i) * 2, rest.working, (numel - i) * 2);
  if (!run.in.ties) return;
  uint16_t ties, old;  // the rest of the word belongs to others
  memcpy(&ties, rest.ties, 2);
  memcpy(&old, run.in.ties + (begin + i) / 8, 2);
  const uint32_t ours = (1u << (numel - i)) - 1;
  ties = uint16_t((ties & ours) | (old & ~ours));
  memcpy(run.out.ties + (begin + i) / 8, &ties, 2);
}

template <class V>
void read8(const char* codes, const char* scale_at, bool root, size_t numel, float* out) {
  char whole[kScaleBlock] = {};
  if (numel < kScaleBlock) codes = static_cast<const char*>(memcpy(whole, codes, numel));
  const typename V::F scale = V::set1(load_scale(scale_at));
  for (size_t i = 0; i < kScaleBlock; i += V::kLanes)
    V::store(root ? root8<V>(codes + i, scale) : signed8<V>(codes + i, scale), out + i);
}

// `in` is used up: what lies behind `numel` becomes zero, and a sum of squares its root.
template <class V>
void write8(float* in, bool root, size_t numel, char* codes, char* scale_at) {
  memset(in + numel, 0, (kScaleBlock - numel) * sizeof(float));
  typename V::U most{};
  for (size_t i = 0; i < kScaleBlock; i += V::kLanes) {
    typename V::F x = V::load(in + i);
    if (root) V::store(x = V::sqrt(x), in + i);
    most = V::max(most, V::bits(x) & 0x7FFFFFFF);
  }
  char whole[kScaleBlock];
  char* const to = numel < kScaleBlock ? whole : codes;
  (root ? store_root8<V> : store_signed8<V>)(in, greatest<V>(most), to, scale_at);
  if (to != codes) memcpy(codes, whole, numel);
}

template <class V>
void write_stochastic(const UpdateRun& run, size_t which, size_t begin, size_t numel, const float* in) {
  for (size_t i = 0; i < numel; i += kPack) {
    typename V::F x[V::kVectors];
    typename V::U h[V::kVectors];
    for (size_t k = 0; k < V::kVectors; ++k) x[k] = V::load(in + i + k * V::kLanes);
    random_bits<V>(run.scalars.seed + uint32_t(run.first_numel + begin + i), h);
    char pack[2 * kPack];
    which ? store_stochastic<V, true>(x, h, pack, 0) : store_stochastic<V, false>(x, h, pack, 0);
    memcpy(run.out.states[which] + 2 * (begin + i), pack, 2 * (numel - i < kPack ? numel - i : kPack));
  }
}

template <class V>
void read_master(const UpdateRun& run, size_t begin, size_t numel, float* out) {
  if (run.master_dtype == Dtype::kInt16) return read_split<V, Split>(run, begin, numel, out);
  if (run.master_dtype == Dtype::kInt8) return read_split<V, Split24>(run, begin, numel, out);
  convert<V>(out, Dtype::kFloat32, run.in.master + begin * bytes_of(run.master_dtype), run.master_dtype, numel);
}

template <class V>
void write_master(const UpdateRun& run, size_t begin, size_t numel, const float* in) {
  if (run.master_dtype == Dtype::kInt16) return write_split<V, Split>(run, begin, numel, in);
  if (run.master_dtype == Dtype::kInt8) return write_split<V, Split24>(run, begin, numel, in);
  char* const to = run.out.master + begin * bytes_of(run.master_dtype);
  if (to != reinterpret_cast<const char*>(in)) convert<V>(to, run.master_dtype, in, Dtype::kFloat32, numel);
  if (run.working_dtype != Dtype::kNone)
    convert<V>(run.out.working + begin * bytes_of(run.working_dtype), run.working_dtype, in, Dtype::kFloat32, numel);
}

template <class V>
void read_state(const UpdateRun& run, size_t which, bool root, size_t begin, size_t numel, float* out) {
  const char* const from = run.in.states[which] + begin * bytes_of(run.state_dtype);
  if (run.state_dtype == Dtype::kUInt8)
    return read8<V>(from, run.in.scales[which] + begin / kScaleBlock * sizeof(float), root, numel, out);
  convert<V>(out, Dtype::kFloat32, from, run.state_dtype, numel);
}

template <class V>
void write_state(const UpdateRun& run, size_t which, bool root, size_t begin, size_t numel, float* in) {
  char* const to = run.out.states[which] + begin * bytes_of(run.state_dtype);
  if (run.state_dtype == Dtype::kUInt8)
    return write8<V>(in, root, numel, to, run.out.scales[which] + begin / kScaleBlock * sizeof(float));
  if (run.state_dtype == Dtype::kBFloat16 && run.scalars.seed)
    return write_stochastic<V>(run, which, begin, numel, in);
  if (to != reinterpret_cast<char*>(in)) convert<V>(to, run.state_dtype, in, Dtype::kFloat32, numel);
}

template <class V, template <class> class R>
void update_blocks(const UpdateRun& run, size_t begin, size_t end) {
  constexpr size_t kStates = R<V>::kStates;
  const R<V> rule(run.scalars);
  alignas(64) float p_block[kScaleBlock] = {}, g_block[kScaleBlock] = {}, s_blocks[kStates][kScaleBlock] = {};
  for (size_t numel; begin < end; begin += numel) {
    numel = end - begin < kScaleBlock ? end - begin : kScaleBlock;
    const bool whole = numel % kPack == 0;
    const auto root = [&](size_t which) { return R<V>::kRoot && which == kStates - 1; };

    const float *g = g_block, *p_in = p_block, *s_in[kMostStates] = {s_blocks[0], s_blocks[kStates - 1]};
    float *p_out = p_block, *s_out[kMostStates] = {s_blocks[0], s_blocks[kStates - 1]};
    if (whole && run.grad_dtype == Dtype::kFloat32)
      g = offset<float>(run.grad, begin);
    else
      convert<V>(g_block, Dtype::kFloat32, run.grad + begin * bytes_of(run.grad_dtype), run.grad_dtype, numel);
    if (whole && run.master_dtype == Dtype::kFloat32) {
      p_in = offset<float>(run.in.master, begin);
      p_out = offset<float>(run.out.master, begin);
    } else {
      read_master<V>(run, begin, numel, p_block);
    }
    for (size_t which = 0; which < run.states; ++which) {
      if (whole && run.state_dtype == Dtype::kFloat32) {
        s_in[which] = offset<float>(run.in.states[which], begin);
        s_out[which] = offset<float>(run.out.states[which], begin);
      } else {
        read_state<V>(run, which, root(which), begin, numel, s_blocks[which]);
      }
    }

    for (size_t i = 0; i < numel; i += V::kLanes) {
      typename V::F p = V::load(p_in + i), s0 = V::load(s_in[0] + i), s1 = V::load(s_in[1] + i);
      rule(p, s0, s1, V::load(g + i));
      V::store(p, p_out + i);
      V::store(s0, s_out[0] + i);
      if (kStates == 2) V::store(s1, s_out[1] + i);
    }

    write_master<V>(run, begin, numel, p_out);
    for (size_t which = 0; which < run.states; ++which)
      write_state<V>(run, which, root(which), begin, numel, s_out[which]);
  }
}

template <class V, template <class> class R>
void update(const UpdateRun& run) {
  update_blocks<V, R>(run, 0, run.numel);
}

// Adam in registers, for every layout: whole packs, and whole blocks of 8-bit states.

template <class V>
OFFLOAD_INLINE void load_grad(const UpdateRun& run, size_t i, typename V::F* g) {
  switch (run.grad_dtype) {
    case Dtype::kBFloat16: return load_bf16<V>(run.grad, i, g);
    case Dtype::kFloat16:
      for (size_t k = 0; k < V::kVectors; ++k) g[k] = V::load(offset<F16>(run.grad, i + k * V::kLanes));
      return;
    default:
      for (size_t k = 0; k < V::kVectors; ++k) g[k] = V::load(offset<float>(run.grad, i + k * V::kLanes));
  }
}

template <class V, bool kStream, class T>
OFFLOAD_INLINE void put(const typename V::F* x, char* to, size_t i) {
  for (size_t k = 0; k < V::kVectors; ++k) {
    T* const at = offset<T>(to, i + k * V::kLanes);
    kStream ? V::stream(x[k], at) : V::store(x[k], at);
  }
}

template <class V>
OFFLOAD_INLINE void put_working(const UpdateRun& run, size_t i, const typename V::F* p) {
  char* const to = run.out.working;
  switch (run.working_dtype) {
    case Dtype::kFloat32: return run.stream ? put<V, true, float>(p, to, i) : put<V, false, float>(p, to, i);
    case Dtype::kFloat16: return run.stream ? put<V, true, F16>(p, to, i) : put<V, false, F16>(p, to, i);
    case Dtype::kBFloat16: {
      typename V::U words[V::kVectors];
      bf16_words<V>(p, words);
      return run.stream ? V::stream_u16(words, to + 2 * i) : V::store_u16(words, to + 2 * i);
    }
    default: return;
  }
}

template <bool kStream>
struct Float32Master {
  static constexpr size_t kBytes = 4, kReadsWorking = 0;
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateRun& run, size_t i, typename V::F* p) {
    for (size_t k = 0; k < V::kVectors; ++k) p[k] = V::load(offset<float>(run.in.master, i + k * V::kLanes));
  }
  template <class V>
  static OFFLOAD_INLINE void store(const UpdateRun& run, size_t i, const typename V::F* p) {
    put<V, kStream, float>(p, run.out.master, i);
    put_working<V>(run, i, p);
  }
};

struct Bf16Master {
  static constexpr size_t kBytes = 2, kReadsWorking = 0;
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateRun& run, size_t i, typename V::F* p) {
    load_bf16<V>(run.in.master, i, p);
  }
  template <class V>
  static OFFLOAD_INLINE void store(const UpdateRun& run, size_t i, const typename V::F* p) {
    store_bf16<V>(p, run.out.master, i);
  }
};

template <class M, size_t kMasterBytes>
struct SplitMaster {
  static constexpr size_t kBytes = kMasterBytes, kReadsWorking = 2;
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateRun& run, size_t i, typename V::F* p) {
    M::template load<V>(run.in, i, p);
  }
  template <class V>
  static OFFLOAD_INLINE void store(const UpdateRun& run, size_t i, const typename V::F* p) {
    M::template store<V>(p, run.out, i);
  }
};

template <bool kStream>
struct Float32States {
  static constexpr size_t kBytes = 4;
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateRun& run, size_t i, typename V::F* m, typename V::F* v) {
    for (size_t k = 0; k < V::kVectors; ++k) {
      m[k] = V::load(offset<float>(run.in.states[0], i + k * V::kLanes));
      v[k] = V::load(offset<float>(run.in.states[1], i + k * V::kLanes));
    }
  }
  template <class V>
  static OFFLOAD_INLINE void store(const UpdateRun& run, size_t i, const typename V::F* m, const typename V::F* v) {
    put<V, kStream, float>(m, run.out.states[0], i);
    put<V, kStream, float>(v, run.out.states[1], i);
  }
};

template <bool kStochastic>
struct Bf16States {
  static constexpr size_t kBytes = 2;
  template <class V>
  static OFFLOAD_INLINE void load(const UpdateRun& run, size_t i, typename V::F* m, typename V::F* v) {
    load_bf16<V>(run.in.states[0], i, m);
    load_bf16<V>(run.in.states[1], i, v);
  }
  template <class V>
  static OFFLOAD_INLINE void store(const UpdateRun& run, size_t i, const typename V::F* m, const typename V::F* v) {
    if (kStochastic) {
      typename V::U h[V::kVectors];
      random_bits<V>(run.scalars.seed + uint32_t(run.first_numel + i), h);
      store_stochastic<V, false>(m, h, run.out.states[0], i);
      store_stochastic<V, true>(v, h, run.out.states[1], i);
    } else {
      store_bf16<V>(m, run.out.states[0], i);
      store_bf16<V>(v, run.out.states[1], i);
    }
  }
};

// A pack is a cache line of float32; smaller elements have some of their lines asked for more than once.
template <class V, class M, size_t kStateBytes>
OFFLOAD_INLINE void prefetch(const UpdateRun& run, size_t i) {
  if (!V::kPrefetch || run.prefetch_bytes == 0) return;
  const size_t ahead = run.prefetch_bytes;
  __builtin_prefetch(run.in.master + i * M::kBytes + ahead, 1);
  if (M::kReadsWorking) __builtin_prefetch(run.in.working + i * M::kReadsWorking + ahead, 1);
  __builtin_prefetch(run.in.states[0] + i * kStateBytes + ahead, 1);
  __builtin_prefetch(run.in.states[1] + i * kStateBytes + ahead, 1);
  __builtin_prefetch(run.grad + i * bytes_of(run.grad_dtype) + ahead, 0);
}

template <class V, class M, class S>
void adam_packs(const UpdateRun& run_in, size_t begin, size_t end) {
  const UpdateRun run = run_in;
  const Adam<V> rule(run.scalars);
  for (size_t i = begin; i < end; i += kPack) {
    prefetch<V, M, S::kBytes>(run, i);
    typename V::F p[V::kVectors], m[V::kVectors], v[V::kVectors], g[V::kVectors];
    load_grad<V>(run, i, g);
    M::template load<V>(run, i, p);
    S::template load<V>(run, i, m, v);
    for (size_t k = 0; k < V::kVectors; ++k) rule(p[k], m[k], v[k], g[k]);
    M::template store<V>(run, i, p);
    S::template store<V>(run, i, m, v);
  }
}

template <class V, class M>
void adam_scale_blocks(const UpdateRun& run_in, size_t begin, size_t end) {
  using F = typename V::F;
  const UpdateRun run = run_in;
  const Adam<V> rule(run.scalars);
  alignas(64) float p_block[kScaleBlock], m_block[kScaleBlock], root_block[kScaleBlock], step_block[kScaleBlock];
  for (size_t block = begin; block < end; block += kScaleBlock) {
    const size_t at = block / kScaleBlock * sizeof(float);
    const F m_scale = V::set1(load_scale(run.in.scales[0] + at)), v_scale = V::set1(load_scale(run.in.scales[1] + at));
    typename V::U m_most{}, root_most{};
    // Three stages, a pack apart, through the first-level cache: a pack's two divisions and its root take longer than a
    // core can look ahead, so the packs before and after it have their other operations beside them.
    for (size_t stage = 0; stage < kScaleBlock + 2 * kPack; stage += kPack) {
      if (stage >= kPack && stage < kScaleBlock + kPack) {
        for (size_t k = 0; k < V::kVectors; ++k) {
          const size_t j = stage - kPack + k * V::kLanes;
          const F root = V::sqrt(V::load(root_block + j));
          V::store(root, root_block + j);
          root_most = V::max(root_most, V::bits(root));  // a NaN has any sign; nothing else has one
          V::store(rule.step(V::load(m_block + j), root), step_block + j);
        }
      }
      if (stage < kScaleBlock) {
        const size_t i = block + stage;
        prefetch<V, M, 1>(run, i);
        F p[V::kVectors], g[V::kVectors];
        load_grad<V>(run, i, g);
        M::template load<V>(run, i, p);
        for (size_t k = 0; k < V::kVectors; ++k) {
          const size_t j = k * V::kLanes;
          F m = signed8<V>(run.in.states[0] + i + j, m_scale), v = root8<V>(run.in.states[1] + i + j, v_scale);
          rule.moments(p[k], m, v, g[k]);
          V::store(p[k], p_block + stage + j);
          V::store(m, m_block + stage + j);
          V::store(v, root_block + stage + j);
          m_most = V::max(m_most, V::bits(m) & 0x7FFFFFFF);
        }
      }
      if (stage >= 2 * kPack) {
        const size_t j = stage - 2 * kPack;
        F p[V::kVectors];
        for (size_t k = 0; k < V::kVectors; ++k)
          p[k] = V::load(p_block + j + k * V::kLanes) + V::load(step_block + j + k * V::kLanes);
        M::template store<V>(run, block + j, p);
      }
    }
    store_signed8<V>(m_block, greatest<V>(m_most), run.out.states[0] + block, run.out.scales[0] + at);
    store_root8<V>(root_block, greatest<V>(root_most), run.out.states[1] + block, run.out.scales[1] + at);
  }
}

template <class V, class M>
void adam_states(const UpdateRun& run, size_t begin, size_t end) {
  if (run.state_dtype == Dtype::kUInt8) return adam_scale_blocks<V, M>(run, begin, end);
  if (run.state_dtype == Dtype::kFloat32) return adam_packs<V, M, Float32States<false>>(run, begin, end);
  if (run.scalars.seed) return adam_packs<V, M, Bf16States<true>>(run, begin, end);
  adam_packs<V, M, Bf16States<false>>(run, begin, end);
}

inline bool aligned(const char* p, size_t nbytes) { return reinterpret_cast<uintptr_t>(p) % nbytes == 0; }

// Whether a pack at this element, and so at those whole packs further, is aligned for stores past the caches.
inline bool streams_working(const UpdateRun& run, size_t i) {
  const size_t size = bytes_of(run.working_dtype);
  return aligned(run.out.working + i * size, kPack * size);
}
inline bool streams_all(const UpdateRun& run, size_t i) {
  return aligned(run.out.master + i * 4, kPack * 4) && aligned(run.out.states[0] + i * 4, kPack * 4) &&
         aligned(run.out.states[1] + i * 4, kPack * 4) &&
         (run.working_dtype == Dtype::kNone || streams_working(run, i));
}

template <class V>
void adam(const UpdateRun& run_in) {
  UpdateRun run = run_in;
  const bool blocks = run.state_dtype == Dtype::kUInt8;
  // Past the caches goes what nobody reads here: the working copy, and all of a plain update out of place, where the
  // outputs are aligned for the same element.
  const bool plain = run.master_dtype == Dtype::kFloat32 && run.state_dtype == Dtype::kFloat32;
  const bool apart = plain && run.out.master != run.in.master;
  const auto streams = apart ? streams_all : streams_working;
  size_t begin = 0;
  run.stream = run.stream && V::kLanes > 1 && !is_split(run.master_dtype) && (apart || run.working_dtype != Dtype::kNone);
  if (run.stream) {
    const size_t limit = blocks ? 1 : kPack;
    while (begin < limit && !streams(run, begin)) ++begin;
    if (begin == limit || begin > run.numel) run.stream = false, begin = 0;
  }
  const size_t step = blocks ? kScaleBlock : kPack;
  const size_t end = begin + (run.numel - begin) / step * step;
  if (begin > 0) update_blocks<V, Adam>(run, 0, begin);
  switch (run.master_dtype) {
    case Dtype::kInt16: adam_states<V, SplitMaster<Split, 2>>(run, begin, end); break;
    case Dtype::kInt8: adam_states<V, SplitMaster<Split24, 1>>(run, begin, end); break;
    case Dtype::kBFloat16: adam_states<V, Bf16Master>(run, begin, end); break;
    default:
      if (apart && run.stream)
        adam_packs<V, Float32Master<true>, Float32States<true>>(run, begin, end);
      else
        adam_states<V, Float32Master<false>>(run, begin, end);
  }
  if (end < run.numel) update_blocks<V, Adam>(run, end, run.numel);
  if (run.stream) V::fence();
}

// The bandwidth ceiling: every array's bytes, a few lines at a time, read and written as they are; what is only written
// becomes 0.

struct ByteStream {
  const char* in;  // null: written only
  char* out;       // null: read only
  size_t pack_bytes;
};

template <class V, bool kStream>
inline void move_bytes(const ByteStream& stream, size_t i, size_t nbytes, typename V::U& sink) {
  typedef typename V::F F;
  for (size_t k = 0; k < nbytes; k += sizeof(F)) {
    F x = V::set1(0);
    if (stream.in) memcpy(&x, stream.in + i + k, sizeof x);
    if (!stream.out)
      sink = sink ^ V::bits(x);
    else if (kStream)
      V::stream(x, offset<float>(stream.out + i + k, 0));
    else
      memcpy(stream.out + i + k, &x, sizeof x);
  }
}

template <class V>
void update_bytes(const UpdateRun& run) {
  constexpr size_t kGroup = 4 * kPack;
  ByteStream streams[kMostStates + 3];
  size_t count = 0;
  const auto add = [&](const char* in, char* out, Dtype dtype) {
    if (bytes_of(dtype) != 0) streams[count++] = {in, out, bytes_of(dtype)};
  };
  add(run.grad, nullptr, run.grad_dtype);
  add(run.in.master, run.out.master, run.master_dtype);
  for (size_t which = 0; which < run.states; ++which)
    add(run.in.states[which], run.out.states[which], run.state_dtype);
  const bool written = !is_split(run.master_dtype);
  add(written ? nullptr : run.in.working, run.out.working, run.working_dtype);
  const ByteStream& working = streams[count - 1];
  const bool streamed = run.stream && V::kLanes > 1 && written && run.working_dtype != Dtype::kNone &&
                        aligned(run.out.working, 64);

  const auto small = [&](size_t i, size_t numel) {
    if (run.in.ties) memmove(run.out.ties + i / 8, run.in.ties + i / 8, (numel + kPack - 1) / kPack * 2);
    if (run.state_dtype == Dtype::kUInt8 && i % kScaleBlock == 0)
      for (size_t which = 0; which < run.states; ++which)
        memmove(run.out.scales[which] + i / 64, run.in.scales[which] + i / 64, sizeof(float));
  };
  typename V::U sink{};
  size_t i = 0;
  for (; i + kGroup <= run.numel; i += kGroup) {
    for (size_t k = 0; k < count; ++k) {
      const ByteStream& one = streams[k];
      const size_t at = i * one.pack_bytes, nbytes = kGroup * one.pack_bytes;
      if (V::kPrefetch && run.prefetch_bytes && one.in)
        for (size_t line = 0; line < nbytes; line += 64) __builtin_prefetch(one.in + at + line + run.prefetch_bytes);
      if (streamed && &one == &working)
        move_bytes<V, true>(one, at, nbytes, sink);
      else
        move_bytes<V, false>(one, at, nbytes, sink);
    }
    small(i, kGroup);
  }
  if (i < run.numel) small(i, run.numel - i);
  for (size_t k = 0; k < count; ++k) {
    const ByteStream& one = streams[k];
    const size_t at = i * one.pack_bytes, nbytes = (run.numel - i) * one.pack_bytes;
    if (one.out && one.out != one.in) one.in ? memcpy(one.out + at, one.in + at, nbytes) : memset(one.out + at, 0, nbytes);
  }
  __asm__ volatile("" : : "r"(&sink) : "memory");  // what was read counts as used
  if (streamed) V::fence();
}

template <class V>
constexpr Kernels make_kernels(const char* isa) {
  return {isa,        {adam<V>, update<V, Lion>, update<V, Sgd>, update<V, Adagrad>, update<V, Sign>},
          update_bytes<V>, convert<V>, accumulate<V>, square_sum<V>};
}

}  // namespace
}  // namespace offload
