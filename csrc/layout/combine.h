// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that add up what experts made of each token, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

// [rows, cols] bf16 values, contiguous and aligned to 16 bytes, cols a multiple of 8. A token has `copies` rows, which `back`
// names: [tokens, copies], each in [0, tokens * copies), in the backward each once.
struct CombineArgs {
  const void *rows, *dout;  // backward: rows may be null; dout: [tokens, cols]
  const int64_t* back;
  const void* weights;  // [tokens, copies], bf16 or fp32; null: 1
  bool wide;            // weights, and dweights, are fp32
  void* out;            // [tokens, cols]; backward: of each row
  void* dweights;       // null without rows
  int32_t tokens, copies, cols;
};

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream);
cudaError_t launch_combine_backward(const CombineArgs& args, cudaStream_t stream);

}  // namespace fsdp_quant
