# SPDX-License-Identifier: Apache-2.0
"""`fq.Linear`: nn.Linear with quantized products; parameters and state_dict keys are those of
nn.Linear."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..context import (
    STEP,
    Autocast,
    current_autocast,
    new_weight_state,
    quantized_init_recipe,
)
from ..counters import counters
from ..ops.capability import DOMAINS, arch_of
from ..ops.rng import own_name
from ..quantizer import FLOATING
from ..recipe import Recipe, as_recipe, identity
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import local_of
from ..tensor.weight_shard import WeightShard, as_shard
from ..tensor.weight_state import WeightState
from .guard import guard_of
from .linear_op import (
    Handed,
    HandedByInput,
    LinearCall,
    can_fuse_activation,
    linear,
    slot_ids,
    weight_state,
)
from .plan import PRODUCTS, GemmPlan, build_plan, plan_of_recipe
from .quantize import BoundaryIds, boundary
from .traced_linear import NO_HISTORIES, GraphTensors, traced_linear
from .training_steps import note_forward


class HasWeight(nn.Module):
    """A module whose `weight` FSDP2 gathers as codes: its shard gets the hooks when FSDP2 registers
    it.

    FSDP2 registers a parameter by `setattr` when it shards it, and each time that it gathers or
    reshards it.

    transposed:  the weight is [.., K, N], of which FSDP2 gathers the values.
    """

    transposed = False

    def __setattr__(self, name: str, value: object) -> None:
        registered = self.__dict__.get("_parameters")
        if (
            registered is None
            or registered.get(name) is None
            or not isinstance(value, nn.Parameter)
        ):
            super().__setattr__(name, value)
            return
        if (
            name == "weight"
            and isinstance(value, DTensor)
            and "_weight_state" in self.__dict__
            and not self.transposed
        ):
            self.__dict__["_weight_state"] = as_shard(value, self._weight_state)
        registered[name] = value


class Linear(HasWeight, nn.Linear):
    """y = x W^T + b, each of its three products in the formats that a recipe gives.

    weight:  [out_features, in_features], the plain nn.Parameter of nn.Linear; under
             `fq.quantized_model_init` a `QuantizedTensor`. `fully_shard` makes of it what it makes
             of any parameter, and gathers it as codes.
    recipe:  `Recipe` or its name; change it with `fq.set_recipe`.
    recomputes_forward:  None: found out as the layer runs; True where the backward recomputes the
                         forward unseen
             (torch.utils.checkpoint inside a compiled block), so that FSDP2 gathers both directions
             in the backward.

    Input [.., in_features] and output [.., out_features] are in the input's dtype, or
    torch.autocast's.

    >>> layer = fq.Linear(64, 32, recipe=fq.recipes.hybrid("mxfp8", "nvfp4"))
    >>> layer(torch.ones(2, 64)).shape
    torch.Size([2, 32])
    """

    module_type = "linear"  # of its roles (`Role.module_type`)
    recomputes_forward: bool | None = None
    # `parallel.TensorParallel`: how ranks share the layer, where its weight is no DTensor that
    # tells
    parallel = None
    _guard: Tensor | None = None
    _backward_guard: Tensor | None = None
    counts_with: Linear | None = None
    # In the forward of a module whose layers read one tensor (`fuse.InputPattern`).
    _handed_by_input: HandedByInput | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ):
        if not isinstance(bias, bool):
            raise ValueError(
                f"fq.Linear: bias is {bias!r}; wanted True or False, and a recipe by its name: "
                f"recipe={bias!r}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        make_quantized(
            self, recipe or quantized_init_recipe() or identity(), own_name(name, "linear")
        )

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def plan(self) -> GemmPlan:
        return self._plan

    @property
    def is_shared(self) -> bool:
        """Ranks or groups of tokens share tensors of its products."""
        return not self._plan.alone or self._weight_state.part[1] > 1

    def plan_on(self, dtype: torch.dtype, device: torch.device) -> GemmPlan:
        """The plan as its products of `dtype` activations run on `device` (`GemmPlan.on`)."""
        return self._plan if self.is_shared else self._plan.on(dtype, device)

    def forward(
        self,
        x: Tensor,
        handed: Handed | None = None,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """residual + scale * (x W^T + b), the product rounded to its dtype first, the rest in one
        pass.

        handed:  what the module that computed x hands over with it.
        """
        weight = self.weight
        if self.parallel is not None or isinstance(weight, DTensor):
            return finished(self.parallel_forward(x), residual, scale)
        if handed is None and self._handed_by_input is not None:
            handed = self._handed_by_input.of(x)
        return self.times(x, weight, self.bias, handed, residual, scale)

    def times(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handed: Handed | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """`forward` of a weight [out_features, in_features] that no ranks share, and a bias: the
        module's, or given ones."""
        x, plan, override = self.checked(x, weight), self._plan, current_autocast()
        if override is not None:
            plan = self._overriding_plan(override)
        if plan.boundary is not None:
            return self.bounded(
                lambda x: self._product(x, weight, bias, plan, None), x, plan, residual, scale
            )
        return finished(self._product(x, weight, bias, plan, handed), residual, scale)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as nn.Module does. torch's styles register parts of weights so, and graphs need
        the group beforehand."""
        super().register_parameter(name, param)
        if name == "weight" and "_graph" in self.__dict__ and isinstance(param, DTensor):
            if param.device_mesh.ndim == 1 and param.placements[0].is_shard():
                attach_tensor_group(self)

    def parallel_forward(self, x: Tensor) -> Tensor:
        """y of a layer that ranks share. Raises NotImplementedError; `fsdp_quant.parallel` makes
        layers that do."""
        raise NotImplementedError(
            f"{self._name}: its weight is a DTensor {self.weight.placements}, or its ranks share "
            "it; apply a style of fsdp_quant.parallel to it"
        )

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, handed: Handed | None
    ) -> Tensor:
        grad = torch.is_grad_enabled()
        save = weight.requires_grad and grad
        if torch.compiler.is_compiling():
            return self.traced(x, weight, bias, plan, save)
        if not isinstance(x, QuantizedTensor):
            plan = plan.on(x.dtype, x.device)
        return linear(x, weight, bias, self.call(x, weight, plan, save, grad), handed)

    def traced(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: GemmPlan,
        save: bool,
        ranks: tuple | None = None,
        training: bool | None = None,
    ) -> Tensor:
        """`traced_linear` with what graphs of this layer are given, which are guarded one by one;
        training: None: the layer's."""
        given, step, ids, guards, histories = self._graph, None, None, [], NO_HISTORIES
        if plan.needs_steps:
            step, ids, guards = STEP.in_graph(given.ids.device), given.ids, given.guards
            histories = given.delayed.get(plan.histories_key, NO_HISTORIES)
        training = self.training if training is None else training
        rank = None if ranks is None else given.rank
        return traced_linear(
            x, weight, bias, plan.key, save, training, step, ids, guards, *histories, rank, ranks
        )

    def bounded(
        self,
        product: Callable[[Tensor], Tensor],
        x: Tensor,
        plan: GemmPlan,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The boundary slots of the recipe around all else."""
        y = product(boundary(x, plan.boundary, self._boundary_ids, output=False))
        return boundary(
            finished(y, residual, scale), plan.boundary, self._boundary_ids, grad_input=False
        )

    def can_fuse_activation(self, x: Tensor) -> bool:
        """An input like x may be made by the kernel that quantizes it: nothing else would see its
        values."""
        if (
            torch.compiler.is_compiling()
            or torch_compat.has_hooks(self)
            or type(self) is not Linear
        ):
            return False
        overridden = (
            "forward" in self.__dict__
            or current_autocast() is not None
            or torch.is_autocast_enabled(x.device.type)
        )
        overridden = overridden or self._plan.boundary is not None
        shared = self.parallel is not None or isinstance(self.weight, DTensor)
        return not (overridden or shared) and can_fuse_activation(
            x, self.weight, self.bias, self._plan.on(x.dtype, x.device)
        )

    def checked(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x in the dtype of its products. Raises for what no product takes, naming the module.

        weight:  that is multiplied; default: the module's.
        """
        device, weight = x.device, self.weight if weight is None else weight
        if x.dtype not in FLOATING:
            raise ValueError(
                f"{self._name}: input is {x.dtype}; a linear layer multiplies bf16, fp16 and fp32: "
                "cast it first"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._name}: input is {list(x.shape)}, its last dim must be {self.in_features}"
            )
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"{self._name}: the weight is a DTensor {weight.placements} that FSDP2 did not "
                "gather; tensor-parallel weights are not supported here: use fully_shard, or leave "
                "the module out of fq.convert"
            )
        if weight.device != device:
            raise ValueError(
                f"{self._name}: input is on {device} and the weight on {weight.device}; move one "
                "of them (a model made on meta: model.to_empty(device=...), then initialize or "
                "load it)"
            )
        return (
            x.to(torch.get_autocast_dtype(device.type))
            if torch.is_autocast_enabled(device.type)
            else x
        )

    def call(self, x: Tensor, weight: Tensor, plan: GemmPlan, save: bool, grad: bool) -> LinearCall:
        """What this call of the layer has besides its tensors. Refuses what the plan did not print.

        save:  the backward needs x. grad: a backward may follow.
        """
        state, device = self._weight_state, x.device
        if weight_state(weight) is None and torch_compat.is_managed(weight):
            self._depart(
                "its weight is a plain tensor under fully_shard, so high-precision bytes were "
                "gathered"
            )
        elif x.dtype != weight.dtype:
            self._check_domains(plan, x.dtype, weight.dtype, device)
        replay = torch_compat.backward_is_running()
        if not replay:
            if plan.needs_steps:
                note_forward(self, grad)
            self._note_recomputation(state, grad)
        records, of_input, of_grad = self.training and not replay, (), ()
        if plan.is_delayed:
            of_input, of_grad = (
                self.histories(plan, slot, device) for slot in ("input", "grad_output")
            )
        watched = plan.resolved(x.dtype, device).is_watched and STEP.is_probed
        guard = guard_of(self, device) if watched else None
        return LinearCall(
            plan,
            state,
            save,
            records,
            STEP.on(device),
            self.ids_on(device),
            guard,
            [h.enc for h in of_input],
            [h.enc for h in of_grad],
            [h.amaxes for h in of_input] if records else (),
            [h.amaxes for h in of_grad] if self.training else (),
        )

    def ids_on(self, device: torch.device) -> Tensor:
        """int64 [3] (`slot_ids`), on the device that asked last."""
        if self._ids.device != device:
            with torch.inference_mode(False):
                self._ids = self._ids.to(device)
        return self._ids

    def histories(
        self, plan: GemmPlan, slot: str, device: torch.device | None
    ) -> list[AmaxHistory]:
        """Amax histories of a slot's delayed sides, on `device` if one is given. Layers that share
        an input share those of it."""
        hybrid, layer = plan.hybrid(slot), self
        if slot == "input" and self._input_of is not None:
            layer = self._input_of() or self
        name = layer._weight_state.name if slot == "weight" else layer._name
        found = [
            layer._weight_state.history(name, slot, d, hybrid.side(d))
            for d in hybrid.delayed_directions
        ]
        return found if device is None else [history.to(device) for history in found]

    def _overriding_plan(self, override: Autocast) -> GemmPlan:
        recipe = override.recipe
        recomputed = (
            override.checkpoint if torch.compiler.is_compiling() else torch_compat.checkpoint_hook()
        )
        if recomputed is not None and recomputed is not override.checkpoint:
            raise ValueError(
                f"{self._name}: the backward would recompute this forward outside fq.autocast, "
                "with another recipe; enter fq.autocast inside the checkpointed function"
            )
        if recipe.tail:
            raise ValueError(
                f"{self._name}: fq.autocast({recipe}) cannot keep the last layers in high "
                "precision, because a module does not know which are last: tail is honoured by "
                "fq.convert and fq.set_recipe"
            )
        plan = plan_of_recipe(recipe.key, self._name, arch_of(self.weight.device), self.module_type)
        if isinstance(self.weight, QuantizedTensor) and plan.weight != self._plan.weight:
            raise ValueError(
                f"{self._name}: fq.autocast would change the weight from {self._plan.weight} to "
                f"{plan.weight}, but fully_shard gathers it outside any context; use fq.set_recipe "
                "at a step boundary"
            )
        return plan

    def _note_recomputation(self, owner: WeightState, grad: bool) -> None:
        """Will the backward run this forward again? An evaluation says nothing about the next
        training step."""
        if self.recomputes_forward is not None:
            owner.recomputes = self.recomputes_forward
        elif grad:
            owner.recomputes = torch_compat.checkpoint_hook() is not None
        elif self.training:
            owner.recomputes = (
                True  # reentrant checkpointing runs the first forward without gradients
            )

    def _check_domains(
        self, plan: GemmPlan, dtype: torch.dtype, planned: torch.dtype, device: torch.device
    ) -> None:
        """Activations came in another dtype than the weight's, which the plan assumed: no product
        may get slower."""
        arch = arch_of(device)
        for product in PRODUCTS:
            runs, printed = (plan.domain(product, d, arch)[0] for d in (dtype, planned))
            if DOMAINS.index(runs) > DOMAINS.index(printed):
                a, b = plan.pair(product)
                self._depart(
                    f"{product.name} ({a} x {b}) of {dtype} activations runs in the {runs} domain, "
                    f"not {printed}"
                )

    def _depart(self, what: str) -> None:
        """The plan did not print this: raise under strict=True, else warn once and count."""
        if self._recipe.strict:
            raise ValueError(
                f"{self._name}: {what}; the plan says otherwise. Make it so, or pass strict=False "
                "to the recipe"
            )
        if (self._name, what) not in counters.of("departure"):
            warnings.warn(f"{self._name}: {what}", stacklevel=4)
        counters.add("departure", (self._name, what))

    def _apply(self, fn, recurse: bool = True) -> Linear:
        applied = super()._apply(fn, recurse)
        self._graph.prepare(self)
        self._boundary_ids.on(self._ids.device)
        return applied

    def __getstate__(self) -> dict:
        """Without what `attach_runtime` makes."""
        return {
            k: v
            for k, v in super().__getstate__().items()
            if k not in ("_graph", "_input_of", "_boundary_ids")
        }

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        attach_runtime(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._recipe}"


