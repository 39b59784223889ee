// Register tiles of 4 outputs x up to 6 rows; one translation unit per instruction set includes this.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kOutputs = 4;
constexpr int kRows = kWidth == 16 ? 6 : 2;  // 24 accumulators of 32 registers with AVX-512, 8 of 16 else
constexpr int kPair = 2 * kWidth;

int64_t linear_padded_depth(int64_t depth) { return (depth + kPair - 1) / kPair * kPair; }

template <class T>
inline void prepare_row(const T* x, int64_t depth, float* out) {
  const int64_t whole = depth / kPair * kPair;
  for (int64_t k = 0; k < whole; k += kPair)
    for (int i = 0; i < kWidth; ++i) {
      out[k + i] = to_float(x[k + 2 * i]);
      out[k + kWidth + i] = to_float(x[k + 2 * i + 1]);
    }
  for (int64_t k = whole; k < linear_padded_depth(depth); ++k) out[k] = k < depth ? to_float(x[k]) : 0.0f;
}

// Rows in the order in which load_pair splits bf16 weights; what does not fill a pair stays in natural order.
void linear_prepare(const LinearRequest& r, float* x) {
  const int64_t width = linear_padded_depth(r.depth);
  for (int64_t row = 0; row < r.num_rows; ++row) {
    if (r.x_dtype == DType::kFp32)
      prepare_row(static_cast<const float*>(r.x) + row * r.x_stride, r.depth, x + row * width);
    else
      prepare_row(static_cast<const bf16*>(r.x) + row * r.x_stride, r.depth, x + row * width);
  }
}

// sums[row][output] for M rows of x and 4 rows of w, `w_stride` apart; the rows of w behind them are prefetched.
template <int M>
KERNELS_INLINE void tile(const float* x, int64_t x_stride, const bf16* w, int64_t w_stride, int64_t depth, bool more,
                         float (*sums)[kOutputs]) {
  Vec acc[M][kOutputs];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < kOutputs; ++n) acc[m][n] = zero();
  int64_t k = 0;
  for (; k + kPair <= depth; k += kPair) {
    Vec even[kOutputs], odd[kOutputs];
    for (int n = 0; n < kOutputs; ++n) {
      load_pair(w + n * w_stride + k, even[n], odd[n]);
      if (more) __builtin_prefetch(w + (kOutputs + n) * w_stride + k);
    }
    for (int m = 0; m < M; ++m) {
      const Vec a = load(x + m * x_stride + k);
      for (int n = 0; n < kOutputs; ++n) acc[m][n] = fmadd(a, even[n], acc[m][n]);
    }
    for (int m = 0; m < M; ++m) {
      const Vec b = load(x + m * x_stride + k + kWidth);
      for (int n = 0; n < kOutputs; ++n) acc[m][n] = fmadd(b, odd[n], acc[m][n]);
    }
  }
  for (; k < depth; k += kWidth) {
    const int count = int(depth - k < kWidth ? depth - k : kWidth);
    for (int n = 0; n < kOutputs; ++n) {
      const Vec weight = load_partial(w + n * w_stride + k, count);
      for (int m = 0; m < M; ++m) acc[m][n] = fmadd(load_partial(x + m * x_stride + k, count), weight, acc[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) reduce_add4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

inline void put(const LinearRequest& r, int64_t row, int64_t output, const float* sums, int count) {
  if (r.y_dtype == DType::kFp32) {
    float* y = static_cast<float*>(r.y) + row * r.y_stride + output;
    for (int n = 0; n < count; ++n) y[n] = sums[n];
  } else {
    bf16* y = static_cast<bf16*>(r.y) + row * r.y_stride + output;
    for (int n = 0; n < count; ++n) y[n] = from_float<bf16>(sums[n]);
  }
}

template <int M>
inline void outputs_of_rows(const LinearRequest& r, const float* x, int64_t row, int64_t first, int64_t last) {
  const int64_t width = linear_padded_depth(r.depth);
  float sums[M][kOutputs];
  int64_t n = first;
  for (; n + kOutputs <= last; n += kOutputs) {
    const bool more = row == 0 && n + 2 * kOutputs <= r.num_outputs;
    tile<M>(x + row * width, width, r.w + n * r.w_stride, r.w_stride, r.depth, more, sums);
    for (int m = 0; m < M; ++m) put(r, row + m, n, sums[m], kOutputs);
  }
  for (; n < last; ++n) {  // fewer than 4 outputs are left: the same row of w four times
    tile<M>(x + row * width, width, r.w + n * r.w_stride, 0, r.depth, false, sums);
    for (int m = 0; m < M; ++m) put(r, row + m, n, sums[m], 1);
  }
}

void linear_block(const LinearRequest& r, const float* x, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + kRows <= r.num_rows; row += kRows) outputs_of_rows<kRows>(r, x, row, first, last);
  switch (r.num_rows - row) {
    case 1: return outputs_of_rows<1>(r, x, row, first, last);
    case 2: return outputs_of_rows<2>(r, x, row, first, last);
    case 3: return outputs_of_rows<3>(r, x, row, first, last);
    case 4: return outputs_of_rows<4>(r, x, row, first, last);
    case 5: return outputs_of_rows<5>(r, x, row, first, last);
  }
}

}  // namespace kernels::KERNELS_ISA_NS
