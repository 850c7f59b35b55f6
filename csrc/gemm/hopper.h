// Products of 8-bit operands by our own kernels for sm_90. Plain data: needs no CUDA compiler, no torch, no cuBLASLt.
//
//   a x b                      when scales are applied                          what for
//   tensor, row or none, both  to the finished sum                              current, delayed and row scaling
//   1x128 x 128x128            every 128 of K                                   fprop and dgrad of block scaling
//   128x128 x 1x128            every 128 of K, at the rate of the next          the mirror image
//   1x128 x 1x128              every 128 of K                                   wgrad of block scaling
//
// Partial sums are promoted to fp32 every 128 of K, whatever fast_accumulation says. out is bf16 or fp32, and fp32 may
// be accumulated in place; every element gets one addition, so that two runs give the same bits.
#pragma once

#include "gemm/hopper_arguments.h"
#include "gemm/product.h"

namespace fsdp_quant::hopper {

// out of one block x the blocks of a cluster, which lie side by side along n and share their rows of a.
enum class Tile : int32_t { k256x128x2 = 0, k128x128x2 = 1, k128x128x1 = 2 };
constexpr int kTiles = 3;

struct Schedule {
  Tile tile;
  int32_t blocks;  // of the launch, a multiple of the cluster
  Stores stores;
};

// Why the kernels do not take a product, or null. Reads sizes, types, addresses. `amax`: null, or an fp32 [1] that
// becomes the larger of itself and the largest magnitude stored; NaN is above all.
const char* why_not(const Product& p, const float* amax = nullptr);

// The fastest known way, of a product that is taken. Depends on sizes, scalings and types alone.
Schedule schedule_of(const Product& p, int32_t sm_count);

Kernel kernel_of(const Product& p, Tile tile);

// Nothing here reads the device, allocates, or waits.
cudaError_t launch(const Product& p, float* amax, const Schedule& schedule, const Kernel& kernel, cudaStream_t stream);

inline cudaError_t launch(const Product& p, float* amax, const Schedule& schedule, cudaStream_t stream) {
  return launch(p, amax, schedule, kernel_of(p, schedule.tile), stream);
}

// Kernel instances by the file that compiles them; `e5m2` of a and b, not both.
Kernel outer_kernel(Tile tile, bool a_e5m2, bool b_e5m2);
Kernel block_kernel(Tile tile, bool a_e5m2, bool b_e5m2);   // 1x128 x 128x128
Kernel mirror_kernel(Tile tile, bool a_e5m2, bool b_e5m2);  // 128x128 x 1x128
Kernel vector_kernel(Tile tile, bool a_e5m2, bool b_e5m2);  // 1x128 x 1x128

}  // namespace fsdp_quant::hopper
