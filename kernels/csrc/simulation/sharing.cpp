#include "sharing.h"

#include <algorithm>
#include <numeric>

namespace kernels::simulation {

void SharedMemory::speeds(const std::vector<LaneName>&, const std::vector<double>& demands,
                          std::vector<double>& result) {
  result.assign(demands.size(), 1.0);
  const double wanted_bytes_s = std::accumulate(demands.begin(), demands.end(), 0.0);
  if (wanted_bytes_s <= host_bytes_s_) return;
  if (!proportional_) return fill(demands, result);
  for (size_t lane = 0; lane < demands.size(); ++lane)
    if (demands[lane] > 0) result[lane] = host_bytes_s_ / wanted_bytes_s;
}

void SharedMemory::fill(const std::vector<double>& demands, std::vector<double>& result) {
  if (by_demand_.size() != demands.size()) {
    by_demand_.resize(demands.size());
    std::iota(by_demand_.begin(), by_demand_.end(), 0);
  }
  const auto less = [&](uint32_t a, uint32_t b) {
    return demands[a] < demands[b] || (demands[a] == demands[b] && a < b);  // ties by the order of lanes
  };
  for (size_t i = 1; i < by_demand_.size(); ++i) {
    const uint32_t lane = by_demand_[i];
    size_t place = i;
    for (; place > 0 && less(lane, by_demand_[place - 1]); --place) by_demand_[place] = by_demand_[place - 1];
    by_demand_[place] = lane;
  }
  double left_bytes_s = host_bytes_s_;
  auto left = static_cast<double>(demands.size());
  for (const uint32_t lane : by_demand_) {
    if (demands[lane] > 0) {
      const double share_bytes_s = std::min(demands[lane], left_bytes_s / left);
      result[lane] = share_bytes_s / demands[lane];
      left_bytes_s -= share_bytes_s;
    }
    left -= 1;  // who wants nothing comes first
  }
}

void MeasuredTogether::speeds(const std::vector<LaneName>& lanes, const std::vector<double>& demands,
                              std::vector<double>& result) {
  sets_.clear();
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    const auto rank = static_cast<size_t>(lanes[lane].rank);
    if (rank >= sets_.size()) sets_.resize(rank + 1, 0);
    if (demands[lane] > 0) sets_[rank] |= 1u << lanes[lane].kind;
  }
  result.assign(lanes.size(), 1.0);
  for (size_t lane = 0; lane < lanes.size(); ++lane)
    if (demands[lane] > 0) result[lane] = table_[sets_[lanes[lane].rank]][lanes[lane].kind];
}

}  // namespace kernels::simulation
