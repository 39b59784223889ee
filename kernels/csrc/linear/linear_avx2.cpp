#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/scratch.h"
#include "../core/types.h"
#include "linear.h"

#include "../simd/begin_avx2.h"

#include "../simd/vec_avx2.h"

#include "../simd/vec.h"

#include "linear_kernel.h"

#include "../simd/end.h"
