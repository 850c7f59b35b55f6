# SPDX-License-Identifier: Apache-2.0
"""`fq.inspect`: numbers that an independent implementation agrees with, and a run that does not
notice."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.golden import oracle
from dist_tests.laws import assert_same_bytes, kept_step, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.inspection import numbers, recorder
from fsdp_quant.models.steps import converted_modules, histories_by_side
from fsdp_quant.ops import dispatch
from fsdp_quant.quantizer import HybridQuantizer
from fsdp_quant.storage import Storage, to_storage
from fsdp_quant.tensor import torch_compat

FLOOR = recipes.mxfp8(scale_rounding="floor")


@pytest.fixture(autouse=True)
def _own_step() -> Iterator[None]:
    with kept_step():
        STEP.counted_by_hand = False
        yield


# Numbers #


def expected(x: np.ndarray, spec: oracle.Spec, columnwise: bool) -> dict[str, float]:
    """The quantities of a direction, from the oracle's codes."""
    made = oracle.quantize(x, spec, columnwise)
    v = (x.T if columnwise else x).astype(np.float64)
    v = oracle.rotate(v) if spec.rotated else v
    d, stored = (t.T if columnwise else t for t in (made.decoded.astype(np.float64), made.scale))
    if spec.scale == "e4m3":
        scale = oracle.grid("e4m3")[stored] * oracle.tensor_scale(made.tensor_amax, spec)
    else:
        scale = (
            np.vectorize(oracle.power_of_two)(stored)
            if spec.scale == "e8m0"
            else stored.astype(np.float64)
        )
    for axis, block in enumerate(spec.block):
        scale = np.repeat(scale, block or v.shape[axis], axis)
    scale, points = scale[: v.shape[0], : v.shape[1]], oracle.grid(spec.element)
    some = v != 0
    return {
        "underflow": (some & (d == 0)).sum() / some.sum(),
        "saturation": (
            some & (np.abs(v) >= scale * (points[-1] + (points[-1] - points[-2]) / 2))
        ).mean(),
        "sqnr_db": 10 * math.log10((v**2).sum() / ((d - v) ** 2).sum()),
        "scale_min": scale[some].min(),
        "scale_max": scale[some].max(),
    }


FORMATS = (
    "fp8_tensor",
    "fp8_row",
    "fp8_1x128",
    "fp8_128x128",
    "mxfp8",
    "mxfp8_floor",
    "mxfp6_floor",
    "nvfp4",
    "nvfp4_16x16",
    "nvfp4_rht",
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["gauss", "outliers", "heavy"])
def test_numbers_are_those_of_an_independent_implementation(name: str, kind: str):
    """If false, a report blames a layer that is well, or clears one that is not."""
    options = {"scale_rounding": "floor"} if name.endswith("_floor") else {}
    fmt = fq.format_of(name.removesuffix("_floor").removesuffix("_rht"), **options)
    quantizer = fq.Quantizer(fmt, rotation=name.endswith("_rht"))
    x = values(64, 96, seed=3, kind=kind)
    x[:, 7], x[5] = 0.0, 0.0
    hybrid = HybridQuantizer(quantizer, quantizer)
    (got,) = numbers.on_host([numbers.measure(x, hybrid.storages(x)[0], hybrid)])
    found = numbers.quantities("x", *got)
    assert found["x/amax"] == x.abs().max().item()
    assert found["x/norm"] == pytest.approx(x.double().norm().item(), rel=1e-12)
    exact = {"rel": 1e-6, "abs": 1e-12}
    # against x, which rotation rounds once more
    bounds = {"sqnr_db": {"abs": 0.1}} if name.endswith("_rht") else {}
    for direction in (ROWWISE, COLUMNWISE):
        want = expected(x.double().numpy(), oracle.SPECS[name], direction is COLUMNWISE)
        for key, value in want.items():
            assert found[f"x.{direction.value}/{key}"] == pytest.approx(
                value, **bounds.get(key, exact)
            ), (direction, key)
    assert ("floor" not in name) == (found["x.rowwise/saturation"] == 0)


def measured(x: Tensor, name: str, row0: int = 0) -> dict[str, float]:
    """Quantities of x, quantized as a shard from row `row0`."""
    q = fq.Quantizer(name.removesuffix("_rht"), rotation=name.endswith("_rht"))
    encodings = [q.encoding(d) for d in (ROWWISE, COLUMNWISE)]
    made = [
        Storage.of(dispatch.encode(x, [e], None, row0)[0], e, x.shape, x.dtype, row0)
        for e in encodings
    ]
    of = numbers.measure(x, {s.direction: s for s in made}, HybridQuantizer(q, q))
    return numbers.quantities("x", *numbers.on_host([of])[0])


