# SPDX-License-Identifier: Apache-2.0
"""The law of "codes are values", in one process: whatever writes a weight, the next product
multiplies what was written.

A program runs on a converted model. After each of its steps a second model is built from nothing
but the plain values of the parameters, converted anew, and run on the same input: outputs and all
gradients are the same bytes. If this is false, training goes on with old codes, old amaxes or old
scales, in silence.

`test_writer_is_seen` runs each writer by itself, so that a failure names it.
`test_programs_run_in_lock_step` runs programs of many writers, drawn by hypothesis. Both are
samples in CI. Every recipe, the emulated GPU, and compiled and 8-bit optimizers inside the
programs:

    FSDP_QUANT_ALL_PAIRS=1 python -m pytest dist_tests/single/test_lockstep.py

FSDP_QUANT_TEST_DEVICE=cuda runs it on a GPU, where norms hand amaxes to the layers behind them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws, lockstep
from dist_tests.multi.harness import DEVICE
from dist_tests.optimizers import CASES
from dist_tests.single import hopper
from fsdp_quant import recipes

M, K = 24, 64  # tokens, width
LAST = 32  # width of the last layer: its weight alone is [LAST, K]
FP32, BF16 = torch.float32, torch.bfloat16
RECIPES = {
    "mxfp8": recipes.mxfp8(),
    "fp8_current": recipes.fp8_current(),
    "mxfp8/nvfp4": recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_block": recipes.fp8_block(),
    "nvfp4": recipes.nvfp4(),
    "identity": recipes.identity(),
    "fp8_delayed": recipes.fp8_delayed(length=2),
}
QUANTIZED = [name for name in RECIPES if name != "identity"]
PLAIN = "plain"  # nn.Linear, unconverted: what these writers do is fair


# The model and the program that runs on it #


class Net(nn.Module):
    """A norm, linear layers with and without a bias, one of them called twice, and a fused norm +
    linear; unconverted.

    recipe:  key of RECIPES, of what is no nn.Linear; PLAIN: all modules are torch's.
    """

    def __init__(self, recipe: str, recompute: bool = False):
        super().__init__()
        self.norm = nn.RMSNorm(K) if recipe == PLAIN else fq.Norm(K)
        self.first, self.twice = nn.Linear(K, K), nn.Linear(K, K, bias=False)
        if recipe == PLAIN:
            self.fused = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, K))
        else:
            self.fused = fq.LayerNormLinear(K, K, recipe=RECIPES[recipe], name="fused")
        self.last = nn.Linear(K, LAST)
        self.recompute = recompute

    def middle(self, h: Tensor) -> Tensor:
        h = torch.relu(self.first(h))
        return h + self.twice(torch.relu(self.twice(h)))

    def forward(self, x: Tensor, between: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
        """`between` sees the output of the norm before the linear layer does."""
        h = between(self.norm(x))
        h = checkpoint(self.middle, h, use_reentrant=False) if self.recompute else self.middle(h)
        return self.last(torch.relu(self.fused(h)))


def converted(net: Net, recipe: str) -> Net:
    return net if recipe == PLAIN else fq.convert(net, RECIPES[recipe])


class Program:
    """A converted model that is written, and the check that it computes what its plain values say.

    recipe:   key of RECIPES; the `set_recipe` writers change it.
    count:    checks so far; the step of the random bits, and the seed of the input.
    live:     context in which the live model runs (the control keeps a code in it).
    """

    def __init__(
        self,
        recipe: str,
        recompute: bool = False,
        dtype: torch.dtype = FP32,
        live=contextlib.nullcontext,
    ):
        torch.manual_seed(0)
        self.recipe, self.count, self.writes, self.live = recipe, 0, 0, live
        self.done: list[str] = []
        self.optimizers: dict[str, tuple[list[Tensor], Callable[[], object]]] = {}
        self.net = converted(Net(recipe, recompute).to(dtype), recipe)

    # The reference #

    def reference(self) -> Net:
        """A new model with the live one's plain values and flags, which recomputes nothing."""
        made = Net(self.recipe).to(self.net.first.weight.dtype)
        lockstep.give(made, lockstep.plain_values(self.net))
        live = dict(self.net.named_parameters())
        for name, p in made.named_parameters():
            p.requires_grad_(live[name].requires_grad)
        return converted(made, self.recipe).train(self.net.training)

    def histories(self) -> dict | None:
        """Delayed scaling is state: amaxes of earlier steps, which plain values do not hold."""
        if self.recipe != "fp8_delayed":
            return None
        return copy.deepcopy(fq.state_dict(self.net)["histories"])

    def x(self) -> Tensor:
        return laws.values(M, K, seed=self.count, dtype=self.net.first.weight.dtype)

    def check(
        self,
        mode: str = "train",
        between: Callable[[Tensor], Tensor] | None = None,
        batches: int = 1,
    ) -> None:
        """Outputs and gradients are those of the reference. Gradients add to those that are there,
        in both models.

        mode:     of `run`.
        between:  writes the norm's output in place, where nothing counts it.
        batches:  forwards before the backwards, which run in reverse.
        """
        self.count += 1
        gradients = {
            n: None if p.grad is None else lockstep.plain(p.grad)
            for n, p in self.net.named_parameters()
        }
        histories = self.histories()
        with self.live():
            got = run(self.net, self.x(), self.count, mode, between or (lambda h: h), batches)
        reference = self.reference()
        if histories is not None:
            state = fq.state_dict(reference) | {"histories": histories}
            del state["codes"]
            fq.load_state_dict(reference, state)
        for name, p in reference.named_parameters():
            p.grad = gradients[name]
        # A clone holds what was written, in memory that nothing remembers.
        known = (lambda h: between(h).clone()) if between else (lambda h: h)
        want = run(reference, self.x(), self.count, mode, known, batches)
        what = f"{self.recipe}, {mode}, after {self.done or 'nothing'}"
        lockstep.assert_same_tensors(got, want, what)
        assert got["output 0"].isfinite().all(), f"{what}: it is not finite, which proves nothing"

    # What writers use #

    def weights(self) -> dict[str, Tensor]:
        """The parameters that products multiply as codes."""
        return {n: p for n, p in self.net.named_parameters() if p.dim() == 2}

    def noise(self, like: Tensor, scale: float = 0.3) -> Tensor:
        """Other values each time, plain."""
        self.writes += 1
        return laws.values(*like.shape, seed=1000 + self.writes, dtype=like.dtype) * scale

    def gradients(self) -> None:
        """Every parameter that trains has a gradient."""
        for p in self.net.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = self.noise(p)

    def step(self, name: str, make: Callable[[list[Tensor]], Callable[[], object]]) -> None:
        """One step of the optimizer of this name, kept from step to step while the parameters are
        the same objects."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        if WRITERS[name].compiles:
            # Inductor takes seconds for each shape.
            some = (self.net.first.weight, self.net.last.weight)
            parameters = [p for p in some if p.requires_grad]
        held, step = self.optimizers.get(name, (None, None))
        if held is None or [(id(p), d) for p, d in held] != [(id(p), p.dtype) for p in parameters]:
            held, step = [(p, p.dtype) for p in parameters], make(parameters)
            self.optimizers[name] = held, step
        self.gradients()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        step()
        for p in self.net.parameters():
            p.grad = None


def run(
    net: nn.Module, x: Tensor, step: int, mode: str, between, batches: int
) -> dict[str, Tensor | None]:
    """Outputs and gradients by name. Both models get the same step of random bits.

    mode:  "train"; "autocast" (to bf16, with a backward); "no_grad" and "inference_mode"
           (evaluation, forward alone).
    """
    context = {
        "train": contextlib.nullcontext,
        "autocast": functools.partial(torch.autocast, x.device.type, BF16),
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }[mode]()
    grad, found, outputs, inputs = mode in ("train", "autocast"), {}, [], []
    net.train(grad)
    for batch in range(batches):
        fq.begin_step(step, micro_batch=batch)
        inputs.append((x * (batch + 1)).requires_grad_(grad))
        with context:
            outputs.append(net(inputs[-1], between))
        found[f"output {batch}"] = outputs[-1].detach()
    for batch in reversed(range(batches if grad else 0)):
        y = outputs[batch]
        y.backward(laws.values(*y.shape, seed=77 + batch, dtype=y.dtype))
        found[f"input gradient {batch}"] = inputs[batch].grad
    net.train()
    return found | {
        f"gradient of {n}": None if p.grad is None else lockstep.plain(p.grad)
        for n, p in net.named_parameters()
    }


# Writers: each changes weights, or how the model runs, and says nothing about it #


class Writer(NamedTuple):
    run: Callable[[Program], object]
    compiles: bool = False  # inductor: seconds


WRITERS: dict[str, Writer] = {}


def writer(change: Callable[[Program], object]) -> Callable[[Program], object]:
    WRITERS[change.__name__] = Writer(change)
    return change


def _optimizer(
    name: str, make: Callable[[list[Tensor]], Callable[[], object]], compiles: bool = False
) -> None:
    WRITERS[name] = Writer(lambda program: program.step(name, make), compiles)


def _torch_optimizer(cls: type, **options) -> Callable:
    return lambda parameters: cls(parameters, **options).step


def _compiled(cls: type, **options) -> Callable:
    def make(parameters: list[Tensor]) -> Callable[[], object]:
        optimizer = cls(parameters, **options)
        return torch.compile(lambda: optimizer.step(), backend="inductor")

    return make


def _torchao(name: str) -> Callable:
    def make(parameters: list[Tensor]) -> Callable[[], object]:
        optim = pytest.importorskip("torchao.optim")
        optimizer = getattr(optim, name)(parameters, lr=0.05)
        return optimizer.step

    return make


for _cls, _options in (
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.05}),
):
    for _way in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        _kind = "fused" if "fused" in _way else "foreach" if _way["foreach"] else "loop"
        _optimizer(f"{_cls.__name__.lower()}_{_kind}", _torch_optimizer(_cls, **_options, **_way))
    _optimizer(f"compiled_{_cls.__name__.lower()}", _compiled(_cls, **_options), compiles=True)
for _name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    _optimizer(f"torchao_{_name.lower()}", _torchao(_name), compiles=True)


def _of_the_page(name: str) -> Callable:
    """An optimizer of docs/optimizers.md."""
    return lambda parameters: (
        CASES[name].cls(CASES[name].parameters(parameters), **CASES[name].options).step
    )


for _name in ("adam_loop", "adagrad", "adafactor_foreach", "muon"):
    _optimizer(_name, _of_the_page(_name))
for _name in ("bitsandbytes_adamw8bit", "bitsandbytes_lion8bit"):
    _optimizer(_name, _of_the_page(_name), compiles=True)  # its library's operators


@writer
def optimizer_in_backward(program: Program) -> None:
    """One optimizer per parameter, stepped as its gradient arrives."""
    with lockstep.optimizers_in_backward(program.net.parameters()):
        program.net(program.x()).square().mean().backward()


@writer
def own_optimizer(program: Program) -> None:
    """No torch Optimizer: nothing tells a library that a step was taken."""
    program.gradients()
    with torch.no_grad():
        for p in program.net.parameters():
            if p.grad is not None:
                p -= 0.3 * p.grad.sign()
                p.grad = None


def _compiled_write(p: Tensor, noise: Tensor) -> None:
    p.sub_(noise.sign(), alpha=0.2)


def _compiled_function(program: Program) -> None:
    """A graph of inductor writes through the pointer of a detached alias."""
    write = torch.compile(_compiled_write, backend="inductor", fullgraph=True)
    for p in program.weights().values():
        write(p.detach(), program.noise(p))


WRITERS["compiled_function"] = Writer(_compiled_function, compiles=True)


@writer
def data_add(program: Program) -> None:
    for p in program.weights().values():
        p.data.add_(program.noise(p))


@writer
def data_assign(program: Program) -> None:
    for p in program.weights().values():
        p.data = program.noise(p)


@writer
def detached_copy(program: Program) -> None:
    for p in program.weights().values():
        p.detach().copy_(program.noise(p))


@writer
def foreach_lerp(program: Program) -> None:
    """An average of weights: EMA, SWA, Lookahead."""
    weights = list(program.weights().values())
    with torch.no_grad():
        torch._foreach_lerp_(weights, [program.noise(p) for p in weights], 0.5)


@writer
def numpy_view(program: Program) -> None:
    for p in program.weights().values():
        lockstep.overwrite_by_numpy(p, program.noise(p))


@writer
def dlpack_view(program: Program) -> None:
    for p in program.weights().values():
        lockstep.assert_reachable(p)
        torch.from_dlpack(p.detach()).copy_(program.noise(p))


@writer
def memmove(program: Program) -> None:
    for p in program.weights().values():
        lockstep.overwrite(p, program.noise(p))


@writer
def storage_copy(program: Program) -> None:
    for p in program.weights().values():
        lockstep.assert_reachable(p)
        written, noise = p.untyped_storage(), program.noise(p).untyped_storage()
        if written.nbytes() == noise.nbytes():  # not a view of a flat buffer
            written.copy_(noise)


@writer
def vector_to_parameters(program: Program) -> None:
    """Parameters become views of one flat buffer, which is written afterwards."""
    parameters = list(program.net.parameters())
    flat = torch.cat([lockstep.plain(p).flatten() for p in parameters])
    nn.utils.vector_to_parameters(flat, parameters)
    program.check()
    flat.add_(program.noise(flat))


@writer
def share_memory(program: Program) -> None:
    """Memory that other processes write (Hogwild): the parameter moves there, and is written
    through its pointer."""
    lockstep.assert_reachable(program.net.first.weight)
    program.net.share_memory()
    program.check()
    for p in program.weights().values():
        lockstep.overwrite(p, program.noise(p))


@writer
def swap_tensors(program: Program) -> None:
    for p in program.weights().values():
        torch.utils.swap_tensors(p, nn.Parameter(program.noise(p), requires_grad=p.requires_grad))


@writer
def new_parameter(program: Program) -> None:
    for name, p in program.weights().items():
        owner, _, attribute = name.rpartition(".")
        setattr(
            program.net.get_submodule(owner),
            attribute,
            nn.Parameter(program.noise(p), p.requires_grad),
        )


@writer
def load(program: Program) -> None:
    program.net.load_state_dict({k: program.noise(v) for k, v in program.net.state_dict().items()})


@writer
def load_assign(program: Program) -> None:
    trains = {n: p.requires_grad for n, p in program.net.named_parameters()}
    program.net.load_state_dict(
        {k: program.noise(v) for k, v in program.net.state_dict().items()}, assign=True
    )
    for n, p in program.net.named_parameters():
        p.requires_grad_(trains[n])


@writer
def state_dict_write(program: Program) -> None:
    """A state dict holds aliases of the weights; who was handed one may write into it at any later
    time."""
    held = program.net.state_dict()
    program.check()
    for value in held.values():
        value.mul_(-1.5)
    program.check()
    lockstep.overwrite(held["first.weight"], program.noise(held["first.weight"]))


@writer
def initialize_again(program: Program) -> None:
    with torch.no_grad():
        for p in program.weights().values():
            nn.init.uniform_(
                p, -0.3, 0.3, generator=torch.Generator(p.device).manual_seed(program.writes)
            )
            program.writes += 1


@writer
def train_a_copy(program: Program) -> None:
    """The copy's writes are not seen by the original, nor the other way round."""
    original, program.net = program.net, copy.deepcopy(program.net)
    data_add(program)
    program.check()
    WRITERS["sgd_loop"].run(program)
    program.check()
    program.net = original


