// SPDX-License-Identifier: Apache-2.0
// Checks, geometry and workspaces of quantize launches.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>

#include "api/checks.h"
#include "api/quantize.h"
#include "layout/scalars.h"

namespace fsdp_quant {

inline Input input_of(const at::Tensor& x, bool round_to_bf16) {
  switch (x.scalar_type()) {
    case at::kBFloat16:
      return Input::kBF16;
    case at::kHalf:
      return Input::kF16;
    case at::kFloat:
      return round_to_bf16 ? Input::kF32AsBF16 : Input::kF32;
    default:
      TORCH_CHECK_VALUE(false, "x is ", x.scalar_type(), "; quantize takes bfloat16, float16 and float32");
  }
}

inline void check_input(const at::Tensor& x) {
  check_cuda(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, "x has shape ", x.sizes(), "; quantize takes [rows, cols]");
  TORCH_CHECK_VALUE(
      x.stride(1) == 1 || x.size(1) == 1, "x has strides ", x.strides(), "; its rows must be contiguous");
  TORCH_CHECK_VALUE(x.numel() > 0, "x is empty: ", x.sizes());
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - kTile;
  TORCH_CHECK_VALUE(x.size(0) < kLargest && x.size(1) < kLargest, "x has shape ", x.sizes(), "; each extent must be below 2^31");
}

inline int32_t shift_of(int64_t row0) { return static_cast<int32_t>(row0 % kTile); }

inline TensorArgs tensor_args(const at::Tensor& x, int64_t row0) {
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

// Tiles of a tensor; rotation pads its rows. Sets tile_rows.
inline int32_t tiles_of(TensorArgs& t, const EncodingSpec& col) {
  const bool fills = col.present() && col.rotated;
  const int64_t rows = fills ? ceil_div(t.rows, kRotationBlock) * kRotationBlock : t.rows;
  t.tile_rows = static_cast<int32_t>(std::max<int64_t>(ceil_div(rows + t.shift, kTile), 1));
  const int64_t tiles = static_cast<int64_t>(t.tile_rows) * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max(), "x has ", tiles, " tiles; one launch takes 2^31");
  return static_cast<int32_t>(tiles);
}

inline Launch<1> launch_of(
    const at::Tensor& x, int64_t row0, Input input, const EncodingSpec& row, const EncodingSpec& col) {
  Launch<1> launch = {};
  launch.input = input, launch.spec[0] = row, launch.spec[1] = col, launch.count = 1;
  launch.tensors[0] = tensor_args(x, row0);
  launch.tiles = tiles_of(launch.tensors[0], col);
  return launch;
}

// Set the token tables, and the number of rows; returns the rows of the columnwise direction.
inline int64_t set_tokens(Launch<1>& launch, const TokenTables* tokens) {
  TensorArgs& t = launch.tensors[0];
  if (tokens == nullptr) return t.rows;
  const int64_t tiles = tokens->tiles * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max() - kTile, tiles, " tiles; one launch takes 2^31");
  t.tile_rows = static_cast<int32_t>(tokens->tiles);
  launch.tiles = static_cast<int32_t>(tiles), launch.sources = tokens->sources;
  if (tokens->order.defined()) {
    TORCH_CHECK_VALUE(launch.input == Input::kBF16 && t.cols % 8 == 0 && t.vector_load,
                      "rows that are read by their order are bfloat16, aligned to 16 bytes, with columns in eights");
    launch.order = tokens->order.const_data_ptr<int64_t>();
    t.rows = static_cast<int32_t>(tokens->order.numel());
    if (t.tile_rows > 1) t.by_band = Division::by(static_cast<uint32_t>(t.tile_rows));
  }
  return tokens->tiles * kTile;
}

// Call after set_tokens: where halves of columns are whole tiles, a block computes dg and du.
inline void set_gated(Launch<1>& launch, const GatedInput& gated) {
  launch.up = gated.up.const_data_ptr(), launch.up_stride = tensor_args(gated.up, 0).row_stride;
  launch.activation = gated.kind, launch.gradient = gated.gradient;
  if (gated.weights.defined()) launch.row_weights = gated.weights.const_data_ptr<float>();
  if (gated.dots.defined()) launch.row_dots = gated.dots.mutable_data_ptr<float>();
  TensorArgs& t = launch.tensors[0];
  if (!launch.gradient || t.cols % (2 * kTile) != 0) return;
  launch.tiles /= 2, t.tile_cols /= 2, t.by_band = Division::by(4u * static_cast<uint32_t>(t.tile_cols));
}

inline void check_tokens(const Launch<1>& launch) {
  TORCH_CHECK_NOT_IMPLEMENTED(launch.sources == nullptr || supports_sources(launch),
                              "rows of bfloat16 are gathered for blocks of (1, 128), anchors, scales of all rows, rounded to nearest, and for 4 bits");
}

inline void check_cut(const EncodingSpec& s, bool columnwise, int64_t row0) {
  TORCH_CHECK_VALUE(!s.chooses() || row0 % (columnwise ? s.contraction : s.outer) == 0, "rows from ", row0,
                    " begin inside a block, whose scale follows from all values of a block; cut between blocks");
}

