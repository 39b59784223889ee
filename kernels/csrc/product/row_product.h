// Products of rows of x with rows of weights in vector registers; one translation unit per instruction set
// includes this, after widened.h or paired.h, which say how far it is cut.
//
// A block of weight rows is cut over its depth into chunks that stay in the caches while all rows of x pass by in
// register tiles. Meanwhile the block's next chunk is fetched from DRAM, evenly spread over the tiles: few rows of x
// then cost what reading the weights costs, more rows hide it.
#pragma once

#include "packed_rows.h"
#include "weight_block.h"

namespace kernels::KERNELS_ISA_NS {

// Rows of x that pass by a chunk.
template <class X>
constexpr int panel_rows() { return 66 / most_tile_rows<X>() * most_tile_rows<X>(); }

// Some 32 weight rows are enough for the memory to be busy all the time; for many rows of x more of them mean that x is
// read less often.
inline int64_t block_rows(int64_t num_rows, int64_t, int) { return num_rows <= 66 ? 32 : kMaxBlockRows; }

template <int M, int N, class W>
KERNELS_INLINE void add_pair(const float* x, int64_t x_stride, const W* const (&w)[N], int64_t k, Vec (&sum)[M][N]) {
  Vec weight[N];  // one half of the pair after the other: both at once would not fit into the registers
  for (int n = 0; n < N; ++n) weight[n] = load_first(w[n] + k);
  for (int m = 0; m < M; ++m) {
    const Vec a = load(x + m * x_stride);
    for (int n = 0; n < N; ++n) sum[m][n] = fmadd(a, weight[n], sum[m][n]);
  }
  for (int n = 0; n < N; ++n) weight[n] = load_second(w[n] + k);
  for (int m = 0; m < M; ++m) {
    const Vec b = load(x + m * x_stride + kWidth);
    for (int n = 0; n < N; ++n) sum[m][n] = fmadd(b, weight[n], sum[m][n]);
  }
}

// Less than a pair.
template <int M, int N, class W>
KERNELS_INLINE void add_rest(const float* x, int64_t x_stride, const W* const (&w)[N], int64_t k, int count,
                             Vec (&sum)[M][N]) {
  for (int i = 0; i < count; i += kWidth) {
    const int part = std::min(kWidth, count - i);
    for (int n = 0; n < N; ++n) {
      const Vec weight = load_partial(w[n] + k + i, part);
      for (int m = 0; m < M; ++m) sum[m][n] = fmadd(load_partial(x + m * x_stride + i, part), weight, sum[m][n]);
    }
  }
}

// acc[m][n] += x[m] . w[n] over elements [first, last), a chunk, for M rows of x and N of w, lane by lane.
template <int M, int N, class W, class X>
KERNELS_INLINE void tile(const X* x, const void* const* rows, int64_t first, int64_t last, Vec* acc, int acc_stride,
                         RowPrefetcher& prefetch) {
  const int64_t length = last - first, x_stride = padded_depth(length);
  const W* w[N];
  for (int n = 0; n < N; ++n) w[n] = static_cast<const W*>(rows[n]) + first;
  Vec sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = first == 0 ? zero() : acc[m * acc_stride + n];
  int64_t k = 0;
  for (; k + kPair <= length; k += kPair) {
    prefetch.step();
    add_pair(x + k, x_stride, w, k, sum);
  }
  if (k < length) add_rest(x + k, x_stride, w, k, int(length - k), sum);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) acc[m * acc_stride + n] = sum[m][n];
}

// One chunk of all the block's rows with M rows of x.
template <int M, class W, class X>
__attribute__((noinline)) void chunk_of_rows(const X* x, const WeightBlock& block, int64_t first, int64_t last,
                                             Vec* acc, RowPrefetcher& prefetch) {
  constexpr int N = tile_outputs<X>(M);
  for (int n = 0; n < block.num_rows; n += N)
    tile<M, N, W>(x, block.rows + n, first, last, acc + n, block.num_rows, prefetch);
}

