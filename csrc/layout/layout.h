// SPDX-License-Identifier: Apache-2.0
// Operations on codes and scales that exist already. Plain data: host code without a CUDA compiler includes it.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "quantize/quantize.h"

namespace fsdp_quant {

enum class Output : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// A factor of a product: a decode scale, or the amax that a second-level scale comes from. Null: 1.
struct Factor {
  const float* value;
  float tensor_max;  // of the amax's direction; 0: a decode scale
};

// Codes [rows, row bytes] to [rows, cols] of `output`; a null scale or tensor amax leaves that factor out.
struct Dequantize {
  const uint8_t* data;
  const void* scale;
  const float* tensor_amax;
  float tensor_max;            // of its direction
  void* out;
  int32_t rows, cols;
  int32_t row_log2, col_log2;  // of the block of one scale; 31 is the whole extent
  int32_t shift;               // global index of the first row, modulo the block's rows
  Element element;
  ScaleKind scale_kind;
  Output output;
  int32_t threads, blocks_per_row;  // of the launch: a block is 8 rows of threads * 8 columns
  bool vectors;                // rows are aligned for 16-byte accesses
  float* alpha;                // null: not wanted; factors[0] * factors[1], on the way
  Factor factors[2];
};

// One matrix of a relayout: bytes or nibbles to their transpose, or scales to padded 128 x 4 tiles; spread: fp32 powers of two,
// as four e8m0 scales each.
enum class Relayout : int32_t {
  kTransposeBytes = 0, kTransposeNibbles = 1, kSwizzle = 2, kSwizzleTransposed = 3, kSpread = 4, kSpreadTransposed = 5
};

inline bool is_swizzle(Relayout kind) { return kind >= Relayout::kSwizzle; }
inline bool is_spread(Relayout kind) { return kind >= Relayout::kSpread; }
// Of scales: their lines are the source's columns.
inline bool is_by_column(Relayout kind) { return kind == Relayout::kSwizzleTransposed || kind == Relayout::kSpreadTransposed; }

struct RelayoutItem {
  const uint8_t* source;  // of kSpread fp32
  uint8_t* out;
  int64_t rows, cols;    // of the source, in elements
  int64_t first_tile;
  int32_t tile_cols;
  Relayout kind;
  int32_t outer_block;   // swizzles: operand rows of one scale
  int64_t outer;         // swizzles: operand rows
  bool vector_load, vector_store;
  const int32_t* sources;  // byte transposes: [rows / 128, 4], see layout/token_groups.h; null: the rows as they lie
};

constexpr int kRelayoutCapacity = 256;

template <int Capacity>
struct RelayoutLaunch {
  int32_t count;
  int64_t tiles;
  RelayoutItem items[Capacity];
};

// Codes of blocks [rows, cols] whose scales are powers of two against one exponent per line of the contraction, per run of a
// line, or per tensor: the largest of its blocks', less what the operand's range leaves (`shift`). Matrices are stacked along
// the rows. Elements of fewer than 8 bits become e4m3. Or two-level codes of scales that are kE4M3Exact, as ScaleLayout::kOperand
// has them.
struct AnchorCodes {
  const uint8_t* data;
  const uint8_t* scale;       // biased exponents (two-level: e4m3 codes) of (outer, contraction) blocks, compact
  const float* tensor_amax;   // two-level: [1]
  float tensor_max;           // of its direction
  const float* powers;        // null; else fp32 scales of (128, 128) blocks of one matrix, whose exponents go to `exponents`
  uint8_t* exponents;         // what scale points to, where powers does
  uint8_t* out;               // [rows, cols], or [cols, rows] when transposed
  float* line_scale;          // [lines], aligned to 16; whole: [1], 0 before the launch; of runs [runs, scale_ld], likewise
  int32_t matrices;           // 1 to 65535
  int32_t rows, cols;         // not 0, below 2^31 - kTile
  int32_t outer_log2;         // 0, 5 or 7; two-level: 0 or 4
  int32_t contraction_log2;   // 5 or 7; two-level: 4
  int32_t run_log2;           // 7 or more; 31: a line is one run
  int32_t scale_ld;           // of runs: lines, rounded up to 4
  int32_t shift;              // 2^shift of the element's largest number is in the range of its operand (Element.operand_shift)
  Element element;
  bool two_level;
  bool columnwise, transposed, whole;
  bool vector_load, vector_scales, vector_store;  // rows are aligned for 8 codes and 8 bytes; of transposed codes, for 16
};

constexpr int kAnchorCapacity = 32;

// Of one element and direction, each of one matrix.
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
