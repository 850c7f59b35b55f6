// SPDX-License-Identifier: Apache-2.0
// What nodes of autograd keep for their backward. Users' saved-tensor hooks see it, as they see torch's own.
#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace fsdp_quant {

// Let go as the backward takes it, not when the backward is over, unless the graph is kept for another one.
class Saved {
 public:
  static bool graph_is_kept() { return torch::autograd::get_current_graph_task_keep_graph(); }

  void keep(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& t : tensors) kept_.emplace_back(t, /*is_output=*/false);
  }

  std::vector<at::Tensor> take() {
    std::vector<at::Tensor> taken;
    for (const auto& s : kept_) taken.push_back(s.unpack());
    if (!graph_is_kept())
      for (auto& s : kept_) s.reset_data();
    return taken;
  }

 private:
  std::vector<torch::autograd::SavedVariable> kept_;
};

// Gradients of gate and up are written over them where the graph is not kept and their storage has
// one holder. A Python wrapper counts as one until it is freed, so the values are taken out first.
// t's values without t, which may have been the last to hold them: `is_sole` tells.
inline at::Tensor take_values(at::Tensor& t) { return std::exchange(t, at::Tensor()).variable_data(); }

// No other tensor shares t's memory.
inline bool is_sole(const at::Tensor& t) { return t.storage().use_count() == 1; }

// The gradients of a node under create_graph=True: there, but not to be differentiated.
void refuse_second_derivatives(torch::autograd::variable_list& gradients);

}  // namespace fsdp_quant
