#include "jobs.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "pages.h"

namespace offload {
namespace {

// A chunk's arrays stay within a second-level cache, and last long enough (10 us) to make handing out free.
constexpr size_t kChunkNumel = 16384;
constexpr size_t kChunkBytes = 256 * 1024;

size_t chunks_of(size_t n, size_t chunk) { return (n + chunk - 1) / chunk; }

char* at(const Array& array, size_t i) {
  return array.data ? static_cast<char*>(array.data) + i * itemsize(array.dtype) : nullptr;
}

// Bytes ahead that are fetched: enough to cover memory latency. On a Zen 4 more loses up to a tenth.
constexpr size_t kPrefetchBytes = 512;

// Larger jobs come from memory. Prefetching and stores past the caches gain there and lose in a core's own cache.
size_t cached_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2 > 0) return size_t(l2) * 2;
#endif
  return 2 << 20;
}

void copy_chunks(Pool* pool, char* dst, const char* src, size_t nbytes) {
  run_chunks(pool, chunks_of(nbytes, kChunkBytes), [&](size_t chunk) {
    const size_t i = chunk * kChunkBytes;
    memcpy(dst + i, src + i, std::min(kChunkBytes, nbytes - i));
  });
}

}  // namespace

size_t itemsize(Dtype dtype) {
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

UpdateScalars update_scalars(Rule rule, const UpdateSegment& s, double grad_scale) {
  UpdateScalars out = {};
  const bool adam = rule == Rule::kAdam;
  const bool decays = adam ? s.decoupled : rule == Rule::kLion || rule == Rule::kSign;
  out.grad_scale = float(s.maximize ? -grad_scale : grad_scale);
  out.decay = decays ? float(1 - s.lr * s.weight_decay) : 1.0f;
  out.l2 = decays ? 0.0f : float(s.weight_decay);
  out.lerp_from_grad = s.beta1 <= 0.5;
  out.lerp = float(out.lerp_from_grad ? s.beta1 : 1 - s.beta1);
  out.lerp2_from_grad = s.beta2 <= 0.5;
  out.lerp2 = float(out.lerp2_from_grad ? s.beta2 : 1 - s.beta2);
  out.momentum = float(s.beta1);
  out.one_minus_dampening = float(1 - s.dampening);
  out.beta2 = float(s.beta2);
  out.one_minus_beta2 = float(1 - s.beta2);
  out.correction2 = float(1 / sqrt(1 - pow(s.beta2, double(s.step))));
  out.eps = float(s.eps);
  out.negative_step_size = float(adam ? -(s.lr / (1 - pow(s.beta1, double(s.step)))) : -s.lr);
  out.seed = s.seed;
  out.has_momentum = s.beta1 != 0;
  out.first_step = s.step == 1;
  out.nesterov = s.nesterov;
  return out;
}

size_t master_numel(Dtype dtype, size_t numel) {
  return dtype == Dtype::kInt16 ? numel + chunks_of(numel, 16) : numel;
}

size_t state_numel(Dtype dtype, size_t numel) {
  return dtype == Dtype::kUInt8 ? numel + sizeof(float) * chunks_of(numel, kScaleBlock) : numel;
}

namespace {

// The working copy is read as well where it holds a part of the master.
bool reads_working(const UpdateState& state) {
  return state.master.dtype == Dtype::kInt16 || state.master.dtype == Dtype::kInt8;
}

// Bytes of the arrays that hold `numel` elements: all of them, or those that are read before they are written.
size_t state_bytes(const UpdateState& state, size_t numel, bool all) {
  size_t nbytes = master_numel(state.master.dtype, numel) * itemsize(state.master.dtype);
  for (size_t k = 0; k < state.count; ++k)
    nbytes += state_numel(state.states[k].dtype, numel) * itemsize(state.states[k].dtype);
  return nbytes + (all || reads_working(state) ? numel * itemsize(state.working.dtype) : 0);
}

// Where element i is in each array. The arrays are for `numel` elements.
UpdateArrays arrays_at(const UpdateState& state, size_t numel, size_t i) {
  UpdateArrays found = {};
  found.master = at(state.master, i);
  found.working = at(state.working, i);
  if (state.master.dtype == Dtype::kInt16) found.ties = at(state.master, numel) + i / 8;
  for (size_t k = 0; k < state.count; ++k) {
    found.states[k] = at(state.states[k], i);
    if (state.states[k].dtype == Dtype::kUInt8)
      found.scales[k] = at(state.states[k], numel) + i / kScaleBlock * sizeof(float);
  }
  return found;
}

// Copies elements that no segment has, from the end of one to the start of the next. The segment before has written
// the word of the bitmap and the 8-bit block that it ends in.
void copy_between(Pool* pool, const UpdateState& to, const UpdateState& from, size_t numel, size_t begin, size_t end) {
  if (begin >= end) return;
  const auto copy = [&](const Array& dst, const Array& src, size_t first, size_t last) {
    if (src.data && first < last) copy_chunks(pool, at(dst, first), at(src, first), (last - first) * itemsize(src.dtype));
  };
  copy(to.master, from.master, begin, end);
  copy(to.working, from.working, begin, end);
  if (from.master.dtype == Dtype::kInt16)
    copy(to.master, from.master, numel + chunks_of(begin, 16), numel + chunks_of(end, 16));
  for (size_t k = 0; k < from.count; ++k) {
    if (from.states[k].dtype == Dtype::kUInt8) {
      const size_t block = chunks_of(begin, kScaleBlock), last = chunks_of(end, kScaleBlock);
      copy(to.states[k], from.states[k], block * kScaleBlock, end);
      copy(to.states[k], from.states[k], numel + block * sizeof(float), numel + last * sizeof(float));
    } else {
      copy(to.states[k], from.states[k], begin, end);
    }
  }
}

}  // namespace

size_t update_bytes(const UpdateJob& job) {
  size_t numel = 0;
  for (const UpdateSegment& segment : job.segments) numel += segment.numel;
  const size_t copied = job.out ? job.grad.numel - numel : 0;
  return numel * itemsize(job.grad.dtype) + state_bytes(job.state, numel, false) + state_bytes(job.state, numel, true) +
         2 * state_bytes(job.state, copied, true);
}

void run_update(Pool* pool, const UpdateJob& job) {
  const UpdateState &in = job.state, &out = job.out ? *job.out : in;
  const size_t numel = job.grad.numel;
  const bool blocks = in.count > 0 && in.states[0].dtype == Dtype::kUInt8;
  // Segments are laid end to end and cut there, so that many small ones cost no more than one large one. Each begins
  // at a whole block: no cut goes through one.
  std::vector<size_t> ends;
  std::vector<UpdateScalars> scalars;
  size_t total = 0;
  for (const UpdateSegment& segment : job.segments) {
    ends.push_back(total += chunks_of(segment.numel, kScaleBlock) * kScaleBlock);
    scalars.push_back(update_scalars(job.rule, segment, job.grad_scale));
  }
  const bool from_memory = update_bytes(job) > cached_bytes();
  run_chunks(pool, chunks_of(total, kChunkNumel), [&](size_t chunk) {
    size_t begin = chunk * kChunkNumel;
    const size_t end = std::min(total, begin + kChunkNumel);
    for (size_t k = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin(); begin < end; ++k) {
      const UpdateSegment& segment = job.segments[k];
      const size_t first = begin - (ends[k] - chunks_of(segment.numel, kScaleBlock) * kScaleBlock);
      const size_t i = segment.offset_numel + first, n = std::min(end - begin, segment.numel - first);
      const UpdateRun run = {arrays_at(in, numel, i),
                             arrays_at(out, numel, i),
                             at(job.grad, i),
                             in.master.dtype,
                             in.working.dtype,
                             in.count ? in.states[0].dtype : Dtype::kNone,
                             job.grad.dtype,
                             in.count,
                             n,
                             first,
                             scalars[k],
                             job.stream.value_or(from_memory),
                             job.prefetch.value_or(from_memory) ? kPrefetchBytes : 0};
      job.update(run);
      // The rest of the segment's last block is nobody's.
      if (blocks && n % kScaleBlock != 0)
        for (size_t which = 0; which < in.count; ++which)
          memset(at(out.states[which], i + n), 0, std::min(numel - (i + n), kScaleBlock - n % kScaleBlock));
      begin = std::min(end, ends[k]);
    }
  });
  if (!job.out) return;
  size_t begin = 0;
  for (const UpdateSegment& segment : job.segments) {
    copy_between(pool, out, in, numel, begin, segment.offset_numel);
    begin = segment.offset_numel + segment.numel;
  }
  copy_between(pool, out, in, numel, begin, numel);
}

void run_copy(Pool* pool, Throttle& throttle, const std::vector<CopySpan>& spans) {
  for (const CopySpan& span : spans) {
    const size_t part = throttle.active() ? throttle.chunk_bytes() : span.nbytes;
    for (size_t done = 0; done < span.nbytes; done += part) {
      const size_t nbytes = std::min(part, span.nbytes - done);
      copy_chunks(pool, span.dst + done, span.src + done, nbytes);
      if (throttle.active()) throttle.pay(nbytes);
    }
  }
}

size_t run_move(Pool* pool, Throttle& throttle, const std::vector<CopySpan>& spans, bool pages) {
  std::vector<CopySpan> rest;
  size_t copied = 0;
  for (CopySpan span : spans) {
    const size_t moved = pages ? move_pages(span.dst, const_cast<char*>(span.src), span.nbytes) : 0;
    rest.push_back({span.dst + moved, span.src + moved, span.nbytes - moved});
    copied += span.nbytes - moved;
  }
  run_copy(pool, throttle, rest);
  return copied;
}

void run_convert(const Kernels& kernels, Pool* pool, Array dst, Array src) {
  run_chunks(pool, chunks_of(src.numel, kChunkNumel), [&](size_t chunk) {
    const size_t i = chunk * kChunkNumel;
    kernels.convert(at(dst, i), dst.dtype, at(src, i), src.dtype, std::min(kChunkNumel, src.numel - i));
  });
}

void run_accumulate(const Kernels& kernels, Pool* pool, Array acc, Array src) {
  run_chunks(pool, chunks_of(src.numel, kChunkNumel), [&](size_t chunk) {
    const size_t i = chunk * kChunkNumel;
    kernels.accumulate(static_cast<float*>(acc.data) + i, at(src, i), src.dtype, std::min(kChunkNumel, src.numel - i));
  });
}

void run_square_sums(const Kernels& kernels, Pool* pool, Array src, const std::vector<Span>& spans, double* out) {
  std::vector<size_t> ends;  // in blocks
  size_t total = 0;
  for (const Span& span : spans) ends.push_back(total += chunks_of(span.numel, kNormBlock));
  run_chunks(pool, total, [&](size_t block) {
    const size_t k = std::upper_bound(ends.begin(), ends.end(), block) - ends.begin();
    const size_t i = (block - (ends[k] - chunks_of(spans[k].numel, kNormBlock))) * kNormBlock;
    out[block] =
        kernels.square_sum(at(src, spans[k].offset_numel + i), src.dtype, std::min(kNormBlock, spans[k].numel - i));
  });
}

}  // namespace offload
