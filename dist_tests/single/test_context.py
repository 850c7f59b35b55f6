"""What changes between steps: autocast, random keys, optimizer steps, amax histories, checkpoints of all that."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, format_of
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import DelayedScaling
from fsdp_quant.tensor import torch_compat


@pytest.fixture(autouse=True)
def _own_step():
    """Each test starts at step 0 of seed 0, counted by optimizer steps, with empty counters."""
    with kept_step():
        restart()
        counters.reset()
        yield


def restart() -> None:
    STEP.seed, STEP.step, STEP.micro_batch, STEP.token_offset, STEP.counted_by_hand = 0, 0, 0, -1, False
    STEP.publish()


def rounds_inputs_and_gradients(role):
    return "mxfp8" if role.tensor_type == "weight" else Quantizer("mxfp8", rounding="stochastic")


def delayed_with(role, *, use="max", length=4, margin=0):
    return Quantizer("fp8_tensor", scaling=DelayedScaling(length, margin, use))


RECIPES = {
    "identity": recipes.identity(), "fp8_current": recipes.fp8_current(), "fp8_block": recipes.fp8_block(),
    "mxfp8": recipes.mxfp8(), "nvfp4": recipes.nvfp4(), "mxfp8_nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "high_precision": recipes.mxfp8(backward_override="high_precision"),
    "dequantized": recipes.nvfp4(backward_override="dequantized"),
}
X, DY = values(24, 40, dtype=torch.float32), values(24, 56, seed=1, dtype=torch.float32)


def net(recipe: fq.Recipe) -> nn.ModuleDict:
    torch.manual_seed(0)
    return fq.convert(nn.ModuleDict({"fc": nn.Linear(40, 56)}), recipe)


def run(m: nn.Module, x: Tensor = X, dy: Tensor = DY) -> dict[str, Tensor]:
    m.zero_grad()
    x = x.clone().requires_grad_()
    y = m["fc"](x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad.clone() for n, p in m.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bytes(got[name], tensor, f"{what} {name}")


def history(m: nn.Module, slot: str, direction=ROWWISE) -> dict[str, Tensor]:
    """Amaxes, the open slot first, and the encode factor of one history."""
    return fq.state_dict(m)["histories"][f"fc.{slot}.{direction.value}"]


# autocast #


@pytest.mark.parametrize("inside", RECIPES)
@pytest.mark.parametrize("own", ["identity", "mxfp8", "nvfp4"])
def test_autocast_equals_a_module_of_that_recipe(own: str, inside: str):
    """Otherwise a temporary recipe is half applied: the forward's, the weight's or the backward's formats are the
    module's own. The backward may run outside."""
    m = net(RECIPES[own])
    mine = run(m)
    with fq.autocast(RECIPES[inside]):
        got = run(m)
    assert_same(got, run(net(RECIPES[inside])), "inside")
    m.zero_grad()
    x = X.clone().requires_grad_()
    with fq.autocast(RECIPES[inside]):
        y = m["fc"](x)
    y.backward(DY)
    assert_same_bytes(x.grad, got["dx"], "backward outside")
    assert_same_bytes(m["fc"].weight.grad, got["fc.weight"], "backward outside")
    assert_same(run(m), mine, "afterwards")


def test_disabled_autocast_multiplies_in_high_precision():
    """Otherwise `enabled=False` leaves a quantized product inside."""
    m = net(recipes.nvfp4())
    torch.manual_seed(0)
    plain = nn.ModuleDict({"fc": nn.Linear(40, 56)})
    with fq.autocast(enabled=False):
        assert_same(run(m), run(plain))
    assert counters.of("quantize") == {}
    with fq.autocast(recipes.mxfp8(), enabled=False):
        assert_same(run(m), run(plain))


def test_nested_autocast_follows_the_innermost():
    """Otherwise leaving an inner context does not restore the outer one, also when it raises."""
    m = net(recipes.mxfp8())
    want = {name: run(net(r)) for name, r in RECIPES.items()}
    with fq.autocast(recipes.fp8_block()):
        assert_same(run(m), want["fp8_block"], "outer")
        with fq.autocast(enabled=False):
            assert_same(run(m), want["identity"], "inner")
            with fq.autocast(recipes.fp8_current()):
                assert_same(run(m), want["fp8_current"], "innermost")
            assert_same(run(m), want["identity"], "inner again")
        with pytest.raises(KeyError), fq.autocast(recipes.fp8_current()):
            raise KeyError
        assert_same(run(m), want["fp8_block"], "outer again")
    assert_same(run(m), want["mxfp8"], "own")


