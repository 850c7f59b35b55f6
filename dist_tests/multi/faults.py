# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks that fault at a place, and what each rank says then, after how many
seconds.

A program trains a few linear layers in one set-up, of this library or of plain torch:

    fsdp2, hsdp    fully_shard, of two ranks and of two copies of two shards
    tp             a SwiGLU MLP cut over two ranks, with sequence parallelism
    ep             packed experts on two ranks
    sync           quantized parameters whose masters two ranks share in flat pieces (`fq.hooks`)

Places are functions that a rank calls in a step. A fault happens at the first call that follows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import parallelize_module

import fsdp_quant as fq
from dist_tests.laws import values
from dist_tests.multi.harness import _PRELOAD
from fsdp_quant.hooks import ShardMap, SyncItem, WeightSync, plan_weight_sync
from fsdp_quant.parallel.token_route import TokenRoute
from fsdp_quant.tensor import torch_compat
from fsdp_quant.tensor.gather_group import GatherPlan
from fsdp_quant.tensor.torch_compat import local_of
from fsdp_quant.tensor.weight_state import values_of

TIMEOUT = 40.0  # seconds that the transport lets a rank wait
K, EXPERTS = 32, 4
WORLDS = {"fsdp2": 2, "hsdp": 4, "tp": 2, "ep": 2, "sync": 2}


# Programs #


