// SPDX-License-Identifier: Apache-2.0
// Products of 8-bit operands, and of groups of bf16 values, by our own kernels for sm_90. Plain data: needs no CUDA compiler, no torch, no cuBLASLt.
//
//   a x b                      when scales are applied                          what for
//   1x512 x 1x512, 2^n         a's every 128 of K, b's every 512                wgrad of anchored e8m0; the others: groups
//   tensor, row or none, both  to the finished sum                              current, delayed and row scaling
//   1x128 x 128x128            every 128 of K                                   fprop and dgrad of block scaling
//   1x128 x 1x128              every 128 of K                                   wgrad of block scaling
//   values x values            tensor, row or none: to the finished sum         what has no product of codes
//
// Partial sums of codes are promoted to fp32 every 128 of K. out is bf16 or fp32, and fp32 may
// be accumulated in place; every element gets one addition, so that two runs give the same bits.
#pragma once

#include "gemm/sm90_gemm_arguments.h"
#include "gemm/gemm_problem.h"

namespace fsdp_quant::sm90 {

// out of one block x the blocks of a cluster, which lie side by side along n and share their rows of a.
enum class Tile : int32_t { k256x128x2 = 0, k128x128x1 = 1 };
constexpr int kTiles = 2;

// Grouping of a product that lie pointer_table.
//
// Groups are in the order of `offsets`, int32 [groups + 1] in device memory that nobody on the host reads: group e is
// what lies from offsets[e] to offsets[e + 1]. Offsets out of order or range are clamped, and set `flag`.
//   kRows     out[rows of e] = a[rows of e] b[e]^T; a [M, K], b [groups, N, K]. Rows outside all groups are left alone.
//             Scales of b, and of a where they are `each`, are stacked: [groups, ...].
//   kDepth    out[e] = a[:, depth of e] b[:, depth of e]^T; a [M, K], b [N, K], out [groups, M, N]. Offsets are
//             multiples of 128, or K. A group of nothing makes zeros, or leaves out alone that is accumulated.
struct Grouping {
  GroupedDim dim = GroupedDim::kNone;
  int32_t groups = 1;
  const int32_t* offsets = nullptr;
  int32_t* flag = nullptr;             // null: none
  int64_t b_plane = 0, out_plane = 0;  // elements from a group's to the next
  bool a_scale_each = false, b_scale_each = false;  // scales of tensors and rows: each group has its own
};

struct Schedule {
  Tile tile;
  int32_t blocks;  // of the launch, a multiple of the cluster
};

// Why the kernels do not take a product, or null. Reads sizes, types, addresses.
const char* unsupported_reason(const GemmProblem& p, const Grouping& grouping = {});

// The fastest known way, of a product that is taken. Depends on sizes, scalings and types alone.
Schedule schedule_of(const GemmProblem& p, int32_t sm_count, const Grouping& grouping = {});

// Nothing here reads the device, allocates, or waits.
cudaError_t launch(const GemmProblem& p, const Grouping& grouping, const Schedule& schedule, cudaStream_t stream);

// Kernel instances by the file that compiles them, of groups but for runs; `e5m2` of a and b, not both; of groups not of b.
Kernel grouped_rowwise_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);
Kernel grouped_1x128_128x128_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);   // 1x128 x 128x128
Kernel grouped_1x128_1x128_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);  // 1x128 x 1x128
Kernel dense_1x512_kernel(Tile tile, bool a_e5m2, bool b_e5m2);              // 1x512 x 1x512, not cut
Kernel grouped_bf16_kernel(GroupedDim dim, Tile tile);                            // bf16 values, cut

}  // namespace fsdp_quant::sm90
