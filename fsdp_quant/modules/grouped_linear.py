# SPDX-License-Identifier: Apache-2.0
"""`fq.GroupedLinear`: a linear layer an expert, over tokens that lie sorted by expert."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..context import current_autocast
from ..counters import counters
from ..formats import Direction
from ..ops import native
from ..ops.rng import own_name
from ..recipe import Recipe, as_recipe, identity
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import WeightState
from .bad_splits import raise_bad_splits, register_tag
from .grouped_op import (
    Beside,
    ExpertWeights,
    GroupedLinearCall,
    unsupported_reason,
)
from .linear import (
    HasWeight,
    Linear,
    _plain_in_state_dict,
    apply_recipe,
    attach_runtime,
    register_weight,
    whole_shape,
)
from .plan import PRODUCTS, GemmPlan, ladder_of
from .traced_experts import runs_in_graphs, traced_experts

EXPERT = "grouped_linear"  # `Role.module_type`


class _Expert(Linear):
    """One expert of packed weights: no module of the tree, and without memory of its own.

    Its weight and bias are those that its module's forward gives it, in it, and else views of the
    module's values of now.
    """

    def __init__(self, in_features: int, out_features: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features

    def part_of(self, module: nn.Module, index: int) -> None:
        """module: has `values_of(index)`, weight and bias."""
        self.__dict__["_part_of"] = weakref.ref(module), index
        self.give(None, None)

    def give(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Multiply these from now on; None: the module's."""
        vars(self).update(weight=weight, bias=bias)

    def _now(self, which: int) -> Tensor | None:
        given, of = vars(self).get("weight"), vars(self).get("_part_of")
        if given is not None:
            return (given, vars(self).get("bias"))[which]
        module = None if of is None else of[0]()
        return None if module is None else module.values_of(of[1])[which]

    weight = property(lambda self: self._now(0))
    bias = property(lambda self: self._now(1))

    def __getstate__(self) -> dict:
        return {
            k: v
            for k, v in super().__getstate__().items()
            if k not in ("weight", "bias", "_part_of")
        }


class ListedExpert(Linear):
    """One expert of a list: a layer that asks its recipe as an expert does."""

    module_type = EXPERT


