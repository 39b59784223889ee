// What the thread sanitizer watches: pools shared by several callers, kernels that split their work over threads, and
// movers that several threads submit to, cancel at and close.
// The argument is the instruction set. Prints and returns 1 where threads give other results than one does or the
// argument is wrong, and 77 where this processor lacks the instruction set, so that nothing was watched.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "attention/decode.h"
#include "core/isa.h"
#include "ffn/ffn.h"
#include "linear/linear.h"
#include "mover/mover.h"
#include "pool/thread_pool.h"

using namespace kernels;

namespace {

std::vector<bf16> random_bf16(size_t size, unsigned seed) {
  std::vector<bf16> values(size);
  for (bf16& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = from_float<bf16>(float(int(seed >> 8) % 2001 - 1000) / 1000.0f);
  }
  return values;
}

std::vector<float> attend(ThreadPool* pool) {
  const int heads = 8, kv_heads = 2, dim = 64, block = 16, blocks = 80;
  const std::vector<bf16> q = random_bf16(2 * heads * dim, 1);
  const std::vector<bf16> k = random_bf16(size_t(blocks) * kv_heads * block * dim, 2);
  const std::vector<bf16> v = random_bf16(k.size(), 3);
  std::vector<int32_t> tables(2 * blocks);
  for (int i = 0; i < 2 * blocks; ++i) tables[size_t(i)] = i * 7 % blocks;
  const int32_t lengths[2] = {blocks * block - 3, 40};
  std::vector<float> out(q.size());
  DecodeRequest r{};
  r.q = q.data(), r.out = out.data(), r.k_cache = k.data(), r.v_cache = v.data();
  r.block_tables = tables.data(), r.context_lens = lengths;
  r.q_dtype = r.kv_dtype = DType::kBf16, r.out_dtype = DType::kFp32;
  r.num_seqs = 2, r.num_heads = heads, r.num_kv_heads = kv_heads, r.head_dim = r.value_dim = dim;
  r.num_blocks = blocks, r.block_size = block, r.max_blocks = blocks;
  r.q_stride = r.out_stride = heads * dim, r.k_block_stride = r.v_block_stride = kv_heads * block * dim;
  r.table_stride = blocks, r.scale = 0.125f;
  decode_attention(r, pool);
  return out;
}

std::vector<float> feed_forward(ThreadPool* pool) {
  const int tokens = 9, hidden = 200, width = 330;
  const std::vector<bf16> x = random_bf16(tokens * hidden, 4), gate_up = random_bf16(2 * width * hidden, 5);
  const std::vector<bf16> down = random_bf16(size_t(hidden) * width, 6);
  std::vector<float> out(x.size());
  FfnRequest r{};
  r.x = x.data(), r.gate = gate_up.data(), r.up = gate_up.data() + width * hidden, r.down = down.data();
  r.out = out.data(), r.x_dtype = DType::kBf16, r.out_dtype = DType::kFp32;
  r.num_tokens = tokens, r.hidden = hidden, r.expert_dim = width;
  r.x_stride = r.gate_stride = r.up_stride = r.out_stride = hidden, r.down_stride = width;
  expert_ffn(r, pool);
  return out;
}

// Requests of both classes from 3 threads, some cancelled; closed while requests may still be under way. Every request
// that is done has arrived, and no byte of one that was cancelled.
bool moves(int num_slots, double rate_bytes_s) {
  constexpr int kCallers = 3, kRequests = 40;
  constexpr int64_t kBytes = 5000;
  std::vector<char> src(kBytes, 7), dst(kCallers * kRequests * kBytes, 0);
  std::vector<std::shared_ptr<Request>> requests(kCallers * kRequests);
  Mover mover({512, 3, rate_bytes_s, 0.05, 2, num_slots, num_slots ? 2 : 0, {}, -1, ""});
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      for (int i = caller * kRequests; i < (caller + 1) * kRequests; ++i) {
        requests[size_t(i)] = mover.traffic().submit({{dst.data() + i * kBytes, src.data(), kBytes}},
                                                     i % 3 ? kNormal : kUrgent, 0, 0);
        if (i % 5 == 0) mover.traffic().cancel(requests[size_t(i)]);
        if (i % 7 == 0) mover.traffic().wait(*requests[size_t(i)], false, 1e18);
        mover.traffic().counters();
      }
    });
  for (std::thread& caller : callers) caller.join();
  if (!mover.close(60)) return false;
  for (int i = 0; i < kCallers * kRequests; ++i) {
    const RequestState state = mover.traffic().locked([&] { return requests[size_t(i)]->state; });
    const char* const start = dst.data() + i * kBytes;
    const int64_t arrived = std::count(start, start + kBytes, 7);
    if (state == RequestState::kDone && arrived != kBytes) return false;
    if (state == RequestState::kCancelled && arrived != 0) return false;
    if (state == RequestState::kWaiting || state == RequestState::kStarted) return false;
  }
  return true;
}

bool close(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::fabs(a[i] - b[i]) <= 1e-4f * (1 + std::fabs(b[i])))) return false;
  return a.size() == b.size();
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const std::string name = num_arguments == 2 ? arguments[1] : "";
  bool known = false;
  for (Isa isa : kIsas) {
    if (name != isa_name(isa)) continue;
    known = true;
    if (!isa_supported(isa)) return std::printf("skipped: this processor does not support %s\n", name.c_str()), 77;
  }
  if (!known) return std::printf("expected portable, avx2, avx512 or amx, got '%s'\n", name.c_str()), 1;
  set_isa(name);
  const std::vector<float> attention = attend(nullptr), ffn = feed_forward(nullptr);
  ThreadPool pool(3);
  std::vector<int> wrong(4);
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < wrong.size(); ++caller)
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 6; ++i) {
        ThreadPool* const chosen = i % 3 == 2 ? default_pool(2) : &pool;
        wrong[caller] += !close(attend(chosen), attention) + !close(feed_forward(chosen), ffn);
        ThreadPool own(2);  // made and ended while the others run
        wrong[caller] += !close(feed_forward(&own), ffn);
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (int count : wrong)
    if (count) return std::printf("%d results differ from those of one thread\n", count), 1;
  for (const int num_slots : {0, 2})
    for (const double rate_bytes_s : {0.0, 50e6})
      if (!moves(num_slots, rate_bytes_s))
        return std::printf("a mover with %d slots at %g bytes/s lost bytes\n", num_slots, rate_bytes_s), 1;
  std::printf("pools shared by 4 callers agree with one thread\n");
  return 0;
}
