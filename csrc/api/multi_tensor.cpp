// SPDX-License-Identifier: Apache-2.0
// Host side of multi-tensor launches: shards of a gather, optimizer masters, expert matrices.
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/ops/as_strided_native.h>
#include <torch/library.h>

#include "api/launch.h"
#include "api/optim.h"

namespace fsdp_quant {

namespace {

using MaybeTensors = c10::List<MaybeTensor>;

// [rows, cols] of every tensor; a stack [E, rows, cols] is E of them.
std::vector<at::Tensor> matrices_of(at::TensorList stacks) {
  std::vector<at::Tensor> x;
  for (const at::Tensor& t : stacks) {
    if (t.dim() != 3) {
      x.push_back(t);
      continue;
    }
    const auto sizes = t.sizes().slice(1), strides = t.strides().slice(1);
    for (int64_t e = 0; e < t.size(0); ++e)
      x.push_back(at::native::as_strided_tensorimpl(t, sizes, strides, t.storage_offset() + e * t.stride(0)));
  }
  return x;
}

Input check_group(at::TensorList x, at::IntArrayRef row0, bool round_to_bf16) {
  TORCH_CHECK_VALUE(!x.empty(), "the group has no tensor");
  TORCH_CHECK_VALUE(row0.size() == x.size(), "got ", x.size(), " tensors and ", row0.size(), " row0");
  const Input input = input_of(x[0], round_to_bf16);
  TORCH_CHECK_VALUE(input == Input::kBF16 || input == Input::kF32AsBF16, "a group is bfloat16, or float32 through ",
                    "bfloat16; got ", x[0].scalar_type());
  for (const at::Tensor& t : x) {
    check_cuda(t, "x");
    TORCH_CHECK_VALUE(t.dim() == 2 && t.stride(1) == 1, "x has shape ", t.sizes(), " and strides ", t.strides(),
                      "; a group's tensors are [rows, cols] with contiguous rows");
    TORCH_CHECK_VALUE(t.scalar_type() == x[0].scalar_type() && t.device() == x[0].device(), "a group has one dtype and ",
                      "device; got ", t.scalar_type(), " on ", t.device(), " and ", x[0].scalar_type(), " on ", x[0].device());
  }
  return input;
}

// Quantize all tensors in one launch. buffers_of(i, data bytes, scale bytes): the buffers of tensor i.
template <class BuffersOf>
void encode_group(at::TensorList x, int64_t encoding, bool columnwise, double eps, at::IntArrayRef row0,
                  const MaybeTensors& amax, const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record,
                  bool round_to_bf16, BuffersOf buffers_of) {
  const Input input = check_group(x, row0, round_to_bf16);
  EncodingSpec specs[2] = {};
  const EncodingSpec& spec = specs[columnwise] = unpack_encoding(encoding, eps, "side");
  TORCH_CHECK_VALUE(!spec.stochastic && !spec.rotated && !spec.transposed && !spec.by_line,
                    "a group is rounded to nearest, not rotated, and compact, without scales per row");
  TORCH_CHECK_VALUE(amax.size() == x.size() && tensor_amax.size() == x.size(), "amax, tensor_amax and offsets ",
                    "need an entry for each tensor");
  const bool delayed = enc.size() > 0;
  TORCH_CHECK_VALUE(!delayed || (enc.size() == x.size() && record.size() == x.size() && spec.whole_tensor()),
                    "enc and record (delayed scaling) go with one scale a tensor, an entry for each");
  const c10::cuda::CUDAGuard guard(x[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  QuantizeGroup<Launch<kMultiTensorCapacity>> launch(
      specs, input, kEncode, [&](const auto& table) { return launch_quantize_multi_tensor(table, stream); });
  for (size_t i = 0; i < x.size(); ++i) {
    check_cut(spec, columnwise, row0[i]);
    const Geometry g = geometry_of(spec, columnwise, x[i].size(0), x[i].size(1), row0[i]);
    // An empty shard still has a scale if the scale covers every row.
    if (x[i].numel() == 0 && (!spec.whole() || g.scale_rows * g.scale_cols == 0)) continue;
    EncodingBuffers both[2] = {}, &b = both[columnwise];
    std::tie(b.data, b.scale) =
        buffers_of(i, g.data_rows * g.data_cols, g.scale_rows * g.scale_cols * (spec.byte_scales() ? 1 : 4));
    b.vector_store = stores_vectors(spec, b.data, g);
    set_geometry(b, g, columnwise);
    b.amax = optional_buffer<float>(amax.get(i), "amax", x[0], g.scale_rows * g.scale_cols);
    b.tensor_amax = optional_buffer<float>(tensor_amax.get(i), "tensor_amax", x[0], 1);
    b.amax_given = b.amax != nullptr, b.tensor_amax_given = b.tensor_amax != nullptr;
    TORCH_CHECK_VALUE((!spec.whole() || b.amax_given) && (!spec.two_level() || b.tensor_amax_given), "tensor ", i,
                      " has a scale that spans more than a tile; pass its amax (statistics_group)");
    if (delayed) {
      b.enc = optional_buffer<float>(enc.get(i), "enc", x[0], 1);
      check_buffer(record[i], "record", x[0], at::kFloat, record[i].numel());
      b.record = record[i].numel() > 0 ? record[i].mutable_data_ptr<float>() : nullptr;
    }
    launch.add(x[i], row0[i], both);
  }
  launch.flush();
}

using DataAndScale = std::tuple<uint8_t*, void*>;

// Write to slices of `staging`; offsets are in bytes, multiples of 16.
void quantize_group(
    at::TensorList stacks, int64_t encoding, bool columnwise, double eps, at::IntArrayRef row0, const MaybeTensors& amax,
    const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record, const at::Tensor& staging,
    at::IntArrayRef data_offset, at::IntArrayRef scale_offset, bool round_to_bf16) {
  const std::vector<at::Tensor> x = matrices_of(stacks);
  TORCH_CHECK_VALUE(!x.empty(), "the group has no tensor");
  TORCH_CHECK_VALUE(data_offset.size() == x.size() && scale_offset.size() == x.size(), "amax, tensor_amax and offsets ",
                    "need an entry for each tensor");
  check_buffer(staging, "staging", x[0], at::kByte, staging.numel());
  auto slices = [&](size_t i, int64_t data_bytes, int64_t scale_bytes) {
    TORCH_CHECK_VALUE(
        data_offset[i] >= 0 && data_offset[i] + data_bytes <= staging.numel() && scale_offset[i] >= 0 &&
            scale_offset[i] + scale_bytes <= staging.numel() && scale_offset[i] % 4 == 0,
        "tensor ", i, " writes ", data_bytes, " bytes at ", data_offset[i], " and ", scale_bytes, " at ", scale_offset[i],
        "; staging has ", staging.numel(), " bytes");
    uint8_t* start = staging.mutable_data_ptr<uint8_t>();
    return DataAndScale(start + data_offset[i], start + scale_offset[i]);
  };
  encode_group(x, encoding, columnwise, eps, row0, amax, tensor_amax, enc, record, round_to_bf16, slices);
}

// Write to the data and scale of each tensor.
void quantize_group_out(
    at::TensorList stacks, int64_t encoding, bool columnwise, double eps, at::IntArrayRef row0, const MaybeTensors& amax,
    const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record, at::TensorList data,
    at::TensorList scale, bool round_to_bf16) {
  const std::vector<at::Tensor> x = matrices_of(stacks);
  TORCH_CHECK_VALUE(data.size() == x.size() && scale.size() == x.size(), "got ", data.size(), " data and ", scale.size(),
                    " scales; wanted one for each of ", x.size(), " tensors");
  auto given = [&](size_t i, int64_t data_bytes, int64_t scale_bytes) {
    check_buffer(data[i], "data", x[0], at::kByte, data_bytes);
    check_buffer(scale[i], "scale", x[0], scale[i].scalar_type(), scale_bytes / scale[i].element_size());
    TORCH_CHECK_VALUE(scale[i].nbytes() == static_cast<size_t>(scale_bytes), "scale ", i, " has ", scale[i].nbytes(),
                      " bytes; wanted ", scale_bytes);
    return DataAndScale(data[i].mutable_data_ptr<uint8_t>(), scale[i].mutable_data_ptr());
  };
  encode_group(x, encoding, columnwise, eps, row0, amax, tensor_amax, enc, record, round_to_bf16, given);
}

// Block amaxes of all tensors, and tensor amaxes of two-level formats, in one launch.
std::vector<at::Tensor> statistics_group(
    at::TensorList stacks, int64_t encoding, bool columnwise, at::IntArrayRef row0, bool round_to_bf16) {
  const std::vector<at::Tensor> x = matrices_of(stacks);
  const Input input = check_group(x, row0, round_to_bf16);
  const EncodingSpec spec = unpack_encoding(encoding, 0.0, "side");
  TORCH_CHECK_VALUE(!spec.rotated && !spec.by_line, "a group is not rotated, without scales per row");
  const c10::cuda::CUDAGuard guard(x[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  ZeroedWorkspace workspace;
  std::vector<std::pair<int64_t, int64_t>> offsets;
  std::vector<Geometry> geometry;
  for (size_t i = 0; i < x.size(); ++i) {
    geometry.push_back(geometry_of(spec, columnwise, x[i].size(0), x[i].size(1), row0[i]));
    offsets.emplace_back(workspace.reserve(geometry[i].scale_rows * geometry[i].scale_cols),
                        spec.two_level() ? workspace.reserve(1) : -1);
  }
  workspace.allocate(x[0], stream);
  EncodingSpec specs[2] = {};
  specs[columnwise] = spec;
  QuantizeGroup<Launch<kMultiTensorCapacity>> launch(
      specs, input, kStatistics, [&](const auto& table) { return launch_quantize_multi_tensor(table, stream); });
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < x.size(); ++i) {
    EncodingBuffers both[2] = {}, &b = both[columnwise];
    set_geometry(b, geometry[i], columnwise);
    b.amax = workspace.at(offsets[i].first);
    result.push_back(workspace.slice(offsets[i].first, {geometry[i].scale_rows, geometry[i].scale_cols}));
    if (spec.two_level()) {
      b.tensor_amax = workspace.at(offsets[i].second);
      result.push_back(workspace.slice(offsets[i].second, {1}));
    }
    if (x[i].numel() > 0) launch.add(x[i], row0[i], both);
  }
  launch.flush();
  return result;
}

// Step Adam on fp32 masters and quantize the new masters, rounded to bf16, into `out`: data and scale per direction (plain
// 8-bit codes whose scales need no earlier pass), or with `statistics` the amax and, for two-level formats, the tensor_amax,
// both zeroed by the caller; an empty amax is skipped. A skipped step quantizes the old masters.
void adam_group(
    at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::IntArrayRef scalar_row,
    const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf, int64_t row, int64_t col,
    double row_eps, double col_eps, at::IntArrayRef row0, bool statistics, at::TensorList out) {
  const AdamTensors tensors(master, grad, first, second, scalar_row, scalars, grad_scale, found_inf);
  TORCH_CHECK_VALUE(tensors.moments_dtype != at::kByte,
                    "moments are 8-bit codes; adam_group supports float32 and bfloat16");
  check_group(master, row0, true);
  const EncodingSpec spec[2] = {unpack_encoding(row, row_eps, "row"), unpack_encoding(col, col_eps, "col")};
  size_t per_master = 0;
  for (const EncodingSpec& s : spec) {
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(!s.stochastic && !s.rotated && !s.transposed && !s.by_line && (statistics || (!s.whole() && s.bits() == 8)),
                      "Adam's kernel makes compact 8-bit codes, rounded to nearest, of scales that need no pass over the "
                      "tensor before, or statistics that are not of rotated values");
    per_master += statistics ? 1 + s.two_level() : 2;
  }
  TORCH_CHECK_VALUE(per_master > 0 && out.size() == per_master * master.size(), "out has ", out.size(), " tensors; wanted ",
                    per_master, " for each of ", master.size(), " masters");
  const c10::cuda::CUDAGuard guard(master[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  QuantizeGroup<AdamQuantizeLaunch> launch(spec, Input::kF32AsBF16, statistics ? kStatistics : kEncode,
                                               [&](const AdamQuantizeLaunch& table) {
                                                 return launch_adam_quantize(table, tensors.grad_dtype == at::kBFloat16,
                                                                             tensors.moments_dtype == at::kBFloat16, stream);
                                               });
  launch.table().step = tensors.step;
  size_t at = 0;
  for (size_t i = 0; i < master.size(); ++i) {
    const AdamTensor t = tensors.at(i);
    EncodingBuffers buffers[2] = {};
    for (int d = 0; d < 2; ++d) {
      const EncodingSpec& s = spec[d];
      if (!s.present()) continue;
      const Geometry g = geometry_of(s, d, master[i].size(0), master[i].size(1), row0[i]);
      EncodingBuffers& b = buffers[d];
      set_geometry(b, g, d);
      const int64_t scales = g.scale_rows * g.scale_cols;
      auto next_buffer = [&](const char* name, at::ScalarType dtype, int64_t numel) {
        check_buffer(out[at], name, master[0], dtype, numel);
        return out[at++].mutable_data_ptr();
      };
      if (statistics) {
        const bool is_wanted = out[at].numel() != 0;
        b.amax = static_cast<float*>(next_buffer("amax", at::kFloat, is_wanted ? scales : 0));
        if (!is_wanted) b.amax = nullptr;
        if (s.two_level()) b.tensor_amax = static_cast<float*>(next_buffer("tensor_amax", at::kFloat, 1));
      } else {
        b.data = static_cast<uint8_t*>(next_buffer("data", at::kByte, g.data_rows * g.data_cols));
        b.scale = next_buffer("scale", s.stored_in_bytes() ? at::kByte : at::kFloat, scales);
        b.vector_store = stores_vectors(s, b.data, g);
      }
    }
    if (t.numel == 0) continue;
    const int32_t place = launch.add(master[i], row0[i], buffers);
    launch.table().source[place] = {t.grad, t.first, t.second, t.row, t.vectors && master[i].size(1) % 4 == 0};
  }
  launch.flush();
}

}  // namespace

Encodings encode_stacked(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, bool round_to_bf16,
                         const StackedHistories (&histories)[2], bool tiles) {
  check_cuda(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 3 && x.numel() > 0 && (x.stride(2) == 1 || x.size(2) == 1), "x has shape ", x.sizes(),
                    " and strides ", x.strides(), "; wanted matrices [count, rows, cols] that are not empty, of contiguous rows");
  const int64_t count = x.size(0);
  Launch<1> one = {};
  const EncodingSpec(&spec)[2] = one.spec;
  one.spec[0] = row, one.spec[1] = col;
  Encodings encoded;
  Geometry g[2];
  ZeroedWorkspace workspace;
  int64_t amax_at[2] = {-1, -1};
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = spec[d];
    if (!s.present()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(s.bits() == 8 && !s.stochastic, "matrices are stacked in 8 bits, rounded to nearest");
    g[d] = geometry_of(s, d, x.size(1), x.size(2), 0);
    encoded[d].data = new_empty(x, {count, g[d].data_rows, g[d].data_cols}, at::kByte);
    const EncodingSpec stored = tiles ? runs_of(s, kOfTile) : s;
    if (tiles) {
      const Geometry of_tiles = geometry_of(stored, d, x.size(1), x.size(2), 0);
      g[d].compact = of_tiles.compact, g[d].stored = of_tiles.stored, g[d].scale_numel = of_tiles.scale_numel;
    }
    const int64_t scales = stored.scale_layout == ScaleLayout::kCompact ? g[d].scale_rows * g[d].scale_cols : g[d].scale_numel;
    encoded[d].scale = new_empty(x, {count, scales}, stored.stored_in_bytes() ? at::kByte : at::kFloat);
  }
  bool delayed = false;
  for (const StackedHistories& of : histories) {
    const auto is_of_all = [&](at::TensorList list) { return list.empty() || static_cast<int64_t>(list.size()) == count; };
    TORCH_CHECK_VALUE(is_of_all(of.enc) && is_of_all(of.record), "got ", of.enc.size(), " factors and ", of.record.size(),
                      " histories; wanted one of each for ", count, " matrices, or none");
    for (const at::Tensor& enc : of.enc) check_buffer(enc, "enc", x, at::kFloat, 1);
    for (const at::Tensor& record : of.record) check_buffer(record, "record", x, at::kFloat, record.numel());
    delayed = delayed || !of.enc.empty();
  }
  const Input input = input_of(x, round_to_bf16);
  if (input != Input::kBF16 && input != Input::kF32AsBF16) {  // multi-tensor kernels hold bf16
    const MaybeTensor none;
    for (int64_t i = 0; i < count; ++i) {
      const auto enc = [&](int d) { return histories[d].enc.empty() ? none : MaybeTensor(histories[d].enc[i]); };
      const auto record = [&](int d) { return histories[d].record.empty() ? nullptr : &histories[d].record[i]; };
      const MaybeTensor encs[2] = {enc(0), enc(1)};
      const GivenAmaxes unknown[2] = {{none, none, encs[0], none, record(0)}, {none, none, encs[1], none, record(1)}};
      Encodings out;
      for (int d = 0; d < 2; ++d)
        if (spec[d].present()) out[d].data = encoded[d].data.select(0, i), out[d].scale = encoded[d].scale.select(0, i);
      encode(x.select(0, i), row, col, unknown, 0, round_to_bf16, false, &out);
    }
    return encoded;
  }
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const bool shares_codes_transposed = can_share_codes_transposed(spec, one.tensors[0].buffers);  // one amax for both
  for (int d = 0; d < 2; ++d) {
    if (!spec[d].present() || !spec[d].whole()) continue;
    amax_at[d] =
        d == 1 && shares_codes_transposed ? amax_at[0] : workspace.reserve(count * g[d].scale_rows * g[d].scale_cols);
  }
  workspace.allocate(x, stream);
  TensorArgs matrix = tensor_args(x.select(0, 0), 0);  // and its successors
  const int64_t matrix_bytes = x.stride(0) * x.element_size();
  matrix.vector_load = matrix.vector_load && matrix_bytes % 16 == 0;
  for (const Phase phase : {kStatistics, kEncode}) {
    EncodingSpec asked[2] = {row, col};
    for (int d = 0; d < 2; ++d)
      if (phase == kStatistics && (amax_at[d] < 0 || (d == 1 && shares_codes_transposed))) asked[d].element = Element::kNone;
    if (!asked[0].present() && !asked[1].present()) continue;
    QuantizeGroup<Launch<kMultiTensorCapacity>> launch(
        asked, input, phase, [&](const auto& table) { return launch_quantize_multi_tensor(table, stream); });
    launch.table().shares_codes_transposed = shares_codes_transposed && !delayed;
    launch.table().in_tile = launch.table().of_codes = tiles;
    for (int64_t i = 0; i < count; ++i) {
      EncodingBuffers both[2] = {};
      for (int d = 0; d < 2; ++d) {
        if (!asked[d].present()) continue;
        EncodingBuffers& b = both[d];
        set_geometry(b, g[d], d);
        if (amax_at[d] >= 0) b.amax = workspace.at(amax_at[d]) + i * g[d].scale_rows * g[d].scale_cols;
        b.amax_given = phase == kEncode && b.amax != nullptr;
        b.data = encoded[d].data.mutable_data_ptr<uint8_t>() + i * encoded[d].data.stride(0);
        b.scale = static_cast<uint8_t*>(encoded[d].scale.mutable_data_ptr()) +
                  i * encoded[d].scale.stride(0) * encoded[d].scale.element_size();
        b.vector_store = stores_vectors(spec[d], b.data, g[d]);
        if (phase == kEncode && !histories[d].enc.empty()) b.enc = histories[d].enc[i].const_data_ptr<float>();
        if (phase == kEncode && !histories[d].record.empty()) b.record = histories[d].record[i].mutable_data_ptr<float>();
      }
      TensorArgs t = matrix;
      t.x = static_cast<const uint8_t*>(matrix.x) + i * matrix_bytes;
      launch.add(t, both);
    }
    launch.flush();
  }
  return encoded;
}

void register_multi_tensor(torch::Library& m) {
  m.def(
      "quantize_group(Tensor[] x, int side, bool columnwise, float eps, int[] row0, Tensor?[] amax, "
      "Tensor?[] tensor_amax, Tensor?[] enc, Tensor(b!)[] record, Tensor(a!) staging, int[] data_offset, int[] scale_offset, bool through_bf16) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_group), compliant());
  m.def(
      "quantize_group_out(Tensor[] x, int side, bool columnwise, float eps, int[] row0, Tensor?[] amax, "
      "Tensor?[] tensor_amax, Tensor?[] enc, Tensor(c!)[] record, Tensor(a!)[] data, Tensor(b!)[] scale, "
      "bool through_bf16) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_group_out), compliant());
  m.def(
      "statistics_group(Tensor[] x, int side, bool columnwise, int[] row0, bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, statistics_group), compliant());
  m.def(
      "adam_group(Tensor(a!)[] master, Tensor[] grad, Tensor(b!)[] first, Tensor(c!)[] second, int[] scalar_row, "
      "Tensor scalars, Tensor? grad_scale, Tensor? found_inf, int row, int col, float row_eps, float col_eps, int[] row0, "
      "bool statistics, Tensor(d!)[] out) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, adam_group), compliant());
}

}  // namespace fsdp_quant
