// SPDX-License-Identifier: Apache-2.0
// Kernels of one thread, or of one block, for what a step needs between its launches and the host must not read.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "layout/layout.h"

namespace fsdp_quant {

// out = a * b.
cudaError_t launch_alpha(const Factor& a, const Factor& b, float* out, cudaStream_t stream);
// key[5] of stochastic rounding (`RandomKey`) from step[5] (seed, step, micro-batch, token offset or -1, rank) and id + (first
// column << 32); without an offset a rank's rows follow those of the rank before.
cudaError_t launch_random_key(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key, cudaStream_t stream);
// What lies pointer_table, of groups.
template <class T>
struct PointerTable {
  const T* at[kMostTokenGroups];
  int32_t count;
};
// out[i] = *at[i].
cudaError_t launch_collect(const PointerTable<float>& scalars, float* out, cudaStream_t stream);
// keys[groups, 5] of groups whose rows are from offsets[e] to offsets[e + 1]: that of a tensor of those rows.
cudaError_t launch_random_keys(
    const int64_t* step, const PointerTable<int64_t>& ids, const int32_t* offsets, int64_t* keys, cudaStream_t stream);
// The decode scales of a two-level direction (tensor_max) of `count` tensor amaxes.
cudaError_t launch_decode_scales(const float* amax, float tensor_max, int32_t count, float* out, cudaStream_t stream);
// *out = the largest of |amaxes|; NaN if one is.
cudaError_t launch_largest(const float* amaxes, int64_t count, float* out, cudaStream_t stream);
// *newest = max(*newest, amax), unless amax is not finite.
cudaError_t launch_record_amax(float* newest, const float* amax, cudaStream_t stream);

}  // namespace fsdp_quant
