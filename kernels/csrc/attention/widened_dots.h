// Scores in float32: queries are widened once, in the kernel order of the keys, and keys as they are loaded.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr bool kOnlyBf16 = false;
constexpr int kFetchedTiles = 8;  // lines of so many tiles are fetched in turn, into the first-level cache
constexpr bool kMayFetchFar = false;
constexpr int kTilesAtOnce = 1;

}  // namespace kernels::KERNELS_ISA_NS

#include "rows.h"
#include "tile_prefetcher.h"

namespace kernels::KERNELS_ISA_NS {

// Floats that a query takes.
template <class T, int D>
KERNELS_INLINE int query_floats(const Row<D>& row) {
  return row.padded();
}

template <class T, int D, class Query>
void load_queries_as(const DecodeRequest& r, const DecodePiece& piece, float* q) {
  const Row<D> row(r.head_dim);
  const int group = r.group();
  const Query* source = static_cast<const Query*>(r.q) + piece.seq * r.q_stride;
  source += int64_t(piece.first_head) * group * row.size();
  for (int h = 0; h < piece.num_heads() * group; ++h, source += row.size(), q += row.padded()) {
    std::fill(q, q + row.padded(), 0.0f);
    int start = 0;
    if (std::is_same<T, bf16>::value) {
      for (; start < row.paired(); start += 2 * kWidth)
        for (int i = 0; i < kWidth; ++i) {
          q[start + i] = to_float(source[start + 2 * i]);
          q[start + kWidth + i] = to_float(source[start + 2 * i + 1]);
        }
    }
    for (; start < row.size(); ++start) q[start] = to_float(source[start]);
  }
}

// The query heads of a piece, in the kernel order of KV type T, padded with zeros.
template <class T, int D>
void load_queries(const DecodeRequest& r, const DecodePiece& piece, float* q) {
  switch (r.q_dtype) {
    case DType::kBf16: return load_queries_as<T, D, bf16>(r, piece, q);
    case DType::kFp16: return load_queries_as<T, D, fp16>(r, piece, q);
    default: return load_queries_as<T, D, float>(r, piece, q);
  }
}

// The scores q[h] . k[t] of H heads and 4 tokens, whose rows start at k + offset[t].
template <class T, int H, int D>
KERNELS_INLINE Vec dot_4_tokens(const Row<D>& row, const float* q, const T* k, const int (&offset)[4],
                                TilePrefetcher<T>& prefetch) {
  Vec acc[H][4];
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < 4; ++t) acc[h][t] = zero();
  int d = 0;
  for (; d < row.paired(); d += 2 * kWidth) {
    prefetch.during_dot();
    Vec q0[H], q1[H];
    for (int h = 0; h < H; ++h) {
      q0[h] = load(q + h * row.padded() + d);
      q1[h] = load(q + h * row.padded() + d + kWidth);
    }
    for (int t = 0; t < 4; ++t) {
      Vec k0, k1;
      load_pair(k + offset[t] + d, k0, k1);
      for (int h = 0; h < H; ++h) {
        acc[h][t] = fmadd(q0[h], k0, acc[h][t]);
        acc[h][t] = fmadd(q1[h], k1, acc[h][t]);
      }
    }
  }
  for (; d < row.size(); d += kWidth) {
    for (int t = 0; t < 4; ++t) {
      const Vec k0 = row.load(k + offset[t], d);
      for (int h = 0; h < H; ++h) acc[h][t] = fmadd(load(q + h * row.padded() + d), k0, acc[h][t]);
    }
  }
  return reduce_4_tokens<H>(acc);
}

}  // namespace kernels::KERNELS_ISA_NS
