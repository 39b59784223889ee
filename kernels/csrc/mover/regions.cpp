#include "regions.h"

#include <algorithm>

namespace kernels {
namespace {

struct Interval {
  uintptr_t start, end;
  bool is_dst;
  size_t region;
};

std::vector<Interval> sorted_intervals(const std::vector<Region>& regions) {
  std::vector<Interval> intervals;
  intervals.reserve(2 * regions.size());
  for (size_t i = 0; i < regions.size(); ++i) {
    const auto dst = reinterpret_cast<uintptr_t>(regions[i].dst), src = reinterpret_cast<uintptr_t>(regions[i].src);
    const auto num_bytes = uintptr_t(regions[i].num_bytes);
    if (num_bytes == 0) continue;
    intervals.push_back({dst, dst + num_bytes, true, i});
    intervals.push_back({src, src + num_bytes, false, i});
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.start < b.start; });
  return intervals;
}

}  // namespace

std::optional<Overlap> find_overlap(const std::vector<Region>& regions) {
  // Of the intervals that start earlier, those that reach furthest are the only ones to look at.
  const Interval* furthest_dst = nullptr;
  const Interval* furthest_src = nullptr;
  const std::vector<Interval> intervals = sorted_intervals(regions);
  for (const Interval& interval : intervals) {
    if (furthest_dst && interval.start < furthest_dst->end) {
      if (interval.is_dst) return Overlap{interval.region, true, furthest_dst->region};
      return Overlap{furthest_dst->region, false, interval.region};
    }
    if (interval.is_dst && furthest_src && interval.start < furthest_src->end)
      return Overlap{interval.region, false, furthest_src->region};
    const Interval*& furthest = interval.is_dst ? furthest_dst : furthest_src;
    if (!furthest || interval.end > furthest->end) furthest = &interval;
  }
  return std::nullopt;
}

}  // namespace kernels
