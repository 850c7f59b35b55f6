// SPDX-License-Identifier: Apache-2.0
// A dense GEMM by cuBLASLt, for host code without torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include <cuda_runtime_api.h>

#include "gemm/gemm_problem.h"

namespace fsdp_quant {

// Plan shared by GEMMs that differ only in addresses. cuBLASLt reads scales and bias from the descriptor, so a plan belongs
// to one thread and is not copied.
class MatmulPlan {
 public:
  MatmulPlan(const GemmProblem& p, int device);
  ~MatmulPlan();

  size_t workspace() const;  // bytes
  // workspace: workspace() bytes, aligned to 256.
  void launch(const GemmProblem& p, void* workspace, cudaStream_t stream);

 private:
  struct State;  // of cuBLASLt
  void set_addresses(const GemmProblem& p);

  const std::unique_ptr<State> state_;
};

// cuBLASLt has no algorithm for a GEMM.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The calling thread's cached plan, valid until its next call. device: the current one. Throws Unsupported, or
// std::runtime_error if cuBLASLt fails.
MatmulPlan& matmul_plan_of(const GemmProblem& p, int device);

}  // namespace fsdp_quant
