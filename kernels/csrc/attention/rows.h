// Rows of head_dim elements: their loop bounds, and the way out (merged results).
#pragma once

#include "decode.h"

namespace kernels::KERNELS_ISA_NS {

inline float* scratch(size_t num_floats) {
  thread_local Scratch buffer;
  return buffer.floats(num_floats);
}

// A row of D elements, known to the compiler, or of any number of elements with D = 0.
template <int D>
class Row {
 public:
  explicit Row(int size) : size_(D ? D : size) {}

  KERNELS_INLINE int size() const { return D ? D : size_; }
  KERNELS_INLINE int padded() const { return padded_width(size()); }
  KERNELS_INLINE int paired() const { return size() / (2 * kWidth) * (2 * kWidth); }  // elements in whole pairs

  // One vector from position `d` on in natural order; zeros beyond the row's end.
  template <class T>
  KERNELS_INLINE Vec load(const T* row, int d) const {
    if (D % kWidth == 0 && D > 0) return KERNELS_ISA_NS::load(row + d);
    return d + kWidth <= size() ? KERNELS_ISA_NS::load(row + d) : load_partial(row + d, size() - d);
  }

 private:
  const int size_;
};

template <class Out>
void store_row(const float* row, int size, bool bf16_round, Out* out) {
  for (int i = 0; i < size; ++i) out[i] = from_float<Out>(bf16_round ? round_to_bf16(row[i]) : row[i]);
}

}  // namespace kernels::KERNELS_ISA_NS
