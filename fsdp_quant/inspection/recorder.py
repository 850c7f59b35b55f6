# SPDX-License-Identifier: Apache-2.0
"""Record quantization statistics of a run, by layer and slot: `inspect(model)`.

[Note: what is measured, and when]
Hooks on the layers quantize each tensor of a sampled step a second time, with the layer's own
quantizers, delayed scales and random key. So the codes are those that the step multiplies. The
hooks store no codes, advance no generator and record no history: training bits do not change.

    input        after the layer's forward (not when a backward recomputes it)
    grad_output  a hook on the layer's output
    weight       after the model's forward; under `fully_shard`, each rank's shard with the shared
                 statistics
    grad_norm    when the weight's gradient is accumulated: the norm of the sharded gradient, before
                 clipping

Statistics stay on the device until the next training forward begins. Steps that are not sampled are
only counted. Each rank measures its own operands; with tensor parallelism, its part of a layer.

torch.compile: a sampled step runs eagerly (`torch.compiler.set_stance("force_eager")`), so nothing
is traced again. Its bits are those of eager mode. They differ from a graph's bits where inductor
fuses. A replayed CUDA graph (`fq.graphed`) runs no hooks.

A run does not depend on the recorder: a fault of it is one warning that names the layer, whose
number is left out (`_observe`). Copies and pickles of the model have no hooks of it. Nothing is
measured under fake tensors, torch.func, or while a graph is traced.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..context import STEP
from ..counters import counters
from ..formats import Direction
from ..linear.grouped_linear import GroupedLinear
from ..linear.linear import Linear
from ..linear.operands import slot_key
from ..models.set_recipe import converted_units
from ..models.steps import converted_modules
from ..options import flag, function, integer
from ..scaling import RowCuts
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.gathered_weight import cuts_of
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import Piece, Shard, encode_shards, storage_of, values_of
from .numbers import Measured, combined, measure, measure_codes, on_host, quantities, to_host
from .plan import plan
from .receipt import receipt

Numbers = dict[str, float]


class Inspection:
    """Records statistics of a model's layers, every `every` steps. See `inspect`.

    latest:   (step, numbers) of the last sampled step whose backward is done, or None.
    records:  (step, numbers) of all sampled steps; empty if they are written to a file.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        path: str | Path | None,
        on_record: Callable[[int, Numbers], None] | None,
        first_step: int,
        evaluation: bool,
    ):
        every = integer(1).read("inspect: every, a number of steps,", every)
        first_step = integer(0).read("inspect: first_step", first_step)
        function().read("inspect: on_record", on_record)
        self.evaluation = flag().read("inspect: evaluation", evaluation)
        if not converted_modules(model):
            raise ValueError("inspect found no fq.Linear; call fq.convert(model, recipe) first")
        self.model, self.every, self.on_record = model, every, on_record
        self.latest: tuple[int, Numbers] | None = None
        self.records: list[tuple[int, Numbers]] = []
        self._path = None if path is None else _of_rank(Path(path))
        self._next = self._step = first_step
        self._sampled = -1
        self._num_forwards = 0  # counted ones so far
        self.in_forward = False  # a sampled step's forward is running
        self._undo: list[Callable[[], object]] = []  # remove the hooks of `start`
        self._hooks: list[Callable[[], object]] = []  # remove the hooks of the sampled step
        self._stance = None
        self._faults: set[str] = set()  # what could not be measured, and was warned of
        self._measured: dict[tuple[str, str], list[Measured]] = {}
        self._gradient_norms: dict[str, list[Tensor]] = {}  # per layer, one per weight gradient

    def start(self) -> Inspection:
        """Count forwards from now on. An existing file is truncated."""
        if self._undo:
            raise ValueError("inspect was started before, and not stopped; call stop() first")
        if self._path is not None:
            self._path.write_text("")
            self._write("plan", plan(self.model).facts())
        self._undo.append(torch_compat.around_calls(self.model, self._before, self._after))
        return self

    def stop(self) -> None:
        """Write the pending sample and `fq.receipt`, and remove all hooks."""
        if not self._undo:
            return
        self._undo.pop()()
        self._leave_eager()
        self._finish()
        if self._path is not None:
            self._observe("the receipt", self._write, "receipt", _in_json(asdict(receipt())))
        if not self._num_forwards:
            kind, how = ("training", "in training mode and with gradients")
            if self.evaluation:
                kind, how = ("evaluation", "in evaluation mode or without gradients")
            warnings.warn(
                f"inspect saw no {kind} forward of {type(self.model).__name__}: call the model "
                f"that was inspected, {how}; a replayed CUDA graph runs no hooks",
                stacklevel=2,
            )

    def __enter__(self) -> Inspection:
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def scalars(self, step: int | None = None, **values: float) -> None:
        """Write the caller's numbers: `log.scalars(loss=loss.item())`. step: default, the current
        one."""
        self._write("scalars", {"values": _in_json(values)}, self._step if step is None else step)

    # Steps #

    def _observe(self, subject: str, run: Callable[..., object], *args) -> None:
        """Call `run`, unseen by the run. A fault becomes one warning per `subject`."""
        try:
            with torch_compat.unobserved(), counters.uncounted():
                run(*args)
        except Exception as error:
            if subject not in self._faults:
                self._faults.add(subject)
                warnings.warn(
                    f"inspect could not measure {subject}, whose numbers are left out; the run "
                    f"goes on ({type(error).__name__}: {error})",
                    stacklevel=3,
                )

    def _before(self) -> None:
        trains = self.model.training and torch.is_grad_enabled()
        if trains is self.evaluation or not torch_compat.can_observe():
            return
        if torch_compat.backward_is_running() or STEP.is_captured:
            return
        self._finish()
        self._num_forwards += 1
        self._step = STEP.step if STEP.counted_by_hand and trains else self._next
        self._next += 1
        if self._step % self.every == 0 and self._sampled != self._step:
            self._sampled = self._step
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                self._stance = torch.compiler.set_stance("force_eager")
            self._observe("this step", self._attach)

    def _after(self) -> None:
        self._leave_eager()
        if self.in_forward:
            self.in_forward = False
            self._observe("the weights", self._measure_weights)
            if self.evaluation:
                self._finish()

    def _leave_eager(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _finish(self) -> None:
        """Copy the statistics of the sampled step to the host, and report them."""
        for undo in self._hooks:
            undo()
        self._hooks, latest = [], self.latest
        if self._measured:
            self._observe("the sampled step", self._collect)
        self._measured, self._gradient_norms = {}, {}
        if self.on_record is not None and self.latest is not None and self.latest is not latest:
            self.on_record(*self.latest)

    def _collect(self) -> None:
        values = iter(on_host([part for parts in self._measured.values() for part in parts]))
        numbers: Numbers = {}
        for (name, slot), parts in self._measured.items():
            totals, directions = combined([next(values) for _ in parts])
            for key, value in quantities(slot, totals, directions).items():
                numbers[f"{name}/{key}"] = value
        norms = iter(to_host([n for parts in self._gradient_norms.values() for n in parts]))
        for name, parts in self._gradient_norms.items():
            if parts:
                numbers[f"{name}/weight/grad_norm"] = math.hypot(*(next(norms)[0] for _ in parts))
        self.latest = self._sampled, numbers
        if self._path is None:
            self.records.append((self._sampled, numbers))
        self._write("numbers", {"values": _in_json(numbers)}, self._sampled)

    # Hooks #

    def _attach(self) -> None:
        self.in_forward = True
        managed = torch_compat.managed_params_of(self.model)
        sharded = {(id(owner), name): m.registered for m in managed for owner, name in m.owners}
        for name, module, layers in units_of(self.model):
            hook = torch_compat.Observer(functools.partial(self._see, name, layers))
            self._hooks.append(module.register_forward_hook(hook, with_kwargs=True).remove)
            weight_name = getattr(module, "source", "weight")
            for owner in dict.fromkeys((module, *layers)):
                weight = sharded.get((id(owner), weight_name), owner._parameters.get(weight_name))
                if weight is not None and weight.requires_grad:
                    norms = self._gradient_norms.setdefault(name, [])
                    add = functools.partial(
                        self._observe, f"{name}: gradient of the weight", _add_gradient, norms
                    )
                    self._hooks.append(weight.register_post_accumulate_grad_hook(add).remove)

    def _see(self, name: str, layers: Sequence[Linear], *call) -> None:
        """Measure a module's call: its forward hook in a sampled step."""
        if torch_compat.can_observe():
            self._observe(name, self._add_call, name, layers, *call)

    def _add_call(
        self,
        name: str,
        layers: Sequence[Linear],
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        output: object,
    ) -> None:
        """Measure the input of a module's call, and later the gradient of its output."""
        if (call := call_of(module, args, kwargs)) is None:
            return
        x, sizes, scale = call
        if not torch_compat.backward_is_running():
            if not self.in_forward:
                return  # an evaluation forward before the next step
            self._add(name, "input", layers, x, sizes)
        if isinstance(output, Tensor) and output.requires_grad and not self.evaluation:
            gradient = functools.partial(self._add, name, "grad_output", layers)
            output.register_hook(
                lambda dy: self._observe(f"{name}: grad_output", gradient, dy, sizes, scale)
            )

    def _add(
        self,
        name: str,
        slot: str,
        layers: Sequence[Linear],
        x: Tensor,
        sizes: list[int] | None,
        scale: float = 1.0,
    ) -> None:
        """Measure scale * x, an activation or gradient [.., cols] of a module.

        sizes:  rows per expert, None without experts.
        """
        if isinstance(x, QuantizedTensor):
            return  # tokens that were dispatched as codes
        x = x if scale == 1.0 else x * scale
        for layer, part in rows_by_layer(layers, x, sizes):
            measured = _of_slot(layer, slot, part)
            self._measured.setdefault((name, slot), []).append(measured)

    def _measure_weights(self) -> None:
        pieces: dict[int, list[Piece]] = {}
        codes: dict[int, FSDPHooks] = {}
        for m in torch_compat.managed_params_of(self.model):
            if not isinstance(local := m.local, FSDPHooks):
                continue
            pieces.update((id(s), []) for s in local.state.matrices)
            if local.state.holds_codes:
                codes[id(local.state)] = local
                continue
            for piece in local.state.pieces(values_of(local).detach(), cuts_of(m), m.rank):
                pieces[id(piece.state)].append(piece)
        for name, _, layers in units_of(self.model):
            for layer in layers:
                state, weight = layer._weight_state, local_of(layer.weight)
                tensor = codes.get(id(state), weight)
                if id(state) in pieces and id(state) not in codes:
                    measured = [_of_piece(p) for p in pieces[id(state)] if p.values.numel()]
                elif isinstance(tensor, QuantizedTensor):
                    present = [d for d in Direction if getattr(tensor, d.value) is not None]
                    sides = {d: tensor.storage_for(d) for d in present}
                    measured = [measure_codes(sides)] if sides else []
                else:
                    values = values_of(weight).detach()
                    measured = [_of_piece(Piece(state, values, RowCuts((0, len(values))), 0))]
                if measured:
                    self._measured.setdefault((name, "weight"), []).extend(measured)

    def _write(self, kind: str, facts: dict, step: int | None = None) -> None:
        if self._path is not None:
            line = {"kind": kind} | ({} if step is None else {"step": step}) | facts
            with self._path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")


def inspect(
    model: nn.Module,
    every: int = 100,
    path: str | Path | None = None,
    on_record: Callable[[int, Numbers], None] | None = None,
    first_step: int = 0,
    evaluation: bool = False,
) -> Inspection:
    """Measure quantization errors of the model's tensors: `with fq.inspect(model) as log:`, or
    start() and stop().

    every:       steps between samples. `fq.begin_step` defines a step, else each training forward
                 is one.
    path:        file of JSON lines for `python -m fsdp_quant report`; rank r > 0 writes
                 NAME.rank{r}.jsonl.
    on_record:   called with (step, numbers) after each sample, such as `lambda step, numbers:
                 wandb.log(numbers, step=step)`.
    first_step:  step of the first training forward, without `fq.begin_step` (a resumed run).
    evaluation:  sample evaluation forwards (evaluation mode, or without gradients) in place of
                 training steps. Each one is a step, and a sample is there when it returns.

    numbers:  "layer/slot/amax", "/norm", "layer/weight/grad_norm", and per quantized direction
              "layer/slot.rowwise/underflow", "/saturation", "/sqnr_db", "/scale_min" and
              "/scale_max" (`inspection.numbers`). Experts of one module are one layer.

    Training bits do not change; `inspection.recorder` describes what is measured when, and how
    compiled models run.
    Raises ValueError for a model without converted layers, and unless `every` is a positive int.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> with fq.inspect(model, every=1) as log:
    ...     for _ in range(2):
    ...         model(torch.ones(2, 64)).sum().backward()
    >>> step, numbers = log.latest
    >>> numbers["0/input/amax"]
    1.0
    """
    return Inspection(model, every, path, on_record, first_step, evaluation)


def units_of(model: nn.Module) -> Iterable[tuple[str, nn.Module, Sequence[Linear]]]:
    """Yield (name, module to hook, its layers) of `converted_units`."""
    for name, layers in converted_units(model).items():
        yield name.replace("_orig_mod.", ""), model.get_submodule(name), layers


def call_of(
    module: nn.Module, args: tuple, kwargs: dict
) -> tuple[Tensor, list[int] | None, float] | None:
    """Return (input as it is multiplied, rows per expert, scale of the output) of a call that a
    forward hook saw.

    None: attention to other keys, which multiplies parts of its weight in high precision.
    """
    call = signature(type(module).forward).bind(module, *args, **kwargs).arguments
    _, x, *_ = call.values()
    if call.get("key", x) is not x:
        return None
    sizes = _sizes(module, call["splits"]) if isinstance(module, GroupedLinear) else None
    dtype = torch_compat.autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype), sizes, call.get("scale", 1.0)


