// The gated activations, on vectors of gate and up projections.
#pragma once

namespace kernels::KERNELS_ISA_NS {
namespace {

// 1 / (1 + e^-z), without overflow for any z: 0 below -87.33.
inline Vec sigmoid(Vec z) {
  const Vec e = vexp(vmin(z, sub(zero(), z)));  // of -|z|
  const Vec one = broadcast(1.0f);
  return div(add(e, zero_where_less(sub(one, e), z, 0.0f)), add(one, e));
}

// The probability that a normal variable is below z. Abramowitz and Stegun, Handbook of Mathematical Functions,
// 7.1.26, with x = |z| / sqrt(2): an absolute error of 8e-8.
inline Vec normal_cdf(Vec z) {
  const Vec x = mul(vmax(z, sub(zero(), z)), broadcast(0.707106781f));
  const Vec one = broadcast(1.0f);
  const Vec t = div(one, fmadd(broadcast(0.3275911f), x, one));
  Vec p = broadcast(1.061405429f);
  p = fmadd(p, t, broadcast(-1.453152027f));
  p = fmadd(p, t, broadcast(1.421413741f));
  p = fmadd(p, t, broadcast(-0.284496736f));
  p = fmadd(p, t, broadcast(0.254829592f));
  const Vec tail = mul(broadcast(0.5f), mul(mul(p, t), vexp(sub(zero(), mul(x, x)))));
  return add(tail, zero_where_less(sub(one, add(tail, tail)), z, 0.0f));
}

inline Vec gelu_tanh(Vec g) {  // 0.5 (1 + tanh(z)) = sigmoid(2 z) with z = sqrt(2 / pi) (g + 0.044715 g^3)
  const Vec cube = mul(mul(g, g), mul(g, broadcast(0.044715f)));
  return mul(g, sigmoid(mul(broadcast(1.595769122f), add(g, cube))));
}

// gpt-oss: the gate is clamped from above, up from both sides and shifted by one.
inline Vec clamped_swiglu(Vec gate, Vec up, float alpha, float limit) {
  const Vec g = vmin(broadcast(limit), gate);  // the second operand where it is NaN: NaN passes
  const Vec u = vmax(broadcast(-limit), vmin(broadcast(limit), up));
  return mul(add(u, broadcast(1.0f)), mul(g, sigmoid(mul(broadcast(alpha), g))));
}

inline Vec activate(const FfnRequest& r, Vec gate, Vec up) {
  switch (r.activation) {
    case Activation::kSilu: return mul(mul(gate, sigmoid(gate)), up);
    case Activation::kGelu: return mul(mul(gate, normal_cdf(gate)), up);
    case Activation::kGeluTanh: return mul(gelu_tanh(gate), up);
    default: return clamped_swiglu(gate, up, r.alpha, r.limit);
  }
}

}  // namespace
}  // namespace kernels::KERNELS_ISA_NS
