// SPDX-License-Identifier: Apache-2.0
#include "gemm/product_error.h"

#include <cooperative_groups.h>

#include "device/ptx.cuh"

namespace fsdp_quant {

namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kErrorThreads = 512, kWarps = kErrorThreads / 32, kCodes = 4, kLines = 64;
constexpr int64_t kSpan = static_cast<int64_t>(kBlocks) * kErrorThreads * kCodes;  // of K per iteration

struct Shared {
  double partials[kLines][kWarps];  // per line
  double sums[kLines];              // of this block's share of K
  double all[kLines];
  float energy[2][kLines];  // 1 / line energy, by operand; 0 for zeros
  float weight[kLines];     // 1 / line sum
  double warp[kWarps][2];
  double result[2];
};

constexpr float kLeastToken = 0x1p-14f;  // of the mean energy: smaller tokens count as part of one

// Lines to probe: different ones in every probe, spread by multiples of the golden ratio, since token patterns repeat at
// powers of two.
struct Lines {
  uint64_t outer, first;

  __device__ Lines(const CountedOperand& o, int64_t probe) : outer(o.outer), first(probe * kLines + 1) {}
  __device__ int64_t operator[](int i) const { return __umul64hi((first + i) * 0x9E3779B97F4A7C15ull, outer); }
};

__device__ __forceinline__ int64_t matrix_of(const CountedOperand& o, int64_t line) {
  return line < o.plane_lines ? 0 : static_cast<uint32_t>(line) / static_cast<uint32_t>(o.plane_lines);
}

__device__ __forceinline__ uint32_t codes_of(const CountedOperand& o, int64_t line, int64_t at, int64_t k) {
  const int64_t matrix = matrix_of(o, line);
  const uint8_t* p = o.data + matrix * o.plane + (line - matrix * o.plane_lines) * o.ld + at;
  if (o.vectors && at + kCodes <= k) return __ldg(reinterpret_cast<const uint32_t*>(p));
  uint32_t codes = 0;
#pragma unroll
  for (int e = 0; e < kCodes; ++e)
    if (at + e < k) codes |= static_cast<uint32_t>(__ldg(p + e)) << 8 * e;
  return codes;
}

__device__ __forceinline__ float2 values_of(uint32_t pair, bool e5m2) {
  return __half22float2(e5m2 ? ptx::cvt_f16x2_e5m2x2(pair) : ptx::cvt_f16x2_e4m3x2(pair));
}

// Scale of a run or tile; line and tensor scales cancel.
__device__ __forceinline__ float run_scale(const CountedOperand& o, int64_t line, int64_t at, int64_t k) {
  if (o.run_log2 == 0 || at >= k) return 1.0f;
  if (!o.tiles) return __ldg(o.scale + (at >> o.run_log2) * o.scale_ld + line);
  const int64_t matrix = matrix_of(o, line), of_matrix = (o.plane_lines + 127) / 128;
  return __ldg(o.scale + (matrix * of_matrix + (line - matrix * o.plane_lines) / 128) * o.scale_ld + (at >> 7));
}

struct Codes {
  float all[kCodes], lost[kCodes];  // squares of the values; mean squares of their possible errors

