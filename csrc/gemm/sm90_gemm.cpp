// SPDX-License-Identifier: Apache-2.0
#include "gemm/sm90_gemm.h"

#include <algorithm>

#include <cudaTypedefs.h>

namespace fsdp_quant::sm90 {

namespace {

constexpr int64_t kBlockK = 128;
constexpr int32_t kBandRows =
    2048;  // of out, walked together: about a square of the tiles that 132 multiprocessors compute at once

int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
bool is_aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
bool is_outer(Scaling s) { return s <= Scaling::kRow; }
bool is_e5m2(const Operand& o) { return o.type == CUDA_R_8F_E5M2; }

bool is_values(const Operand& o) { return o.type == CUDA_R_16BF; }
int64_t bytes_of(const Operand& o) { return is_values(o) ? 2 : 1; }
int64_t block_k(const Operand& o) { return kBlockK / bytes_of(o); }

const char* unsupported_reason(const Operand& o, int64_t k) {
  if (o.type != CUDA_R_8F_E4M3 && o.type != CUDA_R_8F_E5M2 && !is_values(o)) return "an operand is neither e4m3, e5m2 nor bfloat16";
  if (!o.k_major) return "an operand is not K-major";
  if (has_byte_scales(o.scaling)) return "an operand has one-byte scales";
  if ((o.scaling == Scaling::kNone) != (o.scale == nullptr)) return "scales are missing, or given where there are none";
  if (!is_aligned(o.data, 16) || o.ld * bytes_of(o) % 16 != 0 || o.ld < k) return "rows of codes are not aligned to 16 bytes";
  if (!is_aligned(o.scale, o.scaling == Scaling::kTensor ? 4 : 16)) return "scales are not aligned to 16 bytes";
  return nullptr;
}

const char* unsupported_grouping_reason(const GemmProblem& p, const Grouping& grouping) {
  if (grouping.dim == GroupedDim::kNone) return nullptr;
  if (grouping.dim == GroupedDim::kM && (grouping.b_plane % 16 != 0 || grouping.b_plane < p.k))
    return "matrices of b are not aligned to 16 bytes";
  if (grouping.groups < 1 || grouping.groups > kMostGroups) return "there are not 1 to 1024 groups";
  if (grouping.offsets == nullptr || !is_aligned(grouping.offsets, 4)) return "offsets are missing or not aligned to 4 bytes";
  if (grouping.dim == GroupedDim::kK && p.bias != nullptr) return "groups of K have no bias";
  if (is_e5m2(p.b)) return "b is e5m2, and groups are cut";
  if (grouping.dim == GroupedDim::kK && grouping.out_plane % (p.out_type == CUDA_R_16BF ? 8 : 4) != 0)
    return "the outs of groups are not aligned to 16 bytes";
  return nullptr;
}

struct Extent {
  int32_t block_m, block_n, cluster;
};

constexpr Extent kExtents[kTiles] = {{256, 128, 2}, {128, 128, 1}};

// Clocks per block, in the ratios measured for dense and grouped GEMMs on an H100.
struct Cost {
  int32_t of_k_block[3];  // rowwise; 128x128 and 1x512; 1x128
  int32_t of_tile;        // fill, drain and bf16 stores; twice that for fp32, four times if accumulated
};

constexpr Cost kCosts[kTiles] = {{{1150, 1180, 1650}, 2000}, {{650, 665, 950}, 850}};

// Tensor map of [groups, outer, k] (0 groups: [outer, k]) with boxes of `rows`.
bool encode(CUtensorMap* map, const Operand& o, int64_t outer, int64_t k, int32_t rows, int64_t groups, int64_t plane) {
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(usable ? function : nullptr);
  }();
  if (encode_tiled == nullptr) return false;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t extents[] = {size(k * bytes_of(o)), size(outer), size(groups)};
  const cuuint64_t strides[] = {size(o.ld * bytes_of(o)), size((groups > 1 ? plane : o.ld * outer) * bytes_of(o))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kBlockK), static_cast<cuuint32_t>(rows), 1}, steps[] = {1, 1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, groups > 0 ? 3 : 2, const_cast<void*>(o.data), extents,
                      strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

const char* unsupported_reason(const GemmProblem& p, const Grouping& grouping) {
  constexpr int64_t kLargest = (int64_t{1} << 31) - 4096;  // a tile beyond the edge still fits int32
  if (p.m < 1 || p.n < 1 || p.k < 1) return "the GEMM is empty";
  if (std::max({p.m, p.n, p.k}) > kLargest) return "an extent is near 2^31";
  if (p.k % 16 != 0) return "K is no multiple of 16";
  if (p.n % 8 != 0) return "N is no multiple of 8";
  if (const char* reason = unsupported_grouping_reason(p, grouping)) return reason;
  if (const char* reason = unsupported_reason(p.a, p.k)) return reason;
  if (const char* reason = unsupported_reason(p.b, p.k)) return reason;
  if (is_e5m2(p.a) && is_e5m2(p.b)) return "both operands are e5m2";
  if (is_values(p.a) != is_values(p.b)) return "one operand is of codes, and the other of values";
  if (is_values(p.a) && (!is_outer(p.a.scaling) || !is_outer(p.b.scaling)))
    return "values are multiplied with scales of tensors and rows";
  const Scaling a = p.a.scaling, b = p.b.scaling;
  if (is_outer(a) != is_outer(b)) return "only one operand has scales along K";
  if (a == Scaling::k128x128 && (b != Scaling::k1x128 || grouping.dim != GroupedDim::kK))
    return "a has 128x128 scales, and K is not grouped or b has no 1x128 scales";
  if (a == Scaling::k128x128 && is_e5m2(p.a)) return "a is e5m2 with 128x128 scales";
  if ((a == Scaling::k1x512) != (b == Scaling::k1x512)) return "only one operand has 1x512 scales";
  if ((a == Scaling::k1x512) != (grouping.dim == GroupedDim::kNone))
    return "products of 1x512 scales are whole, others in groups";
  const bool bf16 = p.out_type == CUDA_R_16BF;
  if (!bf16 && p.out_type != CUDA_R_32F) return "out is neither bfloat16 nor float32";
  if (p.accumulate && bf16) return "accumulation is into float32";
  if (!is_aligned(p.out, 16) || p.out_ld % (bf16 ? 8 : 4) != 0 || p.out_ld < p.n)
    return "rows of out are not aligned to 16 bytes";
  if (p.bias != nullptr && p.bias_type != CUDA_R_16BF && p.bias_type != CUDA_R_32F) return "bias is neither bfloat16 nor float32";
  if (!is_aligned(p.bias, 16)) return "bias is not aligned to 16 bytes";
  return nullptr;
}

Schedule schedule_of(const GemmProblem& p, int32_t sm_count, const Grouping& grouping) {
  const bool both_by_line = p.a.scaling == Scaling::k1x128 && p.b.scaling == Scaling::k1x128;
  const int grain = is_outer(p.a.scaling) ? 0 : both_by_line ? 2 : 1;
  const int64_t stores = p.accumulate ? 4 : p.out_type == CUDA_R_32F ? 2 : 1;
  // Assume groups of equal size.
  const int64_t m = grouping.dim == GroupedDim::kM ? ceil_div(p.m, grouping.groups) : p.m;
  const int64_t k = grouping.dim == GroupedDim::kK ? ceil_div(p.k, grouping.groups) : p.k;
  Schedule best = {};
  int64_t least = 0;
  for (int i = 0; i < kTiles; ++i) {
    const Extent& e = kExtents[i];
    const int64_t tiles = ceil_div(m, e.block_m) * ceil_div(p.n, e.block_n * e.cluster) * grouping.groups;
    // With groups the tile count is known on the device only; blocks without a tile exit at once.
    const int64_t most = std::max(sm_count / e.cluster, 1), clusters = grouping.groups > 1 ? most : std::min(tiles, most);
    const int64_t cost = ceil_div(tiles, clusters) *
                         (ceil_div(k, block_k(p.a)) * kCosts[i].of_k_block[grain] + stores * kCosts[i].of_tile);
    if (i > 0 && cost >= least) continue;
    least = cost;
    best = {static_cast<Tile>(i), static_cast<int32_t>(clusters * e.cluster)};
  }
  return best;
}

namespace {

Kernel kernel_of(const GemmProblem& p, Tile tile, GroupedDim dim) {
  const bool a = is_e5m2(p.a), b = is_e5m2(p.b);
  if (is_values(p.a)) return grouped_bf16_kernel(dim, tile);
  if (is_outer(p.a.scaling)) return grouped_rowwise_kernel(dim, tile, a, b);
  if (p.a.scaling == Scaling::k1x512) return dense_1x512_kernel(tile, a, b);
  if (p.a.scaling == Scaling::k128x128) return grouped_128x128_1x128_kernel(tile);
  return p.b.scaling == Scaling::k128x128 ? grouped_1x128_128x128_kernel(dim, tile, a, b)
                                          : grouped_1x128_1x128_kernel(dim, tile, a, b);
}

}  // namespace

cudaError_t launch(const GemmProblem& p, const Grouping& grouping, const Schedule& s, cudaStream_t stream) {
  if (unsupported_reason(p, grouping) != nullptr) return cudaErrorInvalidValue;
  const Kernel kernel = kernel_of(p, s.tile, grouping.dim);
  if (kernel.function == nullptr) return cudaErrorInvalidValue;
  const bool rows = grouping.dim == GroupedDim::kM, depth = grouping.dim == GroupedDim::kK;
  Arguments arguments = {};
  if (!encode(&arguments.a, p.a, p.m, p.k, kernel.block_m / kernel.cluster, 0, 0) ||
      !encode(&arguments.b, p.b, p.n, p.k, kernel.block_n, rows ? grouping.groups : 1, grouping.b_plane))
    return cudaErrorInvalidValue;
  arguments.a_scale = static_cast<const float*>(p.a.scale), arguments.b_scale = static_cast<const float*>(p.b.scale);
  arguments.out = p.out, arguments.bias = p.bias, arguments.alpha = p.alpha;
  arguments.offsets = grouping.offsets, arguments.flag = grouping.flag, arguments.groups = grouping.groups;
  arguments.out_ld = p.out_ld, arguments.out_plane = depth ? grouping.out_plane : 0;
  const auto int32 = [](int64_t n) { return static_cast<int32_t>(n); };
  const auto each = [](const Operand& o, int64_t outer, int64_t k) { return scale_numel(o.scaling, outer, k); };
  // M-grouped: a's line scales cover all rows.
  if (grouping.a_scale_each) arguments.a_scale_plane = rows && p.a.scaling == Scaling::kRow ? 0 : each(p.a, p.m, p.k);
  if (grouping.b_scale_each || (rows && !is_outer(p.b.scaling))) arguments.b_scale_plane = each(p.b, p.n, p.k);
  arguments.m = int32(p.m), arguments.n = int32(p.n), arguments.k = int32(p.k);
  arguments.k_blocks = int32(ceil_div(p.k, block_k(p.a)));
  arguments.a_scale_ld = int32(scale_ld(p.a.scaling, p.m, p.k));
  arguments.b_scale_ld = int32(scale_ld(p.b.scaling, p.n, p.k));
  arguments.a_scale_step = p.a.scaling == Scaling::kRow, arguments.b_scale_step = p.b.scaling == Scaling::kRow;
  arguments.m_tiles = int32(ceil_div(p.m, kernel.block_m));
  arguments.n_tiles = int32(ceil_div(p.n, kernel.block_n * kernel.cluster));
  const int64_t tiles = (int64_t{arguments.m_tiles} + (rows ? grouping.groups : 0)) * arguments.n_tiles *
                        (depth ? grouping.groups : 1);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  arguments.tiles = int32(tiles);
  arguments.band = kBandRows / kernel.block_m;
  arguments.bf16_out = p.out_type == CUDA_R_16BF, arguments.bf16_bias = p.bias_type == CUDA_R_16BF;
  arguments.accumulate = p.accumulate;

  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the first use of a kernel loads it
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kernel.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(s.blocks), config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  void* parameters[] = {&arguments};
  return cudaLaunchKernelExC(&config, kernel.function, parameters);
}

}  // namespace fsdp_quant::sm90
