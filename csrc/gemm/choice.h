// Who makes a product: cuBLASLt, or our own kernels. Plain data, no device.
#pragma once

#include <cstdint>

#include "gemm/hopper.h"
#include "gemm/product.h"

namespace fsdp_quant {

struct Choice {
  bool own;                   // by `schedule`; else cuBLASLt
  hopper::Schedule schedule;
  const char* reason;
};

// For an sm_90 of this many multiprocessors. Reads sizes, types, scalings, alignment of addresses.
Choice choice_of(const Product& p, int32_t sm_count);

}  // namespace fsdp_quant
