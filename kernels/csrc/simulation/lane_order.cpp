#include "lane_order.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <queue>
#include <tuple>

namespace kernels::simulation {

namespace {

constexpr int32_t kNone = -1;

// A lane on its way: what waits in its two classes, and the packets that it runs without a break.
struct LaneState {
  std::deque<int32_t> urgent, normal;
  int32_t running = kNone;
  double start_s = 0, packet_s = 0;
  int64_t num_packets = 0;  // until its end, or until an urgent op's turn
  int64_t version = 0;      // of that number
  int32_t latest = kNone;   // the run that ended last

  double end_s() const { return start_s + static_cast<double>(num_packets) * packet_s; }
};

// Plays the graph: whatever ends at one time ends, and the strategy's thread goes on, before any op begins.
class Ordering {
 public:
  explicit Ordering(const OpGraph& graph)
      : graph_(graph), left_(graph.packets), unmet_(graph.lane.size()), after_(graph.lane.size()) {
    found_.last.assign(graph.lane.size(), kNone);
    for (int32_t node = 0; node < static_cast<int32_t>(graph.lane.size()); ++node) {
      unmet_[node] = graph.before[node].size();
      for (const int32_t other : graph.before[node]) after_.at(other).push_back(node);
      const int32_t lane = graph.lane[node];
      if (lane == kNone) continue;
      if (lanes_.size() <= static_cast<size_t>(lane)) lanes_.resize(lane + 1);
      (graph.urgent[node] ? lanes_[lane].urgent : lanes_[lane].normal).push_back(node);
    }
  }

  LaneOrder run() {
    std::vector<int32_t> freed, ended;
    for (int32_t node = 0; node < static_cast<int32_t>(unmet_.size()); ++node)
      if (!unmet_[node]) freed.push_back(node);
    go_on(freed, 0.0);
    while (!events_.empty()) {
      const double now_s = std::get<0>(events_.top());
      ended.clear();
      while (!events_.empty() && std::get<0>(events_.top()) == now_s) {
        const auto [end_s, node, version, lane] = events_.top();
        events_.pop();
        if (version == lanes_[lane].version) ended.push_back(lane);
      }
      for (const int32_t lane : ended) end(lanes_[lane], freed);
      go_on(freed, now_s);
      for (const int32_t lane : ended) offer(lane, now_s, false);
    }
    return std::move(found_);
  }

 private:
  // Begins what can begin now that these nodes are ready, and leaves none of them: first the strategy's thread goes on,
  // which may have submitted something urgent.
  void go_on(std::vector<int32_t>& freed, double now_s) {
    std::vector<std::pair<int32_t, bool>> lanes;  // with whether something urgent has become ready
    while (!freed.empty()) {
      const int32_t node = freed.back(), lane = graph_.lane[node];
      freed.pop_back();
      if (lane == kNone) {
        add_run(node, 0.0, nullptr);
        release(node, freed);
        continue;
      }
      const auto known = std::find_if(lanes.begin(), lanes.end(), [&](const auto& one) { return one.first == lane; });
      if (known == lanes.end()) {
        lanes.emplace_back(lane, graph_.urgent[node]);
      } else {
        known->second = known->second || graph_.urgent[node];
      }
    }
    for (const auto& [lane, urgent] : lanes) offer(lane, now_s, urgent);
  }

  // Begins if the lane is idle. For an urgent op that has become ready, one of the normal class stops behind its present
  // packet.
  void offer(int32_t lane, double now_s, bool urgent) {
    LaneState& state = lanes_[lane];
    if (state.running == kNone) return begin(lane, now_s);
    if (!urgent || graph_.urgent[state.running] || !(state.packet_s > 0)) return;
    const auto num_packets = static_cast<int64_t>(std::ceil((now_s - state.start_s) / state.packet_s));
    if (num_packets >= state.num_packets) return;
    state.num_packets = num_packets;
    expect_end(lane);
  }

  void begin(int32_t lane, double now_s) {
    LaneState& state = lanes_[lane];
    for (const auto* waiting : {&state.urgent, &state.normal}) {
      if (waiting->empty() || unmet_[waiting->front()]) continue;
      state.running = waiting->front();
      state.start_s = now_s;
      state.packet_s = graph_.packet_s[state.running];
      state.num_packets = left_[state.running];
      return expect_end(lane);
    }
  }

  void expect_end(int32_t lane) {
    LaneState& state = lanes_[lane];
    events_.emplace(state.end_s(), state.running, ++state.version, lane);
  }

  // Ends the lane's run; adds to `freed` what is ready because its op has ended.
  void end(LaneState& state, std::vector<int32_t>& freed) {
    const int32_t node = state.running;
    state.running = kNone;
    add_run(node, static_cast<double>(state.num_packets) * state.packet_s, &state);
    left_[node] -= state.num_packets;
    if (left_[node]) return;
    (graph_.urgent[node] ? state.urgent : state.normal).pop_front();
    release(node, freed);
  }

  void release(int32_t node, std::vector<int32_t>& freed) {
    for (const int32_t follower : after_[node])
      if (!--unmet_[follower]) freed.push_back(follower);
  }

  void add_run(int32_t node, double seconds, LaneState* state) {
    std::vector<int32_t> before;
    for (const int32_t earlier : graph_.before[node]) before.push_back(found_.last[earlier]);
    if (state && state->latest != kNone) before.push_back(state->latest);
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    found_.nodes.push_back(node);
    found_.seconds.push_back(seconds);
    found_.before.push_back(std::move(before));
    found_.last[node] = static_cast<int32_t>(found_.nodes.size()) - 1;
    if (state) state->latest = found_.last[node];
  }

  using Event = std::tuple<double, int32_t, int64_t, int32_t>;  // end, node, version, lane

  const OpGraph& graph_;
  std::vector<int64_t> left_;  // packets
  std::vector<size_t> unmet_;
  std::vector<std::vector<int32_t>> after_;
  std::vector<LaneState> lanes_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  LaneOrder found_;
};

}  // namespace

LaneOrder in_lane_order(const OpGraph& graph) { return Ordering(graph).run(); }

}  // namespace kernels::simulation
