// Run-time choice of the instruction set.
#pragma once

#include <string>

namespace kernels {

enum class Isa { kPortable, kAvx2, kAvx512 };

// The path in use: the environment's KERNELS_ISA on first use, else the best this processor has.
// Throws std::invalid_argument when KERNELS_ISA names an unknown or an unsupported path.
Isa current_isa();

// Force a path ("avx512", "avx2", "portable") or go back to the best one (""); same errors.
void set_isa(const std::string& name);

bool isa_supported(Isa isa);
const char* isa_name(Isa isa);

}  // namespace kernels