def handed_to(layer: nn.Module, handed: Handed) -> dict[str, Handed]:
    """The argument by which a layer takes `handed`; none where the layer is not an `fq.Linear` that
    multiplies x itself."""
    takes = (
        isinstance(layer, Linear)
        and not torch.compiler.is_compiling()
        and not torch_compat.has_hooks(layer)
    )
    return {"handed": handed} if takes else {}


def finished(y: Tensor, residual: Tensor | None, scale: float) -> Tensor:
    """residual + scale * y. Raises ValueError for a residual of another shape, which a sum would
    broadcast."""
    if residual is None:
        return y if scale == 1.0 else y * scale
    if residual.shape != y.shape:
        raise ValueError(
            f"residual is {list(residual.shape)} and the output {list(y.shape)}; wanted one shape"
        )
    return torch.add(residual, y, alpha=scale)


def make_quantized(module: nn.Linear, recipe: Recipe | str, name: str) -> None:
    """Give a module of class `Linear` its plan and the state of its weight."""
    module._name = name
    apply_recipe(module, recipe)
    attach_state(module)
    module.register_state_dict_post_hook(_plain_in_state_dict)
    module.register_load_state_dict_post_hook(_after_load)


def attach_state(module: Linear, kind: type[WeightState] | None = None) -> None:
    """Give the module's weight a state (see `new_weight_state`), unless it is tied to one that has
    it."""
    local = local_of(module.weight)
    module._weight_state = weight_state(local) or _tied_state(local)
    if module._weight_state is None:
        module._weight_state = new_weight_state(
            f"{module._name}.weight",
            module._plan.weight,
            tuple(whole_shape(module.weight)),
            module._recipe.compute_dtype,
            kind=kind,
        )
        register_weight(module)
    module._weight_state.plan = module._plan
    attach_runtime(module)


