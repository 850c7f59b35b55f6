"""`MasterWeight`: a thin wrapper over a high-precision weight, and the state that its aliases share.

[Note: versions]
Codes are cached and must never outlive the values they were made from. A version is (storage, mutations
seen by the dispatcher, the inner tensor's own counter): aliases of one storage share the count, a new storage
(`new_zeros`, `clone`, a cast) starts another. torch's counter alone is not enough: fused and foreach optimizers
do not bump it on DTensors. No counter tells what the replay of a CUDA graph writes: while one is captured, and of weights
that a captured graph writes, codes are made where they are read.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..counters import counters
from ..formats import COLUMNWISE, ROWWISE, Direction, Encoding
from ..gemm import StaleWeightError
from ..ops import dispatch, native
from ..ops.dispatch import Encoded, Statistics
from ..ops.layout import COMPACT
from ..scaling import AmaxHistory, RowCuts
from ..storage import Storage
from . import torch_compat, writers
from .aten_table import AtenTable, aten
from .fsdp_hooks import FSDPHooks
from .quantized_tensor import OPERATORS, QuantizedTensor, Unguarded, stable_text
from .torch_compat import tree_map_only

_TABLE = AtenTable("MasterWeight")
ALL_STATES: weakref.WeakSet[WeightState] = weakref.WeakSet()


class WeightState:
    """What belongs to a weight rather than to one of its tensors; aliases and shards share it.

    name:           the module's qualified name and ".weight", for messages and random keys.
    quantizer:      `HybridQuantizer`; None for matrices in one tensor, each of which is quantized as `parts` says.
    shape:          of the unsharded weight, [N, K] or [matrices, N, K].
    parts:          of the matrices of a packed weight.
    compute_dtype:  dtype that quantized formats see (None: the master's own).
    pending:        an event that every rank shares (a step, a load, a change of recipe) changed the master, and
                    its shared statistics have not been reduced since.
    recomputes:     the backward recomputes the forward of the module, so it needs the rowwise codes too.
    keeps_codes:    False: codes of a weight that no one shards are made a direction at a time, and let go as the backward
                    takes the last of them; a second backward of the same version makes them again. None: they are kept as
                    long as their version if micro-batches share it (this one's do, or the last one's did); else a forward
                    whose node holds the columnwise codes is the last to hold any.
    publisher:      what writes the codes of a weight whose masters lie with a trainer (`QuantizedWeight.give_to`), or None.
    tensor_group:   ranks whose weights of this name are parts of one (tensor parallelism), beside FSDP2's shards: amaxes of
                    whole tensors are shared over it. Not copied to files.
    tensor_dim:     of the weight that it cuts.
    histories:      (module or weight name, slot, direction, quantizer) -> AmaxHistory of delayed scaling.
    """

    keeps_shards = False  # codes of a shard are the parameter itself

    def __init__(self, name: str, quantizer, shape: tuple[int, int], compute_dtype: torch.dtype | None):
        self.name, self.quantizer, self.shape, self.compute_dtype = name, quantizer, tuple(shape), compute_dtype
        self.pending = True
        self.recomputes = False
        self.parts: list[WeightState] = []
        self.forgotten = 0  # how often codes were
        self.keeps_codes: bool | None = None
        self.publisher = None
        self.tensor_group, self.tensor_dim = None, 0
        self.histories: dict[tuple, AmaxHistory] = {}
        self._forget()
        ALL_STATES.add(self)

    def _forget(self) -> None:
        self.gathered = None  # the persistent unsharded buffers (gathered_weight.GatheredWeight)
        self.managed = None  # this weight under fully_shard (torch_compat.ManagedParam)
        self._statistics: tuple[object, dict[Direction, Statistics | None]] = (None, {})
        self.sharing = None  # how they are shared, of whichever weights this is the first of (fsdp_hooks.Sharing)
        self._found: tuple[object, dict[Direction, Statistics]] = (None, {})
        self._codes: tuple[object, dict[Direction, Encoded]] = (None, {})
        self._whole: tuple[object, dict[Direction, Storage]] = (None, {})
        self._forwards: tuple[object, int] = (None, 1)  # a version, and how many forwards its nodes of autograd come from
        self._is_shared = True  # by micro-batches; as long as nobody counts

    def __getstate__(self) -> dict:
        drop = ("gathered", "managed", "sharing", "_statistics", "_found", "_codes", "_whole", "_forwards", "_is_shared")
        kept = {k: v for k, v in self.__dict__.items() if k not in drop}
        return kept | {"pending": True, "publisher": None, "tensor_group": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()
        ALL_STATES.add(self)

    def __deepcopy__(self, memo) -> WeightState:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo) | {"tensor_group": self.tensor_group})
        return copied

    def set_quantizer(self, quantizer) -> None:
        """Another recipe: every code and statistic is made anew."""
        self.quantizer = quantizer
        self.pending = True
        self.forgotten += 1
        self.histories.clear()
        self._forget()

    def history(self, name: str, slot: str, direction: Direction, quantizer) -> AmaxHistory:
        """The amax history of a delayed side: of a module's slot, or of the weight itself."""
        key = (name, slot, direction, quantizer)  # autocast may bring another quantizer to the same slot
        if key not in self.histories:
            self.histories[key] = AmaxHistory(quantizer.scaling, quantizer.fmt.element.max, slot == "weight")
        return self.histories[key]

    def wrapped(self, values: Tensor) -> Tensor:
        """What FSDP2 shards, over these high-precision values."""
        return MasterWeight(values, self)

    # Statistics and codes of a shard #

    @property
    def matrices(self) -> list[WeightState]:
        """Of what is quantized by itself: of each matrix of a packed weight, else this."""
        return self.parts or [self]

    @property
    def is_recomputed(self) -> bool:
        """The backward recomputes the forward of the module, or of that of a matrix."""
        return self.recomputes or (bool(self.parts) and any(part.recomputes for part in self.parts))

    def pieces(self, weight: MasterWeight, cuts: RowCuts, rank: int, every: bool = False) -> list[Piece]:
        """What a rank holds of each matrix, of a weight whose dim 0 is cut so.

        every:  also of matrices of which it holds nothing. Always so where scales come from histories, which all ranks keep.
        """
        if not self.parts:
            return [Piece(weight, cuts, rank)]
        first, last = cuts.bounds[rank], cuts.bounds[rank + 1]
        everywhere, rows, made = self.shares_statistics(cuts), self.shape[1], []
        for e in range(len(self.parts)) if every or everywhere else range(first, last):
            inner = weight.inner[e - first] if first <= e < last else weight.inner.flatten(0, 1)[:0]
            matrix = MasterWeight(inner, self.parts[e], weight._mutations)
            matrix._copied_version = weight._copied_version
            ends = [rows if e < end else 0 for end in cuts.bounds[1:]]  # nothing before the rank that holds it
            made.append(Piece(matrix, RowCuts((0, *ends)), rank) if everywhere else Piece(matrix, RowCuts((0, rows)), 0))
        return made

    def shares_statistics(self, cuts: RowCuts) -> bool:
        """Ranks need statistics of each other's rows of this weight; of a packed one, which no cut divides, for histories."""
        if self.parts:
            return len(cuts.bounds) > 2 and any(part.quantizer.delayed_directions for part in self.parts)
        return any(self.crosses(cuts, e) for e in self.quantizer.encodings.values())

    def crosses(self, cuts: RowCuts, encoding: Encoding) -> bool:
        """Some statistic of this encoding needs what other ranks hold."""
        return cuts.shares_statistics(encoding) or (self.part[1] > 1 and encoding.fmt.spans_tensor)

    @property
    def part(self) -> tuple[int, int]:
        """(which, of how many) parts of a weight that tensor parallelism cuts this is."""
        return (0, 1) if self.tensor_group is None else (self.tensor_group.rank(), self.tensor_group.size())

    @property
    def spans_parts(self) -> bool:
        """Some scale is of all parts together. Matrices of a packed weight are whole."""
        return not self.parts and self.part[1] > 1 and any(e.fmt.spans_tensor for e in self.quantizer.encodings.values())

    def encoded_dtype(self, encoding: Encoding, high_precision: torch.dtype) -> torch.dtype | None:
        """What an encoder sees of the master: `compute_dtype`, or for identity the dtype of a plain gather."""
        return self.compute_dtype if encoding.fmt.is_quantized else high_precision

    def set_statistics(self, version: object, stats: dict[Direction, Statistics | None]) -> None:
        """Statistics of this version in each encoding, shared by all ranks that hold a part."""
        self._statistics = (version, stats)

    def set_found(self, version: object, stats: dict[Direction, Statistics]) -> None:
        """Statistics of this rank's rows of this version, which whoever wrote them found on the way."""
        self._found = (version, stats)

    def found(self, weight: MasterWeight, version: object = None) -> dict[Direction, Statistics]:
        """What `set_found` said of this version; default: the weight's."""
        known, stats = self._found
        return stats if stats and known == (version or weight.version) else {}

    def shards(
        self, weight: MasterWeight, directions: Sequence[Direction], cuts: RowCuts, rank: int, high_precision: torch.dtype
    ) -> list[Shard]:
        """For each direction, of each of the weight's pieces; see `Shard`."""
        pieces = [(*piece, piece.weight.version) for piece in self.pieces(weight, cuts, rank)]
        return [Shard(w, d, c, r, high_precision, version) for d in directions for w, c, r, version in pieces]

    def kept(self, shard: Shard) -> Encoded | None:
        """The shard's codes, if they were made of its values as they are now."""
        version = (shard.version, shard.high_precision, replayed := shard.weight.is_replayed)
        if self._codes[0] != version or replayed:
            self._codes = (version, {})
        return self._codes[1].get(shard.direction)

    def room(self, shard: Shard) -> tuple[Tensor, Tensor] | None:
        """(data, scale) that new codes of a shard are written over, or None."""
        return None

    def keep(self, shard: Shard, encoded: Encoded) -> Encoded:
        """Keep fresh codes of a shard for as long as its values stay; the codes as they are kept."""
        self._codes[1][shard.direction] = encoded
        return encoded

    def keep_fresh(self, shard: Shard, encoded: Encoded, keeps: bool = True) -> Encoded:
        """`keep`, and count that they were made."""
        counters.add("weight encode", (self.name, shard.direction.value))
        return self.keep(shard, encoded) if keeps else encoded

    @staticmethod
    def encode(shards: Sequence[Shard], calls: list[tuple[native.GroupEncoding, list[int]]] | None = None) -> list[Encoded]:
        """The buffers of each shard: kept until its master's version changes; equal encodings are made by one launch.

        They are made where FSDP2 computes, of shards that it offloads too.

        calls:  takes launches that may be made again, and the places of the shards that each encodes, whose codes are not kept.

        Raises StaleWeightError if statistics that cross ranks are those of another version.
        """
        states = [s.weight.state for s in shards]
        results = [state.kept(s) for state, s in zip(states, shards)]
        alike: dict[tuple, list[int]] = {}
        for i, (state, s) in enumerate(zip(states, shards)):
            if results[i] is None:
                encoding = state.quantizer.encodings[s.direction]
                dtype = state.encoded_dtype(encoding, s.high_precision)
                device = s.weight.device if state.managed is None else state.managed.device
                alike.setdefault((encoding, dtype, s.weight.dtype, device), []).append(i)
        for (encoding, dtype, _, device), places in alike.items():
            of = [(states[i], shards[i]) for i in places]
            histories, made_by = [state.delayed_history(s.direction, device) for state, s in of], None if calls is None else []
            made = dispatch.encode_group(
                [s.weight.inner.to(device) for _, s in of], encoding,
                [state._shared_statistics(s, device) for state, s in of], [s.row0 for _, s in of],
                [None if h is None else h.enc for h in histories], dtype,
                [state.room(s) if s.weight.device == device else None for state, s in of],
                [None if h is None else h.amaxes for h in histories], made_by,
            )
            if made_by:
                calls.append((made_by[0], places))
            for i, (state, s), encoded in zip(places, of, made):
                # identity is as large as the shard, and no work to make again
                results[i] = state.keep_fresh(s, encoded, not made_by) if encoding.fmt.is_quantized else encoded
        return results

    def sources(self, weight: MasterWeight, direction: Direction) -> tuple:
        """What codes of a shard follow from beside its values: (shared statistics or None, the history of a delayed side, its
        tensors)."""
        stats = self._statistics[1].get(direction)
        if direction not in self.quantizer.delayed_directions:
            return stats, None
        history = self.delayed_history(direction, weight.device)
        return stats, history, history.enc, history.amaxes

    def has_sources(self, weight: MasterWeight, direction: Direction, version: object, sources: tuple) -> bool:
        """These are they still, and the statistics are of this version."""
        (known, stats), (before, history, *tensors) = self._statistics, sources
        if stats.get(direction) is not before or (before is not None and known != version):
            return False
        return history is None or (history.enc is tensors[0] and history.amaxes is tensors[1])

    def fresh_storage(self, shard: Shard, device: torch.device | None = None) -> Storage:
        """The shard's codes of the master as it is now, made on `device`; nothing is kept, recorded or counted."""
        encoding = self.quantizer.encodings[shard.direction]
        values = shard.weight.inner.to(device or shard.weight.device)
        history = self.delayed_history(shard.direction, values.device)
        with counters.kept(), torch.no_grad():
            (encoded,) = dispatch.encode_group(
                [values], encoding, [self._shared_statistics(shard, values.device)], [shard.row0],
                [None if history is None else history.enc], self.encoded_dtype(encoding, shard.high_precision),
            )
        return Storage.of(encoded, encoding, values.shape, shard.high_precision, shard.row0)

    def forget_codes(self) -> None:
        """Codes are made anew at the next use: something other than a counted write changed what they are made from."""
        self._codes = self._whole = self._found = (None, {})
        self.forgotten += 1
        for part in self.parts:
            part.forget_codes()
        if self.gathered is not None and self.gathered.group is not None:
            self.gathered.group.forget(self.gathered)

    def _shared_statistics(self, shard: Shard, device: torch.device) -> Statistics | None:
        """What ranks have shared of this version, on `device`, or None where every statistic follows from this rank's rows.

        The latter are told, not None, where they are known.
        """
        version = shard.version
        is_shared = self._statistics[0] == version
        if is_shared and self._statistics[1][shard.direction] is not None:
            return self._statistics[1][shard.direction].to(device)
        if not is_shared and self.crosses(shard.cuts, self.quantizer.encodings[shard.direction]):
            raise StaleWeightError(
                f"{self.name} changed without an event that every rank shares (an optimizer step, load_state_dict, "
                "set_recipe), and its scales span ranks; call fq.sync(model) on every rank after changing weights by hand"
                f"{shard.weight.last_writer}"
            )
        found = self.found(shard.weight, version).get(shard.direction)
        return None if found is None else found.to(device)

    def delayed_history(self, direction: Direction, device: torch.device) -> AmaxHistory | None:
        """What scales the weight's side of this direction, on `device`; None where no history does."""
        quantizer = self.quantizer.side(direction)
        return self.history(self.name, "weight", direction, quantizer).to(device) if quantizer.is_delayed else None

    def whole_storage(
        self, weight: MasterWeight, direction: Direction, dtype: torch.dtype,
        layouts: dict[Direction, str] | None = None, call: int | None = None, both: bool = False,
    ) -> Storage:
        """The storage of a weight that no one shards, for a GEMM in `dtype`: made once a version.

        layouts:  how its products read both directions (`ops.layout`); None: compact.
        call:     the compiled step (`native.linear_plan`) that reads it so, if there is one.
        both:     the other direction follows: one read of the master makes both.
        """
        wanted = COMPACT if layouts is None else layouts[direction]
        version = (weight.version, dtype, replayed := weight.is_replayed)
        if self._whole[0] != version or replayed:
            self._whole = (version, {})
        storages = self._whole[1]
        found = storages.get(direction)
        if found is not None and found.layout == wanted:
            return found
        q = self.quantizer
        if call is not None and q.side(direction).fmt.is_quantized and not self.shares_statistics(RowCuts((0, weight.shape[0]))):
            if q.one_storage and layouts[ROWWISE] == layouts[COLUMNWISE] == COMPACT:
                if ROWWISE not in storages:
                    self._make(weight, {ROWWISE}, dtype, layouts, call)
                storages[COLUMNWISE] = storages[ROWWISE].as_direction(COLUMNWISE)
            else:
                both = both and (self._is_shared or not self.recomputes) and self.keeps_codes is None
                self._make(weight, {d for d in Direction if d is direction or both}, dtype, layouts, call)
        elif wanted == COMPACT:
            return self._compact_storage(weight, direction, dtype)  # `encode` keeps it, or it is no work to make again
        else:
            storages[direction] = self._compact_storage(weight, direction, dtype).in_layout(wanted)
            if not q.one_storage:
                self._codes[1].pop(direction, None)  # the compact codes have served
        return storages[direction]

    def note_forward(self, version: object) -> None:
        """A forward reads this version, and its node can hold the codes of the backward: see `keeps_codes`."""
        last, count = self._forwards
        is_same = version == last
        self._forwards, self._is_shared = (version, count + 1 if is_same else 1), is_same or count > 1

    def let_go(self) -> None:
        """A pass, or its node, has its operands: forget the codes, unless they are kept."""
        if self.keeps_codes is False or not self._is_shared:
            self._whole = self._codes = (None, {})

    def let_go_of_shard(self) -> None:
        """Codes of a shard have been sent for the last time before an optimizer step."""
        for matrix in self.matrices:
            matrix._codes = (None, {})

    def made(self, weight: MasterWeight, direction: Direction, dtype: torch.dtype, layout: str) -> Storage | None:
        """What `whole_storage` made of this version in this layout, if it has."""
        version, storages = self._whole
        found = storages.get(direction) if version == (weight.version, dtype, weight.is_replayed) else None
        return found if found is not None and found.layout == layout else None

    def _make(self, weight: MasterWeight, wanted: set[Direction], dtype, layouts: dict[Direction, str], call: int) -> None:
        """Operands of the weight, by the compiled step."""
        q, values, storages = self.quantizer, weight.inner, self._whole[1]
        seen = self.compute_dtype or values.dtype
        through_bf16 = values.dtype is torch.float32 and seen is torch.bfloat16
        histories = [self.delayed_history(d, values.device) for d in q.delayed_directions]
        buffers = native.linear_weight(
            values if through_bf16 else values.to(seen), call, ROWWISE in wanted, COLUMNWISE in wanted, through_bf16,
            [h.enc for h in histories], [h.amaxes for h in histories],
        )
        for d in Direction:
            fmt = q.side(d).fmt
            if d not in wanted or not fmt.is_quantized:
                continue
            data, scale, tensor_amax = (*buffers[: 2 + fmt.tensor_scale], None)[:3]
            buffers = buffers[2 + fmt.tensor_scale :]
            storages[d] = Storage(fmt, d, self.shape, data, scale, tensor_amax, dtype, 0, layouts[d])
            if d in q.encodings:
                counters.add("weight encode", (self.name, d.value))

    def _compact_storage(self, weight: MasterWeight, direction: Direction, dtype: torch.dtype) -> Storage:
        cuts = RowCuts((0, weight.shape[0]))

        def encode(d: Direction) -> Storage:
            (encoded,) = self.encode([Shard(weight, d, cuts, 0, dtype, weight.version)])
            return Storage.of(encoded, self.quantizer.encodings[d], weight.shape, dtype)

        return self._side(direction, encode)

    def _side(self, direction: Direction, encode: Callable[[Direction], Storage]) -> Storage:
        """The storage of a direction from those that are encoded."""
        q = self.quantizer
        if direction in q.encodings:
            return encode(direction)
        rowwise = encode(ROWWISE)
        return rowwise.as_direction(COLUMNWISE) if q.one_storage else q.derive_columnwise(rowwise, self.compute_dtype)

    def free_at_reshard(self, buffers) -> None:
        """Let FSDP2 free these tensors with the gathered codes that they were made from."""
        if self.managed is not None:
            self.managed.inner_buffers.extend(buffers)

    def check_fresh(self, storage: Storage, version: object) -> None:
        """Raise StaleWeightError unless gathered codes can be read and are those of the master as it is now."""
        if self.publisher is not None:
            self.publisher.check_ready(self.name, storage.direction)
            return
        if storage.is_freed:
            raise StaleWeightError(
                f"{self.name}: the {storage.direction.value} codes were freed: FSDP resharded the weight or gathered the "
                "other direction only; if this block is recomputed in a way that hooks cannot see (checkpointing "
                "inside a compiled block), set recomputes_forward=True on its fq.Linear"
            )
        local = None if self.managed is None else self.managed.local
        if local is not None and version != local.version:
            raise StaleWeightError(
                f"{self.name} changed while its gathered codes were in use; reshard the module "
                f"(FSDPModule.reshard()) before changing its weights{local.last_writer}"
            )

    # The staleness check (see `writers`) #

    def check_codes(self, weight: MasterWeight | QuantizedTensor, direction: Direction, operand: Storage) -> None:
        """Raise StaleWeightError unless what a product is about to read are the codes of the master as it is now.

        Of a gathered weight each rank checks the rows that it holds itself.
        """
        if isinstance(weight, MasterWeight):
            cuts = RowCuts((0, weight.shape[0]))
            whole = self._side(direction, lambda d: self.fresh_storage(Shard(weight, d, cuts, 0, operand.dtype, weight.version)))
        else:
            weight, slots = None if self.managed is None else self.managed.local, weight._slots
            if weight is None:
                return  # its model is gone
            source = direction if direction in self.quantizer.encodings else ROWWISE
            for shard in self.gathered.shards(weight, [source]):
                if shard.weight.state is self and shard.weight.shape[0]:
                    held = slots.get(source).narrow(shard.row0, shard.weight.shape[0])
                    self._compare(weight, held, self.fresh_storage(shard, self.managed.device))
            whole = self._side(direction, slots.get)
        self._compare(weight, operand, whole.in_layout(operand.layout))

    def _compare(self, weight: MasterWeight, got: Storage, want: Storage) -> None:
        for (name, a), b in zip(got.buffers().items(), want.buffers().values()):
            if apart := writers.bytes_apart(a, b):
                raise StaleWeightError(
                    f"{self.name}: {apart} of {a.nbytes} bytes of {got.direction.value}.{name}, which a product is about to "
                    "read, are not those of the master as it is now: a write moved no version counter (numpy, a raw "
                    "pointer, a kernel of another library), or the codes themselves were written; call fq.sync(model) "
                    f"after such a write{weight.last_writer}"
                )


class Piece(NamedTuple):
    """The rows of `rank` of a matrix, under `cuts`."""

    weight: MasterWeight
    cuts: RowCuts
    rank: int


class Shard(NamedTuple):
    """What is asked of one direction of a weight: the rows of `rank`, under `cuts`.

    high_precision:  dtype that an identity side has.
    version:         of the weight, when this was asked.
    """

    weight: MasterWeight
    direction: Direction
    cuts: RowCuts
    rank: int
    high_precision: torch.dtype
    version: object

    @property
    def row0(self) -> int:
        return self.cuts.bounds[self.rank]


class Mutations:
    """How often a storage was written through the dispatcher; compared by identity, and no two have one hash.

    token:  tensor whose version moves with the count, for compiled code; None until it is asked for.
    last:   (who wrote last, the storage's own version after it), kept under the staleness check alone.
    is_replayed:  a captured graph writes the storage.
    """

    _serial = itertools.count(1)

    def __init__(self, inner: Tensor | None = None):
        self.count, self.token, self._hash, self.is_replayed = 0, None, next(self._serial), False
        self.last = ("nobody since the weight was made", 0 if inner is None else version_of(inner))

    def add(self, writer: object, inner: Tensor) -> None:
        """Count a write of `inner` by `writer` (an operator or an event)."""
        self.count += 1
        self.is_replayed |= torch_compat.is_captured(inner)
        self.note(writer, inner)
        if self.token is not None:
            torch.autograd.graph.increment_version(self.token)

    def note(self, writer: object, inner: Tensor) -> None:
        """Remember who wrote, under the staleness check."""
        if writers.checking:
            self.last = writers.describe(writer), version_of(inner)

    def last_writer(self, inner: Tensor) -> str:
        """The end of a message about stale codes: who wrote the weight last, as far as versions tell."""
        if not writers.checking:
            return " (FSDP_QUANT_CHECK=1 names the last writer)"
        writer, seen = self.last
        if version_of(inner) != seen:
            writer = f"a write past the weight, into memory it shares (a state dict's tensor, .inner); before it, {writer}"
        return f". Last writer: {writer}"

    def __hash__(self) -> int:
        return self._hash


def version_of(inner: Tensor) -> int:
    """The counter that torch keeps of a plain tensor (0 where it keeps none)."""
    return 0 if inner.is_inference() else inner._version


class MasterWeight(FSDPHooks, Tensor):
    """A high-precision weight, or a dim-0 shard of one, that is quantized when it is gathered or multiplied.

    inner:  plain tensor with the values; everything that reads or writes this tensor reads or writes it.
    state:  `WeightState`, shared with every alias and shard.

    Views, slices, casts and copies stay MasterWeights; every other operator returns plain tensors, so gradients
    and optimizer states are never of this class.
    """

    @staticmethod
    def __new__(cls, inner: Tensor, state: WeightState, mutations: Mutations | None = None) -> MasterWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            storage_offset=inner.storage_offset(), requires_grad=False,
        )
        self._inner, self._state = inner, state
        self._mutations = mutations or Mutations(inner)
        self._copied_version = (None, None)  # of the source, and our own when the copy was made
        return self

    @property
    def inner(self) -> Tensor:
        return self._inner

    @property
    def state(self) -> WeightState:
        return self._state

    @property
    def version(self) -> object:
        """Equal as long as the values are (see the module's note)."""
        mutations, inner = self._mutations, self._inner
        own = (mutations, mutations.count, 0 if inner.is_inference() else inner._version)
        source, fresh = self._copied_version
        return source if own == fresh else own

    @property
    def last_writer(self) -> str:
        """See `Mutations.last_writer`."""
        return self._mutations.last_writer(self._inner)

    @property
    def is_replayed(self) -> bool:
        """Replays of a CUDA graph may write or read this weight, of which versions tell nothing."""
        return self._mutations.is_replayed or torch_compat.is_captured(self._inner)

    def note_step(self) -> None:
        """An optimizer has written this weight, maybe by a kernel that no dispatcher saw."""
        self._mutations.is_replayed |= torch_compat.is_captured(self._inner)

    @property
    def stamps(self) -> list[Tensor]:
        """Tensors one of whose versions moves when the values change; [] where versions are not kept."""
        if self._inner.is_inference():
            return []
        if self._mutations.token is None:
            with torch.inference_mode(False):
                self._mutations.token = torch.empty(0, device="cpu")
        return [self._inner, self._mutations.token]

    def _viewed(self, view: Tensor) -> MasterWeight:
        """A view of the values. One that is made here has a version counter of its own, so a view of all shares the tensor."""
        own = self._inner
        lie = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (own, view)]
        return MasterWeight(own if lie[0] == lie[1] else view, self._state, self._mutations)

    @property
    def data(self) -> MasterWeight:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        value = value._inner if isinstance(value, MasterWeight) else value.detach()
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"{self._state.name}.data is {list(self.shape)} {self.dtype} on {self.device}, got {list(value.shape)} "
                f"{value.dtype} on {value.device}; use module.to() to move or cast it"
            )
        self._mutations.add("assignment of .data", self._inner)  # for whoever kept the old one
        self._inner, self._mutations, self._copied_version = value, Mutations(value), (None, None)
        self._mutations.note("assignment of .data", value)

    def __tensor_flatten__(self):
        return ["_inner"], Unguarded(self._state)

    _stable_hash_for_caching = stable_text

    @staticmethod
    def __tensor_unflatten__(inner, shared, outer_size, outer_stride) -> MasterWeight:
        return MasterWeight(inner["_inner"], shared.value)

    def __deepcopy__(self, memo) -> MasterWeight:
        copied = MasterWeight(copy.deepcopy(self._inner, memo), copy.deepcopy(self._state, memo))
        copied = _as_parameter(copied, self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self._inner, self._state, is_parameter, self.requires_grad)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"MasterWeight({self._state.name}, {list(self.shape)}, {self.dtype}, {self._state.quantizer})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OPERATORS:
            return OPERATORS[func](*args, **kwargs)
        handler = _TABLE.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        inner_args, inner_kwargs = [_plain(a) for a in args], {k: _plain(a) for k, a in kwargs.items()}
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs, result)
        if any(r.alias_info is not None for r in func._schema.returns):  # a view: writes to it are writes to the weight
            weight = next(a for a in args if isinstance(a, MasterWeight))
            return tree_map_only(Tensor, weight._viewed, result)
        return result


