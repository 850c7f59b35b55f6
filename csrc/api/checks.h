// SPDX-License-Identifier: Apache-2.0
// Checks that every operator makes before it launches; each error says what was got and wanted.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace fsdp_quant {

using MaybeTensor = std::optional<at::Tensor>;

// Of an operator that a compiled graph may hold: the schema says what it writes, results share memory with no input, it
// has a fake, and it neither waits for the device nor depends on state of the host.
inline std::vector<at::Tag> compliant() { return {at::Tag::pt2_compliant_tag}; }

inline void check_cuda(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.is_cuda(), name, " is on ", t.device(), "; the operator runs on CUDA tensors");
}

// A buffer of exactly this many elements of this type, contiguous, on the device of `like`.
inline void check_buffer(
    const at::Tensor& t, const char* name, const at::Tensor& like, at::ScalarType dtype, int64_t numel) {
  TORCH_CHECK_VALUE(
      t.device() == like.device() && t.scalar_type() == dtype && t.numel() == numel && t.is_contiguous(), name, " is ",
      t.is_contiguous() ? "contiguous " : "not contiguous ", t.scalar_type(), " ", t.sizes(), " on ", t.device(),
      "; wanted ", numel, " contiguous elements of ", dtype, " on ", like.device());
}

// Raise an error of a launch, and leave none as the thread's last error for whoever asks next. of: shapes and what else was
// launched, for the message.
template <class... Of>
void check_launch(cudaError_t error, const char* name, const Of&... of) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  TORCH_CHECK(false, "fsdp_quant::", name, ": ", cudaGetErrorString(error), sizeof...(of) > 0 ? ", of " : "", of...);
}

// On the device of `like`, without the dispatcher: half of the microseconds of at::empty. Filled with NaN, or with bits that
// are all set, where torch.utils.deterministic.fill_uninitialized_memory is in force.
inline at::Tensor new_empty(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor result(at::detail::empty_cuda(sizes, dtype, like.device(), std::nullopt));
  const at::Context& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    const bool floating = at::isFloatingType(dtype);
    result.fill_(floating ? at::Scalar(NAN) : at::Scalar(dtype == at::kByte ? 255 : -1));
  }
  return result;
}

inline bool is_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fsdp_quant
