// SPDX-License-Identifier: Apache-2.0
// bf16 values to two-level 4-bit codes or operands.
#include "quantize/instances.cuh"
#include "quantize/fp4_kernel.cuh"

namespace fsdp_quant {

namespace {

template <bool Square, bool Tokens, Fp4Mode R>
cudaError_t launch_kernel(const Launch<1>& launch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Fp4Smem<R>);
  auto* const kernel = quantize_fp4_kernel<Square, Tokens, R>;
  if constexpr (kBytes > 48 * 1024) {
    const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (allowed != cudaSuccess) return allowed;
  }
  kernel<<<launch.tiles, kThreads, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

template <Fp4Mode R>
cudaError_t launch_of(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.sources != nullptr)
    return launch.shares_codes_transposed ? launch_kernel<true, true, R>(launch, stream)
                                          : launch_kernel<false, true, R>(launch, stream);
  return launch.shares_codes_transposed ? launch_kernel<true, false, R>(launch, stream)
                                        : launch_kernel<false, false, R>(launch, stream);
}

}  // namespace

cudaError_t launch_fp4(const Launch<1>& launch, cudaStream_t stream) {
  const EncodingSpec(&spec)[2] = launch.spec;
  if (spec[0].extended() || spec[1].extended()) return launch_of<Fp4Mode::kExtended>(launch, stream);
  if (spec[0].operand() || spec[1].operand()) return launch_of<Fp4Mode::kOperands>(launch, stream);
  return spec[0].exact() || spec[1].exact() ? launch_of<Fp4Mode::kExact>(launch, stream)
                                            : launch_of<Fp4Mode::kNearest>(launch, stream);
}

}  // namespace fsdp_quant
