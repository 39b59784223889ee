// Decode attention over paged bfloat16 KV, as one writes it without thinking of the machine: what a compiler makes of
// it is the baseline. Compiled at benchmark time, once without vectorisation and once with all the compiler has.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

inline float widen(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

struct Problem {
  const uint16_t *q, *k, *v;  // [seqs, heads, dim], [blocks, kv_heads, block_size, dim]
  const int32_t *tables, *lengths;
  float* out;
  int num_seqs, num_heads, num_kv_heads, dim, block_size, max_blocks;
  float scale;

  const uint16_t* row(const uint16_t* cache, int seq, int kv_head, int token) const {
    const int64_t block = tables[int64_t(seq) * max_blocks + token / block_size];
    return cache + ((block * num_kv_heads + kv_head) * block_size + token % block_size) * dim;
  }
};

// All query heads of one KV head; each row of K and V is read once.
void attend(const Problem& p, int seq, int kv_head, std::vector<float>& q, std::vector<float>& weights) {
  const int group = p.num_heads / p.num_kv_heads, length = p.lengths[seq], dim = p.dim;
  const int64_t first_head = int64_t(seq) * p.num_heads + int64_t(kv_head) * group;
  q.resize(size_t(group) * dim);
  for (int i = 0; i < group * dim; ++i) q[i] = widen(p.q[first_head * dim + i]) * p.scale;
  weights.resize(size_t(group) * length);
  for (int t = 0; t < length; ++t) {
    const uint16_t* k = p.row(p.k, seq, kv_head, t);
    for (int h = 0; h < group; ++h) {
      const float* qh = q.data() + size_t(h) * dim;
      float score = 0;
      for (int d = 0; d < dim; ++d) score += qh[d] * widen(k[d]);
      weights[size_t(h) * length + t] = score;
    }
  }
  for (int h = 0; h < group; ++h) {
    float* w = weights.data() + size_t(h) * length;
    const float top = *std::max_element(w, w + length);
    float sum = 0;
    for (int t = 0; t < length; ++t) sum += w[t] = std::exp(w[t] - top);
    for (int t = 0; t < length; ++t) w[t] /= sum;
  }
  float* out = p.out + first_head * dim;
  std::fill(out, out + group * dim, 0.0f);
  for (int t = 0; t < length; ++t) {
    const uint16_t* v = p.row(p.v, seq, kv_head, t);
    for (int h = 0; h < group; ++h) {
      const float weight = weights[size_t(h) * length + t];
      float* o = out + size_t(h) * dim;
      for (int d = 0; d < dim; ++d) o[d] += weight * widen(v[d]);
    }
  }
}

}  // namespace

extern "C" void decode_attention(const uint16_t* q, const uint16_t* k, const uint16_t* v, const int32_t* tables,
                                 const int32_t* lengths, float* out, int num_seqs, int num_heads, int num_kv_heads,
                                 int dim, int block_size, int max_blocks, float scale, int num_threads) {
  const Problem p{q,        k,         v,            tables, lengths,    out,       num_seqs,
                  num_heads, num_kv_heads, dim,    block_size, max_blocks, scale};
  std::atomic<int> next{0};
  const auto work = [&] {
    std::vector<float> queries, weights;
    for (int seq = next++; seq < num_seqs; seq = next++)
      for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) attend(p, seq, kv_head, queries, weights);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}
