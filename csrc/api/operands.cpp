// SPDX-License-Identifier: Apache-2.0
#include "api/operands.h"

#include "quantize/quantize.h"

namespace fsdp_quant {

int32_t processors_of(int device, int64_t most) {
  int count = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return most > 0 && most < count ? static_cast<int32_t>(most) : count;
}

int capability_of(int device) {
  thread_local int asked = -1, capability = 0;
  if (asked != device) {
    int major = 0, minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    asked = device, capability = 10 * major + minor;
  }
  return capability;
}

cudaDataType_t type_of(at::ScalarType dtype, const char* name) {
  switch (dtype) {
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kFloat:
      return CUDA_R_32F;
    default:
      TORCH_CHECK_VALUE(false, name, " is ", dtype, "; wanted bfloat16, float16 or float32");
  }
}

Operand operand_of_kind(int64_t kind, const char* name) {
  TORCH_CHECK_VALUE(kind >= 0 && (kind & 7) <= 3 && kind >> 3 <= 7, name, "_kind is ", kind,
                    "; wanted element (0 to 3) | scaling (0 to 7) << 3");
  const auto element = static_cast<Element>(kind & 7);
  Operand o = {};
  o.scaling = static_cast<Scaling>(kind >> 3);
  o.type = element == Element::kE4M3   ? CUDA_R_8F_E4M3
           : element == Element::kE5M2 ? CUDA_R_8F_E5M2
           : element == Element::kE2M1 ? CUDA_R_4F_E2M1
                                       : CUDA_R_16BF;
  return o;
}

Operand operand_of(const at::Tensor& x, int64_t kind, const char* name) {
  check_cuda(x, name);
  TORCH_CHECK_VALUE(x.dim() == 2, name, " has shape ", x.sizes(), "; wanted [rows, K]");
  Operand o = operand_of_kind(kind, name);
  const int64_t rows = x.size(0), cols = x.size(1), row_stride = x.stride(0), col_stride = x.stride(1);
  const auto element = static_cast<Element>(kind & 7);
  o.data = x.const_data_ptr();
  // The stride of a dim of size 1 is arbitrary.
  o.k_major = (col_stride == 1 || cols <= 1) && (row_stride >= cols || rows <= 1);
  o.ld = o.k_major ? (rows > 1 ? row_stride : cols) : (cols > 1 ? col_stride : rows);
  if (element == Element::kNone) {
    o.type = type_of(x.scalar_type(), name);
    TORCH_CHECK_VALUE(is_half(o.type), name, " is ", x.scalar_type(),
                      "; wanted bfloat16, float16, or uint8 codes and their element in ", name, "_kind");
    const bool outer_major = (row_stride == 1 || rows <= 1) && (col_stride >= rows || cols <= 1);
    TORCH_CHECK_VALUE(o.k_major || outer_major, name, " has shape ", x.sizes(), " and strides ", x.strides(),
                      "; wanted rows or columns that are contiguous and do not overlap");
    return o;
  }
  TORCH_CHECK_VALUE(x.scalar_type() == at::kByte, name, " is ", x.scalar_type(), "; codes are uint8");
  TORCH_CHECK_VALUE(o.k_major, name, " has shape ", x.sizes(), " and strides ", x.strides(),
                    "; codes are K-major, wanted rows that are contiguous and do not overlap");
  TORCH_CHECK_VALUE(x.numel() == 0 || (cols % 16 == 0 && o.ld % 16 == 0 && is_aligned(o.data, 16)), name,
                    " has rows of ", cols, " bytes, ", o.ld, " bytes apart, from address ",
                    reinterpret_cast<uintptr_t>(o.data) % 16,
                    " modulo 16; rows of codes are multiples of 16 bytes and aligned to 16");
  if (element == Element::kE2M1) o.ld *= 2;
  return o;
}

bool set_scale(
    Operand& o, const MaybeTensor& scale, const at::Tensor& x, int64_t outer, int64_t k, const char* name,
    int64_t count) {
  TORCH_CHECK_VALUE(scale.has_value() == (o.scaling != Scaling::kNone), name, " is ",
                    scale.has_value() ? "given" : "None", ", and the scaling in its kind is ",
                    static_cast<int>(o.scaling), "; 0 has no scale, others have one");
  if (!scale.has_value()) return false;
  const bool bytes = has_byte_scales(o.scaling);
  const int64_t one = scale_numel(o.scaling, outer, k);
  const bool each = count > 1 && scale->numel() != one;
  check_buffer(*scale, name, x, bytes ? at::kByte : at::kFloat, each ? count * one : one);
  o.scale = scale->const_data_ptr();
  TORCH_CHECK_VALUE(o.scaling == Scaling::kTensor || is_aligned(o.scale, 16), name, " is at address ",
                    reinterpret_cast<uintptr_t>(o.scale) % 16,
                    " modulo 16; scales of rows and blocks are aligned to 16 bytes");
  return each;
}

}  // namespace fsdp_quant
