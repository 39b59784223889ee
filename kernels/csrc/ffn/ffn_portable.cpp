#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/scratch.h"
#include "../core/types.h"
#include "ffn.h"

#include "../simd/begin_portable.h"

#include "../simd/vec_portable.h"

#include "../simd/vec.h"

#include "ffn_kernel.h"
