// SPDX-License-Identifier: Apache-2.0
// Arguments of quantize kernels, for host code without a CUDA compiler.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "gemm/capability.h"
#include "norm/norm.h"
#include "optim/adam.h"

namespace fsdp_quant {

// kE4M3, kE4M3Exact: two-level; nearest e4m3, or 1, 1.25 or 1.5 times a power of two (formats.py, FP8_EXACT_SCALES).
enum class ScaleKind : int32_t { kFp32 = 0, kFp32Pow2 = 1, kE8M0Up = 2, kE8M0Floor = 3, kE4M3 = 4, kE4M3Exact = 5 };
// kCompact: [block rows, block cols]. The others are layouts of tensor cores, for outer x contraction blocks:
// whole-contraction scales [outer]; fp32 (1, 128) [contraction, outer rounded up to 4]; fp32 (128, 128) [outer, contraction
// rounded up to 4]; one-byte scales [outer, contraction] (kHopper), or per operand row in zero-padded 128 x 4 tiles of 512
// bytes (kBlackwell; also fp32 powers of two of 128, see `spread`). kOperand, with kE4M3Exact: codes are e4m3(element * scale
// / 8), one byte each, and the scale is 8 D, fp32 [1] (tokens: [groups]).
enum class ScaleLayout : int32_t { kCompact = 0, kHopper = 1, kBlackwell = 2, kOperand = 3 };
// Two-level: what a block's amax becomes, the largest element, or 4 where that has the smaller error (formats.py,
// four_over_six): a sum of squares, or of magnitudes.
enum class ScaleChoice : int32_t { kLargest = 0, kMse = 1, kMae = 2 };
enum class Input : int32_t { kBF16 = 0, kF16 = 1, kF32 = 2, kF32AsBF16 = 3 };

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kRotationBlock = 16;
constexpr int kMostTokenGroups = 1024;

// Encoding of one direction, the same for all tensors of a launch; [0] is rowwise, [1] columnwise. "Lines" run along the dim
// that the GEMM keeps (rowwise: rows), "blocks" are counted along the dim that it sums.
struct EncodingSpec {
  Element element;  // kNone: direction absent
  ScaleKind scale;
  ScaleChoice choice;
  ScaleLayout scale_layout;
  int32_t outer;                         // lines of a block; 0 is the whole extent
  int32_t contraction;                   // elements of a block along the contraction; 0 is the whole extent
  int32_t outer_log2, contraction_log2;  // 31 for the whole extent: every index shifts to block 0
  int32_t anchor_log2;                   // of the run that shares an anchor (EncodingBuffers::anchor)
  float max;                             // largest finite element
  float inverse_max;
  float tensor_max;  // two-level: value to which the tensor amax is encoded
  float eps;         // fp32 scales: lower bound of amaxes
  bool stochastic;
  bool rotated;
  bool transposed;  // codes as [cols, rows]
  bool by_line;     // two-level: a second-level scale per line, not per tensor

