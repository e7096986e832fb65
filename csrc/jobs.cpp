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

void* at(const Array& array, size_t i) {
  return array.data ? static_cast<char*>(array.data) + i * itemsize(array.dtype) : nullptr;
}

// Elements ahead that are fetched: enough to cover memory latency. On a Zen 4 more loses up to a tenth.
constexpr size_t kPrefetchNumel = 128;

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
    case Dtype::kFloat16: return 2;
    case Dtype::kNone: return 0;
  }
  return 0;
}

AdamScalars adam_scalars(const UpdateSegment& s, double grad_scale) {
  const double correction1 = 1 - pow(s.beta1, double(s.step)), correction2 = 1 - pow(s.beta2, double(s.step));
  AdamScalars out;
  out.grad_scale = float(s.maximize ? -grad_scale : grad_scale);
  out.decay = s.decoupled ? float(1 - s.lr * s.weight_decay) : 1.0f;
  out.l2 = s.decoupled ? 0.0f : float(s.weight_decay);
  out.lerp_from_grad = s.beta1 <= 0.5;
  out.lerp = float(out.lerp_from_grad ? s.beta1 : 1 - s.beta1);
  out.beta2 = float(s.beta2);
  out.one_minus_beta2 = float(1 - s.beta2);
  out.correction2_sqrt = float(sqrt(correction2));
  out.eps = float(s.eps);
  out.negative_step_size = float(-(s.lr / correction1));
  return out;
}

size_t adam_bytes(const AdamArrays& arrays, const std::vector<UpdateSegment>& segments, bool out_of_place) {
  size_t numel = 0;
  for (const UpdateSegment& segment : segments) numel += segment.numel;
  const size_t state = 12 + itemsize(arrays.working.dtype);
  const size_t copied = out_of_place ? arrays.master.numel - numel : 0;
  return numel * (12 + itemsize(arrays.grad.dtype) + state) + copied * 2 * state;
}

void run_adam(void (*update)(const AdamRun&), Pool* pool, const AdamArrays& arrays,
              const std::vector<UpdateSegment>& segments, double grad_scale, std::optional<bool> prefetch,
              const std::optional<UpdateOut>& out_of_place) {
  const UpdateOut out =
      out_of_place.value_or(UpdateOut{arrays.master, arrays.exp_avg, arrays.exp_avg_sq, arrays.working});
  // Segments are laid end to end and cut there, so that many small ones cost no more than one large one.
  std::vector<size_t> ends;
  std::vector<AdamScalars> scalars;
  size_t total = 0;
  for (const UpdateSegment& segment : segments) {
    ends.push_back(total += segment.numel);
    scalars.push_back(adam_scalars(segment, grad_scale));
  }
  const bool from_memory = adam_bytes(arrays, segments) > cached_bytes();
  run_chunks(pool, chunks_of(total, kChunkNumel), [&](size_t chunk) {
    size_t begin = chunk * kChunkNumel;
    const size_t end = std::min(total, begin + kChunkNumel);
    for (size_t k = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin(); begin < end; ++k) {
      const size_t stop = std::min(end, ends[k]);
      const size_t i = segments[k].offset_numel + begin - (ends[k] - segments[k].numel);
      update({static_cast<float*>(at(arrays.master, i)), static_cast<float*>(at(arrays.exp_avg, i)),
              static_cast<float*>(at(arrays.exp_avg_sq, i)), at(arrays.grad, i), arrays.grad.dtype,
              static_cast<float*>(at(out.master, i)), static_cast<float*>(at(out.exp_avg, i)),
              static_cast<float*>(at(out.exp_avg_sq, i)), at(out.working, i), arrays.working.dtype, stop - begin,
              scalars[k], from_memory, prefetch.value_or(from_memory) ? kPrefetchNumel : 0});
      begin = stop;
    }
  });
  if (!out_of_place) return;
  size_t begin = 0;
  const auto copy_until = [&](size_t end) {
    const std::pair<const Array&, const Array&> pairs[] = {{out.master, arrays.master},
                                                           {out.exp_avg, arrays.exp_avg},
                                                           {out.exp_avg_sq, arrays.exp_avg_sq},
                                                           {out.working, arrays.working}};
    for (const auto& [to, from] : pairs)
      if (from.data && begin < end)
        copy_chunks(pool, static_cast<char*>(at(to, begin)), static_cast<const char*>(at(from, begin)),
                    (end - begin) * itemsize(from.dtype));
  };
  for (const UpdateSegment& segment : segments) {
    copy_until(segment.offset_numel);
    begin = segment.offset_numel + segment.numel;
  }
  copy_until(arrays.master.numel);
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
    kernels.accumulate(static_cast<float*>(at(acc, i)), at(src, i), src.dtype, std::min(kChunkNumel, src.numel - i));
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
