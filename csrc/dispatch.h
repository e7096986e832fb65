// Which of the built kernels this CPU and operating system can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace offload {

// Best first; the scalar kernels are always last.
std::vector<const Kernels*> available_kernels();

// The kernels of that name, or nullptr when this build or this CPU lacks them.
const Kernels* find_kernels(const std::string& isa);

}  // namespace offload
