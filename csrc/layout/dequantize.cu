// SPDX-License-Identifier: Apache-2.0
// Decode codes: (element * scale) * tensor scale in fp32, rounded once to the output type.
//
// A thread decodes 8 columns of 8 rows: a warp reads 256 (128) and writes 512 contiguous bytes of each row. Rowwise scales
// are one per row, columnwise ones 8 neighbours. Tails are handled per element.
#include <type_traits>

#include "device/values.cuh"
#include "layout/decode_codes.cuh"
#include "layout/factor.cuh"

namespace fsdp_quant {

namespace {

constexpr int kRows = 8, kCols = 8;

template <ScaleKind Kind>
__device__ __forceinline__ float scale_value(uint32_t code) {
  if constexpr (Kind == ScaleKind::kE4M3) return (code & 0x7F) == 0x7F ? quiet_nan() : e4m3_value(code);
  return power_of_two(code);
}

template <ScaleKind Kind>
__device__ __forceinline__ float read_scale(const void* scale, int64_t index) {
  if constexpr (Kind == ScaleKind::kFp32) return __ldg(static_cast<const float*>(scale) + index);
  return scale_value<Kind>(__ldg(static_cast<const uint8_t*>(scale) + index));
}

// Scales of 8 adjacent columns.
template <ScaleKind Kind>
__device__ __forceinline__ void read_scales(float (&out)[kCols], const void* scale, int64_t index, int count, bool vectors) {
  if (Kind != ScaleKind::kFp32 && vectors) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(scale) + index));
    const uint32_t words[2] = {v.x, v.y};
#pragma unroll
    for (int e = 0; e < kCols; ++e) out[e] = scale_value<Kind>((words[e / 4] >> (8 * (e % 4))) & 0xFF);
    return;
  }
#pragma unroll
  for (int e = 0; e < kCols; ++e) out[e] = e < count ? read_scale<Kind>(scale, index + e) : 0.0f;
}

template <Element E>
__device__ __forceinline__ void decode_codes(uint2 codes, float (&out)[kCols]) {
#pragma unroll
  for (int k = 0; k < kCols / 2; ++k) {
    const float2 pair = __half22float2(halves_of<E>(codes, k));
    out[2 * k] = pair.x, out[2 * k + 1] = pair.y;
  }
  if constexpr (kHalfScale<E> != 1.0f) {
#pragma unroll
    for (int e = 0; e < kCols; ++e) out[e] = __fmul_rn(out[e], kHalfScale<E>);
  }
}

template <Output O>
using ValueOf = std::conditional_t<O == Output::kF32, float, std::conditional_t<O == Output::kF16, __half, __nv_bfloat16>>;

template <class T>
__device__ __forceinline__ void store8(T* to, const float (&v)[kCols], int count, bool vectors) {
  const Eight<T> eight = Eight<T>::round(v);
  if (vectors) return eight.store(to);
  using Word = std::conditional_t<Eight<T>::kWide, uint32_t, uint16_t>;
#pragma unroll
  for (int e = 0; e < kCols; ++e) {
    const uint32_t word = Eight<T>::kWide ? eight.w[e % Eight<T>::kWords] : eight.w[e / 2] >> (16 * (e & 1));
    if (e < count) reinterpret_cast<Word*>(to)[e] = static_cast<Word>(word);
  }
}

