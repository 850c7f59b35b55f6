// SPDX-License-Identifier: Apache-2.0
// Warp-group matrix products of sm_90a: one PTX instruction a function.
#pragma once

#include <cstdint>

namespace fsdp_quant::ptx {

// Describes a K-major operand in shared memory: rows of 128 bytes, in the 128-byte swizzle, 8 rows a 1024-byte atom,
// atoms 1024 bytes pointer_table. `address` is a row that begins an atom, plus a multiple of 32 bytes along K: the swizzle is a
// function of address bits, so a start inside a row needs no base offset. The leading offset is not used here.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kLeading = 1, kStride = 1024 >> 4, kSwizzle128 = 1;
  return uint64_t{(address & 0x3FFFF) >> 4} | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Pins registers between asynchronous instructions: the compiler does not know that they are written later.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// d[64 x 128] (+)= a[64 x 32] b[128 x 32]^T of 8-bit elements. Of warp w (of 4) and lane l, d[4 j + 2 h + e] is
// row 16 w + l / 4 + 8 h, column 8 j + 2 (l % 4) + e.
#define FSDP_QUANT_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FSDP_QUANT_WGMMA(shape, elements, signs)                                                                    \
  asm volatile(                                                                                        \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                 \
      "wgmma.mma_async.sync.aligned." shape ".f32." elements " "                                       \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "              \
      "%64, %65, add, " signs ";\n}"                                                                   \
      : FSDP_QUANT_D8(0), FSDP_QUANT_D8(8), FSDP_QUANT_D8(16), FSDP_QUANT_D8(24), FSDP_QUANT_D8(32),   \
        FSDP_QUANT_D8(40), FSDP_QUANT_D8(48), FSDP_QUANT_D8(56)                                        \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

template <bool kE5M2A, bool kE5M2B>
__device__ __forceinline__ void wgmma_m64n128k32(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  static_assert(!(kE5M2A && kE5M2B), "no format multiplies e5m2 by e5m2");
  if constexpr (kE5M2A)
    FSDP_QUANT_WGMMA("m64n128k32", "e5m2.e4m3", "1, 1");
  else if constexpr (kE5M2B)
    FSDP_QUANT_WGMMA("m64n128k32", "e4m3.e5m2", "1, 1");
  else
    FSDP_QUANT_WGMMA("m64n128k32", "e4m3.e4m3", "1, 1");
}

// The same of bf16 elements, K-major: 16 of K are as many bytes.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  FSDP_QUANT_WGMMA("m64n128k16", "bf16.bf16", "1, 1, 0, 0");
}

#undef FSDP_QUANT_WGMMA
#undef FSDP_QUANT_D8

}  // namespace fsdp_quant::ptx