@writer
def go_on_with_a_copy(program: Program) -> None:
    program.net = copy.deepcopy(program.net)
    data_add(program)


@writer
def go_on_with_a_pickle(program: Program) -> None:
    buffer = io.BytesIO()
    torch.save(program.net, buffer)
    program.net = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    data_add(program)


@writer
def freeze_and_write(program: Program) -> None:
    for p in program.weights().values():
        p.requires_grad_(False)
    program.check()
    data_add(program)
    program.check()
    program.net.requires_grad_(True)


@writer
def freeze_one(program: Program) -> None:
    weight = program.net.first.weight
    weight.requires_grad_(not weight.requires_grad)


def _set_recipe(program: Program, recipe: str) -> None:
    fq.set_recipe(program.net, RECIPES[recipe])
    program.recipe = recipe


@writer
def set_recipe(program: Program) -> None:
    """To another recipe, a write under it, and back."""
    if program.recipe == PLAIN:
        return
    before, names = program.recipe, list(RECIPES)
    _set_recipe(program, names[(names.index(before) + 1) % len(names)])
    program.check()
    data_add(program)
    _set_recipe(program, before)


@writer
def exception_in_forward(program: Program) -> None:
    hook = program.net.last.register_forward_pre_hook(lockstep.interrupt)
    with pytest.raises(lockstep.Interrupted):
        program.net(program.x())
    hook.remove()
    data_add(program)


