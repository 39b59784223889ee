#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/isa.h"
#include "../core/scratch.h"
#include "../core/types.h"
#include "../product/product.h"
#include "decode.h"

#include "../simd/begin_amx.h"

#include "../simd/vec_avx512.h"

#include "../simd/vec.h"

#include "tile_visits.h"

#include "decode_amx.h"

#include "../simd/end.h"
