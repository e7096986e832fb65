#include "pages.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#endif

namespace offload {

#if defined(__linux__)
namespace {

// Page tables of ranges that lie alike within such a block are moved by whole entries: ten times as fast.
constexpr size_t kBlockBytes = 2 << 20;

bool remap(char* from, char* to, size_t nbytes, bool keep_from_mapped) {
  const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keep_from_mapped ? MREMAP_DONTUNMAP : 0);
  return mremap(from, nbytes, nbytes, flags, to) != MAP_FAILED;
}

// Replaces whatever is mapped there, if anything, by empty memory.
void map_anew(char* at, size_t nbytes) {
  if (mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    throw std::runtime_error(std::string("the kernel took the pages of a slab and gives no new ones: ") +
                             strerror(errno));
}

// Kernels before 5.7 know no MREMAP_DONTUNMAP.
bool supported() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* const pair = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pair == MAP_FAILED) return false;
  char* const first = static_cast<char*>(pair);
  *first = 1;
  const bool moved = remap(first, first + page, page, true) && first[page] == 1 && *first == 0;
  munmap(pair, 2 * page);
  return moved;
}

}  // namespace

Remap remap_pages = remap;

size_t move_pages(char* dst, char* src, size_t nbytes) {
  static const bool can = supported();
  static const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const uintptr_t to = reinterpret_cast<uintptr_t>(dst), from = reinterpret_cast<uintptr_t>(src);
  const size_t size = nbytes / page * page;
  if (!can || nbytes < kLeastMovedBytes || to % page != 0 || from % page != 0) return 0;
  if (to < from + nbytes && from < to + nbytes) return 0;

  // Addresses to park dst's pages at, placed within their block as dst is.
  const size_t reserved = size + kBlockBytes;
  void* const base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return 0;
  char* const begin = static_cast<char*>(base);
  const size_t head = (to - reinterpret_cast<uintptr_t>(base)) % kBlockBytes;
  char* const park = begin + head;
  const auto release = [&] {
    if (head != 0) munmap(begin, head);
    munmap(park + size, reserved - head - size);
  };

  if (!remap_pages(dst, park, size, true)) {
    // Whether `park` is still ours is unknown, so it is not unmapped: at worst addresses are lost, never memory.
    release();
    return 0;
  }
  if (!remap_pages(src, dst, size, true)) {
    // A refusal may come after dst was unmapped. Its own pages go back, or empty ones: the caller overwrites it.
    if (!remap_pages(park, dst, size, false)) {
      munmap(park, size);
      map_anew(dst, size);
    }
    release();
    return 0;
  }
  if (!remap_pages(park, src, size, false)) {  // dst is right already
    munmap(park, size);
    map_anew(src, size);
  }
  release();
  return size;
}

#else

Remap remap_pages = nullptr;
size_t move_pages(char*, char*, size_t) { return 0; }

#endif

}  // namespace offload