@writer
def exception_in_backward(program: Program) -> None:
    def between(h: Tensor) -> Tensor:
        h.register_hook(lockstep.interrupt)
        return h

    before = {
        n: None if p.grad is None else lockstep.plain(p.grad)
        for n, p in program.net.named_parameters()
    }
    with pytest.raises(lockstep.Interrupted):
        program.net(program.x(), between).sum().backward()
    data_add(program)
    for n, p in program.net.named_parameters():
        p.grad = before[n]


@writer
def forward_without_backward(program: Program) -> None:
    program.net(program.x())
    data_add(program)


def _evaluation(mode: str) -> None:
    def change(program: Program) -> None:
        program.check(mode)
        data_add(program)
        program.check(mode)
        data_add(program)

    WRITERS[f"evaluation_{mode}"] = Writer(change)


for _mode in ("no_grad", "inference_mode"):
    _evaluation(_mode)


@writer
def autocast(program: Program) -> None:
    """Autocast casts weights to bf16, and a cast is a copy that must not outlive a write."""
    program.check("autocast")
    data_add(program)
    program.check("autocast")
    data_add(program)


@writer
def accumulate(program: Program) -> None:
    """Micro-batches, of which some forwards come before the backwards, with a write between two."""
    program.check()
    program.check(batches=2)
    data_add(program)
    program.check()


