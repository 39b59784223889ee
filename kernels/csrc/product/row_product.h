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

// Some 32 weight rows are enough for the memory to be busy all the time. With more of them x is read less often, which
// counts from 8 of its rows on, and threads meet less often at the counter of items, if there are items enough for all.
inline int64_t block_rows(int64_t num_rows, int64_t num_weight_rows, int num_threads) {
  if (num_rows > 66) return kMaxBlockRows;
  const bool is_long = num_threads == 1 ? num_rows >= 8 : num_weight_rows >= 4 * num_threads * kMaxBlockRows;
  return is_long ? kMaxBlockRows : 32;
}

// x: kPair elements of each of M rows.
template <int M, int N, class W>
KERNELS_INLINE void add_pair(const float* x, const W* const (&w)[N], int64_t k, Vec (&sum)[M][N]) {
  Vec weight[N];  // one half of the pair after the other: both at once would not fit into the registers
  for (int n = 0; n < N; ++n) weight[n] = load_first(w[n] + k);
  for (int m = 0; m < M; ++m) {
    const Vec a = load(x + m * kPair);
    for (int n = 0; n < N; ++n) sum[m][n] = fmadd(a, weight[n], sum[m][n]);
  }
  for (int n = 0; n < N; ++n) weight[n] = load_second(w[n] + k);
  for (int m = 0; m < M; ++m) {
    const Vec b = load(x + m * kPair + kWidth);
    for (int n = 0; n < N; ++n) sum[m][n] = fmadd(b, weight[n], sum[m][n]);
  }
}

// Less than a pair.
template <int M, int N, class W>
KERNELS_INLINE void add_rest(const float* x, const W* const (&w)[N], int64_t k, int count, Vec (&sum)[M][N]) {
  for (int i = 0; i < count; i += kWidth) {
    const int part = std::min(kWidth, count - i);
    for (int n = 0; n < N; ++n) {
      const Vec weight = load_partial(w[n] + k + i, part);
      for (int m = 0; m < M; ++m) sum[m][n] = fmadd(load_partial(x + m * kPair + i, part), weight, sum[m][n]);
    }
  }
}

// A part of the depth, and where sums are: lane by lane in `acc`, tile by tile, between two chunks, in `sums` after the
// last, where rows lie kMaxBlockRows apart.
struct Chunk {
  int64_t first, last;
  bool is_last;
  Vec* acc;
  float* sums;
};

// Adds x[m] . w[n] over a chunk to the sums of M rows of x and N of w.
template <int M, int N, class W, class X>
KERNELS_INLINE void tile(const X* x, const void* const* rows, const Chunk& chunk, Vec* acc, float* sums,
                         RowPrefetcher& prefetch) {
  const int64_t first = chunk.first, length = chunk.last - first;
  const W* w[N];
  for (int n = 0; n < N; ++n) w[n] = static_cast<const W*>(rows[n]) + first;
  Vec sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = first == 0 ? zero() : acc[m * N + n];
  int64_t k = 0;
  prefetch.start_tile(length / kPair);
  while (k + kPair <= length) {  // the loop inside has registers for no more than this
    auto run = prefetch.next_run((length - k) / kPair);
    for (const int64_t end = k + run.num_pairs * kPair; k < end; k += kPair) {
      run.step();
      add_pair(x + k * M, w, k, sum);
    }
  }
  if (k < length) add_rest(x + k * M, w, k, int(length - k), sum);
  if (chunk.is_last) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; n += 4)
        reduce_add4(sum[m][n], sum[m][n + 1], sum[m][n + 2], sum[m][n + 3], sums + m * kMaxBlockRows + n);
  } else {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) acc[m * N + n] = sum[m][n];
  }
}

// One chunk of all the block's rows with M rows of x, from the panel's `row` on.
template <int M, class W, class X>
__attribute__((noinline)) void chunk_of_rows(const X* x, int64_t row, const WeightBlock& block, const Chunk& chunk,
                                             RowPrefetcher& prefetch) {
  constexpr int N = tile_outputs<X>(M);
  Vec* const acc = chunk.acc + row * block.num_rows;
  float* const sums = chunk.sums + row * kMaxBlockRows;
  RowPrefetcher mine = prefetch;  // in registers
  for (int n = 0; n < block.num_rows; n += N)
    tile<M, N, W>(x, block.rows + n, chunk, acc + n * M, sums + n, mine);
  prefetch = mine;
}

// Computes a chunk for `num_rows` of x, from 1 to M.
template <int M, class W, class X>
inline void chunk_of_up_to(int64_t num_rows, const X* x, int64_t row, const WeightBlock& block, const Chunk& chunk,
                           RowPrefetcher& prefetch) {
  if constexpr (M > 1)
    if (num_rows < M) return chunk_of_up_to<M - 1, W>(num_rows, x, row, block, chunk, prefetch);
  chunk_of_rows<M, W>(x, row, block, chunk, prefetch);
}

inline Vec* accumulators(size_t num_vectors) {
  thread_local Scratch buffer;
  return reinterpret_cast<Vec*>(buffer.floats(num_vectors * kWidth));
}

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
  const RowGroups groups = x.panel(first_row);
  const int64_t tiles = num_tiles<X>(groups, width);
  Vec* const acc = accumulators(size_t(num_rows) * size_t(width));
  const WeightBlock next_block = first_rows(next);
  for (int64_t first = 0; first < x.depth; first += x.chunk) {
    const int64_t last = x.chunk_end(first), num_pairs = tiles * ((last - first) / kPair);
    const Chunk chunk{first, last, last == x.depth, acc, sums};
    RowPrefetcher prefetch = last < x.depth
                                 ? RowPrefetcher(block, last, x.chunk_end(last), tiles, num_pairs)
                                 : RowPrefetcher(next_block, 0, first_chunk_depth<W>(next), tiles, num_pairs);
    for (int64_t group = 0; group < groups.num_groups; ++group) {
      const Range rows = groups[group];
      chunk_of_up_to<most_tile_rows<X>(), W>(rows.last - rows.first, x.chunk_of(rows, first), rows.first - first_row,
                                             block, chunk, prefetch);
    }
  }
}

// All rows of x with a block: finish(first row, last row, sums) is called for each panel of them.
template <class X, class W, class Finish>
inline void multiply_block(const PackedRows<X, W>& x, const WeightBlock& block, const NextWeights& next,
                           const Finish& finish) {
  alignas(64) float sums[panel_rows<X>() * kMaxBlockRows];
  if (x.depth == 0) std::fill_n(sums, panel_rows<X>() * kMaxBlockRows, 0.0f);
  for (int64_t row = 0; row < x.num_rows; row += panel_rows<X>()) {
    const int64_t last = std::min<int64_t>(x.num_rows, row + panel_rows<X>());
    multiply_panel(x, row, last, block, last == x.num_rows ? next : NextWeights{}, sums);
    finish(row, last, static_cast<const float*>(sums));
  }
}

}  // namespace kernels::KERNELS_ISA_NS
