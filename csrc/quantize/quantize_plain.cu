// SPDX-License-Identifier: Apache-2.0
// bf16 values, scales from the tile or given, rounding to nearest: one instance per pair of widths.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_plain(const Launch<1>& launch, cudaStream_t stream) {
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  if (launch.sources != nullptr) {  // whole-tensor and line scales
    if (launch.shares_codes_transposed) return launch_tokens<SharedCodes8, Absent>(launch, stream);
    if (!col.present()) return launch_tokens<Plain8, Absent>(launch, stream);
    return row.present() ? launch_tokens<Plain8, Plain8>(launch, stream)
                         : launch_tokens<Absent, Plain8>(launch, stream);
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
