# SPDX-License-Identifier: Apache-2.0
"""The law of "codes are values" under `fully_shard`: each gather sends codes of the shards as they
are at that time.

A program runs on a sharded, converted model. After each of its steps every rank gathers the plain
shards, builds the whole model from them, converts it anew and runs it on the same input: outputs,
input gradients and (in worlds whose mean is exact) parameter gradients are the same bytes. If this
is false, ranks multiply codes of other values than their shards hold, or one of them waits for ever
in a collective that the others do not issue.

`test_event_is_seen` runs each event by itself, so that a failure names it;
`test_programs_run_in_lock_step` runs seeded programs, equal on all ranks. Both are samples in CI.
Every recipe, three ranks, and compiled optimizers in the programs:

    FSDP_QUANT_ALL_PAIRS=1 python -m pytest dist_tests/multi/test_fsdp_lockstep.py
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws, lockstep
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, run_ranks
from dist_tests.single import hopper
from fsdp_quant import recipes

M, K = 20, nets.K  # tokens, no number of rows of a shard: the control tells weights by their shape
HIDDEN = (33, 48, 40)
FP32, BF16 = torch.float32, torch.bfloat16
TIMEOUT = timedelta(seconds=12)  # of collectives that another rank does not issue
RECIPES = {
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_current": recipes.fp8_current(),
    "mxfp8": recipes.mxfp8(),
    "fp8_block": recipes.fp8_block(),
    "nvfp4": recipes.nvfp4(),
    "nvfp4 exact": recipes.nvfp4(scale_rule="fp8_exact"),
    "identity": recipes.identity(),
}
FEW = ["mxfp8/nvfp4", "fp8_current", "fp8_block"]
QUANTIZED = [name for name in RECIPES if name != "identity"]
PLAIN = "plain"  # nn.Linear under FSDP2, unconverted: what these events do is fair


# The model, and the program that runs on it #


class Stack(nn.Module):
    """Blocks that run in any order, more than once too, and a head.

    around:  one activation checkpoint around all blocks: None, "reentrant" or "not reentrant".
    """

    def __init__(self, around: str | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(nets.Block(h) for h in HIDDEN)
        self.head = nn.Linear(K, 5)
        self.around, self.order = around, list(range(len(HIDDEN)))

    def middle(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.around is None:
            return self.head(self.middle(x))
        return self.head(checkpoint(self.middle, x, use_reentrant=self.around == "reentrant"))


def local_of(p: Tensor) -> Tensor:
    """What this rank holds of a parameter, an alias."""
    return p.to_local() if isinstance(p, DTensor) else p


def converted(net: Stack, recipe: str) -> Stack:
    return net if recipe == PLAIN else fq.convert(net, RECIPES[recipe])


class Program:
    """A sharded, converted model that is written, and the check that it computes what its shards
    say.

    count:  checks so far: the step of the random bits, and the seed of the input.
    live:   context in which the sharded model runs (the control keeps a code in it).
    """

    def __init__(
        self,
        recipe: str,
        rank: int,
        world: int,
        live: Callable = contextlib.nullcontext,
        around: str | None = None,
        **options,
    ):
        torch.manual_seed(0)
        self.recipe, self.rank, self.world, self.live = recipe, rank, world, live
        self.count, self.writes, self.done = 0, 0, []
        self.optimizers: dict[str, tuple[list, torch.optim.Optimizer, Callable]] = {}
        # A group of its own: what a failed program left undone meets nobody.
        self.group = dist.new_group(timeout=TIMEOUT)
        self.net = converted(Stack(around), recipe)
        mesh = DeviceMesh.from_group(self.group, torch.get_default_device().type)
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(self.net, mesh=mesh, **options)
        self._sharded: dict[str, DTensor] = {}
        self.parameters()

    def parameters(self) -> dict[str, DTensor]:
        """The sharded parameters by name, of modules that are gathered now too: the objects that
        FSDP2 registers again."""
        self._sharded |= {n: p for n, p in self.net.named_parameters() if isinstance(p, DTensor)}
        return self._sharded

    def whole(self, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The plain whole values of sharded tensors; every rank must call it."""
        shards = [None] * self.world
        mine = {
            n: None if t is None else lockstep.plain(local_of(t)).cpu() for n, t in tensors.items()
        }
        dist.all_gather_object(shards, mine, group=self.group)
        return {
            n: None if mine[n] is None else torch.cat([of[n] for of in shards]).to(t.device)
            for n, t in tensors.items()
        }

    def reference(self) -> Stack:
        """The whole model, built anew from the shards' plain values; it recomputes nothing."""
        values = self.whole(self.parameters())
        made = Stack().to(next(iter(values.values())).dtype)
        made.order = self.net.order
        lockstep.give(made, values)
        for name, p in made.named_parameters():
            p.requires_grad_(self.parameters()[name].requires_grad)
        return converted(made, self.recipe)

    def check(self, mode: str = "train", batches: int = 1) -> None:
        """Outputs and gradients of the sharded model are those of the reference; every rank must
        call it.

        mode:     "train", "no_grad" or "inference_mode".
        batches:  micro-batches whose gradients are reduced once.
        """
        self.count += 1
        for p in self.parameters().values():
            p.grad = None
        with self.live():
            got = self._run(self.net, mode, batches)
        want = self._run(reference := self.reference(), mode, batches)
        where = f"rank {self.rank} of {self.world}"
        what = f"{self.recipe}, {mode}, {where}, after {self.done or 'nothing'}"
        lockstep.assert_same_tensors(got, want, what)
        assert got["output 0"].isfinite().all(), f"{what}: it is not finite, which proves nothing"
        exact = self.world <= 2 and self.dtype is FP32  # else a mean rounds more than once
        if mode == "train" and exact:
            mine = self.whole({n: p.grad for n, p in self.parameters().items()})
            ranks: list = [None] * self.world
            dist.all_gather_object(
                ranks,
                {
                    n: None if p.grad is None else lockstep.plain(p.grad).cpu()
                    for n, p in reference.named_parameters()
                },
                group=self.group,
            )
            mean = {
                n: None if g is None else sum(of[n] for of in ranks).to(g.device) / self.world
                for n, g in mine.items()
            }
            lockstep.assert_same_tensors(mine, mean, f"gradients: {what}")

    def _run(self, net: nn.Module, mode: str, batches: int) -> dict[str, Tensor]:
        context = {
            "train": contextlib.nullcontext,
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
        }[mode]
        found = {}
        net.train(mode == "train")
        for batch in range(batches):
            if net is self.net and mode == "train":
                net.set_requires_gradient_sync(batch == batches - 1)
            fq.begin_step(self.count, micro_batch=batch)
            x = self.x(batch).requires_grad_(mode == "train")
            with context():
                y = net(x)
            found[f"output {batch}"] = y.detach()
            if mode == "train":
                y.backward(laws.values(*y.shape, seed=77 + batch, dtype=y.dtype))
                found[f"input gradient {batch}"] = x.grad
        net.train()
        return found

    # What events use #

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters()["head.weight"].dtype

    def x(self, batch: int = 0) -> Tensor:
        """Other tokens on each rank, in each check and micro-batch."""
        return laws.values(M, K, seed=1000 * self.rank + 10 * self.count + batch, dtype=self.dtype)

    def weights(self) -> list[Tensor]:
        return [p for p in self.parameters().values() if p.dim() == 2]

    def locals(self) -> list[Tensor]:
        """This rank's shards of the weights, aliases, without those that hold nothing."""
        return [t for t in map(local_of, self.weights()) if t.numel()]

    def noise(self, like: Tensor) -> Tensor:
        """Other values each time and on each rank, plain and local."""
        self.writes += 1
        seed = 9000 + 100 * self.writes + self.rank
        return laws.values(*like.shape, seed=seed, dtype=like.dtype) * 0.3

    def step(self, name: str) -> None:
        """One step of the optimizer of this name. Gradients are those of the last training check,
        else there are none."""
        parameters = [p for p in self.parameters().values() if p.requires_grad]
        if EVENTS[name].compiles:
            # Inductor takes seconds for each.
            parameters = [p for p in parameters if p.dim() == 2][:1]
        elif name == "muon":
            parameters = [p for p in parameters if p.dim() == 2]
        held, _, step = self.optimizers.get(name, ((), None, None))
        if [(id(p), d) for p, d in held] != [(id(p), p.dtype) for p in parameters]:
            make, options, compiles = OPTIMIZERS[name]
            if isinstance(make, str):
                make = getattr(pytest.importorskip("torchao.optim"), make)
            optimizer = make(parameters, **options)
            step = optimizer.step
            if compiles:
                step = torch.compile(lambda: optimizer.step(), backend="inductor")
            self.optimizers[name] = [(p, p.dtype) for p in parameters], optimizer, step
        step()

    def reshard(self) -> None:
        for module in (*self.net.blocks, self.net):
            module.reshard()


