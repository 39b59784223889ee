// The online softmax of a unit of query heads over up to 64 tokens, and its weights as tiles A.
//
// Scores come a token a row, of 8 heads in half a vector or of 16 in a whole one. Weights go on as three bfloat16 terms
// that add up to all their 24 bits. Of 32 tokens and 8 heads they are two tiles, one with the first term of all heads
// above the second, and one with the third above the least number: with zeros there, whose products are added to those
// of the second term, a value of infinity would become NaN. Of 16 heads they are three tiles, one a term.
//
// Weights are relative to a maximum that follows the scores only when these exceed it by kSlack: until then outputs
// need no rescaling. They are as exact as relative to the true maximum, but sums of values may be e^kSlack times as
// large before they are divided, and so overflow where values come near float32's largest.
#pragma once

#include "../amx/token_tiles.h"
#include "tile_visits.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kStepTokens = 32;     // of a tile of weights
constexpr int kMaxWeightTiles = 3;  // of 32 tokens
constexpr float kSlack = 8.0f;      // weights stay below e^8

constexpr int num_weight_tiles(int unit_heads) { return unit_heads == 8 ? 2 : 3; }

// The softmax of a unit's query heads so far. For 8 heads both halves of `maxima` are the same, and `sums` are to be
// added up.
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

// As `split`, for numbers that are not negative; the least number after the terms.
KERNELS_INLINE void split_weights(Vec x, __m512i (&terms)[kMaxTerms + 1]) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  const __mmask16 not_zero = _mm512_cmp_ps_mask(x, zero(), _CMP_NEQ_UQ);
  Vec rest = x;
  for (int i = 0; i < kMaxTerms; ++i) {
    terms[i] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
    rest = sub(rest, _mm512_castsi512_ps(terms[i]));
  }
  terms[kMaxTerms] = _mm512_maskz_set1_epi32(not_zero, 0x00800000);
  for (int i = 1; i < kMaxTerms; ++i)  // NaN stays NaN
    terms[i] = _mm512_castps_si512(
        _mm512_maskz_max_ps(not_zero, broadcast(1.17549435e-38f), _mm512_castsi512_ps(terms[i])));
}

// Scales the scores of a tile's tokens in place, -infinity for those beyond its last, and returns their maxima.
template <int kHeads>
KERNELS_INLINE Vec scale_scores(float* scores, int num_tokens, const DecodeRequest& r, Vec maximum) {
  constexpr int kTokens = kWidth / kHeads;  // of a vector
  for (int token = 0; token < kTile; token += kTokens, scores += kWidth) {
    Vec vector = load(scores);
    if (r.bf16_round) vector = rounded_to_bf16(vector);
    vector = mul(vector, broadcast(r.scale));
    if (num_tokens < kTile) {
      const int valid = std::clamp(num_tokens - token, 0, kTokens) * kHeads;
      const Vec nothing = broadcast(-std::numeric_limits<float>::infinity());
      vector = _mm512_mask_mov_ps(nothing, __mmask16((1u << valid) - 1), vector);
    }
    store(scores, vector);
    maximum = vmax(maximum, vector);
  }
  return maximum;
}

// Weights of 16 even and 16 odd tokens for one head, as a row of each term's tile.
template <int kHeads>
KERNELS_INLINE void store_row(const float* even, const float* odd, int head, char* tiles) {
  __m512i first[kMaxTerms + 1], second[kMaxTerms + 1];
  split_weights(load(even), first), split_weights(load(odd), second);
  for (int term = 0; term < (kHeads == 8 ? kMaxTerms + 1 : kMaxTerms); ++term)
    _mm512_store_si512(tiles + (term * kHeads + head) * kTileLine, pairs(first[term], second[term]));
}

// Weights of 32 tokens, a token a row, become tiles A.
template <int kHeads>
inline void store_weights(const float* weights, char* tiles) {
  alignas(64) float by_head[2][kTileSide][kTileSide];
  if constexpr (kHeads == 8) {  // a vector has an even and an odd token
    transpose_tile(weights, by_head[0], kTileLine);
    for (int head = 0; head < kHeads; ++head) store_row<kHeads>(by_head[0][head], by_head[0][8 + head], head, tiles);
  } else {
    transpose_tile(weights, by_head[0], kTileLine);
    transpose_tile(weights + kTileSide * kTileSide, by_head[1], kTileLine);
    for (int head = 0; head < kHeads; ++head) store_row<kHeads>(by_head[0][head], by_head[1][head], head, tiles);
  }
}

// Scores of `num_tiles` tiles become weights: num_weight_tiles for every two of them, zeros beyond the last. `scores`
// are lost. Where the maxima have to follow, writes what the heads' old outputs are to be multiplied with and returns
// true.
template <int kHeads>
inline bool weigh(const DecodeRequest& r, const Tile<bf16>* tiles, int num_tiles, float* scores, Softmax& softmax,
                  char* weights, float* correction, VisitPrefetcher& prefetch) {
  constexpr int kTokens = kWidth / kHeads, kTileFloats = kTile * kHeads;
  const Vec old_maximum = load(softmax.maxima);
  Vec maximum = old_maximum;
  for (int tile = 0; tile < num_tiles; ++tile)
    maximum = scale_scores<kHeads>(scores + tile * kTileFloats, tiles[tile].num_tokens, r, maximum);
  if constexpr (kHeads == 8) maximum = vmax(maximum, swap_halves(maximum));
  const bool follows =
      _mm512_cmp_ps_mask(maximum, add(old_maximum, broadcast(kSlack)), _CMP_GT_OQ) != 0;  // also from -infinity
  Vec sums = load(softmax.sums);
  if (follows) {
    const Vec factor = vexp(sub(old_maximum, vmax(broadcast(std::numeric_limits<float>::lowest()), maximum)));
    store(correction, factor);
    store(softmax.maxima, maximum);
    sums = mul(sums, factor);
  }
  const Vec shift = vmax(broadcast(std::numeric_limits<float>::lowest()), load(softmax.maxima));
  for (int tile = 0; tile < num_tiles; tile += 2) {
    const int num_vectors = std::min(2, num_tiles - tile) * kTile / kTokens;
    // For 16 heads even tokens come first, then odd ones, as the transposition wants them.
    alignas(64) float ordered[kStepTokens * kHeads];
    const auto place = [](int i) KERNELS_INLINE_LAMBDA {
      return kHeads == 8 ? i * kWidth : (i / 2 + i % 2 * kTileSide) * kWidth;
    };
    const float* const source = scores + tile * kTileFloats;
    for (int i = 0; i < num_vectors; ++i) {
      prefetch.fetch(1);
      const Vec weight = vexp(sub(load(source + i * kWidth), shift));
      sums = add(sums, weight);
      store(ordered + place(i), weight);
    }
    for (int i = num_vectors; i < kStepTokens / kTokens; ++i) store(ordered + place(i), zero());
    store_weights<kHeads>(ordered, weights + tile / 2 * num_weight_tiles(kHeads) * kTileBytes);
  }
  store(softmax.sums, sums);
  return follows;
}

}  // namespace kernels::KERNELS_ISA_NS
