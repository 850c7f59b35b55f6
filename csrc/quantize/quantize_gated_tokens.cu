// SPDX-License-Identifier: Apache-2.0
// Grouped tokens whose values are SwiGLU or its gradient: both directions, scales from the tile, rounding to nearest.
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

namespace {

constexpr int kAhead = 4;  // rows that are copied before they are read: three blocks of a processor have room for them
using Copies = uint4[kAhead][kThreads];
static_assert(sizeof(Copies) == sizeof(Smem::codes));

// Eights of columns, each of one thread: no barriers.
struct GradientSmem {
  uint4 g[8][kThreads];  // then du
  Copies dh;
};

// dg (to p) and du (to smem.g) of 8 columns of u, from `col`, and `rows` rows from `row0`; rows behind them repeat the last. u is
// copied to `us`. sums: of h * dh of each row.
__device__ __forceinline__ void load_gradient(RegisterTile<BF16>& p, GradientSmem& smem, Copies& us, float (&sums)[8],
                                              const Launch<1>& launch, int32_t row0, int32_t col, int32_t rows) {
  using Values = Eight<__nv_bfloat16>;
  const int n = threadIdx.x;
  const TensorArgs& t = launch.tensors[0];
  const auto* const g = static_cast<const __nv_bfloat16*>(t.x) + row0 * t.row_stride + col;
  const auto* const dh = static_cast<const __nv_bfloat16*>(launch.up) + row0 * launch.up_stride + col;
  const auto row = [&](int k) { return min(k, rows - 1); };
  const auto copy = [&](int k) {
    ptx::copy_async_16(&us[k % kAhead][n], g + t.cols / 2 + row(k) * t.row_stride);
    ptx::copy_async_16(&smem.dh[k % kAhead][n], dh + row(k) * launch.up_stride);
  };
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    ptx::copy_async_16(&smem.g[k][n], g + row(k) * t.row_stride);
    if (k < kAhead) copy(k);
  }
#pragma unroll 1  // unrolled, parts of dg would wait in more registers than there are
  for (int first = 0; first < 8; first += kAhead) {
    ptx::copy_async_wait();
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      Values of_g, of_u, of_h;
      of_g.set(0, smem.g[first + k][n]), of_u.set(0, us[k][n]), of_h.set(0, smem.dh[k][n]);
      if (first == 0) copy(kAhead + k);
      float a[8], slope[8], up[8], d[8], along = 0.0f;
      of_g.widen(a), of_u.widen(up), of_h.widen(d);
      const float weight = __ldg(launch.row_weights + row0 + row(first + k));
#pragma unroll
      for (int i = 0; i < 8; ++i) activate<__nv_bfloat16, Activation::kSilu>(a[i], a[i], slope[i]);
      round_all<__nv_bfloat16>(a);
#pragma unroll
      for (int i = 0; i < 8; ++i) along = fmaf(__bfloat162float(__float2bfloat16_rn(a[i] * up[i])), d[i], along), d[i] *= weight;
      round_all<__nv_bfloat16>(d);
#pragma unroll
      for (int i = 0; i < 8; ++i) up[i] *= d[i];
      round_all<__nv_bfloat16>(up);
#pragma unroll
      for (int i = 0; i < 8; ++i) up[i] *= slope[i], d[i] *= a[i];
      const Values dg = Values::round(up), du = Values::round(d);
#pragma unroll
      for (int i = 0; i < 4; ++i) p.w[k][i] = p.w[kAhead + k][i], p.w[kAhead + k][i] = dg.w[i];
      smem.g[first + k][n] = make_uint4(du.w[0], du.w[1], du.w[2], du.w[3]);
      sums[first + k] = along;
    }
  }
}

