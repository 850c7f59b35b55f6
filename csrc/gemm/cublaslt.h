// One product by cuBLASLt. Plain data: host code without torch includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "gemm/product.h"

namespace fsdp_quant {

// What products that differ in addresses alone share. cuBLASLt reads scales and bias from the descriptor of the
// operation, so a plan belongs to one thread and is never copied.
class Plan {
 public:
  Plan(const Product& p, int device);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  size_t workspace() const { return workspace_; }  // bytes
  // `workspace`: that many bytes, aligned to 256.
  void launch(const Product& p, void* workspace, cudaStream_t stream);

 private:
  void set_addresses(const Product& p);

  cublasLtHandle_t handle_;
  cublasLtMatmulDescOpaque_t operation_;
  cublasLtMatrixLayoutOpaque_t left_, right_, out_;
  cublasLtMatmulAlgo_t algorithm_;
  size_t workspace_;
  const float* beta_;
};

// cuBLASLt has no algorithm for a product, or none of its rank.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The calling thread's plan, made where it has none; valid until its next call. `device` is the current one. Throws
// Unsupported, and std::runtime_error when cuBLASLt fails.
Plan& plan_of(const Product& p, int device);

}  // namespace fsdp_quant
