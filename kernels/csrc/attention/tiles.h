// The tiles of a piece in the order of their computation, and the prefetching of those to come.
#pragma once

#include "decode.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kTile = 16;  // tokens

template <class T>
struct Tile {
  const T *k, *v;  // num_tokens consecutive rows of head_dim elements
  int kv_head, num_tokens;
};

// Block by block, within a block head by head: the order in which they lie in memory.
template <class T>
class TileStream {
 public:
  TileStream(const DecodeRequest& r, const DecodePiece& piece, int head_dim)
      : r_(r), piece_(piece), head_dim_(head_dim), table_(r.block_tables + piece.seq * r.table_stride) {
    enter_block(piece.first);
  }

  bool done() const { return token_ >= piece_.last; }

  Tile<T> next() {
    const int num_tokens = std::min(kTile, block_end_ - token_in_head_);
    const int64_t offset = (int64_t(head_) * r_.block_size + token_in_head_ % r_.block_size) * head_dim_;
    const Tile<T> tile{k_block_ + offset, v_block_ + offset, head_, num_tokens};
    token_in_head_ += num_tokens;
    if (token_in_head_ < block_end_) return tile;
    token_in_head_ = token_;
    if (++head_ == piece_.last_head) enter_block(block_end_);
    return tile;
  }

 private:
  void enter_block(int token) {
    token_ = token_in_head_ = token;
    head_ = piece_.first_head;
    if (done()) return;
    const int block = token / r_.block_size;
    block_end_ = std::min(piece_.last, (block + 1) * r_.block_size);
    k_block_ = static_cast<const T*>(r_.k_cache) + table_[block] * r_.k_block_stride;
    v_block_ = static_cast<const T*>(r_.v_cache) + table_[block] * r_.v_block_stride;
  }

  const DecodeRequest& r_;
  const DecodePiece& piece_;
  const int head_dim_;
  const int32_t* const table_;
  int token_, token_in_head_, block_end_ = 0, head_ = 0;
  const T *k_block_ = nullptr, *v_block_ = nullptr;
};

// Fetches the kWindow tiles that follow the current one, a line of each in turn: a core then reads as many DRAM pages
// at once as there are tiles, which makes scattered blocks almost as fast as one long array. A tile enters the window
// kWindow tiles before its turn and gets an equal share of its lines per tile, so that it is complete when needed.
template <class T>
class TilePrefetcher {
 public:
  static constexpr int kWindow = 8;  // tiles; twice as many streams, one for K and one for V

  // `current` starts at the piece's first tile; `after` is what this thread does next. The first tiles are taken to be
  // under way, because the piece before fetched them.
  TilePrefetcher(TileStream<T> current, TileStream<T> after, int head_dim)
      : ahead_(current), after_(after), lines_per_tile_(int(lines_of_tile(head_dim) + kWindow - 1) / kWindow) {
    for (int i = 0; i <= kWindow; ++i) {
      begin_tile();
      offset_ += lines_per_tile_ * 64;
    }
    offset_ -= lines_per_tile_ * 64;
  }

  void begin_tile() {
    issued_ = 0;
    oldest_ = (oldest_ + 1) % kWindow;
    TileStream<T>& source = ahead_.done() ? after_ : ahead_;
    if (source.done()) return;  // an address beyond a tile fetched before: at worst a few lines for nothing
    const Tile<T> tile = source.next();
    const int newest = (oldest_ + kWindow - 1) % kWindow;
    // All streams share one running offset, so that a step costs two instructions a line.
    k_[newest] = reinterpret_cast<uintptr_t>(tile.k) - uintptr_t(offset_);
    v_[newest] = reinterpret_cast<uintptr_t>(tile.v) - uintptr_t(offset_);
  }

  // Part `step` of `num_steps` of what is to be fetched during one tile.
  KERNELS_INLINE void advance(int step, int num_steps) {
    const int until = lines_per_tile_ * (step + 1) / num_steps;
    for (; issued_ < until; ++issued_, offset_ += 64)
      for (int i = 0; i < kWindow; ++i) {
        __builtin_prefetch(reinterpret_cast<const char*>(k_[i] + uintptr_t(offset_)), 0, 3);
        __builtin_prefetch(reinterpret_cast<const char*>(v_[i] + uintptr_t(offset_)), 0, 3);
      }
  }

 private:
  static int64_t lines_of_tile(int head_dim) { return (int64_t(kTile) * head_dim * int64_t(sizeof(T)) + 63) / 64; }

  TileStream<T> ahead_, after_;
  const int lines_per_tile_;
  int issued_ = 0, oldest_ = 0;
  int64_t offset_ = 0;
  uintptr_t k_[kWindow] = {}, v_[kWindow] = {};
};

}  // namespace kernels::KERNELS_ISA_NS
