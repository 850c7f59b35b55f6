"""The operators that compiled graphs hold: graph_linear(x, w, ..) -> (y, saved buffers) and its backward.

A graph sees plain tensors and shapes alone. The weight enters it as plain memory: the master's values, or the codes that
FSDP2 gathered. What a layer has besides (codes of its weight, random key, amax histories, the anchoring guard) is not in
the graph: the operators find it when they run, by the number of the layer, so one graph serves equal layers, a step reads
what the last one changed, and amaxes are recorded as in eager mode.
"""

from __future__ import annotations

import copy
import itertools
import weakref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..context import STEP
from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE
from ..gemm import StaleWeightError
from ..scaling import AmaxHistory
from ..tensor.master_weight import MasterWeight, WeightState
from ..tensor.quantized_tensor import OPERATORS, QuantizedTensor
from .guard import guard_of
from .linear_op import product, product_backward, quantize_slot, refuse_second_derivative, slot_ids, weight_state
from .plan import GemmPlan, plan_of

_NUMBERS = itertools.count()
_SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()


class Site:
    """What a layer's products read and write beside their operands; a backward may need it when the layer is gone.

    ids:     int64 [3], on the device that asked last (`slot_ids`).
    state:   the weight's `WeightState`.
    input_of:  weak reference to the layer that keeps the histories of the input (`linear.share_input`).
    layer:   weak reference to the `fq.Linear`.
    """

    def __init__(self, layer):
        self.name, self.state, self.layer = layer._name, layer._weight_state, weakref.ref(layer)
        self.input_of = self.layer
        self.ids = slot_ids(self.name)

    def handle(self) -> Tensor:
        """int64 [1] on the host: the number by which operators find this site. It keeps the site alive; copies of it do not."""
        number = next(_NUMBERS)
        _SITES[number] = self
        with torch.inference_mode(False):
            handle = torch.tensor([number], device="cpu")
        handle.site = self
        return handle

    def beside(self, layer, owner: WeightState | None, plan: GemmPlan, dtype: torch.dtype, device: torch.device) -> tuple:
        """(step, ids, guard, amax histories of the input's delayed sides, of grad_output's) of a product on `device`.

        layer:  None where it is gone.
        owner:  None where the weight is a plain tensor: its layer then has no histories.
        """
        guard = None
        if layer is not None and "anchored" in plan.resolved(dtype, device).domains:
            guard = guard_of(layer, device)
        return STEP.on(device), self.ids_on(device), guard, *self.histories(owner, plan, device)

    def ids_on(self, device: torch.device) -> Tensor:
        if self.ids.device != device:
            with torch.inference_mode(False):
                self.ids = self.ids.to(device)
        return self.ids

    def histories(self, owner: WeightState | None, plan: GemmPlan, device: torch.device) -> tuple:
        """Amax histories of the input's delayed sides, and of grad_output's."""
        if owner is None or not plan.is_delayed:
            return (), ()
        return self._histories(owner, plan, "input", device), self._histories(owner, plan, "grad_output", device)

    def _histories(self, owner: WeightState, plan: GemmPlan, slot: str, device: torch.device) -> list[AmaxHistory]:
        """Amax histories of a slot's delayed sides, in order."""
        hybrid, name, lead = plan.hybrid(slot), self.name, self.input_of()
        if slot == "input" and self.input_of is not self.layer and lead is not None:
            owner, name = lead._weight_state, lead._name
        return [owner.history(name, slot, d, hybrid.side(d)).to(device) for d in hybrid.delayed_directions]


def _site_of(handle: Tensor) -> Site:
    site = _SITES.get(int(handle))
    if site is None:
        raise RuntimeError(
            "a compiled graph ran a layer that is gone: its fq.Linear was deleted, and saved-tensor hooks copied the number "
            "that kept what it needs; keep the model until its backward has run"
        )
    return site


def _memory_of(weight: MasterWeight | QuantizedTensor) -> Tensor:
    """The plain tensor that stands for a weight in a graph."""
    if isinstance(weight, MasterWeight):
        return weight.inner
    return (weight.columnwise if weight.rowwise is None else weight.rowwise).data


def _weight_behind(site: Site, weight: Tensor) -> Tensor:
    """The layer's own weight, with its cached or gathered codes, where `weight` is its memory.

    Hooks on saved tensors may have copied it. Of gathered codes the layer's are then taken: they are the same, or refused
    as stale. Of a master the copy is quantized, with the histories of the layer's weight.

    Raises StaleWeightError where FSDP2 has not gathered the weight that a backward multiplies.
    """
    layer = site.layer()
    own = None if layer is None else layer.weight
    if isinstance(own, QuantizedTensor):
        return own
    if isinstance(own, MasterWeight) and own.inner.data_ptr() == weight.data_ptr() and own.shape == weight.shape:
        return own
    if isinstance(own, DTensor) or not weight.is_floating_point():
        raise StaleWeightError(
            f"{site.state.name} is sharded while a compiled graph multiplies its codes; run the backward under the "
            "fully_shard that ran the forward"
        )
    if own is None or isinstance(own, MasterWeight):
        return MasterWeight(weight.detach(), copy.copy(site.state)).requires_grad_(own is None or own.requires_grad)
    return weight


