// SPDX-License-Identifier: Apache-2.0
// Kernel instances of one tensor a launch, by the file that compiles them.
#pragma once

#include "quantize/quantize.h"

namespace fsdp_quant {

cudaError_t launch_statistics(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_plain(const Launch<1>& launch, cudaStream_t stream);     // bf16 values, like full8 and full4
cudaError_t launch_blocks(const Launch<1>& launch, cudaStream_t stream);    // plain, blocks known at compile time
cudaError_t launch_fp4(const Launch<1>& launch, cudaStream_t stream);      // 4 bits, see fits_fp4
cudaError_t launch_anchored(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_full8(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_full4(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_fp6(const Launch<1>& launch, cudaStream_t stream);       // 6 bits, values of any width
cudaError_t launch_delayed(const Launch<1>& launch, cudaStream_t stream);  // see takes_delayed
cudaError_t launch_gated(const Launch<1>& launch, cudaStream_t stream);    // see takes_gated
cudaError_t launch_fp32_input(const Launch<1>& launch, cudaStream_t stream);      // fp32 values

inline bool is_wide(Input input) { return input == Input::kF16 || input == Input::kF32; }

// launch_fp4 computes this: bf16 values, two-level 4-bit codes of (1, 16) blocks, or of (16, 16) ones that serve both
// directions; no sums of columns.
inline bool fits_fp4(const Launch<1>& launch) {
  if (is_wide(launch.input) || launch.barrier != nullptr || launch.sums != nullptr || launch.tensors[0].shift != 0) return false;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    if (!s.four_bit() || s.contraction != 16 || s.outer != (launch.shares_codes_transposed ? 16 : 1)) return false;
    if (launch.tensors[0].buffers[d].amax_given) return false;
  }
  return true;
}

}  // namespace fsdp_quant
