# SPDX-License-Identifier: Apache-2.0
"""`plan(model)`: list formats, domain and reason per GEMM, and bytes of FSDP2's all-gathers per
weight."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..formats import COLUMNWISE, ROWWISE, Direction
from ..modules.convert import ids_of_embeddings
from ..modules.fuse import fused_notes
from ..modules.grouped_linear import GroupedLinear
from ..modules.linear import Linear
from ..modules.multihead_attention import MultiheadAttention
from ..modules.packed_experts import are_sharded, kind_of
from ..modules.plan import PRODUCTS
from ..modules.steps import converted_modules
from ..modules.transposed_linear import TransposedLinear
from ..ops.capability import arch_of
from ..parallel.expert_parallel import describe_experts
from ..parallel.sequence import describe
from ..recipe import default_override
from ..roles import OVERRIDE_VARIABLE
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.gathered_weight import cuts_of, gathered_directions, gathered_size, wire_buffers
from ..tensor.torch_compat import ManagedParam

# Parameters of two or three dims that no GEMM reads, by class of their module and by name.
LOOKED_UP, ADDED = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d), ("bias", "embed", "token")


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
        at = f"{inside / 1e9:g} GB/s" + (
            f" in a copy and {between / 1e9:g} between copies" if between != inside else ""
        )
        return (
            f"at {at}: gathers {forward * 1e3:.2f} ms forward + {backward * 1e3:.2f} ms backward a "
            f"step (not quantized {f * 1e3:.2f} + {b * 1e3:.2f}), gradients "
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
    """

    gemms: list[GemmRow] = field(default_factory=list)
    weight_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    other_bytes: tuple[int, int] = (0, 0)
    weight_elements: int = 0
    notes: list[str] = field(default_factory=list)
    traffic: Traffic | None = None

    def bytes_per_step(self, forward: bool = True, backward: bool = True) -> int:
        """Sum the bytes of all gathers of one forward and backward, with parameters that are not
        quantized."""
        rows = [*self.weight_bytes.values(), self.other_bytes]
        return sum(f * forward + b * backward for f, b in rows)

    @property
    def gathered_bytes_per_element(self) -> float:
        """Forward plus backward bytes of the converted weights, per weight element (a bf16 model:
        4)."""
        total = sum(f + b for f, b in self.weight_bytes.values())
        return total / self.weight_elements if self.weight_elements else 0.0

    def __str__(self) -> str:
        lines = []
        groups: dict[tuple, list[str]] = {}
        for row in self.gemms:
            groups.setdefault((row.product, row.operands, row.domain, row.reason), []).append(
                row.module
            )
        for (product, (a, b), domain, reason), modules in groups.items():
            count = f"{len(modules)} x {modules[0]}" if len(modules) > 1 else modules[0]
            lines.append(f"{product:6} {a:>18} x {b:<18} {domain:9} ({reason})  [{count}]")
        if self.weight_bytes:
            forward, backward = map(sum, zip(*self.weight_bytes.values()))
            lines.append(
                f"gathers a step: weights {forward:,} B forward + {backward:,} B backward "
                f"({self.gathered_bytes_per_element:.3f} B an element), other parameters "
                f"{self.other_bytes[0]:,} B + {self.other_bytes[1]:,} B"
            )
        if self.traffic is not None:
            lines.append(str(self.traffic))
        return "\n".join(lines + self.notes)

    def facts(self) -> dict:
        """The plan in JSON's types; `ModelPlan.of_facts` reads it."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def of_facts(cls, facts: dict) -> ModelPlan:
        """Raises ValueError for what is no plan."""
        try:
            gemms = [
                GemmRow(**row | {"operands": tuple(row["operands"])}) for row in facts["gemms"]
            ]
            weights = {name: tuple(pair) for name, pair in facts["weight_bytes"].items()}
            other, elements = tuple(facts["other_bytes"]), facts["weight_elements"]
            notes = list(facts["notes"])
            fields: dict[str, Any] = {
                name: tuple(of) if isinstance(of, list) else of
                for name, of in (facts.get("traffic") or {}).items()
            }
            traffic = Traffic(**fields) if fields else None
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"this is no plan that fq.plan(model).save wrote: {error!r}"
            ) from error
        return cls(gemms, weights, other, elements, notes, traffic)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `fq.inspection.plan.load`."""
        Path(path).write_text(json.dumps(self.facts(), indent=1) + "\n")


def load(path: str | Path) -> ModelPlan:
    """The plan that `ModelPlan.save` wrote. Raises ValueError for another file."""
    try:
        facts = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no plan that fq.plan(model).save wrote: {error}") from error
    return ModelPlan.of_facts(facts)


