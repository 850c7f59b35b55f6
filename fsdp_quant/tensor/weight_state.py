# SPDX-License-Identifier: Apache-2.0
"""`WeightState`: formats and histories of one weight. It holds codes only inside `fq.hold`.

[Note: codes are values]
A layer quantizes its weight in each forward, and the autograd node owns the codes of the backward.
Under FSDP2 each gather encodes the shard as it is. So nothing here depends on when, or by whom, a
weight was written.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..encoded_matrix import EncodedMatrix, StaleWeightError
from ..formats import Direction, Encoding, Format
from ..ops import dispatch
from ..ops.dispatch import Encoded, Statistics
from ..ops.native import RecordedEncode
from ..scaling import AmaxHistory, RowCuts
from ..storage import Storage
from .torch_compat import ManagedParam, autocast_dtype, local_of

_T = TypeVar("_T")
_S = TypeVar("_S", bound="WeightState")
ALL_STATES: weakref.WeakSet[WeightState] = weakref.WeakSet()


class SideQuantizer(Protocol):
    """What a weight needs of a `Quantizer`, which is above this module."""

    @property
    def fmt(self) -> Format: ...
    @property
    def scaling(self) -> Any: ...
    @property
    def is_delayed(self) -> bool: ...
    def encoding(self, direction: Direction) -> Encoding: ...
    def storage(self, x: Tensor, direction: Direction) -> Storage: ...


class WeightQuantizer(Protocol):
    """What a weight needs of a `HybridQuantizer`, which is above this module."""

    @property
    def rowwise(self) -> Any: ...
    @cached_property
    def sides(self) -> Mapping[Direction, SideQuantizer]: ...
    @cached_property
    def encodings(self) -> dict[Direction, Encoding]: ...
    @cached_property
    def delayed_directions(self) -> tuple[Direction, ...]: ...
    @cached_property
    def is_stochastic(self) -> bool: ...
    @cached_property
    def shares_storage(self) -> bool: ...
    @property
    def is_derived(self) -> bool: ...
    @property
    def decodes_columnwise(self) -> bool: ...
    def side(self, direction: Direction) -> SideQuantizer: ...
    def columnwise_of(
        self, rowwise: EncodedMatrix, *, compute_dtype: torch.dtype | None = None
    ) -> Storage: ...
    def derive_columnwise(
        self, rowwise: EncodedMatrix, compute_dtype: torch.dtype | None = None
    ) -> Storage: ...


class WeightSync(Protocol):
    """What writes the codes of a published weight (`weight_sync.synced_weight`)."""

    @property
    def generation(self) -> object: ...

    def check_ready(self, name: str, direction: Direction) -> None:
        """Raise StaleWeightError unless the codes may be read."""


class WeightState:
    """Formats and histories of one weight. Its layers, shards and gathered codes share the state.

    name:          qualified name of the module and ".weight", for messages and random keys.
    quantizer:     `HybridQuantizer`; None for packed matrices, whose `packed` states have one each.
    shape:         of the unsharded weight, [N, K] or [matrices, N, K].
    packed:        states of the matrices of a packed weight.
    compute_dtype: dtype that quantized formats see (None: the weight's own).
    plan:          `linear.plan.GemmPlan` of the layer: the layouts in which its GEMMs read
                   gathered codes. None: compact.
    recomputed:    names of matrices whose forward the backward runs again, reading rowwise codes.
    formats_set:   how often formats of any weight were set.
    weight_sync:   the `fq.hooks` sync that writes the codes of a published weight, or None.
    tensor_group:  ranks of tensor parallelism, which share amaxes of the whole tensor. Not saved.
    tensor_dim:    dim that tensor parallelism cuts.
    histories:     (module or weight name, slot, direction, quantizer) -> AmaxHistory of delayed
                   scaling.
    gathered:      `gathered_weight.GatheredWeight` under FSDP2.
    held:          the codes inside `fq.hold`; None outside.
    forward_begins: called before a forward of FSDP2 gathers, with its module, whether a backward
                   may follow, and whether it is the root (else a part is called by itself).
    padding:       of the codes of `fq.freeze`: makes the local tensor, of a size, into which FSDP2
                   copies a shard of them.
    statistics:    shared by ranks in the last forward of the root, by matrix and direction; None
                   before one.
    activation_dtype: of the activations that the last eager forward multiplied; None before one.
    """

    holds_codes = False  # the parameter is its codes (`quantized_weight.QuantizedWeightState`)
    formats_set: ClassVar[int] = 0

    forward_begins: Callable[[Any, bool, bool], None] | None = None
    padding: Callable[[Any, torch.Size], Tensor] | None = None

    # Gathers, syncs and holds belong to this process: neither copies nor files have them.
    gathered: Any = None  # gathered_weight.GatheredWeight
    managed: ManagedParam | None = None
    weight_sync: WeightSync | None = None
    held: Held | None = None
    statistics: dict[tuple[str, Direction], Statistics | None] | None = None
    activation_dtype: torch.dtype | None = None
    of_process = frozenset(
        ("gathered", "managed", "weight_sync", "held", "statistics", "activation_dtype")
    )

    def __init__(
        self,
        name: str,
        quantizer: WeightQuantizer | None,
        shape: Sequence[int],
        compute_dtype: torch.dtype | None,
    ):
        self.name, self.compute_dtype = name, compute_dtype
        self.quantizer: WeightQuantizer = quantizer  # pyright: ignore[reportAttributeAccessIssue]
        self.shape = tuple(shape)
        self.plan: Any = None
        self.recomputed: set[str] = set()
        self.packed: list[WeightState] = []
        self.tensor_group: dist.ProcessGroup | None = None
        self.tensor_dim = 0
        self.histories: dict[tuple, AmaxHistory] = {}
        ALL_STATES.add(self)

    def __getstate__(self) -> dict:
        fields = {k: v for k, v in self.__dict__.items() if k not in self.of_process}
        return fields | {"tensor_group": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        ALL_STATES.add(self)

    def __deepcopy__(self, memo) -> WeightState:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(
            copy.deepcopy(self.__getstate__(), memo) | {"tensor_group": self.tensor_group}
        )
        return copied

    def as_kind(self, kind: type[_S]) -> _S:
        """Return a state of another class, of the same formats and histories and of no gather."""
        state = kind(self.name, self.quantizer, self.shape, self.compute_dtype)
        of_weight = "plan", "recomputed", "packed", "tensor_group", "tensor_dim", "histories"
        for name in (*of_weight, "forward_begins"):
            setattr(state, name, getattr(self, name))
        return state

    def set_quantizer(self, quantizer: WeightQuantizer) -> None:
        """Set the quantizer of another recipe; discard held codes and gather buffers."""
        self.quantizer = quantizer
        WeightState.formats_set += 1
        if self.held is not None:
            self.held.codes.clear()
        self.gathered = self.statistics = None

    # Formats and histories #

    @property
    def matrices(self) -> list[WeightState]:
        """States with a quantizer: of each matrix of a packed weight, else this one."""
        return self.packed or [self]

    @property
    def part(self) -> tuple[int, int]:
        """(rank, size) of tensor parallelism."""
        group = self.tensor_group
        return (0, 1) if group is None else (group.rank(), group.size())

    @property
    def spans_parts(self) -> bool:
        """Some scale spans the ranks of tensor parallelism (never that of packed matrices)."""
        return (
            not self.packed
            and self.part[1] > 1
            and any(e.fmt.spans_tensor for e in self.quantizer.encodings.values())
        )

    def history(
        self,
        name: str,
        slot: str,
        direction: Direction,
        quantizer: SideQuantizer,
        before: Mapping[Direction, AmaxHistory] | None = None,
    ) -> AmaxHistory:
        """The amax history of a delayed side: of a module's slot, or of the weight itself.

        before:  histories of the slot under another recipe, whose amaxes a new history continues:
                 those of its direction, else of the other one, which are of the same tensor.
        """
        # under autocast a slot may have several quantizers
        key = (name, slot, direction, quantizer)
        if key not in self.histories:
            scaling, element_max = quantizer.scaling, quantizer.fmt.element.max
            if before:
                last = before.get(direction) or next(iter(before.values()))
                self.histories[key] = last.continued(scaling, element_max)
            else:
                self.histories[key] = AmaxHistory(scaling, element_max, slot == "weight")
        return self.histories[key]

    def delayed_history(
        self, direction: Direction, device: torch.device, quantizer: WeightQuantizer | None = None
    ) -> AmaxHistory | None:
        """The history that scales this direction of the weight, on `device`; None without delayed
        scaling."""
        side = (quantizer or self.quantizer).side(direction)
        if not side.is_delayed:
            return None
        return self.history(self.name, "weight", direction, side).on(device)

    def encoded_dtype(self, encoding: Encoding, high_precision: torch.dtype) -> torch.dtype | None:
        """The dtype to which values are rounded before encoding: `compute_dtype`; for identity the
        dtype of a plain gather."""
        return self.compute_dtype if encoding.fmt.is_quantized else high_precision

    def layouts(self, dtype: torch.dtype, device: torch.device) -> dict[Direction, str] | None:
        """The layouts in which the layer's GEMMs read both directions; None: compact.

        dtype:  of the parameter. Activations have the dtype that the last eager forward multiplied;
                before one that of autocast, else the parameter's.
        """
        if self.plan is None:
            return None
        if self.activation_dtype is not None:
            dtype = self.activation_dtype
        elif dtype is torch.float32:
            dtype = autocast_dtype(device) or dtype
        plan = self.plan if self.part[1] > 1 else self.plan.on(dtype, device)
        plan = plan if plan.alone else plan.of_groups
        return plan.resolved(dtype, device).layouts["weight"]

    # Shards #

    def own_codes(
        self, local: Tensor, direction: Direction, matrix: int | None = None
    ) -> Encoded | None:
        """The codes of a quantized parameter, or of one of its matrices; None: encode the
        values."""
        return None

    def shares_statistics(self, cuts: RowCuts) -> bool:
        """Some statistic of the weight depends on other ranks; for a packed weight, whose matrices
        no cut divides, only those of histories do."""
        if self.packed:
            return len(cuts.bounds) > 2 and any(
                part.quantizer.delayed_directions for part in self.packed
            )
        encodings = self.quantizer.encodings.values()
        return any(cuts.shares_statistics(e, self.part[1]) for e in encodings)

    def pieces(self, values: Tensor, cuts: RowCuts, rank: int, every: bool = False) -> list[Piece]:
        """A rank's rows of each matrix of a weight whose dim 0 is cut by `cuts`.

        values: [local rows, K] or [local matrices, N, K].
        every:  include matrices without rows on the rank; always with delayed scaling, whose
                histories all ranks keep.
        """
        if not self.packed:
            return [Piece(self, values, cuts, rank)]
        first, last = cuts.bounds[rank], cuts.bounds[rank + 1]
        everywhere, rows, pieces = self.shares_statistics(cuts), self.shape[1], []
        for e in range(len(self.packed)) if every or everywhere else range(first, last):
            matrix = values[e - first] if first <= e < last else values.flatten(0, 1)[:0]
            # nothing before the rank that holds it
            ends = [rows if e < end else 0 for end in cuts.bounds[1:]]
            rows_of_ranks = RowCuts((0, *ends) if everywhere else (0, rows))
            pieces.append(Piece(self.packed[e], matrix, rows_of_ranks, rank * everywhere))
        return pieces


class WeightTensor(Tensor):
    """Base of the local tensors that FSDP2 gathers as codes: they have a `state`, and their
    high-precision values `inner`."""

    state: WeightState
    inner: Tensor

    @property
    def saved(self) -> Tensor:
        """The tensor in a state dict."""
        return self.inner

    def __repr__(self, *, tensor_contents=None) -> str:
        facts = self.state.name, list(self.shape), self.dtype, self.state.quantizer
        return f"{type(self).__name__}({', '.join(map(str, facts))})"


_COPIES_ARE_WEIGHTS = contextvars.ContextVar("fsdp_quant_copies_are_weights", default=False)


@contextlib.contextmanager
def copies_are_weights() -> Iterator[None]:
    """Inside nn.Module._apply a copy of a quantized parameter takes its place, with its master;
    elsewhere it is a plain tensor of the values."""
    token = _COPIES_ARE_WEIGHTS.set(True)
    try:
        yield
    finally:
        _COPIES_ARE_WEIGHTS.reset(token)


def is_weight_copied() -> bool:
    return _COPIES_ARE_WEIGHTS.get()


def values_of(tensor: Tensor) -> Tensor:
    """The plain tensor of high-precision values behind a local parameter."""
    return tensor.inner if isinstance(tensor, WeightTensor) else tensor


class Piece(NamedTuple):
    """The rows of `rank` of one matrix, [local rows, K], under `cuts`."""

    state: WeightState
    values: Tensor
    cuts: RowCuts
    rank: int

    @property
    def row0(self) -> int:
        return self.cuts.bounds[self.rank]


class Shard(NamedTuple):
    """One direction of a piece, to be encoded.

    high_precision: dtype of an identity side.
    statistics:     shared between ranks; None if all statistics depend on these rows alone.
    into:           (data, scale) to write, or None.
    records:        record the amax of a delayed side in its history: in training.
    """

    piece: Piece
    direction: Direction
    high_precision: torch.dtype
    statistics: Statistics | None = None
    into: tuple[Tensor, Tensor] | None = None
    records: bool = True


def encode_shards(
    shards: Sequence[Shard],
    device: torch.device,
    launches: list[tuple[RecordedEncode, list[int]]] | None = None,
) -> list[Encoded]:
    """Codes and scales of each shard on `device`; one launch per encoding.

    launches: receives (launch, indices of the shards that it encodes) of launches that can be
              replayed.
    """
    results: dict[int, Encoded] = {}
    by_encoding: dict[tuple, list[int]] = {}
    for i, (piece, direction, high_precision, statistics, *_) in enumerate(shards):
        encoding = piece.state.quantizer.encodings[direction]
        dtype = piece.state.encoded_dtype(encoding, high_precision)
        key = encoding, dtype, piece.values.dtype, statistics is None
        by_encoding.setdefault(key, []).append(i)
    for (encoding, dtype, *_), places in by_encoding.items():
        group = [shards[i] for i in places]
        recorded: list[RecordedEncode] = []
        histories = [s.piece.state.delayed_history(s.direction, device) for s in group]
        codes = dispatch.multi_tensor_encode(
            [s.piece.values.to(device) for s in group],
            encoding,
            [s.statistics and s.statistics.to(device) for s in group],
            [s.piece.row0 for s in group],
            [h and h.encode_scale for h in histories],
            dtype,
            [s.into for s in group],
            [h.amaxes if h and s.records else None for h, s in zip(histories, group)],
            None if launches is None else recorded,
        )
        if launches is not None:
            launches += ((launch, places) for launch in recorded)
        results.update(zip(places, codes))
        if encoding.fmt.is_quantized:
            names = tuple((s.piece.state.name, s.direction.value) for s in group)
            counters.add_each("weight encode", names)
    return list(map(results.__getitem__, range(len(shards))))


def encode_piece(
    piece: Piece,
    direction: Direction,
    dtype: torch.dtype,
    statistics: Statistics | None,
    device: torch.device,
) -> Storage:
    """The codes of a piece on `device`, neither counted nor recorded in a history.

    dtype:       of an identity side, and to which the storage decodes.
    statistics:  as of `Shard`.
    """
    shard = Shard(piece, direction, dtype, statistics, records=False)
    with torch.no_grad(), counters.uncounted():
        (encoded,) = encode_shards([shard], device)
    encoding = piece.state.quantizer.encodings[direction]
    return Storage.of(encoded, encoding, piece.values.shape, dtype, piece.row0)


class Held:
    """The codes of one weight inside `fq.hold`.

    parameter:  returns the registered parameter, whose writes torch counts.
    place:      where the context was entered.
    codes:      by all that decides them besides the values.
    """

    def __init__(self, parameter: Callable[[], Tensor], place: str):
        self.place, self.codes = place, {}
        self._parameter, self._first, self._version = parameter, None, None

    def read(self, name: str, key: tuple, values: Tensor, encode: Callable[[], _T]) -> _T:
        """`encode()` of `values`, or its result at the first use of the key.

        Codes are kept of values in the memory of the parameter: not of a weight that FSDP2 gathers
        in high precision or copies from the CPU, that is computed from parameters, or that was put
        in place of the parameter.

        Raises StaleWeightError if the parameter was written since the first use.
        """
        parameter = self._parameter()
        self._first = parameter if self._first is None else self._first
        if parameter is not self._first:
            return encode()
        if self.is_written():
            raise StaleWeightError(
                f"{name} was written inside fq.hold, which multiplies the codes of its first use; "
                "leave the context before the weights change"
            )
        memory = values_of(values).untyped_storage().data_ptr()
        if memory != values_of(local_of(parameter)).untyped_storage().data_ptr():
            return encode()
        if key not in self.codes:
            self.codes[key] = encode()
        return self.codes[key]

    def is_written(self) -> bool:
        """Return whether torch counted a write of the parameter since the first call."""
        parameter = self._parameter()
        local = local_of(parameter)
        source = values_of(local)
        # DTensor's operators count a write of a sharded parameter on one of these
        counts = [0 if t.is_inference() else t._version for t in (parameter, local, source)]
        version = source.data_ptr(), *counts
        self._version = version if self._version is None else self._version
        return self._version != version


def held(state: WeightState | None, key: tuple, values: Tensor, encode: Callable[[], _T]) -> _T:
    """`encode()`; inside `fq.hold`, as `Held.read`."""
    if state is None or state.held is None:
        return encode()
    return state.held.read(state.name, key, values, encode)
