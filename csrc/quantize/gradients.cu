// SPDX-License-Identifier: Apache-2.0
// Gradients of many parameters to codes in the order of their owners, and the sum of what the senders encoded: one launch
// each. A block has 8192 elements of one gradient's piece for one owner.
//
// Encoding: a thread has 16 elements of a row, the 16 that share a counter of the random bits. 8 threads have a row of 128; a
// warp has a row of 1024, two blocks of 16 a thread. Decoding: a thread has 8 elements and visits the senders in order.
#include "device/values.cuh"
#include "layout/decode_codes.cuh"
#include "quantize/fp4_block.cuh"
#include "quantize/gradients.h"

namespace fsdp_quant {

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;

// Load N values; those beyond the first `count` are zero.
template <class T, int N>
__device__ __forceinline__ void load_values(float (&v)[N], const T* x, int64_t count, bool vectors) {
  if (vectors && count >= N) {
#pragma unroll
    for (int k = 0; k < N; k += 8) Eight<T>::load(x + k).widen(reinterpret_cast<float(&)[8]>(v[k]));
    return;
  }
#pragma unroll
  for (int e = 0; e < N; ++e) v[e] = e < count ? static_cast<float>(x[e]) : 0.0f;
}

template <int N>
__device__ __forceinline__ uint32_t largest(const float (&v)[N]) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < N; ++e) bits = max(bits, bits_of(v[e]) & 0x7FFFFFFFu);
  return bits;
}

// The values of a gradient's piece for one owner.
template <class T>
struct PieceValues {
  const T* x;
  int64_t count;  // those that exist
  bool vectors;

  __device__ PieceValues(const Gradient& g, int32_t owner)
      : x(static_cast<const T*>(g.x) + owner * g.length),
        count(min(g.length, g.numel - owner * g.length)), vectors(g.vectors) {}

