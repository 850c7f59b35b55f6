# SPDX-License-Identifier: Apache-2.0
"""`fq.hooks`: for trainers that own flat buffers and cut them at any element; formats, statistics,
codes and validity are ours.

[Note: the life of a step]
    masters of the pieces --cast_--> this rank's segments --gather--> segments of all ranks
    --finish--> the weights' storages
    INIT                             CAST (generation)                GATHERED
    READY

The trainer decides who owns which elements (`ShardMap`), where the bytes lie (`bind`) and when they
move. A weight is a `QuantizedTensor` parameter of `fq.quantized_model_init`; a product that reads a
direction which is not READY at the newest generation raises StaleWeightError.

What travels is flat uint8, one buffer a channel: what serves the rowwise storages, the columnwise
ones, or both. Two transports give the same bytes: "codes", and "highprec", which gathers rounded
masters and quantizes whole weights on every rank. So do two kinds of statistics: "dense" reduces
every amax and derives every scale on each rank; "halo" reduces the amaxes of blocks that a cut
divides, and gathers scales. Codes that are whole in the gathered segments are read there; others,
and what a trainer's memory (`bind`) has received, are copied to memory of the weights.

A weight that tensor parallelism cuts is a part of one. Blocks are its own, scales of a whole tensor
those of all parts (`tensor_group`), as under fully_shard: then parts put together are the codes of
the whole weight.

>>> with fq.quantized_model_init("mxfp8"):
...     layer = fq.Linear(64, 32, bias=False)
>>> shards = fq.hooks.ShardMap((0, 64 * 32))              # one rank owns all elements
>>> sync = fq.hooks.plan_weight_sync([("w", layer.weight, shards)], None)
>>> masters = sync.init_masters()
>>> sync.refresh(masters)
>>> sync.generation
1
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .context import roll
from .counters import counters
from .formats import COLUMNWISE, Direction, canonical_text
from .gemm import StaleWeightError
from .ops import native
from .parallel.cast_plan import CastPlan
from .parallel.master_weights import cast_master_weights
from .parallel.shard_map import ALIGNMENT, Segments, ShardMap
from .parallel.synced_weight import BOTH, GatherBuffer, SyncedWeight, SyncItem, bits_of
from .recipe import Recipe, Role, as_recipe
from .tensor import torch_compat
from .tensor.agreement import agree
from .tensor.quantized_weight import QuantizedWeight
from .tensor.torch_compat import local_of

__all__ = ["ShardMap", "SyncItem", "WeightSync", "describe", "plan_weight_sync", "token_alignment"]

TRANSPORTS, STATISTICS = ("auto", "codes", "highprec"), ("dense", "halo")


@dataclass(frozen=True)
class WeightFacts:
    """What a trainer may ask of a parameter before it lays out its buffers.

    formats:     by direction; a direction that shares or derives its storage says so.
    wire_bits:   of an element's codes, by what is encoded of the master; scales come on top.
    """

    is_quantized: bool
    shape: tuple[int, ...]
    formats: dict[str, str]
    wire_bits: dict[str, int]


def describe(param: Tensor) -> WeightFacts:
    """What is known of a parameter: formats and bits on the wire, or that it is not quantized."""
    weight = local_of(param)
    if not isinstance(weight, QuantizedWeight):
        return WeightFacts(False, tuple(param.shape), {}, {})
    quantizer = weight.state.quantizer
    formats = {d.value: repr(q.fmt) for d, q in quantizer.sides.items()}
    if quantizer.shares_storage:
        formats[COLUMNWISE.value] += " (the rowwise storage)"
    elif quantizer.is_derived:
        formats[COLUMNWISE.value] += " (of the decoded rowwise storage)"
    bits = {d.value: bits_of(e, weight.dtype) for d, e in quantizer.encodings.items()}
    return WeightFacts(True, tuple(weight.shape), formats, bits)


def token_alignment(recipe: Recipe | str, role: Role | str) -> int:
    """Tokens of which a group (an expert's, a sequence shard's) must be a multiple, so that no
    block of an activation or a gradient crosses into the next group: the least common multiple over
    both tensors and directions.

    role:  of any tensor of the module, or the module's name.
    """
    recipe = as_recipe(recipe, "token_alignment", Recipe)
    kind, name = (role.module_type, role.name) if isinstance(role, Role) else ("linear", role)
    sizes = [1]
    for tensor_type in ("input", "grad_output"):
        hybrid = recipe.hybrid(Role(kind, tensor_type, name))
        sizes += [
            size
            for d, q in hybrid.sides.items()
            for size in (q.fmt.dims(d)[0] or 1, q.fmt.padded_shape((1, 1), d)[0])
        ]
    return math.lcm(*sizes)


# The sync #


class BufferRequest(NamedTuple):
    """Memory that a channel's all-gather fills: uint8 [nbytes], aligned; of rank r from r * segment
    on."""

    directions: frozenset[Direction]
    nbytes: int
    segment: int
    alignment: int


class WeightSync:
    """Casts, gathers and finishes the weights of one data-parallel group; `plan_weight_sync` makes
    it.

    unsupported_reason: None where kernels cast the pieces (`parallel.cast_plan`); else why covering
                    rows are cast, in one clause.
    generation:  casts that were attempted, on the host.
    applied:     int64 [] on the device: steps (`cast_`) that were not skipped.
    fingerprint: of names, shapes, formats and rounding: equal for every world size, cut and
                 transport.

    Every rank of the group makes the same calls in the same order; their number and order follow
    from the plan alone.
    """

    def __init__(
        self,
        weights: list[SyncedWeight],
        group: dist.ProcessGroup | None,
        device: torch.device,
        dense: bool,
        tensor_group: dist.ProcessGroup | None,
    ):
        self.group, self.rank, self.world = (
            group,
            0 if group is None else group.rank(),
            1 if group is None else group.size(),
        )
        self.generation, self.applied = 0, torch.zeros((), dtype=torch.int64, device=device)
        self._device, self._weights, self._dense, self._ready = (
            device,
            weights,
            dense,
            dict.fromkeys(Direction, 0),
        )
        self._tensor_group = tensor_group
        by_serves: dict[frozenset[Direction], list] = {}
        for weight in weights:
            for (direction, part), (serves, plane) in weight.planes.items():
                by_serves.setdefault(serves, []).append(((weight.name, direction, part), plane))
        self._channels = []
        for serves, found in by_serves.items():
            found.sort(key=lambda one: Segments.in_order(one[1]))
            segments = Segments(tuple(plane for _, plane in found), self.world)
            segments.validate()
            own = torch.zeros(segments.size, dtype=torch.uint8, device=device)
            self._channels.append(GatherBuffer(serves, [key for key, _ in found], segments, own))
        self._places = {key: (c, p) for c in self._channels for p, key in enumerate(c.keys)}
        self.unsupported_reason = CastPlan.unsupported_reason(weights, device)
        self._plan = None
        if self.unsupported_reason is None:
            self._plan = CastPlan(
                weights, self.rank, dense, device, self._run_address, self._segment_addresses
            )
        self._initial = [weight.weight.attach_sync(self) for weight in weights]
        for channel in self._channels:
            channel.hold({weight.name: weight.weight for weight in weights})

    def _run_address(self, name: str, direction: Direction | None, part: str) -> int:
        channel, p = self._places[name, direction, part]
        return channel.own.data_ptr() + channel.segments.offsets[self.rank][p]

    def _segment_addresses(self) -> list[int]:
        return [channel.own.data_ptr() for channel in self._channels]

    @property
    def fingerprint(self) -> str:
        facts = [
            (w.state.name, w.shape, w.quantizer, w.state.compute_dtype, w.weight.dtype)
            for w in self._weights
        ]
        return f"{zlib.crc32(canonical_text(facts).encode()):08x}"

    # Memory #

    def buffers(self) -> list[BufferRequest]:
        """The memory that gathers fill, one request a channel."""
        return [
            BufferRequest(c.serves, c.nbytes, c.segments.size, ALIGNMENT) for c in self._channels
        ]

    def bind(self, buffers: Sequence[Tensor]) -> None:
        """Use the trainer's memory for `buffers()`, in that order; what a cast has written is taken
        along, to be gathered.

        Raises ValueError, and binds nothing, for memory that is too small, misaligned, shared or
        elsewhere.
        """
        wanted = self.buffers()
        if len(buffers) != len(wanted):
            raise ValueError(
                f"bind takes {len(wanted)} buffers, as buffers() says, got {len(buffers)}"
            )
        for i, (buffer, want) in enumerate(zip(buffers, wanted)):
            got = f"buffer {i} is {buffer.dtype} {list(buffer.shape)} on {buffer.device}"
            if (
                buffer.dtype is not torch.uint8
                or buffer.stride() != (1,)
                or buffer.device != self._device
            ):
                raise ValueError(
                    f"{got}; wanted contiguous uint8 [{want.nbytes}] on {self._device}"
                )
            if buffer.numel() < want.nbytes:
                raise ValueError(f"{got}, which is too small: wanted at least {want.nbytes} bytes")
            if buffer.data_ptr() % want.alignment:
                raise ValueError(
                    f"{got}, at an address that is no multiple of {want.alignment}; align it"
                )
        spans = sorted(
            (b.data_ptr(), b.data_ptr() + want.nbytes) for b, want in zip(buffers, wanted)
        )
        if any(end > start for (_, end), (start, _) in zip(spans, spans[1:])):
            raise ValueError(
                "buffers overlap: a gather of one direction would write the other's bytes"
            )
        for buffer, channel in zip(buffers, self._channels):
            channel.bind(buffer, self.rank)

    @torch.no_grad()
    def init_masters(self) -> list[Tensor]:
        """fp32 [owned elements] of each weight's initial values, exact; then the initial values are
        freed.

        Raises RuntimeError when they were handed out, or cast over, before.
        """
        if self._initial is None:
            raise RuntimeError(
                "the initial values are gone: init_masters() hands them out once, before the first "
                "cast"
            )
        masters = []
        for weight, values in zip(self._weights, self._initial):
            start, end = weight.shards.run(self.rank)
            masters.append(values.detach().reshape(-1)[start:end].to(torch.float32, copy=True))
        self._initial = None
        return masters

    # A step #

    def cast_(self, masters: Sequence[Tensor], *, skip: Tensor | bool | None = None) -> None:
        """After an optimizer step: histories roll, amaxes are shared, this rank's elements are
        encoded into its segments.

        masters:  for each weight the fp32 (or compute dtype) values of the elements that this rank
                  owns, in any shape.
        skip:     not zero, alike on every rank: the step was not applied. No byte, scale or history
                  changes, and amaxes of activations and gradients since the step before are
                  dropped. It is read on the device.

        Raises ValueError, and changes nothing, for masters that do not fit the plan.
        """
        if skip is not None and self.generation == 0:
            raise ValueError(
                "the first cast cannot be skipped, because there are no codes yet; call "
                "refresh(masters) first"
            )
        masters = self._checked(masters)
        if skip is not None:
            flag = torch.as_tensor(skip, device=self._device)
            skip = flag.reshape(()) != 0
        self._roll(skip)
        self._cast(masters, skip)
        self.applied += 1 if skip is None else ~skip

    @torch.no_grad()
    def refresh(self, masters: Sequence[Tensor]) -> None:
        """Codes of these masters in every direction, outside a step: at the start, after a load,
        for an evaluation."""
        self._cast(self._checked(masters), None)
        self.gather()
        self.finish()

    def _checked(self, masters: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._plan is not None and self._plan.knows(masters):
            return masters
        if len(masters) != len(self._weights):
            raise ValueError(
                f"wanted a master for each of {len(self._weights)} weights, got {len(masters)}"
            )
        for weight, master in zip(self._weights, masters):
            start, end = weight.shards.run(self.rank)
            if master.numel() != end - start:
                raise ValueError(
                    f"{weight.name}: rank {self.rank} owns the {end - start} elements [{start}, "
                    f"{end}), got a master of {master.numel()}; pass the owned elements only, "
                    "without padding"
                )
            if (
                not master.is_floating_point()
                or master.device != self._device
                or not master.is_contiguous()
            ):
                raise ValueError(
                    f"{weight.name}: the master is {master.dtype} on {master.device}, strides "
                    f"{master.stride()}; wanted contiguous floating values on {self._device}"
                )
            if self._plan is not None and master.dtype not in native.PIECE_VALUES:
                raise ValueError(
                    f"{weight.name}: kernels cast masters of {native.PIECE_VALUES}, got "
                    f"{master.dtype}"
                )
        if self._plan is not None:
            return masters
        return [master.detach().reshape(-1) for master in masters]

    @torch.no_grad()
    def _roll(self, skip: Tensor | None) -> None:
        """End the step of every history of these weights' layers; a skipped one drops amaxes of
        activations and gradients."""
        states = {w.state for w in self._weights}
        histories = {
            id(h): h.to(self._device) for state in states for h in state.histories.values()
        }
        roll(histories.values(), skip)

    @torch.no_grad()
    def _cast(self, masters: Sequence[Tensor], skip: Tensor | None) -> None:
        for channel in self._channels:
            channel.wait()
        if self._plan is None:
            self._cast_rows(masters, skip)
        else:
            self._plan.cast_(masters, self.group, self._tensor_group, skip)
        self.generation, self._initial = self.generation + 1, None

    def _cast_rows(self, masters: Sequence[Tensor], skip: Tensor | None) -> None:
        """Where no kernel begins at any element: pieces as the rows that cover them."""

        def write(target: Tensor, values: Tensor) -> None:
            target.copy_(values if skip is None else torch.where(skip, target, values))

        fragments, owners = [], []
        for weight, master in zip(self._weights, masters):
            fragments += (of := weight.fragments(master, self.rank))
            owners += [weight] * len(of)
        factors = [[w.factor(e.direction) for e in f.encodings] for w, f in zip(owners, fragments)]
        if self.world > 1 and any(
            self._dense or f.cuts.shares_statistics(e) for f in fragments for e in f.encodings
        ):
            counters.add("amax all-reduce", "sync")
        if any(w.spans_parts(e) for w, f in zip(owners, fragments) for e in f.encodings):
            counters.add("amax all-reduce", "sync")
        pieces: dict[tuple[str, Direction | None, str], Tensor] = {}
        made = cast_master_weights(fragments, self.group, factors, self._dense, self._tensor_group)
        for weight, fragment, casts in zip(owners, fragments, made):
            for encoding, cast in zip(fragment.encodings, casts):
                direction = encoding.direction
                if (history := weight.history(direction)) is not None:
                    history.record(cast.amax if skip is None else torch.where(skip, 0.0, cast.amax))
                if (whole := weight.amaxes.get(direction)) is not None:
                    write(
                        whole,
                        (cast.amax if cast.tensor_amax is None else cast.tensor_amax).view_as(
                            whole
                        ),
                    )
                if weight.gathers_values:
                    continue
                side = weight.sides[direction]
                pieces[weight.name, direction, "codes"] = cast.codes
                for staged, fresh in (
                    (side.tensor_amax, cast.tensor_amax),
                    (side.scale, cast.scale),
                ):
                    if staged is not None:
                        write(staged, fresh)
                if (direction, "scale") in weight.planes:
                    start, end = weight.planes[direction, "scale"][1].map.run(self.rank)
                    before = fragment.block_rows(encoding).start * cast.scale.shape[1]
                    own = cast.scale.reshape(-1)[start - before : end - before]
                    pieces[weight.name, direction, "scale"] = own.view(torch.uint8)
        for weight, master in zip(self._weights, masters):
            if weight.gathers_values:
                pieces[weight.name, None, "values"] = master.to(weight.wire_dtype).view(torch.uint8)
        for channel in self._channels:
            write(channel.own, self._packed(channel, pieces))

    def _packed(self, channel: GatherBuffer, pieces: dict) -> Tensor:
        offsets, parts, at = channel.segments.offsets[self.rank], [], 0
        for key, offset in zip(channel.keys, offsets):
            parts += [pieces[key].new_zeros(offset - at), pieces[key]]
            at = offset + pieces[key].numel()
        return torch.cat([*parts, channel.own.new_zeros(channel.segments.size - at)])

    def _of(self, directions) -> list[GatherBuffer]:
        wanted = frozenset(directions)
        if not wanted or not wanted <= BOTH:
            raise ValueError(f"directions are fq.ROWWISE and fq.COLUMNWISE, got {directions}")
        return [c for c in self._channels if c.serves & wanted]

    def gather(self, directions=tuple(Direction), async_op: bool = False) -> Work | None:
        """All-gather the segments that serve these directions, in place.

        async_op:  return at once with something to wait for; `finish` waits too.
        Raises StaleWeightError before the first cast.
        """
        channels = self._of(directions)
        if self.generation == 0:
            raise StaleWeightError(
                "nothing was cast yet; call cast_ or refresh with the masters first"
            )
        for channel in channels:
            channel.gather(self.group)
            channel.gathered = self.generation
            counters.add("gather", ("sync", channel.served, "segments"), channel.nbytes)
        work = Work(channels)
        return work if async_op else work.wait()

    def gathered(self, directions=tuple(Direction)) -> None:
        """The trainer has gathered the segments of these directions itself, into the buffers that
        it has bound.

        Raises StaleWeightError where no buffer is bound, or nothing was cast.
        """
        channels = self._of(directions)
        if self.generation == 0 or not all(channel.is_bound for channel in channels):
            raise StaleWeightError(
                "gathered() without a cast, or without buffers: call cast_; bind what buffers() "
                "asks for"
            )
        for channel in channels:
            channel.gathered = self.generation

    @torch.no_grad()
    def finish(self, directions=tuple(Direction)) -> None:
        """Let the weights be what was gathered; a direction that is ready already is left alone.

        Raises StaleWeightError, and changes nothing, for a direction that was not gathered since
        the last cast.
        """
        channels = self._of(directions)
        late = [d for d in Direction if d in directions and self._ready[d] != self.generation]
        needed = [c for c in channels if c.serves & set(late)]
        if self.generation == 0 or any(c.gathered != self.generation for c in needed):
            raise StaleWeightError(
                f"finish({[d.value for d in directions]}) before their gather of generation "
                f"{self.generation}; call gather(), or gathered() after an all-gather of your own"
            )
        for channel in channels:
            channel.wait()
        pieces: dict[str, dict] = {weight.name: {} for weight in self._weights}
        for channel in needed:
            channel.allocate_codes()
            for p, (name, direction, part) in enumerate(
                channel.keys if not channel.is_in_place else ()
            ):
                pieces[name][direction, part] = channel.pieces(p)
        torch_compat.copy_all(
            [pair for weight in self._weights for pair in weight.writes(late, pieces[weight.name])]
        )
        for weight in self._weights:
            weight.derive(late)
        self._ready.update(dict.fromkeys(late, self.generation))
        for channel in channels:
            if all(self._ready[d] == self.generation for d in channel.serves):
                channel.drop()

    def release(self, directions=tuple(Direction)) -> None:
        """Free the codes of these directions, until they are gathered and finished again; for
        gathers in every pass."""
        channels = self._of(directions)
        for channel in channels:
            channel.wait()
            channel.drop()
            channel.gathered = 0
        self._ready.update(dict.fromkeys(directions, 0))
        for channel in channels:
            if all(self._ready[d] == 0 for d in channel.serves):
                channel.free()
        for weight in self._weights:
            weight.weight.free(
                [d for d in Direction if all(self._ready[other] == 0 for other in weight.shares(d))]
            )

    def check_ready(self, name: str, direction: Direction) -> None:
        """Raise StaleWeightError unless the codes of a direction are those of the last cast."""
        if self.generation == 0 or self._ready[direction] != self.generation:
            done = "cast" if self.generation else "planned"
            if self.generation and all(
                c.gathered == self.generation for c in self._of((direction,))
            ):
                done = "gathered"
            raise StaleWeightError(
                f"{name}: the {direction.value} codes are of generation {self._ready[direction]} "
                f"and generation {self.generation} is {done}, not finished; call gather and finish "
                f"for {direction.value}, or refresh, before a product reads it"
            )

    # Checkpoints and text #

    def state_dict(self) -> dict:
        """What a checkpoint holds beside masters and `fq.state_dict`: fingerprint, and how many
        steps were applied."""
        return {"fingerprint": self.fingerprint, "applied": self.applied.clone()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint, at any world size, cuts and transport; `refresh(masters)` then
        makes the codes.

        Raises ValueError, and changes nothing, where other weights, formats or rounding were saved.
        """
        fingerprint, applied = state.get("fingerprint"), state.get("applied")
        if fingerprint != self.fingerprint:
            raise ValueError(
                "the checkpoint is of other weights, formats or rounding (fingerprint "
                f"{fingerprint}, here {self.fingerprint}); plan the sync with the recipe that was "
                "saved, or leave this state out to change it"
            )
        whole = (
            isinstance(applied, Tensor)
            and applied.dtype is torch.int64
            and applied.dim() == 0
            and int(applied) >= 0
        )
        if not whole:
            raise ValueError(
                f"applied of the saved state is {applied!r}, wanted a number of steps, int64 []; "
                "give what state_dict gave"
            )
        self.applied.copy_(applied)

    def describe(self) -> str:
        """The plan as text: what is gathered, a line a channel, and bytes of a whole sync on every
        rank."""
        lines = []
        for channel in self._channels:
            used, segment = (
                sum(plane.nbytes for plane in channel.segments.planes),
                channel.segments.size,
            )
            lines.append(
                f"{channel.served}: {len(channel.keys)} planes, {used} bytes in {self.world} "
                f"segments of {segment}"
            )
            lines[-1] += "" if channel.codes is None else ", read where they are gathered"
        reduced = len({d for w in self._weights for d in w.sides}) and (
            "every amax" if self._dense else "amaxes of cut blocks"
        )
        if any(
            weight.spans_parts(e)
            for weight in self._weights
            for e in weight.quantizer.encodings.values()
        ):
            reduced = (
                f"{reduced or 'nothing'}; of whole tensors, over {self._tensor_group.size()} parts"
            )
        cast = (
            "by kernels"
            if self.unsupported_reason is None
            else f"of covering rows, because {self.unsupported_reason}"
        )
        return "\n".join([*lines, f"reduced at each cast: {reduced or 'nothing'}", f"cast {cast}"])

    def __repr__(self) -> str:
        return f"WeightSync({len(self._weights)} weights, rank {self.rank} of {self.world}, generation {self.generation})"


