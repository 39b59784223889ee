#include "cuda_runtime.h"

#include <dlfcn.h>

#include <fstream>
#include <stdexcept>

namespace kernels {
namespace {

// The path of a mapped libcudart, empty without one. Wheels load it by full path, which dlopen does not find by name.
std::string mapped_runtime() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t start = line.find('/');
    if (start != std::string::npos && line.find("/libcudart.so", start) != std::string::npos) return line.substr(start);
  }
  return "";
}

void* open_runtime(std::string& path) {
  std::string tried;
  const auto open = [&](const std::string& name) {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* error = library ? nullptr : dlerror();
    if (error) tried += std::string(tried.empty() ? "" : "; ") + error;
    if (library) path = name;
    return library;
  };
  void* library = nullptr;
  if (!path.empty()) {
    library = open(path);
  } else {
    const std::string mapped = mapped_runtime();
    if (!mapped.empty()) library = open(mapped);
    for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11"})
      if (!library) library = open(name);
  }
  if (!library) throw std::runtime_error("no CUDA runtime could be loaded: " + tried);
  return library;
}

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error("the CUDA runtime " + path + " has no function " + name);
}

}  // namespace

CudaRuntime load_cuda_runtime(const std::string& path) {
  CudaRuntime cuda{};
  cuda.path = path;
  void* library = open_runtime(cuda.path);
  const auto load = [&](const char* name, auto& function) { find(library, cuda.path, name, function); };
  load("cudaSetDevice", cuda.set_device);
  load("cudaDeviceGetStreamPriorityRange", cuda.get_stream_priority_range);
  load("cudaStreamCreateWithPriority", cuda.stream_create_with_priority);
  load("cudaStreamDestroy", cuda.stream_destroy);
  load("cudaStreamSynchronize", cuda.stream_synchronize);
  load("cudaStreamWaitEvent", cuda.stream_wait_event);
  load("cudaMemcpyAsync", cuda.memcpy_async);
  load("cudaEventCreateWithFlags", cuda.event_create_with_flags);
  load("cudaEventDestroy", cuda.event_destroy);
  load("cudaEventRecord", cuda.event_record);
  load("cudaEventSynchronize", cuda.event_synchronize);
  load("cudaHostAlloc", cuda.host_alloc);
  load("cudaFreeHost", cuda.free_host);
  load("cudaGetErrorString", cuda.get_error_string);
  return cuda;
}

void CudaRuntime::check(CudaError error, const char* function) const {
  if (error) throw std::runtime_error(std::string(function) + " failed: " + get_error_string(error));
}

}  // namespace kernels
