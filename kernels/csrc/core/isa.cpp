#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace kernels {
namespace {

std::atomic<int> chosen{-1};

// The processor has bfloat16 tiles, and the kernel lets this process (all its threads) use them.
#ifdef KERNELS_EMULATED_TILES
bool tiles_granted() { return true; }
#else
bool tiles_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of Linux 5.16's asm/prctl.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// By its number: GCC before 11 does not know it by name.
bool has_bf16_products() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvx512Bf16);
}

// On AMD's cores bfloat16's products are twice as fast as float32's, on the Intel's that was measured half as fast
// (docs/kernels.md).
bool gains(Isa isa) { return isa != Isa::kAvx512Bf16 || __builtin_cpu_is("amd"); }

Isa best_isa() {
  for (Isa isa : kIsas)
    if (isa_supported(isa) && gains(isa)) return isa;
  return Isa::kPortable;
}

Isa parse(const std::string& name, const std::string& field) {
  for (Isa isa : kIsas) {
    if (name != isa_name(isa)) continue;
    if (!isa_supported(isa)) throw std::invalid_argument(field + ": this processor does not support " + name);
    return isa;
  }
  throw std::invalid_argument(field + ": expected amx, avx512bf16, avx512, avx2 or portable, got '" + name + "'");
}

}  // namespace

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::kAmx: {
      static const bool granted = isa_supported(Isa::kAvx512) && tiles_granted();
      return granted;
    }
    case Isa::kAvx512Bf16:
      return isa_supported(Isa::kAvx512) && has_bf16_products();
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
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kAvx512Bf16: return "avx512bf16";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "portable";
  }
}

bool has_large_first_cache() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const bool is_large = __builtin_cpu_is("amd") && sysconf(_SC_LEVEL1_DCACHE_SIZE) >= (48 << 10);
  return is_large;
#else
  return false;
#endif
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

Isa current_vector_isa() {
  const Isa isa = current_isa();
  return isa == Isa::kAmx || isa == Isa::kAvx512Bf16 ? Isa::kAvx512 : isa;
}

void set_isa(const std::string& name) { chosen.store(name.empty() ? -1 : int(parse(name, "isa"))); }

}  // namespace kernels
