// The tile registers of AMX: 8 of 16 rows of 64 bytes. A product adds A [16, 32] . B [32, 16] to C [16, 16], bfloat16
// to float32; B lies as 16 rows of pairs, element (2p, n) beside (2p + 1, n). Denormals count as zeros.
#pragma once

namespace kernels::KERNELS_ISA_NS {

constexpr int kTileSide = 16;         // rows of A, columns of B, both of C
constexpr int kTileDepth = 32;        // columns of A
constexpr int64_t kTileLine = 64;     // bytes of a row
constexpr int64_t kTileBytes = 1024;

// Tiles 0 to 2 may have fewer columns of 32 bits than 16.
inline int bytes_of_line(int tile, int num_columns) { return tile < 3 ? num_columns * 4 : int(kTileLine); }

#ifdef KERNELS_EMULATED_TILES
// The registers in memory, for tests: processors without tiles take this path as well, and sanitizers see what the
// instructions read and write.
struct TileRegister {
  alignas(64) char lines[kTileSide][kTileLine];
  size_t line_bytes;
};
inline thread_local TileRegister tiles_of_thread[8];

struct TileSession {
  explicit TileSession(int num_columns = kTileSide) {
    std::memset(tiles_of_thread, 0, sizeof tiles_of_thread);
    for (int tile = 0; tile < 8; ++tile) tiles_of_thread[tile].line_bytes = size_t(bytes_of_line(tile, num_columns));
  }
};

template <int T>
inline void tile_zero() {
  std::memset(tiles_of_thread[T].lines, 0, sizeof tiles_of_thread[T].lines);
}
template <int T>
inline void tile_load(const void* start, int64_t stride_bytes) {
  for (int row = 0; row < kTileSide; ++row)
    std::memcpy(tiles_of_thread[T].lines[row], static_cast<const char*>(start) + row * stride_bytes,
                tiles_of_thread[T].line_bytes);
}
template <int T>
inline void tile_store(void* start, int64_t stride_bytes) {
  for (int row = 0; row < kTileSide; ++row)
    std::memcpy(static_cast<char*>(start) + row * stride_bytes, tiles_of_thread[T].lines[row],
                tiles_of_thread[T].line_bytes);
}
inline float without_denormals(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f : value; }
template <int C, int A, int B>
inline void tile_multiply() {
  float sums[kTileSide][kTileSide];
  bf16 a[kTileSide][kTileDepth], b[kTileSide][kTileDepth];
  std::memcpy(sums, tiles_of_thread[C].lines, sizeof sums);
  std::memcpy(a, tiles_of_thread[A].lines, sizeof a);
  std::memcpy(b, tiles_of_thread[B].lines, sizeof b);
  for (int m = 0; m < kTileSide; ++m)
    for (int n = 0; n < kTileSide; ++n)
      for (int k = 0; k < kTileDepth; ++k) {
        const float weight = without_denormals(to_float(a[m][k]));
        const float element = without_denormals(to_float(b[k / 2][2 * n + k % 2]));
        sums[m][n] = without_denormals(sums[m][n] + weight * element);
      }
  std::memcpy(tiles_of_thread[C].lines, sums, sizeof sums);
}
#else
// Tiles can be used, by this thread, as long as one of these lives; a thread with tiles in use is dearer to switch.
class TileSession {
 public:
  explicit TileSession(int num_columns = kTileSide) {
    alignas(64) uint8_t config[64] = {1};  // palette 1; [16, 32): bytes a row of each tile; [48, 56): rows
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = uint8_t(bytes_of_line(tile, num_columns));
      config[48 + tile] = kTileSide;
    }
    asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory");
  }
  ~TileSession() { asm volatile("tilerelease" ::: "memory"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

template <int T>
KERNELS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// Call tile_fence() before: values that the compiler still has in registers must be written to memory.
template <int T>
KERNELS_INLINE void tile_load(const void* start, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(start), "r"(stride_bytes), "i"(T));
}
template <int T>
KERNELS_INLINE void tile_store(void* start, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(start), "r"(stride_bytes), "i"(T) : "memory");
}
template <int C, int A, int B>
KERNELS_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif
KERNELS_INLINE void tile_fence() { asm volatile("" ::: "memory"); }

}  // namespace kernels::KERNELS_ISA_NS
