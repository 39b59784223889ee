// The three instruction sets share this code, on top of vec_avx512.h, vec_avx2.h or vec_portable.h (one for each
// translation unit).
//
// Each of those defines, in its own namespace: Vec (kWidth floats), arithmetic, loads that widen bf16 and fp16, and
// load_pair(bf16*), which splits 2*kWidth elements into even and odd ones because that needs no shuffle. load_first and
// load_second give these one at a time.
// Hence "kernel order": the order in which the elements of a row of T leave these loads. Dot products do not care as
// long as both sides agree; results are put back into natural order once, at the end.
#pragma once

#define KERNELS_INLINE inline __attribute__((always_inline))
#define KERNELS_INLINE_LAMBDA __attribute__((always_inline))

namespace kernels::KERNELS_ISA_NS {

inline void load_pair(const float* p, Vec& first, Vec& second) {
  first = load(p);
  second = load(p + kWidth);
}
inline Vec load_first(const fp16* p) { return load(p); }
inline Vec load_second(const fp16* p) { return load(p + kWidth); }
inline void load_pair(const fp16* p, Vec& first, Vec& second) {
  first = load_first(p);
  second = load_second(p);
}

// A score vector holds 4 tokens of each of kHeadTile heads, one head per 128-bit lane: reduce_4_tokens makes one of
// 4 * H accumulators, lane_max and lane_add combine a lane's tokens and leave the result in all four places.
constexpr int kHeadTile = kWidth / 4;

inline Vec lane_max(Vec v) {
  v = vmax(v, swap_pairs(v));
  return vmax(v, swap_neighbours(v));
}
inline Vec lane_add(Vec v) {
  v = add(v, swap_pairs(v));
  return add(v, swap_neighbours(v));
}

inline int padded_width(int num_elements) { return (num_elements + kWidth - 1) / kWidth * kWidth; }

// Copies a row from the kernel order of T to natural order.
template <class T>
inline void to_natural_order(const float* row, int num_elements, float* out) {
  int start = 0;
  if (std::is_same<T, bf16>::value) {
    for (; start + 2 * kWidth <= num_elements; start += 2 * kWidth)
      for (int i = 0; i < kWidth; ++i) {
        out[start + 2 * i] = row[start + i];
        out[start + 2 * i + 1] = row[start + kWidth + i];
      }
  }
  for (; start < num_elements; ++start) out[start] = row[start];
}

// e^x with a relative error below 2e-7; 0 below -87.33 (denormal results flushed), finite above 88; NaN stays NaN.
inline Vec vexp(Vec x) {
  const float lowest = -87.33f, highest = 88.37f;
  const Vec clamped = vmin(broadcast(highest), vmax(broadcast(lowest), x));
  const Vec n = round_nearest(mul(clamped, broadcast(1.44269504f)));
  // ln 2 in two parts, the first with trailing zero bits, so that n * high is exact.
  Vec r = fmadd(n, broadcast(-0.693359375f), clamped);
  r = fmadd(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.0f / 5040);  // Taylor series: |r| <= ln(2) / 2, so the first term left out is 5e-9
  p = fmadd(p, r, broadcast(1.0f / 720));
  p = fmadd(p, r, broadcast(1.0f / 120));
  p = fmadd(p, r, broadcast(1.0f / 24));
  p = fmadd(p, r, broadcast(1.0f / 6));
  p = fmadd(p, r, broadcast(0.5f));
  p = fmadd(p, r, broadcast(1.0f));
  p = fmadd(p, r, broadcast(1.0f));
  return zero_where_less(scale_by_power_of_2(p, n), x, lowest);
}

}  // namespace kernels::KERNELS_ISA_NS
