// SPDX-License-Identifier: Apache-2.0
// What launches of quantize kernels are filled with: checks, geometry, workspaces.
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

// Sets the rows of tiles too: those that a rotation fills beyond the tensor have tiles.
inline int32_t tiles_of(TensorArgs& t, const EncodingSpec* col = nullptr) {
  const bool fills = col != nullptr && col->present() && col->rotated;
  const int64_t rows = fills ? ceil_div(t.rows, kRotationBlock) * kRotationBlock : t.rows;
  t.tile_rows = static_cast<int32_t>(std::max<int64_t>(ceil_div(rows + t.shift, kTile), 1));
  const int64_t tiles = static_cast<int64_t>(t.tile_rows) * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max(), "x has ", tiles, " tiles; one launch takes 2^31");
  return static_cast<int32_t>(tiles);
}

// The rows of the columnwise direction, which sources gather into tiles; x's own without.
inline int64_t set_tokens(Launch<1>& launch, const Tokens* tokens) {
  TensorArgs& t = launch.tensors[0];
  if (tokens == nullptr) return t.rows;
  const int64_t tiles = tokens->tiles * t.tile_cols;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max() - kTile, tiles, " tiles; one launch takes 2^31");
  t.tile_rows = static_cast<int32_t>(tokens->tiles);
  launch.tiles = static_cast<int32_t>(tiles), launch.sources = tokens->sources;
  return tokens->tiles * kTile;
}

inline void check_tokens(const Launch<1>& launch) {
  TORCH_CHECK_NOT_IMPLEMENTED(launch.sources == nullptr || takes_sources(launch),
                              "rows of bfloat16 are gathered for blocks of (1, 128), anchors, scales of all rows, rounded to nearest, and for 4 bits");
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

// One fp32 workspace for everything that atomic maxima start from: zeroed by one memset.
class ZeroedWorkspace {
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
inline at::Tensor new_zeros(const at::Tensor& like, at::IntArrayRef sizes, cudaStream_t stream) {
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

template <class T>
T* optional_buffer(const MaybeTensor& t, const char* name, const at::Tensor& x, int64_t numel) {
  if (!t.has_value()) return nullptr;
  check_buffer(*t, name, x, c10::CppTypeToScalarType<T>::value, numel);
  return static_cast<T*>(const_cast<void*>(t->const_data_ptr()));
}

// Launches over tables of as many tensors as one takes.
template <class Table>
class MultiTensorLaunch {
 public:
  MultiTensorLaunch(const EncodingSpec (&spec)[2], Input input, Phase phase, std::function<cudaError_t(const Table&)> launch) : launch_table_(launch) {
    launch_.spec[0] = spec[0], launch_.spec[1] = spec[1];
    launch_.input = input, launch_.phases = phase;
  }
  Table& table() { return launch_; }
  // The tensor's place in the table.
  int32_t add(const at::Tensor& x, int64_t row0, const EncodingBuffers (&buffers)[2]) {
    if (launch_.count == static_cast<int32_t>(std::size(launch_.tensors))) flush();
    TensorArgs& t = launch_.tensors[launch_.count] = tensor_args(x, row0);
    t.first_tile = launch_.tiles;
    t.buffers[0] = buffers[0], t.buffers[1] = buffers[1];
    launch_.tiles += tiles_of(t);
    return launch_.count++;
  }
  void flush() {
    if (launch_.count > 0) check_launch(launch_table_(launch_), "quantize_group", launch_.count, " tensors, ", launch_.tiles, " tiles");
    launch_.count = 0, launch_.tiles = 0;
  }

 private:
  Table launch_ = {};
  std::function<cudaError_t(const Table&)> launch_table_;
};

}  // namespace fsdp_quant
