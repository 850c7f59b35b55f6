# SPDX-License-Identifier: Apache-2.0
"""`ExpertParallel`: the style that dispatches tokens to the ranks of their experts and combines
what comes back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..context import current_autocast
from ..formats import ROWWISE
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import EXPERT
from ..linear.plan import build_plan
from ..linear.routes import combine
from ..models.steps import name_of
from ..ops.reference import known
from ..quantizer import as_rows
from ..tensor import torch_compat
from ..tensor.agreement import raises_on_all_ranks, recipe_text, weight_text
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import values_of
from .experts import REMEDY, TRANSPORTS, Travel, exchanged, travel_of
from .sequence import planned_bytes
from .tensor_parallel import check_one_axis
from .token_route import route_tokens

OWN_ARGUMENTS = "routes", "weights", "meanwhile"  # of a call, which its module is not given


class ExpertDispatch:
    """What `ExpertParallel` gave a module: dispatch before its forward, combine behind it."""

    def __init__(
        self, module: nn.Module, style: ExpertParallel, group: dist.ProcessGroup, experts: int
    ):
        self.module, self.style, self.group = module, style, group
        self.experts, self.name = experts, name_of(module)
        self._under_way: tuple | None = None
        self._travels: dict[tuple, tuple[list, Travel]] = {}  # with the layers that decide it
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.behind, always_call=True)

    def converted(self, slot: str) -> list[GroupedLinear]:
        layers = [self.module.get_submodule(n) for n in self.style.names(slot)]
        return [layer for layer in layers if isinstance(layer, GroupedLinear)]

    def travel(self, slot: str, dtype: torch.dtype) -> Travel:
        """Return how the tokens ("input") travel, or the gradient of what comes back
        ("grad_output").

        Raises ValueError for codes that were asked for, or that require_native wants, where they
        cannot travel.
        """
        layers = [(m, m._name, m.first.recipe) for m in self.converted(slot)]
        key = slot, dtype, current_autocast() is None
        if key not in self._travels or self._travels[key][0] != layers:
            self._travels[key] = layers, self._travel_of(layers, *key)
        return self._travels[key][1]

    def _travel_of(self, layers: list[tuple], slot: str, dtype: torch.dtype, plain: bool) -> Travel:
        # of all experts, on whichever rank they are
        roles = [(recipe, f"{n}.{e}") for _, n, recipe in layers for e in range(self.experts)]
        quantizers = {build_plan(*role, module_type=EXPERT).hybrid(slot) for role in roles}
        is_input, names = slot == "input", [*self.style.names(slot)]
        transport = self.style.transport if is_input else self.style.gradients
        if not layers or len(layers) < len(names):
            option = "reads" if is_input else "writes"
            travel = Travel(None, f"{option}={names} names no converted experts")
        elif len(quantizers) > 1:
            travel = Travel(None, "experts quantize it differently")
        elif not plain:
            travel = Travel(None, "fq.autocast overrides the recipe")
        else:
            (hybrid,), first = quantizers, layers[0][0].first
            cols = first.in_features if is_input else first.out_features
            travel = travel_of(hybrid, cols, dtype, transport)
            if not hybrid.side(ROWWISE).fmt.is_quantized:
                return travel
        required = transport == "auto" and any(recipe.require_native for *_, recipe in layers)
        if travel.hybrid is None and (transport == "codes" or required):
            asked = "require_native=True" if required else "it was asked to travel as codes"
            raise ValueError(
                f"{self.name}: {slot} would be dispatched in high precision ({travel.reason}), "
                f"and {asked}; {REMEDY}, or ask for high precision"
            )
        return travel

    @torch_compat.never_compiled
    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """(tokens of own experts, their splits, ..) of (this rank's tokens, splits, ..)."""
        if len(args) != 2:  # routes by place, or tokens by name
            named = {key: kwargs.pop(key) for key in OWN_ARGUMENTS if key in kwargs}
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
            placed = {k: bound.arguments.pop(k) for k in OWN_ARGUMENTS if k in bound.arguments}
            args, kwargs = bound.args, bound.kwargs | placed | named
        if len(args) < 2 or not isinstance(args[0], Tensor):
            raise ValueError(
                f"{self.name}: call it with (tokens sorted by expert, splits), got {len(args)} "
                "positional arguments"
            )
        x, splits, *others = args
        routes, weights, meanwhile = (kwargs.get(key) for key in OWN_ARGUMENTS)
        routes = () if routes is None else routes
        if (dtype := torch_compat.autocast_dtype(x.device)) is not None:
            x = x.to(dtype)
        tokens, gradients = self.travel("input", x.dtype), self.travel("grad_output", x.dtype)
        options = f"{tokens}, {gradients}", self.experts, self.name, routes, weights
        route = route_tokens(splits, rows := as_rows(x), self.group, *options)

        grad = torch.is_grad_enabled()

        def begin_ahead() -> None:
            layers = dict.fromkeys([*self.converted("input"), *self.converted("grad_output")])
            with torch.set_grad_enabled(grad):  # which an autograd function turned off
                for layer in layers:
                    layer.begin_ahead(rows)

        route.meanwhile = begin_ahead
        sent, result = exchanged(rows, route, tokens, True, routes, meanwhile)
        summed = () if weights is None else (*routes[1:], weights)
        shape = (sum(route.rows.sent),) if routes and not summed else x.shape[:-1]
        results = (result,) * (meanwhile is not None)
        self._under_way = route, gradients, shape, summed, results
        sizes = route.splits
        if isinstance(splits, Tensor):
            if splits.device == rows.device:
                sizes = route.ends.to(splits)
            else:
                sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0).to(splits)
        return (sent, sizes, *others), {k: v for k, v in kwargs.items() if k not in OWN_ARGUMENTS}

    @torch_compat.never_compiled
    def behind(self, module: nn.Module, args: tuple, y: Tensor) -> Tensor | tuple | None:
        """Results of this rank's tokens, of those of own experts."""
        under_way, self._under_way = self._under_way, None
        if y is None:  # the forward raised, or a checkpoint needs no more of it
            return None
        route, gradients, shape, summed, results = known(under_way, "a dispatch of this forward")
        if y.shape[0] != sum(route.rows.received) or y.dim() != 2:
            raise ValueError(
                f"{self.name}: its forward gave {list(y.shape)}; wanted a row for each of "
                f"{sum(route.rows.received)} tokens"
            )
        y, _ = exchanged(y, route, gradients, False)
        y = combine(y, *summed) if summed else y
        y = y if len(shape) == 1 else y.view(*shape, y.shape[-1])
        return (y, *results) if results else y

    def __deepcopy__(self, memo) -> ExpertDispatch:
        copied = memo[id(self)] = copy.copy(self)  # of the same ranks
        copied.module, copied._under_way = copy.deepcopy(self.module, memo), None
        copied._travels = {}
        return copied


