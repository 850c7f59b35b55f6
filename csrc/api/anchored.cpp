// SPDX-License-Identifier: Apache-2.0
// Host side of MXFP8 operands with one exponent per run, line or tensor.
#include <optional>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "api/launch.h"

namespace fsdp_quant {

bool anchors_codes(const at::Tensor& x, const Side& side, bool through_bf16) {
  return side.element == Element::kE4M3 && side.scale == ScaleKind::kE8M0Up && side.outer == 1 && side.contraction == 32 &&
         !side.stochastic && (x.scalar_type() == at::kBFloat16 || (through_bf16 && x.scalar_type() == at::kFloat));
}

std::vector<at::Tensor> anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool through_bf16, const Beside& beside) {
  const Tokens* const tokens = beside.tokens;
  check_input(x);
  TORCH_CHECK_VALUE(tokens == nullptr || (row_run >= 0 && col_run > 0), "an anchor of the whole contraction serves several groups of tokens");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const int64_t runs[2] = {row_run, col_run};
  const MaybeTensor* const given[2] = {&row_anchor, &col_anchor};
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = {};
  launch.input = input_of(x, through_bf16);
  launch.side[0] = unpack_encoding(row, 0.0, "row"), launch.side[1] = unpack_encoding(col, 0.0, "col");
  launch.count = 1;
  TensorArgs& t = launch.tensors[0] = tensor_args(x, 0);
  launch.tiles = tiles_of(t);
  const int64_t rows[2] = {t.rows, set_tokens(launch, tokens)};
  bool whole[2];
  for (int d = 0; d < 2; ++d) whole[d] = launch.side[d].present() && runs[d] == kOfTensor;
  launch.of_codes = whole[0] || whole[1];
  TORCH_CHECK_VALUE(whole[0] == whole[1] || !launch.side[0].present() || !launch.side[1].present(),
                    "one side is anchored by the tensor, and the other by its lines; make them in two calls");
  Launch<1> statistics = launch;
  Zeroed zeroed;
  int64_t anchor_at[2] = {-1, -1};
  Geometry g[2], anchor[2];
  for (int d = 0; d < 2; ++d) {
    Side& s = launch.side[d];
    statistics.side[d].element = Element::kNone;
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(s.scale == ScaleKind::kE8M0Up, "anchors take the place of e8m0 scales that are rounded up");
    TORCH_CHECK_VALUE(launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16, "x is ", x.scalar_type(),
                      "; anchored codes are made of bfloat16 (or float32 through bfloat16)");
    TORCH_CHECK_VALUE(s.bits() == 8, "anchors are of codes of 8 bits");
    TORCH_CHECK_VALUE(s.outer == 1 && s.contraction == 32, "anchors are of (1, 32) blocks; got (", s.outer, ", ",
                      s.contraction, ")");
    TORCH_CHECK_VALUE(!whole[d] || s.element == Element::kE4M3, "anchors of tensors are of e4m3");
    const Side line = runs_of(s, runs[d]);  // an anchor is the amax of a run of one line, or of the tensor
    s.anchor_log2 = line.contraction_log2;
    g[d] = geometry_of(s, d, rows[d], t.cols, 0);
    anchor[d] = geometry_of(line, d, rows[d], t.cols, 0);
    const int64_t numel = anchor[d].scale_rows * anchor[d].scale_cols;
    t.side[d].anchor = optional_buffer<float>(*given[d], "anchor", x, numel);
    if (t.side[d].anchor != nullptr) continue;
    if (d == 1 && whole[0]) {  // one for both
      anchor_at[1] = anchor_at[0], t.side[1].anchor = t.side[0].anchor;
      continue;
    }
    anchor_at[d] = zeroed.reserve(numel);
    statistics.side[d] = line;
    set_geometry(statistics.tensors[0].side[d], anchor[d], d);
  }
  zeroed.allocate(x, stream);
  std::vector<at::Tensor> result;
  for (int d = 0; d < 2; ++d) {
    if (!launch.side[d].present()) continue;
    SideBuffers& b = t.side[d];
    result.push_back(new_empty(x, {g[d].data_rows, g[d].data_cols}, at::kByte));
    b.data = result.back().mutable_data_ptr<uint8_t>();
    result.push_back(new_empty(x, {anchor[d].scale_rows, anchor[d].scale_cols}, at::kFloat));
    b.scale = result.back().mutable_data_ptr();
    set_geometry(b, g[d], d);
    b.stored = b.anchors = anchor[d].compact;
    if (whole[d]) b.anchors.line_stride = 0;
    b.vector_store = stores_vectors(launch.side[d], b.data, g[d]);
    if (anchor_at[d] >= 0) b.anchor = statistics.tensors[0].side[d].amax = zeroed.at(anchor_at[d]);
  }
  check_tokens(launch);
  const bool needs = anchor_at[0] >= 0 || anchor_at[1] >= 0;
  const ColumnSums sums(x, needs ? statistics : launch, beside.column_sums);
  if (needs) {
    statistics.phases = kStatistics;
    check_launch(launch_quantize(statistics, stream), "quantize_anchored", x.sizes());
    launch.reversed = true;
  }
  launch.phases = kEncode;
  check_launch(launch_quantize(launch, stream), "quantize_anchored", x.sizes());
  sums.finish(stream);
  return result;
}

namespace {

std::vector<at::Tensor> quantize_anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool through_bf16) {
  return anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, through_bf16);
}

}  // namespace

void register_anchored(torch::Library& m) {
  m.def(
      "quantize_anchored(Tensor x, int row, int col, int row_run, int col_run, Tensor? row_anchor, Tensor? col_anchor, "
      "bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_anchored), compliant());
}

}  // namespace fsdp_quant
