#include "gemm/hopper.h"

#include <algorithm>

#include <cudaTypedefs.h>

namespace fsdp_quant::hopper {

namespace {

constexpr int64_t kBlockK = 128;
constexpr int64_t kBandRows = 2048;  // of out, walked together: about a square of what 132 multiprocessors make at once

int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }
bool is_aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
bool is_outer(Scaling s) { return s <= Scaling::kRow; }
bool is_e5m2(const Operand& o) { return o.type == CUDA_R_8F_E5M2; }

const char* why_not(const Operand& o, int64_t k) {
  if (o.type != CUDA_R_8F_E4M3 && o.type != CUDA_R_8F_E5M2) return "an operand is neither e4m3 nor e5m2";
  if (!o.k_major) return "an operand is not K-major";
  if (o.scaling > Scaling::k128x128) return "an operand has one-byte scales";
  if ((o.scaling == Scaling::kNone) != (o.scale == nullptr)) return "scales are missing, or given where there are none";
  if (!is_aligned(o.data, 16) || o.ld % 16 != 0 || o.ld < k) return "rows of codes are not aligned to 16 bytes";
  if (!is_aligned(o.scale, o.scaling == Scaling::kTensor ? 4 : 16)) return "scales are not aligned to 16 bytes";
  return nullptr;
}

struct Extent {
  int32_t block_m, block_n, cluster;
};

constexpr Extent kExtents[kTiles] = {{256, 128, 2}, {128, 128, 2}, {128, 128, 1}};

// Clocks that a block takes, from a model of its shared memory: 128 bytes a clock for the copies in, what wgmma reads,
// and the scales of columns. To be replaced by what is measured.
struct Cost {
  int32_t of_k_block[3];  // outer; block; vector
  int32_t of_tile;        // fill, drain and the stores, in bf16; twice that in fp32, four times accumulated
};

constexpr Cost kCosts[kTiles] = {{{1150, 1180, 1650}, 2000}, {{640, 660, 900}, 1600}, {{720, 740, 950}, 1600}};

bool encode(CUtensorMap* map, const Operand& o, int64_t outer, int64_t k, int32_t rows) {
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(usable ? function : nullptr);
  }();
  if (encode_tiled == nullptr) return false;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(o.ld)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kBlockK), static_cast<cuuint32_t>(rows)}, steps[] = {1, 1};
  return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(o.data), extents, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// From a line of scales to the next: a line is a 128 of K, and of 128x128 scales a 128 of the outer dim.
int32_t scale_ld(const Operand& o, int64_t outer, int64_t k) {
  return static_cast<int32_t>(round_up(o.scaling == Scaling::k128x128 ? ceil_div(k, kBlockK) : outer, 4));
}

}  // namespace

const char* why_not(const Product& p, const float* amax) {
  constexpr int64_t kLargest = (int64_t{1} << 31) - 4096;  // a tile beyond the edge is still an int32
  if (p.m < 1 || p.n < 1 || p.k < 1) return "the product is empty";
  if (std::max({p.m, p.n, p.k}) > kLargest) return "an extent is near 2^31";
  if (p.k % 16 != 0) return "K is no multiple of 16";
  if (p.n % 8 != 0) return "N is no multiple of 8";
  for (const Operand* o : {&p.a, &p.b})
    if (const char* reason = why_not(*o, p.k)) return reason;
  if (is_e5m2(p.a) && is_e5m2(p.b)) return "both operands are e5m2";
  const Scaling a = p.a.scaling, b = p.b.scaling;
  if (is_outer(a) != is_outer(b)) return "one operand has scales along K, and the other has not";
  if (a == Scaling::k128x128 && b == Scaling::k128x128) return "both operands have 128x128 scales";
  const bool bf16 = p.out_type == CUDA_R_16BF;
  if (!bf16 && p.out_type != CUDA_R_32F) return "out is neither bfloat16 nor float32";
  if (p.accumulate && bf16) return "accumulation is into float32";
  if (p.accumulate && amax != nullptr) return "an accumulated out has no amax";
  if (!is_aligned(p.out, 16) || p.out_ld % (bf16 ? 8 : 4) != 0 || p.out_ld < p.n)
    return "rows of out are not aligned to 16 bytes";
  if (p.bias != nullptr && p.bias_type != CUDA_R_16BF && p.bias_type != CUDA_R_32F)
    return "bias is neither bfloat16 nor float32";
  if (!is_aligned(p.bias, 16)) return "bias is not aligned to 16 bytes";
  return nullptr;
}

