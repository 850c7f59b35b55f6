# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam`: AdamW or Adam with fp32 masters of quantized and of low-precision parameters.

[Note: the update]
All in fp32, for a master p, its gradient g (divided by the loss scale if there is one) and moments
m and v:
    p <- p * (1 - lr * decay)                        decoupled; coupled: g <- g + decay * p
    m <- lerp(m, g, 1 - beta1)
    v <- beta2 * v + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
Every operation rounds once and none are fused, so that an element's bits depend neither on its
place in a shard nor on the processor (torch's lerp and addcmul fuse in a CPU's vectors, but not in
the tail). The results are torch.optim.AdamW's up to those roundings; the kernel equals them bit for
bit. Scalars are computed in fp64 and rounded once to fp32, on the host or (capturable) the device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..counters import counters
from ..migration import answers_keywords
from ..ops import native
from ..ops.dispatch import Encoded, Statistics
from ..options import choice
from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.refresh import FusedOutputs, fused_outputs
from ..tensor.torch_compat import local_of
from ..tensor.weight_state import values_of
from . import compact

MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENT_DTYPE = choice(torch.float32, torch.bfloat16, torch.float8_e4m3fn)
STORING = ("moment_dtype", "store_param_remainders")  # settings that say how a state is stored
# Scalars of one update, fp32 [8]; `coupled` weights the decay of g, `keep` is the decoupled factor
# of p.
SCALARS = (
    *("keep", "coupled", "first", "beta2"),
    *("second", "root_correction", "minus_step_size", "eps"),
)


@answers_keywords
class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam) in fp32; after the step, quantized parameters are encoded from their masters.

    params:        as for any optimizer: quantized parameters, plain tensors, DTensors of them.
    lr:            float, or a tensor on the device (capturable).
    weight_decay:  decoupled (AdamW); with decoupled_weight_decay=False added to the gradient
                   (Adam).
    moment_dtype:  torch.float32; torch.bfloat16, rounded to nearest after the update; or
                   torch.float8_e4m3fn: tensors of 4096 elements and two dims or more store moments
                   as codes, 2 + 8 / 256 bytes per element, with one fp32 scale per 256 elements of
                   a row (the note of `optim/compact.py`); others in fp32.
    capturable:    read step and lr on the device, so that a CUDA graph can capture the step.
    store_param_remainders:  for bf16 parameters, store the master's lower 16 bits in place of the
                   whole master: 2 bytes per element less. Masters have the same bits; parameters
                   differ from rounded ones in ties alone.

    An fp32 parameter is its own master. One of lower precision has its master in the state and is
    the rounded master; if something else wrote the parameter, the master follows it. The state
    holds the only high-precision copy of a quantized parameter; the model's state dict saves it,
    not the optimizer's, so checkpoints of quantized and ordinary parameters, and of
    torch.optim.AdamW, have the same keys. Skips the step if `found_inf` (set by a GradScaler) is
    not 0.

    Raises ValueError for settings out of range, and for quantized parameters on the meta device.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization.
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
                "lr, eps and weight_decay must not be negative and betas be in [0, 1), got "
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            )
        _MOMENT_DTYPE.read("moment_dtype", moment_dtype)
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
        """Restore a copy, or copy the states that `load_state_dict` passes into this one's."""
        saved = {p: s.values for p, s in state["state"].items() if isinstance(s, _Saved)}
        if saved:
            self._load(saved, state["param_groups"])
            state = {**state, "state": self.state}
        super().__setstate__(state)
        self._held = {}
        for p, values in self.state.items():  # of a copy, whose weights hold other values
            if isinstance(weight := local_of(p), QuantizedWeight) and "master" in values:
                weight.attach_master(local_of(values["master"]), self)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.requires_grad:
                self._start(p, group)

    def _start(self, p: Tensor, group: dict) -> dict:
        """Complete the state of a parameter, before its first step, so that a checkpoint can load
        into it."""
        state, local = self.state[p], local_of(p)
        if not state:
            state.update(_new_state(p, group))
        if isinstance(local, QuantizedWeight) and "master" not in state:
            state["master"] = _beside(p, local.detach_master(self))
        return state

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Update every parameter that has a gradient. A step hook then encodes quantized ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch_compat.never_compiled  # a compiler would fuse, and change bits
    def _update(self) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        updates = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates.append((group, [(self._hold(p, group), _local_grad(p.grad)) for p in params]))
        for group, held in updates:
            if held:
                scalars = _count_step(group, [h.step for h, _ in held], found_inf)
                _update_all(held, scalars, grad_scale, found_inf)

    def _hold(self, p: Tensor, group: dict) -> _Held:
        """Return the tensors of a parameter's update, collected again if any was replaced."""
        held = self._held.get(id(p))
        if held is None or not held.is_current(p):
            held = self._held[id(p)] = _Held(p, self._start(p, group))
        return held

    # Checkpoints #

    def state_dict(self) -> dict:
        """Return the state without the masters of quantized parameters, which the model's state
        dict has."""
        packed = super().state_dict()
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        ids = chain.from_iterable(g["params"] for g in packed["param_groups"])
        quantized = {i for i, p in zip(ids, params) if isinstance(local_of(p), QuantizedWeight)}
        state = {
            i: {k: v for k, v in s.items() if k != "master" or i not in quantized}
            for i, s in packed["state"].items()
        }
        return packed | {"state": state}

    def load_state_dict(self, state_dict: dict) -> None:
        """Copy into the existing state tensors; nothing is rounded to a parameter's dtype.

        As with torch.optim.AdamW, frozen parameters take their states too, one without a saved
        state starts anew, and settings are the saved ones, but for how states are stored.
        Converts between moments as codes and as values. Raises ValueError, before any change, if a
        parameter's state lacks a moment, the step, or the master or remainder of a low-precision
        parameter, or has another shape, and for settings that FusedAdam does not have.
        """

        def hide_states(_, state_dict: dict) -> dict:
            """Hide states from torch, which would round them to their parameters' dtypes."""
            groups, saved = state_dict["param_groups"], state_dict["state"]
            states = {i: _Saved(saved.get(i)) for group in groups for i in group["params"]}
            return {**state_dict, "state": states}

        with self.register_load_state_dict_pre_hook(hide_states):  # behind those of others
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def _load(self, saved: dict[Tensor, dict | None], groups: list[dict]) -> None:
        """Copy saved states, and complete the saved settings in `groups`."""
        states: list[tuple[Tensor, dict, dict]] = []
        for group, loaded in zip(self.param_groups, groups):
            for name in ("amsgrad", "maximize"):
                if loaded.get(name):
                    raise ValueError(f"the saved state is of {name}=True, which FusedAdam has not")
            for p in group["params"]:
                state, values = self.state.get(p), saved[p]
                if values is not None:
                    state = state or _new_state(p, group)
                    values = _as_stored(values, state)
                    _check_saved(p, state, values)
                    states.append((p, state, values))
                elif state:
                    states.append((p, state, _new_state(p, group)))
        for group, loaded in zip(self.param_groups, groups):
            loaded |= {k: v for k, v in group.items() if k in STORING or k not in loaded}
        for p, state, values in states:
            self.state[p] = state
            for name in state.keys() & values.keys():
                tensor, value = local_of(state[name]), values[name]
                is_tensor = isinstance(value, Tensor)
                tensor.copy_(local_of(value).view_as(tensor)) if is_tensor else tensor.fill_(value)
        for group in groups:
            for p in group["params"]:
                if group["capturable"] and (state := self.state.get(p)):
                    state["step"] = state["step"].to(p.device)


