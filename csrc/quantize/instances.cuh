// Kernel instances of one tensor a launch, by the file that compiles them.
#pragma once

#include "quantize/quantize.h"

namespace fsdp_quant {

cudaError_t launch_statistics(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_plain(const Launch<1>& launch, cudaStream_t stream);  // bf16 values
cudaError_t launch_full8(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_full4(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_wide(const Launch<1>& launch, cudaStream_t stream);   // fp32 values

inline bool is_wide(Input input) { return input == Input::kF16 || input == Input::kF32; }

}  // namespace fsdp_quant
