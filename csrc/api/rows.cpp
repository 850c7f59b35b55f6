// SPDX-License-Identifier: Apache-2.0
// Host side of the operators that move rows between buffers: check, allocate, launch.
#include <limits>
#include <tuple>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "api/checks.h"
#include "layout/rows.h"

namespace fsdp_quant {

namespace {

int64_t row_bytes(const at::Tensor& t) {
  return c10::multiply_integers(t.sizes().slice(1)) * static_cast<int64_t>(t.element_size());
}

class Gather {
 public:
  // index: which of `source_rows` are read, one for each row that is written; without it all are.
  Gather(const at::Tensor& like, const MaybeTensor& index, int64_t source_rows) {
    check_cuda(like, "the rows");
    args_.rows = source_rows;
    if (!index.has_value()) return;
    check_buffer(*index, "index", like, at::kLong, index->numel());
    TORCH_CHECK_VALUE(source_rows > 0 || index->numel() == 0, "index names ", index->numel(), " rows of none");
    args_.index = index->const_data_ptr<int64_t>(), args_.rows = index->numel();
  }
  int64_t rows() const { return args_.rows; }
  // Bytes: of a row, and from row to row.
  void add(const void* source, int64_t source_pitch, void* out, int64_t out_pitch, int64_t width) {
    if (width == 0) return;
    parts_.push_back({source, out, source_pitch, out_pitch, width});
    for (const int64_t n : {source_pitch, out_pitch, width, static_cast<int64_t>(reinterpret_cast<uintptr_t>(source)),
                            static_cast<int64_t>(reinterpret_cast<uintptr_t>(out))})
      while (n % unit_ != 0) unit_ /= 2;
  }
  void launch(const char* name) {
    if (parts_.empty() || args_.rows == 0) return;
    int64_t end = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Bytes& p = parts_[i];
      end += p.width / unit_;
      TORCH_CHECK_VALUE(end <= std::numeric_limits<int32_t>::max() / 2, name, ": rows have ", end * unit_, " bytes");
      args_.parts[i] = {p.source, p.out, p.source_pitch / unit_, p.out_pitch / unit_, static_cast<int32_t>(end)};
    }
    args_.unit = static_cast<int32_t>(unit_), args_.units = static_cast<int32_t>(end);
    check_launch(launch_gather_rows(args_, c10::cuda::getCurrentCUDAStream()), name, args_.rows, " rows of ", end * unit_, " bytes");
  }

 private:
  struct Bytes {
    const void* source;
    void* out;
    int64_t source_pitch, out_pitch, width;
  };
  GatherRows args_ = {};
  std::vector<Bytes> parts_;
  int64_t unit_ = 16;
};

void check_count(at::TensorList buffers) {
  TORCH_CHECK_VALUE(!buffers.empty() && buffers.size() <= kRowParts, "got ", buffers.size(), " buffers; wanted 1 to ", kRowParts);
}

// Rows of the buffers [rows, ..], side by side: uint8 [rows, bytes], or those of `index`.
at::Tensor pack_rows(at::TensorList buffers, const MaybeTensor& index) {
  check_count(buffers);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(buffers[0].device());
  Gather gather(buffers[0], index, buffers[0].size(0));
  std::vector<at::Tensor> sources;
  int64_t width = 0, at = 0;
  for (const at::Tensor& b : buffers) {
    TORCH_CHECK_VALUE(b.dim() > 0 && b.size(0) == buffers[0].size(0) && b.device() == buffers[0].device(), "a buffer is ", b.sizes(),
                      " on ", b.device(), "; wanted ", buffers[0].size(0), " rows on ", buffers[0].device());
    sources.push_back(b.contiguous()), width += row_bytes(b);
  }
  const at::Tensor packed = new_empty(buffers[0], {gather.rows(), width}, at::kByte);
  for (const at::Tensor& s : sources) {
    const int64_t bytes = row_bytes(s);
    gather.add(s.const_data_ptr(), bytes, packed.mutable_data_ptr<uint8_t>() + at, width, bytes);
    at += bytes;
  }
  gather.launch("pack_rows");
  return packed;
}

// The buffers of packed rows, or of those of `index`, each with the dtype and the trailing sizes of one of `like`.
std::vector<at::Tensor> unpack_rows(const at::Tensor& packed, const MaybeTensor& index, at::TensorList like) {
  check_count(like);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::cuda::CUDAGuard guard(packed.device());
  int64_t width = 0, at = 0;
  for (const at::Tensor& b : like) width += row_bytes(b);
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(1) == width, "packed rows are ", packed.sizes(), "; wanted ", width, " bytes each");
  check_buffer(packed, "packed", packed, at::kByte, packed.numel());
  Gather gather(packed, index, packed.size(0));
  std::vector<at::Tensor> result;
  for (const at::Tensor& b : like) {
    std::vector<int64_t> sizes = b.sizes().vec();
    sizes[0] = gather.rows();
    result.push_back(new_empty(packed, sizes, b.scalar_type()));
    const int64_t bytes = row_bytes(b);
    gather.add(packed.const_data_ptr<uint8_t>() + at, width, result.back().mutable_data_ptr(), bytes, bytes);
    at += bytes;
  }
  gather.launch("unpack_rows");
  return result;
}

// int64 [rows] twice: see PieceOrders.
std::tuple<at::Tensor, at::Tensor> piece_orders(const at::Tensor& ends, const at::Tensor& shifts, int64_t rows) {
  check_cuda(ends, "ends");
  check_buffer(ends, "ends", ends, at::kLong, ends.numel());
  check_buffer(shifts, "shifts", ends, at::kLong, ends.numel());
  TORCH_CHECK_VALUE(ends.numel() > 0 || rows == 0, "there are ", rows, " rows of no piece");
  const c10::cuda::CUDAGuard guard(ends.device());
  const at::Tensor order = new_empty(ends, {rows}, at::kLong), inverse = new_empty(ends, {rows}, at::kLong);
  if (rows == 0) return {order, inverse};
  const PieceOrders args = {ends.const_data_ptr<int64_t>(), shifts.const_data_ptr<int64_t>(), order.mutable_data_ptr<int64_t>(),
                            inverse.mutable_data_ptr<int64_t>(), rows, static_cast<int32_t>(ends.numel())};
  check_launch(launch_piece_orders(args, c10::cuda::getCurrentCUDAStream()), "piece_orders", rows, " rows");
  return {order, inverse};
}

}  // namespace

void register_rows(torch::Library& m) {  // eager mode only
  m.def("pack_rows(Tensor[] buffers, Tensor? index) -> Tensor", torch::dispatch(c10::DispatchKey::CUDA, pack_rows));
  m.def("unpack_rows(Tensor packed, Tensor? index, Tensor[] like) -> Tensor[]", torch::dispatch(c10::DispatchKey::CUDA, unpack_rows));
  m.def("piece_orders(Tensor ends, Tensor shifts, int rows) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CUDA, piece_orders));
}

}  // namespace fsdp_quant
