// SPDX-License-Identifier: Apache-2.0
// Which GPUs multiply which pairs of operands. Plain data: needs no CUDA header, so that
// dist_tests/single/test_targets.py compares it with the table of fsdp_quant/ops/capability.py
// wherever there is a C++ compiler.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp_quant {

enum class Element : int32_t { kNone = 0, kE4M3 = 1, kE5M2 = 2, kE2M1 = 3, kE2M3 = 4, kE3M2 = 5 };

// Scales of an operand [outer, K]: none; fp32 [1]; fp32 [outer]; fp32 [ceil(K / 128), outer rounded
// up to 4]; fp32 [ceil(outer / 128), ceil(K / 128) rounded up to 4]; one byte for 32 (e8m0) or 16
// (e4m3) elements along K, in 128 x 4 tiles of 512 bytes; fp32 [ceil(K / 512), outer rounded up to
// 4], powers of two. The numbers are Python's.
enum class Scaling : int32_t {
  kNone = 0, kTensor = 1, kRow = 2, k1x128 = 3, k128x128 = 4, kE8M0 = 5, kE4M3 = 6, k1x512 = 7
};

inline bool has_byte_scales(Scaling s) { return s == Scaling::kE8M0 || s == Scaling::kE4M3; }
// fp32 scales along K: an sm_90 multiplies them.
inline bool has_fp32_blocks(Scaling s) { return s >= Scaling::k1x128 && !has_byte_scales(s); }

// Capabilities from `least` to `most`, 10 * major + minor, and what their tensor cores multiply.
struct Architecture {
  int least, most;
  bool codes;        // of 8 bits, with scales of tensors
  bool fp32_scales;  // of rows and blocks
  bool byte_scales;
};

constexpr Architecture kArchitectures[] = {
    {80, 88, false, false, false}, {89, 89, true, false, false},   {90, 90, true, true, false},
    {100, 109, true, false, true}, {120, 129, true, false, true},
};

struct CodeKind {
  Element element;
  Scaling scaling;
};

inline bool is_fp8(Element e) { return e == Element::kE4M3 || e == Element::kE5M2; }

// Of codes, by cuBLASLt, and 1x512 by our kernels:
//   e4m3 x e4m3 or e5m2, and the other way round    tensor or none on each direction; row x row or
//                                                   tensor, 1x128 x 1x128 or 128x128, and the other
//                                                   way round; e8m0 x e8m0; 1x512 x 1x512
//   e2m1 x e2m1                                     e4m3 x e4m3
inline bool supports_pair(const CodeKind& a, const CodeKind& b) {
  const auto [least, most] = std::minmax(a.scaling, b.scaling);
  if (a.element == Element::kE2M1 && b.element == Element::kE2M1)
    return least == most && most == Scaling::kE4M3;
  if (!is_fp8(a.element) || !is_fp8(b.element)) return false;
  if (a.element == Element::kE5M2 && b.element == Element::kE5M2) return false;
  return most <= Scaling::kTensor || (least >= Scaling::kTensor && most == Scaling::kRow) ||
         (least == Scaling::k1x128 && most <= Scaling::k128x128) ||
         (least == most && (most == Scaling::kE8M0 || most == Scaling::k1x512));
}

// The tensor cores of a capability take the scales of a pair of codes.
inline bool supports_scales(const CodeKind& a, const CodeKind& b, int capability) {
  const Scaling most = std::max(a.scaling, b.scaling);
  for (const Architecture& row : kArchitectures) {
    if (capability < row.least || capability > row.most) continue;
    if (most <= Scaling::kTensor) return row.codes;
    return has_byte_scales(most) ? row.byte_scales : row.fp32_scales;
  }
  return false;
}

}  // namespace fsdp_quant
