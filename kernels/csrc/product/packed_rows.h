// Rows of x in the order in which they are multiplied: chunk by chunk of the depth, in a chunk row by row. Rows that
// lay far apart would compete for the same sets of the cache.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kPair = 2 * kWidth;  // weights in a vector

// What rows of the weights' own type are packed as.
template <class W>
using PackedAs = std::conditional_t<std::is_same<W, bf16>::value, PackedBf16, float>;

// Whether load_first and load_second keep the order of memory.
template <class W>
constexpr bool is_natural = std::is_same<W, fp16>::value;

inline int64_t padded_depth(int64_t depth) { return (depth + kPair - 1) / kPair * kPair; }

// X: float, in a row as load_first and load_second split weights of W (what does not fill a pair stays in natural
// order); or bf16, in natural order, filled up with zeros.
template <class X, class W>
struct PackedRows {
  X* start;
  int64_t num_rows, depth, chunk;

  PackedRows(float* start, int64_t num_rows, int64_t depth)
      : start(reinterpret_cast<X*>(start)), num_rows(num_rows), depth(depth), chunk(chunk_depth<X>(num_rows)) {}

  static int64_t num_floats(int64_t num_rows, int64_t depth) {
    return num_rows * padded_depth(depth) * int64_t(sizeof(X)) / int64_t(sizeof(float));
  }

  int64_t chunk_end(int64_t first) const { return std::min(depth, first + chunk); }

  // A row's elements from `first`, the start of a chunk, to the chunk's end.
  X* chunk_of(int64_t row, int64_t first) const {
    return start + num_rows * first + row * padded_depth(chunk_end(first) - first);
  }

  X& at(int64_t row, int64_t k) const {
    static_assert(std::is_same<X, float>::value, "the order of load_first and load_second");
    const int64_t first = k / chunk * chunk, pair = k / kPair * kPair;
    const bool natural = is_natural<W> || pair + kPair > depth;
    const int64_t in_pair = natural ? k - pair : (k % 2 ? kWidth : 0) + (k - pair) / 2;
    return chunk_of(row, first)[pair - first + in_pair];
  }
};

template <class W, class T>
inline void pack_row(const T* x, int64_t length, float* out) {
  const int64_t whole = is_natural<W> ? 0 : length / kPair * kPair;
  for (int64_t k = 0; k < whole; k += kPair)
    for (int i = 0; i < kWidth; ++i) {
      out[k + i] = to_float(x[k + 2 * i]);
      out[k + kWidth + i] = to_float(x[k + 2 * i + 1]);
    }
  for (int64_t k = whole; k < length; ++k) out[k] = to_float(x[k]);
}

template <class W>
inline void pack_row(const bf16* x, int64_t length, bf16* out) {
  std::memcpy(out, x, size_t(length) * sizeof(bf16));
  std::memset(out + length, 0, size_t(padded_depth(length) - length) * sizeof(bf16));
}

template <class T, class X, class W>
inline void pack_rows(const InputRows& x, const PackedRows<X, W>& packed) {
  for (int64_t row = 0; row < x.num_rows; ++row)
    for (int64_t first = 0; first < x.depth; first += packed.chunk)
      pack_row<W>(static_cast<const T*>(x.start) + row * x.stride + first, packed.chunk_end(first) - first,
               packed.chunk_of(row, first));
}

inline int64_t packed_floats(DType dtype, int64_t num_rows, int64_t depth) {
  return dtype == DType::kBf16 ? PackedRows<PackedBf16, bf16>::num_floats(num_rows, depth)
                               : PackedRows<float, bf16>::num_floats(num_rows, depth);
}

// use(rows): what `packed_floats` of memory hold, as rows of `dtype` are packed.
template <class W, class Use>
inline void with_packed(const float* start, DType dtype, int64_t num_rows, int64_t depth, const Use& use) {
  float* const floats = const_cast<float*>(start);
  if (dtype == DType::kFp32)
    use(PackedRows<float, W>(floats, num_rows, depth));
  else
    use(PackedRows<PackedAs<W>, W>(floats, num_rows, depth));
}

}  // namespace kernels::KERNELS_ISA_NS
