#include "draw.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace kernels {

namespace {

// Number `counter` of the SplitMix64 stream `key`.
inline uint64_t derived(uint64_t key, uint64_t counter) {
  uint64_t x = key + (counter + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A number as a uniform one in (0, 1), exact.
inline double fraction(uint64_t number) { return static_cast<double>(number >> 12) * 0x1p-52 + 0x1p-53; }

// A number as one below `limit` (Lemire 2019, whose bias of limit / 2^64 stays).
inline int64_t below(uint64_t number, int64_t limit) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(number) * static_cast<uint64_t>(limit) >> 64);
}

// The columns of one key so far, and what is left beside them.
class Drawn {
 public:
  Drawn(const double* tails, int64_t num_columns, int64_t k) : tails_(tails), num_columns_(num_columns) {
    columns_.reserve(k);
  }

  void clear() { columns_.clear(); }

  // Draws one more column: the one at which `share` of the weight that is left lies behind.
  int64_t draw(double share) {
    double left = 0, last = 0;  // summed between the drawn ones: a small weight is no difference of large sums
    for (int64_t column : columns_) {
      left += tails_[column + 1] - last;
      last = tails_[column];
    }
    left += tails_[0] - last;
    double behind = share * left;  // and then of all columns, drawn or not
    auto place = columns_.begin();
    for (; place != columns_.end() && behind > tails_[*place + 1]; ++place) behind += weight(*place);
    const int64_t column = drawable(last_with(behind));
    columns_.insert(std::lower_bound(columns_.begin(), columns_.end(), column, std::greater<int64_t>()), column);
    return column;
  }

 private:
  double weight(int64_t column) const { return tails_[column] - tails_[column + 1]; }

  // The last column whose tail is `behind` or more, or the first. Without branches, which nobody could foretell.
  int64_t last_with(double behind) const {
    int64_t column = 0;
    for (int64_t left = num_columns_; left > 1; left -= left / 2)
      column += tails_[column + left / 2] >= behind ? left / 2 : 0;
    return column;
  }

  // The column itself, or the nearest one that can be drawn where rounding led to one that cannot.
  int64_t drawable(int64_t column) const {
    for (int64_t away = 0;; ++away)
      for (int64_t at : {column - away, column + away})
        if (at >= 0 && at < num_columns_ && weight(at) > 0 && !std::count(columns_.begin(), columns_.end(), at))
          return at;
  }

  const double* tails_;
  int64_t num_columns_;
  std::vector<int64_t> columns_;  // descending
};

}  // namespace

void draw_evenly(const uint64_t* keys, int64_t num_keys, int64_t num_columns, int64_t k, int64_t* out) {
  std::vector<int64_t> deck(num_columns), swapped(k);
  std::iota(deck.begin(), deck.end(), 0);
  for (int64_t row = 0; row < num_keys; ++row, out += k) {
    for (int64_t i = 0; i < k; ++i) {
      swapped[i] = i + below(derived(keys[row], static_cast<uint64_t>(i)), num_columns - i);
      std::swap(deck[i], deck[swapped[i]]);
      out[i] = deck[i];
    }
    for (int64_t i = k; i-- > 0;) std::swap(deck[i], deck[swapped[i]]);
  }
}

void draw_by_weight(const uint64_t* keys, const double* tails, int64_t num_keys, int64_t num_columns, int64_t k,
                    int64_t* out) {
  Drawn drawn(tails, num_columns, k);
  for (int64_t row = 0; row < num_keys; ++row, out += k) {
    drawn.clear();
    for (int64_t i = 0; i < k; ++i) out[i] = drawn.draw(fraction(derived(keys[row], static_cast<uint64_t>(i))));
  }
}

}  // namespace kernels