def _graph_linear(x, weight, bias, handle, shape, plan, save, grad, training):
    site = _site_of(handle)
    y, buffers = site.layer().multiply(
        product, x, _weight_behind(site, weight), bias, plan_of(plan), save, grad, training
    )
    return y, [b.clone() if b.data_ptr() == x.data_ptr() else b for b in buffers]  # an identity storage is its input


def _graph_linear_backward(dy, weight, saved, handle, shape, plan, needs, training):
    site = _site_of(handle)
    weight = _weight_behind(site, weight)
    step, ids, guard, inputs, grads = site.beside(site.layer(), weight_state(weight), plan_of(plan), dy.dtype, dy.device)
    histories = [h.amaxes for h in grads] if training else []
    *gradients, amaxes = product_backward(
        dy, weight, saved, plan, needs, step, ids, guard, [h.enc for h in inputs], [h.enc for h in grads], histories
    )
    for history, amax in zip(histories, amaxes):
        AmaxHistory.record_in(history, amax)
    return tuple(g if needed else dy.new_empty(0) for g, needed in zip(gradients, needs))


def _fake_linear(x, weight, bias, handle, shape, plan, save, grad, training):
    plan = plan_of(plan)
    kept = _saved_buffers(plan, x) if save and plan.saves != "input" else ()
    return x.new_empty((*x.shape[:-1], shape[0])), [x.new_empty(shape, dtype=dtype) for shape, dtype in kept]


def _saved_buffers(plan: GemmPlan, x: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    """(shape, dtype) of what the backward keeps of x: as the quantizer makes them, of an x without values."""
    key = (*x.shape, x.dtype, x.device) if all(isinstance(n, int) for n in x.shape) else None
    if key is not None and key in plan.saved_buffers:  # a symbolic length belongs to one trace
        return plan.saved_buffers[key]
    saved = plan.resolved(x.dtype, x.device).saved
    directions = [ROWWISE, COLUMNWISE] if saved is COLUMNWISE else [ROWWISE]
    step, ids = (x.new_empty(n, dtype=torch.int64) for n in (5, 3))
    factors = [x.new_empty(1, dtype=torch.float32) for _ in plan.input.delayed_directions]
    with counters.kept():
        made, _ = quantize_slot(plan, "input", x.reshape(-1, x.shape[-1]), directions, step, ids, None, factors)
    buffers = [(b.shape, b.dtype) for b in made[saved].buffers().values()]
    if key is not None:
        plan.saved_buffers[key] = buffers
    return buffers


def _fake_linear_backward(dy, weight, saved, handle, shape, plan, needs, training):
    shapes = ((*dy.shape[:-1], shape[1]), tuple(shape), (shape[0],))
    return tuple(dy.new_empty(s if needed else 0) for s, needed in zip(shapes, needs))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, handle, shape, plan, save, _, training = inputs
    ctx.weight, ctx.handle, ctx.shape, ctx.plan, ctx.training = weight, handle, shape, plan, training
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(*([x] if save and plan_of(plan).saves == "input" else output[1]))


def _autograd_backward(ctx, dy, _buffers):
    needs = list(ctx.needs_input_grad[:3])
    dx, dw, db = torch.ops.fsdp_quant.graph_linear_backward(
        dy, ctx.weight, list(ctx.saved_tensors), ctx.handle, ctx.shape, ctx.plan, needs, ctx.training
    )
    return (
        dx if needs[0] else None, dw.to(ctx.weight.dtype) if needs[1] else None, db.to(ctx.bias_dtype) if needs[2] else None,
        None, None, None, None, None, None,
    )


def _define(name: str, signature: str, run, fake, backward, setup_context=None) -> None:
    _library.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fsdp_quant::{name}", fake, lib=_library)
    torch.library.register_autograd(f"fsdp_quant::{name}", backward, setup_context=setup_context, lib=_library)
    op = getattr(torch.ops.fsdp_quant, name).default
    OPERATORS[op] = lambda first, weight, *rest: op(first, _memory_of(weight), *rest)


_library = torch.library.Library("fsdp_quant", "FRAGMENT")
_define(
    "graph_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor handle, int[] shape, str plan, bool save, bool grad, bool training"
    ") -> (Tensor, Tensor[])",
    _graph_linear, _fake_linear, _autograd_backward, _setup_context,
)
_define(
    "graph_linear_backward",
    "(Tensor dy, Tensor weight, Tensor[] saved, Tensor handle, int[] shape, str plan, bool[] needs, bool training"
    ") -> (Tensor, Tensor, Tensor)",
    _graph_linear_backward, _fake_linear_backward, refuse_second_derivative,
)


def graph_linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, plan: str, save, grad, training) -> Tensor:
    """y of a layer, in a graph that is being traced."""
    shape = list(weight.shape)
    return torch.ops.fsdp_quant.graph_linear(x, weight, bias, handle, shape, plan, save, grad, training)[0]
