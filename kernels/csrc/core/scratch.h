// Memory that a thread keeps between calls, up to a limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kernels {

// To be made thread_local. Aligned to cache lines: a vector load across two lines costs twice.
class Scratch {
 public:
  // The scratch memory's earlier content is lost.
  float* floats(size_t num_floats) {
    if (num_floats_ < num_floats + 16) {
      buffer_.reset();
      num_floats_ = 0;
      buffer_.reset(new float[num_floats + 16]);
      num_floats_ = num_floats + 16;
    }
    const auto address = reinterpret_cast<uintptr_t>(buffer_.get());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }

  void keep_at_most(size_t num_floats) {
    if (num_floats_ <= num_floats) return;
    buffer_.reset();
    num_floats_ = 0;
  }

 private:
  std::unique_ptr<float[]> buffer_;
  size_t num_floats_ = 0;
};

// The calling thread's memory for the length of a call: one big call must not hold its size for the thread's life.
// One at a time in a thread.
class ScratchLoan {
 public:
  explicit ScratchLoan(size_t num_floats) : start_(scratch().floats(num_floats)) {}
  ~ScratchLoan() { scratch().keep_at_most(size_t(kKeptFloats)); }
  ScratchLoan(const ScratchLoan&) = delete;
  ScratchLoan& operator=(const ScratchLoan&) = delete;

  float* floats() const { return start_; }

  static constexpr int64_t kKeptFloats = int64_t(1) << 20;

 private:
  static Scratch& scratch() {
    thread_local Scratch memory;
    return memory;
  }

  float* const start_;
};

}  // namespace kernels
