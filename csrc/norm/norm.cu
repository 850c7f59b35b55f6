// SPDX-License-Identifier: Apache-2.0
// RMSNorm and LayerNorm over rows, and their backward; the largest magnitude of what is written on the way.
//
//   forward    x^ = (x - mean) * rstd                     y  = round(x^ * gamma + beta)
//   backward   a  = dy * gamma                            dx = round(rstd * (a - mean(a) - x^ * mean(a * x^)))  (+ residual)
//                                                            = round(rstd * a - (slope * x + level))
//              dgamma = sum over rows of dy * x^          dbeta = sum over rows of dy
//
// Where x^ is rounded first, y = round(round(x^) * gamma), a = round(dy * gamma), dgamma = sum of round(dy * round(x^)).
// fp32 inside. A root mean square has no mean: those terms are absent. Sums over rows are deterministic: a fixed number
// of teams adds up its rows in registers, those of a block through shared memory, a second kernel the blocks, in order.
// A row is computed by a team of threads that stays, and takes row after row: while one is computed the next is on its
// way to shared memory, where a thread reads only what it copied itself. A team is a block; in the backward threadIdx.y
// counts those of a block, so that partial sums are few.
//
// Of the copy rate, 8192 x 14336, H100: RMSNorm .86 (with the next row in registers .78), its
// backward .93. The backward was bound by instructions (LayerNorm: 40 per value, 70 % of issue
// slots); 31 now, as addresses differ by constants and dx is two multiply-adds of x and dy: 16384 x
// 4096, H200, LayerNorm .68 -> .82, 2048 wide .51 -> .77. A kernel that names barriers takes all 16
// of them, so few blocks are resident: narrow forwards ran at .53 instead of .80.
#include <algorithm>

#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

namespace {

enum class Kind { kLayerNorm, kRMSNorm, kRoundsFirst };  // the last: a root mean square

constexpr int kVectors = 4, kBackwardVectors = 2;  // of 8 values a thread
constexpr int kResident = 1024;                    // threads of a processor: 64 registers each
constexpr int kBlock = 512;                        // threads of several teams
constexpr int kMostTeams = 15;                     // of a block: barriers that have names

// Sum over the block, in the same order in every thread. One barrier: callers alternate between two `smem`.
__device__ __forceinline__ float block_sum(float v, float (&smem)[32]) {
  const auto over_warp = [&] {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, lane);
  };
  const int lane = threadIdx.x & 31;
  over_warp();
  if (lane == 0) smem[threadIdx.x >> 5] = v;
  __syncthreads();
  v = lane < blockDim.x >> 5 ? smem[lane] : 0.0f;
  over_warp();
  return v;
}

// The same of two values over a team, each in half a warp after the first step.
template <bool Two>
__device__ __forceinline__ void team_sum(float& one, float& other, float (&smem)[2][32]) {
  const int lane = threadIdx.x & 31, half = lane >> 4, warps = blockDim.x >> 5, first = threadIdx.y * warps;
  float v = Two && half ? other : one;
  v += __shfl_xor_sync(0xFFFFFFFFu, Two && !half ? other : one, 16);
  const auto over_half = [&] {
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, lanes);
  };
  over_half();
  if ((lane & 15) == 0) smem[half][first + (threadIdx.x >> 5)] = v;
  if (blockDim.y == 1) {
    __syncthreads();
  } else {
    ptx::sync_some(1 + threadIdx.y, blockDim.x);
  }
  const int warp = lane & 15;
  v = warp < warps ? smem[half][first + warp] : 0.0f;
  if (warps > 16 && warp + 16 < warps) v += smem[half][first + warp + 16];
  over_half();
  one = __shfl_sync(0xFFFFFFFFu, v, 0);
  if constexpr (Two) other = __shfl_sync(0xFFFFFFFFu, v, 16);
}

