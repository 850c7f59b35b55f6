// H100, TFLOP/s over bf16 cuBLASLt, geometric mean of 5 shapes from 4096^3 to 8192^3:
//
//   scales                      ours    cuBLASLt
//   tensor x tensor             1.85    1.94
//   1x128 x 128x128             1.61
//   128x128 x 1x128             1.42
//   1x128 x 1x128, fp32 +=      1.25    1.03 (H200, without +=)
#include "gemm/choice.h"

#include <algorithm>

namespace fsdp_quant {

Choice choice_of(const Product& p, int32_t sm_count) {
  if (p.algorithm > 0) return {false, {}, "an algorithm of its list is asked for"};
  if (const char* reason = hopper::why_not(p)) return {false, {}, reason};
  if (p.a.scaling <= Scaling::kRow) return {false, {}, "scales are factors of the finished sum, where it is as fast"};
  const int32_t processors = p.sm_count > 0 ? std::min(p.sm_count, sm_count) : sm_count;
  const int64_t tiles = (p.m + 127) / 128 * ((p.n + 127) / 128);
  if (2 * tiles < processors) return {false, {}, "128 x 128 tiles would leave half of the multiprocessors idle"};
  return {true, hopper::schedule_of(p, processors), "scales along K, applied every 128, where ours are faster"};
}

}  // namespace fsdp_quant
