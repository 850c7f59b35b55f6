// SPDX-License-Identifier: Apache-2.0
// Host side of dequantize, anchor_codes, transposes and swizzles: check, allocate, launch.
#include "api/layout.h"

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/launch.h"
#include "layout/layout.h"
#include "layout/scalars.h"

namespace fsdp_quant {

at::Tensor decode(
    const at::Tensor& data, const MaybeTensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    int64_t cols, int64_t row0, at::ScalarType dtype, const Alpha* alpha) {
  check_cuda(data, "data");
  const EncodingSpec spec = unpack_encoding(encoding, 0.0, "side");
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "dtype is ", dtype,
                    "; wanted float32, bfloat16 or float16");
  TORCH_CHECK_VALUE(data.dim() == 2, "data has shape ", data.sizes(), "; wanted [rows, row bytes]");
  const int64_t rows = data.size(0), row_bytes = bytes_of(spec, cols);
  check_buffer(data, "data", data, at::kByte, rows * row_bytes);
  const c10::cuda::CUDAGuard guard(data.device());
  const at::Tensor out = new_empty(data, {rows, cols}, dtype);
  if (out.numel() == 0) return out;
  Dequantize a = {};
  at::Tensor line_scale;
  a.data = data.const_data_ptr<uint8_t>();
  a.out = out.mutable_data_ptr();
  TORCH_CHECK_VALUE(rows < (int64_t{1} << 31) && cols < (int64_t{1} << 31), "[", rows, ", ", cols, "] is too large");
  a.rows = static_cast<int32_t>(rows), a.cols = static_cast<int32_t>(cols);
  const int32_t row_block = columnwise ? spec.contraction : spec.outer;
  a.row_log2 = columnwise ? spec.contraction_log2 : spec.outer_log2;
  a.col_log2 = columnwise ? spec.outer_log2 : spec.contraction_log2;
  a.shift = row_block ? static_cast<int32_t>(row0 % row_block) : 0;
  a.element = spec.element, a.scale_kind = spec.two_level() ? ScaleKind::kE4M3 : spec.scale;
  a.output = dtype == at::kFloat ? Output::kF32 : dtype == at::kHalf ? Output::kF16 : Output::kBF16;
  a.vectors = is_aligned(a.data, 16) && cols % 8 == 0;
  a.threads = cols <= 64 * 8 ? 64 : 256;
  a.blocks_per_row = static_cast<int32_t>(ceil_div(cols, a.threads * 8));
  if (scale.has_value()) {
    const int64_t block_rows = row_block ? ceil_div(a.shift + rows, row_block) : 1;
    const int64_t block_cols = ((cols - 1) >> a.col_log2) + 1;
    check_buffer(*scale, "scale", data, spec.byte_scales() ? at::kByte : at::kFloat, block_rows * block_cols);
    a.scale = scale->const_data_ptr();
    a.vectors = a.vectors && is_aligned(a.scale, 16);
  }
  if (tensor_amax.has_value()) {
    check_buffer(*tensor_amax, "tensor_amax", data, at::kFloat, !spec.by_line ? 1 : columnwise ? cols : rows);
    if (spec.by_line) {
      line_scale = tensor_decode_scale(*tensor_amax, encoding);
      a.line_scale = line_scale.const_data_ptr<float>(), a.by_row = !columnwise;
    } else {
      a.tensor_amax = tensor_amax->const_data_ptr<float>(), a.tensor_max = spec.tensor_max;
    }
  }
  if (alpha != nullptr) a.alpha = alpha->out, a.factors[0] = alpha->factors[0], a.factors[1] = alpha->factors[1];
  check_launch(launch_dequantize(a, c10::cuda::getCurrentCUDAStream()), "dequantize", out.sizes());
  return out;
}

