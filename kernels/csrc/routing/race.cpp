#include "race.h"

#include <cstring>
#include <vector>

namespace kernels {

namespace {

// The lowest bits of a number give way to its column: so ties have an order, and one number says both.
uint64_t column_bits(int64_t num_columns) {
  uint64_t bits = 0;
  while (static_cast<int64_t>(bits) < num_columns - 1) bits = 2 * bits + 1;
  return bits;
}

// Writes the columns of the `k` smallest numbers of a row, ascending. `number(column)` gives each number.
template <class Number>
void first_of_row(Number number, int64_t num_columns, int64_t k, uint64_t* first, int64_t* out) {
  const uint64_t low = column_bits(num_columns);
  int64_t found = 0;
  for (int64_t column = 0; column < num_columns; ++column) {
    const uint64_t mine = (number(column) & ~low) | static_cast<uint64_t>(column);
    if (found == k && mine > first[k - 1]) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && first[at - 1] > mine; --at) first[at] = first[at - 1];
    first[at] = mine;
  }
  for (int64_t i = 0; i < k; ++i) out[i] = static_cast<int64_t>(first[i] & low);
}

}  // namespace

void race_fractions(const uint64_t* keys, int64_t num_keys, int64_t num_columns, double* out) {
  for (int64_t row = 0; row < num_keys; ++row)
    for (int64_t column = 0; column < num_columns; ++column)
      out[row * num_columns + column] = fraction(derived(keys[row], static_cast<uint64_t>(column)));
}

void race_by_numbers(const uint64_t* keys, int64_t num_keys, int64_t num_columns, int64_t k, int64_t* out) {
  std::vector<uint64_t> first(k);
  for (int64_t row = 0; row < num_keys; ++row) {
    const auto number = [&](int64_t column) { return derived(keys[row], static_cast<uint64_t>(column)); };
    first_of_row(number, num_columns, k, first.data(), out + row * k);
  }
}

void race_by_arrivals(const double* logs, const double* inverse_rates, int64_t num_keys, int64_t num_columns, int64_t k,
                      int64_t* out) {
  std::vector<uint64_t> first(k);
  for (int64_t row = 0; row < num_keys; ++row) {
    const auto number = [&](int64_t column) {
      const double arrival = -logs[row * num_columns + column] * inverse_rates[column];
      uint64_t bits;  // positive floats sort as whole numbers
      std::memcpy(&bits, &arrival, sizeof bits);
      return bits;
    };
    first_of_row(number, num_columns, k, first.data(), out + row * k);
  }
}

}  // namespace kernels