def _plain(argument):
    """An operator's argument with the plain tensors of its MasterWeights."""
    if isinstance(argument, MasterWeight):
        return argument._inner
    if isinstance(argument, (list, tuple)):
        return [_plain(a) for a in argument]
    return argument


@functools.cache
def _arguments_written(func) -> list[tuple[int, str]]:
    """(place, name) of the arguments that an operator's schema writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written(func, args, kwargs, result):
    """Count a write to every MasterWeight that the operator's schema writes, and return those it returns."""
    wrappers = {}
    for i, name in _arguments_written(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, MasterWeight):
                tensor._mutations.add(func, tensor._inner)
                wrappers[id(tensor._inner)] = tensor
    return tree_map_only(Tensor, lambda t: wrappers.get(id(t), t), result)


def _as_parameter(tensor: MasterWeight, like: Tensor) -> MasterWeight:
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def _rebuild(inner: Tensor, state: WeightState, is_parameter: bool, requires_grad: bool) -> MasterWeight:
    tensor = MasterWeight(inner, state)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


@_TABLE.implements([aten.detach.default, aten.alias.default])
def _alias(func, args, kwargs):
    alias = MasterWeight(args[0]._inner, args[0]._state, args[0]._mutations)
    alias._copied_version = args[0]._copied_version
    return alias


