#include "gemm/choice.h"

#include <algorithm>

namespace fsdp_quant {

namespace {

// Ours over cuBLASLt 13.0, by turns on an H200 (the mirror image on an H100), geometric means: of products with 4 or more
// 128 x 128 tiles a multiprocessor, and of smaller ones. cuBLASLt is taken unless ours are clearly faster, as it is what
// products of other scales have, and its next release may be faster yet.
struct Measured {
  float large, small;
};

constexpr float kClearly = 1.03f;
constexpr Measured kBlock = {.963f, .95f};      // 1x128 x 128x128
constexpr Measured kMirror = {.79f, .80f};      // 128x128 x 1x128
constexpr Measured kVector = {1.007f, .96f};    // 1x128 x 1x128
constexpr Measured kVectorAdd = {.985f, .96f};  // into fp32 +=

const Measured& measured(const Product& p) {
  if (p.a.scaling == Scaling::k128x128) return kMirror;
  if (p.b.scaling == Scaling::k128x128) return kBlock;
  return p.accumulate ? kVectorAdd : kVector;
}

}  // namespace

Choice choice_of(const Product& p, int32_t sm_count) {
  if (p.algorithm > 0) return {false, {}, "an algorithm of its list is asked for"};
  if (const char* reason = hopper::why_not(p)) return {false, {}, reason};
  if (!has_fp32_blocks(p.a.scaling)) return {false, {}, "scales are factors of the finished sum, where it is faster"};
  const int32_t processors = p.sm_count > 0 ? std::min(p.sm_count, sm_count) : sm_count;
  if (p.a.scaling == Scaling::k1x512) return {true, hopper::schedule_of(p, processors), "nothing else multiplies 1x512 scales"};
  const int64_t tiles = (p.m + 127) / 128 * ((p.n + 127) / 128);
  const Measured& of_pair = measured(p);
  const float ratio = tiles >= int64_t{4} * processors ? of_pair.large : of_pair.small;
  if (ratio < kClearly) return {false, {}, "ours are not clearly faster"};
  return {true, hopper::schedule_of(p, processors), "faster than cuBLASLt, measured by turns"};
}

}  // namespace fsdp_quant
