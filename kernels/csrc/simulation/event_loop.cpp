#include "event_loop.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <tuple>
#include <utility>

namespace kernels::simulation {

namespace {

constexpr double kInstantS = 1e-12;      // events this close are simultaneous: rounding must not order what is equal
constexpr double kInstant = 1e-15;       // and this close in proportion to the clock, whose steps grow with it
constexpr double kNearlyAPacket = 1e-9;  // and a packet boundary is reached this much before it, in packets

}  // namespace

template <class Whole>
void EventLoop::insert(Tree<Whole>& tree, size_t place, double value) {
  std::vector<double> values;
  for (size_t i = 0; i + 1 < order_.size(); ++i) values.push_back(tree[i]);
  values.insert(values.begin() + static_cast<std::ptrdiff_t>(place), value);
  tree.assign(values);
}

int EventLoop::add_lane(const std::string& kind, int kind_number, int rank) {
  auto added = std::make_unique<VirtualLane>();
  added->kind = kind;
  added->rank = rank;
  added->id = static_cast<int>(lanes_.size());
  const auto before = [](const VirtualLane* a, const VirtualLane* b) {
    return std::tie(a->kind, a->rank) < std::tie(b->kind, b->rank);
  };
  const auto place = std::lower_bound(order_.begin(), order_.end(), added.get(), before) - order_.begin();
  auto known = std::find(ranks_.begin(), ranks_.end(), rank);
  if (known == ranks_.end()) known = ranks_.insert(ranks_.end(), rank);
  order_.insert(order_.begin() + place, added.get());
  names_.insert(names_.begin() + place, {kind_number, static_cast<int>(known - ranks_.begin())});
  speeds_.insert(speeds_.begin() + place, 1.0);
  insert(due_s_, place, kNever);
  insert(demands_, place, 0.0);
  for (size_t i = 0; i < order_.size(); ++i) order_[i]->place = static_cast<int>(i);
  lanes_.push_back(std::move(added));
  return lanes_.back()->id;
}

void EventLoop::submit(Task& task) {
  VirtualLane& lane = *lanes_[task.lane];
  (task.urgent ? lane.urgent : lane.normal).push_back(&task);
  if (task.ready) consider(task);
}

// A lane that has just ended an op looks for the next one by itself; only one that sleeps must be woken.
void EventLoop::make_ready(Task& task) {
  task.ready = true;
  const VirtualLane& lane = *lanes_[task.lane];
  const bool sleeps = !lane.running && lane.ended_s + lane.turn_s < clock_s_ - kInstantS - kInstant * clock_s_;
  if (sleeps && !lane.launches_ahead) task.submitted_s = std::max(task.submitted_s, clock_s_ + handover_s());
  consider(task);
}

double EventLoop::handover_s() const {
  const bool beside = std::any_of(order_.begin(), order_.end(), [](const VirtualLane* lane) { return lane->running; });
  return beside ? handover_beside_s_ : handover_s_;
}

// A ready op may be the one that its lane runs next.
void EventLoop::consider(Task& task) {
  VirtualLane& lane = *lanes_[task.lane];
  if ((task.urgent ? lane.urgent : lane.normal).front() != &task) return;
  if (!lane.running || (lane.interruptible && task.urgent)) mark(lane);
}

// A cancelled op leaves its queue; the one behind it may be next.
void EventLoop::withdraw(Task& task) {
  VirtualLane& lane = *lanes_[task.lane];
  auto& queue = task.urgent ? lane.urgent : lane.normal;
  queue.erase(std::find(queue.begin(), queue.end(), &task));
  mark(lane);
}

void EventLoop::mark(VirtualLane& lane) {
  if (lane.dirty) return;
  lane.dirty = true;
  dirty_.push_back(&lane);
}

bool EventLoop::step(double until_s) {
  if (!dirty_.empty()) start_ready();
  if (sharing_changed_) share_memory();
  const double next_s = due_s_.whole();
  if (next_s > until_s || next_s == kNever) {
    if (until_s == kNever) return false;
    clock_s_ = until_s;
    return true;
  }
  const size_t first = due_s_.place_of_least();
  const double instant_s = next_s + kInstantS + kInstant * next_s;
  clock_s_ = next_s;
  due_s_.set(first, kNever);
  if (due_s_.whole() > instant_s) {
    happen(*order_[first]);
  } else {
    happen_together(first, std::min(instant_s, until_s));
  }
  return true;
}

double EventLoop::part_of_running(const VirtualLane& lane) const {
  const Task& task = *lane.running;
  if (task.alone_s == 0) return 0;
  const double left_s = lane.left_s - std::max(0.0, clock_s_ - lane.since_s) * lane.speed;
  return 1.0 - static_cast<double>(task.packets_done) / task.packets - left_s / task.alone_s;
}

// -- events ----------------------------------------------------------------------------------------------------------

// Several events in one instant, in the order of lanes. The clock goes to the last of them.
void EventLoop::happen_together(size_t first, double instant_s) {
  together_.assign(1, first);
  while (due_s_.whole() <= instant_s) {
    clock_s_ = due_s_.whole();
    together_.push_back(due_s_.place_of_least());
    due_s_.set(together_.back(), kNever);
  }
  std::sort(together_.begin(), together_.end());
  for (const size_t place : together_) happen(*order_[place]);
}

void EventLoop::happen(VirtualLane& lane) {
  if (!lane.running) return mark(lane);  // the moment has come at which its next op was submitted
  if (lane.boundary >= 0) return pause(lane);
  finish(lane);
}

// The op on the lane has run some more packets and goes.
void EventLoop::leave(VirtualLane& lane, int32_t packets_done) {
  Task& task = *lane.running;
  if (packets_done > task.packets_done)
    log_.record(task, packets_done - task.packets_done, lane.span_start_s, clock_s_);
  task.packets_done = packets_done;
  lane.running = nullptr;
  lane.interruptible = false;
  if (demands_[lane.place] != 0) {
    demands_.set(lane.place, 0);
    sharing_changed_ = true;
  }
  mark(lane);
}

void EventLoop::finish(VirtualLane& lane) {
  Task& task = *lane.running;
  leave(lane, task.packets);
  if (++task.pieces_done == task.pieces) {
    lane.ended_s = clock_s_;
    return ops_.end(task);
  }
  task.packets_done = 0;
  if (task.urgent) return lane.urgent.push_front(&task);  // what it has interrupted is paused
  task.piece_begins = true;
  lane.paused = &task;
}

// An urgent op takes the lane at a packet boundary, possibly before the first packet.
void EventLoop::pause(VirtualLane& lane) {
  lane.paused = lane.running;
  leave(lane, lane.boundary);
  lane.boundary = -1;
}

// -- starting --------------------------------------------------------------------------------------------------------

void EventLoop::start_ready() {
  for (VirtualLane* lane : dirty_) {
    lane->dirty = false;
    if (!lane->running) {
      choose(*lane);
    } else if (lane->interruptible) {
      plan(*lane);
    }
  }
  dirty_.clear();
}

// The urgent head, else what was interrupted, else the normal head: whichever is ready and was submitted.
void EventLoop::choose(VirtualLane& lane) {
  double due_s = kNever;
  const double free_s = lane.ended_s + lane.turn_s;
  for (auto* queue : {&lane.urgent, &lane.normal}) {
    if (queue == &lane.normal && lane.paused) {
      Task& task = *lane.paused;
      lane.paused = nullptr;
      if (task.piece_begins) {
        task.piece_begins = false;
        ops_.begin_piece(task);
      }
      return begin(lane, task);
    }
    if (queue->empty() || !queue->front()->ready) continue;
    Task& head = *queue->front();
    const double begin_s = std::max(head.submitted_s, free_s);
    if (begin_s <= clock_s_) {
      queue->pop_front();
      head.pieces_done ? ops_.begin_piece(head) : ops_.begin(head);
      return begin(lane, head);
    }
    due_s = std::min(due_s, begin_s);
  }
  due_s_.set(lane.place, due_s);
}

// Put an op on its lane, or put it back there.
void EventLoop::begin(VirtualLane& lane, Task& task) {
  lane.running = &task;
  lane.since_s = lane.span_start_s = clock_s_ + std::exchange(task.late_s, 0.0);
  lane.left_s = task.packets_done ? task.alone_s * (task.packets - task.packets_done) / task.packets : task.alone_s;
  lane.speed = speeds_[lane.place];  // the op before may have shared memory in the same way
  due_s_.set(lane.place, lane.since_s + lane.left_s / lane.speed);
  const double demand = task.alone_s ? sharing_->wanted(task.work.host_bytes / task.alone_s) : sharing_->wanted(0);
  if (demand != demands_[lane.place]) {
    demands_.set(lane.place, demand);
    sharing_changed_ = true;
  }
  lane.interruptible = task.packets > 1 && !task.urgent;
  if (lane.interruptible && !lane.urgent.empty()) plan(lane);
}

// When the op on this lane ends, or reaches the packet boundary at which the urgent head takes over.
void EventLoop::plan(VirtualLane& lane) {
  const Task& task = *lane.running;
  lane.boundary = -1;
  double due_s = lane.since_s + lane.left_s / lane.speed;
  if (lane.interruptible && task.alone_s > 0 && !lane.urgent.empty() && lane.urgent.front()->ready) {
    const double packet_s = task.alone_s / task.packets;
    const double from_s = std::max(clock_s_, lane.urgent.front()->submitted_s);
    const double done_s = task.alone_s - lane.left_s;
    const double reached_s = done_s + (from_s - lane.since_s - kInstantS - kInstant * from_s) * lane.speed;
    const auto reached = static_cast<int64_t>(std::ceil(reached_s / packet_s - kNearlyAPacket));
    const int64_t boundary = std::max<int64_t>(reached, task.packets_done);
    if (boundary < task.packets) {
      lane.boundary = static_cast<int32_t>(boundary);
      due_s = std::max(lane.since_s + (static_cast<double>(boundary) * packet_s - done_s) / lane.speed, from_s);
    }
  }
  due_s_.set(lane.place, due_s);
}

// -- sharing ---------------------------------------------------------------------------------------------------------

// Sets the speeds of all lanes for the ops that run now.
void EventLoop::share_memory() {
  sharing_changed_ = false;
  const bool nobody_waits = sharing_->is_quiet(demands_.whole());
  if (nobody_waits && all_at_full_speed_) return;
  all_at_full_speed_ = nobody_waits;
  if (nobody_waits) {
    new_speeds_.assign(order_.size(), 1.0);
  } else {
    wanted_.resize(order_.size());
    for (size_t place = 0; place < wanted_.size(); ++place) wanted_[place] = demands_[place];
    sharing_->speeds(names_, wanted_, new_speeds_);
  }
  for (size_t place = 0; place < new_speeds_.size(); ++place)
    if (new_speeds_[place] != speeds_[place]) rescale(*order_[place], new_speeds_[place]);
  speeds_.swap(new_speeds_);
}

void EventLoop::rescale(VirtualLane& lane, double speed) {
  if (lane.running) {
    const double run_s = std::max(0.0, clock_s_ - lane.since_s);  // none before it has begun
    lane.left_s = std::max(0.0, lane.left_s - run_s * lane.speed);
    lane.since_s = std::max(lane.since_s, clock_s_);
    lane.speed = speed;
    plan(lane);
  } else {
    lane.speed = speed;
  }
}

}  // namespace kernels::simulation
