// Everything after this include is compiled for AVX-512 (F, BW, VL, DQ), whatever the command line says.
// Include standard headers before it: their inline functions must stay runnable on every x86-64.
#include "intrinsics.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define KERNELS_ISA_NS avx512
