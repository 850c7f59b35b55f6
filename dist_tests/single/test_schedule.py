# SPDX-License-Identifier: Apache-2.0
"""Recipes by layer and by step: who gets which, when they switch, and what a checkpoint holds of
it."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.recipe import default_override

MX, NV, BF16 = recipes.mxfp8(), recipes.nvfp4(), recipes.identity()


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, counted by training forwards."""
    with kept_step():
        STEP.seed, STEP.step, STEP.micro_batch, STEP.counted_by_hand = 0, 0, 0, False
        STEP.publish()
        yield


class Model(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self["layers"]:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x


def model(layers: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(
        {
            "layers": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16)})
                for _ in range(layers)
            ),
        }
    )


def named(m: nn.Module) -> dict[str, str]:
    return {
        n.removeprefix("layers."): s.recipe.name
        for n, s in m.named_modules()
        if isinstance(s, fq.Linear)
    }


def train(m: nn.Module, optimizer, steps: int, first: int = 0) -> list[torch.Tensor]:
    seen = []
    for step in range(first, first + steps):
        y = m(values(8, 16, seed=step, dtype=torch.float32))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return seen


# By layer #


def test_rules_by_name_first_and_last_decide_in_that_order():
    """If false, the layers that must stay in high precision are quantized."""
    rules = recipes.per_layer(
        MX, {"layers.2.up": recipes.fp8_row(), "down": NV}, first=(1, BF16), last=(2, BF16)
    )
    m = fq.convert(model(), rules)
    assert named(m) == {
        "0.up": "identity",
        "0.down": "nvfp4",
        "1.up": "mxfp8",
        "1.down": "nvfp4",
        "2.up": "fp8_row",
        "2.down": "nvfp4",
        "3.up": "identity",
        "3.down": "nvfp4",
    }
    fq.set_recipe(m, recipes.per_layer(recipes.mxfp8(tail=0.25), last=(1, NV)))
    assert list(named(m).values()) == ["mxfp8"] * 6 + ["identity", "nvfp4"]
    assert (
        list(named(fq.convert(model(), recipes.nvfp4(tail=0.15))).values())
        == ["nvfp4"] * 6 + ["identity"] * 2
    )


