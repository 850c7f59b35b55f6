# SPDX-License-Identifier: Apache-2.0
"""What files and users of earlier versions hold does not change: names, texts, keys, schemas and
bytes of `frozen.json`.

    python -m dist_tests.golden.test_frozen    writes frozen.json anew; its diff says what a version
                                               breaks

New names may be added. A name that went, or a value that changed, fails.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_quant as fq
from dist_tests.laws import values
from dist_tests.single.hopper import operator_schemas
from fsdp_quant import checkpoint, public, recipe, recipes
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.roles import Role

FROZEN = Path(__file__).parent / "frozen.json"
WRITE = "python -m dist_tests.golden.test_frozen"


def a_model(recipe) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Sequential(nn.Linear(96, 64)))
    return fq.convert(model, recipe)


def public_names() -> dict[str, list[str] | None]:
    """Each public name, and the parameters of those that are functions."""
    found: dict[str, list[str] | None] = {}
    defined = [
        n
        for n, v in vars(recipe).items()
        if getattr(v, "__module__", "") in (recipe.__name__, Role.__module__) and n[0] != "_"
    ]
    namespaces = (fq.recipes, fq.numerics, fq.steps, fq.inspection)
    for where, names in (
        (fq, public.NAMES | public.ALIASES),
        (recipe, defined),
        *((namespace, namespace.__all__) for namespace in namespaces),
    ):
        for name in names:
            value = getattr(where, name)
            function = value.__init__ if inspect.isclass(value) else value
            # how an enum is called is Python's affair
            named = inspect.isfunction(function) and not isinstance(value, enum.EnumMeta)
            found[f"{where.__name__}.{name}"] = (
                [*inspect.signature(value).parameters] if named else None
            )
    return found


def test_names_of_earlier_versions_lead_to_the_same_objects():
    """If false, a program that uses a name from before it moved imports nothing, or a second
    class of which nothing is an instance."""
    assert len(fq.__all__) <= 44 and set(fq.__all__) <= set(dir(fq))
    assert not {"recipe", "gemm", "DelayedScaling"} & set(dir(fq))
    for name, value in public.ALIASES.items():
        assert getattr(fq, name) is value
    for name in (n for n in vars(recipe) if n[0] != "_"):
        assert getattr(fq.recipes, name) is getattr(recipe, name)
    assert fq.recipe is recipe and not hasattr(fq.recipes, "mxfp9")
    assert "DelayedScaling" not in dir(fq.recipes)


def recipe_texts() -> dict[str, str]:
    return {name: recipes.by_name(name).fingerprint() for name in recipes.names()}


def formats() -> dict[str, str]:
    """SHA-256 of the codes and scales of each format in both directions."""
    x, found = values(96, 128, seed=3), {}
    for name, fmt in fq.FORMATS.items():
        for direction in fq.Direction:
            made = Quantizer(fmt).quantize(x)
            storage = made.rowwise if direction is fq.ROWWISE else made.columnwise
            hashed = hashlib.sha256()
            for key, buffer in sorted(storage.buffers().items()):
                hashed.update(f"{key} {tuple(buffer.shape)} {buffer.dtype}".encode())
                hashed.update(buffer.contiguous().view(torch.uint8).numpy().tobytes())
            fingerprint = int(checkpoint.fingerprint(storage))
            found[f"{name}.{direction.value}"] = f"{hashed.hexdigest()[:16]} {fingerprint}"
    return found


def states() -> dict[str, list[str]]:
    """Keys of what is saved beside weights, and of an exported file."""
    fq.begin_step(1)
    model = a_model(recipes.fp8_delayed(length=2))
    optimizer = fq.optim.FusedAdam(model.parameters(), lr=1e-3)
    model(values(32, 64, seed=1, dtype=torch.float32)).sum().backward()
    optimizer.step()
    saved = fq.state_dict(model)
    found = {
        "model.state_dict": [*model.state_dict()],
        "fq.state_dict": [*saved],
        "fq.state_dict histories": [*saved["histories"]],
        "FusedAdam.state": sorted(
            {key for state in optimizer.state_dict()["state"].values() for key in state}
        ),
        "receipt": sorted(vars(fq.receipt())),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "codes.safetensors")
        checkpoint.export_safetensors(a_model(recipes.nvfp4()), path, codes=True)
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        metadata = header.pop("__metadata__")
        found["export_safetensors"] = [
            *(f"{k} {v['dtype']} {v['shape']}" for k, v in sorted(header.items())),
            *sorted(metadata),
        ]
    return found


SECTIONS = {
    "public names": public_names,
    "recipes": recipe_texts,
    "formats": formats,
    "states": states,
    "operators": operator_schemas,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_nothing_frozen_changes(section: str):
    """If false, a checkpoint, a graph or a program that uses an earlier version does not work with
    this one."""
    frozen, now = json.loads(FROZEN.read_text())[section], SECTIONS[section]()
    gone = sorted(set(frozen) - set(now))
    assert not gone, f"{section}: {gone} went; give them back, or an alias"
    for name, was in frozen.items():
        if section == "public names" and was is not None:  # parameters may be added
            assert [p for p in now[name] if p in was] == was, (
                f"{name}{tuple(was)} is now {tuple(now[name])}"
            )
        else:
            assert now[name] == was, (
                f"{section}: {name} was {was} and is {now[name]}; if that is meant, run {WRITE}"
            )


if __name__ == "__main__":
    content = {name: section() for name, section in SECTIONS.items()}
    FROZEN.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
