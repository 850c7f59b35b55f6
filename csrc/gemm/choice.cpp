// H100, TFLOP/s over bf16 cuBLASLt, geometric mean of 6 shapes from 4096^3 to 8192^3, measured in turn:
//
//   scales                      ours    cuBLASLt 13
//   tensor x tensor             1.79    1.88
//   row x row                   1.66    1.72
//   1x128 x 128x128             1.59    1.65
//   128x128 x 1x128             1.30    1.65
//   1x128 x 1x128               1.217   1.214 (ours .90 to .995 where there are few tiles or K is 1024)
//   1x128 x 1x128, fp32 +=      1.13    1.16
#include "gemm/choice.h"

#include <algorithm>

namespace fsdp_quant {

Choice choice_of(const Product& p, int32_t sm_count) {
  if (p.algorithm > 0) return {false, {}, "an algorithm of its list is asked for"};
  if (const char* reason = hopper::why_not(p)) return {false, {}, reason};
  if (p.a.scaling != Scaling::k1x128 || p.b.scaling != Scaling::k1x128) return {false, {}, "cuBLASLt is 3 to 25 % faster"};
  if (p.accumulate || p.out_type != CUDA_R_16BF) return {false, {}, "cuBLASLt stores fp32 2 % faster"};
  const int32_t processors = p.sm_count > 0 ? std::min(p.sm_count, sm_count) : sm_count;
  const int64_t tiles = (p.m + 255) / 256 * ((p.n + 255) / 256);
  if (tiles < processors || p.k < 8192)
    return {false, {}, "cuBLASLt is as fast on few tiles or a short K"};
  return {true, hopper::schedule_of(p, processors), "1x128 scales on both sides: 1 % faster"};
}

}  // namespace fsdp_quant
