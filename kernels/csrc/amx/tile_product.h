// Products of bfloat16 rows of weights, tiles A as they lie in memory, with packed tokens, tiles B.
//
// A panel is two tiles of 16 weight rows that are read side by side: so few streams the hardware fetches ahead of, and
// no order of fetching by software did better (docs/kernels.md). What remains is to run a few lines ahead of the
// products, and on into the panel that follows. A block of panels is cut over its depth into chunks, for which the
// tokens stay in the caches while all panels pass by; sums wait in memory from one chunk to the next. More tokens than
// two tiles hold meet a panel's chunk in several passes, each of which fetches a share of what follows.
#pragma once

#include "../product/weight_block.h"
#include "token_tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kPanelTiles = 2;
constexpr int kPanelRows = kPanelTiles * kTileSide;
constexpr int kItemRows = 64, kMostItems = 4;  // a thread takes kItemRows weight rows, or up to so many times as many
constexpr int kMaxPanels = kMostItems * kItemRows / kPanelRows;
constexpr int64_t kChunkDepth = 2048;  // 4 KiB of a weight row: the hardware fetches ahead within a page
constexpr int64_t kAheadBytes = 256;

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

// Fetches lines of weights, in quarters of a tile's rows.
struct Fetch {
  const char* lines[kPanelTiles];
  int64_t strides[kPanelTiles];  // bytes; 0 where there are no 16 rows

  // From element `k` of the depth on.
  Fetch(const Panel& panel, int64_t k) {
    for (int i = 0; i < kPanelTiles; ++i) {
      lines[i] = reinterpret_cast<const char*>(panel.tiles[i].start + k);
      strides[i] = panel.tiles[i].num_rows == kTileSide ? panel.tiles[i].stride * kWeightBytes : 0;
    }
  }
};

template <int kLocality>
KERNELS_INLINE void fetch_quarter(const char* line, int64_t stride) {
  __builtin_prefetch(line, 0, kLocality);
  __builtin_prefetch(line + stride, 0, kLocality);
  __builtin_prefetch(line + 2 * stride, 0, kLocality);
  __builtin_prefetch(line + 3 * stride, 0, kLocality);
}

// Into the first-level cache, or the second for what is far ahead.
KERNELS_INLINE void fetch_tile(const char* line, int64_t stride) {
  for (int quarter = 0; quarter < 4; ++quarter) fetch_quarter<3>(line + 4 * quarter * stride, stride);
}
KERNELS_INLINE void fetch_rows(const char* line, int64_t stride, int num_quarters) {
  for (; num_quarters > 0; --num_quarters, line += 4 * stride) fetch_quarter<2>(line, stride);
}

template <int T>
KERNELS_INLINE void resume(const Depth& depth, const float* sums) {
  if (depth.first == 0)
    tile_zero<T>();
  else
    tile_load<T>(sums, kTileLine);
}

struct Quarters {
  int first, last;  // of a tile's rows
};

// Both tiles of the panel with G groups of tokens, over [first, last) of the depth.
template <int kParts, int G, bool kAll>
KERNELS_INLINE void multiply_groups(const TokenTiles& x, const Panel& panel, int64_t first, int64_t last, int64_t depth,
                                    int64_t group, const Fetch& fetch, Quarters rows) {
  const int64_t stride0 = fetch.strides[0], stride1 = fetch.strides[1];
  const char *line0 = fetch.lines[0] + 4 * rows.first * stride0, *line1 = fetch.lines[1] + 4 * rows.first * stride1;
  const char* tokens = x.tile(first, 0, group);
  const auto multiply = [&](const auto& load) KERNELS_INLINE_LAMBDA {
    kAll ? fetch_tile(line0, stride0) : fetch_rows(line0, stride0, rows.last - rows.first);
    load(std::integral_constant<int, 4>(), std::integral_constant<int, 0>());
    kAll ? fetch_tile(line1, stride1) : fetch_rows(line1, stride1, rows.last - rows.first);
    load(std::integral_constant<int, 5>(), std::integral_constant<int, 1>());
    for (int part = 0; part < kParts; ++part) {
      tile_load<6>(tokens, kTileLine);
      tile_multiply<0, 4, 6>(), tile_multiply<1, 5, 6>();
      if constexpr (G == 2) {
        tile_load<7>(tokens + kTileBytes, kTileLine);
        tile_multiply<2, 4, 7>(), tile_multiply<3, 5, 7>();
      }
      tokens += x.part_stride_bytes();
    }
    line0 += kTileDepth * kWeightBytes, line1 += kTileDepth * kWeightBytes;
  };
  const WeightTile tile0 = panel.tiles[0], tile1 = panel.tiles[1];
  int64_t k = first;
  if (tile0.num_rows == kTileSide && tile1.num_rows == kTileSide) {
    const char* weights0 = reinterpret_cast<const char*>(tile0.start + k);
    const char* weights1 = reinterpret_cast<const char*>(tile1.start + k);
    for (; k + kTileDepth <= last; k += kTileDepth) {
      multiply([&](auto reg, auto tile) KERNELS_INLINE_LAMBDA {
        tile_load<reg()>(tile() == 0 ? weights0 : weights1, (tile() == 0 ? tile0 : tile1).stride * kWeightBytes);
      });
      weights0 += kTileDepth * kWeightBytes, weights1 += kTileDepth * kWeightBytes;
    }
  }
  for (; k < last; k += kTileDepth)
    multiply([&](auto reg, auto tile) KERNELS_INLINE_LAMBDA { panel.tiles[tile()].template load<reg()>(k, depth); });
}

// What is to be fetched next: a panel, from so far into its depth on.
struct Follower {
  const Panel& panel;
  int64_t first;
};

