// SPDX-License-Identifier: Apache-2.0
// Which GPUs multiply which pairs of operands. Needs no CUDA header: dist_tests/single/test_targets.py compiles it and
// compares it with fsdp_quant/ops/capability.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp_quant {

enum class Element : int32_t { kNone = 0, kE4M3 = 1, kE5M2 = 2, kE2M1 = 3, kE2M3 = 4, kE3M2 = 5 };

// Scales of an operand [outer, K], in order: none; fp32 [1]; fp32 [outer]; fp32 [ceil(K / 128), outer rounded up to 4]; fp32
// [ceil(outer / 128), ceil(K / 128) rounded up to 4]; one byte per 32 (e8m0) or 16 (e4m3) elements of K, in 128 x 4 tiles of
// 512 bytes; fp32 powers of two [ceil(K / 512), outer rounded up to 4]. Python uses the same numbers.
enum class Scaling : int32_t {
  kNone = 0, kTensor = 1, kRow = 2, k1x128 = 3, k128x128 = 4, kE8M0 = 5, kE4M3 = 6, k1x512 = 7
};

inline bool has_byte_scales(Scaling s) { return s == Scaling::kE8M0 || s == Scaling::kE4M3; }
// fp32 scales along K, supported on sm_90.
inline bool has_fp32_blocks(Scaling s) { return s >= Scaling::k1x128 && !has_byte_scales(s); }

// Compute capabilities (10 * major + minor) and the scalings of their tensor cores.
struct Architecture {
  int least, most;
  bool codes;        // 8-bit, with tensor scales; row scales too, by an epilogue (gemm/epilogue.h) unless fp32_scales
  bool fp32_scales;  // per row and block
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

// Supported pairs; cuBLASLt, or for 1x512 our own kernels:
//   e4m3 x e4m3, e4m3 x e5m2, e5m2 x e4m3    tensor or none x tensor or none; row x row or tensor;
//                                            1x128 x 1x128 or 128x128, and swapped; e8m0 x e8m0;
//                                            1x512 x 1x512
//   e2m1 x e2m1                              e4m3 x e4m3
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

inline Architecture architecture_of(int capability) {
  for (const Architecture& row : kArchitectures)
    if (row.least <= capability && capability <= row.most) return row;
  return {};
}

// Whether a capability supports the scales of a pair.
inline bool supports_scales(const CodeKind& a, const CodeKind& b, int capability) {
  const Scaling most = std::max(a.scaling, b.scaling);
  const Architecture row = architecture_of(capability);
  if (most <= Scaling::kRow) return row.codes;
  return has_byte_scales(most) ? row.byte_scales : row.fp32_scales;
}

}  // namespace fsdp_quant
