// SPDX-License-Identifier: Apache-2.0
// Statistics of one tensor, and selection of kernel instances.
#include "quantize/fp4_block.cuh"
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

namespace {

// Whether only amaxes of the second level are wanted: of bf16 values, of their columns rotated, or of both.
bool wants_rotated_maxima(const Launch<1>& launch) {
  const TensorArgs& t = launch.tensors[0];
  if (launch.input != Input::kBF16 || !t.vector_load || t.cols % 4 != 0 || t.shift != 0) return false;
  if (launch.order != nullptr || launch.sums != nullptr || !launch.spec[1].rotated) return false;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    const EncodingBuffers& b = t.buffers[d];
    if (!s.present()) continue;
    if (!s.two_level() || s.by_line || s.rotated != (d == 1)) return false;
    if (b.amax != nullptr || b.tensor_amax == nullptr || b.tensor_amax_given) return false;
  }
  return true;
}

// A thread holds 16 rows of four columns of the tile: rotation needs no other thread's values. Rounding keeps the order, so the
// largest alone is rounded. Reads 3.9 TB/s, as statistics without rotation do; with shuffles 2.2 (65,536 x 2048 and x 4096, H200).
template <bool Tokens>
__global__ void __launch_bounds__(kThreads, 4) rotated_maxima_kernel(const __grid_constant__ Launch<1> launch) {
  __shared__ uint32_t of_warps[2][kThreads / 32];
  const TensorArgs& t = launch.tensors[0];
  const Tile tile = tile_of(t, blockIdx.x);
  int32_t row0 = tile.row0, rows = t.rows, group = 0;
  if constexpr (Tokens) {
    const int4 source = reinterpret_cast<const int4*>(launch.sources)[tile.row0 / kTile];  // first row, rows, group
    if (source.y == 0) return;
    row0 = source.x, rows = source.x + source.y, group = source.z;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t row = row0 + warp * kFp4Block, col = tile.col0 + lane * 4;
  const char* const from = static_cast<const char*>(t.x) + (row * t.row_stride + col) * 2;
  uint2 v[kFp4Block];
#pragma unroll
  for (int i = 0; i < kFp4Block; ++i)
    v[i] = row + i < rows && col < t.cols ? ptx::ld_streaming_8(from + i * t.row_stride * 2) : make_uint2(0, 0);
  uint32_t pairs = 0;
  float rotated = 0;
#pragma unroll
  for (int i = 0; i < kFp4Block; ++i)
    pairs = BF16::larger(pairs, BF16::larger(BF16::magnitude(v[i].x), BF16::magnitude(v[i].y)));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float y[kFp4Block];
    butterflies([&](int e) { return BF16::value(&v[e].x, j); }, y);
#pragma unroll
    for (int e = 0; e < kFp4Block; ++e) rotated = ptx::larger(rotated, fabsf(y[e]));
  }
  const uint32_t plain = max(pairs & 0xFFFF0000u, pairs << 16);
  const uint32_t rounded = static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(__fmul_rn(rotated, 0.25f)))) << 16;
  const uint32_t of_warp[2] = {__reduce_max_sync(0xFFFFFFFFu, plain), __reduce_max_sync(0xFFFFFFFFu, rounded)};
  if (lane == 0) of_warps[0][warp] = of_warp[0], of_warps[1][warp] = of_warp[1];
  __syncthreads();
  const int d = threadIdx.x;
  if (d > 1 || !launch.spec[d].present()) return;
  uint32_t most = 0;
  for (const uint32_t one : of_warps[d]) most = max(most, one);
  atomic_max(t.buffers[d].tensor_amax + group, __uint_as_float(most));
}

}  // namespace

cudaError_t launch_statistics(const Launch<1>& launch, cudaStream_t stream) {
  if (is_wide(launch.input)) return launch_instance<LoadF32, RotatedStatistics, RotatedStatistics, 1, 2>(launch, stream);
  if (wants_rotated_maxima(launch)) {
    auto* const kernel = launch.sources != nullptr ? rotated_maxima_kernel<true> : rotated_maxima_kernel<false>;
    kernel<<<launch.tiles, kThreads, 0, stream>>>(launch);
    return cudaGetLastError();
  }
  if (launch.spec[0].rotated || launch.spec[1].rotated)
    return launch.sources != nullptr ? launch_tokens<RotatedStatistics, RotatedStatistics>(launch, stream)
                                     : launch_instance<LoadBF16, RotatedStatistics, RotatedStatistics, 1, 3>(launch, stream);
  if (launch.sources != nullptr) return launch_tokens<Statistics, Statistics, 4>(launch, stream);
  return launch_instance<LoadBF16, Statistics, Statistics, 1, 4>(launch, stream);
}

cudaError_t launch_quantize(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.phases == kStatistics) return launch_statistics(launch, stream);
  if (launch.up != nullptr && launch.sources != nullptr) return launch_gated_tokens(launch, stream);
  const EncodingSpec& row = launch.spec[0];
  const EncodingSpec& col = launch.spec[1];
  const EncodingBuffers(&buffers)[2] = launch.tensors[0].buffers;
  if (launch.in_tile || buffers[0].anchor != nullptr || buffers[1].anchor != nullptr) return launch_anchored(launch, stream);
  if (fits_fp4(launch)) return launch_fp4(launch, stream);
  if (row.extended() || col.extended()) return launch_extended(launch, stream);
  if (row.six_bit() || col.six_bit()) return launch_fp6(launch, stream);
  if (is_wide(launch.input)) return launch_fp32_input(launch, stream);
  if (launch.up != nullptr) return launch_gated(launch, stream);
  if (supports_delayed(launch)) return launch_delayed(launch, stream);
  const auto asks = [&](int d) { return launch.spec[d].present() && needs_full(launch.spec[d], buffers[d]); };
  const bool full =
      launch.barrier != nullptr || (launch.sources == nullptr && (asks(0) || asks(1)));  // grouped: see supports_sources
  if (full) return row.four_bit() || col.four_bit() ? launch_full4(launch, stream) : launch_full8(launch, stream);
  return known_block(launch) != 0 ? launch_blocks(launch, stream) : launch_plain(launch, stream);
}

}  // namespace fsdp_quant
