// SPDX-License-Identifier: Apache-2.0
// out[m, n] (+)= alpha * sum_k a[m, k] b[n, k] (+ bias[n]) of 8-bit operands, K-major, on sm_90a.
//
// The tensor core accumulates 8-bit products in about 13 bits, so each 128 of K is a partial sum that threads add in fp32:
//   kRowwise   sum += part                     row or tensor scales multiply the finished sum
//   k1x128     sum += part * scale[row]        on either operand
//   k128x128   sum += part * scale             of b
//   kBf16      sum                             accumulated in fp32 by the tensor core; scales as kRowwise. 64 elements are 128 bytes
//   k1x512     sum += part * scale[row]        powers of two on both operands; column scales are units of the sums,
//                                              changed every 512 of K: one operation per element, as k128x128
// One thread sums every element in order of K: results are deterministic.
//
// Block: one loading and two math warp groups, each math group block_m / 2 rows of a block_m x 128 tile, 64 rows (a wave) at
// a time: while one group promotes its wave, the other's occupies the tensor core. Persistent; the blocks of a cluster
// process adjacent tiles along n and each multicast a share of a. A stage is 128 of K:
//   full[stage]    1 arrival (the block's loader) and the bytes of all loads into this block;
//                  k1x512: also 1 arrival per warp that computes column factors; a tile ends in a slot of those only
//   empty[stage]   1 arrival per math warp of the cluster, since a peer's load writes here too
// Tails: TMA reads zeros beyond M, N, K; scales beyond M, N are not loaded, and outputs that they touch are not stored.
//
// Groups are tiled on the device. M-grouped: a group's tiles begin at its first row. In its last tile, waves and shares of the
// next group's rows alone are neither multiplied nor loaded, and other rows of it are not stored. K-grouped: every group has
// all tiles of its own out, over its own K.
//
// Measured on an H200. 256 x 128 tiles in clusters of 2 won on every large shape. k1x128 is bound by its two operations per
// element: four stages and narrow staging gained 7 %, math groups that take turns to issue lost 6 %. Scales are no tensor
// maps: a box whose first column is not at a multiple of 16 bytes, as where a group begins at any row, is an illegal
// instruction (H100); without groups of rows such maps gained 0 to 4 %. TMA stores lost to
// coalesced stores. fp32 additions in L2 gained 5 % over read-modify-write in threads. k1x512 is 8 to 12 % faster than
// anchors of 128 through 1x128 scales; one row-scaled GEMM per 512 tokens, added in fp32, ran at .45 of bf16. Dense GEMMs
// with 1x128 and 128x128 scales ran at .79 to 1.007 of cuBLASLt 13.0 and were removed.
// Of 64 groups of about 1024 rows, a ninth of the tiles' rows belongs to no group: leaving out their waves, and all but
// promoting between two waves, took 2 to 4 % off groups of rows; a fourth stage 1 % off groups of K. The limit is power: the
// clock falls to 1.5 GHz. Clusters of 4 lost 4 to 8 % there (30 of them fit), bulk copies of rows of out 3 to 11 %, the next
// tile's coordinates before out is stored up to 4 %; results that idle warps store during the next tile gain nothing.
#pragma once

#include <type_traits>

#include "gemm/sm90_gemm_accumulators.cuh"

