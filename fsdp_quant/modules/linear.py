"""`fq.Linear`: nn.Linear with quantized products; parameters and state_dict keys are those of nn.Linear."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..context import STEP, Autocast, current_autocast
from ..counters import counters
from ..ops.capability import DOMAINS, arch_of
from ..recipe import Recipe, identity
from ..scaling import AmaxHistory
from ..tensor import torch_compat
from ..tensor.master_weight import MasterWeight, WeightState, inner_of, wrap
from ..tensor.torch_compat import local_of
from .guard import guard_of
from .linear_op import linear, slot_ids, weight_state
from .plan import PRODUCTS, GemmPlan, build_plan


class Linear(nn.Linear):
    """y = x W^T + b, each of its three products in the formats that a recipe gives.

    weight:  [out_features, in_features], high precision; a `MasterWeight` over its memory.
    recipe:  `Recipe`; change it with `fq.set_recipe`.
    recomputes_forward:  None: found out in eager mode; True where the backward recomputes the forward unseen (a
             compiled checkpointed block), so that FSDP2 gathers both directions in the backward.

    Input [.., in_features] and output [.., out_features] are in the input's dtype, or torch.autocast's.
    """

    recomputes_forward: bool | None = None
    _guard: Tensor | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None,
        *, recipe: Recipe | None = None, name: str = "linear",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        adopt(self, recipe or identity(), name)

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def plan(self) -> GemmPlan:
        return self._plan

    def forward(self, x: Tensor) -> Tensor:
        weight, plan = self.weight, self._plan
        override = current_autocast()
        if override is not None:
            plan = self._overriding_plan(override)
        owner = weight_state(weight)
        device = x.device
        if not x.dtype.is_floating_point:
            raise ValueError(f"{self._name}: input is {x.dtype}; a linear layer multiplies floating tensors")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self._name}: input is {list(x.shape)}, its last dim must be {self.in_features}")
        if torch.is_autocast_enabled(device.type):
            x = x.to(torch.get_autocast_dtype(device.type))
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"{self._name}: the weight is a DTensor {weight.placements} that FSDP2 did not gather; tensor-parallel "
                "weights are not supported here: use fully_shard, or leave the module out of fq.convert"
            )
        if owner is None:
            self._depart("its weight is a plain tensor, so high-precision bytes were gathered or the codes are not cached")
        elif x.dtype != weight.dtype:
            self._check_domains(plan, x.dtype, weight.dtype, device)
        replay = torch_compat.backward_is_running()
        if owner is not None and not replay:
            self._note_recomputation(owner)
        if self._ids.device != device:
            with torch.inference_mode(False):
                self._ids = self._ids.to(device)
        records = self.training and not replay
        histories = self._histories(owner, plan, "input", device)
        of_grad = self._histories(owner, plan, "grad_output", device)
        if records and owner is not None and not weight.requires_grad:
            STEP.frozen.add(owner)
        return linear(
            x, weight, self.bias, plan, weight.requires_grad and torch.is_grad_enabled(), STEP.on(device), self._ids,
            self._guard_on(plan, x), [h.enc for h in histories], [h.enc for h in of_grad],
            [h.amaxes for h in histories if records], [h.amaxes for h in of_grad if self.training],
        )

    def _histories(self, owner: WeightState | None, plan: GemmPlan, slot: str, device: torch.device) -> list[AmaxHistory]:
        """Amax histories of a slot's delayed sides, in order; [] without delayed scaling."""
        hybrid = plan.hybrid(slot)
        if owner is None or not hybrid.delayed_directions:
            return []
        return [owner.history(self._name, slot, d, hybrid.side(d)).to(device) for d in hybrid.delayed_directions]

    def _guard_on(self, plan: GemmPlan, x: Tensor) -> Tensor | None:
        """Where the quantizers of anchored products count; None where nothing is anchored."""
        return guard_of(self, x.device) if "anchored" in plan.resolved(x.dtype, x.device).domains else None

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

    def _note_recomputation(self, owner: WeightState) -> None:
        """Will the backward run this forward again? An evaluation says nothing about the next training step."""
        if self.recomputes_forward is not None:
            owner.recomputes = self.recomputes_forward
        elif torch.is_grad_enabled():
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
            warnings.warn(f"{self._name}: {what}", stacklevel=3)
        counters.add("departure", (self._name, what))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._recipe}"


def adopt(module: nn.Linear, recipe: Recipe, name: str) -> None:
    """Give a module of class `Linear` its plan, and its weight the wrapper that FSDP2 gathers as codes."""
    module._name = name
    module._ids = slot_ids(name)
    apply_recipe(module, recipe)
    module._weight_state = weight_state(local_of(module.weight))  # a tied weight has its state already
    if module._weight_state is None:
        module._weight_state = WeightState(
            f"{name}.weight", module._plan.weight, tuple(module.weight.shape), recipe.compute_dtype
        )
        wrap_weight(module)
    module.register_state_dict_post_hook(_unwrap_in_state_dict)
    module.register_load_state_dict_post_hook(_after_load)


def apply_recipe(module: Linear, recipe: Recipe) -> None:
    module._recipe, module._plan = recipe, build_plan(recipe, module._name, arch_of(module.weight.device))


def wrap_weight(module: Linear) -> None:
    """Put a MasterWeight under the module's weight; optimizers that hold the parameter keep it."""
    weight, state = module.weight, module._weight_state
    if not isinstance(weight, DTensor):
        torch_compat.swap_parameter(weight, wrap(weight, state))
        return
    managed = next((m for m in torch_compat.all_managed_params() if m.param.sharded_param is weight), None)
    if managed is None:
        raise ValueError(
            f"{state.name} is a DTensor {weight.placements} that no fully_shard call of this process manages; "
            "apply fq.convert before distributing it, or use fully_shard"
        )
    if not managed.is_sharded:
        raise ValueError(f"{state.name} is gathered now; call reshard() on its FSDP module before fq.convert")
    managed.replace_local(MasterWeight(local_of(weight).detach(), state))


def _unwrap_in_state_dict(module: Linear, state_dict: dict, prefix: str, local_metadata) -> None:
    """Checkpoints hold the plain weight: a view of the registered parameter, with its version counter.

    An in-place load into it is seen as a write; every rank hands out its state dict, so the shared statistics are
    reduced again at the next gather.
    """
    weight, key = module.weight, f"{prefix}weight"
    local = local_of(weight)
    if key not in state_dict or not isinstance(local, MasterWeight):
        return
    plain = inner_of(local).detach()
    if isinstance(weight, DTensor):
        plain = torch_compat.dtensor_like(weight, plain)
    state_dict[key] = plain if not isinstance(state_dict[key], nn.Parameter) else nn.Parameter(plain, weight.requires_grad)
    local.state.pending = True


def _after_load(module: Linear, incompatible_keys) -> None:
    """A load changed the master on every rank; with assign=True it also replaced the parameter."""
    if not isinstance(local_of(module.weight), MasterWeight):
        wrap_weight(module)
    module._weight_state.pending = True
