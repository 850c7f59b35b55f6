// Host side of a linear layer's step: a tensor is quantized and its codes are multiplied, in one call. Each part is an
// operator of its own too; a step that makes one call instead of three leaves the host time to be ahead.
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/gemm.h"
#include "api/quantize.h"

namespace fsdp_quant {

namespace {

// The products of x's codes: rowwise ones by row_b (y = x row_b^T), columnwise ones by col_b. Kinds are those of `gemm`.
// runs: empty, or the anchor runs of both sides (quantize_anchored). Returns the products that were asked for, then what
// the quantizer returns of each side.
std::vector<at::Tensor> quantize_multiply(
    const at::Tensor& x, int64_t row, int64_t col, double row_eps, double col_eps, const MaybeTensor& row_enc,
    const MaybeTensor& col_enc, at::IntArrayRef runs, const MaybeTensor& counts, int64_t row_kind, int64_t col_kind,
    const MaybeTensor& row_b, const MaybeTensor& row_b_scale, int64_t row_b_kind, const MaybeTensor& col_b,
    const MaybeTensor& col_b_scale, int64_t col_b_kind, const MaybeTensor& bias, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(runs.empty() || runs.size() == 2, "runs has ", runs.size(), " entries; wanted none, or one a side");
  constexpr auto kFourBit = static_cast<int64_t>(Element::kE2M1);
  TORCH_CHECK_VALUE((row & 7) != kFourBit && (col & 7) != kFourBit, "codes of 4 bits are multiplied by `gemm`");
  TORCH_CHECK_VALUE((!row_b.has_value() || row != 0) && (!col_b.has_value() || col != 0),
                    "a product needs the side of x that it multiplies");
  const MaybeTensor none;
  const std::vector<at::Tensor> made =
      runs.empty()
          ? quantize_new(x, row, col, row_eps, col_eps, 0, false, none, none, row_enc, none, none, none, col_enc, none)
          : anchored(x, row, col, runs[0], runs[1], none, none, false, counts.has_value() ? &*counts : nullptr);
  std::vector<at::Tensor> result;
  const size_t of_row = row == 0 ? 0 : runs.empty() && parse_side(row, 0.0, "row").whole() ? 3 : 2;  // results
  if (row_b.has_value())
    result.push_back(gemm(made[0], *row_b, made[1], row_b_scale, row_kind, row_b_kind, dtype, bias, none, 0, false, 0));
  if (col_b.has_value())
    result.push_back(gemm(made[of_row], *col_b, made[of_row + 1], col_b_scale, col_kind, col_b_kind, dtype, none, none, 0,
                          false, 0));
  result.insert(result.end(), made.begin(), made.end());
  return result;
}

}  // namespace

void register_linear(torch::Library& m) {
  m.def(
      "quantize_multiply(Tensor x, int row, int col, float row_eps, float col_eps, Tensor? row_enc, Tensor? col_enc, "
      "int[] runs, Tensor? counts, int row_kind, int col_kind, Tensor? row_b, Tensor? row_b_scale, int row_b_kind, "
      "Tensor? col_b, Tensor? col_b_scale, int col_b_kind, Tensor? bias, ScalarType dtype) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_multiply));
}

}  // namespace fsdp_quant
