// Products of rows of x with bfloat16 rows of weights, for both the linear layer and the expert FFN; one translation
// unit per instruction set includes this.
//
// A block of weight rows is cut over its depth into chunks that stay in the first-level cache while all rows of x pass
// by in register tiles. Meanwhile the block's next chunk is fetched from DRAM, a line of each of some rows in turn,
// evenly spread over the tiles: few rows of x then cost what reading the weights costs, more rows hide it.
#pragma once

#include "weight_block.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kOutputs = 4;                  // of a register tile
constexpr int kRows = kWidth == 16 ? 6 : 2;  // of x in it: 24 accumulators of 32 registers with AVX-512, 8 of 16 else
constexpr int kPair = 2 * kWidth;            // weights that load_pair takes
constexpr int kPanelRows = 66;               // of x that pass by a chunk, a multiple of kRows
constexpr int64_t kChunk = 512;              // depth

// x is packed in float32: chunk by chunk, in a chunk row by row, in a row as load_pair splits bf16 weights (what does
// not fill a pair stays in natural order). Rows of x that were far apart would compete for the same sets of the cache.
inline int64_t padded_depth(int64_t depth) { return (depth + kPair - 1) / kPair * kPair; }

inline int64_t chunk_end(int64_t first, int64_t depth) { return std::min(depth, first + kChunk); }

// Where a row's elements from `first`, the start of a chunk, on are.
inline int64_t chunk_position(int64_t row, int64_t first, int64_t num_rows, int64_t depth) {
  return num_rows * first + row * padded_depth(chunk_end(first, depth) - first);
}

inline int64_t packed_position(int64_t row, int64_t k, int64_t num_rows, int64_t depth) {
  const int64_t first = k / kChunk * kChunk, pair = k / kPair * kPair;
  const int64_t in_pair = pair + kPair > depth ? k - pair : (k % 2 ? kWidth : 0) + (k - pair) / 2;
  return chunk_position(row, first, num_rows, depth) + pair - first + in_pair;
}

template <class T>
inline void pack_row(const T* x, int64_t length, float* out) {
  const int64_t whole = length / kPair * kPair;
  for (int64_t k = 0; k < whole; k += kPair)
    for (int i = 0; i < kWidth; ++i) {
      out[k + i] = to_float(x[k + 2 * i]);
      out[k + kWidth + i] = to_float(x[k + 2 * i + 1]);
    }
  for (int64_t k = whole; k < length; ++k) out[k] = to_float(x[k]);
}

inline int64_t packed_floats(DType, int64_t num_rows, int64_t depth) { return num_rows * padded_depth(depth); }

// Some 32 weight rows are enough for the memory to be busy all the time; for many rows of x more of them mean that x is
// read less often.
inline int64_t block_rows(int64_t num_rows, int64_t, int) { return num_rows <= kPanelRows ? 32 : kMaxBlockRows; }

// Packs rows of bf16 or float32, `stride` elements apart.
inline void pack_rows(const void* x, DType dtype, int64_t num_rows, int64_t depth, int64_t stride, float* out) {
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t first = 0; first < depth; first += kChunk) {
      const int64_t start = row * stride + first, length = chunk_end(first, depth) - first;
      float* const target = out + chunk_position(row, first, num_rows, depth);
      if (dtype == DType::kFp32)
        pack_row(static_cast<const float*>(x) + start, length, target);
      else
        pack_row(static_cast<const bf16*>(x) + start, length, target);
    }
}

