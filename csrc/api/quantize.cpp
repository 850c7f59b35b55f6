// Host side of quantize and statistics: check, allocate, choose, launch. Nothing here reads the device.
#include "api/quantize.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/optim.h"
#include "layout/scalars.h"

namespace fsdp_quant {

namespace {

using MaybeTensors = c10::List<MaybeTensor>;

Input input_of(const at::Tensor& x, bool through_bf16) {
  switch (x.scalar_type()) {
    case at::kBFloat16:
      return Input::kBF16;
    case at::kHalf:
      return Input::kF16;
    case at::kFloat:
      return through_bf16 ? Input::kF32AsBF16 : Input::kF32;
    default:
      TORCH_CHECK_VALUE(false, "x is ", x.scalar_type(), "; quantize takes bfloat16, float16 and float32");
  }
}

void check_input(const at::Tensor& x) {
  check_cuda(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, "x has shape ", x.sizes(), "; quantize takes [rows, cols]");
  TORCH_CHECK_VALUE(
      x.stride(1) == 1 || x.size(1) == 1, "x has strides ", x.strides(), "; its rows must be contiguous");
  TORCH_CHECK_VALUE(x.numel() > 0, "x is empty: ", x.sizes());
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - kTile;
  TORCH_CHECK_VALUE(x.size(0) < kLargest && x.size(1) < kLargest, "x has shape ", x.sizes(), "; each extent must be below 2^31");
}

int32_t shift_of(int64_t row0) { return static_cast<int32_t>(row0 % kTile); }

TensorArgs tensor_args(const at::Tensor& x, int64_t row0) {
  TensorArgs t = {};
  t.x = x.const_data_ptr();
  t.rows = static_cast<int32_t>(x.size(0)), t.cols = static_cast<int32_t>(x.size(1));
  t.row_stride = t.rows > 1 ? x.stride(0) : t.cols;
  t.shift = shift_of(row0);
  t.tile_cols = static_cast<int32_t>(ceil_div(t.cols, kTile));
  t.by_band = Division::by(4u * static_cast<uint32_t>(std::max(t.tile_cols, 1)));
  t.vector_load = is_aligned(t.x, 16) && t.row_stride * x.element_size() % 16 == 0;
  return t;
}

// Sets the rows of tiles too: those that a rotation fills beyond the tensor have tiles.
int32_t tiles_of(TensorArgs& t, const Side* col = nullptr) {
  const bool fills = col != nullptr && col->present() && col->rotated;
  const int64_t rows = fills ? ceil_div(t.rows, kRotationBlock) * kRotationBlock : t.rows;
  t.tile_rows = static_cast<int32_t>(std::max<int64_t>(ceil_div(rows + t.shift, kTile), 1));
  const int64_t tiles = static_cast<int64_t>(t.tile_rows) * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max(), "x has ", tiles, " tiles; one launch takes 2^31");
  return static_cast<int32_t>(tiles);
}

// The rows of the columnwise side, which sources gather into tiles; x's own without.
int64_t set_tokens(Launch<1>& launch, const Tokens* tokens) {
  TensorArgs& t = launch.tensors[0];
  if (tokens == nullptr) return t.rows;
  const int64_t tiles = tokens->tiles * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max() - kTile, tiles, " tiles; one launch takes 2^31");
  t.tile_rows = static_cast<int32_t>(tokens->tiles);
  launch.tiles = static_cast<int32_t>(tiles), launch.sources = tokens->sources;
  return tokens->tiles * kTile;
}

void check_tokens(const Launch<1>& launch) {
  TORCH_CHECK_NOT_IMPLEMENTED(launch.sources == nullptr || takes_sources(launch),
                              "rows of bfloat16 are gathered for blocks of (1, 128), anchors, scales of all rows, rounded to nearest, and for 4 bits");
}

bool stores_vectors(const Side& s, const void* data, const Geometry& g) {
  const int64_t width = s.transposed || s.operand() ? 16 : s.four_bit() ? 4 : 8;
  return is_aligned(data, width) && g.data_cols % width == 0;
}

void set_geometry(SideBuffers& b, const Geometry& g, bool columnwise) {
  b.lines = static_cast<int32_t>(columnwise ? g.cols : g.rows);
  b.length = static_cast<int32_t>(columnwise ? g.rows : g.cols);
  b.compact = g.compact, b.stored = g.stored;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

bool collects(const Side& s, const SideBuffers& b) {
  return s.present() && ((b.amax != nullptr && !b.amax_given) || (b.tensor_amax != nullptr && !b.tensor_amax_given));
}

// One fp32 workspace for everything that atomic maxima start from: zeroed by one memset.
class Zeroed {
 public:
  // Reserve `count` words; the pointer is known after `allocate`.
  int64_t reserve(int64_t count) { return std::exchange(size_, size_ + std::max<int64_t>(ceil_div(count, 4) * 4, 4)); }
  void allocate(const at::Tensor& like, cudaStream_t stream) {
    if (size_ == 0) return;
    buffer_ = new_empty(like, {size_}, at::kFloat);
    C10_CUDA_CHECK(cudaMemsetAsync(buffer_.mutable_data_ptr(), 0, size_ * sizeof(float), stream));
  }
  float* at(int64_t offset) const { return buffer_.mutable_data_ptr<float>() + offset; }
  // sizes: of one dimension or two.
  at::Tensor slice(int64_t offset, at::IntArrayRef sizes) const {
    const int64_t strides[] = {sizes.back(), 1};
    return buffer_.as_strided(sizes, at::IntArrayRef(strides).slice(2 - sizes.size()), offset);
  }

 private:
  int64_t size_ = 0;
  at::Tensor buffer_;
};

// Zeros with memory of their own: what an operator returns shares memory with no other result.
at::Tensor new_zeros(const at::Tensor& like, at::IntArrayRef sizes, cudaStream_t stream) {
  at::Tensor made = new_empty(like, sizes, at::kFloat);
  if (made.numel() > 0) C10_CUDA_CHECK(cudaMemsetAsync(made.mutable_data_ptr(), 0, made.nbytes(), stream));
  return made;
}

// Of a launch that sums columns.
class ColumnSums {
 public:
  // to: null, or where the sums of x go.
  ColumnSums(const at::Tensor& x, Launch<1>& launch, at::Tensor* to) : to_(to) {
    if (to == nullptr) return;
    TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16 && launch.up == nullptr && launch.sources == nullptr, "x is ",
                      x.scalar_type(), "; columns of bfloat16 are summed, as they lie");
    TensorArgs& t = launch.tensors[0];
    partial_ = new_empty(x, {t.tile_rows, t.cols}, at::kFloat);
    *to_ = new_empty(x, {t.cols}, at::kBFloat16);
    launch.sums = partial_.mutable_data_ptr<float>();
  }
  // After the launch.
  void finish(const c10::cuda::CUDAStream& stream) const {
    if (to_ == nullptr) return;
    const int32_t rows = static_cast<int32_t>(partial_.size(0)), cols = static_cast<int32_t>(partial_.size(1));
    const Partials partials = {partial_.const_data_ptr<float>(), 0, {to_->mutable_data_ptr(), nullptr}, rows, cols};
    check_launch(launch_sum_partials(partials, Values::kBF16, stream), "column_sums");
  }

 private:
  at::Tensor* to_;
  at::Tensor partial_;
};

