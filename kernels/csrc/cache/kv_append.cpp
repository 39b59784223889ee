#include "kv_append.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

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

template <class Src, class Dst>
void scatter(const AppendRequest& r, const int64_t* slots, const void* source, int64_t source_stride, void* cache,
             int64_t block_stride) {
  const int head_dim = r.head_dim;
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    const int64_t slot = slots[token];
    const Src* src = static_cast<const Src*>(source) + token * source_stride;
    Dst* dst = static_cast<Dst*>(cache) + slot / r.block_size * block_stride + slot % r.block_size * head_dim;
    for (int head = 0; head < r.num_kv_heads; ++head) {
      if (std::is_same<Src, Dst>::value)
        std::memcpy(dst, src, size_t(head_dim) * sizeof(Dst));
      else
        for (int d = 0; d < head_dim; ++d) dst[d] = from_float<Dst>(to_float(src[d]));
      src += head_dim;
      dst += int64_t(r.block_size) * head_dim;
    }
  }
}

template <class Src, class Dst>
void append_as(const AppendRequest& r, const int64_t* slots) {
  scatter<Src, Dst>(r, slots, r.k, r.k_stride, r.k_cache, r.k_block_stride);
  if (r.v) scatter<Src, Dst>(r, slots, r.v, r.v_stride, r.v_cache, r.v_block_stride);
}

template <class Src>
void append_from(const AppendRequest& r, const int64_t* slots) {
  switch (r.cache_dtype) {
    case DType::kBf16: return append_as<Src, bf16>(r, slots);
    case DType::kFp16: return append_as<Src, fp16>(r, slots);
    default: return append_as<Src, float>(r, slots);
  }
}

}  // namespace

void kv_append(const AppendRequest& r) {
  const std::vector<int64_t> slots = checked_slots(r);
  switch (r.src_dtype) {
    case DType::kBf16: return append_from<bf16>(r, slots.data());
    case DType::kFp16: return append_from<fp16>(r, slots.data());
    default: return append_from<float>(r, slots.data());
  }
}

}  // namespace kernels
