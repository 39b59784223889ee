// Compiles where the functions that the data mover loads by name, and the constants it gives them, are what CUDA's own
// header says they are: the mover is built without it.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "mover/cuda_runtime.h"

namespace {

// A type of ours, as the header has it.
template <class Ours>
struct Known {
  using type = Ours;
};
template <>
struct Known<kernels::CudaStream> {
  using type = cudaStream_t;
};
template <>
struct Known<kernels::CudaEvent> {
  using type = cudaEvent_t;
};
template <class Ours>
struct Known<Ours*> {
  using type = std::conditional_t<std::is_class_v<Ours>, Ours*, typename Known<Ours>::type*>;
};

// The same, or int for an enumeration of its size.
template <class Ours, class Theirs>
constexpr bool fits = std::is_same_v<typename Known<Ours>::type, Theirs> ||
                      (std::is_same_v<Ours, int> && std::is_enum_v<Theirs> && sizeof(Theirs) == sizeof(int));

template <class Ours, class Theirs>
constexpr bool same = false;
template <class OurResult, class TheirResult, class... Ours, class... Theirs>
constexpr bool same<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return fits<OurResult, TheirResult> && (fits<Ours, Theirs> && ...);
  }
}();

using Runtime = kernels::CudaRuntime;
#define CHECK(member, function) \
  static_assert(same<decltype(Runtime::member), decltype(&function)>, #function " has another signature")

CHECK(set_device, cudaSetDevice);
CHECK(get_stream_priority_range, cudaDeviceGetStreamPriorityRange);
CHECK(stream_create_with_priority, cudaStreamCreateWithPriority);
CHECK(stream_destroy, cudaStreamDestroy);
CHECK(stream_synchronize, cudaStreamSynchronize);
CHECK(stream_wait_event, cudaStreamWaitEvent);
CHECK(memcpy_async, cudaMemcpyAsync);
CHECK(event_create_with_flags, cudaEventCreateWithFlags);
CHECK(event_destroy, cudaEventDestroy);
CHECK(event_record, cudaEventRecord);
CHECK(event_synchronize, cudaEventSynchronize);
CHECK(host_alloc, cudaHostAlloc);
CHECK(free_host, cudaFreeHost);
CHECK(get_error_string, cudaGetErrorString);

static_assert(kernels::kCudaStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kernels::kCudaEventBlockingSync == cudaEventBlockingSync);
static_assert(kernels::kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(kernels::kCudaHostAllocPortable == cudaHostAllocPortable);
static_assert(kernels::kCudaMemcpyDefault == cudaMemcpyDefault);
static_assert(cudaSuccess == 0);

#ifdef PLANT  // each is wrong, and must not compile
#if PLANT == 1
CHECK(event_record, cudaEventSynchronize);  // a parameter too many
#elif PLANT == 2
CHECK(stream_synchronize, cudaEventSynchronize);  // a handle of the other kind
#elif PLANT == 3
CHECK(free_host, cudaSetDevice);  // memory for a number
#endif
#endif

}  // namespace
