// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's: what csrc/gemm/sm90_gemm.cpp calls. A launch runs the kernel on fibers.
#pragma once

#include "cuda.h"

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDataType_t { CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF, CUDA_R_32F };
using cudaStream_t = void*;

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr int cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, int, int, cudaDriverEntryPointQueryResult*);

enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0, cudaLaunchAttributeClusterDimension = 0;
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaLaunchAttribute {
  int id;
  struct { dim3 clusterDim; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
