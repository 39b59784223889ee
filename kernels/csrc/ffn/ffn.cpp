#include "ffn.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "../core/scratch.h"
#include "../pool/thread_pool.h"
#include "../pool/waiting.h"
#include "../product/product.h"

namespace kernels {
namespace {

// The part of the request that concerns `num` tokens from `first` on.
FfnRequest slab(const FfnRequest& r, int64_t first, int64_t num) {
  FfnRequest part = r;
  part.num_tokens = num;
  part.x = static_cast<const char*>(r.x) + first * r.x_stride * size_bytes(r.x_dtype);
  part.out = static_cast<char*>(r.out) + first * r.out_stride * size_bytes(r.out_dtype);
  if (r.row_weights) part.row_weights = r.row_weights + first;
  return part;
}

// The last of the three products, from packed h.
LinearRequest down_projection(const FfnRequest& r) {
  LinearRequest down{};
  down.w = r.down, down.y = r.out;
  down.x_dtype = DType::kFp32, down.w_dtype = r.w_dtype, down.y_dtype = r.out_dtype;
  down.num_rows = r.num_tokens, down.num_outputs = r.hidden, down.depth = r.expert_dim;
  down.w_stride = r.down_stride, down.y_stride = r.out_stride;
  down.bias = r.down_bias, down.row_weights = r.row_weights, down.accumulate = r.accumulate;
  return down;
}

int64_t whole_lines(int64_t num_floats) { return (num_floats + 15) / 16 * 16; }

// A slab of one expert's tokens. x is packed first, by one thread; then h is computed from it, and outputs from h, both
// cut over the weights' rows.
struct Job {
  Job(const FfnRequest& request, int num_threads)
      : ffn(request), down(down_projection(request)), kernel(product_kernel(ffn.w_dtype)),
        x_floats(whole_lines(kernel.packed_floats(ffn.x_dtype, ffn.num_tokens, ffn.hidden))),
        h_floats(whole_lines(kernel.packed_floats(DType::kFp32, ffn.num_tokens, ffn.expert_dim))),
        hidden_step(kernel.block_rows(ffn.num_tokens, 2 * ffn.expert_dim, num_threads) / 2),
        output_step(kernel.block_rows(ffn.num_tokens, ffn.hidden, num_threads)) {}

  int64_t num_hidden() const { return (ffn.expert_dim + hidden_step - 1) / hidden_step; }
  int64_t num_floats() const { return x_floats + h_floats; }
  int64_t num_outputs() const { return (ffn.hidden + output_step - 1) / output_step; }

  FfnRequest ffn;
  LinearRequest down;
  ProductKernel kernel;
  int64_t x_floats, h_floats;
  int64_t hidden_step, output_step;
  float *x = nullptr, *h = nullptr;
};

enum class Stage { kPack, kHidden, kOutputs };

// Items of one stage of a job, numbered from `first` on in the order of the whole wave.
struct Stretch {
  int64_t first;
  size_t job;
  Stage stage;
};

// Jobs that run together. Stages follow each other so that an expert's outputs come after the next one's hidden
// activations, and its packing before those of the one before: what they wait for is done when a thread comes to them.
// So few of the jobs are under way at a time that their intermediate results, which take turns in kPlaces, stay in a
// core's caches. Threads take items in ascending order, and an item waits for lower ones only, so there is always one
// that runs.
class Wave {
 public:
  static constexpr size_t kPlaces = 4;  // two jobs' outputs may be under way while the next but one is packed

  Wave(const Job* jobs, size_t num_jobs) : jobs_(jobs), left_(new Left[num_jobs]) {
    for (size_t i = 0; i < num_jobs; ++i) {
      left_[i].hidden = jobs[i].num_hidden();
      left_[i].outputs = jobs[i].num_outputs();
    }
    add(0, Stage::kPack, 1);
    for (size_t i = 0; i < num_jobs; ++i) {
      if (i + 1 < num_jobs) add(i + 1, Stage::kPack, 1);
      add(i, Stage::kHidden, jobs[i].num_hidden());
      if (i > 0) add(i - 1, Stage::kOutputs, jobs[i - 1].num_outputs());
    }
    add(num_jobs - 1, Stage::kOutputs, jobs[num_jobs - 1].num_outputs());
  }

