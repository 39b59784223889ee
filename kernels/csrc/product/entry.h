// One instruction set's own: the last include of its translation unit.
#pragma once

namespace kernels::KERNELS_ISA_NS {

ProductKernel product_kernel() { return {packed_floats, block_rows, pack, outputs, gate_up}; }

}  // namespace kernels::KERNELS_ISA_NS
