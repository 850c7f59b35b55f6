# SPDX-License-Identifier: Apache-2.0
"""`BaseLinear`: `fq.Linear` without its forward: runtime, checks, what a call passes on."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..context import STEP, Autocast, contexts, quantized_init_recipe
from ..counters import counters
from ..ops.capability import DOMAINS, Place, arch_of
from ..ops.reference import known
from ..quantizer import FLOATING
from ..recipe import Recipe, recipe_of
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantized_weight import QuantizedWeightState
from ..tensor.weight_state import WeightState, values_of
from .call import NOTHING, BySlot, Call
from .cut import Layouts, TensorParallel
from .guard import guard_of
from .has_weight import (
    HasWeight,
    attach_tensor_group,
    known_state,
    plain_in_state_dict,
    reencode_after_load,
    register_weight,
    whole_shape,
)
from .operands import state_for, weight_histories, weight_state
from .plan import PRODUCTS, GemmPlan, build_plan, check_native, plan_of
from .program import in_graph
from .runtime import NO_HISTORIES, LayerRuntime
from .training_steps import note_forward, note_traced
from .weight_gradient import WeightGradient, main_grad_of, refuse_reduced


@functools.cache  # a plan takes half a millisecond, and each call inside fq.autocast has one
def _plan_of_key(key: str, over_rowwise: bool, *of: str) -> GemmPlan:
    plan = build_plan(recipe_of(key), *of)
    return plan.over_rowwise if over_rowwise else plan


@torch.compiler.assume_constant_result
def plan_of_recipe(
    key: str, name: str, arch: str, module_type: str, over_rowwise: bool = False
) -> GemmPlan:
    """`build_plan` of a recipe by its key. A trace runs it; a graph could register no plan.

    over_rowwise:  for a weight that keeps its rowwise codes alone.
    """
    return _plan_of_key(key, over_rowwise, name, arch, module_type)


@torch.compiler.assume_constant_result
def _batch_invariant_plan(key: str) -> GemmPlan | None:
    """Return a plan inside `batch_invariant`, by its key; None: bits of a token depend on other
    tokens, or on its place among them."""
    return plan_of(key).once(_made_batch_invariant)


@torch.compiler.assume_constant_result
def _check_native(key: str, name: str, arch: str) -> None:
    check_native(plan_of(key), name, arch)


def _made_batch_invariant(plan: GemmPlan) -> GemmPlan | None:
    output = None if plan.boundary is None else plan.boundary.output
    sides = [known(h.rowwise, "a rowwise side") for h in (plan.input, output) if h is not None]
    apart = all(side.fmt.keeps_rows_apart and not side.is_stochastic for side in sides)
    return replace(plan, batch_invariant=True) if apart and plan.is_token_local() else None


class BaseLinear(HasWeight, nn.Linear):
    """A linear layer with a `LayerRuntime`.

    recomputes_forward:  True: the backward recomputes the forward unseen (torch.utils.checkpoint
                         in a compiled block), or the forward takes gradients (torch.autograd.grad
                         inside it), so FSDP2 gathers both directions for both; "backward": for the
                         backward alone; None: detected.
    parallel:            how ranks share the layer (`TensorParallel`), or a style's `Layouts`.
    fuse_wgrad_accumulation, delay_wgrad_compute:  as of `fq.Linear`.
    """

    runtime: LayerRuntime
    module_type = "linear"  # of its roles (`Role.module_type`)
    recomputes_forward: bool | Literal["backward"] | None = None
    fuse_wgrad_accumulation = False
    delay_wgrad_compute = False
    parallel: TensorParallel | Layouts | None = None

    def make_quantized(self, recipe: Recipe | str, name: str) -> None:
        """Give the layer its runtime, and its weight a state unless it has one."""
        self.runtime = LayerRuntime(name, self.module_type, recipe, self.weight.device)
        self.attach_state()
        torch_compat.make_fx_leaf(self)
        self.register_state_dict_post_hook(plain_in_state_dict)
        self.register_load_state_dict_post_hook(reencode_after_load)

    def attach_state(self, kind: type[WeightState] | None = None) -> None:
        runtime, state = self.runtime, known_state(self.weight)
        is_new = state is None
        if state is None:
            name, shape = f"{runtime.name}.weight", tuple(whole_shape(self.weight))
            dtype = runtime.recipe.compute_dtype
            default = WeightState if quantized_init_recipe() is None else QuantizedWeightState
            state = (kind or default)(name, runtime.plan.weight, shape, dtype)
        runtime.set_weight_state(state)
        if is_new:
            register_weight(self)
        self.prepare_graphs()

    @property
    def _weight_state(self) -> WeightState:
        return self.runtime.weight_state

    def set_weight_state(self, state: WeightState) -> None:
        self.runtime.weight_state = state

    @property
    def recipe(self) -> Recipe:
        return self.runtime.recipe

    @property
    def plan(self) -> GemmPlan:
        return self.runtime.plan

    def plan_on(self, dtype: torch.dtype, device: Place) -> GemmPlan:
        """The plan as its products of `dtype` activations run on `device` (`GemmPlan.on`)."""
        return self.plan if self.runtime.is_shared else self.plan.on(dtype, device)

    def prepare_graphs(self) -> None:
        """Allocate what compiled graphs receive, for the plan and the device of now."""
        weight, runtime = self.weight, self.runtime
        runtime.graphs.prepare(runtime, None if weight is None else weight.device)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """torch's styles register parts of weights so, and graphs need the group beforehand."""
        super().register_parameter(name, param)
        if name == "weight" and "runtime" in self.__dict__ and isinstance(param, DTensor):
            if param.device_mesh.ndim == 1 and param.placements[0].is_shard():
                attach_tensor_group(self)

    def checked(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x in the dtype of its products. Raises for what no product accepts, naming the module.

        weight:  that is multiplied; default: the module's.
        """
        device, runtime = x.device, self.runtime
        weight = self.weight if weight is None else weight
        if x.dtype not in FLOATING:
            raise ValueError(
                f"{runtime.name}: input is {x.dtype}; a linear layer multiplies bf16, fp16 and "
                "fp32: cast it first"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{runtime.name}: input is {list(x.shape)}, its last dim must be {self.in_features}"
            )
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"{runtime.name}: the weight is a DTensor {weight.placements} that FSDP2 did not "
                "gather; tensor-parallel weights are not supported here: use fully_shard, or leave "
                "the module out of fq.convert"
            )
        if weight.device != device:
            raise ValueError(
                f"{runtime.name}: input is on {device} and the weight on {weight.device}; move one "
                "of them (a model made on meta: model.to_empty(device=...), then initialize or "
                "load it)"
            )
        dtype = torch_compat.autocast_dtype(device)
        return x if dtype is None else x.to(dtype)

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> Call:
        """Return what this call of the layer has besides x, weight and bias. Refuses what the plan
        did not print."""
        runtime, device, grad = self.runtime, x.device, torch.is_grad_enabled()
        if (transform := torch_compat.forward_transform(x)) is not None:
            raise NotImplementedError(
                f"{runtime.name}: {transform} reached a layer that multiplies codes, which have no "
                "tangents and no batches; use torch.func.grad or vjp, or transform the model "
                "before fq.convert"
            )
        runtime.last_run = counters.epoch
        if weight_state(weight) is None and torch_compat.is_managed(weight):
            self._fallback(
                "its weight is a plain tensor under fully_shard, so high-precision bytes were "
                "gathered"
            )
        elif x.dtype != weight.dtype:
            self._check_domains(plan, x.dtype, weight.dtype, device)
        records = False
        if not torch_compat.backward_is_running():
            counts = plan.needs_steps or (runtime.steps is not None and runtime.steps.is_scheduled)
            records = counts and note_forward(self, (x, weight, bias))
        self.note_recomputation()
        watched = plan.resolved(x.dtype, device).is_watched and STEP.is_probed
        guard = guard_of(runtime, device) if watched else None
        state, group = None, None
        if not isinstance(weight, QuantizedTensor):
            state = state_for(runtime.weight_state, plan, values_of(weight))
            group = state.tensor_group if state.spans_parts else None
        factors = histories = NOTHING
        if plan.is_delayed or plan.weight.delayed_directions:
            factors, histories = self._histories(plan, state, device, records)
        return Call(
            plan,
            weight.requires_grad and grad,
            STEP.on(device),
            runtime.ids_on(device),
            state,
            guard,
            guard,
            factors,
            histories,
            weight_group=group,
            grad=grad,
            name=runtime.name,
            wgrad=self.weight_gradient(weight),
        )

    @property
    def returns_wgrad(self) -> bool:
        """Whether autograd is given the gradient of the weight."""
        return not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute)

    @property
    def trained(self) -> tuple[Tensor, int | None, bool]:
        """`WeightGradient.parameter`, `index` and `transposed`."""
        return self.weight, None, False

    def weight_gradient(self, weight: Tensor) -> WeightGradient | None:
        """Return what takes the wgrad of this call in place of autograd; None: nothing does.

        Raises NotImplementedError where FSDP2 or DDP reduces it, ValueError for a `main_grad` that
        is missing or that does not fit.
        """
        if self.returns_wgrad or not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        fuses, name = self.fuse_wgrad_accumulation, self.runtime.name
        parameter, index, transposed = self.trained
        refuse_reduced(parameter, name, fuses)
        if fuses:
            main_grad_of(parameter, name)
        waiting = self.runtime.waiting if self.delay_wgrad_compute else None
        return WeightGradient(name, parameter, index, transposed, fuses, waiting)

    def backward_dw(self) -> None:
        """Compute the wgrad of the oldest backward that waits for it (`delay_wgrad_compute`).

        It is added to `weight.grad`, or to `weight.main_grad`; hooks on the weight's gradient do
        not run. Does nothing for a layer that delays none, or whose weight is frozen. Raises
        RuntimeError if no wgrad waits.
        """
        if self.delay_wgrad_compute and self.trained[0].requires_grad:
            self.runtime.waiting.compute()

    def _histories(
        self, plan: GemmPlan, state: WeightState | None, device: torch.device, records: bool
    ) -> tuple[BySlot, BySlot]:
        """Return `Call.factors` and `Call.histories`. Gradients are recorded where they are
        computed, so always."""
        of_input = self.runtime.histories(plan, "input", device)
        of_weight = []
        if state is not None:  # which a context may have made for this call; histories go on
            of_weight = weight_histories(self.runtime.weight_state, plan, device)
        of_grad = self.runtime.histories(plan, "grad_output", device)
        scales = [[h.encode_scale for h in slot] for slot in (of_input, of_weight, of_grad)]
        amaxes = [[h.amaxes for h in slot] for slot in (of_input, of_weight, of_grad)]
        recorded = (amaxes[0], amaxes[1], amaxes[2]) if records else ((), (), amaxes[2])
        return (scales[0], scales[1], scales[2]), recorded

    def in_graph(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: GemmPlan,
        ranks: tuple | None = None,
    ) -> Tensor:
        """Return `program.in_graph` of what graphs receive, which dynamo guards one by one."""
        inputs, step, ids, guards, delayed = self.runtime.graphs, None, None, [], NO_HISTORIES
        grad = torch.is_grad_enabled()
        trains = grad and (self.training or x.requires_grad or weight.requires_grad)
        note_traced(self, plan, x.device)
        if plan.needs_steps:
            step, guards = STEP.in_graph(x.device), inputs.guards
            ids = inputs.ids if plan.is_keyed else None
            if plan.has_histories:
                delayed = inputs.delayed.get(plan.histories_key, NO_HISTORIES)
        rank = None if ranks is None else inputs.rank
        save, codes = grad and weight.requires_grad, None
        if inputs.codes is not None and (inputs.has_columnwise or not grad):
            usual: Any = _batch_invariant_plan(self.plan.key) if plan.batch_invariant else self.plan
            codes = inputs.codes if usual is not None and plan.key == usual.key else None
        key, main_grad = plan.key, None
        if save and self.fuse_wgrad_accumulation:
            parameter: Any = self.weight
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True  # nothing of ours runs in the backward
            main_grad = main_grad_of(parameter, self.runtime.name)
        states = step, ids, guards, *delayed
        return in_graph(x, weight, bias, key, save, trains, *states, rank, ranks, codes, main_grad)

    def plan_here(self, device: torch.device) -> GemmPlan:
        """Return the plan of a call on `device` in the contexts of this thread. Raises as
        `plan_in`, and ValueError inside `batch_invariant` for a plan that cannot be made so."""
        here, plan, recipe = contexts(), self.plan, self.recipe
        if here.autocast is not None:
            plan, recipe = self.plan_in(here.autocast, device), here.autocast.recipe
        if not here.batch_invariant:
            return plan
        invariant = _batch_invariant_plan(plan.key)
        if invariant is None:
            raise ValueError(
                f"{self.runtime.name}: got {recipe}, where a token's output depends on other "
                "tokens or on its place, and fq.numerics.batch_invariant() wants a token-local "
                'recipe: mxfp8, fp8_block, mxfp6 or mxfp4 with accuracy="token", fp8_row(), '
                'nvfp4(scale_per="row") or identity(); set one, or leave the context'
            )
        if recipe.require_native:
            _check_native(invariant.key, self.runtime.name, arch_of(device))
        return invariant

    def plan_in(self, override: Autocast, device: torch.device) -> GemmPlan:
        """Return the plan of a call on `device` inside `fq.autocast`."""
        recipe, runtime = override.recipe, self.runtime
        function = torch_compat.running_function()
        if function not in (None, override.function) and not hasattr(function, "is_wrapped"):
            raise ValueError(
                f"{runtime.name}: the backward of {type(function).__name__} would recompute this "
                "forward outside fq.autocast, with another recipe; enter fq.autocast inside the "
                "recomputed function, or use torch.utils.checkpoint"
            )
        if recipe.tail:
            raise ValueError(
                f"{runtime.name}: fq.autocast({recipe}) cannot keep the last layers in high "
                "precision, because a module does not know which are last: tail is honoured by "
                "fq.convert and fq.set_recipe"
            )
        arch = arch_of(device)
        kept = runtime.reads_rowwise
        return plan_of_recipe(recipe.key, runtime.name, arch, runtime.module_type, kept)

    def note_recomputation(self) -> None:
        """Record whether the backward runs this forward again. An evaluation says nothing of it."""
        recomputes, owner = self.recomputes_forward, self.runtime.weight_state
        if recomputes is None and torch.is_grad_enabled():
            recomputes = torch_compat.checkpoint_hook() is not None
        elif recomputes is None and torch_compat.running_function() is not None:
            recomputes = True  # reentrant checkpointing runs the first forward
        if not (recomputes is None or torch_compat.backward_is_running()):
            (owner.recomputed.add if recomputes else owner.recomputed.discard)(owner.name)

    def _check_domains(
        self, plan: GemmPlan, dtype: torch.dtype, planned: torch.dtype, device: torch.device
    ) -> None:
        """The plan assumed activations in the weight's dtype; in others no GEMM may be slower."""
        arch = arch_of(device)
        for product in PRODUCTS:
            runs, printed = (plan.domain(product, d, arch)[0] for d in (dtype, planned))
            if DOMAINS.index(runs) > DOMAINS.index(printed):
                a, b = plan.pair(product)
                self._fallback(
                    f"{product.name} ({a} x {b}) of {dtype} activations runs in the {runs} domain, "
                    f"not {printed}"
                )

    def _fallback(self, what: str) -> None:
        """The plan did not print this: raise under strict=True, else warn once and count."""
        name = self.runtime.name
        departure = name, what
        if self.recipe.strict:
            raise ValueError(
                f"{name}: {what}; the plan says otherwise. Make it so, or pass strict=False to the "
                "recipe"
            )
        if departure not in counters.of("departure"):
            warnings.warn(f"{name}: {what}", stacklevel=4)
        counters.add("departure", departure)

    def _apply(self, fn, recurse: bool = True):
        applied = super()._apply(fn, recurse)
        self.prepare_graphs()
        self.runtime.boundary_ids.on(self.runtime.ids.device)
        return applied

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.prepare_graphs()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"