class _Saved:
    """What a state dict has of a parameter, or None: `values`."""

    def __init__(self, values: dict | None):
        self.values = values


def _check_saved(p: Tensor, state: dict, saved: dict) -> None:
    """Raise ValueError unless `state` can be filled with the values of `saved`."""
    needed = state.keys() - ({"master"} if isinstance(local_of(p), QuantizedWeight) else set())
    if not needed <= saved.keys():
        raise ValueError(
            f"the saved state of a parameter {list(p.shape)} has {sorted(saved)}, and FusedAdam "
            f"needs {sorted(needed)}; save it with FusedAdam, or start without its state"
        )
    for name in state.keys() & saved.keys():
        value, tensor = saved[name], local_of(state[name])
        if isinstance(value, Tensor) and local_of(value).shape != tensor.shape and name != "step":
            raise ValueError(
                f"the saved {name} of a parameter {list(p.shape)} is {list(local_of(value).shape)},"
                f" wanted {list(tensor.shape)}: it is of another model, or of another cut of it"
            )


def _new_state(p: Tensor, group: dict) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step, but for the master of a quantized
    one."""
    local = local_of(p)
    if not local.is_floating_point():
        raise ValueError(f"FusedAdam updates floating parameters, got {local.dtype}")

    def zeros(dtype: torch.dtype, shape_of: Callable | None = None) -> Tensor:
        shape = local.shape if shape_of is None else shape_of(local.shape)
        tensor = torch.zeros(shape, dtype=dtype, device=local.device)
        return _beside(p, tensor, None if shape_of is None else shape_of(p.shape))

    on_device = local.device if group["capturable"] else "cpu"
    state = {"step": torch.zeros((), dtype=torch.float32, device=on_device)}
    is_low_precision = local.dtype is not torch.float32 and not isinstance(local, QuantizedWeight)
    if is_low_precision and local.dtype is torch.bfloat16 and group["store_param_remainders"]:
        state["remainder"] = zeros(torch.uint8, lambda shape: (*shape, 2))
    elif is_low_precision:
        state["master"] = _beside(p, values_of(local).detach().float())
    dtype = group["moment_dtype"]
    in_codes = dtype is torch.float8_e4m3fn and compact.takes_codes(p)
    for name in MOMENTS:
        if in_codes:
            state[f"{name}_codes"] = zeros(torch.uint8)
            state[f"{name}_scale"] = zeros(torch.float32, compact.scale_shape)
        else:
            state[name] = zeros(torch.float32 if dtype is torch.float8_e4m3fn else dtype)
    return state


def _as_stored(saved: dict, state: dict) -> dict:
    """Return a saved state with its moments as `state` stores them: as codes or as values."""
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


def _local_grad(grad: Tensor) -> Tensor:
    if (local := local_of(grad)).is_sparse:
        raise ValueError(
            "FusedAdam accepts dense gradients, got a sparse one; use torch.optim.SparseAdam for it"
        )
    return local


def _beside(p: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a state tensor, sharded like p. shape: of the unsharded tensor (default: of p)."""
    return torch_compat.dtensor_like(p, local, shape) if isinstance(p, DTensor) else local


