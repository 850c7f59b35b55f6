# SPDX-License-Identifier: Apache-2.0
"""`offload`: keep tensors that autograd saves in pinned host memory between forward and backward.

    forward    a side stream copies each saved tensor; its device memory is freed once `in_flight`
               more bytes have been saved
    backward   tensors are copied back in reverse order, `in_flight` bytes ahead of their use

The compute stream waits only for copies that fall behind; the host never waits. The tensors saved
last are still on the device when the backward begins, and are not copied back.
torch.autograd.graph.save_on_cpu does not serve: it copies on the compute stream, which waits for
each transfer both ways, copies a tensor once per node that saves it, and copies weights too.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor, nn
from torch.cuda import Event, Stream, current_stream

from ..tensor import torch_compat


class _Copy:
    """A saved tensor on the host.

    uses:      number of times that the graph saved it. taken: of those that a backward has used.
    has_left:  event after which the source may be written.
    loaded:    its values on the device, once requested. ready: event after which they are complete.
    stays:     loaded is the source.
    """

    def __init__(self, source: Tensor, stream: Stream, place: int):
        self.stream, self.place, self.bytes = stream, place, source.nbytes
        self.uses, self.taken, self.stays = 0, 0, False
        self.loaded: Tensor | None = None
        self.ready: Event | torch.Event | None = None
        self.device, self.version = source.device, source._version
        self.host = _pinned_like(source)
        stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
            self.has_left = stream.record_event()

    def load(self) -> Tensor:
        """Begin to copy the values back, into memory of the compute stream."""
        if self.loaded is not None:
            return self.loaded
        self.stays = False
        self.loaded = values = torch.empty_like(self.host, device=self.device)
        self.reader = current_stream(self.device)
        self.stream.wait_stream(self.reader)
        with torch.cuda.stream(self.stream):
            values.copy_(self.host, non_blocking=True)
            self.ready = self.stream.record_event()
        return values

    def take(self) -> Tensor:
        """The values for one use. Drops the device copy after the last; a retained graph may take
        more."""
        values = self.load()
        if self.stays:
            self.check(values)
        self._wait(current_stream(self.device))
        self.taken += 1
        if self.taken >= self.uses:
            self.loaded = None
        return values

    def check(self, source: Tensor) -> None:
        """Raise RuntimeError, as autograd does, if the source was written since it was saved."""
        if source._version != self.version:
            raise RuntimeError(
                f"fq.memory.offload: a saved tensor, {list(source.shape)} {source.dtype}, was "
                f"modified by an inplace operation (version {source._version}, saved at "
                f"{self.version}) before its backward; clone it first"
            )

    def _wait(self, reader: Stream) -> None:
        if self.ready is not None:
            reader.wait_event(self.ready)
            self.ready = None

    def __del__(self):
        # the allocator returns its memory to the stream that allocated it
        if self.loaded is not None and self.ready is not None:
            self._wait(self.reader)


class offload(torch.autograd.graph.saved_tensors_hooks):
    """with fq.memory.offload(model): y = model(x)    # then y.backward() anywhere

    module:     whose parameters stay on the device, as FSDP2's always do. None: weights that
                autograd saves, as nn.Linear's, are copied too, which gains nothing.
    min_bytes:  smaller tensors stay.
    in_flight:  bytes of tensors that leave, and of tensors that return before they are needed, on a
                device at a time.

    Results are bitwise those without it, also for codes, under torch.utils.checkpoint and FSDP2,
    and with retained graphs. Host tensors and tensor subclasses stay. One object serves many steps.
    Raises ValueError for negative sizes, NotImplementedError in a captured CUDA graph.
    """

    def __init__(
        self, module: nn.Module | None = None, *, min_bytes: int = 2**20, in_flight: int = 2**29
    ):
        for name, size in (("min_bytes", min_bytes), ("in_flight", in_flight)):
            if size < 0:
                raise ValueError(f"fq.memory.offload: {name} is {size}; wanted bytes, at least 0")
        super().__init__(self._pack, self._unpack)
        self._module, self._min_bytes, self._in_flight = module, min_bytes, in_flight
        self._streams: dict[torch.device, Stream] = {}
        # in the order of saving, of all live graphs
        self._copies: deque[weakref.ref[_Copy]] = deque()
        self._saved = 0
        self._leaving: deque[tuple[Tensor, _Copy]] = deque()
        self._parameters: set[int] = set()

    def __enter__(self) -> offload:
        if self._module is not None:
            tensors = map(torch_compat.local_of, self._module.parameters())
            self._parameters = {t.data_ptr() for t in tensors if type(t) in (Tensor, nn.Parameter)}
        self._copies = deque(ref for ref in self._copies if ref() is not None)
        super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        leaving, self._leaving = self._leaving, deque()
        for source, copy in leaving:  # the backward needs these first: keep them on the device
            copy.check(source)
            source.record_stream(copy.stream)
            copy.loaded, copy.stays = source, True

    def _pack(self, t: Tensor) -> Tensor | _Copy:
        is_dense = type(t) in (Tensor, nn.Parameter) and t.nbytes <= t.untyped_storage().nbytes()
        if not _is_on_device(t) or not is_dense or t.nbytes < self._min_bytes:
            return t
        if t.data_ptr() in self._parameters or torch_compat.is_unsharded_parameter(t):
            return t
        if torch_compat.is_captured(t):
            raise NotImplementedError(
                "fq.memory.offload copies to the host, which a captured CUDA graph cannot; leave "
                "it out"
            )
        copy = next((c for s, c in self._leaving if _same(s, t)), None)
        if copy is None:
            if t.device not in self._streams:
                self._streams[t.device] = Stream(t.device)
            self._saved += 1
            copy = _Copy(t, self._streams[t.device], self._saved)
            self._copies.append(weakref.ref(copy))
            self._leaving.append((t.detach(), copy))
        copy.uses += 1
        while sum(c.bytes for _, c in self._leaving) > self._in_flight:
            source, left = self._leaving.popleft()
            left.check(source)
            current_stream(left.device).wait_event(left.has_left)
        return copy

    def _unpack(self, packed: Tensor | _Copy) -> Tensor:
        if not isinstance(packed, _Copy):
            return packed
        packed.load()
        ahead = 0
        for ref in reversed(self._copies):
            before = ref()
            if (
                before is not None
                and before.place < packed.place
                and before.device == packed.device
                and not before.taken
            ):
                ahead += before.bytes
                if ahead > self._in_flight:
                    break
                before.load()
        return packed.take()


def _is_on_device(t: Tensor) -> bool:
    return t.is_cuda


def _pinned_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="cpu", pin_memory=True)


def _same(s: Tensor, t: Tensor) -> bool:
    """The same tensor, not written in between."""
    s_is, t_is = ((x.data_ptr(), x.shape, x.stride(), x.dtype, x._version) for x in (s, t))
    return s_is == t_is
