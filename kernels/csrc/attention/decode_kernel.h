// One piece of decode attention, written once against vec.h and compiled for each instruction set.
//
// A tile is up to 16 tokens of one KV head in one block, a unit a tile with up to kHeadTile of the query heads that use
// it. A unit has three steps: scores, online softmax, weighted sum of values. The scores of the next unit are computed
// between the softmax and the sum, so that the softmax's long dependency chain overlaps with independent work.
#pragma once

#include "decode.h"
#include "state.h"
#include "tiles.h"
#include "units.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kQuads = kTile / 4;  // score vectors of a tile

// For tiles with less than 16 tokens, and for rounding.
inline void scale_one_by_one(Vec (&scores)[kQuads], int num_tokens, const DecodeRequest& r) {
  alignas(64) float values[kQuads * kWidth];
  for (int i = 0; i < kQuads; ++i) store(values + i * kWidth, scores[i]);
  for (int t = 0; t < kTile; ++t) {
    for (int h = 0; h < kHeadTile; ++h) {
      float& value = values[t / 4 * kWidth + h * 4 + t % 4];
      if (r.bf16_round) value = round_to_bf16(value);
      value = t < num_tokens ? value * r.scale : -std::numeric_limits<float>::infinity();
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
// N is 1) from position `d` on. `weights` and `correction` are score vectors in memory; the values are `stride` apart.
template <class T, int H, int N, int D>
KERNELS_INLINE void add_columns(const Row<D>& row, int d, const float* weights, const float* correction, const T* v,
                                int stride, int num_tokens, float* acc, TilePrefetcher<T>& prefetch) {
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
    for (int i = 0; i < 4; ++i, v += stride) {
      if (N == 4 && i % 2 == 0) prefetch.during_values();
      add_token(weights + i, v);
    }
  for (; t < num_tokens; ++t, ++weights, v += stride) add_token(weights, v);
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i) store(acc + h * row.padded() + d + i * kWidth, sum[h][i]);
}

template <class T, int H, int D>
KERNELS_INLINE void add_values(const Row<D>& row, const float* weights, const float* correction, const T* v,
                               int stride, int num_tokens, float* acc, TilePrefetcher<T>& prefetch) {
  int d = 0;
  for (; d + 4 * kWidth <= row.size(); d += 4 * kWidth)
    add_columns<T, H, 4, D>(row, d, weights, correction, v, stride, num_tokens, acc, prefetch);
  for (; d + 2 * kWidth <= row.size(); d += 2 * kWidth)
    add_columns<T, H, 2, D>(row, d, weights, correction, v, stride, num_tokens, acc, prefetch);
  for (; d < row.size(); d += kWidth)
    add_columns<T, H, 1, D>(row, d, weights, correction, v, stride, num_tokens, acc, prefetch);
}

template <class T, int H, int D>
__attribute__((noinline)) void score_unit(const Row<D>& row, const DecodeRequest& r, const Unit<T>& unit,
                                          TilePrefetcher<T>& prefetch, Vec (&scores)[kQuads]) {
  for (int i = 0; i < kQuads; ++i) {
    int offset[4];  // tokens beyond the tile's last repeat it and are masked below
    for (int t = 0; t < 4; ++t) offset[t] = std::min(4 * i + t, unit.tile.num_tokens - 1) * row.size();
    scores[i] = dot_4_tokens<T, H, D>(row, unit.q, unit.tile.k, offset, prefetch);
  }
  if (r.bf16_round || unit.tile.num_tokens < kTile) return scale_one_by_one(scores, unit.tile.num_tokens, r);
  for (int i = 0; i < kQuads; ++i) scores[i] = mul(scores[i], broadcast(r.scale));
}

template <class T, int H, int D>
__attribute__((noinline)) void sum_unit(const Row<D>& row, int stride, const Unit<T>& unit, const float* weights,
                                        const float* correction, TilePrefetcher<T>& prefetch) {
  add_values<T, H, D>(row, weights, correction, unit.tile.v, stride, unit.tile.num_tokens, unit.acc, prefetch);
}

// Calls body(std::integral_constant<int, H>) for H = num_heads.
template <class Body>
KERNELS_INLINE void with_num_heads(int num_heads, const Body& body) {
  if (num_heads == kHeadTile) return body(std::integral_constant<int, kHeadTile>());
  if constexpr (kHeadTile > 1)
    if (num_heads == 1) return body(std::integral_constant<int, 1>());
  if constexpr (kHeadTile > 2) {
    if (num_heads == 2) return body(std::integral_constant<int, 2>());
    return body(std::integral_constant<int, 3>());
  }
}

template <class T, int D, int V>
void attend(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, float* states) {
  const Row<D> key(r.head_dim);
  const Row<V> value(r.value_dim);
  const int64_t num_queries = int64_t(piece.num_heads()) * r.group();
  float* const queries = scratch(size_t(num_queries * query_floats<T>(key)));
  load_queries<T, D>(r, piece, queries);
  for (int head = 0; head < piece.num_heads(); ++head)
    State(states + head * state_floats(r), r.group()).clear(r.group(), value.padded());

  UnitStream<T> units(r, piece, next, queries, query_floats<T>(key), states);
  const auto score = [&](const Unit<T>& unit, Vec(&scores)[kQuads]) {
    with_num_heads(unit.num_heads, [&](auto h) { score_unit<T, h(), D>(key, r, unit, units.prefetch, scores); });
  };
  Unit<T> unit;
  Vec scores[kQuads];
  bool more = units.next(unit);
  if (more) score(unit, scores);
  while (more) {
    alignas(64) float weights[kQuads * kWidth], correction[kWidth];
    store(correction, update_softmax(scores, unit.maxima, unit.sums));
    for (int i = 0; i < kQuads; ++i) store(weights + i * kWidth, scores[i]);
    const Unit<T> current = unit;
    more = units.next(unit);
    if (more) score(unit, scores);
    with_num_heads(current.num_heads, [&](auto h) {
      sum_unit<T, h(), V>(value, key.size(), current, weights, correction, units.prefetch);
    });
  }
}

// Loops with constant bounds for the most usual shapes; they gain about 10 % of the time that is not spent on memory.
template <class T>
DecodeKernel kernel_for(const DecodeRequest& r) {
  if constexpr (kWidth > 4) {
    if (r.head_dim == 64 && r.value_dim == 64) return {attend<T, 64, 64>, finish<T>, state_floats};
    if (r.head_dim == 128 && r.value_dim == 128) return {attend<T, 128, 128>, finish<T>, state_floats};
    // Latent and rope part of DeepSeek-V2, V3 and Moonlight.
    if (r.head_dim == 576 && r.value_dim == 512) return {attend<T, 576, 512>, finish<T>, state_floats};
  }
  return {attend<T, 0, 0>, finish<T>, state_floats};
}

DecodeKernel decode_kernel(const DecodeRequest& r) {
  if constexpr (!kOnlyBf16) {
    if (r.kv_dtype == DType::kFp16) return kernel_for<fp16>(r);
    if (r.kv_dtype == DType::kFp32) return kernel_for<float>(r);
  }
  return kernel_for<bf16>(r);
}

}  // namespace kernels::KERNELS_ISA_NS
