"""`GemmPlan`: the three products of a linear layer resolved from a recipe, checked when it is built.

A plan is a value: layers with equal quantizers share one. Operators receive its key, a text, because an operator
takes no Python objects and a compiled graph must be the same for equal layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..formats import COLUMNWISE, ROWWISE, Direction, Format, canonical_text, check_pair
from ..ops.capability import gemm_domain
from ..quantizer import HybridQuantizer
from ..recipe import Recipe, Role

_PLANS: dict[str, GemmPlan] = {}


class Product(NamedTuple):
    """One GEMM: which slot and direction each operand comes from."""

    name: str
    a: tuple[str, Direction]
    b: tuple[str, Direction]


PRODUCTS = (
    Product("fprop", ("input", ROWWISE), ("weight", ROWWISE)),
    Product("dgrad", ("grad_output", ROWWISE), ("weight", COLUMNWISE)),
    Product("wgrad", ("grad_output", COLUMNWISE), ("input", COLUMNWISE)),
)


@dataclass(frozen=True)
class GemmPlan:
    """Quantizers of the three slots, and what the backward keeps of the input.

    saves:  "input": the original tensor (identity backward, or re-quantized from it); "columnwise" or "rowwise":
            that storage only.
    """

    input: HybridQuantizer
    weight: HybridQuantizer
    grad_output: HybridQuantizer
    saves: str
    compute_dtype: torch.dtype | None

    @cached_property
    def key(self) -> str:
        """The text that stands for this plan in an operator's arguments."""
        key = canonical_text(self)
        _PLANS.setdefault(key, self)
        return key

    def hybrid(self, slot: str) -> HybridQuantizer:
        return getattr(self, slot)

    def operand(self, slot: str, direction: Direction) -> Format:
        """Format that a product reads for this slot and direction."""
        return self.hybrid(slot).side(direction).fmt

    def pair(self, product: Product) -> tuple[Format, Format]:
        return self.operand(*product.a), self.operand(*product.b)

    def domain(self, product: Product, dtype: torch.dtype, arch: str) -> tuple[str, str]:
        """(domain, reason) of one product that returns `dtype` on `arch`."""
        return gemm_domain(*self.pair(product), dtype, arch)


def plan_of(key: str) -> GemmPlan:
    """The plan a key was made from. Raises KeyError for a key of another process's plan."""
    if key not in _PLANS:
        raise KeyError("this GEMM plan was not built in this process; build the model's plans (fq.convert) before running it")
    return _PLANS[key]


def build_plan(recipe: Recipe, name: str, arch: str | None = None, module_type: str = "linear") -> GemmPlan:
    """Resolve a recipe for one module, and check every pair.

    arch:  where it will run; under `require_native` every product must have a native domain there.
    Raises ValueError, naming module, slots and formats, for a pair that has no meaning, a missing direction, or a
    product that `require_native` refuses.
    """
    slots = {t: recipe.hybrid(Role(module_type, t, name)) for t in ("input", "weight", "grad_output")}
    for slot, hybrid in slots.items():
        for direction in Direction:
            if hybrid.side(direction) is None:
                raise ValueError(f"{name}: {slot}.{direction.value} is read by a product, but {recipe} makes none")
        quantizer = slots["weight"].rowwise
        if slot == "weight" and (quantizer.is_stochastic or slots["weight"].columnwise.is_stochastic):
            raise ValueError(
                f"{name}: stochastic rounding of weights makes training diverge and is refused; round gradients "
                "(grad_output) stochastically instead"
            )
    plan = GemmPlan(**slots, saves=_saved(slots["input"], recipe.save_original_input), compute_dtype=recipe.compute_dtype)
    for product in PRODUCTS:
        check_pair(f"{name}: {product.name}", *plan.pair(product), _label(product.a), _label(product.b))
    if recipe.require_native and arch is not None:
        _check_native(plan, name, arch)
    return plan


def _check_native(plan: GemmPlan, name: str, arch: str) -> None:
    """Raise ValueError for a product of bf16 activations that no matrix unit of `arch` computes."""
    for product in PRODUCTS:
        domain, reason = plan.domain(product, torch.bfloat16, arch)
        if domain not in ("native", "anchored"):
            a, b = plan.pair(product)
            raise ValueError(
                f"{name}: {product.name} multiplies {_label(product.a)} ({a}) by {_label(product.b)} ({b}) in the {domain} "
                f"domain on {arch} ({reason}), and require_native=True; choose a pair that {arch} multiplies, or drop "
                "require_native"
            )


def _label(operand: tuple[str, Direction]) -> str:
    return f"{operand[0]}.{operand[1].value}"


def _saved(hybrid: HybridQuantizer, save_original_input: bool | None) -> str:
    if hybrid.is_derived:
        if save_original_input:
            raise ValueError("save_original_input=True cannot keep the forward's decoded operands; leave it None")
        return "rowwise"
    if save_original_input or not hybrid.columnwise.fmt.is_quantized:
        return "input"
    return "rowwise" if hybrid.one_storage else "columnwise"