# id of a plain weight -> the module that has its state, for layers that share one. A weak reference
# to the weight itself would stop torch.utils.swap_tensors.
_TIED: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def _tied_state(weight: Tensor) -> WeightState | None:
    owner = _TIED.get(id(weight))
    return owner._weight_state if owner is not None and owner.weight is weight else None


def whole_shape(weight: Tensor) -> torch.Size:
    """Of the weight that products multiply: without the shards of `fully_shard`, of this rank's
    part of all other cuts."""
    managed = _managed(weight)
    return local_of(weight).shape if managed is None else managed.global_shape


def _managed(weight: Tensor) -> torch_compat.ManagedParam | None:
    """A DTensor as `fully_shard` manages it."""
    if not isinstance(weight, DTensor):
        return None
    return next((m for m in torch_compat.all_managed_params() if m.registered is weight), None)


def share_input(first: Linear, second: Linear) -> None:
    """Layers that always multiply one tensor keep one history of its amaxes (the first does), so
    that its codes are one."""
    second._input_of = weakref.ref(first)
    second._graph.prepare(second)


def attach_runtime(module: Linear) -> None:
    """Give the module its slot ids, and what graphs of it are given."""
    module._input_of, module._ids = None, slot_ids(module._name)
    module._graph = GraphTensors(module)
    module._boundary_ids = BoundaryIds(module._name)


