#include "product.h"

#include "../core/isa.h"

namespace kernels {

ProductKernel product_kernel(DType w_dtype) {
  const Isa isa = current_isa();
  switch (isa == Isa::kAmx && w_dtype != DType::kBf16 ? Isa::kAvx512 : isa) {
    case Isa::kAmx: return amx::product_kernel();
    case Isa::kAvx512Bf16: return avx512bf16::product_kernel();
    case Isa::kAvx512: return avx512::product_kernel();
    case Isa::kAvx2: return avx2::product_kernel();
    default: return portable::product_kernel();
  }
}

}  // namespace kernels
