// SPDX-License-Identifier: Apache-2.0
// Pieces of which a direction, or both, is in 4 bits.
#include "quantize/pieces_kernel.cuh"

namespace fsdp_quant {

cudaError_t launch_pieces4(const PiecesLaunch& launch, cudaStream_t stream) {
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  if (!launch.encodes(1)) return launch_pieces<Plain4, Statistics>(launch, stream);
  if (!launch.encodes(0)) return launch_pieces<Statistics, Plain4>(launch, stream);
  if (!row.four_bit()) return launch_pieces<Plain8, Plain4>(launch, stream);
  return col.four_bit() ? launch_pieces<Plain4, Plain4>(launch, stream) : launch_pieces<Plain4, Plain8>(launch, stream);
}

}  // namespace fsdp_quant
