#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../core/types.h"
#include "decode.h"

#include "../simd/begin_portable.h"

#include "../simd/vec_portable.h"

#include "../simd/vec.h"

#include "widened_dots.h"

#include "decode_kernel.h"

