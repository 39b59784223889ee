#include "decode.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../pool/thread_pool.h"

namespace kernels {
namespace {

// Tiles take as long for 8 query heads as for one: with up to 4, vectors are as fast or faster.
constexpr int kLeastTileHeads = 5;

DecodeKernel choose_kernel(const DecodeRequest& r) {
  const bool is_bf16 = r.q_dtype == DType::kBf16 && r.kv_dtype == DType::kBf16;
  const bool tiles_serve = r.group() >= kLeastTileHeads && r.head_dim % 32 == 0 && r.value_dim % 32 == 0;
  if (current_isa() == Isa::kAmx && is_bf16 && tiles_serve) return amx::decode_kernel(r);
  if (current_isa() == Isa::kAvx512Bf16 && is_bf16) return avx512bf16::decode_kernel(r);
  switch (current_vector_isa()) {
    case Isa::kAvx512: return avx512::decode_kernel(r);
    case Isa::kAvx2: return avx2::decode_kernel(r);
    default: return portable::decode_kernel(r);
  }
}

// Lengths and used block ids, copied before they are checked: the tensors they come from may be written by other
// threads meanwhile.
class CheckedTables {
 public:
  explicit CheckedTables(const DecodeRequest& r) : lengths_(r.context_lens, r.context_lens + r.num_seqs) {
    check_lengths(r);
    int64_t width = 0;
    for (const int length : lengths_) width = std::max(width, (int64_t(length) + r.block_size - 1) / r.block_size);
    blocks_.reset(new int32_t[size_t(width * r.num_seqs)]);
    stride_ = width;
    DecodeRequest own = with_these(r);
    for (int seq = 0; seq < r.num_seqs; ++seq)
      // 64 bits: the end of the last block may lie beyond the greatest int.
      for (int64_t i = own.first_token(seq) / r.block_size; i * r.block_size < lengths_[size_t(seq)]; ++i)
        blocks_[size_t(seq * width + i)] = checked_block(r, seq, i);
  }

  DecodeRequest with_these(DecodeRequest r) const {
    r.context_lens = lengths_.data();
    r.block_tables = blocks_.get();
    r.table_stride = stride_;
    return r;
  }

 private:
  void check_lengths(const DecodeRequest& r) const {
    const int64_t capacity = int64_t(r.max_blocks) * r.block_size;
    for (size_t seq = 0; seq < lengths_.size(); ++seq)
      if (lengths_[seq] < 0 || lengths_[seq] > capacity)
        throw std::invalid_argument("context_lens[" + std::to_string(seq) + "]: expected 0 to " +
                                    std::to_string(capacity) + " (block_tables' width), got " +
                                    std::to_string(lengths_[seq]));
  }

  static int32_t checked_block(const DecodeRequest& r, int seq, int64_t index) {
    const volatile int32_t* const entry = r.block_tables + seq * r.table_stride + index;
    const int32_t block = *entry;  // read once
    if (block < 0 || block >= r.num_blocks)
      throw std::invalid_argument("block_tables[" + std::to_string(seq) + ", " + std::to_string(index) +
                                  "]: expected a block below " + std::to_string(r.num_blocks) + ", got " +
                                  std::to_string(block));
    return block;
  }