class ExpertParallel(ParallelStyle):
    """Experts of a module over the ranks of one mesh axis; it is called with all of a rank's
    tokens, as without the style.

    reads, writes:  names of the `fq.GroupedLinear` submodules that multiply the tokens, and of the
                    one whose output the module returns ("": the module itself). They quantize what
                    travels. Default: those of a `fq.GroupedMLP`, or of a `fq.GroupedLinear` itself.
    transport:      of tokens: "auto": rowwise codes where their values are exact and they are
                    fewer bytes (`dispatch_tokens`), else high precision; "codes";
                    "high_precision".
    gradients:      of the output: the same; default "high_precision". Gradients of tokens, and
                    outputs, are sums: always in high precision.

    Call: y [.., N] = module(x [.., K], splits): rows sorted by expert, splits as of
    `fq.GroupedLinear`, of all experts. Every rank calls it, also without tokens. routes=(order,
    back), of `fq.GroupedLinear`: x is [T, K], of tokens that k experts each multiply; with
    weights=[T, k] besides, y [T, N] is the weighted sum of a token's rows, in fp32. With
    meanwhile=function, which is called while the tokens are on their way (shared experts), the call
    returns (y, what it returns); its backward runs while gradients of tokens are. The module's
    forward is given the tokens of the experts that the rank holds, or the values of their codes, by
    expert, then by rank. The host waits once for the numbers of tokens.

    Every parameter of the module is cut along dim 0, between experts, and is a DTensor: checkpoints
    fit other numbers of ranks. Apply it before or after `fq.convert`, and before
    `fully_shard(module, mesh=)`, whose mesh is another axis of the same mesh. Gradients of an
    expert are sums over the ranks of its axis: where the loss is a mean over ranks, give the module
    `set_gradient_divide_factor(ranks of both axes)` (with gloo,
    `set_force_sum_reduction_for_comms(True)` too). It runs eagerly: under torch.compile it breaks
    the graph.

    Raises ValueError, on every rank, for a mesh of more axes, parameters that R does not divide or
    that disagree about the number of experts, experts under `fully_shard`, and names of no
    submodule.
    """

    def __init__(
        self,
        *,
        reads: str | Sequence[str] | None = None,
        writes: str | None = None,
        transport: str = "auto",
        gradients: str = "high_precision",
    ):
        super().__init__()
        self.reads = [reads] if isinstance(reads, str) else None if reads is None else list(reads)
        self.writes = None if writes is None else [writes]
        self.transport, self.gradients = transport, gradients
        for option in ("transport", "gradients"):
            if getattr(self, option) not in TRANSPORTS:
                raise ValueError(
                    f"ExpertParallel: {option} must be one of {', '.join(TRANSPORTS)}, got "
                    f"{getattr(self, option)!r}"
                )

    def names(self, slot: str) -> list[str]:
        return (self.reads if slot == "input" else self.writes) or []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = name_of(module)
        check_one_axis(name, "ExpertParallel", device_mesh, "expert parallelism", "ep")
        style, parameters = copy.copy(self), dict(module.named_parameters())
        own = ([""], [""]) if "weight" in module._parameters else ([], [])
        reads, writes = getattr(module, "reads_and_writes", own)
        style.reads = reads if self.reads is None else self.reads
        style.writes = writes if self.writes is None else self.writes
        experts = next((p.shape[0] for p in parameters.values() if p.dim() == 3), 0)
        facts = {f"{name}.{key}": weight_text(p) for key, p in parameters.items()}
        facts |= {
            f"{name}.{key}, its recipe": recipe_text(m.layers[0])
            for key, m in module.named_modules()
            if isinstance(m, GroupedLinear)
        }
        with raises_on_all_ranks(device_mesh.get_all_groups(), facts):
            _check_experts(name, parameters, experts, device_mesh)
            for submodule in (*style.reads, *style.writes):
                module.get_submodule(submodule)
        dispatch = ExpertDispatch(module, style, device_mesh.get_group(), experts)
        setattr(module, "expert_dispatch", dispatch)
        for child in module.modules():
            _cut(child, device_mesh)
        return module


