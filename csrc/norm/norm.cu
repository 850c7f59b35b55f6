// RMSNorm and LayerNorm over rows, and their backward; the largest magnitude of what is written on the way.
//
//   forward    x^ = (x - mean) * rstd                     y  = round(x^ * gamma + beta)
//   backward   a  = dy * gamma                            dx = round(rstd * (a - mean(a) - x^ * mean(a * x^)))  (+ residual)
//              dgamma = sum over rows of dy * x^          dbeta = sum over rows of dy
//
// fp32 inside. A root mean square has no mean: those terms are absent. Sums over rows are deterministic: a fixed number
// of blocks adds up its rows in registers, a second kernel adds the blocks in order.
// Blocks stay, and take row after row: while one is computed the next is on its way to shared memory, where a thread
// reads only what it copied itself.
#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

namespace {

constexpr int kVectors = 4, kBackwardVectors = 2;  // of 8 values a thread
constexpr int kResident = 1024;                    // threads of a processor: 64 registers each

// Sums over the block, in the same order in every thread. One barrier: callers alternate between two `smem`.
template <int N>
__device__ __forceinline__ void block_sum(float (&v)[N], float (*smem)[32]) {
  const auto over_warp = [&] {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(0xFFFFFFFFu, v[i], lane);
  };
  const int lane = threadIdx.x & 31;
  over_warp();
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (lane == 0) smem[i][threadIdx.x >> 5] = v[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = lane < blockDim.x >> 5 ? smem[i][lane] : 0.0f;
  over_warp();
}

// Rows of some tensors that are copied ahead; a thread has `Vectors` of each to itself, blockDim.x apart.
template <class T, int Vectors, int Stages>
struct Ahead {
  static constexpr int kParts = Eight<T>::kWords / 4, kStages = Stages;
  uint4* mine;
  int tensors;

  // Of shared memory, a thread.
  static constexpr int bytes(int tensors) { return Stages * tensors * Vectors * kParts * sizeof(uint4); }
  __device__ __forceinline__ uint4* place(int stage, int tensor, int k) const {
    return mine + ((stage * tensors + tensor) * Vectors + k) * kParts * blockDim.x;
  }
  __device__ __forceinline__ void copy(int stage, int tensor, int k, const void* rows, int64_t at) const {
    uint4* const to = place(stage, tensor, k);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      ptx::copy_async_16(to + part * blockDim.x, reinterpret_cast<const uint4*>(static_cast<const T*>(rows) + at) + part);
  }
  __device__ __forceinline__ void widen(int stage, int tensor, int k, float (&v)[8]) const {
    const uint4* const from = place(stage, tensor, k);
    Eight<T> e;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 w = from[part * blockDim.x];
      e.w[4 * part] = w.x, e.w[4 * part + 1] = w.y, e.w[4 * part + 2] = w.z, e.w[4 * part + 3] = w.w;
    }
    e.widen(v);
  }
};

template <class T>
using ForwardAhead = Ahead<T, kVectors, 2>;
template <class T>
using BackwardAhead = Ahead<T, kBackwardVectors, Eight<T>::kWide ? 1 : 2>;  // three rows of fp32 fill the shared memory

template <class T, bool Centred>
__global__ void __launch_bounds__(512, Eight<T>::kWide ? 1 : 2) norm_kernel(const __grid_constant__ NormArgs args) {
  extern __shared__ uint4 ring[];
  __shared__ float sums[2][1][32];
  __shared__ uint32_t maxima[32];
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const bias = static_cast<const T*>(args.bias);
  const ForwardAhead<T> ahead = {ring + threadIdx.x, 1};
  const auto column = [&](int k) { return static_cast<int32_t>(threadIdx.x + k * blockDim.x) * 8; };
  const auto fetch = [&](int32_t row, int stage) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (column(k) < args.cols) ahead.copy(stage, 0, k, args.x, static_cast<int64_t>(row) * args.cols + column(k));
  };
  Magnitudes<T> largest;
  int turn = 0;
  fetch(blockIdx.x, 0);
  for (int32_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    ptx::copy_async_wait();
    if (row + static_cast<int64_t>(gridDim.x) < args.rows) fetch(row + gridDim.x, turn ^ 1);
    T* const y = static_cast<T*>(args.y) + static_cast<int64_t>(row) * args.cols;
    float v[kVectors][8], sum[1] = {0.0f}, mean = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= args.cols) continue;
      ahead.widen(turn, 0, k, v[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[0] += Centred ? v[k][i] : v[k][i] * v[k][i];
    }
    block_sum(sum, sums[Centred ? 0 : turn]);
    if constexpr (Centred) {
      mean = sum[0] / args.cols;
      sum[0] = 0.0f;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (column(k) >= args.cols) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[k][i] -= mean, sum[0] += v[k][i] * v[k][i];
      }
      block_sum(sum, sums[1]);
      if (threadIdx.x == 0) args.mean[row] = mean;
    }
    const float rstd = rsqrtf(sum[0] / args.cols + args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= args.cols) continue;
      float gamma[8], beta[8] = {};
      Eight<T>::cached(weight + column(k)).widen(gamma);
      if (bias != nullptr) Eight<T>::cached(bias + column(k)).widen(beta);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[k][i] = v[k][i] * rstd * (gamma[i] + args.offset) + beta[i];
      const Eight<T> made = Eight<T>::round(v[k]);
      largest.take(made);
      made.store(y + column(k));
    }
  }
  raise_amax(args.amax, largest.largest(), maxima);
}

