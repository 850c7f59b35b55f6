// SPDX-License-Identifier: Apache-2.0
// The sum of a token's rows over its experts, and its backward.
//
//   forward    out[t]            = round(sum over j of weight[t, j] * rows[back[t, j]])
//   backward   drows[back[t, j]] = round(weight[t, j] * dout[t])
//              dweight[t, j]     = round(sum over columns of rows[back[t, j]] * dout[t])
//
// Computes in fp32 in a fixed order: over j from the first, each product rounded as a separate operation (ops/routing.py); over
// columns by lane, then lanes, then warps. Each value is read once. A team of threads takes a token, a thread 8 columns at a
// time, so a block of 256 has several tokens where rows are short; kAtOnce rows of a thread are on their way together.
// Measured on an H200, 65,536 rows of 2048 of 8192 tokens: 74 us (.30 GB), backward 144 us (.57 GB).
#include "device/values.cuh"
#include "layout/combine.h"

namespace fsdp_quant {

namespace {

using Values = Eight<__nv_bfloat16>;

constexpr int kBlock = 256, kAtOnce = 8, kWarps = kBlock / 32;

__device__ __forceinline__ float weight_at(const CombineArgs& args, int64_t i) {
  if (args.weights == nullptr) return 1.0f;
  return args.wide ? __ldg(static_cast<const float*>(args.weights) + i)
                   : __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(args.weights) + i));
}

__device__ __forceinline__ const __nv_bfloat16* row_at(const CombineArgs& args, int64_t row) {
  return static_cast<const __nv_bfloat16*>(args.rows) + row * args.cols;
}

__global__ void __launch_bounds__(kBlock, 4) combine_kernel(const __grid_constant__ CombineArgs args) {
  const int32_t token = blockIdx.x * blockDim.y + threadIdx.y;
  const int32_t col = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (token >= args.tokens || col >= args.cols) return;
  const int64_t first = static_cast<int64_t>(token) * args.copies;
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = -0.0f;  // plus any first term, -0 too, is that term
  for (int32_t j = 0; j < args.copies; j += kAtOnce) {
    Values rows[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (j + k >= args.copies) break;
      rows[k] = Values::load(row_at(args, __ldg(args.back + first + j + k)) + col);
      weights[k] = weight_at(args, first + j + k);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (j + k >= args.copies) break;
      float v[8];
      rows[k].widen(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(v[i], weights[k]));
    }
  }
  Values::round(sum).store(static_cast<__nv_bfloat16*>(args.out) + static_cast<int64_t>(token) * args.cols + col);
}

// A team has whole warps, and all columns of its token.
__global__ void __launch_bounds__(kBlock, 3) combine_backward_kernel(const __grid_constant__ CombineArgs args) {
  __shared__ float sums[kWarps][kAtOnce];
  const int32_t token = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = token < args.tokens, dots = args.dweights != nullptr;
  const int64_t first = static_cast<int64_t>(token) * args.copies;
  const auto* const dout = static_cast<const __nv_bfloat16*>(args.dout) + static_cast<int64_t>(token) * args.cols;
  const int32_t warps = blockDim.x >> 5, first_warp = threadIdx.y * warps;
  for (int32_t j = 0; j < args.copies; j += kAtOnce) {
    const int32_t count = inside ? min(args.copies - j, kAtOnce) : 0;
    int32_t at[kAtOnce];
    float along[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k < count) at[k] = static_cast<int32_t>(__ldg(args.back + first + j + k));
    }
    for (int32_t col = inside ? threadIdx.x * 8 : args.cols; col < args.cols; col += blockDim.x * 8) {
      Values rows[kAtOnce];
      float d[8];
      if (dots) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (k >= count) break;
          rows[k] = Values::load(row_at(args, at[k]) + col);
        }
      }
      Values::cached(dout + col).widen(d);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= count) break;
        float v[8];
        if (dots) {
          rows[k].widen(v);
#pragma unroll
          for (int i = 0; i < 8; ++i) along[k] = fmaf(v[i], d[i], along[k]);
        }
        const float weight = weight_at(args, first + j + k);  // cached
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = d[i] * weight;
        Values::round(v).store(static_cast<__nv_bfloat16*>(args.out) + static_cast<int64_t>(at[k]) * args.cols + col);
      }
    }
    if (!dots) continue;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) along[k] += __shfl_xor_sync(0xFFFFFFFFu, along[k], lanes);
    }
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) sums[first_warp + (threadIdx.x >> 5)][k] = along[k];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      float sum = sums[first_warp][threadIdx.x];
      for (int w = 1; w < warps; ++w) sum += sums[first_warp + w][threadIdx.x];
      const int64_t to = first + j + threadIdx.x;
      if (args.wide) {
        static_cast<float*>(args.dweights)[to] = sum;
      } else {
        static_cast<__nv_bfloat16*>(args.dweights)[to] = __float2bfloat16_rn(sum);
      }
    }
    __syncthreads();  // sums are free again
  }
}

// Teams of whole warps.
dim3 shape_of(const CombineArgs& args) {
  const int32_t vectors = args.cols / 8, parts = (vectors + kBlock - 1) / kBlock;
  const int32_t threads = ((vectors + parts - 1) / parts + 31) / 32 * 32;
  return dim3(threads, kBlock / threads);
}

unsigned blocks_of(const CombineArgs& args, const dim3& shape) { return (args.tokens - 1) / shape.y + 1; }

}  // namespace

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  const dim3 shape = shape_of(args);
  combine_kernel<<<dim3(blocks_of(args, shape), (args.cols / 8 - 1) / shape.x + 1), shape, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_combine_backward(const CombineArgs& args, cudaStream_t stream) {
  const dim3 shape = shape_of(args);
  combine_backward_kernel<<<blocks_of(args, shape), shape, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
