// Run-time choice of the instruction set.
#pragma once

#include <string>

namespace kernels {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The path in use: the environment's KERNELS_ISA on first use, else the fastest that this processor has.
// Throws std::invalid_argument when KERNELS_ISA names an unknown or an unsupported path.
Isa current_isa();

// Returns the path for code that does not multiply bfloat16: kAvx512 instead of kAmx and kAvx512Bf16.
Isa current_vector_isa();

// Force a path by its name or go back to the process's own ("", decided again at the next use); same errors.
void set_isa(const std::string& name);

// In the order in which they are tried.
inline constexpr Isa kIsas[] = {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

bool isa_supported(Isa isa);
const char* isa_name(Isa isa);

// Whether the core is taken for one of Zen 5's kind: of AMD's, with a first-level data cache of 48 KiB (Zen 4: 32).
bool has_large_first_cache();

}  // namespace kernels
