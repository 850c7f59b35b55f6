// out[m, n] (+)= alpha * sum_k a[m, k] b[n, k] (+ bias[n]) of 8-bit operands, K-major, on sm_90a.
//
// The tensor core sums 8-bit products in about 13 bits, so 128 of K are one partial sum, which the threads add in fp32:
//   kOuter    sum += part                     scales of rows or tensors are factors of the finished sum
//   kVector   sum += part * scale[row]        of 1 x 128, on either side
//   kBlock    sum += part * scale             of 128 x 128
// Every element is summed by one thread in order of K: the same bits every run.
//
// Block: a warp group that loads and two that multiply, each block_m / 2 rows of a block_m x 128 tile, 64 rows (a wave)
// at a time: while one group promotes its wave, the other's occupies the tensor core. Persistent; a cluster's blocks
// take neighbouring tiles along n and load a share of a each, for all. A stage is 128 of K:
//   full[stage]    1 arrival (the own loader's) and the bytes of all loads into this block
//   empty[stage]   1 arrival of each multiplying warp of the cluster, since a peer's load writes here too
// Tails: the copy engine reads zeros beyond M, N, K; scales beyond M, N are not loaded, what they touch is not stored.
#pragma once

#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "gemm/hopper_arguments.h"

namespace fsdp_quant::hopper {

enum class Grain { kOuter, kVector, kBlock };

constexpr int kBlockN = 128, kBlockK = 128;
constexpr int kGroup = 128;        // threads of a warp group
constexpr int kMathGroups = 2;
constexpr int kThreads = (kMathGroups + 1) * kGroup;
constexpr int kMathWarps = kMathGroups * 4;
constexpr int kWaveRows = 64;

// kTurns: the groups take turns to issue. kThin: out is staged in narrow pieces, which leaves room for a stage.
template <int M, int Stages, int Cluster, bool Turns, bool Thin>
struct Shape {
  static constexpr int kBlockM = M, kStages = Stages, kCluster = Cluster;
  static constexpr bool kTurns = Turns;
  static constexpr int kWaves = M / (kMathGroups * kWaveRows);
  static constexpr int kABytes = M * kBlockK, kBBytes = kBlockN * kBlockK, kStageBytes = kABytes + kBBytes;

  // Staging of out: 16 rows a warp, a piece of columns at a time. Rows are 4 (bf16) and 8 (fp32) banks out of step, so
  // that the 8 rows that a warp writes at once are in different banks.
  static constexpr int kCols16 = Thin ? 64 : 128, kPitch16 = kCols16 * 2 + 16, kBuffers16 = Thin ? 1 : kWaves;
  static constexpr int kCols32 = Thin ? 32 : 128, kPitch32 = kCols32 * 4 + 32;
  static constexpr int kStaged16 = kBuffers16 * 16 * kPitch16, kStaged32 = 16 * kPitch32;
  static constexpr int kStaged = kStaged16 > kStaged32 ? kStaged16 : kStaged32;

  static constexpr int kStagingAt = Stages * kStageBytes;
  static constexpr int kScalesAt = kStagingAt + kMathWarps * kStaged;
  static constexpr int kBarriersAt = kScalesAt + Stages * (M + kBlockN) * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kBarriersAt + 2 * Stages * 8;

  static_assert(kStageBytes % 1024 == 0 && kABytes % 1024 == 0, "swizzled tiles begin at multiples of 1024 bytes");
  static_assert((M / Cluster) % 8 == 0 && M / Cluster <= 256, "a share of a is whole swizzle atoms, in one box");
  static_assert(kSharedBytes <= 232448, "more shared memory than a block has");
};

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef HOPPER_DEBUG
  const uint32_t start = ptx::nanoseconds();
  while (!ptx::mbarrier_try_wait(barrier, parity))
    if (ptx::nanoseconds() - start > 2000000000) __trap();
#else
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

template <class S>
struct Shared {
  uint32_t base;

