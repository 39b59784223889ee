// Values as tiles B, and their weighted sums.
#pragma once

#include "../amx/token_tiles.h"
#include "tile_visits.h"
#include "weight_tiles.h"

namespace kernels::KERNELS_ISA_NS {

// Two tiles B of 32 tokens take every 32 columns: the first, of each 8 columns, four, and the second the other four, as
// unpacking gives them.
inline int64_t value_bytes(int value_dim) { return value_dim / kTileSide * kTileBytes; }

// The tokens of `tile` by pairs, as 8 rows of each of the tiles; zeros beyond the last.
inline void pair_values(const Tile<bf16>& tile, int value_dim, int stride, char* tiles,
                        VisitPrefetcher& prefetch) {
  const int num_fetched = stride / 128;  // lines of a stream with each pair of tokens
  for (int token = 0; token < kTile; token += 2) {
    const bf16* const first = tile.v + int64_t(token) * stride;
    const __mmask16 has_first = token < tile.num_tokens ? 0xffff : 0;
    const __mmask16 has_second = token + 1 < tile.num_tokens ? 0xffff : 0;
    char* out = tiles + token / 2 * kTileLine;
    for (int d = 0; d < value_dim; d += kTileDepth, out += 2 * kTileBytes) {
      const __m512i even = _mm512_maskz_loadu_epi32(has_first, first + d);
      const __m512i odd = _mm512_maskz_loadu_epi32(has_second, first + stride + d);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(out + kTileBytes, _mm512_unpackhi_epi16(even, odd));
    }
    prefetch.fetch(num_fetched);
  }
}

// Two tiles of outputs go on with `num_steps` times 32 tokens. Of 8 heads' outputs the first term's rows lie above the
// second's.
template <int kHeads>
KERNELS_INLINE void add_value_pair(const char* weights, const char* values, int64_t step, int num_steps, bool is_first,
                                   float* outputs, VisitPrefetcher& prefetch) {
  char* const out = reinterpret_cast<char*>(outputs);
  if (is_first)
    tile_zero<4>(), tile_zero<5>();
  else
    tile_load<4>(out, kTileLine), tile_load<5>(out + kTileBytes, kTileLine);
  for (int i = 0; i < num_steps; ++i, values += step) {
    prefetch.fetch(4);
    tile_load<3>(values, kTileLine), tile_load<7>(values + kTileBytes, kTileLine);
    for (int tile = 0; tile < num_weight_tiles(kHeads); ++tile, weights += kTileBytes) {
      tile_load<6>(weights, kTileLine);
      tile_multiply<4, 6, 3>(), tile_multiply<5, 6, 7>();
    }
  }
  tile_store<4>(out, kTileLine), tile_store<5>(out + kTileBytes, kTileLine);
}

// Copies a head's outputs to the state's order: see value_bytes, and load_pair in vec.h.
template <int kHeads>
inline void put_outputs(const float* outputs, int head, int value_dim, float* acc) {
  for (int d = 0; d < value_dim; d += kTileDepth, outputs += 2 * kTileSide * kTileSide) {
    const auto row = [&](int tile) KERNELS_INLINE_LAMBDA {
      const float* const start = outputs + (tile * kTileSide + head) * kTileSide;
      return kHeads == 8 ? add(load(start), load(start + 8 * kTileSide)) : load(start);
    };
    const Vec low = row(0), high = row(1);
    // low has columns 0-3, 8-11, 16-19, 24-27 of 32, high the rest.
    const __m512i even = _mm512_set_epi32(30, 28, 14, 12, 26, 24, 10, 8, 22, 20, 6, 4, 18, 16, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    store(acc + d, _mm512_permutex2var_ps(low, even, high));
    store(acc + d + kWidth, _mm512_permutex2var_ps(low, odd, high));
  }
}

}  // namespace kernels::KERNELS_ISA_NS
