// 8 floats in one AVX2 register. See vec.h for the contract.
#pragma once

namespace kernels::avx2 {

using Vec = __m256;
constexpr int kWidth = 8;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }

inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

template <int H>
inline Vec reduce_4_tokens(const Vec (&acc)[H][4]) {
  Vec head[2];
  for (int h = 0; h < 2; ++h)
    head[h] = h < H ? _mm256_hadd_ps(_mm256_hadd_ps(acc[h % H][0], acc[h % H][1]),
                                     _mm256_hadd_ps(acc[h % H][2], acc[h % H][3]))
                    : zero();
  return add(_mm256_permute2f128_ps(head[0], head[1], 0x20), _mm256_permute2f128_ps(head[0], head[1], 0x31));
}

inline Vec swap_pairs(Vec v) { return _mm256_permute_ps(v, 0x4e); }
inline Vec swap_neighbours(Vec v) { return _mm256_permute_ps(v, 0xb1); }

inline float reduce_add(Vec v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}
inline float reduce_max(Vec v) {
  __m128 top = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  top = _mm_max_ps(top, _mm_movehl_ps(top, top));
  return _mm_cvtss_f32(_mm_max_ss(top, _mm_shuffle_ps(top, top, 1)));
}

inline Vec widen_bf16(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Vec load(const bf16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline __m256i load_bits(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Vec even_of(__m256i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)); }
inline Vec odd_of(__m256i bits) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000u))));
}
inline Vec load_first(const bf16* p) { return even_of(load_bits(p)); }
inline Vec load_second(const bf16* p) { return odd_of(load_bits(p)); }
inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  const __m256i bits = load_bits(p);
  even = even_of(bits);
  odd = odd_of(bits);
}

template <class T>
inline Vec load_partial(const T* p, int n) {
  T padded[kWidth] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

inline Vec round_nearest(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power_of_2(Vec v, Vec exponent) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
  return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
inline Vec zero_where_less(Vec v, Vec x, float bound) {
  return _mm256_and_ps(v, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLT_UQ));
}

}  // namespace kernels::avx2
