// SPDX-License-Identifier: Apache-2.0
// Host side of quantize and statistics: check, allocate, select kernels, launch. Never reads device memory.
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "api/launch.h"

namespace fsdp_quant {

namespace {

bool collects(const EncodingSpec& s, const EncodingBuffers& b) {
  return s.present() && ((b.amax != nullptr && !b.amax_given) || (b.tensor_amax != nullptr && !b.tensor_amax_given));
}

// Launch statistics, then encoding; one cooperative launch if there is a barrier. The first launch sums columns.
void launch_phases(Launch<1>& launch, const c10::cuda::CUDAStream& stream, const char* name) {
  const TensorArgs& t = launch.tensors[0];
  EncodingBuffers(&b)[2] = launch.tensors[0].buffers;
  const bool both = fuses(launch.spec, b, launch.input);
  launch.shares_codes_transposed = can_share_codes_transposed(launch.spec, b);
  const bool needs = collects(launch.spec[0], b[0]) || collects(launch.spec[1], b[1]);
  const auto has = [&](int d, bool history) { return launch.spec[d].present() && (b[d].enc != nullptr) == history; };
  const bool delayed = has(0, true) || has(1, true), all_delayed = !has(0, false) && !has(1, false);
  const bool mixed = launch.spec[0].present() && launch.spec[1].present() &&
                     launch.spec[0].four_bit() != launch.spec[1].four_bit();
  const bool operands = launch.spec[0].operand() || launch.spec[1].operand();
  const bool extended = launch.spec[0].extended() || launch.spec[1].extended();
  int processors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, stream.device_index()));
  const bool fits = launch.barrier != nullptr && launch.tiles <= processors && !is_capturing(stream);
  if (needs && both && !mixed && !delayed && !operands && !extended && launch.sources == nullptr && fits) {
    launch.phases = kStatistics | kEncode;
    check_launch(launch_quantize(launch, stream), name, t.rows, " x ", t.cols);
    return;
  }
  launch.barrier = nullptr;
  if (needs) {
    launch.phases = kStatistics;
    Launch<1> statistics = launch;
    if (launch.shares_codes_transposed && b[0].amax != nullptr && b[0].amax == b[1].amax)
      statistics.spec[1].element = Element::kNone;
    const bool of_groups = launch.sources != nullptr;
    if (of_groups && !supports_delayed(launch))  // their encoding computes no amaxes
      for (EncodingBuffers& one : statistics.tensors[0].buffers) one.enc = nullptr;
    check_launch(all_delayed && !of_groups ? launch_first_amax(launch, processors, stream) : launch_quantize(statistics, stream), name, t.rows, " x ", t.cols);
    if (!all_delayed) launch.sums = nullptr;
    launch.reversed = !all_delayed;  // tiles read last are still in L2
  }
  launch.phases = kEncode;
  if ((operands || extended) && launch.sums != nullptr) {  // these kernels sum no columns
    Launch<1> sums = launch;
    sums.phases = kStatistics, sums.spec[0].element = sums.spec[1].element = Element::kNone;
    check_launch(launch_quantize(sums, stream), name, t.rows, " x ", t.cols);
    launch.sums = nullptr;
  }
  if (both && (!extended || fits_fp4(launch))) {
    check_launch(launch_quantize(launch, stream), name, t.rows, " x ", t.cols);
  } else {
    for (int d = 0; d < 2; ++d) {
      if (!launch.spec[d].present()) continue;
      Launch<1> one = launch;
      one.spec[1 - d].element = Element::kNone, one.shares_codes_transposed = false;
      check_launch(launch_quantize(one, stream), name, t.rows, " x ", t.cols);
      launch.sums = nullptr;
    }
  }
  if (delayed && launch.sources == nullptr && !(supports_delayed(launch) && b[0].amax_given))
    check_launch(launch_delayed_scales(launch, stream), name, t.rows, " x ", t.cols);
}

