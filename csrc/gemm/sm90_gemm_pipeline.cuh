// SPDX-License-Identifier: Apache-2.0
// Pipeline of the sm_90 GEMMs: shared memory, barriers, tiles of groups, and the loading warp. See sm90_gemm_kernel.cuh.
#pragma once

#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "gemm/sm90_gemm_arguments.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products on Hopper use instructions of sm_90a alone: compile for sm_90a instead of sm_90"
#endif

namespace fsdp_quant::sm90 {

enum class Granularity { kRowwise, k1x128, k128x128, k1x512, kBf16 };

// Elements of K in 128 bytes, a stage's part of a row.
template <Granularity kA>
constexpr int kElements = kA == Granularity::kBf16 ? 64 : 128;

constexpr int kBlockN = 128, kBlockK = 128;
constexpr int kWarpGroup = 128;
constexpr int kMathWarpGroups = 2;
constexpr int kThreads = (kMathWarpGroups + 1) * kWarpGroup;
constexpr int kMathWarps = kMathWarpGroups * 4;
constexpr int kMathRegisters = 232, kOtherRegisters = 40;  // of a thread
static_assert(kMathWarpGroups * kMathRegisters + kOtherRegisters <= 65536 / kThreads / 8 * 8 * (kMathWarpGroups + 1),
              "more registers than a block begins with: math groups would wait for them forever");
constexpr int kWaveRows = 64;
constexpr int kFactorWarps = 2;      // of the loading warp group: compute column factors
constexpr int kBlocksPer512 = 4;     // 128s of K per 1x512 scale
constexpr float kWindow = 0x1p-32f;  // of a column's largest unit so far: lower bound of its units

// Group offsets and the row tiles before each, in shared memory.
constexpr int kTableBytes = (2 * (kMostGroups + 1) * static_cast<int>(sizeof(int32_t)) + 15) / 16 * 16;

// kThin: stages out in narrow pieces, which frees memory for another pipeline stage.
template <int M, int Stages, int Cluster, bool Thin>
struct TileConfig {
  static constexpr int kBlockM = M, kStages = Stages, kCluster = Cluster;
  static constexpr int kWaves = M / (kMathWarpGroups * kWaveRows);
  static constexpr int kABytes = M * kBlockK, kBBytes = kBlockN * kBlockK, kStageBytes = kABytes + kBBytes;
  // Rows of scales: bulk copies begin at multiples of 4, groups at any row.
  static constexpr int kAScales = M + 4, kScales = kAScales + kBlockN;

  // Staging of out: 16 rows per warp, a piece of columns at a time. Rows are 4 (bf16) and 8 (fp32) banks out of step, so that
  // the 8 rows of one store are in different banks.
  static constexpr int kCols16 = Thin ? 64 : 128, kPitch16 = kCols16 * 2 + 16;
  static constexpr int kCols32 = Thin ? 32 : 128, kPitch32 = kCols32 * 4 + 32;
  static constexpr int kStaged = 16 * (kPitch16 > kPitch32 ? kPitch16 : kPitch32);

  static constexpr int kStagingAt = Stages * kStageBytes;
  static constexpr int kScalesAt = kStagingAt + kMathWarps * kStaged;
  static constexpr int kTableAt = kScalesAt + Stages * kScales * static_cast<int>(sizeof(float));
  static constexpr int kBarriersAt = kTableAt + kTableBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * Stages * 8;

  static_assert(kStageBytes % 1024 == 0 && kABytes % 1024 == 0, "swizzled tiles begin at multiples of 1024 bytes");
  static_assert((M / Cluster) % 8 == 0 && M / Cluster <= 256, "a share of a is whole swizzle atoms, in one box");
  static_assert(kSharedBytes <= 232448, "more shared memory than a block has");
};

// Random sleeps in builds with FSDP_QUANT_RANDOM_SLEEPS, to vary the order in which warps arrive.
__device__ __forceinline__ void jitter() {
#ifdef FSDP_QUANT_RANDOM_SLEEPS
  const uint32_t dice = (static_cast<uint32_t>(clock64()) + blockIdx.x * 40503u + threadIdx.x / 32 * 977u) * 2654435761u >> 16;
  if (dice % 4 == 0) __nanosleep(dice % 1024);
#endif
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  jitter();
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
}

template <class S>
struct Shared {
  uint32_t base;

