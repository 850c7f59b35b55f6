"""`FusedAdam`: AdamW or Adam with fp32 masters of quantized and of low-precision parameters.

[Note: the update]
All in fp32, of a master p, its gradient g (divided by the loss scale where there is one) and moments m and v:
    p <- p * (1 - lr * decay)                        decoupled; coupled: g <- g + decay * p
    m <- lerp(m, g, 1 - beta1)
    v <- beta2 * v + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
Every operation rounds once and none are fused, so that an element's bits depend on nothing else: not on where it lies in a
shard, nor on the processor (torch's own lerp and addcmul fuse in the vectors of a CPU and not in what is left over). The
results are torch.optim.AdamW's but for those roundings; the kernel equals them bit for bit. Scalars are computed in fp64 and
rounded once to fp32, on the host or (capturable) on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..formats import Encoding
from ..ops import native
from ..ops.dispatch import Encoded, Statistics
from ..tensor import torch_compat
from ..tensor.quantized_weight import FusedOutputs, QuantizedWeight, fused_outputs
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import values_of

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = ("master", *MOMENTS, "step")
# Scalars of one update, fp32 [8]; `coupled` weights the decay of g, `keep` is the decoupled factor of p.
SCALARS = ("keep", "coupled", "first", "beta2", "second", "root_correction", "minus_step_size", "eps")


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam) in fp32; after the step, codes of quantized parameters follow their masters.

    params:        as of any optimizer: quantized parameters, plain tensors, DTensors of them.
    lr:            float, or a tensor on the device (capturable).
    weight_decay:  decoupled (AdamW); with decoupled_weight_decay=False it is added to the gradient (Adam).
    moment_dtype:  torch.float32 or torch.bfloat16, rounded to nearest after the update.
    capturable:    step and lr are read on the device, so that a CUDA graph may hold the step.

    A parameter of fp32 is its own master; one of lower precision has its master in the state, and is that rounded, unless
    something else wrote it since: then the master follows it. Of a quantized parameter the state holds the only
    high-precision copy, and the model's state dict has it, not the optimizer's: checkpoints of quantized and ordinary
    parameters, and of torch.optim.AdamW, hold the same keys. Skips the step where `found_inf` (a GradScaler sets it) is not 0.

    Raises ValueError for settings out of range, and for parameters on the meta device that are quantized.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, decoupled_weight_decay: bool = True, moment_dtype: torch.dtype = torch.float32,
        capturable: bool = False,
    ):
        if not 0.0 <= float(lr) or not 0.0 <= eps or not 0.0 <= weight_decay or not all(0.0 <= b < 1.0 for b in betas):
            raise ValueError(
                f"lr, eps and weight_decay must not be negative and betas lie in [0, 1), got lr={lr}, eps={eps}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype must be torch.float32 or torch.bfloat16, got {moment_dtype}")
        if isinstance(lr, Tensor) and not capturable:
            raise ValueError("lr is a tensor, which is read on the device only with capturable=True; pass a float")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "moment_dtype": moment_dtype, "capturable": capturable,
        }
        self._held: dict[int, _Held] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._held = {}

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.requires_grad:
                self._start(p, group)

    def _start(self, p: Tensor, group: dict) -> dict:
        """The state of a parameter: complete from the start, so that checkpoints can be loaded into it."""
        state, local = self.state[p], local_of(p)
        if state:
            return state
        if not local.is_floating_point():
            raise ValueError(f"FusedAdam updates floating parameters, got {local.dtype}")
        on_device = local.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
        if isinstance(local, QuantizedWeight):
            state["master"] = _beside(p, local.take_master())
        elif local.dtype is not torch.float32:
            state["master"] = _beside(p, values_of(local).detach().float())
        for name in MOMENTS:
            state[name] = _beside(p, torch.zeros(local.shape, dtype=group["moment_dtype"], device=local.device))
        return state

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Update every parameter that has a gradient; the codes of quantized ones follow when the step ends."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch.compiler.disable  # its bits are those of the definition
    def _update(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        updates = []
        for group in self.param_groups:
            held = [self._hold(p, group) for p in group["params"] if p.grad is not None]
            updates.append((group, held, [h.grad for h in held]))
        for group, held, grads in updates:
            if not held:
                continue
            scalars = _scalars_on_device if group["capturable"] else _scalars_on_host
            rows, index = scalars(group, [h.step for h in held], found_inf)
            _update_all(held, grads, rows, index, grad_scale, found_inf)

    def _hold(self, p: Tensor, group: dict) -> _Held:
        """What an update of a parameter reads and writes; looked up anew where something took its place."""
        held = self._held.get(id(p))
        if held is None or not held.is_current(p):
            held = self._held[id(p)] = _Held(p, self._start(p, group))
        return held

    # Checkpoints #

    def state_dict(self) -> dict:
        """As of any optimizer, without the masters of quantized parameters: the model's state dict has them."""
        packed = super().state_dict()
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        ids = chain.from_iterable(g["params"] for g in packed["param_groups"])
        quantized = {i for i, p in zip(ids, params) if isinstance(local_of(p), QuantizedWeight)}
        state = {
            i: {k: v for k, v in s.items() if k != "master" or i not in quantized} for i, s in packed["state"].items()
        }
        return packed | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load into the tensors of the state as they lie: nothing is rounded to a parameter's dtype, or moved.

        Raises ValueError, before anything is changed, for a state that lacks a moment, a step, or the master of a
        low-precision parameter, naming it.
        """
        own = dict(self.state)
        params = list(chain.from_iterable(g["params"] for g in self.param_groups))
        ids = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        for i, p in zip(ids, params):
            saved = state_dict["state"].get(i)
            needed = own.get(p, {}).keys() - ({"master"} if isinstance(local_of(p), QuantizedWeight) else set())
            if saved is not None and not needed <= saved.keys():
                raise ValueError(
                    f"the saved state of parameter {i} {list(p.shape)} has {sorted(saved)}, and FusedAdam needs "
                    f"{sorted(needed)}; save it with FusedAdam, or start without its state"
                )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(own)
        for i, p in zip(ids, params):
            saved = state_dict["state"].get(i)
            for name, tensor in (own.get(p, {}) if saved is not None else {}).items():
                if name in saved:
                    value = saved[name]
                    local_of(tensor).copy_(local_of(value) if isinstance(value, Tensor) else torch.tensor(value))


def _beside(p: Tensor, local: Tensor) -> Tensor:
    """A state tensor that is sharded as its parameter is."""
    return torch_compat.dtensor_like(p, local) if isinstance(p, DTensor) else local


class _Held:
    """The plain local tensors of one parameter's update, but for its gradient.

    rounded:   the low-precision parameter that is its master rounded, or None.
    weight:    the quantized parameter, or None.
    launches:  a kernel takes them.
    """

    def __init__(self, p: Tensor, state: dict):
        self.p, self.state, self.tensors = p, state, [state.get(name) for name in STATE]
        self.local = local_of(p)
        self.values = None if isinstance(self.local, QuantizedWeight) else values_of(self.local)
        self.weight = self.local if self.values is None else None
        master, self.first, self.second, self.step = (None if t is None else local_of(t) for t in self.tensors)
        self.master = self.values if master is None else master
        self.rounded = None if master is None else self.values
        self.launches = native.adam_takes(self.master, self.first, self.second, self.rounded)
        self._outputs: tuple[tuple, FusedOutputs | None] | None = None  # and what it follows from

    def is_current(self, p: Tensor) -> bool:
        return (
            self.p is p and local_of(p) is self.local and all(self.state.get(n) is t for n, t in zip(STATE, self.tensors))
            and (self.values is None or values_of(self.local).data_ptr() == self.values.data_ptr())
        )

    @property
    def grad(self) -> Tensor:
        """Raises ValueError for a sparse one."""
        grad = local_of(self.p.grad)
        if grad.is_sparse:
            raise ValueError("FusedAdam takes dense gradients, got a sparse one; use torch.optim.SparseAdam for it")
        return grad

    @property
    def outputs(self) -> FusedOutputs | None:
        """What the kernel makes of the new master on its way."""
        if self.weight is None:
            return None
        state = self.weight.state
        of = state.quantizer, state.compute_dtype, state.managed
        if self._outputs is None or any(a is not b for a, b in zip(self._outputs[0], of)):
            self._outputs = of, fused_outputs(self.weight)
        return self._outputs[1]


# Scalars of an update #

def _scalars(group: dict, lr, bias1, bias2) -> list:
    """In the order of SCALARS; bias1 and bias2 are beta^t. Floats, or fp64 tensors of any shape."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    return [
        1 - lr * decay if decoupled else 1.0, 0.0 if decoupled else decay, 1 - beta1, beta2, 1 - beta2,
        (1 - bias2) ** 0.5, -(lr / (1 - bias1)), group["eps"],
    ]


