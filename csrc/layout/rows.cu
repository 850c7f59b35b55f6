// SPDX-License-Identifier: Apache-2.0
// Rows of several buffers into one, side by side, and apart again: what expert parallelism sends of codes and scales. A team of
// threads takes a row, kAtOnce units of a thread on their way together.
#include "layout/rows.h"

namespace fsdp_quant {

namespace {

constexpr int kBlock = 256, kAtOnce = 4;

template <class Unit>
__global__ void __launch_bounds__(kBlock) gather_rows_kernel(const __grid_constant__ GatherRows args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int64_t from = args.index == nullptr ? row : __ldg(args.index + row);
  for (int32_t first = threadIdx.x; first < args.units; first += blockDim.x * kAtOnce) {
    Unit values[kAtOnce];
    Unit* to[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int32_t at = first + k * blockDim.x, begin = 0, p = 0;
      if (at >= args.units) break;
      while (at >= args.parts[p].end) begin = args.parts[p++].end;
      at -= begin;
      values[k] = __ldg(static_cast<const Unit*>(args.parts[p].source) + from * args.parts[p].source_pitch + at);
      to[k] = static_cast<Unit*>(args.parts[p].out) + row * args.parts[p].out_pitch + at;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * static_cast<int32_t>(blockDim.x) >= args.units) break;
      *to[k] = values[k];
    }
  }
}

__global__ void __launch_bounds__(kBlock) piece_orders_kernel(const __grid_constant__ PieceOrders args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (row >= args.rows) return;
  int32_t low = 0, high = args.pieces - 1;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (row < __ldg(args.ends + middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t other = row + __ldg(args.shifts + low);
  args.order[row] = other, args.inverse[other] = row;
}

template <class Unit>
void gather(const GatherRows& args, cudaStream_t stream) {
  const int32_t team = ((args.units - 1) / kAtOnce + 32) / 32 * 32, threads = team < kBlock ? team : kBlock;
  const dim3 shape(threads, kBlock / threads);
  gather_rows_kernel<Unit><<<static_cast<unsigned>((args.rows - 1) / shape.y + 1), shape, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_gather_rows(const GatherRows& args, cudaStream_t stream) {
  switch (args.unit) {
    case 16: gather<uint4>(args, stream); break;
    case 8: gather<uint2>(args, stream); break;
    case 4: gather<uint32_t>(args, stream); break;
    case 2: gather<uint16_t>(args, stream); break;
    default: gather<uint8_t>(args, stream);
  }
  return cudaGetLastError();
}

cudaError_t launch_piece_orders(const PieceOrders& args, cudaStream_t stream) {
  piece_orders_kernel<<<static_cast<unsigned>((args.rows - 1) / kBlock + 1), kBlock, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