  __host__ __device__ bool present() const { return element != Element::kNone; }
  __host__ __device__ bool four_bit() const { return element == Element::kE2M1; }
  __host__ __device__ bool six_bit() const { return element >= Element::kE2M3; }
  __host__ __device__ int bits() const { return four_bit() ? 4 : six_bit() ? 6 : 8; }
  __host__ __device__ bool two_level() const { return scale >= ScaleKind::kE4M3; }
  __host__ __device__ bool exact() const { return scale == ScaleKind::kE4M3Exact; }
  __host__ __device__ bool chooses() const { return choice != ScaleChoice::kLargest; }
  // Needs more than a table of the encode factors of a tensor's scales.
  __host__ __device__ bool extended() const { return chooses() || by_line; }
  __host__ __device__ bool operand() const { return scale_layout == ScaleLayout::kOperand; }
  __host__ __device__ bool whole() const { return contraction == 0; }
  __host__ __device__ bool whole_tensor() const { return contraction == 0 && outer == 0; }
  __host__ __device__ bool byte_scales() const { return scale >= ScaleKind::kE8M0Up && !operand(); }
  // fp32 powers of two per 128 elements, stored as e8m0 scales of 32, each four times.
  __host__ __device__ bool spread() const {
    return scale == ScaleKind::kFp32Pow2 && scale_layout == ScaleLayout::kBlackwell && !whole();
  }
  bool stored_in_bytes() const { return byte_scales() || spread(); }
};

// Strides in elements over (line block, block).
struct Grid {
  int32_t lines, blocks;
  int32_t line_stride, block_stride;
};

// Buffers of one direction of one tensor; null if not given or not wanted.
struct EncodingBuffers {
  uint8_t* data;
  void* scale;
  float* amax;            // compact: given, or computed by the statistics phase
  float* tensor_amax;     // [1] (tokens: [groups]; by_line: [lines]), likewise
  const float* enc;       // [1] (tokens: [groups]), delayed scaling; 0: no history yet, use the amax
  float* record;          // [1], with enc: largest finite amax so far
  const int64_t* key;     // [5] (tokens: [groups, 5]), stochastic rounding
  const float* anchor;    // amax per run of a line, whose scale replaces the block's
  int32_t lines, length;  // of the codes; rotation pads the contraction
  Grid compact;           // of amax
  Grid stored;            // of scale, except kBlackwell; may exceed compact, padded with zeros
  Grid anchors;           // of anchor
  bool amax_given, tensor_amax_given;
  bool vector_store;  // rows of `data` are aligned for vectors
};

// Finish delayed scaling of grouped tokens after encoding: `amax`, `enc` and `scale` are [groups].
struct DelayedGroups {
  EncodingSpec spec[2];
  EncodingBuffers buffers[2];  // null enc: not delayed
  float* record[2][kMostTokenGroups];  // histories; null: none
  int32_t groups;
};

// n / divisor for 0 <= n < 2^31 by multiplication: Granlund and Montgomery, PLDI 1994.
struct Division {
  uint32_t magic, shift;

  static Division by(uint32_t divisor) {  // at least 2
    uint32_t log2 = 1;
    while ((uint64_t{1} << log2) < divisor) ++log2;
    return {static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor), log2 - 1};
  }
};

struct TensorArgs {
  const void* x;
  int64_t row_stride;
  int32_t rows, cols;
  int32_t first_tile;  // in the launch
  int32_t tile_rows, tile_cols;
  Division by_band;  // by the tiles of a band, 4 * tile_cols (rows by their order: tile_rows, if several)
  int32_t shift;     // global index of the first row, modulo the tile
  bool vector_load;
  EncodingBuffers buffers[2];
};

enum Phase : int32_t { kStatistics = 1, kEncode = 2 };

template <int Capacity>
struct Launch {
  EncodingSpec spec[2];
  Input input;
  int32_t phases;                // both: one cooperative launch, one tile per block
  int32_t count;                 // tensors
  bool shares_codes_transposed;  // the columnwise codes are the rowwise ones, transposed
  bool reversed;                 // last tile first: what the previous pass read last is still in L2
  bool of_codes;                 // convert the codes of the blocks, rounded again where the anchor makes them subnormal
  bool in_tile;                  // no statistics: anchors are of runs of 128; with of_codes of tiles of 128 x 128 (of token
                                 // groups, the columnwise ones)
  int32_t tiles;
  uint32_t* barrier;  // [2], cooperative launches only
  const float* parts[2];  // null, or amaxes of parts of the tensor: the first block that comes writes the largest to `amax`
  int64_t part_counts[2];
  uint32_t* arrivals;  // [2], initially 0: blocks that came, whether the amaxes are written
  const void* up;     // values are act(x) * up; null: x
  int64_t up_stride;
  bool gradient;      // values are the gradient of act(g) * u, of which [g, u] is x and whose gradient is `up`
  const int32_t* sources;  // [tile rows, 4], see layout/token_groups.h; null: x is not grouped
  const int64_t* order;  // null, or the row of x that each row of the groups is; `rows` counts them, and rows are aligned
  const float* row_weights;  // of grouped tokens with `up`: what each row of act(g) * u is multiplied by
  float* row_dots;  // with gradient: that of row_weights, [columns of tiles of u, rows of x], to be summed
  Activation activation;
  float* sums;  // null, or column sums [tile rows, cols] of bf16 values
  TensorArgs tensors[Capacity];
};

