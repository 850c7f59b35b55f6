// SPDX-License-Identifier: Apache-2.0
// Single-tensor kernel instances, one function per source file.
#pragma once

#include "quantize/quantize.h"

namespace fsdp_quant {

cudaError_t launch_statistics(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_plain(const Launch<1>& launch, cudaStream_t stream);   // bf16 values, as full8 and full4
cudaError_t launch_blocks(const Launch<1>& launch, cudaStream_t stream);  // plain, block size known at compile time
cudaError_t launch_fp4(const Launch<1>& launch, cudaStream_t stream);     // 4 bits, see fits_fp4
cudaError_t launch_anchored(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_full8(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_full4(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_extended(const Launch<1>& launch, cudaStream_t stream);    // 4 bits, one `extended` direction, any input
cudaError_t launch_fp6(const Launch<1>& launch, cudaStream_t stream);         // 6 bits, any input
cudaError_t launch_delayed(const Launch<1>& launch, cudaStream_t stream);     // see supports_delayed
cudaError_t launch_gated(const Launch<1>& launch, cudaStream_t stream);       // see supports_gated
cudaError_t launch_gated_tokens(const Launch<1>& launch, cudaStream_t stream);  // see supports_gated_tokens
cudaError_t launch_fp32_input(const Launch<1>& launch, cudaStream_t stream);  // fp32 and fp16 values

}  // namespace fsdp_quant
