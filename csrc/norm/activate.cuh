// SPDX-License-Identifier: Apache-2.0
// Activations of fp32 values, for activation and quantize kernels.
#pragma once

#include "device/values.cuh"
#include "norm/norm.h"

namespace fsdp_quant {

// Normal CDF, within 2^-23; sets e = exp(-x^2 / 2), the density up to a factor. Source: Abramowitz and Stegun, 7.1.26. One
// reciprocal, one exponential, which the slope needs too, and a polynomial.
__device__ __forceinline__ float normal_cdf(float x, float& e) {
  e = ptx::exp2_approx(x * x * -0.72134752044448170368f);
  const float t = ptx::reciprocal_approx(fmaf(fabsf(x), 0.23164190f, 1.0f));
  const float series = fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.530702715f, -0.726576015f), 0.710706870f), -0.142248368f), 0.127414796f);
  const float tail = series * t * e;
  return x < 0.0f ? tail : 1.0f - tail;
}

// value: act(x); slope: act'(x). Skips terms that rounding to T removes.
template <class T, Activation A>
__device__ __forceinline__ void activate(float x, float& value, float& slope) {
  if constexpr (A == Activation::kSilu) {
    const float s = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * -1.44269504088896340736f));
    value = x * s;
    slope = s * (1.0f + x * (1.0f - s));
  } else if constexpr (A == Activation::kGelu) {
    float e, cdf;
    if constexpr (Eight<T>::kWide)
      cdf = 0.5f * (1.0f + erff(x * 0.70710678118654752440f)), e = __expf(-0.5f * x * x);
    else
      cdf = normal_cdf(x, e);
    value = x * cdf;
    slope = cdf + x * 0.39894228040143267794f * e;
  } else if constexpr (A == Activation::kGeluTanh) {
    constexpr float kBeta = 0.79788456080286535588f, kKappa = 0.044715f;
    const float t = tanhf(kBeta * (x + kKappa * x * x * x));
    value = 0.5f * x * (1.0f + t);
    slope = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kBeta * (1.0f + 3.0f * kKappa * x * x);
  } else if constexpr (A == Activation::kRelu) {
    value = x <= 0.0f ? 0.0f : x;  // NaN propagates
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
