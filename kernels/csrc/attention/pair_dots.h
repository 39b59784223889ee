// Scores by products of bfloat16 pairs (vdpbf16ps): queries and keys go in as they are, so that nothing is widened and a
// product takes half as many instructions. Products are exact and sums float32, as elsewhere; denormals count as zeros.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr bool kOnlyBf16 = true;
// Measured on cores of Zen 4 and Zen 5 (docs/kernels.md): one tile after the other. On a Zen 4 it comes into the
// second-level cache, which can wait for more lines than the first, its values from the end; on a Zen 5 into the first.
constexpr int kFetchedTiles = 1;
constexpr bool kMayFetchFar = true;
constexpr int kTilesAtOnce = 1;

}  // namespace kernels::KERNELS_ISA_NS

#include "rows.h"
#include "tile_prefetcher.h"

namespace kernels::KERNELS_ISA_NS {

template <int D>
KERNELS_INLINE int padded_pairs(const Row<D>& row) {
  return (row.size() + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth);
}

// Floats that a query takes.
template <class T, int D>
KERNELS_INLINE int query_floats(const Row<D>& row) {
  return padded_pairs(row) / 2;
}

// The query heads of a piece, each padded with zeros to whole vectors.
template <class T, int D>
void load_queries(const DecodeRequest& r, const DecodePiece& piece, float* q) {
  const Row<D> row(r.head_dim);
  const int num_rows = piece.num_heads() * r.group();
  const bf16* source = static_cast<const bf16*>(r.q) + piece.seq * r.q_stride;
  source += int64_t(piece.first_head) * r.group() * row.size();
  bf16* target = reinterpret_cast<bf16*>(q);
  for (int h = 0; h < num_rows; ++h, source += row.size(), target += padded_pairs(row)) {
    std::memcpy(target, source, size_t(row.size()) * sizeof(bf16));
    std::memset(target + row.size(), 0, size_t(padded_pairs(row) - row.size()) * sizeof(bf16));
  }
}

// The scores q[h] . k[t] of H heads and 4 tokens, whose rows start at k + offset[t].
template <class T, int H, int D>
KERNELS_INLINE Vec dot_4_tokens(const Row<D>& row, const float* q, const T* k, const int (&offset)[4],
                                TilePrefetcher<T>& prefetch) {
  Vec acc[H][4];
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < 4; ++t) acc[h][t] = zero();
  const auto add = [&](int d, auto is_whole, __mmask32 rest) KERNELS_INLINE_LAMBDA {
    __m512i query[H];
    for (int h = 0; h < H; ++h) query[h] = _mm512_loadu_si512(q + h * query_floats<T>(row) + d / 2);
    for (int t = 0; t < 4; ++t) {
      const T* const start = k + offset[t] + d;
      const __m512i key = is_whole() ? _mm512_loadu_si512(start) : _mm512_maskz_loadu_epi16(rest, start);
      for (int h = 0; h < H; ++h) acc[h][t] = _mm512_dpbf16_ps(acc[h][t], (__m512bh)query[h], (__m512bh)key);
    }
  };
  int d = 0;
  for (; d < row.paired(); d += 2 * kWidth) {
    prefetch.during_dot();
    add(d, std::true_type(), 0);
  }
  if (d < row.size()) add(d, std::false_type(), (1u << (row.size() - d)) - 1);
  return reduce_4_tokens<H>(acc);
}

}  // namespace kernels::KERNELS_ISA_NS