  __device__ uint32_t a(int stage) const { return base + stage * S::kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + S::kABytes; }
  __device__ uint32_t a_scale(int stage) const { return base + S::kScalesAt + stage * S::kScales * 4; }
  __device__ uint32_t b_scale(int stage) const { return a_scale(stage) + S::kAScales * 4; }
  __device__ uint32_t full(int stage) const { return base + S::kBarriersAt + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(stage) + S::kStages * 8; }
  // k1x512: factors of far columns, and per half whether there are any; overlays the group table.
  __device__ uint32_t far_factors(int stage) const { return base + S::kTableAt + stage * (kBlockN + 4) * 4; }
  __device__ uint32_t is_far(int stage) const { return far_factors(stage) + kBlockN * 4; }
  // [groups + 1] each: valid offsets; row tiles before a group.
  __device__ int32_t* offsets() const { return static_cast<int32_t*>(__cvta_shared_to_generic(base + S::kTableAt)); }
  __device__ int32_t* row_tiles() const { return offsets() + kMostGroups + 1; }
};

// Position in the ring of stages, advanced alike by loader and math threads.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Fill the group table; all threads of the block.
template <class S, GroupedDim kGrouped>
__device__ __forceinline__ void tabulate(const Arguments& p, const Shared<S>& shared) {
  int32_t *const offsets = shared.offsets(), *const row_tiles = shared.row_tiles();
  const int lane = threadIdx.x % 32, last = kGrouped == GroupedDim::kM ? p.m : p.k;
  for (int i = threadIdx.x; i <= p.groups; i += kThreads) offsets[i] = __ldg(p.offsets + i);
  __syncthreads();
  if (threadIdx.x < 32) {
    int most = 0, tiles = 0;  // of earlier lanes and rounds
    bool clamped = false;
    for (int i0 = 0; i0 <= p.groups; i0 += 32) {
      const int i = i0 + lane;
      const bool exists = i <= p.groups;
      const int given = exists ? offsets[i] : 0;
      int offset = max(min(given, last), most);
      if (kGrouped == GroupedDim::kK && offset != last) offset &= ~(kBlockK - 1);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, offset, d);
        if (lane >= d) offset = max(offset, other);
      }
      clamped |= exists && offset != given;
      int before = __shfl_up_sync(0xFFFFFFFF, offset, 1);
      if (lane == 0) before = most;
      int sum = exists && i > 0 ? (offset - before + S::kBlockM - 1) / S::kBlockM : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, sum, d);
        if (lane >= d) sum += other;
      }
      if (exists) offsets[i] = offset, row_tiles[i] = tiles + sum;
      most = __shfl_sync(0xFFFFFFFF, offset, 31), tiles += __shfl_sync(0xFFFFFFFF, sum, 31);
    }
    if (blockIdx.x == 0 && clamped && p.flag != nullptr) *p.flag = 1;  // several lanes may write it
  }
  __syncthreads();
}

template <class S, GroupedDim kGrouped>
__device__ __forceinline__ int tiles_of(const Arguments& p, const Shared<S>& shared) {
  return kGrouped == GroupedDim::kM ? shared.row_tiles()[p.groups] * p.n_tiles : p.tiles;
}

// This block's tile of cluster tile `t`. Bands of rows, walked along n, keep the data of concurrent clusters near a square.
struct TileCoord {
  int m0, n0;  // first row and column
  int m;       // end of the rows
  int group;
  int k0, k_blocks;  // 128s of K
};

// group: of an earlier tile.
template <class S, GroupedDim kGrouped, int kOfK = kBlockK>
__device__ __forceinline__ TileCoord tile_coord(const Arguments& p, const Shared<S>& shared, int t, int rank, int group = 0) {
  TileCoord at = {0, 0, p.m, group, 0, p.k_blocks};
  int m_tiles = p.m_tiles;
  if constexpr (kGrouped == GroupedDim::kM) {
    const int32_t* const row_tiles = shared.row_tiles();
    const int row_tile = t / p.n_tiles;
    while (row_tiles[at.group + 1] <= row_tile) ++at.group;
    const int32_t* const offsets = shared.offsets() + at.group;
    m_tiles = row_tiles[at.group + 1] - row_tiles[at.group];
    t -= row_tiles[at.group] * p.n_tiles;
    at.m0 = offsets[0], at.m = offsets[1];
  } else if constexpr (kGrouped == GroupedDim::kK) {
    at.group = t / (p.m_tiles * p.n_tiles);
    t -= at.group * p.m_tiles * p.n_tiles;
    const int32_t* const offsets = shared.offsets() + at.group;
    at.k0 = offsets[0] / kOfK;
    at.k_blocks = offsets[1] > offsets[0] ? (offsets[1] + kOfK - 1) / kOfK - at.k0 : 0;
  }
  const int band = t / (p.band * p.n_tiles), first = band * p.band;
  const int height = min(p.band, m_tiles - first), r = t - first * p.n_tiles;
  const int n = r / height;
  at.m0 += (first + r - n * height) * S::kBlockM, at.n0 = (n * S::kCluster + rank) * kBlockN;
  return at;
}