# name -> (class, or the name of torchao's; options; its step is compiled)
OPTIMIZERS = {
    "sgd_loop": (torch.optim.SGD, {"lr": 0.005, "foreach": False}, False),
    "sgd_foreach": (torch.optim.SGD, {"lr": 0.005, "foreach": True}, False),
    "adamw_loop": (torch.optim.AdamW, {"lr": 0.05, "foreach": False}, False),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.05, "foreach": True}, False),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}, False),
    "compiled_sgd": (torch.optim.SGD, {"lr": 0.005}, True),
    "compiled_adamw": (torch.optim.AdamW, {"lr": 0.05}, True),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}, False),
    "muon": (torch.optim.Muon, {"lr": 0.05}, False),
    "torchao_adamw8bit": ("AdamW8bit", {"lr": 0.05}, False),
    "torchao_adamw4bit": ("AdamW4bit", {"lr": 0.05}, False),
    "torchao_adamwfp8": ("AdamWFp8", {"lr": 0.05}, False),
}


# Events #


class Event(NamedTuple):
    """What happens to a program.

    compiles:  by inductor, which takes seconds.
    fresh:     to a model that did not run: an option of `fully_shard`, or a first forward.
    mode:      of the check behind it.
    checks:    it repeats itself, with checks between.
    """

    run: Callable[[Program], object]
    compiles: bool = False
    fresh: bool = False
    mode: str = "train"
    checks: bool = False