def test_rules_that_take_nothing_or_too_much_are_refused():
    """If false, a misspelled layer trains in the default recipe without a word; and half of the
    model is converted."""
    for rules, message in (
        (
            recipes.per_layer(MX, {"layers.9.*": NV}),
            r"'layers\.9\.\*' matches no layer; the model has layers\.0\.up",
        ),
        (
            recipes.per_layer(MX, first=(5, NV), last=(4, NV)),
            "covers 5 and 4 of 8 layers; they overlap",
        ),
    ):
        m = model()
        with pytest.raises(ValueError, match=message):
            fq.convert(m, rules)
        assert named(m) == {}
    for call, message in (
        (lambda: recipes.per_layer(MX, {"up": 4}), r"per_layer\('up'\) wants a recipe, got 4"),
        (lambda: recipes.per_layer(MX, first=(0, NV)), "an integer >= 1, got 0"),
        (
            lambda: recipes.per_layer(MX, {"up": recipes.nvfp4(tail=0.5)}),
            "tail belongs to the default",
        ),
        (lambda: fq.convert(model(), 8), "fq.convert wants a recipe, got 8; pass fq.recipes.mxfp8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with (
        pytest.raises(ValueError, match="fq.autocast wants Recipe, got per_layer"),
        fq.autocast(recipes.per_layer(MX)),
    ):
        pass


def answers_a_number_later(role):
    return 8


def answers_none(role):
    return None


def test_bad_answers_of_any_phase_name_module_and_slot_at_once():
    """If false, a run of weeks fails where its last phase begins."""
    for factory, message in (
        (answers_a_number_later, r"layers\.0\.up: input: answers_a_number_later gave 8"),
        (answers_none, "returned None for Role.*tensor_type='input', name='layers.0.up'"),
    ):
        m = model()
        with pytest.raises(ValueError, match=message):
            fq.convert(
                m, recipes.schedule(MX, (0.82, 1.0, fq.CustomRecipe(factory)), total_steps=100)
            )
        assert named(m) == {}


# By step #


def test_fractions_and_steps_say_when():
    """If false, a switch at 82 % is a step early or late."""
    s = recipes.schedule(NV, (0.82, 1.0, BF16), total_steps=100)
    assert [s.at(i) for i in (0, 81, 82, 99, 100, 5000)] == [NV, NV, BF16, BF16, BF16, BF16]
    # 246 = 0.82 * 300
    assert recipes.schedule(NV, (0.82, None, BF16), total_steps=300).at(245) == NV
    assert recipes.schedule(NV, (0.82, None, BF16), total_steps=300).at(246) == BF16
    s = recipes.schedule(MX, (10, 20, NV), (0, 3, BF16))
    assert [s.at(i).name for i in (0, 2, 3, 9, 10, 19, 20)] == [
        "identity",
        "identity",
        "mxfp8",
        "mxfp8",
        "nvfp4",
        "nvfp4",
        "mxfp8",
    ]
    assert pickle.loads(pickle.dumps(s)) == s
    assert s.fingerprint() != recipes.schedule(MX, (10, 21, NV), (0, 3, BF16)).fingerprint()


@pytest.mark.parametrize(
    "switches, total, message",
    [
        (((10, 20, NV), (19, 30, BF16)), None, "overlaps identity.* from step 19"),
        (((10, None, NV), (30, 40, BF16)), None, "from step 10 to the end overlaps"),
        (((20, 20, NV),), None, "runs in no step"),
        (((0.5, 1.0, NV),), None, "fraction of the steps; give total_steps"),
        (((1.5, None, NV),), 100, "fractions from 0.0 to 1.0"),
        (((1.0, None, NV),), 100, "needs a first step"),
        (((3, 4, 8),), None, "schedule wants a recipe, got 8"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(switches, total, message: str):
    """If false, a step has two recipes, or a phase never runs."""
    with pytest.raises(ValueError, match=message):
        recipes.schedule(MX, *switches, total_steps=total)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_schedule_equals_set_recipe_at_its_steps(by_hand: bool):
    """If false, a schedule switches in another step than it says, or multiplies codes of the phase
    before."""
    base = BF16 if by_hand else MX  # which counts no steps on its own
    phases = {0: base, 2: NV, 4: recipes.fp8_delayed(length=3)}

    def run(scheduled: bool) -> list[torch.Tensor]:
        STEP.step, STEP.counted_by_hand = 0, False
        STEP.publish()
        m = fq.convert(
            model(), recipes.schedule(base, (2, 4, NV), (4, None, phases[4])) if scheduled else base
        )
        optimizer, seen = torch.optim.AdamW(m.parameters(), lr=1e-2), []
        for step in range(6):
            if by_hand:
                fq.begin_step(step)
            if not scheduled and step in phases:
                fq.set_recipe(m, phases[step])
            seen += train(m, optimizer, 1, step)
        return seen

    for step, (got, want) in enumerate(zip(run(True), run(False))):
        assert_same_bytes(got, want, f"step {step}")


@pytest.mark.parametrize("first, then", [(BF16, NV), (NV, BF16)])
def test_a_scheduled_model_that_runs_by_pieces_says_what_it_needs(first, then):
    """If false, its recipe never switches, in silence: an optimizer's step switches it, and where
    there is none a layer cannot, as it runs already."""
    m = fq.convert(model(), recipes.schedule(first, (1, None, then)))
    x = values(8, 16, dtype=torch.float32)
    m["layers"][0]["up"](x).sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert set(named(m).values()) == {then.name}
    fq.set_recipe(m, recipes.schedule(NV, (2, None, BF16)))
    m["layers"][0]["up"](x)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"layers\.0\.up: its model follows a schedule and runs by pieces.*fq.begin_step",
        ):
            m["layers"][0]["up"](x)
    with torch.no_grad():
        m["layers"][0]["up"](x)
    for step, want in ((1, "nvfp4"), (2, "identity")):
        fq.begin_step(step)
        m["layers"][0]["up"](x)
        assert set(named(m).values()) == {want}


def test_setting_a_recipe_ends_a_schedule():
    """If false, a recipe that was set by hand is undone at the next switch."""
    m = fq.convert(model(), recipes.schedule(MX, (1, None, NV)))
    fq.set_recipe(m, BF16)
    fq.begin_step(1)
    assert set(named(m).values()) == {"identity"}
    fq.set_recipe(m, recipes.schedule(MX, (1, None, NV)))
    assert set(named(m).values()) == {"nvfp4"}
    with pytest.raises(
        ValueError, match=r"layers\.0\.up.* were converted before, and a schedule is of all layers"
    ):
        m["extra"] = nn.Linear(4, 4)
        fq.convert(m, recipes.schedule(MX, (1, None, NV)))


def test_a_schedule_resumes_in_its_phase():
    """If false, training 6 steps is not training 3, loading in a fresh model, and training 3."""

    def fresh():
        m = fq.convert(
            model(), recipes.schedule(MX, (2, 5, recipes.fp8_delayed(length=4)), (5, None, NV))
        )
        return m, torch.optim.AdamW(m.parameters(), lr=1e-2)

    m, optimizer = fresh()
    train(m, optimizer, 3)
    saved = pickle.dumps((m.state_dict(), optimizer.state_dict(), fq.state_dict(m)))
    want = train(m, optimizer, 3, 3)
    STEP.step = 0
    again, optimizer = fresh()
    weights, moments, state = pickle.loads(saved)
    again.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    fq.load_state_dict(again, state)
    assert set(named(again).values()) == {"fp8_delayed"}
    for step, (a, b) in enumerate(zip(train(again, optimizer, 3, 3), want)):
        assert_same_bytes(a, b, f"step {3 + step}")
    assert set(named(again).values()) == {"nvfp4"}


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_state_that_is_saved_before_a_switch_resumes(by_hand: bool):
    """If false, a run that ends where the next step has another recipe cannot go on, or is given
    histories and codes of the wrong one."""

    def fresh():
        STEP.step, STEP.counted_by_hand = 0, False
        m = fq.convert(
            model(), recipes.schedule(NV, (2, 3, recipes.fp8_delayed(length=4)), (3, None, NV))
        )
        return m, torch.optim.SGD(m.parameters(), lr=1e-2)

    def run(m, optimizer, steps) -> list[torch.Tensor]:
        seen = []
        for step in steps:
            if by_hand:
                fq.begin_step(step)
            seen += train(m, optimizer, 1, step)
        return seen

    for saved in range(1, 5):
        m, optimizer = fresh()
        run(m, optimizer, range(saved))
        kept = pickle.dumps((m.state_dict(), fq.state_dict(m)))
        want = run(m, optimizer, range(saved, 5))
        again, optimizer = fresh()
        weights, state = pickle.loads(kept)
        again.load_state_dict(weights)
        fq.load_state_dict(again, state)
        fq.load_state_dict(again, fq.state_dict(again))
        for i, (a, b) in enumerate(zip(run(again, optimizer, range(saved, 5)), want)):
            assert_same_bytes(a, b, f"saved after {saved} steps, value {i}")


def test_a_state_of_another_schedule_is_refused():
    """If false, a resumed run switches in other steps than the run that was saved."""
    m = fq.convert(model(), recipes.schedule(MX, (8, None, NV)))
    state = fq.state_dict(m)
    for other in (recipes.schedule(MX, (9, None, NV)), MX):
        m = fq.convert(model(), other)
        with pytest.raises(ValueError, match="follows the schedule .* allow_recipe_change=True"):
            fq.load_state_dict(m, state)
        fq.load_state_dict(m, state, allow_recipe_change=True)
    outer = nn.Sequential(fq.convert(model(), recipes.schedule(MX, (8, None, NV))))
    assert fq.state_dict(outer)["schedule"] == state["schedule"]
    m = fq.convert(model(), recipes.schedule(NV, (8, None, MX)))
    with pytest.raises(ValueError, match="the saved state is of recipe mxfp8"):
        fq.load_state_dict(m, state)


# The environment's backward mode #


@pytest.fixture
def environment(monkeypatch):
    """Set the variable as if the process had started with it."""

    def set_to(value: str) -> None:
        monkeypatch.setenv("FSDP_QUANT_BACKWARD_OVERRIDE", value)
        default_override.cache_clear()

    yield set_to
    default_override.cache_clear()


def test_the_environment_gives_recipes_their_backward_mode(environment):
    """If false, the variable is ignored, overrules a recipe that says otherwise, or goes
    unprinted."""
    environment("dequantized")
    assert recipes.mxfp8() == recipes.mxfp8(backward_override="dequantized")
    assert recipes.mxfp8(backward_override=None).backward_override is None
    assert "backward_override='dequantized'" in repr(recipes.mxfp8())
    m = fq.convert(model(1), recipes.mxfp8())
    assert all(s.plan.saves == "rowwise" for s in m.modules() if isinstance(s, fq.Linear))
    note = "backward_override=dequantized: 2 modules (FSDP_QUANT_BACKWARD_OVERRIDE=dequantized)"
    assert str(fq.plan(m)).splitlines()[-1] == note
    os.environ["FSDP_QUANT_BACKWARD_OVERRIDE"] = "high_precision"
    assert recipes.mxfp8().backward_override == "dequantized", "read once"
    environment("exact")
    with pytest.raises(
        ValueError, match="='exact' in the environment; wanted 'high_precision' or 'dequantized'"
    ):
        recipes.mxfp8()
