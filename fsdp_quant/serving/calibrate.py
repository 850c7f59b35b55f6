# SPDX-License-Identifier: Apache-2.0
"""`calibrate`: measure the largest inputs of layers, from which servers scale inputs statically."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..formats import ROWWISE
from ..inspection.advise import call_with
from ..inspection.calls import call_of, rows_by_layer, units_of
from ..linear.linear import Linear
from ..options import function
from ..tensor import torch_compat
from ..tensor.quantized_tensor import QuantizedTensor
from .kinds import kind_of
from .weights import sources_of


def calibrate(
    model: nn.Module,
    batches: Iterable,
    forward: Callable[[nn.Module, object], object] | None = None,
    names: Callable[[str], str] | None = None,
) -> dict[str, float]:
    """Run batches without gradients, and return the largest input of each layer whose input a
    server scales per tensor: the `input_amax=` of `fq.export`.

    batches:  each is one argument of the model, a tuple or list of arguments, or a mapping of
              keywords.
    forward:  (model, batch) -> anything; runs a batch in another way.
    names:    as in `fq.export`, whose layers are named so.

    returns:  name of the layer in the checkpoint -> largest magnitude over all batches and ranks.
              Layers of nvfp4 and of one fp8 scale per tensor that quantize their input; others
              need no amax.

    Runs in evaluation mode, compiled models in eager mode; steps, histories and random bits of
    training stay as they are. Every rank must call it, with as many batches as the collectives of
    the model need. An expert that no token reached has the largest input of the experts beside it.
    Inputs that are codes count as what their codes decode to.

    Warns of layers that no batch reached, which the result lacks.
    Raises ValueError, on every rank, for a model without such layers, for batches that reach none,
    and for an input that is infinite or NaN.

    >>> model = fq.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), "nvfp4")
    >>> amaxes = fq.calibrate(model, [torch.ones(4, 128), torch.full((2, 128), 3.0)])
    >>> amaxes
    {'0': 3.0}
    >>> fq.export(model, "served", input_amax=amaxes)
    """
    function().read("calibrate: forward", forward)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    amaxes: dict[int, Tensor] = {}  # id of a layer -> fp32 []
    with _observed(model, amaxes), torch.no_grad():
        for batch in batches:
            (forward or call_with)(model, batch)
    of_rank = [
        (name, unit, amaxes[id(layer)].item() if id(layer) in amaxes else 0.0)
        for name, unit, layer in _layers_with_amaxes(model, names)
    ]
    return _over_ranks(of_rank)


@contextlib.contextmanager
def _observed(model: nn.Module, amaxes: dict[int, Tensor]) -> Iterator[None]:
    """Measure the inputs of all layers, in evaluation mode and outside graphs."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for _, module, layers in units_of(model):
            hook = torch_compat.Observer(functools.partial(_measure, amaxes, layers))
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def _measure(
    amaxes: dict[int, Tensor],
    layers: Sequence[Linear],
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    output: object,
) -> None:
    """The forward hook of a module: the largest input of each of its layers."""
    if not torch_compat.can_observe() or (call := call_of(module, args, kwargs)) is None:
        return
    _, x, sizes, _ = call
    with torch_compat.unobserved():
        x = x.dequantize() if isinstance(x, QuantizedTensor) else x
        for layer, rows in rows_by_layer(layers, x, sizes):
            amax = torch.linalg.vector_norm(rows, math.inf, dtype=torch.float32)
            known = amaxes.get(id(layer))
            amaxes[id(layer)] = amax if known is None else torch.maximum(known, amax)


def _layers_with_amaxes(
    model: nn.Module, names: Callable[[str], str] | None
) -> Iterator[tuple[str, str, Linear]]:
    """Yield (name in the checkpoint, name of its module, layer) of this rank's layers whose input
    a checkpoint may scale."""
    units = {id(layer): name for name, _, layers in units_of(model) for layer in layers}
    for source in sources_of(model, names) if units else ():
        for piece in source.matrices or source.slices:
            index = (piece.matrix or 0) - getattr(source.owner, "first_expert", 0)
            is_here = 0 <= index < len(source.layers)  # quantized, and on this rank
            if not is_here or not piece.name.endswith(".weight"):
                continue
            layer = source.layers[index]
            kind, inputs = kind_of(layer.plan.weight.side(ROWWISE).fmt), layer.plan.input
            if kind and kind.takes_input_amax and inputs.side(ROWWISE).fmt.is_quantized:
                yield piece.name.removesuffix(".weight"), units[id(layer)], layer


def _over_ranks(of_rank: list[tuple[str, str, float]]) -> dict[str, float]:
    """Return the largest amax per name over all ranks. of_rank: (name, module, amax or 0)."""
    of_ranks = [of_rank]
    if dist.is_initialized():
        of_ranks = [of_rank] * dist.get_world_size()
        dist.all_gather_object(of_ranks, of_rank)
    amaxes: dict[str, float] = {}
    units: dict[str, str] = {}
    of_units: dict[str, float] = {}
    for name, unit, amax in (entry for entries in of_ranks for entry in entries):
        if not math.isfinite(amax):
            raise ValueError(
                f"calibrate: the input of {name} is {amax}; give batches whose activations are "
                "finite"
            )
        units[name], amaxes[name] = unit, max(amax, amaxes.get(name, 0.0))
        of_units[unit] = max(amax, of_units.get(unit, 0.0))
    if not amaxes:
        raise ValueError(
            "calibrate found no layer whose input a server scales per tensor; convert the model "
            "to nvfp4, fp8_current or fp8_delayed (inputs of other formats need no amax)"
        )
    reached = {name: amax or of_units[units[name]] for name, amax in amaxes.items()}
    missing = [name for name, amax in reached.items() if not amax]
    listed = f"{', '.join(missing[:4])}{', ...' * (len(missing) > 4)}"
    fault = f"calibrate: no batch reached {listed} with an input other than 0"
    if len(missing) == len(reached):
        raise ValueError(f"{fault}; give at least one batch, and the model that was converted")
    if missing:
        warnings.warn(
            f"{fault}, so these have no amax: servers scale their inputs dynamically, or keep them "
            "in high precision",
            stacklevel=3,
        )
    return {name: amax for name, amax in reached.items() if amax}