// Computes a chunk for `num_rows` of x, from 1 to M.
template <int M, class W, class X>
inline void chunk_of_up_to(int64_t num_rows, const X* x, const WeightBlock& block, int64_t first, int64_t last,
                           Vec* acc, RowPrefetcher& prefetch) {
  if constexpr (M > 1)
    if (num_rows < M) return chunk_of_up_to<M - 1, W>(num_rows, x, block, first, last, acc, prefetch);
  chunk_of_rows<M, W>(x, block, first, last, acc, prefetch);
}

inline Vec* accumulators(size_t num_vectors) {
  thread_local Scratch buffer;
  return reinterpret_cast<Vec*>(buffer.floats(num_vectors * kWidth));
}

// Groups of rows [first, last) of x that a register tile takes, of equal size, so that fetches are evenly spread.
struct RowGroups {
  int64_t first, last, num_groups;
  Range operator[](int64_t group) const {
    return {first + (last - first) * group / num_groups, first + (last - first) * (group + 1) / num_groups};
  }
};

template <class X>
inline int64_t num_tiles(const RowGroups& groups, int num_weight_rows) {
  int64_t count = 0;
  for (int64_t group = 0; group < groups.num_groups; ++group)
    count += num_weight_rows / tile_outputs<X>(int(groups[group].last - groups[group].first));
  return count;
}

// How much of the next weights' rows is their first chunk.
template <class W>
inline int64_t first_chunk_depth(const NextWeights& next) {
  if (next.num_rows == 0) return 0;  // nothing is next
  const int64_t chunk = next.x_dtype == DType::kFp32 ? chunk_depth<float>(next.num_rows)
                                                     : chunk_depth<PackedAs<W>>(next.num_rows);
  return std::min(next.depth, chunk);
}

// Rows [first_row, last_row) of x, up to a panel: sums[row - first_row][n] is the product of row and block.rows[n];
// rows of sums lie kMaxBlockRows apart. The first chunk of `next` is fetched during the last.
template <class X, class W>
inline void multiply_panel(const PackedRows<X, W>& x, int64_t first_row, int64_t last_row, const WeightBlock& block,
                           const NextWeights& next, float* sums) {
  if (x.depth == 0) return;  // sums are zeros
  const int width = block.num_rows;
  const int64_t num_rows = last_row - first_row;
  const RowGroups groups{first_row, last_row, (num_rows + most_tile_rows<X>() - 1) / most_tile_rows<X>()};
  const int64_t tiles = num_tiles<X>(groups, width);
  Vec* const acc = accumulators(size_t(num_rows) * size_t(width));
  const WeightBlock next_block = first_rows(next);
  for (int64_t first = 0; first < x.depth; first += x.chunk) {
    const int64_t last = x.chunk_end(first), num_steps = tiles * ((last - first) / kPair);
    RowPrefetcher prefetch = last < x.depth ? RowPrefetcher(block, last, x.chunk_end(last), num_steps)
                                            : RowPrefetcher(next_block, 0, first_chunk_depth<W>(next), num_steps);
    for (int64_t group = 0; group < groups.num_groups; ++group) {
      const Range rows = groups[group];
      chunk_of_up_to<most_tile_rows<X>(), W>(rows.last - rows.first, x.chunk_of(rows.first, first), block, first, last,
                                          acc + (rows.first - first_row) * width, prefetch);
    }
  }
  for (int64_t m = 0; m < num_rows; ++m)
    for (int n = 0; n < width; n += 4) {
      const Vec* const sum = acc + m * width + n;
      reduce_add4(sum[0], sum[1], sum[2], sum[3], sums + m * kMaxBlockRows + n);
    }
}

// All rows of x with a block: finish(first row, last row, sums) is called for each panel of them.
template <class X, class W, class Finish>
inline void multiply_block(const PackedRows<X, W>& x, const WeightBlock& block, const NextWeights& next,
                           const Finish& finish) {
  alignas(64) float sums[panel_rows<X>() * kMaxBlockRows] = {};
  for (int64_t row = 0; row < x.num_rows; row += panel_rows<X>()) {
    const int64_t last = std::min<int64_t>(x.num_rows, row + panel_rows<X>());
    multiply_panel(x, row, last, block, last == x.num_rows ? next : NextWeights{}, sums);
    finish(row, last, static_cast<const float*>(sums));
  }
}

}  // namespace kernels::KERNELS_ISA_NS