  // A subnormal code lies on a uniform grid: error step^2 / 12. Codes from smaller elements count in blocks of 16 or 32 that
  // are not exact, held by four or eight threads.
  __device__ Codes(const CountedOperand& o, int64_t line, int64_t at, int64_t k) {
    const uint32_t codes = codes_of(o, line, at, k), exponent = o.e5m2 ? 0x7C : 0x78;
    bool counts = o.counted;
    if (o.of_blocks) {
      uint32_t largest = codes & 0x7F7F7F7Fu;
      for (int lane = 1; lane < 1 << o.exact.lanes_log2; lane *= 2) largest = __vmaxu4(largest, __shfl_xor_sync(~0u, largest, lane));
      counts = __vcmpgeu4(largest, o.exact.least * 0x01010101u) == 0;
    }
    const float scale = run_scale(o, line, at, k), each = (o.e5m2 ? 0x1p-32f : 0x1p-18f) / 12 * scale * scale;
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

  __device__ Energies(const CountedOperand& o, const Lines& lines, const float* weight, int64_t at, int64_t k) {
#pragma unroll 4
    for (int l = 0; l < kLines; ++l) {
      const Codes c(o, lines[l], at, k);
#pragma unroll
      for (int e = 0; e < kCodes; ++e) all[e] += c.all[e] * weight[l], lost[e] += c.lost[e] * weight[l];
    }
  }
};

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
  return v;
}

// weight[line] = 1 / sum of `terms` over K, in a fixed order. terms: (line, start of the span) -> this thread's sum.
template <typename Terms>
__device__ void weigh(float* weight, bool of_tokens, int64_t k, Shared& s, const cg::cluster_group& cluster, Terms terms) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kLines * kWarps; i += kErrorThreads) (&s.partials[0][0])[i] = 0.0;
  __syncthreads();
  for (int64_t start = 0; start < k; start += kSpan) {
    terms(start, [&](int line, float sum) {
      const double all = warp_sum(static_cast<double>(sum));
      if (lane == 0) s.partials[line][warp] += all;
    });
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
    for (int l = 0; l < kLines; ++l) mean += s.all[l] / kLines;
    const float sum = static_cast<float>(s.all[line]);
    weight[line] = sum > 0.0f ? 1.0f / fmaxf(sum, of_tokens ? static_cast<float>(mean) * kLeastToken : 0.0f) : 0.0f;
  }
  __syncthreads();
}

// Add the errors of a's lines, and those of their formats, relative to the sum of both. energy_a, energy_b: of Shared.
__device__ void add_lines(
    double& extra, double& product, float own, const CountedOperand& a, const CountedOperand& b, const float* energy_a,
    const float* energy_b, int64_t probe, int64_t k, int64_t first, Shared& s, const cg::cluster_group& cluster) {
  const Lines of_a(a, probe), of_b(b, probe);
  weigh(s.weight, a.of_tokens, k, s, cluster, [&](int64_t start, auto add) {
    const Energies along(b, of_b, energy_b, start + first, k);
#pragma unroll 4
    for (int l = 0; l < kLines; ++l) {
      const Codes c(a, of_a[l], start + first, k);
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kCodes; ++e) sum += c.all[e] * (own * along.all[e] + along.lost[e]) + c.lost[e] * along.all[e];
      add(l, energy_a[l] > 0.0f ? sum : 0.0f);
    }
  });
  for (int64_t start = 0; start < k; start += kSpan) {
    const Energies along_a(a, of_a, s.weight, start + first, k), along_b(b, of_b, energy_b, start + first, k);
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
  if (step % p.every != 0) return;
  const int64_t k = p.k_end != nullptr ? min(p.k, static_cast<int64_t>(*p.k_end)) : p.k;
  __shared__ Shared s;
  const auto cluster = cg::this_cluster();
  const int64_t first = (static_cast<int64_t>(cluster.block_rank()) * kErrorThreads + threadIdx.x) * kCodes;
  const int64_t probe = step / p.every;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Lines lines(p.operand[i], probe);
    weigh(s.energy[i], p.operand[i].of_tokens, k, s, cluster, [&](int64_t start, auto add) {
#pragma unroll 4
      for (int l = 0; l < kLines; ++l) {
        const Codes c(p.operand[i], lines[l], start + first, k);
        add(l, c.all[0] + c.all[1] + c.all[2] + c.all[3]);
      }
    });
  }
  const auto own_of = [](const CountedOperand& o) { return o.of_blocks ? o.exact.own_error : o.e5m2 ? kOwnE5M2 : kOwnE4M3; };
  const double own = own_of(p.operand[0]) + own_of(p.operand[1]);
  double extra = 0.0, product = 0.0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    add_lines(extra, product, static_cast<float>(own), p.operand[i], p.operand[1 - i], s.energy[i], s.energy[1 - i], probe, k,
              first, s, cluster);
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
