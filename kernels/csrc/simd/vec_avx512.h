// 16 floats in one AVX-512 register, for the namespaces avx512, avx512bf16 and amx. See vec.h for the contract.
#pragma once

namespace kernels::KERNELS_ISA_NS {

using Vec = __m512;
constexpr int kWidth = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }

inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }

inline Vec reduce_lanes4(Vec a, Vec b, Vec c, Vec d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a0+a2 b0+b2 a1+a3 b1+b3
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const Vec lanes = reduce_lanes4(a, b, c, d);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

template <int H>
inline Vec reduce_4_tokens(const Vec (&acc)[H][4]) {
  Vec head[4];  // lane i of head[h]: the four tokens' sums over elements 4i to 4i+3, to be added over the lanes
  for (int h = 0; h < 4; ++h)
    head[h] = h < H ? reduce_lanes4(acc[h % H][0], acc[h % H][1], acc[h % H][2], acc[h % H][3]) : zero();
  const Vec heads01 =
      add(_mm512_shuffle_f32x4(head[0], head[1], 0x44), _mm512_shuffle_f32x4(head[0], head[1], 0xee));
  const Vec heads23 =
      add(_mm512_shuffle_f32x4(head[2], head[3], 0x44), _mm512_shuffle_f32x4(head[2], head[3], 0xee));
  return add(_mm512_shuffle_f32x4(heads01, heads23, 0x88), _mm512_shuffle_f32x4(heads01, heads23, 0xdd));
}

inline Vec swap_pairs(Vec v) { return _mm512_permute_ps(v, 0x4e); }
inline Vec swap_neighbours(Vec v) { return _mm512_permute_ps(v, 0xb1); }

inline Vec load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline Vec even_of(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
inline Vec odd_of(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))));
}
inline Vec load_first(const bf16* p) { return even_of(_mm512_loadu_si512(p)); }
inline Vec load_second(const bf16* p) { return odd_of(_mm512_loadu_si512(p)); }
inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = even_of(bits);
  odd = odd_of(bits);
}

inline __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
inline Vec load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline Vec load_partial(const bf16* p, int n) {
  const __m256i bits = _mm256_maskz_loadu_epi16(first(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load_partial(const fp16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }

inline Vec round_nearest(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power_of_2(Vec v, Vec exponent) { return _mm512_scalef_ps(v, exponent); }
inline Vec zero_where_less(Vec v, Vec x, float bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLT_UQ), v);
}

}  // namespace kernels::KERNELS_ISA_NS
