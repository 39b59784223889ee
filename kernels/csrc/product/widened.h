// Products in float32: rows of x are packed as float32 and weights widened as they are loaded. How register tiles and
// chunks are cut was measured on Intel processors; see row_product.h for what these mean.
#pragma once

#include "weight_block.h"

namespace kernels::KERNELS_ISA_NS {

using PackedBf16 = float;  // what rows of bf16 are packed as

constexpr int kMostTileOutputs = 4;
template <class X>
constexpr int tile_outputs(int) { return kMostTileOutputs; }

// 24 accumulators of 32 registers with AVX-512, 8 of 16 else.
template <class X>
constexpr int most_tile_rows() { return kWidth == 16 ? 6 : 2; }

template <class X>
constexpr int64_t chunk_depth(int64_t num_rows) { return kWidth == 16 && num_rows > 8 ? 1024 : 512; }

// Fetches with each pair; see paired.h for what tiles ask.
class RowPrefetcher {
 public:
  RowPrefetcher(const WeightBlock& block, int64_t first, int64_t last, int64_t, int64_t num_pairs)
      : lines_(block, first, last, num_pairs) {}

  void start_tile(int64_t) {}

  struct Run {
    ChunkPrefetcher& lines;
    int64_t num_pairs;
    KERNELS_INLINE void step() { lines.step(); }
  };
  Run next_run(int64_t most_pairs) { return {lines_, most_pairs}; }

 private:
  ChunkPrefetcher lines_;
};

}  // namespace kernels::KERNELS_ISA_NS