def diff(old: ModelPlan, new: ModelPlan) -> list[str]:
    """Return one sentence per difference from `old` to `new`; equal changes of several modules
    share one."""
    before, after = ({(row.module, row.product): row for row in of.gemms} for of in (old, new))
    changes: dict[str, list[str]] = {}
    for module, product in dict.fromkeys([*before, *after]):
        was, now = (_described(of.get((module, product))) for of in (before, after))
        if was != now:
            changes.setdefault(f"{product}: {was} -> {now}", []).append(module)
    lines = [
        f"{change}  [{len(of)} x {of[0]}]" if len(of) > 1 else f"{change}  [{of[0]}]"
        for change, of in changes.items()
    ]
    (f0, b0), (f1, b1) = (
        (of.bytes_per_step(backward=False), of.bytes_per_step(forward=False)) for of in (old, new)
    )
    if (f0, b0) != (f1, b1):
        lines.append(f"gathers a step: {f0:,} B forward + {b0:,} B backward -> {f1:,} B + {b1:,} B")
    lines += [f"no longer: {note}" for note in old.notes if note not in new.notes]
    return lines + [f"now: {note}" for note in new.notes if note not in old.notes]


def _described(row: GemmRow | None) -> str:
    if row is None:
        return "none"
    return f"{row.operands[0]} x {row.operands[1]} {row.domain} ({row.reason})"