def test_autocast_follows_the_weight():
    """Otherwise an overriding format multiplies codes of a weight that has changed since."""
    m = net(recipes.mxfp8())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    with fq.autocast(recipes.fp8_block()):
        run(m)
        optimizer.step()
        fresh = net(recipes.fp8_block())
        fresh.load_state_dict(m.state_dict())
        assert_same(run(m), run(fresh), "after a step")
        y = m["fc"](X)
    with torch.no_grad():
        m["fc"].weight.mul_(2.0)
    with pytest.raises(fq.StaleWeightError, match="fc.weight was modified"):
        y.backward(DY)


def test_autocast_keeps_the_histories_of_recipes_apart():
    """Otherwise a delayed scale made for e5m2 (maximum 57344) encodes e4m3 (448) and every gradient saturates.

    e4m3 rounds within 2^-4 of every element; gradients that saturate are off by their whole size.
    """
    m = net(recipes.fp8_delayed())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    with fq.autocast(recipes.fp8_delayed(grad_element="e4m3")):
        got = run(m)["dx"]
    want = DY @ m.state_dict()["fc.weight"]
    assert (got - want).norm() < 0.1 * want.norm()


def test_autocast_refuses_what_it_cannot_honour():
    """Otherwise the layers that a recipe keeps in high precision are quantized: one module does not know the last ones."""
    m = net(recipes.mxfp8())
    with pytest.raises(ValueError, match="tail"), fq.autocast(recipes.nvfp4(tail=0.25)):
        m["fc"](X)


# Steps #


def test_optimizer_steps_advance_the_step_until_it_is_counted_by_hand():
    """Otherwise stochastic rounding repeats its bits, or a trainer that counts steps counts each twice."""
    m = net(recipes.nvfp4())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    seen = [STEP.on(torch.device("cpu"))]
    for want in (1, 2):
        run(m)
        optimizer.step()
        assert STEP.step == want
        assert seen[0][1] == want
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert STEP.step == 2  # that optimizer has nothing to do with quantized layers
    fq.begin_step(micro_batch=3)
    assert (STEP.step, STEP.micro_batch) == (2, 3)
    optimizer.step()
    assert STEP.step == 3
    fq.begin_step(10)
    optimizer.step()
    assert (STEP.step, STEP.micro_batch) == (10, 0)
    fq.begin_step(seed=7)
    assert seen[0].tolist() == [7, 10, 0, -1, 0]
    assert STEP.on(torch.device("cpu")) is seen[0]


@pytest.mark.parametrize("trains", ["adapter", "bias"])
def test_steps_of_a_frozen_quantized_base_advance(trains: str):
    """Otherwise fine-tuning over a frozen base rounds its gradients with one draw forever, a bias, and its delayed
    scales never leave the first use."""
    m = net(recipes.fp8_delayed(length=4))
    m["fc"].weight.requires_grad_(False)
    adapter = nn.Linear(56, 4)
    optimizer = torch.optim.SGD(adapter.parameters() if trains == "adapter" else [m["fc"].bias], lr=0.1)
    for step in range(1, 4):
        adapter(m["fc"](X.clone().requires_grad_())).sum().backward()
        optimizer.step()
        assert STEP.step == step
    for slot in ("input", "weight", "grad_output"):
        assert history(m, slot)["enc"] > 0, slot
        assert history(m, slot)["amaxes"][0] == 0, slot


def test_token_offsets_nest_and_restore():
    """Otherwise rows are placed wrongly after a micro-batch, or after an exception in one."""
    device = torch.device("cpu")
    with fq.token_offset(64):
        assert STEP.on(device)[3] == 64
        with fq.token_offset(128):
            assert STEP.on(device)[3] == 128
        assert STEP.on(device)[3] == 64
    with pytest.raises(KeyError), fq.token_offset(64):
        raise KeyError
    assert STEP.on(device)[3] == -1


@pytest.mark.parametrize("change", [{"step": 1}, {"seed": 1}, {"micro_batch": 1}])
def test_begin_step_changes_random_bits_of_inputs_and_gradients(change: dict):
    """Otherwise one of the fields is not part of the random key."""
    m = net(fq.CustomRecipe(rounds_inputs_and_gradients))
    fq.begin_step(0, seed=0)
    first = run(m)
    fq.begin_step(**({"step": 0} | change))
    other = run(m)
    for name in ("y", "dx", "fc.weight"):
        assert not torch.equal(first[name], other[name]), name
    fq.begin_step(0, seed=0)
    assert_same(run(m), first, "the first step again")