def rows_by_layer(
    layers: Sequence[Linear], x: Tensor, sizes: list[int] | None
) -> list[tuple[Linear, Tensor]]:
    """Return each layer with this rank's rows [M, cols] of x [.., cols] that it reads, if any."""
    rows = local_of(x).detach().reshape(-1, x.shape[-1])
    pairs = zip(layers, [rows] if sizes is None else rows.split(sizes))
    return [(layer, part) for layer, part in pairs if len(part)]


def _sizes(module: GroupedLinear, splits) -> list[int]:
    """Return the rows per expert. Waits for the device if `splits` is a tensor there."""
    if not isinstance(splits, Tensor):
        return list(splits)
    ends = splits.tolist()
    return [end - start for start, end in zip([0, *ends], ends)]


def _of_slot(layer: Linear, slot: str, x: Tensor) -> Measured:
    """Measure x [rows, cols] in the formats of a slot, with the layer's delayed scales and random
    bits."""
    layer_plan, hybrid = layer.plan, layer.plan.hybrid(slot)
    factors = [h.encode_scale for h in layer.runtime.histories(layer_plan, slot, x.device)]
    key = slot_key(layer_plan, slot, STEP.on(x.device), layer.runtime.ids_on(x.device), len(x))
    storages, _ = hybrid.storages(x, key=key, factors=dict(zip(hybrid.delayed_directions, factors)))
    return measure(x, storages, hybrid)


def _of_piece(piece: Piece) -> Measured:
    state, values = piece.state, piece.values
    rounded = values.to(state.compute_dtype or values.dtype)

    def encode(direction: Direction) -> Storage:
        shared = (state.statistics or {}).get((state.name, direction))
        (encoded,) = encode_shards(
            [Shard(piece, direction, values.dtype, shared, None, False)], values.device
        )
        return Storage.of(
            encoded, state.quantizer.encodings[direction], values.shape, rounded.dtype, piece.row0
        )

    storages = {d: storage_of(state.quantizer, d, state.compute_dtype, encode) for d in Direction}
    return measure(rounded, storages, state.quantizer)


def _add_gradient(norms: list[Tensor], weight: Tensor) -> None:
    if weight.grad is not None:
        gradient = local_of(weight.grad).detach()
        norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _of_rank(path: Path) -> Path:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return path.with_suffix(f".rank{rank}{path.suffix}") if rank else path


def _in_json(value):
    """Convert keys to strings, and numbers that JSON lacks to None."""
    if isinstance(value, dict):
        return {
            " | ".join(map(str, k)) if isinstance(k, tuple) else str(k): _in_json(v)
            for k, v in value.items()
        }
    return None if isinstance(value, float) and not math.isfinite(value) else value
