#include "product.h"

#include "../core/isa.h"

namespace kernels {
namespace {

// Tiles take 16 rows of x, however few there are: with fewer than this, vectors are faster (docs/kernels.md).
constexpr int64_t kLeastTileRows = 7;

}  // namespace

ProductKernel product_kernel(int64_t num_rows, DType w_dtype) {
  const Isa isa = current_isa();
  const bool tiles_serve = num_rows >= kLeastTileRows && w_dtype == DType::kBf16;
  switch (isa == Isa::kAmx && !tiles_serve ? Isa::kAvx512 : isa) {
    case Isa::kAmx: return amx::product_kernel();
    case Isa::kAvx512Bf16: return avx512bf16::product_kernel();
    case Isa::kAvx512: return avx512::product_kernel();
    case Isa::kAvx2: return avx2::product_kernel();
    default: return portable::product_kernel();
  }
}

}  // namespace kernels