class Stored(NamedTuple):
    """The stored tensors that an update of one parameter reads and writes.

    master:   fp32; or uint8 [.., 2], the remainder, which with `rounded` is the master.
    first, second:  moments in fp32 or bf16; or uint8 codes with scales (`compact.encode` of the
                    first, and of the root of the second).
    rounded:  the low-precision parameter, or None.
    """

    master: Tensor
    first: Tensor
    second: Tensor
    rounded: Tensor | None = None
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None

    def updated(self, grad: Tensor, scalars: Tensor, grad_scale: Tensor | None = None) -> Stored:
        """Return the values after one update (`adam_update`), in the same dtypes."""
        master, first, second, rounded, first_scale, second_scale = self
        if first_scale is not None and second_scale is not None:
            first = compact.decode(first, first_scale)
            second = compact.decode(second, second_scale).square()
        joined = master.dtype is torch.uint8
        if joined and rounded is not None:
            master, rounded = compact.join(rounded, master), None
        p, m, v = adam_update(master, grad, first, second, rounded, scalars, grad_scale)
        if first_scale is not None:
            m, first_scale = compact.encode(m)
            v, second_scale = compact.encode(_root(v), is_root=True)
        else:
            m, v = m.to(first.dtype), v.to(second.dtype)
        if joined:
            rounded, p = compact.split(p)
        elif rounded is not None:
            rounded = p.to(rounded.dtype)
        return Stored(p, m, v, rounded, first_scale, second_scale)


class _Held:
    """The plain local tensors of one parameter's update, except its gradient.

    weight:    the quantized parameter, or None.
    launches:  a kernel updates them.
    """

    def __init__(self, p: Tensor, state: dict[str, Tensor]):
        self.p, self.state, self.tensors, self.local = p, state, list(state.values()), local_of(p)
        self.weight = self.local if isinstance(self.local, QuantizedWeight) else None
        self.values = values = values_of(self.local) if self.weight is None else None
        plain = {name: local_of(t) for name, t in state.items()}
        self.step = plain["step"]
        masters = plain.get("master"), plain.get("remainder"), values
        master = next(t for t in masters if t is not None)
        suffix = "" if "exp_avg" in plain else "_codes"
        self.stored = Stored(
            master,
            first=plain[f"exp_avg{suffix}"],
            second=plain[f"exp_avg_sq{suffix}"],
            rounded=None if master is values else values,
            first_scale=plain.get("exp_avg_scale"),
            second_scale=plain.get("exp_avg_sq_scale"),
        )
        rounds = self.stored.rounded is None or self.stored.rounded.dtype is torch.bfloat16
        self.launches = rounds and native.adam_takes(*self.stored)
        self._outputs: tuple[tuple, FusedOutputs | None] | None = None  # with their key

    def is_current(self, p: Tensor) -> bool:
        return (
            self.p is p
            and local_of(p) is self.local
            and len(self.state) == len(self.tensors)
            and all(map(operator.is_, self.state.values(), self.tensors))
            and (self.values is None or values_of(self.local).data_ptr() == self.values.data_ptr())
        )

    @property
    def outputs(self) -> FusedOutputs | None:
        """Return what the kernel computes of the new master besides; with 8-bit moments None."""
        if self.weight is None or self.stored.first_scale is not None:
            return None
        state = self.weight.state
        key = state.quantizer, state.compute_dtype, state.managed
        if self._outputs is None or any(a is not b for a, b in zip(self._outputs[0], key)):
            self._outputs = key, fused_outputs(self.weight)
        return self._outputs[1]


