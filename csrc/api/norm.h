// SPDX-License-Identifier: Apache-2.0
// C++ entry points of activations, also for autograd nodes.
#pragma once

#include <tuple>
#include <utility>

#include "api/checks.h"

namespace fsdp_quant {

// h = act(g) (* u) [rows, cols], and its amaxes [AmaxLayout].
std::tuple<at::Tensor, at::Tensor> activation(const at::Tensor& g, const MaybeTensor& u, int64_t kind);

// Gate and up: as given, or (packed) the halves of g's rows.
std::pair<at::Tensor, MaybeTensor> operands_of(const at::Tensor& g, const MaybeTensor& u, bool packed);

// dg, du (empty without u) and their amaxes [2 (1), AmaxLayout], written to `of_g` and `of_u`, which may alias g and u. halves:
// both are halves of one contiguous tensor, with amaxes [1, AmaxLayout].
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_into(
    const at::Tensor& of_g, const at::Tensor& of_u, const MaybeTensor& of_amaxes, const at::Tensor& dh, const at::Tensor& g,
    const MaybeTensor& u, int64_t kind, bool halves = false);

}  // namespace fsdp_quant
