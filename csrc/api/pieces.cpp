// SPDX-License-Identifier: Apache-2.0
// Host side of casts of tensor pieces, from tables in device memory.
#include <torch/library.h>

#include "api/quantize.h"
#include "quantize/pieces.h"

namespace fsdp_quant {

namespace {

const void* rows_of(const at::Tensor& table, const char* name, int64_t bytes, const at::Tensor& like) {
  check_cuda(like, "table");
  TORCH_CHECK_VALUE(table.dim() == 2 && table.size(1) * table.element_size() == bytes && table.is_contiguous() &&
                        table.device() == like.device() && is_aligned(table.const_data_ptr(), 16),
                    name, " is ", table.scalar_type(), " ", table.sizes(), " on ", table.device(), "; wanted rows of ", bytes,
                    " bytes on ", like.device());
  TORCH_CHECK_VALUE(table.size(0) < int64_t{1} << 31, name, " has ", table.size(0), " rows; one launch takes 2^31");
  return table.const_data_ptr();
}

const uint8_t* flag_of(const MaybeTensor& skip, const at::Tensor& like) {
  if (!skip.has_value()) return nullptr;
  check_buffer(*skip, "skip", like, at::kBool, 1);
  return static_cast<const uint8_t*>(skip->const_data_ptr());
}

// Amaxes and codes of the listed tiles. pieces: rows of `Piece`. tiles: int32 [tiles, 4].
void cast_pieces(
    const at::Tensor& pieces, const at::Tensor& tiles, int64_t row, int64_t col, double row_eps, double col_eps, bool second,
    const MaybeTensor& skip) {
  PiecesLaunch launch = {};
  launch.pieces = static_cast<const Piece*>(rows_of(pieces, "pieces", sizeof(Piece), pieces));
  launch.tiles = static_cast<const int4*>(rows_of(tiles, "tiles", sizeof(int4), pieces));
  launch.spec[0] = unpack_encoding(row, row_eps, "row"), launch.spec[1] = unpack_encoding(col, col_eps, "col");
  launch.count = static_cast<int32_t>(tiles.size(0)), launch.second = second, launch.skip = flag_of(skip, pieces);
  bool four_bit = false;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    TORCH_CHECK_VALUE(!s.stochastic && !s.rotated && !s.transposed && s.scale_layout == ScaleLayout::kCompact && !s.six_bit() &&
                          !s.extended(),
                      "pieces are of 8 or 4 bits, rounded to nearest, not rotated, and compact, with the scales of their amaxes");
    four_bit |= launch.encodes(d) && s.four_bit();
  }
  TORCH_CHECK_VALUE(launch.spec[0].present() || launch.spec[1].present(), "no direction is requested");
  if (launch.count == 0) return;
  const c10::cuda::CUDAGuard guard(pieces.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  check_launch(four_bit ? launch_pieces4(launch, stream) : launch_pieces8(launch, stream), "cast_pieces");
}

// Scales from collected amaxes, or values cast to another dtype. segments: rows of `ScaleSegment`. chunks: int32 [chunks, 2].
void cast_scales(const at::Tensor& segments, const at::Tensor& chunks, at::IntArrayRef specs, at::ArrayRef<double> eps,
                 const MaybeTensor& skip) {
  TORCH_CHECK_VALUE(specs.size() <= kScaleSpecs && eps.size() == specs.size(),
                    specs.size(), " sides with ", eps.size(), " eps; wanted ", kScaleSpecs, " at most, an eps each");
  ScalesLaunch launch = {};
  launch.segments = static_cast<const ScaleSegment*>(rows_of(segments, "runs", sizeof(ScaleSegment), segments));
  launch.chunks = static_cast<const int2*>(rows_of(chunks, "chunks", sizeof(int2), segments));
  for (size_t i = 0; i < specs.size(); ++i) launch.spec[i] = unpack_encoding(specs[i], eps[i], "side");
  launch.count = static_cast<int32_t>(chunks.size(0)), launch.skip = flag_of(skip, segments);
  if (launch.count == 0) return;
  const c10::cuda::CUDAGuard guard(segments.device());
  check_launch(launch_cast_scales(launch, c10::cuda::getCurrentCUDAStream()), "cast_scales");
}

}  // namespace

void register_pieces(torch::Library& m) {
  m.def(
      "cast_pieces(Tensor pieces, Tensor tiles, int row, int col, float row_eps, float col_eps, bool second, Tensor? skip) "
      "-> ()",
      torch::dispatch(c10::DispatchKey::CUDA, cast_pieces));
  m.def(
      "cast_scales(Tensor runs, Tensor chunks, int[] sides, float[] eps, Tensor? skip) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, cast_scales));
}

}  // namespace fsdp_quant
