#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace offload {
namespace {

#if defined(__x86_64__)
struct Cpu {
  bool avx2 = false, avx512 = false;

  Cpu() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool f16c = c & (1u << 29), xsave = c & (1u << 27);
    if (!f16c || !xsave) return;
    // The operating system must save the wide registers, too.
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool ymm = (low & 0x06) == 0x06, zmm = (low & 0xE6) == 0xE6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm && (b & (1u << 5));
    avx512 = avx2 && zmm && (b & (1u << 16));
  }
};
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  static const Cpu cpu;
  if (cpu.avx512) found.push_back(&kAvx512Kernels);
  if (cpu.avx2) found.push_back(&kAvx2Kernels);
#elif defined(__aarch64__)
  found.push_back(&kNeonKernels);
#endif
  found.push_back(&kScalarKernels);
  return found;
}

const Kernels* find_kernels(const std::string& isa) {
  for (const Kernels* kernels : available_kernels())
    if (isa == kernels->isa) return kernels;
  return nullptr;
}

}  // namespace offload
