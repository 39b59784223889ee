// The online softmax of a tile of query heads, and its weights as tiles A.
//
// Scores come as tiles C, a token a row. 8 query heads fill half a row, so that a vector takes two tokens of a tile:
// token i, and token i + 8 in its upper half. A weight goes on as three bfloat16 terms that add up to all its 24 bits:
// for 32 tokens, two tiles A, one with the first term of 8 heads above the second, one with the third.
#pragma once

#include "../amx/token_tiles.h"
#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kUnitHeads = 8;
constexpr int kTileVectors = kTile / 2;  // of a tile's scores
constexpr int kWeightTiles = 2;          // of 32 tokens

// The softmax of 8 query heads so far: both halves are the same.
struct Softmax {
  alignas(64) float maxima[kWidth], sums[kWidth];

  void clear() {
    std::fill(maxima, maxima + kWidth, -std::numeric_limits<float>::infinity());
    std::fill(sums, sums + kWidth, 0.0f);
  }
};

inline Vec swap_halves(Vec v) { return _mm512_shuffle_f32x4(v, v, 0x4e); }

// As from_float<bf16>.
inline Vec rounded_to_bf16(Vec v) {
  const __m512i bits = _mm512_castps_si512(v), upper = _mm512_set1_epi32(int(0xffff0000u));
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_mask_mov_epi32(rounded, nan, quiet), upper));
}

// The scores of 8 heads for tokens i and i + 8 of a tile, of which there are `num_tokens`; -infinity for those beyond.
KERNELS_INLINE Vec scaled_scores(const float* tile, int i, int num_tokens, const DecodeRequest& r) {
  const __m512 lower = _mm512_castps256_ps512(_mm256_load_ps(tile + i * kTileSide));
  Vec scores = _mm512_insertf32x8(lower, _mm256_load_ps(tile + (i + kTileVectors) * kTileSide), 1);
  if (r.bf16_round) scores = rounded_to_bf16(scores);
  scores = mul(scores, broadcast(r.scale));
  if (num_tokens == kTile) return scores;
  const auto valid = __mmask16((i < num_tokens ? 0xff : 0) | (i + kTileVectors < num_tokens ? 0xff00 : 0));
  return _mm512_mask_mov_ps(broadcast(-std::numeric_limits<float>::infinity()), valid, scores);
}

// As `split`, for numbers from 0 to 1.
KERNELS_INLINE void split_weights(Vec x, __m512i (&terms)[kMaxTerms]) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  const __mmask16 not_zero = _mm512_cmp_ps_mask(x, zero(), _CMP_NEQ_UQ);
  Vec rest = x;
  for (int i = 0; i < kMaxTerms; ++i) {
    terms[i] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
    rest = sub(rest, _mm512_castsi512_ps(terms[i]));
  }
  for (int i = 1; i < kMaxTerms; ++i)  // NaN stays NaN
    terms[i] = _mm512_castps_si512(
        _mm512_maskz_max_ps(not_zero, broadcast(1.17549435e-38f), _mm512_castsi512_ps(terms[i])));
}

// Weights of tokens i and i + 1 (and i + 8 and i + 9) as pairs, term by term; adds them to `total`.
KERNELS_INLINE void weight_pairs(const float* scores, Vec shift, Vec& total, __m512i (&terms)[kMaxTerms]) {
  const Vec first = vexp(sub(load(scores), shift)), second = vexp(sub(load(scores + kWidth), shift));
  total = add(total, add(first, second));
  __m512i even[kMaxTerms], odd[kMaxTerms];
  split_weights(first, even), split_weights(second, odd);
  for (int i = 0; i < kMaxTerms; ++i) terms[i] = pairs(even[i], odd[i]);
}

// The weights of 8 heads, term by term in pairs of tokens, to two tiles A. The second's lower half stays as it is.
inline void store_weights(const __m512i (&terms)[kMaxTerms][8], char* tiles) {
  for (int term = 0; term < kMaxTerms; ++term) {
    __m512i rows[kUnitHeads];
    transpose(terms[term], rows);
    for (int head = 0; head < kUnitHeads; ++head)
      _mm512_store_si512(tiles + (term * kUnitHeads + head) * kTileLine, rows[head]);
  }
}

// Scores of `num_tiles` tiles, `scores` being those of the first head and token, become weights relative to each head's
// new running maximum: kWeightTiles for every two of them, filled up with zeros. Returns what the heads' old outputs
// are to be multiplied with. See update_softmax.
template <class T>
inline Vec weigh(const DecodeRequest& r, const Tile<T>* tiles, int num_tiles, const float* scores, Softmax& softmax,
                 char* weights, TilePrefetcher<T>& prefetch) {
  alignas(64) float scaled[kTilesAtOnce * kTileVectors * kWidth];
  const Vec old_maximum = load(softmax.maxima);
  Vec maximum = old_maximum;
  for (int tile = 0; tile < num_tiles; ++tile)
    for (int i = 0; i < kTileVectors; ++i) {
      const Vec vector = scaled_scores(scores + tile * kTile * kTileSide, i, tiles[tile].num_tokens, r);
      store(scaled + (tile * kTileVectors + i) * kWidth, vector);
      maximum = vmax(maximum, vector);
    }
  maximum = vmax(maximum, swap_halves(maximum));
  store(softmax.maxima, maximum);
  const Vec shift = vmax(broadcast(std::numeric_limits<float>::lowest()), maximum);
  Vec total = zero();
  for (int tile = 0; tile < num_tiles; tile += 2) {
    __m512i terms[kMaxTerms][8];  // four vectors of pairs a tile
    if (tile + 1 == num_tiles)
      for (auto& term : terms) std::fill(term + 4, term + 8, _mm512_setzero_si512());
    for (int i = 0; i < std::min(2, num_tiles - tile) * kTileVectors; i += 2) {
      __m512i pair[kMaxTerms];
      prefetch.during_tiles();
      weight_pairs(scaled + (tile * kTileVectors + i) * kWidth, shift, total, pair);
      for (int term = 0; term < kMaxTerms; ++term) terms[term][i / 2] = pair[term];
    }
    store_weights(terms, weights + tile / 2 * kWeightTiles * kTileBytes);
  }
  const Vec correction = vexp(sub(old_maximum, shift));
  store(softmax.sums, fmadd(load(softmax.sums), correction, add(total, swap_halves(total))));
  return correction;
}

}  // namespace kernels::KERNELS_ISA_NS
