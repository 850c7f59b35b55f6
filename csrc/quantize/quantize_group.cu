// SPDX-License-Identifier: Apache-2.0
// All shards of a parameter group, or both sides of the experts' weights, in one launch: the same tiles, found in a table
// of tensors. Weights are rounded to nearest and not rotated.
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_quantize_group(const Launch<kGroupCapacity>& launch, cudaStream_t stream) {
  const Side& row = launch.side[0];
  const Side& col = launch.side[1];
  constexpr int kMany = kGroupCapacity;
  if (launch.phases == kStatistics) return launch_instance<LoadBF16, Statistics, Statistics, kMany, 4>(launch, stream);
  if (row.six_bit() || col.six_bit()) return launch_instance<LoadBF16, Plain6, Plain6, kMany, 2>(launch, stream);
  if (row.present() && col.present())  // 8 bits
    return launch.twins ? launch_instance<LoadBF16, Twin8, Absent, kMany, 3>(launch, stream)
                        : launch_instance<LoadBF16, Plain8, Plain8, kMany, 3>(launch, stream);
  if (row.present()) {
    return row.four_bit() ? launch_instance<LoadBF16, Plain4, Absent, kMany, 3>(launch, stream)
                          : launch_instance<LoadBF16, Plain8, Absent, kMany, 3>(launch, stream);
  }
  return col.four_bit() ? launch_instance<LoadBF16, Absent, Plain4, kMany, 3>(launch, stream)
                        : launch_instance<LoadBF16, Absent, Plain8, kMany, 3>(launch, stream);
}

}  // namespace fsdp_quant
