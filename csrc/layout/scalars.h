// SPDX-License-Identifier: Apache-2.0
// Small kernels for scalars that the host must not read between launches.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "layout/layout.h"

namespace fsdp_quant {

// out = a * b.
cudaError_t launch_alpha(const Factor& a, const Factor& b, float* out, cudaStream_t stream);
// Write the stochastic-rounding key[5] (`RandomKey`) from step[5] (seed, step, micro-batch, token offset or -1, rank) and id
// + (first column << 32). Without an offset, a rank's rows follow those of the previous rank.
cudaError_t launch_random_key(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key, cudaStream_t stream);
// Pointers to one scalar or row per group.
template <class T>
struct PointerTable {
  const T* at[kMostTokenGroups];
  int32_t count;
};
// out[i] = *at[i].
cudaError_t launch_collect(const PointerTable<float>& scalars, float* out, cudaStream_t stream);
// Write keys[groups, 5]; group e is a tensor of rows [offsets[e], offsets[e + 1]).
cudaError_t launch_random_keys(
    const int64_t* step, const PointerTable<int64_t>& ids, const int32_t* offsets, int64_t* keys, cudaStream_t stream);
// Count a reduction in counted[4] and write its keys[count, 5]: see `gradient_keys` in fsdp_quant/ops/gradient_codes.py.
cudaError_t launch_gradient_keys(
    const int64_t* step, const int64_t* idents, int64_t count, int64_t* counted, int64_t* keys, cudaStream_t stream);
// Decode scales of a two-level spec (tensor_max) from `count` tensor amaxes.
cudaError_t launch_decode_scales(const float* amax, float tensor_max, int32_t count, float* out, cudaStream_t stream);
// *newest = max(*newest, amax) if amax is finite.
cudaError_t launch_record_amax(float* newest, const float* amax, cudaStream_t stream);

}  // namespace fsdp_quant