// A chunk of the panel with up to two groups of tokens. Lines are fetched `ahead` of what is multiplied, and after the
// chunk's last those of `next`: of all rows, or of some for one of several passes.
template <int kParts, int G, bool kAll>
__attribute__((noinline)) void multiply_chunk(const TokenTiles& x, const Panel& panel, const Depth& depth, int64_t group,
                                              PanelSums sums, int64_t ahead, const Follower& next, Quarters rows) {
  resume<0>(depth, sums.tile(0, group)), resume<1>(depth, sums.tile(1, group));
  if constexpr (G == 2) resume<2>(depth, sums.tile(0, group + 1)), resume<3>(depth, sums.tile(1, group + 1));
  const int64_t before = std::max<int64_t>(0, depth.last - depth.first - ahead) / kTileDepth * kTileDepth;
  const int64_t turn = depth.first + before;
  multiply_groups<kParts, G, kAll>(x, panel, depth.first, turn, depth.whole, group,
                                   Fetch(panel, depth.first + ahead), rows);
  multiply_groups<kParts, G, kAll>(x, panel, turn, depth.last, depth.whole, group,
                                   Fetch(next.panel, next.first), rows);
  tile_store<0>(sums.tile(0, group), kTileLine), tile_store<1>(sums.tile(1, group), kTileLine);
  if constexpr (G == 2)
    tile_store<2>(sums.tile(0, group + 1), kTileLine), tile_store<3>(sums.tile(1, group + 1), kTileLine);
}

// With one pass lines are fetched a little ahead of the products. Of several, each fetches a share of all that follows.
template <int kParts>
inline void multiply_pass(const TokenTiles& x, const Panel& panel, const Depth& depth, int pass, int num_passes,
                          PanelSums sums, const Follower& next) {
  const int64_t group = pass * kGroupsTogether;
  const bool is_pair = group + 1 < x.num_groups;
  if (num_passes == 1) {
    const auto multiply = is_pair ? multiply_chunk<kParts, 2, true> : multiply_chunk<kParts, 1, true>;
    return multiply(x, panel, depth, group, sums, kAheadBytes / kWeightBytes, next, {0, 4});
  }
  const auto multiply = is_pair ? multiply_chunk<kParts, 2, false> : multiply_chunk<kParts, 1, false>;
  multiply(x, panel, depth, group, sums, kChunkDepth, next, {pass * 4 / num_passes, (pass + 1) * 4 / num_passes});
}

inline void fold_sums(const PanelSums& sums, int term_columns) {  // of one group
  for (int row = 0; row < kPanelRows; ++row) {
    float* const columns = sums.start + row * kTileSide;
    store(columns, fold(load(columns), term_columns));
  }
}

// The first panel of what is multiplied next.
inline Panel panel_of(const NextWeights& next) {
  Panel panel;
  for (int tile = 0; tile < kPanelTiles; ++tile) {
    const int matrix = next.num_matrices == 2 ? tile : 0;
    const int64_t first = next.range.first + (next.num_matrices == 2 ? 0 : tile * kTileSide);
    panel.tiles[tile] = WeightTile(static_cast<const bf16*>(next.matrices[matrix]), next.strides[matrix], first,
                                   next.range.last);
  }
  return panel;
}

// Computes a block of panels with all tokens and calls finish(i, sums) for each; the beginning of `next` is fetched at
// the end.
template <int kParts, class Finish>
inline void multiply_panels_of(const TokenTiles& x, const Panel* panels, int num_panels, const NextWeights& next,
                               const Finish& finish) {
  thread_local Scratch scratch;
  const int64_t panel_floats = PanelSums::num_floats(x.num_groups);
  float* const sums = scratch.floats(size_t(num_panels * panel_floats));
  if (x.depth == 0) std::fill(sums, sums + num_panels * panel_floats, 0.0f);
  const TileSession session;
  const auto panel_sums = [&](int i) { return PanelSums{sums + i * panel_floats, x.num_groups}; };
  const bool has_next = next.range.first < next.range.last;
  const int num_passes = int((x.num_groups + kGroupsTogether - 1) / kGroupsTogether);
  for (int64_t first = 0; first < x.depth; first += kChunkDepth) {
    const Depth depth{first, std::min(x.depth, first + kChunkDepth), x.depth};
    const bool is_last = depth.last == x.depth;
    for (int i = 0; i < num_panels; ++i) {
      const bool in_chunk = i + 1 < num_panels;
      const Panel after = in_chunk ? panels[i + 1] : is_last && has_next ? panel_of(next) : panels[0];
      const Follower follower{after, in_chunk ? first : is_last ? 0 : depth.last};
      for (int pass = 0; pass < num_passes; ++pass)
        multiply_pass<kParts>(x, panels[i], depth, pass, num_passes, panel_sums(i), follower);
      if (!is_last) continue;
      if (kParts < x.num_terms) fold_sums(panel_sums(i), x.term_columns);
      finish(i, panel_sums(i));  // while what follows comes
    }
  }
  if (x.depth == 0)
    for (int i = 0; i < num_panels; ++i) finish(i, panel_sums(i));
}

template <class Finish>
inline void multiply_panels(const TokenTiles& x, const Panel* panels, int num_panels, const NextWeights& next,
                            const Finish& finish) {
  if (x.num_parts == 1) return multiply_panels_of<1>(x, panels, num_panels, next, finish);
  multiply_panels_of<kMaxTerms>(x, panels, num_panels, next, finish);
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

// Chooses a number of rows that leaves each thread some blocks.
inline int64_t block_rows(int64_t, int64_t num_weight_rows, int num_threads) {
  return std::clamp<int64_t>(num_weight_rows / kItemRows / (4 * num_threads), 1, kMostItems) * kItemRows;
}

}  // namespace kernels::KERNELS_ISA_NS
