// Products of bfloat16 rows of weights, tiles A as they lie in memory, with packed tokens, tiles B.
//
// A panel is 4 tiles of 16 weight rows. A block of panels is cut over its depth into chunks, for which the tokens stay
// in the caches while all panels pass by; sums wait in memory from one chunk to the next. While a panel's chunk is
// computed the next one's is fetched, a line of each of some rows in turn, in equal shares a step.
#pragma once

#include "../product/weight_block.h"
#include "token_tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kPanelTiles = 4;
constexpr int kPanelRows = kPanelTiles * kTileSide;
constexpr int kMaxPanels = 4;         // of a block
constexpr int64_t kChunkDepth = 2048;  // 4 KiB of a weight row: the hardware fetches ahead within a page
static_assert(kPanelRows == kMaxBlockRows);

// Up to 16 rows; those beyond `num_rows` count as zeros.
struct WeightTile {
  const bf16* start = nullptr;
  int64_t stride = 0;  // elements
  int num_rows = 0;

  // Rows [first, last) of a matrix, of which there may be more or less than 16.
  WeightTile() = default;
  WeightTile(const bf16* matrix, int64_t stride, int64_t first, int64_t last)
      : start(matrix + first * stride), stride(stride),
        num_rows(int(std::min<int64_t>(kTileSide, std::max<int64_t>(0, last - first)))) {}

  // Elements [k, k + 32) of `depth`.
  template <int T>
  KERNELS_INLINE void load(int64_t k, int64_t depth) const {
    if (num_rows == kTileSide && k + kTileDepth <= depth)
      tile_load<T>(start + k, stride * int64_t(sizeof(bf16)));
    else
      load_part<T>(k, int(std::min<int64_t>(kTileDepth, depth - k)));
  }

 private:
  template <int T>
  __attribute__((noinline)) void load_part(int64_t k, int count) const {
    alignas(64) bf16 rows[kTileSide][kTileDepth] = {};
    for (int row = 0; row < num_rows; ++row)
      std::memcpy(rows[row], start + row * stride + k, size_t(count) * sizeof(bf16));
    tile_fence();
    tile_load<T>(rows, kTileLine);
    tile_fence();
  }
};

struct Panel {
  WeightTile tiles[kPanelTiles];

  WeightBlock rows() const {
    WeightBlock block;
    for (const WeightTile& tile : tiles) block.add(tile.start, tile.stride, 0, tile.num_rows, 1);
    return block;
  }
};

// Sums of a panel: [tile][group of tokens][16 weight rows][16 tokens].
struct PanelSums {
  float* start;
  int64_t num_groups;

  static int64_t num_floats(int64_t num_groups) { return kPanelTiles * num_groups * kTileSide * kTileSide; }
  KERNELS_INLINE float* tile(int tile, int64_t group) const {
    return start + (tile * num_groups + group) * kTileSide * kTileSide;
  }
};

struct Depth {
  int64_t first, last, whole;  // [first, last) of `whole`
};

// Counts the prefetcher's steps while a panel's chunk is computed: one for each tile of weights and group of tokens.
inline int64_t num_steps_of(const Depth& depth, int64_t num_groups) {
  return (depth.last - depth.first + kTileDepth - 1) / kTileDepth * num_groups * kPanelTiles;
}

template <int T>
KERNELS_INLINE void resume(const Depth& depth, const float* sums) {
  if (depth.first == 0)
    tile_zero<T>();
  else
    tile_load<T>(sums, kTileLine);
}

// C tiles 0 to 3: all tiles of the panel with one group of tokens.
template <int kTerms>
inline void one_group(const TokenTiles& x, const Panel& panel, const Depth& depth, int64_t group, PanelSums sums,
                      ChunkPrefetcher& prefetch) {
  resume<0>(depth, sums.tile(0, group)), resume<1>(depth, sums.tile(1, group));
  resume<2>(depth, sums.tile(2, group)), resume<3>(depth, sums.tile(3, group));
  for (int64_t k = depth.first; k < depth.last; k += kTileDepth) {
    tile_load<5>(x.tile(k, 0, group), kTileLine);
    if constexpr (kTerms > 1) tile_load<6>(x.tile(k, 1, group), kTileLine);
    if constexpr (kTerms > 2) tile_load<7>(x.tile(k, 2, group), kTileLine);
    const auto add = [&](auto c) KERNELS_INLINE_LAMBDA {
      prefetch.step();
      panel.tiles[c()].template load<4>(k, depth.whole);
      tile_multiply<c(), 4, 5>();
      if constexpr (kTerms > 1) tile_multiply<c(), 4, 6>();
      if constexpr (kTerms > 2) tile_multiply<c(), 4, 7>();
    };
    add(std::integral_constant<int, 0>()), add(std::integral_constant<int, 1>());
    add(std::integral_constant<int, 2>()), add(std::integral_constant<int, 3>());
  }
  tile_store<0>(sums.tile(0, group), kTileLine), tile_store<1>(sums.tile(1, group), kTileLine);
  tile_store<2>(sums.tile(2, group), kTileLine), tile_store<3>(sums.tile(3, group), kTileLine);
}

