// SPDX-License-Identifier: Apache-2.0
// Arguments of kernels on existing codes and scales, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

enum class Output : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// A factor of a GEMM: a decode scale, or the tensor amax from which it is computed. Null: 1.
struct Factor {
  const float* value;
  float tensor_max;  // of the amax's spec; 0: a decode scale
};

// Decode codes [rows, row bytes] to [rows, cols] of `output`; a null scale or tensor amax is omitted.
struct Dequantize {
  const uint8_t* data;
  const void* scale;
  const float* tensor_amax;
  float tensor_max;         // of the spec
  const float* line_scale;  // in place of a tensor amax: a decode scale per row, or per column
  bool by_row;
  void* out;
  int32_t rows, cols;
  int32_t row_log2, col_log2;  // of the block of one scale; 31: the whole extent
  int32_t shift;               // global index of the first row, modulo the block's rows
  Element element;
  ScaleKind scale_kind;
  Output output;
  int32_t threads, blocks_per_row;  // of the launch: a block covers 8 rows of threads * 8 columns
  bool vectors;                     // rows are aligned for 16-byte accesses
  float* alpha;                     // null, or receives factors[0] * factors[1]
  Factor factors[2];
};

// Relayout of one matrix: transpose bytes or nibbles, or convert scales to padded 128 x 4 tiles. Spread: fp32 powers of two,
// each stored as four e8m0 scales.
enum class Relayout : int32_t {
  kTransposeBytes = 0, kTransposeNibbles = 1, kSwizzle = 2, kSwizzleTransposed = 3, kSpread = 4, kSpreadTransposed = 5
};

inline bool is_swizzle(Relayout kind) { return kind >= Relayout::kSwizzle; }
inline bool is_spread(Relayout kind) { return kind >= Relayout::kSpread; }
// Scale relayouts whose lines are the source's columns.
inline bool is_by_column(Relayout kind) { return kind == Relayout::kSwizzleTransposed || kind == Relayout::kSpreadTransposed; }

struct RelayoutItem {
  const uint8_t* source;  // kSpread: fp32
  uint8_t* out;
  int64_t rows, cols;  // of the source, in elements
  int32_t first_tile, tile_cols;
  Relayout kind;
  int32_t outer_block;  // swizzles: operand rows of one scale
  int64_t outer;        // swizzles: operand rows
  bool vector_load, vector_store;
};

constexpr int kRelayoutCapacity = 256;

template <int Capacity>
struct RelayoutLaunch {
  int32_t count, tiles;
  RelayoutItem tensors[Capacity];
};

// Re-express codes of blocks [rows, cols] with power-of-two scales using one exponent per line of the contraction, per run of
// a line, per tile of 128 x 128, or per tensor: the largest of its blocks' minus `shift`. Matrices are stacked along the rows. Elements of fewer
// than 8 bits become e4m3; two-level codes become ScaleLayout::kOperand, which rounds them unless their scales are kE4M3Exact.
struct AnchorCodes {
  const uint8_t* data;
  const uint8_t* scale;      // biased exponents (two-level: e4m3 codes) of (outer, contraction) blocks, compact
  const float* tensor_amax;  // two-level: [1]
  float tensor_max;          // of the spec
  const float* powers;       // null, or fp32 scales of (128, 128) blocks of one matrix, in place of `scale`
  uint8_t* parts;            // whole: [kExponentParts], written by the first launch
  uint8_t* out;              // [rows, cols], or [cols, rows] when transposed
  float* line_scale;         // [lines], aligned to 16; whole: [1]; runs: [runs, scale_ld], initially 0;
                             // tiles: [lines / 128, scale_ld], initially 0
  int64_t line_plane;        // of a matrix's line scales to the next one's
  int32_t matrices;          // 1 to 65535
  int32_t rows, cols;        // not 0, below 2^31 - kTile
  int32_t outer_log2;        // 0, 5 or 7; two-level: 0 or 4
  int32_t contraction_log2;  // 5 or 7; two-level: 4
  int32_t run_log2;          // 7 or more; 31: the whole line
  int32_t scale_ld;          // runs: lines, rounded up to 4; tiles: those along the contraction, rounded up to 4
  int32_t shift;             // 2^shift of the element's largest number fits the operand (Element.operand_shift)
  Element element;
  bool two_level;
  bool columnwise, transposed, whole, tiles;
  bool vector_load, vector_scales, vector_store;  // rows are aligned for 8 codes and 8 bytes; transposed stores: for 16
};

constexpr int kAnchorCapacity = 32, kExponentParts = 32;

// Tensors of one element and direction, one matrix each.
struct AnchorMultiTensor {
  int32_t count;
  AnchorCodes items[kAnchorCapacity];
};

cudaError_t launch_dequantize(const Dequantize& args, cudaStream_t stream);
cudaError_t launch_anchor_codes(const AnchorCodes& args, cudaStream_t stream);
cudaError_t launch_anchor_multi_tensor(const AnchorMultiTensor& group, cudaStream_t stream);
cudaError_t launch_relayout(const RelayoutLaunch<1>& launch, cudaStream_t stream);
cudaError_t launch_relayout_multi_tensor(const RelayoutLaunch<kRelayoutCapacity>& launch, cudaStream_t stream);

}  // namespace fsdp_quant
