// Up to four tiles of a KV head at a time, for kernels of which 16 tokens fill no more than half of a tile's depth.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kFetchedTiles = 8;  // as without tiles: see widened_dots.h
constexpr bool kMayFetchFar = false;
constexpr int kTilesAtOnce = 4;

}  // namespace kernels::KERNELS_ISA_NS

#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

class VisitStream {
 public:
  VisitStream(const DecodeRequest& r, const DecodePiece& piece) : stream_(r, piece), waiting_(!stream_.done()) {
    if (waiting_) tile_ = stream_.next();
  }

  // Returns how many tiles there are; 0 after the last.
  int next(Tile<bf16> (&tiles)[kTilesAtOnce]) {
    int num_tiles = 0;
    while (waiting_ && num_tiles < kTilesAtOnce && (num_tiles == 0 || tile_.kv_head == tiles[0].kv_head)) {
      tiles[num_tiles++] = tile_;
      waiting_ = !stream_.done();
      if (waiting_) tile_ = stream_.next();
    }
    return num_tiles;
  }

 private:
  TileStream<bf16> stream_;
  bool waiting_;
  Tile<bf16> tile_{};
};

}  // namespace kernels::KERNELS_ISA_NS
