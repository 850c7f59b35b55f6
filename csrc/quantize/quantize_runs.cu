// bf16 values to two-level 4-bit codes.
#include "quantize/instances.cuh"
#include "quantize/runs_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_runs(const Launch<1>& launch, cudaStream_t stream) {
  const bool tokens = launch.sources != nullptr;
  auto* kernel = launch.twins ? tokens ? quantize_runs_kernel<true, true> : quantize_runs_kernel<true, false>
                 : tokens     ? quantize_runs_kernel<false, true>
                              : quantize_runs_kernel<false, false>;
  kernel<<<launch.tiles, kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
