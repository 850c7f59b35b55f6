// out[m, n] (+)= alpha * sum_k a[m, k] b[n, k] (+ bias[n]) of 8-bit operands, K-major, on sm_90a.
//
// The tensor core sums 8-bit products in about 13 bits, so 128 of K are one partial sum, which the threads add in fp32:
//   kOuter    sum += part                     scales of rows or tensors are factors of the finished sum
//   kVector   sum += part * scale[row]        of 1 x 128, on either side
//   kBlock    sum += part * scale             of 128 x 128, of b
//   kValues   sum                             bf16 values, which it sums in fp32; scales as of kOuter. A 128 of K is 64 of them
//   kRun      sum += part * scale[row]        of 1 x 512 on both sides, powers of two; those of columns are units of
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
// Groups are tiled on the device. Cut along M, a group's tiles begin at its first row, and the rows of the next group
// in its last tile are not stored; cut along K, every group has all tiles of an out of its own, and its 128s of K.
#pragma once

#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "gemm/hopper_arguments.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products on Hopper use instructions of sm_90a alone: compile for sm_90a instead of sm_90"
#endif

namespace fsdp_quant::hopper {

enum class Grain { kOuter, kVector, kBlock, kRun, kValues };

// Elements of K in 128 bytes, which a stage holds of a row.
template <Grain kA>
constexpr int kElements = kA == Grain::kValues ? 64 : 128;

constexpr int kBlockN = 128, kBlockK = 128;
constexpr int kGroup = 128;        // threads of a warp group
constexpr int kMathGroups = 2;
constexpr int kThreads = (kMathGroups + 1) * kGroup;
constexpr int kMathWarps = kMathGroups * 4;
constexpr int kWaveRows = 64;
constexpr int kFactorWarps = 2;    // of the loading group: make the factors of columns
constexpr int kRunBlocks = 4;      // 128s of K that share a scale of 1 x 512
constexpr float kWindow = 0x1p-32f;  // of the largest unit of a column so far: where its units end

// Offsets of groups and the row tiles before each, in shared memory.
constexpr int kTableBytes = (2 * (kMostGroups + 1) * static_cast<int>(sizeof(int32_t)) + 15) / 16 * 16;

// kThin: out is staged in narrow pieces, which leaves room for a stage.
template <int M, int Stages, int Cluster, bool Thin>
struct Shape {
  static constexpr int kBlockM = M, kStages = Stages, kCluster = Cluster;
  static constexpr int kWaves = M / (kMathGroups * kWaveRows);
  static constexpr int kABytes = M * kBlockK, kBBytes = kBlockN * kBlockK, kStageBytes = kABytes + kBBytes;
  // Of rows: bulk copies begin at multiples of 4 scales, rows of a group anywhere.
  static constexpr int kAScales = M + 4, kScales = kAScales + kBlockN;

