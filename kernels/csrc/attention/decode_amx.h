// One piece of decode attention with tiles, for q and caches of bfloat16 and for rows of whole tiles.
//
// A visit is up to kTilesAtOnce tiles of 16 tokens of one KV head. Keys are tiles A as they lie in memory, queries
// tiles B that are packed once a piece. Values become tiles B by pairs of tokens and weights tiles A, of 32 tokens of
// the visit each. Sums leave their tiles after each visit and are added to the state in vectors.
#pragma once

#include "state.h"
#include "value_tiles.h"
#include "weight_tiles.h"

namespace kernels::KERNELS_ISA_NS {

// The scores of N tiles with up to 16 heads, in C tiles 0 to N - 1.
template <int N>
inline void multiply_keys(const bf16* const (&keys)[kTilesAtOnce], const TokenTiles& q, int64_t group, float* scores,
                          TilePrefetcher<bf16>& prefetch) {
  static_assert(kTilesAtOnce == 4);
  const auto all = [&](const auto& body) KERNELS_INLINE_LAMBDA {
    body(std::integral_constant<int, 0>());
    if constexpr (N > 1) body(std::integral_constant<int, 1>());
    if constexpr (N > 2) body(std::integral_constant<int, 2>());
    if constexpr (N > 3) body(std::integral_constant<int, 3>());
  };
  all([&](auto c) KERNELS_INLINE_LAMBDA { tile_zero<c()>(); });
  for (int64_t k = 0; k < q.depth; k += kTileDepth) {
    tile_load<4>(q.tile(k, 0, group), kTileLine);
    all([&](auto c) KERNELS_INLINE_LAMBDA {
      constexpr int kKeys = 5 + c() % 3;
      prefetch.during_tiles();
      tile_load<kKeys>(keys[c()] + k, q.depth * int64_t(sizeof(bf16)));
      tile_multiply<c(), kKeys, 4>();
    });
  }
  all([&](auto c) KERNELS_INLINE_LAMBDA { tile_store<c()>(scores + c() * kTileSide * kTileSide, kTileLine); });
}

// What a thread works with, one part behind the other.
class TileAttention {
 public:
  TileAttention(const DecodeRequest& r, const DecodePiece& piece, float* states)
      : r_(r), piece_(piece), states_(states), num_units_((r.group() + kUnitHeads - 1) / kUnitHeads) {
    const int64_t query_floats = num_query_floats(), num_softmax = int64_t(piece.num_heads()) * num_units_;
    const int64_t key_floats = int64_t(kTile) * r.head_dim / 2, value_floats = value_bytes(r.value_dim) / 4;
    const int64_t softmax_floats = int64_t(sizeof(Softmax) / sizeof(float)) * num_softmax;
    queries_ = scratch(size_t(piece.num_heads() * query_floats + softmax_floats + kTilesAtOnce * key_floats +
                              kTilesAtOnce / 2 * value_floats));
    softmax_ = reinterpret_cast<Softmax*>(queries_ + piece.num_heads() * query_floats);
    keys_ = reinterpret_cast<bf16*>(softmax_ + num_softmax);
    values_ = reinterpret_cast<char*>(keys_ + kTilesAtOnce * int64_t(kTile) * r.head_dim);
    for (int64_t i = 0; i < num_softmax; ++i) softmax_[i].clear();
    for (int head = 0; head < piece.num_heads(); ++head) {
      pack_tokens(queries(head), {queries_of(head), DType::kBf16, DType::kBf16, r.group(), r.head_dim, r.head_dim});
      state(head).clear(r.group(), r.value_dim);
    }
  }

  void visit(const Tile<bf16>* tiles, int num_tiles, TilePrefetcher<bf16>& prefetch) {
    const int kv_head = tiles[0].kv_head - piece_.first_head;
    const TokenTiles q = queries(kv_head);
    const bf16* keys[kTilesAtOnce];
    for (int i = 0; i < num_tiles; ++i) keys[i] = whole_keys(tiles[i], keys_ + i * int64_t(kTile) * r_.head_dim);
    tile_fence();
    prefetch.begin_tiles(num_tiles);
    for (int64_t group = 0; group < q.num_groups; ++group) {
      alignas(64) float scores[kTilesAtOnce * kTileSide * kTileSide];
      switch (num_tiles) {
        case 1: multiply_keys<1>(keys, q, group, scores, prefetch); break;
        case 2: multiply_keys<2>(keys, q, group, scores, prefetch); break;
        case 3: multiply_keys<3>(keys, q, group, scores, prefetch); break;
        default: multiply_keys<4>(keys, q, group, scores, prefetch);
      }
      if (group == 0) pair_all(tiles, num_tiles, prefetch);  // while the products run
      for (int unit = 0; unit < kTileSide / kUnitHeads; ++unit)
        attend_unit(tiles, num_tiles, kv_head, int(group) * (kTileSide / kUnitHeads) + unit,
                    scores + unit * kUnitHeads, prefetch);
    }
    prefetch.end_tiles();
  }