// Index of a tile's tensor in a table (Launch, AdamLaunch, RelayoutLaunch), by binary search.
template <class Table>
constexpr int index_of_tile(const Table& table, int tile) {
  int low = 0;
  for (int high = table.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (table.tensors[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

constexpr int kMultiTensorCapacity = 96;  // the table is a kernel parameter, limited to 32 KiB
static_assert(sizeof(TensorArgs) * kMultiTensorCapacity < 32000, "a group's table is too large for kernel parameters");

// fp32 masters (x, contiguous) are updated by Adam and rounded to bf16 as they are loaded.
struct AdamSource {
  const void* grad;
  void *first, *second;  // moments
  int32_t row;           // of the scalars
  bool vectors;          // rows of all tensors are aligned to four elements
};

constexpr int kAdamQuantizeCapacity = 84;

struct AdamQuantizeLaunch : Launch<kAdamQuantizeCapacity> {
  AdamStep step;
  AdamSource source[kAdamQuantizeCapacity];
};
static_assert(sizeof(AdamQuantizeLaunch) <= 32764, "the table is too large for kernel parameters");

// Whether a direction needs more than tile or given scales and rounding to nearest.
inline bool needs_full(const EncodingSpec& s, const EncodingBuffers& b) {
  return s.stochastic || s.rotated || b.enc != nullptr;
}

// Whether one launch can encode both directions; else the caller launches twice.
inline bool fuses(const EncodingSpec (&spec)[2], const EncodingBuffers (&b)[2], Input input) {
  if (!spec[0].present() || !spec[1].present() || spec[0].bits() == spec[1].bits()) return true;
  if (spec[0].six_bit() || spec[1].six_bit()) return false;
  if (spec[0].operand() || spec[1].operand()) return false;  // only fp4_kernel.cuh writes operands
  return input != Input::kF16 && input != Input::kF32 && spec[1].four_bit() && !needs_full(spec[0], b[0]);
}

// Whether one block serves both directions, so that the columnwise codes are the rowwise ones, transposed.
inline bool can_share_codes_transposed(const EncodingSpec (&spec)[2], const EncodingBuffers (&b)[2]) {
  const EncodingSpec &row = spec[0], &col = spec[1];
  return row.present() && col.present() && row.element == col.element && row.scale == col.scale && row.choice == col.choice &&
         row.eps == col.eps &&
         (!row.four_bit() || !b[0].amax_given) &&
         row.outer == row.contraction && row.outer == col.outer && row.contraction == col.contraction && col.transposed &&
         !row.stochastic && !row.rotated && !col.stochastic && !col.rotated && b[0].enc == b[1].enc &&
         b[0].amax_given == b[1].amax_given &&
         (!b[0].amax_given || b[0].amax == b[1].amax) && b[0].tensor_amax_given == b[1].tensor_amax_given &&
         (!b[0].tensor_amax_given || b[0].tensor_amax == b[1].tensor_amax);
}

// Whether launch_delayed supports a launch: one factor for both directions with shared codes, or rowwise only.
inline bool supports_delayed(const Launch<1>& launch) {
  const EncodingSpec& row = launch.spec[0];
  return row.present() && launch.tensors[0].buffers[0].enc != nullptr && !row.stochastic &&
         (launch.shares_codes_transposed || !launch.spec[1].present()) &&
         (launch.input == Input::kBF16 || launch.input == Input::kF32AsBF16);
}

// The block size that launch_blocks supports for both directions; 0 if none.
inline int known_block(const Launch<1>& launch) {
  int block = 0;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    const int usual = s.byte_scales() ? 32 : kTile;
    const bool known = s.bits() == 8 && s.outer == 1 && s.contraction == usual && !launch.tensors[0].buffers[d].amax_given &&
                       !needs_full(s, launch.tensors[0].buffers[d]);
    if (!known || (block != 0 && block != s.contraction)) return 0;
    block = s.contraction;
  }
  return block;
}

// Whether SwiGLU of grouped tokens, or its gradient, can be computed while quantizing: bf16 in both directions, with scales of
// (1, 128) blocks, or with exponents of runs of 128 (columns of the forward: of tiles).
inline bool supports_gated_tokens(const Launch<1>& launch) {
  return launch.activation == Activation::kSilu && launch.input == Input::kBF16 && launch.spec[0].present() &&
         launch.spec[1].present() && launch.order == nullptr &&
         (launch.in_tile ? launch.of_codes != launch.gradient : known_block(launch) == kTile);
}

// Whether grouped rows (`sources`) are supported: bf16 with scales from the tile or of the whole contraction, delayed or not;
// or 4 bits (fp4_kernel.cuh).
inline bool supports_sources(const Launch<1>& launch) {
  const EncodingBuffers(&b)[2] = launch.tensors[0].buffers;
  bool whole = true, fp4 = true;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    whole = whole && s.whole() && !s.stochastic && !s.rotated;
    fp4 = fp4 && s.four_bit() && !s.by_line && s.contraction == 16 && s.outer == (can_share_codes_transposed(launch.spec, b) ? 16 : 1);
  }
  return launch.input == Input::kBF16 && (launch.up == nullptr || supports_gated_tokens(launch)) &&
         (whole || fp4 || (launch.spec[1].present() &&
                    (known_block(launch) == kTile ||
                     (known_block(launch) == 32 && (launch.in_tile || b[1].anchor != nullptr)))));
}

// Whether gated activations can be computed while quantizing: bf16, scales that need no earlier pass.
inline bool supports_gated(const Launch<1>& launch) {
  return (launch.activation == Activation::kSilu || launch.activation == Activation::kGelu) && launch.input == Input::kBF16 &&
         (supports_delayed(launch) || known_block(launch) == kTile);
}

inline bool is_wide(Input input) { return input == Input::kF16 || input == Input::kF32; }

// Whether launch_fp4 supports a launch: bf16 values, two-level 4-bit codes of (1, 16) blocks, or (16, 16) blocks that serve
// both directions; no column sums.
inline bool fits_fp4(const Launch<1>& launch) {
  if (is_wide(launch.input) || launch.barrier != nullptr || launch.sums != nullptr || launch.tensors[0].shift != 0) return false;
  for (int d = 0; d < 2; ++d) {
    const EncodingSpec& s = launch.spec[d];
    if (!s.present()) continue;
    if (!s.four_bit() || s.contraction != 16 || s.outer != (launch.shares_codes_transposed ? 16 : 1)) return false;
    if (launch.tensors[0].buffers[d].amax_given) return false;
  }
  return true;
}

cudaError_t launch_quantize(const Launch<1>& launch, cudaStream_t stream);
// Amaxes of delayed directions without a history, before encoding; scales and records, after it.
cudaError_t launch_first_amax(const Launch<1>& launch, int processors, cudaStream_t stream);
cudaError_t launch_delayed_scales(const Launch<1>& launch, cudaStream_t stream);
cudaError_t launch_delayed_scales(const DelayedGroups& groups, cudaStream_t stream);
cudaError_t launch_quantize_multi_tensor(const Launch<kMultiTensorCapacity>& launch, cudaStream_t stream);
// Plain 8-bit codes of the new masters, whose scales need no earlier pass, or their statistics.
cudaError_t launch_adam_quantize(const AdamQuantizeLaunch& launch, bool bf16_grad, bool bf16_moments, cudaStream_t stream);

}  // namespace fsdp_quant