EVENTS: dict[str, Event] = {}


def event(change: Callable[[Program], object]) -> Callable[[Program], object]:
    EVENTS[change.__name__] = Event(change)
    return change


def checked_event(change: Callable[[Program], object]) -> Callable[[Program], object]:
    EVENTS[change.__name__] = Event(change, checks=True)
    return change


def first_event(change: Callable[[Program], object]) -> Callable[[Program], object]:
    EVENTS[change.__name__] = Event(change, fresh=True)
    return change


def _optimizer(name: str) -> None:
    EVENTS[name] = Event(
        lambda program: program.step(name), "compiled" in name or "torchao" in name
    )


for _name in OPTIMIZERS:
    _optimizer(_name)


@event
def optimizer_in_backward(program: Program) -> None:
    with lockstep.optimizers_in_backward(program.parameters().values()):
        program.net(program.x()).square().mean().backward()


@event
def data_add(program: Program) -> None:
    for shard in program.locals():
        shard.data.add_(program.noise(shard))


@event
def detached_copy(program: Program) -> None:
    for shard in program.locals():
        shard.detach().copy_(program.noise(shard))


@event
def memmove(program: Program) -> None:
    for shard in program.locals():
        lockstep.overwrite(shard, program.noise(shard))


@event
def numpy_view(program: Program) -> None:
    for shard in program.locals():
        lockstep.overwrite_by_numpy(shard, program.noise(shard))


@event
def dtensor_write(program: Program) -> None:
    with torch.no_grad():
        for p in program.weights():
            p.mul_(-0.7)