  // Staging of out: 16 rows a warp, a piece of columns at a time. Rows are 4 (bf16) and 8 (fp32) banks out of step, so
  // that the 8 rows that a warp writes at once are in different banks.
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

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
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
  // Of columns that are far below, and for each half whether there are any: where other products have tables of groups.
  __device__ uint32_t far_factors(int stage) const { return base + S::kTableAt + stage * (kBlockN + 4) * 4; }
  __device__ uint32_t is_far(int stage) const { return far_factors(stage) + kBlockN * 4; }
  // [groups + 1] each: offsets, in order and range; row tiles before a group.
  __device__ int32_t* offsets() const { return static_cast<int32_t*>(__cvta_shared_to_generic(base + S::kTableAt)); }
  __device__ int32_t* row_tiles() const { return offsets() + kMostGroups + 1; }
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

// Fills the table of groups; all threads of the block.
template <class S, Cut kCut>
__device__ __forceinline__ void tabulate(const Arguments& p, const Shared<S>& shared) {
  int32_t *const offsets = shared.offsets(), *const row_tiles = shared.row_tiles();
  const int lane = threadIdx.x % 32, last = kCut == Cut::kRows ? p.m : p.k;
  for (int i = threadIdx.x; i <= p.groups; i += kThreads) offsets[i] = __ldg(p.offsets + i);
  __syncthreads();
  if (threadIdx.x < 32) {
    int most = 0, tiles = 0;  // of the lanes and rounds before
    bool clamped = false;
    for (int i0 = 0; i0 <= p.groups; i0 += 32) {
      const int i = i0 + lane;
      const bool exists = i <= p.groups;
      const int given = exists ? offsets[i] : 0;
      int offset = max(min(given, last), most);
      if (kCut == Cut::kDepth && offset != last) offset &= ~(kBlockK - 1);
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
    if (blockIdx.x == 0 && clamped && p.flag != nullptr) *p.flag = 1;  // by several lanes, the same
  }
  __syncthreads();
}

template <class S, Cut kCut>
__device__ __forceinline__ int tiles_of(const Arguments& p, const Shared<S>& shared) {
  return kCut == Cut::kRows ? shared.row_tiles()[p.groups] * p.n_tiles : p.tiles;
}

// This block's tile of cluster tile `t`. Bands of rows, walked along n, keep what the clusters that run at once read
// near a square.
struct Place {
  int m0, n0;        // first row and column
  int m;             // rows end before
  int group;
  int k0, k_blocks;  // 128s of K
};

template <class S, Cut kCut, int kOfK = kBlockK>
__device__ __forceinline__ Place place_of(const Arguments& p, const Shared<S>& shared, int t, int rank) {
  Place at = {0, 0, p.m, 0, 0, p.k_blocks};
  int m_tiles = p.m_tiles;
  if constexpr (kCut == Cut::kRows) {
    const int32_t* const row_tiles = shared.row_tiles();
    const int row_tile = t / p.n_tiles;
    for (int step = kMostGroups / 2; step > 0; step /= 2)  // the last group whose tiles do not begin later
      if (at.group + step < p.groups && row_tiles[at.group + step] <= row_tile) at.group += step;
    const int32_t* const offsets = shared.offsets() + at.group;
    m_tiles = row_tiles[at.group + 1] - row_tiles[at.group];
    t -= row_tiles[at.group] * p.n_tiles;
    at.m0 = offsets[0], at.m = offsets[1];
  } else if constexpr (kCut == Cut::kDepth) {
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

// Scales of one 128-line block for the 128s of K of a tile, 32 at a time, one a lane.
struct BlockScales {
  const float* line;
  int count;
  float now, next;

  // `line`: at the tile's first 128 of K.
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
template <class S, Grain kA, Grain kB, Cut kCut>
__device__ __forceinline__ void load(const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank) {
  constexpr int kShare = S::kBlockM / S::kCluster;
  const int a_lines = (p.m + 3) & ~3, b_lines = (p.n + 3) & ~3, tiles = tiles_of<S, kCut>(p, shared);
  Ring<S::kStages> ring;
  for (int t = cluster; t < tiles; t += clusters) {
    const Place at = place_of<S, kCut, kElements<kA>>(p, shared, t, rank);
    const int a_line = kCut == Cut::kRows ? at.m0 & ~3 : at.m0;
    constexpr int kAScales = kCut == Cut::kRows ? S::kAScales : S::kBlockM;
    const uint32_t a_bytes = kA == Grain::kVector || kA == Grain::kRun ? 4 * min(kAScales, a_lines - a_line) : 0;
    const uint32_t b_bytes = kB == Grain::kVector ? 4 * max(min(kBlockN, b_lines - at.n0), 0) : 0;
    const float* const b_scale = p.b_scale + (kCut == Cut::kRows ? at.group * p.b_scale_plane : 0) + at.n0;
    const int plane = kCut == Cut::kRows ? at.group : 0;  // of b
    for (int kb = at.k0; kb < at.k0 + at.k_blocks; ++kb) {
      const int stage = ring.stage;
      const uint32_t full = shared.full(stage), a = shared.a(stage) + rank * kShare * kBlockK;
      wait(shared.empty(stage), ring.phase ^ 1);
      ptx::mbarrier_expect(full, S::kStageBytes + a_bytes + b_bytes);
      if constexpr (S::kCluster > 1)
        ptx::copy_tile_multicast(a, &p.a, kb * kBlockK, at.m0 + rank * kShare, full, (1 << S::kCluster) - 1);
      else
        ptx::copy_tile(a, &p.a, kb * kBlockK, at.m0, full);
      ptx::copy_tile(shared.b(stage), &p.b, kb * kBlockK, at.n0, plane, full);
      if constexpr (kA == Grain::kVector || kA == Grain::kRun) {
        const int line = kA == Grain::kRun ? kb / kRunBlocks : kb;
        ptx::copy_bytes(shared.a_scale(stage), p.a_scale + int64_t{line} * p.a_scale_ld + a_line, a_bytes, full);
      }
      if constexpr (kB == Grain::kVector)
        if (b_bytes > 0) ptx::copy_bytes(shared.b_scale(stage), b_scale + int64_t{kb} * p.b_scale_ld, b_bytes, full);
      ring.advance();
    }
    if constexpr (kA == Grain::kRun) {
      wait(shared.empty(ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive(shared.full(ring.stage));
      ring.advance();
    }
  }
}

// The unit in which the sums of one column are held while its scales change: out = unit * sum.
//   of 512 of K whose scale s is        sum *=         part *=
//   in the window below the largest     unit / s       1          and s is the unit from there on: exact, of powers of 2
//   below that (far)                    1              s / unit
//   0: all codes are 0                  1              1          (anchors of zeros are 2^-127, like any other s)
//   NaN                                 NaN            1
// So units stay within 2^-32 of the largest s, and |sum| <= 2^32 * sum over k of |a| * 448 (e5m2: 57344): no overflow
// where a's lines sum to less than 2^87 (2^80). What else is rounded is below 2^-149 (1 + |sum|) units.
struct ColumnUnit {
  float unit = 0, largest = 0, part = 1;

  // Returns what the sum is multiplied by; `part`: what the partial sums of this run are.
  __device__ __forceinline__ float change(float scale) {
    part = 1;
    if (!(scale > 0)) return scale == 0 ? 1 : scale;
    largest = fmaxf(largest, scale);
    if (scale < largest * kWindow) return part = scale / unit, 1;
    const float ratio = unit > 0 ? unit / scale : 1;
    unit = scale;
    return ratio;
  }
};

// Factors of the columns of every run of 512 and, in the slot that ends a tile, their units. 2 columns a lane of two
// warps, in the order in which a multiplying thread reads its 32: 16 bytes are its columns of two 8s.
template <class S, Cut kCut>
__device__ __forceinline__ void make_column_factors(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int half) {
  static_assert(S::kStages * (kBlockN + 4) * 4 <= kTableBytes && kCut == Cut::kNone, "far factors lie in the table");
  const int lane = threadIdx.x % 32, pair = half * 32 + lane, tiles = tiles_of<S, kCut>(p, shared);
  const uint32_t to = pair / 8 * 64 + pair % 4 * 16 + pair / 4 % 2 * 8;
  Ring<S::kStages> ring;
  for (int t = cluster; t < tiles; t += clusters) {
    const Place at = place_of<S, kCut>(p, shared, t, rank);
    const float* line = p.b_scale + at.n0 + 2 * pair;
    ColumnUnit low, high;
    float2 factors;
    bool far = false;
    for (int kb = 0; kb <= at.k_blocks; ++kb) {
      if (kb == at.k_blocks) {
        factors = {low.unit, high.unit};
      } else if (kb % kRunBlocks == 0) {
        const float2 scales = at.n0 + 2 * pair < p.n ? __ldg(reinterpret_cast<const float2*>(line)) : float2{};
        line += p.b_scale_ld;
        factors = {low.change(scales.x), high.change(scales.y)};
        far = __any_sync(0xFFFFFFFF, low.part != 1 || high.part != 1);
      }
      const int stage = ring.stage;
      wait(shared.empty(stage), ring.phase ^ 1);
      shared_at<float2>(shared.b_scale(stage) + to) = factors;
      shared_at<float2>(shared.far_factors(stage) + to) = {low.part, high.part};  // the other half may be far
      if (lane == 0) shared_at<uint32_t>(shared.is_far(stage) + 4 * half) = far;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared.full(stage));
      ring.advance();
    }
  }
}

// x *= the factors of the thread's columns, of one wave.
__device__ __forceinline__ void multiply_columns(float (&x)[64], uint32_t factors) {
  float4 f = shared_at<const float4>(factors);
#pragma unroll
  for (int i = 0; i < 64; i += 8) {
    const float4 now = f;
    if (i < 56) f = shared_at<const float4>(factors + 64 * (i / 8 + 1));
    x[i] *= now.x, x[i + 1] *= now.y, x[i + 2] *= now.x, x[i + 3] *= now.y;
    x[i + 4] *= now.z, x[i + 5] *= now.w, x[i + 6] *= now.z, x[i + 7] *= now.w;
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
      const float2 b = j < kHeld ? held[j % kHeld] : shared_at<const float2>(b_scale + 32 * j);
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
__device__ __forceinline__ void finish(const Arguments& p, const Place& at, float (&sum)[64], int row, int col) {
  constexpr bool kOuter = kA == kB && (kA == Grain::kOuter || kA == Grain::kValues);
  if (kOuter || p.alpha != nullptr) {
    const float alpha = p.alpha != nullptr ? __ldg(p.alpha) : 1.0f;
    float low = alpha, high = alpha;
    if constexpr (kOuter) {
      if (p.a_scale != nullptr) {
        const float* const a = p.a_scale + at.group * p.a_scale_plane;
        low *= __ldg(a + int64_t{min(row, at.m - 1)} * p.a_scale_step);
        high *= __ldg(a + int64_t{min(row + 8, at.m - 1)} * p.a_scale_step);
      }
      if (p.b_scale != nullptr && p.b_scale_step == 0) {
        const float b = __ldg(p.b_scale + at.group * p.b_scale_plane);
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
    const float* const scale = p.b_scale + at.group * p.b_scale_plane;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (col + 8 * j >= p.n) continue;
      const float2 b = __ldg(reinterpret_cast<const float2*>(scale + col + 8 * j));
      sum[4 * j] *= b.x, sum[4 * j + 1] *= b.y, sum[4 * j + 2] *= b.x, sum[4 * j + 3] *= b.y;
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (col + 8 * j >= p.n) continue;
      const float2 b = __bfloat1622float2(*(static_cast<const __nv_bfloat162*>(p.bias) + (col + 8 * j) / 2));
      sum[4 * j] += b.x, sum[4 * j + 1] += b.y, sum[4 * j + 2] += b.x, sum[4 * j + 3] += b.y;
    }
  }
}

// One wave of a warp, 16 rows from `row0`, rounded and stored; rows and columns beyond the edge are not.
template <class S>
__device__ __forceinline__ void store_bf16(
    const Arguments& p, const Place& at, const float (&sum)[64], uint32_t staging, int row0, int lane) {
  const int r = lane / 4, q = lane % 4;
  uint32_t packed[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    packed[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  constexpr int kPieces = kBlockN / S::kCols16, kJ = S::kCols16 / 8;
  constexpr int kLanes = S::kCols16 / 8, kRows = 32 / kLanes;  // of 16-byte accesses
  const int my_row = lane / kLanes, my_col = lane % kLanes * 8;
  __nv_bfloat16* const out =
      static_cast<__nv_bfloat16*>(p.out) + at.group * p.out_plane + (row0 + my_row) * p.out_ld + at.n0 + my_col;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const uint32_t to = staging + r * S::kPitch16 + (8 * j + 2 * q) * 2;
      *static_cast<uint32_t*>(__cvta_shared_to_generic(to)) = packed[2 * (c * kJ + j)];
      *static_cast<uint32_t*>(__cvta_shared_to_generic(to + 8 * S::kPitch16)) = packed[2 * (c * kJ + j) + 1];
    }
    __syncwarp();
    const int rows = at.n0 + c * S::kCols16 + my_col < p.n ? at.m - row0 - my_row : 0;
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      const uint32_t from = staging + (my_row + i * kRows) * S::kPitch16 + my_col * 2;
      const uint4 v = *static_cast<const uint4*>(__cvta_shared_to_generic(from));
      if (i * kRows < rows) *reinterpret_cast<uint4*>(out + c * S::kCols16 + i * kRows * p.out_ld) = v;
    }
  }
}

// L2 adds 16 bytes at a time (red): an element gets one addition, so that the sum is the same every run; subnormals are
// flushed. Threads that read and write took 10 % longer over whole products (H100, 6 shapes).
template <class S>
__device__ __forceinline__ void store_fp32(
    const Arguments& p, const Place& at, const float (&sum)[64], uint32_t staging, int row0, int lane) {
  const int r = lane / 4, q = lane % 4;
  constexpr int kPieces = kBlockN / S::kCols32, kJ = S::kCols32 / 8;
  constexpr int kLanes = S::kCols32 / 4, kRows = 32 / kLanes;  // of 16-byte accesses, in batches that hide latency
  constexpr int kSteps = 16 / kRows, kBatch = kSteps < 8 ? kSteps : 8;
  const int my_row = lane / kLanes, my_col = lane % kLanes * 4;
  float* const out =
      static_cast<float*>(p.out) + at.group * p.out_plane + (row0 + my_row) * p.out_ld + at.n0 + my_col;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const uint32_t to = staging + r * S::kPitch32 + (8 * j + 2 * q) * 4;
      const float* s = sum + 4 * (c * kJ + j);
      *static_cast<float2*>(__cvta_shared_to_generic(to)) = make_float2(s[0], s[1]);
      *static_cast<float2*>(__cvta_shared_to_generic(to + 8 * S::kPitch32)) = make_float2(s[2], s[3]);
    }
    __syncwarp();
    const int all_rows = at.n0 + c * S::kCols32 + my_col < p.n ? at.m - row0 - my_row : 0;
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kBatch) {
      const int rows = all_rows - first * kRows;
      const uint32_t from = staging + (my_row + first * kRows) * S::kPitch32 + my_col * 4;
      float* const to = out + c * S::kCols32 + first * kRows * p.out_ld;
      const auto staged = [&](int i) {
        return *static_cast<const float4*>(__cvta_shared_to_generic(from + i * kRows * S::kPitch32));
      };
      if (!p.accumulate) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i * kRows < rows) *reinterpret_cast<float4*>(to + i * kRows * p.out_ld) = staged(i);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i * kRows < rows) ptx::red_add(to + i * kRows * p.out_ld, staged(i));
      }
    }
  }
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B, Cut kCut>
__device__ __forceinline__ void multiply(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group_row = group * S::kWaves * kWaveRows, warp_row = group_row + warp * 16;
  const uint32_t staging = shared.base + S::kStagingAt + (group * 4 + warp) * S::kStaged;
  const uint32_t b_scale_at = lane % 4 * 8;
  const auto release = [&](int stage) {
    __syncwarp();
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) ptx::mbarrier_arrive_remote(ptx::map_shared(shared.empty(stage), lane));
    } else {
      if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
    }
  };

  const int tiles = tiles_of<S, kCut>(p, shared);
  Ring<S::kStages> ring;
  for (int t = cluster; t < tiles; t += clusters) {
    const Place at = place_of<S, kCut, kElements<kA>>(p, shared, t, rank);
    if (kCut == Cut::kDepth && at.k_blocks == 0 && p.accumulate) continue;
    constexpr bool kRuns = kA == Grain::kRun;
    static_assert(kRuns == (kB == Grain::kRun), "runs of 512 are multiplied by runs of 512");
    constexpr bool kHasBlock = kB == Grain::kBlock;
    static_assert(kA != Grain::kBlock, "nothing here has 128 x 128 scales of a");
    const float* const of_group = p.b_scale + (kCut == Cut::kRows ? at.group * p.b_scale_plane : 0);
    BlockScales block(of_group + int64_t{min(at.n0, p.n - 1) / 128} * p.b_scale_ld + at.k0, kHasBlock ? at.k_blocks : 0, lane);
    const uint32_t a_scale_at = (warp_row + lane / 4 + (kCut == Cut::kRows ? at.m0 & 3 : 0)) * 4;
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
      constexpr int kHeld = S::kWaves == 1 ? 16 : kCut == Cut::kNone ? 10 : 8;
      float2 held[kHeld];
      wait(shared.full(stage), ring.phase);
      if constexpr (kA == Grain::kValues) {
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
      if constexpr (kRuns) {
        const uint2 of_halves = shared_at<const uint2>(shared.is_far(stage));
        is_far = (of_halves.x | of_halves.y) != 0;
      }
#pragma unroll
      for (int w = 0; w < S::kWaves; ++w) {
        const uint64_t a = ptx::wgmma_descriptor(shared.a(stage) + (group_row + w * kWaveRows) * kBlockK);
        float low = block_scale, high = block_scale;
        if constexpr (kA == Grain::kVector || kRuns) {
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
        if constexpr (kB == Grain::kVector) {
          if (w == 0) {
#pragma unroll
            for (int j = 0; j < kHeld; ++j) held[j] = shared_at<const float2>(b_scales + 32 * j);
          }
        }
        if constexpr (kRuns) {
          if (kb % kRunBlocks == 0) multiply_columns(sum[w], shared.b_scale(stage) + lane % 4 * 16);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(part);
        if constexpr (kRuns) {
          if (is_far) multiply_columns(part, shared.far_factors(stage) + lane % 4 * 16);
        }
        if (w == S::kWaves - 1 && kB != Grain::kVector) release(stage);
        promote<kA, kB>(sum[w], part, low, high, b_scales, held);
      }
      if constexpr (kB == Grain::kVector) release(stage);
      ring.advance();
    }
    if constexpr (kRuns) {
      wait(shared.full(ring.stage), ring.phase);
#pragma unroll
      for (int w = 0; w < S::kWaves; ++w) multiply_columns(sum[w], shared.b_scale(ring.stage) + lane % 4 * 16);
      release(ring.stage);
      ring.advance();
    }

#pragma unroll
    for (int w = 0; w < S::kWaves; ++w) {
      const int row0 = at.m0 + warp_row + w * kWaveRows;
      if (kCut != Cut::kDepth || at.k_blocks > 0)  // a scale of nothing need not be finite
        finish<kA, kB>(p, at, sum[w], row0 + lane / 4, at.n0 + lane % 4 * 2);
      p.bf16_out ? store_bf16<S>(p, at, sum[w], staging, row0, lane) : store_fp32<S>(p, at, sum[w], staging, row0, lane);
    }
    __syncwarp();
  }
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B, Cut kCut>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared = {ptx::shared_address(memory)};
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / kGroup, 0);  // the same in a warp, as the compiler now knows
  const int rank = S::kCluster > 1 ? ptx::cluster_rank() : 0;
  const int cluster = blockIdx.x / S::kCluster, clusters = gridDim.x / S::kCluster;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), kA == Grain::kRun ? 1 + kFactorWarps : 1);
      ptx::mbarrier_init(shared.empty(stage), kMathWarps * S::kCluster);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) ptx::cluster_arrive();
  if constexpr (kCut != Cut::kNone) tabulate<S, kCut>(p, shared);
  if constexpr (S::kCluster > 1) ptx::cluster_wait();

