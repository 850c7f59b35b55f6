// SPDX-License-Identifier: Apache-2.0
// PTX instructions and memory accesses, one per function.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/fp8_bits.h"

namespace fsdp_quant::ptx {

// Two fp32 values to 8-bit elements, saturating, to nearest even; `lo` in the low byte. NaN gives 0x7F. Uses fp8_bits.h
// before sm_89.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint32_t cvt_e4m3x2(float hi, float lo) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ uint32_t cvt_e5m2x2(float hi, float lo) {
  uint16_t r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ uint32_t cvt_e4m3x2_f16x2(__half2 v) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(*reinterpret_cast<uint32_t*>(&v)));
  return r;
}

__device__ __forceinline__ uint32_t cvt_e5m2x2_f16x2(__half2 v) {
  uint16_t r;
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(r) : "r"(*reinterpret_cast<uint32_t*>(&v)));
  return r;
}

// Two 8-bit elements as fp16, exact.
__device__ __forceinline__ __half2 cvt_f16x2_e4m3x2(uint32_t codes) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(codes)));
  return *reinterpret_cast<__half2*>(&r);
}

__device__ __forceinline__ __half2 cvt_f16x2_e5m2x2(uint32_t codes) {
  uint32_t r;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(codes)));
  return *reinterpret_cast<__half2*>(&r);
}
#else
__device__ __forceinline__ uint32_t cvt_e4m3x2(float hi, float lo) { return fp8_code<3>(hi) << 8 | fp8_code<3>(lo); }
__device__ __forceinline__ uint32_t cvt_e5m2x2(float hi, float lo) { return fp8_code<2>(hi) << 8 | fp8_code<2>(lo); }
__device__ __forceinline__ uint32_t cvt_e4m3x2_f16x2(__half2 v) { return cvt_e4m3x2(__high2float(v), __low2float(v)); }
__device__ __forceinline__ uint32_t cvt_e5m2x2_f16x2(__half2 v) { return cvt_e5m2x2(__high2float(v), __low2float(v)); }

template <int Mantissa>
__device__ __forceinline__ __half2 halves_of_fp8(uint32_t codes) {
  const uint32_t r = half_of_fp8<Mantissa>(codes & 0xFF) | half_of_fp8<Mantissa>(codes >> 8 & 0xFF) << 16;
  return *reinterpret_cast<const __half2*>(&r);
}
__device__ __forceinline__ __half2 cvt_f16x2_e4m3x2(uint32_t codes) { return halves_of_fp8<3>(codes); }
__device__ __forceinline__ __half2 cvt_f16x2_e5m2x2(uint32_t codes) { return halves_of_fp8<2>(codes); }
#endif

// Casts of architecture ("a") and family ("f") targets of Blackwell. -DFSDP_QUANT_SOFTWARE_CASTS disables them; `python -m
// fsdp_quant selftest` compares them with the definition.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && !defined(FSDP_QUANT_SOFTWARE_CASTS)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define FSDP_QUANT_HARDWARE_CASTS
#endif
#endif

#ifdef FSDP_QUANT_HARDWARE_CASTS
constexpr bool kHardwareCasts = true;

// Eight fp32 values to 4-bit elements, saturating, to nearest even; the first in the lowest bits. NaN gives +6.
__device__ __forceinline__ uint32_t cvt_e2m1x8(const float (&v)[8]) {
  uint32_t r;
  asm("{\n.reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\ncvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\ncvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n}"
      : "=r"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return r;
}

// Biased exponent of v >= 0, rounded up; infinity gives 0xFE, NaN 0xFF.
__device__ __forceinline__ uint32_t cvt_ue8m0(float v) {
  uint16_t r;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return r & 0xFF;
}
#else
constexpr bool kHardwareCasts = false;
__device__ uint32_t cvt_e2m1x8(const float (&v)[8]);  // declared only, never called
__device__ uint32_t cvt_ue8m0(float v);
#endif

// Relative error at most 2^-22 (2^x) and 2^-23 (1 / x); subnormal results are flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Load 16 bytes that this kernel reads once.
__device__ __forceinline__ uint4 ld_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint2 ld_streaming_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// Of values that are read again soon: L2 gives up others first.
__device__ __forceinline__ uint4 ld_again(const void* p) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy));
  return v;
}

__device__ __forceinline__ void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }

// Copy 16 bytes from global to shared memory asynchronously, bypassing L1.
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}

__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Byte permute of (b, a); unlike __byte_perm, a selector of 8 or more replicates the sign of its byte.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selectors));
  return out;
}

__device__ __forceinline__ uint32_t thread_z() {
  uint32_t z;
  asm("mov.u32 %0, %%tid.z;" : "=r"(z));
  return z;
}

__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// 32-bit shared-memory address; addresses of the own block are also valid cluster addresses.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Keep v in a register from here on, instead of recomputing it at its uses.
template <class T>
__device__ __forceinline__ void keep(T& v) {
  asm volatile("" : "+r"(v));
}

// Add 4 floats to memory in one asynchronous transaction. sm_90.
__device__ __forceinline__ void red_add(float* p, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Synchronize `threads` threads of the block, in whole warps. barrier: 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// mbarriers: a phase completes after `count` arrivals and all expected bytes. sm_90.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(count) : "memory");
}

// Make initialized barriers visible to the cluster and to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// barrier: a cluster address, see map_shared. Issue order suffices to order this warp's reads; a release at cluster scope
// would wait for all memory accesses of the thread.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Whether the phase with this parity is complete; waits for a while. A new barrier has completed parity 1.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Thread block clusters, sm_90.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// Address in block `rank` of the cluster that corresponds to `address` in this block.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Set the registers per thread of all warps of the warp group. sm_90a.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// TMA, sm_90a. `map`: a CUtensorMap in parameter or global memory; x counts along the contiguous dim.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Copy to the same address and barrier offset in every block of the mask `blocks`.
__device__ __forceinline__ void copy_tile_multicast(
    uint32_t to, const void* map, int x, int y, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;"
      :
      : "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// `bytes` is a multiple of 16; both addresses are aligned to 16.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace fsdp_quant::ptx
