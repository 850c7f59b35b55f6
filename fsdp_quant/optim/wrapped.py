# SPDX-License-Identifier: Apache-2.0
"""`wrap`: any torch optimizer class, with fp32 masters of quantized parameters.

[Note: the optimizer inside]
An optimizer of `wrap(cls)` holds one of `cls` (`inner`) over the caller's parameters, with fp32
masters in place of quantized parameters. One step:
    gradients of quantized parameters -> gradients of masters, in fp32
    inner.step()                      -> masters, and the other parameters, in place
    codes of all masters              -> encoded after every optimizer's step
                                         (`linear/training_steps.py`)
Settings of both optimizers are equal before and after each step, and `state[p]` is the inner
optimizer's state of p or of its master, so schedulers, clipping, GradScaler and checkpoints see
what they see of `cls`. The model's state dict stores the masters, under the names of the weights.
Whatever else `cls` has (`train`, `eval`, `first_step`, attributes) is the inner optimizer's: a
method runs on the masters and their gradients as a step does, and codes follow what it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..tensor import torch_compat
from ..tensor.quantized_weight import QuantizedWeight
from ..tensor.torch_compat import local_of
from .fused_adam import FusedAdam

_OF_GRAD_SCALER = "grad_scale", "found_inf"  # set on optimizers that unscale themselves
_T = TypeVar("_T")


@functools.cache
def wrap(optimizer_cls: type[Optimizer]) -> type[Optimizer]:
    """Return a class like `optimizer_cls` whose optimizers step quantized parameters too.

        optimizer = fq.optim.wrap(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)

    Its optimizers accept the arguments of `optimizer_cls`, and parameters of every kind. They hold
    the fp32 master of each quantized parameter that requires grad, and encode it after each step;
    other parameters go to `optimizer_cls` unchanged. Create them after `fully_shard` and
    initialization. Their state dict is that of `optimizer_cls`, with states of masters in fp32.
    They are instances of `optimizer_cls`, with its methods and attributes: a method that writes
    parameters (`eval()` of an averaging optimizer) writes masters, and the next forward multiplies
    their codes. Every rank must call such a method. `optimizer.inner` is the optimizer of
    `optimizer_cls`; compile the update of masters by
    `optimizer.inner.step = torch.compile(optimizer.inner.step)`. After calling a method of `inner`
    that writes parameters outside of a step, call `fq.sync(model)`.

    Returns FusedAdam, which has its own masters, unchanged. Raises ValueError for anything but a
    subclass of torch.optim.Optimizer.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise ValueError(
            f"fq.optim.wrap accepts a subclass of torch.optim.Optimizer, got {optimizer_cls!r}; "
            "wrap the class, and give its options to the class that wrap returns"
        )
    if issubclass(optimizer_cls, (FusedAdam, WithMasters)):
        return optimizer_cls
    forwarded = {
        name: _forwarded(name)
        for base in reversed(optimizer_cls.__mro__)
        if not issubclass(Optimizer, base)
        for name, value in vars(base).items()
        if name not in vars(WithMasters)
        and not isinstance(value, (classmethod, staticmethod))
        and not (name.startswith("_") and hasattr(Optimizer, name))
        and not name.startswith("__")
    }
    return type(
        f"{optimizer_cls.__name__}WithMasters",
        (WithMasters, optimizer_cls),
        forwarded | {"wraps": optimizer_cls},
    )


