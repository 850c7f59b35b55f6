// Activations, for operators that begin with one.
#pragma once

#include <tuple>

#include "api/checks.h"

namespace fsdp_quant {

// h = act(g) (* u) [rows, cols], and its amaxes [AmaxesOf].
std::tuple<at::Tensor, at::Tensor> activation(const at::Tensor& g, const MaybeTensor& u, int64_t kind);

}  // namespace fsdp_quant