// ByLine: a second-level scale per row or column (Dequantize::line_scale).
template <Element E, ScaleKind Kind, Output O, bool ByLine>
__global__ void __launch_bounds__(256) dequantize_kernel(const Dequantize a) {
  const int32_t row_of_blocks = blockIdx.x / a.blocks_per_row;
  const int32_t col = ((blockIdx.x - row_of_blocks * a.blocks_per_row) * blockDim.x + threadIdx.x) * kCols;
  const int32_t row0 = row_of_blocks * kRows;
  if (a.alpha != nullptr && blockIdx.x + threadIdx.x == 0) *a.alpha = value_of(a.factors[0]) * value_of(a.factors[1]);
  if (col >= a.cols) return;
  const int32_t count = min(kCols, a.cols - col);
  const bool whole = a.vectors && count == kCols;
  const int32_t bytes = row_bytes(E, a.cols);
  const int32_t block_cols = ((a.cols - 1) >> a.col_log2) + 1;
  const float tensor_scale = a.tensor_amax ? tensor_decode_scale(__ldg(a.tensor_amax), a.tensor_max) : 1.0f;
  uint2 codes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    codes[i] = make_uint2(0, 0);
    if (row0 + i < a.rows) codes[i] = load_codes<E>(a.data + static_cast<int64_t>(row0 + i) * bytes, col, bytes, whole);
  }
  float row_scales[kRows], scales[kCols];
  int32_t known_row = -1;
  if (a.scale != nullptr && a.col_log2 >= 3) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = min(row0 + i, a.rows - 1);
      const int32_t block_row = ((row + a.shift) >> a.row_log2) - (a.shift >> a.row_log2);
      row_scales[i] = read_scale<Kind>(a.scale, static_cast<int64_t>(block_row) * block_cols + (col >> a.col_log2));
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int32_t row = row0 + i;
    if (row >= a.rows) continue;
    float v[kCols];
    decode_codes<E>(codes[i], v);
    if (a.scale != nullptr) {
      const int32_t block_row = ((row + a.shift) >> a.row_log2) - (a.shift >> a.row_log2);
      const int64_t base = static_cast<int64_t>(block_row) * block_cols;
      if (a.col_log2 >= 3) {
#pragma unroll
        for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], row_scales[i]);
      } else {  // one scale per column, shared by rows of a block
        if (block_row != known_row) read_scales<Kind>(scales, a.scale, base + col, count, whole);
        known_row = block_row;
#pragma unroll
        for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], scales[e]);
      }
    }
    if (a.tensor_amax != nullptr) {
#pragma unroll
      for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], tensor_scale);
    } else if (ByLine) {
#pragma unroll
      for (int e = 0; e < kCols; ++e)
        v[e] = __fmul_rn(v[e], __ldg(a.line_scale + (a.by_row ? row : min(col + e, a.cols - 1))));
    }
    store8(static_cast<ValueOf<O>*>(a.out) + static_cast<int64_t>(row) * a.cols + col, v, count, whole);
  }
}

template <Element E, ScaleKind Kind, bool ByLine = false>
cudaError_t choose_output(const Dequantize& a, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(a.blocks_per_row) * ((a.rows + kRows - 1) / kRows);
  if (blocks > 0x7FFFFFFF) return cudaErrorInvalidConfiguration;
  switch (a.output) {
    case Output::kF32:
      dequantize_kernel<E, Kind, Output::kF32, ByLine><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
      break;
    case Output::kBF16:
      dequantize_kernel<E, Kind, Output::kBF16, ByLine><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
      break;
    default:
      dequantize_kernel<E, Kind, Output::kF16, ByLine><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

template <Element E>
cudaError_t choose_scale(const Dequantize& a, cudaStream_t stream) {
  if constexpr (E == Element::kE2M1) {
    if (a.line_scale != nullptr) return choose_output<E, ScaleKind::kE4M3, true>(a, stream);
  }
  if (a.scale_kind == ScaleKind::kE4M3) return choose_output<E, ScaleKind::kE4M3>(a, stream);
  if (a.scale_kind >= ScaleKind::kE8M0Up) return choose_output<E, ScaleKind::kE8M0Up>(a, stream);
  return choose_output<E, ScaleKind::kFp32>(a, stream);
}

}  // namespace

cudaError_t launch_dequantize(const Dequantize& a, cudaStream_t stream) {
  switch (a.element) {
    case Element::kE2M1:
      return choose_scale<Element::kE2M1>(a, stream);
    case Element::kE5M2:
      return choose_scale<Element::kE5M2>(a, stream);
    case Element::kE2M3:
      return choose_output<Element::kE2M3, ScaleKind::kE8M0Up>(a, stream);
    case Element::kE3M2:
      return choose_output<Element::kE3M2, ScaleKind::kE8M0Up>(a, stream);
    default:
      return choose_scale<Element::kE4M3>(a, stream);
  }
}

}  // namespace fsdp_quant
