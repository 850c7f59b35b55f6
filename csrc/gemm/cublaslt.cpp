// SPDX-License-Identifier: Apache-2.0
// A GEMM in cuBLASLt's terms. Its matrices are column-major, so a row-major [r, c] is its [c, r]: it computes out^T[n, m] =
// op(b) op(a), with b as left operand.
//
// It requires K-major codes, rows of 16 bytes, N a multiple of 16, line and block scales aligned to 16 bytes, and no bias for
// fp8 GEMMs with fp32 output; `native.gemm` pads or adds what does not fit. We use the first algorithm of the heuristic's
// list.
#include "gemm/cublaslt.h"

#include <array>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <cublasLt.h>

#include "gemm/epilogue.h"

#if CUBLAS_VERSION < 120900
#error "row and block scales of 8-bit operands are in cuBLAS 12.9 and newer; put its headers before older ones"
#endif

namespace fsdp_quant {

namespace {

constexpr uint64_t kWorkspaceLimit = 32 << 20;  // cuBLAS's own choice on sm_90
constexpr size_t kPlans = 4096;                 // cached per thread
constexpr float kFactors[2] = {0.0f, 1.0f};

const char* name_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_16F: return "float16";
    case CUDA_R_32F: return "float32";
    case CUDA_R_8F_E4M3: return "e4m3";
    case CUDA_R_8F_E5M2: return "e5m2";
    case CUDA_R_4F_E2M1: return "e2m1";
    default: return "of another type";
  }
}

const char* name_of(Scaling scaling) {
  constexpr const char* kNames[] = {"no", "tensor", "row", "1x128", "128x128", "e8m0", "e4m3"};
  return kNames[static_cast<int>(scaling)];
}

std::string describe(const GemmProblem& p) {
  std::ostringstream text;
  const auto operand = [&](const char* name, const Operand& o, int64_t outer) {
    text << name << " [" << outer << ", " << p.k << "] " << name_of(o.type) << ", " << name_of(o.scaling) << " scales, "
         << (o.k_major ? "K" : "outer") << "-major, ld " << o.ld << "; ";
  };
  operand("a", p.a, p.m);
  operand("b", p.b, p.n);
  text << "out " << name_of(p.out_type) << ", ld " << p.out_ld << (p.accumulate ? ", accumulated" : "");
  if (p.bias != nullptr) text << ", bias " << name_of(p.bias_type);
  text << (p.alpha != nullptr ? ", alpha" : "");
  if (p.sm_count != 0) text << ", for " << p.sm_count << " multiprocessors";
  return text.str();
}

void check(cublasStatus_t status, const GemmProblem& p) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLASLt: ") + cublasLtGetStatusString(status) + ", of " + describe(p));
}

// Log2 of the largest power of two up to 256 that divides an address; 256 divides null.
int alignment_log2(const void* address) { return __builtin_ctzll(reinterpret_cast<uintptr_t>(address) | 256); }

// Everything that determines descriptors and algorithm.
using Key = std::array<uint64_t, 8>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0;
    for (const uint64_t word : key) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

Key key_of(const GemmProblem& p, int device) {
  uint64_t traits = 0, places = 0;
  const auto add = [](uint64_t& word, int bits, auto value) { word = word << bits | static_cast<uint64_t>(value); };
  for (const Operand* o : {&p.a, &p.b}) {
    add(traits, 8, o->type), add(traits, 4, o->scaling), add(traits, 1, o->k_major);
    add(places, 4, alignment_log2(o->data)), add(places, 4, alignment_log2(o->scale));
  }
  add(traits, 8, p.out_type), add(traits, 8, p.bias != nullptr ? p.bias_type : 0), add(traits, 1, p.bias != nullptr);
  add(traits, 1, p.alpha != nullptr), add(traits, 1, p.accumulate);
  add(places, 4, alignment_log2(p.out)), add(places, 4, alignment_log2(p.bias));
  add(places, 8, device), add(places, 16, p.sm_count);
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  return {word(p.m), word(p.n), word(p.k), word(p.a.ld), word(p.b.ld), word(p.out_ld), traits, places};
}

