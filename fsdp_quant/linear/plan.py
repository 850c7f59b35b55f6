# SPDX-License-Identifier: Apache-2.0
"""Resolve a recipe to the three GEMMs of a linear layer, and check them: `GemmPlan`.

A plan is a value: layers with equal quantizers share one. Operators receive its key, a string,
because they accept no Python objects and a compiled graph must be the same for equal layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar

import torch

from ..counters import counters
from ..formats import (
    COLUMNWISE,
    E5M2,
    ROWWISE,
    Direction,
    Format,
    anchored_format,
    check_pair,
    digest,
    value_class,
)
from ..ops import native
from ..ops.capability import (
    Place,
    anchors,
    anchors_tensor,
    arch_of,
    decodes_groups,
    gemm_domain,
    may_be_anchored,
    operand_layout,
    scales_tensor,
)
from ..ops.layout import (
    ANCHORED,
    ANCHORED_128,
    ANCHORED_512,
    ANCHORED_TENSOR,
    ANCHORED_TILE,
    ANCHORS,
    COMPACT,
    OVER_TOKENS,
    is_anchored_as_encoded,
    is_anchored_of_codes,
)
from ..ops.product_error import NOT_COUNTED, counted_as
from ..quantizer import HybridQuantizer, Quantizer
from ..recipe import Recipe, Role
from ..roles import QUANTIZED_TYPES
from .boundary import OutputQuantization, boundaries
from .products import EXACT, LADDER_OVER_TOKENS, PRODUCTS, Product, ladder_of

_T = TypeVar("_T")
_OF_GROUPS = (ANCHORED_TILE, ANCHORED_TILE, ANCHORED_TILE)
_PLANS: dict[str, GemmPlan] = {}
# Number of a compiled step -> (its plan, domains, whether it encodes transposed weights).
_CALLS: dict[int, tuple[GemmPlan, tuple[str, str, str], bool]] = {}


class Resolved(NamedTuple):
    """A plan for one device and one dtype.

    domains:   of fprop, dgrad and wgrad.
    layouts:   slot -> direction -> layout in which its GEMM reads the storage (`ops.layout`).
    saved:     which storage of the input the backward saves, if it saves one.
    call:      number of the compiled step (`native.linear_plan`), -1 elsewhere; None: it has none.
    shared:    key of the codes of the input, apart from histories; layers with equal keys may share
               them. None: they belong to this layer alone.
    watched:   for fprop, dgrad and wgrad, which operands may lose bits to anchors, (of a, of b), as
               `product_error` counts.
    multiple:  M, N and K in the compiled step are multiples of it, so that each row of codes is a
               multiple of 16 bytes.
    """

    domains: tuple[str, str, str]
    layouts: dict[str, dict[Direction, str]]
    saved: Direction
    call: int | None
    shared: tuple | None
    watched: tuple[tuple[int, int], ...]
    multiple: int

    @property
    def is_watched(self) -> bool:
        return any(a or b for a, b in self.watched)


@value_class
class GemmPlan:
    """Quantizers of the three slots, and what the backward saves of the input.

    saves:         "input": the original tensor (identity backward, or re-quantized from it);
                   "columnwise" or "rowwise": that storage only.
    rungs:         for fprop, dgrad and wgrad, its rung in its ladder (`ladder_of`).
    shared_rungs:  for fprop, dgrad and wgrad, replaces the first rung if scales per tensor are
                   ruled out.
    boundary:      of the layer, or None.
    alone:         no groups of tokens share tensors of the layer, so one exponent may serve a
                   whole tensor.
    watched:       as in `Resolved`, for a plan from `on` whose operands are already anchored; None:
                   decided by the formats.
    by_tensor:     for fprop, dgrad and wgrad, of a plan from `on`: codes of its operands have one
                   exponent per tensor.
    batch_invariant:  of fprop: no row depends on their number (`context.batch_invariant`).
    """

    input: HybridQuantizer
    weight: HybridQuantizer
    grad_output: HybridQuantizer
    saves: str
    compute_dtype: torch.dtype | None
    accuracy: str = "fast"
    rungs: tuple[str, str, str] = (ANCHORED_TENSOR, ANCHORED_TENSOR, ANCHORED_TENSOR)
    shared_rungs: tuple[str, str, str] = (ANCHORED, ANCHORED, OVER_TOKENS)
    boundary: OutputQuantization | None = None
    alone: bool = True
    watched: tuple[tuple[int, int], ...] | None = None
    by_tensor: tuple[bool, bool, bool] = (False, False, False)
    batch_invariant: bool = False

    # Computed, so no fields; no properties, which dynamo does not call of a constant.
    key: ClassVar[str]  # represents this plan in an operator's arguments
    is_keyed: ClassVar[bool]  # an activation or gradient is rounded stochastically
    needs_steps: ClassVar[bool]
    has_histories: ClassVar[bool]
    histories_key: ClassVar[str]

    def __post_init__(self):
        slots = self.input, self.weight, self.grad_output  # whatever the rungs
        object.__setattr__(self, "key", digest(self))
        keyed = self.input.is_stochastic or self.grad_output.is_stochastic
        object.__setattr__(self, "is_keyed", keyed)
        object.__setattr__(self, "has_histories", any(h.delayed_directions for h in slots))
        object.__setattr__(self, "needs_steps", self._needs_steps())
        object.__setattr__(self, "histories_key", digest(slots))
        _PLANS.setdefault(self.key, self)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @cached_property
    def is_delayed(self) -> bool:
        """Whether an activation or gradient is encoded with delayed scaling in some direction."""
        return bool(self.input.delayed_directions or self.grad_output.delayed_directions)

    def _needs_steps(self) -> bool:
        """The bits depend on the step, or the guard watches the plan on some device."""
        of = self.boundary
        sides = () if of is None else (of.output, of.grad_input)
        rounded = self.is_keyed or any(s is not None and s.is_stochastic for s in sides)
        anchored = self.watched is not None or any(may_be_anchored(*self.pair(p)) for p in PRODUCTS)
        return self.has_histories or rounded or anchored or self._with_tensor_scales != self

    @cached_property
    def of_groups(self) -> GemmPlan:
        """This plan for one grouped GEMM over groups of tokens. In wgrad's contraction, groups and
        runs of anchors begin at multiples of 128.

        One kernel computes and applies the anchors of both directions of a tensor, in tiles of
        128 x 128. Operands b (weights, and the input in wgrad) have one anchor per tile, which
        multiplies as fast as one per line; operands a have one per run of 128.
        """
        return replace(self, shared_rungs=_OF_GROUPS)

    # Weights are anchored from codes (which rounds subnormals twice), so that gathered and
    # unsharded weights give the same bits. Activations are rounded once, against the anchor. From
    # values, one kernel rounds twice (`Work::kOfCodes`) against the tensor's amax. Experts have no
    # exponents per tensor: tokens that are sent as codes would be rounded twice where they
    # become subnormal, so a rank's gradients would differ from the bits of one process.
    def on(self, dtype: torch.dtype, device: Place) -> GemmPlan:
        """Return this plan for `dtype` activations on `device` that neither ranks nor groups of
        tokens share.

        If its tensor cores do not accept block scales, or are slower with them, activations and
        gradients with one power-of-two scale per block get one per tensor: the same numbers, except
        far below the largest. Operands of fewer than 8 bits are first encoded in their blocks. This
        applies to GEMMs on the first rung only. The layer's own plan still defines what is sent and
        what checkpoints store.
        """
        plain = (
            not self.alone
            or dtype is not torch.bfloat16
            or not native.is_available_on(device)
            or arch_of(device) != "sm_90a"
        )
        return self if plain else self._with_tensor_scales

    @cached_property
    def _with_tensor_scales(self) -> GemmPlan:
        quantizers: dict[tuple[str, Direction], Quantizer] = {}
        watched: list[tuple[int, int]] = []
        by_tensor: list[bool] = []
        for product in PRODUCTS:
            scaled = self._tensor_quantizers(product)
            by_tensor.append(scaled is not None)
            if scaled is None:
                domain = self.domain(product, torch.bfloat16, "sm_90a")[0]
                watched.append(self._watched(product, domain))
                continue
            quantizers |= scaled
            a, b = (_counted(o in scaled, self.operand(*o)) for o in (product.a, product.b))
            watched.append((a, b))
        if not any(by_tensor):
            return self
        slots: dict[str, HybridQuantizer] = {}
        for slot, _ in quantizers:
            rowwise, columnwise = (
                quantizers.get((slot, d)) or self.hybrid(slot).side(d)
                for d in (ROWWISE, COLUMNWISE)
            )
            slots[slot] = HybridQuantizer(rowwise, columnwise)
        saves = self.saves
        if saves != "input" and slots.get("input", self.input).shares_storage:
            saves = "rowwise"
        elif saves != "input" and "input" in slots:
            saves = "columnwise"
        return replace(
            self, **slots, saves=saves, watched=tuple(watched), by_tensor=tuple(by_tensor)
        )

    def _tensor_quantizers(self, product: Product) -> dict[tuple[str, Direction], Quantizer] | None:
        """Return the quantizers that give operands of a GEMM one exponent per tensor; None if codes
        of one of them keep other scales."""
        if self.rung(product) != ANCHORED_TENSOR or self._keeps_scales(product):
            return None
        operands = product.a, product.b
        scaled = {o: side for o in operands if (side := self._tensor_scaled(*o)) is not None}
        of_codes = any(
            anchors(fmt) and is_anchored_of_codes(fmt, ANCHORED_TENSOR)
            for fmt in (self.operand(*o) for o in operands if o[0] != "weight")
        )
        a, b = (scaled[o].fmt if o in scaled else self.operand(*o) for o in operands)
        have_one = all(scales_tensor(fmt) or anchors_tensor(fmt) for fmt in (a, b))
        if not have_one or not (scaled or of_codes):
            return None
        domain, _ = gemm_domain(a, b, torch.bfloat16, "sm_90a", compiled=True)
        return scaled if domain in ("native", "anchored") else None

    def _tensor_scaled(self, slot: str, direction: Direction) -> Quantizer | None:
        """Return the quantizer that replaces the block scales of a direction by one power of two
        per tensor; None if there is none."""
        hybrid = self.hybrid(slot)
        side, fmt = hybrid.side(direction), hybrid.side(direction).fmt
        in_rows = fmt.block[0] == 1 and (anchors(fmt) or (fmt.pow2 and fmt.block[1] is not None))
        in_rows = in_rows and not is_anchored_of_codes(fmt, ANCHORED_TENSOR)
        is_plain = not (hybrid.is_derived or hybrid.turns or side.is_stochastic or side.eps)
        if slot == "weight" or not is_plain or not in_rows:
            return None
        return Quantizer(anchored_format(fmt, None, whole=True))

    def _keeps_scales(self, product: Product) -> bool:
        """Return whether the accuracy rules out that all tokens share an exponent."""
        return self.accuracy == EXACT or (self.accuracy == "token" and product.name != "wgrad")

    def is_token_local(self, gradients: bool = False) -> bool:
        """Return whether outputs of a token (gradients: input gradients) depend on no other token
        of the call, on whichever device."""
        plan, product = self._with_tensor_scales, PRODUCTS[gradients]
        return plan.operand(*product.a).keeps_rows_apart and not plan.by_tensor[gradients]

    def _watched(self, product: Product, domain: str) -> tuple[int, int]:
        if domain != "anchored":
            return NOT_COUNTED, NOT_COUNTED
        a, b = self.pair(product)
        return _counted(False, a), _counted(False, b)

    def hybrid(self, slot: str) -> HybridQuantizer:
        return getattr(self, slot)

    def operand(self, slot: str, direction: Direction) -> Format:
        """Return the format that a GEMM reads for this slot and direction."""
        return self.hybrid(slot).side(direction).fmt

    def pair(self, product: Product) -> tuple[Format, Format]:
        return self.operand(*product.a), self.operand(*product.b)

    def decodes_groups(self, arch: str) -> bool:
        """One product serves groups of tokens, whose codes are decoded."""
        return self.shared_rungs == _OF_GROUPS and self.once(GemmPlan._decodes_groups, arch)

    def _decodes_groups(self, arch: str) -> bool:
        return decodes_groups(map(self.pair, PRODUCTS), arch)

    def domain(self, product: Product, dtype: torch.dtype, arch: str) -> tuple[str, str]:
        """Return (domain, reason) of one GEMM of `dtype` activations on `arch`."""
        if self.operand(*product.a).is_quantized and self.decodes_groups(arch):
            return "bf16", f"no kernel multiplies codes of groups on {arch}"
        exact = EXACT in (self.accuracy, self.rung(product))
        invariant = self.batch_invariant and product is PRODUCTS[0]
        return gemm_domain(*self.pair(product), dtype, arch, exact, invariant)

    def slower_products(self, dtype: torch.dtype, arch: str) -> list[tuple[Product, str, str]]:
        """Return (GEMM, domain, reason) of those that no matrix unit of `arch` computes."""
        planned = [(product, *self.domain(product, dtype, arch)) for product in PRODUCTS]
        return [row for row in planned if row[1] not in ("native", "anchored")]

    def rung(self, product: Product) -> str:
        return self.rungs[PRODUCTS.index(product)]

    @property
    def moved(self) -> dict[str, str]:
        """GEMM -> rung, for GEMMs that the guard moved from the first rung."""
        return {p.name: rung for p, rung in zip(PRODUCTS, self.rungs) if rung != ANCHORED_TENSOR}

    def moved_to(self, rungs: Mapping[str, str]) -> GemmPlan:
        """Return this plan with GEMMs on these rungs, and all others on the first."""
        return replace(self, rungs=tuple(rungs.get(p.name, ANCHORED_TENSOR) for p in PRODUCTS))

    def next_rung(self, product: Product, is_shared: bool) -> str | None:
        """Return the rung after the present one of a GEMM; None: there is none.

        is_shared:  ranks or groups share tensors of the layer, which rules out scales per tensor.
        """
        pair, rung, ladder = self.pair(product), self.rung(product), (ANCHORED_TENSOR, EXACT)
        if all(map(anchors, pair)):
            ladder = ladder_of(product)
        elif any(map(anchors, pair)) and all(anchors(f) or f.block[1] is None for f in pair):
            ladder = (ANCHORED_TENSOR, ANCHORED, EXACT)
        if (is_shared or self._keeps_scales(product)) and rung == ANCHORED_TENSOR:
            rung = self.shared_rungs[PRODUCTS.index(product)]
        if rung == ANCHORED_TILE and ladder == LADDER_OVER_TOKENS:
            return ANCHORED_128
        return next(iter(ladder[ladder.index(rung) + 1 :]), None) if rung in ladder else EXACT

    def resolved(self, dtype: torch.dtype, device: Place) -> Resolved:
        """Resolve this plan for `dtype` activations on `device`. Cached."""
        return self.once(GemmPlan._resolve, dtype, device)

    def _resolve(self, dtype: torch.dtype, device: Place) -> Resolved:
        arch = arch_of(device)
        layouts = {
            s: {d: self._layout(s, d, dtype, arch) for d in Direction} for s in QUANTIZED_TYPES
        }
        fprop, dgrad, wgrad = (self.domain(p, dtype, arch)[0] for p in PRODUCTS)
        domains = fprop, dgrad, wgrad
        watched = self.watched or tuple(map(self._watched, PRODUCTS, domains))
        call = shared = None
        is_available = native.is_available_on(device)
        specs = self._operand_specs(layouts, domains, dtype, arch) if is_available else None
        if specs is not None:
            call = -1
            if not isinstance(device, str):
                call = native.linear_plan(specs, self.saves == "input", watched, self.key)
                _count(call, self, domains, False)
            shared = None if self.input.is_stochastic else tuple(specs[:2])
        in_4_bits = any(
            domain == "native" and self.pair(p)[0].bits == 4 for p, domain in zip(PRODUCTS, domains)
        )
        is_laid_out = self.input.shares_storage and layouts["input"][COLUMNWISE] != COMPACT
        saved = COLUMNWISE if self.saves == "columnwise" or is_laid_out else ROWWISE
        return Resolved(domains, layouts, saved, call, shared, watched, 32 if in_4_bits else 16)

    def turned(self, dtype: torch.dtype, device: torch.device) -> int | None:
        """Return the number of the compiled step for transposed weights: it encodes each direction
        as the other one. Cached.

        None if codes of a weight and of its transpose differ, or if the weight has histories.
        """
        return self.once(GemmPlan._turn, dtype, device)

    def _turn(self, dtype: torch.dtype, device: torch.device) -> int | None:
        resolved, arch = self.resolved(dtype, device), arch_of(device)
        layouts = resolved.layouts["weight"]
        if resolved.call is None or self.weight.delayed_directions or COMPACT in layouts.values():
            return None
        if self.weight.turns or any(self.operand("weight", d).tensor_scale for d in Direction):
            return None
        specs = self._operand_specs(resolved.layouts, resolved.domains, dtype, arch)
        if specs is None:
            return None
        directions = (ROWWISE, COLUMNWISE, 1), (COLUMNWISE, ROWWISE, 0)
        for index, (direction, source, product) in enumerate(directions, 2):
            spec = native.operand_spec_of(
                self.weight.side(source).encoding(direction),
                layouts[source],
                resolved.domains[product],
                arch,
                False,
                None,
            )
            if spec is None:
                return None
            specs[index] = spec
        call = native.linear_plan(specs, self.saves == "input", resolved.watched, self.key + "T")
        _count(call, self, resolved.domains, True)
        return call

    @cached_property
    def over_rowwise(self) -> GemmPlan:
        """This plan for a weight that keeps its rowwise codes alone."""
        weight = self.weight.over_rowwise
        return self if weight == self.weight else replace(self, weight=weight)

    @cached_property
    def turns_wgrad(self) -> bool:
        """Whether grouped GEMMs compute dw transposed. Not for e5m2: kernels do not accept it as
        the second operand of groups that cut the contraction."""
        return self.operand("grad_output", COLUMNWISE).element != E5M2

    def _operand_specs(
        self,
        layouts: dict[str, dict[Direction, str]],
        domains: tuple[str, ...],
        dtype: torch.dtype,
        arch: str,
    ) -> list[native.OperandSpec] | None:
        """Return the rowwise and columnwise spec of every slot in the compiled step; None if it
        does not support one of them."""
        if dtype is not torch.bfloat16:
            return None
        operand_specs: list[native.OperandSpec] = []
        for slot in QUANTIZED_TYPES:
            hybrid = self.hybrid(slot)
            distinct, delayed = set(layouts[slot].values()), hybrid.delayed_directions
            if hybrid.is_derived or (hybrid.turns and slot != "weight"):
                return None
            # a columnwise copy of stochastic codes is no rounding of its own
            is_copied = COMPACT in distinct or hybrid.is_stochastic
            if hybrid.shares_storage and is_copied and distinct != {COMPACT}:
                return None
            # the step of a single matrix supports runs over tokens only
            in_runs = distinct if slot == "weight" else {layouts[slot][ROWWISE]}
            if {ANCHORED_512, ANCHORED_128} & in_runs and self.shared_rungs != _OF_GROUPS:
                return None
            for d in Direction:
                source = ROWWISE if hybrid.shares_storage else d  # direction of its history
                spec = native.operand_spec_of(
                    hybrid.side(d).encoding(d),
                    layouts[slot][d],
                    domains[PRODUCTS.index(_product_of(slot, d))],
                    arch,
                    d is COLUMNWISE and hybrid.shares_storage and distinct == {COMPACT},
                    delayed.index(source) if source in delayed else None,
                )
                if spec is None:
                    return None
                operand_specs.append(spec)
        return operand_specs

    def once(self, compute: Callable[..., _T], *of: Hashable) -> _T:
        """Return `compute(self, *of)`, computed in the first call with these arguments."""
        key = compute, *of
        try:
            return self._known[key]
        except KeyError:
            return self._known.setdefault(key, compute(self, *of))

    @cached_property
    def _known(self) -> dict:
        return {}

    def _layout(self, slot: str, direction: Direction, dtype: torch.dtype, arch: str) -> str:
        if self.hybrid(slot).is_derived and direction is ROWWISE:
            return COMPACT  # the columnwise storage is derived from it
        product = _product_of(slot, direction)
        index = PRODUCTS.index(product)
        other = product.b if product.a == (slot, direction) else product.a
        fmt, other_fmt = self.operand(slot, direction), self.operand(*other)
        rung, domain = self.rung(product), self.domain(product, dtype, arch)[0]
        by_tensor = self.by_tensor[index] or (slot == "weight" and scales_tensor(other_fmt))
        if rung == ANCHORED_TENSOR and not by_tensor:
            rung = self.shared_rungs[index]
        rounded = any(self.hybrid(s).side(d).is_stochastic for s, d in (product.a, product.b))
        of_values = rung not in (ANCHORED_TENSOR, ANCHORED, EXACT)  # bf16, rounded to nearest
        if of_values and (dtype is not torch.bfloat16 or rounded):
            rung = ANCHORED  # of existing codes
        if rung in (ANCHORED_128, ANCHORED_TILE) and self.shared_rungs == _OF_GROUPS:
            rung = self._rung_of_groups(rung, slot, product.b == (slot, direction), fmt)
        return operand_layout(fmt, other_fmt, domain, arch, rung if rung in ANCHORS else ANCHORED)

    def _rung_of_groups(self, rung: str, slot: str, is_b: bool, fmt: Format) -> str:
        """Return the granularity of an operand's anchors in a grouped GEMM: see `of_groups`."""
        if slot == "weight":
            return ANCHORED_TILE
        is_tiled = rung == ANCHORED_TILE and is_b and is_anchored_as_encoded(fmt, ANCHORED_TENSOR)
        return ANCHORED_TILE if is_tiled else ANCHORED_128


