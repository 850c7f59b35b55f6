// SPDX-License-Identifier: Apache-2.0
// Arguments and buffer geometry of the quantize operators.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "api/encoding.h"
#include "quantize/quantize.h"

namespace fsdp_quant {

struct Geometry : EncodingSizes<int64_t> {
  Grid compact, stored;  // strides over (lines, blocks) of amax and of scale
};

// Values that the caller already has for one direction. amax: of a whole tensor, also several, of parts of it: the largest
// counts. record: fp32 amax history to update, with enc (delayed scaling).
// Grouped tokens have one entry per group in each field, and `records`, one per group or none.
struct GivenAmaxes {
  const MaybeTensor &amax, &tensor_amax, &enc, &key;
  const at::Tensor* record = nullptr;
  at::TensorList records = {};
};

// The values are act(x) * up; or (gradient) those of the gradient of act(g) * u, of which [g, u] is x and whose gradient is
// `up`.
struct GatedInput {
  at::Tensor up;
  Activation kind;
  bool gradient = false;
  at::Tensor weights = {};  // of grouped tokens, fp32: what each row of act(g) * u is multiplied by, rounded
  at::Tensor dots = {};     // with gradient: receives the gradient of weights, fp32 [columns of tiles, rows], to be summed
};

// Grouped tokens with scales per group (`sources` of layout/token_groups.h). The columnwise direction pads each group with
// zeros to a multiple of 128 rows; empty groups write nothing. The rowwise direction keeps the rows.
struct TokenTables {
  const int32_t *sources, *offsets, *padded;
  int64_t tiles, groups;
  at::Tensor order = {};  // int64: the row of x that each row is; undefined: x has these rows
};

// The rows of the groups, where a kernel does not read them by their order.
at::Tensor ordered_rows(const at::Tensor& x, const TokenTables* tokens);

// Extra inputs and outputs of `encode`. gated: see can_encode_gated, can_gate_tokens. tokens: scales that span rows, and tensor
// amaxes, are per group: [groups, lines] or [groups]. column_sums: receives column_sums(x) from the first launch; not with gated or
// tokens.
struct EncodeExtras {
  const GatedInput* gated = nullptr;
  const TokenTables* tokens = nullptr;
  at::Tensor* column_sums = nullptr;
  at::Tensor* anchor = nullptr;  // `encode_anchored`: receives the amax of the tensor, [1], where it is the anchor and was not given
};

// Result of one direction. Undefined: a direction that is absent; tensor_amax and amax if given; tensor_amax of one-level
// formats; amax of scales that do not span the contraction.
struct Encoded {
  at::Tensor data, scale, tensor_amax, amax;
};
using Encodings = std::array<Encoded, 2>;

// Quantize x. wants_amax: also return amaxes. out: buffers to write instead of new tensors.
Encodings encode(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const GivenAmaxes (&known)[2],
                 int64_t row0, bool round_to_bf16, bool wants_amax, const Encodings* out, const EncodeExtras& extras = {});

// Delayed-scaling inputs of stacked matrices: one per matrix, or none.
struct StackedHistories {
  at::TensorList enc, record;
};

// Quantize matrices [count, rows, cols] separately into stacked buffers: 8 bits, round to nearest, one-level scales.
// tiles: with one exponent per tile of 128 x 128, see can_encode_anchored.
Encodings encode_stacked(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, bool round_to_bf16,
                         const StackedHistories (&histories)[2], bool tiles = false);

// Whether `encode` can compute the activation itself: bf16 [rows, cols], 16-byte aligned rows.
bool can_encode_gated(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const MaybeTensor (&enc)[2],
                      const GatedInput& gated);

// Whether `encode` and `encode_anchored` can compute SwiGLU or its gradient of token groups themselves: 16-byte aligned rows.
bool can_gate_tokens(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, int64_t row_run, int64_t col_run,
                     const GatedInput& gated, const TokenTables& tokens);

// Whether `encode_anchored` can quantize x with one exponent per tensor, and `encode_stacked` per tile, with the same bytes as `anchor_codes`.
bool can_encode_anchored(const at::Tensor& x, const EncodingSpec& spec, bool round_to_bf16);

// Quantize to MXFP8 whose blocks share the scale of their run: 8-bit operands whose fp32 scales stay out of the main loop.
// Returns data and scale per direction. Run kOfTensor gives the same bytes as `anchor_codes`, in all requested directions.
// extras: gated if `can_gate_tokens`; with tokens, the columnwise run is not the whole line.
std::vector<at::Tensor> encode_anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool round_to_bf16, const EncodeExtras& extras = {});

// Block amaxes per direction, and tensor amaxes of two-level formats. row, col: packed encodings.
std::vector<at::Tensor> statistics(const at::Tensor& x, int64_t row, int64_t col, int64_t row0, bool round_to_bf16);

// Sum x [rows, cols] bf16 over rows: fp32 sums in tiles of 128 rows, rounded once. Returns [cols].
at::Tensor column_sums(const at::Tensor& x);

Geometry geometry_of(const EncodingSpec& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0);

}  // namespace fsdp_quant