// Statistics in their own launch, or in the encoding one where it has a barrier; then codes. The first launch sums columns.
void run(Launch<1>& launch, const c10::cuda::CUDAStream& stream, const char* name) {
  SideBuffers(&b)[2] = launch.tensors[0].side;
  const bool both = fuses(launch.side, b, launch.input);
  launch.twins = are_twins(launch.side, b);
  const bool needs = collects(launch.side[0], b[0]) || collects(launch.side[1], b[1]);
  const auto has = [&](int d, bool history) { return launch.side[d].present() && (b[d].enc != nullptr) == history; };
  const bool delayed = has(0, true) || has(1, true), all_delayed = !has(0, false) && !has(1, false);
  const bool mixed = launch.side[0].present() && launch.side[1].present() &&
                     launch.side[0].four_bit() != launch.side[1].four_bit();
  const bool operands = launch.side[0].operand() || launch.side[1].operand();
  int processors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, stream.device_index()));
  const bool fits = launch.barrier != nullptr && launch.tiles <= processors && !is_capturing(stream);
  if (needs && both && !mixed && !delayed && !operands && launch.sources == nullptr && fits) {
    launch.phases = kStatistics | kEncode;
    check_launch(launch_quantize(launch, stream), name);
    return;
  }
  launch.barrier = nullptr;
  if (needs) {
    launch.phases = kStatistics;
    Launch<1> statistics = launch;
    if (launch.twins && b[0].amax != nullptr && b[0].amax == b[1].amax) statistics.side[1].element = Element::kNone;
    const bool of_groups = launch.sources != nullptr;
    if (of_groups && !takes_delayed(launch))  // their codes are made without amaxes on the way
      for (SideBuffers& one : statistics.tensors[0].side) one.enc = nullptr;
    check_launch(all_delayed && !of_groups ? launch_first_amax(launch, processors, stream) : launch_quantize(statistics, stream), name);
    if (!all_delayed) launch.sums = nullptr;
    launch.reversed = !all_delayed;  // the tiles read last are still in L2
  }
  launch.phases = kEncode;
  if (operands && launch.sums != nullptr) {  // the kernel of operands sums no columns
    Launch<1> sums = launch;
    sums.phases = kStatistics, sums.side[0].element = sums.side[1].element = Element::kNone;
    check_launch(launch_quantize(sums, stream), name);
    launch.sums = nullptr;
  }
  if (both) {
    check_launch(launch_quantize(launch, stream), name);
  } else {
    for (int d = 0; d < 2; ++d) {
      Launch<1> one = launch;
      one.side[1 - d].element = Element::kNone;
      check_launch(launch_quantize(one, stream), name);
      launch.sums = nullptr;
    }
  }
  if (delayed && launch.sources == nullptr && !(takes_delayed(launch) && b[0].amax_given))
    check_launch(launch_delayed_scales(launch, stream), name);
}

void finish_groups(const Launch<1>& launch, const Known (&known)[2], int64_t groups, cudaStream_t stream) {
  DelayedGroups g = {};
  g.groups = static_cast<int32_t>(groups);
  bool any = false;
  for (int d = 0; d < 2; ++d) {
    if (!launch.side[d].present()) continue;
    g.how[d] = launch.side[d], g.side[d] = launch.tensors[0].side[d];
    any = any || g.side[d].enc != nullptr;
    const at::TensorList records = known[d].records;
    for (size_t e = 0; e < records.size(); ++e) g.record[d][e] = records[e].mutable_data_ptr<float>();
  }
  if (any) check_launch(launch_delayed_scales(g, stream), "quantize");
}

template <class T>
T* optional_buffer(const MaybeTensor& t, const char* name, const at::Tensor& x, int64_t numel) {
  if (!t.has_value()) return nullptr;
  check_buffer(*t, name, x, c10::CppTypeToScalarType<T>::value, numel);
  return static_cast<T*>(const_cast<void*>(t->const_data_ptr()));
}

}  // namespace

