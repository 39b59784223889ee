// Visits: up to four tiles of a KV head at a time, for kernels of which 16 tokens fill no more than half of a tile's
// depth.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kVisitTiles = 4;
constexpr int kTilesAtOnce = kVisitTiles;

}  // namespace kernels::KERNELS_ISA_NS

#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

struct Visit {
  Tile<bf16> tiles[kVisitTiles];
  int num_tiles = 0;

  int num_steps() const { return (num_tiles + 1) / 2; }
};

class VisitStream {
 public:
  VisitStream(const DecodeRequest& r, const DecodePiece& piece) : stream_(r, piece), waiting_(!stream_.done()) {
    if (waiting_) tile_ = stream_.next();
  }

  // A visit without tiles after the last.
  Visit next() {
    Visit visit;
    while (waiting_ && visit.num_tiles < kVisitTiles &&
           (visit.num_tiles == 0 || tile_.kv_head == visit.tiles[0].kv_head)) {
      visit.tiles[visit.num_tiles++] = tile_;
      waiting_ = !stream_.done();
      if (waiting_) tile_ = stream_.next();
    }
    return visit;
  }

 private:
  TileStream<bf16> stream_;
  bool waiting_;
  Tile<bf16> tile_{};
};

// Fetches, while a visit is computed, the values of the next one and the keys of the one after that, into the
// second-level cache: a line of each of two tiles' keys and values in turn, or of four tiles that are both. Four streams
// are what a core reads fastest.
class VisitPrefetcher {
 public:
  // `next` is what the thread does after the piece. A piece's first visits are taken to be under way.
  VisitPrefetcher(const DecodeRequest& r, const DecodePiece& piece, const DecodePiece& next)
      : own_(r, piece), others_(r, next), num_lines_(r.head_dim * int(sizeof(bf16)) * kTile / kLine),
        has_values_(!r.values_in_keys()) {
    following();
    next_ = following();
  }

  void begin() {
    const Visit after = following();
    num_turns_ = turn_ = 0, line_ = 0;
    const Visit& keys = after.num_tiles > 0 ? after : next_;
    const Visit& values = next_.num_tiles > 0 ? next_ : keys;
    // The first of a visit's tiles once more, where the other visit has more of them.
    const auto tile = [](const Visit& visit, int i) -> const Tile<bf16>& {
      return visit.tiles[i < visit.num_tiles ? i : 0];
    };
    if (!has_values_ && keys.num_tiles > 0) {
      for (int i = 0; i < kVisitTiles; ++i) turns_[0].lines[i] = address(tile(keys, i).k);
      num_turns_ = 1;
    }
    for (int i = 0; has_values_ && i < std::max(keys.num_tiles, values.num_tiles); i += 2) {
      Turn& turn = turns_[num_turns_++];
      for (int j = 0; j < 2; ++j) {
        turn.lines[j] = address(tile(keys, i + j).k);
        turn.lines[2 + j] = address(tile(values, i + j).v);
      }
    }
    next_ = after;
  }

  // To be called often while a visit is computed: fetches so many lines of each stream.
  KERNELS_INLINE void fetch(int num_lines) {
    for (; num_lines > 0 && turn_ < num_turns_; --num_lines) {
      const Turn& turn = turns_[turn_];
      for (const char* line : turn.lines) __builtin_prefetch(line + line_, 0, 2);
      line_ += kLine;
      if (line_ == num_lines_ * kLine) line_ = 0, ++turn_;
    }
  }
  void end() { fetch(std::numeric_limits<int>::max()); }

 private:
  static constexpr int kLine = 64;
  static_assert(kVisitTiles == 4);
  struct Turn {
    const char* lines[kVisitTiles];
  };

  static const char* address(const bf16* start) { return reinterpret_cast<const char*>(start); }
  Visit following() {
    const Visit visit = own_.next();
    return visit.num_tiles ? visit : others_.next();
  }

  VisitStream own_, others_;
  const int num_lines_;
  const bool has_values_;
  Visit next_;
  Turn turns_[kVisitTiles / 2];
  int num_turns_ = 0, turn_ = 0;
  int64_t line_ = 0;
};

}  // namespace kernels::KERNELS_ISA_NS