@_TABLE.implements([aten.unbind.int])
def _unbind(func, args, kwargs):
    """The matrices of a packed weight, each with its own state."""
    weight, state = args[0], args[0]._state
    inner = func(weight._inner, *args[1:], **kwargs)
    states = state.parts if len(state.parts) == len(inner) and args[1:] in ((), (0,)) else [state] * len(inner)
    return [MasterWeight(t, s, weight._mutations) for t, s in zip(inner, states)]


@_TABLE.implements([aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default])
def _fused_inference(func, args, kwargs):
    raise NotImplementedError(
        f"{func} multiplies the weights of fq.Linear modules in high precision without calling them; switch it off with "
        "torch.backends.mha.set_fastpath_enabled(False)"
    )


@_TABLE.implements([aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default])
def _new(func, args, kwargs):
    return MasterWeight(func(args[0]._inner, *args[1:], **kwargs), args[0]._state)


@_TABLE.implements([aten._to_copy.default, aten.clone.default, aten._pin_memory.default])
def _copy(func, args, kwargs):
    weight = args[0]
    copied = MasterWeight(func(weight._inner, *args[1:], **kwargs), weight._state)
    if copied.dtype == weight.dtype:
        copied._copied_version = (weight.version, copied.version)
    return copied


def wrap(parameter: Tensor, state: WeightState) -> torch.nn.Parameter:
    """The parameter as one that FSDP2 shards as `state` says, over the same memory."""
    return torch.nn.Parameter(state.wrapped(parameter.detach()), requires_grad=parameter.requires_grad)


def inner_of(tensor: Tensor) -> Tensor:
    """The plain tensor behind a MasterWeight, sharing memory and version counter."""
    return tensor._inner if isinstance(tensor, MasterWeight) else tensor


