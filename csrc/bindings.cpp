// The operators of fsdp_quant, by domain. Python defines the namespace; this library adds to it.
#include <torch/library.h>

namespace fsdp_quant {
void register_encoding(torch::Library& m);
void register_quantize(torch::Library& m);
void register_layout(torch::Library& m);
void register_gemm(torch::Library& m);
void register_parts(torch::Library& m);
void register_linear(torch::Library& m);
void register_norm(torch::Library& m);
void register_optim(torch::Library& m);
void register_pieces(torch::Library& m);
}  // namespace fsdp_quant

TORCH_LIBRARY_FRAGMENT(fsdp_quant, m) {
  fsdp_quant::register_encoding(m);
  fsdp_quant::register_quantize(m);
  fsdp_quant::register_layout(m);
  fsdp_quant::register_gemm(m);
  fsdp_quant::register_parts(m);
  fsdp_quant::register_linear(m);
  fsdp_quant::register_norm(m);
  fsdp_quant::register_optim(m);
  fsdp_quant::register_pieces(m);
}
