// SPDX-License-Identifier: Apache-2.0
// What operators are given of a direction, and the geometry of its buffers.
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
  Grid compact, stored;  // over lines and blocks: the compact grid, and the scale buffer's
};

// What the caller may know of a direction. record: fp32, its first the largest finite amax so far, with enc. Of groups of tokens
// there is one of each a group; records has one a group, or none.
struct GivenAmaxes {
  const MaybeTensor &amax, &tensor_amax, &enc, &key;
  const at::Tensor* record = nullptr;
  at::TensorList records = {};
};

// The values are act(x) * up.
struct GatedInput {
  at::Tensor up;
  Activation kind;
};

// Rows of x in groups whose scales are their own (`sources` of layout/token_groups.h): the columnwise direction has each group's rows
// from a multiple of 128 on, zeros behind them (of none: nothing is written); the rowwise direction keeps x's rows.
struct Tokens {
  const int32_t *sources, *offsets;
  int64_t tiles, groups;
};

// What goes with the encoding of x. gated: see encodes_gated. tokens: scales that span rows are one set a group,
// [groups, lines] or [groups], as are amaxes of tensors. column_sums: set to column_sums(x), which the first launch that reads x makes on the way; not of
// gated values or tokens.
struct EncodeExtras {
  const GatedInput* gated = nullptr;
  const Tokens* tokens = nullptr;
  at::Tensor* column_sums = nullptr;
};

// What is made of a direction. Undefined: a direction that is not made; tensor_amax and amax also where they were given, tensor_amax
// of formats of one level, amax of scales that do not span the contraction.
struct Encoded {
  at::Tensor data, scale, tensor_amax, amax;
};
using Encodings = std::array<Encoded, 2>;

// Codes and scales of x. wants_amax: return the amaxes too. out: data and scale to write instead of new tensors.
Encodings encode(
    const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const GivenAmaxes (&known)[2], int64_t row0, bool round_to_bf16,
    bool wants_amax, const Encodings* out, const EncodeExtras& extras = {});

// Histories of delayed directions, one a matrix, or none.
struct StackedHistories {
  at::TensorList enc, record;
};

// Codes and scales of matrices [count, rows, cols], each by itself, stacked: 8 bits, rounded to nearest, of scales of one level.
Encodings encode_stacked(
    const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, bool round_to_bf16, const StackedHistories (&histories)[2]);

// `encode` makes these values itself: bf16 [rows, cols], both with rows of 16 bytes.
bool encodes_gated(
    const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const MaybeTensor (&enc)[2], const GatedInput& gated);

// Anchors of tensors are made of these values as `anchor_codes` makes them of their codes.
bool anchors_codes(const at::Tensor& x, const EncodingSpec& spec, bool round_to_bf16);

// MXFP8 whose blocks share the scale of their run of the contraction: 8-bit operands with fp32 scales that leave the main
// loop. Returns data and scale of each direction. A run of kOfTensor: what `anchor_codes` makes of the directions' codes, of both or of
// neither. beside: not gated; with tokens, the columnwise run is not the whole contraction.
std::vector<at::Tensor> anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool round_to_bf16, const EncodeExtras& extras = {});

// Sums over the rows of x [rows, cols], bf16: added up in fp32 in tiles of 128 rows, rounded once. [cols].
at::Tensor column_sums(const at::Tensor& x);

Geometry geometry_of(const EncodingSpec& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0);

}  // namespace fsdp_quant
