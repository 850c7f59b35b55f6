// SPDX-License-Identifier: Apache-2.0
// Argument checks of the operators. Each error states the actual and the expected value.
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

// Tag of operators that compiled graphs may contain: the schema lists all mutations, results alias no input, a fake exists,
// and the operator neither synchronizes nor reads host state that results depend on.
inline std::vector<at::Tag> compliant() { return {at::Tag::pt2_compliant_tag}; }

inline void check_cuda(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.is_cuda(), name, " is on ", t.device(), "; the operator runs on CUDA tensors");
}

// Check that t is contiguous, has numel elements of dtype, and is on the device of `like`.
inline void check_buffer(
    const at::Tensor& t, const char* name, const at::Tensor& like, at::ScalarType dtype, int64_t numel) {
  TORCH_CHECK_VALUE(
      t.device() == like.device() && t.scalar_type() == dtype && t.numel() == numel && t.is_contiguous(), name, " is ",
      t.is_contiguous() ? "contiguous " : "not contiguous ", t.scalar_type(), " ", t.sizes(), " on ", t.device(),
      "; wanted ", numel, " contiguous elements of ", dtype, " on ", like.device());
}

// Raise a launch error and clear it, so that later calls do not report it again. of: shapes for the message.
template <class... Of>
void check_launch(cudaError_t error, const char* name, const Of&... of) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  TORCH_CHECK(false, "fsdp_quant::", name, ": ", cudaGetErrorString(error), sizeof...(of) > 0 ? ", of " : "", of...);
}

// Allocate without the dispatcher, in half the time of at::empty. Fills with NaN, or sets all bits, where
// torch.utils.deterministic.fill_uninitialized_memory is in force.
inline at::Tensor new_empty(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor result(at::detail::empty_cuda(sizes, dtype, like.device(), std::nullopt));
  const at::Context& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    const bool floating = at::isFloatingType(dtype);
    result.fill_(floating ? at::Scalar(NAN) : at::Scalar(dtype == at::kByte ? 255 : -1));
  }
  return result;
}

// Whether a CUDA graph records what is launched on the stream.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

inline bool is_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fsdp_quant
