// SPDX-License-Identifier: Apache-2.0
// bf16 values, scales from the tile or given, rounding to nearest: an instance for each pair of widths.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_plain(const Launch<1>& launch, cudaStream_t stream) {
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  if (launch.sources != nullptr) {  // of whole tensors and lines
    if (launch.shares_codes_transposed) return launch_instance<LoadTokens, SharedCodes8, Absent, 1, 3>(launch, stream);
    if (!col.present()) return launch_instance<LoadTokens, Plain8, Absent, 1, 3>(launch, stream);
    return row.present() ? launch_instance<LoadTokens, Plain8, Plain8, 1, 3>(launch, stream)
                         : launch_instance<LoadTokens, Absent, Plain8, 1, 3>(launch, stream);
  }
  if (launch.shares_codes_transposed) return launch_instance<LoadBF16, SharedCodes8, Absent, 1, 3>(launch, stream);
  if (!col.present()) {
    return row.four_bit() ? launch_instance<LoadBF16, Plain4, Absent, 1, 3>(launch, stream)
                          : launch_instance<LoadBF16, Plain8, Absent, 1, 3>(launch, stream);
  }
  if (!row.present()) {
    return col.four_bit() ? launch_instance<LoadBF16, Absent, Plain4, 1, 3>(launch, stream)
                          : launch_instance<LoadBF16, Absent, Plain8, 1, 3>(launch, stream);
  }
  if (row.four_bit()) return launch_instance<LoadBF16, Plain4, Plain4, 1, 3>(launch, stream);
  return col.four_bit() ? launch_instance<LoadBF16, Plain8, Plain4, 1, 3>(launch, stream)
                        : launch_instance<LoadBF16, Plain8, Plain8, 1, 3>(launch, stream);
}

}  // namespace fsdp_quant