void finish_groups(const Launch<1>& launch, const GivenAmaxes (&known)[2], int64_t groups, cudaStream_t stream) {
  DelayedGroups g = {};
  g.groups = static_cast<int32_t>(groups);
  bool any = false;
  for (int d = 0; d < 2; ++d) {
    if (!launch.spec[d].present()) continue;
    g.spec[d] = launch.spec[d], g.buffers[d] = launch.tensors[0].buffers[d];
    any = any || g.buffers[d].enc != nullptr;
    const at::TensorList records = known[d].records;
    for (size_t e = 0; e < records.size(); ++e) g.record[d][e] = records[e].mutable_data_ptr<float>();
  }
  if (any) check_launch(launch_delayed_scales(g, stream), "quantize");
}

}  // namespace

bool can_encode_gated(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const MaybeTensor (&enc)[2],
                      const GatedInput& gated) {
  Launch<1> launch = {};
  launch.input = input_of(x, false), launch.activation = gated.kind;
  launch.spec[0] = row, launch.spec[1] = col;
  EncodingBuffers(&b)[2] = launch.tensors[0].buffers;
  for (int d = 0; d < 2; ++d)
    if (enc[d].has_value()) b[d].enc = enc[d]->const_data_ptr<float>();
  launch.shares_codes_transposed = can_share_codes_transposed(launch.spec, b);
  return supports_gated(launch) && x.size(1) % 8 == 0 && tensor_args(x, 0).vector_load &&
         tensor_args(gated.up, 0).vector_load;
}

bool can_gate_tokens(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, int64_t row_run, int64_t col_run,
                     const GatedInput& gated, const TokenTables& tokens) {
  Launch<1> launch = {};
  launch.input = input_of(x, false), launch.activation = gated.kind, launch.gradient = gated.gradient;
  launch.spec[0] = row, launch.spec[1] = col;
  launch.of_codes = col_run == kOfTile;
  launch.in_tile = row_run == kTile && (col_run == kTile || col_run == kOfTile);
  const int64_t cols = gated.up.size(1) * (gated.gradient ? 2 : 1);
  return !tokens.order.defined() && supports_gated_tokens(launch) && gated.up.size(1) % 8 == 0 &&
         x.size(0) == gated.up.size(0) && x.size(1) == cols && gated.up.scalar_type() == x.scalar_type() &&
         tensor_args(x, 0).vector_load && tensor_args(gated.up, 0).vector_load;
}

at::Tensor ordered_rows(const at::Tensor& x, const TokenTables* tokens) {
  if (tokens == nullptr || !tokens->order.defined()) return x;
  return at::index_select(x, 0, tokens->order);
}

