// One step of AdamW (coupled == 0) or Adam (keep == 1), fp32 masters p:
//   g = g / grad_scale;  g = fma(p, coupled, g)
//   p = p * keep;  m = fma(first, g - m, m);  v = fma(g * second, g, v * beta2)
//   p = p + (m * minus_step_size) / (sqrt(v) / root_correction + eps)
// Every operation rounds once, to nearest: the bits of optim/fused_adam.py on a CPU. Moments are stored rounded to their
// type, and the update uses what was rounded. A low-precision parameter that is not its master rounded was written by
// something else, and the master follows it.
// Block: 256 threads, 4096 elements of one tensor; reads 8 to 18 bytes an element and writes as many, each once.
#include "optim/adam.h"

#include <cuda_bf16.h>

namespace fsdp_quant {

namespace {

constexpr int kThreads = 256, kVector = 4, kBatch = 2;

template <typename T>
struct alignas(sizeof(T) * kVector) Vector {
  T v[kVector];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

struct Scalars {
  float of[kAdamScalars];
  float grad_scale;
  bool scaled;
};

template <typename Grad, typename Moment, bool kRounded>
__device__ __forceinline__ void update(
    const Scalars& s, float& p, Grad grad, Moment& first, Moment& second, __nv_bfloat16& rounded) {
  float g = to_float(grad), m = to_float(first), v = to_float(second);
  if (kRounded) {
    const float parameter = __bfloat162float(rounded);
    if (!(__bfloat162float(__float2bfloat16_rn(p)) == parameter)) p = parameter;
  }
  if (s.scaled) g = __fdiv_rn(g, s.grad_scale);
  if (s.of[kCoupled] != 0.0f) g = __fadd_rn(g, __fmul_rn(p, s.of[kCoupled]));
  p = __fmul_rn(p, s.of[kKeep]);
  const float change = __fsub_rn(g, m), weight = s.of[kFirst];
  m = weight < 0.5f ? __fadd_rn(m, __fmul_rn(change, weight))
                    : __fsub_rn(g, __fmul_rn(change, __fsub_rn(1.0f, weight)));
  v = __fadd_rn(__fmul_rn(v, s.of[kBeta2]), __fmul_rn(__fmul_rn(g, s.of[kSecond]), g));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.of[kRootCorrection]), s.of[kEps]);
  p = __fadd_rn(p, __fdiv_rn(__fmul_rn(m, s.of[kMinusStepSize]), denominator));
  round_to(first, m), round_to(second, v);
  if (kRounded) rounded = __float2bfloat16_rn(p);
}

template <typename Grad, typename Moment, bool kRounded>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamLaunch launch) {
  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return;
  int low = 0, high = launch.count;  // the tensor of this tile: the last that begins at or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (launch.tensors[middle].first_tile <= static_cast<int>(blockIdx.x) ? low : high) = middle;
  }
  const AdamTensor& t = launch.tensors[low];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - t.first_tile) * kAdamTile;
  const int64_t left = t.numel - begin;
  const int count = left < kAdamTile ? static_cast<int>(left) : kAdamTile;

  Scalars s;
#pragma unroll
  for (int i = 0; i < kAdamScalars; ++i) s.of[i] = launch.scalars[t.row * kAdamScalars + i];
  s.scaled = launch.grad_scale != nullptr;
  s.grad_scale = s.scaled ? *launch.grad_scale : 1.0f;

  float* p = t.master + begin;
  const Grad* g = static_cast<const Grad*>(t.grad) + begin;
  Moment* m = static_cast<Moment*>(t.first) + begin;
  Moment* v = static_cast<Moment*>(t.second) + begin;
  __nv_bfloat16* r = static_cast<__nv_bfloat16*>(t.rounded) + (kRounded ? begin : 0);

  int done = 0;
  if (t.vectors) {
    constexpr int kStride = kThreads * kVector;
    const int whole = count / kVector * kVector;
    for (int at = threadIdx.x * kVector; at < whole; at += kBatch * kStride) {
      Vector<float> ps[kBatch];
      Vector<Grad> gs[kBatch];
      Vector<Moment> ms[kBatch], vs[kBatch];
      Vector<__nv_bfloat16> rs[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
        ps[b] = *reinterpret_cast<const Vector<float>*>(p + i);
        gs[b] = *reinterpret_cast<const Vector<Grad>*>(g + i);
        ms[b] = *reinterpret_cast<const Vector<Moment>*>(m + i);
        vs[b] = *reinterpret_cast<const Vector<Moment>*>(v + i);
        if (kRounded) rs[b] = *reinterpret_cast<const Vector<__nv_bfloat16>*>(r + i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          update<Grad, Moment, kRounded>(s, ps[b].v[j], gs[b].v[j], ms[b].v[j], vs[b].v[j], rs[b].v[j]);
        }
        *reinterpret_cast<Vector<float>*>(p + i) = ps[b];
        *reinterpret_cast<Vector<Moment>*>(m + i) = ms[b];
        *reinterpret_cast<Vector<Moment>*>(v + i) = vs[b];
        if (kRounded) *reinterpret_cast<Vector<__nv_bfloat16>*>(r + i) = rs[b];
      }
    }
    done = whole;
  }
  for (int i = done + threadIdx.x; i < count; i += kThreads) {
    __nv_bfloat16 none;
    update<Grad, Moment, kRounded>(s, p[i], g[i], m[i], v[i], kRounded ? r[i] : none);
  }
}

template <typename Grad, typename Moment>
void launch_as(const AdamLaunch& launch, bool rounded, cudaStream_t stream) {
  if (rounded) {
    adam_kernel<Grad, Moment, true><<<launch.tiles, kThreads, 0, stream>>>(launch);
  } else {
    adam_kernel<Grad, Moment, false><<<launch.tiles, kThreads, 0, stream>>>(launch);
  }
}

}  // namespace

cudaError_t launch_adam(
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, bool rounded, cudaStream_t stream) {
  if (bf16_grad) {
    bf16_moments ? launch_as<__nv_bfloat16, __nv_bfloat16>(launch, rounded, stream)
                 : launch_as<__nv_bfloat16, float>(launch, rounded, stream);
  } else {
    bf16_moments ? launch_as<float, __nv_bfloat16>(launch, rounded, stream)
                 : launch_as<float, float>(launch, rounded, stream);
  }
  return cudaGetLastError();
}

}  // namespace fsdp_quant
