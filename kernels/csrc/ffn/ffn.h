// The gated feed-forward network of one expert, y = weight * (down . (act(gate . x) * up . x)), with bfloat16 or float16
// weights read once and in place, and float32 sums.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/types.h"

namespace kernels {

class ThreadPool;

// The numbers are those of kernels/ffn.py.
enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

struct FfnRequest {
  const void* x;           // [num_tokens, hidden]
  const void *gate, *up;   // [expert_dim, hidden]
  const void* down;        // [hidden, expert_dim]
  void* out;               // [num_tokens, hidden]
  const float *gate_bias, *up_bias, *down_bias;  // [expert_dim], [expert_dim], [hidden]; each may be null
  const float* row_weights;                      // [num_tokens], or null: 1
  DType x_dtype, w_dtype, out_dtype;             // of weights kBf16 or kFp16; of x and out the same or kFp32
  int64_t num_tokens, hidden, expert_dim;
  int64_t x_stride, gate_stride, up_stride, down_stride, out_stride;  // in elements
  Activation activation;
  float alpha, limit;  // of kClampedSwiglu
  bool accumulate;     // add to `out` instead of overwriting it
};

// One parallel region for all of them where their intermediate results fit into a few MB: threads go on to the next
// expert while others finish one. An expert's outputs are the same, bit for bit, whichever experts come with it.
void expert_ffns(const std::vector<FfnRequest>& requests, ThreadPool* pool);

}  // namespace kernels
