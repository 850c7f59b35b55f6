// SPDX-License-Identifier: Apache-2.0
// The packed description of an encoding and the sizes of its buffers, for operators, their fakes and Python. Needs no device.
#pragma once

#include <cstdint>

#include <c10/util/string_view.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

// Pack a format and the options of one direction into an integer; 0 means not quantized. outer, contraction: block extents, 0
// for the whole dim. pow2 applies to fp32 scales, scale_rounding to e8m0, the others to e4m3 (formats.py).
// Unpacking checks that kernels exist for the blocks.
int64_t pack_encoding(c10::string_view element, c10::string_view scale, bool pow2,
                      c10::string_view scale_rounding, c10::string_view scale_rule, int64_t outer,
                      int64_t contraction, bool stochastic, bool rotated, bool transposed,
                      int64_t scale_layout, c10::string_view four_over_six, c10::string_view scale_per);

// Unpack an encoding; 0 gives kNone. name: of the argument, for errors.
EncodingSpec unpack_encoding(int64_t packed, double eps, const char* name);

// The same encoding with compact buffers.
int64_t compact_encoding(int64_t packed);

// Bytes per row of codes, packed as in `PACKINGS` of formats.py; operands have one byte per code.
template <class Int>
Int bytes_of(const EncodingSpec& spec, const Int& codes) {
  if (spec.six_bit()) return (codes + 3) / 4 * 3;
  return spec.four_bit() && !spec.operand() ? (codes + 1) / 2 : codes;
}

// Codes stored in a number of bytes.
inline int64_t codes_of(const EncodingSpec& spec, int64_t bytes) {
  return spec.six_bit() ? bytes / 3 * 4 : spec.four_bit() && !spec.operand() ? bytes * 2 : bytes;
}

// Span of elements that shares an anchor: a run of one line (0: the whole line), the whole tensor, or a tile of 128 x 128.
constexpr int64_t kOfTensor = -2, kOfTile = -3;

// The spec whose blocks are the runs, with fp32 scales: compact, of tiles as operands (kHopper), of runs as the spec's.
EncodingSpec runs_of(const EncodingSpec& spec, int64_t run);

// Buffer sizes of one direction of a tensor [rows, cols]. Int: int64_t, or c10::SymInt for symbolic lengths.
template <class Int>
struct EncodingSizes {
  Int rows, cols;  // of the codes; rotation pads the contraction
  Int data_rows, data_cols;  // of the data buffer, in bytes per row
  Int scale_rows, scale_cols;  // of the compact block grid, also that of amaxes
  Int stored_lines, stored_blocks;  // of the scale buffer, except kBlackwell
  Int scale_numel;  // of the scale buffer
};

// row0: global index of the shard's first row. Raises ValueError if a layout cannot be sharded.
template <class Int>
EncodingSizes<Int> encoding_sizes(const EncodingSpec& spec, bool columnwise, const Int& rows,
                                  const Int& cols, const Int& row0);

}  // namespace fsdp_quant
