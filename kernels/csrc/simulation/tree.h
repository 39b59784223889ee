// Numbers by place with a whole over all of them, their least or their sum, kept up to date in log(places).
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kernels::simulation {

struct Least {
  static double of(double a, double b) { return b < a ? b : a; }
};

struct Sum {
  static double of(double a, double b) { return a + b; }
};

template <class Whole>
class Tree {
 public:
  explicit Tree(double none) : none_(none), nodes_(2, none) {}

  void assign(const std::vector<double>& values) {
    for (leaves_ = 1; leaves_ < values.size();) leaves_ *= 2;
    nodes_.assign(2 * leaves_, none_);
    std::copy(values.begin(), values.end(), nodes_.begin() + static_cast<std::ptrdiff_t>(leaves_));
    for (size_t node = leaves_ - 1; node > 0; --node) nodes_[node] = Whole::of(nodes_[2 * node], nodes_[2 * node + 1]);
  }

  double operator[](size_t place) const { return nodes_[leaves_ + place]; }
  double whole() const { return nodes_[1]; }

  void set(size_t place, double value) {
    size_t node = leaves_ + place;
    nodes_[node] = value;
    while (node /= 2) nodes_[node] = Whole::of(nodes_[2 * node], nodes_[2 * node + 1]);
  }

  // The first place that has the least number.
  size_t place_of_least() const {
    size_t node = 1;
    while (node < leaves_) node = 2 * node + (nodes_[2 * node + 1] < nodes_[2 * node]);
    return node - leaves_;
  }

 private:
  double none_;
  size_t leaves_ = 1;
  std::vector<double> nodes_;  // node n has the children 2 n and 2 n + 1; leaves last
};

}  // namespace kernels::simulation
