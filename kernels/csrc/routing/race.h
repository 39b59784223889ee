// Races of random numbers by counter: harness/routing/sampling.py says what they are for, counters.py what the numbers.
#pragma once

#include <cstdint>

namespace kernels {

// Number `counter` of the SplitMix64 stream `key`.
inline uint64_t derived(uint64_t key, uint64_t counter) {
  uint64_t x = key + (counter + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A number as a uniform one in (0, 1), exact.
inline double fraction(uint64_t number) { return static_cast<double>(number >> 12) * 0x1p-52 + 0x1p-53; }

// Writes the fraction of number `column` of each key's stream to out [num_keys, num_columns].
void race_fractions(const uint64_t* keys, int64_t num_keys, int64_t num_columns, double* out);

// Writes the columns with the `k` smallest numbers of each key's stream, ascending, to out [num_keys, k].
void race_by_numbers(const uint64_t* keys, int64_t num_keys, int64_t num_columns, int64_t k, int64_t* out);

// As race_by_numbers, with the arrivals -log * inverse_rates [num_columns] in place of the numbers. `logs` [num_keys,
// num_columns] are those of the fractions.
void race_by_arrivals(const double* logs, const double* inverse_rates, int64_t num_keys, int64_t num_columns, int64_t k,
                      int64_t* out);

}  // namespace kernels
