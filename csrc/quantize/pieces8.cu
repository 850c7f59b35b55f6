// Pieces in 8 bits, and scales of collected amaxes.
#include "quantize/pieces_kernel.cuh"

namespace fsdp_quant {

namespace {

__device__ __forceinline__ void convert(const ScaleRun& run, int64_t i) {
  const float v = run.narrow & 1 ? __bfloat162float(static_cast<const __nv_bfloat16*>(run.from)[i])
                                 : static_cast<const float*>(run.from)[i];
  if (run.narrow & 2) {
    static_cast<__nv_bfloat16*>(run.out)[i] = __float2bfloat16_rn(v);
  } else {
    static_cast<float*>(run.out)[i] = v;
  }
}

__global__ void __launch_bounds__(kThreads) cast_scales_kernel(const __grid_constant__ ScalesLaunch launch) {
  if (launch.skip != nullptr && *launch.skip != 0) return;
  const int2 where = launch.chunks[blockIdx.x];
  const ScaleRun run = launch.runs[where.x];
  const Side& s = launch.side;
  const int64_t first = static_cast<int64_t>(where.y) * kScaleChunk, end = min(first + kScaleChunk, run.count);
  const auto* amax = static_cast<const float*>(run.from);
  const float target =
      s.present() && s.two_level() ? __fmul_rn(tensor_encode_factor(*run.tensor_amax), 1.0f / 6.0f) : 0.0f;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    if (!s.present()) {
      convert(run, i);
    } else if (run.enc != nullptr) {
      const float found = amax[i];
      PieceSide b = {};
      b.amax = const_cast<float*>(amax) + i, b.enc = run.enc;
      if (run.out != nullptr) static_cast<uint32_t*>(run.out)[i] = delayed_scale(s, b).stored;
      if (run.record != nullptr && is_finite(found)) *run.record = fmaxf(*run.record, found);
    } else if (s.two_level()) {
      static_cast<uint8_t*>(run.out)[i] = static_cast<uint8_t>(two_level_code(amax[i], target, false));
    } else if (s.byte_scales()) {
      static_cast<uint8_t*>(run.out)[i] = static_cast<uint8_t>(e8m0_scale(amax[i], s).stored);
    } else {
      static_cast<uint32_t*>(run.out)[i] = fp32_scale(amax[i], s).stored;
    }
  }
}

}  // namespace

cudaError_t launch_pieces8(const PiecesLaunch& launch, cudaStream_t stream) {
  if (!launch.side[1].present()) return launch_pieces<Plain8, Absent, 3>(launch, stream);
  if (!launch.side[0].present()) return launch_pieces<Absent, Plain8, 3>(launch, stream);
  return launch_pieces<Plain8, Plain8, 3>(launch, stream);
}

cudaError_t launch_cast_scales(const ScalesLaunch& launch, cudaStream_t stream) {
  cast_scales_kernel<<<static_cast<unsigned>(launch.count), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace fsdp_quant
