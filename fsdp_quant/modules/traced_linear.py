"""`traced_linear`: the executor of linear layers in compiled graphs.

dynamo calls `traced_linear` without tracing into it (`allow_in_graph`). AOTAutograd traces it: it runs
this Python with fake tensors and records the functional operators that `quantize` and `gemm` call:

    forward    amax(x), quantize(x, rowwise), quantize(w, rowwise), gemm
    backward   amax(dy), quantize(dy, both), quantize(w, columnwise, amax), gemm,
               quantize(x, columnwise, amax), gemm

Nothing of ours runs when the graph runs. State comes in as tensors (`Beside`); amax histories and counts
of the guard are written by functionalized in-place operators.

[Note: what the backward saves]
The backward saves x and w, not their codes, and the amaxes of whole tensors. w is a parameter. x is often
recomputed for free: from gate and up (saved by silu's backward), or from the input of a norm. Saving
codes would add one byte per element. `x.clone()` in the backward tells the min-cut partitioner that x is
read by a fusible operator; without it, the partitioner never recomputes x. inductor removes the clone
where x is in memory. If x cannot be recomputed, the partitioner quantizes it columnwise in the forward
and saves the codes, since that is the smaller cut. Layers that share x (q, k, v; gate, up) quantize it
once: the calls are equal, and fx_graph_cse merges them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..context import STEP
from ..formats import COLUMNWISE, ROWWISE, Direction
from ..gemm import gemm
from ..ops import dispatch, opaque
from ..ops.dispatch import Statistics
from ..ops.layout import COMPACT, NATIVE
from ..quantizer import FLOATING, HybridQuantizer
from ..scaling import AmaxHistory
from ..storage import Storage
from ..tensor import torch_compat
from ..tensor.gather_group import RECOMPUTED_IN_GRAPHS
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.weight_state import values_of
from .guard import backward_guard_of, guard_of
from .linear_op import SLOTS, bias_gradient, slot_key, slot_storages, storage_over
from .plan import GemmPlan, plan_of


class GraphTensors:
    """The tensors that graphs of a layer are given beside its operands. Tracing makes none, so they are made where the plan or
    the device of the layer changes, and kept by the layer: the same objects in every step. The step's tensor is `STEP.in_graph`.

    ids:      int64 [3] (`slot_ids`).
    guards:   [forward's, backward's] counts of anchored quantizers; [] where nothing is anchored.
    delayed:  by the key of a plan, the encode factors and the amax histories of its delayed sides, of all slots.
    """

    def __init__(self, layer):
        self.delayed: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        self.prepare(layer)

    def prepare(self, layer, device: torch.device | None = None, plan: GemmPlan | None = None) -> None:
        plan = plan or layer._plan
        if device is None:  # a copied expert of packed weights has none of its own
            device = layer._ids.device if layer.weight is None else layer.weight.device
        if device.type == "meta":
            device = layer._ids.device
        self.ids, self.guards, step = layer.ids_on(device), [], STEP.prepare(device)
        domains = [plan.resolved(dtype, device).domains for dtype in FLOATING]  # which asks C++, now and not in a trace
        if any("anchored" in of for of in domains):
            self.guards = [guard_of(layer, device), backward_guard_of(layer, device)]
        found = [h for slot in SLOTS for h in layer.histories(plan, slot, device)]
        self.delayed[plan.key] = [h.enc for h in found], [h.amaxes for h in found]
        torch_compat.keeps_its_address([step, self.ids, *self.guards, *(t for of in self.delayed[plan.key] for t in of)])


NO_HISTORIES: tuple[list[Tensor], list[Tensor]] = [], []


class Beside(NamedTuple):
    """What a layer's products read and write beside their operands, on their device. The same tensors in every step.

    step:       int64 [5] (`context.STEP_FIELDS`); ids: int64 [3] (`slot_ids`).
    guard, backward_guard:  int64 [3, 2, 2], what quantizers of the forward and of the backward count; None: nothing is anchored.
    factors:    of input, weight and grad_output, fp32 [1] of the history of each delayed side; [] without delayed scaling.
    histories:  likewise, where their amaxes go.
    """

    step: Tensor
    ids: Tensor
    guard: Tensor | None
    backward_guard: Tensor | None
    factors: tuple[list[Tensor], list[Tensor], list[Tensor]]
    histories: tuple[list[Tensor], list[Tensor], list[Tensor]]

    def tensors(self) -> list[Tensor]:
        flat = [t for of in (*self.factors, *self.histories) for t in of]
        return [t for t in (*self[:4], *flat) if t is not None]


# Values and codes #

def whole_amaxes(hybrid: HybridQuantizer, x: Tensor, dtype: torch.dtype | None = None) -> dict[Direction, Statistics]:
    """Amaxes of all of x [rows, cols], by encoded direction that is scaled by them, in torch operators: a compiler takes them where x
    is written.

    dtype:  that encoders see; None: x's.
    """
    spans = {d: e.fmt for d, e in hybrid.encodings.items() if e.fmt.spans_tensor and not e.fmt.rotated}
    spans = {d: fmt for d, fmt in spans.items() if not hybrid.side(d).is_delayed}
    if not spans or x.numel() == 0:
        return {}
    amax = (x if dtype is None else x.to(dtype)).abs().amax().reshape(1)
    if amax.dtype is torch.bfloat16:  # through its bits: a compiler that took the amax of unrounded values must round now
        amax = (amax.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    amax = amax.float()
    return {d: Statistics(None, amax) if fmt.tensor_scale else Statistics(amax.view(1, 1), None) for d, fmt in spans.items()}


def _weight_storage(
    plan: GemmPlan, weight: Tensor, direction: Direction, dtype: torch.dtype, statistics: dict[Direction, Statistics],
    factors: list[Tensor],
) -> tuple[Storage, dict[Direction, Tensor]]:
    """The weight as a product reads it, and the amaxes of its delayed side: of a gathered weight its codes."""
    hybrid, wanted = plan.weight, plan.resolved(dtype, weight.device).layouts["weight"][direction]
    if isinstance(weight, QuantizedTensor):
        return weight.operand_in_graph(direction, wanted, hybrid), {}
    values = values_of(weight)
    if direction is COLUMNWISE:  # an expression of its own, for the partitioner: else it would keep codes of the forward
        values = values.clone()
    source = direction if direction in hybrid.encodings else ROWWISE
    encoding = hybrid.encodings[source]
    if hybrid.one_storage and direction is COLUMNWISE:
        encoding = hybrid.columnwise.encoding(COLUMNWISE) if wanted == NATIVE else encoding
    seen = plan.compute_dtype if encoding.fmt.is_quantized else dtype
    delayed = hybrid.delayed_directions
    factor = factors[delayed.index(source)] if source in delayed else None
    (encoded,) = dispatch.encode(
        values, [encoding], [statistics.get(source)] if source in statistics else None, encs=[factor], dtype=seen,
        layouts=[wanted if wanted == NATIVE and not hybrid.is_derived else COMPACT],
    )
    storage = Storage.of(encoded, encoding, weight.shape, dtype)
    amaxes = {source: encoded.amax} if factor is not None else {}
    if storage.direction is not direction:
        storage = storage.as_direction(direction) if hybrid.one_storage else hybrid.derive_columnwise(storage, plan.compute_dtype)
    return storage.in_layout(wanted), amaxes


def _saved_input(
    ctx, plan: GemmPlan, saved: list[Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> Storage:
    """The columnwise storage of the input [M, K]."""
    if plan.saves != "rowwise" or plan.input.one_storage:
        x, *rest = saved
        key, rest = (rest[0], rest[1:]) if plan.input.is_stochastic else (None, rest)
        made, _ = slot_storages(
            plan, "input", x.reshape(shape).clone(), [COLUMNWISE], key, ctx.beside.backward_guard, ctx.beside.factors[0],
            ctx.of_input,
        )
        return made[COLUMNWISE]
    fmt = plan.input.rowwise.fmt
    rowwise = storage_over(saved, fmt, ROWWISE, shape, dtype, COMPACT)
    return plan.input.derive_columnwise(rowwise, key=saved[-1] if plan.input.is_stochastic else None)


def _record(histories: list[Tensor], hybrid: HybridQuantizer, amaxes: dict[Direction, Tensor]) -> None:
    for direction, history in zip(hybrid.delayed_directions, histories):
        if direction in amaxes:
            AmaxHistory.record_in(history, amaxes[direction])


class _TracedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, plan, save, training, beside):
        with opaque.tracing(), torch.autocast(x.device.type, enabled=False):
            rows, resolved = x.reshape(-1, x.shape[-1]), plan.resolved(x.dtype, x.device)
            ctx.plan, ctx.weight, ctx.training, ctx.beside = plan, weight, training, beside
            ctx.bias_dtype = None if bias is None else bias.dtype
            torch_compat.save_by_reference(beside.tensors())
            if isinstance(weight, QuantizedTensor):
                torch_compat.save_by_reference([weight])
                if torch_compat.is_recomputed_in_graph():
                    RECOMPUTED_IN_GRAPHS.add(plan.weight)
            key = slot_key(plan, "input", beside.step, beside.ids, rows.shape[0])
            ctx.of_input = whole_amaxes(plan.input, rows)
            made, amaxes = slot_storages(plan, "input", rows, [ROWWISE], key, beside.guard, beside.factors[0], ctx.of_input)
            ctx.of_weight = {}
            if not isinstance(weight, QuantizedTensor):
                ctx.of_weight = whole_amaxes(plan.weight, values_of(weight), plan.compute_dtype)
            w, of_weight = _weight_storage(plan, weight, ROWWISE, x.dtype, ctx.of_weight, beside.factors[1])
            y = gemm(made[ROWWISE], w, out_dtype=x.dtype, bias=bias, domain=resolved.domains[0])
            if COLUMNWISE in plan.input.delayed_directions and save and plan.saves == "columnwise":
                amaxes[COLUMNWISE] = rows.abs().amax()
            if training:
                _record(beside.histories[0], plan.input, amaxes)
                _record(beside.histories[1], plan.weight, of_weight)
            if save:
                derived = plan.saves == "rowwise" and not plan.input.one_storage
                kept = list(made[ROWWISE].buffers().values()) if derived else [x]
                ctx.save_for_backward(*kept, *([] if key is None else [key]))
            return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        with opaque.tracing(), torch.autocast(dy.device.type, enabled=False):
            return *_gradients(ctx, dy), None, None, None, None


def _gradients(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    plan, weight, beside = ctx.plan, ctx.weight, ctx.beside
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    rows, (n, k) = dy.reshape(-1, dy.shape[-1]), weight.shape
    resolved = plan.resolved(dy.dtype, dy.device)
    directions = [d for d, needed in ((ROWWISE, need_x), (COLUMNWISE, need_w)) if needed]
    dx = dw = db = None
    if need_b:
        db = bias_gradient(plan, rows, directions).to(ctx.bias_dtype)
    if not directions:
        return None, None, db
    key = slot_key(plan, "grad_output", beside.step, beside.ids, rows.shape[0], dy)
    made, amaxes = slot_storages(
        plan, "grad_output", rows, directions, key, beside.backward_guard, beside.factors[2], whole_amaxes(plan.grad_output, rows)
    )
    if ctx.training:
        _record(beside.histories[2], plan.grad_output, amaxes)
    if need_x:
        w, _ = _weight_storage(plan, weight, COLUMNWISE, dy.dtype, ctx.of_weight, beside.factors[1])
        dx = gemm(made[ROWWISE], w, out_dtype=dy.dtype, domain=resolved.domains[1]).view(*dy.shape[:-1], k)
    if need_w:
        x = _saved_input(ctx, plan, list(ctx.saved_tensors), (rows.shape[0], k), dy.dtype)
        dw = gemm(made[COLUMNWISE], x, out_dtype=dy.dtype, domain=resolved.domains[2]).to(weight.dtype)
    return dx, dw, db


@torch.compiler.allow_in_graph
def traced_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: str, save: bool, training: bool, step: Tensor, ids: Tensor,
    guards: list[Tensor], factors: list[Tensor], histories: list[Tensor],
) -> Tensor:
    """y [.., N] of x [.., K], in a graph that is being traced.

    plan:       key of the plan. save: the backward needs x. training: amaxes are recorded.
    guards:     those of `Beside`, or [].
    factors, histories:  of the delayed sides of input, weight and grad_output, one after the other.
    """
    plan = plan_of(plan)
    counts = [len(plan.hybrid(slot).delayed_directions) for slot in SLOTS]
    of = ([], [], []), ([], [], [])
    for flat, by_slot in zip((list(factors), list(histories)), of):
        for here, count in zip(by_slot, counts):
            here.extend(flat[:count])
            del flat[:count]
    if len(factors) < sum(counts):
        raise ValueError(
            "a compiled region entered fq.autocast with delayed scaling, whose histories cannot be made while a graph is traced; "
            "run it once in eager mode first"
        )
    step, ids = step.to(x.device), ids.to(x.device)
    beside = Beside(step, ids, *(guards or (None, None)), *of)
    return _TracedLinear.apply(x, weight, bias, plan, save, training, beside)
