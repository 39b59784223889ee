#include "kv_append.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../pool/thread_pool.h"

namespace kernels {
namespace {

// Copied before they are checked: the tensor they come from may be written by another thread meanwhile.
std::vector<int64_t> checked_slots(const AppendRequest& r) {
  std::vector<int64_t> slots(static_cast<size_t>(r.num_tokens));
  if (r.slots_are_64_bit)
    std::copy_n(static_cast<const int64_t*>(r.slots), r.num_tokens, slots.begin());
  else
    std::copy_n(static_cast<const int32_t*>(r.slots), r.num_tokens, slots.begin());
  const int64_t num_slots = r.num_blocks * r.block_size;
  for (size_t token = 0; token < slots.size(); ++token)
    if (slots[token] < 0 || slots[token] >= num_slots)
      throw std::invalid_argument("slots[" + std::to_string(token) + "]: expected 0 to " +
                                  std::to_string(num_slots - 1) + ", got " + std::to_string(slots[token]));
  return slots;
}

// Columns [first, first + num) of one head of all tokens, in their order.
struct Columns {
  const void* source;
  void* cache;
  int64_t source_stride, block_stride;
  int head, first, num;
};

// What threads do at a time: all tokens of some columns, so that of equal slots the last one wins.
std::vector<Columns> columns_of(const AppendRequest& r) {
  constexpr int kMostColumns = 256;
  std::vector<Columns> items;
  const auto add = [&](const void* source, void* cache, int64_t source_stride, int64_t block_stride) {
    for (int head = 0; head < r.num_kv_heads; ++head)
      for (int first = 0; first < r.head_dim; first += kMostColumns)
        items.push_back({source, cache, source_stride, block_stride, head, first,
                         std::min(kMostColumns, r.head_dim - first)});
  };
  add(r.k, r.k_cache, r.k_stride, r.k_block_stride);
  if (r.v) add(r.v, r.v_cache, r.v_stride, r.v_block_stride);
  return items;
}

template <class Src, class Dst>
void scatter(const AppendRequest& r, const int64_t* slots, const Columns& columns) {
  const Src* src = static_cast<const Src*>(columns.source) + columns.head * r.head_dim + columns.first;
  Dst* const start = static_cast<Dst*>(columns.cache) + int64_t(columns.head) * r.block_size * r.head_dim + columns.first;
  for (int64_t token = 0; token < r.num_tokens; ++token, src += columns.source_stride) {
    const int64_t slot = slots[token];
    Dst* const dst = start + slot / r.block_size * columns.block_stride + slot % r.block_size * r.head_dim;
    if (std::is_same<Src, Dst>::value)
      std::memcpy(dst, src, size_t(columns.num) * sizeof(Dst));
    else
      for (int d = 0; d < columns.num; ++d) dst[d] = from_float<Dst>(to_float(src[d]));
  }
}

template <class Src, class Dst>
void append_as(const AppendRequest& r, const int64_t* slots, ThreadPool* pool) {
  constexpr int64_t kLeastElements = 1 << 14;  // fewer are copied before another thread has come
  const std::vector<Columns> items = columns_of(r);
  const int64_t num_elements = r.num_tokens * r.num_kv_heads * r.head_dim;
  for_each_item(num_elements < kLeastElements ? nullptr : pool, int64_t(items.size()),
                [&](int64_t i, int64_t) { scatter<Src, Dst>(r, slots, items[size_t(i)]); });
}

template <class Src>
void append_from(const AppendRequest& r, const int64_t* slots, ThreadPool* pool) {
  switch (r.cache_dtype) {
    case DType::kBf16: return append_as<Src, bf16>(r, slots, pool);
    case DType::kFp16: return append_as<Src, fp16>(r, slots, pool);
    default: return append_as<Src, float>(r, slots, pool);
  }
}

}  // namespace

void kv_append(const AppendRequest& r, ThreadPool* pool) {
  const std::vector<int64_t> slots = checked_slots(r);
  switch (r.src_dtype) {
    case DType::kBf16: return append_from<bf16>(r, slots.data(), pool);
    case DType::kFp16: return append_from<fp16>(r, slots.data(), pool);
    default: return append_from<float>(r, slots.data(), pool);
  }
}

}  // namespace kernels