// Scales of a 128-line block for all 128s of K of a tile, loaded 32 at a time, one per lane.
struct BlockScales {
  const float* line;
  int count;
  float now, next;

  // line: at the tile's first 128 of K.
  __device__ __forceinline__ BlockScales(const float* line, int count, int lane)
      : line(line + lane), count(count - lane), now(0), next(load(0)) {}
  __device__ __forceinline__ float load(int kb) const { return kb < count ? __ldg(line + kb) : 0.0f; }
  __device__ __forceinline__ float at(int kb) {
    if (kb % 32 == 0) now = next, next = load(kb + 32);
    return __shfl_sync(0xFFFFFFFF, now, kb % 32);
  }
};

template <class T>
__device__ __forceinline__ T& shared_at(uint32_t address) {
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}

// Loader: one thread.
template <class S, Granularity kA, Granularity kB, GroupedDim kGrouped>
__device__ __forceinline__ void load(const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank) {
  constexpr int kShare = S::kBlockM / S::kCluster;
  const int a_lines = (p.m + 3) & ~3, b_lines = (p.n + 3) & ~3, tiles = tiles_of<S, kGrouped>(p, shared);
  Ring<S::kStages> ring;
  for (int t = cluster, group = 0; t < tiles; t += clusters) {
    const TileCoord at = tile_coord<S, kGrouped, kElements<kA>>(p, shared, t, rank, group);
    group = at.group;
    const int a_line = kGrouped == GroupedDim::kM ? at.m0 & ~3 : at.m0;
    constexpr int kAScales = kGrouped == GroupedDim::kM ? S::kAScales : S::kBlockM;
    const uint32_t a_bytes = kA == Granularity::k1x128 || kA == Granularity::k1x512 ? 4 * min(kAScales, a_lines - a_line) : 0;
    const uint32_t b_bytes = kB == Granularity::k1x128 ? 4 * max(min(kBlockN, b_lines - at.n0), 0) : 0;
    const float* const b_scale = p.b_scale + (kGrouped == GroupedDim::kM ? at.group * p.b_scale_plane : 0) + at.n0;
    const int plane = kGrouped == GroupedDim::kM ? at.group : 0;  // of b
    // Shares of a that have rows of the group. Others are not loaded.
    const int shares = kGrouped == GroupedDim::kM ? min((at.m - at.m0 + kShare - 1) / kShare, S::kCluster) : S::kCluster;
    const uint32_t bytes = shares * kShare * kBlockK + S::kBBytes + a_bytes + b_bytes;
    for (int kb = at.k0; kb < at.k0 + at.k_blocks; ++kb) {
      const int stage = ring.stage;
      const uint32_t full = shared.full(stage), a = shared.a(stage) + rank * kShare * kBlockK;
      wait(shared.empty(stage), ring.phase ^ 1);
      ptx::mbarrier_expect(full, bytes);
      if constexpr (S::kCluster == 1)
        ptx::copy_tile(a, &p.a, kb * kBlockK, at.m0, full);
      else if (rank < shares)
        ptx::copy_tile_multicast(a, &p.a, kb * kBlockK, at.m0 + rank * kShare, full, (1 << S::kCluster) - 1);
      ptx::copy_tile(shared.b(stage), &p.b, kb * kBlockK, at.n0, plane, full);
      if constexpr (kA == Granularity::k1x128 || kA == Granularity::k1x512) {
        const int line = kA == Granularity::k1x512 ? kb / kBlocksPer512 : kb;
        ptx::copy_bytes(shared.a_scale(stage), p.a_scale + int64_t{line} * p.a_scale_ld + a_line, a_bytes, full);
      }
      if constexpr (kB == Granularity::k1x128)
        if (b_bytes > 0) ptx::copy_bytes(shared.b_scale(stage), b_scale + int64_t{kb} * p.b_scale_ld, b_bytes, full);
      ring.advance();
    }
    if constexpr (kA == Granularity::k1x512) {
      wait(shared.empty(ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive(shared.full(ring.stage));
      ring.advance();
    }
  }
}

}  // namespace fsdp_quant::sm90