  const std::vector<int32_t> lengths_;
  std::unique_ptr<int32_t[]> blocks_;  // [num_seqs, stride_]; unused entries hold anything
  int64_t stride_ = 0;
};

struct Plan {
  std::vector<DecodePiece> pieces;   // those of a sequence and head range next to each other
  std::vector<int> first_of_run;     // per piece: the first piece of the same sequence and heads
  std::vector<int> run_length;       // at each first piece: how many there are
  std::vector<int64_t> state_index;  // per piece of a sequence that is cut: its first state
  int64_t num_states = 0;            // of these pieces
};

// Cuts sequences over the context, and when they are few also over KV heads, so that no piece exceeds 1/16 of a
// thread's share: the threads then end together. Uncut pieces read whole blocks, which lie together in memory, and their
// states stay in the cache of the thread that computes them.
Plan make_plan(const DecodeRequest& r, int num_threads) {
  int64_t total = 0;  // tokens * KV heads
  for (int seq = 0; seq < r.num_seqs; ++seq)
    total += int64_t(r.context_lens[seq] - r.first_token(seq)) * r.num_kv_heads;
  const int64_t limit = num_threads == 1 ? total : std::max<int64_t>(512, total / num_threads / 16);
  Plan plan;
  for (int seq = 0; seq < r.num_seqs; ++seq) {
    const int first = r.first_token(seq), last = r.context_lens[seq];
    const int64_t work = int64_t(last - first) * r.num_kv_heads;
    const int num_pieces = int(std::max<int64_t>(1, limit ? (work + limit - 1) / limit : 1));
    const int max_cuts = std::max(1, (last - first) / 256);
    const int head_cuts = std::min(r.num_kv_heads, (num_pieces + max_cuts - 1) / max_cuts);
    const int context_cuts = std::max(1, num_pieces / head_cuts);
    const int64_t step = ((last - first) / context_cuts / r.block_size + 1) * int64_t(r.block_size);
    for (int cut = 0; cut < head_cuts; ++cut) {
      const int first_head = cut * r.num_kv_heads / head_cuts, last_head = (cut + 1) * r.num_kv_heads / head_cuts;
      const int run = int(plan.pieces.size());
      int token = first;
      do {
        const int end = int(std::min<int64_t>(last, token / r.block_size * r.block_size + step));
        plan.pieces.push_back({seq, first_head, last_head, token, end});
        plan.first_of_run.push_back(run);
        plan.run_length.push_back(0);
        token = end;
      } while (token < last);
      plan.run_length[run] = int(plan.pieces.size()) - run;
      for (int i = 0; i < plan.run_length[run]; ++i) {
        plan.state_index.push_back(plan.num_states);
        if (plan.run_length[run] > 1) plan.num_states += plan.pieces[size_t(run)].num_heads();
      }
    }
  }
  return plan;
}

}  // namespace

void decode_attention(const DecodeRequest& request, ThreadPool* pool) {
  const CheckedTables tables(request);
  const DecodeRequest r = tables.with_these(request);
  const DecodeKernel kernel = choose_kernel(r);
  const Plan plan = make_plan(r, pool ? pool->size() : 1);
  const int64_t num_pieces = int64_t(plan.pieces.size());
  const int64_t state_floats = kernel.state_floats(r);
  const ScratchLoan scratch(size_t(state_floats * plan.num_states));
  float* const states = scratch.floats();
  std::unique_ptr<std::atomic<int>[]> unfinished(new std::atomic<int>[num_pieces]);
  for (int64_t i = 0; i < num_pieces; ++i) unfinished[i] = plan.run_length[i];

  // `states` are those of the run's pieces, one piece after the other.
  auto finish_run = [&](int run, const float* states) {
    const DecodePiece& first = plan.pieces[run];
    std::vector<const float*> head_states(plan.run_length[run]);
    for (int head = first.first_head; head < first.last_head; ++head) {
      for (int i = 0; i < plan.run_length[run]; ++i)
        head_states[i] = states + (int64_t(i) * first.num_heads() + head - first.first_head) * state_floats;
      kernel.finish(r, first.seq, head, head_states.data(), plan.run_length[run]);
    }
  };
  for_each_item(pool, num_pieces, [&](int64_t i, int64_t next) {
    const DecodePiece &piece = plan.pieces[i], *const after = next < num_pieces ? &plan.pieces[next] : nullptr;
    const int run = plan.first_of_run[i];
    const size_t its_floats = size_t(state_floats * piece.num_heads());
    thread_local Scratch memory;  // as large as one sequence's states at most
    float* const own = memory.floats(its_floats);
    kernel.attend(r, piece, after, own);
    if (plan.run_length[run] == 1) return finish_run(run, own);
    std::copy(own, own + its_floats, states + plan.state_index[i] * state_floats);
    if (unfinished[run].fetch_sub(1) == 1) finish_run(run, states + plan.state_index[run] * state_floats);
  });
}

}  // namespace kernels
