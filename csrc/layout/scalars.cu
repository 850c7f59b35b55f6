// SPDX-License-Identifier: Apache-2.0
#include "layout/scalars.h"

#include "layout/factor.cuh"

namespace fsdp_quant {

namespace {

__global__ void alpha_kernel(Factor a, Factor b, float* out) { *out = value_of(a) * value_of(b); }

__device__ void make_key(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key) {
  const int64_t offset = step[3];
  key[0] = step[0], key[1] = step[1], key[2] = *id & 0xFFFFFFFF, key[3] = step[2];
  key[4] = (offset < 0 ? step[4] * rows : offset) + (*id >> 32 << 40);
}

__global__ void random_key_kernel(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key) {
  make_key(step, id, rows, key);
}

__global__ void random_keys_kernel(
    const int64_t* step, const __grid_constant__ PointerTable<int64_t> ids, const int32_t* offsets, int64_t* keys) {
  const int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e < ids.count) make_key(step, ids.at[e], offsets[e + 1] - offsets[e], keys + 5 * e);
}

__global__ void gradient_keys_kernel(
    const int64_t* step, const int64_t* idents, int64_t count, int64_t* counted, int64_t* keys) {  // one block
  const bool again = counted[0] == step[0] && counted[1] == step[1] && counted[2] == step[2];
  const int64_t before = again ? counted[3] + 1 : 0;
  __syncthreads();  // all threads have read
  if (threadIdx.x < 4) counted[threadIdx.x] = threadIdx.x < 3 ? step[threadIdx.x] : before;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t* const key = keys + 5 * i;
    key[0] = step[0], key[1] = step[1], key[2] = idents[i], key[3] = step[2] + (before << 16), key[4] = 0;
  }
}

__global__ void decode_scales_kernel(const float* amax, float tensor_max, int32_t count, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = tensor_decode_scale(amax[i], tensor_max);
}

__global__ void record_amax_kernel(float* newest, const float* amax) {
  if (isfinite(*amax)) *newest = fmaxf(*newest, *amax);
}

constexpr int kBlock = 128;

unsigned blocks_of(int32_t count) { return (count + kBlock - 1) / kBlock; }

__global__ void collect_kernel(const __grid_constant__ PointerTable<float> scalars, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < scalars.count) out[i] = *scalars.at[i];
}

}  // namespace

cudaError_t launch_alpha(const Factor& a, const Factor& b, float* out, cudaStream_t stream) {
  alpha_kernel<<<1, 1, 0, stream>>>(a, b, out);
  return cudaGetLastError();
}

cudaError_t launch_random_key(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key, cudaStream_t stream) {
  random_key_kernel<<<1, 1, 0, stream>>>(step, id, rows, key);
  return cudaGetLastError();
}

cudaError_t launch_collect(const PointerTable<float>& scalars, float* out, cudaStream_t stream) {
  collect_kernel<<<blocks_of(scalars.count), kBlock, 0, stream>>>(scalars, out);
  return cudaGetLastError();
}

cudaError_t launch_random_keys(
    const int64_t* step, const PointerTable<int64_t>& ids, const int32_t* offsets, int64_t* keys, cudaStream_t stream) {
  random_keys_kernel<<<blocks_of(ids.count), kBlock, 0, stream>>>(step, ids, offsets, keys);
  return cudaGetLastError();
}

cudaError_t launch_gradient_keys(
    const int64_t* step, const int64_t* idents, int64_t count, int64_t* counted, int64_t* keys, cudaStream_t stream) {
  gradient_keys_kernel<<<1, kBlock, 0, stream>>>(step, idents, count, counted, keys);
  return cudaGetLastError();
}

cudaError_t launch_decode_scales(const float* amax, float tensor_max, int32_t count, float* out, cudaStream_t stream) {
  decode_scales_kernel<<<blocks_of(count), kBlock, 0, stream>>>(amax, tensor_max, count, out);
  return cudaGetLastError();
}

cudaError_t launch_record_amax(float* newest, const float* amax, cudaStream_t stream) {
  record_amax_kernel<<<1, 1, 0, stream>>>(newest, amax);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
