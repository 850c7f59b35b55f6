// Codes to values: (element * scale) * tensor scale in fp32, rounded once to the result's type.
//
// A thread decodes 8 columns of 8 rows: a warp reads 256 (128) and writes 512 contiguous bytes of each row. Rowwise scales
// are one a row, columnwise ones 8 neighbours. Tails go one by one.
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

// The scales of 8 neighbouring columns.
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

// 4 (or 8) elements of a word.
template <Element E>
__device__ __forceinline__ void decode_word(uint32_t word, float* out) {
  if constexpr (E == Element::kE2M1) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint2 four = halves_of_e2m1x4(word >> (16 * h));
      const __half2 a = *reinterpret_cast<const __half2*>(&four.x), b = *reinterpret_cast<const __half2*>(&four.y);
      out[4 * h] = __low2float(a), out[4 * h + 1] = __high2float(a);
      out[4 * h + 2] = __low2float(b), out[4 * h + 3] = __high2float(b);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t two = (word >> (16 * e)) & 0xFFFF;
      const __half2 pair = E == Element::kE5M2 ? ptx::cvt_f16x2_e5m2x2(two) : ptx::cvt_f16x2_e4m3x2(two);
      out[2 * e] = __low2float(pair), out[2 * e + 1] = __high2float(pair);
    }
  }
}

// 8 elements of 6 bits: their exponent and mantissa are those of an fp16 number, but for the exponent's bias.
template <Element E>
__device__ __forceinline__ void decode_six(const uint32_t (&words)[2], float (&out)[kCols]) {
  constexpr int kMantissa = E == Element::kE3M2 ? 2 : 3, kBias = E == Element::kE3M2 ? 3 : 1;
  const uint64_t codes = static_cast<uint64_t>(words[1]) << 32 | words[0];
#pragma unroll
  for (int e = 0; e < kCols; ++e) {
    const uint32_t code = static_cast<uint32_t>(codes >> (6 * e));
    const __half_raw half = {static_cast<unsigned short>((code & 0x20u) << 10 | (code & 0x1Fu) << (10 - kMantissa))};
    out[e] = __fmul_rn(__half2float(half), static_cast<float>(1 << (15 - kBias)));
  }
}

template <Output O>
__device__ __forceinline__ void store8(void* out, int64_t at, const float* v, int count, bool vectors) {
  if constexpr (O == Output::kF32) {
    auto* p = static_cast<float*>(out) + at;
    if (vectors) {
#pragma unroll
      for (int e = 0; e < 2; ++e) reinterpret_cast<float4*>(p)[e] = make_float4(v[4 * e], v[4 * e + 1], v[4 * e + 2], v[4 * e + 3]);
    } else {
#pragma unroll
      for (int e = 0; e < kCols; ++e) {
        if (e < count) p[e] = v[e];
      }
    }
  } else {
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (O == Output::kBF16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * e], v[2 * e + 1]);
        words[e] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(v[2 * e], v[2 * e + 1]);
        words[e] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    auto* p = static_cast<uint16_t*>(out) + at;
    if (vectors) {
      *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int e = 0; e < kCols; ++e) {
        if (e < count) p[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e & 1)));
      }
    }
  }
}

template <Element E, ScaleKind Kind, Output O>
__global__ void __launch_bounds__(256) dequantize_kernel(const Dequantize a) {
  constexpr bool kSix = E == Element::kE2M3 || E == Element::kE3M2;
  constexpr int kBytes = E == Element::kE2M1 ? 4 : kSix ? 6 : 8;  // codes of 8 columns: as many as a code has bits
  constexpr int kWords = (kBytes + 3) / 4;
  const int32_t row_of_blocks = blockIdx.x / a.blocks_per_row;
  const int32_t col = ((blockIdx.x - row_of_blocks * a.blocks_per_row) * blockDim.x + threadIdx.x) * kCols;
  const int32_t row0 = row_of_blocks * kRows;
  if (a.alpha != nullptr && blockIdx.x + threadIdx.x == 0) *a.alpha = value_of(a.factors[0]) * value_of(a.factors[1]);
  if (col >= a.cols) return;
  const int32_t count = min(kCols, a.cols - col);
  const bool whole = a.vectors && count == kCols;
  const int64_t row_bytes = E == Element::kE2M1 ? (a.cols + 1) >> 1 : kSix ? ((a.cols + 3) >> 2) * 3 : a.cols;
  const int32_t block_cols = ((a.cols - 1) >> a.col_log2) + 1;
  const float tensor_scale = a.tensor_amax ? tensor_decode_scale(__ldg(a.tensor_amax), a.tensor_max) : 1.0f;
  uint32_t words[kRows][kWords];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint8_t* at = a.data + (row0 + i) * row_bytes + col * kBytes / kCols;
    if (whole && row0 + i < a.rows) {
      if constexpr (kBytes == 8) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
        words[i][0] = v.x, words[i][1] = v.y;
      } else if constexpr (kSix) {
        const auto* const halves = reinterpret_cast<const uint16_t*>(at);
        words[i][0] = __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16, words[i][1] = __ldg(halves + 2);
      } else {
        words[i][0] = __ldg(reinterpret_cast<const uint32_t*>(at));
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[i][w] = 0;
      const int bytes = E == Element::kE2M1 ? (count + 1) / 2 : kSix ? (count + 3) / 4 * 3 : count;
#pragma unroll
      for (int e = 0; e < kBytes; ++e) {
        if (row0 + i < a.rows && e < bytes) words[i][e / 4] |= static_cast<uint32_t>(at[e]) << (8 * (e % 4));
      }
    }
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
    if constexpr (kSix) {
      decode_six<E>(words[i], v);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) decode_word<E>(words[i][w], v + w * (kCols * 4 / kBytes));
    }
    if (a.scale != nullptr) {
      const int32_t block_row = ((row + a.shift) >> a.row_log2) - (a.shift >> a.row_log2);
      const int64_t base = static_cast<int64_t>(block_row) * block_cols;
      if (a.col_log2 >= 3) {
#pragma unroll
        for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], row_scales[i]);
      } else {  // one scale a column, the same for rows of one block
        if (block_row != known_row) read_scales<Kind>(scales, a.scale, base + col, count, whole);
        known_row = block_row;
#pragma unroll
        for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], scales[e]);
      }
    }
    if (a.tensor_amax != nullptr) {
#pragma unroll
      for (int e = 0; e < kCols; ++e) v[e] = __fmul_rn(v[e], tensor_scale);
    }
    store8<O>(a.out, static_cast<int64_t>(row) * a.cols + col, v, count, whole);
  }
}

template <Element E, ScaleKind Kind>
cudaError_t choose_output(const Dequantize& a, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(a.blocks_per_row) * ((a.rows + kRows - 1) / kRows);
  if (blocks > 0x7FFFFFFF) return cudaErrorInvalidConfiguration;
  switch (a.output) {
    case Output::kF32:
      dequantize_kernel<E, Kind, Output::kF32><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
      break;
    case Output::kBF16:
      dequantize_kernel<E, Kind, Output::kBF16><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
      break;
    default:
      dequantize_kernel<E, Kind, Output::kF16><<<static_cast<unsigned>(blocks), a.threads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

template <Element E>
cudaError_t choose_scale(const Dequantize& a, cudaStream_t stream) {
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
