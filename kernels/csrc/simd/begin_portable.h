// The baseline: what every x86-64 runs (SSE2), through the compiler's generic vectors.
#define KERNELS_ISA_NS portable