@pytest.mark.parametrize(
    "name, row0",
    [*itertools.product(("mxfp8", "nvfp4", "fp8_128x128", "fp8_1x128"), (0, 24)), ("nvfp4_rht", 0)],
)
def test_sampled_rows_keep_their_codes_and_scales(
    monkeypatch: pytest.MonkeyPatch, name: str, row0: int
):
    """If false, rows of a large tensor are compared with the scales of others."""
    group = 16 if "nvfp4" in name else fq.format_of(name).row_alignment(COLUMNWISE)
    # Groups of rows on the global grid are equal, so any of them have the shares of all.
    x = values(group, 64, seed=1, kind="outliers").repeat(640 // group, 1)
    whole = measured(x, name)
    monkeypatch.setattr(numbers, "MOST_ELEMENTS", 256 * 64)
    assert measured(x.roll(-row0, 0), name, row0) == pytest.approx(whole, rel=1e-12)


class Outputs(TorchDispatchMode):
    """Counts operators that are no views, and keeps the size of the largest result."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, Tensor) and out.numel():
            self.count, self.largest = self.count + 1, max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128", "fp8_tensor"])
def test_a_measurement_launches_few_operators_on_few_values(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    """If false, one sampled step in 100 takes more than 2 % of a run."""
    x, q = values(1024, 64, seed=1), fq.Quantizer(name)
    hybrid = HybridQuantizer(q, q)
    storages = hybrid.storages(x)[0]
    monkeypatch.setattr(numbers, "MOST_ELEMENTS", 256 * 64)
    # Kernels decode where training runs; here the definition would, in many operators.
    decoded = torch.randn(256, 64)
    monkeypatch.setattr(Storage, "decode", lambda self, dtype: decoded)
    monkeypatch.setattr(numbers, "_scale_per_element", lambda s, scales=torch.ones(256, 64): scales)
    numbers.measure(x, storages, hybrid)  # caches which rows
    with Outputs() as outputs:
        numbers.measure(x, storages, hybrid)
    directions = 1 if hybrid.shares_storage else 2
    assert outputs.largest <= 4 * directions * 256 * 64  # four masks, counted at once
    assert outputs.count <= 32  # both directions by the same operators


def test_what_means_nothing_is_left_out():
    """If false, an empty or broken tensor ends the run, or fills the log with numbers of
    nothing."""
    q = HybridQuantizer(fq.Quantizer("mxfp8"), fq.Quantizer("identity"))
    for x in (torch.zeros(32, 32), torch.zeros(0, 32), torch.full((32, 32), math.nan)):
        found = numbers.quantities(
            "x", *numbers.on_host([numbers.measure(x, q.storages(x)[0], q)])[0]
        )
        assert not any("sqnr" in key or "columnwise" in key for key in found)
    x = values(32, 32, seed=1)
    x[3, 3] = math.inf
    found = numbers.quantities("x", *numbers.on_host([numbers.measure(x, q.storages(x)[0], q)])[0])
    assert found["x/amax"] == math.inf


# A run does not notice #


class Net(nn.Module):
    """Every module that has converted layers; `recompute`: checkpoints it, non-reentrant or (None)
    reentrant."""

    def __init__(self, recipe, recompute: bool | None = False):
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.first = nn.Linear(32, 64)
        self.attend = nn.MultiheadAttention(64, 2, batch_first=True)
        self.mlp = fq.LayerNormMLP(64, 32, recipe=recipe, residual=True, name="mlp")
        self.norm = fq.LayerNormLinear(64, 64, recipe=recipe, name="norm")
        self.packed = fq.GroupedLinear(3, 64, 64, packed=True, recipe=recipe, name="packed")
        self.listed = fq.GroupedLinear(3, 64, 32, recipe=recipe, name="listed")
        fq.convert(self, recipe)

    def inner(self, x: Tensor) -> Tensor:
        x = self.norm(self.mlp(self.attend(x, x, x, need_weights=False)[0])).flatten(0, 1)
        sizes = [len(x) // 2, 0, len(x) - len(x) // 2]
        x = self.packed(x, sizes)
        return self.listed(x, torch.tensor(sizes).cumsum(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (
            self.inner(x)
            if self.recompute is False
            else checkpoint(self.inner, x, use_reentrant=self.recompute is None)
        )


def batches(count: int) -> list[Tensor]:
    return [values(4, 16, 32, seed=s, dtype=torch.float32) for s in range(count)]


def train(
    m: nn.Module,
    steps: int = 5,
    micro: int = 1,
    log: fq.inspection.recorder.Inspection | None = None,
) -> list[Tensor]:
    """Everything that a run leaves: losses, parameters, histories, generators."""
    optimizer, losses = torch.optim.AdamW(m.parameters(), lr=1e-2), []
    torch.manual_seed(5)
    for x in batches(steps):
        for part in x.chunk(micro):
            loss = m(part).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        if log is not None:
            log.scalars(loss=losses[-1].item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            m.eval()
            losses.append(m(x).float().mean())
            m.train()
    histories = [
        t
        for layer in converted_modules(m).values()
        for h in histories_by_side(layer).values()
        for t in (h.amaxes, h.encode_scale)
    ]
    return [*losses, *m.parameters(), *histories, torch.get_rng_state(), torch.rand(4)]


def hooks_of(m: nn.Module) -> list[list]:
    """Hooks on the calls of a model and of its modules."""
    return [list(module._forward_hooks.values()) for module in m.modules()]


RUNS = {
    "delayed": (recipes.fp8_delayed(length=3), False),
    "nvfp4": (recipes.nvfp4(), False),
    "bf16": ("bf16", False),
    "mxfp8/nvfp4": ("mxfp8/nvfp4", True),
    "dequantized": (recipes.mxfp8(backward_override="dequantized"), False),
    "reentrant": (recipes.fp8_delayed(length=3), None),
}


@pytest.mark.parametrize("name", laws.every_second(list(RUNS), 1))
def test_a_run_with_it_equals_one_without(name: str):
    """If false, looking at a run changes it: a generator, a history or a step is consumed."""
    recipe, recompute = RUNS[name]
    results, receipts = [], []
    for looks in (False, True):
        with kept_step():
            m = Net(recipe, recompute)
            hooks = hooks_of(m)
            fq.reset_receipt()
            if looks:
                with fq.inspect(m, every=2) as log:
                    results.append(train(m))
            else:
                results.append(train(m))
            receipts.append(fq.receipt())
    for i, (got, want) in enumerate(zip(*reversed(results), strict=True)):
        assert_same_bytes(got, want, f"{name} {i}")
    assert receipts[0] == receipts[1]
    assert [step for step, _ in log.records] == [0, 2, 4]
    assert hooks_of(m) == hooks and not m.first.weight._post_accumulate_grad_hooks
    names = {
        "first",
        "attend",
        "attend.out_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "norm.linear",
        "packed",
        "listed",
    }
    for slot in ("weight", "input", "grad_output"):
        seen = {key.split("/")[0] for key in log.latest[1] if key.split("/")[1] == slot}
        # torch's attention multiplies by both of its weights without a call of a layer for each.
        unseen = {
            "weight": set(),
            "input": {"attend.out_proj"},
            "grad_output": {"attend.out_proj", "attend"},
        }[slot]
        assert seen == names - unseen
    assert any(key.endswith("rowwise/sqnr_db") for key in log.latest[1]) == (name != "bf16")


def test_codes_are_those_that_the_step_multiplies(monkeypatch: pytest.MonkeyPatch):
    """If false, delayed scales or random bits of the numbers are others than those of training."""
    m, made = fq.convert(nn.Sequential(nn.Linear(32, 32)), recipes.nvfp4()), []

    def recorded(method: Callable) -> Callable:
        def record(self, x, *args, **kwargs):
            result = method(self, x, *args, **kwargs)
            made.append({d: to_storage(s).data.clone() for d, s in result[0].items()})
            return result

        return record

    # `storages`, which the numbers are of, calls it too
    monkeypatch.setattr(HybridQuantizer, "operands", recorded(HybridQuantizer.operands))
    with fq.inspect(m, every=1):
        m(values(32, 32, seed=0, dtype=torch.float32).requires_grad_()).square().sum().backward()
    x, x_again, dy_again, dy = made  # the hook on the output runs before the node
    assert_same_bytes(x_again[COLUMNWISE], x[COLUMNWISE], "x")
    for d in (ROWWISE, COLUMNWISE):
        assert_same_bytes(dy_again[d], dy[d], "dy")


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_unsampled_steps_launch_nothing(monkeypatch: pytest.MonkeyPatch):
    """If false, inspecting costs in every step, or waits for the device."""
    monkeypatch.setattr(torch_compat, "unobserved", torch.no_grad)  # so that `Counting` sees it

    def launched(m: nn.Module) -> int:
        with Counting() as counting:
            m(values(32, 32, seed=0, dtype=torch.float32)).square().sum().backward()
        return counting.count

    m = fq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
    alone = launched(m)
    with fq.inspect(m, every=3):
        first, second, third = (launched(m) for _ in range(3))
    # the second one brings the sums of the first to the host
    assert first > alone and second - alone <= 40 and third == alone


@pytest.mark.parametrize("recipe, most", [("mxfp8", 110), ("nvfp4", 290)])
def test_a_sampled_step_launches_a_bounded_number_of_operators_per_layer(
    recipe: str, most: int, monkeypatch: pytest.MonkeyPatch
):
    """If false, a sampled step waits for the host: kernels are smaller than their launches.

    Does not count how codes are made and decoded, which is one kernel on a GPU.
    """

    class Measuring(Outputs):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            count, out = self.count, super().__torch_dispatch__(func, types, args, kwargs)
            self.count = count if inside else self.count
            return out

    monkeypatch.setattr(torch_compat, "unobserved", torch.no_grad)  # so that `Outputs` sees it
    inside: list[str] = []

    def uncounted(method: Callable) -> Callable:
        def call(*args, **kwargs):
            inside.append(method.__name__)
            try:
                return method(*args, **kwargs)
            finally:
                inside.pop()

        return call

    for owner, name in (
        (HybridQuantizer, "storages"),
        (recorder, "encode_piece"),
        (Storage, "decode"),
    ):
        monkeypatch.setattr(owner, name, uncounted(getattr(owner, name)))

    def launched(every: int, layers: int) -> int:
        m = fq.convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), recipe)
        with fq.inspect(m, every=every) as log:
            m(values(32, 64, seed=0, dtype=torch.float32))  # step 0 is sampled
            log.flush()
            with Measuring() as outputs:
                m(values(32, 64, seed=0, dtype=torch.float32)).square().sum().backward()
                log.flush()
        return outputs.count

    per_layer = [launched(every, 3) - launched(every, 2) for every in (1, 1000)]
    assert 0 < per_layer[0] - per_layer[1] <= most


# Modules, steps and files #


def test_experts_of_one_module_are_one_layer():
    """If false, experts are measured across their borders, or one of them stands for all."""
    with kept_step():
        listed = fq.GroupedLinear(2, 32, 32, recipe=recipes.fp8_current(), name="g")
        with fq.inspect(nn.Sequential(listed), every=1) as log:
            log._before()
            x = torch.cat([values(16, 32, seed=1), 100 * values(32, 32, seed=2)]).float()
            listed(x, [16, 32]).sum().backward()
            log._after()
    numbers_of = log.latest[1]
    q = fq.Quantizer("fp8_tensor")
    parts = [
        oracle.quantize(p.double().numpy(), oracle.SPECS["fp8_tensor"], False).decoded
        for p in x.split([16, 32])
    ]
    noise = sum(((d - p.numpy()) ** 2).sum() for d, p in zip(parts, x.double().split([16, 32])))
    assert numbers_of["0/input.rowwise/sqnr_db"] == pytest.approx(
        10 * math.log10((x.double().numpy() ** 2).sum() / noise), rel=1e-6
    )
    scales = [q.quantize(p).rowwise.scale.item() for p in x.split([16, 32])]
    assert (numbers_of["0/input.rowwise/scale_min"], numbers_of["0/input.rowwise/scale_max"]) == (
        min(scales),
        max(scales),
    )
    grads = [e.weight.grad.double().norm().item() for e in listed.experts]
    assert numbers_of["0/weight/grad_norm"] == pytest.approx(math.hypot(*grads))


class Shared(nn.Module):
    """Two layers that read one tensor, and experts that read their sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.up = (nn.Linear(32, 32) for _ in range(3))
        self.experts = fq.GroupedLinear(2, 32, 32, recipe="mxfp8", name="experts")

    def forward(self, x: Tensor) -> Tensor:
        n = self.first(x)
        return self.experts(self.gate(n) + 2 * self.up(n), [4, 12])


def test_outputs_and_gradients_are_those_of_each_layer_alone():
    """If false, the dgrad of a layer is blamed for what others that read the same input add."""
    m = fq.convert(Shared(), "mxfp8")
    tensors: dict[str, Tensor] = {}
    for name, module in m.named_children():
        module.register_forward_hook(
            lambda _, args, y, name=name: tensors.update({f"{name}/output": y})
        )
    with kept_step(), fq.inspect(m, every=1) as log:
        m(values(16, 32, seed=0, dtype=torch.float32)).square().sum().backward()
    found = log.latest[1]
    for key, y in tensors.items():
        assert found[f"{key}/norm"] == pytest.approx(y.double().norm().item())
        assert found[f"{key}/amax"] == y.abs().max().item()
    for name in ("first", "gate", "up"):
        grad = getattr(m, name).weight.grad
        assert found[f"{name}/weight/grad_amax"] == grad.abs().max().item()
        assert found[f"{name}/weight/grad_norm"] == pytest.approx(grad.double().norm().item())
    assert "first/grad_input/norm" not in found  # x needs no gradient
    for name, factor in (("gate", 1), ("up", 2)):
        dy, w = factor * values(16, 32, seed=1, dtype=torch.float32), getattr(m, name).weight
        assert found[f"{name}/grad_output/norm"] == pytest.approx(
            factor * found["gate/grad_output/norm"]
        )
        layer = fq.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8")
        layer[0].weight.data.copy_(w)
        x = torch.zeros(16, 32, requires_grad=True)
        with fq.inspect(layer, every=1) as one:
            layer(x).backward(dy)
        assert one.latest[1]["0/grad_input/norm"] == pytest.approx(x.grad.double().norm().item())
    summed = m.experts, found["experts/grad_input/norm"]
    assert summed[1] == pytest.approx(found["gate/grad_output/norm"])


def test_gradients_are_those_of_what_the_experts_themselves_returned():
    """If false, under expert parallelism, whose hook sends the results back, gradients have the
    rows of other tokens or none."""
    with kept_step():
        m = nn.Sequential(fq.GroupedLinear(2, 32, 32, recipe="mxfp8", name="0"))
        m[0].register_forward_hook(lambda module, args, y: 2 * y[:3])
        with fq.inspect(m, every=1) as log, warnings.catch_warnings():
            warnings.filterwarnings("error", message="inspect could not measure")
            log._before()
            m[0](values(16, 32, seed=0, dtype=torch.float32), [4, 12]).sum().backward()
            log._after()
    assert log.latest[1]["0/grad_output/norm"] == pytest.approx(2 * math.sqrt(3 * 32))


@pytest.mark.parametrize("sizes", [None, [10, 22]])
def test_what_if_is_the_sqnr_that_the_other_recipe_has(sizes):
    """If false, someone moves a layer to a format whose noise nobody measured."""
    results = {}
    for recipe, what_if in (("mxfp8", fq.recipes.hybrid("nvfp4", "mxfp8")), ("nvfp4/mxfp8", None)):
        with kept_step():
            torch.manual_seed(0)
            experts = fq.GroupedLinear(2, 32, 32, recipe=recipe, name="0")
            m = nn.Sequential(nn.Linear(32, 32) if sizes is None else experts)
            m = fq.convert(m, recipe) if sizes is None else m
            with fq.inspect(m, every=1, what_if=what_if, layers="0") as log:
                x = values(32, 32, seed=0, dtype=torch.float32)
                log._before()
                y = m[0](x) if sizes is None else m[0](x, sizes)
                y.backward(values(32, 32, seed=1, dtype=torch.float32))
                log._after()
            results[recipe] = log.latest[1]
    seen, want = results.values()
    other = {k for k in seen if k.endswith(recorder.WHAT_IF)}
    assert {k.split("/")[1] for k in other} == {
        f"{slot}.{d}wise" for slot in ("input", "weight", "grad_output") for d in ("row", "column")
    }
    for key in other:
        assert seen[key] == pytest.approx(want[key.replace(recorder.WHAT_IF, "sqnr_db")]), key
    assert seen["0/input.rowwise/" + recorder.WHAT_IF] < seen["0/input.rowwise/sqnr_db"] - 5


def test_dumps_hold_what_the_step_multiplied(tmp_path):
    """If false, a kernel is debugged on tensors that no step had."""
    with kept_step():
        m = Net("nvfp4")
        inputs: list[Tensor] = []
        m.first.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
        with fq.inspect(m, every=2, dump=tmp_path, layers=["first", "listed", "packed"]) as log:
            before = m.first.weight.detach().clone()
            train(m, 3)
    assert {key.split("/")[0] for key in log.latest[1]} == {"first", "listed", "packed"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step0", "step2"]
    assert len(list((tmp_path / "step2").iterdir())) == 3
    tensors = fq.checkpoint.load_safetensors(tmp_path / "step0" / "first.rank0.safetensors")
    assert_same_bytes(tensors["input"], inputs[0], "input")
    assert_same_bytes(tensors["weight"], before.bfloat16(), "weight")
    q = fq.Quantizer("nvfp4").quantize(inputs[0])
    assert_same_bytes(tensors["input.rowwise"].dequantize(), q.dequantize(), "codes")
    slots = {key.split(".")[0] for key in tensors}
    assert slots == {"input", "weight", "grad_output", "output", "wgrad"}
    experts = fq.checkpoint.load_safetensors(tmp_path / "step0" / "packed.rank0.safetensors")
    assert {"input.expert0", "input.expert2", "weight.expert1", "grad_input"} <= experts.keys()
    assert "input.expert1" not in experts  # no token


def test_a_gradient_that_vanishes_and_a_scale_that_lags_are_seen():
    """If false, the two failures that people look for leave no trace: underflowing gradients, and
    delayed scales that saturate."""
    m = fq.convert(nn.Sequential(nn.Linear(32, 32)), recipes.fp8_delayed(length=2))
    with fq.inspect(m, every=1) as log:
        for factor in (1.0, 1.0, 64.0):
            y = m(factor * values(32, 32, seed=0, dtype=torch.float32))
            (y * torch.cat([torch.ones(16), torch.full((16,), 1e-11)])[:, None]).sum().backward()
    (_, first), _, (_, last) = log.records
    assert first["0/input.rowwise/saturation"] == 0 and last["0/input.rowwise/saturation"] > 0.3
    assert first["0/grad_output.rowwise/underflow"] == 0.5


def test_steps_by_hand_sample_their_first_micro_batch():
    """If false, gradient accumulation samples other steps than those that the log says."""
    m = fq.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8")
    with fq.inspect(m, every=2) as log:
        for step in range(10, 14):
            fq.begin_step(step)
            for _ in range(3):
                m(values(32, 32, seed=0, dtype=torch.float32)).sum().backward()
    assert [step for step, _ in log.records] == [10, 12]
    log = fq.inspect(m, every=5, first_step=9)
    STEP.counted_by_hand = False
    log.start()
    for _ in range(3):
        m(values(32, 32, seed=0, dtype=torch.float32)).sum().backward()
    log.stop()
    assert log.latest[0] == 10


def test_evaluation_forwards_have_the_numbers_of_the_same_forward_in_training():
    """If false, what is seen of an evaluation is of a training step in between, or of none."""
    m, told = fq.convert(_linears(), "nvfp4"), []
    x, other = (values(32, 32, seed=s, dtype=torch.float32) for s in (0, 1))
    with kept_step(), fq.inspect(m, every=1) as log:
        _forward(m, x)
    fq.begin_step(7)
    with fq.inspect(m, every=2, evaluation=True, on_record=lambda *of: told.append(of)) as seen:
        for i in range(2):
            _forward(m, other)  # no evaluation
            with torch.no_grad():
                m(other if i else x)  # in training mode
            assert len(told) == 1
        m.eval()(x).sum().backward()  # with gradients
    assert [step for step, _ in seen.records] == [0, 2] and told == seen.records
    for _, numbers_of in seen.records:
        assert {k.split("/")[1].split(".")[0] for k in numbers_of} == {"input", "output", "weight"}
        assert numbers_of.items() <= log.latest[1].items()
    with (
        pytest.warns(UserWarning, match="saw no evaluation forward of Sequential"),
        fq.inspect(m.train(), evaluation=True),
    ):
        _forward(m, x)


def test_the_file_holds_what_was_handed_out(tmp_path):
    """If false, a report shows other numbers than the run logged, or JSON that only Python
    reads."""
    m, told = Net("mxfp8/nvfp4"), []
    path = tmp_path / "run.jsonl"
    with fq.inspect(
        m, every=2, path=path, on_record=lambda step, of: told.append((step, of))
    ) as log:
        train(m, 3, log=log)

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == [
        "plan",
        "scalars",
        "numbers",
        "scalars",
        "scalars",
        "numbers",
        "receipt",
    ]
    assert [
        (line["step"], line["values"]) for line in lines if line["kind"] == "numbers"
    ] == told and len(told) == 2
    assert {line["step"] for line in lines if line["kind"] == "scalars"} == {0, 1, 2}
    assert fq.inspection.plan.ModelPlan.of_facts(lines[0]) == fq.plan(m)
    assert sum(lines[-1]["gemms"].values()) > 0


def test_quantized_parameters_have_the_range_of_their_scales():
    """If false, a model whose parameters are codes cannot be inspected."""
    with fq.quantized_model_init("mxfp8"):
        m = nn.Sequential(fq.Linear(32, 32))
    with fq.inspect(m, every=1) as log:
        m(values(32, 32, seed=0, dtype=torch.float32)).sum().backward()
    found = {key: v for key, v in log.latest[1].items() if "weight" in key}
    assert found["0/weight/amax"] == m[0].weight.dequantize().abs().max().item()
    assert found["0/weight.rowwise/scale_max"] > 0 and "0/weight.rowwise/sqnr_db" not in found


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fq.inspect(nn.Linear(4, 4)), "inspect found no fq.Linear; call fq.convert"),
        (
            lambda: fq.inspect(fq.Linear(16, 16), every=0),
            "every, a number of steps, must be .*got 0",
        ),
        (lambda: fq.inspect(fq.Linear(16, 16), every=True), "every.* got True"),
        (lambda: fq.inspect(fq.Linear(16, 16), first_step=1.5), "first_step.* got 1.5"),
        (lambda: fq.inspect(fq.Linear(16, 16), on_record="x"), "on_record.* got 'x'"),
        (lambda: fq.inspect(fq.Linear(16, 16), what_if="fp8_delayed"), "what_if .* delayed scales"),
        (lambda: fq.inspect(fq.Linear(16, 16), what_if="fp9"), "fp9"),
        (lambda: fq.inspect(fq.Linear(16, 16), layers=["up"]), "layers: 'up' matches no layer"),
        (lambda: fq.inspect(fq.Linear(16, 16), evaluation="x"), "evaluation must be .*got 'x'"),
        (lambda: fq.inspect(fq.Linear(16, 16)).start().start(), "was started before"),
    ],
)
def test_what_it_cannot_do_is_refused(call: Callable, message: str):
    """If false, a run is believed to be inspected."""
    with pytest.raises(ValueError, match=message):
        call()


