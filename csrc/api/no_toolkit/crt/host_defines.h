// SPDX-License-Identifier: Apache-2.0
// What the headers of CUDA's runtime ask of crt/host_defines.h when a C++ compiler reads them. The packages beside torch hold those
// headers and not this one, which comes with nvcc (ops/build.py takes this folder where there is none).
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __CUDA_DEPRECATED
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __host__
#define __device__
#define __global__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __no_return__ __attribute__((noreturn))
