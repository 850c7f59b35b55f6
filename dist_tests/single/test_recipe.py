# SPDX-License-Identifier: Apache-2.0
"""Recipes: values that name the quantizer of every slot, and plans that stand for them in
operators."""

from __future__ import annotations

import functools
import itertools
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_quant as fq
from fsdp_quant import recipe as recipe_module
from fsdp_quant import recipes
from fsdp_quant.context import current_autocast
from fsdp_quant.formats import COLUMNWISE, IDENTITY, ROWWISE, Format, canonical_text, format_of
from fsdp_quant.linear.plan import PRODUCTS, build_plan
from fsdp_quant.quantizer import HybridQuantizer, Quantizer, hybrid_of
from fsdp_quant.recipe_options import SWITCHES
from fsdp_quant.scaling import DelayedScaling

SLOTS = ("input", "weight", "grad_output")
FAMILIES = ("identity", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


def role(slot: str, name: str = "layers.0.fc") -> fq.Role:
    return fq.Role("linear", slot, name)


def everything_mxfp8(role):
    return "mxfp8"


def returns_each_kind(role):
    """One kind of answer a slot: a Format, a Quantizer, a HybridQuantizer, None at the
    boundaries."""
    return {
        "input": format_of("mxfp8"),
        "weight": Quantizer("fp8_row"),
        "grad_output": HybridQuantizer("fp8_tensor", Quantizer("mxfp8", rounding="stochastic")),
    }.get(role.tensor_type)


def only_the_head_is_plain(role):
    return "identity" if role.name == "head" else "mxfp8"


def with_arguments(role, *, fmt, eps=0.0):
    return Quantizer(fmt, eps=eps)


def returns_none(role):
    return None


def returns_a_number(role):
    return 8


def returns_an_unknown_name(role):
    return "fp3"


def lacks_a_direction(role):
    return HybridQuantizer("mxfp8", None) if role.tensor_type == "weight" else "mxfp8"


def rounds_weights(role):
    return Quantizer("mxfp8", rounding="stochastic")


def rotates_one_operand(role):
    return HybridQuantizer("nvfp4", Quantizer("nvfp4", rotation=role.tensor_type == "input"))


class OwnQuantizer(Quantizer):
    """With a rounding that nothing would call."""

    def storage(self, x, direction, key=None):
        raise AssertionError


class OwnHybrid(HybridQuantizer):
    def operands(self, *args, **options):
        raise AssertionError


class OwnFormat(Format):
    pass


SUBCLASSES = {
    "OwnQuantizer.* Quantizer": OwnQuantizer("mxfp8"),
    "OwnQuantizer.* Quantizer.* ": HybridQuantizer("mxfp8", OwnQuantizer("mxfp8")),
    "OwnHybrid.* HybridQuantizer": OwnHybrid("mxfp8", "nvfp4"),
    "OwnFormat.* Format": OwnFormat("own", format_of("mxfp8").element, (1, 32), "e8m0"),
}


def of_own(role, message, slot):
    return SUBCLASSES[message] if role.tensor_type == slot else "mxfp8"


class Factory:
    def __call__(self, role):
        return "mxfp8"


# The slots of named recipes #

MX, NV, SQUARE = Quantizer("mxfp8"), Quantizer("nvfp4"), Quantizer("nvfp4_16x16")
RHT = Quantizer("nvfp4", rotation=True)
SR, SR_RHT = (
    Quantizer("nvfp4", rounding="stochastic"),
    Quantizer("nvfp4", rounding="stochastic", rotation=True),
)
CURRENT, ROW = Quantizer("fp8_tensor"), Quantizer("fp8_row")
E5M2 = Quantizer(format_of("fp8_tensor", element="e5m2"))
DELAYED = Quantizer("fp8_tensor", scaling=DelayedScaling())
DELAYED_E5M2 = Quantizer(format_of("fp8_tensor", element="e5m2"), scaling=DelayedScaling())
BLOCK, BLOCKS = Quantizer("fp8_1x128"), Quantizer("fp8_128x128")
FLOOR = Quantizer(format_of("mxfp8", scale_rounding="floor"))
PLAIN = Quantizer("identity")
MX_SQUARE, MX_SR = Quantizer("mxfp8_32x32"), Quantizer("mxfp8", rounding="stochastic")
MX_E5M2, ROW_E5M2, BLOCK_E5M2 = (
    Quantizer(format_of(name, element="e5m2")) for name in ("mxfp8", "fp8_row", "fp8_1x128")
)

# recipe: x.row, x.col, w.row, w.col, dy.row, dy.col
TABLE = {
    "identity": (recipes.identity(), (PLAIN,) * 6),
    "bf16": (recipes.bf16(), (PLAIN,) * 6),
    "fp8_current": (recipes.fp8_current(), (CURRENT,) * 6),
    "fp8_current_e5m2": (recipes.fp8_current(grad_element="e5m2"), (CURRENT,) * 4 + (E5M2,) * 2),
    "fp8_current_pow2": (
        recipes.fp8_current(pow2=True),
        (Quantizer(format_of("fp8_tensor", pow2=True)),) * 6,
    ),
    "fp8_delayed": (recipes.fp8_delayed(), (DELAYED,) * 4 + (DELAYED_E5M2,) * 2),
    "fp8_row": (recipes.fp8_row(), (ROW,) * 6),
    "fp8_block": (recipes.fp8_block(), (BLOCK, BLOCK, BLOCKS, BLOCKS, BLOCK, BLOCK)),
    "mxfp8": (recipes.mxfp8(), (MX,) * 6),
    "mxfp8_floor": (recipes.mxfp8(scale_rounding="floor"), (FLOOR,) * 6),
    "nvfp4": (recipes.nvfp4(), (NV, RHT, SQUARE, SQUARE, SR, SR_RHT)),
    "mxfp8 e5m2": (recipes.mxfp8(grad_element="e5m2"), (MX,) * 4 + (MX_E5M2,) * 2),
    "mxfp8 square": (recipes.mxfp8(square_blocks=True), (MX, MX, MX_SQUARE, MX_SQUARE, MX, MX)),
    "mxfp8 stochastic": (recipes.mxfp8(stochastic=True), (MX,) * 4 + (MX_SR,) * 2),
    "fp8_row e5m2": (recipes.fp8_row(grad_element="e5m2"), (ROW,) * 4 + (ROW_E5M2,) * 2),
    "fp8_block e5m2": (
        recipes.fp8_block(grad_element="e5m2", square_blocks=False),
        (BLOCK,) * 4 + (BLOCK_E5M2,) * 2,
    ),
    "nvfp4 plain": (
        recipes.nvfp4(rotation=False, stochastic=False),
        (NV, NV, SQUARE, SQUARE, NV, NV),
    ),
    "nvfp4 vectors": (recipes.nvfp4(square_blocks=False), (NV, RHT, NV, NV, SR, SR_RHT)),
    "hybrid square": (
        recipes.hybrid("mxfp8", "nvfp4", square_blocks=True, rotation=False),
        (MX, NV, MX_SQUARE, SQUARE, SR, SR),
    ),
    "hybrid e5m2": (
        recipes.hybrid("nvfp4", "mxfp8", grad_element="e5m2"),
        (NV, MX, NV, MX, MX_E5M2, MX_E5M2),
    ),
    "hybrid mxfp8 nvfp4": (recipes.hybrid("mxfp8", "nvfp4"), (MX, RHT, MX, NV, SR, SR_RHT)),
    "hybrid nvfp4 mxfp8": (recipes.hybrid("nvfp4", "mxfp8"), (NV, MX, NV, MX, MX, MX)),
    "hybrid fp8_block mxfp8": (
        recipes.hybrid("fp8_block", "mxfp8"),
        (BLOCK, MX, BLOCK, MX, MX, MX),
    ),
    "hybrid mxfp8 fp8_block": (
        recipes.hybrid("mxfp8", "fp8_block"),
        (MX, BLOCK, MX, BLOCK, BLOCK, BLOCK),
    ),
    "hybrid fp8 bf16": (
        recipes.hybrid("fp8", "bf16"),
        (CURRENT, PLAIN, CURRENT, PLAIN, PLAIN, PLAIN),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_named_recipe_slots_are_those_of_the_table(name: str):
    """Otherwise a recipe trains in other formats than its documentation says."""
    recipe, want = TABLE[name]
    got = tuple(recipe.hybrid(role(slot)).side(d) for slot in SLOTS for d in (ROWWISE, COLUMNWISE))
    assert got == want
    for slot in SLOTS:
        assert recipe.hybrid(role(slot)).columnwise_source == "original"
    assert recipe.hybrid(role("output")) is None
    assert recipe.hybrid(role("grad_input")) is None


@pytest.mark.parametrize(
    "name, shared",
    [
        ("fp8_current", "x w dy"),
        ("fp8_delayed", "x w dy"),
        ("fp8_block", "w"),
        ("nvfp4", "w"),
        ("mxfp8", ""),
        ("fp8_row", ""),
    ],
)
def test_one_storage_serves_both_directions_where_the_table_says_same(name: str, shared: str):
    """Otherwise a square block or a tensor scale is quantized, kept and gathered twice."""
    recipe = TABLE[name][0]
    got = [
        short
        for short, slot in zip(("x", "w", "dy"), SLOTS)
        if recipe.hybrid(role(slot)).shares_storage
    ]
    assert got == shared.split()


@pytest.mark.parametrize("family", FAMILIES)
def test_hybrid_of_one_family_has_the_slots_of_that_family(family: str):
    """Otherwise `hybrid(F, F)` is not F."""
    named = {"fp8_tensor": recipes.fp8_current}.get(family) or getattr(recipes, family)
    for slot in SLOTS:
        assert recipes.hybrid(family, family).hybrid(role(slot)) == named().hybrid(role(slot))


@pytest.mark.parametrize("forward, backward", list(itertools.product(FAMILIES, FAMILIES)))
def test_every_hybrid_plans_and_its_rotations_cancel(forward: str, backward: str):
    """Otherwise some pair of families cannot train, or multiplies a rotated operand by a plain
    one."""
    plan = build_plan(recipes.hybrid(forward, backward), "fc")
    for product in PRODUCTS:
        a, b = plan.pair(product)
        assert (
            a.rotated == b.rotated == (backward in ("nvfp4", "mxfp4") and product.name == "wgrad")
        )
    assert plan.input.rowwise.fmt == plan.operand("input", ROWWISE)
    for slot in SLOTS:
        stochastic = backward in ("nvfp4", "mxfp4") and slot == "grad_output"
        assert plan.hybrid(slot).columnwise.is_stochastic == stochastic
        assert plan.hybrid(slot).rowwise.is_stochastic == stochastic
    square = forward == backward and forward in ("fp8_block", "nvfp4")
    assert (plan.weight.rowwise.fmt.block[0] not in (1, None)) == square
    for slot in ("input", "grad_output"):
        for direction in (ROWWISE, COLUMNWISE):
            assert plan.operand(slot, direction).block[0] in (1, None)


# Values #


def test_recipes_are_values():
    """Otherwise equal recipes differ after a pickle, in another process or as a dictionary's
    key."""
    made = [recipe for recipe, _ in TABLE.values()] + [
        fq.CustomRecipe(everything_mxfp8),
        recipes.mxfp8(backward_override="dequantized"),
        recipes.mxfp8(strict=False),
        recipes.mxfp8(require_native=True),
        recipes.mxfp8(compute_dtype=None),
        recipes.mxfp8(accuracy="exact"),
        recipes.mxfp8(save_original_input=True),
        recipes.nvfp4(tail=0.25),
        recipes.fp8_delayed(length=16),
        recipes.fp8_delayed(margin=1),
        recipes.fp8_delayed(use="newest"),
        fq.Recipe("custom", with_arguments, (("eps", 1.0), ("fmt", "fp8_row"))),
        fq.Recipe("custom", with_arguments, (("eps", 2.0), ("fmt", "fp8_row"))),
    ]
    for i, recipe in enumerate(made):
        again = pickle.loads(pickle.dumps(recipe))
        assert again == recipe
        assert hash(again) == hash(recipe)
        assert again.fingerprint() == recipe.fingerprint()
        del again.__dict__["key"]  # as in a file that is older than keys
        assert pickle.loads(pickle.dumps(again)).key == recipe.key
        for other in made[i + 1 :]:
            if other.name in ("bf16", recipe.name) and other == recipe:
                # bf16 is the same recipe
                assert {recipe.name, other.name} == {"identity"}, (recipe, other)
            else:
                assert other != recipe
                assert other.fingerprint() != recipe.fingerprint(), (recipe, other)
    # a message that compares two recipes shows a difference
    assert len({repr(r) for r in made}) == len(set(made))
    assert recipes.identity() == recipes.bf16()
    assert recipes.fp8_delayed(length=16) == recipes.fp8_delayed(length=16)


def test_fingerprints_are_equal_in_another_process():
    """Otherwise a checkpoint refuses the recipe it was saved with."""
    program = "from fsdp_quant import recipes as r"
    program += "; print(r.hybrid('mxfp8', 'nvfp4', tail=0.25).fingerprint())"
    program += "; print(r.fp8_delayed(length=16).fingerprint())"
    root = Path(fq.__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [
        recipes.hybrid("mxfp8", "nvfp4", tail=0.25).fingerprint(),
        recipes.fp8_delayed(length=16).fingerprint(),
    ]


def test_fingerprints_tell_arguments_apart():
    """Otherwise a checkpoint of one quantizer loads under another."""
    made = [
        fq.Recipe("custom", with_arguments, (("fmt", q),))
        for q in (
            Quantizer("fp8_row"),
            Quantizer("fp8_row", eps=1.0),
            DELAYED,
            replace_scaling(length=4),
            MX,
            FLOOR,
        )
    ] + [fq.Recipe("custom", with_arguments, (("fmt", format_of("mxfp8", block=(1, 64))),))]
    assert len({r.fingerprint() for r in made}) == len(made)


def replace_scaling(**options) -> Quantizer:
    return Quantizer("fp8_tensor", scaling=DelayedScaling(**options))


PLANS = {
    "eps": (with_arguments, {"fmt": "fp8_row"}, {"fmt": "fp8_row", "eps": 1.0}),
    "block": (
        with_arguments,
        {"fmt": format_of("mxfp8")},
        {"fmt": format_of("mxfp8", block=(1, 64))},
    ),
    "element": (with_arguments, {"fmt": "fp8_row"}, {"fmt": format_of("fp8_row", element="e5m2")}),
    "pow2": (with_arguments, {"fmt": "fp8_row"}, {"fmt": format_of("fp8_row", pow2=True)}),
}


def derives_the_weight(role):
    return HybridQuantizer(
        "mxfp8", "mxfp8", "rowwise_dequantized" if role.tensor_type == "weight" else "original"
    )


def test_different_plans_have_different_keys():
    """Otherwise a module multiplies with the quantizers of another module that was converted before
    it.

    Operators receive a plan as its key: two plans that differ in any quantizer must not share one.
    """
    made = [
        recipes.mxfp8(),
        recipes.mxfp8(scale_rounding="floor"),
        recipes.mxfp8(compute_dtype=None),
        recipes.mxfp8(compute_dtype=torch.float16),
        recipes.mxfp8(save_original_input=True),
        fq.CustomRecipe(derives_the_weight),
        recipes.fp8_delayed(),
        recipes.fp8_delayed(length=4),
        recipes.fp8_delayed(margin=2),
        recipes.fp8_delayed(use="newest"),
        recipes.fp8_current(),
        recipes.fp8_current(pow2=True),
        recipes.fp8_current(grad_element="e5m2"),
    ]
    made += [
        fq.Recipe(kind, f, tuple(sorted(a.items())))
        for kind, (f, *both) in PLANS.items()
        for a in both
    ]
    plans = list(dict.fromkeys(build_plan(r, "fc") for r in made))
    assert len(plans) > len(PLANS) + 10
    keys = {p.key: p for p in plans}
    clashes = [f"{p} and {keys[p.key]}" for p in plans if keys[p.key] != p]
    assert not clashes


def test_texts_are_kept_by_one_value_alone():
    """Otherwise a changed copy carries the text, and so the plan, of the value that it was made
    from."""
    nearest = format_of("mxfp8")
    text = canonical_text(Quantizer(nearest))
    floor = replace(nearest, scale_rounding="floor")
    assert canonical_text(Quantizer(floor)) != text
    assert canonical_text(Quantizer(replace(floor, scale_rounding=nearest.scale_rounding))) == text
    assert (
        "_canonical" in nearest.__dict__
        and "_canonical" not in pickle.loads(pickle.dumps(nearest)).__dict__
    )


def test_modules_with_other_delayed_scaling_do_not_share_it():
    """Otherwise the gradients' scale of a second model follows the first model's margin.

    Scales after one step: max / amax / 2^margin.
    """
    for margin in (0, 3):
        torch.manual_seed(0)
        module = fq.convert(
            nn.ModuleDict({"fc": nn.Linear(16, 16)}), recipes.fp8_delayed(margin=margin)
        )["fc"]
        for _ in range(2):
            module(torch.ones(4, 16)).backward(torch.full((4, 16), 7.0))
        enc = fq.state_dict(module)["histories"][".grad_output.rowwise"]["enc"]
        assert enc.item() == 57344 / 7 / 2**margin


# What a factory may return #


def test_qfactory_answers_become_hybrids():
    """Otherwise a factory must know the library's classes to name a format."""
    recipe = fq.CustomRecipe(returns_each_kind)
    assert recipe.hybrid(role("input")) == HybridQuantizer(MX, MX)
    assert recipe.hybrid(role("weight")) == HybridQuantizer(ROW, ROW)
    grad = recipe.hybrid(role("grad_output"))
    assert (grad.rowwise, grad.columnwise) == (CURRENT, Quantizer("mxfp8", rounding="stochastic"))
    assert recipe.hybrid(role("output")) is None
    named = fq.CustomRecipe(everything_mxfp8)
    assert named.hybrid(role("input")) == recipes.mxfp8().hybrid(role("input"))
    assert fq.Recipe("custom", with_arguments, (("fmt", "fp8_row"),)).hybrid(
        role("input")
    ) == HybridQuantizer(ROW, ROW)


def test_qfactory_sees_the_modules_name():
    """Otherwise a recipe cannot treat one layer differently."""
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "head": nn.Linear(16, 16)})
    fq.convert(model, fq.CustomRecipe(only_the_head_is_plain))
    assert model["body"].plan.operand("weight", ROWWISE) == format_of("mxfp8")
    assert model["head"].plan.operand("weight", ROWWISE) == IDENTITY


@pytest.mark.parametrize(
    "factory, message",
    [
        (returns_none, "returned None for Role"),
        (returns_a_number, "8"),
        (returns_an_unknown_name, "unknown format 'fp3'; known formats: .*mxfp8"),
        (lacks_a_direction, r"fc: weight.columnwise is read by a product"),
        (rounds_weights, "fc: stochastic rounding of weights"),
        (
            rotates_one_operand,
            r"fc: wgrad multiplies grad_output.columnwise \(nvfp4\) "
            r"by input.columnwise \(nvfp4\(RHT\)\)",
        ),
    ],
)
def test_bad_answers_are_refused_when_the_recipe_is_applied(factory, message: str):
    """Otherwise a mistake in a recipe is found in the first step, or never; and half of the model
    is converted."""
    model = nn.ModuleDict({"fc": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match=message):
        fq.convert(model, fq.CustomRecipe(factory))
    assert type(model["fc"]) is nn.Linear
    assert type(model["fc"].weight) is nn.Parameter


@pytest.mark.parametrize("message", SUBCLASSES)
def test_quantizers_of_a_users_class_are_refused_by_name(message: str):
    """If false, a model trains in the formats of a base class, or in the user's forward alone, and
    nobody calls the method that the user wrote."""
    kind = message.split()[1]
    wanted = rf"got {message.strip()}; wanted a {kind} itself.*fq.numerics.Format.*'identity'"

    def recipe(slot: str, **options) -> fq.Recipe:
        arguments = (("message", message), ("slot", slot))
        return fq.Recipe("own", of_own, arguments, **options)

    model = nn.ModuleDict({"fc": nn.Linear(16, 16)})
    for slot in SLOTS:
        with pytest.raises(ValueError, match=rf"fc: {slot}: own gave .*{wanted}"):
            fq.convert(model, recipe(slot))
        with pytest.raises(ValueError, match=wanted):
            fq.convert(model, recipes.per_layer("mxfp8", {"fc": recipe(slot)}))
    assert type(model["fc"]) is nn.Linear
    with pytest.raises(ValueError, match=wanted):
        fq.convert(model, recipe("output", boundary_slots=True))
    with pytest.raises(ValueError, match=wanted):
        fq.numerics.Quantize(recipe("grad_input"))
    with pytest.raises(ValueError, match=wanted):
        fq.GroupedLinear(2, 16, 16, recipe=recipe("weight"))
    layer = fq.Linear(16, 16, recipe=recipes.mxfp8())
    with pytest.raises(ValueError, match=wanted), fq.autocast(recipe("weight")):
        layer(torch.zeros(2, 16))
    assert hybrid_of(MX) == HybridQuantizer("mxfp8", "mxfp8")


def test_functions_that_do_not_pickle_are_refused_by_name():
    """Otherwise a recipe fails when a checkpoint or a worker process pickles it, hours later."""

    def local_factory(role):
        return "mxfp8"

    with pytest.raises(ValueError, match="module-level function.*<lambda>"):
        fq.CustomRecipe(lambda role: "mxfp8")
    with pytest.raises(ValueError, match="module-level function.*local_factory"):
        fq.CustomRecipe(local_factory)
    with pytest.raises(ValueError, match="module-level function"):
        fq.CustomRecipe(functools.partial(with_arguments, fmt="mxfp8"))
    with pytest.raises(ValueError, match="module-level function"):
        fq.CustomRecipe(Factory())
    with pytest.raises(ValueError, match="module-level function.*'mxfp8'"):
        fq.CustomRecipe("mxfp8")


def test_unknown_names_list_the_known_ones():
    """Otherwise a misspelled recipe, family, element or slot is a KeyError, or is ignored."""
    with pytest.raises(
        ValueError, match="unknown recipe 'mxfp5'; known recipes: bf16, fp8_block, .*mxfp8, .*nvfp4"
    ):
        recipes.by_name("mxfp5")
    with pytest.raises(
        ValueError, match="unknown format family 'mxfp5'; known families: .*fp8_block.*mxfp8"
    ):
        recipes.hybrid("mxfp8", "mxfp5")
    with pytest.raises(ValueError, match="grad_element must be 'e4m3' or 'e5m2', got 'e3m4'"):
        recipes.fp8_current(grad_element="e3m4")
    with pytest.raises(ValueError, match="scale_rounding must be 'up' or 'floor', got 'down'"):
        recipes.mxfp8(scale_rounding="down")
    with pytest.raises(
        ValueError, match="tensor_type must be one of input, weight, grad_output.*'wieght'"
    ):
        fq.Role("linear", "wieght")
    assert {*recipes.names(), "hybrid"} == {*fq.recipe.NAMED, "bf16"}, "lists leave out a recipe"
    for name in recipes.names():
        assert recipes.by_name(name).hybrid(role("weight")) is not None
    assert recipes.by_name("nvfp4", tail=0.5) == recipes.nvfp4(tail=0.5)


_ELEMENT = format_of("mxfp8").element
BAD_OPTIONS = {  # of what has options: values that mean nothing
    recipes.mxfp8: {
        "backward_override": ["bf16", False, 0],
        "accuracy": ["slow", True, None],
        "anchor_tolerance": [-0.1, float("nan"), True, "0.1"],
        "save_original_input": [1, "yes"],
        "strict": [1, "no", None],
        "require_native": [0, None],
        "compute_dtype": [torch.int8, torch.complex64, torch.float64, torch.float8_e4m3fn, "bf16"],
        "tail": [-0.1, 1.1, float("nan"), True, "0.5", None],
        "boundary_slots": [1, True],
        "scale_rounding": ["down", True],
        "colour": ["red"],
        "grad_element": ["e2m3"],
        "pow2": [True, False],
        "rotation": [True, 1],
        "stochastic": [1],
        "square_blocks": [0],
    },
    recipes.identity: {"stochastic": [True], "grad_element": ["e5m2"]},
    recipes.nvfp4: {"tail": [True, 2], "scale_rule": ["exact", 1], "grad_element": ["e5m2"]},
    recipes.fp8_current: {"pow2": [1, "yes"], "grad_element": ["e2m1", "e3m4", 5]},
    recipes.fp8_row: {"pow2": [0]},
    recipes.mxfp6: {"grad_element": ["e5m2"], "square_blocks": [True]},
    recipes.fp8_delayed: {
        "length": [0, -1, 1.5, True, "8", None],
        "margin": [-3, 17, 0.5, True, None],
        "use": ["min", None, 1],
        "strict": [1],
    },
    DelayedScaling: {"length": [1.5], "margin": [-3], "use": [1]},
    functools.partial(recipes.hybrid, "mxfp8", "nvfp4"): {"tail": [True], "scale_rule": [1]},
    functools.partial(fq.CustomRecipe, everything_mxfp8): {
        "compute_dtype": ["bf16"],
        "tail": [True],
        "colour": ["red"],
    },
    functools.partial(fq.Recipe, "own", everything_mxfp8): {
        "compute_dtype": [torch.int8],
        "arguments": [{"fmt": "mxfp8"}, ("fmt", "mxfp8")],
    },
    functools.partial(recipes.per_layer, "mxfp8"): {
        "first": [2, (0, "bf16"), (True, "bf16"), (1.5, "bf16")],
        "last": [("1", "bf16")],
        "named": [["head"], {3: "bf16"}],
    },
    functools.partial(recipes.PerLayer, recipes.mxfp8()): {"first": [(True, recipes.bf16())]},
    functools.partial(Quantizer, "fp8_row"): {
        "rounding": [None],
        "rotation": [1],
        "eps": [-1.0, float("nan"), True],
    },
    functools.partial(Format, "own", _ELEMENT, (1, 64), "e8m0"): {
        "pow2": [1],
        "rotated": [1],
        "tensor_scale": [None],
        "scale_rounding": ["down"],
        "scale_rule": ["exact"],
    },
    functools.partial(Format, "own", scale="e8m0"): {
        "element": ["e4m3"],
        "block": [[1, 64], (1, -64), (1, 6.5), (1, True), (1, 2, 3), 64],
    },
}


@pytest.mark.parametrize("make", BAD_OPTIONS, ids=lambda m: getattr(m, "func", m).__qualname__)
def test_options_that_mean_nothing_are_refused_where_they_are_written(make):
    """Otherwise an option computes garbage in silence, or fails late in a forward that no one
    connects with it."""
    for name, values in BAD_OPTIONS[make].items():
        rest = {"element": _ELEMENT, "block": (1, 64)} if "block" in BAD_OPTIONS[make] else {}
        for value in values:
            with pytest.raises(ValueError, match=name):
                make(**rest | {name: value})
                pytest.fail(f"{name}={value!r} was accepted")


@pytest.mark.parametrize(
    "switch",
    [
        (True, None, "bf16"),
        ("1", None, "bf16"),
        (-1, None, "bf16"),
        (0.5, None, "bf16"),
        (0, float("nan"), "bf16"),
        (0, "bf16"),
        0,
    ],
)
def test_switches_of_schedules_are_steps_or_fractions(switch):
    """Otherwise a schedule switches at a step that nobody meant."""
    with pytest.raises(ValueError, match="schedule"):
        recipes.schedule("mxfp8", switch)
    for total in (0, 2.5, True):
        with pytest.raises(ValueError, match="total_steps"):
            recipes.schedule("mxfp8", (0.5, None, "bf16"), total_steps=total)
    with pytest.raises(ValueError, match="schedule"):
        recipes.Schedule(recipes.mxfp8(), ((1.5, None, recipes.bf16()),))


def test_every_named_recipe_has_the_switches_of_the_table():
    """If false, `fq.recipes.table()` offers a switch or a value that its recipe refuses or ignores,
    or a recipe accepts one under no name of the table."""
    page = (Path(fq.__file__).parents[1] / "docs/reference/recipes.md").read_text()
    assert recipes.table() in page, (
        f"docs/reference/recipes.md wants this table:\n{recipes.table()}"
    )
    lines = [[cell.strip() for cell in line.split("|")] for line in recipes.table().splitlines()]
    assert [line[1] for line in lines[2:-2]] == [f"{n}()" for n in recipe_module.NAMED[:-1]]
    for _, call, *_, text, _ in lines[2:-2]:
        make, others = getattr(recipes, call.removesuffix("()")), set(SWITCHES)
        for switch in text.split("; ") if text else []:
            name, _, values = switch.partition(" ")
            read = [{"True": True, "False": False}.get(v, v) for v in values.split(" or ")]
            plans = [build_plan(make(**{name: value}), "fc") for value in read]
            assert plans[0] == build_plan(make(), "fc") != plans[1], (call, switch)
            others.remove(name)
        for name in others:
            for value in ("e5m2", "e3m2", True, "floor", "fp8_exact"):
                with pytest.raises(ValueError, match=rf"{name}.* needs .*switches of this recipe"):
                    make(**{name: value})
    assert recipes.mxfp8(rotation=False, stochastic=False) == recipes.mxfp8()


def test_numpy_numbers_are_those_numbers():
    """Otherwise a sweep over np.arange has other recipes than one over range, or none."""
    pairs = [
        (recipes.fp8_delayed(length=np.int64(16)), recipes.fp8_delayed(length=16)),
        (recipes.nvfp4(tail=np.float32(0.5)), recipes.nvfp4(tail=0.5)),
        (recipes.mxfp8(strict=np.bool_(False)), recipes.mxfp8(strict=False)),
        (
            recipes.per_layer("mxfp8", first=(np.int32(2), "bf16")),
            recipes.per_layer("mxfp8", first=(2, "bf16")),
        ),
        (
            recipes.schedule("mxfp8", (np.int64(3), np.float32(0.5), "bf16"), total_steps=8),
            recipes.schedule("mxfp8", (3, 4, "bf16")),
        ),
    ]
    for numpy, plain in pairs:
        assert numpy == plain and numpy.fingerprint() == plain.fingerprint()


# backward_override as a rewrite #


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_rewrites_the_columnwise_side_only(name: str, override: str):
    """Otherwise an override changes the forward, or leaves something quantized in the backward."""
    recipe, want = TABLE[name]
    options = {f: getattr(recipe, f) for f in ("compute_dtype", "tail")}
    overridden = fq.Recipe(
        recipe.name, recipe.qfactory, recipe.arguments, backward_override=override, **options
    )
    source = "rowwise_dequantized" if override == "dequantized" else "original"
    for i, slot in enumerate(("input", "weight")):
        assert overridden.hybrid(role(slot)) == HybridQuantizer(want[2 * i], PLAIN, source)
    assert overridden.hybrid(role("grad_output")) == HybridQuantizer(PLAIN, PLAIN)
    plan = build_plan(overridden, "fc")
    for product in PRODUCTS[1:]:
        assert plan.pair(product) == (IDENTITY, IDENTITY)


def rotates_everything(role):
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("nvfp4", rotation=True)


def test_a_rotated_forward_cannot_be_decoded_for_the_backward():
    """Otherwise `dequantized` derives the backward's operand from turned values; the module and
    slot are named."""
    with pytest.raises(ValueError, match="not rotated"):
        HybridQuantizer(RHT, "identity", "rowwise_dequantized")
    model = nn.ModuleDict({"fc": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match="fc: input: rotates_everything gave nvfp4.* not rotated"):
        fq.convert(model, fq.CustomRecipe(rotates_everything, backward_override="dequantized"))
    assert type(model["fc"]) is nn.Linear


# Native products only #


@pytest.mark.parametrize(
    "forward, backward", [("mxfp8", "mxfp8"), ("mxfp8", "nvfp4"), ("identity", "fp8_row")]
)
def test_require_native_refuses_by_module_slot_and_formats(forward: str, backward: str):
    """Otherwise a run that asked for tensor cores trains through slow products without a word."""
    recipe = recipes.hybrid(forward, backward, require_native=True)
    product, a, b = (
        ("dgrad", "grad_output", "weight")
        if forward == "identity"
        else ("fprop", "input", "weight")
    )
    columns = "columnwise" if product == "dgrad" else "rowwise"
    plan = build_plan(recipe, "fc")
    fmt_a, fmt_b = plan.pair(next(p for p in PRODUCTS if p.name == product))
    sentence = (
        rf"{product} multiplies {a}.rowwise \({_text(fmt_a)}\) by {b}.{columns} \({_text(fmt_b)}\)"
    )
    with pytest.raises(ValueError, match=rf"layers.fc: {sentence}.*require_native=True"):
        fq.convert(nn.ModuleDict({"layers": nn.ModuleDict({"fc": nn.Linear(16, 16)})}), recipe)
    model = fq.convert(
        nn.ModuleDict({"fc": nn.Linear(16, 16)}), recipes.identity(require_native=True)
    )
    before = model["fc"].plan
    with pytest.raises(ValueError, match=rf"fc: {sentence}"):
        fq.set_recipe(model, recipe)
    assert model["fc"].plan == before
    with pytest.raises(ValueError, match=sentence):
        fq.Linear(16, 16, recipe=recipe, name="fc")
    with pytest.raises(ValueError, match=sentence), fq.autocast(recipe):
        model["fc"](torch.zeros(2, 16))


def _text(fmt: Format) -> str:
    return repr(fmt).replace("(", r"\(").replace(")", r"\)")


# Kinds of modules #


def experts_in_blocks(role):
    """Another format for experts than for all other layers."""
    return "fp8_1x128" if role.module_type == "grouped_linear" else "mxfp8"


class Packed(nn.Module):
    """What fq.convert(grouped=) takes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 16, 16))


def test_experts_ask_a_recipe_as_grouped_linear():
    """If false, a recipe cannot tell experts from the layers around them."""
    recipe = fq.CustomRecipe(experts_in_blocks)
    model = nn.ModuleDict({"fc": nn.Linear(16, 16), "packed": Packed()})
    fq.convert(model, recipe, grouped=["packed"])
    experts = [*model["packed"].layers]
    for packed in (False, True):
        experts += fq.GroupedLinear(2, 16, 16, packed=packed, recipe=recipe).layers
    blocks = Quantizer("fp8_1x128").fmt
    assert len(experts) == 6 and {e.plan.input.rowwise.fmt for e in experts} == {blocks}
    assert model["fc"].plan.input.rowwise.fmt != blocks
    fq.set_recipe(model, recipes.mxfp8())
    fq.set_recipe(model, recipe)
    assert model["packed"].layers[0].plan.input.rowwise.fmt == blocks
    listed = fq.GroupedLinear(2, 16, 16)
    with fq.autocast(recipe):
        assert (
            listed.layers[0]
            .plan_in(current_autocast(), listed.layers[0].weight.device)
            .input.rowwise.fmt
            == blocks
        )
