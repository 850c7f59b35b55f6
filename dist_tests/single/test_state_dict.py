"""What a checkpoint holds beside parameters: fingerprints of codes, refusals, files of exact codes."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

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
        first, last = (0, 1) if b0 is None else (start // b0, -(-stop // b0) if stop > start else start // b0)
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
    """Otherwise a run goes on with weights that are not those of its checkpoint, or half of the state is loaded."""
    recipe = recipes.fp8_delayed(length=3)
    m, other = net(recipe), net(recipe)
    for _ in range(2):
        step(m)
    state = fq.state_dict(m)
    parameters = {k: v.clone() for k, v in m.state_dict().items()}
    fresh = fq.state_dict(other)
    STEP.step, STEP.seed = 7, 1
    before = fresh["step"]
    with pytest.raises(ValueError, match=r"codes of 0\.weight, 2\.weight are not those.*load the parameters"):
        fq.load_state_dict(other, state)
    assert (fq.state_dict(other)["step"], STEP.seed) == (before, 1)
    for key, history in fq.state_dict(other)["histories"].items():
        assert_same_bytes(history["enc"], fresh["histories"][key]["enc"], f"{key} after a refused load")
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
    """Otherwise a resumed run multiplies in the anchored domain what the guard had moved out of it."""
    m = net(recipes.mxfp8())
    m[2]._plan = m[2].plan.moved_to({"wgrad": "anchored 512"})
    state = fq.state_dict(m)
    other = net(recipes.mxfp8())
    fq.load_state_dict(other, state)
    assert (other[0].plan.moved, other[2].plan.moved) == ({}, {"wgrad": "anchored 512"})
    fq.load_state_dict(other, state | {"moved": '{"0": ["fprop"]}'})  # of a version that knew one rung
    assert (other[0].plan.moved, other[2].plan.moved) == ({"fprop": "exact"}, {})


def test_a_model_that_has_run_goes_back_to_its_first_step():
    """If false, a state that was saved after the first step, counted by hand, leaves that step's amaxes out of the scales."""
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
        outcomes.append([*m.state_dict().values(), *(h["amaxes"] for h in fq.state_dict(m)["histories"].values())])
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
    """Otherwise inference runs on other codes than the training forward, or a file cannot say what it holds."""
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
        assert_same_bytes(tensor.dequantize(torch.float32), storage.dequantize(torch.float32), "decoded")
        assert_same_storage(tensor.rowwise, storage, "exported")


def test_export_without_safetensors_says_what_is_missing(monkeypatch, tmp_path):
    """Otherwise an optional package is an AttributeError of None."""
    monkeypatch.setattr(checkpoint, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.export_safetensors(net(recipes.mxfp8()), tmp_path / "x")
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.load_safetensors(tmp_path / "x")
