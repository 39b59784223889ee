// What the thread sanitizer watches: pools shared by several callers, and kernels that split their work over threads.
// The argument is the instruction set. Prints and returns 1 where threads give other results than one does or the
// argument is wrong, and 77 where this processor lacks the instruction set, so that nothing was watched.
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "attention/decode.h"
#include "core/isa.h"
#include "ffn/ffn.h"
#include "linear/linear.h"
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
  const int heads = 24, kv_heads = 2, dim = 64, block = 16, blocks = 80;
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

// More experts than have places for their intermediate results at a time.
std::vector<float> feed_forward(ThreadPool* pool) {
  const int counts[] = {9, 2, 30, 1, 7, 40, 3}, num_tokens = 92, hidden = 200, width = 330;
  const std::vector<bf16> x = random_bf16(num_tokens * hidden, 4), gate_up = random_bf16(2 * width * hidden, 5);
  const std::vector<bf16> down = random_bf16(size_t(hidden) * width, 6);
  std::vector<float> out(x.size());
  FfnRequest r{};
  r.x = x.data(), r.gate = gate_up.data(), r.up = gate_up.data() + width * hidden, r.down = down.data();
  r.out = out.data(), r.x_dtype = DType::kBf16, r.out_dtype = DType::kFp32;
  r.hidden = hidden, r.expert_dim = width;
  r.x_stride = r.gate_stride = r.up_stride = r.out_stride = hidden, r.down_stride = width;
  std::vector<FfnRequest> requests;
  for (const int count : counts) {
    r.num_tokens = count;
    requests.push_back(r);
    r.x = static_cast<const bf16*>(r.x) + count * hidden;
    r.out = static_cast<float*>(r.out) + count * hidden;
  }
  expert_ffns(requests, pool);
  return out;
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
  ThreadPool pool(3, 20);
  std::vector<int> wrong(4);
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < wrong.size(); ++caller)
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 6; ++i) {
        ThreadPool* const chosen = i % 3 == 2 ? default_pool(2) : &pool;
        wrong[caller] += !close(attend(chosen), attention) + !close(feed_forward(chosen), ffn);
        ThreadPool own(2, 0);  // made and ended while the others run
        wrong[caller] += !close(feed_forward(&own), ffn);
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (int count : wrong)
    if (count) return std::printf("%d results differ from those of one thread\n", count), 1;
  std::printf("pools shared by 4 callers agree with one thread\n");
  return 0;
}
