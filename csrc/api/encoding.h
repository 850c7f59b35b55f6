// SPDX-License-Identifier: Apache-2.0
// The packed description of an encoding, and the sizes of the buffers of one: operators, their
// fakes and Python ask here. Integers alone: nothing needs a device.
#pragma once

#include <cstdint>

#include <c10/util/string_view.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

// A format and a direction's options in one integer, which nobody but `unpack_encoding` reads. 0
// stands for a direction that is not quantized. outer, contraction: extents of a block, 0 for the
// whole. pow2, scale_rounding, scale_rule: of fp32, e8m0 and e4m3 scales (formats.py). The blocks that kernels
// exist for are checked when the integer is unpacked.
int64_t pack_encoding(c10::string_view element, c10::string_view scale, bool pow2,
                      c10::string_view scale_rounding, c10::string_view scale_rule, int64_t outer,
                      int64_t contraction, bool stochastic, bool rotated, bool transposed,
                      int64_t scale_layout);

// What kernels are told of it; kNone of 0. name: of the argument, for errors.
EncodingSpec unpack_encoding(int64_t packed, double eps, const char* name);

// Bytes of a row of so many codes, packed as `PACKINGS` of formats.py says; of operands a byte each.
template <class Int>
Int bytes_of(const EncodingSpec& spec, const Int& codes) {
  if (spec.six_bit()) return (codes + 3) / 4 * 3;
  return spec.four_bit() && !spec.operand() ? (codes + 1) / 2 : codes;
}

// Codes that so many bytes hold.
inline int64_t codes_of(const EncodingSpec& spec, int64_t bytes) {
  return spec.six_bit() ? bytes / 3 * 4 : spec.four_bit() && !spec.operand() ? bytes * 2 : bytes;
}

// What shares an anchor: a run of so many elements of one line, 0 is its whole contraction; or the tensor.
constexpr int64_t kOfTensor = -2;

// The direction whose blocks share an anchor each.
EncodingSpec runs_of(const EncodingSpec& spec, int64_t run);

// Sizes of the buffers of one direction of a tensor [rows, cols]. Int: int64_t, or c10::SymInt
// where a length is symbolic.
template <class Int>
struct EncodingSizes {
  Int rows, cols;  // of the codes: rotation fills the contraction
  Int data_rows, data_cols;  // of the data buffer, in bytes per row
  Int scale_rows, scale_cols;  // of the compact block grid, which amaxes have in every scale layout
  Int stored_lines, stored_blocks;  // of the scale buffer, but for kBlackwell
  Int scale_numel;  // of the scale buffer
};

// row0: global index of the first row of a shard. Raises ValueError for a layout that no shard has.
template <class Int>
EncodingSizes<Int> encoding_sizes(const EncodingSpec& spec, bool columnwise, const Int& rows,
                                  const Int& cols, const Int& row0);

}  // namespace fsdp_quant
