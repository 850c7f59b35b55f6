// SPDX-License-Identifier: Apache-2.0
#include "api/encoding.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "api/checks.h"

namespace fsdp_quant {

namespace {

// Bits [first, first + count) of the integer.
struct Field {
  int first, count;
  const char* name;

  int64_t most() const { return (int64_t{1} << count) - 1; }
  int32_t of(int64_t packed) const { return static_cast<int32_t>(packed >> first & most()); }
  int64_t holding(int64_t value) const {
    TORCH_CHECK_VALUE(value >= 0 && value <= most(), "an encoding has ", name, " ", value,
                      "; wanted 0 to ", most());
    return value << first;
  }
};

constexpr Field kElement = {0, 3, "element"}, kScale = {3, 3, "scale"}, kOuter = {6, 10, "outer"};
constexpr Field kContraction = {16, 10, "contraction"}, kStochastic = {26, 1, "stochastic"},
                kRotated = {27, 1, "rotated"};
constexpr Field kTransposed = {28, 1, "transposed"}, kScaleLayout = {29, 2, "scale layout"},
                kChoice = {31, 2, "choice of scales"}, kByLine = {33, 1, "second level"};
constexpr int kBits = 34;

Element element_of(c10::string_view name) {
  if (name == "e4m3") return Element::kE4M3;
  if (name == "e5m2") return Element::kE5M2;
  if (name == "e2m1") return Element::kE2M1;
  if (name == "e2m3") return Element::kE2M3;
  if (name == "e3m2") return Element::kE3M2;
  TORCH_CHECK_VALUE(false, "element is ", name, "; wanted e4m3, e5m2, e3m2, e2m3 or e2m1");
}

ScaleKind scale_kind_of(c10::string_view name, bool pow2, c10::string_view rounding, c10::string_view rule) {
  if (name == "fp32") return pow2 ? ScaleKind::kFp32Pow2 : ScaleKind::kFp32;
  if (name == "e8m0") return rounding == "floor" ? ScaleKind::kE8M0Floor : ScaleKind::kE8M0Up;
  TORCH_CHECK_VALUE(rule == "nearest" || rule == "fp8_exact", "scale rule is ", rule,
                    "; wanted nearest or fp8_exact");
  if (name == "e4m3") return rule == "nearest" ? ScaleKind::kE4M3 : ScaleKind::kE4M3Exact;
  TORCH_CHECK_VALUE(false, "scale is ", name, "; wanted fp32, e8m0 or e4m3");
}

ScaleChoice choice_of(c10::string_view four_over_six) {
  if (four_over_six == "off") return ScaleChoice::kLargest;
  if (four_over_six == "mse") return ScaleChoice::kMse;
  if (four_over_six == "mae") return ScaleChoice::kMae;
  TORCH_CHECK_VALUE(false, "four_over_six is ", four_over_six, "; wanted off, mse or mae");
}

// Shift that maps an index to its block; 31 for the whole extent (0).
int32_t log2_of(int64_t size) {
  int32_t log2 = 0;
  while (size >> log2 > 1) ++log2;
  return size == 0 ? 31 : log2;
}

template <class Int>
Int blocks_of(const Int& extent, int64_t block) {
  return (extent + (block - 1)) / block;
}

template <class Int>
Int padded(const Int& extent, int64_t multiple) {
  return blocks_of(extent, multiple) * multiple;
}

using Symbols = std::vector<c10::SymInt>;

// Describe the results of `quantize` in one direction: sizes of data, scale and amax; whether scales are bytes (else fp32),
// sizes of the tensor amax, none without one; and whether there is an amax. run: of `quantize_anchored`, whose scales are fp32, one
// per run.
std::tuple<Symbols, Symbols, Symbols, bool, Symbols, bool> encoding_shapes(
    int64_t packed, bool columnwise, c10::SymInt rows, c10::SymInt cols, c10::SymInt row0,
    std::optional<int64_t> run) {
  const EncodingSpec spec = unpack_encoding(packed, 0.0, "encoding");
  TORCH_CHECK_VALUE(spec.present(),
                    "encoding is 0: a direction that is not quantized has no buffers");
  const EncodingSizes<c10::SymInt> s = encoding_sizes(spec, columnwise, rows, cols, row0);
  const Symbols data = {s.data_rows, s.data_cols}, amax = {s.scale_rows, s.scale_cols};
  if (run.has_value()) {
    const EncodingSpec line = runs_of(spec, *run);
    const EncodingSizes<c10::SymInt> of_runs = encoding_sizes(line, columnwise, rows, cols, row0);
    const Symbols grid = {of_runs.scale_rows, of_runs.scale_cols};
    const Symbols by_run = {of_runs.stored_blocks, of_runs.stored_lines}, by_tile = {of_runs.stored_lines, of_runs.stored_blocks};
    const bool is_compact = line.scale_layout == ScaleLayout::kCompact;
    return {data, is_compact ? grid : line.outer == 1 ? by_run : by_tile, grid, false, {}, false};
  }
  const Symbols scale = spec.scale_layout == ScaleLayout::kCompact ? amax : Symbols{s.scale_numel};
  const Symbols tensor_amax = !spec.two_level() ? Symbols{} : Symbols{spec.by_line ? s.stored_lines : c10::SymInt(1)};
  return {data, scale, amax, spec.stored_in_bytes(), tensor_amax, spec.whole()};
}

}  // namespace

int64_t pack_encoding(c10::string_view element, c10::string_view scale, bool pow2,
                      c10::string_view scale_rounding, c10::string_view scale_rule, int64_t outer,
                      int64_t contraction, bool stochastic, bool rotated, bool transposed,
                      int64_t scale_layout, c10::string_view four_over_six, c10::string_view scale_per) {
  TORCH_CHECK_VALUE(scale_per == "tensor" || scale_per == "row", "scale_per is ", scale_per,
                    "; wanted tensor or row");
  return kElement.holding(static_cast<int64_t>(element_of(element))) |
         kScale.holding(static_cast<int64_t>(scale_kind_of(scale, pow2, scale_rounding, scale_rule))) |
         kOuter.holding(outer) | kContraction.holding(contraction) |
         kStochastic.holding(stochastic) | kRotated.holding(rotated) |
         kTransposed.holding(transposed) | kScaleLayout.holding(scale_layout) |
         kChoice.holding(static_cast<int64_t>(choice_of(four_over_six))) |
         kByLine.holding(scale_per == "row");
}

EncodingSpec unpack_encoding(int64_t packed, double eps, const char* name) {
  EncodingSpec s = {};
  if (packed == 0) return s;
  const int32_t element = kElement.of(packed), scale = kScale.of(packed),
                layout = kScaleLayout.of(packed), choice = kChoice.of(packed);
  TORCH_CHECK_VALUE(packed > 0 && packed >> kBits == 0 && element >= 1 && element <= 5 &&
                        scale <= 5 && choice <= 2,
                    name, " is ", packed, ": no encoding (see pack_encoding)");
  s.element = static_cast<Element>(element), s.scale = static_cast<ScaleKind>(scale);
  s.outer = kOuter.of(packed), s.contraction = kContraction.of(packed);
  s.stochastic = kStochastic.of(packed), s.rotated = kRotated.of(packed),
  s.transposed = kTransposed.of(packed), s.by_line = kByLine.of(packed);
  s.scale_layout = static_cast<ScaleLayout>(layout), s.choice = static_cast<ScaleChoice>(choice);
  const int32_t c = s.contraction;
  const bool in_bytes = s.scale >= ScaleKind::kE8M0Up;
  const bool known = in_bytes ? c == 16 || c == 32 : c == 0 || c == 128;
  TORCH_CHECK_VALUE(known && (s.outer == 1 || s.outer == c), name, " has blocks of (", s.outer,
                    ", ", c, ") with scale kind ", scale, ": no kernel");
  const bool of_32 = s.scale == ScaleKind::kE8M0Up && s.outer == 1 && c == 32;
  TORCH_CHECK_VALUE(s.four_bit() ? s.two_level() || of_32 : !s.two_level(), name,
                    ": 4-bit elements go with two-level scales, or with e8m0 scales of (1, 32) blocks");
  TORCH_CHECK_VALUE(!s.chooses() || (s.two_level() && c == 16 && !s.stochastic), name,
                    ": four_over_six chooses two-level scales of blocks of 16, rounded to nearest");
  TORCH_CHECK_VALUE(!s.by_line || (s.two_level() && c == 16 && s.outer == 1 && !s.operand()), name,
                    ": second-level scales per row are of e2m1 in blocks of (1, 16)");
  TORCH_CHECK_VALUE(!s.six_bit() || (of_32 && !s.transposed && s.scale_layout == ScaleLayout::kCompact), name,
                    ": 6-bit elements go with e8m0 scales of (1, 32) blocks, as compact codes");
  TORCH_CHECK_VALUE(!s.operand() || (s.exact() && c == 16), name, ": operands are made of e2m1 in ",
                    "blocks of 16 whose scales are fp8_exact");
  TORCH_CHECK_VALUE(!s.rotated || (s.four_bit() && s.outer == 1), name,
                    ": rotation is for 4-bit blocks of one line");
  s.eps = static_cast<float>(eps);
  constexpr float kLargest[] = {448.0f, 57344.0f, 6.0f, 7.5f, 28.0f};
  s.max = kLargest[element - 1];
  s.inverse_max = 1.0f / s.max;
  s.tensor_max = s.two_level() ? s.max * (s.exact() ? 384.0f : 448.0f) : 0.0f;
  s.outer_log2 = log2_of(s.outer), s.contraction_log2 = log2_of(s.contraction);
  return s;
}

int64_t compact_encoding(int64_t packed) {
  for (const Field& f : {kTransposed, kScaleLayout}) packed &= ~(f.most() << f.first);
  return packed;
}

EncodingSpec runs_of(const EncodingSpec& spec, int64_t run) {
  TORCH_CHECK_VALUE(run == kOfTensor || run == kOfTile || (run >= 0 && run % kTile == 0 && (run & (run - 1)) == 0), "anchor run is ", run,
                    "; wanted 0 (the whole contraction), a power of two of ", kTile, " or more, ", kOfTensor,
                    " (the tensor), or ", kOfTile, " (a tile)");
  EncodingSpec line = spec;
  line.scale = ScaleKind::kFp32Pow2;
  if (run <= 0 || line.scale_layout != ScaleLayout::kHopper) line.scale_layout = ScaleLayout::kCompact;
  if (run == kOfTensor) {
    line.outer = line.contraction = 0, line.outer_log2 = line.contraction_log2 = log2_of(0);
    return line;
  }
  if (run == kOfTile) {
    line.outer = line.contraction = kTile, line.outer_log2 = line.contraction_log2 = log2_of(kTile);
    line.scale_layout = ScaleLayout::kHopper;
    return line;
  }
  line.outer = 1, line.outer_log2 = 0;
  line.contraction = static_cast<int32_t>(run), line.contraction_log2 = log2_of(run);
  return line;
}

template <class Int>
EncodingSizes<Int> encoding_sizes(const EncodingSpec& s, bool columnwise, const Int& rows, const Int& cols,
                                  const Int& row0) {
  const bool is_of_any_rows =
      !s.transposed && s.scale_layout == ScaleLayout::kCompact && !(s.rotated && columnwise);
  TORCH_CHECK_VALUE(is_of_any_rows || row0 % kTile == 0, "a shard from row ", row0,
                    " has compact storages that are not rotated along the rows; gather it first");
  TORCH_CHECK_VALUE(columnwise || !s.transposed, "rowwise codes are not transposed");
  EncodingSizes<Int> g = {};
  const auto filled = [&](const Int& n) { return s.rotated ? padded(n, kRotationBlock) : n; };
  g.rows = columnwise ? filled(rows) : rows, g.cols = columnwise ? cols : filled(cols);
  g.data_rows = s.transposed ? g.cols : g.rows;
  g.data_cols = bytes_of(s, s.transposed ? g.rows : g.cols);
  const int64_t row_block = columnwise ? s.contraction : s.outer,
                col_block = columnwise ? s.outer : s.contraction;
  g.scale_rows = row_block ? blocks_of(Int(row0 % row_block + g.rows), row_block) : Int(1);
  g.scale_cols = col_block ? blocks_of(g.cols, col_block) : Int(1);
  g.stored_lines = columnwise ? g.scale_cols : g.scale_rows,
  g.stored_blocks = columnwise ? g.scale_rows : g.scale_cols;
  g.scale_numel = g.stored_lines * g.stored_blocks;
  if (s.scale_layout == ScaleLayout::kCompact || s.whole()) return g;
  if (s.operand()) {
    g.scale_numel = 1;
    return g;
  }
  if (s.stored_in_bytes()) {
    const Int lines = columnwise ? g.cols : g.rows, blocks = s.spread() ? g.stored_blocks * 4 : padded(g.stored_blocks, 4);
    if (s.scale_layout == ScaleLayout::kBlackwell) g.scale_numel = padded(lines, 128) * blocks;
    return g;
  }
  Int& longer = s.outer == 1 ? g.stored_lines : g.stored_blocks;
  longer = padded(longer, 4);
  g.scale_numel = g.stored_lines * g.stored_blocks;
  return g;
}

template EncodingSizes<int64_t> encoding_sizes(const EncodingSpec&, bool, const int64_t&, const int64_t&,
                                               const int64_t&);
template EncodingSizes<c10::SymInt> encoding_sizes(const EncodingSpec&, bool, const c10::SymInt&,
                                                   const c10::SymInt&, const c10::SymInt&);

void register_encoding(torch::Library& m) {
  m.def(
      "pack_encoding(str element, str scale, bool pow2, str scale_rounding, str scale_rule, int outer, "
      "int contraction, bool stochastic, "
      "bool rotated, bool transposed, int scale_layout, str four_over_six='off', str scale_per='tensor') -> int",
      pack_encoding, compliant());
  m.def(
      "encoding_shapes(int encoding, bool columnwise, SymInt rows, SymInt cols, SymInt row0=0, "
      "int? run=None) -> "
      "(SymInt[] data, SymInt[] scale, SymInt[] amax, bool byte_scales, SymInt[] tensor_amax, bool "
      "has_amax)",
      encoding_shapes, compliant());
}

}  // namespace fsdp_quant
