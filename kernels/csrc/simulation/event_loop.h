// Lanes on a virtual clock: what runs, how fast, and what happens next.
//
// Every lane has at most one next event: its op ends, its op reaches the packet boundary at which an urgent one takes
// over, or the moment comes at which its next op was submitted. Times are worked out when a lane's state or speed
// changes and not looked at again until the event is due. Events of one instant happen together, before anything
// starts. Nothing here depends on addresses, hashes or the host's clock: the same calls give the same times, bit for
// bit.
#pragma once

#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "sharing.h"
#include "span_log.h"
#include "task.h"
#include "tree.h"

namespace kernels::simulation {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Two FIFO classes, and the op on the lane: `left_s` is what remained of its lone duration at `since_s`, consumed at
// `speed` <= 1 from then on. An op that begins late has the lane before, as far as others can see.
struct VirtualLane {
  std::string kind;
  int rank;
  int id;         // in the order of making
  int place = 0;  // in the order of lanes: ties go to the first
  std::deque<Task*> normal, urgent;
  Task* running = nullptr;
  Task* paused = nullptr;      // interrupted after some of its packets, or between two pieces
  bool interruptible = false;  // what runs, by an urgent op, at a packet boundary
  int32_t boundary = -1;       // packets after which an urgent op takes over
  bool dirty = false;          // to be looked at before time goes on
  double left_s = 0, since_s = 0, speed = 1, span_start_s = 0;
  double ended_s = -kNever;  // when its last op was over
  double turn_s = 0;         // from then until it begins another one that is ready
  bool launches_ahead = false;  // its ops are handed over before they can begin
};

class EventLoop {
 public:
  // The side that knows what ops are. Both may throw; the loop is then of no use any more.
  class Ops {
   public:
    virtual ~Ops() = default;
    // The op starts: fill in what a task has from its beginning on.
    virtual void begin(Task& task) = 0;
    // A further piece of it starts, which may take another time than the one before.
    virtual void begin_piece(Task& task) = 0;
    // It has ended: call `make_ready` for those that waited for it alone. The task is the owner's again.
    virtual void end(Task& task) = 0;
  };

  EventLoop(Ops& ops, SpanLog& log) : ops_(ops), log_(log) {}

  double clock_s() const { return clock_s_; }  // how far the lanes have come
  void share(std::shared_ptr<Sharing> sharing) { sharing_ = std::move(sharing); }  // before anything runs
  // From the end of what an op waited for until its lane, idle until then, has noticed: while no other lane runs
  // anything, and while one does.
  void set_handover_s(double alone_s, double beside_s) {
    handover_s_ = alone_s;
    handover_beside_s_ = beside_s;
  }
  // From the end of a lane's op until it begins another one that is ready.
  void set_turn_s(int id, double seconds) { lanes_[id]->turn_s = seconds; }

  // Ops of this lane are launched before they can begin: nothing is handed over then.
  void set_launches_ahead(int id) { lanes_[id]->launches_ahead = true; }
  // From the end of what an op waited for until its lane, idle until then, begins, at this moment.
  double handover_s() const;

  int add_lane(const std::string& kind, int kind_number, int rank);
  const std::vector<VirtualLane*>& lanes() const { return order_; }
  const VirtualLane& lane(int id) const { return *lanes_[id]; }

  void submit(Task& task);
  void make_ready(Task& task);
  void withdraw(Task& task);

  // Starts what can start and goes to the next event, or to `until_s` if that comes first. False: there is neither.
  bool step(double until_s = kNever);

  // Returns the part of a lane's op that is done and not in the log yet.
  double part_of_running(const VirtualLane& lane) const;

 private:
  template <class Whole>
  void insert(Tree<Whole>& tree, size_t place, double value);
  void mark(VirtualLane& lane);
  void consider(Task& task);
  void leave(VirtualLane& lane, int32_t packets_done);
  void happen(VirtualLane& lane);
  void happen_together(size_t first, double instant_s);
  void finish(VirtualLane& lane);
  void pause(VirtualLane& lane);
  void start_ready();
  void choose(VirtualLane& lane);
  void begin(VirtualLane& lane, Task& task);
  void plan(VirtualLane& lane);
  void share_memory();
  void rescale(VirtualLane& lane, double speed);

  Ops& ops_;
  SpanLog& log_;
  std::shared_ptr<Sharing> sharing_;
  double clock_s_ = 0, handover_s_ = 0, handover_beside_s_ = 0;
  std::vector<std::unique_ptr<VirtualLane>> lanes_;  // by id
  std::vector<int> ranks_;                           // that lanes have; their places are the ranks in names_
  // By place:
  std::vector<VirtualLane*> order_;
  std::vector<LaneName> names_;
  Tree<Least> due_s_{kNever};  // of the next event
  Tree<Sum> demands_{0.0};
  std::vector<double> speeds_;
  bool all_at_full_speed_ = true;
  std::vector<VirtualLane*> dirty_;
  std::vector<size_t> together_;
  std::vector<double> wanted_, new_speeds_;
  bool sharing_changed_ = false;
};

}  // namespace kernels::simulation