def _other_values(program: Program) -> dict[str, Tensor]:
    """A state dict of other values, of DTensors that this rank makes by itself."""
    found = program.net.state_dict()
    return {
        k: DTensor.from_local(
            program.noise(local_of(v)),
            v.device_mesh,
            v.placements,
            run_check=False,
            shape=v.shape,
            stride=v.stride(),
        )
        for k, v in found.items()
    }


@event
def load(program: Program) -> None:
    program.net.load_state_dict(_other_values(program))


@event
def load_assign(program: Program) -> None:
    program.net.load_state_dict(_other_values(program), assign=True)


@checked_event
def state_dict_write(program: Program) -> None:
    """A state dict holds aliases of the shards; who was handed one may write into it at any later
    time."""
    held = program.net.state_dict()
    program.check()
    for value in held.values():
        local_of(value).mul_(-1.5)
    program.check()
    weight = local_of(held["blocks.0.up.weight"])
    lockstep.overwrite(weight, program.noise(weight))


@checked_event
def freeze_and_write(program: Program) -> None:
    for p in program.weights():
        p.requires_grad_(False)
    program.check()
    data_add(program)
    program.check()
    program.net.requires_grad_(True)


@checked_event
def set_recipe(program: Program) -> None:
    if program.recipe == PLAIN:
        return
    before, names = program.recipe, list(RECIPES)
    program.recipe = names[(names.index(before) + 1) % len(names)]
    fq.set_recipe(program.net, RECIPES[program.recipe])
    program.check()
    data_add(program)
    fq.set_recipe(program.net, RECIPES[before])
    program.recipe = before


@checked_event
def evaluation_no_grad(program: Program) -> None:
    program.check("no_grad")
    data_add(program)
    program.reshard()  # without a backward the root stays gathered, as in plain FSDP2
    program.check("no_grad")
    program.reshard()


@checked_event
def evaluation_inference_mode(program: Program) -> None:
    program.check("inference_mode")
    data_add(program)
    program.reshard()
    program.check("inference_mode")
    program.reshard()


@checked_event
def accumulate(program: Program) -> None:
    program.check(batches=2)
    data_add(program)
    program.check(batches=2)


@checked_event
def unshard_by_hand(program: Program) -> None:
    """A gather outside of any forward is of the shards as they are; the forward behind it uses
    it."""
    for write in (data_add, detached_copy):
        write(program)
        for module in program.net.blocks:
            module.unshard()
        program.check()
        program.net.blocks[1].unshard()
        program.net.blocks[1].reshard()


@checked_event
def exception_in_forward(program: Program) -> None:
    hook = program.net.head.register_forward_pre_hook(lockstep.interrupt)
    with pytest.raises(lockstep.Interrupted):
        program.net(program.x())
    hook.remove()
    program.check()  # the root is still gathered: FSDP2 does not reshard what is in its forward
    data_add(program)


@event
def forward_without_backward(program: Program) -> None:
    program.net(program.x())
    program.reshard()
    data_add(program)


# Explicit prefetch: of a block that has run, and of one that runs twice #


