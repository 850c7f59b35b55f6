// Activations, for operators that begin with one; what is known of tensors that are quantized next.
#pragma once

#include <tuple>

#include "api/checks.h"

namespace fsdp_quant {

// h = act(g) (* u) [rows, cols], and its amaxes [AmaxesOf].
std::tuple<at::Tensor, at::Tensor> activation(const at::Tensor& g, const MaybeTensor& u, int64_t kind);

// Who quantizes x next need not read it for its statistics. amaxes: of all of x [1], or AmaxesOf.
void remember_amax(const at::Tensor& x, const at::Tensor& amaxes);

}  // namespace fsdp_quant
