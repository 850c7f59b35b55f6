// SPDX-License-Identifier: Apache-2.0
#include "gemm/hopper.h"

#include <algorithm>

#include <cudaTypedefs.h>

namespace fsdp_quant::hopper {

namespace {

constexpr int64_t kBlockK = 128;
constexpr int32_t kBandRows = 2048;  // of out, walked together: about a square of what 132 multiprocessors make at once

int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
bool is_aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
bool is_outer(Scaling s) { return s <= Scaling::kRow; }
bool is_e5m2(const Operand& o) { return o.type == CUDA_R_8F_E5M2; }

bool is_values(const Operand& o) { return o.type == CUDA_R_16BF; }
int64_t bytes_of(const Operand& o) { return is_values(o) ? 2 : 1; }
int64_t block_k(const Operand& o) { return kBlockK / bytes_of(o); }

const char* why_not(const Operand& o, int64_t k) {
  if (o.type != CUDA_R_8F_E4M3 && o.type != CUDA_R_8F_E5M2 && !is_values(o)) return "an operand is neither e4m3, e5m2 nor bfloat16";
  if (!o.k_major) return "an operand is not K-major";
  if (has_byte_scales(o.scaling)) return "an operand has one-byte scales";
  if ((o.scaling == Scaling::kNone) != (o.scale == nullptr)) return "scales are missing, or given where there are none";
  if (!is_aligned(o.data, 16) || o.ld * bytes_of(o) % 16 != 0 || o.ld < k) return "rows of codes are not aligned to 16 bytes";
  if (!is_aligned(o.scale, o.scaling == Scaling::kTensor ? 4 : 16)) return "scales are not aligned to 16 bytes";
  return nullptr;
}

const char* why_not_cut(const Product& p, const Parts& parts) {
  if (parts.cut == Cut::kNone) return nullptr;
  if (parts.cut == Cut::kRows && (parts.b_plane % 16 != 0 || parts.b_plane < p.k)) return "parts of b are not aligned to 16 bytes";
  if (parts.groups < 1 || parts.groups > kMostGroups) return "there are not 1 to 1024 groups";
  if (parts.offsets == nullptr || !is_aligned(parts.offsets, 4)) return "offsets are missing or not aligned to 4 bytes";
  if (p.bias != nullptr) return "groups have no bias";
  if (is_e5m2(p.b)) return "b is e5m2, and groups are cut";
  if (parts.cut == Cut::kDepth && parts.out_plane % (p.out_type == CUDA_R_16BF ? 8 : 4) != 0)
    return "the outs of groups are not aligned to 16 bytes";
  return nullptr;
}

struct Extent {
  int32_t block_m, block_n, cluster;
};

constexpr Extent kExtents[kTiles] = {{256, 128, 2}, {128, 128, 1}};

// Clocks that a block takes, in the ratios that whole and grouped products took on an H100.
struct Cost {
  int32_t of_k_block[3];  // outer; block and run; vector
  int32_t of_tile;        // fill, drain and the stores, in bf16; twice that in fp32, four times accumulated
};

constexpr Cost kCosts[kTiles] = {{{1150, 1180, 1650}, 2000}, {{650, 665, 950}, 850}};

// Operand [groups, outer, k], of 0 groups [outer, k], in boxes of `rows`.
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

const char* why_not(const Product& p, const Parts& parts) {
  constexpr int64_t kLargest = (int64_t{1} << 31) - 4096;  // a tile beyond the edge is still an int32
  if (p.m < 1 || p.n < 1 || p.k < 1) return "the product is empty";
  if (std::max({p.m, p.n, p.k}) > kLargest) return "an extent is near 2^31";
  if (p.k % 16 != 0) return "K is no multiple of 16";
  if (p.n % 8 != 0) return "N is no multiple of 8";
  if (const char* reason = why_not_cut(p, parts)) return reason;
  if (const char* reason = why_not(p.a, p.k)) return reason;
  if (const char* reason = why_not(p.b, p.k)) return reason;
  if (is_e5m2(p.a) && is_e5m2(p.b)) return "both operands are e5m2";
  if (is_values(p.a) != is_values(p.b)) return "one operand is of codes, and the other of values";
  if (is_values(p.a) && (!is_outer(p.a.scaling) || !is_outer(p.b.scaling)))
    return "values are multiplied with scales of tensors and rows";
  const Scaling a = p.a.scaling, b = p.b.scaling;
  if (is_outer(a) != is_outer(b)) return "one operand has scales along K, and the other has not";
  if (a == Scaling::k128x128) return "a has 128x128 scales";
  if ((a == Scaling::k1x512) != (b == Scaling::k1x512)) return "one operand has 1x512 scales, and the other has not";
  if ((a == Scaling::k1x512) != (parts.cut == Cut::kNone)) return "products of 1x512 scales are whole, others in groups";
  const bool bf16 = p.out_type == CUDA_R_16BF;
  if (!bf16 && p.out_type != CUDA_R_32F) return "out is neither bfloat16 nor float32";
  if (p.accumulate && bf16) return "accumulation is into float32";
  if (!is_aligned(p.out, 16) || p.out_ld % (bf16 ? 8 : 4) != 0 || p.out_ld < p.n)
    return "rows of out are not aligned to 16 bytes";
  if (p.bias != nullptr && p.bias_type != CUDA_R_16BF) return "bias is not bfloat16";
  if (!is_aligned(p.bias, 16)) return "bias is not aligned to 16 bytes";
  return nullptr;
}

Schedule schedule_of(const Product& p, int32_t sm_count, const Parts& parts) {
  const int grain = is_outer(p.a.scaling) ? 0 : p.b.scaling == Scaling::k128x128 || p.b.scaling == Scaling::k1x512 ? 1 : 2;
  const int64_t stores = p.accumulate ? 4 : p.out_type == CUDA_R_32F ? 2 : 1;
  // Groups are taken to be of one size.
  const int64_t m = parts.cut == Cut::kRows ? ceil_div(p.m, parts.groups) : p.m;
  const int64_t k = parts.cut == Cut::kDepth ? ceil_div(p.k, parts.groups) : p.k;
  Schedule best = {};
  int64_t least = 0;
  for (int i = 0; i < kTiles; ++i) {
    const Extent& e = kExtents[i];
    const int64_t tiles = ceil_div(m, e.block_m) * ceil_div(p.n, e.block_n * e.cluster) * parts.groups;
    // Where groups decide how many there are, blocks without a tile end at once.
    const int64_t most = std::max(sm_count / e.cluster, 1), clusters = parts.groups > 1 ? most : std::min(tiles, most);
    const int64_t cost = ceil_div(tiles, clusters) *
                         (ceil_div(k, block_k(p.a)) * kCosts[i].of_k_block[grain] + stores * kCosts[i].of_tile);
    if (i > 0 && cost >= least) continue;
    least = cost;
    best = {static_cast<Tile>(i), static_cast<int32_t>(clusters * e.cluster)};
  }
  return best;
}

namespace {

Kernel kernel_of(const Product& p, Tile tile, Cut cut) {
  const bool a = is_e5m2(p.a), b = is_e5m2(p.b);
  if (is_values(p.a)) return values_kernel(cut, tile);
  if (is_outer(p.a.scaling)) return outer_kernel(cut, tile, a, b);
  if (p.a.scaling == Scaling::k1x512) return run_kernel(tile, a, b);
  return p.b.scaling == Scaling::k128x128 ? block_kernel(cut, tile, a, b) : vector_kernel(cut, tile, a, b);
}

}  // namespace

cudaError_t launch(const Product& p, const Parts& parts, const Schedule& s, cudaStream_t stream) {
  if (why_not(p, parts) != nullptr) return cudaErrorInvalidValue;
  const Kernel kernel = kernel_of(p, s.tile, parts.cut);
  if (kernel.function == nullptr) return cudaErrorInvalidValue;
  const bool rows = parts.cut == Cut::kRows, depth = parts.cut == Cut::kDepth;
  Arguments arguments = {};
  if (!encode(&arguments.a, p.a, p.m, p.k, kernel.block_m / kernel.cluster, 0, 0) ||
      !encode(&arguments.b, p.b, p.n, p.k, kernel.block_n, rows ? parts.groups : 1, parts.b_plane))
    return cudaErrorInvalidValue;
  arguments.a_scale = static_cast<const float*>(p.a.scale), arguments.b_scale = static_cast<const float*>(p.b.scale);
  arguments.out = p.out, arguments.bias = p.bias, arguments.alpha = p.alpha;
  arguments.offsets = parts.offsets, arguments.flag = parts.flag, arguments.groups = parts.groups;
  arguments.out_ld = p.out_ld, arguments.out_plane = depth ? parts.out_plane : 0;
  const auto int32 = [](int64_t n) { return static_cast<int32_t>(n); };
  const auto each = [](const Operand& o, int64_t outer, int64_t k) { return scale_numel(o.scaling, outer, k); };
  // Of rows that are cut, a's scales of lines are those of all rows.
  if (parts.a_scale_each) arguments.a_scale_plane = rows && p.a.scaling == Scaling::kRow ? 0 : each(p.a, p.m, p.k);
  if (parts.b_scale_each || (rows && !is_outer(p.b.scaling))) arguments.b_scale_plane = each(p.b, p.n, p.k);
  arguments.m = int32(p.m), arguments.n = int32(p.n), arguments.k = int32(p.k);
  arguments.k_blocks = int32(ceil_div(p.k, block_k(p.a)));
  arguments.a_scale_ld = int32(scale_ld(p.a.scaling, p.m, p.k));
  arguments.b_scale_ld = int32(scale_ld(p.b.scaling, p.n, p.k));
  arguments.a_scale_step = p.a.scaling == Scaling::kRow, arguments.b_scale_step = p.b.scaling == Scaling::kRow;
  arguments.m_tiles = int32(ceil_div(p.m, kernel.block_m));
  arguments.n_tiles = int32(ceil_div(p.n, kernel.block_n * kernel.cluster));
  const int64_t tiles = (int64_t{arguments.m_tiles} + (rows ? parts.groups : 0)) * arguments.n_tiles *
                        (depth ? parts.groups : 1);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  arguments.tiles = int32(tiles);
  arguments.band = kBandRows / kernel.block_m;
  arguments.bf16_out = p.out_type == CUDA_R_16BF;
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

}  // namespace fsdp_quant::hopper
