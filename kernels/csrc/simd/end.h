// Ends the region opened by begin_amx.h, begin_avx512bf16.h, begin_avx512.h or begin_avx2.h.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
