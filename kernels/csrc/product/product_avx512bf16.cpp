#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../core/types.h"
#include "product.h"

#include "../simd/begin_avx512bf16.h"

#include "../simd/vec_avx512.h"

#include "../simd/vec.h"

#include "paired.h"

#include "../linear/linear_kernel.h"

#include "../ffn/ffn_kernel.h"

#include "entry.h"

#include "../simd/end.h"
