// Models how lanes slow each other down while they run together.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace kernels::simulation {

constexpr int kMaxKinds = 8;  // of lanes

struct LaneName {
  int kind;  // below kMaxKinds
  int rank;  // from 0 on, without gaps
};

// `demands` are host bytes per second at full speed, as `wanted` has them; 0 on a lane on which nothing runs.
class Sharing {
 public:
  virtual ~Sharing() = default;
  // Returns the part of a running op's demand that matters.
  virtual double wanted(double bytes_s) const = 0;
  // Tells whether no lane slows down where all lanes together want this.
  virtual bool is_quiet(double wanted) const = 0;
  // Returns for each lane its speed relative to running alone, in (0, 1]; 1 where nothing runs.
  virtual void speeds(const std::vector<LaneName>& lanes, const std::vector<double>& demands,
                      std::vector<double>& result) = 0;
};

// One memory for all lanes.
class SharedMemory : public Sharing {
 public:
  // Max-min fair: who asks for less than an equal share gets it, the others split the rest. Proportional: everyone gets
  // the same part of what they ask for.
  SharedMemory(double host_bytes_s, bool proportional) : host_bytes_s_(host_bytes_s), proportional_(proportional) {}
  double wanted(double bytes_s) const override { return bytes_s; }
  bool is_quiet(double wanted_bytes_s) const override { return wanted_bytes_s <= host_bytes_s_; }
  void speeds(const std::vector<LaneName>& lanes, const std::vector<double>& demands,
              std::vector<double>& result) override;

 private:
  void fill(const std::vector<double>& demands, std::vector<double>& result);

  double host_bytes_s_;
  bool proportional_;
  std::vector<uint32_t> by_demand_;  // lanes; between calls few change their place
};

// Speeds by the set of kinds that run on a lane's rank (bit k: kind k), and by kind. Ranks do not disturb each other.
class MeasuredTogether : public Sharing {
 public:
  using Table = std::vector<std::array<double, kMaxKinds>>;  // by set

  explicit MeasuredTogether(Table table) : table_(std::move(table)) {}
  double wanted(double) const override { return 1.0; }  // that it runs
  bool is_quiet(double num_running) const override { return num_running <= 1.0; }
  void speeds(const std::vector<LaneName>& lanes, const std::vector<double>& demands,
              std::vector<double>& result) override;

 private:
  Table table_;
  std::vector<uint32_t> sets_;  // by rank
};

}  // namespace kernels::simulation