def apply_recipe(module: Linear, recipe: Recipe | str) -> None:
    recipe = as_recipe(recipe, module._name, Recipe)
    before = module.__dict__.get("_plan")
    plan = build_plan(recipe, module._name, arch_of(module.weight.device), module.module_type)
    module._recipe, module._plan = recipe, replace(plan, alone=before is None or before.alone)
    if "_weight_state" in module.__dict__:
        module._weight_state.plan = module._plan


def register_weight(module: Linear) -> None:
    """Let the module's weight be known by its state: a parameter of codes, or a shard, has it; a
    plain one stays as it is."""
    weight, state = module.weight, module._weight_state
    if state.holds_codes:
        _wrap_codes(module)
    elif not isinstance(weight, DTensor):
        _TIED[id(weight)] = module
    if not isinstance(weight, DTensor):
        return
    attach_tensor_group(module)
    managed = _managed(weight)
    if managed is None or state.holds_codes:
        return
    if not managed.is_sharded:
        raise ValueError(
            f"{state.name} is gathered now; call reshard() on its FSDP module before fq.convert"
        )
    managed.replace_local(WeightShard(local_of(weight).detach(), state))


def attach_tensor_group(module: Linear) -> None:
    """Tell the state of a DTensor weight which ranks hold its other parts."""
    weight, state = module.weight, module._weight_state
    managed = _managed(weight)
    mesh = weight.device_mesh if managed is None else managed.tensor_mesh
    if mesh is not None:
        state.tensor_group, state.tensor_dim = (
            _tensor_group(state, weight, mesh),
            weight.placements[-1].dim,
        )
        if "_graph" in module.__dict__:
            module._graph.prepare(module)


