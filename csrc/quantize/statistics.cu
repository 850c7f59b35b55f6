// SPDX-License-Identifier: Apache-2.0
// Statistics of one tensor, and selection of kernel instances.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_statistics(const Launch<1>& launch, cudaStream_t stream) {
  if (is_wide(launch.input)) return launch_instance<LoadF32, RotatedStatistics, RotatedStatistics, 1, 2>(launch, stream);
  if (launch.spec[0].rotated || launch.spec[1].rotated)
    return launch.sources != nullptr ? launch_tokens<RotatedStatistics, RotatedStatistics>(launch, stream)
                                     : launch_instance<LoadBF16, RotatedStatistics, RotatedStatistics, 1, 3>(launch, stream);
  if (launch.sources != nullptr) return launch_tokens<Statistics, Statistics, 4>(launch, stream);
  return launch_instance<LoadBF16, Statistics, Statistics, 1, 4>(launch, stream);
}

cudaError_t launch_quantize(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.phases == kStatistics) return launch_statistics(launch, stream);
  if (launch.up != nullptr && launch.sources != nullptr) return launch_gated_tokens(launch, stream);
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const EncodingBuffers(&buffers)[2] = launch.tensors[0].buffers;
  if (launch.in_tile || buffers[0].anchor != nullptr || buffers[1].anchor != nullptr) return launch_anchored(launch, stream);
  if (fits_fp4(launch)) return launch_fp4(launch, stream);
  if (row.extended() || col.extended()) return launch_extended(launch, stream);
  if (row.six_bit() || col.six_bit()) return launch_fp6(launch, stream);
  if (is_wide(launch.input)) return launch_fp32_input(launch, stream);
  if (launch.up != nullptr) return launch_gated(launch, stream);
  if (supports_delayed(launch)) return launch_delayed(launch, stream);
  const auto asks = [&](int d) { return launch.spec[d].present() && needs_full(launch.spec[d], buffers[d]); };
  const bool full =
      launch.barrier != nullptr || (launch.sources == nullptr && (asks(0) || asks(1)));  // grouped: see supports_sources
  if (full) return row.four_bit() || col.four_bit() ? launch_full4(launch, stream) : launch_full8(launch, stream);
  return known_block(launch) != 0 ? launch_blocks(launch, stream) : launch_plain(launch, stream);
}

}  // namespace fsdp_quant
