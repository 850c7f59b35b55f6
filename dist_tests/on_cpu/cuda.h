// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's: the words of kernels, and tensor maps that `device/ptx.cuh` reads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(threads, blocks)
#define __CUDA_ARCH_FEAT_SM90_ALL

using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float float_of(uint32_t bits) {
  float v;
  return __builtin_memcpy(&v, &bits, 4), v;
}
inline __nv_bfloat16 bf16_of(float v) {  // of numbers, to nearest even
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline float float_of(__nv_bfloat16 v) { return float_of(uint32_t{v.bits} << 16); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {bf16_of(x), bf16_of(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float_of(v.x), float_of(v.y)}; }
inline float __fadd_rn(float x, float y) { return x + y; }

// Of rows [planes, rows, bytes], in boxes of 128 bytes of some rows.
struct CUtensorMap {
  const uint8_t* data;
  int64_t rows, bytes, stride, plane;
  int box_rows;
};
