// One piece of decode attention, written once against vec.h and compiled for each instruction set.
//
// A tile is up to 16 tokens of one block. Its keys stay in L1 while all query heads of the group use them, kHeadTile
// heads at a time; then an online softmax (running maximum) and the weighted sum of the tile's values.
#pragma once

#include "decode.h"
#include "rows.h"
#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

static_assert(kTile % kWidth == 0, "scores of a tile are whole vectors");

// scores[h][t] = q[h] . k[t] for H heads and N tokens. Row<D> makes the bounds of all loops constants.
template <class T, int H, int N, int D>
KERNELS_INLINE void dot_tokens(const Row<D>& row, const float* q, const T* k, float* scores) {
  Vec acc[H][N];
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < N; ++t) acc[h][t] = zero();
  int d = 0;
  for (; d < row.paired(); d += 2 * kWidth) {
    Vec q0[H], q1[H];
    for (int h = 0; h < H; ++h) {
      q0[h] = load(q + h * row.padded() + d);
      q1[h] = load(q + h * row.padded() + d + kWidth);
    }
    for (int t = 0; t < N; ++t) {
      Vec k0, k1;
      load_pair(k + t * row.size() + d, k0, k1);
      for (int h = 0; h < H; ++h) {
        acc[h][t] = fmadd(q0[h], k0, acc[h][t]);
        acc[h][t] = fmadd(q1[h], k1, acc[h][t]);
      }
    }
  }
  for (; d < row.size(); d += kWidth) {
    for (int t = 0; t < N; ++t) {
      const Vec k0 = row.load(k + t * row.size(), d);
      for (int h = 0; h < H; ++h) acc[h][t] = fmadd(load(q + h * row.padded() + d), k0, acc[h][t]);
    }
  }
  for (int h = 0; h < H; ++h) {
    if constexpr (N == 4)
      reduce_add4(acc[h][0], acc[h][1], acc[h][2], acc[h][3], scores + h * kTile);
    else
      for (int t = 0; t < N; ++t) scores[h * kTile + t] = reduce_add(acc[h][t]);
  }
}