@checked_event
def prefetch_in_a_circle(program: Program) -> None:
    """Each block prefetches the next one, the last the first, whose forward has run."""
    blocks = list(program.net.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch([blocks[(i + 1) % len(blocks)]])
    for _ in range(2):
        program.check()
        data_add(program)
        program.reshard()
    program.check()
    for block in blocks:
        block.set_modules_to_forward_prefetch([])
    program.reshard()


@checked_event
def prefetch_of_a_block_that_runs_twice(program: Program) -> None:
    """A prefetches B, in the order A, B, A."""
    blocks, order = list(program.net.blocks), program.net.order
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    program.net.order = [0, 1, 0]
    for _ in range(2):
        program.check()
        data_add(program)
        program.reshard()
    program.check()
    blocks[0].set_modules_to_forward_prefetch([])
    program.net.order = order
    program.reshard()


@checked_event
def a_block_that_runs_twice(program: Program) -> None:
    order, program.net.order = program.net.order, [0, 1, 0, 2, 1]
    program.check()
    data_add(program)
    program.check()
    program.net.order = order


@checked_event
def prefetch_in_the_backward(program: Program) -> None:
    blocks = list(program.net.blocks)
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    program.check()
    data_add(program)
    program.check()
    blocks[2].set_modules_to_backward_prefetch([])


# On one rank alone: the others issue nothing for it #


def _on_one_rank(name: str, change: Callable[[Program], object]) -> None:
    """On rank 0, then on the last."""

    def run(program: Program) -> None:
        for rank in (0, program.world - 1):
            if program.rank == rank:
                change(program)
            program.check()

    EVENTS[f"one_rank_{name}"] = Event(run, checks=True)


def _load_own(program: Program) -> None:
    program.net.load_state_dict({k: v.clone() for k, v in program.net.state_dict().items()})


_on_one_rank("state_dict", lambda program: program.net.state_dict())
_on_one_rank("load", _load_own)
_on_one_rank(
    "load_other_values", lambda program: program.net.load_state_dict(_other_values(program))
)
_on_one_rank("step", lambda program: program.step("sgd_loop"))
_on_one_rank("step_foreach", lambda program: program.step("adamw_foreach"))
_on_one_rank("sync", lambda program: fq.sync(program.net))
_on_one_rank("write", data_add)
_on_one_rank("counted_write", detached_copy)
_on_one_rank("memmove", memmove)
_on_one_rank("read", lambda program: [lockstep.plain(shard) for shard in program.locals()])


# Of a model that did not run #


@first_event
def first_forward_in_inference_mode(program: Program) -> None:
    """A rollout worker, which is written and acts again. FSDP2's own buffers are then inference
    tensors: it cannot train."""
    program.check("inference_mode")
    data_add(program)
    program.reshard()


@first_event
def first_forward_in_no_grad(program: Program) -> None:
    program.check("no_grad")
    program.reshard()


@first_event
def cast_before_the_first_forward(program: Program) -> None:
    """Later than that, plain FSDP2 gathers into buffers of the old dtype."""
    program.net.to(BF16)
    data_add(program)


@first_event
def write_before_the_first_forward(program: Program) -> None:
    data_add(program)


OPTIONS = {
    "reshard_after_forward_false": {"reshard_after_forward": False},
    "one_checkpoint_around_blocks": {"around": "not reentrant"},
    "one_reentrant_checkpoint_around_blocks": {"around": "reentrant"},
}


EVENTS["first_forward_in_inference_mode"] = EVENTS["first_forward_in_inference_mode"]._replace(
    mode="inference_mode"
)


def _option(name: str) -> None:
    def run(program: Program) -> None:
        for _ in range(2):
            program.check()
            data_add(program)

    EVENTS[name] = Event(run, fresh=True, checks=True)


for _name in OPTIONS:
    _option(_name)


# Laws #


def _one_event(rank: int, world: int, name: str, recipe: str, gpu: bool = False) -> None:
    with hopper.emulated() if gpu else contextlib.nullcontext():
        program = Program(recipe, rank, world, **OPTIONS.get(name, {}))
        if not EVENTS[name].fresh:
            program.check()
        program.done.append(name)
        event = EVENTS[name]
        twice = laws.EVERYTHING or event.fresh and not event.checks  # others are the second
        for _ in range(1 + twice):  # what is remembered of the first is found by the second
            EVENTS[name].run(program)
            program.check(EVENTS[name].mode)


GPU = (False, True) if DEVICE == "cpu" else (False,)  # emulated, on a CPU
ON_GPU = {
    "sgd_loop": "fp8_current",
    "data_add": "mxfp8",
    "prefetch_in_a_circle": "mxfp8/nvfp4",
    "one_rank_step": "fp8_current",
    "evaluation_inference_mode": "fp8_block",
}
# Others do the same by other functions; what compiles and torchao's run in one process in CI.
NOT_IN_CI = {
    "sgd_foreach",
    "adamw_loop",
    "adagrad",
    "one_rank_load",
    "one_rank_step",
    "one_rank_counted_write",
} | {name for name, e in EVENTS.items() if e.compiles}
CHUNKS = 4  # of events that CI runs in the same two processes


def _cases() -> list[tuple[str, str, bool]]:
    """(event, recipe, emulated GPU): all, or each event with one recipe in turn."""
    if laws.EVERYTHING:
        cases = [(e, r, gpu) for gpu in GPU for e in EVENTS for r in (*RECIPES, PLAIN)]
        return [case for case in cases if case[1:] != (PLAIN, True)]
    names = [name for name in EVENTS if name not in NOT_IN_CI]
    cases = [(n, QUANTIZED[i % len(QUANTIZED)], False) for i, n in enumerate(names)]
    return cases + [(name, recipe, True) for name, recipe in ON_GPU.items() if True in GPU]


def _events(rank: int, world: int, cases: list[tuple[str, str, bool]]) -> dict[tuple, list[str]]:
    """case -> what each rank says, of the cases that failed. Each has a model and a group."""
    failed = {}
    for case in cases:
        try:
            _one_event(rank, world, *case)
            error = "nothing"
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:600]}"
        errors: list = [None] * world
        dist.all_gather_object(errors, error)
        if any(e != "nothing" for e in errors):
            failed[case] = errors
    return failed


