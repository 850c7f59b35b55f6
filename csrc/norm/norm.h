// SPDX-License-Identifier: Apache-2.0
// What the kernels of norms and activations are told. Plain data: host code without a CUDA compiler includes it.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

enum class Values : int32_t { kBF16 = 0, kF16 = 1, kF32 = 2 };
enum class Activation : int32_t { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kReluSquared = 4 };

constexpr int kLargestWidth = 16384;  // columns of a norm: a block holds a row in registers
constexpr int kNormBlocks = 264;      // of a norm's backward at most, and partial sums of gamma's gradient

// [rows, cols] values, 16-byte rows; each of g, u and dh with its own distance between rows. Outputs are contiguous, or dg and du
// are the halves of the rows of one tensor.
struct ActivationArgs {
  const void *g, *u, *dh;  // u: null where nothing is gated; dh: of the backward
  int64_t g_stride, u_stride, dh_stride;
  int64_t out_stride;      // of out and du: cols; 2 cols where they are halves of one tensor
  void *out, *du;          // h; or dg and du
  float *amaxes;           // of out, then of du, each as AmaxesOf; or of both in one
  int64_t rows, cols;      // cols a multiple of 8
};

constexpr int kAmaxRun = 512;         // rows: what anchors an operand of wgrad

// Where the largest magnitudes of [rows, cols] values lie in one buffer, zero before, each at a multiple of 16 bytes: of
// all (0), of every row, of every column over runs of kAmaxRun rows, [runs, cols].
struct AmaxesOf {
  int64_t rows, cols;

  __host__ __device__ int64_t at_rows() const { return 4; }
  __host__ __device__ int64_t at_runs() const { return 4 + (rows + 3) / 4 * 4; }
  __host__ __device__ int64_t runs() const { return (rows + kAmaxRun - 1) / kAmaxRun; }
  __host__ __device__ int64_t size() const { return at_runs() + runs() * cols; }
};

// [rows, cols] values, contiguous, cols a multiple of 8 and at most kLargestWidth.
struct NormArgs {
  const void *x, *weight, *bias;      // bias: null, or [cols]
  float offset;                       // gamma = weight + offset
  float eps;
  bool rounds_first;                  // x^ is rounded before gamma multiplies it
  void* y;
  float *rstd, *mean;                 // [rows]; mean: null for a root mean square
  float* amax;                        // [1], zero: of y; or of dx
  const void *dy, *residual;          // backward. residual: null, or a gradient that dx, rounded, is added to
  void *dx, *dweight, *dbias;         // dbias: null without one
  float* partial;                     // [2 (1 without dbias), kNormBlocks, cols]
  int32_t rows, cols;
};

// Partial sums [rows, cols] of one line or two, added up in order.
struct Partials {
  const float* from;
  int64_t stride;                     // of the second line's from the first's
  void* out[2];                       // [cols] each; the second null where there is one
  int32_t rows, cols;
};

cudaError_t launch_activation(const ActivationArgs& args, Values values, Activation kind, bool backward, cudaStream_t stream);
cudaError_t launch_norm(const NormArgs& args, Values values, cudaStream_t stream);
cudaError_t launch_norm_backward(const NormArgs& args, Values values, cudaStream_t stream);
cudaError_t launch_sum_partials(const Partials& args, Values values, cudaStream_t stream);

}  // namespace fsdp_quant