Encodings encode(const at::Tensor& x, const EncodingSpec& row, const EncodingSpec& col, const GivenAmaxes (&known)[2],
                 int64_t row0, bool round_to_bf16, bool wants_amax, const Encodings* out, const EncodeExtras& extras) {
  const GatedInput* const gated = extras.gated;
  const TokenTables* tokens = extras.tokens;
  const bool apart = !col.present() && !row.whole_tensor() && !row.two_level();  // no scale covers rows of two groups
  if (tokens != nullptr && tokens->order.defined() && (apart || row.four_bit() || col.four_bit())) {  // no kernel reads by it
    TokenTables in_order = *tokens;
    in_order.order.reset();
    return encode(ordered_rows(x, tokens), row, col, known, row0, round_to_bf16, wants_amax, out, {gated, &in_order, extras.column_sums});
  }
  if (apart) tokens = nullptr;
  if (tokens != nullptr && row.present() && col.present() &&
      !(row.whole() ? col.whole() && known[0].enc.has_value() == known[1].enc.has_value()
        : row.four_bit()
            ? col.four_bit()
            : row.outer == 1 && row.contraction == kTile && !col.whole() && !col.four_bit())) {  // no fused launch
    const EncodingSpec none = {};
    const EncodeExtras alone = {nullptr, tokens};
    return {encode(x, row, none, known, row0, round_to_bf16, wants_amax, out, alone)[0],
            encode(x, none, col, known, row0, round_to_bf16, wants_amax, out, alone)[1]};
  }
  check_input(x);
  TORCH_CHECK_VALUE(row0 >= 0, "row0 is ", row0, "; wanted 0 or more");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // saves microseconds in views of new tensors
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = launch_of(x, row0, input_of(x, round_to_bf16), row, col);
  TensorArgs& t = launch.tensors[0];
  const int64_t of_groups = set_tokens(launch, tokens), rows[2] = {t.rows, of_groups};
  if (gated != nullptr) {
    const MaybeTensor enc[2] = {known[0].enc, known[1].enc};
    const bool fits = tokens != nullptr ? can_gate_tokens(x, row, col, 0, 0, *gated, *tokens)
                                        : gated->up.sizes() == x.sizes() && can_encode_gated(x, row, col, enc, *gated);
    TORCH_CHECK_VALUE(row0 == 0 && fits, "no kernel fuses this activation; compute it first");
    set_gated(launch, *gated);
  }

  ZeroedWorkspace workspace;
  Encodings encoded;
  Geometry g[2];
  int64_t amax_at[2] = {-1, -1}, tensor_at[2] = {-1, -1}, seconds[2] = {};  // amaxes of the second level
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(!s.operand() || (s.transposed == (d == 1) && (launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16) &&
                                       !known[d].amax.has_value()),
                      "operands are made of bfloat16 (or float32 through bfloat16) of which no amax is known, along the contraction");
    check_cut(s, d, row0);
    g[d] = geometry_of(s, d, rows[d], t.cols, row0);
    EncodingBuffers& b = t.buffers[d];
    set_geometry(b, g[d], d);
    if (tokens != nullptr && (d ? s.whole() : s.whole_tensor())) g[d].scale_rows *= tokens->groups, g[d].scale_numel *= tokens->groups;
    const bool in_parts = tokens == nullptr && s.whole_tensor() && known[d].amax.has_value() && known[d].amax->numel() > 1;
    b.amax = optional_buffer<float>(known[d].amax, "amax", x, in_parts ? known[d].amax->numel() : g[d].scale_rows * g[d].scale_cols);
    const int64_t groups = tokens != nullptr ? tokens->groups : 1;
    seconds[d] = s.by_line ? b.lines : groups;
    b.tensor_amax = optional_buffer<float>(known[d].tensor_amax, "tensor_amax", x, seconds[d]);
    b.enc = optional_buffer<float>(known[d].enc, "enc", x, groups);
    b.key = optional_buffer<int64_t>(known[d].key, "key", x, 5 * groups);
    b.amax_given = b.amax != nullptr, b.tensor_amax_given = b.tensor_amax != nullptr;
    if (in_parts) {
      const bool is_shared = d == 1 && b.amax == launch.parts[0];
      amax_at[d] = is_shared ? amax_at[0] : workspace.reserve(1);
      launch.parts[d] = is_shared ? nullptr : b.amax, launch.part_counts[d] = known[d].amax->numel();
    }
    TORCH_CHECK_VALUE(!s.stochastic || b.key != nullptr, "stochastic rounding needs a random key, got None");
    TORCH_CHECK_VALUE(b.enc == nullptr || s.whole_tensor(), "enc (delayed scaling) goes with one scale a tensor");
    for (const at::Tensor& record : known[d].records) check_buffer(record, "record", x, at::kFloat, record.numel());
    TORCH_CHECK_VALUE(known[d].records.empty() || static_cast<int64_t>(known[d].records.size()) == (tokens ? tokens->groups : 0),
                      "got ", known[d].records.size(), " records; wanted one for each group of tokens");
    if (known[d].record != nullptr) {
      check_buffer(*known[d].record, "record", x, at::kFloat, known[d].record->numel());
      b.record = known[d].record->mutable_data_ptr<float>();
    }
    if (wants_amax) {
      if (s.whole() && !b.amax_given) encoded[d].amax = new_zeros(x, {g[d].scale_rows, g[d].scale_cols}, stream);
      if (s.two_level() && !b.tensor_amax_given) encoded[d].tensor_amax = new_zeros(x, {seconds[d]}, stream);
      continue;
    }
    const bool is_shared = d == 1 && can_share_codes_transposed(launch.spec, t.buffers);  // uses that of rowwise
    if (s.whole() && !b.amax_given)
      amax_at[d] = is_shared ? amax_at[0] : workspace.reserve(g[d].scale_rows * g[d].scale_cols);
    if (s.two_level() && !b.tensor_amax_given) tensor_at[d] = workspace.reserve(seconds[d]);
  }
  const bool in_parts = launch.part_counts[0] + launch.part_counts[1] > 0;
  const auto crosses = [](const EncodingSpec& s, const EncodingBuffers& b) {
    return s.present() && ((s.whole() && !b.amax_given) || (s.two_level() && !b.tensor_amax_given));
  };
  const int64_t barrier_at = crosses(row, t.buffers[0]) || crosses(col, t.buffers[1]) || in_parts ? workspace.reserve(4) : -1;
  workspace.allocate(x, stream);
  if (barrier_at >= 0) launch.barrier = reinterpret_cast<uint32_t*>(workspace.at(barrier_at));
  if (in_parts) launch.arrivals = launch.barrier + 2;
  check_tokens(launch);

  auto output_buffer = [&](at::Tensor& to, const at::Tensor* given, at::IntArrayRef sizes, at::ScalarType dtype,
                           const char* name) {
    if (given != nullptr) check_buffer(*given, name, x, dtype, c10::multiply_integers(sizes));
    to = given != nullptr ? *given : new_empty(x, sizes, dtype);
    return to.mutable_data_ptr();
  };
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    EncodingBuffers& b = t.buffers[d];
    const Encoded* given = out != nullptr ? &(*out)[d] : nullptr;
    b.data = static_cast<uint8_t*>(output_buffer(
        encoded[d].data, given ? &given->data : nullptr, {g[d].data_rows, g[d].data_cols}, at::kByte, "out data"));
    const auto scale_dtype = s.stored_in_bytes() ? at::kByte : at::kFloat;
    const at::Tensor* scale = given ? &given->scale : nullptr;
    b.scale = s.operand()
                  ? output_buffer(encoded[d].scale, scale, {tokens != nullptr ? tokens->groups : 1}, at::kFloat, "out scale")
              : s.scale_layout == ScaleLayout::kCompact
                  ? output_buffer(encoded[d].scale, scale, {g[d].scale_rows, g[d].scale_cols}, scale_dtype, "out scale")
                  : output_buffer(encoded[d].scale, scale, {g[d].scale_numel}, scale_dtype, "out scale");
    b.vector_store = stores_vectors(s, b.data, g[d]);
    if (tensor_at[d] >= 0) {
      b.tensor_amax = workspace.at(tensor_at[d]);
      encoded[d].tensor_amax = workspace.slice(tensor_at[d], {seconds[d]});
    }
    if (amax_at[d] >= 0) b.amax = workspace.at(amax_at[d]);
    if (encoded[d].amax.defined()) b.amax = encoded[d].amax.mutable_data_ptr<float>();
    if (wants_amax && encoded[d].tensor_amax.defined()) b.tensor_amax = encoded[d].tensor_amax.mutable_data_ptr<float>();
  }
  for (int d = 0; d < 2; ++d) {  // kernels of square blocks need both directions
    if (!launch.spec[d].operand() || launch.spec[d].outer == 1 || launch.spec[1 - d].present()) continue;
    EncodingSpec& other = launch.spec[1 - d] = launch.spec[d];
    other.transposed = d == 0;
    EncodingBuffers& b = t.buffers[1 - d];
    set_geometry(b, geometry_of(other, 1 - d, rows[1 - d], t.cols, row0), 1 - d);
    b.tensor_amax = t.buffers[d].tensor_amax, b.tensor_amax_given = t.buffers[d].tensor_amax_given;
  }
  // Delayed-scaling kernels compute one amax for both directions, in the first buffer.
  const bool shares_amax =
      t.buffers[1].enc != nullptr && encoded[1].amax.defined() && can_share_codes_transposed(launch.spec, t.buffers);
  if (shares_amax) t.buffers[1].amax = t.buffers[0].amax;
  const ColumnSums sums(x, launch, extras.column_sums);
  launch_phases(launch, stream, "quantize");
  sums.finish(stream);
  if (shares_amax) encoded[1].amax.copy_(encoded[0].amax, /*non_blocking=*/true);
  if (tokens != nullptr) finish_groups(launch, known, tokens->groups, stream);
  return encoded;
}