def _forwarded(name: str) -> property:
    """Return the attribute of the class of `wrap` that is one of the inner optimizer."""
    return property(
        lambda self: self._read_inner(name), lambda self, new: setattr(self.inner, name, new)
    )


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and all optimizers in its attributes, also in containers there."""
    optimizers = [optimizer]
    for outer in optimizers:  # the loop appends to it
        for name, value in vars(outer).items():
            if name in ("state", "param_groups"):
                continue
            value = list(value.values()) if isinstance(value, dict) else value
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(inner, Optimizer) and inner not in optimizers:
                    optimizers.append(inner)
    return optimizers


def _rebuilt(optimizer_cls: type[Optimizer]) -> Optimizer:
    """Return an optimizer of `wrap` without state: pickle finds the class by that of torch."""
    cls = wrap(optimizer_cls)
    return cls.__new__(cls)


class WithMasters(Optimizer):
    """An optimizer of quantized parameters through one of class `wraps`; see the module's note.

    inner:     the optimizer of class `wraps`.
    _masters:  quantized parameter -> (its weight, the parameter of `inner`, the master's plain
               local tensor, which the weight refers to weakly).

    Raises ValueError for a quantized parameter on the meta device, or whose master another
    optimizer holds; and what `wraps` raises, after returning the masters to the weights.
    """

    wraps: type[Optimizer]
    inner: Optimizer

    def __init__(self, params: ParamsT, *args, **kwargs):
        self._masters: dict[Tensor, tuple[QuantizedWeight, nn.Parameter, Tensor]] = {}
        Optimizer.__init__(self, params, {})  # the next class is `wraps`
        groups = self.param_groups
        self.inner = self._with_masters(groups, lambda inside: self.wraps(inside, *args, **kwargs))
        self.defaults = self.inner.defaults
        self._pull()

    def __getattr__(self, name: str):
        if name in _OF_GRAD_SCALER or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._read_inner(name)

    def _read_inner(self, name: str):
        """Return an attribute of the inner optimizer; a method runs as a step does."""
        value = getattr(self.inner, name)
        return functools.partial(self._call, value) if inspect.isroutine(value) else value

    def __setattr__(self, name: str, value) -> None:
        """Set an attribute that only the inner optimizer has there."""
        inner = self.__dict__.get("inner")
        is_own = name in self.__dict__ or hasattr(type(self), name) or name in _OF_GRAD_SCALER
        is_inner = inner is not None and not is_own and hasattr(inner, name)
        object.__setattr__(inner if is_inner else self, name, value)

    __getstate__ = Optimizer.__getstate__

    def add_param_group(self, param_group: dict) -> None:
        Optimizer.add_param_group(self, param_group)
        if "inner" not in self.__dict__:
            return
        try:
            self._with_masters(
                self.param_groups[-1:], lambda inside: self.inner.add_param_group(*inside)
            )
        except BaseException:
            del self.param_groups[len(self.inner.param_groups) :]
            raise
        self._pull()

    def _with_masters(self, groups: list[dict], call: Callable[[list[dict]], _T]) -> _T:
        """Call with groups of masters. Returns the masters to their weights if `call` raises."""
        before = set(self._masters)
        try:
            return call([{**g, "params": [self._inside(p) for p in g["params"]]} for g in groups])
        except BaseException:
            for p in self._masters.keys() - before:
                weight, _, master = self._masters.pop(p)
                weight.return_master(master)
            raise

    def _inside(self, p: Tensor) -> Tensor:
        """Return the tensor that stands for a parameter in the inner optimizer."""
        local = local_of(p)
        if not isinstance(local, QuantizedWeight):
            return p
        if not p.requires_grad:  # a placeholder, so that later parameters keep their numbers
            return nn.Parameter(torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=False)
        master = local.detach_master(self)
        parameter = nn.Parameter(
            torch_compat.dtensor_like(p, master) if isinstance(p, DTensor) else master
        )
        self._masters[p] = local, parameter, master
        return parameter

    def __reduce_ex__(self, protocol) -> tuple:
        inside = [(p, parameter) for p, (_, parameter, _) in self._masters.items()]
        state = Optimizer.__getstate__(self) | {"inner": self.inner, "_masters": inside}
        return _rebuilt, (self.wraps,), state

    def __setstate__(self, state: dict) -> None:
        """Let the weights of a copy, which hold other values, refer to the masters."""
        inside = state["_masters"]
        Optimizer.__setstate__(self, state | {"_masters": {}})
        for p, parameter in inside:
            if isinstance(weight := local_of(p), QuantizedWeight):
                master = local_of(parameter).detach()
                weight.attach_master(master, self)
                self._masters[p] = weight, parameter, master

    # The step #

    @torch_compat.never_compiled  # the inner step may be compiled
    def step(self, closure: Callable | None = None):
        """Step the inner optimizer. A step hook then encodes quantized parameters."""
        with self._entered():
            if closure is None:
                return self.inner.step()
            return self.inner.step(self._evaluate(closure))

    @torch_compat.never_compiled
    def _call(self, method: Callable[..., _T], *args, **kwargs) -> _T | WithMasters:
        """Call a method of the inner optimizer. If it stepped, this is a step for hooks too."""
        stepped: list[Optimizer] = []
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_inside(self.inner):
                hook = optimizer.register_step_post_hook(lambda inner, *_: stepped.append(inner))
                stack.enter_context(hook)
            stack.enter_context(self._entered(writes_all=True))
            result = method(*args, **kwargs)
        if stepped:
            self._run_hooks()
        return self if result is self.inner else result

    @Optimizer.profile_hook_step
    def _run_hooks(self) -> None:
        """Run the hooks of a step that the inner optimizer made."""

    @contextlib.contextmanager
    def _entered(self, writes_all: bool = False) -> Iterator[None]:
        """Give masters the gradients inside, and the weights what the inner optimizer did.

        writes_all:  it may write masters without gradients too, and gradients.
        """
        self._push()
        self._copy_gradients()
        try:
            yield
        finally:
            written = [p for p in self._masters if writes_all or p.grad is not None]
            self._return_gradients(writes_all)
            for _, parameter, _ in self._masters.values():
                parameter.grad = None
            self._mark_written(written)
            self._pull()

    def _evaluate(self, closure: Callable) -> Callable:
        """Return the closure for an inner optimizer, which may write masters before a call."""

        def versions() -> list[int]:
            return [local_of(parameter)._version for _, parameter, _ in self._masters.values()]

        before, calls = versions(), itertools.count()

        def evaluate():
            if next(calls) or versions() != before:
                self._return_gradients()
                self._mark_written(list(self._masters))  # the forward inside encodes them again
            with torch.enable_grad():
                loss = closure()
            self._copy_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def _copy_gradients(self) -> None:
        """Set the masters' gradients to those of their parameters, in fp32."""
        for p, (_, parameter, _) in self._masters.items():
            parameter.grad = None if p.grad is None else p.grad.to(torch.float32)

    @torch.no_grad()
    def _return_gradients(self, values: bool = False) -> None:
        """Drop gradients that the inner optimizer dropped. values: copy those that it changed."""
        for p, (_, parameter, _) in self._masters.items():
            if parameter.grad is None:
                p.grad = None
            elif values and p.grad is not None and parameter.grad is not p.grad:
                p.grad.copy_(parameter.grad)

    @torch.no_grad()
    def _mark_written(self, written: list[Tensor]) -> None:
        """Note writes of masters that torch may not have counted (a compiled step, a kernel)."""
        for p in written:
            weight, parameter, master = self._masters[p]
            if local_of(parameter).data_ptr() != master.data_ptr():  # its memory was replaced
                master.copy_(local_of(parameter))
            weight.state.mark_written()

    # Settings and state #

    def _push(self) -> None:
        """Copy to the inner optimizer what schedulers, users and a GradScaler wrote here."""
        for group, inside in zip(self.param_groups, self.inner.param_groups):
            inside.update({k: v for k, v in group.items() if k != "params"})
        for name in _OF_GRAD_SCALER:
            if hasattr(self, name):
                setattr(self.inner, name, getattr(self, name))
            elif hasattr(self.inner, name):
                delattr(self.inner, name)

    def _pull(self) -> None:
        """Copy the settings and the state of the inner optimizer."""
        self.state = defaultdict(dict)
        for group, inside in zip(self.param_groups, self.inner.param_groups):
            group.update({k: v for k, v in inside.items() if k != "params"})
            for p, parameter in zip(group["params"], inside["params"]):
                is_placeholder = parameter is not p and not parameter.numel()
                if parameter in self.inner.state and not is_placeholder:
                    self.state[p] = self.inner.state[parameter]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def state_dict(self) -> dict:
        """Return the inner optimizer's, without masters, which the model's state dict stores."""
        self._push()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load into the inner optimizer, also from a state dict of `wraps` over plain
        parameters."""
        self.inner.load_state_dict(state_dict)
        self._pull()