class Work(NamedTuple):
    """All-gathers under way."""

    channels: list[GatherBuffer]

    def wait(self) -> None:
        for channel in self.channels:
            channel.wait()


# The plan #

_REMEDY = "give every rank of a group the same items, options and build of fsdp_quant"


def plan_weight_sync(
    items: Sequence[SyncItem],
    group: dist.ProcessGroup | None,
    transport: str = "auto",
    stats: str = "dense",
    compute_dtype: torch.dtype | None = torch.bfloat16,
    tensor_group: dist.ProcessGroup | None = None,
) -> WeightSync:
    """Plan how these weights are cast, gathered and finished; from then on they are what the sync
    publishes.

    items:          the same on every rank of `group` (None: one process), in the same order.
    transport:      "codes", "highprec" (rounded masters), or "auto": for each weight what sends
                    fewer bytes.
    stats:          "dense" or "halo"; see the module's note.
    compute_dtype:  that the weights' recipe has: what quantizers see of the master.
    tensor_group:   of ranks whose weights of these names are the other parts of them, or copies:
                    each cast reduces amaxes of whole tensors over it too. None: every weight is
                    whole.

    Every rank must call it: one all-reduce a group compares the plans. Raises ValueError on every
    rank, and changes no weight, if any of them cannot plan: ownership that does not cover a weight
    once, encodings that mix elements across a cut (a rotation), stochastic rounding, a weight that
    is no quantized parameter, or that another sync or optimizer has, or a layer's part of a weight
    whose scales span all parts, without its layer's group.
    """
    error, weights, dense = None, [], stats == "dense"
    part = (0, 1) if tensor_group is None else (tensor_group.rank(), tensor_group.size())
    device = next(
        (part.device for item in items for part in item if isinstance(part, Tensor)),
        torch_compat.device_of(group),
    )
    try:
        planned = [SyncItem(*item) for item in items]
        _check(planned, group, device, transport, stats, compute_dtype, part)
        weights = [
            SyncedWeight(item, transport, dense, part if item.is_part else (0, 1))
            for item in planned
        ]
    except (ValueError, TypeError) as caught:
        error = caught
    kernels = CastPlan.unsupported_reason(weights, device) or "with kernels"
    same = {"the sync": f"from {compute_dtype}, {kernels}"}
    of_parts = {w.name: f"{w.quantizer}, one of {w.part[1]} parts" for w in weights}
    own = {
        w.name: f"{list(w.shape)} of {w.quantizer}, cut at {w.shards.cuts}, "
        f"{'values' if w.gathers_values else 'codes'} travel"
        for w in weights
    }
    for of, facts in (
        (group, own | {"transport": transport, "stats": stats}),
        (tensor_group, of_parts),
    ):
        try:
            agree(
                facts | same,
                [] if of is None else [of],
                error,
                _REMEDY,
                "ranks plan other weight syncs",
            )
        except (ValueError, TypeError) as caught:  # ranks of the other group wait to hear it
            error = caught
    if error is not None:
        raise error
    return WeightSync(weights, group, device, dense, tensor_group)