def _check_events(world: int, cases: list[tuple[str, str, bool]]) -> None:
    failed = run_ranks(world, _events, cases)[0]
    texts = [f"{', '.join(map(str, case))}: {errors}" for case, errors in failed.items()]
    if texts:
        of = f"{len(texts)} of {len(cases)} events (event, recipe, emulated GPU) failed"
        raise AssertionError(f"{of} at {world} ranks:\n" + "\n".join(texts))


if laws.EVERYTHING:

    @pytest.mark.parametrize("world", [2, 3])
    @pytest.mark.parametrize("name, recipe, gpu", _cases(), ids=lockstep.case_id)
    def test_event_is_seen(name: str, recipe: str, gpu: bool, world: int) -> None:
        """One event between two passes, twice. False: the gather after this event sends codes of
        other values, or hangs."""
        _check_events(world, [(name, recipe, gpu)])

else:

    @pytest.mark.parametrize("chunk", range(CHUNKS))
    def test_event_is_seen(chunk: int) -> None:
        """One event between two passes, twice. False: the gather after this event sends codes of
        other values, or hangs."""
        _check_events(2, _cases()[chunk::CHUNKS])


def _program(rank: int, world: int, names: list[str], recipe: str, seed: int, steps: int) -> None:
    drawn = random.Random(seed)
    program = Program(recipe, rank, world, reshard_after_forward=drawn.random() < 0.7)
    program.check()
    for _ in range(steps):
        name = drawn.choice(names)
        program.done.append(name)
        EVENTS[name].run(program)
        program.check()


def _programs(
    rank: int, world: int, names: list[str], cases: list[tuple[str, int]], steps: int
) -> None:
    for recipe, seed in cases:
        _program(rank, world, names, recipe, seed, steps)


# Ranks, programs and their lengths of a test, whose ranks have five minutes.
PROGRAMS = [(2, [(recipe, seed) for seed, recipe in enumerate(FEW)], 3)]
if laws.EVERYTHING:
    PROGRAMS = [
        (world, [(recipe, seed), (recipe, seed + 1)], 15)
        for world, recipe, seed in itertools.product((2, 3), (*RECIPES, PLAIN), range(0, 10, 2))
    ]


@pytest.mark.parametrize("world, cases, steps", PROGRAMS)
def test_programs_run_in_lock_step(world: int, cases: list[tuple[str, int]], steps: int) -> None:
    """Programs of many events. False: some order of them leaves codes of other values to a
    gather."""
    names = [n for n, e in EVENTS.items() if not e.fresh and (laws.EVERYTHING or not e.compiles)]
    run_ranks(world, _programs, names, cases, steps)


PLAIN_EVENTS = ["sgd_loop", "adamw_foreach", "load"]