bool encodes_gated(
    const at::Tensor& x, const Side& row, const Side& col, const MaybeTensor (&enc)[2], const Gated& gated) {
  Launch<1> launch = {};
  launch.input = input_of(x, false), launch.activation = gated.kind;
  launch.side[0] = row, launch.side[1] = col;
  SideBuffers(&b)[2] = launch.tensors[0].side;
  for (int d = 0; d < 2; ++d)
    if (enc[d].has_value()) b[d].enc = enc[d]->const_data_ptr<float>();
  launch.twins = are_twins(launch.side, b);
  return takes_gated(launch) && x.size(1) % 8 == 0 && tensor_args(x, 0).vector_load && tensor_args(gated.up, 0).vector_load;
}

Encodings encode(
    const at::Tensor& x, const Side& row, const Side& col, const Known (&known)[2], int64_t row0, bool through_bf16,
    bool wants_amax, const Encodings* out, const Beside& beside) {
  const Gated* const gated = beside.gated;
  const Tokens* tokens = beside.tokens;
  if (!col.present() && !row.whole_tensor() && !row.two_level()) tokens = nullptr;  // no scale serves rows of two groups
  if (tokens != nullptr && row.present() && col.present() &&
      !(row.whole()      ? col.whole() && known[0].enc.has_value() == known[1].enc.has_value()
        : row.four_bit() ? col.four_bit()
                         : row.outer == 1 && row.contraction == kTile && !col.whole() && !col.four_bit())) {  // no launch for both
    const Side none = {};
    const Beside alone = {nullptr, tokens};
    return {encode(x, row, none, known, row0, through_bf16, wants_amax, out, alone)[0],
            encode(x, none, col, known, row0, through_bf16, wants_amax, out, alone)[1]};
  }
  check_input(x);
  TORCH_CHECK_VALUE(row0 >= 0, "row0 is ", row0, "; wanted 0 or more");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // views of new tensors: a few microseconds less
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = {};
  launch.input = input_of(x, through_bf16);
  launch.side[0] = row, launch.side[1] = col;
  launch.count = 1;
  TensorArgs& t = launch.tensors[0] = tensor_args(x, row0);
  launch.tiles = tiles_of(t, &col);
  const int64_t rows[2] = {t.rows, set_tokens(launch, tokens)};
  if (gated != nullptr) {
    const MaybeTensor enc[2] = {known[0].enc, known[1].enc};
    TORCH_CHECK_VALUE(row0 == 0 && gated->up.sizes() == x.sizes() && encodes_gated(x, row, col, enc, *gated),
                      "no kernel quantizes this activation as it makes it; make it first");
    launch.up = gated->up.const_data_ptr(), launch.up_stride = tensor_args(gated->up, 0).row_stride;
    launch.activation = gated->kind;
  }

  Zeroed zeroed;
  Encodings made;
  Geometry g[2];
  int64_t amax_at[2] = {-1, -1}, tensor_at[2] = {-1, -1};
  for (int d = 0; d < 2; ++d) {
    const Side& s = launch.side[d];
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(!s.operand() || (s.transposed == (d == 1) && (launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16) &&
                                       !known[d].amax.has_value()),
                      "operands are made of bfloat16 (or float32 through bfloat16) of which no amax is known, along the contraction");
    g[d] = geometry_of(s, d, rows[d], t.cols, row0);
    SideBuffers& b = t.side[d];
    set_geometry(b, g[d], d);
    if (tokens != nullptr && (d ? s.whole() : s.whole_tensor())) g[d].scale_rows *= tokens->groups, g[d].scale_numel *= tokens->groups;
    b.amax = optional_buffer<float>(known[d].amax, "amax", x, g[d].scale_rows * g[d].scale_cols);
    const int64_t groups = tokens != nullptr ? tokens->groups : 1;
    b.tensor_amax = optional_buffer<float>(known[d].tensor_amax, "tensor_amax", x, groups);
    b.enc = optional_buffer<float>(known[d].enc, "enc", x, groups);
    b.key = optional_buffer<int64_t>(known[d].key, "key", x, 5 * groups);
    b.amax_given = b.amax != nullptr, b.tensor_amax_given = b.tensor_amax != nullptr;
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
      if (s.whole() && !b.amax_given) made[d].amax = new_zeros(x, {g[d].scale_rows, g[d].scale_cols}, stream);
      if (s.two_level() && !b.tensor_amax_given) made[d].tensor_amax = new_zeros(x, {groups}, stream);
      continue;
    }
    const bool is_shared = d == 1 && are_twins(launch.side, t.side);  // the first one's
    if (s.whole() && !b.amax_given) amax_at[d] = is_shared ? amax_at[0] : zeroed.reserve(g[d].scale_rows * g[d].scale_cols);
    if (s.two_level() && !b.tensor_amax_given) tensor_at[d] = zeroed.reserve(groups);
  }
  const auto crosses = [](const Side& s) { return s.present() && (s.whole() || s.two_level()); };
  const int64_t barrier_at = crosses(row) || crosses(col) ? zeroed.reserve(2) : -1;
  zeroed.allocate(x, stream);
  if (barrier_at >= 0) launch.barrier = reinterpret_cast<uint32_t*>(zeroed.at(barrier_at));
  check_tokens(launch);

  auto take = [&](at::Tensor& to, const at::Tensor* given, at::IntArrayRef sizes, at::ScalarType dtype, const char* name) {
    if (given != nullptr) check_buffer(*given, name, x, dtype, c10::multiply_integers(sizes));
    to = given != nullptr ? *given : new_empty(x, sizes, dtype);
    return to.mutable_data_ptr();
  };
  for (int d = 0; d < 2; ++d) {
    const Side& s = launch.side[d];
    if (!s.present()) continue;
    SideBuffers& b = t.side[d];
    const Encoded* given = out != nullptr ? &(*out)[d] : nullptr;
    b.data = static_cast<uint8_t*>(take(
        made[d].data, given ? &given->data : nullptr, {g[d].data_rows, g[d].data_cols}, at::kByte, "out data"));
    const auto scale_dtype = s.byte_scales() ? at::kByte : at::kFloat;
    const at::Tensor* scale = given ? &given->scale : nullptr;
    b.scale = s.operand() ? take(made[d].scale, scale, {tokens != nullptr ? tokens->groups : 1}, at::kFloat, "out scale")
              : s.scale_layout == ScaleLayout::kCompact
                  ? take(made[d].scale, scale, {g[d].scale_rows, g[d].scale_cols}, scale_dtype, "out scale")
                  : take(made[d].scale, scale, {g[d].scale_numel}, scale_dtype, "out scale");
    b.vector_store = stores_vectors(s, b.data, g[d]);
    if (tensor_at[d] >= 0) {
      b.tensor_amax = zeroed.at(tensor_at[d]);
      made[d].tensor_amax = zeroed.slice(tensor_at[d], {tokens != nullptr ? tokens->groups : 1});
    }
    if (amax_at[d] >= 0) b.amax = zeroed.at(amax_at[d]);
    if (made[d].amax.defined()) b.amax = made[d].amax.mutable_data_ptr<float>();
    if (wants_amax && made[d].tensor_amax.defined()) b.tensor_amax = made[d].tensor_amax.mutable_data_ptr<float>();
  }
  for (int d = 0; d < 2; ++d) {  // the other side of a square block is made for the kernel alone
    if (!launch.side[d].operand() || launch.side[d].outer == 1 || launch.side[1 - d].present()) continue;
    Side& other = launch.side[1 - d] = launch.side[d];
    other.transposed = d == 0;
    SideBuffers& b = t.side[1 - d];
    set_geometry(b, geometry_of(other, 1 - d, rows[1 - d], t.cols, row0), 1 - d);
    b.tensor_amax = t.side[d].tensor_amax, b.tensor_amax_given = t.side[d].tensor_amax_given;
  }
  // The kernels of delayed scaling take the amax of both sides once, where the first one's lies.
  const bool shares_amax = t.side[1].enc != nullptr && made[1].amax.defined() && are_twins(launch.side, t.side);
  if (shares_amax) t.side[1].amax = t.side[0].amax;
  const ColumnSums sums(x, launch, beside.column_sums);
  run(launch, stream, "quantize");
  sums.finish(stream);
  if (shares_amax) made[1].amax.copy_(made[0].amax, /*non_blocking=*/true);
  if (tokens != nullptr) finish_groups(launch, known, tokens->groups, stream);
  return made;
}

