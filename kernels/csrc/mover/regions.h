// The check that a request's regions do not write what they also read or write elsewhere.
#pragma once

#include <optional>
#include <vector>

#include "request.h"

namespace kernels {

struct Overlap {
  size_t dst;          // index of the region whose destination overlaps
  bool with_dst;       // another destination; else a source
  size_t other;        // index of that region
};

// A destination that shares bytes with another destination or with any source. Sources may overlap each other.
std::optional<Overlap> find_overlap(const std::vector<Region>& regions);

}  // namespace kernels
