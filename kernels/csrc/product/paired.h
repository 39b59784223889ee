// Products of pairs: rows of bfloat16 are multiplied as they are, two elements a lane, into float32; denormals count as
// zeros. Rows of float32 are multiplied in float32, as elsewhere: a product of their three bfloat16 terms would take
// three instructions where two do (and one to widen a weight, for all rows of x).
//
// Measured on a Zen 4 core (docs/kernels.md), whose second-level cache can wait for more lines than its first: weights
// are fetched into the second, a row after the other, in long pieces. Another vendor's cores with these instructions
// have tiles as well.
#pragma once

#include "weight_block.h"

namespace kernels::KERNELS_ISA_NS {

using PackedBf16 = bf16;

constexpr int kMostTileOutputs = 8;
template <class X>
constexpr int tile_outputs(int num_rows) { return num_rows <= 2 ? 8 : num_rows <= 6 ? 4 : 2; }

template <class X>
constexpr int most_tile_rows() { return sizeof(X) == sizeof(bf16) ? 8 : 6; }

// The part of x that a register tile reads fills half of the first-level cache.
template <class X>
constexpr int64_t chunk_depth(int64_t num_rows) {
  const int64_t rows = std::min<int64_t>(num_rows, most_tile_rows<X>());
  return std::clamp<int64_t>((16 << 10) / (rows * int64_t(sizeof(X))) / 512 * 512, 512, 4096);
}

using RowPrefetcher = ChunkPrefetcher<1, 2>;

// sum[m][n] += x[m] . w[n] for 32 elements or the first `count` of them; x has zeros beyond.
template <int M, int N, class Load>
KERNELS_INLINE void add_pairs(const bf16* x, int64_t x_stride, const Load& load_weights, Vec (&sum)[M][N]) {
  __m512i weight[N];
  for (int n = 0; n < N; ++n) weight[n] = load_weights(n);
  for (int m = 0; m < M; ++m) {
    const __m512i row = _mm512_loadu_si512(x + m * x_stride);
    for (int n = 0; n < N; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], (__m512bh)row, (__m512bh)weight[n]);
  }
}

template <int M, int N>
KERNELS_INLINE void add_pair(const bf16* x, int64_t x_stride, const bf16* const (&w)[N], int64_t k, Vec (&sum)[M][N]) {
  add_pairs<M, N>(x, x_stride, [&](int n) { return _mm512_loadu_si512(w[n] + k); }, sum);
}

template <int M, int N>
KERNELS_INLINE void add_rest(const bf16* x, int64_t x_stride, const bf16* const (&w)[N], int64_t k, int count,
                             Vec (&sum)[M][N]) {
  const __mmask32 mask = (1u << count) - 1;
  add_pairs<M, N>(x, x_stride, [&](int n) { return _mm512_maskz_loadu_epi16(mask, w[n] + k); }, sum);
}

}  // namespace kernels::KERNELS_ISA_NS