at::Tensor column_sums(const at::Tensor& x) {
  check_input(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = {};
  launch.count = 1, launch.phases = kStatistics;
  launch.tensors[0] = tensor_args(x, 0);
  launch.tiles = tiles_of(launch.tensors[0]);
  at::Tensor made;
  const ColumnSums sums(x, launch, &made);
  check_launch(launch_quantize(launch, stream), "column_sums");
  sums.finish(stream);
  return made;
}

namespace {

// The amax of a side with one scale, of those of parts of x [parts, 1]; of other sides as it is.
MaybeTensor of_all_parts(const at::Tensor& x, const Side& side, const MaybeTensor& amax) {
  if (!amax.has_value() || !side.whole_tensor() || amax->numel() <= 1) return amax;
  check_buffer(*amax, "amax", x, at::kFloat, amax->numel());
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor most = new_empty(x, {1, 1}, at::kFloat);
  check_launch(launch_largest(amax->const_data_ptr<float>(), amax->numel(), most.mutable_data_ptr<float>(),
                              c10::cuda::getCurrentCUDAStream()), "largest");
  return most;
}

// data, scale of each side, its tensor amax (two-level formats) and amax (scales that span the contraction) unless they
// were given. An amax of one scale may be those of parts of x.
std::vector<at::Tensor> quantize(
    const at::Tensor& x, int64_t row, int64_t col, double row_eps, double col_eps, int64_t row0, bool through_bf16,
    const MaybeTensor& row_amax, const MaybeTensor& row_tensor_amax, const MaybeTensor& row_enc,
    const MaybeTensor& row_key, const MaybeTensor& col_amax, const MaybeTensor& col_tensor_amax,
    const MaybeTensor& col_enc, const MaybeTensor& col_key) {
  const Side sides[2] = {unpack_encoding(row, row_eps, "row"), unpack_encoding(col, col_eps, "col")};
  const MaybeTensor row_most = of_all_parts(x, sides[0], row_amax);
  const bool is_same = row_amax.has_value() && col_amax.has_value() && sides[0].whole_tensor() && sides[1].whole_tensor() &&
                       row_amax->is_same(*col_amax);
  const MaybeTensor col_most = is_same ? row_most : of_all_parts(x, sides[1], col_amax);
  const Known known[2] = {{row_most, row_tensor_amax, row_enc, row_key}, {col_most, col_tensor_amax, col_enc, col_key}};
  std::vector<at::Tensor> result;
  result.reserve(8);
  for (Encoded& one : encode(x, sides[0], sides[1], known, row0, through_bf16, true, nullptr))
    for (at::Tensor* t : {&one.data, &one.scale, &one.tensor_amax, &one.amax})
      if (t->defined()) result.push_back(std::move(*t));
  return result;
}

}  // namespace

bool anchors_codes(const at::Tensor& x, const Side& side, bool through_bf16) {
  return side.element == Element::kE4M3 && side.scale == ScaleKind::kE8M0Up && side.outer == 1 && side.contraction == 32 &&
         !side.stochastic && (x.scalar_type() == at::kBFloat16 || (through_bf16 && x.scalar_type() == at::kFloat));
}

std::vector<at::Tensor> anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool through_bf16, const Beside& beside) {
  const Tokens* const tokens = beside.tokens;
  check_input(x);
  TORCH_CHECK_VALUE(tokens == nullptr || (row_run >= 0 && col_run > 0), "an anchor of the whole contraction serves several groups of tokens");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const int64_t runs[2] = {row_run, col_run};
  const MaybeTensor* const given[2] = {&row_anchor, &col_anchor};
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = {};
  launch.input = input_of(x, through_bf16);
  launch.side[0] = unpack_encoding(row, 0.0, "row"), launch.side[1] = unpack_encoding(col, 0.0, "col");
  launch.count = 1;
  TensorArgs& t = launch.tensors[0] = tensor_args(x, 0);
  launch.tiles = tiles_of(t);
  const int64_t rows[2] = {t.rows, set_tokens(launch, tokens)};
  bool whole[2];
  for (int d = 0; d < 2; ++d) whole[d] = launch.side[d].present() && runs[d] == kOfTensor;
  launch.of_codes = whole[0] || whole[1];
  TORCH_CHECK_VALUE(whole[0] == whole[1] || !launch.side[0].present() || !launch.side[1].present(),
                    "one side is anchored by the tensor, and the other by its lines; make them in two calls");
  Launch<1> statistics = launch;
  Zeroed zeroed;
  int64_t anchor_at[2] = {-1, -1};
  Geometry g[2], anchor[2];
  for (int d = 0; d < 2; ++d) {
    Side& s = launch.side[d];
    statistics.side[d].element = Element::kNone;
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(s.scale == ScaleKind::kE8M0Up, "anchors take the place of e8m0 scales that are rounded up");
    TORCH_CHECK_VALUE(launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16, "x is ", x.scalar_type(),
                      "; anchored codes are made of bfloat16 (or float32 through bfloat16)");
    TORCH_CHECK_VALUE(!s.four_bit(), "anchors are of codes of 8 bits");
    TORCH_CHECK_VALUE(s.outer == 1 && s.contraction == 32, "anchors are of (1, 32) blocks; got (", s.outer, ", ",
                      s.contraction, ")");
    TORCH_CHECK_VALUE(!whole[d] || s.element == Element::kE4M3, "anchors of tensors are of e4m3");
    const Side line = runs_of(s, runs[d]);  // an anchor is the amax of a run of one line, or of the tensor
    s.anchor_log2 = line.contraction_log2;
    g[d] = geometry_of(s, d, rows[d], t.cols, 0);
    anchor[d] = geometry_of(line, d, rows[d], t.cols, 0);
    const int64_t numel = anchor[d].scale_rows * anchor[d].scale_cols;
    t.side[d].anchor = optional_buffer<float>(*given[d], "anchor", x, numel);
    if (t.side[d].anchor != nullptr) continue;
    if (d == 1 && whole[0]) {  // one for both
      anchor_at[1] = anchor_at[0], t.side[1].anchor = t.side[0].anchor;
      continue;
    }
    anchor_at[d] = zeroed.reserve(numel);
    statistics.side[d] = line;
    set_geometry(statistics.tensors[0].side[d], anchor[d], d);
  }
  zeroed.allocate(x, stream);
  std::vector<at::Tensor> result;
  for (int d = 0; d < 2; ++d) {
    if (!launch.side[d].present()) continue;
    SideBuffers& b = t.side[d];
    result.push_back(new_empty(x, {g[d].data_rows, g[d].data_cols}, at::kByte));
    b.data = result.back().mutable_data_ptr<uint8_t>();
    result.push_back(new_empty(x, {anchor[d].scale_rows, anchor[d].scale_cols}, at::kFloat));
    b.scale = result.back().mutable_data_ptr();
    set_geometry(b, g[d], d);
    b.stored = b.anchors = anchor[d].compact;
    if (whole[d]) b.anchors.line_stride = 0;
    b.vector_store = stores_vectors(launch.side[d], b.data, g[d]);
    if (anchor_at[d] >= 0) b.anchor = statistics.tensors[0].side[d].amax = zeroed.at(anchor_at[d]);
  }
  check_tokens(launch);
  const bool needs = anchor_at[0] >= 0 || anchor_at[1] >= 0;
  const ColumnSums sums(x, needs ? statistics : launch, beside.column_sums);
  if (needs) {
    statistics.phases = kStatistics;
    check_launch(launch_quantize(statistics, stream), "quantize_anchored");
    launch.reversed = true;
  }
  launch.phases = kEncode;
  check_launch(launch_quantize(launch, stream), "quantize_anchored");
  sums.finish(stream);
  return result;
}