// A row that is copied ahead; a thread has kVectors of it to itself, blockDim.x pointer_table.
template <class T>
struct Ahead {
  static constexpr int kParts = Eight<T>::kWords / 4;
  static constexpr int kBytes = 2 * kVectors * kParts * sizeof(uint4);  // of shared memory, a thread
  uint4* mine;

  __device__ __forceinline__ uint4* place(int stage, int k) const { return mine + (stage * kVectors + k) * kParts * blockDim.x; }
  __device__ __forceinline__ void copy(int stage, int k, const void* x, int64_t at) const {
    uint4* const to = place(stage, k);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      ptx::copy_async_16(to + part * blockDim.x, reinterpret_cast<const uint4*>(static_cast<const T*>(x) + at) + part);
  }
  __device__ __forceinline__ void widen(int stage, int k, float (&v)[8]) const {
    const uint4* const from = place(stage, k);
    Eight<T> e;
#pragma unroll
    for (int part = 0; part < kParts; ++part) e.set(part, from[part * blockDim.x]);
    e.widen(v);
  }
};

template <class T>
constexpr int kBackwardStages = Eight<T>::kWide ? 1 : 2;  // three rows of fp32 fill the shared memory

template <class T, Kind kKind>
__global__ void __launch_bounds__(512, Eight<T>::kWide ? 1 : 2) norm_kernel(const __grid_constant__ NormArgs args) {
  constexpr bool Centred = kKind == Kind::kLayerNorm;
  extern __shared__ uint4 ring[];
  __shared__ float sums[2][32];
  __shared__ uint32_t maxima[32];
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const bias = static_cast<const T*>(args.bias);
  const Ahead<T> ahead = {ring + threadIdx.x};
  const auto column = [&](int k) { return static_cast<int32_t>(threadIdx.x + k * blockDim.x) * 8; };
  const auto fetch = [&](int32_t row, int stage) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (column(k) < args.cols) ahead.copy(stage, k, args.x, static_cast<int64_t>(row) * args.cols + column(k));
  };
  Magnitudes<T> largest;
  int turn = 0;
  fetch(blockIdx.x, 0);
  for (int32_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    ptx::copy_async_wait();
    if (row + static_cast<int64_t>(gridDim.x) < args.rows) fetch(row + gridDim.x, turn ^ 1);
    T* const y = static_cast<T*>(args.y) + static_cast<int64_t>(row) * args.cols;
    float v[kVectors][8], sum = 0.0f, mean = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= args.cols) continue;
      ahead.widen(turn, k, v[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += Centred ? v[k][i] : v[k][i] * v[k][i];
    }
    sum = block_sum(sum, sums[Centred ? 0 : turn]);
    if constexpr (Centred) {
      mean = sum / args.cols;
      sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (column(k) >= args.cols) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[k][i] -= mean, sum += v[k][i] * v[k][i];
      }
      sum = block_sum(sum, sums[1]);
      if (threadIdx.x == 0) args.mean[row] = mean;
    }
    const float rstd = rsqrtf(sum / args.cols + args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= args.cols) continue;
      float gamma[8], beta[8] = {};
      Eight<T>::cached(weight + column(k)).widen(gamma);
      if (bias != nullptr) Eight<T>::cached(bias + column(k)).widen(beta);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[k][i] *= rstd;
      if constexpr (kKind == Kind::kRoundsFirst) Eight<T>::round(v[k]).widen(v[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[k][i] = v[k][i] * (gamma[i] + args.offset) + beta[i];
      const Eight<T> made = Eight<T>::round(v[k]);
      largest.take(made);
      made.store(y + column(k));
    }
  }
  raise_amax(args.amax, largest.largest(), maxima);
}