inline bool stores_vectors(const EncodingSpec& s, const void* data, const Geometry& g) {
  const int64_t width = s.transposed || s.operand() ? 16 : s.four_bit() ? 4 : s.six_bit() ? 2 : 8;
  return is_aligned(data, width) && g.data_cols % width == 0;
}

inline void set_geometry(EncodingBuffers& b, const Geometry& g, bool columnwise) {
  b.lines = static_cast<int32_t>(columnwise ? g.cols : g.rows);
  b.length = static_cast<int32_t>(columnwise ? g.rows : g.cols);
  b.compact = g.compact, b.stored = g.stored;
}

// fp32 workspace for atomic maxima, cleared by one memset.
class ZeroedWorkspace {
 public:
  // Reserve `count` words; the pointer is valid after `allocate`.
  int64_t reserve(int64_t count) { return std::exchange(size_, size_ + std::max<int64_t>(ceil_div(count, 4) * 4, 4)); }
  void allocate(const at::Tensor& like, cudaStream_t stream) {
    if (size_ == 0) return;
    buffer_ = new_empty(like, {size_}, at::kFloat);
    C10_CUDA_CHECK(cudaMemsetAsync(buffer_.mutable_data_ptr(), 0, size_ * sizeof(float), stream));
  }
  float* at(int64_t offset) const { return buffer_.mutable_data_ptr<float>() + offset; }
  // sizes: one or two dims.
  at::Tensor slice(int64_t offset, at::IntArrayRef sizes) const {
    const int64_t strides[] = {sizes.back(), 1};
    return buffer_.as_strided(sizes, at::IntArrayRef(strides).slice(2 - sizes.size()), offset);
  }

 private:
  int64_t size_ = 0;
  at::Tensor buffer_;
};

// Zeros in an own allocation, since results of an operator must not share memory.
inline at::Tensor new_zeros(const at::Tensor& like, at::IntArrayRef sizes, cudaStream_t stream) {
  at::Tensor zeros = new_empty(like, sizes, at::kFloat);
  if (zeros.numel() > 0) C10_CUDA_CHECK(cudaMemsetAsync(zeros.mutable_data_ptr(), 0, zeros.nbytes(), stream));
  return zeros;
}

// Column sums computed by a quantize launch.
class ColumnSums {
 public:
  // to: null, or receives the sums of x.
  ColumnSums(const at::Tensor& x, Launch<1>& launch, at::Tensor* to) : to_(to) {
    if (to == nullptr) return;
    TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16 && launch.up == nullptr && launch.sources == nullptr, "x is ",
                      x.scalar_type(), "; column sums need bfloat16 that is neither gated nor grouped");
    TensorArgs& t = launch.tensors[0];
    partial_ = new_empty(x, {t.tile_rows, t.cols}, at::kFloat);
    *to_ = new_empty(x, {t.cols}, at::kBFloat16);
    launch.sums = partial_.mutable_data_ptr<float>();
  }
  // Call after the launch.
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

template <class T>
T* optional_buffer(const MaybeTensor& t, const char* name, const at::Tensor& x, int64_t numel) {
  if (!t.has_value()) return nullptr;
  check_buffer(*t, name, x, c10::CppTypeToScalarType<T>::value, numel);
  return static_cast<T*>(const_cast<void*>(t->const_data_ptr()));
}

// Split a list of tensors into launches over tables; a full table is flushed.
template <class Table>
class MultiTensorLaunch {
 public:
  MultiTensorLaunch(const char* name, std::function<cudaError_t(const Table&)> launch) : name_(name), launch_(launch) {}
  Table& table() { return table_; }
  // Returns the tensor's index in the table.
  template <class T>
  int32_t add(const T& tensor, int64_t tiles) {
    const bool is_full = table_.count == static_cast<int32_t>(std::size(table_.tensors));
    if (is_full || tiles > std::numeric_limits<int32_t>::max() - table_.tiles) flush();
    table_.tensors[table_.count] = tensor, table_.tensors[table_.count].first_tile = table_.tiles;
    table_.tiles += static_cast<int32_t>(tiles);
    return table_.count++;
  }
  void flush() {
    if (table_.count > 0) check_launch(launch_(table_), name_, table_.count, " tensors, ", table_.tiles, " tiles");
    table_.count = 0, table_.tiles = 0;
  }

 private:
  const char* name_;
  Table table_ = {};
  std::function<cudaError_t(const Table&)> launch_;
};

template <class Table>
struct QuantizeGroup : MultiTensorLaunch<Table> {
  QuantizeGroup(const EncodingSpec (&spec)[2], Input input, Phase phase, std::function<cudaError_t(const Table&)> launch)
      : MultiTensorLaunch<Table>("quantize_group", launch) {
    Table& table = this->table();
    table.spec[0] = spec[0], table.spec[1] = spec[1], table.input = input, table.phases = phase;
  }
  int32_t add(const at::Tensor& x, int64_t row0, const EncodingBuffers (&buffers)[2]) {
    return add(tensor_args(x, row0), buffers);
  }
  int32_t add(TensorArgs t, const EncodingBuffers (&buffers)[2]) {
    t.buffers[0] = buffers[0], t.buffers[1] = buffers[1];
    const int32_t tiles = tiles_of(t, {});
    return MultiTensorLaunch<Table>::add(t, tiles);
  }
};

}  // namespace fsdp_quant
