// Values as tiles B, and their weighted sums.
#pragma once

#include "../amx/token_tiles.h"
#include "tiles.h"
#include "weight_tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kSumTiles = 4;  // that are computed together

// Tiles B of 32 tokens, one for the even and one for the odd columns of every 32.
inline int64_t value_bytes(int value_dim) { return value_dim / kTileSide * kTileBytes; }

// The tokens of `tile` by pairs, as 8 rows of each of the tiles; zeros beyond the last.
inline void pair_values(const Tile<bf16>& tile, int value_dim, int stride, char* tiles,
                        TilePrefetcher<bf16>& prefetch) {
  const auto row = [&](int token, int d) KERNELS_INLINE_LAMBDA {
    return token < tile.num_tokens ? _mm512_loadu_si512(tile.v + int64_t(token) * stride + d) : _mm512_setzero_si512();
  };
  for (int token = 0; token < kTile; token += 2)
    for (int d = 0; d < value_dim; d += kTileDepth) {
      if (token % 4 == 0 && d % (2 * kTileDepth) == 0) prefetch.during_tiles();
      const __m512i first = row(token, d), second = row(token + 1, d);
      char* const out = tiles + d / kTileSide * kTileBytes + token / 2 * kTileLine;
      _mm512_store_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaau, first, _mm512_slli_epi32(second, 16)));
      _mm512_store_si512(out + kTileBytes, pairs(first, second));
    }
}

// C tiles 0 to N - 1: 16 columns each of the weighted sum of `num_tokens`, taken 32 at a time.
template <int N>
inline void multiply_values(const char* weights, const char* values, int64_t step, int num_tokens, char* sums,
                            TilePrefetcher<bf16>& prefetch) {
  const auto all = [&](const auto& body) KERNELS_INLINE_LAMBDA {
    body(std::integral_constant<int, 0>()), body(std::integral_constant<int, 1>());
    if constexpr (N > 2) body(std::integral_constant<int, 2>()), body(std::integral_constant<int, 3>());
  };
  all([&](auto c) KERNELS_INLINE_LAMBDA { tile_zero<c()>(); });
  for (int token = 0; token < num_tokens; token += kTileDepth, values += step)
    for (int part = 0; part < kWeightTiles; ++part, weights += kTileBytes) {
      tile_load<4>(weights, kTileLine);
      // All sums in turn: a product that adds to a tile waits for the one before.
      all([&](auto c) KERNELS_INLINE_LAMBDA {
        constexpr int kValues = 5 + c() % 3;
        if constexpr (c() % 2 == 0) prefetch.during_tiles();
        tile_load<kValues>(values + c() * kTileBytes, kTileLine);
        tile_multiply<c(), 4, kValues>();
      });
    }
  all([&](auto c) KERNELS_INLINE_LAMBDA { tile_store<c()>(sums + c() * kTileBytes, kTileLine); });
}

// acc[head] = correction[head] * acc[head] + the sums of its terms, for columns [d, d + 16 * num_tiles).
inline void add_sums(const float* sums, int num_tiles, int num_heads, const float* correction, int padded_dim, int d,
                     float* acc) {
  for (int head = 0; head < num_heads; ++head, acc += padded_dim, sums += kTileSide)
    for (int tile = 0; tile < num_tiles; ++tile) {
      const float* const first = sums + tile * kTileSide * kTileSide;
      const Vec sum = add(load(first), load(first + kUnitHeads * kTileSide));
      float* const out = acc + d + tile * kTileSide;
      store(out, fmadd(broadcast(correction[head]), load(out), sum));
    }
}

// The outputs of up to 8 heads go on with the values of `num_tokens`.
inline void add_values(const char* weights, const char* values, int value_dim, int num_tokens, int num_heads,
                       const float* correction, float* acc, TilePrefetcher<bf16>& prefetch) {
  alignas(64) float sums[kSumTiles * kTileSide * kTileSide];
  const int64_t step = value_bytes(value_dim);
  tile_fence();
  for (int d = 0; d < value_dim; d += kSumTiles * kTileSide, values += kSumTiles * kTileBytes) {
    const int num_tiles = std::min(kSumTiles, (value_dim - d) / kTileSide);
    if (num_tiles == kSumTiles)
      multiply_values<kSumTiles>(weights, values, step, num_tokens, reinterpret_cast<char*>(sums), prefetch);
    else
      multiply_values<2>(weights, values, step, num_tokens, reinterpret_cast<char*>(sums), prefetch);
    add_sums(sums, num_tiles, num_heads, correction, value_dim, d, acc);
  }
}

}  // namespace kernels::KERNELS_ISA_NS
