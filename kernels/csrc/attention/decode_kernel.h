// One piece of decode attention, written once against vec.h and compiled for each instruction set.
//
// A tile is up to 16 tokens of one KV head in one block. Its keys stay in L1 while all query heads of the group use
// them, kHeadTile heads at a time; then an online softmax (running maximum) and the weighted sum of the tile's values.
#pragma once

#include "decode.h"
#include "rows.h"
#include "state.h"
#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kQuads = kTile / 4;  // score vectors of a tile

// The scores q[h] . k[t] of H heads and 4 tokens, whose rows start at k + offset[t].
template <class T, int H, int D>
KERNELS_INLINE Vec dot_4_tokens(const Row<D>& row, const float* q, const T* k, const int (&offset)[4]) {
  Vec acc[H][4];
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < 4; ++t) acc[h][t] = zero();
  int d = 0;
  for (; d < row.paired(); d += 2 * kWidth) {
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

// For tiles with less than 16 tokens, and for rounding: the scores one by one.
inline void patch_scores(Vec (&scores)[kQuads], int num_tokens, bool bf16_round) {
  alignas(64) float values[kQuads * kWidth];
  for (int i = 0; i < kQuads; ++i) store(values + i * kWidth, scores[i]);
  for (int t = 0; t < kTile; ++t) {
    for (int h = 0; h < kHeadTile; ++h) {
      float& value = values[t / 4 * kWidth + h * 4 + t % 4];
      if (bf16_round) value = round_to_bf16(value);
      if (t >= num_tokens) value = -std::numeric_limits<float>::infinity();
    }
  }
  for (int i = 0; i < kQuads; ++i) scores[i] = load(values + i * kWidth);
}

// Scores become weights relative to each head's new running maximum. Returns what the heads' old outputs are to be
// multiplied with. Heads with nothing but -infinity so far get weights of 0, not NaN.
KERNELS_INLINE Vec update_softmax(Vec (&scores)[kQuads], float* maxima, float* sums) {
  Vec top = scores[0];
  for (int i = 1; i < kQuads; ++i) top = vmax(top, scores[i]);
  const Vec old_maximum = load(maxima);
  const Vec maximum = vmax(old_maximum, lane_max(top));
  store(maxima, maximum);
  const Vec shift = vmax(broadcast(std::numeric_limits<float>::lowest()), maximum);
  Vec total = zero();
  for (int i = 0; i < kQuads; ++i) {
    scores[i] = vexp(sub(scores[i], shift));
    total = add(total, scores[i]);
  }
  const Vec correction = vexp(sub(old_maximum, shift));
  store(sums, fmadd(load(sums), correction, lane_add(total)));
  return correction;
}

// acc[h] = correction[h] * acc[h] + sum over the tile's tokens of weight[h][t] * v[t], for N vectors (in pairs unless
// N is 1) from position `d` on. `weights` and `correction` are score vectors in memory.
template <class T, int H, int N, int D>
KERNELS_INLINE void add_columns(const Row<D>& row, int d, const float* weights, const float* correction, const T* v,
                                int num_tokens, float* acc) {
  Vec sum[H][N];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i)
      sum[h][i] = mul(broadcast(correction[4 * h]), load(acc + h * row.padded() + d + i * kWidth));
  const auto add_token = [&](const float* weight, const T* value_row) KERNELS_INLINE_LAMBDA {
    Vec value[N];
    if constexpr (N == 1)
      value[0] = row.load(value_row, d);
    else
      for (int i = 0; i < N; i += 2) load_pair(value_row + d + i * kWidth, value[i], value[i + 1]);
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < N; ++i) sum[h][i] = fmadd(broadcast(weight[4 * h]), value[i], sum[h][i]);
  };
  int t = 0;
  for (; t + 4 <= num_tokens; t += 4, weights += kWidth)
    for (int i = 0; i < 4; ++i, v += row.size()) add_token(weights + i, v);
  for (; t < num_tokens; ++t, ++weights, v += row.size()) add_token(weights, v);
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

