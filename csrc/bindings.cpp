// SPDX-License-Identifier: Apache-2.0
// Registration of the operators. Python defines the namespace; this library adds to it.
#include <torch/library.h>

namespace fsdp_quant {
void register_encoding(torch::Library& m);
void register_quantize(torch::Library& m);
void register_anchored(torch::Library& m);
void register_multi_tensor(torch::Library& m);
void register_layout(torch::Library& m);
void register_gemm(torch::Library& m);
void register_grouped_gemm(torch::Library& m);
void register_norm(torch::Library& m);
void register_combine(torch::Library& m);
void register_rows(torch::Library& m);
void register_optim(torch::Library& m);
void register_pieces(torch::Library& m);
void register_gradients(torch::Library& m);
namespace step {
void register_plan(torch::Library& m);
void register_slots(torch::Library& m);
void register_weight(torch::Library& m);
void register_linear(torch::Library& m);
void register_grouped(torch::Library& m);
void register_activate(torch::Library& m);
}  // namespace step
}  // namespace fsdp_quant

TORCH_LIBRARY_FRAGMENT(fsdp_quant, m) {
  using namespace fsdp_quant;
  for (const auto add :
       {register_encoding, register_quantize, register_anchored, register_multi_tensor, register_layout, register_gemm,
        register_grouped_gemm, register_norm, register_combine, register_rows, register_optim, register_pieces, register_gradients,
        step::register_plan, step::register_slots, step::register_weight, step::register_linear, step::register_grouped,
        step::register_activate})
    add(m);
}
