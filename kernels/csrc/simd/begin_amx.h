// Everything after this include is compiled for AVX-512 with the tiles of AMX beside it; for vec_avx512.h as well.
// Include standard headers before it, as with begin_avx512.h. The tile instructions are inline assembly (amx/tiles.h),
// which GCC needs no option for.
#include "intrinsics.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define KERNELS_ISA_NS amx
