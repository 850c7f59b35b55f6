// SPDX-License-Identifier: Apache-2.0
// Host side of gradient codes; see quantize/gradients.cu and fsdp_quant/ops/gradient_codes.py.
#include <torch/library.h>

#include "api/encoding.h"
#include "api/launch.h"
#include "quantize/gradients.h"

namespace fsdp_quant {

namespace {

int64_t aligned(int64_t bytes) { return ceil_div(bytes, 16) * 16; }

// Rows and sections of a buffer, [Note: layout of a gradient buffer].
struct Sections {
  int64_t row, row_bytes, scale_bytes, amax_bytes;

  explicit Sections(const EncodingSpec& s)
      : row(row_of(codes_of(s))), row_bytes(s.present() ? bytes_of(s, row) : 2 * row),
        scale_bytes(!s.present() ? 0 : s.two_level() ? row / 16 : 4), amax_bytes(s.two_level() ? 4 : 0) {}

  int64_t rows_of(int64_t length) const { return ceil_div(length, row); }
};

EncodingSpec spec_of(int64_t encoding) {
  const EncodingSpec s = unpack_encoding(encoding, 0.0, "encoding");
  const bool known = s.two_level() ? s.by_line && !s.exact() && !s.chooses()
                                   : s.element == Element::kE4M3 && (s.byte_scales() ? s.contraction == 32 : s.contraction == 128);
  TORCH_CHECK_VALUE(!s.present() || (known && s.outer == 1 && s.stochastic && !s.rotated && !s.transposed),
                    "encoding is ", encoding, "; gradients are bf16, or e4m3 in blocks of 128 or 32, or e2m1 in blocks of 16, ",
                    "rounded stochastically");
  return s;
}

// Launch over gradients whose pieces have these lengths. fill(g, i): the rest of its arguments.
template <class Run, class Fill>
void launch_gradients(const char* name, GradientLaunch&& arguments, const at::Tensor& buffer, const std::vector<int64_t>& lengths,
                      Run run, Fill fill) {
  const Sections sections(arguments.spec);
  int64_t rows = 0;
  for (const int64_t length : lengths) rows += sections.rows_of(length);
  arguments.scale_offset = aligned(rows * sections.row_bytes);
  arguments.amax_offset = aligned(arguments.scale_offset + rows * sections.scale_bytes);
  arguments.bytes = aligned(arguments.amax_offset + rows * sections.amax_bytes);
  check_cuda(buffer, "buffer");
  TORCH_CHECK_VALUE(buffer.dim() == 2 && buffer.size(1) == arguments.bytes && buffer.size(0) < 65536, "buffer has shape ",
                    buffer.sizes(), "; wanted [owners, ", arguments.bytes, "]");
  check_buffer(buffer, "buffer", buffer, at::kByte, buffer.numel());
  if (buffer.numel() == 0) return;
  TORCH_CHECK_VALUE(is_aligned(buffer.const_data_ptr(), 16), "the buffer is not aligned to 16 bytes");
  arguments.world = static_cast<int32_t>(buffer.size(0));
  const c10::cuda::CUDAGuard guard(buffer.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  MultiTensorLaunch<GradientLaunch> launch(name, [&](const GradientLaunch& table) { return run(table, stream); });
  launch.table() = arguments;
  int64_t first_row = 0, at = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Gradient g = {};
    g.length = lengths[i], g.rows = sections.rows_of(g.length), g.first_row = first_row, g.at = at;
    first_row += g.rows, at += g.length;
    if (g.length == 0) continue;
    fill(g, i);
    launch.add(g, ceil_div(g.rows * sections.row, kGradientTile));
  }
  launch.flush();
}

// Keys int64 [idents, 5] of a reduction, which is counted. step: int64 [5]. counted: int64 [4].
at::Tensor gradient_keys(const at::Tensor& step, const at::Tensor& idents, at::Tensor& counted) {
  check_cuda(step, "step");
  check_buffer(step, "step", step, at::kLong, 5);
  check_buffer(idents, "idents", step, at::kLong, idents.numel());
  check_buffer(counted, "counted", step, at::kLong, 4);
  const c10::cuda::CUDAGuard guard(step.device());
  const at::Tensor keys = new_empty(step, {idents.numel(), 5}, at::kLong);
  check_launch(launch_gradient_keys(step.const_data_ptr<int64_t>(), idents.const_data_ptr<int64_t>(), idents.numel(),
                                    counted.mutable_data_ptr<int64_t>(), keys.mutable_data_ptr<int64_t>(),
                                    c10::cuda::getCurrentCUDAStream()), "gradient_keys");
  return keys;
}

// Codes of all owners. grads: one dtype, contiguous. keys: int64 [grads, 5]. buffer: uint8 [owners, bytes].
void encode_gradients(at::TensorList grads, int64_t encoding, const MaybeTensor& keys, at::Tensor& buffer) {
  TORCH_CHECK_VALUE(!grads.empty(), "there is no gradient");
  TORCH_CHECK_VALUE(buffer.dim() == 2, "buffer has shape ", buffer.sizes(), "; wanted [owners, bytes]");
  GradientLaunch arguments = {};
  arguments.spec = spec_of(encoding), arguments.input = input_of(grads[0], false);
  arguments.buffer = buffer.mutable_data_ptr<uint8_t>();
  TORCH_CHECK_VALUE(!arguments.spec.present() || keys.has_value(), "keys are needed for stochastic rounding");
  if (arguments.spec.present()) check_buffer(*keys, "keys", buffer, at::kLong, 5 * static_cast<int64_t>(grads.size()));
  std::vector<int64_t> lengths;
  for (const at::Tensor& g : grads) {
    TORCH_CHECK_VALUE(g.dim() > 0, "a gradient has no dim");
    const int64_t lines = ceil_div(g.size(0), buffer.size(0));
    lengths.push_back(g.size(0) == 0 ? 0 : lines * (g.numel() / g.size(0)));
  }
  launch_gradients("encode_gradients", std::move(arguments), buffer, lengths, launch_encode_gradients, [&](Gradient& g, size_t i) {
    check_buffer(grads[i], "a gradient", buffer, grads[0].scalar_type(), grads[i].numel());
    g.x = grads[i].const_data_ptr(), g.numel = grads[i].numel();
    g.vectors = is_aligned(g.x, 16) && g.length * grads[i].element_size() % 16 == 0;
    if (keys.has_value()) g.key = keys->const_data_ptr<int64_t>() + 5 * i;
  });
}

// The sum of what the senders encoded. buffer: uint8 [senders, bytes]. sum: [sum of lengths], of the pieces.
void decode_gradients(const at::Tensor& buffer, at::IntArrayRef lengths, int64_t encoding, double factor, at::Tensor& sum) {
  GradientLaunch arguments = {};
  arguments.spec = spec_of(encoding), arguments.factor = static_cast<float>(factor);
  arguments.buffer = const_cast<uint8_t*>(buffer.const_data_ptr<uint8_t>());
  int64_t total = 0;
  for (const int64_t length : lengths) total += length;
  check_buffer(sum, "sum", buffer, sum.scalar_type(), total);
  const Input kind = input_of(sum, false);
  arguments.output = kind == Input::kF32 ? Output::kF32 : kind == Input::kF16 ? Output::kF16 : Output::kBF16;
  arguments.sum = sum.mutable_data_ptr();
  const int64_t size = sum.element_size();
  launch_gradients("decode_gradients", std::move(arguments), buffer, lengths.vec(), launch_decode_gradients, [&](Gradient& g, size_t) {
    g.vectors = is_aligned(static_cast<const uint8_t*>(sum.const_data_ptr()) + g.at * size, 16);
  });
}

}  // namespace

void register_gradients(torch::Library& m) {
  m.def("gradient_keys(Tensor step, Tensor idents, Tensor(a!) counted) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, gradient_keys), compliant());
  m.def("encode_gradients(Tensor[] grads, int encoding, Tensor? keys, Tensor(a!) buffer) -> ()",
        torch::dispatch(c10::DispatchKey::CUDA, encode_gradients), compliant());
  m.def("decode_gradients(Tensor buffer, int[] lengths, int encoding, float factor, Tensor(a!) sum) -> ()",
        torch::dispatch(c10::DispatchKey::CUDA, decode_gradients), compliant());
}

}  // namespace fsdp_quant
