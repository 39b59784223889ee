// Rows of 32-bit elements become columns, in registers.
#pragma once

#include "tiles.h"

namespace kernels::KERNELS_ISA_NS {

// 16 rows of 8 elements become 8 rows of 16. A vector of `in` holds two rows: i and i + 4, or from i = 4 on i + 4 and
// i + 8.
KERNELS_INLINE void transpose(const __m512i (&in)[8], __m512i (&out)[8]) {
  __m512i columns[8];  // [rows 0 to 7, 8 to 15][column of four]: in each 128 bits the elements of four rows
  for (int i = 0; i < 8; i += 4) {
    const __m512i low01 = _mm512_unpacklo_epi32(in[i], in[i + 1]), low23 = _mm512_unpacklo_epi32(in[i + 2], in[i + 3]);
    const __m512i high01 = _mm512_unpackhi_epi32(in[i], in[i + 1]),
                  high23 = _mm512_unpackhi_epi32(in[i + 2], in[i + 3]);
    columns[i] = _mm512_unpacklo_epi64(low01, low23), columns[i + 1] = _mm512_unpackhi_epi64(low01, low23);
    columns[i + 2] = _mm512_unpacklo_epi64(high01, high23), columns[i + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(columns[i], columns[4 + i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(columns[i], columns[4 + i], 0xdd);
  }
}

// 16 rows of 16 elements, one behind the other, become 16 rows `stride` bytes apart.
inline void transpose_tile(const void* rows, void* out, int64_t stride) {
  const char* const start = static_cast<const char*>(rows);
  const auto half = [&](int row, int64_t column) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + row * kTileLine + column * 4));
  };
  for (int column = 0; column < kTileSide; column += 8) {
    __m512i in[8], columns[8];
    for (int i = 0; i < 8; ++i) {
      const int row = i < 4 ? i : i + 4;
      in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(row, column)), half(row + 4, column), 1);
    }
    transpose(in, columns);
    for (int i = 0; i < 8; ++i) _mm512_storeu_si512(static_cast<char*>(out) + (column + i) * stride, columns[i]);
  }
}

}  // namespace kernels::KERNELS_ISA_NS
