// SPDX-License-Identifier: Apache-2.0
#include "step/weight.h"

#include <optional>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include "api/grouped_gemm.h"
#include "step/ranks.h"

namespace fsdp_quant::step {

namespace {

// `linear_weight` for matrices [E, N, K] in 4 bits, quantized as token groups: compact rowwise codes [E * N, K / 2] and
// scales; columnwise codes [K, E * n / 2] with n = N rounded up to 128, scales [K or its blocks, E * n / 16] and tensor
// amaxes [E]. Operands (ScaleLayout) have one byte per code and scales [E].
std::vector<at::Tensor> stacked_fp4(const at::Tensor& weight, int64_t plan, bool row, bool col) {
  const OperandSpec(&r)[kDirections] = plan_of(plan).operand_specs[kWeight];
  check_cuda(weight, "weight");
  const c10::cuda::CUDAGuard guard(weight.device());
  const int64_t matrices = weight.size(0), rows = weight.size(1);
  TORCH_CHECK_VALUE(weight.is_contiguous() && rows % kRotationBlock == 0, "weight has shape ", weight.sizes(), " and strides ",
                    weight.strides(), "; wanted contiguous matrices, of multiples of ", kRotationBlock, " rows");
  const EncodingSpec none = {}, of_col = (r[kColumnwise].same ? r[kRowwise] : r[kColumnwise]).spec;
  EncodingSpec of_row = row ? r[kRowwise].spec : of_col;
  of_row.transposed = false;
  const bool both = (col ? of_col : of_row).outer != 1;  // square blocks serve both
  const EncodingSpec spec[kDirections] = {row || both ? of_row : none,
                                          col || both ? k_major_spec(col ? of_col : of_row) : none};
  const at::Tensor ends = at::arange(rows, (matrices + 1) * rows, rows, weight.options().dtype(at::kInt));
  const at::Tensor tables = token_groups(ends, matrices * rows, matrices * ceil_div(rows, kTile), std::nullopt, 0);
  const TokenTables tokens = tables_of(tables, matrices, weight);
  const MaybeTensor unknown;
  const GivenAmaxes known[kDirections] = {{unknown, unknown, unknown, unknown}, {unknown, unknown, unknown, unknown}};
  const Encodings encoded = encode(weight.view({matrices * rows, weight.size(2)}), spec[0], spec[1], known, 0, false, false,
                                   nullptr, {nullptr, &tokens});
  std::vector<at::Tensor> result;
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!(d == kRowwise ? row : col)) continue;
    count(plan, kWeight * kDirections + (r[d].same ? kRowwise : d), matrices);
    append(result, r[d], encoded[d]);
  }
  return result;
}

}  // namespace

