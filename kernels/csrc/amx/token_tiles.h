// Rows of x (tokens) as B tiles: 16 tokens by 32 of the depth.
//
// Products take bfloat16, so a float32 is given as three terms that add up to all its 24 bits, each with its sign. A
// term that is zero is made the least normal number: a weight of infinity then gives infinity, not NaN.
#pragma once

#include "tiles.h"
#include "transpose.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kMaxTerms = 3, kGroupsTogether = 2;

// Two groups of 16 tokens lie together: tiles of the same part of the depth one behind the other, part by part. A part
// is a term, or all terms of up to 5 tokens beside each other. All parts of a group are added to the same sums; those of
// terms beside each other `fold` adds up.
class TokenTiles {
 public:
  TokenTiles(void* start, DType dtype, int64_t num_tokens, int64_t depth)
      : num_terms(dtype == DType::kFp32 ? kMaxTerms : 1), term_columns(columns_of_term(num_terms, num_tokens)),
        num_parts((num_terms * term_columns + kTileSide - 1) / kTileSide),
        num_groups((num_tokens + kTileSide - 1) / kTileSide), num_tokens(num_tokens), depth(depth),
        together_(num_groups == 1 ? 1 : kGroupsTogether), start_(static_cast<char*>(start)) {}

  static int64_t num_bytes(DType dtype, int64_t num_tokens, int64_t depth) {
    const TokenTiles tiles(nullptr, dtype, num_tokens, depth);
    return (tiles.num_groups + tiles.together_ - 1) / tiles.together_ * tiles.bytes_together();
  }

  // Tile of elements [k, k + 32), k a multiple of 32.
  KERNELS_INLINE char* tile(int64_t k, int part, int64_t group) const {
    return start_ + group / together_ * bytes_together() +
           ((k / kTileDepth * num_parts + part) * together_ + group % together_) * kTileBytes;
  }
  KERNELS_INLINE int64_t part_stride_bytes() const { return together_ * kTileBytes; }

  // Where a term's columns begin, counted over the parts of a group.
  KERNELS_INLINE int first_column(int term) const { return term * term_columns; }

  const int num_terms, term_columns, num_parts;
  const int64_t num_groups, num_tokens, depth;

 private:
  static int columns_of_term(int num_terms, int64_t num_tokens) {
    return num_terms * num_tokens <= kTileSide ? int(num_tokens) : kTileSide;
  }
  int64_t bytes_together() const { return (depth + kTileDepth - 1) / kTileDepth * num_parts * part_stride_bytes(); }

  const int64_t together_;
  char* const start_;
};

// A row of sums: adds the columns of a token's other terms to its first one.
KERNELS_INLINE Vec fold(Vec sums, int term_columns) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const auto moved = [&](int columns) KERNELS_INLINE_LAMBDA {
    return _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(columns)), sums);
  };
  return add(add(sums, moved(term_columns)), moved(2 * term_columns));
}

// The upper halves of `even` and `odd`: a row of pairs.
inline __m512i pairs(__m512i even, __m512i odd) {
  return _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, _mm512_set1_epi32(int(0xffff0000u))));
}

// Three vectors of bfloat16 values (in the upper halves) whose sum is x.
inline void split(Vec x, __m512i (&terms)[kMaxTerms]) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u)), sign_bit = _mm512_set1_epi32(int(0x80000000u));
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i least = _mm512_or_si512(_mm512_and_si512(bits, sign_bit), _mm512_set1_epi32(0x00800000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
  terms[0] = _mm512_mask_mov_epi32(_mm512_and_si512(bits, upper), nan, _mm512_set1_epi32(0x7fc00000));
  Vec rest = _mm512_sub_ps(x, _mm512_castsi512_ps(terms[0]));  // NaN for an infinity: `least` then
  for (int i = 1; i < kMaxTerms; ++i) {
    const __m512i term = _mm512_and_si512(_mm512_castps_si512(rest), upper);
    const __mmask16 usable =
        _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_castsi512_ps(term)), _mm512_set1_ps(1.17549435e-38f), _CMP_GE_OQ);
    terms[i] = _mm512_mask_mov_epi32(least, usable, term);
    terms[i] = _mm512_maskz_mov_epi32(__mmask16(~(zero | nan)), terms[i]);
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(term));
  }
}

// One token's 32 elements as pairs, term by term.
inline void token_pairs(const bf16* x, int count, __m512i (&terms)[kMaxTerms]) {
  terms[0] = _mm512_maskz_loadu_epi16(__mmask32(count < 32 ? (1u << count) - 1 : ~0u), x);
}
inline void token_pairs(const float* x, int count, __m512i (&terms)[kMaxTerms]) {
  __m512i low[kMaxTerms], high[kMaxTerms];
  split(load_partial(x, std::min(count, kWidth)), low);
  split(load_partial(x + std::min(count, kWidth), std::max(0, count - kWidth)), high);
  const __m512i odd_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                              25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int i = 0; i < kMaxTerms; ++i) terms[i] = _mm512_permutex2var_epi16(low[i], odd_halves, high[i]);
}

template <class T>
inline void pack_tile(const TokenTiles& tiles, const T* x, int64_t stride, int64_t k, int64_t group) {
  alignas(64) int32_t rows[kMaxTerms * kTileSide][kTileSide];  // [column][pair]
  for (int i = 0; i < tiles.num_parts * kTileSide; ++i) _mm512_store_si512(rows[i], _mm512_setzero_si512());
  const int count = int(std::min<int64_t>(kTileDepth, tiles.depth - k));
  const int num_tokens = int(std::min<int64_t>(kTileSide, tiles.num_tokens - group * kTileSide));
  for (int token = 0; token < num_tokens; ++token) {
    __m512i terms[kMaxTerms] = {};
    token_pairs(x + (group * kTileSide + token) * stride + k, count, terms);
    for (int i = 0; i < tiles.num_terms; ++i) _mm512_store_si512(rows[tiles.first_column(i) + token], terms[i]);
  }
  for (int i = 0; i < tiles.num_parts; ++i)
    transpose_tile(rows[i * kTileSide], tiles.tile(k, i, group), kTileLine);
}

inline void pack_tokens(const TokenTiles& tiles, const InputRows& x) {
  for (int64_t k = 0; k < tiles.depth; k += kTileDepth)
    for (int64_t group = 0; group < tiles.num_groups; ++group)
      if (x.dtype == DType::kFp32)
        pack_tile(tiles, static_cast<const float*>(x.start), x.stride, k, group);
      else
        pack_tile(tiles, static_cast<const bf16*>(x.start), x.stride, k, group);
}

}  // namespace kernels::KERNELS_ISA_NS
