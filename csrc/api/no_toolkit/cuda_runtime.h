// SPDX-License-Identifier: Apache-2.0
// The part of cuda_runtime.h that the glue needs, for builds without nvcc's headers.
#pragma once

#include <cuda_runtime_api.h>
