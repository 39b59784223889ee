// One piece of decode attention with tiles, for q and caches of bfloat16 and for rows of whole tiles.
//
// A visit is up to kVisitTiles tiles of 16 tokens of one KV head. Keys are tiles A as they lie in memory, queries tiles
// B that are packed once a piece, of a unit of 8 or 16 query heads. Values become tiles B by pairs of tokens and
// weights tiles A, of 32 tokens of the visit each. Outputs stay tiles, in memory between visits. The scores of the next
// visit are computed between a visit's softmax and its sum: tiles and vectors then work at the same time.
//
// Tiles 0 to 2 have a unit's columns: scores and queries. The others are whole.
#pragma once

#include "state.h"
#include "value_tiles.h"
#include "weight_tiles.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kFetchedWithKeys = 2;  // lines of a stream with each tile of keys

// The scores of one or two tiles of keys with a unit's queries, a token a row.
template <int N>
KERNELS_INLINE void multiply_keys(const bf16* const* keys, int64_t depth, const char* queries, int64_t line_bytes,
                                  float* scores, VisitPrefetcher& prefetch) {
  const int64_t query_bytes = kTileSide * line_bytes;
  tile_zero<0>();
  if constexpr (N > 1) tile_zero<1>();
  for (int64_t k = 0; k < depth; k += kTileDepth, queries += query_bytes) {
    tile_load<2>(queries, line_bytes);
    tile_load<3>(keys[0] + k, depth * int64_t(sizeof(bf16)));
    tile_multiply<0, 3, 2>();
    prefetch.fetch(kFetchedWithKeys);
    if constexpr (N > 1) {
      tile_load<7>(keys[1] + k, depth * int64_t(sizeof(bf16)));
      tile_multiply<1, 7, 2>();
      prefetch.fetch(kFetchedWithKeys);
    }
  }
  tile_store<0>(scores, line_bytes);
  if constexpr (N > 1) tile_store<1>(reinterpret_cast<char*>(scores) + query_bytes, line_bytes);
}

// What a thread works with, one part behind the other. A unit has kHeads query heads, the last of a KV head maybe less.
template <int kHeads>
class TileAttention {
 public:
  TileAttention(const DecodeRequest& r, const DecodePiece& piece, float* states)
      : r_(r), piece_(piece), states_(states), num_units_((r.group() + kHeads - 1) / kHeads) {
    const int64_t units = int64_t(piece.num_heads()) * num_units_;
    const int64_t key_floats = int64_t(kTile) * r.head_dim / 2, value_floats = value_bytes(r.value_dim) / 4;
    const int64_t scores_floats = int64_t(num_units_) * kVisitTiles * kTile * kHeads;
    const int64_t softmax_floats = int64_t(sizeof(Softmax) / sizeof(float));
    float* place = scratch(size_t(units * (query_floats() + softmax_floats + output_floats()) + scores_floats +
                                  kVisitTiles * key_floats + kVisitTiles / 2 * value_floats));
    const auto take = [&](int64_t num_floats) { return std::exchange(place, place + num_floats); };
    queries_ = take(units * query_floats());
    softmax_ = reinterpret_cast<Softmax*>(take(units * softmax_floats));
    outputs_ = take(units * output_floats());
    scores_ = take(scores_floats);
    keys_ = reinterpret_cast<bf16*>(take(kVisitTiles * key_floats));
    values_ = reinterpret_cast<char*>(take(kVisitTiles / 2 * value_floats));
    for (int64_t i = 0; i < units; ++i) softmax_[i].clear();
    for (int64_t i = 0; i < units; ++i) pack_queries(i);
    begun_.assign(size_t(piece.num_heads()), false);
  }