  if (group == kMathGroups) {
    ptx::registers_shrink<40>();
    if (threadIdx.x == kMathGroups * kGroup) load<S, kA, kB, kCut>(p, shared, cluster, clusters, rank);
    if constexpr (kA == Grain::kRun) {
      const int half = static_cast<int>(threadIdx.x / 32) - kMathWarps - 1;  // beside the warp that loads
      if (half >= 0 && half < kFactorWarps) make_column_factors<S, kCut>(p, shared, cluster, clusters, rank, half);
    }
    __syncwarp();
  } else {
    ptx::registers_grow<232>();
    multiply<S, kA, kB, kE5M2A, kE5M2B, kCut>(p, shared, cluster, clusters, rank, group);
  }
  // No block leaves while a peer may still arrive at its barriers.
  if constexpr (S::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
#else
  __trap();  // of another architecture, where no host launches it
#endif
}

template <class S, Grain kA, Grain kB, bool kE5M2A, bool kE5M2B, Cut kCut>
Kernel describe() {
  return {reinterpret_cast<const void*>(&kernel<S, kA, kB, kE5M2A, kE5M2B, kCut>), S::kBlockM, kBlockN, S::kCluster,
          kThreads, S::kSharedBytes};
}

}  // namespace fsdp_quant::hopper