  __device__ uint32_t a(int stage) const { return base + stage * S::kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + S::kABytes; }
  __device__ uint32_t a_scale(int stage) const { return base + S::kScalesAt + stage * (S::kBlockM + kBlockN) * 4; }
  __device__ uint32_t b_scale(int stage) const { return a_scale(stage) + S::kBlockM * 4; }
  __device__ uint32_t full(int stage) const { return base + S::kBarriersAt + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(stage) + S::kStages * 8; }
};

// Where the loader or a multiplying thread is in the ring: all walk it alike.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// First row and column of this block's tile of cluster tile `t`. Bands of rows, walked along n, keep what the clusters
// that run at once read near a square.
struct Place {
  int m0, n0;
};

template <class S>
__device__ __forceinline__ Place place_of(const Arguments& p, int t, int rank) {
  const int band = t / (p.band * p.n_tiles), first = band * p.band;
  const int height = min(p.band, p.m_tiles - first), r = t - first * p.n_tiles;
  const int n = r / height;
  return {(first + r - n * height) * S::kBlockM, (n * S::kCluster + rank) * kBlockN};
}

// Scales of one 128-line block for all of K, 32 blocks of K at a time, one a lane.
struct BlockScales {
  const float* line;
  int count;
  float now, next;

  __device__ __forceinline__ BlockScales(const float* scale, int ld, int outer0, int outer, int count, int lane)
      : line(scale + int64_t{min(outer0, outer - 1) / 128} * ld + lane), count(count - lane), now(0) {
    next = load(0);
  }
  __device__ __forceinline__ float load(int kb) const { return kb < count ? __ldg(line + kb) : 0.0f; }
  __device__ __forceinline__ float at(int kb) {
    if (kb % 32 == 0) now = next, next = load(kb + 32);
    return __shfl_sync(0xFFFFFFFF, now, kb % 32);
  }
};

__device__ __forceinline__ float2 shared_float2(uint32_t address) {
  return *static_cast<const float2*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ float shared_float(uint32_t address) {
  return *static_cast<const float*>(__cvta_shared_to_generic(address));
}

// Loader: one thread.
template <class S, Grain kA, Grain kB>
__device__ __forceinline__ void load(const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank) {
  constexpr int kShare = S::kBlockM / S::kCluster;
  const int a_lines = (p.m + 3) & ~3, b_lines = (p.n + 3) & ~3;
  Ring<S::kStages> ring;
  for (int t = cluster; t < p.tiles; t += clusters) {
    const auto [m0, n0] = place_of<S>(p, t, rank);
    const uint32_t a_bytes = kA == Grain::kVector ? 4 * min(S::kBlockM, a_lines - m0) : 0;
    const uint32_t b_bytes = kB == Grain::kVector ? 4 * max(min(kBlockN, b_lines - n0), 0) : 0;
    for (int kb = 0; kb < p.k_blocks; ++kb) {
      const int stage = ring.stage;
      const uint32_t full = shared.full(stage), a = shared.a(stage) + rank * kShare * kBlockK;
      wait(shared.empty(stage), ring.phase ^ 1);
      ptx::mbarrier_expect(full, S::kStageBytes + a_bytes + b_bytes);
      if constexpr (S::kCluster > 1)
        ptx::copy_tile_multicast(a, &p.a, kb * kBlockK, m0 + rank * kShare, full, (1 << S::kCluster) - 1);
      else
        ptx::copy_tile(a, &p.a, kb * kBlockK, m0, full);
      ptx::copy_tile(shared.b(stage), &p.b, kb * kBlockK, n0, full);
      if constexpr (kA == Grain::kVector)
        ptx::copy_bytes(shared.a_scale(stage), p.a_scale + int64_t{kb} * p.a_scale_ld + m0, a_bytes, full);
      if constexpr (kB == Grain::kVector)
        if (b_bytes > 0)
          ptx::copy_bytes(shared.b_scale(stage), p.b_scale + int64_t{kb} * p.b_scale_ld + n0, b_bytes, full);
      ring.advance();
    }
  }
}

// One wave of partial sums into the sums. `low`, `high`: the factor of the thread's two rows; `b_scale`: address of the
// scales of its columns, of which `held` has the first.
template <Grain kA, Grain kB, int kHeld>
__device__ __forceinline__ void promote(
    float (&sum)[64], const float (&part)[64], float low, float high, uint32_t b_scale, const float2 (&held)[kHeld]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float* s = sum + 4 * j;
    const float* d = part + 4 * j;
    if constexpr (kB == Grain::kVector) {
      const float2 b = j < kHeld ? held[j % kHeld] : shared_float2(b_scale + 32 * j);
      s[0] = fmaf(low * b.x, d[0], s[0]), s[1] = fmaf(low * b.y, d[1], s[1]);
      s[2] = fmaf(high * b.x, d[2], s[2]), s[3] = fmaf(high * b.y, d[3], s[3]);
    } else if constexpr (kA == Grain::kOuter) {
      s[0] += d[0], s[1] += d[1], s[2] += d[2], s[3] += d[3];
    } else {
      s[0] = fmaf(low, d[0], s[0]), s[1] = fmaf(low, d[1], s[1]);
      s[2] = fmaf(high, d[2], s[2]), s[3] = fmaf(high, d[3], s[3]);
    }
  }
}

// Scales, alpha and bias of one wave. `row`: the thread's first row (its second is 8 below), `col` its first column.
template <Grain kA, Grain kB>
__device__ __forceinline__ void finish(const Arguments& p, float (&sum)[64], int row, int col) {
  constexpr bool kOuter = kA == Grain::kOuter && kB == Grain::kOuter;
  if (kOuter || p.alpha != nullptr) {
    const float alpha = p.alpha != nullptr ? __ldg(p.alpha) : 1.0f;
    float low = alpha, high = alpha;
    if constexpr (kOuter) {
      if (p.a_scale != nullptr) {
        low *= __ldg(p.a_scale + int64_t{min(row, p.m - 1)} * p.a_scale_step);
        high *= __ldg(p.a_scale + int64_t{min(row + 8, p.m - 1)} * p.a_scale_step);
      }
      if (p.b_scale != nullptr && p.b_scale_step == 0) {
        const float b = __ldg(p.b_scale);
        low *= b, high *= b;
      }
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      sum[4 * j] *= low, sum[4 * j + 1] *= low;
      sum[4 * j + 2] *= high, sum[4 * j + 3] *= high;
    }
  }
  if (kOuter && p.b_scale_step != 0) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (col + 8 * j >= p.n) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(p.b_scale + col + 8 * j));
      sum[4 * j] *= b.x, sum[4 * j + 1] *= b.y, sum[4 * j + 2] *= b.x, sum[4 * j + 3] *= b.y;
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (col + 8 * j >= p.n) continue;
      const float2 b =
          p.bf16_bias ? __bfloat1622float2(*(static_cast<const __nv_bfloat162*>(p.bias) + (col + 8 * j) / 2))
                      : __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(p.bias) + col + 8 * j));
      sum[4 * j] += b.x, sum[4 * j + 1] += b.y, sum[4 * j + 2] += b.x, sum[4 * j + 3] += b.y;
    }
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// One wave of a warp, 16 rows from `row0`, rounded and stored; rows and columns beyond the edge are not. Returns the
// bits of the largest magnitude stored (NaN above all).
template <class S>
__device__ __forceinline__ uint32_t store_bf16(
    const Arguments& p, const float (&sum)[64], uint32_t staging, int row0, int n0, int wave, int lane) {
  const int r = lane / 4, q = lane % 4;
  uint32_t packed[32], amax = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    packed[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  if (p.amax != nullptr) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const bool inside = row0 + r + i % 2 * 8 < p.m && n0 + i / 2 * 8 + 2 * q < p.n;
      const uint32_t bits = max(packed[i] << 16 & 0x7FFFFFFF, packed[i] & 0x7FFF0000);
      amax = max(amax, inside ? bits : 0);
    }
  }
  constexpr int kPieces = kBlockN / S::kCols16, kJ = S::kCols16 / 8;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const uint32_t buffer = staging + (wave * kPieces + c) % S::kBuffers16 * 16 * S::kPitch16;
    ptx::store_wait_read<S::kBuffers16 - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const uint32_t at = buffer + r * S::kPitch16 + (8 * j + 2 * q) * 2;
      *static_cast<uint32_t*>(__cvta_shared_to_generic(at)) = packed[2 * (c * kJ + j)];
      *static_cast<uint32_t*>(__cvta_shared_to_generic(at + 8 * S::kPitch16)) = packed[2 * (c * kJ + j) + 1];
    }
    const int col = n0 + c * S::kCols16, cols = min(S::kCols16, p.n - col);
    __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(p.out) + row0 * p.out_ld + col;
    if (p.stores == Stores::kThreads) {
      __syncwarp();
      constexpr int kLanes = S::kCols16 / 8, kRows = 32 / kLanes;
      const int my_row = lane / kLanes, my_col = lane % kLanes * 8;
#pragma unroll
      for (int i = 0; i < 16 / kRows; ++i) {
        const int row = my_row + i * kRows;
        const uint4 v = *static_cast<const uint4*>(__cvta_shared_to_generic(buffer + row * S::kPitch16 + my_col * 2));
        if (row0 + row < p.m && my_col < cols) *reinterpret_cast<uint4*>(out + row * p.out_ld + my_col) = v;
      }
      continue;
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane < 16 && row0 + lane < p.m && cols > 0)
      ptx::store_bytes(out + lane * p.out_ld, buffer + lane * S::kPitch16, cols * 2);
    ptx::store_commit();
  }
  return amax;
}