  // Computes the scores of a visit, in place of those of the visit before.
  void score(const Visit& visit, VisitPrefetcher& prefetch) {
    const int64_t unit = first_unit(visit);
    const bf16* keys[kVisitTiles];
    for (int i = 0; i < visit.num_tiles; ++i)
      keys[i] = whole_keys(visit.tiles[i], keys_ + i * int64_t(kTile) * r_.head_dim);
    tile_fence();
    for (int u = 0; u < num_units_; ++u) {
      const char* const queries = reinterpret_cast<const char*>(queries_ + (unit + u) * query_floats());
      float* scores = scores_of(u);
      for (int i = 0; i < visit.num_tiles; i += 2, scores += 2 * kTile * kHeads)
        if (i + 1 < visit.num_tiles)
          multiply_keys<2>(keys + i, r_.head_dim, queries, kLineBytes, scores, prefetch);
        else
          multiply_keys<1>(keys + i, r_.head_dim, queries, kLineBytes, scores, prefetch);
    }
  }

  // Brings a visit's values into tiles.
  void pair(const Visit& visit, VisitPrefetcher& prefetch) {
    const int64_t half = kTileBytes / 2, both = value_bytes(r_.value_dim);
    for (int i = 0; i < visit.num_tiles; ++i)
      pair_values(visit.tiles[i], r_.value_dim, r_.head_dim, values_ + i / 2 * both + i % 2 * half, prefetch);
    // Zeros beyond the last. From an address that is in use: elsewhere a load of nothing waits for the page tables.
    if (visit.num_tiles % 2)
      pair_values({nullptr, visit.tiles[0].v, 0, 0}, r_.value_dim, 0, values_ + visit.num_tiles / 2 * both + half,
                  prefetch);
  }

  // Makes weights of a unit's scores, which were the last to be computed.
  void weigh_unit(const Visit& visit, int unit, VisitPrefetcher& prefetch) {
    const int64_t index = first_unit(visit) + unit;
    alignas(64) float correction[kWidth];
    const bool follows = weigh<kHeads>(r_, visit.tiles, visit.num_tiles, scores_of(unit), softmax_[index], weights_,
                                       correction, prefetch);
    if (follows && has_begun(visit)) rescale(outputs_ + index * output_floats(), correction);
  }

  // Adds the values with the unit's weights, which were the last to be made.
  void add_values(const Visit& visit, int unit, VisitPrefetcher& prefetch) {
    float* out = outputs_ + (first_unit(visit) + unit) * output_floats();
    const char* values = values_;
    const int64_t step = value_bytes(r_.value_dim);
    tile_fence();
    for (int d = 0; d < r_.value_dim; d += kTileDepth, values += 2 * kTileBytes, out += 2 * kTileSide * kTileSide)
      add_value_pair<kHeads>(weights_, values, step, visit.num_steps(), !has_begun(visit), out, prefetch);
  }

  void end(const Visit& visit) { begun_[size_t(visit.tiles[0].kv_head - piece_.first_head)] = true; }
  int num_units() const { return num_units_; }

  // To be called after the last visit.
  void finish_states() {
    for (int kv_head = 0; kv_head < piece_.num_heads(); ++kv_head) {
      State state(states_ + kv_head * state_floats(r_), r_.group());
      state.clear(r_.group(), r_.value_dim);
      if (!begun_[size_t(kv_head)]) continue;
      for (int head = 0; head < r_.group(); ++head) {
        const int64_t unit = kv_head * num_units_ + head / kHeads;
        const int in_unit = head % kHeads;
        const float* const sums = softmax_[unit].sums;
        state.maxima[State::lane(head)] = softmax_[unit].maxima[in_unit];
        state.sums[State::lane(head)] = kHeads == 8 ? sums[in_unit] + sums[8 + in_unit] : sums[in_unit];
        put_outputs<kHeads>(outputs_ + unit * output_floats(), in_unit, r_.value_dim,
                            state.acc + int64_t(head) * r_.value_dim);
      }
    }
  }

 private:
  static constexpr int64_t kLineBytes = kHeads * 4;

  int64_t query_floats() const { return int64_t(r_.head_dim) / kTileDepth * kTileSide * kHeads; }
  int64_t output_floats() const { return int64_t(r_.value_dim) * kTileSide; }
  int64_t first_unit(const Visit& visit) const {
    return int64_t(visit.tiles[0].kv_head - piece_.first_head) * num_units_;
  }
  bool has_begun(const Visit& visit) const { return begun_[size_t(visit.tiles[0].kv_head - piece_.first_head)]; }
  float* scores_of(int unit) const { return scores_ + int64_t(unit) * kVisitTiles * kTile * kHeads; }

