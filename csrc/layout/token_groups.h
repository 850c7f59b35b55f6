// SPDX-License-Identifier: Apache-2.0
// Where the tokens of groups lie: what products of groups and their quantizers are told.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

struct TokenGroups {
  const void* ends;       // [groups], the row behind each group's last: int32, or int64
  bool wide;
  int32_t groups, tokens, tiles;
  int32_t* offsets;       // [groups + 1], first row of each group
  int32_t* padded;        // [groups + 1], where groups begin at multiples of 128
  int32_t* sources;       // [tiles, 4], of every 128 of those rows: first row, how many there are, the group, its first of those rows
  int64_t* wrong;         // null, or [1]: tag << 32 | tokens where ends decrease, leave [0, tokens] or do not end there, and
  int32_t tag;            // were clamped; memory of the device, or of the host
};

cudaError_t launch_token_groups(const TokenGroups& groups, cudaStream_t stream);

}  // namespace fsdp_quant
