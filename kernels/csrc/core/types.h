// Element types of the tensors that cross the Python border, and their scalar conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace kernels {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The numbers are those of kernels/_tensors.py.
enum class DType : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

inline int64_t size_bytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return float_from_bits(uint32_t(value.bits) << 16); }

inline float to_float(fp16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  uint32_t bits = magnitude + (112u << 23);  // the exponent's bias is 127, not 15
  // Denormals: as fractions of 2^-14 less 2^-14, so that no float32 denormal meets a processor told to flush them.
  if (magnitude < (0x400u << 13)) bits = float_bits(float_from_bits(bits + (1u << 23)) - float_from_bits(113u << 23));
  if (magnitude >= (0x7c00u << 13)) bits |= 0x7f800000u;  // infinity and NaN keep an all-ones exponent
  return float_from_bits(bits | uint32_t(value.bits & 0x8000) << 16);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even, as torch does; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline fp16 from_float<fp16>(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // rounds to 65536 or more: infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is a denormal: adding 0.5 makes the FPU round at the denormal's last place.
    const uint32_t rounded = float_bits(float_from_bits(magnitude) + 0.5f);
    return {uint16_t(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t rebiased = magnitude - (112u << 23);
  return {uint16_t(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1)) >> 13))};
}

inline float round_to_bf16(float value) { return to_float(from_float<bf16>(value)); }

}  // namespace kernels
