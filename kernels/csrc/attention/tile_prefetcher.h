// The fetching of tiles to come, for kernels in vectors.
#pragma once

#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

// Fetches the tiles that will follow, a line of each in turn: a core then reads as many DRAM pages at once as there are
// tiles in the window, which makes scattered blocks almost as fast as one long array. A tile enters the window kWindow
// tiles before its turn and gets an equal share of its lines per tile, so that it is complete when needed. Lines are
// spread evenly over the computation, because a burst fills the core's line buffers and stalls it.
template <class T>
class TilePrefetcher {
 public:
  static constexpr int kWindow = kFetchedTiles;  // twice as many streams, one for K and one for V

  // `current` stands at the piece's first tile; `after` is what this thread does next. The first tiles are taken to be
  // under way, because the piece before fetched them. A tile is computed in `num_units` units.
  TilePrefetcher(TileStream<T> current, TileStream<T> after, const DecodeRequest& r, int num_units)
      : ahead_(current), after_(after) {
    int lines = int((int64_t(kTile) * r.head_dim * int64_t(sizeof(T)) + 63) / 64);
    if (r.values_in_keys()) {  // then the second stream is the second half of the keys
      lines = (lines + 1) / 2;
      second_half_ = uintptr_t(lines) * 64;
    }
    last_line_ = uintptr_t(lines - 1) * 64;
    pairs_per_tile_ = (lines + kWindow - 1) / kWindow * kWindow;
    dot_pairs_ = std::max(1, kWidth * int(sizeof(T)) / 16 / num_units);
    value_pairs_ = std::max(1, kWidth * int(sizeof(T)) / 16 / num_units);
    for (int i = 0; i <= kWindow; ++i) {
      begin_tile();
      position_ += left_;
    }
    left_ = 0;
  }

  void begin_tile() {
    position_ += left_;
    left_ = pairs_per_tile_;
    oldest_ = (oldest_ + 1) % kWindow;
    TileStream<T>& source = ahead_.done() ? after_ : ahead_;
    if (source.done()) return;  // an address beyond a tile fetched before: at worst a few lines for nothing
    const Tile<T> tile = source.next();
    const uintptr_t offset = uintptr_t(position_ / kWindow * 64);
    Stream& newest = streams_[(oldest_ + kWindow - 1) % kWindow];
    newest.k = reinterpret_cast<uintptr_t>(tile.k) - offset;
    newest.v = reinterpret_cast<uintptr_t>(tile.v) + second_half_;
    newest.v += fetches_far() ? last_line_ + offset : -offset;
  }

  // To be called once per 2 vectors of 4 keys, and once per 4 vectors of 2 values.
  KERNELS_INLINE void during_dot() { fetch(dot_pairs_); }
  KERNELS_INLINE void during_values() { fetch(value_pairs_); }

 private:
  // Whether tiles come into the second-level cache; decided by the compiler where there is no choice.
  bool fetches_far() const { return kMayFetchFar && is_far_; }

  // A line of K and one of V in one tile, the next ones in the next tile, and so on round the window. On their way to
  // the second-level cache those of V come from the tile's end: K and V that lie a large power of two apart, line beside
  // line, share banks of the memory.
  KERNELS_INLINE void fetch(int num_pairs) {
    for (int i = 0; i < num_pairs && left_ > 0; ++i, --left_, ++position_) {
      const Stream& stream = streams_[position_ % kWindow];
      const uintptr_t offset = uintptr_t(position_ / kWindow * 64);
      const auto* const key = reinterpret_cast<const char*>(stream.k + offset);
      const auto* const value = reinterpret_cast<const char*>(stream.v + (fetches_far() ? -offset : offset));
      if (fetches_far()) {
        __builtin_prefetch(key, 0, 2);
        __builtin_prefetch(value, 0, 2);
      } else {
        __builtin_prefetch(key, 0, 3);
        __builtin_prefetch(value, 0, 3);
      }
    }
  }

  struct Stream {
    uintptr_t k = 0, v = 0;  // less the offset at which the tile entered the window; backwards, with it
  };

  const bool is_far_ = !has_large_first_cache();
  TileStream<T> ahead_, after_;
  int pairs_per_tile_, dot_pairs_, value_pairs_;
  int left_ = 0, oldest_ = 0;
  uint64_t position_ = 0;
  uintptr_t second_half_ = 0, last_line_;
  Stream streams_[kWindow];
};

}  // namespace kernels::KERNELS_ISA_NS
