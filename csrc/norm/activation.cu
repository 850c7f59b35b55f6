// h = act(g), or act(g) * u, and its backward, in one pass each; the largest magnitude of what is written on the way.
//
//   forward    a = round(act(g))      h = round(a * u)
//   backward   da = round(dh * u)     dg = round(da * act'(g))     du = round(dh * a)
//
// fp32 inside; rounding points are those of the two separate operations, so that fusing them changes nothing but the
// last bits of exp, erf and tanh. `a` is made again in the backward, not kept.
// Block: 256 threads, 4096 values of a row at a time, 16 (32) bytes a thread and access.
#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

namespace {

constexpr int kThreadsOf = 256, kUnroll = 2, kChunk = kThreadsOf * 8 * kUnroll;

// value: act(x); slope: act'(x).
template <Activation A>
__device__ __forceinline__ void activate(float x, float& value, float& slope) {
  if constexpr (A == Activation::kSilu) {
    const float s = __fdividef(1.0f, 1.0f + __expf(-x));
    value = x * s;
    slope = s * (1.0f + x * (1.0f - s));
  } else if constexpr (A == Activation::kGelu) {
    const float cdf = 0.5f * (1.0f + erff(x * 0.70710678118654752440f));
    value = x * cdf;
    slope = cdf + x * 0.39894228040143267794f * __expf(-0.5f * x * x);
  } else if constexpr (A == Activation::kGeluTanh) {
    constexpr float kBeta = 0.79788456080286535588f, kKappa = 0.044715f;
    const float t = tanhf(kBeta * (x + kKappa * x * x * x));
    value = 0.5f * x * (1.0f + t);
    slope = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kBeta * (1.0f + 3.0f * kKappa * x * x);
  } else if constexpr (A == Activation::kRelu) {
    value = x <= 0.0f ? 0.0f : x;  // NaN stays
    slope = x <= 0.0f ? 0.0f : 1.0f;
  } else {
    const float r = x <= 0.0f ? 0.0f : x;
    value = r * r;
    slope = 2.0f * r;
  }
}

template <class T>
__device__ __forceinline__ void round_all(float (&v)[8]) {
  Eight<T>::round(v).widen(v);
}

template <class T, Activation A, bool Gated, bool Backward>
__global__ void __launch_bounds__(kThreadsOf, Backward ? 3 : 4) activation_kernel(
    const __grid_constant__ ActivationArgs args, int32_t chunks_of_row, int32_t chunks) {
  __shared__ uint32_t smem[2][kThreadsOf / 32];
  const T* const g = static_cast<const T*>(args.g);
  const T* const u = static_cast<const T*>(args.u);
  const T* const dh = static_cast<const T*>(args.dh);
  T* const out = static_cast<T*>(args.out);
  T* const du = static_cast<T*>(args.du);
  Largest<T> of_out, of_du;
  for (int32_t n = blockIdx.x; n < chunks; n += gridDim.x) {
    const int64_t row = n / chunks_of_row;
    const int64_t first = static_cast<int64_t>(n - static_cast<int32_t>(row) * chunks_of_row) * kChunk + threadIdx.x * 8;
    Eight<T> gs[kUnroll], us[kUnroll], dhs[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t col = first + k * kThreadsOf * 8;
      if (col >= args.cols) continue;
      gs[k] = Eight<T>::load(g + row * args.g_stride + col);
      if constexpr (Gated) us[k] = Eight<T>::load(u + row * args.u_stride + col);
      if constexpr (Backward) dhs[k] = Eight<T>::load(dh + row * args.dh_stride + col);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t col = first + k * kThreadsOf * 8;
      if (col >= args.cols) continue;
      float x[8], up[8], a[8], slope[8], made[8];
      gs[k].widen(x);
      if constexpr (Gated) us[k].widen(up);
#pragma unroll
      for (int i = 0; i < 8; ++i) activate<A>(x[i], a[i], slope[i]);
      if constexpr (!Backward) {
        if constexpr (Gated) {
          round_all<T>(a);
#pragma unroll
          for (int i = 0; i < 8; ++i) a[i] *= up[i];
        }
        const Eight<T> h = Eight<T>::round(a);
        of_out.take(h);
        h.store(out + row * args.cols + col);
      } else {
        float d[8];
        dhs[k].widen(d);
        if constexpr (Gated) {
          round_all<T>(a);
#pragma unroll
          for (int i = 0; i < 8; ++i) made[i] = d[i] * a[i], d[i] *= up[i];
          const Eight<T> of_up = Eight<T>::round(made);
          of_du.take(of_up);
          of_up.store(du + row * args.cols + col);
          round_all<T>(d);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) made[i] = d[i] * slope[i];
        const Eight<T> dg = Eight<T>::round(made);
        of_out.take(dg);
        dg.store(out + row * args.cols + col);
      }
    }
  }
  raise_amax(args.amax, of_out.widened(), smem[0]);
  if constexpr (Backward && Gated) raise_amax(args.du_amax, of_du.widened(), smem[1]);
}

template <class T, Activation A>
cudaError_t launch_kind(const ActivationArgs& args, bool backward, cudaStream_t stream) {
  const int64_t of_row = (args.cols + kChunk - 1) / kChunk, chunks = args.rows * of_row;
  const dim3 blocks(static_cast<unsigned>(chunks < 132 * 16 ? chunks : 132 * 16));
  const auto start = [&](auto* kernel) {
    kernel<<<blocks, kThreadsOf, 0, stream>>>(args, static_cast<int32_t>(of_row), static_cast<int32_t>(chunks));
    return cudaGetLastError();
  };
  const bool gated = args.u != nullptr;
  if (backward) return gated ? start(activation_kernel<T, A, true, true>) : start(activation_kernel<T, A, false, true>);
  return gated ? start(activation_kernel<T, A, true, false>) : start(activation_kernel<T, A, false, false>);
}

template <class T>
cudaError_t launch_values(const ActivationArgs& args, Activation kind, bool backward, cudaStream_t stream) {
  switch (kind) {
    case Activation::kGelu:
      return launch_kind<T, Activation::kGelu>(args, backward, stream);
    case Activation::kGeluTanh:
      return launch_kind<T, Activation::kGeluTanh>(args, backward, stream);
    case Activation::kSilu:
      return launch_kind<T, Activation::kSilu>(args, backward, stream);
    case Activation::kRelu:
      return launch_kind<T, Activation::kRelu>(args, backward, stream);
    default:
      return launch_kind<T, Activation::kReluSquared>(args, backward, stream);
  }
}

}  // namespace

cudaError_t launch_activation(const ActivationArgs& args, Values values, Activation kind, bool backward, cudaStream_t stream) {
  switch (values) {
    case Values::kBF16:
      return launch_values<__nv_bfloat16>(args, kind, backward, stream);
    case Values::kF16:
      return launch_values<__half>(args, kind, backward, stream);
    default:
      return launch_values<float>(args, kind, backward, stream);
  }
}

}  // namespace fsdp_quant
