// What a core's registers multiply with no memory in the way: 16 independent sums, again and again. 32 operations an
// instruction of float32, 64 of bfloat16 pairs. The caller asks the processor what it has.
#include <cstdint>

#define FOR_SUMS(DO) \
  DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
#define CLOBBER "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
                "xmm12", "xmm13", "xmm14", "xmm15"
#define ZERO(i) "vpxord %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n"
#define FMA(i) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #i "\n"
#define PAIRS(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #i "\n"
#define LOOP(name, INSTRUCTION)                                                                           \
  extern "C" __attribute__((target("avx512f"))) void name(int64_t num_rounds) {                           \
    asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" FOR_SUMS(ZERO)    \
                 "1:\n" FOR_SUMS(INSTRUCTION) "dec %0\njnz 1b\nvzeroupper\n"                              \
                 : "+r"(num_rounds)::CLOBBER, "xmm30", "xmm31", "cc");                                    \
  }

LOOP(float32_rounds, FMA)
LOOP(bfloat16_rounds, PAIRS)
