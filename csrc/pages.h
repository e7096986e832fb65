// Moving values by exchanging the physical pages behind two address ranges, instead of copying the bytes.
#pragma once

#include <stddef.h>

namespace offload {

// Below this a copy is as fast.
constexpr size_t kLeastMovedBytes = 256 * 1024;

// Exchanges the whole pages of [dst, +nbytes) and [src, +nbytes) and returns their bytes: the caller copies what is
// left of the last page. Returns 0, with src as it was, when the ranges are small, overlap or do not start on a page,
// or when the kernel refuses. Every address stays mapped, so pointers into either range stay good; nobody may read or
// write there meanwhile. Throws when the kernel neither moves pages nor gives an address back.
//
// Only for private memory that no device has registered: a device goes on reading the physical pages it was told of.
size_t move_pages(char* dst, char* src, size_t nbytes);

// mremap to a fixed place, for tests to make it fail: returns whether it worked.
using Remap = bool (*)(char* from, char* to, size_t nbytes, bool keep_from_mapped);
extern Remap remap_pages;

}  // namespace offload
