// Rows of x in the order in which they are multiplied: chunk by chunk of the depth, in a chunk group by group, in a
// group (the rows that a register tile takes) pair by pair of each row in turn. One pointer then serves all rows of a
// tile: with one for each, the loop runs out of registers.
#pragma once

namespace kernels::KERNELS_ISA_NS {

// What rows of the weights' own type are packed as.
template <class W>
using PackedAs = std::conditional_t<std::is_same<W, bf16>::value, PackedBf16, float>;

// Whether load_first and load_second keep the order of memory.
template <class W>
constexpr bool is_natural = std::is_same<W, fp16>::value;

inline int64_t padded_depth(int64_t depth) { return (depth + kPair - 1) / kPair * kPair; }

// Rows of x that pass by a chunk of weights: a panel.
template <class X>
constexpr int panel_rows() { return 66 / most_tile_rows<X>() * most_tile_rows<X>(); }

// Groups of rows [first, last) of a panel, of equal size, so that fetches are evenly spread.
struct RowGroups {
  int64_t first, last, num_groups;
  Range operator[](int64_t group) const {
    return {first + (last - first) * group / num_groups, first + (last - first) * (group + 1) / num_groups};
  }
  Range of_row(int64_t row) const { return (*this)[((row - first + 1) * num_groups - 1) / (last - first)]; }
};

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

  RowGroups panel(int64_t first_row) const {
    const int64_t last_row = std::min<int64_t>(num_rows, first_row + panel_rows<X>());
    return {first_row, last_row, (last_row - first_row + most_tile_rows<X>() - 1) / most_tile_rows<X>()};
  }

  // The group of `row`.
  Range group_of(int64_t row) const { return panel(row / panel_rows<X>() * panel_rows<X>()).of_row(row); }

  // The group's elements from `first`, the start of a chunk, to the chunk's end: kPair of each row in turn.
  X* chunk_of(Range group, int64_t first) const {
    return start + num_rows * first + group.first * padded_depth(chunk_end(first) - first);
  }

  // The pair that holds a row's element `k`.
  X* pair_of(Range group, int64_t row, int64_t k) const {
    const int64_t first = k / chunk * chunk, pair = (k - first) / kPair;
    return chunk_of(group, first) + (pair * (group.last - group.first) + row - group.first) * kPair;
  }

  // Sets elements [k, k + count) of a row, k a multiple of kWidth and `count` at most that.
  void set(Range group, int64_t row, int64_t k, const float* values, int count) const {
    static_assert(std::is_same<X, float>::value, "the order of load_first and load_second");
    float* const pair = pair_of(group, row, k);
    const int64_t in_pair = k % kPair;
    if (is_natural<W> || k - in_pair + kPair > depth) {
      for (int i = 0; i < count; ++i) pair[in_pair + i] = values[i];
    } else {
      for (int i = 0; i < count; ++i) pair[in_pair / 2 + i / 2 + (i % 2) * kWidth] = values[i];
    }
  }
};

// Packs `length` elements, pairs `step` apart.
template <class W, class T>
inline void pack_row(const T* x, int64_t length, float* out, int64_t step) {
  int64_t k = 0;
  for (; !is_natural<W> && k + kPair <= length; k += kPair, out += step)
    for (int i = 0; i < kWidth; ++i) {
      out[i] = to_float(x[k + 2 * i]);
      out[kWidth + i] = to_float(x[k + 2 * i + 1]);
    }
  for (; k < length; k += kPair, out += step)
    for (int64_t i = 0; i < std::min<int64_t>(kPair, length - k); ++i) out[i] = to_float(x[k + i]);
}

template <class W>
inline void pack_row(const bf16* x, int64_t length, bf16* out, int64_t step) {
  for (; length >= kPair; x += kPair, length -= kPair, out += step) std::memcpy(out, x, kPair * sizeof(bf16));
  if (length == 0) return;
  std::memcpy(out, x, size_t(length) * sizeof(bf16));
  std::memset(out + length, 0, size_t(kPair - length) * sizeof(bf16));
}

template <class T, class X, class W>
inline void pack_rows(const InputRows& x, const PackedRows<X, W>& packed) {
  for (int64_t row = 0; row < x.num_rows; ++row) {
    const Range group = packed.group_of(row);
    const T* const from = static_cast<const T*>(x.start) + row * x.stride;
    for (int64_t first = 0; first < x.depth; first += packed.chunk)
      pack_row<W>(from + first, packed.chunk_end(first) - first, packed.pair_of(group, row, first),
                  (group.last - group.first) * kPair);
  }
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
