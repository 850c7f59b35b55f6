// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that move rows between buffers, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fsdp_quant {

constexpr int kRowParts = 4;

// Row r of each part's `out` is row index[r] of its source. Widths, pitches and addresses are multiples of `unit` bytes.
struct GatherRows {
  struct Part {
    const void* source;
    void* out;
    int64_t source_pitch, out_pitch;  // units from row to row
    int32_t end;                      // behind the part's last unit, of all parts side by side
  } parts[kRowParts];
  const int64_t* index;  // null: the same row
  int64_t rows;
  int32_t unit;  // 1, 2, 4, 8 or 16
  int32_t units;
};

// Pieces of rows that move together: row r, of the first piece p with r < ends[p], is row r + shifts[p] of another order.
struct PieceOrders {
  const int64_t *ends, *shifts;
  int64_t* order;    // [rows], to that row
  int64_t* inverse;  // [rows], and back
  int64_t rows;
  int32_t pieces;
};

cudaError_t launch_gather_rows(const GatherRows& args, cudaStream_t stream);
cudaError_t launch_piece_orders(const PieceOrders& args, cudaStream_t stream);

}  // namespace fsdp_quant
