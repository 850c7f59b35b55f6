# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam`: AdamW or Adam with fp32 masters of quantized and of low-precision parameters.

[Note: the update]
All in fp32, of a master p, its gradient g (divided by the loss scale where there is one) and
moments m and v:
    p <- p * (1 - lr * decay)                        decoupled; coupled: g <- g + decay * p
    m <- lerp(m, g, 1 - beta1)
    v <- beta2 * v + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
Every operation rounds once and none are fused, so that an element's bits depend on nothing else:
not on where it lies in a shard, nor on the processor (torch's own lerp and addcmul fuse in the
vectors of a CPU and not in what is left over). The results are torch.optim.AdamW's but for those
roundings; the kernel equals them bit for bit. Scalars are computed in fp64 and rounded once to
fp32, on the host or (capturable) on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..formats import Encoding
from ..ops import native
from ..ops.dispatch import Encoded, Statistics
from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.refresh import FusedOutputs, fused_outputs
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import values_of
from . import compact

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = tuple(f"{name}_{of}" for name in MOMENTS for of in ("codes", "scale"))  # of 8-bit moments
MASTERS = ("master", "remainder")
STATE = (*MASTERS, *MOMENTS, *CODES, "step")
# Scalars of one update, fp32 [8]; `coupled` weights the decay of g, `keep` is the decoupled factor
# of p.
SCALARS = (
    "keep",
    "coupled",
    "first",
    "beta2",
    "second",
    "root_correction",
    "minus_step_size",
    "eps",
)


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam) in fp32; after the step, codes of quantized parameters follow their masters.

    params:        as of any optimizer: quantized parameters, plain tensors, DTensors of them.
    lr:            float, or a tensor on the device (capturable).
    weight_decay:  decoupled (AdamW); with decoupled_weight_decay=False it is added to the gradient
                   (Adam).
    moment_dtype:  torch.float32; torch.bfloat16, rounded to nearest after the update; or
                   torch.float8_e4m3fn, which keeps moments of tensors of 4096 elements and two dims
                   or more as codes, in 2 + 8 / 256 bytes per element, with fp32 scales per 256
                   elements of a row (the note of `optim/compact.py`), and others in fp32.
    capturable:    step and lr are read on the device, so that a CUDA graph may hold the step.
    store_param_remainders:  of a bf16 parameter keep the master's lower 16 bits beside it in place
                             of the whole master: 2
                   bytes per element less. Masters are the same bits; parameters differ from rounded
                   ones in ties alone.

    A parameter of fp32 is its own master; one of lower precision has its master in the state, and
    is that rounded, unless something else wrote it since: then the master follows it. Of a
    quantized parameter the state holds the only high-precision copy, and the model's state dict has
    it, not the optimizer's: checkpoints of quantized and ordinary parameters, and of
    torch.optim.AdamW, hold the same keys. Skips the step where `found_inf` (a GradScaler sets it)
    is not 0.

    Raises ValueError for settings out of range, and for parameters on the meta device that are
    quantized. Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        moment_dtype: torch.dtype = torch.float32,
        capturable: bool = False,
        store_param_remainders: bool = False,
    ):
        if (
            not 0.0 <= float(lr)
            or not 0.0 <= eps
            or not 0.0 <= weight_decay
            or not all(0.0 <= b < 1.0 for b in betas)
        ):
            raise ValueError(
                "lr, eps and weight_decay must not be negative and betas lie in [0, 1), got "
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            )
        if moment_dtype not in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                "moment_dtype must be torch.float32, torch.bfloat16 or torch.float8_e4m3fn, got "
                f"{moment_dtype}"
            )
        if isinstance(lr, Tensor) and not capturable:
            raise ValueError(
                "lr is a tensor, which is read on the device only with capturable=True; pass a "
                "float"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "moment_dtype": moment_dtype,
            "capturable": capturable,
            "store_param_remainders": store_param_remainders,
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
        """The state of a parameter: complete from the start, so that checkpoints can be loaded into
        it."""
        state, local = self.state[p], local_of(p)
        if state:
            return state
        if not local.is_floating_point():
            raise ValueError(f"FusedAdam updates floating parameters, got {local.dtype}")
        on_device = local.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
        if isinstance(local, QuantizedWeight):
            state["master"] = _beside(p, local.detach_master(self))
        elif local.dtype is torch.bfloat16 and group["store_param_remainders"]:
            remainder = torch.zeros((*local.shape, 2), dtype=torch.uint8, device=local.device)
            state["remainder"] = _beside(p, remainder, (*p.shape, 2))
        elif local.dtype is not torch.float32:
            state["master"] = _beside(p, values_of(local).detach().float())
        dtype = group["moment_dtype"]
        in_codes = dtype is torch.float8_e4m3fn and compact.takes_codes(p)
        for name in MOMENTS:
            if in_codes:
                codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
                scale = torch.zeros(compact.scale_shape(local.shape), device=local.device)
                state[f"{name}_codes"] = _beside(p, codes)
                state[f"{name}_scale"] = _beside(p, scale, compact.scale_shape(p.shape))
            else:
                kept = torch.float32 if dtype is torch.float8_e4m3fn else dtype
                state[name] = _beside(p, torch.zeros(local.shape, dtype=kept, device=local.device))
        return state

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Update every parameter that has a gradient; the codes of quantized ones follow when the
        step ends."""
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
        """What an update of a parameter reads and writes; looked up anew where something took its
        place."""
        held = self._held.get(id(p))
        if held is None or not held.is_current(p):
            held = self._held[id(p)] = _Held(p, self._start(p, group))
        return held

    # Checkpoints #

    def state_dict(self) -> dict:
        """As of any optimizer, without the masters of quantized parameters: the model's state dict
        has them."""
        packed = super().state_dict()
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        ids = chain.from_iterable(g["params"] for g in packed["param_groups"])
        quantized = {i for i, p in zip(ids, params) if isinstance(local_of(p), QuantizedWeight)}
        state = {
            i: {k: v for k, v in s.items() if k != "master" or i not in quantized}
            for i, s in packed["state"].items()
        }
        return packed | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load into the tensors of the state as they lie: nothing is rounded to a parameter's
        dtype, or moved.

        Moments that were saved as codes load into values, and values into codes. Raises ValueError,
        before anything is changed, for a state that lacks a moment, a step, or the master or
        remainder of a low-precision parameter, naming it.
        """
        own = dict(self.state)
        params = list(chain.from_iterable(g["params"] for g in self.param_groups))
        ids = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        loaded = []
        for i, p in zip(ids, params):
            saved, state = state_dict["state"].get(i), own.get(p, {})
            if saved is None:
                continue
            saved = _as_kept(saved, state)
            needed = state.keys() - (
                {"master"} if isinstance(local_of(p), QuantizedWeight) else set()
            )
            if not needed <= saved.keys():
                raise ValueError(
                    f"the saved state of parameter {i} {list(p.shape)} has {sorted(saved)}, and "
                    f"FusedAdam needs {sorted(needed)}; save it with FusedAdam, or start without "
                    "its state"
                )
            loaded.append((state, saved))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(own)
        for state, saved in loaded:
            for name, tensor in state.items():
                if name in saved:
                    value = saved[name]
                    local_of(tensor).copy_(
                        local_of(value) if isinstance(value, Tensor) else torch.tensor(value)
                    )


def _as_kept(saved: dict, state: dict) -> dict:
    """A saved state with its moments as `state` keeps them: in codes, or as values."""
    saved = dict(saved)
    for name in MOMENTS:
        codes, scale, is_root = f"{name}_codes", f"{name}_scale", name == "exp_avg_sq"
        if codes in state and name in saved:
            value = local_of(saved.pop(name)).float()
            saved[codes], saved[scale] = compact.encode(_root(value) if is_root else value, is_root)
        elif name in state and {codes, scale} <= saved.keys():
            value = compact.decode(local_of(saved.pop(codes)), local_of(saved.pop(scale)))
            saved[name] = value.square() if is_root else value
    return saved


def _beside(p: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A state tensor that is sharded as its parameter is.

    shape:  of all shards; None: the parameter's.
    """
    return torch_compat.dtensor_like(p, local, shape) if isinstance(p, DTensor) else local


class Stored(NamedTuple):
    """What an update reads and writes of one parameter, as it is stored.

    master:   fp32; or uint8 [.., 2], the remainder of the master that `rounded` and it make up.
    first, second:  moments in fp32 or bf16; or uint8 codes with scales (`compact.encode`, of the
                    second its root).
    rounded:  the low-precision parameter, or None.
    """

    master: Tensor
    first: Tensor
    second: Tensor
    rounded: Tensor | None = None
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None

    def updated(self, grad: Tensor, scalars: Tensor, grad_scale: Tensor | None = None) -> Stored:
        """After one update (`adam_update`), in the same dtypes."""
        in_codes, joined = self.first_scale is not None, self.master.dtype is torch.uint8
        first, second, master = self.first, self.second, self.master
        if in_codes:
            first = compact.decode(first, self.first_scale)
            second = compact.decode(second, self.second_scale).square()
        if joined:
            master = compact.join(self.rounded, master)
        p, m, v = adam_update(
            master, grad, first, second, None if joined else self.rounded, scalars, grad_scale
        )
        scales = ()
        if in_codes:
            m, first_scale = compact.encode(m)
            v, second_scale = compact.encode(_root(v), is_root=True)
            scales = first_scale, second_scale
        else:
            m, v = m.to(first.dtype), v.to(second.dtype)
        if joined:
            rounded, p = compact.split(p)
        else:
            rounded = None if self.rounded is None else p.to(self.rounded.dtype)
        return Stored(p, m, v, rounded, *scales)


class _Held:
    """The plain local tensors of one parameter's update, but for its gradient.

    weight:    the quantized parameter, or None.
    launches:  a kernel takes them.
    """

    def __init__(self, p: Tensor, state: dict):
        self.p, self.state, self.tensors = p, state, [state.get(name) for name in STATE]
        self.local = local_of(p)
        self.values = None if isinstance(self.local, QuantizedWeight) else values_of(self.local)
        self.weight = self.local if self.values is None else None
        master, remainder, *moments, self.step = (
            None if t is None else local_of(t) for t in self.tensors
        )
        first, second, first_codes, first_scale, second_codes, second_scale = moments
        kept = next((t for t in (master, remainder) if t is not None), None)
        in_codes = first is None
        self.stored = Stored(
            self.values if kept is None else kept,
            first_codes if in_codes else first,
            second_codes if in_codes else second,
            None if kept is None else self.values,
            first_scale,
            second_scale,
        )
        self.launches = native.adam_takes(*self.stored)
        self._outputs: tuple[tuple, FusedOutputs | None] | None = None  # and what it follows from

    def is_current(self, p: Tensor) -> bool:
        return (
            self.p is p
            and local_of(p) is self.local
            and all(self.state.get(n) is t for n, t in zip(STATE, self.tensors))
            and (self.values is None or values_of(self.local).data_ptr() == self.values.data_ptr())
        )

    @property
    def grad(self) -> Tensor:
        """Raises ValueError for a sparse one."""
        grad = local_of(self.p.grad)
        if grad.is_sparse:
            raise ValueError(
                "FusedAdam takes dense gradients, got a sparse one; use torch.optim.SparseAdam for "
                "it"
            )
        return grad

    @property
    def outputs(self) -> FusedOutputs | None:
        """What the kernel makes of the new master on its way; the one of 8-bit moments makes
        nothing."""
        if self.weight is None or self.stored.first_scale is not None:
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
        1 - lr * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - bias2) ** 0.5,
        -(lr / (1 - bias1)),
        group["eps"],
    ]


def _scalars_on_host(
    group: dict, steps: list[Tensor], found_inf: Tensor | None
) -> tuple[Tensor, list[int]]:
    """(fp32 [distinct steps, 8] on the host, row of each parameter), after counting the step."""
    if found_inf is None or not found_inf.item():
        for step in steps:
            step += 1
    # 0 where the first step is skipped: nothing reads its row
    numbers = [max(int(step), 1) for step in steps]
    row_of = {n: i for i, n in enumerate(dict.fromkeys(numbers))}
    beta1, beta2 = group["betas"]
    rows = [_scalars(group, group["lr"], beta1**n, beta2**n) for n in row_of]
    return torch.tensor(rows, dtype=torch.float32, device="cpu"), [row_of[n] for n in numbers]


def _scalars_on_device(
    group: dict, steps: list[Tensor], found_inf: Tensor | None
) -> tuple[Tensor, list[int]]:
    """(fp32 [parameters, 8] on the device, row of each parameter), after counting the step; nothing
    is read."""
    (beta1, beta2), index = group["betas"], list(range(len(steps)))
    if not all(map(native.runs, steps)):
        return scalars_on_device(group, steps, found_inf), index
    rest = group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
    return native.adam_count(steps, found_inf, group["lr"], beta1, beta2, *rest), index


def scalars_on_device(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> Tensor:
    """fp32 [parameters, 8] (`SCALARS`), after adding 1 - found_inf to the steps: what
    `native.adam_count` equals."""
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
    held: list[_Held],
    grads: list[Tensor],
    scalars: Tensor,
    index: list[int],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """A launch for all that is alike to the kernel; the rest one after another."""
    alike: dict[tuple, list[tuple[_Held, Tensor, int]]] = {}
    for h, grad, row in zip(held, grads, index):
        of = h.stored
        if (
            h.launches
            and native.adam_takes(grad)
            and (of.rounded is None or of.rounded.dtype is torch.bfloat16)
        ):
            found = h.outputs
            follows = None if found is None else (found.encodings, found.blocks is None)
            key = (
                of.master.device,
                of.master.dtype,
                grad.dtype,
                of.first.dtype,
                of.rounded is None,
                follows,
            )
            alike.setdefault(key, []).append((h, grad, row))
        else:
            _update_one(h, grad, scalars[row], grad_scale, found_inf)
    for (*_, follows), of in alike.items():
        held, grads, rows = zip(*of)
        master, first, second, rounded, *scales = map(list, zip(*(h.stored for h in held)))
        step = native.AdamStep(master, grads, first, second, rows, scalars, grad_scale, found_inf)
        if follows is None:
            native.adam(step, *([] if of[0] is None else of for of in (rounded, *scales)))
        else:
            _update_and_follow(step, held, *follows)


def _update_and_follow(
    step: native.AdamStep, held: list[_Held], encodings: tuple[Encoding, ...], codes: bool
) -> None:
    """One launch updates masters of quantized parameters and makes their codes, or the statistics
    that those follow from."""
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


def _update_one(
    h: _Held, grad: Tensor, row: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """What `native.adam` does, by the definition."""
    device = h.stored.master.device
    scale, skip = (None if t is None else t.to(device).reshape(()) for t in (grad_scale, found_inf))
    for target, value in zip(h.stored, h.stored.updated(grad, row.to(device), scale)):
        if target is not None:
            target.copy_(value if skip is None else torch.where(skip != 0, target, value))


def adam_update(
    master: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    rounded: Tensor | None,
    scalars: Tensor,
    grad_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(master, first and second moment) after one update, in fp32, of one tensor: the definition
    that the kernel equals.

    scalars:     fp32 [8] (`SCALARS`).
    grad_scale:  fp32 []; the gradient is divided by it.
    """
    keep, coupled, weight, beta2, weight2, root, minus_step, eps = scalars.unbind()
    p, g, m, v = (t.float() for t in (master, grad, first, second))
    if rounded is not None:
        # something else wrote the parameter
        p = torch.where(p.to(rounded.dtype) == rounded, p, rounded.float())
    if grad_scale is not None:
        g = g / grad_scale
    g = torch.where(coupled != 0, g + p * coupled, g)
    p = p * keep
    change = g - m
    m = torch.where(weight < 0.5, m + change * weight, g - change * (1 - weight))
    v = v * beta2 + g * weight2 * g
    return p + (m * minus_step) / (_root(v) / root + eps), m, v


def _root(v: Tensor) -> Tensor:
    """fp32, rounded once: roots of a CPU's vector library are an ulp off."""
    return v.double().sqrt().float()
