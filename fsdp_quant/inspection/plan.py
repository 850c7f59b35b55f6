# SPDX-License-Identifier: Apache-2.0
"""`plan(model)`: list formats, domain and reason per GEMM, and bytes of FSDP2's all-gathers per
weight."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.plan import PRODUCTS, GemmPlan
from ..models.convert import OURS, ids_of_embeddings
from ..models.fuse import fused_notes
from ..models.multihead_attention import MultiheadAttention
from ..models.set_recipe import converted_units
from ..models.steps import converted_modules
from ..ops.capability import Place, arch_of, place_of
from ..ops.reference import known
from ..parallel.expert_parallel import describe_experts
from ..parallel.sequence import describe
from ..recipe import default_override
from ..roles import OVERRIDE_VARIABLE
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.torch_compat import ManagedParam
from ..training.gradient_reduction import reduced_bytes
from .memory import Memory, by_group, gathered_bytes, gathers_once, memory_of, plain_bytes

# Parameters of two or three dims that no GEMM reads, by class of their module and by name.
LOOKED_UP, ADDED = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d), ("bias", "embed", "token")
MANY_PARTS = 8  # of a model under `fully_shard`; of fewer, late gathers cost little


@dataclass(frozen=True)
class GemmRow:
    """One planned GEMM of one module."""

    module: str
    product: str
    operands: tuple[str, str]
    domain: str
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Predicted seconds of one step's collectives per rank, on a link without other traffic.

    Ring model: a rank receives (W - 1) / W of the bytes of an all-gather or reduce-scatter of W
    ranks, and twice that of an all-reduce.

    gather:     all-gathers of parameters (forward, backward).
    in_16_bit:  the same without quantization, in FSDP2's dtypes.
    reduce:     reduce-scatter of gradients over shards, and all-reduce over replicas.
    """

    bandwidth: tuple[float, float]
    latency: float
    gather: tuple[float, float]
    in_16_bit: tuple[float, float]
    reduce: float

    def __str__(self) -> str:
        (forward, backward), (f, b), (inside, between) = self.gather, self.in_16_bit, self.bandwidth
        speed = f"{inside / 1e9:g} GB/s"
        if between != inside:
            speed += f" in a copy and {between / 1e9:g} between copies"
        return (
            f"at {speed}: gathers {forward * 1e3:.2f} ms forward + {backward * 1e3:.2f} ms "
            f"backward a step (not quantized {f * 1e3:.2f} + {b * 1e3:.2f}), gradients "
            f"{self.reduce * 1e3:.2f} ms"
        )


@dataclass
class ModelPlan:
    """GEMMs that `model` will run, and bytes of all-gather outputs per step and rank.

    gemms:            one row per GEMM of every converted module.
    weight_bytes:     qualified name -> (forward, backward) bytes of the converted weights under
                      FSDP2.
    other_bytes:      (forward, backward) bytes of all other parameters under FSDP2.
    weight_elements:  elements of the converted weights under FSDP2.
    notes:            sentences about backward modes, experts, fused modules and GEMMs in high
                      precision.
    traffic:          predicted time of FSDP2's collectives, if `bandwidth` was given.
    gradient_bytes:   bytes of gradients (to owners of shards, between copies), if each backward
                      reduces them.
    memory:           bytes that a rank holds, if `on` or `tokens` was given.
    """

    gemms: list[GemmRow] = field(default_factory=list)
    weight_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    other_bytes: tuple[int, int] = (0, 0)
    weight_elements: int = 0
    notes: list[str] = field(default_factory=list)
    traffic: Traffic | None = None
    gradient_bytes: tuple[int, int] = (0, 0)
    memory: Memory | None = None

    @property
    def gathered_bytes(self) -> tuple[int, int]:
        """Sum the (forward, backward) bytes of the converted weights."""
        return _summed(self.weight_bytes.values())

    def bytes_per_step(self, forward: bool = True, backward: bool = True) -> int:
        """Sum the bytes of a forward's and backward's gathers, of unquantized parameters too."""
        return sum(f * forward + b * backward for f, b in (self.gathered_bytes, self.other_bytes))

    @property
    def gathered_bytes_per_element(self) -> float:
        """Forward plus backward bytes of the converted weights, per weight element (a bf16 model:
        4)."""
        return sum(self.gathered_bytes) / self.weight_elements if self.weight_elements else 0.0

    def equal_gemms(self) -> list[tuple[GemmRow, list[str]]]:
        """Return the first row of each group of rows that differ in their module, and these."""
        groups: dict[GemmRow, tuple[GemmRow, list[str]]] = {}
        for row in self.gemms:
            groups.setdefault(replace(row, module=""), (row, []))[1].append(row.module)
        return list(groups.values())

    def __str__(self) -> str:
        lines = []
        for row, modules in self.equal_gemms():
            (a, b), count = row.operands, f"[{_counted(modules)}]"
            lines.append(
                f"{row.product:6} {a:>18} x {b:<18} {row.domain:9} ({row.reason})  {count}"
            )
        if self.weight_bytes:
            forward, backward = self.gathered_bytes
            lines.append(
                f"gathers a step: weights {forward:,} B forward + {backward:,} B backward "
                f"({self.gathered_bytes_per_element:.3f} B an element), other parameters "
                f"{self.other_bytes[0]:,} B + {self.other_bytes[1]:,} B"
            )
        if any(self.gradient_bytes):
            shards, copies = self.gradient_bytes
            lines.append(f"gradients a step: {shards:,} B to shards, {copies:,} B between copies")
        lines += [str(part) for part in (self.traffic, self.memory) if part is not None]
        return "\n".join(lines + self.notes)

    def facts(self) -> dict:
        """Return the plan in JSON's types; `ModelPlan.of_facts` reads it."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def of_facts(cls, facts: dict) -> ModelPlan:
        """Return the plan whose `facts` these are. Raises ValueError for other JSON."""
        try:
            traffic, memory = _with_tuples(facts.get("traffic") or {}), facts.get("memory")
            return cls(
                [GemmRow(**_with_tuples(row)) for row in facts["gemms"]],
                _with_tuples(facts["weight_bytes"]),
                tuple(facts["other_bytes"]),
                facts["weight_elements"],
                list(facts["notes"]),
                Traffic(**traffic) if traffic else None,
                tuple(facts.get("gradient_bytes", (0, 0))),
                Memory(**memory) if memory else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"this is no plan that fq.plan(model).save wrote: {error!r}"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `fq.inspection.load_plan`."""
        Path(path).write_text(json.dumps(self.facts(), indent=1) + "\n")


