// SPDX-License-Identifier: Apache-2.0
// GEMMs of 8-bit operands, and grouped GEMMs of bf16, by our own kernels for sm_90. Needs no CUDA compiler, torch or
// cuBLASLt.
//
//   a x b                      scales are applied                             used for
//   1x512 x 1x512, 2^n         a's every 128 of K, b's every 512              wgrad of anchored e8m0 (dense); others: grouped
//   tensor, row or none, both  to the finished sum                            current, delayed and row scaling
//   1x128 x 128x128            every 128 of K                                 fprop, dgrad of block scaling; wgrad of anchored
//   1x128 x 1x128              every 128 of K                                 wgrad of block scaling
//   128x128 x 1x128            every 128 of K; K-grouped, a e4m3              transposed wgrad of anchored e8m0
//   bf16 x bf16                tensor, row or none: to the finished sum       operands without an fp8 GEMM
//
// Partial sums of codes are promoted to fp32 every 128 of K. out is bf16 or fp32; fp32 may be accumulated in place, with one
// addition per element, so that results are deterministic.
#pragma once

#include "gemm/sm90_gemm_arguments.h"
#include "gemm/gemm_problem.h"

namespace fsdp_quant::sm90 {

// Tile of out per block x blocks of a cluster, which are adjacent along n and share their rows of a.
enum class Tile : int32_t { k256x128x2 = 0, k128x128x1 = 1 };
constexpr int kTiles = 2;

// Grouped dim of a GEMM and its tables.
//
// Group e spans [offsets[e], offsets[e + 1]) of the grouped dim; offsets, int32 [groups + 1], are read on the device only.
// Offsets out of order or range are clamped and set `flag`.
//   kM    out[rows of e] = a[rows of e] b[e]^T; a [M, K], b [groups, N, K]. Rows outside all groups are not written.
//         Scales of b, and of a with a_scale_each, and biases are stacked: [groups, ...].
//   kK    out[e] = a[:, columns of e] b[:, columns of e]^T; a [M, K], b [N, K], out [groups, M, N]. Offsets are
//         multiples of 128, or K. An empty group gives zeros, or leaves an accumulated out unchanged.
struct Grouping {
  GroupedDim dim = GroupedDim::kNone;
  int32_t groups = 1;
  const int32_t* offsets = nullptr;
  int32_t* flag = nullptr;                          // null: none
  int64_t b_plane = 0, out_plane = 0;               // elements from a group to the next
  bool a_scale_each = false, b_scale_each = false;  // tensor and row scales per group
};

struct Schedule {
  Tile tile;
  int32_t blocks;  // of the launch, a multiple of the cluster
};

// Why the kernels do not support a GEMM, or null. Depends on sizes, types and addresses.
const char* unsupported_reason(const GemmProblem& p, const Grouping& grouping = {});

// The fastest known schedule of a supported GEMM. Depends on sizes, scalings and types only.
Schedule schedule_of(const GemmProblem& p, int32_t sm_count, const Grouping& grouping = {});

// Never reads the device, allocates or waits.
cudaError_t launch(const GemmProblem& p, const Grouping& grouping, const Schedule& schedule, cudaStream_t stream);

// Kernel instances, one function per source file; grouped except 1x512. At most one of a and b is e5m2; grouped b never is.
Kernel grouped_rowwise_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);
Kernel grouped_1x128_128x128_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);
Kernel grouped_1x128_1x128_kernel(GroupedDim dim, Tile tile, bool a_e5m2, bool b_e5m2);
Kernel grouped_128x128_1x128_kernel(Tile tile);  // K-grouped, e4m3
Kernel dense_1x512_kernel(Tile tile, bool a_e5m2, bool b_e5m2);  // dense
Kernel grouped_bf16_kernel(GroupedDim dim, Tile tile);

}  // namespace fsdp_quant::sm90