at::Tensor column_sums(const at::Tensor& x) {
  check_input(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = launch_of(x, 0, Input::kBF16, {}, {});
  launch.phases = kStatistics;
  at::Tensor out;
  const ColumnSums sums(x, launch, &out);
  check_launch(launch_quantize(launch, stream), "column_sums", x.sizes());
  sums.finish(stream);
  return out;
}

namespace {

// Returns data and scale per direction, with the tensor amax (two-level formats) and amax (scales that span the contraction)
// unless given.
std::vector<at::Tensor> quantize(
    const at::Tensor& x, int64_t row, int64_t col, double row_eps, double col_eps, int64_t row0, bool round_to_bf16,
    const MaybeTensor& row_amax, const MaybeTensor& row_tensor_amax, const MaybeTensor& row_enc,
    const MaybeTensor& row_key, const MaybeTensor& col_amax, const MaybeTensor& col_tensor_amax,
    const MaybeTensor& col_enc, const MaybeTensor& col_key) {
  const EncodingSpec specs[2] = {unpack_encoding(row, row_eps, "row"), unpack_encoding(col, col_eps, "col")};
  const GivenAmaxes known[2] = {{row_amax, row_tensor_amax, row_enc, row_key}, {col_amax, col_tensor_amax, col_enc, col_key}};
  std::vector<at::Tensor> result;
  result.reserve(8);
  for (Encoded& one : encode(x, specs[0], specs[1], known, row0, round_to_bf16, true, nullptr))
    for (at::Tensor* t : {&one.data, &one.scale, &one.tensor_amax, &one.amax})
      if (t->defined()) result.push_back(std::move(*t));
  return result;
}

}  // namespace

std::vector<at::Tensor> statistics(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row0, bool round_to_bf16) {
  check_input(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = launch_of(
      x, row0, input_of(x, round_to_bf16), unpack_encoding(row, 0.0, "row"), unpack_encoding(col, 0.0, "col"));
  launch.phases = kStatistics;
  TensorArgs& t = launch.tensors[0];
  std::vector<at::Tensor> result;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    const Geometry g = geometry_of(s, d, t.rows, t.cols, row0);
    const int64_t sizes[] = {g.scale_rows, g.scale_cols};
    result.push_back(s.whole() ? new_zeros(x, sizes, stream) : new_empty(x, sizes, at::kFloat));  // atomic maxima start at 0
    set_geometry(t.buffers[d], g, d);
    t.buffers[d].amax = result.back().mutable_data_ptr<float>();
    if (!s.two_level()) continue;
    result.push_back(new_zeros(x, {s.by_line ? t.buffers[d].lines : 1}, stream));
    t.buffers[d].tensor_amax = result.back().mutable_data_ptr<float>();
  }
  check_launch(launch_quantize(launch, stream), "statistics", x.sizes());
  return result;
}

Geometry geometry_of(const EncodingSpec& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0) {
  Geometry g = {encoding_sizes(s, columnwise, rows, cols, row0)};
  const auto at = [](int64_t n) { return static_cast<int32_t>(n); };
  const int32_t line_blocks = at(columnwise ? g.scale_cols : g.scale_rows);
  const int32_t blocks = at(columnwise ? g.scale_rows : g.scale_cols);
  g.compact = columnwise ? Grid{line_blocks, blocks, 1, line_blocks} : Grid{line_blocks, blocks, blocks, 1};
  g.stored = g.compact;
  if (s.scale_layout == ScaleLayout::kCompact || s.whole()) return g;
  const bool by_line = s.stored_in_bytes() || s.outer != 1;  // blocks of a line are adjacent
  g.stored = {at(g.stored_lines), at(g.stored_blocks), by_line ? at(g.stored_blocks) : 1, by_line ? 1 : at(g.stored_lines)};
  return g;
}

void register_quantize(torch::Library& m) {
  m.def(
      "quantize(Tensor x, int row, int col, float row_eps, float col_eps, SymInt row0, bool through_bf16, "
      "Tensor? row_amax=None, Tensor? row_tensor_amax=None, Tensor? row_enc=None, Tensor? row_key=None, "
      "Tensor? col_amax=None, Tensor? col_tensor_amax=None, Tensor? col_enc=None, Tensor? col_key=None) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, quantize), compliant());
  m.def(
      "statistics(Tensor x, int row, int col, SymInt row0, bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, statistics), compliant());
  m.def("column_sums(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CUDA, column_sums), compliant());
}

}  // namespace fsdp_quant