def test_recipes_without_stochastic_rounding_ignore_the_step():
    """Otherwise a deterministic recipe depends on a counter."""
    m = net(recipes.mxfp8())
    first = run(m)
    fq.begin_step(5, 2, 9)
    with fq.token_offset(100):
        assert_same(run(m), first)


# Histories of delayed scaling #


@pytest.mark.parametrize("use, margin", [("max", 0), ("newest", 0), ("max", 2)])
def test_histories_follow_their_definition(use: str, margin: int):
    """Otherwise scales are not max / amax(history) / 2^margin of earlier steps.

    Three steps of three micro-batches; the encode factor of a step is that of the amaxes up to the step before.
    """
    m = net(fq.Recipe("delayed", delayed_with, (("length", 2), ("margin", margin), ("use", use))))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    amaxes = {"input": [], "grad_output": [], "weight": []}
    for step in range(4):
        for slot, seen in amaxes.items():
            if step:
                # length=2: the open slot and the last step.
                newest = seen[-1] if use == "newest" else max(seen[-2:])
                want = torch.tensor(448.0) / torch.tensor(newest) / 2**margin
                assert history(m, slot)["enc"].item() == want.item(), (slot, step)
        batches = [values(24, 40, seed=10 * step + i, dtype=torch.float32) * (3 - step) for i in range(3)]
        gradients = [values(24, 56, seed=10 * step + i, dtype=torch.float32) * (step + 1) for i in range(3)]
        for x, dy in zip(batches, gradients):
            run(m, x, dy)
        amaxes["input"].append(max(float(x.abs().max()) for x in batches))
        amaxes["grad_output"].append(max(float(dy.abs().max()) for dy in gradients))
        amaxes["weight"].append(float(m.state_dict()["fc.weight"].bfloat16().abs().max()))
        enc = {slot: history(m, slot)["enc"].clone() for slot in amaxes}
        optimizer.step()
        if step == 0:
            assert all(e == 0 for e in enc.values())
        with torch.no_grad():
            m["fc"].weight.mul_(0.9)


def test_a_step_rolls_a_history_once():
    """Otherwise a slot is lost or doubled: histories end up shorter than they say."""
    m = net(recipes.fp8_delayed(length=8))
    optimizer = torch.optim.AdamW(m.parameters())
    for step in range(3):
        run(m)
        run(m)
        optimizer.step()
    for slot in ("input", "weight", "grad_output"):
        assert history(m, slot)["amaxes"].count_nonzero() == 3, slot
        assert (history(m, slot)["amaxes"][1:4] > 0).all(), slot
    assert history(m, "input")["amaxes"][1:4].unique().numel() == 1
    bias_only = torch.optim.SGD([m["fc"].bias], lr=0.1)
    bias_only.step()
    assert history(m, "input")["amaxes"].count_nonzero() == 3


def test_delayed_scales_encode_the_next_step():
    """Otherwise the history is kept but not used: values beyond the last step's amax must saturate."""
    m = net(recipes.fp8_delayed())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    got = run(m, X * 4, DY)["y"]
    enc_x, enc_w = (history(m, slot)["enc"] for slot in ("input", "weight"))
    x = (X * 4 * enc_x).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / enc_x)
    master = m.state_dict()["fc.weight"].bfloat16().float()
    w = (master * enc_w).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / enc_w)
    assert x.abs().max() < 0.3 * (X * 4).abs().max()
    assert_same_bytes(got, x @ w.t() + m["fc"].bias.detach(), "saturated output")


def test_non_finite_amaxes_are_never_recorded():
    """Otherwise one overflow makes every later scale zero or NaN."""
    m = net(recipes.fp8_delayed(length=4))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    want = {slot: history(m, slot)["enc"].clone() for slot in ("input", "grad_output")}
    for bad in (float("inf"), float("nan")):
        x, dy = X.clone(), DY.clone()
        x[3, 4], dy[5, 6] = bad, bad
        out = run(m, x, dy)
        assert not out["y"].isfinite().all()
        m.zero_grad()
        optimizer.step()
    for slot, enc in want.items():
        assert history(m, slot)["enc"].isfinite()
        assert_same_bytes(history(m, slot)["enc"], enc, slot)