def _check(
    items: list[SyncItem],
    group,
    device,
    transport: str,
    stats: str,
    compute_dtype: torch.dtype | None,
    part: tuple[int, int],
) -> None:
    """Raise ValueError for what cannot be planned, naming the weight."""
    if transport not in TRANSPORTS or stats not in STATISTICS:
        raise ValueError(
            f"transport is one of {TRANSPORTS} and stats one of {STATISTICS}, got {transport!r} "
            f"and {stats!r}"
        )
    world, seen = 1 if group is None else group.size(), set()
    for name, weight, shards, is_part in items:
        if weight is not local_of(weight):
            raise ValueError(
                f"{name} is a DTensor {weight.placements}, so fully_shard or tensor parallelism "
                "owns and gathers its pieces; give a weight to fully_shard or to a weight sync, "
                "not to both"
            )
        if not isinstance(weight, QuantizedWeight):
            raise ValueError(
                f"{name}: {type(weight).__name__} is no quantized parameter; build the model under "
                "fq.quantized_model_init"
            )
        quantizer, state = weight.state.quantizer, weight.state
        if (
            weight.dim() != 2
            or tuple(weight.shape) != state.shape
            or not weight.numel()
            or weight.device != device
        ):
            raise ValueError(
                f"{name}: wanted a whole weight of two dims on {device}, where the first one is, "
                f"got {list(weight.shape)} on {weight.device}"
            )
        if seen & {id(state), name}:
            raise ValueError(
                f"{name}: the weight, or its name, is in the items twice; a tied weight is "
                "published once"
            )
        seen |= {id(state), name}
        weight.check_not_taken()
        if shards.numel != weight.numel() or shards.ranks != world:
            raise ValueError(
                f"{name}: the shards are of {shards.numel} elements on {shards.ranks} ranks; "
                f"wanted {weight.numel()} on {world}"
            )
        if state.spans_parts and (not is_part or state.part != part):
            formats = ", ".join(
                f"{d.value} {e.fmt}" for d, e in quantizer.encodings.items() if e.fmt.spans_tensor
            )
            raise ValueError(
                f"{name} is one of {state.part[1]} parts of a weight, whose scales of a whole "
                f"tensor ({formats}) they share; pass tensor_group=, the group of its layer"
            )
        for d, encoding in quantizer.encodings.items():
            if encoding.fmt.rotated or quantizer.is_stochastic:
                what = (
                    "rotated, which mixes elements of two owners"
                    if encoding.fmt.rotated
                    else "rounded stochastically"
                )
                raise ValueError(
                    f"{name}.{d.value} is {quantizer}, {what}; do so with activations and "
                    "gradients only"
                )
        if state.compute_dtype != compute_dtype:
            raise ValueError(
                f"{name}: its recipe quantizes from {state.compute_dtype}, and "
                f"compute_dtype={compute_dtype}; wanted one dtype"
            )