# Scalars of an update #


def _scalars(group: dict, lr, bias1, bias2) -> list:
    """Return the values of SCALARS, from beta^t: floats, or fp64 tensors of any shape."""
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


def _count_step(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> Tensor:
    """Count the step unless it is skipped; fp32 [parameters, 8] (`SCALARS`), on the host or
    (capturable) on the device. There nothing is read back."""
    if not group["capturable"] and found_inf is not None:
        found_inf = torch.tensor(found_inf.item(), dtype=torch.float32, device="cpu")
    if not all(map(native.is_available_for, steps)):
        return scalars_on_device(group, steps, found_inf)
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    return native.adam_count(steps, found_inf, group["lr"], beta1, beta2, eps, decay, decoupled)


def scalars_on_device(group: dict, steps: list[Tensor], found_inf: Tensor | None) -> Tensor:
    """Add 1 - found_inf to the steps; fp32 [parameters, 8] (`SCALARS`). The definition of
    `native.adam_count`."""
    torch_compat.foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf.reshape(()))
    step = torch.stack(steps).double()
    lr = group["lr"]
    lr = lr.to(step.device, torch.float64) if isinstance(lr, Tensor) else lr
    beta1, beta2 = group["betas"]
    columns = _scalars(group, lr, torch.pow(beta1, step), torch.pow(beta2, step))
    columns = [c if isinstance(c, Tensor) else torch.full_like(step, c) for c in columns]
    return torch.stack([c.expand_as(step) for c in columns], 1).float()


# The update #


def _update_all(
    held: list[tuple[_Held, Tensor]],
    scalars: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update all parameters: one launch per kind with a kernel, the rest one by one.

    held:  with the local gradients.
    """
    by_kind: dict[tuple, list[tuple[_Held, Tensor, int, FusedOutputs | None]]] = {}
    for row, (h, grad) in enumerate(held):
        stored = h.stored
        if h.launches and native.adam_takes(grad):
            outputs = h.outputs
            kind = (
                stored.master.device,
                stored.master.dtype,
                grad.dtype,
                stored.first.dtype,
                stored.rounded is None,
                None if outputs is None else (outputs.encodings, outputs.blocks is None),
            )
            by_kind.setdefault(kind, []).append((h, grad, row, outputs))
        else:
            _update_one(h, grad, scalars[row], grad_scale, found_inf)
    for group in by_kind.values():
        _, grads, rows, _ = map(list, zip(*group))
        master, first, second, *rest = map(list, zip(*(h.stored for h, *_ in group)))
        step = native.AdamStep(master, grads, first, second, rows, scalars, grad_scale, found_inf)
        fused = [(h.weight, o) for h, *_, o in group if h.weight is not None and o is not None]
        if fused:
            _update_and_encode(step, fused)
        else:
            native.adam(step, *([] if tensors[0] is None else tensors for tensors in rest))


def _update_and_encode(
    step: native.AdamStep, fused: list[tuple[QuantizedWeight, FusedOutputs]]
) -> None:
    """One launch updates masters of quantized parameters, and encodes them or computes their
    statistics. All have equal encodings."""
    encodings, row0 = fused[0][1].encodings, [outputs.shards[0][1] for _, outputs in fused]
    blocks = [outputs.blocks for _, outputs in fused if outputs.blocks is not None]
    if blocks:
        statistics = native.adam_statistics(step, encodings, row0, blocks)
        for (weight, outputs), results in zip(fused, statistics):
            computed = {d: Statistics(*result) for (d, _), result in zip(outputs.shards, results)}
            weight.state.computed = weight.version, computed
        return
    buffers = [[weight.output_buffers(d) for d, _ in outputs.shards] for weight, outputs in fused]
    for (weight, outputs), results in zip(fused, native.adam_codes(step, encodings, row0, buffers)):
        for (direction, start), (data, scale) in zip(outputs.shards, results):
            counters.add("weight encode", (weight.state.name, direction.value))
            weight.store(direction, Encoded(data, scale, None, None), start)


def _update_one(
    h: _Held, grad: Tensor, row: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """Update one parameter by the definition, as `native.adam` does."""
    device = h.stored.master.device
    scale, skip = (None if t is None else t.to(device).reshape(()) for t in (grad_scale, found_inf))
    for target, value in zip(h.stored, h.stored.updated(grad, row.to(device), scale)):
        if target is not None and value is not None:
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
    """Return (master, first, second moment) of one tensor after one update, in fp32: the
    definition of the kernel.

    scalars:     fp32 [8] (`SCALARS`).
    grad_scale:  fp32 []; divides the gradient.
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
    """fp32 root, rounded once: a CPU's vector library is an ulp off."""
    return v.double().sqrt().float()
