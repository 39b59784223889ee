// The order in which lanes run the ops of a graph: harness/machine/critical_path.py says what it means.
#pragma once

#include <cstdint>
#include <vector>

namespace kernels::simulation {

// Ops by parallel vectors; the strategy's thread is a node without a lane (-1) and takes no time.
struct OpGraph {
  std::vector<int32_t> lane;
  std::vector<bool> urgent;
  std::vector<int64_t> packets;
  std::vector<double> packet_s;
  std::vector<std::vector<int32_t>> before;  // nodes with smaller numbers
};

// Runs of packets, an op that is interrupted has several: by run the op's node, and the runs before it, ascending.
struct LaneOrder {
  std::vector<int32_t> nodes;
  std::vector<double> seconds;
  std::vector<std::vector<int32_t>> before;
  std::vector<int32_t> last;  // by node its last run; -1 where it waits for one that its lane runs later
};

LaneOrder in_lane_order(const OpGraph& graph);

}  // namespace kernels::simulation
