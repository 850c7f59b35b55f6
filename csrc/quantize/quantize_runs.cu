// SPDX-License-Identifier: Apache-2.0
// bf16 values to two-level 4-bit codes, or to operands made of them.
#include "quantize/instances.cuh"
#include "quantize/runs_kernel.cuh"

namespace fsdp_quant {

namespace {

template <bool Square, bool Tokens, Runs R>
cudaError_t launch_kernel(const Launch<1>& launch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(RunsSmem<R>);
  auto* const kernel = quantize_runs_kernel<Square, Tokens, R>;
  if constexpr (kBytes > 48 * 1024) {
    const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (allowed != cudaSuccess) return allowed;
  }
  kernel<<<launch.tiles, kThreads, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

template <Runs R>
cudaError_t launch_of(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.sources != nullptr)
    return launch.twins ? launch_kernel<true, true, R>(launch, stream) : launch_kernel<false, true, R>(launch, stream);
  return launch.twins ? launch_kernel<true, false, R>(launch, stream) : launch_kernel<false, false, R>(launch, stream);
}

}  // namespace

cudaError_t launch_runs(const Launch<1>& launch, cudaStream_t stream) {
  const Side(&side)[2] = launch.side;
  if (side[0].operand() || side[1].operand()) return launch_of<Runs::kOperands>(launch, stream);
  return side[0].exact() || side[1].exact() ? launch_of<Runs::kExact>(launch, stream) : launch_of<Runs::kNearest>(launch, stream);
}

}  // namespace fsdp_quant
