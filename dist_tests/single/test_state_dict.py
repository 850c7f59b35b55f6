# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds beside parameters: fingerprints of codes, refusals, files of exact
codes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_quant as fq
from dist_tests.laws import QUANTIZERS, assert_same_bytes, assert_same_storage, values
from dist_tests.multi import nets
from fsdp_quant import checkpoint, recipes
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding
from fsdp_quant.ops import dispatch
from fsdp_quant.ops.dispatch import Statistics
from fsdp_quant.scaling import RowCuts
from fsdp_quant.storage import Storage


def net(recipe: fq.Recipe, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    if tied:
        m[2].weight = m[0].weight
    return fq.convert(m, recipe)


def step(m: nn.Module) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(values(16, 40, dtype=torch.float32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def shards(x: torch.Tensor, encoding: Encoding, bounds: tuple[int, ...]) -> list[Storage]:
    """The storages of x [rows, cols] cut at `bounds`, each from statistics of the whole."""
    amax, tensor_amax = dispatch.statistics(x, [encoding])[0]
    b0 = encoding.fmt.dims(encoding.direction)[0]
    made = []
    for start, stop in zip(bounds, bounds[1:]):
        first, last = (
            (0, 1) if b0 is None else (start // b0, -(-stop // b0) if stop > start else start // b0)
        )
        stats = Statistics(None if amax is None else amax[first:last], tensor_amax)
        (encoded,) = dispatch.encode(x[start:stop], [encoding], [stats], start)
        made.append(Storage.of(encoded, encoding, (stop - start, x.shape[1]), x.dtype, start))
    return made


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_fingerprint_of_shards_adds_up_to_that_of_the_whole(name: str, direction):
    """Otherwise a checkpoint is refused, or wrong codes pass, at another world size."""
    x = values(67, 37)
    encoding = QUANTIZERS[name].encoding(direction)
    whole = checkpoint.fingerprint(shards(x, encoding, (0, 67))[0])
    cuts = [(0, 1, 67), (0, 32, 64, 67), RowCuts.chunked(67, 40).bounds]
    for bounds in [] if encoding.fmt.rotated and direction is COLUMNWISE else cuts:
        total = sum(checkpoint.fingerprint(s) for s in shards(x, encoding, bounds))
        assert int(total) == int(whole), bounds


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["fp8_tensor", "mxfp8", "nvfp4"])
def test_fingerprint_changes_with_any_byte_and_with_order(name: str, direction):
    """Otherwise flipped or exchanged codes and scales pass the check of a load."""
    storage = shards(values(48, 64), QUANTIZERS[name].encoding(direction), (0, 48))[0]
    seen = {int(checkpoint.fingerprint(storage))}
    changes = 0
    for buffer, tensor in storage.buffers().items():
        raw = tensor.view(torch.uint8).flatten()
        for at in (0, raw.numel() // 2, raw.numel() - 1):
            changed = raw.clone()
            changed[at] ^= 1
            turned = storage.with_buffers({buffer: changed.view(tensor.dtype).view(tensor.shape)})
            seen.add(int(checkpoint.fingerprint(turned)))
            changes += 1
    seen.add(int(checkpoint.fingerprint(storage.with_buffers({"data": storage.data.flip(0)}))))
    seen.add(int(checkpoint.fingerprint(storage.with_buffers({"data": storage.data.roll(8, 1)}))))
    assert len(seen) >= changes + 2  # the middle byte of a single scale may be its first


def test_other_weights_than_the_saved_are_refused_by_name():
    """Otherwise a run goes on with weights that are not those of its checkpoint, or half of the
    state is loaded."""
    recipe = recipes.fp8_delayed(length=3)
    m, other = net(recipe), net(recipe)
    for _ in range(2):
        step(m)
    state = fq.state_dict(m)
    parameters = {k: v.clone() for k, v in m.state_dict().items()}
    fresh = fq.state_dict(other)
    STEP.step, STEP.seed = 7, 1
    before = fresh["step"]
    with pytest.raises(
        ValueError, match=r"codes of 0\.weight, 2\.weight are not those.*load the parameters"
    ):
        fq.load_state_dict(other, state)
    assert (fq.state_dict(other)["step"], STEP.seed) == (before, 1)
    for key, history in fq.state_dict(other)["histories"].items():
        assert_same_bytes(
            history["enc"], fresh["histories"][key]["enc"], f"{key} after a refused load"
        )
    parameters["2.weight"][3, 4] *= 1.5
    other.load_state_dict(parameters)
    with pytest.raises(ValueError, match=r"codes of 2\.weight are not"):
        fq.load_state_dict(other, state)
    fq.load_state_dict(other, {k: v for k, v in state.items() if k != "codes"})
    other.load_state_dict(m.state_dict())
    fq.load_state_dict(other, state)
    assert STEP.step == state["step"]
    assert fq.state_dict(other)["codes"] == state["codes"]


def test_another_recipe_is_loaded_only_on_request():
    """Otherwise a checkpoint changes formats silently, or its step is lost with its histories."""
    m = net(recipes.fp8_delayed())
    step(m)
    state = fq.state_dict(m)
    other = net(recipes.mxfp8())
    other.load_state_dict(m.state_dict())
    with pytest.raises(ValueError, match="of recipe fp8_delayed.*allow_recipe_change=True"):
        fq.load_state_dict(other, state)
    fq.load_state_dict(other, state, allow_recipe_change=True)
    assert STEP.step == state["step"]
    with pytest.raises(ValueError, match="follows the schedule bf16 at 82%"):
        fq.load_state_dict(m, state | {"schedule": "bf16 at 82%"})


def test_products_that_the_guard_moved_stay_moved():
    """Otherwise a resumed run multiplies in the anchored domain what the guard had moved out of
    it."""
    m = net(recipes.mxfp8())
    m[2].runtime.plan = m[2].plan.moved_to({"wgrad": "anchored 512"})
    state = fq.state_dict(m)
    other = net(recipes.mxfp8())
    fq.load_state_dict(other, state)
    assert (other[0].plan.moved, other[2].plan.moved) == ({}, {"wgrad": "anchored 512"})
    # of a version that knew one rung
    fq.load_state_dict(other, state | {"moved": '{"0": ["fprop"]}'})
    assert (other[0].plan.moved, other[2].plan.moved) == ({"fprop": "exact"}, {})


def test_a_model_that_has_run_goes_back_to_its_first_step():
    """If false, a state that was saved after the first step, counted by hand, leaves that step's
    amaxes out of the scales."""
    model = fq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipes.fp8_delayed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(steps: range) -> list[torch.Tensor]:
        for step in steps:
            fq.begin_step(step)
            model(values(32, 32) * 2**step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    weights, state = train(range(1)), fq.state_dict(model)
    expected = train(range(1, 3))
    with torch.no_grad():
        for p, saved in zip(model.parameters(), weights):
            p.copy_(saved)
    fq.load_state_dict(model, state)
    for got, wanted in zip(train(range(1, 3)), expected):
        assert_same_bytes(got, wanted)


def test_a_state_dict_takes_no_part_in_training():
    """Otherwise saving records amaxes, keeps codes or counts work that no step did."""
    outcomes = []
    for saves in (False, True):
        STEP.step, STEP.counted_by_hand = 0, False
        m = net(recipes.fp8_delayed(length=3))
        for _ in range(3):
            if saves:
                fq.reset_receipt()
                fq.state_dict(m)
                assert str(fq.receipt()) == "nothing ran" and m[0]._weight_state.held is None
            step(m)
        outcomes.append(
            [
                *m.state_dict().values(),
                *(h["amaxes"] for h in fq.state_dict(m)["histories"].values()),
            ]
        )
    for got, want in zip(*outcomes):
        assert_same_bytes(got, want, "training with and without saving")


def test_plain_checkpoints_load_strict_in_both_directions():
    """Otherwise a converted model and nn.Linear do not exchange checkpoints."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40)).bfloat16()
    m = net(recipes.mxfp8()).bfloat16()
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    m.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert list(m.state_dict()) == list(plain.state_dict())
    assert all(type(v) is torch.Tensor for v in m.state_dict().values())
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    back = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40)).bfloat16()
    back.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for name, value in plain.state_dict().items():
        assert_same_bytes(back.state_dict()[name], value, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "identity"])
def test_exported_codes_are_those_that_the_forward_multiplies(name: str, tied: bool, tmp_path):
    """Otherwise inference runs on other codes than the training forward, or a file cannot say what
    it holds."""
    pytest.importorskip("safetensors")
    m = net(recipes.by_name(name), tied)
    step(m)
    checkpoint.export_safetensors(m, tmp_path / "codes", codes=True)
    checkpoint.export_safetensors(m, tmp_path / "weights")
    with nets.recorded_weights() as seen, torch.no_grad():
        m(values(16, 40, dtype=torch.float32))
    loaded, plain = (checkpoint.load_safetensors(tmp_path / f) for f in ("codes", "weights"))
    assert loaded.keys() == plain.keys() == m.state_dict().keys()
    for key, value in m.state_dict().items():
        assert_same_bytes(plain[key], value, key)
    quantized = [loaded[f"{i}.weight"] for i in (0, 2)]
    if name == "identity":
        assert_same_bytes(quantized[0], m.state_dict()["0.weight"], "weight")
        return
    for tensor, (direction, storage, _) in zip(quantized, seen):
        assert direction is ROWWISE and tensor.columnwise is None and tensor.shape == (40, 40)
        assert_same_bytes(
            tensor.dequantize(torch.float32), storage.dequantize(torch.float32), "decoded"
        )
        assert_same_storage(tensor.rowwise, storage, "exported")


def test_export_without_safetensors_says_what_is_missing(monkeypatch, tmp_path):
    """Otherwise an optional package is an AttributeError of None."""
    monkeypatch.setattr(checkpoint.files, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.export_safetensors(net(recipes.mxfp8()), tmp_path / "x")
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.load_safetensors(tmp_path / "x")


# States that nobody saved #


def whole(m: nn.Module, objects: bool) -> tuple:
    """All that `fq.load_state_dict` may write, and the objects that graphs hold, where no recipe is
    switched."""
    state = fq.state_dict(m)
    histories = {k: [t.tolist() for t in h.values()] for k, h in state["histories"].items()}
    held = [id(h) for i in (0, 2) for h in m[i]._weight_state.histories.values()] if objects else []
    return (
        histories,
        state["step"],
        state["seed"],
        state["moved"],
        STEP.step,
        m[0].recipe,
        [m[i].plan for i in (0, 2)],
        held,
    )


def of_history(part: str, value) -> Callable[[dict], object]:
    """Write to a part of the last history: those before it are whole."""

    def change(state: dict) -> None:
        saved = state["histories"][list(state["histories"])[-1]]
        saved[part] = value(saved[part]) if callable(value) else value

    return change


def without(key: str) -> Callable[[dict], object]:
    return lambda state: state.pop(key)


def having(key: str, value) -> Callable[[dict], object]:
    return lambda state: state.__setitem__(key, value)


NAN, INF = float("nan"), float("inf")
REFUSED = {
    **{
        f"no {key}": (without(key), f"{key} of the saved state")
        for key in ("step", "seed", "fingerprint", "histories")
    },
    **{
        f"step {v}": (having("step", v), "step of the saved state is")
        for v in (None, -5, 2.5, 2**70, True)
    },
    **{f"seed {v}": (having("seed", v), "seed of the saved state is") for v in ("x", 2**70)},
    **{
        f"moved {v}": (having("moved", v), "moved of the saved state is not what")
        for v in (
            "not json",
            "[1]",
            "[" * 5000,
            '{"0": ["nonsense"]}',
            '{"0": {"wgrad": "somewhere"}}',
            3,
        )
    },
    **{
        f"amaxes {v}": (
            of_history("amaxes", lambda t, v=v: t.fill_(v)),
            "amaxes of .* negative or not finite",
        )
        for v in (NAN, INF, -1.0)
    },
    **{
        f"enc {v}": (
            of_history("enc", lambda t, v=v: t.fill_(v)),
            "enc of .* negative or not finite",
        )
        for v in (NAN, INF, -1.0)
    },
    "enc of another shape": (
        of_history("enc", torch.ones(5)),
        r"enc of .* is torch.float32 \[5\].*wanted float32 \[1\]",
    ),
    "amaxes of another length": (
        of_history("amaxes", torch.ones(9)),
        r"is torch.float32 \[9\].*wanted float32 \[3\]",
    ),
    "amaxes of integers": (of_history("amaxes", lambda t: t.long()), "is torch.int64"),
    "amaxes of nothing": (of_history("amaxes", None), "is NoneType"),
    "a history missing": (
        lambda s: s["histories"].pop(list(s["histories"])[-1]),
        "has no amax history of 2.grad_output.rowwise",
    ),
    "a history that is a list": (
        lambda s: s["histories"].__setitem__("0.input.rowwise", [1.0]),
        "is NoneType",
    ),
    "codes of text": (having("codes", {"0.weight": "x"}), "codes are no integers"),
    "other codes": (
        lambda s: s["codes"].__setitem__("2.weight", 5),
        r"codes of 2\.weight are not those",
    ),
    "codes missing": (lambda s: s["codes"].pop("0.weight"), r"codes of 0\.weight are not those"),
    "a list": (lambda s: [s], "takes what fq.state_dict returned, got list"),
}
HARMLESS = {
    "nothing": lambda s: None,
    "no codes": without("codes"),
    "no recipe": without("recipe"),
    "no moved": without("moved"),
    "another key": having("other", 1),
    "another history": lambda s: s["histories"].__setitem__("9.input.rowwise", 1),
    "codes of another weight": lambda s: s["codes"].__setitem__("9.weight", 5),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("attack", [*REFUSED, *HARMLESS])
def test_a_refused_state_changes_nothing(attack: str, scheduled: bool):
    """If false, a damaged checkpoint leaves a model that is half of it, or trains on scales that no
    step wrote."""
    recipe = recipes.fp8_delayed(length=3)
    if scheduled:  # the step that is restored is of another recipe
        recipe = recipes.schedule(recipes.fp8_delayed(length=2), (2, None, recipe))
    m = net(recipe)
    for _ in range(3):
        step(m)
    saved, parameters = fq.state_dict(m), copy.deepcopy(m.state_dict())
    other = net(recipe)
    other.load_state_dict(parameters)
    step(other) if scheduled else None
    other.load_state_dict(parameters)
    before, good = whole(other, not scheduled), copy.deepcopy(saved)
    change, message = REFUSED.get(attack, (HARMLESS.get(attack), None))
    changed = change(saved)
    state = changed if isinstance(changed, list) else saved
    if message is None:
        fq.load_state_dict(other, state)
    else:
        with pytest.raises(ValueError, match=message) as refused:
            fq.load_state_dict(other, state)
        assert whole(other, not scheduled) == before and "\n" not in str(refused.value)
        fq.load_state_dict(other, good)
    for of in (m, other):
        STEP.step = good["step"]
        step(of)
    for key, value in m.state_dict().items():
        assert_same_bytes(other.state_dict()[key], value, f"{attack}: {key} a step after")


def test_a_model_that_never_ran_refuses_whole():
    """If false, histories that a refused load has made stay behind with the values of another
    model."""
    m, other = net(recipes.fp8_delayed(length=3)), net(recipes.fp8_delayed(length=3))
    for _ in range(2):
        step(m)
    with pytest.raises(ValueError, match="codes of"):
        fq.load_state_dict(other, fq.state_dict(m))
    for key, history in fq.state_dict(other)["histories"].items():
        assert not history["amaxes"].any() and not history["enc"].any(), key


# Names #


class Around(nn.Module):
    """A module around a model, as of a trainer."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


def in_checkpoints(m: nn.Module) -> nn.Module:
    m[0] = checkpoint_wrapper(m[0])
    return m


def in_parts(m: nn.Module) -> nn.Module:
    m[2] = torch.compile(m[2], backend="eager")
    return m


WRAPPERS = {
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "compiled parts": in_parts,
    "checkpoint_wrapper": in_checkpoints,
    "module around": Around,
    "DataParallel": lambda m: nn.DataParallel(m),
    "both": lambda m: Around(in_checkpoints(in_parts(m))),
}


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_states_and_random_bits_do_not_know_wrappers(wrapper: str, name: str):
    """If false, a resume of the same model is refused, or rounds by other random bits, because
    someone wrapped it."""
    recipe, wrap, x = recipes.by_name(name), WRAPPERS[wrapper], values(16, 40, dtype=torch.float32)
    m = net(recipe)
    step(m)
    saved = fq.state_dict(m)
    wrapped = wrap(copy.deepcopy(m))
    assert fq.state_dict(wrapped)["fingerprint"] == saved["fingerprint"]
    assert (
        fq.state_dict(wrapped)["codes"] == saved["codes"]
        and fq.state_dict(wrapped)["histories"].keys() == saved["histories"].keys()
    )
    fq.load_state_dict(wrapped, saved)
    fq.load_state_dict(m, fq.state_dict(wrapped))
    old = fq.state_dict(wrapped, old_names=True)
    assert (old["fingerprint"] != saved["fingerprint"]) == (wrapper != "nothing")
    fq.load_state_dict(wrapped, old)  # of a version that did not clean names
    if wrapper in ("module around", "both"):
        return  # a module that no one knows is a part of the model that is converted
    plain = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    after = fq.convert(wrap(copy.deepcopy(plain)), recipe)
    before = fq.convert(plain, recipe)
    gradients = []
    for of in (before, after):
        fq.begin_step(3)
        of.zero_grad()
        of(x).square().mean().backward()
        gradients.append([p.grad for p in of.parameters()])
    for got, want in zip(*gradients):
        assert_same_bytes(got, want, "gradient of a model that was converted inside its wrapper")
    fq.load_state_dict(after, fq.state_dict(before))
    STEP.counted_by_hand = False


def test_other_layers_of_the_same_recipe_are_named():
    """If false, a model with other layers is said to have another recipe."""
    saved = fq.state_dict(net(recipes.mxfp8()))
    other = fq.convert(
        nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.ReLU(), nn.Linear(40, 40)), recipes.mxfp8()
    )
    with pytest.raises(
        ValueError,
        match=r"has this recipe.*2\.weight the saved one has alone; 3\.weight the model has alone",
    ):
        fq.load_state_dict(other, saved)
