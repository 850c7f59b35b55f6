// bf16 values to two-level 4-bit codes, or to operands made of them.
#include "quantize/instances.cuh"
#include "quantize/runs_kernel.cuh"

namespace fsdp_quant {

namespace {

template <bool Square, bool Tokens, bool Operands>
cudaError_t launch_kernel(const Launch<1>& launch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(RunsSmem<Operands>);
  auto* const kernel = quantize_runs_kernel<Square, Tokens, Operands>;
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<launch.tiles, kThreads, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

template <bool Operands>
cudaError_t launch_of(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.sources != nullptr)
    return launch.twins ? launch_kernel<true, true, Operands>(launch, stream) : launch_kernel<false, true, Operands>(launch, stream);
  return launch.twins ? launch_kernel<true, false, Operands>(launch, stream) : launch_kernel<false, false, Operands>(launch, stream);
}

}  // namespace

cudaError_t launch_runs(const Launch<1>& launch, cudaStream_t stream) {
  return launch.side[0].operand() || launch.side[1].operand() ? launch_of<true>(launch, stream) : launch_of<false>(launch, stream);
}

}  // namespace fsdp_quant
