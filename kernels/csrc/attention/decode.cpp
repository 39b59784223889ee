#include "decode.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "../core/isa.h"
#include "../pool/thread_pool.h"

namespace kernels {
namespace {

DecodeKernel choose_kernel(const DecodeRequest& r) {
  switch (current_isa()) {
    case Isa::kAvx512: return avx512::decode_kernel(r.kv_dtype, r.head_dim);
    case Isa::kAvx2: return avx2::decode_kernel(r.kv_dtype, r.head_dim);
    default: return portable::decode_kernel(r.kv_dtype, r.head_dim);
  }
}

void check_tables(const DecodeRequest& r) {
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    const int length = r.context_lens[seq];
    const int64_t capacity = int64_t(r.max_blocks) * r.block_size;
    if (length < 0 || length > capacity)
      throw std::invalid_argument("context_lens[" + std::to_string(seq) + "]: expected 0 to " +
                                  std::to_string(capacity) + " (block_tables' width), got " + std::to_string(length));
    const int32_t* table = r.block_tables + seq * r.table_stride;
    for (int token = r.first_token(seq); token < length; token = (token / r.block_size + 1) * r.block_size) {
      const int32_t block = table[token / r.block_size];
      if (block < 0 || block >= r.num_blocks)
        throw std::invalid_argument("block_tables[" + std::to_string(seq) + ", " +
                                    std::to_string(token / r.block_size) + "]: expected a block below " +
                                    std::to_string(r.num_blocks) + ", got " + std::to_string(block));
    }
  }
}

struct Plan {
  std::vector<DecodePiece> pieces;   // those of a sequence and head range next to each other
  std::vector<int> first_of_run;     // per piece: the first piece of the same sequence and heads
  std::vector<int> run_length;       // at each first piece: how many there are
  std::vector<int64_t> state_index;  // per piece: its first state
};

// Cuts sequences over the context, and when they are few also over KV heads, so that no piece exceeds 1/16 of a
// thread's share: the threads then end together. Uncut pieces read whole blocks, which lie together in memory.
Plan make_plan(const DecodeRequest& r, int num_threads) {
  int64_t total = 0;  // tokens * KV heads
  for (int seq = 0; seq < r.num_seqs; ++seq) total += int64_t(r.context_lens[seq] - r.first_token(seq)) * r.num_kv_heads;
  const int64_t limit = num_threads == 1 ? total : std::max<int64_t>(512, total / num_threads / 16);
  Plan plan;
  int64_t num_states = 0;
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    const int first = r.first_token(seq), last = r.context_lens[seq];
    const int64_t work = int64_t(last - first) * r.num_kv_heads;
    const int num_pieces = int(std::max<int64_t>(1, limit ? (work + limit - 1) / limit : 1));
    const int max_cuts = std::max(1, (last - first) / 256);
    const int head_cuts = std::min(r.num_kv_heads, (num_pieces + max_cuts - 1) / max_cuts);
    const int context_cuts = std::max(1, num_pieces / head_cuts);
    const int step = ((last - first) / context_cuts / r.block_size + 1) * r.block_size;
    for (int cut = 0; cut < head_cuts; ++cut) {
      const int run = int(plan.pieces.size());
      int token = first;
      do {
        const int end = std::min(last, token / r.block_size * r.block_size + step);
        plan.pieces.push_back({seq, cut * r.num_kv_heads / head_cuts, (cut + 1) * r.num_kv_heads / head_cuts, token, end});
        plan.first_of_run.push_back(run);
        plan.run_length.push_back(0);
        plan.state_index.push_back(num_states);
        num_states += plan.pieces.back().num_heads();
        token = end;
      } while (token < last);
      plan.run_length[run] = int(plan.pieces.size()) - run;
    }
  }
  plan.state_index.push_back(num_states);
  return plan;
}

}  // namespace

void decode_attention(const DecodeRequest& r, ThreadPool* pool) {
  check_tables(r);
  const DecodeKernel kernel = choose_kernel(r);
  const Plan plan = make_plan(r, pool ? pool->size() : 1);
  const int64_t num_pieces = int64_t(plan.pieces.size());
  const int64_t state_floats = kernel.state_floats(r);
  thread_local std::vector<float> buffer;
  buffer.resize(size_t(state_floats * plan.state_index.back()));
  float* const states = buffer.data();
  std::unique_ptr<std::atomic<int>[]> unfinished(new std::atomic<int>[num_pieces]);
  for (int64_t i = 0; i < num_pieces; ++i) unfinished[i] = plan.run_length[i];

  auto finish_run = [&](int run) {
    const DecodePiece& first = plan.pieces[run];
    std::vector<const float*> head_states(plan.run_length[run]);
    for (int head = first.first_head; head < first.last_head; ++head) {
      for (int i = 0; i < plan.run_length[run]; ++i)
        head_states[i] = states + (plan.state_index[run + i] + head - first.first_head) * state_floats;
      kernel.finish(r, first.seq, head, head_states.data(), plan.run_length[run]);
    }
  };
  for_each_item(pool, num_pieces, [&](int64_t i, int64_t next) {
    kernel.attend(r, plan.pieces[i], next < num_pieces ? &plan.pieces[next] : nullptr,
                  states + plan.state_index[i] * state_floats);
    const int run = plan.first_of_run[i];
    if (unfinished[run].fetch_sub(1) == 1) finish_run(run);
  });
}

}  // namespace kernels