def _control(rank: int, world: int, recipe: str) -> tuple[str, int]:
    """(what failed, times that a kept code was sent) of a program that passes without the
    control."""
    _programs(rank, world, PLAIN_EVENTS, [(recipe, 0)], 3)
    rows = len(torch.empty(HIDDEN[1], K).chunk(world)[rank])  # of blocks.1.up.weight
    with lockstep.one_code_kept((rows, K)) as (live, kept):
        program = Program(recipe, rank, world, live)
        failed = ""
        program.check()
        for name in PLAIN_EVENTS:
            program.done.append(name)
            EVENTS[name].run(program)
            try:
                program.check()
            except AssertionError as error:
                failed = failed or str(error)
    return failed, kept.times


@pytest.mark.parametrize("recipe", laws.every_second(["mxfp8", "fp8_current"], 1))
def test_one_kept_code_fails_the_lock_step(recipe: str) -> None:
    """The control: the shards of one weight keep their codes of the first gather. False: the law
    proves nothing."""
    for rank, (failed, times) in enumerate(run_ranks(2, _control, recipe)):
        assert times, "no kept code was handed out: shards are not quantized by ops.dispatch.encode"
        assert "elements differ" in failed, (
            f"rank {rank} computed what its shards say, with a code that was kept"
        )


# Laws beside the lock step #


def _refused(rank: int, world: int, order: str) -> str:
    """The message of the refusal, which comes before any collective that another rank would not
    join."""
    # Plain FSDP2 itself wants even shards of dim 1.
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if order == "convert first":
        fq.convert(net, RECIPES["mxfp8"])
    placed = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}
    try:
        fully_shard(net[0], **placed)
        fully_shard(net, **placed)
        if order == "shard first":
            fq.convert(net, RECIPES["mxfp8"])
        net(laws.values(M, 64, dtype=FP32)).sum().backward()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("order", ["convert first", "shard first"])
def test_shards_of_dim_1_are_refused_on_every_rank(order: str) -> None:
    """False: columns are taken for rows, and another model is trained; or one rank raises and the
    others wait."""
    for texts in [
        run_ranks(world, _refused, order) for world in ((2, 4) if laws.EVERYTHING else (2,))
    ]:
        assert len(set(texts)) == 1, f"other messages on other ranks: {texts}"
        assert "weight" in texts[0] and "dim" in texts[0], (
            f"no refusal that names the weight and the dim: {texts[0]!r}"
        )


class InPlace(nn.Module):
    """Linear layers, sharded each by itself, whose outputs are operated on in place, or out of
    place."""

    def __init__(self, bias: bool, in_place: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, K, bias=bias) for _ in range(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        if not self.in_place:
            return third(torch.relu(second(torch.relu(first(x))) + x)) + 1
        y = second(nn.functional.relu(first(x), inplace=True))
        y += x
        nn.functional.relu(y, inplace=True)
        y = third(y)
        y += 1
        return y


def _in_place(rank: int, world: int, names: list[str]) -> None:
    for name, bias, shape in laws.crossed(names, (True, False), ((M, K), (2, M // 2, K)), stride=3):
        found = []
        for in_place in (False, True):
            torch.manual_seed(0)
            net = fq.convert(InPlace(bias, in_place), RECIPES[name])
            for layer in net.layers:
                fully_shard(layer)
            fully_shard(net)
            fq.begin_step(0)
            x = laws.values(*shape, seed=rank, dtype=FP32).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                y = net(x)
                y.square().mean().backward()
            found.append(
                {"output": y, "x": x.grad}
                | {n: local_of(p.grad) for n, p in net.named_parameters()}
            )
        lockstep.assert_same_tensors(found[1], found[0], f"{name}, bias {bias}, {list(shape)}")


def test_outputs_take_operations_in_place() -> None:
    """`x += y` and `ReLU(inplace=True)` on outputs of sharded layers, without a warning. False:
    torch refuses them, or drops the hook by which FSDP2 gathers for the backward."""
    run_ranks(2, _in_place, ["identity", "mxfp8", "fp8_current"])
