// Optimizer steps of many tensors.
#include <limits>

#include <torch/library.h>

#include "api/checks.h"
#include "optim/adam.h"

namespace fsdp_quant {

namespace {

const float* optional_scalar(const MaybeTensor& t, const char* name, const at::Tensor& like) {
  if (!t.has_value()) return nullptr;
  check_buffer(*t, name, like, at::kFloat, 1);
  return t->const_data_ptr<float>();
}

// One step, in place; see optim/adam.cu. rounded: empty, or bf16 parameters that are their masters rounded.
void adam(
    at::TensorList master, at::TensorList grad, at::TensorList first, at::TensorList second, at::TensorList rounded,
    at::IntArrayRef row, const at::Tensor& scalars, const MaybeTensor& grad_scale, const MaybeTensor& found_inf) {
  const size_t n = master.size();
  TORCH_CHECK_VALUE(
      n > 0 && grad.size() == n && first.size() == n && second.size() == n && row.size() == n &&
          (rounded.empty() || rounded.size() == n),
      "got ", n, " masters, ", grad.size(), " gradients, ", first.size(), " and ", second.size(), " moments, ", row.size(),
      " rows and ", rounded.size(), " rounded parameters; wanted one of each for every master");
  const at::ScalarType of_grad = grad[0].scalar_type(), of_moments = first[0].scalar_type();
  for (const at::ScalarType type : {of_grad, of_moments}) {
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "gradients and moments are float32 or bfloat16, got ",
                      type);
  }
  check_cuda(master[0], "master");
  check_buffer(scalars, "scalars", master[0], at::kFloat, scalars.numel() / kAdamScalars * kAdamScalars);
  const c10::cuda::CUDAGuard guard(master[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  AdamLaunch launch;
  launch.scalars = scalars.const_data_ptr<float>();
  launch.grad_scale = optional_scalar(grad_scale, "grad_scale", master[0]);
  launch.found_inf = optional_scalar(found_inf, "found_inf", master[0]);
  launch.count = launch.tiles = 0;
  auto flush = [&] {
    if (launch.count == 0) return;
    check_launch(
        launch_adam(launch, of_grad == at::kBFloat16, of_moments == at::kBFloat16, !rounded.empty(), stream), "adam");
    launch.count = launch.tiles = 0;
  };
  for (size_t i = 0; i < n; ++i) {
    const int64_t numel = master[i].numel();
    check_buffer(master[i], "master", master[0], at::kFloat, numel);
    check_buffer(grad[i], "grad", master[0], of_grad, numel);
    check_buffer(first[i], "first", master[0], of_moments, numel);
    check_buffer(second[i], "second", master[0], of_moments, numel);
    if (!rounded.empty()) check_buffer(rounded[i], "rounded", master[0], at::kBFloat16, numel);
    TORCH_CHECK_VALUE(row[i] >= 0 && row[i] < scalars.numel() / kAdamScalars, "tensor ", i, " reads row ", row[i],
                      " of scalars ", scalars.sizes());
    const int64_t tiles = ceil_div(numel, kAdamTile);
    TORCH_CHECK_VALUE(tiles < std::numeric_limits<int32_t>::max() / 2, "tensor ", i, " has ", numel, " elements; too many");
    if (numel == 0) continue;
    if (launch.count == kAdamCapacity || tiles > std::numeric_limits<int32_t>::max() - launch.tiles) flush();
    AdamTensor& t = launch.tensors[launch.count++];
    t.master = master[i].mutable_data_ptr<float>();
    t.grad = grad[i].const_data_ptr();
    t.first = first[i].mutable_data_ptr(), t.second = second[i].mutable_data_ptr();
    t.rounded = rounded.empty() ? nullptr : rounded[i].mutable_data_ptr();
    t.numel = numel, t.row = static_cast<int32_t>(row[i]), t.first_tile = launch.tiles;
    const int64_t moment = of_moments == at::kFloat ? 16 : 8;
    t.vectors = is_aligned(t.master, 16) && is_aligned(t.grad, of_grad == at::kFloat ? 16 : 8) &&
                is_aligned(t.first, moment) && is_aligned(t.second, moment) && is_aligned(t.rounded, 8);
    launch.tiles += static_cast<int32_t>(tiles);
  }
  flush();
}

}  // namespace

void register_optim(torch::Library& m) {
  m.def(
      "adam(Tensor(a!)[] master, Tensor[] grad, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] rounded, int[] row, "
      "Tensor scalars, Tensor? grad_scale, Tensor? found_inf) -> ()",
      torch::dispatch(c10::DispatchKey::CUDA, adam));
}

}  // namespace fsdp_quant