@writer
def zero_grad(program: Program) -> None:
    for p in program.net.parameters():
        p.grad = None


@writer
def cast_there_and_back(program: Program) -> None:
    dtype = program.net.first.weight.dtype
    program.net.to(BF16 if dtype is FP32 else FP32)
    program.check()
    data_add(program)
    program.check()
    program.net.to(dtype)


def _scaled(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """What a collective in place or another library's kernel does to an activation: 1000 times as
    large, uncounted."""

    def between(h: Tensor) -> Tensor:
        write(h, (h.detach() * 1000).contiguous())
        return h

    return between


def _activation_writer(name: str, write: Callable[[Tensor, Tensor], object]) -> None:
    WRITERS[f"activation_{name}"] = Writer(lambda program: program.check(between=_scaled(write)))


_activation_writer("data", lambda h, new: h.data.copy_(new))
_activation_writer("memmove", lambda h, new: lockstep.overwrite(h.detach(), new))
_activation_writer("numpy", lockstep.overwrite_by_numpy)


# Laws #


@pytest.fixture(autouse=True)
def _own_step(monkeypatch) -> Iterator[None]:
    """Steps that programs begin are not seen by other tests."""
    # Else pytest prints what inductor logs.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    on_cpu = DEVICE == "cpu"  # where a default costs a call of Python at each call of torch
    with contextlib.nullcontext() if on_cpu else torch.device(DEVICE), laws.kept_step():
        yield
    torch._dynamo.reset()


GPU = (False, True) if DEVICE == "cpu" else (False,)  # emulated, on a CPU
# of those that compile: inductor takes seconds
IN_CI = ("torchao_adamw8bit", "bitsandbytes_adamw8bit")
ON_GPU = {  # amaxes that norms hand over are read by scales of whole tensors
    "activation_data": "fp8_current",
    "activation_memmove": "fp8_current",
    "activation_numpy": "fp8_delayed",
    "data_add": "mxfp8",
    "memmove": "nvfp4",
    "evaluation_no_grad": "fp8_block",
    "train_a_copy": "mxfp8/nvfp4",
}


def _cases() -> list:
    """(writer, recipe, emulated GPU): all, or each writer with one recipe in turn."""
    if laws.EVERYTHING:
        return [
            (w, r, gpu)
            for w in WRITERS
            for r in (*RECIPES, PLAIN)
            for gpu in GPU
            if r != PLAIN or not gpu
        ]
    names = [n for n, w in WRITERS.items() if not w.compiles or n in IN_CI]
    cases = [(n, QUANTIZED[i % len(QUANTIZED)], False) for i, n in enumerate(names)]
    return cases + [(name, recipe, True) for name, recipe in ON_GPU.items() if True in GPU]


@pytest.mark.parametrize("name, recipe, gpu", _cases(), ids=lockstep.case_id)
def test_writer_is_seen(name: str, recipe: str, gpu: bool) -> None:
    """One writer between two passes, twice in the full run. False: the product after this writer
    multiplies codes of other values."""
    with hopper.emulated() if gpu else contextlib.nullcontext():
        program = Program(recipe)
        program.check()
        for _ in range(2 if laws.EVERYTHING else 1):
            WRITERS[name].run(program)
            program.done.append(name)
            program.check()


def programs(
    names: list[str], recipe_names: list[str], gpu: bool = False, live=contextlib.nullcontext
) -> type[RuleBasedStateMachine]:
    """A state machine whose rules are these writers; outputs and gradients are compared after
    each."""

    class LockStep(RuleBasedStateMachine):
        program = None

        def __init__(self):
            super().__init__()
            self.contexts = contextlib.ExitStack()
            self.contexts.enter_context(laws.kept_step())
            if gpu:
                self.contexts.enter_context(hopper.emulated())

        @initialize(
            recipe=st.sampled_from(recipe_names),
            recompute=st.booleans(),
            dtype=st.sampled_from([FP32, FP32, BF16]),
        )
        def convert(self, recipe: str, recompute: bool, dtype: torch.dtype) -> None:
            self.program = Program(recipe, recompute, dtype, live)

        @invariant()
        def outputs_and_gradients_are_those_of_the_plain_values(self) -> None:
            if self.program is not None:
                self.program.check()

        def teardown(self) -> None:
            self.contexts.close()

    def rule_of(name: str) -> Callable:
        def change(self) -> None:
            self.program.done.append(name)
            WRITERS[name].run(self.program)

        change.__name__ = change.__qualname__ = name
        return rule()(change)

    def to_recipe(self, recipe: str) -> None:
        self.program.done.append(f"set_recipe({recipe!r})")
        _set_recipe(self.program, recipe)

    rules = {name: rule_of(name) for name in names}
    if "set_recipe" in names:
        rules["set_recipe"] = precondition(lambda self: self.program.recipe != PLAIN)(
            rule(recipe=st.sampled_from(list(RECIPES)))(to_recipe)
        )
    return type("LockStep", (LockStep,), rules)


def run_programs(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """The same programs in each run; a failure is not shrunk, which would take minutes:
    `test_writer_is_seen` names it."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize("gpu", GPU, ids=lambda gpu: "gpu" if gpu else "cpu")
def test_programs_run_in_lock_step(gpu: bool) -> None:
    """Programs of many writers. False: some order of them leaves codes of other values to a
    product."""
    names = [n for n, w in WRITERS.items() if laws.EVERYTHING or not w.compiles]
    if laws.EVERYTHING:
        run_programs(
            programs(names, list(RECIPES) + ([] if gpu else [PLAIN]), gpu), examples=100, steps=15
        )
    else:
        run_programs(programs(names, list(RECIPES), gpu), examples=2 if gpu else 6, steps=6)


PLAIN_WRITERS = [
    "sgd_loop",
    "sgd_foreach",
    "adamw_loop",
    "adamw_foreach",
    "detached_copy",
    "initialize_again",
    "zero_grad",
]


@pytest.mark.parametrize("recipe", laws.sample(QUANTIZED, 3))
def test_one_kept_code_fails_the_lock_step(recipe: str) -> None:
    """The control: the live model keeps the codes of one weight from its first forward. False: the
    law proves nothing."""
    run_programs(programs(PLAIN_WRITERS, [recipe]), examples=3, steps=4)
    with lockstep.one_code_kept((LAST, K)) as (live, kept):
        with pytest.raises(AssertionError, match="output 0: .* elements differ"):
            run_programs(programs(PLAIN_WRITERS, [recipe], live=live), examples=3, steps=4)
        assert kept.times, (
            "no kept code was handed out: weights are not quantized by ops.dispatch.encode"
        )


# A weight is a Parameter, an output is a tensor of its own #


@pytest.mark.parametrize("recipe", QUANTIZED if laws.EVERYTHING else ["mxfp8", "nvfp4"])
def test_data_of_another_dtype_is_a_cast(recipe: str) -> None:
    """`weight.data = weight.data.to(bf16)`, as trainers cast models. False: the cast is refused, or
    old codes go on."""
    program = Program(recipe)
    program.check()
    for dtype in (BF16, FP32):
        for p in program.net.parameters():
            p.data, p.grad = lockstep.plain(p).to(dtype), None
        assert {p.dtype for p in program.net.parameters()} == {dtype}
        program.check()
        WRITERS["sgd_loop"].run(program)
        program.check()


IN_PLACE = {
    "y += 1": lambda y, z: y.add_(1),
    "y += z": lambda y, z: y.add_(z),
    "y *= z": lambda y, z: y.mul_(z),
    "relu_": lambda y, z: torch.relu_(y),
    "y[.., 0] = 0": lambda y, z: y.select(-1, 0).zero_() is None or y,
}
OF_PLACE = {
    "y += 1": lambda y, z: y.add(1),
    "y += z": lambda y, z: y.add(z),
    "y *= z": lambda y, z: y.mul(z),
    "relu_": lambda y, z: torch.relu(y),
    "y[.., 0] = 0": lambda y, z: torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], -1),
}
MODULES = {
    "linear": lambda r: fq.Linear(K, LAST, recipe=r, name="layer"),
    "no bias": lambda r: fq.Linear(K, LAST, bias=False, recipe=r, name="layer"),
    "norm + linear": lambda r: fq.LayerNormLinear(K, LAST, recipe=r, name="layer"),
    "norm": lambda r: fq.Norm(K),
    "mlp": lambda r: fq.LayerNormMLP(
        K, LAST, bias=False, normalization="RMSNorm", recipe=r, name="layer"
    ),
}


def _operated(
    kind: str, recipe: str, operation: Callable, shape: tuple[int, ...], frozen: bool, needs_x: bool
) -> dict:
    """Output, after the operation, and gradients of a new module."""
    torch.manual_seed(0)
    module = MODULES[kind](RECIPES[recipe])
    for name, p in module.named_parameters():
        p.requires_grad_(not (frozen and name.endswith("weight")))
    x = laws.values(*shape, dtype=FP32).requires_grad_(needs_x)
    fq.begin_step(0)
    y = module(x)
    z = laws.values(*y.shape, seed=3, dtype=FP32).requires_grad_()
    y = operation(y, z)
    y.backward(laws.values(*y.shape, seed=5, dtype=FP32))
    return {"output": y, "z": z.grad, "x": x.grad} | {
        n: p.grad for n, p in module.named_parameters()
    }


@pytest.mark.parametrize("gpu", GPU, ids=lambda gpu: "gpu" if gpu else "cpu")
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_take_operations_in_place(kind: str, gpu: bool) -> None:
    """`x += y`, `ReLU(inplace=True)`: outputs and gradients of the same operation out of place.
    False: torch refuses the operation, because the output is a view that a custom function
    returned."""
    shapes = (M, K), (2, M // 2, K)
    cases = [(shape, False, True, operation) for shape in shapes for operation in IN_PLACE]
    cases += [(shapes[1], True, True, "y += z"), (shapes[1], False, False, "y += z")]
    wrong = []
    with hopper.emulated() if gpu else contextlib.nullcontext():
        for recipe in RECIPES if laws.EVERYTHING else ("identity", "mxfp8"):
            for shape, frozen, needs_x, operation in cases:
                what = f"{recipe}, {list(shape)}, gradient {needs_x}, frozen {frozen}, {operation}"
                want = _operated(kind, recipe, OF_PLACE[operation], shape, frozen, needs_x)
                try:
                    got = _operated(kind, recipe, IN_PLACE[operation], shape, frozen, needs_x)
                except RuntimeError as error:
                    wrong.append(f"{what}: {str(error)[:60]}")
                    continue
                lockstep.assert_same_tensors(got, want, f"{kind}, {what}")
    if wrong:
        raise AssertionError(f"{kind}: {len(wrong)} refused, such as\n  " + "\n  ".join(wrong[:3]))


@pytest.mark.parametrize(
    "recipe", QUANTIZED if laws.EVERYTHING else ["mxfp8", "fp8_current", "nvfp4"]
)
def test_a_quantized_parameter_follows_its_quantizer(recipe: str) -> None:
    """`fq.set_recipe` of `fq.quantized_model_init`'s parameters: codes of the masters by the new
    recipe. False: products go on with codes of the old one, or with codes of codes."""
    others = [r for r in QUANTIZED if r not in (recipe, "fp8_delayed")]
    torch.manual_seed(0)
    with fq.quantized_model_init(RECIPES[recipe]):
        net = fq.convert(
            nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, LAST)), RECIPES[recipe]
        )
    optimizer = fq.optim.FusedAdam(net.parameters(), lr=0.05)
    for step, other in enumerate(others if laws.EVERYTHING else others[:2], 1):
        results = []
        fq.set_recipe(net, RECIPES[other])
        fresh = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, LAST))
        fresh.load_state_dict(net.state_dict())  # values of the masters
        fq.convert(fresh, RECIPES[other])
        for model in (net, fresh):
            fq.begin_step(step)
            x = laws.values(M, K, seed=step, dtype=FP32).requires_grad_()
            y = model(x)
            y.backward(laws.values(*y.shape, seed=5, dtype=FP32))
            results.append(
                {"output": y, "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
            )
        lockstep.assert_same_tensors(*results, f"{recipe}, then {other} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
