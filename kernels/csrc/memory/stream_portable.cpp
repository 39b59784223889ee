#include <cstdint>
#include <cstring>

#include "stream.h"

#include "../simd/begin_portable.h"

#include "stream_kernel.h"

