// SPDX-License-Identifier: Apache-2.0
// 4 bits with scales chosen by error or a second level per line, of what fp4_kernel.cuh does not take: one direction a launch.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

namespace {

template <class In, int MinBlocks>
cudaError_t launch_of(const Launch<1>& launch, cudaStream_t stream) {
  return launch.spec[0].present() ? launch_instance<In, Extended4, Absent, 1, MinBlocks>(launch, stream)
                                  : launch_instance<In, Absent, Extended4, 1, MinBlocks>(launch, stream);
}

}  // namespace

cudaError_t launch_extended(const Launch<1>& launch, cudaStream_t stream) {
  return is_wide(launch.input) ? launch_of<LoadF32, 1>(launch, stream) : launch_of<LoadBF16, 2>(launch, stream);
}

}  // namespace fsdp_quant
