# SPDX-License-Identifier: Apache-2.0
"""Files from strangers and broken disks: what is read is what was written, or is refused in one
sentence; kills lose nothing."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fsdp_quant as fq
import train_lm
from dist_tests.laws import QUANTIZERS, assert_same_bytes, assert_same_storage, values
from dist_tests.single import hopper
from dist_tests.single.test_state_dict import net, step
from examples.mini_megatron.model import Config
from examples.mini_megatron.ranks import Sizes, on_virtual_ranks
from examples.mini_megatron.train import Trainer
from fsdp_quant import checkpoint, recipes
from fsdp_quant.checkpoint import code_hash
from fsdp_quant.formats import Direction
from fsdp_quant.storage import Storage, rebuild_storage

safetensors = pytest.importorskip("safetensors")
WEIGHT, CODES, SCALE = "0.weight", "0.weight.rowwise.data", "0.weight.rowwise.scale"


# Storages #


def changed(facts: dict, buffers: dict, change: Callable) -> tuple[dict, dict]:
    facts, buffers = dict(facts), dict(buffers)
    change(facts, buffers)
    return facts, buffers


def fact(key: str, value) -> Callable:
    return lambda facts, buffers: facts.__setitem__(key, value)


def buffer(key: str, value: Callable) -> Callable:
    return lambda facts, buffers: buffers.__setitem__(key, value(buffers.get(key)))


WRONG = {
    **{
        f"shape {v}": fact("shape", v)
        for v in (
            [96, 64],
            [24, 128],
            [16, 64],
            [-48, -64],
            [2**40, 2**20],
            [2**39, 2**39],
            ["a", "b"],
            [48, 64, 1],
            [48.0, 64.0],
            48,
        )
    },
    **{f"dtype {v}": fact("dtype", v) for v in ("load", "nonsense", "int8", None)},
    **{f"direction {v}": fact("direction", v) for v in ("columnwise", "sideways")},
    **{
        f"block {v}": fact("block", v)
        for v in ([0, 0], [1, -32], [1, 1], [1, None], [1], "ab", [True, 32])
    },
    **{f"format {v}": fact("format", v) for v in (None, 3)},
    **{
        f"{k} {v}": fact(k, v)
        for k, v in (
            ("element", "e9m9"),
            ("pow2", True),
            ("rotated", 1),
            ("tensor_scale", True),
            ("scale", "fp32"),
            ("zzz", 1),
            ("scale", []),
        )
    },
    "a fact missing": lambda facts, buffers: facts.pop("shape"),
    "scale missing": lambda facts, buffers: buffers.pop("scale"),
    "data missing": lambda facts, buffers: buffers.pop("data"),
    "scale short": buffer("scale", lambda t: t[:3]),
    "scale of fp32": buffer("scale", lambda t: t.float()),
    "data of fp32": buffer("data", lambda t: t.float()),
    "data flat": buffer("data", lambda t: t.flatten()),
    "data a text": buffer("data", lambda t: "x"),
    "another buffer": buffer("layout", lambda t: torch.zeros(3)),
    "a tensor amax": buffer("tensor_amax", lambda t: torch.zeros(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_storage_of_other_facts_or_buffers_is_refused(name: str):
    """If false, codes decode without scales, as other values, or beyond their memory on a GPU."""
    storage = QUANTIZERS["mxfp8"].storage(values(48, 64), Direction.ROWWISE)
    facts, buffers = changed(storage.facts(), storage.buffers(), WRONG[name])
    with pytest.raises(ValueError, match="no storage has these facts|is .*, wanted") as refused:
        rebuild_storage(facts, buffers)
    assert "\n" not in str(refused.value)


def test_codes_of_a_format_of_ones_own_are_read_back_or_not_written(tmp_path):
    """If false, a run with a private format writes files of codes that nothing decodes."""
    element = fq.format_of("mxfp8").element
    for which, made in (
        ("read", fq.Format("own", element, (1, 64), "e8m0")),
        ("refused", fq.Format("own", replace(element, name="e4m3 of mine"), (1, 64), "e8m0")),
    ):
        codes = fq.Quantizer(made).quantize(values(8, 64))
        if which == "read":
            torch.save(codes, tmp_path / "codes")
            again = torch.load(tmp_path / "codes", weights_only=True)
            assert_same_storage(again.rowwise, codes.rowwise, which)
        else:
            with pytest.raises(ValueError, match="own: element e4m3 of mine is not in .*ELEMENTS"):
                torch.save(codes, tmp_path / "codes")


def test_every_storage_is_rebuilt():
    """If false, a good file is refused: of some format, direction, cut or layout."""
    for name, quantizer in QUANTIZERS.items():
        for direction in Direction:
            for shape in ((33, 48), (1, 5), (0, 16), (130, 37)):
                whole = quantizer.storage(values(*shape), direction)
                cuts = (
                    [(3, 7), (shape[0] // 2, shape[0] - shape[0] // 2)]
                    if not whole.fmt.rotated
                    else []
                )
                for storage in [
                    whole,
                    *(whole.narrow(*cut) for cut in cuts if sum(cut) <= shape[0]),
                ]:
                    again = rebuild_storage(storage.facts(), storage.buffers(), storage.row0)
                    assert_same_storage(again, storage, f"{name} {direction} {shape}")
    with hopper.emulated():
        for name in ("mxfp8", "fp8_block", "fp8_row", "fp8_current"):
            layer = fq.Linear(
                256, 384, dtype=torch.bfloat16, recipe=recipes.by_name(name)
            ).requires_grad_(False)
            fq.freeze(layer, keep="operands")
            for storage in (layer.weight.rowwise, layer.weight.columnwise):
                assert storage.layout != "compact"
                rebuild_storage(storage.facts(), storage.buffers(), 0, storage.layout)
                short = {**storage.buffers(), "scale": storage.scale.flatten()[:0]}
                with pytest.raises(ValueError, match="scale of .* is .*, wanted"):
                    rebuild_storage(storage.facts(), short, 0, storage.layout)
    with pytest.raises(ValueError, match="no storage has these facts"):
        rebuild_storage(whole.facts(), whole.buffers(), 0, "of another library")


def loaded_by_torch(
    tensor: fq.QuantizedTensor, damage: Callable[[Storage], Storage], weights_only: bool
) -> fq.QuantizedTensor:
    made = fq.QuantizedTensor(tensor.rowwise)
    made._pair.rowwise = damage(tensor.rowwise)
    file = io.BytesIO()
    torch.save({"weight": made}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["weight"]


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_load_checks_codes(weights_only: bool):
    """If false, a damaged file of torch.save gives a tensor that reads other memory, or other
    values."""
    tensor = fq.Quantizer("mxfp8").quantize(values(48, 64))
    assert_same_bytes(
        loaded_by_torch(tensor, lambda s: s, weights_only).dequantize(),
        tensor.dequantize(),
        "loaded",
    )
    for damage in (
        lambda s: s.with_buffers({"scale": None}),
        lambda s: s.with_buffers({"scale": s.scale[:5]}),
        lambda s: s.with_buffers({}, shape=(4096, 4096)),
        lambda s: s.with_buffers({"data": s.data.float()}),
    ):
        with pytest.raises(ValueError, match="is .*, wanted|does not flatten"):
            loaded_by_torch(tensor, damage, weights_only)


# Exports #


def exported(
    folder: Path, recipe: fq.Recipe
) -> tuple[nn.Module, dict[str, Tensor], dict[str, str], Path]:
    torch.manual_seed(0)
    model = fq.convert(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)), recipe)
    path = folder / "model.safetensors"
    checkpoint.export_safetensors(model, path, codes=True)
    with safetensors.safe_open(path, "pt") as file:
        return model, {key: file.get_tensor(key) for key in file.keys()}, file.metadata(), path


def of_facts(change: Callable) -> Callable:
    """A change of (facts, buffers), as one of (tensors, metadata)."""

    def apply(tensors: dict, metadata: dict) -> None:
        prefix = "0.weight.rowwise."
        buffers = {
            k.removeprefix(prefix): tensors.pop(k) for k in list(tensors) if k.startswith(prefix)
        }
        facts, buffers = changed(json.loads(metadata[WEIGHT]), buffers, change)
        metadata[WEIGHT] = json.dumps(facts)
        tensors.update({prefix + k: t.contiguous() for k, t in buffers.items()})

    return apply


TAMPERED = {
    **{
        name: of_facts(change)
        for name, change in WRONG.items()
        if name not in ("data a text", "another buffer")
    },
    **{
        f"facts {text[:9]}": lambda tensors, metadata, text=text: metadata.__setitem__(WEIGHT, text)
        for text in ("zzz", "[1]", "[" * 5000, '{"tied": "zzz"}', '{"tied": "0.weight"}', "{}")
    },
    "no facts": lambda tensors, metadata: metadata.pop(WEIGHT),
    "two of one name": lambda tensors, metadata: tensors.__setitem__(WEIGHT, torch.zeros(48, 64)),
}
ONLY_BY_DIGEST = {
    "a bit of codes": (CODES, lambda t, m: t[CODES].view(-1)[7:8].bitwise_xor_(64)),
    "a bit of a scale": (SCALE, lambda t, m: t[SCALE].view(-1)[3:4].bitwise_xor_(1)),
    "a bit of a bias": ("1.bias", lambda t, m: t["1.bias"].view(torch.uint8)[2:3].bitwise_xor_(4)),
    "a plain tensor missing": ("1.bias", lambda t, m: t.pop("1.bias")),
    "a tensor added": ("2.bias", lambda t, m: t.__setitem__("2.bias", torch.ones(3))),
    "e5m2 for e4m3": (WEIGHT, of_facts(fact("element", "e5m2"))),
    "digests that are none": ("digests", lambda t, m: m.__setitem__("fsdp_quant", "[" * 5000)),
}


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_export_is_refused(name: str, digests: bool, tmp_path):
    """If false, inference runs on codes without scales, of another shape, or of other values."""
    _, tensors, metadata, path = exported(tmp_path, recipes.mxfp8())
    TAMPERED[name](tensors, metadata)
    if not digests:  # a stranger writes none, or good ones
        del metadata["fsdp_quant"]
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(ValueError) as refused:
        checkpoint.load_safetensors(path)
    assert "\n" not in str(refused.value) and "0.weight" in str(refused.value)
    assert checkpoint.verify(path).problems == [str(refused.value)]


@pytest.mark.parametrize("name", ONLY_BY_DIGEST)
def test_a_flipped_bit_is_named_by_tensor(name: str, tmp_path):
    """If false, a broken disk changes a model in silence."""
    _, tensors, metadata, path = exported(tmp_path, recipes.mxfp8())
    where, change = ONLY_BY_DIGEST[name]
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=rf"{where}.*damaged"):
        checkpoint.load_safetensors(path)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "identity"])
def test_files_of_others_and_of_before_are_read(name: str, tmp_path):
    """If false, a note in the metadata, or a file that is older than digests, cannot be loaded."""
    model, tensors, metadata, path = exported(tmp_path, recipes.by_name(name))
    want = checkpoint.load_safetensors(path)
    assert want.keys() == model.state_dict().keys() and not checkpoint.verify(path).problems
    for note, has_digests in (("made by me", True), ('{"by": "me"}', True), ("[1]", False)):
        given = {**metadata, "note": note}
        if not has_digests:
            del given["fsdp_quant"]
        safetensors.torch.save_file(tensors, path, given)
        got = checkpoint.load_safetensors(path)
        assert got.keys() == want.keys()
        for key, value in want.items():
            decoded = [
                t.dequantize() if isinstance(t, fq.QuantizedTensor) else t
                for t in (got[key], value)
            ]
            assert_same_bytes(*decoded, key)
    path.write_bytes(path.read_bytes()[:-5])
    assert checkpoint.verify(path).problems


def test_exports_of_wrapped_models_hold_codes_once(tmp_path):
    """If false, a wrapped layer is written as codes and in high precision, under two names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net(recipes.mxfp8())
    checkpoint.export_safetensors(model, tmp_path / "plain", codes=True)
    want = checkpoint.load_safetensors(tmp_path / "plain")
    model[0] = checkpoint_wrapper(model[0])
    checkpoint.export_safetensors(
        torch.compile(model, backend="eager"), tmp_path / "wrapped", codes=True
    )
    got = checkpoint.load_safetensors(tmp_path / "wrapped")
    assert got.keys() == want.keys()
    assert {k for k, v in got.items() if isinstance(v, fq.QuantizedTensor)} == {
        "0.weight",
        "2.weight",
    }


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensor"])
def test_fingerprints_of_parts_are_that_of_the_whole(name: str, direction: Direction):
    """If false, a checkpoint of tensor parallelism is refused at another number of ranks, or a swap
    of two parts is not seen."""
    whole = fq.Quantizer(name).storage(values(64, 128, dtype=torch.float32), direction)
    want = int(checkpoint.fingerprint(whole))
    for rows, cols in ((1, 2), (2, 1), (2, 2), (1, 4)):

        def part(i: int, j: int) -> Storage:
            """Of rows x cols equal ones, which cut no block."""
            buffers = {
                name: buffer if buffer.numel() == 1 else buffer.chunk(rows)[i].chunk(cols, 1)[j]
                for name, buffer in whole.buffers().items()
            }
            return replace(whole, shape=(64 // rows, 128 // cols), **buffers)

        def total(*order: tuple[int, int]) -> int:
            made = ((part(*place), at) for place, at in zip(order, sorted(order)))
            return (
                sum(int(checkpoint.fingerprint(s, (rows, cols), at, 64 // rows)) for s, at in made)
                % 2**64
            )

        order = [(i, j) for i in range(rows) for j in range(cols)]
        assert total(*order) == want % 2**64, (rows, cols)
        assert total(*reversed(order)) != want % 2**64, (rows, cols)


def test_fingerprints_hash_a_few_rows_at_once(monkeypatch):
    """If false, the hash of a large weight depends on how many rows are hashed at once, or takes
    several times its memory."""
    storage = fq.Quantizer("mxfp8").storage(values(48, 64), Direction.ROWWISE)
    sizes, mixed = [], code_hash._mixed
    want = int(checkpoint.fingerprint(storage))
    monkeypatch.setattr(code_hash, "_mixed", lambda x: (sizes.append(x.numel()), mixed(x))[1])
    monkeypatch.setattr(code_hash, "_CHUNK_WORDS", 40)  # five rows of codes
    assert int(checkpoint.fingerprint(storage)) == want
    assert max(sizes) == 40 and len(sizes) > 20


def test_fingerprints_stay_what_they_were():
    """If false, checkpoints that earlier versions wrote are refused: their codes seem to be
    others."""
    x = torch.arange(64 * 40, dtype=torch.float32).view(64, 40) / 64 - 20
    found = {
        name: int(checkpoint.fingerprint(fq.Quantizer(name).storage(x, Direction.ROWWISE)))
        for name in ("fp8_tensor", "mxfp8", "nvfp4")
    }
    assert found == {
        "fp8_tensor": -2113984449588819467,
        "mxfp8": 7087266080457221439,
        "nvfp4": 1740970733113023142,
    }


# Folders #


@contextlib.contextmanager
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "hybrid"])
def test_verify_reads_a_folder_without_a_model(name: str, tmp_path, capsys):
    """If false, nobody knows what a checkpoint holds, or that a disk changed it, before a run
    resumes."""
    recipe = recipes.hybrid("mxfp8", "nvfp4") if name == "hybrid" else recipes.by_name(name)
    model = net(recipe)
    for _ in range(3):  # scales of the last one follow from histories, which know other weights
        step(model)
        with torch.no_grad():
            model[2].weight.mul_(0.7)
    with alone():
        state = {"model": dict(model.state_dict()), "fsdp_quant": {"rank_0": fq.state_dict(model)}}
        dcp.save(state, checkpoint_id=tmp_path / "good")
        state["model"]["2.weight"] = state["model"]["2.weight"].detach().clone()
        state["model"]["2.weight"][3, 4] *= 1.5
        state["fsdp_quant"]["rank_0"]["moved"] = json.dumps({"saved by": [0, 2]})
        if name == "fp8_delayed":
            state["fsdp_quant"]["rank_0"]["histories"]["0.input.rowwise"]["enc"].fill_(-1.0)
        dcp.save(state, checkpoint_id=tmp_path / "bad")
    good, bad = (checkpoint.verify(tmp_path / folder) for folder in ("good", "bad"))
    assert not good.problems, str(good)
    assert "model.2.weight: [40, 40] torch.float32" in str(
        good
    ) and "codes of 2 of 2 weights" in str(good)
    assert str(good) in capsys.readouterr().out
    assert any("codes of 2.weight are not those that were saved" in p for p in bad.problems), str(
        bad
    )
    if name == "fp8_delayed":
        assert any(
            "enc of the amax history of 0.input.rowwise is negative" in p for p in bad.problems
        )
        assert any("amax histories of ranks [0] of 2" in p for p in bad.problems)
    shutil.copytree(tmp_path / "good", tmp_path / "short")
    largest = max((tmp_path / "short").glob("*.distcp"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    assert "cannot be read" in checkpoint.verify(tmp_path / "short").problems[0]
    with pytest.raises(FileNotFoundError):
        checkpoint.verify(tmp_path / "nothing")


def test_verify_finds_the_values_of_each_weight(tmp_path):
    """If false, a good checkpoint is said to be damaged: of experts, of modules in modules whose
    names end alike, or of a model that has not trained."""

    def layers(name: str) -> list[nn.Module]:
        experts = fq.GroupedLinear(3, 64, 32, packed=True, recipe=recipes.mxfp8(), name=name)
        return [nn.Linear(40, 40), experts]

    model = nn.Sequential(*layers("outer"), nn.Sequential(*layers("inner")))
    fq.convert(model, recipes.mxfp8())
    with alone():
        state = {"model": dict(model.state_dict()), "fsdp_quant": fq.state_dict(model)}
        dcp.save(state, checkpoint_id=tmp_path / "good")
    good = checkpoint.verify(tmp_path / "good")
    assert not good.problems, str(good)
    assert "codes of 8 of 8 weights encoded again" in str(good)


# Kills #


def content(number: int) -> dict[str, Tensor]:
    """What the checkpoint of a step holds."""
    return {name: torch.full((256, 256), float(number + i)) for i, name in enumerate("abcd")}


def trained(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model all of whose values are `number`."""
    model = fq.convert(nn.Sequential(nn.Linear(256, 256, bias=False)), recipes.mxfp8())
    with torch.no_grad():
        model[0].weight.fill_(float(number))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


GRID, CONFIG = Sizes(data=2), Config(recipes.mxfp8(), layers=1)


def save_for_ever(trainer: Trainer, folder: Path) -> None:
    """Checkpoints of masters all of which are the number of their step."""
    for number in range(1, 10_000):
        for shard in trainer.optimizer.shards.values():
            shard.sync.applied.fill_(number)
            for master in shard.masters.values():
                master.detach().fill_(float(number))
        trainer.optimizer.refresh()
        trainer.save(folder)


def write_for_ever(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if kind == "mini_megatron":
        on_virtual_ranks(GRID, lambda ranks: save_for_ever(Trainer(ranks, CONFIG), folder))
    for number in range(1, 10_000):
        path = folder / f"step_{number:08d}"
        part = folder / f".{path.name}.part"
        if kind == "export":
            checkpoint.export_safetensors(trained(number)[0], folder / "export", codes=True)
        elif kind == "save":
            train_lm.save_checkpoint(folder, number, *trained(number), {})
        else:
            dcp.async_save(content(number), checkpoint_id=part).result()
            checkpoint.publish(str(part), str(path))  # as torch takes them


def last_whole(kind: str, folder: Path) -> int:
    """The step that the last checkpoint is of, all of it. 0: there is none."""
    if kind == "export":
        if not (folder / "export").exists():
            return 0
        assert not checkpoint.verify(folder / "export").problems
        (weight,) = checkpoint.load_safetensors(folder / "export").values()
        (value,) = weight.dequantize().unique().tolist()
        return int(value)
    if kind == "mini_megatron":
        # compares codes
        trainers = on_virtual_ranks(GRID, lambda ranks: Trainer(ranks, CONFIG, resume=folder))
        masters = [
            m
            for trainer in trainers
            for shard in trainer.optimizer.shards.values()
            for m in shard.masters.values()
        ]
        (value,) = torch.cat([m.detach().flatten() for m in masters]).unique().tolist()
        assert {trainer.applied for trainer in trainers} == {int(value)}
        return int(value)
    found = sorted(folder.glob("step_*"))
    if not found:
        return 0
    if kind == "save":
        model, optimizer = trained(0)
        with alone():
            number = train_lm.load_checkpoint(found[-1], model, optimizer)
        assert (
            max(train_lm.checkpoints(folder)) == number
            and not checkpoint.verify(found[-1]).problems
        )
        assert_same_bytes(model[0].weight, trained(number)[0][0].weight, f"step {number}")
        return number
    number, state = (
        int(found[-1].name.removeprefix("step_")),
        {k: torch.empty_like(v) for k, v in content(0).items()},
    )
    dcp.load(state, checkpoint_id=found[-1], no_dist=True)
    for name, value in content(number).items():
        assert_same_bytes(state[name], value, f"{name} of step {number}")
    return number


KILLS = int(os.environ.get("FSDP_QUANT_KILLS", "6"))


@pytest.mark.parametrize("kind", ["save", "async save", "export", "mini_megatron"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(kind: str, tmp_path):
    """If false, a run that is preempted while it saves has nothing to resume from.
    FSDP_QUANT_KILLS=50 for more."""
    context, chance = multiprocessing.get_context("forkserver"), random.Random(kind)
    context.set_forkserver_preload(
        ["fsdp_quant", "torch.distributed.checkpoint", "torch._dynamo", __name__]
    )
    written = []
    for _ in range(-(-KILLS // 3)):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        writer = context.Process(target=write_for_ever, args=(kind, tmp_path))
        writer.start()
        end = time.monotonic() + 60
        while last_of(tmp_path) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        written.append(last_whole(kind, tmp_path))
    assert min(written) >= 1, written


def last_of(folder: Path) -> int:
    """How much is there, from names alone."""
    return 2 * (folder / "export").exists() or len([*folder.glob("step_*"), *folder.glob("*.1.pt")])


# The page #


def test_the_page_runs_as_written(tmp_path, monkeypatch):
    """If false, docs/checkpoints.md loses histories, or does not run."""
    page = (Path(fq.__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    (block,) = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(block, "docs/checkpoints.md", "exec"), {"__name__": "page"})
    finally:
        dist.destroy_process_group()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "codes.safetensors",
        "step_1",
    ]