// One tile for the H query heads from `head` on, whose queries are `q`.
template <class T, int H, int D>
__attribute__((noinline)) void attend_heads(const Row<D>& row, const DecodeRequest& r, const float* q,
                                            const Tile<T>& tile, State state, int head, TilePrefetcher<T>* prefetch) {
  Vec scores[kQuads];
  for (int i = 0; i < kQuads; ++i) {
    if (prefetch) prefetch->advance(i, kQuads);
    int offset[4];  // tokens beyond the tile's last repeat it and are masked below
    for (int t = 0; t < 4; ++t) offset[t] = std::min(4 * i + t, tile.num_tokens - 1) * row.size();
    scores[i] = dot_4_tokens<T, H, D>(row, q, tile.k, offset);
  }
  if (r.bf16_round || tile.num_tokens < kTile) patch_scores(scores, tile.num_tokens, r.bf16_round);
  for (int i = 0; i < kQuads; ++i) scores[i] = mul(scores[i], broadcast(r.scale));

  const int lane = State::lane(head);
  alignas(64) float weights[kQuads * kWidth], correction[kWidth];
  store(correction, update_softmax(scores, state.maxima + lane, state.sums + lane));
  for (int i = 0; i < kQuads; ++i) store(weights + i * kWidth, scores[i]);
  add_values<T, H, D>(row, weights, correction, tile.v, tile.num_tokens, state.acc + int64_t(head) * row.padded());
}

template <class T, int D>
KERNELS_INLINE void attend_tile(const Row<D>& row, const DecodeRequest& r, const float* queries, const Tile<T>& tile,
                                State state, TilePrefetcher<T>* prefetch) {
  const int group = r.group();
  for (int head = 0; head < group; head += kHeadTile, prefetch = nullptr) {
    const float* q = queries + int64_t(head) * row.padded();
    const int num_heads = std::min(kHeadTile, group - head);
    if (num_heads == kHeadTile) {
      attend_heads<T, kHeadTile, D>(row, r, q, tile, state, head, prefetch);
    } else if constexpr (kHeadTile > 1) {
      if (num_heads == 1) attend_heads<T, 1, D>(row, r, q, tile, state, head, prefetch);
      if constexpr (kHeadTile > 2) {
        if (num_heads == 2) attend_heads<T, 2, D>(row, r, q, tile, state, head, prefetch);
        if (num_heads == 3) attend_heads<T, 3, D>(row, r, q, tile, state, head, prefetch);
      }
    }
  }
}

template <class T, int D>
void attend(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, float* states) {
  const Row<D> row(r.head_dim);
  const int group = r.group();
  const int64_t size = State::size(group, row.padded());
  float* const queries = scratch(size_t(piece.num_heads()) * group * row.padded());
  load_queries<T, D>(r, piece, queries);
  for (int head = 0; head < piece.num_heads(); ++head) State(states + head * size, group).clear(group, row.padded());

  const DecodePiece nothing{piece.seq, 0, 0, 0, 0};
  TileStream<T> tiles(r, piece, row.size());
  TilePrefetcher<T> prefetch(tiles, TileStream<T>(r, next ? *next : nothing, row.size()), row.size());
  while (!tiles.done()) {
    const Tile<T> tile = tiles.next();
    const int64_t head = tile.kv_head - piece.first_head;
    prefetch.begin_tile();
    attend_tile<T, D>(row, r, queries + head * group * row.padded(), tile, State(states + head * size, group),
                      &prefetch);
  }
}

template <class T>
DecodeKernel kernel_for(int head_dim) {
  switch (head_dim) {
    case 64: return {attend<T, 64>, finish<T>, state_floats};
    case 80: return {attend<T, 80>, finish<T>, state_floats};
    case 96: return {attend<T, 96>, finish<T>, state_floats};
    case 128: return {attend<T, 128>, finish<T>, state_floats};
    case 192: return {attend<T, 192>, finish<T>, state_floats};
    case 256: return {attend<T, 256>, finish<T>, state_floats};
    default: return {attend<T, 0>, finish<T>, state_floats};
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
