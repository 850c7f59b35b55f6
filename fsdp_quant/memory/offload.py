# SPDX-License-Identifier: Apache-2.0
"""`offload`: what autograd saves waits in pinned memory of the host between the forward and the
backward.

    forward    a saved tensor is copied by a stream of its own, and let go as `in_flight` bytes more
               have been saved
    backward   tensors come back in the opposite order, `in_flight` bytes ahead of who needs them

The stream that computes waits for a copy only where that has fallen behind; the host waits for
nothing. What was saved last is still there when the backward begins, and is not copied back.
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

    uses:      how often the graph saved it; taken: how many of these a backward has taken.
    has_left:  the event after which the source may be written.
    loaded:    its values on the device, once they were asked for; ready: the event after which they
               are.
    stays:     loaded is the source.
    """

    def __init__(self, source: Tensor, stream: Stream, place: int):
        self.stream, self.place, self.bytes = stream, place, source.nbytes
        self.uses, self.taken, self.stays = 0, 0, False
        self.loaded: Tensor | None = None
        self.ready: Event | None = None
        self.device, self.version = source.device, source._version
        self.host = _pinned_like(source)
        stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
            self.has_left = stream.record_event()

    def load(self) -> None:
        """Begin to bring the values back, into memory of the stream that computes."""
        if self.loaded is not None:
            return
        self.stays = False
        self.loaded, self.reader = (
            torch.empty_like(self.host, device=self.device),
            current_stream(self.device),
        )
        self.stream.wait_stream(self.reader)
        with torch.cuda.stream(self.stream):
            self.loaded.copy_(self.host, non_blocking=True)
            self.ready = self.stream.record_event()

    def take(self) -> Tensor:
        """The values, for one of the uses; the last one has the device's memory to itself. A
        retained graph takes more."""
        self.load()
        if self.stays:
            self.check(self.loaded)
        self._wait(current_stream(self.device))
        values, self.taken = self.loaded, self.taken + 1
        if self.taken >= self.uses:
            self.loaded = None
        return values

    def check(self, source: Tensor) -> None:
        """Raise RuntimeError for a source that was written since it was saved, as autograd does."""
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
        # its memory goes back to the stream that it was made on
        if self.loaded is not None and self.ready is not None:
            self._wait(self.reader)


class offload(torch.autograd.graph.saved_tensors_hooks):
    """with fq.memory.offload(model): y = model(x)    # then y.backward() anywhere

    module:     its parameters stay where they are (those that FSDP2 manages always do); None: a
                weight that autograd saves, as nn.Linear's, is copied as well, for nothing.
    min_bytes:  smaller tensors stay.
    in_flight:  bytes that leaving tensors may hold on a device, and bytes that may come back before
                they are needed.

    Bits are those of the step without it: of our operators' codes, under torch.utils.checkpoint,
    FSDP2 and retained graphs. Tensors of the host, and tensor subclasses, stay. One object serves
    many steps. Raises ValueError for negative sizes, NotImplementedError in a captured CUDA graph.
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
        # as they were saved, of all graphs that live
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
        for source, copy in leaving:  # what the backward needs first: it need not come back
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
    """The same memory, not written in between."""
    return (
        s.data_ptr() == t.data_ptr()
        and s.shape == t.shape
        and s.stride() == t.stride()
        and s.dtype is t.dtype
        and s._version == t._version
    )