cublasLtMatmulMatrixScale_t scale_mode(Scaling scaling) {
  switch (scaling) {
    case Scaling::kRow: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Scaling::k1x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Scaling::k128x128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case Scaling::kE8M0: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case Scaling::kE4M3: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

// One per device, never destroyed: at exit the driver may be gone first.
cublasLtHandle_t handle_of(const GemmProblem& p, int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check(cublasLtCreate(&handle), p);
  return handle;
}

// Allow the calling thread to allocate and load modules during graph capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

struct MatmulPlan::State {
  cublasLtHandle_t handle;
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t left, right, out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  const float* beta;
};

MatmulPlan::~MatmulPlan() = default;

size_t MatmulPlan::workspace() const { return state_->workspace; }

void MatmulPlan::set_addresses(const GemmProblem& p) {
  State& own = *state_;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* address) {
    if (address != nullptr)
      check(cublasLtMatmulDescSetAttribute(&own.operation, attribute, &address, sizeof(address)), p);
  };
  set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
  set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
  set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
}

MatmulPlan::MatmulPlan(const GemmProblem& p, int device) : state_(std::make_unique<State>()) {
  State& own = *state_;
  const RelaxedCapture relaxed;
  own.handle = handle_of(p, device);

  check(cublasLtMatmulDescInit(&own.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), p);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    check(cublasLtMatmulDescSetAttribute(&own.operation, attribute, &value, sizeof(value)), p);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.k_major ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.k_major ? CUBLAS_OP_N : CUBLAS_OP_T);
  if (p.a.type != CUDA_R_16BF && p.a.type != CUDA_R_16F) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(p.b.scaling));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(p.a.scaling));
  }
  if (p.sm_count > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, p.sm_count);
  if (p.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.bias_type);
  }
  own.beta = &kFactors[p.accumulate];
  if (p.alpha != nullptr) {
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (const cudaError_t error = device_beta(p.accumulate, &own.beta); error != cudaSuccess)
      throw std::runtime_error(std::string("beta: ") + cudaGetErrorString(error) + ", of " + describe(p));
  }
  set_addresses(p);  // the heuristic reads their alignment

  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& matrix, const Operand& o, int64_t outer) {
    check(cublasLtMatrixLayoutInit(&matrix, o.type, o.k_major ? p.k : outer, o.k_major ? outer : p.k, o.ld), p);
  };
  layout(own.left, p.b, p.n);
  layout(own.right, p.a, p.m);
  check(cublasLtMatrixLayoutInit(&own.out, p.out_type, p.n, p.m, p.out_ld), p);

  cublasLtMatmulPreferenceOpaque_t preference;
  check(cublasLtMatmulPreferenceInit(&preference), p);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)), p);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceLimit);
  // Split-K partials are added in fp32, never in a 16-bit out.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 1u << alignment_log2(p.b.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 1u << alignment_log2(p.a.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 1u << alignment_log2(p.out));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 1u << alignment_log2(p.out));

  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      own.handle, &own.operation, &own.left, &own.right, &own.out, &own.out, &preference, 1, &result, &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, p);
  if (status != CUBLAS_STATUS_SUCCESS || found < 1 || result.state != CUBLAS_STATUS_SUCCESS)
    throw Unsupported("cuBLASLt has no algorithm for " + describe(p));
  own.algorithm = result.algo;
  own.workspace = result.workspaceSize;
}

void MatmulPlan::launch(const GemmProblem& p, void* workspace, cudaStream_t stream) {
  State& own = *state_;
  set_addresses(p);
  const float* alpha = p.alpha != nullptr ? p.alpha : &kFactors[1];
  check(cublasLtMatmul(own.handle, &own.operation, alpha, p.b.data, &own.left, p.a.data, &own.right, own.beta, p.out, &own.out,
                       p.out, &own.out, &own.algorithm, workspace, own.workspace, stream), p);
}

MatmulPlan& matmul_plan_of(const GemmProblem& p, int device) {
  thread_local std::unordered_map<Key, MatmulPlan, Hash> plans;
  const Key key = key_of(p, device);
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  if (plans.size() == kPlans) plans.clear();
  return plans.try_emplace(key, p, device).first->second;
}

}  // namespace fsdp_quant