namespace {

struct AnchorShape {
  int64_t matrices, rows, cols, lines, out_rows, out_cols;
  int64_t scale[2];  // per matrix: [runs, lines], [1, lines], [1, 1], or of tiles [line tiles, tiles of a line]
};

// run: kOfTensor, kOfTile, 0 for a whole line, or a number of elements.
AnchorShape anchor_shape(const at::Tensor& data, int64_t cols, bool columnwise, bool transposed, int64_t run) {
  check_cuda(data, "data");
  const bool stacked = data.dim() == 3;
  TORCH_CHECK_VALUE(stacked || data.dim() == 2, "data has shape ", data.sizes(), "; wanted [rows, row bytes], or matrices of that");
  const int64_t rows = data.size(-2), matrices = stacked ? data.size(0) : 1;
  TORCH_CHECK_VALUE(matrices > 0 && matrices < 1 << 16, "there are ", matrices, " matrices; wanted 1 to 65535");
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - kTile;
  TORCH_CHECK_VALUE(rows < kLargest && cols < kLargest, "[", rows, ", ", cols, "] is too large");
  const int64_t lines = columnwise ? cols : rows;
  TORCH_CHECK_VALUE(matrices == 1 || lines % 4 == 0, "matrices of ", lines, " lines; wanted multiples of 4");
  TORCH_CHECK_VALUE(!stacked || run <= 0, "matrices are anchored by lines, tiles or tensors; got runs of ", run);
  AnchorShape shape = {matrices, rows, cols, lines, transposed ? cols : rows, transposed ? rows : cols, {1, 1}};
  const int64_t length = columnwise ? rows : cols;
  if (run == 0) shape.scale[1] = lines;
  if (run > 0) shape.scale[0] = ceil_div(length, run), shape.scale[1] = ceil_div(lines, 4) * 4;
  if (run == kOfTile) shape.scale[0] = ceil_div(lines, kTile), shape.scale[1] = ceil_div(ceil_div(length, kTile), 4) * 4;
  return shape;
}

// `Element.operand_shift` of formats.py.
int32_t operand_shift(const EncodingSpec& spec) { return spec.bits() == 8 ? 0 : std::ilogb(448.0f / spec.max); }

// Kernel arguments for one tensor; none if it is empty.
std::optional<AnchorCodes> anchor_of(
    const at::Tensor& data, const at::Tensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    bool transposed, int64_t run, int64_t cols, const at::Tensor& out, const at::Tensor& line_scale, uint8_t* parts) {
  const AnchorShape shape = anchor_shape(data, cols, columnwise, transposed, run);
  const EncodingSpec spec = unpack_encoding(encoding, 0.0, "side");
  const bool whole = run == kOfTensor;
  const bool e8m0 = spec.scale == ScaleKind::kE8M0Up || spec.scale == ScaleKind::kE8M0Floor;
  const bool powers = spec.scale == ScaleKind::kFp32Pow2 && spec.outer == kTile && whole;
  const bool two_level = spec.two_level() && !spec.by_line && whole && shape.matrices == 1 && tensor_amax.has_value();
  TORCH_CHECK_VALUE(spec.present() && (powers || two_level || (e8m0 && spec.contraction == 32)), "side is ", encoding,
                    "; wanted e8m0 scales of (1, 32) or (32, 32) blocks, or for a tensor powers of two of (128, 128), or 4-bit codes "
                    "of one matrix with e4m3 scales and a tensor amax");
  const int64_t elements = shape.matrices * shape.rows * shape.cols;
  const EncodingSizes<int64_t> of = encoding_sizes<int64_t>(spec, columnwise, shape.rows, shape.cols, 0);
  check_buffer(data, "data", data, at::kByte, shape.matrices * shape.rows * bytes_of(spec, cols));
  check_buffer(scale, "scale", data, powers ? at::kFloat : at::kByte, shape.matrices * of.scale_rows * of.scale_cols);
  check_buffer(out, "out", data, at::kByte, elements);
  check_buffer(line_scale, "line_scale", data, at::kFloat, shape.matrices * shape.scale[0] * shape.scale[1]);
  if (elements == 0) {
    line_scale.fill_(0x1p-127);
    return std::nullopt;
  }
  AnchorCodes a = {};
  if (two_level) {
    check_buffer(*tensor_amax, "tensor_amax", data, at::kFloat, 1);
    a.tensor_amax = tensor_amax->const_data_ptr<float>(), a.tensor_max = spec.tensor_max;
  }
  if (powers) {
    TORCH_CHECK_VALUE(shape.matrices == 1, "one matrix of (128, 128) blocks at a time is anchored");
    a.powers = scale.const_data_ptr<float>();
  } else {
    a.scale = scale.const_data_ptr<uint8_t>();
  }
  a.data = data.const_data_ptr<uint8_t>(), a.parts = parts;
  a.out = out.mutable_data_ptr<uint8_t>(), a.line_scale = line_scale.mutable_data_ptr<float>();
  a.matrices = static_cast<int32_t>(shape.matrices);
  a.rows = static_cast<int32_t>(shape.rows), a.cols = static_cast<int32_t>(shape.cols);
  a.outer_log2 = spec.outer_log2, a.contraction_log2 = spec.contraction_log2, a.element = spec.element;
  a.run_log2 = runs_of(spec, run).contraction_log2, a.tiles = run == kOfTile;
  a.scale_ld = run > 0 || a.tiles ? static_cast<int32_t>(shape.scale[1]) : 0, a.line_plane = shape.scale[0] * shape.scale[1];
  a.two_level = two_level, a.shift = two_level ? 0 : operand_shift(spec);
  a.columnwise = columnwise, a.transposed = transposed, a.whole = whole;
  a.vector_load = is_aligned(a.data, spec.six_bit() ? 2 : spec.bits()) && shape.cols % 8 == 0;
  a.vector_scales = is_aligned(a.scale, 8) && of.scale_cols % 8 == 0;  // holds for every matrix
  a.vector_store = is_aligned(a.out, 16) && shape.out_cols % (transposed ? 16 : 8) == 0;
  return a;
}

void anchor_group(
    at::TensorList data, at::TensorList scale, at::TensorList tensor_amax, int64_t encoding, bool columnwise, bool transposed,
    bool whole, at::IntArrayRef cols, at::TensorList out, at::TensorList line_scale, int64_t run) {
  const size_t n = data.size();
  TORCH_CHECK_VALUE(n > 0 && scale.size() == n && cols.size() == n && out.size() == n && line_scale.size() == n &&
                        (tensor_amax.empty() || tensor_amax.size() == n),
                    "anchor_group: lists of different lengths");
  check_cuda(data[0], "data");
  const c10::cuda::CUDAGuard guard(data[0].device());
  if (whole) run = kOfTensor;
  if (run > 0 || run == kOfTile) at::_foreach_zero_(line_scale);
  AnchorMultiTensor group = {};
  const at::Tensor parts = new_empty(data[0], {static_cast<int64_t>(whole ? n * kExponentParts : 0)}, at::kByte);
  auto flush = [&] {
    if (group.count > 0) check_launch(launch_anchor_multi_tensor(group, c10::cuda::getCurrentCUDAStream()), "anchor_group");
    group.count = 0;
  };
  for (size_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(data[i].dim() == 2, "data has shape ", data[i].sizes(), "; wanted [rows, row bytes]");
    const MaybeTensor amax = tensor_amax.empty() ? MaybeTensor() : MaybeTensor(tensor_amax[i]);
    const auto one = anchor_of(data[i], scale[i], amax, encoding, columnwise, transposed, run, cols[i], out[i], line_scale[i],
                               whole ? parts.mutable_data_ptr<uint8_t>() + i * kExponentParts : nullptr);
    if (!one.has_value()) continue;
    if (group.count == kAnchorCapacity) flush();
    group.items[group.count++] = *one;
  }
  flush();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> anchor_codes(
    const at::Tensor& data, const at::Tensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    bool transposed, bool whole, int64_t cols, int64_t run) {
  if (whole) run = kOfTensor;
  const AnchorShape shape = anchor_shape(data, cols, columnwise, transposed, run);
  const c10::cuda::CUDAGuard guard(data.device());
  const bool stacked = data.dim() == 3;
  const int64_t sizes[] = {shape.matrices, shape.out_rows, shape.out_cols};
  const int64_t lines[] = {shape.matrices, shape.scale[0], shape.scale[1]};
  const bool is_grid = run > 0 || run == kOfTile;
  const at::Tensor out = new_empty(data, at::IntArrayRef(sizes + !stacked, sizes + 3), at::kByte);
  const at::Tensor line_scale =
      is_grid ? new_empty(data, at::IntArrayRef(lines + !stacked, lines + 3), at::kFloat)
              : new_empty(data, stacked ? at::IntArrayRef({lines[0], lines[2]}) : at::IntArrayRef({lines[2]}), at::kFloat);
  if (is_grid && line_scale.numel() > 0)
    C10_CUDA_CHECK(cudaMemsetAsync(line_scale.mutable_data_ptr(), 0, line_scale.nbytes(), c10::cuda::getCurrentCUDAStream()));
  const at::Tensor parts = new_empty(data, {whole ? shape.matrices * kExponentParts : 0}, at::kByte);
  const auto a = anchor_of(data, scale, tensor_amax, encoding, columnwise, transposed, run, cols, out, line_scale,
                           whole ? parts.mutable_data_ptr<uint8_t>() : nullptr);
  if (a.has_value()) check_launch(launch_anchor_codes(*a, c10::cuda::getCurrentCUDAStream()), "anchor_codes", data.sizes(), " bytes");
  return {out, line_scale};
}

namespace {

at::Tensor dequantize(
    const at::Tensor& data, const MaybeTensor& scale, const MaybeTensor& tensor_amax, int64_t encoding, bool columnwise,
    int64_t cols, int64_t row0, at::ScalarType dtype) {
  return decode(data, scale, tensor_amax, encoding, columnwise, cols, row0, dtype, nullptr);
}

}  // namespace

at::Tensor tensor_decode_scale(const at::Tensor& tensor_amax, int64_t encoding) {
  check_cuda(tensor_amax, "tensor_amax");
  const int64_t count = tensor_amax.numel();
  check_buffer(tensor_amax, "tensor_amax", tensor_amax, at::kFloat, count);
  TORCH_CHECK_VALUE(count < std::numeric_limits<int32_t>::max(), "tensor_amax has shape ", tensor_amax.sizes());
  const c10::cuda::CUDAGuard guard(tensor_amax.device());
  const at::Tensor out = new_empty(tensor_amax, {count}, at::kFloat);
  const EncodingSpec of = unpack_encoding(encoding, 0.0, "side");
  TORCH_CHECK_VALUE(of.two_level(), "side is ", encoding, "; wanted two levels of scales");
  if (count == 0) return out;  // of no line
  check_launch(launch_decode_scales(tensor_amax.const_data_ptr<float>(), of.tensor_max, static_cast<int32_t>(count),
                                    out.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()), "tensor_decode_scale");
  return out;
}

namespace {

struct Sizes {
  int64_t source, out;  // bytes; fp32 scales: elements
};

Sizes sizes_of(Relayout kind, int64_t rows, int64_t cols, int64_t outer) {
  switch (kind) {
    case Relayout::kTransposeBytes:
      return {rows * cols, rows * cols};
    case Relayout::kTransposeNibbles:
      return {rows * ceil_div(cols, 2), cols * ceil_div(rows, 2)};
    default:
      const int64_t blocks = is_by_column(kind) ? rows : cols;
      return {rows * cols, ceil_div(outer, 128) * (is_spread(kind) ? blocks : ceil_div(blocks, 4)) * 512};
  }
}

RelayoutItem item_of(
    const at::Tensor& source, const at::Tensor& out, Relayout kind, int64_t rows, int64_t cols, int64_t outer,
    int64_t outer_block) {
  check_cuda(source, "source");
  const Sizes sizes = sizes_of(kind, rows, cols, outer);
  check_buffer(source, "source", source, is_spread(kind) ? at::kFloat : at::kByte, sizes.source);
  check_buffer(out, "out", source, at::kByte, sizes.out);
  const bool swizzles = is_swizzle(kind);
  const int64_t lines = is_by_column(kind) ? cols : rows;
  TORCH_CHECK_VALUE(!swizzles || (outer_block > 0 && ceil_div(outer, outer_block) == lines), "scales of ", lines,
                    " lines, ", outer_block, " operand rows each, do not make ", outer, " rows");
  RelayoutItem m = {};
  m.source = static_cast<const uint8_t*>(source.const_data_ptr()), m.out = out.mutable_data_ptr<uint8_t>();
  m.rows = rows, m.cols = cols, m.kind = kind;
  m.outer = outer, m.outer_block = static_cast<int32_t>(outer_block);
  const int64_t per = kind == Relayout::kTransposeNibbles ? 2 : 1;
  m.vector_load = is_aligned(m.source, 8) && ceil_div(cols, per) % (8 / per) == 0;
  m.vector_store = is_aligned(m.out, 16) && ceil_div(rows, per) % 16 == 0;
  const int64_t tile_rows = swizzles ? ceil_div(outer, kTile) : ceil_div(rows, kTile);
  m.tile_cols = static_cast<int32_t>(ceil_div(is_by_column(kind) ? rows : cols, kTile));
  TORCH_CHECK_VALUE(tile_rows > 0 && m.tile_cols > 0, "nothing to relayout: [", rows, ", ", cols, "]");
  return m;
}

int64_t tiles_of(const RelayoutItem& m) {
  const int64_t rows = is_swizzle(m.kind) ? m.outer : m.rows;
  return ceil_div(rows, kTile) * m.tile_cols;
}

at::Tensor one(const at::Tensor& source, const at::Tensor& out, const RelayoutItem& item, const char* name) {
  RelayoutLaunch<1> launch = {};
  launch.count = 1, launch.tiles = static_cast<int32_t>(tiles_of(item)), launch.tensors[0] = item;
  check_launch(launch_relayout(launch, c10::cuda::getCurrentCUDAStream()), name);
  return out;
}

}  // namespace

at::Tensor transpose_codes(const at::Tensor& data, int64_t rows, int64_t cols, int64_t bits) {
  check_cuda(data, "data");
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits is ", bits, "; codes have 8 or 4");
  const c10::cuda::CUDAGuard guard(data.device());
  const at::Tensor out = new_empty(data, {cols, bits == 4 ? ceil_div(rows, 2) : rows}, data.scalar_type());
  if (rows * cols == 0) return out;
  const Relayout kind = bits == 4 ? Relayout::kTransposeNibbles : Relayout::kTransposeBytes;
  return one(data, out, item_of(data, out, kind, rows, cols, 0, 1), "transpose_codes");
}

at::Tensor transpose_stack(const at::Tensor& data) {
  check_cuda(data, "data");
  TORCH_CHECK_VALUE(data.dim() == 3 && data.is_contiguous(), "data has shape ", data.sizes(), " and strides ", data.strides(),
                    "; wanted contiguous matrices");
  const c10::cuda::CUDAGuard guard(data.device());
  const int64_t count = data.size(0), rows = data.size(1), cols = data.size(2);
  const at::Tensor out = new_empty(data, {count, cols, rows}, at::kByte);
  if (out.numel() == 0) return out;
  RelayoutItem item = item_of(data[0], out[0], Relayout::kTransposeBytes, rows, cols, 0, 1);
  item.vector_load = item.vector_load && rows * cols % 8 == 0, item.vector_store = item.vector_store && rows * cols % 16 == 0;
  MultiTensorLaunch<RelayoutLaunch<kRelayoutCapacity>> launch("transpose_stack", [](const auto& table) {
    return launch_relayout_multi_tensor(table, c10::cuda::getCurrentCUDAStream());
  });
  for (int64_t e = 0; e < count; ++e, item.source += rows * cols, item.out += rows * cols) launch.add(item, tiles_of(item));
  launch.flush();
  return out;
}

namespace {

at::Tensor swizzle_scales(const at::Tensor& scale, int64_t outer, int64_t outer_block, bool transposed) {
  check_cuda(scale, "scale");
  TORCH_CHECK_VALUE(scale.dim() == 2, "scale has shape ", scale.sizes(), "; wanted [block rows, block cols]");
  const c10::cuda::CUDAGuard guard(scale.device());
  const bool spread = scale.scalar_type() == at::kFloat;
  const Relayout kind = transposed ? (spread ? Relayout::kSpreadTransposed : Relayout::kSwizzleTransposed)
                                   : (spread ? Relayout::kSpread : Relayout::kSwizzle);
  const at::Tensor out = new_empty(scale, {sizes_of(kind, scale.size(0), scale.size(1), outer).out}, at::kByte);
  if (out.numel() == 0) return out;
  const RelayoutItem item = item_of(scale, out, kind, scale.size(0), scale.size(1), outer, outer_block);
  return one(scale, out, item, "swizzle_scales");
}

// Relayout many tensors, kRelayoutCapacity per launch.
void relayout_group(
    at::TensorList source, at::TensorList out, at::IntArrayRef kind, at::IntArrayRef rows, at::IntArrayRef cols,
    at::IntArrayRef outer, at::IntArrayRef outer_block) {
  const size_t n = source.size();
  TORCH_CHECK_VALUE(n > 0 && out.size() == n && kind.size() == n && rows.size() == n && cols.size() == n &&
                        outer.size() == n && outer_block.size() == n, "relayout_group: lists of different lengths");
  check_cuda(source[0], "source");
  const c10::cuda::CUDAGuard guard(source[0].device());
  MultiTensorLaunch<RelayoutLaunch<kRelayoutCapacity>> launch("relayout_group", [](const auto& table) {
    return launch_relayout_multi_tensor(table, c10::cuda::getCurrentCUDAStream());
  });
  for (size_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(kind[i] >= 0 && kind[i] <= 3, "kind is ", kind[i], "; wanted 0 to 3");
    if (rows[i] * cols[i] == 0) continue;
    const RelayoutItem item =
        item_of(source[i], out[i], static_cast<Relayout>(kind[i]), rows[i], cols[i], outer[i], outer_block[i]);
    launch.add(item, tiles_of(item));
  }
  launch.flush();
}

}  // namespace

void register_layout(torch::Library& m) {
  m.def(
      "dequantize(Tensor data, Tensor? scale, Tensor? tensor_amax, int side, bool columnwise, SymInt cols, SymInt row0, "
      "ScalarType dtype) -> Tensor",
      torch::dispatch(c10::DispatchKey::CUDA, dequantize), compliant());
  m.def("anchor_codes(Tensor data, Tensor scale, Tensor? tensor_amax, int side, bool columnwise, bool transposed, bool whole, "
        "SymInt cols, int run=0) -> (Tensor codes, Tensor scale)",
        torch::dispatch(c10::DispatchKey::CUDA, anchor_codes), compliant());
  m.def(
      "anchor_group(Tensor[] data, Tensor[] scale, Tensor[] tensor_amax, int side, bool columnwise, bool transposed, bool whole, "
      "int[] cols, Tensor(a!)[] out, Tensor(b!)[] line_scale, int run=0) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, anchor_group), compliant());
  m.def("tensor_decode_scale(Tensor tensor_amax, int side) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, tensor_decode_scale), compliant());
  m.def("transpose_codes(Tensor data, SymInt rows, SymInt cols, int bits) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, transpose_codes), compliant());
  m.def("swizzle_scales(Tensor scale, SymInt outer, int outer_block, bool transposed) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, swizzle_scales), compliant());
  m.def(
      "relayout_group(Tensor[] source, Tensor(a!)[] out, int[] kind, int[] rows, int[] cols, int[] outer, "
      "int[] outer_block) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, relayout_group), compliant());
}

}  // namespace fsdp_quant