template <class T, bool Centred>
__global__ void __launch_bounds__(1024) norm_backward_kernel(const __grid_constant__ NormArgs args) {
  extern __shared__ uint4 ring[];
  __shared__ float sums[2][2][32];
  __shared__ uint32_t maxima[32];
  constexpr int kStages = BackwardAhead<T>::kStages;
  const T* const weight = static_cast<const T*>(args.weight);
  const bool adds = args.residual != nullptr;
  const BackwardAhead<T> ahead = {ring + threadIdx.x, adds ? 3 : 2};
  const auto column = [&](int k) { return static_cast<int32_t>(threadIdx.x + k * blockDim.x) * 8; };
  const auto fetch = [&](int32_t row, int stage) {
    const int64_t start = static_cast<int64_t>(row) * args.cols;
#pragma unroll
    for (int k = 0; k < kBackwardVectors; ++k) {
      if (column(k) >= args.cols) continue;
      ahead.copy(stage, 0, k, args.x, start + column(k)), ahead.copy(stage, 1, k, args.dy, start + column(k));
      if (adds) ahead.copy(stage, 2, k, args.residual, start + column(k));
    }
  };
  float dgamma[kBackwardVectors][8] = {}, dbeta[kBackwardVectors][8] = {};
  Magnitudes<T> largest;
  int turn = 0;
  fetch(blockIdx.x, 0);
  for (int32_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    const int64_t start = static_cast<int64_t>(row) * args.cols, following = row + static_cast<int64_t>(gridDim.x);
    const int stage = kStages == 1 ? 0 : turn;
    ptx::copy_async_wait();
    if (kStages == 2 && following < args.rows) fetch(following, stage ^ 1);
    const float rstd = args.rstd[row], mean = Centred ? args.mean[row] : 0.0f;
    float sum[Centred ? 2 : 1] = {};  // of a * x^, and of a
#pragma unroll
    for (int k = 0; k < kBackwardVectors; ++k) {
      if (column(k) >= args.cols) continue;
      float x[8], dy[8], gamma[8];
      ahead.widen(stage, 0, k, x), ahead.widen(stage, 1, k, dy);
      Eight<T>::cached(weight + column(k)).widen(gamma);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float normal = (x[i] - mean) * rstd, a = dy[i] * (gamma[i] + args.offset);
        sum[0] += a * normal;
        dgamma[k][i] += dy[i] * normal;
        if constexpr (Centred) sum[1] += a, dbeta[k][i] += dy[i];
      }
    }
    block_sum(sum, sums[turn]);
    const float along = sum[0] / args.cols * rstd, level = Centred ? sum[Centred] / args.cols : 0.0f;
#pragma unroll
    for (int k = 0; k < kBackwardVectors; ++k) {
      if (column(k) >= args.cols) continue;
      float x[8], dy[8], gamma[8];
      ahead.widen(stage, 0, k, x), ahead.widen(stage, 1, k, dy);
      Eight<T>::cached(weight + column(k)).widen(gamma);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = rstd * (dy[i] * (gamma[i] + args.offset) - level - (x[i] - mean) * along);
      Eight<T> made = Eight<T>::round(x);
      if (adds) {
        float other[8];
        made.widen(x), ahead.widen(stage, 2, k, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += other[i];
        made = Eight<T>::round(x);
      }
      largest.take(made);
      made.store(static_cast<T*>(args.dx) + start + column(k));
    }
    if (kStages == 1 && following < args.rows) fetch(following, 0);
  }
  float* const of_gamma = args.partial + static_cast<int64_t>(blockIdx.x) * args.cols;
  float* const of_beta = of_gamma + static_cast<int64_t>(kNormBlocks) * args.cols;
#pragma unroll
  for (int k = 0; k < kBackwardVectors; ++k) {
    if (column(k) >= args.cols) continue;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      *reinterpret_cast<float4*>(of_gamma + column(k) + i) =
          make_float4(dgamma[k][i], dgamma[k][i + 1], dgamma[k][i + 2], dgamma[k][i + 3]);
      if (Centred && args.dbias != nullptr)
        *reinterpret_cast<float4*>(of_beta + column(k) + i) =
            make_float4(dbeta[k][i], dbeta[k][i + 1], dbeta[k][i + 2], dbeta[k][i + 3]);
    }
  }
  raise_amax(args.amax, largest.largest(), maxima);
}

