// The softmax state of one KV head's query heads (see DecodeKernel), and the merging of states into output rows.
#pragma once

#include "rows.h"

namespace kernels::KERNELS_ISA_NS {

struct State {
  float *maxima, *sums;  // one score vector a head tile: head h at [h / kHeadTile * kWidth + h % kHeadTile * 4]
  float* acc;            // [group, padded head_dim]

  State(float* start, int group) : maxima(start), sums(start + vectors(group)), acc(sums + vectors(group)) {}

  static int vectors(int group) { return (group + kHeadTile - 1) / kHeadTile * kWidth; }
  static int lane(int head) { return head / kHeadTile * kWidth + head % kHeadTile * 4; }
  static int64_t size(int group, int padded_dim) { return 2 * vectors(group) + int64_t(group) * padded_dim; }

  void clear(int group, int padded_dim) {
    std::fill(maxima, maxima + vectors(group), -std::numeric_limits<float>::infinity());
    std::fill(sums, acc + int64_t(group) * padded_dim, 0.0f);
  }
};

inline int64_t state_floats(const DecodeRequest& r) { return State::size(r.group(), padded_width(r.value_dim)); }

// Weighted sum of one head's states in `merged` (kernel order), normalised; all-masked heads give zeros. `sink` is one
// more logit, without a value (-infinity: none).
inline void merge_head(const float* const* states, int num_states, int group, int head, float sink, int padded_dim,
                       float* merged) {
  const auto state = [&](int i) { return State(const_cast<float*>(states[i]), group); };
  const float infinity = std::numeric_limits<float>::infinity();
  const int lane = State::lane(head);
  float maximum = sink;
  for (int i = 0; i < num_states; ++i) maximum = std::max(maximum, state(i).maxima[lane]);
  const float shift = maximum == -infinity ? 0.0f : maximum;
  std::fill(merged, merged + padded_dim, 0.0f);
  float sum = std::exp(sink - shift);
  for (int i = 0; i < num_states; ++i) {
    const float weight = std::exp(state(i).maxima[lane] - shift);
    sum += weight * state(i).sums[lane];
    const float* acc = state(i).acc + int64_t(head) * padded_dim;
    for (int d = 0; d < padded_dim; d += kWidth)
      store(merged + d, fmadd(broadcast(weight), load(acc + d), load(merged + d)));
  }
  const Vec factor = broadcast(sum == 0 ? 0.0f : 1.0f / sum);
  for (int d = 0; d < padded_dim; d += kWidth) store(merged + d, mul(factor, load(merged + d)));
}

// See DecodeKernel::finish.
template <class T>
void finish(const DecodeRequest& r, int seq, int kv_head, const float* const* states, int num_states) {
  const int size = r.value_dim, padded_dim = padded_width(size), group = r.group();
  float* const merged = scratch(2 * size_t(padded_dim));
  float* const natural = merged + padded_dim;
  for (int h = 0; h < group; ++h) {
    const int64_t head = int64_t(kv_head) * group + h;
    const float sink = r.sinks ? r.sinks[head] : -std::numeric_limits<float>::infinity();
    merge_head(states, num_states, group, h, sink, padded_dim, merged);
    to_natural_order<T>(merged, size, natural);
    const int64_t start = seq * r.out_stride + head * size;
    if (r.out_dtype == DType::kBf16) store_row(natural, size, r.bf16_round, static_cast<bf16*>(r.out) + start);
    if (r.out_dtype == DType::kFp16) store_row(natural, size, r.bf16_round, static_cast<fp16*>(r.out) + start);
    if (r.out_dtype == DType::kFp32) store_row(natural, size, r.bf16_round, static_cast<float*>(r.out) + start);
  }
}

}  // namespace kernels::KERNELS_ISA_NS
