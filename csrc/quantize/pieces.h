// SPDX-License-Identifier: Apache-2.0
// Arguments of casts of tensor pieces: this rank holds any element range of each tensor. The tables are in device memory,
// because one launch casts thousands of tensors. `weight_sync/cast_plan.py` writes them in this order: 8-byte words, then 4-byte
// words, of the head and of each direction.
#pragma once

#include "quantize/quantize.h"

namespace fsdp_quant {

// One direction. Addresses are those of element or block 0 of the whole tensor, wherever the piece begins.
//
// A block row is "cut" if ranks share its amaxes: the first launch collects them, the second reads the reduced ones. Scales
// that span more than a tile use collected amaxes too. All other blocks are the rank's own and lie in one tile, which
// computes their amax.
struct PieceBuffers {
  uint8_t* data;
  void* scale;          // of own blocks; null: all scales come from collected amaxes (cast_scales)
  float* amax;          // collected: [block rows, across]
  float* cut_amax[2];   // collected, [across], of the block rows in cut_row
  float* tensor_amax;   // [1]
  const float* enc;     // [1], delayed scaling
  int64_t first, last;  // element range of the piece in the row-major whole tensor
  int32_t lines, length;
  int32_t across;      // blocks per block row
  int32_t cut_row[2];  // -1: none
  int32_t own[2];      // rows [first, end) of own blocks
  int32_t early[2];    // rows that the first launch encodes; the second encodes the others
  int32_t rows[2];     // rows with elements of the piece
  int32_t all_amaxes;  // collect those of own blocks too
  int32_t vectors;     // rows of data are aligned for vectors
  int32_t second;      // set by the kernel in the second launch

  static constexpr bool amax_given = false;
};

// A tile inside the piece, encoded by this launch with the tile's amaxes, in aligned rows: needs no edge tests.
struct InnerPieceBuffers : PieceBuffers {};

struct Piece {
  const void* x;  // of element 0
  int64_t first, last;
  int32_t rows, cols;
  int32_t narrow;   // the values are bf16; else fp32
  int32_t vectors;  // rows of x are aligned to 16 bytes
  InnerPieceBuffers buffers[2];
};

// Work bits of a tile; those of the columnwise direction are shifted by two.
enum PieceWork : int32_t { kCollect = 1, kEncodePiece = 2 };

struct PiecesLaunch {
  EncodingSpec spec[2];
  const Piece* pieces;
  const int4* tiles;    // piece, tile row, tile column, PieceWork
  int32_t count;        // of tiles
  const uint8_t* skip;  // [1] or null; nonzero skips everything
  bool second;

  // The second launch encodes scales of tensors, or of lines that leave a tile; the first collects their amaxes.
  bool encodes(int d) const {
    return spec[d].present() && (second || !(spec[d].whole() || spec[d].two_level()));
  }
};

// Elementwise: scales from amaxes, or values in another dtype.
struct ScaleSegment {
  const void* from;          // amaxes, or values
  void* out;                 // null: not wanted
  const float* tensor_amax;  // [1], of a two-level format
  const float* enc;          // [1], delayed scaling
  float* record;             // [1], with enc: largest finite amax so far
  int64_t count;
  int32_t narrow;  // bit 0: bf16 values, bit 1: bf16 result; else fp32
  int32_t spec;    // index into the launch's specs; -1: values
};

constexpr int kScaleChunk = 2048;  // of a segment, per block
constexpr int kScaleSpecs = 8;

struct ScalesLaunch {
  EncodingSpec spec[kScaleSpecs];
  const ScaleSegment* segments;
  const int2* chunks;  // segment, chunk
  int32_t count;
  const uint8_t* skip;
};

cudaError_t launch_pieces8(const PiecesLaunch& launch, cudaStream_t stream);
cudaError_t launch_pieces4(const PiecesLaunch& launch, cudaStream_t stream);
cudaError_t launch_cast_scales(const ScalesLaunch& launch, cudaStream_t stream);

}  // namespace fsdp_quant
