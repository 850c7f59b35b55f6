// SPDX-License-Identifier: Apache-2.0
// Pieces with 8 bits, and scales from collected amaxes.
#include "quantize/pieces_kernel.cuh"

namespace fsdp_quant {

namespace {

__global__ void __launch_bounds__(kThreads) cast_scales_kernel(const __grid_constant__ ScalesLaunch launch) {
  if (launch.skip != nullptr && *launch.skip != 0) return;
  const int2 where = launch.chunks[blockIdx.x];
  const ScaleSegment segment = launch.segments[where.x];
  const int64_t first = static_cast<int64_t>(where.y) * kScaleChunk + threadIdx.x;
  float v[kScaleChunk / kThreads];  // amaxes, or values
#pragma unroll
  for (int k = 0; k < kScaleChunk / kThreads; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= segment.count) continue;
    v[k] = segment.narrow & 1 ? __bfloat162float(static_cast<const __nv_bfloat16*>(segment.from)[i])
                          : static_cast<const float*>(segment.from)[i];
  }
  const EncodingSpec& s = launch.spec[max(segment.spec, 0)];
  const bool is_values = segment.spec < 0;
  const float target = !is_values && s.two_level() ? two_level_target(*segment.tensor_amax, s) : 0.0f;
#pragma unroll
  for (int k = 0; k < kScaleChunk / kThreads; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= segment.count) continue;
    if (is_values) {
      if (segment.narrow & 2) {
        static_cast<__nv_bfloat16*>(segment.out)[i] = __float2bfloat16_rn(v[k]);
      } else {
        static_cast<float*>(segment.out)[i] = v[k];
      }
    } else if (segment.enc != nullptr) {
      PieceBuffers b = {};
      b.amax = const_cast<float*>(static_cast<const float*>(segment.from)) + i, b.enc = segment.enc;
      if (segment.out != nullptr) static_cast<uint32_t*>(segment.out)[i] = delayed_scale(s, b).stored;
      if (segment.record != nullptr && is_finite(v[k])) atomic_max(segment.record, v[k]);
    } else if (s.two_level()) {
      static_cast<uint8_t*>(segment.out)[i] = static_cast<uint8_t>(two_level_code(__fmul_rn(v[k], target), false, s.exact()));
    } else if (s.byte_scales()) {
      static_cast<uint8_t*>(segment.out)[i] = static_cast<uint8_t>(e8m0_scale(v[k], s).stored);
    } else {
      static_cast<uint32_t*>(segment.out)[i] = fp32_scale(v[k], s).stored;
    }
  }
}

}  // namespace

cudaError_t launch_pieces8(const PiecesLaunch& launch, cudaStream_t stream) {
  const bool row = launch.encodes(0), col = launch.encodes(1);
  const auto is_known = [&](int d) {
    const EncodingSpec& s = launch.spec[d];
    return s.byte_scales() && s.outer == 1 && s.contraction == 32;
  };
  if (!row && !col) return launch_pieces<Statistics, Statistics>(launch, stream);
  if (!col) {
    return is_known(0) ? launch_pieces<Plain8x32, Statistics>(launch, stream)
                       : launch_pieces<Plain8, Statistics>(launch, stream);
  }
  if (!row) {
    return is_known(1) ? launch_pieces<Statistics, Plain8x32>(launch, stream)
                       : launch_pieces<Statistics, Plain8>(launch, stream);
  }
  return is_known(0) && is_known(1) ? launch_pieces<Plain8x32, Plain8x32>(launch, stream)
                                    : launch_pieces<Plain8, Plain8>(launch, stream);
}

cudaError_t launch_cast_scales(const ScalesLaunch& launch, cudaStream_t stream) {
  cast_scales_kernel<<<static_cast<unsigned>(launch.count), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
