// Runs everywhere; the yardstick that the other instruction sets must equal bit for bit.
#include "update-inl.h"

namespace offload {
extern const Kernels kScalarKernels = make_kernels<One>("scalar");
}
