// SPDX-License-Identifier: Apache-2.0
// Accumulators of the sm_90 GEMMs: scaling during and after accumulation, and stores. See sm90_gemm_kernel.cuh.
#pragma once

#include "gemm/sm90_gemm_pipeline.cuh"

namespace fsdp_quant::sm90 {

// The unit in which the sums of one column are held while its scale changes: out = unit * sum.
//   512 of K with scale s                sum *=         part *=
//   in the window below the largest      unit / s       1          and s becomes the unit: exact for powers of two
//   below that (far)                     1              s / unit
//   0: all codes are 0                   1              1          (anchors of zeros are 2^-127, handled like any s)
//   NaN                                  NaN            1
// So units stay within 2^-32 of the largest s, and |sum| <= 2^32 * sum over k of |a| * 448 (e5m2: 57344): no overflow if a's
// lines sum to less than 2^87 (2^80). Other rounding is below 2^-149 (1 + |sum|) units.
struct ColumnUnit {
  float unit = 0, largest = 0, part = 1;

  // Returns the factor of the sum; sets `part`, the factor of the partial sums of these 512.
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

// Column factors of every 512 of K and, in the slot that ends a tile, the units. Two warps, 2 columns per lane, in the order
// in which a math thread reads its 32: 16 bytes are its columns of two 8s.
template <class S, GroupedDim kGrouped>
__device__ __forceinline__ void make_column_factors(
    const Arguments& p, const Shared<S>& shared, int cluster, int clusters, int rank, int half) {
  static_assert(S::kStages * (kBlockN + 4) * 4 <= kTableBytes && kGrouped == GroupedDim::kNone,
                "far factors overlay the table");
  const int lane = threadIdx.x % 32, pair = half * 32 + lane, tiles = tiles_of<S, kGrouped>(p, shared);
  const uint32_t to = pair / 8 * 64 + pair % 4 * 16 + pair / 4 % 2 * 8;
  Ring<S::kStages> ring;
  for (int t = cluster; t < tiles; t += clusters) {
    const TileCoord at = tile_coord<S, kGrouped>(p, shared, t, rank);
    const float* line = p.b_scale + at.n0 + 2 * pair;
    ColumnUnit low, high;
    float2 factors;
    bool far = false;
    for (int kb = 0; kb <= at.k_blocks; ++kb) {
      if (kb == at.k_blocks) {
        factors = {low.unit, high.unit};
      } else if (kb % kBlocksPer512 == 0) {
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

// Multiply one wave by the factors of the thread's columns.
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

// Add one wave of partial sums to the sums. low, high: factors of the thread's two rows; b_scale: address of its column
// scales, of which `held` has the first.
template <Granularity kA, Granularity kB, int kHeld>
__device__ __forceinline__ void promote(
    float (&sum)[64], const float (&part)[64], float low, float high, uint32_t b_scale, const float2 (&held)[kHeld]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float* s = sum + 4 * j;
    const float* d = part + 4 * j;
    if constexpr (kB == Granularity::k1x128) {
      const float2 b = j < kHeld ? held[j % kHeld] : shared_at<const float2>(b_scale + 32 * j);
      s[0] = fmaf(low * b.x, d[0], s[0]), s[1] = fmaf(low * b.y, d[1], s[1]);
      s[2] = fmaf(high * b.x, d[2], s[2]), s[3] = fmaf(high * b.y, d[3], s[3]);
    } else if constexpr (kA == Granularity::kRowwise) {
      s[0] += d[0], s[1] += d[1], s[2] += d[2], s[3] += d[3];
    } else {
      s[0] = fmaf(low, d[0], s[0]), s[1] = fmaf(low, d[1], s[1]);
      s[2] = fmaf(high, d[2], s[2]), s[3] = fmaf(high, d[3], s[3]);
    }
  }
}

// Apply scales, alpha and bias to one wave. row: the thread's first row (the second is 8 below); col: its first column.
template <Granularity kA, Granularity kB>
__device__ __forceinline__ void finish(const Arguments& p, const TileCoord& at, float (&sum)[64], int row, int col) {
  constexpr bool kScalesSum = kA == kB && (kA == Granularity::kRowwise || kA == Granularity::kBf16);
  if (kScalesSum || p.alpha != nullptr) {
    const float alpha = p.alpha != nullptr ? __ldg(p.alpha) : 1.0f;
    float low = alpha, high = alpha;
    if constexpr (kScalesSum) {
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
  if (kScalesSum && p.b_scale_step != 0) {
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
      const int64_t pair = (int64_t{at.group} * p.n + col) / 2 + 4 * j;
      const float2 b = p.bf16_bias ? __bfloat1622float2(static_cast<const __nv_bfloat162*>(p.bias)[pair])
                                   : __ldg(static_cast<const float2*>(p.bias) + pair);
      // never contracted with the factors' multiplications
      sum[4 * j] = __fadd_rn(sum[4 * j], b.x), sum[4 * j + 1] = __fadd_rn(sum[4 * j + 1], b.y);
      sum[4 * j + 2] = __fadd_rn(sum[4 * j + 2], b.x), sum[4 * j + 3] = __fadd_rn(sum[4 * j + 3], b.y);
    }
  }
}

// Round and store one wave of a warp, 16 rows from `row0`; masks rows and columns beyond the edge. T: bf16 or float.
// Accumulation uses 16-byte red operations in L2: one addition per element, so that sums are deterministic; subnormals are
// flushed. Read-modify-write in threads took 10 % longer on dense GEMMs (H100, 6 shapes).
template <class S, class T>
__device__ __forceinline__ void store(
    const Arguments& p, const TileCoord& at, const float (&sum)[64], uint32_t staging, int row0, int lane) {
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kCols = kWide ? S::kCols32 : S::kCols16, kPitch = kWide ? S::kPitch32 : S::kPitch16;
  constexpr int kPieces = kBlockN / kCols, kJ = kCols / 8;
  constexpr int kVector = 16 / sizeof(T), kLanes = kCols / kVector, kRows = 32 / kLanes;  // of 16-byte accesses
  constexpr int kSteps = 16 / kRows, kBatch = kWide && kSteps > 8 ? 8 : kSteps;           // batched to hide latency
  const int my_row = lane / kLanes, my_col = lane % kLanes * kVector;
  const uint32_t to = staging + lane / 4 * kPitch + lane % 4 * 2 * sizeof(T);
  T* const out = static_cast<T*>(p.out) + at.group * p.out_plane + (row0 + my_row) * p.out_ld + at.n0 + my_col;
  const auto stage = [](uint32_t to, float x, float y) {
    void* const address = __cvta_shared_to_generic(to);
    if constexpr (kWide) {
      *static_cast<float2*>(address) = make_float2(x, y);
    } else {
      *static_cast<__nv_bfloat162*>(address) = __floats2bfloat162_rn(x, y);
    }
  };
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kJ; ++j) {
      const float* const s = sum + 4 * (c * kJ + j);
      stage(to + 8 * j * sizeof(T), s[0], s[1]), stage(to + 8 * j * sizeof(T) + 8 * kPitch, s[2], s[3]);
    }
    __syncwarp();
    const int all_rows = at.n0 + c * kCols + my_col < p.n ? at.m - row0 - my_row : 0;
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kBatch) {
      const int rows = all_rows - first * kRows;
      const uint32_t from = staging + (my_row + first * kRows) * kPitch + my_col * sizeof(T);
      T* const to = out + c * kCols + first * kRows * p.out_ld;
      const auto staged = [&](int i) {
        return *static_cast<const float4*>(__cvta_shared_to_generic(from + i * kRows * kPitch));
      };
      if (kWide && p.accumulate) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i * kRows < rows) ptx::red_add(reinterpret_cast<float*>(to + i * kRows * p.out_ld), staged(i));
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i * kRows < rows) *reinterpret_cast<float4*>(to + i * kRows * p.out_ld) = staged(i);
      }
    }
  }
}

}  // namespace fsdp_quant::sm90
