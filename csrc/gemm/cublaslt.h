// SPDX-License-Identifier: Apache-2.0
// One product by cuBLASLt. Plain data: host code without torch includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include <cuda_runtime_api.h>

#include "gemm/gemm_problem.h"

namespace fsdp_quant {

// What products that differ in addresses alone share. cuBLASLt reads scales and bias from the descriptor of the
// operation, so a plan belongs to one thread and is never copied.
class MatmulPlan {
 public:
  MatmulPlan(const GemmProblem& p, int device);
  ~MatmulPlan();

  size_t workspace() const;  // bytes
  // `workspace`: that many bytes, aligned to 256.
  void launch(const GemmProblem& p, void* workspace, cudaStream_t stream);

 private:
  struct State;  // cuBLASLt's
  void set_addresses(const GemmProblem& p);

  const std::unique_ptr<State> state_;
};

// cuBLASLt has no algorithm for a product.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The calling thread's plan, made where it has none; valid until its next call. `device` is the current one. Throws
// Unsupported, and std::runtime_error when cuBLASLt fails.
MatmulPlan& matmul_plan_of(const GemmProblem& p, int device);

}  // namespace fsdp_quant
