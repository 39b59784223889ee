#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../core/types.h"
#include "decode.h"

#include "../simd/begin_avx512bf16.h"

#include "../simd/vec_avx512.h"

#include "../simd/vec.h"

#include "pair_dots.h"

#include "decode_kernel.h"

#include "../simd/end.h"