namespace {

std::vector<at::Tensor> quantize_anchored(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row_run, int64_t col_run, const MaybeTensor& row_anchor,
    const MaybeTensor& col_anchor, bool through_bf16) {
  return anchored(x, row, col, row_run, col_run, row_anchor, col_anchor, through_bf16);
}

// Block amaxes of each side, and tensor amaxes of two-level formats.
std::vector<at::Tensor> statistics(
    const at::Tensor& x, int64_t row, int64_t col, int64_t row0, bool through_bf16) {
  check_input(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Launch<1> launch = {};
  launch.input = input_of(x, through_bf16);
  launch.side[0] = unpack_encoding(row, 0.0, "row"), launch.side[1] = unpack_encoding(col, 0.0, "col");
  launch.count = 1, launch.phases = kStatistics;
  TensorArgs& t = launch.tensors[0] = tensor_args(x, row0);
  launch.tiles = tiles_of(t, &launch.side[1]);
  std::vector<at::Tensor> result;
  for (int d = 0; d < 2; ++d) {
    const Side& s = launch.side[d];
    if (!s.present()) continue;
    const Geometry g = geometry_of(s, d, t.rows, t.cols, row0);
    const int64_t sizes[] = {g.scale_rows, g.scale_cols};
    result.push_back(s.whole() ? new_zeros(x, sizes, stream) : new_empty(x, sizes, at::kFloat));  // maxima start from zeros
    set_geometry(t.side[d], g, d);
    t.side[d].amax = result.back().mutable_data_ptr<float>();
    if (!s.two_level()) continue;
    result.push_back(new_zeros(x, {1}, stream));
    t.side[d].tensor_amax = result.back().mutable_data_ptr<float>();
  }
  check_launch(launch_quantize(launch, stream), "statistics");
  return result;
}

// Launches over tables of as many tensors as one takes.
template <class Table>
class GroupLaunch {
 public:
  GroupLaunch(const Side (&side)[2], Input input, Phase phase, std::function<cudaError_t(const Table&)> run) : run_(run) {
    launch_.side[0] = side[0], launch_.side[1] = side[1];
    launch_.input = input, launch_.phases = phase;
  }
  Table& table() { return launch_; }
  // The tensor's place in the table.
  int32_t add(const at::Tensor& x, int64_t row0, const SideBuffers (&buffers)[2]) {
    if (launch_.count == static_cast<int32_t>(std::size(launch_.tensors))) flush();
    TensorArgs& t = launch_.tensors[launch_.count] = tensor_args(x, row0);
    t.first_tile = launch_.tiles;
    t.side[0] = buffers[0], t.side[1] = buffers[1];
    launch_.tiles += tiles_of(t);
    return launch_.count++;
  }
  void flush() {
    if (launch_.count > 0) check_launch(run_(launch_), "quantize_group");
    launch_.count = 0, launch_.tiles = 0;
  }

 private:
  Table launch_ = {};
  std::function<cudaError_t(const Table&)> run_;
};

Input check_group(at::TensorList x, at::IntArrayRef row0, bool through_bf16) {
  TORCH_CHECK_VALUE(!x.empty(), "the group has no tensor");
  TORCH_CHECK_VALUE(row0.size() == x.size(), "got ", x.size(), " tensors and ", row0.size(), " row0");
  const Input input = input_of(x[0], through_bf16);
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

// Codes and scales of every tensor, in one launch. buffers_of(i, bytes of data, bytes of scale): where tensor i's go.
template <class BuffersOf>
void encode_group(
    at::TensorList x, int64_t spec, bool columnwise, double eps, at::IntArrayRef row0, const MaybeTensors& amax,
    const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record, bool through_bf16, BuffersOf buffers_of) {
  const Input input = check_group(x, row0, through_bf16);
  Side sides[2] = {};
  const Side& side = sides[columnwise] = unpack_encoding(spec, eps, "side");
  TORCH_CHECK_VALUE(!side.stochastic && !side.rotated && !side.transposed, "a group is rounded to nearest, not rotated, ",
                    "and compact");
  TORCH_CHECK_VALUE(amax.size() == x.size() && tensor_amax.size() == x.size(), "amax, tensor_amax and offsets ",
                    "need an entry for each tensor");
  const bool delayed = enc.size() > 0;
  TORCH_CHECK_VALUE(!delayed || (enc.size() == x.size() && record.size() == x.size() && side.whole_tensor()),
                    "enc and record (delayed scaling) go with one scale a tensor, an entry for each");
  const c10::cuda::CUDAGuard guard(x[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  GroupLaunch<Launch<kGroupCapacity>> launch(
      sides, input, kEncode, [&](const auto& table) { return launch_quantize_group(table, stream); });
  for (size_t i = 0; i < x.size(); ++i) {
    const Geometry g = geometry_of(side, columnwise, x[i].size(0), x[i].size(1), row0[i]);
    // An empty shard has a scale all the same, where that is of every row.
    if (x[i].numel() == 0 && (!side.whole() || g.scale_rows * g.scale_cols == 0)) continue;
    SideBuffers both[2] = {}, &b = both[columnwise];
    std::tie(b.data, b.scale) =
        buffers_of(i, g.data_rows * g.data_cols, g.scale_rows * g.scale_cols * (side.byte_scales() ? 1 : 4));
    b.vector_store = stores_vectors(side, b.data, g);
    set_geometry(b, g, columnwise);
    b.amax = optional_buffer<float>(amax.get(i), "amax", x[0], g.scale_rows * g.scale_cols);
    b.tensor_amax = optional_buffer<float>(tensor_amax.get(i), "tensor_amax", x[0], 1);
    b.amax_given = b.amax != nullptr, b.tensor_amax_given = b.tensor_amax != nullptr;
    TORCH_CHECK_VALUE((!side.whole() || b.amax_given) && (!side.two_level() || b.tensor_amax_given), "tensor ", i,
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

// Into slices of `staging`: offsets in bytes, multiples of 16.
void quantize_group(
    at::TensorList x, int64_t spec, bool columnwise, double eps, at::IntArrayRef row0, const MaybeTensors& amax,
    const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record, const at::Tensor& staging,
    at::IntArrayRef data_offset, at::IntArrayRef scale_offset, bool through_bf16) {
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
  encode_group(x, spec, columnwise, eps, row0, amax, tensor_amax, enc, record, through_bf16, slices);
}

// Into data and scale of each tensor.
void quantize_group_out(
    at::TensorList x, int64_t spec, bool columnwise, double eps, at::IntArrayRef row0, const MaybeTensors& amax,
    const MaybeTensors& tensor_amax, const MaybeTensors& enc, at::TensorList record, at::TensorList data,
    at::TensorList scale, bool through_bf16) {
  TORCH_CHECK_VALUE(data.size() == x.size() && scale.size() == x.size(), "got ", data.size(), " data and ", scale.size(),
                    " scales; wanted one for each of ", x.size(), " tensors");
  auto given = [&](size_t i, int64_t data_bytes, int64_t scale_bytes) {
    check_buffer(data[i], "data", x[0], at::kByte, data_bytes);
    check_buffer(scale[i], "scale", x[0], scale[i].scalar_type(), scale_bytes / scale[i].element_size());
    TORCH_CHECK_VALUE(scale[i].nbytes() == static_cast<size_t>(scale_bytes), "scale ", i, " has ", scale[i].nbytes(),
                      " bytes; wanted ", scale_bytes);
    return DataAndScale(data[i].mutable_data_ptr<uint8_t>(), scale[i].mutable_data_ptr());
  };
  encode_group(x, spec, columnwise, eps, row0, amax, tensor_amax, enc, record, through_bf16, given);
}

// Block amaxes of every tensor, and tensor amaxes of two-level formats, in one launch.
std::vector<at::Tensor> statistics_group(
    at::TensorList x, int64_t spec, bool columnwise, at::IntArrayRef row0, bool through_bf16) {
  const Input input = check_group(x, row0, through_bf16);
  const Side side = unpack_encoding(spec, 0.0, "side");
  TORCH_CHECK_VALUE(!side.rotated, "a group is not rotated");
  const c10::cuda::CUDAGuard guard(x[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  Zeroed zeroed;
  std::vector<std::pair<int64_t, int64_t>> places;
  std::vector<Geometry> geometry;
  for (size_t i = 0; i < x.size(); ++i) {
    geometry.push_back(geometry_of(side, columnwise, x[i].size(0), x[i].size(1), row0[i]));
    places.emplace_back(zeroed.reserve(geometry[i].scale_rows * geometry[i].scale_cols),
                        side.two_level() ? zeroed.reserve(1) : -1);
  }
  zeroed.allocate(x[0], stream);
  Side sides[2] = {};
  sides[columnwise] = side;
  GroupLaunch<Launch<kGroupCapacity>> launch(
      sides, input, kStatistics, [&](const auto& table) { return launch_quantize_group(table, stream); });
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < x.size(); ++i) {
    SideBuffers both[2] = {}, &b = both[columnwise];
    set_geometry(b, geometry[i], columnwise);
    b.amax = zeroed.at(places[i].first);
    result.push_back(zeroed.slice(places[i].first, {geometry[i].scale_rows, geometry[i].scale_cols}));
    if (side.two_level()) {
      b.tensor_amax = zeroed.at(places[i].second);
      result.push_back(zeroed.slice(places[i].second, {1}));
    }
    if (x[i].numel() > 0) launch.add(x[i], row0[i], both);
  }
  launch.flush();
  return result;
}

// A step of Adam of fp32 masters, and of the new ones as bf16 what `out` takes: data and scale of each side (plain 8-bit
// codes of scales that need no pass over the tensor before), or with `statistics` amax and, of two-level formats,
// tensor_amax, zeros before; an amax without elements is not wanted. A skipped step gives those of the old masters.
void adam_group(
    at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::IntArrayRef scalar_row,
    const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf, int64_t row, int64_t col,
    double row_eps, double col_eps, at::IntArrayRef row0, bool statistics, at::TensorList out) {
  const AdamTensors tensors(master, grad, first, second, scalar_row, scalars, grad_scale, found_inf);
  check_group(master, row0, true);
  const Side side[2] = {unpack_encoding(row, row_eps, "row"), unpack_encoding(col, col_eps, "col")};
  size_t wanted = 0;
  for (const Side& s : side) {
    if (!s.present()) continue;
    TORCH_CHECK_VALUE(!s.stochastic && !s.rotated && !s.transposed && (statistics || (!s.whole() && !s.four_bit())),
                      "Adam's kernel makes compact 8-bit codes, rounded to nearest, of scales that need no pass over the "
                      "tensor before, or statistics that are not of rotated values");
    wanted += statistics ? 1 + s.two_level() : 2;
  }
  TORCH_CHECK_VALUE(wanted > 0 && out.size() == wanted * master.size(), "out has ", out.size(), " tensors; wanted ",
                    wanted, " for each of ", master.size(), " masters");
  const c10::cuda::CUDAGuard guard(master[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  GroupLaunch<AdamGroup> launch(side, Input::kF32AsBF16, statistics ? kStatistics : kEncode, [&](const AdamGroup& table) {
    return launch_adam_group(table, tensors.of_grad == at::kBFloat16, tensors.of_moments == at::kBFloat16, stream);
  });
  launch.table().step = tensors.step;
  size_t at = 0;
  for (size_t i = 0; i < master.size(); ++i) {
    const AdamTensor t = tensors.at(i);
    SideBuffers buffers[2] = {};
    for (int d = 0; d < 2; ++d) {
      const Side& s = side[d];
      if (!s.present()) continue;
      const Geometry g = geometry_of(s, d, master[i].size(0), master[i].size(1), row0[i]);
      SideBuffers& b = buffers[d];
      set_geometry(b, g, d);
      const int64_t scales = g.scale_rows * g.scale_cols;
      auto take = [&](const char* name, at::ScalarType dtype, int64_t numel) {
        check_buffer(out[at], name, master[0], dtype, numel);
        return out[at++].mutable_data_ptr();
      };
      if (statistics) {
        const bool is_wanted = out[at].numel() != 0;
        b.amax = static_cast<float*>(take("amax", at::kFloat, is_wanted ? scales : 0));
        if (!is_wanted) b.amax = nullptr;
        if (s.two_level()) b.tensor_amax = static_cast<float*>(take("tensor_amax", at::kFloat, 1));
      } else {
        b.data = static_cast<uint8_t*>(take("data", at::kByte, g.data_rows * g.data_cols));
        b.scale = take("scale", s.byte_scales() ? at::kByte : at::kFloat, scales);
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

Encodings encode_stacked(
    const at::Tensor& x, const Side& row, const Side& col, bool through_bf16, const StackedHistories (&histories)[2]) {
  check_cuda(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 3 && x.numel() > 0 && (x.stride(2) == 1 || x.size(2) == 1), "x has shape ", x.sizes(),
                    " and strides ", x.strides(), "; wanted matrices [count, rows, cols] that are not empty, of contiguous rows");
  const int64_t count = x.size(0);
  Launch<1> one = {};
  const Side(&side)[2] = one.side;
  one.side[0] = row, one.side[1] = col;
  Encodings made;
  Geometry g[2];
  Zeroed zeroed;
  int64_t amax_at[2] = {-1, -1};
  for (int d = 0; d < 2; ++d) {
    const Side& s = side[d];
    if (!s.present()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!s.four_bit() && !s.stochastic, "matrices are stacked in 8 bits, rounded to nearest");
    g[d] = geometry_of(s, d, x.size(1), x.size(2), 0);
    made[d].data = new_empty(x, {count, g[d].data_rows, g[d].data_cols}, at::kByte);
    const int64_t scales = s.scale_layout == ScaleLayout::kCompact ? g[d].scale_rows * g[d].scale_cols : g[d].scale_numel;
    made[d].scale = new_empty(x, {count, scales}, s.byte_scales() ? at::kByte : at::kFloat);
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
  const Input input = input_of(x, through_bf16);
  if (input != Input::kBF16 && input != Input::kF32AsBF16) {  // the group's kernels hold bf16
    const MaybeTensor none;
    for (int64_t i = 0; i < count; ++i) {
      const auto enc = [&](int d) { return histories[d].enc.empty() ? none : MaybeTensor(histories[d].enc[i]); };
      const auto record = [&](int d) { return histories[d].record.empty() ? nullptr : &histories[d].record[i]; };
      const MaybeTensor encs[2] = {enc(0), enc(1)};
      const Known unknown[2] = {{none, none, encs[0], none, record(0)}, {none, none, encs[1], none, record(1)}};
      Encodings out;
      for (int d = 0; d < 2; ++d)
        if (side[d].present()) out[d].data = made[d].data.select(0, i), out[d].scale = made[d].scale.select(0, i);
      encode(x.select(0, i), row, col, unknown, 0, through_bf16, false, &out);
    }
    return made;
  }
  const c10::cuda::CUDAGuard guard(x.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const bool twins = are_twins(side, one.tensors[0].side);  // of one amax, which is taken once
  for (int d = 0; d < 2; ++d) {
    if (!side[d].present() || !side[d].whole()) continue;
    amax_at[d] = d == 1 && twins ? amax_at[0] : zeroed.reserve(count * g[d].scale_rows * g[d].scale_cols);
  }
  zeroed.allocate(x, stream);
  for (const Phase phase : {kStatistics, kEncode}) {
    Side asked[2] = {row, col};
    for (int d = 0; d < 2; ++d)
      if (phase == kStatistics && (amax_at[d] < 0 || (d == 1 && twins))) asked[d].element = Element::kNone;
    if (!asked[0].present() && !asked[1].present()) continue;
    GroupLaunch<Launch<kGroupCapacity>> launch(
        asked, input, phase, [&](const auto& table) { return launch_quantize_group(table, stream); });
    launch.table().twins = twins && !delayed;
    for (int64_t i = 0; i < count; ++i) {
      SideBuffers both[2] = {};
      for (int d = 0; d < 2; ++d) {
        if (!asked[d].present()) continue;
        SideBuffers& b = both[d];
        set_geometry(b, g[d], d);
        if (amax_at[d] >= 0) b.amax = zeroed.at(amax_at[d]) + i * g[d].scale_rows * g[d].scale_cols;
        b.amax_given = phase == kEncode && b.amax != nullptr;
        b.data = made[d].data.mutable_data_ptr<uint8_t>() + i * made[d].data.stride(0);
        b.scale = static_cast<uint8_t*>(made[d].scale.mutable_data_ptr()) + i * made[d].scale.stride(0) * made[d].scale.element_size();
        b.vector_store = stores_vectors(side[d], b.data, g[d]);
        if (phase == kEncode && !histories[d].enc.empty()) b.enc = histories[d].enc[i].const_data_ptr<float>();
        if (phase == kEncode && !histories[d].record.empty()) b.record = histories[d].record[i].mutable_data_ptr<float>();
      }
      launch.add(x.select(0, i), 0, both);
    }
    launch.flush();
  }
  return made;
}

Geometry geometry_of(const Side& s, bool columnwise, int64_t rows, int64_t cols, int64_t row0) {
  Geometry g = {encoding_sizes(s, columnwise, rows, cols, row0)};
  const auto at = [](int64_t n) { return static_cast<int32_t>(n); };
  const int32_t line_blocks = at(columnwise ? g.scale_cols : g.scale_rows);
  const int32_t blocks = at(columnwise ? g.scale_rows : g.scale_cols);
  g.compact = columnwise ? Grid{line_blocks, blocks, 1, line_blocks} : Grid{line_blocks, blocks, blocks, 1};
  g.stored = g.compact;
  if (s.scale_layout == ScaleLayout::kCompact || s.whole()) return g;
  const bool by_line = s.byte_scales() || s.outer != 1;  // blocks of a line lie side by side
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
      "quantize_anchored(Tensor x, int row, int col, int row_run, int col_run, Tensor? row_anchor, Tensor? col_anchor, "
      "bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_anchored), compliant());
  m.def(
      "statistics(Tensor x, int row, int col, SymInt row0, bool through_bf16) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CUDA, statistics), compliant());
  m.def(
      "quantize_group(Tensor[] x, int side, bool columnwise, float eps, int[] row0, Tensor?[] amax, "
      "Tensor?[] tensor_amax, Tensor?[] enc, Tensor(b!)[] record, Tensor(a!) staging, int[] data_offset, int[] scale_offset, bool through_bf16) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, quantize_group), compliant());
  m.def("column_sums(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CUDA, column_sums), compliant());
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