std::vector<at::Tensor> linear_weight(
    const at::Tensor& weight, int64_t plan, bool row, bool col, bool round_to_bf16, at::TensorList factors,
    at::TensorList histories, const ScalingAmaxes& amaxes) {
  const LinearPlan& p = plan_of(plan);
  const OperandSpec(&r)[kDirections] = p.operand_specs[kWeight];
  const std::vector<at::Tensor> scales_by = factors.vec(), recorded = histories.vec();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool stacked = weight.dim() == 3;
  const bool is_fp4[kDirections] = {r[kRowwise].spec.two_level(),
                                    (r[kColumnwise].same ? r[kRowwise] : r[kColumnwise]).spec.two_level()};
  if (stacked && ((row && is_fp4[kRowwise]) || (col && is_fp4[kColumnwise]))) {
    std::vector<at::Tensor> operands = stacked_fp4(weight, plan, row && is_fp4[kRowwise], col && is_fp4[kColumnwise]), rest;
    if ((row && !is_fp4[kRowwise]) || (col && !is_fp4[kColumnwise]))
      rest = linear_weight(weight, plan, row && !is_fp4[kRowwise], col && !is_fp4[kColumnwise], round_to_bf16, factors,
                           histories);
    if (!is_fp4[kRowwise]) operands.swap(rest);  // rowwise buffers come first
    operands.insert(operands.end(), rest.begin(), rest.end());
    return operands;
  }
  const int64_t matrices = stacked ? weight.size(0) : 1;
  TORCH_CHECK_VALUE(!stacked || matrices > 0, "weight has shape ", weight.sizes(), "; wanted one matrix or more");
  EncodingSpec specs[kDirections] = {}, tiles[kDirections] = {};  // tiles: of stacked matrices
  int64_t direct[kDirections] = {};
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!wants(p, kWeight, d, row, col)) continue;
    if (!stacked && r[d].run == kOfTensor && can_encode_anchored(weight, r[d].spec, round_to_bf16)) {
      direct[d] = r[d].packed;
      continue;
    }
    if (stacked && r[d].run == kOfTile && can_encode_anchored(weight, r[d].spec, round_to_bf16)) {
      tiles[d] = r[d].spec;
      continue;
    }
    specs[d] = r[d].spec;
    if (r[d].is_anchored()) specs[d].transposed = false;  // compact, for `anchor_codes`
    TORCH_CHECK_NOT_IMPLEMENTED(!stacked || (!specs[d].two_level() && r[d].kind != 0),
                                "matrices are stacked as products of groups read them");
  }
  const Delayed by = delayed_of(r, specs, {scales_by, recorded}, matrices);
  Encodings encoded;
  const bool any = specs[0].present() || specs[1].present();
  if (stacked && any) {
    encoded = encode_stacked(weight, specs[0], specs[1], round_to_bf16,
                             {{by.factors[0], by.records[0]}, {by.factors[1], by.records[1]}});
  } else if (any) {
    encoded = encode_directions(specs, matrix(weight), by, std::nullopt, round_to_bf16, amaxes);
  }
  if (tiles[0].present() || tiles[1].present()) {
    Encodings made = encode_stacked(weight, tiles[0], tiles[1], round_to_bf16, {}, true);
    for (const Direction d : {kRowwise, kColumnwise})
      if (tiles[d].present()) encoded[d] = std::move(made[d]);
  }
  std::vector<at::Tensor> anchors;
  if (direct[0] != 0 || direct[1] != 0)
    anchors = encode_anchored(matrix(weight), direct[0], direct[1], kOfTensor, kOfTensor, std::nullopt, std::nullopt,
                              round_to_bf16);
  std::vector<at::Tensor> result;
  auto next = anchors.begin();
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (!specs[d].present() && !tiles[d].present() && direct[d] == 0) continue;
    count(plan, kWeight * kDirections + d, matrices);
    if (direct[d] != 0) {
      encoded[d].data = *next++, encoded[d].scale = next++->view({1});
    } else if (specs[d].present() && r[d].is_anchored()) {
      anchor(encoded[d], r[d], d, weight.size(-2), weight.size(-1));
    }
    append(result, r[d], encoded[d]);
  }
  return result;
}

std::vector<at::Tensor> weight_operand(LinearCall& call, const Weight& weight, bool dgrad) {
  if (!weight.values.has_value()) {
    call.columnwise = weight.columnwise.vec();
    return weight.rowwise.vec();
  }
  const OperandSpec(&r)[kDirections] = call.plan->operand_specs[kWeight];
  const ScalingAmaxes amaxes = share_amaxes(call, kWeight, matrix(*weight.values), true, true, weight.round_to_bf16);
  std::vector<at::Tensor> buffers = linear_weight(*weight.values, call.handle, true, dgrad, weight.round_to_bf16, weight.factors,
                                                  weight.histories, amaxes);
  size_t at = 0;
  std::vector<at::Tensor> operands[kDirections];
  for (const Direction d : {kRowwise, kColumnwise}) {
    if (d == kColumnwise && !dgrad) continue;
    if (!r[d].is_quantized()) {
      operands[d] = {*weight.values};
    } else if (d == kColumnwise && r[d].same) {
      operands[d] = operands[kRowwise];
    } else {
      append(operands[d], r[d], next_encoded(buffers, at, r[d]));
    }
  }
  call.columnwise = std::move(operands[kColumnwise]);
  return operands[kRowwise];
}

void register_weight(torch::Library& m) {
  m.def(
      "linear_weight(Tensor weight, int plan, bool row, bool col, bool through_bf16, Tensor[] factors, "
      "Tensor[] histories) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, [](const at::Tensor& weight, int64_t plan, bool row, bool col, bool round_to_bf16,
                                                 at::TensorList factors, at::TensorList histories) {
        return linear_weight(weight, plan, row, col, round_to_bf16, factors, histories);
      }));
}

}  // namespace fsdp_quant::step
