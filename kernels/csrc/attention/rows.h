// Rows of head_dim elements: their loop bounds, the way in (queries) and the way out (merged results).
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

template <class T, int D, class Query>
void load_queries_as(const DecodeRequest& r, const DecodePiece& piece, float* q) {
  const Row<D> row(r.head_dim);
  const int group = r.group();
  const Query* source = static_cast<const Query*>(r.q) + piece.seq * r.q_stride;
  source += int64_t(piece.first_head) * group * row.size();
  for (int h = 0; h < piece.num_heads() * group; ++h, source += row.size(), q += row.padded()) {
    std::fill(q, q + row.padded(), 0.0f);
    int start = 0;
    if (std::is_same<T, bf16>::value) {
      for (; start < row.paired(); start += 2 * kWidth)
        for (int i = 0; i < kWidth; ++i) {
          q[start + i] = to_float(source[start + 2 * i]);
          q[start + kWidth + i] = to_float(source[start + 2 * i + 1]);
        }
    }
    for (; start < row.size(); ++start) q[start] = to_float(source[start]);
  }
}

// The query heads of a piece, in the kernel order of KV type T, padded with zeros.
template <class T, int D>
void load_queries(const DecodeRequest& r, const DecodePiece& piece, float* q) {
  switch (r.q_dtype) {
    case DType::kBf16: return load_queries_as<T, D, bf16>(r, piece, q);
    case DType::kFp16: return load_queries_as<T, D, fp16>(r, piece, q);
    default: return load_queries_as<T, D, float>(r, piece, q);
  }
}

template <class Out>
void store_row(const float* row, int size, bool bf16_round, Out* out) {
  for (int i = 0; i < size; ++i) out[i] = from_float<Out>(bf16_round ? round_to_bf16(row[i]) : row[i]);
}

}  // namespace kernels::KERNELS_ISA_NS
