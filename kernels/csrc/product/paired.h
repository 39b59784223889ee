// Products of pairs: rows of bfloat16 are multiplied as they are, two elements a lane, into float32; denormals count as
// zeros. Rows of float32 are multiplied in float32, as elsewhere: a product of their three bfloat16 terms would take
// three instructions where two do (and one to widen a weight, for all rows of x).
//
// Measured on cores of Zen 4 and Zen 5 (docs/kernels.md): weights are fetched a row after the other, in long pieces. On a
// Zen 4, whose second-level cache can wait for more lines than its first, they come into the second. A Zen 5 multiplies
// twice as fast, so that with many rows of x what comes from the second-level cache is its limit. An Intel's
// core took twice as long for these products as for float32's: there this path is not chosen.
#pragma once

#include "weight_block.h"

namespace kernels::KERNELS_ISA_NS {

using PackedBf16 = bf16;

constexpr int kMostTileOutputs = 8;
template <class X>
constexpr int tile_outputs(int num_rows) { return num_rows <= 2 ? 8 : 4; }

template <class X>
constexpr int most_tile_rows() { return 6; }

// Between two chunks sums go through memory: with many rows, where a Zen 4's arithmetic is the limit, long chunks save
// time; elsewhere a register tile's rows of x and of weights are to stay in the first-level cache. With few, what is
// fetched ahead must not fill the second-level cache.
template <class X>
inline int64_t chunk_depth(int64_t num_rows) {
  const int64_t of_many = has_large_first_cache() ? 2048 : 8192;
  return (num_rows <= 2 ? 8192 : num_rows <= 8 ? 4096 : of_many) / int64_t(sizeof(X));
}

// Fetches elements [first, last) of a block's rows in equal shares a tile, a row after the other, into the second-level
// cache, or the first where that is large.
class RowPrefetcher {
 public:
  RowPrefetcher(const WeightBlock& block, int64_t first, int64_t last, int64_t num_tiles, int64_t) {
    if (block.num_rows == 0 || num_tiles == 0 || first == last) return;
    next_row_ = block.rows, end_rows_ = block.rows + block.num_rows;
    offset_ = first * kWeightBytes;
    lines_of_row_ = ((last - first) * kWeightBytes + 63) / 64;
    lines_of_tile_ = (block.num_rows * lines_of_row_ + num_tiles - 1) / num_tiles;
  }

  void start_tile(int64_t num_pairs) {
    lines_due_ += lines_of_tile_;
    rate_ = num_pairs ? (lines_due_ * kLine + num_pairs - 1) / num_pairs : 0;
  }

  // Lines that follow each other, equally many with each pair.
  struct Run {
    const char* line;
    int64_t rate, credit, num_pairs;
    bool into_first;

    KERNELS_INLINE void step() {
      for (credit += rate; credit >= kLine; credit -= kLine, line += 64) {
        if (into_first)
          __builtin_prefetch(line, 0, 3);
        else
          __builtin_prefetch(line, 0, 2);
        // The next address only after some cycles: products wait for registers and fetches do not, which would run
        // ahead until all places for missing lines were theirs.
        asm volatile("" : "+m"(line));
        asm volatile("imul $1, %0, %0\n\timul $1, %0, %0" : "+r"(line) : : "cc");
      }
    }
  };

  Run next_run(int64_t most_pairs) {
    if (lines_left_ == 0 && next_row_ != end_rows_) {
      line_ = static_cast<const char*>(*next_row_++) + offset_;
      lines_left_ = lines_of_row_;
    }
    const int64_t num_lines = std::min(lines_due_, lines_left_);
    if (num_lines == 0) return {nullptr, 0, 0, most_pairs, into_first_};
    const int64_t num_pairs = std::min(most_pairs, (num_lines * kLine + rate_ - 1) / rate_);
    const Run run{line_, rate_, 0, num_pairs, into_first_};  // may run over the row's end, into what is fetched then
    const int64_t fetched = std::min(num_lines, num_pairs * rate_ / kLine);
    line_ += 64 * fetched, lines_left_ -= fetched, lines_due_ -= fetched;
    return run;
  }

 private:
  static constexpr int64_t kLine = 1 << 10;  // lines are counted in such parts

  const void *const *next_row_ = nullptr, *const *end_rows_ = nullptr;
  const char* line_ = nullptr;
  bool into_first_ = has_large_first_cache();
  int64_t offset_ = 0, lines_of_row_ = 0, lines_of_tile_ = 0, lines_left_ = 0, lines_due_ = 0, rate_ = 0;
};

// sum[m][n] += x[m] . w[n] for 32 elements or the first `count` of them; x has zeros beyond.
template <int M, int N, class Load>
KERNELS_INLINE void add_pairs(const bf16* x, const Load& load_weights, Vec (&sum)[M][N]) {
  __m512i weight[N];
  for (int n = 0; n < N; ++n) weight[n] = load_weights(n);
  for (int m = 0; m < M; ++m) {
    const __m512i row = _mm512_loadu_si512(x + m * kPair);
    for (int n = 0; n < N; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], (__m512bh)row, (__m512bh)weight[n]);
  }
}

template <int M, int N>
KERNELS_INLINE void add_pair(const bf16* x, const bf16* const (&w)[N], int64_t k, Vec (&sum)[M][N]) {
  add_pairs<M, N>(x, [&](int n) { return _mm512_loadu_si512(w[n] + k); }, sum);
}

template <int M, int N>
KERNELS_INLINE void add_rest(const bf16* x, const bf16* const (&w)[N], int64_t k, int count,
                             Vec (&sum)[M][N]) {
  const __mmask32 mask = (1u << count) - 1;
  add_pairs<M, N>(x, [&](int n) { return _mm512_maskz_loadu_epi16(mask, w[n] + k); }, sum);
}

}  // namespace kernels::KERNELS_ISA_NS
