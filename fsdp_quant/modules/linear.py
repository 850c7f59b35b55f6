"""`fq.Linear`: nn.Linear with quantized products; parameters and state_dict keys are those of nn.Linear."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..context import STEP, Autocast, current_autocast, new_weight_state, quantized_init_recipe
from ..counters import counters
from ..ops.capability import DOMAINS, arch_of
from ..recipe import Recipe, identity
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.master_weight import MasterWeight, WeightState, wrap
from ..tensor.torch_compat import local_of
from .graph_op import Site, graph_linear
from .linear_op import Source, linear, takes_source, weight_state
from .plan import PRODUCTS, GemmPlan, build_plan
from .quantize import boundary, boundary_ids


class Linear(nn.Linear):
    """y = x W^T + b, each of its three products in the formats that a recipe gives.

    weight:  [out_features, in_features], high precision: a `MasterWeight` over its memory; under
             `fq.quantized_model_init` a `QuantizedTensor`.
    recipe:  `Recipe`; change it with `fq.set_recipe`.
    recomputes_forward:  None: found out as the layer runs; True where the backward recomputes the forward unseen
             (torch.utils.checkpoint inside a compiled block), so that FSDP2 gathers both directions in the backward.

    Input [.., in_features] and output [.., out_features] are in the input's dtype, or torch.autocast's.
    """

    recomputes_forward: bool | None = None
    parallel = None  # `parallel.TensorParallel`: how ranks share the layer, where its weight is no DTensor that tells
    parallel_forward: Callable | None = None  # (module, x) -> y of a layer that ranks share; set by `parallel.linear`
    _guard: Tensor | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None,
        *, recipe: Recipe | None = None, name: str = "linear",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        adopt(self, recipe or quantized_init_recipe() or identity(), name)

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def plan(self) -> GemmPlan:
        return self._plan

    def forward(
        self, x: Tensor, source: Source | None = None, *, residual: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """residual + scale * (x W^T + b), the product rounded to its dtype first, the rest in one pass.

        source:  of an x without values, where `takes_source` said so.
        """
        weight, plan = self.weight, self._plan
        if self.parallel is not None or isinstance(weight, DTensor):
            return finished(self.parallel_forward(x), residual, scale)
        x = self.checked(x)
        override = current_autocast()
        if override is not None:
            plan = self._overriding_plan(override)
        if plan.boundary is not None:
            return self.bounded(lambda x: self._product(x, weight, plan, None), x, plan, residual, scale)
        return finished(self._product(x, weight, plan, source), residual, scale)

    def _product(self, x: Tensor, weight: Tensor, plan: GemmPlan, source: Source | None) -> Tensor:
        grad = torch.is_grad_enabled()
        save = weight.requires_grad and grad
        if torch.compiler.is_compiling():
            return graph_linear(x, weight, self.bias, self._handle, plan.key, save, grad, self.training)
        operator = linear if source is None else functools.partial(linear, source=source)
        return self.multiply(operator, x, weight, self.bias, plan, save, grad, self.training)

    def bounded(
        self, product: Callable[[Tensor], Tensor], x: Tensor, plan: GemmPlan, residual: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """The boundary slots of the recipe around all else."""
        y = product(boundary(x, plan.boundary, self._boundary_ids, output=False))
        return boundary(finished(y, residual, scale), plan.boundary, self._boundary_ids, grad_input=False)

    def takes_source(self, x: Tensor) -> bool:
        """An input like x may be made by the kernel that quantizes it: nothing else would see its values."""
        if torch.compiler.is_compiling() or torch_compat.has_hooks(self) or type(self) is not Linear:
            return False
        overridden = "forward" in self.__dict__ or current_autocast() is not None or torch.is_autocast_enabled(x.device.type)
        overridden = overridden or self._plan.boundary is not None
        shared = self.parallel is not None or isinstance(self.weight, DTensor)
        return not (overridden or shared) and takes_source(x, self.weight, self.bias, self._plan)

    def checked(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x in the dtype of its products. Raises for what no product takes, naming the module.

        weight:  that is multiplied; default: the module's.
        """
        device, weight = x.device, self.weight if weight is None else weight
        if not x.dtype.is_floating_point:
            raise ValueError(f"{self._name}: input is {x.dtype}; a linear layer multiplies floating tensors")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self._name}: input is {list(x.shape)}, its last dim must be {self.in_features}")
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"{self._name}: the weight is a DTensor {weight.placements} that FSDP2 did not gather; tensor-parallel "
                "weights are not supported here: use fully_shard, or leave the module out of fq.convert"
            )
        return x.to(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else x

    def note(self, x: Tensor, weight: Tensor, plan: GemmPlan, grad: bool) -> tuple[WeightState | None, bool]:
        """(the weight's state, this is a recomputation): told what runs, and refused where the plan did not print it."""
        owner = weight_state(weight)
        if owner is None:
            self._depart("its weight is a plain tensor, so high-precision bytes were gathered or the codes are not cached")
        elif x.dtype != weight.dtype:
            self._check_domains(plan, x.dtype, weight.dtype, x.device)
        replay = torch_compat.backward_is_running()
        if owner is not None and not replay:
            self._note_recomputation(owner, grad)
        return owner, replay

    def multiply(
        self, operator: Callable, x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, save: bool, grad: bool,
        training: bool,
    ):
        """What `operator` (`linear_op.linear`, or its like) gives of x and of what the layer has beside.

        save:      the backward needs x.
        grad:      a backward may follow.
        """
        owner, replay = self.note(x, weight, plan, grad)
        step, ids, guard, histories, of_grad = self._site.beside(self, owner, plan, x.dtype, x.device)
        records = training and not replay
        if records and owner is not None and not weight.requires_grad:
            STEP.frozen.add(owner)
        return operator(
            x, weight, bias, plan, save, step, ids, guard, [h.enc for h in histories] if histories else [],
            [h.enc for h in of_grad] if of_grad else [], [h.amaxes for h in histories] if histories and records else [],
            [h.amaxes for h in of_grad] if of_grad and training else [],
        )

    def _overriding_plan(self, override: Autocast) -> GemmPlan:
        recipe, recomputed = override.recipe, torch_compat.checkpoint_hook()
        if recomputed is not None and recomputed is not override.checkpoint:
            raise ValueError(
                f"{self._name}: the backward would recompute this forward outside fq.autocast, with another recipe; enter "
                "fq.autocast inside the checkpointed function"
            )
        if recipe.tail:
            raise ValueError(
                f"{self._name}: fq.autocast({recipe}) cannot keep the last layers in high precision, because a module does "
                "not know which are last: tail is honoured by fq.convert and fq.set_recipe"
            )
        plan = build_plan(recipe, self._name, arch_of(self.weight.device))
        if not isinstance(self.weight, MasterWeight) and plan.weight != self._plan.weight:
            raise ValueError(
                f"{self._name}: fq.autocast would change the weight from {self._plan.weight} to {plan.weight}, but "
                "fully_shard gathers it outside any context; use fq.set_recipe at a step boundary"
            )
        return plan

    def _note_recomputation(self, owner: WeightState, grad: bool) -> None:
        """Will the backward run this forward again? An evaluation says nothing about the next training step."""
        if self.recomputes_forward is not None:
            owner.recomputes = self.recomputes_forward
        elif grad:
            owner.recomputes = torch_compat.checkpoint_hook() is not None
        elif self.training:
            owner.recomputes = True  # reentrant checkpointing runs the first forward without gradients

    def _check_domains(self, plan: GemmPlan, dtype: torch.dtype, planned: torch.dtype, device: torch.device) -> None:
        """Activations came in another dtype than the weight's, which the plan assumed: no product may get slower."""
        arch = arch_of(device)
        for product in PRODUCTS:
            runs, printed = (plan.domain(product, d, arch)[0] for d in (dtype, planned))
            if DOMAINS.index(runs) > DOMAINS.index(printed):
                a, b = plan.pair(product)
                self._depart(f"{product.name} ({a} x {b}) of {dtype} activations runs in the {runs} domain, not {printed}")

    def _depart(self, what: str) -> None:
        """The plan did not print this: raise under strict=True, else warn once and count."""
        if self._recipe.strict:
            raise ValueError(f"{self._name}: {what}; the plan says otherwise. Make it so, or pass strict=False to the recipe")
        if (self._name, what) not in counters.of("departure"):
            warnings.warn(f"{self._name}: {what}", stacklevel=4)
        counters.add("departure", (self._name, what))

    def __getstate__(self) -> dict:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_site", "_handle", "_boundary_ids")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        place(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._recipe}"


def finished(y: Tensor, residual: Tensor | None, scale: float) -> Tensor:
    """residual + scale * y. Raises ValueError for a residual of another shape, which a sum would broadcast."""
    if residual is None:
        return y if scale == 1.0 else y * scale
    if residual.shape != y.shape:
        raise ValueError(f"residual is {list(residual.shape)} and the output {list(y.shape)}; wanted one shape")
    return torch.add(residual, y, alpha=scale)


def adopt(module: nn.Linear, recipe: Recipe, name: str) -> None:
    """Give a module of class `Linear` its plan, and its weight the wrapper that FSDP2 gathers as codes."""
    module._name = name
    apply_recipe(module, recipe)
    take_weight(module)
    module.register_state_dict_post_hook(_unwrap_in_state_dict)
    module.register_load_state_dict_post_hook(_after_load)


def take_weight(module: Linear, kind: type[WeightState] | None = None) -> None:
    """Give the module's weight a state (see `new_weight_state`) and its wrapper, unless it is tied to one that has them, and
    the module its site."""
    module._weight_state = weight_state(local_of(module.weight))
    if module._weight_state is None:
        module._weight_state = new_weight_state(
            f"{module._name}.weight", module._plan.weight, tuple(whole_shape(module.weight)), module._recipe.compute_dtype,
            kind=kind,
        )
        wrap_weight(module)
    place(module)


def whole_shape(weight: Tensor) -> torch.Size:
    """Of the weight that products multiply: without the shards of `fully_shard`, of this rank's part of all other cuts."""
    managed = _managed(weight)
    return local_of(weight).shape if managed is None else managed.global_shape


def _managed(weight: Tensor) -> torch_compat.ManagedParam | None:
    """A DTensor as `fully_shard` manages it."""
    if not isinstance(weight, DTensor):
        return None
    return next((m for m in torch_compat.all_managed_params() if m.registered is weight), None)


def share_input(first: Linear, second: Linear) -> None:
    """Layers that always multiply one tensor keep one history of its amaxes (the first does), so that its codes are one."""
    second._site.input_of = first._site.layer


def place(module: Linear) -> None:
    """Give the module the site that its operators find by its handle."""
    module._site = Site(module)
    module._handle = module._site.handle()
    module._boundary_ids = boundary_ids(module._name)


def apply_recipe(module: Linear, recipe: Recipe) -> None:
    module._recipe, module._plan = recipe, build_plan(recipe, module._name, arch_of(module.weight.device))


def wrap_weight(module: Linear) -> None:
    """Put what FSDP2 gathers as codes under the module's weight; optimizers that hold the parameter keep it."""
    weight, state = module.weight, module._weight_state
    if not isinstance(weight, DTensor):
        torch_compat.swap_parameter(weight, wrap(weight, state))
        return
    managed = _managed(weight)
    mesh = weight.device_mesh if managed is None else managed.tensor_mesh
    if mesh is not None:
        state.tensor_group, state.tensor_dim = _tensor_group(state, weight, mesh), weight.placements[-1].dim
    if managed is None:
        torch_compat.replace_local(weight, state.wrapped(local_of(weight).detach()))
        return
    if not managed.is_sharded:
        raise ValueError(f"{state.name} is gathered now; call reshard() on its FSDP module before fq.convert")
    managed.replace_local(state.wrapped(local_of(weight).detach()))


def _tensor_group(state: WeightState, weight: DTensor, mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that a tensor-parallel weight is cut over. Raises ValueError for cuts that products do not know."""
    cut = weight.placements[-1]
    if mesh.ndim != 1 or not cut.is_shard(0 if len(state.shape) == 3 else None):
        raise ValueError(
            f"{state.name} is a DTensor {weight.placements} over {mesh}: no fully_shard manages it so, and tensor parallelism "
            "cuts one dim of a weight over one axis (of packed ones: between experts); use fq.parallel's styles, fully_shard, or "
            "skip= of fq.convert"
        )
    return mesh.get_group()


def _unwrap_in_state_dict(module: Linear, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold the plain weight: a view of the registered parameter, with its version counter.

    An in-place load into it is seen as a write; every rank hands out its state dict, so the shared statistics are
    reduced again at the next gather.
    """
    weight, key = module.weight, f"{prefix}weight"
    local = local_of(weight)
    if key not in state_dict or not isinstance(local, FSDPHooks):
        return
    plain = local.inner.detach()
    if isinstance(weight, DTensor):
        plain = torch_compat.dtensor_like(weight, plain)
    state_dict[key] = plain if not isinstance(state_dict[key], nn.Parameter) else nn.Parameter(plain, weight.requires_grad)
    local.state.pending = True


def _after_load(module: Linear, incompatible_keys) -> None:
    """A load changed the master on every rank; with assign=True it also replaced the parameter."""
    if not isinstance(local_of(module.weight), FSDPHooks):
        wrap_weight(module)
    module._weight_state.pending = True
