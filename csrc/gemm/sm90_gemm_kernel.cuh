// SPDX-License-Identifier: Apache-2.0
// out[m, n] (+)= alpha * sum_k a[m, k] b[n, k] (+ bias[n]) of 8-bit operands, K-major, on sm_90a.
//
// The tensor core sums 8-bit products in about 13 bits, so 128 of K are one partial sum, which the threads add in fp32:
//   kOuter    sum += part                     scales of rows or tensors are factors of the finished sum
//   kVector   sum += part * scale[row]        of 1 x 128, on either direction
//   kBlock    sum += part * scale             of 128 x 128, of b
//   kValues   sum                             bf16 values, which it sums in fp32; scales as of kOuter. A 128 of K is 64 of them
//   kRun      sum += part * scale[row]        of 1 x 512 on both directions, powers of two; those of columns are units of
//                                             the sums, changed every 512 of K: one operation an element, as kBlock
// Every element is summed by one thread in order of K: the same bits every run.
//
// Block: a warp group that loads and two that multiply, each block_m / 2 rows of a block_m x 128 tile, 64 rows (a wave)
// at a time: while one group promotes its wave, the other's occupies the tensor core. Persistent; a cluster's blocks
// take neighbouring tiles along n and load a share of a each, for all. A stage is 128 of K:
//   full[stage]    1 arrival (the own loader's) and the bytes of all loads into this block
//                  kRun: and 1 of each warp that makes the columns' factors; a tile ends in a slot of those alone
//   empty[stage]   1 arrival of each multiplying warp of the cluster, since a peer's load writes here too
// Tails: the copy engine reads zeros beyond M, N, K; scales beyond M, N are not loaded, what they touch is not stored.
//
// Groups are tiled on the device. GroupedDim along M, a group's tiles begin at its first row, and the rows of the next group
// in its last tile are not stored; cut along K, every group has all tiles of an out of its own, and its 128s of K.
//
// Measured on an H200. 256 x 128 tiles in clusters of 2 won on every large shape. kVector is bound
// by its two operations per element: four stages and narrow staging gained 7 %, two groups that
// take turns to issue lost 6 %. Stores by the copy engine lost to coalesced stores. Additions to
// fp32 that L2 makes (one per element, so that runs agree) gained 5 % over threads that read and
// write. kRun is 8 to 12 % faster than anchors of 128 through 1 x 128 scales; one product per 512
// tokens, row-scaled and added in fp32, ran at .45 of bf16. Whole products with 1 x 128 and 128 x
// 128 scales ran at .79 to 1.007 of cuBLASLt 13.0; these, products of the planes of an all-gather,
// and the amax of the result had no user, and went.
#pragma once

#include "gemm/sm90_gemm_accumulators.cuh"

