// The gated feed-forward network of one expert, y = weight * (down . (act(gate . x) * up . x)), with bfloat16 weights
// read once and in place, and float32 sums.
#pragma once

#include <cstdint>

#include "../core/types.h"
#include "../linear/linear.h"

namespace kernels {

class ThreadPool;

// The numbers are those of kernels/ffn.py.
enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

struct FfnRequest {
  const void* x;           // [num_tokens, hidden]
  const bf16 *gate, *up;   // [expert_dim, hidden]
  const bf16* down;        // [hidden, expert_dim]
  void* out;               // [num_tokens, hidden]
  const float *gate_bias, *up_bias, *down_bias;  // [expert_dim], [expert_dim], [hidden]; each may be null
  const float* row_weights;                      // [num_tokens], or null: 1
  DType x_dtype, out_dtype;                      // kBf16 or kFp32
  int64_t num_tokens, hidden, expert_dim;
  int64_t x_stride, gate_stride, up_stride, down_stride, out_stride;  // in elements
  Activation activation;
  float alpha, limit;  // of kClampedSwiglu
  bool accumulate;     // add to `out` instead of overwriting it
};

void expert_ffn(const FfnRequest& request, ThreadPool* pool);

// x and h are packed as the linear layer's x is, h as float32 sums. `gate_up` computes a range of h's columns from x,
// from two weight rows each, `down` one of the output's from h; both fetch the first weights of the `next` range. A
// range is at most as long as block_rows says for these weights, and starts at a multiple of that.
struct FfnKernel {
  int64_t (*packed_floats)(DType dtype, int64_t num_tokens, int64_t depth);
  int64_t (*block_rows)(int64_t num_tokens, int64_t num_weight_rows, int num_threads);
  void (*pack)(const FfnRequest&, float* x);
  void (*gate_up)(const FfnRequest&, const float* x, Range range, Range next, float* h);
  void (*down)(const FfnRequest&, const float* h, Range range, Range next);
};
namespace amx {
FfnKernel ffn_kernel();
}
namespace avx512 {
FfnKernel ffn_kernel();
}
namespace avx2 {
FfnKernel ffn_kernel();
}
namespace portable {
FfnKernel ffn_kernel();
}

}  // namespace kernels