def plan(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    bandwidth: float | tuple[float, float] | None = None,
    latency: float = 0.0,
) -> ModelPlan:
    """Plan every GEMM of the converted modules of `model`, without running anything.

    dtype:      of activations (default: FSDP2's param_dtype, else the weight's).
    bandwidth:  bytes per second that each rank receives; for HSDP (within a replica, between
                replicas). Adds the time of FSDP2's collectives (`ModelPlan.traffic`).
    latency:    seconds per collective, added to its transfer time.
    Raises ValueError for a model without converted modules, and for a bandwidth that is not
    positive.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8/nvfp4")
    >>> print(fq.plan(model))                                 # on a CPU
    fprop               mxfp8 x mxfp8              reference (the result is float32)  [0]
    dgrad            nvfp4+SR x nvfp4              reference (the result is float32)  [0]
    wgrad       nvfp4(RHT)+SR x nvfp4(RHT)         reference (the result is float32)  [0]
    """
    links = (bandwidth, bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
    if links is not None and not (len(links) == 2 and min(links) > 0 and latency >= 0):
        raise ValueError(
            f"plan(bandwidth={bandwidth!r}, latency={latency!r}): give bytes per second, or a pair "
            "of them (inside a copy, between copies), and seconds"
        )
    modules = converted_modules(model)
    if not modules:
        raise ValueError("plan found no fq.Linear; call fq.convert(model, recipe) first")
    result = ModelPlan()
    managed = torch_compat.managed_params_of(model)
    by_state = {
        id(s): m for m in managed if isinstance(m.local, FSDPHooks) for s in m.local.state.matrices
    }
    for name, module in modules.items():
        m = by_state.get(id(module._weight_state))
        activations = dtype or (m.param_dtype if m else module.weight.dtype)
        arch = arch_of(module.weight.device)
        planned = module.plan_on(activations, module.weight.device)
        for product in PRODUCTS:
            domain, reason = planned.domain(product, activations, arch)
            (slot_a, side_a), (slot_b, side_b) = product.a, product.b
            operands = (
                repr(planned.hybrid(slot_a).side(side_a)),
                repr(planned.hybrid(slot_b).side(side_b)),
            )
            result.gemms.append(GemmRow(name, product.name, operands, domain, reason))
    layers = modules.values()
    shared = Counter(filter(None, map(describe, layers)))
    result.notes = [
        *_override_notes(layers),
        *_boundary_notes(layers),
        *_module_notes(model, dtype, by_state),
    ]
    result.notes += [*fused_notes(model), *_other_notes(model)]
    result.notes += [f"{what}  [{count} modules]" for what, count in shared.items()]
    roots = {id(state) for state in torch_compat.outermost_states(model) if state._is_root is None}
    names = {module: name for name, module in model.named_modules()}
    if links is not None:
        result.traffic = _traffic(managed, roots, links, latency)
    for m in managed:
        pair = gathered_bytes(m, _gathers_once(m, roots))
        if isinstance(m.local, FSDPHooks):
            owner, attribute = m.owners[0]
            result.weight_bytes[f"{names[owner]}.{attribute}".lstrip(".")] = pair
            result.weight_elements += m.global_shape.numel()
        else:
            forward, backward = result.other_bytes
            result.other_bytes = forward + pair[0], backward + pair[1]
    return result


def _gathers_once(m: ManagedParam, roots: set[int]) -> bool:
    return m.stays_unsharded_after_forward or (id(m.state) in roots and m.reshards_by_default)


def gathered_bytes(m: ManagedParam, once: bool) -> tuple[int, int]:
    """(forward, backward) bytes of the all-gather output of one parameter. once: it stays unsharded
    between forward and backward."""
    local = m.local
    if not isinstance(local, FSDPHooks):
        return _plain_bytes(m, once)
    state, quantizer = local.state, local.state.matrices[0].quantizer

    def size(needs: frozenset[Direction]) -> int:
        of = cuts_of(m), m.global_shape, m.param_dtype
        encodings = [quantizer.encodings[d] for d in gathered_directions(quantizer, needs)]
        return sum(gathered_size(wire_buffers(e, *of), m.world_size) for e in encodings)

    both = frozenset(Direction)
    if once:
        return size(both), 0
    backward = both if state.is_recomputed else frozenset({COLUMNWISE})
    return size(frozenset({ROWWISE})), size(backward)


def _plain_bytes(m: ManagedParam, once: bool) -> tuple[int, int]:
    size = _padded_elements(m) * m.param_dtype.itemsize
    return size, 0 if once else size


def _padded_elements(m: ManagedParam) -> int:
    return -(-m.global_shape[0] // m.world_size) * m.global_shape[1:].numel() * m.world_size


def _traffic(
    managed: list[ManagedParam], roots: set[int], links: tuple[float, float], latency: float
) -> Traffic:
    inside, between = links
    gather, in_16_bit, reduce = [0.0, 0.0], [0.0, 0.0], 0.0
    groups: dict[int, tuple[bool, int]] = {}
    for m in managed:
        once, received = _gathers_once(m, roots), (m.world_size - 1) / m.world_size
        groups[id(m.group)] = once, m.copies
        codes, plain = gathered_bytes(m, once), _plain_bytes(m, once)
        for i in range(2):
            gather[i] += codes[i] * received / inside
            in_16_bit[i] += plain[i] * received / inside
        size = _padded_elements(m) * m.reduce_dtype.itemsize
        reduce += (
            size * received / inside + 2 * size / m.world_size * (m.copies - 1) / m.copies / between
        )
    for once, copies in groups.values():
        for seconds in (gather, in_16_bit):
            seconds[0] += latency
            seconds[1] += latency * (not once)
        reduce += latency * (1 + (copies > 1))
    return Traffic(links, latency, (gather[0], gather[1]), (in_16_bit[0], in_16_bit[1]), reduce)


def _override_notes(modules: Iterable[Linear]) -> list[str]:
    counts = Counter(m.recipe.backward_override for m in modules)
    said = f" ({OVERRIDE_VARIABLE}={default_override()})" if default_override() else ""
    return [
        f"backward_override={mode}: {count} modules{said}"
        for mode, count in counts.items()
        if mode or said
    ]


def _boundary_notes(modules: Iterable[Linear]) -> list[str]:
    counts = Counter(m.plan.boundary for m in modules if m.plan.boundary is not None)
    return [
        f"output {sides.output}, grad_input {sides.grad_input}: {n} modules"
        for sides, n in counts.items()
    ]


def _module_notes(
    model: nn.Module, dtype: torch.dtype | None, by_state: dict[int, ManagedParam]
) -> list[str]:
    attention = [
        name or type(m).__name__
        for name, m in model.named_modules()
        if isinstance(m, MultiheadAttention)
    ]
    notes = [
        f"[{len(attention)} x {name}]: q, k and v of one tensor are one product, of several they "
        "are in high precision"
        for name in attention[:1]
    ]
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            first = module.layers[0]
            m = by_state.get(id(first._weight_state))
            why = module.unsupported_reason(
                dtype or (m.param_dtype if m else first.weight.dtype), first.weight.device
            )
            how = "all in one product" if why is None else f"one after the other ({why})"
            if why is None and module.decodes:
                how += " of values that their codes decode to, in bf16"
            notes.append(f"{name or type(module).__name__}: {len(module.layers)} experts, {how}")
        exchanged = describe_experts(module, dtype or torch.bfloat16)
        if exchanged is not None:
            notes.append(f"{name or type(module).__name__}: {exchanged}")
    return notes


def _other_notes(model: nn.Module) -> list[str]:
    """One sentence per kind of module with GEMMs in high precision: its share of multiply-adds per
    token."""
    routers = (getattr(m, "top_k", None) for m in model.modules())
    routed = next((top_k for top_k in routers if isinstance(top_k, int)), None)
    embeddings = ids_of_embeddings(model)
    ours = {
        id(m._parameters.get("weight"))
        for m in model.modules()
        if isinstance(m, (Linear, GroupedLinear))
    }
    ours |= {
        id(m._parameters[m.source]) for m in model.modules() if isinstance(m, TransposedLinear)
    }
    others: dict[tuple[str, str, str], float] = defaultdict(float)
    total, seen = 0.0, set()
    for name, module in model.named_modules():
        for which, p in module._parameters.items():
            if p is None or is_lazy(p) or p.dim() not in (2, 3) or id(p) in seen:
                continue
            if isinstance(module, LOOKED_UP) or any(s in which for s in ADDED):
                continue
            seen.add(id(p))
            work = p.numel() if p.dim() == 2 else p.numel() / len(p) * min(routed or len(p), len(p))
            total += work
            if id(p) not in ours:
                tied = ", tied to an embedding" * (id(p) in embeddings)
                left_out = f", {reason}" if (reason := module.__dict__.get("_left_out")) else ""
                hint = ", which fq.convert quantizes before fully_shard" * bool(
                    kind_of(module) and are_sharded(module)
                )
                others[
                    type(module).__name__ + tied + left_out + hint, name.rpartition(".")[2], which
                ] += work
    return [
        f"in high precision: {f'{name}.{which}'.lstrip('.')} of {kind}, {work / total:.1%} of a "
        "token's multiply-adds"
        for (kind, name, which), work in sorted(others.items(), key=lambda of: -of[1])
    ]