def _check_experts(
    name: str, parameters: Mapping[str, Tensor], experts: int, mesh: DeviceMesh
) -> None:
    """Raise ValueError for parameters that are not packed experts, or that the ranks do not
    divide."""
    for key, p in parameters.items():
        if type(p) is QuantizedTensor:
            raise ValueError(
                f"{name}.{key} is codes of fq.freeze, which ExpertParallel does not cut; call "
                "fq.unfreeze, or leave these experts to fully_shard"
            )
        is_packed = p.dim() == 3 or (p.dim() == 2 and key.rpartition(".")[2] == "bias")
        fits = is_packed and p.shape[0] == experts and experts % mesh.size() == 0
        if isinstance(p, DTensor) or not fits:
            raise ValueError(
                f"{name}: ExpertParallel cuts packed parameters [experts, ..] between {experts} "
                f"experts, over {mesh.size()} ranks, and {key} is "
                f"{'a DTensor' if isinstance(p, DTensor) else 'of shape'} {list(p.shape)}; give it "
                "packed experts alone, whose number the ranks divide, before fully_shard"
            )


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank's experts in the module's own parameters."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            cut = distribute_tensor(values_of(parameter).detach(), mesh, [Shard(0)])
            module._parameters[key] = nn.Parameter(cut, parameter.requires_grad)
    if isinstance(module, GroupedLinear):
        before = module.first
        module.take_packed([layer.recipe for layer in module._linears], module._name)
        for layer in module._linears:
            layer.runtime.steps, layer.runtime.chosen = before.runtime.steps, before.runtime.chosen
            for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute", "recomputes_forward"):
                setattr(layer, option, getattr(before, option))


def planned_dispatch(
    module: nn.Module, counts: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> dict[tuple, int]:
    """Return the bytes that this rank's tokens send and receive in a forward and backward: (pass,
    direction, format) -> bytes, as `receipt` counts.

    module:  with `ExpertParallel`, whose layers are converted.
    counts:  [E] of this rank's tokens.
    """
    experts: ExpertDispatch = getattr(module, "expert_dispatch")
    planned, rows = {}, sum(counts)
    k = experts.converted("input")[0].first.in_features
    n = experts.converted("grad_output")[0].first.out_features
    for phase, slot, cols, summed in ("forward", "input", k, n), ("backward", "grad_output", n, k):
        hybrid = experts.travel(slot, dtype).hybrid
        planned |= planned_bytes(phase, hybrid, (ROWWISE,), (rows, cols), dtype, 1)
        planned[phase, "sum", "high precision"] = rows * summed * dtype.itemsize
    return planned


def describe_experts(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Return a line of `fq.plan` about what ranks exchange for a module of experts; None where they
    do not."""
    experts: ExpertDispatch | None = getattr(module, "expert_dispatch", None)
    if experts is None:
        return None
    tokens, gradients = (experts.travel(slot, dtype) for slot in ("input", "grad_output"))
    return (
        f"{experts.experts} experts over {experts.group.size()} ranks: tokens are dispatched "
        f"{tokens}, gradients of the output {gradients}"
    )
