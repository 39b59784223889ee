#include "../linear/linear.h"

#include <pybind11/stl.h>

#include "../ffn/ffn.h"
#include "bindings.h"

namespace kernels {

void bind_linear(py::module_& m) {
  m.def("linear", [](int64_t num_outputs, int64_t depth, int64_t num_rows, uintptr_t w, uintptr_t x, uintptr_t y,
                     int w_dtype, int x_dtype, int y_dtype, int64_t w_stride, int64_t x_stride, int64_t y_stride,
                     int num_threads) {
    const LinearRequest request{pointer(x), pointer(w), pointer(y), DType(x_dtype), DType(w_dtype), DType(y_dtype),
                                num_rows, num_outputs, depth, x_stride, w_stride, y_stride};
    py::gil_scoped_release unlocked;
    linear(request, default_pool(num_threads));
  });
}

void bind_ffn(py::module_& m) {
  // An expert: its first row and number of tokens; addresses of gate, up, down and of their biases; strides of the three
  // matrices.
  using Expert = std::tuple<int64_t, int64_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t,
                            int64_t, int64_t>;
  m.def("expert_ffns",
        [](const std::vector<Expert>& experts, int64_t expert_dim, int64_t hidden, int w_dtype, uintptr_t x,
           uintptr_t out, uintptr_t row_weights, int x_dtype, int out_dtype, int64_t x_stride, int64_t out_stride,
           int activation, float alpha, float limit, bool accumulate, int num_threads) {
          FfnRequest r{};
          r.x_dtype = DType(x_dtype), r.w_dtype = DType(w_dtype), r.out_dtype = DType(out_dtype);
          r.hidden = hidden, r.expert_dim = expert_dim, r.x_stride = x_stride, r.out_stride = out_stride;
          r.activation = Activation(activation), r.alpha = alpha, r.limit = limit, r.accumulate = accumulate;
          std::vector<FfnRequest> requests;
          for (const auto& [row, num_tokens, gate, up, down, gate_bias, up_bias, down_bias, gate_stride, up_stride,
                            down_stride] : experts) {
            r.num_tokens = num_tokens;
            r.x = pointer(x + uintptr_t(row * x_stride * size_bytes(r.x_dtype)));
            r.out = pointer(out + uintptr_t(row * out_stride * size_bytes(r.out_dtype)));
            r.row_weights = row_weights ? pointer_to<const float>(row_weights) + row : nullptr;
            r.gate = pointer(gate), r.up = pointer(up), r.down = pointer(down);
            r.gate_bias = pointer_to<const float>(gate_bias), r.up_bias = pointer_to<const float>(up_bias);
            r.down_bias = pointer_to<const float>(down_bias);
            r.gate_stride = gate_stride, r.up_stride = up_stride, r.down_stride = down_stride;
            requests.push_back(r);
          }
          py::gil_scoped_release unlocked;
          expert_ffns(requests, default_pool(num_threads));
        });
}

}  // namespace kernels