def _product_of(slot: str, direction: Direction) -> Product:
    """Return the GEMM that reads a direction of a slot."""
    return next(p for p in PRODUCTS if (slot, direction) in (p.a, p.b))


def _counted(is_rescaled: bool, fmt: Format) -> int:
    """Return how `product_error` counts an operand of an anchored GEMM. is_rescaled: quantized with
    one scale per tensor."""
    return counted_as(fmt) if is_rescaled or anchors_tensor(fmt) else NOT_COUNTED


def plan_of(key: str) -> GemmPlan:
    """Return the plan of a key. Raises KeyError for the key of another process's plan."""
    if key not in _PLANS:
        raise KeyError(
            "this GEMM plan was not built in this process; build the model's plans (fq.convert) "
            "before running it"
        )
    return _PLANS[key]


def _count(number: int, plan: GemmPlan, domains: tuple[str, str, str], turned: bool) -> None:
    """Register a compiled step with `counters`, which then include its calls."""
    _CALLS[number] = plan, domains, turned
    if _called not in counters.sources:
        counters.sources.append(_called)


def _called() -> Iterator[tuple[str, object, int]]:
    """Yield what compiled steps ran since the last call, as entries of `counters`."""
    operands = [(slot, d) for slot in QUANTIZED_TYPES for d in Direction]
    of_plans = map(iter, native.linear_counts() if _CALLS else ())
    for (plan, domains, turned), counts in zip(_CALLS.values(), of_plans):
        for (slot, d), n in zip(operands, counts):
            if turned:  # each direction is encoded as the other one
                d = ROWWISE if d is COLUMNWISE else COLUMNWISE
            yield "quantize", (plan.operand(slot, d).name, d.value, "native"), n
        for product, domain, n in zip(PRODUCTS, domains, counts):
            yield "gemm", (domain, *map(repr, plan.pair(product))), n
        for (slot, d), n in zip(operands[:2] + operands[4:], counts):  # of input and gradient
            phase = "forward" if (slot, d) == operands[0] else "backward"
            d = ROWWISE if plan.hybrid(slot).shares_storage else d  # of the codes that are sent
            yield "sequence gather", (phase, d.value, plan.operand(slot, d).name), n
        for tensors, n in zip(("activations", "weights"), counts):
            yield "amax all-reduce", tensors, n


