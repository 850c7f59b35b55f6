// SPDX-License-Identifier: Apache-2.0
// Common block formats: bf16 values, blocks of one line, scales from the tile, rounding to nearest.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

namespace {

template <class P>
cudaError_t launch_sides(const Launch<1>& launch, cudaStream_t stream) {
  if constexpr (!std::is_same_v<P, Plain8x32> && !P::kOfCodes) {
    if (launch.sources != nullptr)
      return launch.spec[0].present() ? launch_tokens<P, P>(launch, stream)
                                      : launch_tokens<Absent, P>(launch, stream);
  }
  if (!launch.spec[1].present()) return launch_instance<LoadBF16, P, Absent, 1, 4>(launch, stream);
  if (!launch.spec[0].present()) return launch_instance<LoadBF16, Absent, P, 1, 3>(launch, stream);
  return launch_instance<LoadBF16, P, P, 1, 3>(launch, stream);
}

}  // namespace

cudaError_t launch_blocks(const Launch<1>& launch, cudaStream_t stream) {
  return known_block(launch) == 32 ? launch_sides<Plain8x32>(launch, stream) : launch_sides<Plain8x128>(launch, stream);
}

cudaError_t launch_anchored(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.in_tile && launch.of_codes)  // token groups: rows by runs, columns by tiles
    return launch.spec[0].present() ? launch_tokens<AnchoredInTile8, OfCodesInTile8>(launch, stream)
                                    : launch_tokens<Absent, OfCodesInTile8>(launch, stream);
  if (launch.in_tile) return launch_sides<AnchoredInTile8>(launch, stream);
  return launch.of_codes ? launch_sides<OfCodes8>(launch, stream) : launch_sides<Anchored8>(launch, stream);
}

}  // namespace fsdp_quant