// The gradient [dg, du] of [g, u] = x by the gradient `up` of h = silu(g) * u times the rows' weights, rounded as the separate
// operations, and the weights' own, of each column of tiles: halves of columns in eights. A block reads its place of g, u and dh
// once, all rows ahead of their use (loads to registers are issued one row at a time, as registers are few), and encodes dg, then
// du. If halves are no whole tiles, then `tile_cols` covers both, and a block encodes one tile, whose columns are of either half.
template <class P>
__global__ void __launch_bounds__(kThreads, 3) swiglu_gradient_kernel(const __grid_constant__ Launch<1> launch) {
  __shared__ Smem smem;
  extern __shared__ uint4 dynamic_smem[];
  auto& of_gradient = *reinterpret_cast<GradientSmem*>(dynamic_smem);
  Position at;
  const TensorArgs& t = launch.tensors[0];
  Tile tile = tile_of(t, blockIdx.x), row_tile = tile;
  const int4 source = reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows
  if (source.y == 0) return;
  row_tile.row0 = source.x;
  EncodingBuffers row_buffers = t.buffers[0];
  const EncodingBuffers& col_buffers = t.buffers[1];
  row_buffers.lines = row_buffers.stored.lines = source.x + source.y;

  const int32_t half = t.cols / 2, col0 = tile.col0 + at.col(), lines = source.y - at.row(), rows = col0 < t.cols ? lines : 0;
  RegisterTile<BF16> p = {};
  auto& sums = reinterpret_cast<float(&)[kThreads][8]>(static_cast<TileSmem&>(smem));
  static_assert(sizeof(sums) <= sizeof(TileSmem));
  if (rows > 0) {
    load_gradient(p, of_gradient, reinterpret_cast<Copies&>(smem.codes), sums[threadIdx.x], launch, source.x + at.row(),
                  col0 < half ? col0 : col0 - half, rows);
  }
  if (rows < 8) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k >= rows) p.w[k][0] = p.w[k][1] = p.w[k][2] = p.w[k][3] = 0, of_gradient.g[k][threadIdx.x] = {};
    }
  }
  __syncwarp();
  if (tile.col0 < half && at.chunk < min(lines, 8)) {
    const float(*const first)[8] = sums + (threadIdx.x - at.chunk);
    float sum = 0.0f;
    for (int i = 0; i < 16 && tile.col0 + 8 * i < half; ++i) sum += first[i][at.chunk];
    launch.row_dots[tile.col0 / kTile * static_cast<int64_t>(t.rows) + source.x + at.row() + at.chunk] = sum;
  }
  __syncthreads();
  const auto take_du = [&] {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint4 v = of_gradient.g[k][threadIdx.x];
      p.w[k][0] = v.x, p.w[k][1] = v.y, p.w[k][2] = v.z, p.w[k][3] = v.w;
    }
  };
  if (col0 >= half) take_du();
  const int32_t last = t.tile_cols * kTile == half ? tile.col0 + half : tile.col0;
  while (true) {
    // What follows from these, or from p in both directions, would be computed early and take the registers.
    ptx::keep(at.warp), ptx::keep(at.half), ptx::keep(at.chunk), ptx::keep(tile.row0), ptx::keep(row_tile.row0);
    encode<false, P>(p, launch.spec[0], row_buffers, row_tile, nullptr, nullptr, smem, at);
#pragma unroll
    for (int k = 0; k < 8; ++k) ptx::keep(p.w[k][0]), ptx::keep(p.w[k][1]), ptx::keep(p.w[k][2]), ptx::keep(p.w[k][3]);
    encode<true, P>(p, launch.spec[1], col_buffers, tile, nullptr, nullptr, smem, at);  // writes codes behind a barrier
    __syncthreads();
    if (launch.spec[1].transposed)
      flush_transposed<false>(col_buffers.data, col_buffers.vector_store, tile.row0, tile.col0, col_buffers.length, t.cols,
                              smem.codes);
    if (tile.col0 == last) return;
    tile.col0 += half, row_tile.col0 += half;
    take_du();
  }
}

template <class P>
cudaError_t launch_gradient(const Launch<1>& launch, cudaStream_t stream) {
  auto* const kernel = swiglu_gradient_kernel<P>;
  constexpr int kBytes = sizeof(GradientSmem);
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<launch.tiles, kThreads, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gated_tokens(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.gradient)
    return launch.in_tile ? launch_gradient<AnchoredInTile8>(launch, stream) : launch_gradient<Plain8x128>(launch, stream);
  return launch.in_tile ? launch_instance<LoadSwiGLU, AnchoredInTile8, OfCodesInTile8, 1, 3>(launch, stream)
                        : launch_instance<LoadSwiGLU, Plain8x128, Plain8x128, 1, 3>(launch, stream);
}

}  // namespace fsdp_quant
