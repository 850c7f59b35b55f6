#include "layout/scalars.h"

#include "layout/factor.cuh"

namespace fsdp_quant {

namespace {

__global__ void alpha_kernel(Factor a, Factor b, float* out) { *out = value_of(a) * value_of(b); }

__global__ void random_key_kernel(const int64_t* step, const int64_t* id, int64_t rows, int64_t* key) {
  const int64_t offset = step[3];
  key[0] = step[0], key[1] = step[1], key[2] = *id, key[3] = step[2];
  key[4] = offset < 0 ? step[4] * rows : offset;
}

__global__ void record_amax_kernel(float* newest, const float* amax) {
  if (isfinite(*amax)) *newest = fmaxf(*newest, *amax);
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

cudaError_t launch_record_amax(float* newest, const float* amax, cudaStream_t stream) {
  record_amax_kernel<<<1, 1, 0, stream>>>(newest, amax);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
