// SPDX-License-Identifier: Apache-2.0
// Tensors saved by autograd nodes. Saved-tensor hooks see them, as they see torch's own.
#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace fsdp_quant {

// Freed as the backward unpacks them, not at its end, unless the graph is retained.
class Saved {
 public:
  static bool retains_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }

  void save(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& t : tensors) saved_.emplace_back(t, /*is_output=*/false);
  }

  std::vector<at::Tensor> unpack() {
    std::vector<at::Tensor> tensors;
    for (const auto& s : saved_) tensors.push_back(s.unpack());
    if (!retains_graph())
      for (auto& s : saved_) s.reset_data();
    return tensors;
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

// Detach t's values and clear t. A Python wrapper holds the storage until it is freed, so nodes do this before they test
// `is_sole` to write gradients over gate and up.
inline at::Tensor detach_values(at::Tensor& t) { return std::exchange(t, at::Tensor()).variable_data(); }

// Whether no other tensor shares t's storage.
inline bool is_sole(const at::Tensor& t) { return t.storage().use_count() == 1; }

// Under create_graph=True, make gradients raise if they are differentiated.
void forbid_double_backward(torch::autograd::variable_list& gradients);

}  // namespace fsdp_quant
