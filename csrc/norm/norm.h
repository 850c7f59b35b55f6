// SPDX-License-Identifier: Apache-2.0
// Arguments of norm and activation kernels, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

enum class Values : int32_t { kBF16 = 0, kF16 = 1, kF32 = 2 };
enum class Activation : int32_t { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kReluSquared = 4 };

constexpr int kLargestWidth = 16384;  // columns of a norm: a block holds a row in registers
constexpr int kNormBlocks = 264;      // upper bound of blocks, and of partial sums of dgamma, in the backward

// [rows, cols] values with 16-byte aligned rows; g, u and dh have own row strides. Outputs are contiguous, or dg and du are
// halves of the rows of one tensor.
struct ActivationArgs {
  const void *g, *u, *dh;  // u: null if not gated; dh: backward
  int64_t g_stride, u_stride, dh_stride;
  int64_t out_stride;  // of out and du: cols, or 2 cols for halves of one tensor
  void *out, *du;      // h; or dg and du
  float *amaxes;       // of out, then of du, each as AmaxLayout; or of both in one
  int64_t rows, cols;  // cols a multiple of 8
};

constexpr int kAmaxRun = 512;  // rows that share an anchor of a wgrad operand

// Layout of the amaxes of [rows, cols] values in one buffer, initially 0, each part aligned to 16 bytes: of the tensor (at
// 0), per row, and per column over runs of kAmaxRun rows, [runs, cols].
struct AmaxLayout {
  int64_t rows, cols;

  __host__ __device__ int64_t at_rows() const { return 4; }
  __host__ __device__ int64_t at_runs() const { return 4 + (rows + 3) / 4 * 4; }
  __host__ __device__ int64_t runs() const { return (rows + kAmaxRun - 1) / kAmaxRun; }
  __host__ __device__ int64_t size() const { return at_runs() + runs() * cols; }
};

// [rows, cols] values, contiguous, cols a multiple of 8 and at most kLargestWidth.
struct NormArgs {
  const void *x, *weight, *bias;  // bias: null, or [cols]
  float offset;                   // gamma = weight + offset
  float eps;
  bool rounds_first;  // round x^ before multiplying by gamma
  void* y;
  float *rstd, *mean;          // [rows]; mean: null for RMSNorm
  float* amax;                 // [1], initially 0: of y or dx
  const void *dy, *residual;   // backward; residual: null, or added to the rounded dx
  void *dx, *dweight, *dbias;  // dbias: null if absent
  float* partial;              // [2 (1 without dbias), kNormBlocks, cols]
  int32_t rows, cols;
};

// Partial sums [rows, cols] of one line or two, added in order.
struct Partials {
  const float* from;
  int64_t stride;  // distance of the second line
  void* out[2];    // [cols] each; the second null if there is one
  int32_t rows, cols;
};

cudaError_t launch_activation(const ActivationArgs& args, Values values, Activation kind, bool backward, cudaStream_t stream);
cudaError_t launch_norm(const NormArgs& args, Values values, cudaStream_t stream);
cudaError_t launch_norm_backward(const NormArgs& args, Values values, cudaStream_t stream);
cudaError_t launch_sum_partials(const Partials& args, Values values, cudaStream_t stream);

}  // namespace fsdp_quant