class GroupedLinear(HasWeight):
    """y[rows of e] = x[rows of e] W[e]^T + b[e] for experts e, each product in the formats that a
    recipe gives.

    packed:  False: `experts`, a list of `fq.Linear`. True: one `weight` [E, N, K] and one `bias`
             [E, N]; FSDP2 cuts it between experts, and gathers each expert's codes whole.
    recipe:  `Recipe`; change it with `fq.set_recipe`. The role of expert e is called
             "name.experts.e", or "name.e" of packed weights.

    Every expert quantizes its own tokens: a call gives what a loop over `fq.Linear` modules gives.
    On sm_90 one product serves all experts where no scale serves tokens of two
    (`grouped_op.unsupported_reason`, printed by `fq.plan`).

    first_expert:  this rank's first, where the packed weight is a DTensor whose ranks hold experts
                   each.

    >>> experts = fq.GroupedLinear(4, 64, 32, recipe=fq.recipes.mxfp8())
    >>> experts(torch.ones(10, 64), [3, 0, 5, 2]).shape
    torch.Size([10, 32])
    """

    first_expert = 0

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        packed: bool = False,
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ):
        name = own_name(name, "grouped_linear")
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"{name}: num_experts must be at least 1, got {num_experts}")
        recipe, options = (
            as_recipe(recipe or identity(), name, Recipe),
            {"device": device, "dtype": dtype},
        )
        if not packed:
            self.experts = nn.ModuleList(
                ListedExpert(
                    in_features,
                    out_features,
                    bias,
                    **options,
                    recipe=recipe,
                    name=f"{name}.experts.{e}",
                )
                for e in range(num_experts)
            )
            self._linears, self.packed = list(self.experts), False
            finish_experts(self, name)
            return
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, **options))
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(num_experts, out_features, **options)) if bias else None,
        )
        bound = in_features**-0.5  # as nn.Linear
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)
        adopt_packed(self, [recipe] * num_experts, name)

    @property
    def matrices(self) -> Tensor:
        """The packed weight as products multiply it, [E, N, K]."""
        return self.weight.mT if self.transposed else self.weight

    @property
    def held(self) -> tuple[Tensor, Tensor | None]:
        """Packed weight and bias of this rank's experts; DTensors while `fully_shard` has them in
        shards."""
        weight, bias = self.matrices, self.bias
        if (
            not isinstance(weight, DTensor)
            or self._weight_state.tensor_group is None
            or weight.device_mesh.ndim > 1
        ):
            return weight, bias
        return weight.to_local(), None if bias is None else bias.to_local()

    @property
    def first(self) -> Linear:
        """The layer of this rank's first expert, over whatever it last multiplied: for what all
        experts have alike."""
        return self._linears[0]

    @property
    def layers(self) -> Sequence[Linear]:
        """The `fq.Linear` of each expert, over its values now; while the weight is sharded, over
        none of its own."""
        for layer in self._linears if self.packed else ():
            layer.training = self.training
        return self._linears

    def values_of(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one, without gradients; of a sharded weight the shard."""
        with torch.no_grad():
            weight, bias = self.held
            if isinstance(weight, DTensor):
                return weight.detach(), None
            return weight[expert], None if bias is None else bias[expert]

    @property
    def owners(self) -> Sequence[nn.Module]:
        """Modules whose weights one product for all experts takes: this one, packed, or each
        expert."""
        return [self] if self.packed else self._linears

    def _operand(self, owner: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of one of `owners`, as products multiply them."""
        return self.held if owner is self else (owner.weight, owner.bias)

    def forward(self, x: Tensor, splits: Sequence[int] | Tensor) -> Tensor:
        """y [.., N] of x [.., K], whose rows lie sorted by expert.

        x:       or a `QuantizedTensor` of the codes that each expert would make of its tokens
                 (`parallel.dispatch_tokens`).
        splits:  number of rows of each expert, on the host; or int tensor [E], the row behind each
                 expert's last (the `offs` of `torch._grouped_mm`), which is not read where one
                 product serves all experts. Given a tensor, packed experts are in compiled graphs,
                 but those of `traced_experts.runs_in_graphs`; they and experts in a list run
                 between graphs, and `fullgraph=True` is refused.

        Raises ValueError for splits that are not of E experts or do not add up to the rows: now
        where they are on the host, else before an optimizer step or in a call that follows, when
        the device has said so.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and isinstance(splits, Tensor):
            whole = self._goes_into_graphs and not isinstance(self.weight, DTensor)
            whole = whole and not isinstance(x, QuantizedTensor) and current_autocast() is None
            return self._in_graph(x, splits) if whole else self._outside_graphs(x, splits)
        if not compiling:
            raise_bad_splits()
        plan, reason = (
            None if compiling else self.common_plan,
            "experts differ, or it is compiled, overridden or of no tokens",
        )
        first = self._linears[0]
        rows = first.checked(x, self._operand(self.owners[0])[0]).reshape(-1, first.in_features)
        sizes = self._sizes(splits, rows)
        if (
            plan is not None
            and not torch_compat.dispatch_is_watched()
            and current_autocast() is None
            and len(rows)
        ):
            reason = self._unsupported_reason(plan, rows.dtype, x.device)
            two_level = any(plan.operand("input", d).tensor_scale for d in Direction)
            if reason is None and two_level and isinstance(x, QuantizedTensor):
                reason = "the tokens came as two-level codes"
        if reason is None:
            y = self._in_one(plan, rows, splits, sizes)
        else:
            if sizes is None:
                counters.add(
                    "departure",
                    (self._name, f"waits for the device to tell the token splits: {reason}"),
                )
                sizes = self._checked(_sizes_of(splits.tolist()), len(rows))
            parts = rows.split(sizes)
            y = torch.cat(
                self._traced(parts) if compiling and self.packed else self._one_by_one(parts)
            )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _one_by_one(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """y of each part. Drops the views of the weight afterwards: they hold its AccumulateGrad
        node, of this pass's stream."""
        if self.owners[0] is not self:
            return [layer(part) for layer, part in zip(self._linears, parts)]
        weight, bias = self.held
        biases, made = [None] * len(parts) if bias is None else bias.unbind(), []
        for layer, part, *own in zip(self.layers, parts, weight.unbind(), biases):
            layer.give(*own)
            try:
                made.append(layer(part))
            finally:
                layer.give(None, None)
        return made

    def _in_graph(self, x: Tensor, ends: Tensor) -> Tensor:
        first = self._linears[0]
        rows = first.checked(x, self.weight).reshape(-1, first.in_features)
        save, guards = torch.is_grad_enabled() and self.weight.requires_grad, first._graph.guards
        ends = ends if ends.device == rows.device else ends.to(rows.device)
        y = traced_experts(
            rows, ends, self.weight, self.bias, first._plan.key, save, self.transposed, guards
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    @torch.compiler.disable(
        reason="experts of these formats take token splits that are a tensor outside graphs; give "
        "counts, a list"
    )
    def _outside_graphs(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.forward(x, splits)

    def _traced(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """y of each expert of packed weights, in a graph that is being traced."""
        grad, (held, bias) = torch.is_grad_enabled(), self.held
        save = grad and held.requires_grad
        biases = bias.unbind() if bias is not None else [None] * len(parts)
        made = []
        for part, weight, bias, layer in zip(parts, held.unbind(), biases, self._linears):

            def product(x, weight=weight, bias=bias, layer=layer):
                return layer.traced(x, weight, bias, layer.plan, save, training=self.training)

            made.append(
                product(part)
                if layer.plan.boundary is None
                else layer.bounded(product, part, layer.plan)
            )
        return made

    @property
    def common_plan(self) -> GemmPlan | None:
        """The plan of one product for all, or None. What the guard moves for one, which may count
        for all, is moved for all."""
        planned = [layer._plan for layer in self._linears]
        if planned == self._planned[0]:
            return self._planned[1]
        plans = {plan.key: plan for plan in planned}
        if len(plans) > 1 and any(plan.moved for plan in plans.values()):
            furthest = {
                p.name: max((plan.rung(p) for plan in plans.values()), key=ladder_of(p).index)
                for p in PRODUCTS
            }
            for layer in self._linears:
                layer._plan = layer.plan.moved_to(furthest)
            plans = {layer.plan.key: layer.plan for layer in self._linears}
        self._planned = planned, next(iter(plans.values())).of_groups if len(plans) == 1 else None
        return self._planned[1]

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why experts are multiplied one after the other, in one clause; None where one product
        serves all."""
        return self._unsupported_reason(self.common_plan, dtype, device)

    def _unsupported_reason(
        self, plan: GemmPlan | None, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        if plan is None:
            return "experts have different plans"
        key, first = (plan.key, dtype, device), self._linears[0]
        if key not in self._reasons:
            bias = self._operand(self.owners[0])[1] is not None
            self._reasons[key] = unsupported_reason(
                plan, dtype, device, len(self._linears), first.out_features, first.in_features, bias
            )
        return self._reasons[key]

    def _in_one(self, plan: GemmPlan, rows: Tensor, splits, sizes: list[int] | None) -> Tensor:
        """One product for all experts."""
        device, grad = rows.device, torch.is_grad_enabled()
        held = [self._operand(owner) for owner in self.owners]
        weights, layers = [weight for weight, _ in held], self._linears
        # all calls say the same where no expert has histories or random bits of its own
        if self.packed:
            own = plan.is_delayed or plan.input.is_stochastic or plan.grad_output.is_stochastic
            layers = layers if own else layers[:1]
            calls = [layer.call(rows, weights[0], plan, grad, grad) for layer in layers]
        else:
            calls = [
                layer.call(rows, weight, plan, grad, grad) for layer, weight in zip(layers, weights)
            ]
        ends = torch.tensor(sizes, device="cpu").cumsum(0) if sizes is not None else splits
        ends = ends if ends.dtype in (torch.int32, torch.int64) else ends.int()
        ends = ends if ends.device == device else ends.to(device, non_blocking=True)
        biases = [bias for _, bias in held if bias is not None]
        save = grad and any(weight.requires_grad for weight in weights)
        of = ExpertWeights(
            weights, [layer._weight_state for layer in self._linears], calls[0].records
        )
        return GroupedLinearCall.apply(
            rows,
            ends,
            of,
            plan,
            calls[0].guard,
            save,
            self._tag,
            Beside.of(calls),
            *weights,
            *biases,
        )

    def _sizes(self, splits, rows: Tensor) -> list[int] | None:
        """Rows of each expert, or None where only a device knows them."""
        if not isinstance(splits, Tensor):
            return self._checked(list(splits), len(rows))
        experts = len(self._linears)
        if splits.shape != (experts,) or splits.is_floating_point() or splits.dtype is torch.bool:
            raise ValueError(
                f"{self._name}: splits is {splits.dtype} {list(splits.shape)}; wanted integers "
                f"[{experts}], the row behind each expert's last"
            )
        if splits.device.type != "cpu" or native.runs_on(splits.device):
            return None
        return self._checked(_sizes_of(splits.tolist()), len(rows))

    def _checked(self, sizes: list[int], rows: int) -> list[int]:
        experts = len(self._linears)
        if len(sizes) != experts or any(size < 0 for size in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"{self._name}: splits give {sizes} rows to {len(sizes)} experts, {sum(sizes)} in "
                f"all; wanted {experts} counts, none negative, that add up to the input's {rows} "
                "rows"
            )
        return sizes

    def _apply(self, fn, recurse: bool = True) -> GroupedLinear:
        applied = super()._apply(fn, recurse)
        self.prepare()
        return applied

    def prepare(self) -> None:
        """What graphs are given, made where plans or the device change."""
        self._goes_into_graphs = "weight" in self._parameters and runs_in_graphs(self.common_plan)
        for layer in self._linears if self.packed else ():
            layer._graph.prepare(layer, next(self.parameters()).device)

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_reasons": {}, "_planned": (None, None), "_tag": 0}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _take_parts(self)
        register_tag(self)
        self.prepare()

    def extra_repr(self) -> str:
        first = self._linears[0]
        return f"{len(self._linears)} experts, {first.in_features} -> {first.out_features}, packed={self.packed}"


def adopt_packed(module: nn.Module, recipes: Sequence[Recipe], name: str) -> None:
    """Give a module of class `GroupedLinear` with packed weights a layer an expert, over views of
    the weight.

    The optimizer holds one parameter, so the states of all experts share the histories that its
    steps roll.
    """
    if "bias" not in module._parameters:
        module.register_parameter("bias", None)
    take_packed(module, recipes, name)
    module.packed = True
    finish_experts(module, name)
    module.register_state_dict_post_hook(_plain_in_state_dict)


def take_packed(module: GroupedLinear, recipes: Sequence[Recipe], name: str) -> None:
    """Give the packed weight its states and wrapper, and each expert that this rank holds its
    layer.

    recipes:  of all experts.
    """
    weight = module.matrices.detach()
    shape = tuple(weight.shape if module.transposed else whole_shape(module.weight))
    module._weight_state = state = WeightState(
        f"{name}.weight", None, shape, recipes[0].compute_dtype
    )
    register_weight(module)
    module.first_expert = first = (
        0 if state.tensor_group is None else state.tensor_group.rank() * shape[0]
    )
    ours = range(first, first + shape[0])
    module._linears = []
    for e in ours:
        module._linears.append(
            expert(weight, recipes[e], f"{name}.{e}", EXPERT, next(iter(module._linears), None))
        )
    for layer in module._linears:
        layer._weight_state.histories = state.histories
        layer._graph.prepare(layer)
        state.parts.append(layer._weight_state)
    _take_parts(module)


def _take_parts(module: GroupedLinear) -> None:
    """Let the layers of a packed weight find it."""
    for e, layer in enumerate(module._linears if "weight" in module._parameters else ()):
        layer.part_of(module, e)


def expert(
    weight: Tensor, recipe: Recipe, name: str, module_type: str, first: _Expert | None = None
) -> _Expert:
    """The layer of an expert that is no module of the tree; whoever calls it renews weight and bias
    (now maybe packed).

    module_type:  of its roles.
    first:  the expert whose guard counts for this one.
    """
    out_features, in_features = weight.shape[-2:]
    layer = _Expert(in_features, out_features)
    layer._name, layer.module_type = name, module_type
    layer.give(weight, None)
    layer.__dict__["counts_with"] = first  # no submodule
    apply_recipe(layer, recipe)
    layer._weight_state = WeightState(
        f"{name}.weight", layer.plan.weight, (out_features, in_features), recipe.compute_dtype
    )
    layer._weight_state.plan = layer.plan
    attach_runtime(layer)
    return layer


def finish_experts(module: GroupedLinear, name: str) -> None:
    """What a `GroupedLinear` has beside its experts."""
    module._name, module._reasons, module._planned = name, {}, (None, None)
    for layer in module._linears:
        layer._plan = layer._weight_state.plan = replace(layer.plan, alone=False)
    module._goes_into_graphs = "weight" in module._parameters and runs_in_graphs(module.common_plan)
    register_tag(module)


def _sizes_of(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends)]
