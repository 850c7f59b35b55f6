// SPDX-License-Identifier: Apache-2.0
// h = act(g), or act(g) * u, and its backward, in one pass each, with the amaxes of the outputs.
//
//   forward    a = round(act(g))      h = round(a * u)
//   backward   da = round(dh * u)     dg = round(da * act'(g))     du = round(dh * a)
//
// Computes in fp32 and rounds where the separate operations do, so that only the last bits of exp, erf and tanh differ. The
// backward recomputes `a`; dg and du may alias g and u, since a thread reads its elements before it writes them. Block: 128
// rows of 256 columns; a warp processes every eighth row, a lane 8 columns. Column amaxes over runs, the anchors of wgrad
// operands, are reduced in shared memory and by one atomic per block, row amaxes by one atomic per warp. Tiles are 256
// columns wide so that narrow tensors fill the GPU.
#include "norm/activate.cuh"

namespace fsdp_quant {

namespace {

constexpr int kWarps = 8, kBlock = kWarps * 32, kWidth = 32 * 8, kRows = 128;

// Amaxes of one output: rows at once, columns and the whole at the end of the tile.
template <class T>
struct Collected {
  static constexpr int kWords = 32 * Magnitudes<T>::kWords;  // for the tile's columns
  struct Shared {
    uint32_t words[kWarps][kWords], maxima[kWarps];
  };
  Magnitudes<T> of_cols;

  __device__ __forceinline__ void take(const Eight<T>& e, uint32_t* of_row) {
    of_cols.take(e);
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, Magnitudes<T>::largest(e));
    if ((threadIdx.x & 31) == 0) atomicMax(of_row, Magnitudes<T>::widened(largest));
  }
  // of_run: the tile's columns, `cols` of them. Called by all threads of the block.
  __device__ __forceinline__ void store(float* whole, float* of_run, int32_t cols, Shared& smem) {
    constexpr int kColsAWord = kWidth / kWords;
#pragma unroll
    for (int k = 0; k < Magnitudes<T>::kWords; ++k)
      smem.words[threadIdx.x >> 5][(threadIdx.x & 31) * Magnitudes<T>::kWords + k] = of_cols.w[k];
    raise_amax(whole, of_cols.largest(), smem.maxima);  // synchronizes the block
    const int32_t word = threadIdx.x;
    if (word >= kWords || word * kColsAWord >= cols) return;
    uint32_t largest = smem.words[0][word];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = Magnitudes<T>::larger(largest, smem.words[w][word]);
    Magnitudes<T>::raise(largest, of_run + word * kColsAWord);
  }
};

template <class T, Activation A, bool Gated, bool Backward>
__global__ void __launch_bounds__(kBlock, Eight<T>::kWide ? 3 : 4) activation_kernel(const __grid_constant__ ActivationArgs args) {
  constexpr int kUnroll = Backward ? 2 : 4;
  __shared__ typename Collected<T>::Shared smem[Backward && Gated ? 2 : 1];
  const int32_t left = blockIdx.x * kWidth, lane = threadIdx.x & 31, col = left + lane * 8;
  const bool inside = col < args.cols;  // all threads take part in lane reductions
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  const int32_t rows = static_cast<int32_t>(args.rows - first < kRows ? args.rows - first : kRows);
  const T* const g = static_cast<const T*>(args.g) + first * args.g_stride + col;
  const T* const u = static_cast<const T*>(args.u) + first * args.u_stride + col;
  const T* const dh = static_cast<const T*>(args.dh) + first * args.dh_stride + col;
  T* const out = static_cast<T*>(args.out) + first * args.out_stride + col;
  T* const du = static_cast<T*>(args.du) + first * args.out_stride + col;
  const AmaxLayout layout = {args.rows, args.out_stride};
  const bool halves = args.out_stride != args.cols;
  float* const of_du_amaxes = args.amaxes + (halves ? 0 : layout.size());
  auto* const out_rows = reinterpret_cast<uint32_t*>(args.amaxes + layout.at_rows() + first);
  auto* const du_rows = reinterpret_cast<uint32_t*>(of_du_amaxes + layout.at_rows() + first);
  Collected<T> of_out, of_du;
  for (int32_t first_row = threadIdx.x >> 5; first_row < rows; first_row += kWarps * kUnroll) {
    Eight<T> gs[kUnroll] = {}, us[kUnroll] = {}, dhs[kUnroll] = {};
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int32_t row = first_row + k * kWarps;
      if (!inside || row >= rows) continue;
      gs[k] = Eight<T>::load(g + row * args.g_stride);
      if constexpr (Gated) us[k] = Eight<T>::load(u + row * args.u_stride);
      if constexpr (Backward) dhs[k] = Eight<T>::load(dh + row * args.dh_stride);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int32_t row = first_row + k * kWarps;
      if (row >= rows) break;  // uniform per warp
      const int64_t at = row * args.out_stride;
      float x[8], up[8], a[8], slope[8];
      gs[k].widen(x);
      if constexpr (Gated) us[k].widen(up);
#pragma unroll
      for (int i = 0; i < 8; ++i) activate<T, A>(x[i], a[i], slope[i]);
      if constexpr (!Backward) {
        if constexpr (Gated) {
          round_all<T>(a);
#pragma unroll
          for (int i = 0; i < 8; ++i) a[i] *= up[i];
        }
        const Eight<T> h = Eight<T>::round(a);
        of_out.take(h, out_rows + row);
        if (inside) h.store(out + at);
      } else {
        float d[8];
        dhs[k].widen(d);
        if constexpr (Gated) {
          round_all<T>(a);
#pragma unroll
          for (int i = 0; i < 8; ++i) a[i] *= d[i], d[i] *= up[i];
          const Eight<T> of_up = Eight<T>::round(a);
          of_du.take(of_up, du_rows + row);
          if (inside) of_up.store(du + at);
          round_all<T>(d);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] *= slope[i];
        const Eight<T> dg = Eight<T>::round(d);
        of_out.take(dg, out_rows + row);
        if (inside) dg.store(out + at);
      }
    }
  }
  const int64_t of_run = layout.at_runs() + first / kAmaxRun * args.out_stride + left;
  const int32_t cols = static_cast<int32_t>(args.cols - left);
  of_out.store(args.amaxes, args.amaxes + of_run, cols, smem[0]);
  if constexpr (Backward && Gated) of_du.store(of_du_amaxes, of_du_amaxes + of_run + (halves ? args.cols : 0), cols, smem[1]);
}

template <class T, Activation A>
cudaError_t launch_kind(const ActivationArgs& args, bool backward, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.cols + kWidth - 1) / kWidth), static_cast<unsigned>((args.rows + kRows - 1) / kRows));
  const auto start = [&](auto* kernel) {
    kernel<<<blocks, kBlock, 0, stream>>>(args);
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
