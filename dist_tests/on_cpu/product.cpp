// SPDX-License-Identifier: Apache-2.0
// The products of Hopper (csrc/gemm/sm90_gemm.cpp and its kernels) as a library of the CPU, for test_products_on_cpu.py.
#include "gemm/sm90_gemm.h"

#include <cudaTypedefs.h>

#include "threads.h"

namespace fsdp_quant::sm90 {
uint8_t memory[1];  // that a kernel declares
}

namespace {

uint32_t seed;
bool ended;

int encode(CUtensorMap* map, int, uint32_t dims, void* data, const cuuint64_t* extents, const cuuint64_t* strides,
           const cuuint32_t* box, const cuuint32_t*, int, int, int, int) {
  const auto of = [](uint64_t n) { return static_cast<int64_t>(n); };
  *map = {static_cast<const uint8_t*>(data), of(extents[1]), of(extents[0]), of(strides[0]), dims > 2 ? of(strides[1]) : 0,
          static_cast<int>(box[1])};
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, int, int, cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&encode), *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  using namespace fsdp_quant::sm90;
  const auto function = reinterpret_cast<void (*)(Arguments)>(const_cast<void*>(kernel));
  const int blocks = config->gridDim.x, of_cluster = config->attrs[0].val.clusterDim.x;
  gridDim.x = blocks;
  const auto& given = *static_cast<const Arguments*>(arguments[0]);
  ended = on_cpu::run(blocks, of_cluster, config->blockDim.x, config->dynamicSmemBytes, seed, [&] { function(given); });
  return cudaSuccess;
}

// numbers: grouped dim, groups, m, n, k, type and scaling of a and of b, type of out, whether it accumulates, processors,
//          whether groups have scales of their own of a, and of b, type of the bias.
// pointers: a, its scales, b, its scales, out, bias, alpha, offsets, flag.
// Returns rows of a tile, 0 for what is not supported, -1 where threads wait for ever, -2 for another fault.
extern "C" int product(const int64_t* numbers, void* const* pointers, uint32_t given_seed) {
  using namespace fsdp_quant;
  const auto number = [&] { return *numbers++; };
  sm90::Grouping grouping;
  GemmProblem p = {};
  grouping.dim = static_cast<sm90::GroupedDim>(number()), grouping.groups = number();
  p.m = number(), p.n = number(), p.k = number();
  for (Operand* o : {&p.a, &p.b}) {
    o->type = static_cast<cudaDataType_t>(number()), o->scaling = static_cast<Scaling>(number());
    o->ld = p.k, o->k_major = true, o->data = *pointers++, o->scale = *pointers++;
  }
  p.out = *pointers++, p.bias = *pointers++, p.alpha = static_cast<const float*>(*pointers++), p.out_ld = p.n;
  p.out_type = static_cast<cudaDataType_t>(number()), p.accumulate = number();
  const int64_t processors = number();
  grouping.a_scale_each = number(), grouping.b_scale_each = number();
  p.bias_type = static_cast<cudaDataType_t>(number());
  grouping.offsets = static_cast<const int32_t*>(*pointers++), grouping.flag = static_cast<int32_t*>(*pointers);
  grouping.b_plane = p.n * p.k, grouping.out_plane = p.m * p.n;
  if (const char* reason = sm90::unsupported_reason(p, grouping)) return std::printf("%s\n", reason), 0;
  const sm90::Schedule schedule = sm90::schedule_of(p, static_cast<int32_t>(processors), grouping);
  seed = given_seed, ended = false, on_cpu::readable.clear();
  const auto reads = [](const void* from, int64_t bytes) {
    on_cpu::readable.emplace_back(static_cast<const uint8_t*>(from), from ? bytes : 0);
  };
  const bool each_b = grouping.b_scale_each || (grouping.dim == sm90::GroupedDim::kM && p.b.scaling > Scaling::kRow);
  reads(p.a.scale, 4 * scale_numel(p.a.scaling, p.m, p.k) * (grouping.a_scale_each ? grouping.groups : 1));
  reads(p.b.scale, 4 * scale_numel(p.b.scaling, p.n, p.k) * (each_b ? grouping.groups : 1));
  reads(p.bias, p.n * grouping.groups * (p.bias_type == CUDA_R_32F ? 4 : 2)), reads(p.alpha, 4);
  reads(grouping.offsets, 4 * (grouping.groups + 1));
  if (sm90::launch(p, grouping, schedule, nullptr) != cudaSuccess) return 0;
  if (on_cpu::fault) return std::printf("%s\n", on_cpu::fault), std::fflush(stdout), -2;
  return !ended ? -1 : schedule.tile == sm90::Tile::k256x128x2 ? 256 : 128;
}