  // To be called after the last visit.
  void finish_states() {
    for (int kv_head = 0; kv_head < piece_.num_heads(); ++kv_head)
      for (int head = 0; head < r_.group(); ++head) {
        const Softmax& softmax = softmax_[kv_head * num_units_ + head / kUnitHeads];
        state(kv_head).maxima[State::lane(head)] = softmax.maxima[head % kUnitHeads];
        state(kv_head).sums[State::lane(head)] = softmax.sums[head % kUnitHeads];
      }
  }

 private:
  int64_t num_query_floats() const {
    return TokenTiles::num_bytes(DType::kBf16, r_.group(), r_.head_dim) / int64_t(sizeof(float));
  }
  TokenTiles queries(int kv_head) const {
    return TokenTiles(queries_ + kv_head * num_query_floats(), DType::kBf16, r_.group(), r_.head_dim);
  }
  const bf16* queries_of(int kv_head) const {
    const int64_t first_row = int64_t(piece_.first_head + kv_head) * r_.group();
    return static_cast<const bf16*>(r_.q) + piece_.seq * r_.q_stride + first_row * r_.head_dim;
  }
  State state(int kv_head) const { return State(states_ + kv_head * state_floats(r_), r_.group()); }

  // The keys of 16 tokens: `copy`, with zeros beyond the last, where there are fewer.
  const bf16* whole_keys(const Tile<bf16>& tile, bf16* copy) const {
    if (tile.num_tokens == kTile) return tile.k;
    const int64_t size = int64_t(tile.num_tokens) * r_.head_dim, whole_size = int64_t(kTile) * r_.head_dim;
    std::memcpy(copy, tile.k, size_t(size) * sizeof(bf16));
    std::memset(copy + size, 0, size_t(whole_size - size) * sizeof(bf16));
    return copy;
  }

  void pair_all(const Tile<bf16>* tiles, int num_tiles, TilePrefetcher<bf16>& prefetch) {
    const int64_t half = kTileBytes / 2, both = value_bytes(r_.value_dim);
    for (int i = 0; i < num_tiles; ++i)
      pair_values(tiles[i], r_.value_dim, r_.head_dim, values_ + i / 2 * both + i % 2 * half, prefetch);
    if (num_tiles % 2)
      pair_values({nullptr, nullptr, 0, 0}, r_.value_dim, 0, values_ + num_tiles / 2 * both + half, prefetch);
  }

  void attend_unit(const Tile<bf16>* tiles, int num_tiles, int kv_head, int unit, const float* scores,
                   TilePrefetcher<bf16>& prefetch) {
    const int head = unit * kUnitHeads, num_heads = std::min(kUnitHeads, r_.group() - head);
    if (num_heads <= 0) return;
    alignas(64) float correction[kWidth];
    Softmax& softmax = softmax_[kv_head * num_units_ + unit];
    store(correction, weigh(r_, tiles, num_tiles, scores, softmax, weights_, prefetch));
    add_values(weights_, values_, r_.value_dim, num_tiles * kTile, num_heads, correction,
               state(kv_head).acc + int64_t(head) * r_.value_dim, prefetch);
  }

  const DecodeRequest& r_;
  const DecodePiece& piece_;
  float* const states_;
  const int num_units_;
  float* queries_;
  Softmax* softmax_;
  bf16* keys_;    // of tiles with less than 16 tokens
  char* values_;  // tiles B
  alignas(64) char weights_[kTilesAtOnce / 2 * kWeightTiles * kTileBytes] = {};  // tiles A
};

inline void attend(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, float* states) {
  const DecodePiece nothing{piece.seq, 0, 0, 0, 0};
  TilePrefetcher<bf16> prefetch(TileStream<bf16>(r, piece), TileStream<bf16>(r, next ? *next : nothing), r, 1);
  const TileSession session;
  TileAttention attention(r, piece, states);
  VisitStream visits(r, piece);
  Tile<bf16> tiles[kTilesAtOnce];
  while (const int num_tiles = visits.next(tiles)) attention.visit(tiles, num_tiles, prefetch);
  attention.finish_states();
}

DecodeKernel decode_kernel(const DecodeRequest&) { return {attend, finish<bf16>, state_floats}; }

}  // namespace kernels::KERNELS_ISA_NS
