// The few functions of the CUDA runtime that a mover needs, found when the program runs: one build serves machines
// with and without CUDA, and no CUDA header is needed.
#pragma once

#include <cstddef>
#include <string>

namespace kernels {

using CudaError = int;  // 0: success
using CudaStream = struct CudaStreamTag*;
using CudaEvent = struct CudaEventTag*;

constexpr unsigned kCudaStreamNonBlocking = 1;  // does not wait for the legacy default stream
constexpr unsigned kCudaEventBlockingSync = 1, kCudaEventDisableTiming = 2;
constexpr unsigned kCudaHostAllocPortable = 1;
constexpr int kCudaMemcpyDefault = 4;  // the direction follows from the addresses

struct CudaRuntime {
  CudaError (*set_device)(int device);
  CudaError (*get_stream_priority_range)(int* least, int* greatest);
  CudaError (*stream_create_with_priority)(CudaStream* stream, unsigned flags, int priority);
  CudaError (*stream_destroy)(CudaStream stream);
  CudaError (*stream_synchronize)(CudaStream stream);
  CudaError (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaError (*memcpy_async)(void* dst, const void* src, size_t num_bytes, int kind, CudaStream stream);
  CudaError (*event_create_with_flags)(CudaEvent* event, unsigned flags);
  CudaError (*event_destroy)(CudaEvent event);
  CudaError (*event_record)(CudaEvent event, CudaStream stream);
  CudaError (*event_synchronize)(CudaEvent event);
  CudaError (*host_alloc)(void** memory, size_t num_bytes, unsigned flags);
  CudaError (*free_host)(void* memory);
  const char* (*get_error_string)(CudaError error);
  std::string path;

  // Throws std::runtime_error "<function> failed: <its error string>".
  void check(CudaError error, const char* function) const;
};

// The runtime at `path`; with an empty one, the libcudart that this process has loaded already (torch's: a second copy
// would not know its streams), else libcudart.so.13, .12 or .11. Never unloaded. Throws std::runtime_error that says
// what was tried.
CudaRuntime load_cuda_runtime(const std::string& path);

}  // namespace kernels
