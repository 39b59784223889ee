// 4 floats through the compiler's generic vectors (SSE2 on x86-64). See vec.h for the contract.
#pragma once

namespace kernels::portable {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t UintVec __attribute__((vector_size(16)));
constexpr int kWidth = 4;

inline Vec zero() { return Vec{}; }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fmadd(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }  // the second operand where either is NaN, as SSE and AVX do
inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }

inline float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float reduce_max(Vec v) {
  const float low = v[0] > v[1] ? v[0] : v[1];
  const float high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  out[0] = reduce_add(a);
  out[1] = reduce_add(b);
  out[2] = reduce_add(c);
  out[3] = reduce_add(d);
}

template <int H>
inline Vec reduce_4_tokens(const Vec (&acc)[H][4]) {
  static_assert(H == 1, "one head fills the vector");
  return Vec{reduce_add(acc[0][0]), reduce_add(acc[0][1]), reduce_add(acc[0][2]), reduce_add(acc[0][3])};
}

inline Vec swap_pairs(Vec v) { return Vec{v[2], v[3], v[0], v[1]}; }
inline Vec swap_neighbours(Vec v) { return Vec{v[1], v[0], v[3], v[2]}; }

inline UintVec load_bits(const void* p) {
  uint16_t bits[4];
  std::memcpy(bits, p, sizeof bits);
  return UintVec{bits[0], bits[1], bits[2], bits[3]};
}
inline Vec load(const bf16* p) { return (Vec)(load_bits(p) << 16); }
inline Vec load(const fp16* p) {
  const UintVec bits = load_bits(p);
  const UintVec magnitude = (bits & 0x7fffu) << 13;
  const UintVec rebiased = magnitude + (112u << 23);
  // As in types.h: denormals without float32 denormals, then all-ones exponents (infinity, NaN).
  const UintVec normalised = (UintVec)((Vec)(rebiased + (1u << 23)) - float_from_bits(113u << 23));
  const UintVec is_denormal = (UintVec)((IntVec)magnitude < (0x400 << 13));
  const UintVec special = (UintVec)((IntVec)magnitude >= (0x7c00 << 13)) & 0x7f800000u;
  return (Vec)((normalised & is_denormal) | (rebiased & ~is_denormal) | special | (bits & 0x8000u) << 16);
}

inline UintVec load_pairs(const bf16* p) {
  UintVec bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}
inline Vec load_first(const bf16* p) { return (Vec)(load_pairs(p) << 16); }
inline Vec load_second(const bf16* p) { return (Vec)(load_pairs(p) & 0xffff0000u); }
inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  even = load_first(p);
  odd = load_second(p);
}

template <class T>
inline Vec load_partial(const T* p, int n) {
  T padded[kWidth] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

inline Vec round_nearest(Vec v) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  return (v + shifter) - shifter;
}
inline Vec scale_by_power_of_2(Vec v, Vec exponent) {
  return v * (Vec)((__builtin_convertvector(exponent, IntVec) + 127) << 23);
}
inline Vec zero_where_less(Vec v, Vec x, float bound) { return (Vec)((IntVec)v & ~(x < bound)); }

}  // namespace kernels::portable
