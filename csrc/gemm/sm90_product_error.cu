// SPDX-License-Identifier: Apache-2.0
#include "gemm/product_error.h"

#include <cooperative_groups.h>

#include "device/ptx.cuh"

namespace fsdp_quant {

namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kErrorThreads = 512, kWarps = kErrorThreads / 32, kCodes = 4, kLines = 64, kAtOnce = 8;
constexpr int64_t kSpan = static_cast<int64_t>(kBlocks) * kErrorThreads * kCodes;  // of K per iteration

// Where the codes and scales of a probed line begin. scale: null if one serves the line, since line and tensor scales cancel.
struct Line {
  const uint8_t* data;
  const float* scale;
};

struct Shared {
  Line lines[2][kLines];
  double partials[kLines][kWarps];  // per line
  double sums[kLines];              // of this block's share of K
  double all[kLines];
  float energy[2][kLines];  // 1 / line energy, by operand; 0 for zeros
  float weight[kLines];     // 1 / line sum
  double warp[kWarps][2];
  double result[2];
};

constexpr float kLeastToken = 0x1p-14f;  // of the mean energy: smaller tokens count as part of one

// The i-th line of a probe: different ones in every probe, spread by multiples of the golden ratio, since token patterns
// repeat at powers of two.
__device__ Line probed_line(const CountedOperand& o, int64_t probe, int i) {
  const int64_t line = __umul64hi((probe * kLines + 1 + i) * 0x9E3779B97F4A7C15ull, o.outer);
  const int64_t matrix = line / o.plane_lines, in_matrix = line - matrix * o.plane_lines;
  const float* scale = nullptr;
  if (o.run_log2 != 0)
    scale = o.scale + (o.tiles ? (matrix * ((o.plane_lines + 127) / 128) + in_matrix / 128) * o.scale_ld : line);
  return {o.data + matrix * o.plane + in_matrix * o.ld, scale};
}

__device__ __forceinline__ uint32_t codes_of(const CountedOperand& o, const uint8_t* line, int64_t at, int64_t k) {
  if (o.vectors && at + kCodes <= k) return __ldg(reinterpret_cast<const uint32_t*>(line + at));
  uint32_t codes = 0;
#pragma unroll
  for (int e = 0; e < kCodes; ++e)
    if (at + e < k) codes |= static_cast<uint32_t>(__ldg(line + at + e)) << 8 * e;
  return codes;
}

__device__ __forceinline__ float2 values_of(uint32_t pair, bool e5m2) {
  return __half22float2(e5m2 ? ptx::cvt_f16x2_e5m2x2(pair) : ptx::cvt_f16x2_e4m3x2(pair));
}

struct Codes {
  float all[kCodes], lost[kCodes];  // squares of the values; mean squares of their possible errors

  // A subnormal code lies on a uniform grid: error step^2 / 12. Codes from smaller elements count in blocks of 16 or 32 that
  // are not exact, held by four or eight threads.
  __device__ __forceinline__ Codes(const CountedOperand& o, const Line& line, int64_t at, int64_t k) {
    const uint32_t codes = codes_of(o, line.data, at, k), exponent = o.e5m2 ? 0x7C : 0x78;
    bool counts = o.counted;
    if (o.of_blocks) {
      uint32_t largest = codes & 0x7F7F7F7Fu;
      for (int lane = 1; lane < 1 << o.exact.lanes_log2; lane *= 2) largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, lane));
      counts = __vcmpgeu4(largest, o.exact.least * 0x01010101u) == 0;
    }
    float scale = 1.0f;
    if (line.scale != nullptr && at < k) scale = __ldg(line.scale + (at >> o.run_log2) * (o.tiles ? 1 : o.scale_ld));
    const float each = (o.e5m2 ? 0x1p-32f : 0x1p-18f) / 12 * scale * scale;
    const float2 lo = values_of(codes & 0xFFFF, o.e5m2), hi = values_of(codes >> 16, o.e5m2);
    const float v[kCodes] = {lo.x * scale, lo.y * scale, hi.x * scale, hi.y * scale};
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      all[e] = v[e] * v[e];
      lost[e] = counts && (codes >> 8 * e & exponent) == 0 && at + e < k ? each : 0.0f;
    }
  }
};

// Weighted energies of four elements of K, over the lines.
struct Energies {
  float all[kCodes] = {}, lost[kCodes] = {};

  __device__ Energies(const CountedOperand& o, const Line* lines, const float* weight, int64_t at, int64_t k) {
#pragma unroll kAtOnce
    for (int l = 0; l < kLines; ++l) {
      const Codes c(o, lines[l], at, k);
#pragma unroll
      for (int e = 0; e < kCodes; ++e) all[e] += c.all[e] * weight[l], lost[e] += c.lost[e] * weight[l];
    }
  }
};

// K of a warp, one part in each span: neighbours are on different processors, so that a short K has all of them.
__device__ __forceinline__ int64_t first_of_warp(const cg::cluster_group& cluster) {
  return static_cast<int64_t>(threadIdx.x / 32 * kBlocks + cluster.block_rank()) * 32 * kCodes;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
  return v;
}

