// One step of the computation works on these units: a tile and up to kHeadTile of the query heads that use it.
#pragma once

#include "state.h"
#include "tile_prefetcher.h"

namespace kernels::KERNELS_ISA_NS {

template <class T>
struct Unit {
  Tile<T> tile;
  const float* q;  // of its first query head
  float *maxima, *sums, *acc;
  int num_heads;
};

// The units of a piece, tile by tile.
template <class T>
class UnitStream {
  const DecodePiece& piece_;
  const DecodePiece nothing_;
  const float* const queries_;  // [kv_heads * group, query_floats]
  float* const states_;
  const int64_t state_floats_;
  const int group_, query_floats_, value_padded_;
  TileStream<T> tiles_;
  Tile<T> tile_;
  int head_;

 public:
  TilePrefetcher<T> prefetch;

  UnitStream(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece* next, const float* queries,
             int query_floats, float* states)
      : piece_(piece), nothing_{piece.seq, 0, 0, 0, 0}, queries_(queries), states_(states),
        state_floats_(state_floats(r)), group_(r.group()), query_floats_(query_floats),
        value_padded_(padded_width(r.value_dim)), tiles_(r, piece), tile_(), head_(group_),
        prefetch(tiles_, TileStream<T>(r, next ? *next : nothing_), r, (group_ + kHeadTile - 1) / kHeadTile) {}

  bool next(Unit<T>& unit) {
    if (head_ >= group_) {
      if (tiles_.done()) return false;
      tile_ = tiles_.next();
      prefetch.begin_tile();
      head_ = 0;
    }
    const int64_t kv_head = tile_.kv_head - piece_.first_head;
    const State state(states_ + kv_head * state_floats_, group_);
    const int lane = State::lane(head_);
    unit = {tile_, queries_ + (kv_head * group_ + head_) * query_floats_, state.maxima + lane, state.sums + lane,
            state.acc + int64_t(head_) * value_padded_, std::min(kHeadTile, group_ - head_)};
    head_ += kHeadTile;
    return true;
  }
};

}  // namespace kernels::KERNELS_ISA_NS