  template <int N>
  __device__ __forceinline__ void load(float (&v)[N], int64_t at) const {
    load_values(v, x + at, count - at, vectors);
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }

__device__ __forceinline__ uint4 codes8(const float (&v)[16], float enc, const uint4& random, const EncodingSpec& spec) {
  uint32_t w[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    w[k] = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      w[k] |= stochastic_code<8>(__fmul_rn(v[4 * k + e], enc), word_of(random, k) >> (8 * e) & 0xFF, spec) << (8 * e);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ uint2 codes4(const float (&v)[16], float enc, const uint4& random) {
  uint32_t w[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    w[half] = e2m1_nibbles<true, true>(
        [&](int e) { return __fmul_rn(fabsf(v[8 * half + e]), enc); },
        [&](int e) { return __byte_perm(word_of(random, 2 * half + e / 4), 0xFB008001u, 0x7054 | (e & 3) << 8); });
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (enc == enc) w[half] |= (bits_of(v[8 * half + e]) >> 31) << (4 * e + 3);  // NaN blocks have +6
  }
  return make_uint2(w[0], w[1]);
}

template <class T, GradientCodes kCodes>
__global__ void __launch_bounds__(256) encode_gradients_kernel(const __grid_constant__ GradientLaunch launch) {
  constexpr int kRow = row_of(kCodes), kRows = kGradientTile / kRow;
  const Gradient& g = launch.tensors[index_of_tile(launch, blockIdx.x)];
  const int32_t owner = blockIdx.y, thread = threadIdx.x;
  const PieceValues<T> values(g, owner);
  const int64_t first = static_cast<int64_t>(blockIdx.x - g.first_tile) * kRows;  // row of the piece
  uint8_t* const part = launch.buffer + owner * launch.bytes;
  if constexpr (kCodes == GradientCodes::kValues) {
#pragma unroll
    for (int it = 0; it < kRows / 256; ++it) {
      const int64_t row = first + it * 256 + thread;
      if (row >= g.rows) return;
      float v[8];
      values.load(v, row * 8);
      Eight<__nv_bfloat16>::round(v).store(reinterpret_cast<__nv_bfloat16*>(part) + (g.first_row + row) * 8);
    }
  } else if constexpr (kCodes == GradientCodes::kTwoLevel) {
    const RandomBlocks random = random_blocks(g.key, false, owner * static_cast<int32_t>(g.rows), 0);
    const int64_t row = first + thread / 32, at = g.first_row + row;  // a row a warp
    if (row >= g.rows) return;
    const int lane = thread % 32;
    float v[2][16];
    uint32_t most[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      values.load(v[k], row * kRow + 512 * k + 16 * lane);
      most[k] = largest(v[k]);
    }
    const float amax = __uint_as_float(canonical(__reduce_max_sync(kAll, max(most[0], most[1]))));
    const OfLine level(amax, launch.spec);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int block = 32 * k + lane;
      const BlockScale s = two_level_scale(__uint_as_float(canonical(most[k])), level, true, false);
      *reinterpret_cast<uint2*>(part + at * (kRow / 2) + block * 8) =
          codes4(v[k], s.enc, random.draw_one(static_cast<uint32_t>(row), block));
      part[launch.scale_offset + at * (kRow / 16) + block] = static_cast<uint8_t>(s.stored);
    }
    if (lane == 0) reinterpret_cast<float*>(part + launch.amax_offset)[at] = amax;
  } else {
    const RandomBlocks random = random_blocks(g.key, false, owner * static_cast<int32_t>(g.rows), 0);
    const int lane = thread % 8;  // of a row
#pragma unroll
    for (int it = 0; it < kRows / 32; ++it) {
      const int64_t row = first + it * 32 + thread / 8, at = g.first_row + row;
      const bool exists = row < g.rows;
      float v[16];
      values.load(v, exists ? row * kRow + 16 * lane : values.count);
      uint32_t most = largest(v);
#pragma unroll
      for (int by = 1; by < (kCodes == GradientCodes::kBlock32 ? 2 : 8); by *= 2)
        most = max(most, __shfl_xor_sync(kAll, most, by));
      if (!exists) continue;
      const float amax = __uint_as_float(canonical(most));
      const BlockScale s = kCodes == GradientCodes::kBlock32 ? e8m0_scale(amax, launch.spec) : fp32_scale(amax, launch.spec);
      *reinterpret_cast<uint4*>(part + at * kRow + 16 * lane) =
          codes8(v, s.enc, random.draw_one(static_cast<uint32_t>(row), lane), launch.spec);
      uint8_t* const scale = part + launch.scale_offset + at * 4;
      if (kCodes == GradientCodes::kBlock32 && lane % 2 == 0) scale[lane / 2] = static_cast<uint8_t>(s.stored);
      if (kCodes == GradientCodes::kBlock128 && lane == 0) *reinterpret_cast<uint32_t*>(scale) = s.stored;
    }
  }
}

// Elements `at` to at + 7 of a row that a sender encoded.
template <GradientCodes kCodes>
__device__ __forceinline__ void decode8(float (&v)[8], const uint8_t* part, int64_t row, int32_t at, const GradientLaunch& a) {
  if constexpr (kCodes == GradientCodes::kValues) {
    return Eight<__nv_bfloat16>::cached(reinterpret_cast<const __nv_bfloat16*>(part) + row * 8).widen(v);
  } else {
    constexpr Element E = kCodes == GradientCodes::kTwoLevel ? Element::kE2M1 : Element::kE4M3;
    constexpr int kRow = row_of(kCodes), kBytes = row_bytes(E, kRow);
    const uint2 codes = load_codes<E>(part + row * kBytes, at, kBytes, true);
    const uint8_t* const scales = part + a.scale_offset;
    float scale, outer = 1.0f;
    if constexpr (kCodes == GradientCodes::kTwoLevel) {
      const uint32_t code = __ldg(scales + row * (kRow / 16) + at / 16);
      scale = (code & 0x7F) == 0x7F ? quiet_nan() : e4m3_value(code);
      outer = tensor_decode_scale(__ldg(reinterpret_cast<const float*>(part + a.amax_offset) + row), a.spec.tensor_max);
    } else if constexpr (kCodes == GradientCodes::kBlock32) {
      scale = power_of_two(__ldg(scales + row * 4 + at / 32));
    } else {
      scale = __ldg(reinterpret_cast<const float*>(scales) + row);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = __half22float2(halves_of<E>(codes, k));
      v[2 * k] = __fmul_rn(pair.x, scale), v[2 * k + 1] = __fmul_rn(pair.y, scale);
    }
    if constexpr (kCodes == GradientCodes::kTwoLevel) {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], outer);
    }
  }
}

