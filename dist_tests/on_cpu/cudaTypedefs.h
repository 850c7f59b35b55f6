// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's: what makes tensor maps.
#pragma once

#include "cuda.h"

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
constexpr int CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0, CU_TENSOR_MAP_INTERLEAVE_NONE = 0, CU_TENSOR_MAP_SWIZZLE_128B = 0,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 0, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0, CUDA_SUCCESS = 0;
using PFN_cuTensorMapEncodeTiled_v12000 = int (*)(
    CUtensorMap*, int, uint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, int, int,
    int, int);
