// SPDX-License-Identifier: Apache-2.0
// Arguments of gradient kernels, for host code without a CUDA compiler. fsdp_quant/ops/gradient_codes.py defines the buffer:
// per owner, rows of codes, then their scales, then their second-level amaxes.
#pragma once

#include "layout/layout.h"
#include "quantize/quantize.h"

namespace fsdp_quant {

constexpr int kGradientTile = 8192;  // elements per block

// What gradients are encoded to.
enum class GradientCodes { kValues, kBlock128, kBlock32, kTwoLevel };

inline GradientCodes codes_of(const EncodingSpec& s) {
  if (!s.present()) return GradientCodes::kValues;
  return s.two_level() ? GradientCodes::kTwoLevel : s.byte_scales() ? GradientCodes::kBlock32 : GradientCodes::kBlock128;
}

// Elements of a row; blocks of a scale do not leave it.
constexpr int32_t row_of(GradientCodes codes) {
  return codes == GradientCodes::kValues ? 8 : codes == GradientCodes::kTwoLevel ? 1024 : 128;
}

struct Gradient {
  const void* x;         // [numel], contiguous (encoding)
  int64_t numel;         // of the gradient
  int64_t length;        // of the piece of an owner
  int64_t first_row;     // of an owner's matrix
  int64_t rows;          // of a piece
  int64_t at;            // of the piece in the sum (decoding)
  const int64_t* key;    // [5], or null
  int32_t first_tile;
  bool vectors;          // pieces are aligned to 16 bytes
};

constexpr int kGradientCapacity = 256;

struct GradientLaunch {
  EncodingSpec spec;  // kNone: values are sent as bf16
  uint8_t* buffer;    // [world, bytes]
  int64_t bytes, scale_offset, amax_offset;
  int32_t world;
  Input input;    // of encoding
  void* sum;      // of decoding
  Output output;
  float factor;
  int32_t count, tiles;
  Gradient tensors[kGradientCapacity];
};
static_assert(sizeof(GradientLaunch) <= 32764, "the table is too large for kernel parameters");

cudaError_t launch_encode_gradients(const GradientLaunch& launch, cudaStream_t stream);
cudaError_t launch_decode_gradients(const GradientLaunch& launch, cudaStream_t stream);

}  // namespace fsdp_quant
