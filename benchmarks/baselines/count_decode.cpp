// One call of decode attention for benchmarks/count_instructions.py: ours (an instruction set's name) or the compiler's
// ("baseline"), on bfloat16 KV of 16 sequences of 256 tokens, 8 KV heads of 128 elements, with `group` heads each.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/decode.h"
#include "core/isa.h"

extern "C" void decode_attention(const uint16_t* q, const uint16_t* k, const uint16_t* v, const int32_t* tables,
                                 const int32_t* lengths, float* out, int num_seqs, int num_heads, int num_kv_heads,
                                 int dim, int block_size, int max_blocks, float scale, int num_threads);

using namespace kernels;

extern "C" __attribute__((noinline)) void counted(const DecodeRequest& r, bool baseline) {
  if (!baseline) return decode_attention(r, nullptr);
  ::decode_attention(static_cast<const uint16_t*>(r.q), static_cast<const uint16_t*>(r.k_cache),
                     static_cast<const uint16_t*>(r.v_cache), r.block_tables, r.context_lens, static_cast<float*>(r.out),
                     r.num_seqs, r.num_heads, r.num_kv_heads, r.head_dim, r.block_size, r.max_blocks, r.scale, 1);
}

int main(int, char** arguments) {
  const std::string path = arguments[1];
  const int group = std::atoi(arguments[2]), kv_heads = 8, dim = 128, block = 16, seqs = 16, blocks = 16;
  if (path != "baseline") set_isa(path);
  std::vector<bf16> q(size_t(seqs) * kv_heads * size_t(group) * dim, from_float<bf16>(0.01f));
  std::vector<bf16> k(size_t(seqs) * blocks * kv_heads * block * dim, from_float<bf16>(0.5f)), v = k;
  std::vector<int32_t> tables(size_t(seqs) * blocks), lengths(seqs, blocks * block);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = int32_t(i);
  std::vector<float> out(q.size());
  DecodeRequest r{};
  r.q = q.data(), r.out = out.data(), r.k_cache = k.data(), r.v_cache = v.data();
  r.block_tables = tables.data(), r.context_lens = lengths.data();
  r.q_dtype = r.kv_dtype = DType::kBf16, r.out_dtype = DType::kFp32;
  r.num_seqs = seqs, r.num_heads = kv_heads * group, r.num_kv_heads = kv_heads, r.head_dim = r.value_dim = dim;
  r.num_blocks = seqs * blocks, r.block_size = block, r.max_blocks = blocks;
  r.q_stride = r.out_stride = int64_t(kv_heads) * group * dim;
  r.k_block_stride = r.v_block_stride = int64_t(kv_heads) * block * dim, r.table_stride = blocks, r.scale = 0.088f;
  counted(r, path == "baseline");
  std::printf("%d\n", seqs * blocks * block * kv_heads);  // rows of K, and of V
}
