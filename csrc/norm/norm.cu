// RMSNorm and LayerNorm over rows, and their backward; the largest magnitude of what is written on the way.
//
//   forward    x^ = (x - mean) * rstd                     y  = round(x^ * gamma + beta)
//   backward   a  = dy * gamma                            dx = round(rstd * (a - mean(a) - x^ * mean(a * x^)))  (+ residual)
//              dgamma = sum over rows of dy * x^          dbeta = sum over rows of dy
//
// fp32 inside. A root mean square has no mean: those terms are absent. Sums over rows are deterministic: a fixed number
// of blocks adds up its rows in registers, a second kernel adds the blocks in order.
// Block: a row in registers, 16 values a thread.
#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

namespace {

constexpr int kVectors = 2;

// Sums over the block, in the same order in every thread. One barrier: callers alternate between two `smem`.
__device__ __forceinline__ float2 block_sum(float2 v, float2* smem) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    v.x += __shfl_xor_sync(0xFFFFFFFFu, v.x, lane);
    v.y += __shfl_xor_sync(0xFFFFFFFFu, v.y, lane);
  }
  if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = v;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  v = lane < blockDim.x >> 5 ? smem[lane] : make_float2(0.0f, 0.0f);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    v.x += __shfl_xor_sync(0xFFFFFFFFu, v.x, other);
    v.y += __shfl_xor_sync(0xFFFFFFFFu, v.y, other);
  }
  return v;
}

template <class T, bool Centred>
__global__ void __launch_bounds__(1024) norm_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float2 sums[2][32];
  __shared__ uint32_t maxima[32];
  const int32_t row = blockIdx.x;
  const T* const x = static_cast<const T*>(args.x) + static_cast<int64_t>(row) * args.cols;
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const bias = static_cast<const T*>(args.bias);
  T* const y = static_cast<T*>(args.y) + static_cast<int64_t>(row) * args.cols;
  float v[kVectors][8];
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
    const bool inside = col < args.cols;
    if (inside) Eight<T>::load(x + col).widen(v[k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!inside) v[k][i] = 0.0f;
      sum.x += Centred ? v[k][i] : v[k][i] * v[k][i];
    }
  }
  float total = block_sum(sum, sums[0]).x;
  if constexpr (Centred) {
    const float mean = total / args.cols;
    sum.x = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const bool inside = static_cast<int32_t>(threadIdx.x + k * blockDim.x) * 8 < args.cols;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[k][i] -= mean;
        if (inside) sum.x += v[k][i] * v[k][i];
      }
    }
    total = block_sum(sum, sums[1]).x;
    if (threadIdx.x == 0) args.mean[row] = mean;
  }
  const float rstd = rsqrtf(total / args.cols + args.eps);
  if (threadIdx.x == 0) args.rstd[row] = rstd;
  Magnitudes<T> largest;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
    if (col >= args.cols) continue;
    float gamma[8], beta[8] = {};
    Eight<T>::cached(weight + col).widen(gamma);
    if (bias != nullptr) Eight<T>::cached(bias + col).widen(beta);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[k][i] = v[k][i] * rstd * (gamma[i] + args.offset) + beta[i];
    const Eight<T> made = Eight<T>::round(v[k]);
    largest.take(made);
    made.store(y + col);
  }
  raise_amax(args.amax, largest.largest(), maxima);
}

// Threads: at most so many; half as many have twice the registers.
template <class T, bool Centred, int Threads>
__global__ void __launch_bounds__(Threads) norm_backward_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float2 sums[2][32];
  __shared__ uint32_t maxima[32];
  const T* const weight = static_cast<const T*>(args.weight);
  const T* const residual = static_cast<const T*>(args.residual);
  float dgamma[kVectors][8] = {}, dbeta[kVectors][8] = {};
  Magnitudes<T> largest;
  int turn = 0;
  for (int32_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    const int64_t start = static_cast<int64_t>(row) * args.cols;
    Eight<T> xs[kVectors], dys[kVectors], rest[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
      if (col >= args.cols) continue;
      xs[k] = Eight<T>::load(static_cast<const T*>(args.x) + start + col);
      dys[k] = Eight<T>::load(static_cast<const T*>(args.dy) + start + col);
      if (residual != nullptr) rest[k] = Eight<T>::load(residual + start + col);
    }
    const float rstd = args.rstd[row], mean = Centred ? args.mean[row] : 0.0f;
    float2 sum = make_float2(0.0f, 0.0f);  // of a * x^, and of a
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
      if (col >= args.cols) continue;
      float x[8], dy[8], gamma[8];
      xs[k].widen(x), dys[k].widen(dy), Eight<T>::cached(weight + col).widen(gamma);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float normal = (x[i] - mean) * rstd, a = dy[i] * (gamma[i] + args.offset);
        sum.x += a * normal;
        if constexpr (Centred) sum.y += a;
        dgamma[k][i] += dy[i] * normal;
        if constexpr (Centred) dbeta[k][i] += dy[i];
      }
    }
    sum = block_sum(sum, sums[turn]);
    const float along = sum.x / args.cols, level = Centred ? sum.y / args.cols : 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
      if (col >= args.cols) continue;
      float x[8], dy[8], gamma[8];
      xs[k].widen(x), dys[k].widen(dy), Eight<T>::cached(weight + col).widen(gamma);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[i] = rstd * (dy[i] * (gamma[i] + args.offset) - level - (x[i] - mean) * rstd * along);
      Eight<T> made = Eight<T>::round(x);
      if (residual != nullptr) {
        float other[8];
        made.widen(x), rest[k].widen(other);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += other[i];
        made = Eight<T>::round(x);
      }
      largest.take(made);
      made.store(static_cast<T*>(args.dx) + start + col);
    }
  }
  float* const of_gamma = args.partial + static_cast<int64_t>(blockIdx.x) * args.cols;
  float* const of_beta = of_gamma + static_cast<int64_t>(kNormBlocks) * args.cols;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t col = (threadIdx.x + k * blockDim.x) * 8;
    if (col >= args.cols) continue;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      *reinterpret_cast<float4*>(of_gamma + col + i) =
          make_float4(dgamma[k][i], dgamma[k][i + 1], dgamma[k][i + 2], dgamma[k][i + 3]);
      if (Centred && args.dbias != nullptr)
        *reinterpret_cast<float4*>(of_beta + col + i) =
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

dim3 threads_of(int32_t cols) { return dim3(((cols / 8 + kVectors - 1) / kVectors + 31) / 32 * 32); }

template <class T>
cudaError_t launch_forward(const NormArgs& args, cudaStream_t stream) {
  auto* kernel = args.mean != nullptr ? norm_kernel<T, true> : norm_kernel<T, false>;
  kernel<<<args.rows, threads_of(args.cols), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T, int Threads>
auto backward_kernel(const NormArgs& args) {
  return args.mean != nullptr ? norm_backward_kernel<T, true, Threads> : norm_backward_kernel<T, false, Threads>;
}

template <class T>
cudaError_t launch_backward(const NormArgs& args, cudaStream_t stream) {
  const int32_t blocks = args.rows < kNormBlocks ? args.rows : kNormBlocks;
  const dim3 threads = threads_of(args.cols);
  auto* kernel = threads.x <= 512 ? backward_kernel<T, 512>(args) : backward_kernel<T, 1024>(args);
  kernel<<<blocks, threads, 0, stream>>>(args);
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