class MLP(nn.Module):
    def __init__(self, rows: int = 64):
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.gate, self.up, self.down = (
            nn.Linear(K, rows, bias=False),
            nn.Linear(K, rows, bias=False),
            nn.Linear(rows, K, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Program:
    """What a rank trains.

    plain:    of torch's modules alone.
    recipe, rows, ranks: of this rank's model; another recipe, width or number of ranks on one of
                         them is a fault.
    """

    def __init__(self, plain: bool = False, recipe: str = "fp8_current", rows: int = 64):
        torch.manual_seed(0)
        self.rank, self.world, self.plain, self.recipe = (
            dist.get_rank(),
            dist.get_world_size(),
            plain,
            recipe,
        )
        self.net = self.build(rows)
        self.parameters = list(self.net.parameters())  # sharded
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, foreach=True)

    def converted(self, net: nn.Module) -> nn.Module:
        return net if self.plain else fq.convert(net, self.recipe, fuse=False)

    def build(self, rows: int) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @property
    def middle(self) -> nn.Module:
        """Hooks on it run in the midst of a pass."""
        return self.net[0].down

    def compute(self, step: int, poison: bool = False) -> None:
        fq.begin_step(step)
        x = values(16, K, seed=step * 7 + self.rank, dtype=torch.float32)
        self.forward(x * float("nan") if poison else x).float().square().mean().backward()

    def step(self, step: int, poison: bool = False) -> None:
        self.compute(step, poison)
        for update in self.updates:
            update()

    @property
    def updates(self) -> list[Callable[[], None]]:
        """What follows a backward; each may be called again where it raised."""
        return [self.update]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, moments = get_state_dict(self.net, self.optimizer)
        own = {} if self.plain else {f"rank_{self.rank}": fq.state_dict(self.net)}
        dcp.save({"model": model, "optimizer": moments} | own, checkpoint_id=folder)

    def state(self) -> list[Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [values_of(local_of(t)).detach().clone() for t in [*self.parameters, *moments]]

    def places(self) -> dict[str, list[tuple[object, str]]]:
        """(owner, name) of functions that are called at a place."""
        gather, come = (
            (_fsdp_param_group, "foreach_all_gather"),
            (_fsdp_param_group, "foreach_all_gather_copy_out"),
        )
        if not self.plain:
            gather, come = (GatherPlan, "send"), (GatherPlan, "receive")
        return {"pre_all_gather": [gather], "post_all_gather": [come]}

    @contextlib.contextmanager
    def at(self, place: str, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` at each passing of a place."""

        def hook(*_) -> None:
            act()

        def before(function: Callable) -> Callable:
            def call(*args, **options):
                act()
                return function(*args, **options)

            return call

        with contextlib.ExitStack() as stack:
            if place == "forward":
                stack.callback(self.middle.register_forward_pre_hook(hook).remove)
            elif place == "backward":
                stack.callback(self.middle.register_full_backward_pre_hook(hook).remove)
            elif place == "optimizer":
                stack.callback(self.optimizer.register_step_pre_hook(hook).remove)
            elif place == "save":
                stack.enter_context(
                    mock.patch.object(
                        dcp.FileSystemWriter, "write_data", before(dcp.FileSystemWriter.write_data)
                    )
                )
            else:
                for owner, name in self.places()[place]:
                    stack.enter_context(
                        mock.patch.object(owner, name, before(getattr(owner, name)))
                    )
            yield


class Sharded(Program):
    axes = ("shards",)

    def build(self, rows: int) -> nn.Module:
        net = self.converted(nn.Sequential(MLP(rows), MLP(64), nn.Linear(K, 8)))
        sizes = (self.world,) if len(self.axes) == 1 else (2, self.world // 2)
        options = {
            "mesh": init_device_mesh("cpu", sizes, mesh_dim_names=self.axes),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
        }
        for block in net:
            fully_shard(block, **options)
        return fully_shard(net, **options)


class Copied(Sharded):
    axes = ("copies", "shards")


class Tensors(Program):
    def build(self, rows: int) -> nn.Module:
        net, mesh = (
            self.converted(nn.Sequential(MLP(rows), MLP(64))),
            init_device_mesh("cpu", (self.world,)),
        )
        of = styles if self.plain else fq.parallel
        for block in net:
            inputs = {"input_layouts": Shard(1)} if self.plain else {}
            parallelize_module(
                block,
                mesh,
                {
                    "norm": styles.SequenceParallel(),
                    "gate": of.ColwiseParallel(**inputs),
                    "up": of.ColwiseParallel(**inputs),
                    "down": of.RowwiseParallel(output_layouts=Shard(1)),
                },
            )
        return net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(4, 4, K))

    def places(self) -> dict:
        return {} if self.plain else {"gather": [(torch_compat, "all_gather_rows")]}


class PlainExperts(nn.Module):
    """Two experts per rank, in high precision."""

    def __init__(self, rows: int):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(values(2, *shape, seed=i, dtype=torch.float32) / 8)
            for i, shape in enumerate(((K, rows), (rows, K)))
        )

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        way = [len(x) // dist.get_world_size()] * dist.get_world_size()
        come = all_to_all_single_autograd(x, way, way, dist.group.WORLD).view(2, -1, K)
        return all_to_all_single_autograd(
            (come @ self.up @ self.down).view(-1, K), way, way, dist.group.WORLD
        )


class Experts(nn.Module):
    def __init__(self, rows: int, recipe: str):
        super().__init__()
        self.up = fq.GroupedLinear(
            EXPERTS, K, rows, bias=False, packed=True, recipe=recipe, name="up"
        )
        self.down = fq.GroupedLinear(
            EXPERTS, rows, K, bias=False, packed=True, recipe=recipe, name="down"
        )

    def forward(self, x: Tensor, splits) -> Tensor:
        return self.down(F.silu(self.up(x, splits)), splits)


class SpreadExperts(Program):
    def build(self, rows: int) -> nn.Module:
        if self.plain:
            return PlainExperts(rows)
        style = fq.parallel.ExpertParallel(reads="up", writes="down")
        return parallelize_module(
            Experts(rows, self.recipe), init_device_mesh("cpu", (self.world,)), style
        )

    @property
    def middle(self) -> nn.Module:
        return self.net if self.plain else self.net.down

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.requires_grad_(), [4] * EXPERTS)

    def places(self) -> dict:
        return {} if self.plain else {"gather": [(TokenRoute, "spread")]}


class Published(Program):
    """Masters of each weight in two pieces; gradients are summed, and each rank updates its
    piece."""

    def build(self, rows: int) -> nn.Module:
        if self.plain:
            net = nn.Sequential(nn.Linear(K, rows, bias=False), nn.Linear(rows, K, bias=False))
        else:
            with fq.quantized_model_init(self.recipe):
                net = fq.convert(
                    nn.Sequential(nn.Linear(K, rows, bias=False), nn.Linear(rows, K, bias=False)),
                    self.recipe,
                )
        self.weights = {f"{i}.weight": layer.weight for i, layer in enumerate(net)}
        size = K * rows
        self.cut = ((0, size // 2 + 3), (size // 2 + 3, size))[self.rank]
        if self.plain:
            self.masters = [
                w.detach().flatten()[slice(*self.cut)].clone() for w in self.weights.values()
            ]
        else:
            shards = ShardMap((0, size // 2 + 3, size))
            self.sync = plan_weight_sync(
                [SyncItem(n, w, shards) for n, w in self.weights.items()], dist.group.WORLD
            )
            self.masters = self.sync.init_masters()
            self.sync.refresh(self.masters)
        return net

    @property
    def middle(self) -> nn.Module:
        return self.net[1]

    @property
    def updates(self) -> list[Callable[[], None]]:
        return [self.update, self.publish]

    def update(self) -> None:
        for weight, master in zip(self.weights.values(), self.masters):
            dist.all_reduce(weight.grad)
            master -= 0.1 * weight.grad.flatten()[slice(*self.cut)]
            weight.grad = None

    def publish(self) -> None:
        if not self.plain:
            self.sync.cast_(self.masters)
            self.sync.gather()
            self.sync.finish()
            return
        for weight, master in zip(self.weights.values(), self.masters):
            sent = F.pad(master.bfloat16(), (0, K + 3 - (len(master) - weight.numel() // 2 + 3)))
            out = sent.new_empty(2 * len(sent))
            torch_compat.all_gather(out, sent, dist.group.WORLD)
            whole = torch.cat(
                [
                    out[: weight.numel() // 2 + 3],
                    out[len(sent) : len(sent) + weight.numel() // 2 - 3],
                ]
            )
            weight.data.copy_(whole.view_as(weight))

    def state(self) -> list[Tensor]:
        codes = (
            []
            if self.plain
            else [s.data for w in self.weights.values() for s in (w.rowwise, w.columnwise)]
        )
        return [t.clone() for t in (*self.masters, *codes)]

    def places(self) -> dict:
        gather = {"gather": [(torch_compat, "all_gather")]}
        return (
            gather
            if self.plain
            else gather
            | {"cast": [(WeightSync, "_cast_rows")], "finish": [(torch_compat, "copy_all")]}
        )


PROGRAMS: dict[str, type[Program]] = {
    "fsdp2": Sharded,
    "hsdp": Copied,
    "tp": Tensors,
    "ep": SpreadExperts,
    "sync": Published,
}
PLACES = {
    "fsdp2": ("forward", "backward", "pre_all_gather", "post_all_gather", "optimizer", "save"),
    "hsdp": ("forward", "backward", "pre_all_gather", "post_all_gather", "optimizer", "save"),
    "tp": ("forward", "backward", "gather", "optimizer", "save"),
    "ep": ("forward", "backward", "gather", "optimizer", "save"),
    "sync": ("forward", "backward", "cast", "gather"),
}


# Faults #


def stop(seconds: float) -> None:
    """SIGSTOP this process; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def raised(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error("injected")

    return act


FAULTS: dict[str, Callable[[], None]] = {
    "raise": raised(RuntimeError),
    "memory": raised(torch.OutOfMemoryError),
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Said(NamedTuple):
    """What a rank said, and after how many seconds.

    text:   "" where it went on; `state` is then a digest of what it holds, or what the function
            returned.
    """

    text: str
    seconds: float
    state: object = None


def once(act: Callable[[], None], folder: str | None = None) -> Callable[[], None]:
    """Call `act` the first time, and leave the time in the folder."""
    left = [act]

    def call() -> None:
        if left:
            if folder is not None:
                Path(folder, "fault").write_text(str(time.monotonic()))
            left.pop()()

    return call


def faulty(folder: str, setup: str, place: str, fault: str, plain: bool) -> int:
    """Train three steps; the last rank faults in the second one."""
    program = PROGRAMS[setup](plain)
    program.step(0)
    act = FAULTS.get(fault) or (lambda: stop(float(fault.removeprefix("stop "))))
    is_odd = program.rank == program.world - 1 and fault not in ("none", "nan")
    with (
        program.at(place, once(act, folder) if is_odd else lambda: None)
        if place
        else contextlib.nullcontext()
    ):
        for step in (1, 2):
            program.step(step, fault == "nan" and program.rank == program.world - 1 and step == 1)
            if place == "save":
                program.save(Path(folder) / "saved")
    return digest(program.state())


def mismatched(folder: str, setup: str, options: dict) -> int:
    """Build, and train two steps, where the last rank has other options."""
    mine = dict(options) if dist.get_rank() == dist.get_world_size() - 1 else {}
    build = mock.patch("fsdp_quant.tensor.agreement.build", lambda: "0.0.9 (sources 0f0f0f0f)")
    patched = mine.pop("build", False)
    with build if patched else contextlib.nullcontext():
        program = PROGRAMS[setup](**mine)
        for step in range(2):
            program.step(step)
    return digest(program.state())


def digest(tensors: list[Tensor]) -> int:
    return zlib.crc32(
        b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    )


def _entry(rank: int, world: int, port: int, folder: str, fn: Callable, args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
    )
    dist.barrier()
    start, text, state = time.monotonic(), "", None
    try:
        state = fn(folder, *args)
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if isinstance(error, dcp.api.CheckpointException):
            text += f" {next(iter(error.failures.values()))[0]!r}"
    ended = time.monotonic()
    if (fault := Path(folder, "fault")).exists():
        start = float(fault.read_text())
    said = Said(text, ended - start, state)
    with open(os.path.join(folder, str(rank)), "wb") as file:
        pickle.dump(said, file)
    if not text:
        with contextlib.suppress(RuntimeError):  # others may be gone
            dist.barrier()
    os._exit(bool(text))


def run(world: int, fn: Callable, *args) -> list[Said]:
    """What each rank says of fn(folder, *args), where ranks may die: those that say nothing were
    killed, or wait."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_entry, args=(r, world, store.port, folder, fn, args))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 3 * TIMEOUT
        while (alive := [p for p in ranks if p.is_alive()]) and (
            rest := end - time.monotonic()
        ) > 0:
            connection.wait([p.sentinel for p in alive], rest)
        waits = [p.is_alive() for p in ranks]
        for process in ranks:
            process.kill()
            process.join()
        found = []
        for rank in range(world):
            path = Path(folder, str(rank))
            found.append(
                pickle.loads(path.read_bytes())
                if path.exists()
                else Said("waits" if waits[rank] else "killed", float("nan"))
            )
    return found


# Recovery #


def trained(
    setup: str, folder: Path, place: str = "", act: Callable[[], None] = lambda: None
) -> tuple[list[int], int]:
    """(digests of three steps, exceptions): what raises in the second step is called again."""
    program, states, seen = PROGRAMS[setup](), [], 0
    for step in range(3):
        stages = [lambda step=step: program.compute(step), *program.updates]
        if step == 1 and place == "save":
            stages.append(lambda: program.save(folder / f"{seen}"))
        with program.at(place, act) if step == 1 and place else contextlib.nullcontext():
            while stages:
                try:
                    stages[0]()
                    del stages[0]
                except (RuntimeError, dcp.api.CheckpointException):
                    seen += 1
                    if len(stages) > len(program.updates):  # gradients of the failed pass
                        for parameter in program.parameters:
                            parameter.grad = None
        states.append(digest(program.state()))
    return states, seen


def recovers(folder: str, setup: str) -> list[str]:
    """Where the steps behind an exception have other bits than without: of all ranks at each place,
    and of one where the others can go on."""
    want, found = trained(setup, Path(folder))[0], []
    for place in PLACES[setup]:
        for fault in ("raise", "memory"):
            for alone in (False, True) if place in ("optimizer", "save") else (False,):
                raises = not alone or dist.get_rank() == 1
                act = once(FAULTS[fault]) if raises else lambda: None
                got, seen = trained(setup, Path(folder, f"{place} {fault} {alone}"), place, act)
                if got != want or (raises and seen != 1):
                    wrong = "other bits" if seen else "nothing was raised"
                    found.append(
                        f"{setup}, {fault} at {place}{' of one rank' if alone else ''}: {wrong}"
                    )
    return found
