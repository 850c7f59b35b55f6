// SPDX-License-Identifier: Apache-2.0
// Multi-tensor Adam; see optim/update.cuh. Block: 256 threads, 4096 elements of one tensor; reads and writes each of the 8 to
// 18 bytes per element once. With 8-bit moments, a warp processes blocks of 256 elements and computes their scales in
// registers.
#include "device/numeric.cuh"
#include "device/ptx.cuh"
#include "optim/update.cuh"

namespace fsdp_quant {

namespace {

constexpr int kAdamThreads = 256, kVector = 4, kBatch = 2;

template <typename Grad, typename Moment, AdamMaster kMaster>
__global__ void __launch_bounds__(kAdamThreads) adam_kernel(const __grid_constant__ AdamLaunch launch) {
  using Stored = StoredMaster<kMaster>;
  if (is_skipped(launch.step)) return;
  const AdamTensor& t = launch.tensors[index_of_tile(launch, blockIdx.x)];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - t.first_tile) * kAdamTile;
  const int64_t left = t.numel - begin;
  const int count = left < kAdamTile ? static_cast<int>(left) : kAdamTile;

  const AdamScalars s(launch.step, t.row);

  Stored* p = static_cast<Stored*>(t.master) + begin;
  const Grad* g = static_cast<const Grad*>(t.grad) + begin;
  Moment* m = static_cast<Moment*>(t.first) + begin;
  Moment* v = static_cast<Moment*>(t.second) + begin;
  __nv_bfloat16* r = static_cast<__nv_bfloat16*>(t.rounded) + (kMaster != kAlone ? begin : 0);

  int done = 0;
  if (t.vectors) {
    constexpr int kStride = kAdamThreads * kVector;
    const int whole = count / kVector * kVector;
    for (int at = threadIdx.x * kVector; at < whole; at += kBatch * kStride) {
      Four<Stored> ps[kBatch];
      Four<Grad> gs[kBatch];
      Four<Moment> ms[kBatch], vs[kBatch];
      Four<__nv_bfloat16> rs[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
        ps[b] = *reinterpret_cast<const Four<Stored>*>(p + i);
        gs[b] = *reinterpret_cast<const Four<Grad>*>(g + i);
        ms[b] = *reinterpret_cast<const Four<Moment>*>(m + i);
        vs[b] = *reinterpret_cast<const Four<Moment>*>(v + i);
        if (kMaster != kAlone) rs[b] = *reinterpret_cast<const Four<__nv_bfloat16>*>(r + i);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = at + b * kStride;
        if (i >= whole) break;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          adam_update<Grad, Moment, kMaster>(s, ps[b].v[j], gs[b].v[j], ms[b].v[j], vs[b].v[j], rs[b].v[j]);
        }
        *reinterpret_cast<Four<Stored>*>(p + i) = ps[b];
        *reinterpret_cast<Four<Moment>*>(m + i) = ms[b];
        *reinterpret_cast<Four<Moment>*>(v + i) = vs[b];
        if (kMaster != kAlone) *reinterpret_cast<Four<__nv_bfloat16>*>(r + i) = rs[b];
      }
    }
    done = whole;
  }
  for (int i = done + threadIdx.x; i < count; i += kAdamThreads) {
    __nv_bfloat16 none;
    adam_update<Grad, Moment, kMaster>(s, p[i], g[i], m[i], v[i], kMaster != kAlone ? r[i] : none);
  }
}

