#include <cstdint>
#include <cstring>

#include "stream.h"

#include "../simd/begin_avx512.h"

#include "stream_kernel.h"

#include "../simd/end.h"
