// Adam of many tensors in one launch; see optim/update.cuh.
// Block: 256 threads, 4096 elements of one tensor; reads 8 to 18 bytes an element and writes as many, each once.
#include "optim/update.cuh"

namespace fsdp_quant {

namespace {

constexpr int kThreads = 256, kVector = 4, kBatch = 2;

template <typename Grad, typename Moment, bool kRounded>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamLaunch launch) {
  if (is_skipped(launch.step)) return;
  int low = 0, high = launch.count;  // the tensor of this tile: the last that begins at or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (launch.tensors[middle].first_tile <= static_cast<int>(blockIdx.x) ? low : high) = middle;
  }
  const AdamTensor& t = launch.tensors[low];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - t.first_tile) * kAdamTile;
  const int64_t left = t.numel - begin;
  const int count = left < kAdamTile ? static_cast<int>(left) : kAdamTile;

  const AdamScalars s(launch.step, t.row);

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
      Four<float> ps[kBatch];
      Four<Grad> gs[kBatch];
      Four<Moment> ms[kBatch], vs[kBatch];
      Four<__nv_bfloat16> rs[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
        ps[b] = *reinterpret_cast<const Four<float>*>(p + i);
        gs[b] = *reinterpret_cast<const Four<Grad>*>(g + i);
        ms[b] = *reinterpret_cast<const Four<Moment>*>(m + i);
        vs[b] = *reinterpret_cast<const Four<Moment>*>(v + i);
        if (kRounded) rs[b] = *reinterpret_cast<const Four<__nv_bfloat16>*>(r + i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          adam_update<Grad, Moment, kRounded>(s, ps[b].v[j], gs[b].v[j], ms[b].v[j], vs[b].v[j], rs[b].v[j]);
        }
        *reinterpret_cast<Four<float>*>(p + i) = ps[b];
        *reinterpret_cast<Four<Moment>*>(m + i) = ms[b];
        *reinterpret_cast<Four<Moment>*>(v + i) = vs[b];
        if (kRounded) *reinterpret_cast<Four<__nv_bfloat16>*>(r + i) = rs[b];
      }
    }
    done = whole;
  }
  for (int i = done + threadIdx.x; i < count; i += kThreads) {
    __nv_bfloat16 none;
    adam_update<Grad, Moment, kRounded>(s, p[i], g[i], m[i], v[i], kRounded ? r[i] : none);
  }
}

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ AdamCount c) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= c.count) return;
  const float step = *c.steps[i] + (c.found_inf == nullptr ? 1.0f : __fsub_rn(1.0f, *c.found_inf));
  *c.steps[i] = step;
  const double lr = c.lr == nullptr ? c.learning_rate : *c.lr;
  const double bias1 = pow(c.beta1, static_cast<double>(step)), bias2 = pow(c.beta2, static_cast<double>(step));
  float* s = c.scalars + i * kAdamScalars;
  s[kKeep] = static_cast<float>(c.decoupled ? __dsub_rn(1.0, __dmul_rn(lr, c.decay)) : 1.0);
  s[kCoupled] = static_cast<float>(c.decoupled ? 0.0 : c.decay);
  s[kFirst] = static_cast<float>(1.0 - c.beta1);
  s[kBeta2] = static_cast<float>(c.beta2);
  s[kSecond] = static_cast<float>(1.0 - c.beta2);
  s[kRootCorrection] = static_cast<float>(sqrt(__dsub_rn(1.0, bias2)));
  s[kMinusStepSize] = static_cast<float>(-__ddiv_rn(lr, __dsub_rn(1.0, bias1)));
  s[kEps] = static_cast<float>(c.eps);
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

cudaError_t launch_adam_count(const AdamCount& count, cudaStream_t stream) {
  count_kernel<<<(count.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(count);
  return cudaGetLastError();
}

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
