// Rows of weights (bfloat16 or float16) that are multiplied together, and the fetching of those to come.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kPair = 2 * kWidth;  // weights in a vector
constexpr int kMaxBlockRows = 64;
constexpr int64_t kWeightBytes = 2;

// Weight rows by address, so that they may come from two matrices (gate and up) or lie any distance apart.
struct WeightBlock {
  const void* rows[kMaxBlockRows];
  int num_rows = 0;

  // Rows [first, last) of a matrix, filled up to a multiple of `multiple` by repeating the last.
  void add(const void* matrix, int64_t stride, int64_t first, int64_t last, int multiple) {
    const char* const start = static_cast<const char*>(matrix);
    for (int64_t row = first; row < last; ++row) rows[num_rows++] = start + row * stride * kWeightBytes;
    for (; num_rows % multiple; ++num_rows) rows[num_rows] = rows[num_rows - 1];
  }
};

// The first rows that a thread multiplies with next: equally many of each matrix.
inline WeightBlock first_rows(const NextWeights& next) {
  WeightBlock block;
  if (next.range.first == next.range.last) return block;
  const int64_t last = std::min<int64_t>(next.range.last, next.range.first + kMaxBlockRows / next.num_matrices);
  for (int i = 0; i < next.num_matrices; ++i)
    block.add(next.matrices[i], next.strides[i], next.range.first, last, 1);
  return block;
}

// Fetches elements [first, last) of a block's rows in equal shares a step, a line of each of 8 rows in turn, into the
// first-level cache.
class ChunkPrefetcher {
 public:
  ChunkPrefetcher(const WeightBlock& block, int64_t first, int64_t last, int64_t num_steps) {
    if (block.num_rows == 0 || num_steps == 0) return;
    num_rows_ = block.num_rows;
    rows_ = block.rows;
    offset_ = first_offset_ = first * kWeightBytes;
    end_offset_ = last * kWeightBytes;
    const int64_t lines = int64_t(num_rows_) * ((end_offset_ - first_offset_ + 63) / 64);
    lines_per_step_ = int((lines + num_steps - 1) / num_steps);
    num_streams_ = std::min(kStreams, num_rows_);
  }

  KERNELS_INLINE void step() {
    for (int i = 0; i < lines_per_step_; ++i) {
      __builtin_prefetch(static_cast<const char*>(rows_[stream_]) + offset_, 0, 3);
      if (++stream_ == num_streams_) next_line();
    }
  }

 private:
  static constexpr int kStreams = 8;

  void next_line() {
    stream_ = 0;
    offset_ += 64;
    if (offset_ < end_offset_) return;
    rows_ += num_streams_;
    num_rows_ -= num_streams_;
    offset_ = first_offset_;
    num_streams_ = std::min(kStreams, num_rows_);
    if (num_rows_ == 0) lines_per_step_ = 0;
  }

  const void* const* rows_ = nullptr;
  int num_rows_ = 0, num_streams_ = 0, stream_ = 0, lines_per_step_ = 0;
  int64_t first_offset_ = 0, offset_ = 0, end_offset_ = 0;
};

}  // namespace kernels::KERNELS_ISA_NS
