// SPDX-License-Identifier: Apache-2.0
// Many tensors in one launch (shards of a parameter group, expert weights): the same tiles, found in a table. Weights are
// rounded to nearest and not rotated.
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_quantize_multi_tensor(const Launch<kMultiTensorCapacity>& launch, cudaStream_t stream) {
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  constexpr int kMany = kMultiTensorCapacity;
  if (launch.phases == kStatistics) return launch_instance<LoadBF16, Statistics, Statistics, kMany, 4>(launch, stream);
  if (launch.in_tile) {
    if (!col.present()) return launch_instance<LoadBF16, OfCodesInTile8, Absent, kMany, 3>(launch, stream);
    if (!row.present()) return launch_instance<LoadBF16, Absent, OfCodesInTile8, kMany, 3>(launch, stream);
    return launch_instance<LoadBF16, OfCodesInTile8, OfCodesInTile8, kMany, 3>(launch, stream);
  }
  if (row.extended()) return launch_instance<LoadBF16, Extended4, Absent, kMany, 2>(launch, stream);
  if (col.extended()) return launch_instance<LoadBF16, Absent, Extended4, kMany, 2>(launch, stream);
  if (row.six_bit() || col.six_bit()) return launch_instance<LoadBF16, Plain6, Plain6, kMany, 2>(launch, stream);
  if (row.present() && col.present())  // 8 bits
    return launch.shares_codes_transposed ? launch_instance<LoadBF16, SharedCodes8, Absent, kMany, 3>(launch, stream)
                        : launch_instance<LoadBF16, Plain8, Plain8, kMany, 3>(launch, stream);
  if (row.present()) {
    return row.four_bit() ? launch_instance<LoadBF16, Plain4, Absent, kMany, 3>(launch, stream)
                          : launch_instance<LoadBF16, Plain8, Absent, kMany, 3>(launch, stream);
  }
  return col.four_bit() ? launch_instance<LoadBF16, Absent, Plain4, kMany, 3>(launch, stream)
                        : launch_instance<LoadBF16, Absent, Plain8, kMany, 3>(launch, stream);
}

}  // namespace fsdp_quant