// Encode a warp's block of moments: lane l has the elements 4 l + 128 k + j in x[k][j], zeros beyond the end. scale = max |x|
// / 256, 0 if subnormal; code = e4m3(x / scale). Writes the scale. root: nonzero values get nonzero codes.
__device__ __forceinline__ void encode_block(const float (&x)[2][4], bool root, Four<uint8_t> (&codes)[2], float* scale_at) {
  uint32_t largest = 0;  // compared as bits: NaN is largest
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(fabsf(x[i / 4][i % 4])));
  const float amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, largest));
  float scale = __fmul_rn(amax, 1.0f / 256);
  if (scale < 1.17549435e-38f) scale = 0.0f;
  const float inverse = scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, scale);
  if (threadIdx.x % 32 == 0) *scale_at = scale;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const float a = x[k][j], b = x[k][j + 1];
      const uint32_t pair = ptx::cvt_e4m3x2(__fmul_rn(b, inverse), __fmul_rn(a, inverse));
      uint32_t of_a = pair & 0xFF, of_b = pair >> 8 & 0xFF;
      if (root && scale != 0.0f) {
        if (a > 0.0f && of_a == 0) of_a = 1;
        if (b > 0.0f && of_b == 0) of_b = 1;
      }
      codes[k].v[j] = static_cast<uint8_t>(of_a), codes[k].v[j + 1] = static_cast<uint8_t>(of_b);
    }
  }
}

// Moments are e4m3 codes (second moment: of its square root) with one scale per 256 elements of a row
// (fsdp_quant/optim/compact.py).
template <typename Grad, AdamMaster kMaster>
__global__ void __launch_bounds__(kAdamThreads) adam_codes_kernel(const __grid_constant__ AdamLaunch launch) {
  using Stored = StoredMaster<kMaster>;
  static_assert(kAdamThreads == 32 * kMomentBlocksOfTile, "one warp per block");
  if (is_skipped(launch.step)) return;
  const AdamTensor& t = launch.tensors[index_of_tile(launch, blockIdx.x)];
  const int32_t per_row = (t.cols + kMomentBlock - 1) / kMomentBlock;
  const int64_t block = static_cast<int64_t>(blockIdx.x - t.first_tile) * kMomentBlocksOfTile + threadIdx.x / 32;
  const int64_t row = block / per_row;
  const int32_t col = static_cast<int32_t>(block % per_row) * kMomentBlock;
  const int64_t begin = row * t.cols + col;
  if (begin >= t.numel) return;
  const int32_t count = min(kMomentBlock, t.cols - col);

  const AdamScalars s(launch.step, t.row);
  Stored* p = static_cast<Stored*>(t.master) + begin;
  const Grad* g = static_cast<const Grad*>(t.grad) + begin;
  uint8_t *m = static_cast<uint8_t*>(t.first) + begin, *v = static_cast<uint8_t*>(t.second) + begin;
  __nv_bfloat16* r = static_cast<__nv_bfloat16*>(t.rounded) + (kMaster != kAlone ? begin : 0);
  const float first_scale = t.first_scale[block], second_scale = t.second_scale[block];

  Four<Stored> ps[2];
  Four<Grad> gs[2];
  Four<uint8_t> ms[2], vs[2];
  Four<__nv_bfloat16> rs[2];
  auto each = [&](auto vectors, auto elements) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = threadIdx.x % 32 * 4 + 128 * k;
      if (t.vectors && i + 4 <= count) {
        vectors(k, i);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (i + j < count) elements(k, j, i + j);
        }
      }
    }
  };
  each(
      [&](int k, int i) {
        ps[k] = *reinterpret_cast<const Four<Stored>*>(p + i);
        gs[k] = *reinterpret_cast<const Four<Grad>*>(g + i);
        ms[k] = *reinterpret_cast<const Four<uint8_t>*>(m + i);
        vs[k] = *reinterpret_cast<const Four<uint8_t>*>(v + i);
        if (kMaster != kAlone) rs[k] = *reinterpret_cast<const Four<__nv_bfloat16>*>(r + i);
      },
      [&](int k, int j, int i) {
        ps[k].v[j] = p[i], gs[k].v[j] = g[i], ms[k].v[j] = m[i], vs[k].v[j] = v[i];
        if (kMaster != kAlone) rs[k].v[j] = r[i];
      });
  float first[2][4] = {}, root[2][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (static_cast<int>(threadIdx.x % 32) * 4 + 128 * k + j >= count) continue;
      const float deviation = __fmul_rn(e4m3_value(vs[k].v[j]), second_scale);
      float second = __fmul_rn(deviation, deviation);
      first[k][j] = __fmul_rn(e4m3_value(ms[k].v[j]), first_scale);
      adam_update<Grad, float, kMaster>(s, ps[k].v[j], gs[k].v[j], first[k][j], second, rs[k].v[j]);
      root[k][j] = __fsqrt_rn(second);
    }
  }
  encode_block(first, false, ms, t.first_scale + block);
  encode_block(root, true, vs, t.second_scale + block);
  each(
      [&](int k, int i) {
        *reinterpret_cast<Four<Stored>*>(p + i) = ps[k];
        *reinterpret_cast<Four<uint8_t>*>(m + i) = ms[k];
        *reinterpret_cast<Four<uint8_t>*>(v + i) = vs[k];
        if (kMaster != kAlone) *reinterpret_cast<Four<__nv_bfloat16>*>(r + i) = rs[k];
      },
      [&](int k, int j, int i) {
        p[i] = ps[k].v[j], m[i] = ms[k].v[j], v[i] = vs[k].v[j];
        if (kMaster != kAlone) r[i] = rs[k].v[j];
      });
}