// acc[h] = correction[h] * acc[h] + sum over the tile's tokens of weights[h][t] * v[t], for the N vectors (in pairs
// where N is even) from position `d` on.
template <class T, int H, int N, int D>
KERNELS_INLINE void add_columns(const Row<D>& row, int d, const float* weights, const float* correction, const T* v,
                                int num_tokens, float* acc) {
  Vec sum[H][N];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i)
      sum[h][i] = mul(broadcast(correction[h]), load(acc + h * row.padded() + d + i * kWidth));
  for (int t = 0; t < num_tokens; ++t, v += row.size(), ++weights) {
    Vec value[N];
    if constexpr (N == 1)
      value[0] = row.load(v, d);
    else
      for (int i = 0; i < N; i += 2) load_pair(v + d + i * kWidth, value[i], value[i + 1]);
    for (int h = 0; h < H; ++h) {
      const Vec weight = broadcast(weights[h * kTile]);
      for (int i = 0; i < N; ++i) sum[h][i] = fmadd(weight, value[i], sum[h][i]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i) store(acc + h * row.padded() + d + i * kWidth, sum[h][i]);
}

template <class T, int H, int D>
KERNELS_INLINE void add_values(const Row<D>& row, const float* weights, const float* correction, const T* v,
                               int num_tokens, float* acc) {
  int d = 0;
  for (; d + 4 * kWidth <= row.size(); d += 4 * kWidth)
    add_columns<T, H, 4, D>(row, d, weights, correction, v, num_tokens, acc);
  for (; d + 2 * kWidth <= row.size(); d += 2 * kWidth)
    add_columns<T, H, 2, D>(row, d, weights, correction, v, num_tokens, acc);
  for (; d < row.size(); d += kWidth) add_columns<T, H, 1, D>(row, d, weights, correction, v, num_tokens, acc);
}

// The scores of H heads become softmax weights relative to each head's new running maximum; `correction` is what the
// heads' old sums and outputs are to be multiplied with.
template <int H>
KERNELS_INLINE void update_softmax(float* scores, int num_tokens, float scale, bool bf16_round, float* maxima,
                                   float* sums, float* correction) {
  constexpr int kVecs = kTile / kWidth;
  const float infinity = std::numeric_limits<float>::infinity();
  alignas(64) float change[kWidth < H ? H : kWidth] = {};
  for (int h = 0; h < H; ++h) {
    float* row = scores + h * kTile;
    if (bf16_round)
      for (int t = 0; t < num_tokens; ++t) row[t] = round_to_bf16(row[t]);
    for (int i = 0; i < kVecs; ++i) store(row + i * kWidth, mul(load(row + i * kWidth), broadcast(scale)));
    for (int t = num_tokens; t < kTile; ++t) row[t] = -infinity;
    Vec top = load(row);
    for (int i = 1; i < kVecs; ++i) top = vmax(top, load(row + i * kWidth));
    const float maximum = std::max(maxima[h], reduce_max(top));
    const float shift = maximum == -infinity ? 0.0f : maximum;  // all masked so far: weights 0, not NaN
    change[h] = maxima[h] - shift;
    maxima[h] = maximum;
    correction[h] = shift;
  }
  for (int h = 0; h < H; ++h) {
    float* row = scores + h * kTile;
    Vec total = zero();
    for (int i = 0; i < kVecs; ++i) {
      const Vec weight = vexp(sub(load(row + i * kWidth), broadcast(correction[h])));
      store(row + i * kWidth, weight);
      total = add(total, weight);
    }
    correction[h] = reduce_add(total);
  }
  for (int i = 0; i < H; i += kWidth) store(change + i, vexp(load(change + i)));
  for (int h = 0; h < H; ++h) {
    sums[h] = sums[h] * change[h] + correction[h];
    correction[h] = change[h];
  }
}

// The query heads and the softmax state of a tile's KV head.
struct HeadTask {
  const float* q;
  float *maxima, *sums, *acc;
  float scale;
  bool bf16_round;
};

// H query heads from `head` on; `prefetch` may be null.
template <class T, int H, int D>
__attribute__((noinline)) void attend_heads(const Row<D>& row, const HeadTask& task, const Tile<T>& tile, int head,
                                            TilePrefetcher<T>* prefetch) {
  alignas(64) float scores[H * kTile];
  float correction[H];
  const float* q = task.q + int64_t(head) * row.padded();
  int t = 0;
  for (; t + 4 <= tile.num_tokens; t += 4) {
    if (prefetch) prefetch->advance(t / 4, kTile / 4);
    dot_tokens<T, H, 4, D>(row, q, tile.k + int64_t(t) * row.size(), scores + t);
  }
  for (; t < tile.num_tokens; ++t) dot_tokens<T, H, 1, D>(row, q, tile.k + int64_t(t) * row.size(), scores + t);
  if (prefetch) prefetch->advance(0, 1);
  update_softmax<H>(scores, tile.num_tokens, task.scale, task.bf16_round, task.maxima + head, task.sums + head,
                    correction);
  add_values<T, H, D>(row, scores, correction, tile.v, tile.num_tokens, task.acc + int64_t(head) * row.padded());
}

template <class T, int D>
KERNELS_INLINE void attend_tile(const Row<D>& row, const HeadTask& task, const Tile<T>& tile, int group,
                                TilePrefetcher<T>* prefetch) {
  int head = 0;
  for (; head + 4 <= group && kHeadTile == 4; head += 4, prefetch = nullptr)
    attend_heads<T, kHeadTile, D>(row, task, tile, head, prefetch);
  for (; head + 2 <= group; head += 2, prefetch = nullptr) attend_heads<T, 2, D>(row, task, tile, head, prefetch);
  if (head < group) attend_heads<T, 1, D>(row, task, tile, head, prefetch);
}

template <class T, int D>
void attend(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, float* states) {
  const Row<D> row(r.head_dim);
  const int group = r.group();
  const int64_t state_floats = int64_t(group) * (row.padded() + 2);
  float* const queries = scratch(size_t(piece.num_heads()) * group * row.padded());
  load_queries<T, D>(r, piece, queries);
  std::fill(states, states + piece.num_heads() * state_floats, 0.0f);
  for (int head = 0; head < piece.num_heads(); ++head)
    std::fill_n(states + head * state_floats, group, -std::numeric_limits<float>::infinity());

  const DecodePiece nothing{piece.seq, 0, 0, 0, 0};
  TileStream<T> tiles(r, piece, row.size());
  TilePrefetcher<T> prefetch(tiles, TileStream<T>(r, next ? *next : nothing, row.size()), row.size());
  while (!tiles.done()) {
    const Tile<T> tile = tiles.next();
    const int64_t head = tile.kv_head - piece.first_head;
    float* const state = states + head * state_floats;
    const HeadTask task{queries + head * group * row.padded(), state, state + group, state + 2 * group,
                        r.scale, r.bf16_round};
    prefetch.begin_tile();
    attend_tile<T, D>(row, task, tile, group, &prefetch);
  }
}

template <class T>
DecodeKernel kernel_for(int head_dim) {
  const int padded_dim = padded_width(head_dim);
  switch (head_dim) {
    case 64: return {attend<T, 64>, finish<T>, padded_dim};
    case 80: return {attend<T, 80>, finish<T>, padded_dim};
    case 96: return {attend<T, 96>, finish<T>, padded_dim};
    case 128: return {attend<T, 128>, finish<T>, padded_dim};
    case 192: return {attend<T, 192>, finish<T>, padded_dim};
    case 256: return {attend<T, 256>, finish<T>, padded_dim};
    default: return {attend<T, 0>, finish<T>, padded_dim};
  }
}

DecodeKernel decode_kernel(DType kv_dtype, int head_dim) {
  switch (kv_dtype) {
    case DType::kBf16: return kernel_for<bf16>(head_dim);
    case DType::kFp16: return kernel_for<fp16>(head_dim);
    default: return kernel_for<float>(head_dim);
  }
}

}  // namespace kernels::KERNELS_ISA_NS
