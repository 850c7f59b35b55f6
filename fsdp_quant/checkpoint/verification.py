# SPDX-License-Identifier: Apache-2.0
"""`verify`: check a checkpoint without a model."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import fsdp_quant.recipe as recipes

from ..qat import FACTORIES
from ..scaling import DelayedScaling, RowCuts
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import Piece, WeightState
from .code_hash import fingerprint
from .files import installed, read_checked
from .weights import LocalWeight

# Keys next to the modules in "moved" of a saved state: [rank that saved it, of how many], and
# whether its step was skipped. DCP can load older files because they are no leaves of their own. No
# attribute, and so no module that is one, has a name with a space.
SAVED_BY, SKIPPED = "saved by", "step skipped"
RANKS = "ranks"  # of a state of all ranks: what each has of its own


@dataclass
class Verified:
    """The result of `verify`: lines to print, and one sentence per problem."""

    path: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = [f"WRONG: {problem}" for problem in self.problems] or ["whole"]
        return "\n".join([self.path, *self.lines, *verdict])


def verify(path: str | PathLike) -> Verified:
    """Check a checkpoint without a model, and print its contents.

    path:  a file of `export_safetensors`: checks digests and metadata of every tensor. A folder of
           `torch.distributed.checkpoint`: reads every tensor, and quantizes again and compares the
           weights that a state of `fq.state_dict` has fingerprints of, if a recipe of `fq.recipes`
           quantized them. Unpickles such a folder: read only those that you trust.

    Raises FileNotFoundError if there is nothing.
    """
    path = Path(path)
    report = Verified(str(path))
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if files:  # of `fq.export`, or of a hub
        for file in files:
            _verify_file(file, report)
        _verify_index(path, report)
    elif path.is_dir():
        _verify_folder(path, report)
    else:
        with path.open("rb"):
            _verify_file(path, report)
    print(report)
    return report


def of_rank(state: dict, rank: int) -> dict:
    """The state of a rank, or of rank r % W, in one that W ranks saved; a state of one rank as it
    is. Raises ValueError for damaged bytes."""
    if RANKS not in state:
        return state
    try:
        own = state[RANKS][rank % len(state[RANKS])]
        if isinstance(own, bytes):  # else of an earlier version
            own = torch.load(io.BytesIO(own), map_location="cpu", weights_only=True)
        return {key: value for key, value in state.items() if key != RANKS} | own
    except Exception as error:  # readers of damaged bytes raise anything
        raise ValueError(f"the saved state of rank {rank} is damaged: {error!r}") from error


def _verify_file(path: Path, report: Verified) -> None:
    damaged = installed().SafetensorError
    try:
        loaded = read_checked(path)
    except (ValueError, damaged) as error:
        report.problems.append(str(error))
        return
    for name, tensor in loaded.items():
        codes = tensor.rowwise or tensor.columnwise if isinstance(tensor, QuantizedTensor) else None
        report.lines.append(
            f"  {name}: {list(tensor.shape)} "
            + (str(tensor.dtype) if codes is None else codes.describe())
        )


def _verify_index(path: Path, report: Verified) -> None:
    """Report files that the index of a folder names and the folder lacks."""
    for index in path.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            report.problems.append(f"{index} cannot be read: {type(error).__name__}: {error}")
            continue
        if missing := sorted(name for name in named if not (path / str(name)).is_file()):
            report.problems.append(f"{path} lacks {', '.join(missing)}, which {index.name} names")


def _verify_folder(path: Path, report: Verified) -> None:
    # by place; functions that read tensors, which are large
    values: dict[tuple[str, ...], Any] = {}
    try:
        metadata = FileSystemReader(path).read_metadata()
        for key, stored in metadata.state_dict_metadata.items():
            place = (metadata.planner_data or {}).get(key, (key,))
            value = _read_one(path, key, stored)
            if isinstance(stored, TensorStorageMetadata) and "histories" not in place:
                report.lines.append(f"  {key}: {list(stored.size)} {stored.properties.dtype}")
                value = functools.partial(_read_one, path, key, stored)
            values[tuple(map(str, place))] = value
    except (Exception, CheckpointException) as error:  # readers of damaged bytes raise anything
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        report.problems.append(
            f"it cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        )
        return
    ranks: dict[int, set[int]] = {}
    for place in values:
        if place[-1] == "fingerprint" and place[:-1] + ("recipe",) in values:
            parent, name = place[:-1], ".".join(place[:-1])
            state = {p[len(parent) :]: v for p, v in values.items() if p[: len(parent)] == parent}
            try:
                for own in _of_each_rank(state):
                    rank, world = _verify_state(name or "state", own, values, report)
                    ranks.setdefault(world, set()).add(rank)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                report.problems.append(f"{name} is no state of fq.state_dict: {error}")
    for world, saved in ranks.items():
        if world and len(saved) < world and any("histories" in place for place in values):
            report.problems.append(
                f"it holds amax histories of ranks {sorted(saved)} of {world}, and each rank has "
                "its own; save fq.steps.TrainingState(model)"
            )


def _of_each_rank(state: dict[tuple, Any]) -> Iterator[dict[tuple, Any]]:
    """Yield the state of each rank; codes, which they share, with the first alone."""
    of_ranks = state.pop((RANKS,), None)
    if of_ranks is None:
        yield state
        return
    for rank in range(len(of_ranks)):
        own = of_rank({RANKS: of_ranks}, rank)
        histories = own["histories"].items()
        flat = {("histories", name, key): t for name, h in histories for key, t in h.items()}
        yield state | flat | {("moved",): own["moved"]}
        state = {place: value for place, value in state.items() if place[0] != "codes"}


def _read_one(path: Path, key: str, stored: object) -> Any:
    state: dict[str, Any] = {key: None}
    if isinstance(stored, TensorStorageMetadata):
        state[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    load(state, checkpoint_id=path, no_dist=True)
    return state[key]


def _verify_state(
    name: str, state: dict[tuple, Any], values: dict[tuple, Any], report: Verified
) -> tuple[int, int]:
    """Check a state of `fq.state_dict`, whose leaves are given by place. Returns (rank, world size)
    that saved it; (0, 0) for older files."""
    rank, world = json.loads(state.get(("moved",), "{}")).get(SAVED_BY, (0, 0))
    step, seed, text = (state[key,] for key in ("step", "seed", "recipe"))
    report.lines.append(
        f"  {name}: step {step}, seed {seed}, rank {rank} of {world or '?'}, {text}"
    )
    if type(step) is not int or step < 0 or type(seed) is not int:
        raise ValueError(f"step is {step!r} and seed {seed!r}")
    histories: dict[str, dict[str, Tensor]] = {}
    for place, value in state.items():
        if place[0] == "histories":
            histories.setdefault(place[1], {})[place[2]] = value
            if not (value.isfinite() & (value >= 0)).all():
                report.problems.append(
                    f"{name}: {place[2]} of the amax history of {place[1]} is negative or not "
                    "finite"
                )
    candidates = _recipes_in(text)
    codes = {place[1]: value for place, value in state.items() if place[0] == "codes"}
    if codes and not candidates:
        report.lines.append(
            f"  {name}: codes not compared, because no recipe of fq.recipes alone encoded them"
        )
    elif codes:
        same = {w: _reproduces(candidates, w, codes[w], histories, values) for w in codes}
        report.lines.append(
            f"  {name}: codes of {[*same.values()].count(True)} of {len(codes)} weights encoded "
            "again, and compared"
        )
        if other := [weight for weight, is_same in same.items() if is_same is False]:
            report.problems.append(
                f"{name}: the codes of {', '.join(other[:5])} are not those that were saved: the "
                "weight, or its fingerprint, is damaged (or tensor parallelism cut its blocks)"
            )
    return rank, world


def _reproduces(
    candidates: list[recipes.Recipe],
    weight: str,
    saved: int,
    histories: Mapping[str, dict],
    values: Mapping[tuple, Any],
) -> bool | None:
    """One of the recipes quantizes the checkpoint's values of a weight to codes of this
    fingerprint; None: the values are not in it."""
    parameter, _, last = weight.rpartition(".")
    parameter, expert = (parameter, last) if last.isdigit() else (weight, "")
    module = parameter.rpartition(".")[0]
    # the product of packed experts is a module inside the one that has the parameter
    ends = f".{parameter}", f".{parameter.removesuffix('_product.weight')}"
    named = {p: ".".join(p) for p, value in values.items() if callable(value)}
    places = [p for p, name in named.items() if f".{name}".endswith(ends)]
    if not places:
        return None
    place = min(places, key=lambda p: len(named[p]))  # longer ones are of other modules
    master = values[place]()[int(expert)] if expert else values[place]()
    layer = f"{module}.{expert}" if expert else module
    # a state does not say which weights are stored [K, N]
    for recipe, matrix in itertools.product(candidates, (master, master.t())):
        hybrid = recipe.hybrid(recipes.Role("linear", "weight", module))
        if hybrid is None:
            continue
        state = WeightState(weight, hybrid, tuple(matrix.shape), recipe.compute_dtype)
        for d in hybrid.delayed_directions:
            history = histories.get(f"{layer}.weight.{d.value}".lstrip("."))
            if history is not None:
                state.history(weight, "weight", d, hybrid.side(d)).load_state_dict(history)
        piece = Piece(state, matrix, RowCuts((0, len(matrix))), 0)
        storages = LocalWeight(weight, piece, None, {}).storages()
        if sum(int(fingerprint(s)) for s in storages) % 2**64 == saved % 2**64:
            return True
    return False


def _recipes_in(text: str) -> list[recipes.Recipe]:
    """The recipes in a text of `Recipe.__repr__` joined by bars; none if one is not of
    `fq.recipes`."""
    parsed = []
    for part in text.split(" | "):
        try:
            name, keywords = _call(ast.parse(part, mode="eval").body)
            if name not in FACTORIES:
                return []
            values = {keyword: _value(node) for keyword, node in keywords.items()}
            options: dict[str, Any] = {"backward_override": None}
            for option in values.keys() & recipes.Recipe.__dataclass_fields__.keys():
                options[option] = values.pop(option)
            arguments = tuple(sorted(values.items()))
            parsed.append(recipes.Recipe(name, FACTORIES[name], arguments, **options))
        except (SyntaxError, TypeError, ValueError):
            return []
    return parsed


def _call(node: ast.expr) -> tuple[str, dict[str, ast.expr]]:
    """(name, keyword arguments) of a call. Raises ValueError for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError(f"wanted name(keyword=value, ..), got {ast.unparse(node)}")
    return node.func.id, {str(keyword.arg): keyword.value for keyword in node.keywords}


def _value(node: ast.expr) -> object:
    """A literal, a torch dtype, or `DelayedScaling(...)`."""
    if isinstance(node, ast.Call):
        name, keywords = _call(node)
        if name == "DelayedScaling":
            return DelayedScaling(**{k: ast.literal_eval(value) for k, value in keywords.items()})
    return _DTYPES.get(ast.unparse(node)) or ast.literal_eval(node)


_DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
