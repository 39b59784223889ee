// The tiles of a piece in the order of their computation.
#pragma once

#include "decode.h"

namespace kernels::KERNELS_ISA_NS {

constexpr int kTile = 16;  // tokens

template <class T>
struct Tile {
  const T *k, *v;  // num_tokens rows, head_dim elements apart
  int kv_head, num_tokens;
};

// kTilesAtOnce blocks after so many, of them head by head: for one, the order in which they lie in memory.
template <class T>
class TileStream {
 public:
  TileStream(const DecodeRequest& r, const DecodePiece& piece)
      : r_(r), piece_(piece), table_(r.block_tables + piece.seq * r.table_stride) {
    enter_blocks(piece.first);
  }

  bool done() const { return token_ >= piece_.last; }

  Tile<T> next() {
    const int block = token_in_head_ / r_.block_size, in_block = token_in_head_ % r_.block_size;
    const int num_tokens = std::min({kTile, r_.block_size - in_block, last_token_ - token_in_head_});
    const int64_t offset = (int64_t(head_) * r_.block_size + in_block) * r_.head_dim;
    const Tile<T> tile{static_cast<const T*>(r_.k_cache) + table_[block] * r_.k_block_stride + offset,
                       static_cast<const T*>(r_.v_cache) + table_[block] * r_.v_block_stride + offset, head_,
                       num_tokens};
    token_in_head_ += num_tokens;
    if (token_in_head_ < last_token_) return tile;
    token_in_head_ = token_;
    if (++head_ == piece_.last_head) enter_blocks(last_token_);
    return tile;
  }

 private:
  void enter_blocks(int token) {
    token_ = token_in_head_ = token;
    head_ = piece_.first_head;
    if (done()) return;
    const int64_t end = (int64_t(token / r_.block_size) + kTilesAtOnce) * r_.block_size;
    last_token_ = int(std::min<int64_t>(piece_.last, end));
  }

  const DecodeRequest& r_;
  const DecodePiece& piece_;
  const int32_t* const table_;
  int token_, token_in_head_, last_token_ = 0, head_ = 0;
};

}  // namespace kernels::KERNELS_ISA_NS