def _scalars_on_host(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> tuple[Tensor, list[int]]:
    """(fp32 [distinct steps, 8] on the host, row of each parameter), after counting the step."""
    if found_inf is None or not found_inf.item():
        for step in steps:
            step += 1
    numbers = [max(int(step), 1) for step in steps]  # 0 where the first step is skipped: nothing reads its row
    row_of = {n: i for i, n in enumerate(dict.fromkeys(numbers))}
    beta1, beta2 = group["betas"]
    rows = [_scalars(group, group["lr"], beta1**n, beta2**n) for n in row_of]
    return torch.tensor(rows, dtype=torch.float32, device="cpu"), [row_of[n] for n in numbers]


def _scalars_on_device(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> tuple[Tensor, list[int]]:
    """(fp32 [parameters, 8] on the device, row of each parameter), after counting the step; nothing is read."""
    (beta1, beta2), index = group["betas"], list(range(len(steps)))
    if not all(map(native.runs, steps)):
        return scalars_on_device(group, steps, found_inf), index
    rest = group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
    return native.adam_count(steps, found_inf, group["lr"], beta1, beta2, *rest), index


def scalars_on_device(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> Tensor:
    """fp32 [parameters, 8] (`SCALARS`), after adding 1 - found_inf to the steps: what `native.adam_count` equals."""
    applied = 1.0 if found_inf is None else 1.0 - found_inf.reshape(())
    torch_compat.foreach_add_(steps, applied)
    step = torch.stack(steps).double()
    lr = group["lr"]
    lr = lr.to(step.device, torch.float64) if isinstance(lr, Tensor) else lr
    beta1, beta2 = group["betas"]
    columns = _scalars(group, lr, torch.pow(beta1, step), torch.pow(beta2, step))
    columns = [c if isinstance(c, Tensor) else torch.full_like(step, c) for c in columns]
    return torch.stack([c.expand_as(step) for c in columns], 1).float()


# The update #

def _update_all(
    held: list[_Held], grads: list[Tensor], scalars: Tensor, index: list[int], grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """A launch for all that is alike to the kernel; the rest one after another."""
    alike: dict[tuple, list[tuple[_Held, Tensor, int]]] = {}
    for h, grad, row in zip(held, grads, index):
        if h.launches and native.adam_takes(grad) and (h.rounded is None or h.rounded.dtype is torch.bfloat16):
            found = h.outputs
            follows = None if found is None else (found.encodings, found.blocks is None)
            key = h.master.device, grad.dtype, h.first.dtype, h.rounded is None, follows
            alike.setdefault(key, []).append((h, grad, row))
        else:
            _update_one(h, grad, scalars[row], grad_scale, found_inf)
    for (*_, is_master, follows), of in alike.items():
        held, grads, rows = zip(*of)
        step = native.AdamStep(
            [h.master for h in held], grads, [h.first for h in held], [h.second for h in held], rows, scalars, grad_scale,
            found_inf,
        )
        if follows is None:
            native.adam(step, () if is_master else [h.rounded for h in held])
        else:
            _update_and_follow(step, held, *follows)


def _update_and_follow(step: native.AdamStep, held: list[_Held], encodings: tuple[Encoding, ...], codes: bool) -> None:
    """One launch updates masters of quantized parameters and makes their codes, or the statistics that those follow from."""
    found = [h.outputs for h in held]
    row0 = [f.shards[0][1] for f in found]
    if codes:
        rooms = [[h.weight.room(d) for d, _ in f.shards] for h, f in zip(held, found)]
        made = native.adam_codes(step, encodings, row0, rooms)
        for h, f, of in zip(held, found, made):
            for (direction, start), (data, scale) in zip(f.shards, of):
                counters.add("weight encode", (h.weight.state.name, direction.value))
                h.weight.store(direction, Encoded(data, scale, None, None), start)
    else:
        made = native.adam_statistics(step, encodings, row0, [f.blocks for f in found])
        for h, f, of in zip(held, found, made):
            stats = {direction: Statistics(*one) for (direction, _), one in zip(f.shards, of)}
            h.weight.state.found = h.weight.version, stats


def _update_one(h: _Held, grad: Tensor, row: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """What `native.adam` does, by the definition."""
    device = h.master.device
    scale, skip = (None if t is None else t.to(device).reshape(()) for t in (grad_scale, found_inf))
    new = adam_update(h.master, grad, h.first, h.second, h.rounded, row.to(device), scale)
    for target, value in zip((h.master, h.first, h.second, h.rounded), (*new, new[0])):
        if target is not None:
            target.copy_(value if skip is None else torch.where(skip != 0, target, value))


def adam_update(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, rounded: Tensor | None, scalars: Tensor,
    grad_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(master, first and second moment) after one update, in fp32, of one tensor: the definition that the kernel equals.

    scalars:     fp32 [8] (`SCALARS`).
    grad_scale:  fp32 []; the gradient is divided by it.
    """
    keep, coupled, weight, beta2, weight2, root, minus_step, eps = scalars.unbind()
    p, g, m, v = (t.float() for t in (master, grad, first, second))
    if rounded is not None:
        p = torch.where(p.to(rounded.dtype) == rounded, p, rounded.float())  # something else wrote the parameter
    if grad_scale is not None:
        g = g / grad_scale
    g = torch.where(coupled != 0, g + p * coupled, g)
    p = p * keep
    change = g - m
    m = torch.where(weight < 0.5, m + change * weight, g - change * (1 - weight))
    v = v * beta2 + g * weight2 * g
    deviation = v.double().sqrt().float()  # fp32 roots of a CPU's vector library are an ulp off
    return p + (m * minus_step) / (deviation / root + eps), m, v