def test_each_side_of_a_hybrid_keeps_its_own_history():
    """Otherwise e4m3 rows and e5m2 columns take each other's scale."""
    m = net(fq.CustomRecipe(delayed_sides))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    run(m)
    optimizer.step()
    for slot, x in (("input", X), ("grad_output", DY), ("weight", m.state_dict()["fc.weight"].bfloat16().float())):
        for direction, limit in ((ROWWISE, 448.0), (COLUMNWISE, 57344.0)):
            want = torch.tensor(limit) / x.abs().max()
            assert_same_bytes(history(m, slot, direction)["enc"][0], want, f"{slot} {direction}")
    product = X @ m.state_dict()["fc.weight"].t()
    assert (run(m)["y"] - m["fc"].bias - product).norm() < 0.1 * product.norm()


def delayed_sides(role):
    return HybridQuantizer(
        Quantizer("fp8_tensor", scaling=DelayedScaling(8)),
        Quantizer(format_of("fp8_tensor", element="e5m2"), scaling=DelayedScaling(8)),
    )


def test_a_side_that_is_not_needed_does_not_fill_the_other_sides_history():
    """Otherwise the first layer, which makes columns of its gradient only, records them as rows."""
    m = net(fq.CustomRecipe(delayed_sides))
    m["fc"](X).backward(DY)  # no gradient for X: no dgrad, no rows
    assert history(m, "grad_output", COLUMNWISE)["amaxes"][0] == DY.abs().max()
    assert history(m, "grad_output", ROWWISE)["amaxes"][0] == 0


@pytest.mark.parametrize("use", ["max", "newest"])
def test_a_skipped_step_leaves_no_trace(use: str):
    """Otherwise a batch that overflowed sets scales: the run must equal one that never saw it."""
    def train(bad_at: int | None):
        restart()
        m = net(fq.Recipe("delayed", delayed_with, (("use", use),)))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        seen = []
        for step in range(5):
            if step == bad_at:
                run(m, X * 1e4, DY * 1e4)
                m.zero_grad()
                fq.skip_step()
            x, dy = (values(24, n, seed=step, dtype=torch.float32) for n in (40, 56))
            seen.append(run(m, x, dy))
            optimizer.step()
        return seen, {k: h["amaxes"] for k, h in fq.state_dict(m)["histories"].items()}

    want, want_histories = train(None)
    for bad_at in (0, 1, 3):
        got, histories = train(bad_at)
        for step, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"bad batch before step {bad_at}, step {step}")
        for key, amaxes in want_histories.items():
            assert_same_bytes(histories[key], amaxes, f"history of {key}")


@pytest.mark.parametrize("make", [
    lambda p: fq.optim.FusedAdam(p, lr=0.05), lambda p: fq.optim.FusedAdam(p, lr=0.05, capturable=True),
    lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
], ids=["fused_adam", "capturable", "torch"])
def test_a_step_that_the_device_skips_leaves_no_trace(make):
    """Otherwise an overflow that a GradScaler leaves to the optimizer rolls histories, or moves random bits and schedules."""
    later = recipes.fp8_delayed(length=3)

    def train(bad_at: int | None):
        restart()
        m = fq.convert(
            nn.ModuleDict({"fc": nn.Linear(40, 56), "nv": nn.Linear(40, 56)}),
            recipes.per_layer(later, {"nv": recipes.nvfp4()}),
        )
        with torch.no_grad():
            for p in m.parameters():
                p.copy_(values(*p.shape, dtype=torch.float32) / 8)
        fq.set_recipe(m, recipes.schedule(
            recipes.per_layer(later, {"nv": recipes.nvfp4()}), (3, None, recipes.per_layer(later, {"nv": recipes.mxfp8()}))))
        optimizer, seen = make(m.parameters()), []
        for step in range(5):
            for bad in (True, False) if step == bad_at else (False,):
                scale = 1e4 if bad else 1.0
                x = values(24, 40, seed=step, dtype=torch.float32) * scale
                y = torch.stack([m["fc"](x), m["nv"](x)])
                y.backward(values(*y.shape, seed=9, dtype=torch.float32) * scale)
                gradients = {n: p.grad.clone() for n, p in m.named_parameters()}
                optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(bad)), torch.ones(())
                optimizer.step()
                optimizer.zero_grad()
            seen.append({"y": y.detach(), "step": STEP.on(torch.device("cpu")).clone(), **gradients})
        assert STEP.step == 5
        return seen, {f"{k}.{n}": t for k, h in fq.state_dict(m)["histories"].items() for n, t in h.items()}

    want, want_histories = train(None)
    for bad_at in (0, 3):
        got, histories = train(bad_at)
        for step, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"bad batch before step {bad_at}, step {step}")
        assert_same(histories, want_histories, f"bad batch before step {bad_at}, histories")