Schedule schedule_of(const Product& p, int32_t sm_count) {
  const int grain = is_outer(p.a.scaling) ? 0 : p.b.scaling == Scaling::k128x128 ? 1 : 2;
  const int64_t stores = p.accumulate ? 4 : p.out_type == CUDA_R_32F ? 2 : 1;
  Schedule best = {};
  int64_t least = 0;
  for (int i = 0; i < kTiles; ++i) {
    const Extent& e = kExtents[i];
    const int64_t tiles = ceil_div(p.m, e.block_m) * ceil_div(p.n, e.block_n * e.cluster);
    const int64_t clusters = std::min<int64_t>(tiles, std::max(sm_count / e.cluster, 1));
    const int64_t cost = ceil_div(tiles, clusters) *
                         (ceil_div(p.k, kBlockK) * kCosts[i].of_k_block[grain] + stores * kCosts[i].of_tile);
    if (i > 0 && cost >= least) continue;
    least = cost;
    best = {static_cast<Tile>(i), static_cast<int32_t>(clusters * e.cluster),
            p.accumulate ? Stores::kReductions : Stores::kThreads};
  }
  return best;
}

Kernel kernel_of(const Product& p, Tile tile) {
  const bool a = is_e5m2(p.a), b = is_e5m2(p.b);
  if (is_outer(p.a.scaling)) return outer_kernel(tile, a, b);
  if (p.a.scaling == Scaling::k128x128) return mirror_kernel(tile, a, b);
  return p.b.scaling == Scaling::k128x128 ? block_kernel(tile, a, b) : vector_kernel(tile, a, b);
}

cudaError_t launch(const Product& p, float* amax, const Schedule& s, const Kernel& kernel, cudaStream_t stream) {
  if (kernel.function == nullptr || why_not(p, amax) != nullptr) return cudaErrorInvalidValue;
  Arguments arguments = {};
  if (!encode(&arguments.a, p.a, p.m, p.k, kernel.block_m / kernel.cluster) ||
      !encode(&arguments.b, p.b, p.n, p.k, kernel.block_n))
    return cudaErrorInvalidValue;
  arguments.a_scale = static_cast<const float*>(p.a.scale), arguments.b_scale = static_cast<const float*>(p.b.scale);
  arguments.out = p.out, arguments.bias = p.bias, arguments.alpha = p.alpha;
  arguments.amax = reinterpret_cast<uint32_t*>(amax);
  arguments.out_ld = p.out_ld;
  arguments.m = static_cast<int32_t>(p.m), arguments.n = static_cast<int32_t>(p.n);
  arguments.k_blocks = static_cast<int32_t>(ceil_div(p.k, kBlockK));
  arguments.a_scale_ld = scale_ld(p.a, p.m, p.k), arguments.b_scale_ld = scale_ld(p.b, p.n, p.k);
  arguments.a_scale_step = p.a.scaling == Scaling::kRow, arguments.b_scale_step = p.b.scaling == Scaling::kRow;
  arguments.m_tiles = static_cast<int32_t>(ceil_div(p.m, kernel.block_m));
  arguments.n_tiles = static_cast<int32_t>(ceil_div(p.n, kernel.block_n * kernel.cluster));
  const int64_t tiles = int64_t{arguments.m_tiles} * arguments.n_tiles;
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  arguments.tiles = static_cast<int32_t>(tiles);
  arguments.band = static_cast<int32_t>(kBandRows / kernel.block_m);
  arguments.bf16_out = p.out_type == CUDA_R_16BF, arguments.bf16_bias = p.bias_type == CUDA_R_16BF;
  arguments.accumulate = p.accumulate, arguments.stores = s.stores;

  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
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
