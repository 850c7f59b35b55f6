// SPDX-License-Identifier: Apache-2.0
// Adam of many masters, and their codes (or their statistics) in the same read: a tile is updated row by row as it is
// loaded, and stays in registers as bf16.
//
// 16 x 4096^2, H200, over the copy of Adam's 28 bytes alone: codes of both directions .84 (mxfp8),
// .90 (128x128); statistics cost nothing (.97 with and without), and with the encoding after them
// .80 in all (fp8_tensor, nvfp4 16x16). Three blocks of one row each, with spills: .80 and .86;
// blocks known at compile time: one to three points more, not taken.
#include "optim/update.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

template <typename Grad, typename Moment>
struct LoadAdam {
  using Value = BF16;

  // Two neighbour lanes share 16 columns, four by four in turn, so that every access is of whole sectors.
  __device__ static __forceinline__ void load(
      RegisterTile<BF16>& p, const AdamQuantizeLaunch& launch, int which, int32_t row0, int32_t col0) {
    const TensorArgs& t = launch.tensors[which];
    const AdamSource& source = launch.source[which];
    const AdamScalars s(launch.step, source.row);
    const bool skipped = is_skipped(launch.step), odd = col0 & 8;
    const int32_t start = (col0 & ~15) + (odd ? 4 : 0);
    constexpr int kRows = 2;  // on their way at once
#pragma unroll 1
    for (int first = 0; first < 8; first += kRows) {  // a short loop: straight code starves on instruction fetch
#pragma unroll
      for (int i = 0; i + kRows < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) p.w[i][j] = p.w[i + kRows][j];
      }
      Four<float> ps[kRows][2];
      Four<Grad> gs[kRows][2];
      Four<Moment> ms[kRows][2], vs[kRows][2];
      auto each = [&](auto vectors, auto elements) {
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const int32_t row = row0 + first + k, col = start + 8 * q;
            const int64_t at = static_cast<int64_t>(row) * t.cols + col;
            const bool inside = row >= 0 && row < t.rows;
            if (inside && source.vectors && col + 4 <= t.cols) {
              vectors(k, q, at);
            } else {
#pragma unroll
              for (int j = 0; j < 4; ++j) elements(k, q, j, at + j, inside && col + j < t.cols);
            }
          }
        }
      };
      float* x = static_cast<float*>(const_cast<void*>(t.x));
      const Grad* g = static_cast<const Grad*>(source.grad);
      Moment *m = static_cast<Moment*>(source.first), *v = static_cast<Moment*>(source.second);
      each(
          [&](int k, int q, int64_t at) {
            ps[k][q] = *reinterpret_cast<const Four<float>*>(x + at);
            if (skipped) return;
            gs[k][q] = *reinterpret_cast<const Four<Grad>*>(g + at);
            ms[k][q] = *reinterpret_cast<const Four<Moment>*>(m + at);
            vs[k][q] = *reinterpret_cast<const Four<Moment>*>(v + at);
          },
          [&](int k, int q, int j, int64_t at, bool exists) {
            ps[k][q].v[j] = exists ? x[at] : 0.0f;
            if (!exists || skipped) return;
            gs[k][q].v[j] = g[at], ms[k][q].v[j] = m[at], vs[k][q].v[j] = v[at];
          });
      auto update = [&](int k, int q, int j) {
        __nv_bfloat16 none;
        adam_update<Grad, Moment, kAlone>(s, ps[k][q].v[j], gs[k][q].v[j], ms[k][q].v[j], vs[k][q].v[j], none);
      };
      if (!skipped) {
        each(
            [&](int k, int q, int64_t at) {
#pragma unroll
              for (int j = 0; j < 4; ++j) update(k, q, j);
              *reinterpret_cast<Four<float>*>(x + at) = ps[k][q];
              *reinterpret_cast<Four<Moment>*>(m + at) = ms[k][q];
              *reinterpret_cast<Four<Moment>*>(v + at) = vs[k][q];
            },
            [&](int k, int q, int j, int64_t at, bool exists) {
              if (!exists) return;
              update(k, q, j);
              x[at] = ps[k][q].v[j], m[at] = ms[k][q].v[j], v[at] = vs[k][q].v[j];
            });
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        uint32_t words[2][2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(ps[k][q].v[2 * j], ps[k][q].v[2 * j + 1]);
            words[q][j] = *reinterpret_cast<const uint32_t*>(&pair);
          }
        }
        uint32_t(&w)[4] = p.w[8 - kRows + k];  // moved up by those that follow
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // a lane keeps the four next to its own of the other's
          const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? words[0][j] : words[1][j], 1);
          w[j] = odd ? other : words[0][j], w[2 + j] = odd ? words[1][j] : other;
        }
      }
    }
  }
};

template <typename Grad, typename Moment>
struct LaunchOf<LoadAdam<Grad, Moment>, 1> {
  static constexpr bool kLoads = true;
};
template <typename Grad, typename Moment>
struct LaunchOf<LoadAdam<Grad, Moment>, kAdamQuantizeCapacity> {
  using type = AdamQuantizeLaunch;
};

namespace {

template <typename Grad, typename Moment>
cudaError_t launch_as(const AdamQuantizeLaunch& launch, cudaStream_t stream) {
  using In = LoadAdam<Grad, Moment>;
  constexpr int kMany = kAdamQuantizeCapacity;
  if (launch.phases == kStatistics) return launch_instance<In, Statistics, Statistics, kMany, 2>(launch, stream);
  return launch_instance<In, Plain8, Plain8, kMany, 2>(launch, stream);
}

}  // namespace

cudaError_t launch_adam_quantize(const AdamQuantizeLaunch& launch, bool bf16_grad, bool bf16_moments, cudaStream_t stream) {
  if (bf16_grad) {
    return bf16_moments ? launch_as<__nv_bfloat16, __nv_bfloat16>(launch, stream)
                        : launch_as<__nv_bfloat16, float>(launch, stream);
  }
  return bf16_moments ? launch_as<float, __nv_bfloat16>(launch, stream) : launch_as<float, float>(launch, stream);
}

}  // namespace fsdp_quant
