// SPDX-License-Identifier: Apache-2.0
// The part of cuda_runtime.h that C++ around kernels uses, where the rest of CUDA's compiler is not there.
#pragma once

#include <cuda_runtime_api.h>