def test_a_run_that_it_does_not_see_warns():
    """If false, the log of a model that runs by other means is empty, without a word."""
    with (
        pytest.warns(UserWarning, match="saw no training forward of Linear"),
        fq.inspect(fq.Linear(16, 16)),
    ):
        pass


class ByKeywords(nn.Module):
    """Calls what it has by keywords, as torch's own modules may be called."""

    def __init__(self, other_keys: bool = False):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.other_keys = other_keys

    def forward(self, x):
        x = x[None]
        key = x * 2 if self.other_keys else x
        return self.attention(key=key, need_weights=False, value=key, query=x)[0][0]


class Selective(nn.Sequential):
    """Recomputes all but products, by the policy that torchtitan uses."""

    def forward(self, x):
        def policy(ctx, func, *args, **kwargs):
            kept = func in (torch.ops.aten.mm.default, torch.ops.aten.abs.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


def _forward(m: nn.Module, x: Tensor) -> None:
    m(x).square().sum().backward()


def _copied(m: nn.Module, x: Tensor) -> None:
    """Copies inside, which are other models: of them nothing is measured."""
    _forward(m, x)
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    for other in (copy.deepcopy(m), torch.load(file, weights_only=False)):
        _forward(other, x)


def _transformed(m: nn.Module, x: Tensor) -> None:
    _forward(m, x)
    weights = dict(m.eval().named_parameters())
    torch.func.grad(lambda w: torch.func.functional_call(m, w, (x,)).square().sum())(weights)
    m.train()


def _failed(m: nn.Module, x: Tensor) -> None:
    with pytest.raises(ValueError, match="wants|features|input"):
        m(x[:, :16])
    _forward(m, x)


def _frozen(m: nn.Module) -> nn.Module:
    m[0].requires_grad_(False)
    fq.freeze(m)
    return m


def _linears(dtype: torch.dtype = torch.float32, made: type = nn.Sequential) -> nn.Module:
    return made(nn.Linear(32, 32, dtype=dtype), nn.Linear(32, 32, dtype=dtype))


PROGRAMS = {
    "attention": (lambda: nn.Sequential(ByKeywords(), nn.Linear(32, 32)), None, _forward),
    "other keys": (lambda: nn.Sequential(ByKeywords(True), nn.Linear(32, 32)), None, _forward),
    "frozen": (_linears, _frozen, _forward),
    "frozen bf16": (lambda: _linears(torch.bfloat16), _frozen, _forward),
    "copies": (_linears, None, _copied),
    "transforms": (_linears, None, _transformed),
    "selective": (lambda: nn.Sequential(_linears(made=Selective)), None, _forward),
    "failed": (_linears, None, _failed),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_that_works_without_it_works_with_it(name: str):
    """If false, a training stops in the middle, or has other bits, because someone looked."""
    make, change, run = PROGRAMS[name]
    results = []
    for is_inspected in (False, True):
        with kept_step():
            torch.manual_seed(0)
            m = fq.convert(make(), "mxfp8")
            m = m if change is None else change(m)
            x, hooks = values(32, 32, seed=0, dtype=next(m.parameters()).dtype), hooks_of(m)
            log = fq.inspect(m, every=1)
            with log if is_inspected else contextlib.nullcontext(), warnings.catch_warnings():
                warnings.filterwarnings("error", message="inspect could not measure")
                for _ in range(2):
                    run(m, x)
        gradients = {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
        results.append(gradients)
        assert gradients
    for key, gradient in results[0].items():
        assert_same_bytes(results[1][key], gradient, key)
    of_layers = {key.rpartition("/")[0] for key in log.latest[1]}
    assert ("0.attention/input" in of_layers) == (name == "attention")
    assert any(key.endswith("input.rowwise") for key in of_layers)
    assert hooks_of(m) == hooks


def test_faults_of_the_recorder_are_warnings_that_name_the_layer(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """If false, a fault in what is measured, or a full disk, ends a training."""
    m, x = fq.convert(_linears(), "mxfp8"), values(32, 32, seed=0, dtype=torch.float32)

    def faulty(*_):
        raise torch.OutOfMemoryError("no memory")

    for target in ("_of_slot", "_of_piece", "_add_wgrad", "on_host"):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            owner = recorder if hasattr(recorder, target) else recorder.Inspection
            patch.setattr(owner, target, faulty)
            with fq.inspect(m, every=1, path=tmp_path / "log.jsonl"):
                for _ in range(3):
                    _forward(m, x)
        texts = [str(w.message) for w in warned]
        assert texts and len(texts) == len(set(texts)), texts  # one per layer, not per step
        assert all("inspect could not measure" in t and "no memory" in t for t in texts), texts
        assert target != "_of_slot" or "measure 0," in texts[0]


# Compiled models #


def compiled(how: str) -> tuple[nn.Module, nn.Module]:
    """(what is called, what is inspected), with a backend that shows how many graphs there are."""
    torch.manual_seed(0)
    m = fq.convert(
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))),
        recipes.fp8_delayed(length=3),
    )
    if how == "blocks":
        for block in m:
            block.compile(backend="aot_eager")
    elif how == "in place":
        m.compile(backend="aot_eager")
    elif how == "wrapped":
        wrapped = torch.compile(m, backend="aot_eager")
        return wrapped, wrapped
    return m, m


@pytest.mark.parametrize("how", ["blocks", "in place", "wrapped"])
def test_compiled_models_run_sampled_steps_eagerly(how: str):
    """If false, a compiled model shows nothing, is traced once more, or loses count of its
    steps."""
    torch.compiler.reset()
    results = {}
    for kind in ("eager", how):
        with kept_step():
            called, seen = compiled(kind)
            log = fq.inspect(seen, every=2)
            losses = []
            for i, x in enumerate(batches(6)):
                loss = called(x).square().mean()
                loss.backward()
                losses.append(loss.item())
                if i == 1:
                    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                    log.start()  # a model that has run
            log.stop()
            if kind != "eager":
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
            histories = [
                h.amaxes
                for layer in converted_modules(seen).values()
                for h in histories_by_side(layer).values()
            ]
            results[kind] = losses, log.records, histories
    (want, records, histories), (got, seen_records, seen_histories) = results["eager"], results[how]
    assert got == pytest.approx(want, rel=1e-6)
    assert [step for step, _ in seen_records] == [step for step, _ in records] == [0, 2]
    for (_, a), (_, b) in zip(records, seen_records):
        assert a.keys() == b.keys()
        for key in a:
            assert b[key] == pytest.approx(a[key], rel=1e-4), key
    for a, b in zip(histories, seen_histories):
        assert torch.allclose(a, b, rtol=1e-5)