__global__ void __launch_bounds__(kAdamThreads) count_kernel(const __grid_constant__ AdamCount c) {
  const int i = blockIdx.x * kAdamThreads + threadIdx.x;
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
void launch_as(const AdamLaunch& launch, AdamMaster master, cudaStream_t stream) {
  switch (master) {
    case kAlone: adam_kernel<Grad, Moment, kAlone><<<launch.tiles, kAdamThreads, 0, stream>>>(launch); break;
    case kRounded: adam_kernel<Grad, Moment, kRounded><<<launch.tiles, kAdamThreads, 0, stream>>>(launch); break;
    case kRemainder: adam_kernel<Grad, Moment, kRemainder><<<launch.tiles, kAdamThreads, 0, stream>>>(launch);
  }
}

template <typename Grad>
void launch_codes_as(const AdamLaunch& launch, AdamMaster master, cudaStream_t stream) {
  switch (master) {
    case kAlone: adam_codes_kernel<Grad, kAlone><<<launch.tiles, kAdamThreads, 0, stream>>>(launch); break;
    case kRounded: adam_codes_kernel<Grad, kRounded><<<launch.tiles, kAdamThreads, 0, stream>>>(launch); break;
    case kRemainder: adam_codes_kernel<Grad, kRemainder><<<launch.tiles, kAdamThreads, 0, stream>>>(launch);
  }
}

}  // namespace

cudaError_t launch_adam_count(const AdamCount& count, cudaStream_t stream) {
  count_kernel<<<(count.count + kAdamThreads - 1) / kAdamThreads, kAdamThreads, 0, stream>>>(count);
  return cudaGetLastError();
}

cudaError_t launch_adam(
    const AdamLaunch& launch, bool bf16_grad, bool bf16_moments, AdamMaster master, cudaStream_t stream) {
  if (bf16_grad) {
    bf16_moments ? launch_as<__nv_bfloat16, __nv_bfloat16>(launch, master, stream)
                 : launch_as<__nv_bfloat16, float>(launch, master, stream);
  } else {
    bf16_moments ? launch_as<float, __nv_bfloat16>(launch, master, stream)
                 : launch_as<float, float>(launch, master, stream);
  }
  return cudaGetLastError();
}

cudaError_t launch_adam_codes(const AdamLaunch& launch, bool bf16_grad, AdamMaster master, cudaStream_t stream) {
  bf16_grad ? launch_codes_as<__nv_bfloat16>(launch, master, stream) : launch_codes_as<float>(launch, master, stream);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
