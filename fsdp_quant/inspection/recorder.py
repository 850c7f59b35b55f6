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
    grad_norm    when the weight's gradient is accumulated: norm and amax of the sharded gradient,
                 before clipping (`grad_amax`)
    output       of the layer's forward, in high precision
    grad_input   a hook on the node that computes dgrad: of this layer alone, in high precision.
                 Layers that share one gathered input among ranks have their sum

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

import contextlib
import functools
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..context import STEP
from ..counters import counters
from ..formats import COLUMNWISE, IDENTITY, ROWWISE, Direction
from ..linear.linear import Linear
from ..linear.operands import slot_key
from ..linear.passes import steps_of
from ..linear.plan import GemmPlan
from ..models.steps import converted_modules
from ..options import flag, function, integer
from ..quantizer import HybridQuantizer, Quantizer
from ..recipe import PerLayer, Recipe
from ..roles import Selector
from ..scaling import RowCuts
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.fsdp_hooks import FSDPHooks
from ..tensor.gathered_weight import cuts_of
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import Piece, WeightQuantizer, encode_piece, values_of
from .calls import call_of, plans_of, rows_by_layer, units_of
from .dump import Dump
from .numbers import Measured, combined, measure, measure_codes, on_host, quantities
from .plan import plan
from .receipt import receipt

Numbers = dict[str, float]
WHAT_IF = "what_if_sqnr_db"
HIGH_PRECISION = HybridQuantizer(Quantizer(IDENTITY), Quantizer(IDENTITY))


