// Draws of different columns by counter: kernels/routing.py says what is drawn, harness/routing/counters.py of which
// numbers.
#pragma once

#include <cstdint>

namespace kernels {

// Writes `k` different columns of each key, all equally likely, to out [num_keys, k].
void draw_evenly(const uint64_t* keys, int64_t num_keys, int64_t num_columns, int64_t k, int64_t* out);

// As draw_evenly, each time in proportion to the weights of the columns that are left. `tails` [num_columns + 1] are
// the sums of the weights from each column on; `k` columns or more have a weight above 0.
void draw_by_weight(const uint64_t* keys, const double* tails, int64_t num_keys, int64_t num_columns, int64_t k,
                    int64_t* out);

}  // namespace kernels