// Block: 32 columns, 16 threads each; y of the grid: gamma, beta.
template <class T>
__global__ void __launch_bounds__(512) sum_partials(const __grid_constant__ NormArgs args, int32_t blocks) {
  __shared__ float sums[16][33];
  const int32_t lane = threadIdx.x & 31, part = threadIdx.x >> 5, col = blockIdx.x * 32 + lane;
  const float* const partial = args.partial + static_cast<int64_t>(blockIdx.y) * kNormBlocks * args.cols;
  float sum = 0.0f;
  if (col < args.cols)
    for (int32_t b = part; b < blocks; b += 16) sum += partial[static_cast<int64_t>(b) * args.cols + col];
  sums[part][lane] = sum;
  __syncthreads();
  if (part != 0 || col >= args.cols) return;
#pragma unroll
  for (int i = 1; i < 16; ++i) sum += sums[i][lane];
  static_cast<T*>(blockIdx.y == 0 ? args.dweight : args.dbias)[col] = static_cast<T>(sum);
}

// Threads that hold a row, and blocks of them that are resident together.
struct Shape {
  int32_t threads, blocks;
};

Shape shape_of(const NormArgs& args, int vectors, int resident) {
  const int32_t threads = ((args.cols / 8 + vectors - 1) / vectors + 31) / 32 * 32;
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int32_t blocks = processors * (resident / threads > 1 ? resident / threads : 1);
  return {threads, blocks < args.rows ? blocks : args.rows};
}

template <class Kernel>
cudaError_t start(Kernel* kernel, const NormArgs& args, int32_t blocks, int32_t threads, int bytes, cudaStream_t stream) {
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<blocks, threads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_forward(const NormArgs& args, cudaStream_t stream) {
  const Shape shape = shape_of(args, kVectors, Eight<T>::kWide ? kResident / 2 : kResident);
  auto* kernel = args.mean != nullptr ? norm_kernel<T, true> : norm_kernel<T, false>;
  return start(kernel, args, shape.blocks, shape.threads, shape.threads * ForwardAhead<T>::bytes(1), stream);
}

template <class T>
cudaError_t launch_backward(const NormArgs& args, cudaStream_t stream) {
  const Shape shape = shape_of(args, kBackwardVectors, kResident);
  const int32_t blocks = shape.blocks < kNormBlocks ? shape.blocks : kNormBlocks;
  const int bytes = shape.threads * BackwardAhead<T>::bytes(args.residual != nullptr ? 3 : 2);
  auto* kernel = args.mean != nullptr ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>;
  const cudaError_t error = start(kernel, args, blocks, shape.threads, bytes, stream);
  if (error != cudaSuccess) return error;
  sum_partials<T><<<dim3((args.cols + 31) / 32, args.dbias != nullptr ? 2 : 1), 512, 0, stream>>>(args, blocks);
  return cudaGetLastError();
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

}  // namespace fsdp_quant