# What a checkpoint holds besides parameters #


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_training_resumes_bit_for_bit(name: str):
    """Otherwise a resumed run drifts from an uninterrupted one: step, seed or histories are not restored."""
    recipe = recipes.by_name(name)

    def train(m, optimizer, steps):
        losses = []
        for step in steps:
            loss = (m["fc"](values(24, 40, seed=step, dtype=torch.float32)) - DY).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fq.begin_step(seed=3)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    want = train(m, optimizer, range(6))
    restart()
    fq.begin_step(seed=3)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    got = train(m, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": m.state_dict(), "optimizer": optimizer.state_dict(), "quant": fq.state_dict(m)}, file)
    train(m, optimizer, range(50, 52))  # what happens after the save is not in the file
    restart()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    m = net(recipe)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    m.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    fq.load_state_dict(m, saved["quant"])
    got += train(m, optimizer, range(3, 6))
    assert got == want


def test_a_state_of_another_recipe_is_refused():
    """Otherwise histories of one format scale another."""
    m, other = net(recipes.fp8_delayed()), net(recipes.fp8_delayed(grad_element="e4m3"))
    run(m)
    state = fq.state_dict(m)
    with pytest.raises(ValueError, match="allow_recipe_change=True"):
        fq.load_state_dict(other, state)
    assert all(h["enc"] == 0 for h in fq.state_dict(other)["histories"].values())
    fq.load_state_dict(other, state, allow_recipe_change=True)
    run(other)


def test_sync_makes_codes_follow_changes_by_hand():
    """Otherwise the call that a user is told to make does nothing, or breaks a model that no one shards."""
    m = net(recipes.nvfp4())
    run(m)
    with torch.no_grad():
        m["fc"].weight.mul_(3.0)
    fq.sync(m)
    fresh = net(recipes.nvfp4())
    fresh.load_state_dict(m.state_dict())
    assert_same(run(m), run(fresh))


# CUDA graphs #

@pytest.mark.parametrize("name", ["fp8_current", "mxfp8_nvfp4", "nvfp4"])
def test_codes_do_not_outlive_what_replays_write(name: str, monkeypatch):
    """If false, a captured step holds no quantization of its weights, or an evaluation after replays reads old codes."""
    m = net(RECIPES[name])
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    run(m)
    encoded = counters.total("weight encode")
    run(m)
    assert counters.total("weight encode") == encoded > 0
    for captured in (True, False):  # what a capture made is not there before a replay
        monkeypatch.setattr(torch_compat, "is_captured", lambda x, captured=captured: captured)
        encoded = counters.total("weight encode")
        run(m)
        assert counters.total("weight encode") > encoded
    monkeypatch.setattr(torch_compat, "is_captured", lambda x: True)
    optimizer.step()
    monkeypatch.undo()
    for factor in (1.0, 0.5):
        m["fc"].weight.inner.numpy()[:] *= factor  # as a replay writes: no version tells
        fresh = net(RECIPES[name])
        fresh.load_state_dict(m.state_dict())
        STEP.step = 0
        STEP.publish()
        assert_same_bytes(m["fc"](X).detach(), fresh["fc"](X).detach(), f"after a replay, {factor}")


def test_replays_count_steps_on_the_device(monkeypatch):
    """If false, a replayed step repeats the random bits of the capture, or writes a step of the host at every replay."""
    m = net(recipes.nvfp4())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    run(m)
    on_device = STEP.on(X.device)
    monkeypatch.setattr(torch_compat, "is_captured", lambda x: True)
    optimizer.step()
    assert (STEP.step, on_device[1].item()) == (0, 1)
    for write in (lambda: fq.begin_step(3), lambda: fq.token_offset(8).__enter__()):
        with pytest.raises(ValueError, match="would repeat them at every replay"):
            write()
    assert (STEP.step, STEP.token_offset, STEP.counted_by_hand) == (0, -1, False)
    monkeypatch.undo()
    fq.begin_step(5)
    assert on_device[1] == 5