  // Tiles B of a unit's queries: pairs of the depth by heads.
  void pack_queries(int64_t unit) {
    const int64_t kv_head = unit / num_units_, first = unit % num_units_ * kHeads;
    const int64_t num_heads = std::min<int64_t>(kHeads, r_.group() - first);
    const bf16* const q = static_cast<const bf16*>(r_.q) + piece_.seq * r_.q_stride +
                          ((piece_.first_head + kv_head) * r_.group() + first) * r_.head_dim;
    float* out = queries_ + unit * query_floats();
    for (int k = 0; k < r_.head_dim; k += kTileDepth) {
      alignas(64) int32_t rows[kTileSide][kTileSide] = {}, tile[kTileSide][kTileSide];  // [head][pair], [pair][head]
      for (int64_t head = 0; head < num_heads; ++head) std::memcpy(rows[head], q + head * r_.head_dim + k, kTileLine);
      transpose_tile(rows, tile, kTileLine);
      for (int pair = 0; pair < kTileSide; ++pair, out += kHeads) std::memcpy(out, tile[pair], size_t(kLineBytes));
    }
  }

  // The keys of 16 tokens: `copy`, with zeros beyond the last, where there are fewer.
  const bf16* whole_keys(const Tile<bf16>& tile, bf16* copy) const {
    if (tile.num_tokens == kTile) return tile.k;
    const int64_t size = int64_t(tile.num_tokens) * r_.head_dim, whole_size = int64_t(kTile) * r_.head_dim;
    std::memcpy(copy, tile.k, size_t(size) * sizeof(bf16));
    std::memset(copy + size, 0, size_t(whole_size - size) * sizeof(bf16));
    return copy;
  }

  void rescale(float* outputs, const float* correction) const {
    for (int64_t row = 0; row < output_floats() / kTileSide; ++row, outputs += kTileSide)
      store(outputs, mul(broadcast(correction[row % kHeads]), load(outputs)));
  }

  const DecodeRequest& r_;
  const DecodePiece& piece_;
  float* const states_;
  const int num_units_;
  float* queries_;
  Softmax* softmax_;
  float* outputs_;    // [unit][pair of tiles]
  float* scores_;     // [unit][token][head] of a visit
  bf16* keys_;        // of tiles with less than 16 tokens
  char* values_;      // tiles B
  std::vector<bool> begun_;  // of KV heads
  alignas(64) char weights_[kVisitTiles / 2 * kMaxWeightTiles * kTileBytes];  // tiles A of one unit
};

template <int kHeads>
void attend(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, float* states) {
  const DecodePiece nothing{piece.seq, 0, 0, 0, 0};
  VisitPrefetcher prefetch(r, piece, next ? *next : nothing);
  const TileSession session(kHeads);
  TileAttention<kHeads> attention(r, piece, states);
  VisitStream visits(r, piece);
  Visit now = visits.next();
  if (now.num_tiles) attention.score(now, prefetch);
  while (now.num_tiles) {
    const Visit after = visits.next();
    prefetch.begin();
    attention.pair(now, prefetch);
    attention.weigh_unit(now, 0, prefetch);
    if (attention.num_units() == 1) {
      if (after.num_tiles) attention.score(after, prefetch);
      attention.add_values(now, 0, prefetch);
    } else {
      attention.add_values(now, 0, prefetch);
      for (int unit = 1; unit < attention.num_units(); ++unit) {
        attention.weigh_unit(now, unit, prefetch);
        attention.add_values(now, unit, prefetch);
      }
      if (after.num_tiles) attention.score(after, prefetch);
    }
    attention.end(now);
    prefetch.end();
    now = after;
  }
  attention.finish_states();
}

DecodeKernel decode_kernel(const DecodeRequest& r) {
  return {r.group() <= 8 ? attend<8> : attend<16>, finish<bf16>, state_floats};
}

}  // namespace kernels::KERNELS_ISA_NS