template <class S>
__device__ __forceinline__ uint32_t store_fp32(
    const Arguments& p, const float (&sum)[64], uint32_t staging, int row0, int n0, int lane) {
  const int r = lane / 4, q = lane % 4;
  uint32_t amax = 0;
  if (p.amax != nullptr) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const bool inside = row0 + r + i / 2 % 2 * 8 < p.m && n0 + i / 4 * 8 + 2 * q < p.n;
      amax = max(amax, inside ? magnitude_bits(sum[i]) : 0);
    }
  }
  constexpr int kPieces = kBlockN / S::kCols32, kJ = S::kCols32 / 8;
  constexpr int kLanes = S::kCols32 / 4, kRows = 32 / kLanes;  // of 16-byte accesses, in batches that hide latency
  constexpr int kSteps = 16 / kRows, kBatch = kSteps < 8 ? kSteps : 8;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int col = n0 + c * S::kCols32, cols = min(S::kCols32, p.n - col);
    float* const out = static_cast<float*>(p.out) + row0 * p.out_ld + col;
    ptx::store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const uint32_t at = staging + r * S::kPitch32 + (8 * j + 2 * q) * 4;
      const float* s = sum + 4 * (c * kJ + j);
      *static_cast<float2*>(__cvta_shared_to_generic(at)) = make_float2(s[0], s[1]);
      *static_cast<float2*>(__cvta_shared_to_generic(at + 8 * S::kPitch32)) = make_float2(s[2], s[3]);
    }
    if (p.stores != Stores::kCopies) {
      __syncwarp();
      const int my_row = lane / kLanes, my_col = lane % kLanes * 4;
#pragma unroll 1
      for (int first = 0; first < kSteps; first += kBatch) {
        const int row = my_row + first * kRows, rows = my_col < cols ? p.m - row0 - row : 0;
        const uint32_t from = staging + row * S::kPitch32 + my_col * 4;
        float* const to = out + row * p.out_ld + my_col;
        const auto staged = [&](int i) {
          return *static_cast<const float4*>(__cvta_shared_to_generic(from + i * kRows * S::kPitch32));
        };
        const auto target = [&](int i) { return reinterpret_cast<float4*>(to + i * kRows * p.out_ld); };
        if (!p.accumulate) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (i * kRows < rows) *target(i) = staged(i);
        } else if (p.stores == Stores::kReductions) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (i * kRows < rows) ptx::red_add(to + i * kRows * p.out_ld, staged(i));
        } else {
          float4 old[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) old[i] = i * kRows < rows ? *target(i) : float4{};
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const float4 v = staged(i);
            if (i * kRows < rows) *target(i) = {old[i].x + v.x, old[i].y + v.y, old[i].z + v.z, old[i].w + v.w};
          }
        }
      }
      continue;
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane < 16 && row0 + lane < p.m && cols > 0) {
      if (p.accumulate)
        ptx::add_floats(out + lane * p.out_ld, staging + lane * S::kPitch32, cols * 4);
      else
        ptx::store_bytes(out + lane * p.out_ld, staging + lane * S::kPitch32, cols * 4);
    }
    ptx::store_commit();
  }
  return amax;
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B>
__device__ __forceinline__ void multiply(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group_row = group * S::kWaves * kWaveRows, warp_row = group_row + warp * 16;
  const uint32_t staging = shared.base + S::kStagingAt + (group * 4 + warp) * S::kStaged;
  const uint32_t a_scale_at = (warp_row + lane / 4) * 4, b_scale_at = lane % 4 * 8;
  const uint32_t own_turn = 1 + group, other_turn = 2 - group;
  const auto release = [&](int stage) {
    __syncwarp();
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) ptx::mbarrier_arrive_remote(ptx::map_shared(shared.empty(stage), lane));
    } else {
      if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
    }
  };

  uint32_t amax = 0;
  Ring<S::kStages> ring;
  if (S::kTurns && group == 1) ptx::named_arrive(other_turn, 2 * kGroup);
  for (int t = cluster; t < p.tiles; t += clusters) {
    const auto [m0, n0] = place_of<S>(p, t, rank);
    constexpr bool kHasBlock = kA == Grain::kBlock || kB == Grain::kBlock;
    static_assert(!kHasBlock || kA != kB, "nothing multiplies 128 x 128 scales by 128 x 128");
    static_assert(kA != Grain::kBlock || S::kWaves * kWaveRows <= 128, "a group's rows have one scale");
    BlockScales block(kA == Grain::kBlock ? p.a_scale : p.b_scale, kA == Grain::kBlock ? p.a_scale_ld : p.b_scale_ld,
                      kA == Grain::kBlock ? m0 + group_row : n0, kA == Grain::kBlock ? p.m : p.n,
                      kHasBlock ? p.k_blocks : 0, lane);
    float sum[S::kWaves][64];
#pragma unroll
    for (int w = 0; w < S::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[w][i] = 0;

    for (int kb = 0; kb < p.k_blocks; ++kb) {
      const int stage = ring.stage;
      const float block_scale = kHasBlock ? block.at(kb) : 1.0f;
      const uint64_t b = ptx::wgmma_descriptor(shared.b(stage));
      const uint32_t b_scales = shared.b_scale(stage) + b_scale_at;
      constexpr int kHeld = S::kWaves > 1 ? 12 : 16;  // column scales that fit in registers: read once for all waves
      float2 held[kHeld];
      wait(shared.full(stage), ring.phase);
#pragma unroll
      for (int w = 0; w < S::kWaves; ++w) {
        const uint64_t a = ptx::wgmma_descriptor(shared.a(stage) + (group_row + w * kWaveRows) * kBlockK);
        float low = block_scale, high = block_scale;
        if constexpr (kA == Grain::kVector) {
          const uint32_t at = shared.a_scale(stage) + a_scale_at + w * kWaveRows * 4;
          low *= shared_float(at), high *= shared_float(at + 32);
        }
        float part[64];
        if constexpr (S::kTurns) ptx::named_sync(own_turn, 2 * kGroup);
        ptx::pin(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 32; ++k)  // descriptors count 16 bytes
          ptx::wgmma_m64n128k32<kE5M2A, kE5M2B>(part, a + 2 * k, b + 2 * k, k > 0);
        ptx::wgmma_commit();
        if constexpr (S::kTurns) ptx::named_arrive(other_turn, 2 * kGroup);
        if constexpr (kB == Grain::kVector) {
          if (w == 0) {
#pragma unroll
            for (int j = 0; j < kHeld; ++j) held[j] = shared_float2(b_scales + 32 * j);
          }
        }
        ptx::wgmma_wait<0>();
        ptx::pin(part);
        if (w == S::kWaves - 1 && kB != Grain::kVector) release(stage);
        promote<kA, kB>(sum[w], part, low, high, b_scales, held);
      }
      if constexpr (kB == Grain::kVector) release(stage);
      ring.advance();
    }

#pragma unroll
    for (int w = 0; w < S::kWaves; ++w) {
      const int row0 = m0 + warp_row + w * kWaveRows;
      finish<kA, kB>(p, sum[w], row0 + lane / 4, n0 + lane % 4 * 2);
      const uint32_t bits = p.bf16_out ? store_bf16<S>(p, sum[w], staging, row0, n0, w, lane)
                                       : store_fp32<S>(p, sum[w], staging, row0, n0, lane);
      amax = max(amax, bits);
    }
    __syncwarp();
  }
  if (S::kTurns && group == 0) ptx::named_sync(own_turn, 2 * kGroup);
  if (p.amax != nullptr) {
    amax = __reduce_max_sync(0xFFFFFFFF, amax);
    if (lane == 0) atomicMax(p.amax, amax);
  }
  ptx::store_wait();
  __syncwarp();
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared = {ptx::shared_address(memory)};
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / kGroup, 0);  // the same in a warp, as the compiler now knows
  const int rank = S::kCluster > 1 ? ptx::cluster_rank() : 0;
  const int cluster = blockIdx.x / S::kCluster, clusters = gridDim.x / S::kCluster;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.empty(stage), kMathWarps * S::kCluster);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();

  if (group == kMathGroups) {
    ptx::registers_shrink<40>();
    if (threadIdx.x == kMathGroups * kGroup) load<S, kA, kB>(p, shared, cluster, clusters, rank);
    __syncwarp();
  } else {
    ptx::registers_grow<232>();
    multiply<S, kA, kB, kE5M2A, kE5M2B>(p, shared, cluster, clusters, rank, group);
  }
  // No block leaves while a peer may still arrive at its barriers.
  if constexpr (S::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
#endif
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B>
Kernel describe() {
  return {reinterpret_cast<const void*>(&kernel<S, kA, kB, kE5M2A, kE5M2B>), S::kBlockM, kBlockN, S::kCluster, kThreads,
          S::kSharedBytes};
}

}  // namespace fsdp_quant::hopper
