#include "../linear/linear.h"

#include "../ffn/ffn.h"
#include "bindings.h"

namespace kernels {

void bind_linear(py::module_& m) {
  m.def("linear", [](uintptr_t x, uintptr_t w, uintptr_t y, int x_dtype, int w_dtype, int y_dtype, int64_t num_rows,
                     int64_t num_outputs, int64_t depth, int64_t x_stride, int64_t w_stride, int64_t y_stride,
                     int num_threads) {
    const LinearRequest request{pointer(x), pointer(w), pointer(y), DType(x_dtype), DType(w_dtype), DType(y_dtype),
                                num_rows, num_outputs, depth, x_stride, w_stride, y_stride};
    py::gil_scoped_release unlocked;
    linear(request, default_pool(num_threads));
  });
}

void bind_ffn(py::module_& m) {
  m.def("expert_ffn",
        [](uintptr_t x, uintptr_t gate, uintptr_t up, uintptr_t down, uintptr_t out, uintptr_t gate_bias,
           uintptr_t up_bias, uintptr_t down_bias, uintptr_t row_weights, int x_dtype, int w_dtype, int out_dtype,
           int64_t num_tokens, int64_t hidden, int64_t expert_dim, int64_t x_stride, int64_t gate_stride,
           int64_t up_stride, int64_t down_stride, int64_t out_stride, int activation, float alpha, float limit,
           bool accumulate, int num_threads) {
          const FfnRequest request{pointer(x), pointer(gate), pointer(up), pointer(down), pointer(out),
                                   pointer_to<const float>(gate_bias), pointer_to<const float>(up_bias),
                                   pointer_to<const float>(down_bias), pointer_to<const float>(row_weights),
                                   DType(x_dtype), DType(w_dtype), DType(out_dtype), num_tokens, hidden, expert_dim,
                                   x_stride, gate_stride, up_stride, down_stride, out_stride, Activation(activation),
                                   alpha, limit, accumulate};
          py::gil_scoped_release unlocked;
          expert_ffn(request, default_pool(num_threads));
        });
}

}  // namespace kernels
