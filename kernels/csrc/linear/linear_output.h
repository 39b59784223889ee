// Where the linear layer's sums go.
#pragma once

#include "linear.h"

namespace kernels::KERNELS_ISA_NS {
namespace {

// Outputs [first, last) of a row of x.
void put(const LinearRequest& r, int64_t row, int64_t first, int64_t last, const float* sums) {
  if (r.y_dtype == DType::kFp32) {
    float* const y = static_cast<float*>(r.y) + row * r.y_stride + first;
    for (int64_t n = 0; n < last - first; ++n) y[n] = sums[n];
  } else {
    bf16* const y = static_cast<bf16*>(r.y) + row * r.y_stride + first;
    for (int64_t n = 0; n < last - first; ++n) y[n] = from_float<bf16>(sums[n]);
  }
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