namespace fsdp_quant::sm90 {

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
__device__ __forceinline__ void multiply(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int warp_group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // Where rows may end inside a tile, math groups take turns at its waves: both have as few.
  constexpr bool kEndsInside = kGrouped == GroupedDim::kM;
  constexpr int kWaveStep = kEndsInside ? kMathWarpGroups * kWaveRows : kWaveRows;  // rows
  const int group_row = warp_group * (kEndsInside ? kWaveRows : S::kWaves * kWaveRows), warp_row = group_row + warp * 16;
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
  for (int t = cluster, group = 0; t < tiles; t += clusters) {
    const TileCoord at = tile_coord<S, kGrouped, kElements<kA>>(p, shared, t, rank, group);
    group = at.group;
    if (kGrouped == GroupedDim::kK && at.k_blocks == 0 && p.accumulate) continue;
    constexpr bool kIs1x512 = kA == Granularity::k1x512;
    static_assert(kIs1x512 == (kB == Granularity::k1x512), "1x512 scales on both operands");
    constexpr bool kTilesOfA = kA == Granularity::k128x128, kHasBlock = kTilesOfA || kB == Granularity::k128x128;
    static_assert(kA != kB || !kTilesOfA, "128 x 128 scales of one operand");
    static_assert(!kTilesOfA || kGrouped == GroupedDim::kK, "b's matrices have 128 x 128 scales, a's rows do not");
    const float* const of_group = p.b_scale + (kGrouped == GroupedDim::kM ? at.group * p.b_scale_plane : 0);
    const float* const of_line =
        kTilesOfA ? p.a_scale + int64_t{min(at.m0 + group_row, p.m - 1) / 128} * p.a_scale_ld
                  : of_group + int64_t{min(at.n0, p.n - 1) / 128} * p.b_scale_ld;
    BlockScales block(of_line + at.k0, kHasBlock ? at.k_blocks : 0, lane);
    const uint32_t a_scale_at = (warp_row + lane / 4 + (kGrouped == GroupedDim::kM ? at.m0 & 3 : 0)) * 4;
    // Factors of the thread's two rows of a wave.
    const auto factors = [&](int stage, int w, float block_scale) {
      float2 of_rows = {block_scale, block_scale};
      if constexpr (kA == Granularity::k1x128 || kIs1x512) {
        const uint32_t from = shared.a_scale(stage) + a_scale_at + w * kWaveStep * 4;
        of_rows.x *= shared_at<const float>(from), of_rows.y *= shared_at<const float>(from + 32);
      }
      return of_rows;
    };
    // That have rows of the group: others are not multiplied.
    const int waves = kEndsInside ? min((at.m - at.m0 - group_row + kWaveStep - 1) / kWaveStep, S::kWaves) : S::kWaves;
    float sum[S::kWaves][64];
#pragma unroll
    for (int w = 0; w < S::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[w][i] = 0;

    // Adds up the first kNow waves. Threads read factors, wait for the next stage and release the last one while the tensor
    // core works; between two waves they promote alone.
    const auto accumulate = [&](auto now) {
      constexpr int kNow = decltype(now)::value;
      if (at.k_blocks == 0) return;
      wait(shared.full(ring.stage), ring.phase);
      float block_scale = kHasBlock ? block.at(0) : 1.0f;
      float2 of_rows = factors(ring.stage, 0, block_scale);
      int last = 0;  // stage
      for (int kb = 0; kb < at.k_blocks; ++kb) {
        const int stage = ring.stage;
        const uint64_t b = ptx::wgmma_descriptor(shared.b(stage));
        const uint32_t b_scales = shared.b_scale(stage) + b_scale_at;
        const auto a_of = [&](int w) { return ptx::wgmma_descriptor(shared.a(stage) + (group_row + w * kWaveStep) * kBlockK); };
        ring.advance();
        const auto begin_next = [&] {
          if (kb + 1 == at.k_blocks) return;
          wait(shared.full(ring.stage), ring.phase);
          if constexpr (kHasBlock) block_scale = block.at(kb + 1);
        };
        if constexpr (kA == Granularity::kBf16) {
#pragma unroll
          for (int w = 0; w < kNow; ++w) ptx::pin(sum[w]);
          ptx::wgmma_fence();
#pragma unroll
          for (int w = 0; w < kNow; ++w) {
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::wgmma_m64n128k16(sum[w], a_of(w) + 2 * k, b + 2 * k, true);
          }
          ptx::wgmma_commit();
          if (kb > 0) release(last);
          begin_next();
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int w = 0; w < kNow; ++w) ptx::pin(sum[w]);
        } else {
          // Column scales held in registers, read once for all waves.
          constexpr int kHeld = S::kWaves == 1 ? 16 : kGrouped == GroupedDim::kNone ? 10 : 8;
          float2 held[kHeld];
          [[maybe_unused]] bool is_far = false;
          if constexpr (kIs1x512) {
            const uint2 of_halves = shared_at<const uint2>(shared.is_far(stage));
            is_far = (of_halves.x | of_halves.y) != 0;
          }
#pragma unroll
          for (int w = 0; w < kNow; ++w) {
            float part[64];
            ptx::pin(part);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockK / 32; ++k)  // descriptors count 16 bytes
              ptx::wgmma_m64n128k32<kE5M2A, kE5M2B>(part, a_of(w) + 2 * k, b + 2 * k, k > 0);
            ptx::wgmma_commit();
            if (w == 0 && kb > 0) release(last);
            if constexpr (kB == Granularity::k1x128) {
              if (w == 0) {
#pragma unroll
                for (int j = 0; j < kHeld; ++j) held[j] = shared_at<const float2>(b_scales + 32 * j);
              }
            }
            if constexpr (kIs1x512) {
              if (kb % kBlocksPer512 == 0) multiply_columns(sum[w], shared.b_scale(stage) + lane % 4 * 16);
            }
            const bool is_last = w == kNow - 1;
            if (is_last) begin_next();
            const float2 next = factors(is_last ? ring.stage : stage, is_last ? 0 : w + 1, block_scale);
            ptx::wgmma_wait<0>();
            ptx::pin(part);
            if constexpr (kIs1x512) {
              if (is_far) multiply_columns(part, shared.far_factors(stage) + lane % 4 * 16);
            }
            promote<kA, kB>(sum[w], part, of_rows.x, of_rows.y, b_scales, held);
            of_rows = next;
          }
          if constexpr (kNow == 0) {
            if (kb > 0) release(last);
            begin_next();
          }
        }
        last = stage;
      }
      release(last);
    };
    static_assert(S::kWaves <= 2);
    if (!kEndsInside || waves == S::kWaves) {
      accumulate(std::integral_constant<int, S::kWaves>());
    } else if (waves > 0) {
      accumulate(std::integral_constant<int, 1>());
    } else {
      accumulate(std::integral_constant<int, 0>());
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
      if (w >= waves) continue;
      const int row0 = at.m0 + warp_row + w * kWaveStep;
      if (kGrouped != GroupedDim::kK || at.k_blocks > 0)  // the scale of an empty group need not be finite
        finish<kA, kB>(p, at, sum[w], row0 + lane / 4, at.n0 + lane % 4 * 2);
      p.bf16_out ? store<S, __nv_bfloat16>(p, at, sum[w], staging, row0, lane)
                 : store<S, float>(p, at, sum[w], staging, row0, lane);
    }
    __syncwarp();
  }
}

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared = {ptx::shared_address(memory)};
  const int warp_group = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpGroup, 0);  // uniform per warp, known to the compiler
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
    ptx::registers_shrink<kOtherRegisters>();
    if (threadIdx.x == kMathWarpGroups * kWarpGroup) load<S, kA, kB, kGrouped>(p, shared, cluster, clusters, rank);
    if constexpr (kA == Granularity::k1x512) {
      const int half = static_cast<int>(threadIdx.x / 32) - kMathWarps - 1;  // the warps after the loader
      if (half >= 0 && half < kFactorWarps) make_column_factors<S, kGrouped>(p, shared, cluster, clusters, rank, half);
    }
    __syncwarp();
  } else {
    ptx::registers_grow<kMathRegisters>();
    multiply<S, kA, kB, kE5M2A, kE5M2B, kGrouped>(p, shared, cluster, clusters, rank, warp_group);
  }
  // No block exits while a peer may still arrive at its barriers.
  if constexpr (S::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
#else
  __trap();  // never launched on other architectures
#endif
}

template <class S, Granularity kA, Granularity kB, bool kE5M2A, bool kE5M2B, GroupedDim kGrouped>
Kernel describe() {
  return {reinterpret_cast<const void*>(&kernel<S, kA, kB, kE5M2A, kE5M2B, kGrouped>), S::kBlockM, kBlockN, S::kCluster,
          kThreads, S::kSharedBytes};
}

}  // namespace fsdp_quant::sm90