// Bound by instructions: what a thread has in memory, of x, dy and the residual, and its columns, lie at distances that
// are constants of instructions. Threads: of a block at most.
template <class T, Kind kKind, int Threads>
__global__ void __launch_bounds__(Threads, kResident / Threads) norm_backward_kernel(const __grid_constant__ NormArgs args) {
  constexpr bool Centred = kKind == Kind::kLayerNorm, RoundsFirst = kKind == Kind::kRoundsFirst;
  extern __shared__ uint4 ring[];
  __shared__ float sums[2][2][32];
  __shared__ uint32_t maxima[32];
  constexpr int kStages = kBackwardStages<T>, kVectors = kBackwardVectors, kParts = Eight<T>::kWords / 4;
  constexpr uint32_t kBytes = Threads * sizeof(uint4), kStage = kVectors * kParts * kBytes;  // from place to place
  const bool adds = args.residual != nullptr;
  int32_t first = ((threadIdx.x >> 5) * kVectors * 32 + (threadIdx.x & 31)) * 8;
  uint32_t mine = ptx::shared_address(ring + threadIdx.y * blockDim.x + threadIdx.x);
  ptx::keep(first), ptx::keep(mine);
  const auto has = [&](int k) { return first < args.cols - k * 256; };
  const auto place = [&](uint32_t stage, int tensor, int k, int part) {
    return static_cast<uint4*>(__cvta_shared_to_generic(stage + tensor * kStages * kStage + (k * kParts + part) * kBytes));
  };
  const auto fetch = [&](uint32_t stage, uint32_t row) {
    const int64_t at = static_cast<int64_t>(row) * args.cols + first;
    const auto copy = [&](int tensor, const void* rows) {
      const auto* const from = reinterpret_cast<const uint4*>(static_cast<const T*>(rows) + at);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (!has(k)) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) ptx::copy_async_16(place(stage, tensor, k, part), from + k * 32 * kParts + part);
      }
    };
    copy(0, args.x), copy(1, args.dy);
    if (adds) copy(2, args.residual);
  };
  const auto widen = [&](uint32_t stage, int tensor, int k, float (&v)[8]) {
    Eight<T> e;
#pragma unroll
    for (int part = 0; part < kParts; ++part) e.set(part, *place(stage, tensor, k, part));
    e.widen(v);
  };
  const auto scale = [&](int k, float (&gamma)[8]) {
    Eight<T>::cached(static_cast<const T*>(args.weight) + first + k * 256).widen(gamma);
    if (args.offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) gamma[i] += args.offset;
  };
  const auto multiply = [](float (&a)[8], const float (&b)[8]) {  // and round
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] *= b[i];
    Eight<T>::round(a).widen(a);
  };
  float next_rstd = 0.0f, next_mean = 0.0f;
  const auto fetch_scalars = [&](uint32_t row) {
    next_rstd = __ldg(args.rstd + row);
    if constexpr (Centred) next_mean = __ldg(args.mean + row);
  };
  float dgamma[kVectors][8] = {}, dbeta[kVectors][8] = {};
  uint32_t largest = 0, turn = 0;
  const uint32_t rows = args.rows, stride = gridDim.x * blockDim.y;
  uint32_t row = blockIdx.x + threadIdx.y * gridDim.x;
  if (row < rows) fetch(mine, row), fetch_scalars(row);
  for (; row < rows; row += stride, turn ^= 1) {
    const uint32_t stage = kStages == 1 ? mine : mine + turn * kStage, following = row + stride;
    ptx::copy_async_wait();
    const float rstd = next_rstd, shift = Centred ? -next_mean * rstd : 0.0f;
    if (following < rows) {
      if (kStages == 2) fetch(mine + (turn ^ 1) * kStage, following);
      fetch_scalars(following);
    }
    float along = 0.0f, mean = 0.0f;  // of a * x^, and of a
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      float x[8], dy[8], gamma[8];
      widen(stage, 0, k, x), widen(stage, 1, k, dy), scale(k, gamma);
      if constexpr (RoundsFirst) {
        multiply(gamma, dy);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= rstd, along += gamma[i] * x[i];
        Eight<T>::round(x).widen(x), multiply(x, dy);
#pragma unroll
        for (int i = 0; i < 8; ++i) dgamma[k][i] += x[i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float normal = x[i] * rstd + shift, a = dy[i] * gamma[i];
          along += a * normal;
          dgamma[k][i] += dy[i] * normal;
          if constexpr (Centred) mean += a, dbeta[k][i] += dy[i];
        }
      }
    }
    team_sum<Centred>(along, mean, sums[turn]);
    along = along / args.cols * rstd;
    const float slope = along * rstd, level = Centred ? along * shift + mean / args.cols * rstd : 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      float x[8], dy[8], gamma[8];
      widen(stage, 0, k, x), widen(stage, 1, k, dy), scale(k, gamma);
      if constexpr (RoundsFirst) {
        multiply(gamma, dy);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = gamma[i] * rstd - x[i] * slope;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = dy[i] * gamma[i] * rstd - (x[i] * slope + level);
      }
      Eight<T> made = Eight<T>::round(x);
      if (adds) {
        float other[8];
        made.widen(x), widen(stage, 2, k, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += other[i];
        made = Eight<T>::round(x);
      }
#pragma unroll
      for (int i = 0; i < Eight<T>::kWords; ++i)
        largest = Magnitudes<T>::larger(largest, Magnitudes<T>::magnitude(made.w[i]));
      made.store(static_cast<T*>(args.dx) + static_cast<int64_t>(row) * args.cols + first + k * 256);
    }
    if (kStages == 1 && following < rows) fetch(mine, following);
  }
  __syncthreads();  // the ring is read: [gamma, beta][teams][cols] now
  auto* const of_teams = reinterpret_cast<float4*>(ring);
  const int32_t fours = args.cols / 4, lines = Centred && args.dbias != nullptr ? 2 : 1;
  const auto put = [&](int line, const float (&sums)[kVectors][8]) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) continue;
      float4* const to = of_teams + (line * blockDim.y + threadIdx.y) * fours + first / 4 + k * 64;