def _wrap_codes(module: Linear) -> None:
    """Put a quantized parameter over the module's weight; optimizers that hold the parameter keep
    it."""
    weight, state = module.weight, module._weight_state
    if not isinstance(weight, DTensor):
        made = nn.Parameter(state.wrapped(weight.detach()), requires_grad=weight.requires_grad)
        torch_compat.swap_parameter(weight, made)
        return
    managed = _managed(weight)
    if managed is None:
        torch_compat.replace_local(weight, state.wrapped(local_of(weight).detach()))
        return
    if not managed.is_sharded:
        raise ValueError(
            f"{state.name} is gathered now; call reshard() on its FSDP module before fq.convert"
        )
    managed.replace_local(state.wrapped(local_of(weight).detach()))


def _tensor_group(state: WeightState, weight: DTensor, mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that a tensor-parallel weight is cut over. Raises ValueError for cuts that products
    do not know."""
    cut = weight.placements[-1]
    if mesh.ndim != 1 or not cut.is_shard(0 if len(state.shape) == 3 else None):
        raise ValueError(
            f"{state.name} is a DTensor {weight.placements} over {mesh}: no fully_shard manages it "
            "so, and tensor parallelism cuts one dim of a weight over one axis (of packed ones: "
            "between experts); use fq.parallel's styles, fully_shard, or skip= of fq.convert"
        )
    return mesh.get_group()


def _plain_in_state_dict(module: nn.Module, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold the plain weight."""
    key = f"{prefix}weight"
    if key in state_dict:
        state_dict[key] = saved_plain(module.weight, state_dict[key])


def saved_plain(weight: Tensor, saved: Tensor) -> Tensor:
    """What a state dict holds of a weight: a plain view of it, with its version counter.

    saved:  what torch put there; a Parameter is replaced by one.
    """
    local = local_of(weight)
    if not isinstance(local, FSDPHooks):
        return saved
    plain = local.saved.detach()
    if isinstance(weight, DTensor):
        plain = torch_compat.dtensor_like(weight, plain)
    return nn.Parameter(plain, weight.requires_grad) if isinstance(saved, nn.Parameter) else plain


def _after_load(module: nn.Module, incompatible_keys) -> None:
    """A load wrote the values of quantized parameters on every rank; with assign=True it also
    replaced the parameter."""
    state = module._weight_state
    if not state.holds_codes:
        return
    if not isinstance(local_of(module.weight), FSDPHooks):
        _wrap_codes(module)
    state.pending = True