  void run(ThreadPool* pool) {
    for_each_item(pool, num_items_, [&](int64_t item, int64_t next) {
      try {
        run_item(item, next);
      } catch (...) {
        failed_ = true;  // nobody waits for what will not come
        throw;
      }
    });
  }

 private:
  struct alignas(64) Left {  // what is not done yet
    std::atomic<int64_t> packing{1}, hidden{0}, outputs{0};
  };

  void add(size_t job, Stage stage, int64_t num_items) {
    stretches_.push_back({num_items_, job, stage});
    num_items_ += num_items;
  }

  const Stretch& stretch_of(int64_t item) const {
    const auto is_before = [](int64_t value, const Stretch& stretch) { return value < stretch.first; };
    return *(std::upper_bound(stretches_.begin(), stretches_.end(), item, is_before) - 1);
  }

  // False where another thread has failed.
  bool wait_for(const std::atomic<int64_t>& left) const {
    wait_briefly([&] { return left.load() == 0 || failed_.load(); });
    return !failed_.load();
  }

  NextWeights weights_of(int64_t item) const {
    if (item >= num_items_) return {};
    const Stretch& at = stretch_of(item);
    const Job& job = jobs_[at.job];
    const int64_t i = item - at.first;
    if (at.stage == Stage::kHidden)
      return next_weights(job.ffn, range_of_item(i, job.hidden_step, job.ffn.expert_dim));
    if (at.stage == Stage::kOutputs) return next_weights(job.down, range_of_item(i, job.output_step, job.ffn.hidden));
    return {};
  }

  void run_item(int64_t item, int64_t next) {
    const Stretch& at = stretch_of(item);
    const Job& job = jobs_[at.job];
    Left& left = left_[at.job];
    const int64_t i = item - at.first;
    if (at.stage == Stage::kPack && (at.job < kPlaces || wait_for(left_[at.job - kPlaces].outputs))) {
      const FfnRequest& r = job.ffn;
      job.kernel.pack({r.x, r.x_dtype, r.w_dtype, r.num_tokens, r.hidden, r.x_stride}, job.x);
      --left.packing;
    } else if (at.stage == Stage::kHidden && wait_for(left.packing)) {
      const Range range = range_of_item(i, job.hidden_step, job.ffn.expert_dim);
      job.kernel.gate_up(job.ffn, job.x, range, weights_of(next), job.h);
      --left.hidden;
    } else if (at.stage == Stage::kOutputs && wait_for(left.packing) && wait_for(left.hidden)) {
      const Range range = range_of_item(i, job.output_step, job.ffn.hidden);
      job.kernel.outputs(job.down, job.h, range, weights_of(next));
      --left.outputs;
    }
  }

  const Job* const jobs_;
  const std::unique_ptr<Left[]> left_;
  std::vector<Stretch> stretches_;
  int64_t num_items_ = 0;
  std::atomic<bool> failed_{false};
};

// Large jobs come alone: places for several would be larger than what a thread keeps.
void run_together(Job* jobs, size_t num_jobs, ThreadPool* pool) {
  int64_t place_floats = 0;
  for (size_t i = 0; i < num_jobs; ++i) place_floats = std::max(place_floats, jobs[i].num_floats());
  const ScratchLoan scratch(size_t(place_floats) * std::min(num_jobs, Wave::kPlaces));
  for (size_t i = 0; i < num_jobs; ++i) {
    jobs[i].x = scratch.floats() + int64_t(i % Wave::kPlaces) * place_floats;
    jobs[i].h = jobs[i].x + jobs[i].x_floats;
  }
  Wave(jobs, num_jobs).run(pool);
}

}  // namespace

void expert_ffns(const std::vector<FfnRequest>& requests, ThreadPool* pool) {
  std::vector<Job> jobs;
  for (const FfnRequest& r : requests)
    for (int64_t first = 0; first < r.num_tokens; first += kSlabRows)
      jobs.emplace_back(slab(r, first, std::min(kSlabRows, r.num_tokens - first)), pool ? pool->size() : 1);
  constexpr int64_t kMostFloats = ScratchLoan::kKeptFloats / int64_t(Wave::kPlaces);
  const auto is_large = [&](size_t i) { return jobs[i].num_floats() > kMostFloats; };
  for (size_t first = 0, last = 0; first < jobs.size(); first = last) {
    last = first + 1;
    while (!is_large(first) && last < jobs.size() && !is_large(last)) ++last;
    run_together(&jobs[first], last - first, pool);
  }
}

}  // namespace kernels