# A tensor of a step: its values in high precision (None if it exists only as codes), its codes
# (none if no GEMM reads it), and their quantizer.
Sample = tuple[Tensor | None, dict[Direction, Storage], WeightQuantizer]


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
        what_if: Recipe | PerLayer | str | None,
        dump: str | Path | None,
        layers: Selector | Sequence[Selector] | None,
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
        self._first = self._next = self._step = first_step
        self._sampled = -1
        self.in_forward = False  # a sampled step's forward is running
        self._units = functools.partial(units_of, model, layers)
        units = self._units()
        self._what_if = {} if what_if is None else plans_of(model, units, what_if)
        self._dump = None if dump is None else Dump(Path(dump))
        self._undo: list[Callable[[], object]] = []  # remove the hooks of `start`
        self._hooks = contextlib.ExitStack()  # removes the hooks of the sampled step
        self._eager = contextlib.ExitStack()  # entered in a sampled step
        self._faults: set[str] = set()  # what could not be measured, and was warned of
        # (layer, slot, of another recipe) -> its parts
        self._measured: dict[tuple[str, str, bool], list[Measured]] = defaultdict(list)

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
        self._eager.close()
        self.flush()
        if self._path is not None:
            self._observe("the receipt", self._write, "receipt", _in_json(asdict(receipt())))
        if self._next == self._first:
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
        self.flush()
        steps = steps_of(self.model)
        self._step = steps.number if steps.is_by_hand and trains else self._next
        self._next += 1
        if self._step % self.every == 0 and self._sampled != self._step:
            self._sampled = self._step
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
            self._observe("this step", self._attach)

    def _after(self) -> None:
        self._eager.close()
        if self.in_forward:
            self.in_forward = False
            self._observe("the weights", self._measure_weights)
            if self.evaluation:
                self.flush()

    def flush(self) -> None:
        """Copy the statistics of the sampled step, whose backward has run, to the host, and report
        them; else the next forward does."""
        self._hooks.close()
        latest = self.latest
        if self._measured:
            self._observe("the sampled step", self._collect)
            if self._dump is not None:
                self._observe("the tensors to dump", self._dump.write, self._sampled)
        self._measured.clear()
        if self.on_record is not None and self.latest is not None and self.latest is not latest:
            self.on_record(*self.latest)

    def _collect(self) -> None:
        values = iter(on_host([part for parts in self._measured.values() for part in parts]))
        numbers: Numbers = {}
        for (name, slot, is_other), parts in self._measured.items():
            totals, directions = combined([next(values) for _ in parts])
            for key, value in quantities(slot, totals, directions).items():
                if not is_other:
                    key = key.replace("wgrad/", "weight/grad_")
                    numbers[f"{name}/{key}"] = value
                elif key.endswith("/sqnr_db"):
                    numbers[f"{name}/{key.removesuffix('sqnr_db')}{WHAT_IF}"] = value
        self.latest = self._sampled, numbers
        if self._path is None:
            self.records.append((self._sampled, numbers))
        self._write("numbers", {"values": _in_json(numbers)}, self._sampled)

    # Hooks #

    def _attach(self) -> None:
        self.in_forward = True
        managed = torch_compat.managed_params_of(self.model)
        sharded = {(id(owner), name): m.registered for m in managed for owner, name in m.owners}
        for name, module, layers in self._units():
            hook = torch_compat.Observer(functools.partial(self._see, name, layers))
            # before hooks that change the output: those of expert parallelism send it back
            handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            self._hooks.callback(handle.remove)
            weight_name = getattr(module, "source", "weight")
            for owner in dict.fromkeys((module, *layers)):
                weight = sharded.get((id(owner), weight_name), owner._parameters.get(weight_name))
                if weight is not None and weight.requires_grad and not self.evaluation:
                    add = functools.partial(
                        self._observe, f"{name}: gradient of the weight", self._add_wgrad, name
                    )
                    self._hooks.callback(weight.register_post_accumulate_grad_hook(add).remove)

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
        x, rows, sizes, scale = call
        high = functools.partial(self._add_high_precision, name)
        if not torch_compat.backward_is_running():
            if not self.in_forward:
                return  # an evaluation forward before the next step
            self._add(name, "input", layers, rows, sizes)
            if isinstance(output, Tensor):
                high("output", output)
        if isinstance(output, Tensor) and output.requires_grad and not self.evaluation:
            gradient = functools.partial(self._add, name, "grad_output", layers)
            output.register_hook(
                lambda dy: self._observe(f"{name}: grad_output", gradient, dy, sizes, scale)
            )
            torch_compat.on_gradient(
                x, output, lambda dx: self._observe(f"{name}: grad_input", high, "grad_input", dx)
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
            return  # gathered along a sequence as codes
        x = x if scale == 1.0 else x * scale
        for layer, part in rows_by_layer(layers, x, sizes):
            sample = _of_slot(layer, layer.plan, slot, part)
            self._take(name, slot, _tensor_name(slot, layers, layer), sample)
            if name in self._what_if:
                other = _of_slot(layer, self._what_if[name], slot, part)
                self._measured[name, slot, True].append(_measured(other))

    def _add_high_precision(self, name: str, slot: str, x: Tensor) -> None:
        """Measure a tensor that no GEMM of the layer reads as codes."""
        if not isinstance(x, QuantizedTensor):
            self._take(name, slot, slot, (local_of(x).detach(), {}, HIGH_PRECISION))

    def _add_wgrad(self, name: str, weight: Tensor) -> None:
        if weight.grad is not None:
            self._add_high_precision(name, "wgrad", weight.grad)

    def _take(self, name: str, slot: str, tensor: str, sample: Sample) -> None:
        """Measure a tensor of a slot, and dump it as `tensor`."""
        values, storages, _ = sample
        self._measured[name, slot, False].append(_measured(sample))
        if self._dump is not None:
            self._dump.add(name, tensor, values, storages)

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
        for name, _, layers in self._units():
            for layer in layers:
                other = self._what_if.get(name)
                for sample in _of_weight(layer, pieces, codes):
                    self._take(name, "weight", _tensor_name("weight", layers, layer), sample)
                    values = sample[0]
                    if other is not None and values is not None:
                        values = values.to(other.compute_dtype or values.dtype)
                        storages, _ = other.weight.storages(values)
                        numbers = measure(values, storages, other.weight)
                        self._measured[name, "weight", True].append(numbers)

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
    what_if: Recipe | PerLayer | str | None = None,
    dump: str | Path | None = None,
    layers: Selector | Sequence[Selector] | None = None,
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
    what_if:     another recipe, whose SQNR of the same tensors is measured too.
    dump:        folder for the tensors of sampled steps and their codes, a safetensors file per
                 step, layer and rank (`inspection.dump`).
    layers:      to inspect, as `skip` of `fq.convert` names them; default: all.

    numbers:  "layer/slot/amax" and "/norm" of the slots input, weight, grad_output, output and
              grad_input, "layer/weight/grad_norm" and "/grad_amax", and per quantized direction
              "layer/slot.rowwise/underflow", "/saturation", "/sqnr_db", "/scale_min", "/scale_max"
              (`inspection.numbers`) and "/what_if_sqnr_db". Experts of one module are one layer.

    Training bits do not change; `inspection.recorder` describes what is measured when, and how
    compiled models run.
    Raises ValueError for a model without converted layers, unless `every` is a positive int, for
    a pattern without layers, and for `what_if` with delayed scales or a schedule, which follow
    a run; ImportError for `dump` without safetensors.

    >>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    >>> with fq.inspect(model, every=1) as log:
    ...     for _ in range(2):
    ...         model(torch.ones(2, 64)).sum().backward()
    >>> step, numbers = log.latest
    >>> numbers["0/input/amax"]
    1.0
    """
    return Inspection(model, every, path, on_record, first_step, evaluation, what_if, dump, layers)


def _measured(sample: Sample) -> Measured:
    values, storages, hybrid = sample
    return measure_codes(storages) if values is None else measure(values, storages, hybrid)


def _tensor_name(slot: str, layers: Sequence[Linear], layer: Linear) -> str:
    return slot if len(layers) == 1 else f"{slot}.expert{list(layers).index(layer)}"


def _of_slot(layer: Linear, planned: GemmPlan, slot: str, x: Tensor) -> Sample:
    """Quantize x [rows, cols] in the formats of a slot of a plan, with the layer's delayed scales
    and random bits."""
    hybrid = planned.hybrid(slot)
    factors = [h.encode_scale for h in layer.runtime.histories(planned, slot, x.device)]
    key = slot_key(planned, slot, STEP.on(x.device), layer.runtime.ids_on(x.device), len(x))
    storages, _ = hybrid.storages(x, key=key, factors=dict(zip(hybrid.delayed_directions, factors)))
    return x, storages, hybrid


def _of_weight(
    layer: Linear, pieces: dict[int, list[Piece]], codes: dict[int, FSDPHooks]
) -> list[Sample]:
    """pieces, codes:  of the weights under `fully_shard`, by the id of their state."""
    state, weight = layer._weight_state, local_of(layer.weight)
    if id(state) in pieces and id(state) not in codes:
        return [_of_piece(p) for p in pieces[id(state)] if p.values.numel()]
    tensor = codes.get(id(state), weight)
    if isinstance(tensor, QuantizedTensor):
        present = [d for d in Direction if getattr(tensor, d.value) is not None]
        sides = {d: tensor.storage_for(d) for d in present}
        return [(None, sides, state.quantizer)] if sides else []
    values = values_of(weight).detach()
    return [_of_piece(Piece(state, values, RowCuts((0, len(values))), 0))]


def _of_piece(piece: Piece) -> Sample:
    state, values = piece.state, piece.values
    rounded, shared = values.to(state.compute_dtype or values.dtype), state.statistics or {}
    storages = {
        d: encode_piece(piece, d, rounded.dtype, shared.get((state.name, d)), values.device)
        for d in state.quantizer.encodings
    }
    if COLUMNWISE not in storages:
        rowwise, dtype = storages[ROWWISE], state.compute_dtype
        storages[COLUMNWISE] = state.quantizer.columnwise_of(rowwise, compute_dtype=dtype)
    return rounded, storages, state.quantizer


def _of_rank(path: Path) -> Path:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return path.with_suffix(f".rank{rank}{path.suffix}") if rank else path


def _in_json(value):
    """Convert keys to strings, and numbers that JSON lacks to None."""
    if isinstance(value, dict):
        return {
            " | ".join(map(str, k)) if isinstance(k, tuple) else str(k): _in_json(v)
            for k, v in value.items()
        }
    return None if isinstance(value, float) and not math.isfinite(value) else value
