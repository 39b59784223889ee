// The places that sums are written to.
#pragma once

namespace kernels::KERNELS_ISA_NS {
namespace {

template <class Y>
void put_as(const LinearRequest& r, int64_t row, Range range, const float* sums) {
  const float weight = r.row_weights ? r.row_weights[row] : 1.0f;
  Y* const y = static_cast<Y*>(r.y) + row * r.y_stride;
  for (int64_t n = range.first; n < range.last; ++n) {
    const float value = weight * (r.bias ? sums[n - range.first] + r.bias[n] : sums[n - range.first]);
    y[n] = from_float<Y>(r.accumulate ? to_float(y[n]) + value : value);
  }
}

// The outputs of `range` for a row of x.
void put(const LinearRequest& r, int64_t row, Range range, const float* sums) {
  switch (r.y_dtype) {
    case DType::kBf16: return put_as<bf16>(r, row, range, sums);
    case DType::kFp16: return put_as<fp16>(r, row, range, sums);
    default: return put_as<float>(r, row, range, sums);
  }
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
