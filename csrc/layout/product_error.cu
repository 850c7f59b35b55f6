#include "layout/product_error.h"

#include <cooperative_groups.h>

#include "device/ptx.cuh"

namespace fsdp_quant {

namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kErrorThreads = 512, kWarps = kErrorThreads / 32, kCodes = 4, kLines = 64;
constexpr int64_t kSpan = static_cast<int64_t>(kBlocks) * kErrorThreads * kCodes;  // of the contraction, at a time

struct Shared {
  float parts[2][kLines][kWarps];  // of each line's energy
  float energy[2][kLines];         // in this block's part of the contraction
  float weight[2][kLines];         // 1 / the energy of the line
  double warp[kWarps][2];
  double sums[2];
};

// Which 64 lines are looked at: others in every probe.
struct Lines {
  int64_t count, stride, offset;

  __device__ Lines(const CountedOperand& o, int64_t probe) {
    count = o.outer < kLines ? o.outer : kLines, stride = o.outer / count, offset = probe * 7919 % stride;
  }
  __device__ int64_t operator[](int i) const { return i * stride + offset; }
};

__device__ __forceinline__ uint32_t codes_of(const CountedOperand& o, int64_t line, int64_t at, int64_t k) {
  return at < k ? __ldg(reinterpret_cast<const uint32_t*>(o.data + line * o.ld + at)) : 0;
}

__device__ __forceinline__ float2 values_of(uint32_t pair, bool e5m2) {
  return __half22float2(e5m2 ? ptx::cvt_f16x2_e5m2x2(pair) : ptx::cvt_f16x2_e4m3x2(pair));
}

// The scale of a run; of lines and tensors it cancels.
__device__ __forceinline__ float run_scale(const CountedOperand& o, int64_t line, int64_t at, int64_t k) {
  return o.run_log2 == 0 || at >= k ? 1.0f : __ldg(o.scale + (at >> o.run_log2) * o.scale_ld + line);
}

// Of four elements of the contraction, over the lines: their energy, and the square of what they may have lost, both against
// the energy of the line. A code without an exponent lies on a grid, of steps of the least: step^2 / 12.
struct Energies {
  float all[kCodes] = {}, lost[kCodes] = {};

  __device__ Energies(const CountedOperand& o, const Lines& lines, const float* weight, int64_t at, int64_t k) {
    const float lost_each = (o.e5m2 ? 0x1p-32f : 0x1p-18f) / 12;
    const uint32_t exponent = o.e5m2 ? 0x7C : 0x78;
#pragma unroll 4
    for (int l = 0; l < lines.count; ++l) {
      const uint32_t codes = codes_of(o, lines[l], at, k);
      const float scale = run_scale(o, lines[l], at, k), w = weight[l] * scale * scale;
      const float2 lo = values_of(codes & 0xFFFF, o.e5m2), hi = values_of(codes >> 16, o.e5m2);
      const float v[kCodes] = {lo.x, lo.y, hi.x, hi.y};
#pragma unroll
      for (int e = 0; e < kCodes; ++e) {
        all[e] += v[e] * v[e] * w;
        if (o.counted && (codes >> 8 * e & exponent) == 0 && at < k) lost[e] += lost_each * w;
      }
    }
  }
};

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
  return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
  return v;
}

__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kErrorThreads)
    product_error_kernel(const __grid_constant__ ProductError p) {
  const int64_t step = *p.step;
  if (step % kProbedSteps != 0) return;
  __shared__ Shared s;
  const auto cluster = cg::this_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lines lines[2] = {{p.operand[0], step / kProbedSteps}, {p.operand[1], step / kProbedSteps}};
  const int64_t first = (static_cast<int64_t>(cluster.block_rank()) * kErrorThreads + threadIdx.x) * kCodes;
  for (int i = threadIdx.x; i < 2 * kLines * kWarps; i += kErrorThreads) (&s.parts[0][0][0])[i] = 0.0f;
  __syncthreads();
  for (int64_t start = 0; start < p.k; start += kSpan) {
    const int64_t at = start + first;
    for (int which = 0; which < 2; ++which) {
      const CountedOperand& o = p.operand[which];
#pragma unroll 4
      for (int l = 0; l < lines[which].count; ++l) {
        const uint32_t codes = codes_of(o, lines[which][l], at, p.k);
        const float2 lo = values_of(codes & 0xFFFF, o.e5m2), hi = values_of(codes >> 16, o.e5m2);
        const float scale = run_scale(o, lines[which][l], at, p.k);
        const float energy = warp_sum((lo.x * lo.x + lo.y * lo.y + hi.x * hi.x + hi.y * hi.y) * scale * scale);
        if (lane == 0) s.parts[which][l][warp] += energy;
      }
    }
  }
  __syncthreads();
  const int which = threadIdx.x / kLines, line = threadIdx.x % kLines;
  if (which < 2) {
    float energy = 0.0f;
    for (int w = 0; w < kWarps; ++w) energy += s.parts[which][line][w];
    s.energy[which][line] = energy;
  }
  cluster.sync();
  if (which < 2) {
    float energy = 0.0f;
    for (int r = 0; r < kBlocks; ++r) energy += *cluster.map_shared_rank(&s.energy[which][line], r);
    s.weight[which][line] = energy == 0.0f ? 0.0f : 1.0f / energy;
  }
  __syncthreads();
  double extra = 0.0, product = 0.0;
  for (int64_t start = 0; start < p.k; start += kSpan) {
    const Energies a(p.operand[0], lines[0], s.weight[0], start + first, p.k);
    const Energies b(p.operand[1], lines[1], s.weight[1], start + first, p.k);
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      extra += static_cast<double>(a.lost[e]) * b.all[e] + static_cast<double>(a.all[e]) * b.lost[e];
      product += static_cast<double>(a.all[e]) * b.all[e];
    }
  }
  extra = warp_sum(extra), product = warp_sum(product);
  if (lane == 0) s.warp[warp][0] = extra, s.warp[warp][1] = product;
  __syncthreads();
  if (threadIdx.x == 0) {
    s.sums[0] = s.sums[1] = 0.0;
    for (int w = 0; w < kWarps; ++w) s.sums[0] += s.warp[w][0], s.sums[1] += s.warp[w][1];
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {  // in one order: the same sums in every run
    double all[2] = {};
    for (int r = 0; r < kBlocks; ++r)
      for (int i = 0; i < 2; ++i) all[i] += *cluster.map_shared_rank(&s.sums[i], r);
    const double own = all[1] * ((p.operand[0].e5m2 ? kOwnE5M2 : kOwnE4M3) + (p.operand[1].e5m2 ? kOwnE5M2 : kOwnE4M3));
    if (isfinite(all[0]) && isfinite(own)) p.sums[0] += static_cast<float>(all[0]), p.sums[1] += static_cast<float>(own);
  }
  cluster.sync();  // their shared memory is read until here
}

}  // namespace

cudaError_t launch_product_error(const ProductError& p, cudaStream_t stream) {
  product_error_kernel<<<kBlocks, kErrorThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
