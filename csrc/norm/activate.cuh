// Activations of fp32 values, for the kernels that write them and those that quantize them at once.
#pragma once

#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

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

}  // namespace fsdp_quant
