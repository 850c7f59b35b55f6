// SPDX-License-Identifier: Apache-2.0
// Token groups: the tables that grouped GEMMs and their quantizers read.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

struct TokenGroups {
  const void* ends;  // [groups], end row of each group: int32 or int64
  bool wide;
  int32_t groups, tokens, tiles;
  int32_t* offsets;  // [groups + 1], first row of each group
  int32_t* padded;   // [groups + 1], first row after padding groups to multiples of 128
  int32_t* sources;  // [tiles, 4], per 128 padded rows: first row, rows, group, first padded row of the group
  int64_t* wrong;    // null, or [1] in device or host memory: set to tag << 32 | tokens if ends decrease, leave
  int32_t tag;       // [0, tokens] or do not end there (they are clamped)
};

cudaError_t launch_token_groups(const TokenGroups& groups, cudaStream_t stream);

}  // namespace fsdp_quant
