// SPDX-License-Identifier: Apache-2.0
// The macros that CUDA's runtime headers need from crt/host_defines.h. PyPI packages ship those headers without this file,
// which is part of nvcc; ops/build.py adds this folder if it is missing.
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
