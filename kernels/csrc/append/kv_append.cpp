#include "kv_append.h"

#include <stdexcept>
#include <string>
#include <type_traits>

namespace kernels {
namespace {

int64_t slot_at(const AppendRequest& r, int64_t token) {
  return r.slots_are_64_bit ? static_cast<const int64_t*>(r.slots)[token] : static_cast<const int32_t*>(r.slots)[token];
}

void check_slots(const AppendRequest& r) {
  const int64_t num_slots = r.num_blocks * r.block_size;
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    const int64_t slot = slot_at(r, token);
    if (slot < 0 || slot >= num_slots)
      throw std::invalid_argument("slots[" + std::to_string(token) + "]: expected 0 to " +
                                  std::to_string(num_slots - 1) + ", got " + std::to_string(slot));
  }
}

template <class Src, class Dst>
void scatter(const AppendRequest& r, const void* source, int64_t source_stride, void* cache, int64_t block_stride) {
  const int head_dim = r.head_dim;
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    const int64_t slot = slot_at(r, token);
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
void append_as(const AppendRequest& r) {
  scatter<Src, Dst>(r, r.k, r.k_stride, r.k_cache, r.k_block_stride);
  scatter<Src, Dst>(r, r.v, r.v_stride, r.v_cache, r.v_block_stride);
}

template <class Src>
void append_from(const AppendRequest& r) {
  switch (r.cache_dtype) {
    case DType::kBf16: return append_as<Src, bf16>(r);
    case DType::kFp16: return append_as<Src, fp16>(r);
    default: return append_as<Src, float>(r);
  }
}

}  // namespace

void kv_append(const AppendRequest& r) {
  check_slots(r);
  switch (r.src_dtype) {
    case DType::kBf16: return append_from<bf16>(r);
    case DType::kFp16: return append_from<fp16>(r);
    default: return append_from<float>(r);
  }
}

}  // namespace kernels
