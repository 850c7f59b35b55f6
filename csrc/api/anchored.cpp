// SPDX-License-Identifier: Apache-2.0
// Host side of `quantize_anchored`: MXFP8 operands with one shared exponent (anchor) per run, line or tensor.
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "api/launch.h"

namespace fsdp_quant {

bool can_encode_anchored(const at::Tensor& x, const EncodingSpec& spec, bool round_to_bf16) {
  return spec.element == Element::kE4M3 && spec.scale == ScaleKind::kE8M0Up && spec.outer == 1 && spec.contraction == 32 &&
         !spec.stochastic && (x.scalar_type() == at::kBFloat16 || (round_to_bf16 && x.scalar_type() == at::kFloat));
}

std::vector<at::Tensor> encode_anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool round_to_bf16, const EncodeExtras& extras) {
  const TokenTables* const tokens = extras.tokens;
  check_input(x);
  TORCH_CHECK_VALUE(tokens == nullptr || (row_run >= 0 && (col_run > 0 || col_run == kOfTile)),
                    "an anchor of the whole contraction would cover several token groups");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const int64_t runs[2] = {row_run, col_run};
  const MaybeTensor* const given[2] = {&row_anchor, &col_anchor};
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = launch_of(
      x, 0, input_of(x, round_to_bf16), unpack_encoding(row, 0.0, "row"), unpack_encoding(col, 0.0, "col"));
  TensorArgs& t = launch.tensors[0];
  const int64_t of_groups = set_tokens(launch, tokens), rows[2] = {t.rows, of_groups};
  bool whole[2];
  for (int d = 0; d < 2; ++d) whole[d] = launch.spec[d].present() && runs[d] == kOfTensor;
  const bool by_tile = launch.spec[1].present() && col_run == kOfTile;
  launch.of_codes = whole[0] || whole[1] || by_tile;
  const auto holds = [&](int d) {
    return !launch.spec[d].present() || ((runs[d] == kTile || (d == 1 && by_tile)) && !given[d]->has_value());
  };
  launch.in_tile = holds(0) && holds(1);
  if (extras.gated != nullptr) set_gated(launch, *extras.gated);
  TORCH_CHECK_VALUE(whole[0] == whole[1] || !launch.spec[0].present() || !launch.spec[1].present(),
                    "one side is anchored by the tensor, and the other by its lines; make them in two calls");
  TORCH_CHECK_VALUE(!by_tile || (launch.in_tile && tokens != nullptr && can_encode_anchored(x, launch.spec[1], round_to_bf16)),
                    "anchors of tiles are of e4m3 columns of token groups, with rows by runs of 128; of stacked matrices "
                    "(linear_weight); or of codes");
  Launch<1> statistics = launch;
  ZeroedWorkspace workspace;
  int64_t anchor_at[2] = {-1, -1};
  Geometry g[2], anchor[2];
  bool compact[2] = {true, true};
  for (int d = 0; d < 2; ++d) {
    EncodingSpec& s = launch.spec[d];
    statistics.spec[d].element = Element::kNone;
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(s.scale == ScaleKind::kE8M0Up, "anchors take the place of e8m0 scales that are rounded up");
    TORCH_CHECK_VALUE(launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16, "x is ", x.scalar_type(),
                      "; anchored codes are made of bfloat16 (or float32 through bfloat16)");
    TORCH_CHECK_VALUE(s.bits() == 8, "anchors are of codes of 8 bits");
    TORCH_CHECK_VALUE(s.outer == 1 && s.contraction == 32, "anchors are of (1, 32) blocks; got (", s.outer, ", ",
                      s.contraction, ")");
    TORCH_CHECK_VALUE(!whole[d] || s.element == Element::kE4M3, "anchors of tensors are of e4m3");
    const EncodingSpec line = runs_of(s, runs[d]);  // the anchor is the amax of the run or tensor
    s.anchor_log2 = line.contraction_log2, compact[d] = line.scale_layout == ScaleLayout::kCompact;
    g[d] = geometry_of(s, d, rows[d], t.cols, 0);
    anchor[d] = geometry_of(line, d, rows[d], t.cols, 0);
    const int64_t numel = anchor[d].scale_rows * anchor[d].scale_cols;
    t.buffers[d].anchor = optional_buffer<float>(*given[d], "anchor", x, numel);
    if (t.buffers[d].anchor != nullptr || launch.in_tile) continue;
    if (d == 1 && whole[0]) {  // both directions share it
      anchor_at[1] = anchor_at[0], t.buffers[1].anchor = t.buffers[0].anchor;
      continue;
    }
    anchor_at[d] = workspace.reserve(numel);
    statistics.spec[d] = line;
    set_geometry(statistics.tensors[0].buffers[d], anchor[d], d);
  }
  workspace.allocate(x, stream);
  std::vector<at::Tensor> result;
  for (int d = 0; d < 2; ++d) {
    if (!launch.spec[d].present()) continue;
    EncodingBuffers& b = t.buffers[d];
    result.push_back(new_empty(x, {g[d].data_rows, g[d].data_cols}, at::kByte));
    b.data = result.back().mutable_data_ptr<uint8_t>();
    const Geometry& a = anchor[d];
    result.push_back(compact[d]      ? new_empty(x, {a.scale_rows, a.scale_cols}, at::kFloat)
                     : d == 1 && by_tile ? new_empty(x, {a.stored_lines, a.stored_blocks}, at::kFloat)
                                         : new_empty(x, {a.stored_blocks, a.stored_lines}, at::kFloat));
    b.scale = result.back().mutable_data_ptr();
    set_geometry(b, g[d], d);
    b.stored = a.stored, b.anchors = a.compact;
    if (d == 1 && by_tile) b.compact = a.compact;
    if (whole[d]) b.anchors.line_stride = 0;
    b.vector_store = stores_vectors(launch.spec[d], b.data, g[d]);
    if (anchor_at[d] < 0) continue;
    b.anchor = statistics.tensors[0].buffers[d].amax = workspace.at(anchor_at[d]);
    if (whole[d] && extras.anchor != nullptr) *extras.anchor = workspace.slice(anchor_at[d], {1});
  }
  check_tokens(launch);
  const bool needs = anchor_at[0] >= 0 || anchor_at[1] >= 0;
  const ColumnSums sums(x, needs ? statistics : launch, extras.column_sums);
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

// Returns data and scale per direction; then the amax of x, if it is the anchor and was not given.
std::vector<at::Tensor> quantize_anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool round_to_bf16) {
  at::Tensor anchor;
  EncodeExtras extras;
  extras.anchor = &anchor;
  std::vector<at::Tensor> result = encode_anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, round_to_bf16, extras);
  if (anchor.defined()) result.push_back(std::move(anchor));
  return result;
}

}  // namespace

void register_anchored(torch::Library& m) {
  m.def(
      "quantize_anchored(Tensor x, int row, int col, int row_run, int col_run, Tensor? row_anchor, Tensor? col_anchor, "
      "bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_anchored), compliant());
}

}  // namespace fsdp_quant
