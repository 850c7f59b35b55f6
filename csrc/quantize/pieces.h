// SPDX-License-Identifier: Apache-2.0
// What a cast of pieces is told: tensors of which this rank holds a run of elements, from any to any other. Plain data:
// the tables lie in device memory, because thousands of tensors are one launch. `weight_sync/cast_plan.py` writes them, in
// this order: 8-byte words and then 4-byte ones, of the head and of each direction.
#pragma once

#include "quantize/quantize.h"

namespace fsdp_quant {

// One direction. Addresses are those of element, or block, 0 of the whole tensor, wherever the piece begins.
//
// A block row is "cut" where ranks share its amaxes: the first launch collects them, and the second reads what was
// reduced. Scales that span more than a tile are made of collected amaxes too. Every other block is this rank's own, in
// one tile, which has its amax.
struct PieceBuffers {
  uint8_t* data;
  void* scale;          // of own blocks; null: all scales are made of the collected amaxes (cast_scales)
  float* amax;          // collected: [block rows, across]
  float* cut_amax[2];   // likewise, [across], of the block rows in cut_row
  float* tensor_amax;   // [1]
  const float* enc;     // [1], delayed scaling
  int64_t first, last;  // elements of the piece, in row-major order of the whole tensor
  int32_t lines, length;
  int32_t across;       // blocks in a block row
  int32_t cut_row[2];   // -1: none
  int32_t own[2];       // rows [first, end) of own blocks
  int32_t early[2];     // rows whose codes the first launch makes; the second makes those of all others
  int32_t rows[2];      // of which the piece holds elements
  int32_t all_amaxes;   // collect those of own blocks too
  int32_t vectors;      // rows of data are aligned for whole vectors
  int32_t second;       // set by the kernel: this is the second launch

  static constexpr bool amax_given = false;
};

// What a kernel knows of a tile that lies within the piece, whose codes its launch makes, by amaxes of the tile, in rows
// that are aligned: it looks at no edge.
struct InnerPieceBuffers : PieceBuffers {};

struct Piece {
  const void* x;        // of element 0
  int64_t first, last;
  int32_t rows, cols;
  int32_t narrow;       // the values are bf16; else fp32
  int32_t vectors;      // rows of x are aligned to 16 bytes
  InnerPieceBuffers buffers[2];
};

// Bits of a tile's work, those of the columnwise direction shifted by two.
enum PieceWork : int32_t { kCollect = 1, kEncodePiece = 2 };

struct PiecesLaunch {
  EncodingSpec spec[2];
  const Piece* pieces;
  const int4* tiles;    // piece, tile row, tile column, PieceWork
  int32_t count;        // of tiles
  const uint8_t* skip;  // [1] or null; not 0 leaves everything as it is
  bool second;

  // Scales of a tensor, or of lines that leave a tile, are known to the second launch; the first has their amaxes alone.
  bool encodes(int d) const {
    return spec[d].present() && (second || !(spec[d].whole() || spec[d].two_level()));
  }
};

// Elementwise: scales of amaxes, or values in another dtype.
struct ScaleSegment {
  const void* from;          // amaxes, or values
  void* out;                 // null: none are wanted
  const float* tensor_amax;  // [1], of a two-level format
  const float* enc;          // [1], delayed scaling
  float* record;             // [1], with enc: the largest finite amax so far
  int64_t count;
  int32_t narrow;            // bit 0: the values are bf16, bit 1: the result is; else fp32
  int32_t spec;              // of the launch; -1: values
};

constexpr int kScaleChunk = 2048;  // of a run, a block
constexpr int kScaleSpecs = 8;

struct ScalesLaunch {
  EncodingSpec spec[kScaleSpecs];
  const ScaleSegment* segments;
  const int2* chunks;        // run, chunk
  int32_t count;
  const uint8_t* skip;
};

cudaError_t launch_pieces8(const PiecesLaunch& launch, cudaStream_t stream);
cudaError_t launch_pieces4(const PiecesLaunch& launch, cudaStream_t stream);
cudaError_t launch_cast_scales(const ScalesLaunch& launch, cudaStream_t stream);

}  // namespace fsdp_quant