// Two tiles of the panel with two groups of tokens: half the loads for each product.
template <int kTerms>
inline void two_groups(const TokenTiles& x, const Panel& panel, int tile, const Depth& depth, int64_t group,
                       PanelSums sums, ChunkPrefetcher& prefetch) {
  resume<0>(depth, sums.tile(tile, group)), resume<1>(depth, sums.tile(tile, group + 1));
  resume<2>(depth, sums.tile(tile + 1, group)), resume<3>(depth, sums.tile(tile + 1, group + 1));
  for (int64_t k = depth.first; k < depth.last; k += kTileDepth) {
    panel.tiles[tile].template load<4>(k, depth.whole);
    prefetch.step(), prefetch.step();
    panel.tiles[tile + 1].template load<5>(k, depth.whole);
    prefetch.step(), prefetch.step();
    for (int term = 0; term < kTerms; ++term) {
      tile_load<6>(x.tile(k, term, group), kTileLine);
      tile_load<7>(x.tile(k, term, group + 1), kTileLine);
      tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>();
      tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(sums.tile(tile, group), kTileLine), tile_store<1>(sums.tile(tile, group + 1), kTileLine);
  tile_store<2>(sums.tile(tile + 1, group), kTileLine), tile_store<3>(sums.tile(tile + 1, group + 1), kTileLine);
}

template <int kTerms>
__attribute__((noinline)) void panel_chunk(const TokenTiles& x, const Panel& panel, const Depth& depth, PanelSums sums,
                                           ChunkPrefetcher& prefetch) {
  int64_t group = 0;
  for (; group + 2 <= x.num_groups; group += 2)
    for (int tile = 0; tile < kPanelTiles; tile += 2) two_groups<kTerms>(x, panel, tile, depth, group, sums, prefetch);
  if (group < x.num_groups) one_group<kTerms>(x, panel, depth, group, sums, prefetch);
}

// Computes a block of panels with all tokens and calls finish(i, sums) for each; `next`'s first chunk is fetched at the
// end.
template <class Finish>
inline void multiply_panels(const TokenTiles& x, const Panel* panels, int num_panels, const NextWeights& next,
                            const Finish& finish) {
  thread_local Scratch scratch;
  const int64_t panel_floats = PanelSums::num_floats(x.num_groups);
  float* const sums = scratch.floats(size_t(num_panels * panel_floats));
  if (x.depth == 0) std::fill(sums, sums + num_panels * panel_floats, 0.0f);
  const TileSession session;
  const auto panel_sums = [&](int i) { return PanelSums{sums + i * panel_floats, x.num_groups}; };
  for (int64_t first = 0; first < x.depth; first += kChunkDepth) {
    const Depth depth{first, std::min(x.depth, first + kChunkDepth), x.depth};
    const int64_t num_steps = num_steps_of(depth, x.num_groups);
    for (int i = 0; i < num_panels; ++i) {
      const bool same_chunk = i + 1 < num_panels, same_block = same_chunk || depth.last < x.depth;
      const int64_t start = same_chunk ? first : same_block ? depth.last : 0;
      const WeightBlock rows = same_block ? panels[same_chunk ? i + 1 : 0].rows() : first_rows(next);
      const int64_t end = std::min(same_block ? x.depth : next.depth, start + kChunkDepth);
      ChunkPrefetcher prefetch(rows, start, end, num_steps);
      if (x.num_terms == 1)
        panel_chunk<1>(x, panels[i], depth, panel_sums(i), prefetch);
      else
        panel_chunk<kMaxTerms>(x, panels[i], depth, panel_sums(i), prefetch);
    }
  }
  for (int i = 0; i < num_panels; ++i) finish(i, panel_sums(i));
}

inline Panel panel_of(const bf16* weights, int64_t stride, int64_t first, int64_t last) {
  Panel panel;
  for (int tile = 0; tile < kPanelTiles; ++tile)
    panel.tiles[tile] = WeightTile(weights, stride, first + tile * kTileSide, last);
  return panel;
}

// Sums of one group of tokens as rows of tokens: rows[token][weight row], kPanelRows apart.
inline void tokens_first(const PanelSums& sums, int64_t group, float* rows) {
  for (int tile = 0; tile < kPanelTiles; ++tile)
    transpose_tile(sums.tile(tile, group), rows + tile * kTileSide, kPanelRows * int64_t(sizeof(float)));
}

// Calls put(token, weight rows, sums) for all tokens and for weight rows [range) of one matrix, some at a time.
template <class Put>
inline void multiply_rows(const TokenTiles& x, const bf16* weights, int64_t stride, Range range, const NextWeights& next,
                          const Put& put) {
  Panel panels[kMaxPanels];
  int num_panels = 0;
  for (int64_t first = range.first; first < range.last; first += kPanelRows)
    panels[num_panels++] = panel_of(weights, stride, first, range.last);
  multiply_panels(x, panels, num_panels, next, [&](int index, const PanelSums& sums) {
    const int64_t first = range.first + index * kPanelRows;
    const Range rows{first, std::min(range.last, first + kPanelRows)};
    alignas(64) float by_token[kTileSide * kPanelRows];
    for (int64_t group = 0; group < x.num_groups; ++group) {
      tokens_first(sums, group, by_token);
      const int64_t token = group * kTileSide, num_tokens = std::min<int64_t>(kTileSide, x.num_tokens - token);
      for (int64_t i = 0; i < num_tokens; ++i) put(token + i, rows, by_token + i * kPanelRows);
    }
  });
}

inline int64_t packed_floats(DType dtype, int64_t num_tokens, int64_t depth) {
  return TokenTiles::num_bytes(dtype, num_tokens, depth) / int64_t(sizeof(float));
}

// Chooses as many panels as leave each thread some blocks.
inline int64_t block_rows(int64_t, int64_t num_weight_rows, int num_threads) {
  const int64_t panels = num_weight_rows / kPanelRows / (4 * num_threads);
  return std::clamp<int64_t>(panels, 1, kMaxPanels) * kPanelRows;
}

}  // namespace kernels::KERNELS_ISA_NS
