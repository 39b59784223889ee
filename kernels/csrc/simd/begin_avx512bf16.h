// Everything after this include is compiled for AVX-512 with products of bfloat16; for vec_avx512.h as well.
// Include standard headers before it, as with begin_avx512.h.
#include "intrinsics.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif
#define KERNELS_ISA_NS avx512bf16