#pragma unroll
      for (int i = 0; i < 8; i += 4) to[i / 4] = make_float4(sums[k][i], sums[k][i + 1], sums[k][i + 2], sums[k][i + 3]);
    }
  };
  put(0, dgamma);
  if (lines > 1) put(1, dbeta);
  raise_amax(args.amax, Magnitudes<T>::widened_word(largest), maxima);  // waits for all
  for (int32_t i = threadIdx.y * blockDim.x + threadIdx.x; i < lines * fours; i += blockDim.x * blockDim.y) {
    const int32_t line = i >= fours, at = i - line * fours;
    float4 sum = of_teams[line * blockDim.y * fours + at];
    for (int team = 1; team < blockDim.y; ++team) {
      const float4 more = of_teams[(line * blockDim.y + team) * fours + at];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    reinterpret_cast<float4*>(args.partial)[(static_cast<int64_t>(line) * kNormBlocks + blockIdx.x) * fours + at] = sum;
  }
}

// Block: 32 columns, 16 threads each; y of the grid: which line.
template <class T>
__global__ void __launch_bounds__(512) sum_partials(const __grid_constant__ Partials args) {
  __shared__ float sums[16][33];
  const int32_t lane = threadIdx.x & 31, part = threadIdx.x >> 5, col = blockIdx.x * 32 + lane;
  const float* const from = args.from + blockIdx.y * args.stride + col;
  float sum = 0.0f;
  if (col < args.cols) {
#pragma unroll 8
    for (int32_t row = part; row < args.rows; row += 16) sum += __ldcg(from + static_cast<int64_t>(row) * args.cols);
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part != 0 || col >= args.cols) return;
#pragma unroll
  for (int i = 1; i < 16; ++i) sum += sums[i][lane];
  static_cast<T*>(blockIdx.y == 0 ? args.out[0] : args.out[1])[col] = static_cast<T>(sum);
}

// Teams of threads that hold a row each, and blocks of teams that are resident together.
struct Shape {
  dim3 threads;
  int32_t blocks;

  int32_t count() const { return threads.x * threads.y; }
};