// acc[m][n] += x[m] . w[n] over elements [first, last), a chunk, for M rows of x and 4 of w, lane by lane.
template <int M>
KERNELS_INLINE void tile(const float* x, const bf16* const* rows, int64_t first, int64_t last, Vec* acc, int acc_stride,
                         ChunkPrefetcher& prefetch) {
  const int64_t x_stride = padded_depth(last - first);
  const bf16* w[kOutputs];
  for (int n = 0; n < kOutputs; ++n) w[n] = rows[n] + first;
  Vec sum[M][kOutputs];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < kOutputs; ++n) sum[m][n] = first == 0 ? zero() : acc[m * acc_stride + n];
  const int64_t length = last - first;
  int64_t k = 0;
  for (; k + kPair <= length; k += kPair) {
    prefetch.step();
    Vec weight[kOutputs];  // even and odd elements one after the other: both at once would not fit into the registers
    for (int n = 0; n < kOutputs; ++n) weight[n] = load_even(w[n] + k);
    for (int m = 0; m < M; ++m) {
      const Vec a = load(x + m * x_stride + k);
      for (int n = 0; n < kOutputs; ++n) sum[m][n] = fmadd(a, weight[n], sum[m][n]);
    }
    for (int n = 0; n < kOutputs; ++n) weight[n] = load_odd(w[n] + k);
    for (int m = 0; m < M; ++m) {
      const Vec b = load(x + m * x_stride + k + kWidth);
      for (int n = 0; n < kOutputs; ++n) sum[m][n] = fmadd(b, weight[n], sum[m][n]);
    }
  }
  for (; k < length; k += kWidth) {
    const int count = int(std::min<int64_t>(kWidth, length - k));
    for (int n = 0; n < kOutputs; ++n) {
      const Vec weight = load_partial(w[n] + k, count);
      for (int m = 0; m < M; ++m) sum[m][n] = fmadd(load_partial(x + m * x_stride + k, count), weight, sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < kOutputs; ++n) acc[m * acc_stride + n] = sum[m][n];
}

// One chunk of all the block's rows with M rows of x.
template <int M>
__attribute__((noinline)) void chunk_of_rows(const float* x, const WeightBlock& block, int64_t first, int64_t last,
                                             Vec* acc, ChunkPrefetcher& prefetch) {
  for (int n = 0; n < block.num_rows; n += kOutputs)
    tile<M>(x, block.rows + n, first, last, acc + n, block.num_rows, prefetch);
}

inline void chunk_of_rows(int64_t num_rows, const float* x, const WeightBlock& block, int64_t first, int64_t last,
                          Vec* acc, ChunkPrefetcher& prefetch) {
  if constexpr (kRows > 2) {
    switch (num_rows) {
      case 6: return chunk_of_rows<6>(x, block, first, last, acc, prefetch);
      case 5: return chunk_of_rows<5>(x, block, first, last, acc, prefetch);
      case 4: return chunk_of_rows<4>(x, block, first, last, acc, prefetch);
      case 3: return chunk_of_rows<3>(x, block, first, last, acc, prefetch);
    }
  }
  if (num_rows == 2) return chunk_of_rows<2>(x, block, first, last, acc, prefetch);
  return chunk_of_rows<1>(x, block, first, last, acc, prefetch);
}

inline Vec* accumulators(size_t num_vectors) {
  thread_local Scratch buffer;
  return reinterpret_cast<Vec*>(buffer.floats(num_vectors * kWidth));
}

// Rows [first_row, last_row) out of num_rows of packed x, up to kPanelRows: sums[row - first_row][n] is the product of
// row and block.rows[n]; rows of sums lie kMaxBlockRows apart. The first chunk of `next` (which may be empty) is
// fetched during the last.
inline void multiply_panel(const float* x, int64_t first_row, int64_t last_row, int64_t num_rows, int64_t depth,
                           const WeightBlock& block, const WeightBlock& next, float* sums) {
  if (depth == 0) return;  // sums are zeros
  const int width = block.num_rows;
  const int64_t panel_rows = last_row - first_row, num_groups = (panel_rows + kRows - 1) / kRows;
  Vec* const acc = accumulators(size_t(panel_rows) * size_t(width));
  for (int64_t first = 0; first < depth; first += kChunk) {
    const int64_t last = chunk_end(first, depth);
    const int64_t num_steps = num_groups * (width / kOutputs) * ((last - first) / kPair);
    ChunkPrefetcher prefetch = last < depth ? ChunkPrefetcher(block, last, chunk_end(last, depth), num_steps)
                                            : ChunkPrefetcher(next, 0, chunk_end(0, depth), num_steps);
    for (int64_t group = 0; group < num_groups; ++group) {  // of equal size, so that the prefetches are evenly spread
      const int64_t row = panel_rows * group / num_groups, end = panel_rows * (group + 1) / num_groups;
      chunk_of_rows(end - row, x + chunk_position(first_row + row, first, num_rows, depth), block, first, last,
                    acc + row * width, prefetch);
    }
  }
  for (int64_t m = 0; m < panel_rows; ++m)
    for (int n = 0; n < width; n += kOutputs) {
      const Vec* const sum = acc + m * width + n;
      reduce_add4(sum[0], sum[1], sum[2], sum[3], sums + m * kMaxBlockRows + n);
    }
}

// The same for any number of rows: finish(first row, last row, sums) is called for each panel of them.
template <class Finish>
inline void multiply_block(const float* x, int64_t num_rows, int64_t depth, const WeightBlock& block,
                           const WeightBlock& next, const Finish& finish) {
  alignas(64) float sums[kPanelRows * kMaxBlockRows] = {};
  for (int64_t row = 0; row < num_rows; row += kPanelRows) {
    const int64_t last = std::min(num_rows, row + kPanelRows);
    multiply_panel(x, row, last, num_rows, depth, block, last == num_rows ? next : WeightBlock(), sums);
    finish(row, last, static_cast<const float*>(sums));
  }
}

}  // namespace kernels::KERNELS_ISA_NS