namespace fsdp_quant::sm90 {

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
__device__ __forceinline__ void multiply(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int warp_group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group_row = warp_group * S::kWaves * kWaveRows, warp_row = group_row + warp * 16;
  const uint32_t staging = shared.base + S::kStagingAt + (warp_group * 4 + warp) * S::kStaged;
  const uint32_t b_scale_at = lane % 4 * 8;
  const auto release = [&](int stage) {
    jitter();
    __syncwarp();
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) ptx::mbarrier_arrive_remote(ptx::map_shared(shared.empty(stage), lane));
    } else {
      if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
    }
  };

  const int tiles = tiles_of<S, kGrouped>(p, shared);
  Ring<S::kStages> ring;
  for (int t = cluster; t < tiles; t += clusters) {
    const Place at = place_of<S, kGrouped, kElements<kA>>(p, shared, t, rank);
    if (kGrouped == GroupedDim::kK && at.k_blocks == 0 && p.accumulate) continue;
    constexpr bool kIs1x512 = kA == Granularity::k1x512;
    static_assert(kIs1x512 == (kB == Granularity::k1x512), "runs of 512 are multiplied by runs of 512");
    constexpr bool kHasBlock = kB == Granularity::k128x128;
    static_assert(kA != Granularity::k128x128, "nothing here has 128 x 128 scales of a");
    const float* const of_group = p.b_scale + (kGrouped == GroupedDim::kM ? at.group * p.b_scale_plane : 0);
    BlockScales block(of_group + int64_t{min(at.n0, p.n - 1) / 128} * p.b_scale_ld + at.k0, kHasBlock ? at.k_blocks : 0, lane);
    const uint32_t a_scale_at = (warp_row + lane / 4 + (kGrouped == GroupedDim::kM ? at.m0 & 3 : 0)) * 4;
    float sum[S::kWaves][64];
#pragma unroll
    for (int w = 0; w < S::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[w][i] = 0;

    for (int kb = 0; kb < at.k_blocks; ++kb) {
      const int stage = ring.stage;
      const float block_scale = kHasBlock ? block.at(kb) : 1.0f;
      const uint64_t b = ptx::wgmma_descriptor(shared.b(stage));
      const uint32_t b_scales = shared.b_scale(stage) + b_scale_at;
      // Column scales that fit in registers: read once for all waves.
      constexpr int kHeld = S::kWaves == 1 ? 16 : kGrouped == GroupedDim::kNone ? 10 : 8;
      float2 held[kHeld];
      wait(shared.full(stage), ring.phase);
      if constexpr (kA == Granularity::kBf16) {
#pragma unroll
        for (int w = 0; w < S::kWaves; ++w) ptx::pin(sum[w]);
        ptx::wgmma_fence();
#pragma unroll
        for (int w = 0; w < S::kWaves; ++w) {
          const uint64_t a = ptx::wgmma_descriptor(shared.a(stage) + (group_row + w * kWaveRows) * kBlockK);
#pragma unroll
          for (int k = 0; k < 4; ++k) ptx::wgmma_m64n128k16(sum[w], a + 2 * k, b + 2 * k, true);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int w = 0; w < S::kWaves; ++w) ptx::pin(sum[w]);
        release(stage);
        ring.advance();
        continue;
      }
      bool is_far = false;
      if constexpr (kIs1x512) {
        const uint2 of_halves = shared_at<const uint2>(shared.is_far(stage));
        is_far = (of_halves.x | of_halves.y) != 0;
      }
#pragma unroll
      for (int w = 0; w < S::kWaves; ++w) {
        const uint64_t a = ptx::wgmma_descriptor(shared.a(stage) + (group_row + w * kWaveRows) * kBlockK);
        float low = block_scale, high = block_scale;
        if constexpr (kA == Granularity::k1x128 || kIs1x512) {
          const uint32_t from = shared.a_scale(stage) + a_scale_at + w * kWaveRows * 4;
          low *= shared_at<const float>(from), high *= shared_at<const float>(from + 32);
        }
        float part[64];
        ptx::pin(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 32; ++k)  // descriptors count 16 bytes
          ptx::wgmma_m64n128k32<kE5M2A, kE5M2B>(part, a + 2 * k, b + 2 * k, k > 0);
        ptx::wgmma_commit();
        if constexpr (kB == Granularity::k1x128) {
          if (w == 0) {
#pragma unroll
            for (int j = 0; j < kHeld; ++j) held[j] = shared_at<const float2>(b_scales + 32 * j);
          }
        }
        if constexpr (kIs1x512) {
          if (kb % kBlocksPer512 == 0) multiply_columns(sum[w], shared.b_scale(stage) + lane % 4 * 16);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(part);
        if constexpr (kIs1x512) {
          if (is_far) multiply_columns(part, shared.far_factors(stage) + lane % 4 * 16);
        }
        if (w == S::kWaves - 1 && kB != Granularity::k1x128) release(stage);
        promote<kA, kB>(sum[w], part, low, high, b_scales, held);
      }
      if constexpr (kB == Granularity::k1x128) release(stage);
      ring.advance();
    }
    if constexpr (kIs1x512) {
      wait(shared.full(ring.stage), ring.phase);
#pragma unroll
      for (int w = 0; w < S::kWaves; ++w) multiply_columns(sum[w], shared.b_scale(ring.stage) + lane % 4 * 16);
      release(ring.stage);
      ring.advance();
    }

#pragma unroll
    for (int w = 0; w < S::kWaves; ++w) {
      const int row0 = at.m0 + warp_row + w * kWaveRows;
      if (kGrouped != GroupedDim::kK || at.k_blocks > 0)  // a scale of nothing need not be finite
        finish<kA, kB>(p, at, sum[w], row0 + lane / 4, at.n0 + lane % 4 * 2);
      p.bf16_out ? store_bf16<S>(p, at, sum[w], staging, row0, lane) : store_fp32<S>(p, at, sum[w], staging, row0, lane);
    }
    __syncwarp();
  }
}

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared = {ptx::shared_address(memory)};
  const int warp_group = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpGroup, 0);  // the same in a warp, as the compiler now knows
  const int rank = S::kCluster > 1 ? ptx::cluster_rank() : 0;
  const int cluster = blockIdx.x / S::kCluster, clusters = gridDim.x / S::kCluster;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), kA == Granularity::k1x512 ? 1 + kFactorWarps : 1);
      ptx::mbarrier_init(shared.empty(stage), kMathWarps * S::kCluster);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) ptx::cluster_arrive();
  if constexpr (kGrouped != GroupedDim::kNone) tabulate<S, kGrouped>(p, shared);
  if constexpr (S::kCluster > 1) ptx::cluster_wait();

  if (warp_group == kMathWarpGroups) {
    ptx::registers_shrink<40>();
    if (threadIdx.x == kMathWarpGroups * kWarpGroup) load<S, kA, kB, kGrouped>(p, shared, cluster, clusters, rank);
    if constexpr (kA == Granularity::k1x512) {
      const int half = static_cast<int>(threadIdx.x / 32) - kMathWarps - 1;  // beside the warp that loads
      if (half >= 0 && half < kFactorWarps) make_column_factors<S, kGrouped>(p, shared, cluster, clusters, rank, half);
    }
    __syncwarp();
  } else {
    ptx::registers_grow<232>();
    multiply<S, kA, kB, kE5M2A, kE5M2B, kGrouped>(p, shared, cluster, clusters, rank, warp_group);
  }
  // No block leaves while a peer may still arrive at its barriers.
  if constexpr (S::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
#else
  __trap();  // of another architecture, where no host launches it
#endif
}

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
Kernel describe() {
  return {reinterpret_cast<const void*>(&kernel<S, kA, kB, kE5M2A, kE5M2B, kGrouped>), S::kBlockM, kBlockN, S::kCluster,
          kThreads, S::kSharedBytes};
}

}  // namespace fsdp_quant::sm90
