#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace kernels {
namespace {

std::atomic<int> chosen{-1};

Isa best_isa() {
  if (isa_supported(Isa::kAvx512)) return Isa::kAvx512;
  if (isa_supported(Isa::kAvx2)) return Isa::kAvx2;
  return Isa::kPortable;
}

Isa parse(const std::string& name, const std::string& field) {
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (name != isa_name(isa)) continue;
    if (!isa_supported(isa)) throw std::invalid_argument(field + ": this processor does not support " + name);
    return isa;
  }
  throw std::invalid_argument(field + ": expected avx512, avx2 or portable, got '" + name + "'");
}

}  // namespace

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && isa_supported(Isa::kAvx2);
    case Isa::kAvx2:
      // Every processor with AVX2 has F16C; GCC before 11 cannot ask for it by name.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
}

const char* isa_name(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "portable";
}

Isa current_isa() {
  int isa = chosen.load(std::memory_order_relaxed);
  if (isa < 0) {
    const char* forced = std::getenv("KERNELS_ISA");
    isa = int(forced && *forced ? parse(forced, "KERNELS_ISA") : best_isa());
    chosen.store(isa, std::memory_order_relaxed);
  }
  return Isa(isa);
}

void set_isa(const std::string& name) { chosen.store(int(name.empty() ? best_isa() : parse(name, "isa"))); }

}  // namespace kernels