template <class T, GradientCodes kCodes>
__global__ void __launch_bounds__(256) decode_gradients_kernel(const __grid_constant__ GradientLaunch launch) {
  constexpr int kRow = row_of(kCodes);
  const Gradient& g = launch.tensors[index_of_tile(launch, blockIdx.x)];
  const int64_t tile = static_cast<int64_t>(blockIdx.x - g.first_tile) * kGradientTile;
#pragma unroll 2
  for (int it = 0; it < kGradientTile / 8 / 256; ++it) {
    const int64_t at = tile + (it * 256 + static_cast<int32_t>(threadIdx.x)) * 8, left = g.length - at;
    if (left <= 0) return;
    const int64_t row = g.first_row + at / kRow;
    float sum[8];
    decode8<kCodes>(sum, launch.buffer, row, at % kRow, launch);
#pragma unroll 4
    for (int sender = 1; sender < launch.world; ++sender) {
      float v[8];
      decode8<kCodes>(v, launch.buffer + sender * launch.bytes, row, at % kRow, launch);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = __fadd_rn(sum[e], v[e]);
    }
    if (launch.factor != 1.0f) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = __fmul_rn(sum[e], launch.factor);
    }
    T* const to = static_cast<T*>(launch.sum) + g.at + at;
    const Eight<T> eight = Eight<T>::round(sum);
    if (g.vectors && left >= 8) {
      eight.store(to);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < left) to[e] = reinterpret_cast<const T*>(eight.w)[e];
    }
  }
}

// Call launch(T{}, integral_constant<GradientCodes>) for the kind of codes.
template <class T, class Launch>
cudaError_t with_codes(const EncodingSpec& s, Launch launch) {
  switch (codes_of(s)) {
    case GradientCodes::kValues:
      launch(T{}, std::integral_constant<GradientCodes, GradientCodes::kValues>());
      break;
    case GradientCodes::kBlock128:
      launch(T{}, std::integral_constant<GradientCodes, GradientCodes::kBlock128>());
      break;
    case GradientCodes::kBlock32:
      launch(T{}, std::integral_constant<GradientCodes, GradientCodes::kBlock32>());
      break;
    case GradientCodes::kTwoLevel:
      launch(T{}, std::integral_constant<GradientCodes, GradientCodes::kTwoLevel>());
      break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_encode_gradients(const GradientLaunch& a, cudaStream_t stream) {
  const auto launch = [&](auto type, auto codes) {
    encode_gradients_kernel<decltype(type), decltype(codes)::value><<<dim3(a.tiles, a.world), 256, 0, stream>>>(a);
  };
  if (a.input == Input::kF32) return with_codes<float>(a.spec, launch);
  return a.input == Input::kF16 ? with_codes<__half>(a.spec, launch) : with_codes<__nv_bfloat16>(a.spec, launch);
}

cudaError_t launch_decode_gradients(const GradientLaunch& a, cudaStream_t stream) {
  const auto launch = [&](auto type, auto codes) {
    decode_gradients_kernel<decltype(type), decltype(codes)::value><<<a.tiles, 256, 0, stream>>>(a);
  };
  if (a.output == Output::kF32) return with_codes<float>(a.spec, launch);
  return a.output == Output::kF16 ? with_codes<__half>(a.spec, launch) : with_codes<__nv_bfloat16>(a.spec, launch);
}

}  // namespace fsdp_quant