Shape shape_of(const NormArgs& args, int vectors, int resident, int block) {
  const int32_t threads = ((args.cols / 8 + vectors - 1) / vectors + 31) / 32 * 32;
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int32_t of_processor = std::max(resident / threads, 1), rows = (args.rows - 1) / processors + 1;
  const int32_t teams = std::min({std::max(block / threads, 1), kMostTeams, rows});
  return {dim3(threads, teams), std::min(processors * (of_processor / teams), (args.rows - 1) / teams + 1)};
}

template <class Kernel>
cudaError_t start(Kernel* kernel, const NormArgs& args, int32_t blocks, const Shape& shape, int bytes, cudaStream_t stream) {
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<blocks, shape.threads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_forward(const NormArgs& args, cudaStream_t stream) {
  const Shape shape = shape_of(args, kVectors, Eight<T>::kWide ? kResident / 2 : kResident, 0);
  auto* kernel = args.mean != nullptr ? norm_kernel<T, Kind::kLayerNorm> : norm_kernel<T, Kind::kRMSNorm>;
  if constexpr (!Eight<T>::kWide)
    if (args.rounds_first) kernel = norm_kernel<T, Kind::kRoundsFirst>;
  return start(kernel, args, shape.blocks, shape, shape.count() * Ahead<T>::kBytes, stream);
}

template <class T>
cudaError_t launch_partials(const Partials& args, cudaStream_t stream) {
  sum_partials<T><<<dim3((args.cols + 31) / 32, args.out[1] != nullptr ? 2 : 1), 512, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T, int Threads>
cudaError_t start_backward(const NormArgs& args, const Shape& shape, int32_t blocks, cudaStream_t stream) {
  const int bytes = (args.residual != nullptr ? 3 : 2) * kBackwardStages<T> * kBackwardVectors * 8 * sizeof(T) * Threads;
  auto* kernel = args.mean != nullptr ? norm_backward_kernel<T, Kind::kLayerNorm, Threads>
                                      : norm_backward_kernel<T, Kind::kRMSNorm, Threads>;
  if constexpr (!Eight<T>::kWide)
    if (args.rounds_first) kernel = norm_backward_kernel<T, Kind::kRoundsFirst, Threads>;
  return start(kernel, args, blocks, shape, bytes, stream);
}

template <class T>
cudaError_t launch_backward(const NormArgs& args, cudaStream_t stream) {
  const Shape shape = shape_of(args, kBackwardVectors, kResident, kBlock);
  const int32_t blocks = std::min(shape.blocks, kNormBlocks);
  const cudaError_t error = shape.count() <= kBlock ? start_backward<T, kBlock>(args, shape, blocks, stream)
                                                    : start_backward<T, kResident>(args, shape, blocks, stream);
  if (error != cudaSuccess) return error;
  return launch_partials<T>({args.partial, int64_t{kNormBlocks} * args.cols, {args.dweight, args.dbias}, blocks, args.cols}, stream);
}

}  // namespace

cudaError_t launch_norm(const NormArgs& args, Values values, cudaStream_t stream) {
  if (values == Values::kBF16) return launch_forward<__nv_bfloat16>(args, stream);
  return values == Values::kF16 ? launch_forward<__half>(args, stream) : launch_forward<float>(args, stream);
}

cudaError_t launch_norm_backward(const NormArgs& args, Values values, cudaStream_t stream) {
  if (values == Values::kBF16) return launch_backward<__nv_bfloat16>(args, stream);
  return values == Values::kF16 ? launch_backward<__half>(args, stream) : launch_backward<float>(args, stream);
}

cudaError_t launch_sum_partials(const Partials& args, Values values, cudaStream_t stream) {
  if (values == Values::kBF16) return launch_partials<__nv_bfloat16>(args, stream);
  return values == Values::kF16 ? launch_partials<__half>(args, stream) : launch_partials<float>(args, stream);
}

}  // namespace fsdp_quant