// weight[line] = 1 / sum of `terms` over K, in a fixed order. terms: element of K -> line -> this thread's term.
template <typename Terms>
__device__ void weigh(float* weight, bool of_tokens, int64_t k, Shared& s, const cg::cluster_group& cluster, Terms terms) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kLines * kWarps; i += kErrorThreads) (&s.partials[0][0])[i] = 0.0;
  __syncthreads();
  for (int64_t start = first_of_warp(cluster); start < k; start += kSpan) {
    const auto of = terms(start + lane * kCodes);
#pragma unroll 1
    for (int first = 0; first < kLines; first += kAtOnce) {
      float sums[kAtOnce], own = 0.0f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[i] = of(first + i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float sum = warp_sum(sums[i]);
        if (lane == i) own = sum;
      }
      if (lane < kAtOnce) s.partials[first + lane][warp] += own;
    }
  }
  __syncthreads();
  const int line = threadIdx.x;
  if (line < kLines) {
    double sum = 0.0;
    for (int w = 0; w < kWarps; ++w) sum += s.partials[line][w];
    s.sums[line] = sum;
  }
  cluster.sync();
  if (line < kLines) {
    double sum = 0.0;
    for (int r = 0; r < kBlocks; ++r) sum += *cluster.map_shared_rank(&s.sums[line], r);
    s.all[line] = sum;
  }
  cluster.sync();  // sums are read until here
  if (line < kLines) {
    double mean = 0.0;
#pragma unroll 16
    for (int l = 0; l < kLines; ++l) mean += s.all[l] / kLines;
    const float sum = static_cast<float>(s.all[line]);
    weight[line] = sum > 0.0f ? 1.0f / fmaxf(sum, of_tokens ? static_cast<float>(mean) * kLeastToken : 0.0f) : 0.0f;
  }
  __syncthreads();
}

// Add the errors of the lines of operand `i`, and those of their formats, relative to the sum of both.
__device__ void add_lines(
    double& extra, double& product, float own, int i, const ProductError& p, int64_t k, Shared& s, const cg::cluster_group& cluster) {
  const CountedOperand &a = p.operand[i], &b = p.operand[1 - i];
  const Line *of_a = s.lines[i], *of_b = s.lines[1 - i];
  const float *energy_a = s.energy[i], *energy_b = s.energy[1 - i];
  weigh(s.weight, a.of_tokens, k, s, cluster, [&](int64_t at) {
    return [&, at, along = Energies(b, of_b, energy_b, at, k)](int l) {
      const Codes c(a, of_a[l], at, k);
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kCodes; ++e) sum += c.all[e] * (own * along.all[e] + along.lost[e]) + c.lost[e] * along.all[e];
      return energy_a[l] > 0.0f ? sum : 0.0f;
    };
  });
  for (int64_t start = first_of_warp(cluster); start < k; start += kSpan) {
    const int64_t at = start + threadIdx.x % 32 * kCodes;
    const Energies along_a(a, of_a, s.weight, at, k), along_b(b, of_b, energy_b, at, k);
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      extra += static_cast<double>(along_a.lost[e]) * along_b.all[e] + static_cast<double>(along_a.all[e]) * along_b.lost[e];
      product += static_cast<double>(along_a.all[e]) * along_b.all[e];
    }
  }
}

__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kErrorThreads)
    product_error_kernel(const __grid_constant__ ProductError p) {
  const int64_t step = *p.step;
  if (step % (step < kSettledSteps ? p.every : p.every * kLessOften) != 0) return;
  const int64_t k = p.k_end != nullptr ? min(p.k, static_cast<int64_t>(*p.k_end)) : p.k;
  __shared__ Shared s;
  const auto cluster = cg::this_cluster();
  if (threadIdx.x < 2 * kLines) {
    const int i = threadIdx.x / kLines, l = threadIdx.x % kLines;
    s.lines[i][l] = probed_line(p.operand[i], step / p.every, l);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    weigh(s.energy[i], p.operand[i].of_tokens, k, s, cluster, [&](int64_t at) {
      return [&, at](int l) {
        const Codes c(p.operand[i], s.lines[i][l], at, k);
        return c.all[0] + c.all[1] + c.all[2] + c.all[3];
      };
    });
  }
  const auto own_of = [](const CountedOperand& o) { return o.of_blocks ? o.exact.own_error : o.e5m2 ? kOwnE5M2 : kOwnE4M3; };
  const double own = own_of(p.operand[0]) + own_of(p.operand[1]);
  double extra = 0.0, product = 0.0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    add_lines(extra, product, static_cast<float>(own), i, p, k, s, cluster);
  extra = warp_sum(extra), product = warp_sum(product);
  if (threadIdx.x % 32 == 0) s.warp[threadIdx.x / 32][0] = extra, s.warp[threadIdx.x / 32][1] = product;
  __syncthreads();
  if (threadIdx.x == 0) {
    s.result[0] = s.result[1] = 0.0;
    for (int w = 0; w < kWarps; ++w) s.result[0] += s.warp[w][0], s.result[1] += s.warp[w][1];
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    double all[2] = {};
    for (int r = 0; r < kBlocks; ++r)
      for (int i = 0; i < 2; ++i) all[i] += *cluster.map_shared_rank(&s.result[i], r);
    if (isfinite(all[0]) && isfinite(all[1])) p.sums[0] += static_cast<float>(all[0]), p.sums[1] += static_cast<float>(own * all[1]);
  }
  cluster.sync();  // shared memory of peers is read until here
}

}  // namespace

cudaError_t launch_product_error(const ProductError& p, cudaStream_t stream) {
  product_error_kernel<<<kBlocks, kErrorThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
