// SPDX-License-Identifier: Apache-2.0
#include "layout/token_groups.h"

namespace fsdp_quant {

namespace {

constexpr int kRows = 128, kBlock = 1024;

// One block: a thread adds up the groups, all find the group of each tile.
__global__ void __launch_bounds__(kBlock) token_groups_kernel(const TokenGroups g) {
  __shared__ int32_t offsets[kMostTokenGroups + 1], padded[kMostTokenGroups + 1];
  __shared__ int wrong;
  const int thread = threadIdx.x;
  if (thread == 0) wrong = 0;
  __syncthreads();
  if (thread < g.groups) {
    const int64_t given = g.wide ? static_cast<const int64_t*>(g.ends)[thread] : static_cast<const int32_t*>(g.ends)[thread];
    const int64_t clamped = min(max(given, int64_t{0}), int64_t{g.tokens});
    if (clamped != given || (thread == g.groups - 1 && given != g.tokens)) wrong = 1;
    offsets[thread + 1] = static_cast<int32_t>(clamped);
  }
  __syncthreads();
  if (thread == 0) {
    int32_t end = 0, at = 0;
    offsets[0] = padded[0] = 0;
    for (int e = 1; e <= g.groups; ++e) {
      const int32_t next = e == g.groups ? g.tokens : offsets[e];
      if (next < end) wrong = 1;
      at += (max(next, end) - end + kRows - 1) / kRows * kRows;
      end = max(next, end);
      offsets[e] = end, padded[e] = at;
    }
    if (wrong && g.wrong != nullptr) *g.wrong = static_cast<int64_t>(g.tag) << 32 | g.tokens;
  }
  __syncthreads();
  for (int e = thread; e <= g.groups; e += kBlock) g.offsets[e] = offsets[e], g.padded[e] = padded[e];
  for (int tile = thread; tile < g.tiles; tile += kBlock) {
    const int32_t row = tile * kRows;
    int low = 0, high = g.groups;  // the last group that begins at or before the row
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (padded[middle] <= row ? low : high) = middle;
    }
    const bool is_used = row < padded[g.groups];
    const int32_t first = is_used ? offsets[low] + row - padded[low] : 0;
    const int32_t count = is_used ? min(offsets[low + 1] - first, kRows) : 0;
    reinterpret_cast<int4*>(g.sources)[tile] = make_int4(first, count, low, padded[low]);
  }
}

}  // namespace

cudaError_t launch_token_groups(const TokenGroups& groups, cudaStream_t stream) {
  token_groups_kernel<<<1, kBlock, 0, stream>>>(groups);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
