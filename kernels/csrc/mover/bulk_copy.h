// Large copies at the speed of memory, in stretches of any size.
#pragma once

#include <cstdint>

namespace kernels {

// memcpy with non-temporal stores that walks several pages at once: memory then has more rows open, which makes a copy
// cut into small packets as fast as one large memcpy (which does the same, but only from many MB on).
void bulk_copy(void* dst, const void* src, int64_t num_bytes);

}  // namespace kernels