def _with_tuples(fields: dict) -> dict:
    """Return fields that JSON stored, with tuples for its lists."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _counted(modules: list[str]) -> str:
    return f"{len(modules)} x {modules[0]}" if len(modules) > 1 else modules[0]


def load(path: str | Path) -> ModelPlan:
    """Read the plan that `ModelPlan.save` wrote. Raises ValueError for another file."""
    try:
        facts = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no plan that fq.plan(model).save wrote: {error}") from error
    return ModelPlan.of_facts(facts)


def diff(old: ModelPlan, new: ModelPlan) -> list[str]:
    """Return one sentence per difference from `old` to `new`; equal changes of several modules
    share one."""
    before, after = ({(r.module, r.product): _described(r) for r in p.gemms} for p in (old, new))
    changes: dict[str, list[str]] = {}
    for module, product in dict.fromkeys([*before, *after]):
        texts = [gemms.get((module, product), "none") for gemms in (before, after)]
        if texts[0] != texts[1]:
            changes.setdefault(f"{product}: {' -> '.join(texts)}", []).append(module)
    lines = [f"{change}  [{_counted(modules)}]" for change, modules in changes.items()]
    (f0, b0), (f1, b1) = (
        (plan.bytes_per_step(backward=False), plan.bytes_per_step(forward=False))
        for plan in (old, new)
    )
    if (f0, b0) != (f1, b1):
        lines.append(f"gathers a step: {f0:,} B forward + {b0:,} B backward -> {f1:,} B + {b1:,} B")
    if old.gradient_bytes != new.gradient_bytes:
        (s0, c0), (s1, c1) = old.gradient_bytes, new.gradient_bytes
        lines.append(
            f"gradients a step: {s0:,} B to shards, {c0:,} B between copies -> {s1:,} B, {c1:,} B"
        )
    lines += [f"no longer: {note}" for note in old.notes if note not in new.notes]
    return lines + [f"now: {note}" for note in new.notes if note not in old.notes]


def _described(row: GemmRow) -> str:
    return f"{row.operands[0]} x {row.operands[1]} {row.domain} ({row.reason})"


def gemm_rows(name: str, planned: GemmPlan, dtype: torch.dtype, device: Place) -> list[GemmRow]:
    """Return the rows of the three GEMMs of `dtype` activations of the module `name`."""
    rows = []
    for product in PRODUCTS:
        a, b = (repr(planned.hybrid(slot).side(d)) for slot, d in (product.a, product.b))
        rows.append(
            GemmRow(name, product.name, (a, b), *planned.domain(product, dtype, arch_of(device)))
        )
    return rows


def plan(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    bandwidth: float | tuple[float, float] | None = None,
    latency: float = 0.0,
    on: Place | None = None,
    tokens: int | None = None,
) -> ModelPlan:
    """Plan every GEMM of converted modules of `model` (of frozen weights: no wgrad), and run none.

    dtype:      of activations (default: FSDP2's param_dtype, else the weight's).
    bandwidth:  bytes per second that each rank receives; for HSDP (within a replica, between
                replicas). Adds the time of FSDP2's collectives (`ModelPlan.traffic`).
    latency:    seconds per collective, added to its transfer time.
    on:         where the model will run: a device, or a GPU that need not be here, with compiled
                kernels ("sm_90a", docs/targets.md). Default: where its weights are. It may be on
                the meta device.
    tokens:     of a rank's micro-batch. `on` and `tokens` add the memory (`inspection.Memory`).

    Raises ValueError for a model without converted modules, for a bandwidth that is not positive,
    and for an unknown GPU.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8/nvfp4")
    >>> print(fq.plan(model))                                 # on a CPU
    fprop               mxfp8 x mxfp8              reference (the result is float32)  [0]
    dgrad            nvfp4+SR x nvfp4              reference (the result is float32)  [0]
    wgrad       nvfp4(RHT)+SR x nvfp4(RHT)         reference (the result is float32)  [0]
    >>> fq.plan(model, torch.bfloat16, on="sm_100f").gemms[0].reason
    'sm_100f multiplies them, accumulated in fp32'
    """
    links = _links(bandwidth, latency)
    modules = converted_modules(model)
    if not modules:
        raise ValueError("plan found no fq.Linear; call fq.convert(model, recipe) first")
    managed = torch_compat.managed_params_of(model)
    by_state = {
        id(s): m for m in managed if isinstance(m.local, FSDPHooks) for s in m.local.state.matrices
    }

    place = None if on is None else _known_place(on)

    def runs(layer: Linear) -> tuple[torch.dtype, Place]:
        m = by_state.get(id(layer._weight_state))
        return dtype or (m.param_dtype if m else layer.weight.dtype), place or layer.weight.device

    result = ModelPlan(notes=_notes(model, modules.values(), dtype, runs))
    for name, module in modules.items():
        activations, device = runs(module)
        rows = gemm_rows(name, module.plan_on(activations, device), activations, device)
        result.gemms += rows if module.weight.requires_grad else rows[:2]  # no wgrad
    roots = {id(state) for state in torch_compat.outermost_states(model) if state._is_root is None}
    names = {module: name for name, module in model.named_modules()}
    result.gradient_bytes = _summed(list(map(reduced_bytes, by_group(managed))))
    if links is not None:
        result.traffic = _traffic(managed, roots, links, latency)
    for m in managed:
        pair = gathered_bytes(m, gathers_once(m, roots))
        if isinstance(m.local, FSDPHooks):
            owner, attribute = m.owners[0]
            result.weight_bytes[f"{names[owner]}.{attribute}".lstrip(".")] = pair
            result.weight_elements += m.global_shape.numel()
        else:
            result.other_bytes = _summed([result.other_bytes, pair])
    if on is not None or tokens is not None:
        active = _experts_per_token(model) or 1
        result.memory = memory_of(model, managed, roots, active, runs, tokens)
    return result


def _known_place(on: Place) -> Place:
    place = place_of(on)
    if isinstance(place, torch.device) and place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"plan(on={on!r}): this machine has no GPU; name one, such as 'sm_90a'")
    return place


def _links(
    bandwidth: float | tuple[float, float] | None, latency: float
) -> tuple[float, float] | None:
    links = (bandwidth, bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
    if links is not None and not (len(links) == 2 and min(links) > 0 and latency >= 0):
        raise ValueError(
            f"plan(bandwidth={bandwidth!r}, latency={latency!r}): give bytes per second, or a pair "
            "of them (inside a copy, between copies), and seconds"
        )
    return links


def _summed(pairs: Collection[tuple[int, int]]) -> tuple[int, int]:
    return sum(first for first, _ in pairs), sum(second for _, second in pairs)


def _traffic(
    managed: list[ManagedParam], roots: set[int], links: tuple[float, float], latency: float
) -> Traffic:
    inside, between = links
    gather, in_16_bit, reduce = [0.0, 0.0], [0.0, 0.0], 0.0
    for params in by_group(managed):
        ranks, copies, once = params[0].world_size, params[0].copies, gathers_once(params[0], roots)
        for seconds, size in (gather, gathered_bytes), (in_16_bit, plain_bytes):
            forward, backward = _summed([size(m, once) for m in params])
            seconds[0] += forward * (ranks - 1) / ranks / inside + latency
            seconds[1] += backward * (ranks - 1) / ranks / inside + latency * (not once)
        to_shards, to_copies = reduced_bytes(params)
        reduce += to_shards * (ranks - 1) / ranks / inside + latency
        reduce += to_copies * (copies - 1) / copies / between + latency * (copies > 1)
    return Traffic(links, latency, (gather[0], gather[1]), (in_16_bit[0], in_16_bit[1]), reduce)


def _notes(
    model: nn.Module,
    layers: Iterable[Linear],
    dtype: torch.dtype | None,
    runs: Callable[[Linear], tuple[torch.dtype, Place]],
) -> list[str]:
    """Return sentences about backward modes, boundary slots, attention, experts, fused modules and
    GEMMs in high precision."""
    variable = f" ({OVERRIDE_VARIABLE}={default_override()})" if default_override() else ""
    notes = [
        f"backward_override={mode}: {count} modules{variable}"
        for mode, count in Counter(m.recipe.backward_override for m in layers).items()
        if mode or variable
    ]
    boundaries = Counter(m.plan.boundary for m in layers if m.plan.boundary is not None)
    notes += [
        f"output {sides.output}, grad_input {sides.grad_input}: {count} modules"
        for sides, count in boundaries.items()
    ]
    if (parts := torch_compat.parts_gathered_late(model)) >= MANY_PARTS:
        notes.append(
            f"none of the {parts} parts that fully_shard gathers is gathered ahead in the forward: "
            "if a step waits for the host, call set_modules_to_forward_prefetch (docs/fsdp2.md)"
        )
    named = [(name or type(m).__name__, m) for name, m in model.named_modules()]
    attention = [name for name, m in named if isinstance(m, MultiheadAttention)]
    if attention:
        notes.append(
            f"[{len(attention)} x {attention[0]}]: q, k and v of one tensor are one product, of "
            "several they are in high precision"
        )
    for name, module in named:
        if isinstance(module, GroupedLinear):
            notes.append(f"{name}: {_experts_note(module, *runs(module.layers[0]))}")
        exchanged = describe_experts(module, dtype or torch.bfloat16)
        if exchanged is not None:
            notes.append(f"{name}: {exchanged}")
    notes += [*_named_notes(model), *fused_notes(model), *_high_precision_notes(model)]
    shared = Counter(filter(None, map(describe, layers)))
    return notes + [f"{sentence}  [{count} modules]" for sentence, count in shared.items()]


def _named_notes(model: nn.Module) -> list[str]:
    """Return a sentence per pattern of `fq.recipes.per_layer`: the layers that it chose for."""
    chosen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (layer, *_) in converted_units(model).items():
        if layer.runtime.rule is not None:
            chosen[layer.runtime.rule, layer.recipe.name].append(name)
    return [f"per_layer: {rule} is {r}  [{_counted(names)}]" for (rule, r), names in chosen.items()]


def _experts_note(module: GroupedLinear, dtype: torch.dtype, place: Place) -> str:
    why = module.unsupported_reason(dtype, place)
    how = "all in one product" if why is None else f"one after the other ({why})"
    if why is None and known(module.common_plan, "the plan").decodes_groups(arch_of(place)):
        how += " of values that their codes decode to, in bf16"
    return f"{len(module.layers)} experts, {how}"


def _high_precision_notes(model: nn.Module) -> list[str]:
    """Return a sentence per kind of module with GEMMs in high precision: its share of multiply-adds
    per token."""
    routed = _experts_per_token(model)
    embeddings = ids_of_embeddings(model)
    quantized = {
        id(m._parameters.get(getattr(m, "source", "weight")))
        for m in model.modules()
        if isinstance(m, OURS)
    }
    others: dict[str, list[tuple[str, float]]] = defaultdict(list)
    total = 0.0
    for name, module, attribute, p in _multiplied_parameters(model):
        work = p.numel() if p.dim() == 2 else p.numel() / len(p) * min(routed or len(p), len(p))
        total += work
        if id(p) not in quantized:
            kind = type(module).__name__ + ", tied to an embedding" * (id(p) in embeddings)
            if reason := module.__dict__.get("_left_out"):
                kind += f", {reason}"
            last = f"{name.rpartition('.')[2]}.{attribute}".lstrip(".")
            others[f"{last} of {kind}"].append((name, work))
    notes = []
    for kind, rows in sorted(others.items(), key=lambda item: -sum(work for _, work in item[1])):
        share = sum(work for _, work in rows) / total
        counted = f"  [{_counted([name for name, _ in rows])}]" * (len(rows) > 1)
        notes.append(f"in high precision: {kind}, {share:.1%} of a token's multiply-adds{counted}")
    return notes


def _experts_per_token(model: nn.Module) -> int | None:
    routers = (getattr(m, "top_k", None) for m in model.modules())
    return next((top_k for top_k in routers if isinstance(top_k, int)), None)


def _multiplied_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (module name, module, attribute, parameter) of each parameter that a GEMM may read."""
    ids = set()
    for name, module in model.named_modules():
        if isinstance(module, LOOKED_UP):
            continue
        for attribute, p in module._parameters.items():
            if p is None or is_lazy(p) or p.dim() not in (2, 3) or id(p) in ids:
                continue
            if not any(word in attribute for word in ADDED):
                ids.add(id(p))
                yield name, module, attribute, p