def build_plan(
    recipe: Recipe, name: str, arch: str | None = None, module_type: str = "linear"
) -> GemmPlan:
    """Resolve a recipe for one module, and check every pair.

    arch:  where it will run; under `require_native`, every GEMM must run natively there.
    Raises ValueError, naming module, slots and formats, for a pair that has no meaning, a missing
    direction, or a GEMM that `require_native` refuses.
    """
    slots: dict[str, HybridQuantizer] = {}
    for slot in QUANTIZED_TYPES:
        hybrid = recipe.hybrid(Role(module_type, slot, name))
        for direction in Direction:
            if hybrid is None or direction not in hybrid.sides:
                raise ValueError(
                    f"{name}: {slot}.{direction.value} is read by a product, but {recipe} makes "
                    "none"
                )
            slots[slot] = hybrid
        if slot == "weight" and slots[slot].is_stochastic:
            raise ValueError(
                f"{name}: stochastic rounding of weights makes training diverge and is refused; "
                "round gradients (grad_output) stochastically instead"
            )
    plan = GemmPlan(
        slots["input"],
        slots["weight"],
        slots["grad_output"],
        saves=_saved(slots["input"], recipe.save_original_input),
        compute_dtype=recipe.compute_dtype,
        accuracy=recipe.accuracy,
        boundary=boundaries(recipe, name, module_type) if recipe.boundary_slots else None,
    )
    for product in PRODUCTS:
        check_pair(
            f"{name}: {product.name}", *plan.pair(product), _label(product.a), _label(product.b)
        )
    if recipe.require_native and arch is not None:
        check_native(plan, name, arch)
    return plan


def check_native(plan: GemmPlan, name: str, arch: str) -> None:
    """Raise ValueError for a GEMM of bf16 activations that no matrix unit of `arch` computes."""
    for product, domain, reason in plan.slower_products(torch.bfloat16, arch):
        a, b = plan.pair(product)
        raise ValueError(
            f"{name}: {product.name} multiplies {_label(product.a)} ({a}) by "
            f"{_label(product.b)} ({b}) in the {domain} domain on {arch} ({reason}), and "
            f"require_native=True; choose a pair that {arch} multiplies, or drop require_native"
        )


def _label(operand: tuple[str, Direction]) -> str:
    return f"{operand[0]}.{operand[1].value}"


def _saved(hybrid: HybridQuantizer, save_original_input: bool | None) -> str:
    if hybrid.is_derived:  # the forward decoded rowwise codes, not the original input
        return "rowwise"
    if save_original_input or not hybrid.side(COLUMNWISE).fmt.is_quantized:
        return "input"
    return "rowwise" if hybrid.shares_storage else "columnwise"
