// One product by cuBLASLt. Plain data: host code without torch includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

namespace fsdp_quant {

// Scales of an operand [outer, K]: none; fp32 [1]; fp32 [outer]; fp32 [ceil(K / 128), outer rounded up to 4]; fp32
// [ceil(outer / 128), ceil(K / 128) rounded up to 4]; one byte for 32 (e8m0) or 16 (e4m3) elements along K, in 128 x 4
// tiles of 512 bytes. The numbers are Python's.
enum class Scaling : int32_t { kNone = 0, kTensor = 1, kRow = 2, k1x128 = 3, k128x128 = 4, kE8M0 = 5, kE4M3 = 6 };

struct Operand {
  const void* data;
  const void* scale;  // null: none
  int64_t ld;         // elements from a row to the next; where K is not contiguous, from a column to the next
  cudaDataType_t type;
  Scaling scaling;
  bool k_major;       // K is contiguous
};

// out[m, n] = alpha * a[m, k] b[n, k]^T (+ out) (+ bias[n]), of scaled operands.
struct Product {
  Operand a, b;
  void* out;           // rows of n contiguous elements
  const void* bias;    // null: none
  const float* alpha;  // in device memory; null: 1
  int64_t m, n, k, out_ld;
  cudaDataType_t out_type, bias_type;
  int32_t sm_count;    // multiprocessors to plan for; 0: all
  int32_t algorithm;   // rank in the heuristic's list
  bool accumulate;
  bool fast_accumulation;  // 8-bit operands: partial sums are not promoted
};

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
