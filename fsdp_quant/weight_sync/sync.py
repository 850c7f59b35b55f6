# SPDX-License-Identifier: Apache-2.0
"""`WeightSync`: cast, gather and finish the weights of one data-parallel group; see `hooks`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..counters import counters
from ..formats import Direction, Encoding, canonical_text
from ..gemm import StaleWeightError
from ..linear.passes import roll
from ..ops import native
from ..ops.dispatch import Encoded
from ..scaling import Fragment
from ..tensor import torch_compat
from .cast import cast_master_weights
from .cast_plan import CastPlan
from .shard_map import ALIGNMENT, Segments
from .synced_weight import BOTH, GatherBuffer, SyncedWeight


class BufferRequest(NamedTuple):
    """Memory that a channel's all-gather fills: uint8 [nbytes], aligned; rank r at r * segment."""

    directions: frozenset[Direction]
    nbytes: int
    segment: int
    alignment: int


class WeightSync:
    """Casts, gathers and finishes the weights of one data-parallel group; see `plan_weight_sync`.

    unsupported_reason: why covering rows are cast in place of pieces, in one clause; None if
                 kernels cast the pieces (`cast_plan`).
    generation:  casts that were attempted, on the host.
    applied:     int64 [] on the device: steps (`cast_`) that were not skipped.
    fingerprint: hash of names, shapes, formats and rounding; independent of world size, cuts and
                 transport.

    Every rank of the group issues the same collectives in the order of the plan.
    """

    def __init__(
        self,
        weights: list[SyncedWeight],
        group: dist.ProcessGroup | None,
        device: torch.device,
        dense: bool,
        tensor_group: dist.ProcessGroup | None,
    ):
        self.group, self._tensor_group = group, tensor_group
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())
        self.generation, self.applied = 0, torch.zeros((), dtype=torch.int64, device=device)
        self._device, self._weights, self._dense = device, weights, dense
        self._ready = dict.fromkeys(Direction, 0)
        by_serves: dict[frozenset[Direction], dict] = {}
        for weight in weights:
            for key, wire in weight.wire_tensors.items():
                by_serves.setdefault(weight.serves(key[0]), {})[(weight.name, *key)] = wire
        self._channels = []
        for serves, wires in by_serves.items():
            keys = sorted(wires, key=lambda key: Segments.in_order(wires[key]))
            segments = Segments(tuple(wires[key] for key in keys), self.world)
            segment = torch.zeros(segments.size, dtype=torch.uint8, device=device)
            self._channels.append(GatherBuffer(serves, keys, segments, segment))
        self._places = {key: (c, p) for c in self._channels for p, key in enumerate(c.keys)}
        self.unsupported_reason = CastPlan.unsupported_reason(weights, device)
        self._plan = None
        if self.unsupported_reason is None:
            self._plan = CastPlan(
                weights, self.rank, dense, device, self._run_address, self._channels
            )
        self._initial = [weight.weight.attach_sync(self) for weight in weights]
        for channel in self._channels:
            channel.hold({weight.name: weight.weight for weight in weights})

    def _run_address(self, name: str, direction: Direction | None, part: str) -> int:
        channel, p = self._places[name, direction, part]
        return channel.segment.data_ptr() + channel.segments.offsets[self.rank][p]

    @property
    def fingerprint(self) -> str:
        facts = [
            (w.state.name, w.shape, w.quantizer, w.state.compute_dtype, w.weight.dtype)
            for w in self._weights
        ]
        return f"{zlib.crc32(canonical_text(facts).encode()):08x}"

    # Memory #

    def buffers(self) -> list[BufferRequest]:
        """The memory that gathers fill, one request per channel."""
        return [
            BufferRequest(c.serves, c.nbytes, c.segments.size, ALIGNMENT) for c in self._channels
        ]

    def bind(self, buffers: Sequence[Tensor]) -> None:
        """Use the trainer's memory for `buffers()`, in that order; codes that were cast are copied
        there.

        Raises ValueError, and binds nothing, for memory that is too small, misaligned, overlapping
        or on another device.
        """
        requests = self.buffers()
        if len(buffers) != len(requests):
            raise ValueError(
                f"bind wants {len(requests)} buffers, as buffers() says, got {len(buffers)}"
            )
        for i, (buffer, request) in enumerate(zip(buffers, requests)):
            text = f"buffer {i} is {buffer.dtype} {list(buffer.shape)} on {buffer.device}"
            if (
                buffer.dtype is not torch.uint8
                or buffer.stride() != (1,)
                or buffer.device != self._device
            ):
                raise ValueError(
                    f"{text}; wanted contiguous uint8 [{request.nbytes}] on {self._device}"
                )
            if buffer.numel() < request.nbytes:
                raise ValueError(
                    f"{text}, which is too small: wanted at least {request.nbytes} bytes"
                )
            if buffer.data_ptr() % request.alignment:
                raise ValueError(
                    f"{text}, at an address that is no multiple of {request.alignment}; align it"
                )
        spans = sorted(
            (b.data_ptr(), b.data_ptr() + request.nbytes) for b, request in zip(buffers, requests)
        )
        if any(end > start for (_, end), (start, _) in zip(spans, spans[1:])):
            raise ValueError(
                "buffers overlap: a gather of one direction would write the other's bytes"
            )
        for buffer, channel in zip(buffers, self._channels):
            channel.bind(buffer, self.rank)

    @torch.no_grad()
    def init_masters(self) -> list[Tensor]:
        """fp32 [owned elements] of each weight's exact initial values, which are then freed.

        Raises RuntimeError on a second call and after the first cast.
        """
        if self._initial is None:
            raise RuntimeError(
                "the initial values are gone: init_masters() hands them out once, before the first "
                "cast"
            )
        initial, self._initial = self._initial, None
        runs = [slice(*weight.shards.run(self.rank)) for weight in self._weights]
        owned = [values.detach().reshape(-1)[run] for values, run in zip(initial, runs)]
        return [values.to(torch.float32, copy=True) for values in owned]

    # A step #

    @torch.no_grad()
    def cast_(self, masters: Sequence[Tensor], *, skip: Tensor | bool | None = None) -> None:
        """After an optimizer step: histories roll, amaxes are shared, this rank's elements are
        encoded into its segments.

        masters:  per weight, the fp32 (or compute dtype) elements that this rank owns, in any
                  shape.
        skip:     nonzero, equal on every rank: the step was not applied. No byte, scale or history
                  changes, and amaxes of activations and gradients of the step are dropped. Read on
                  the device.

        Raises ValueError, and changes nothing, for masters that do not fit the plan.
        """
        if skip is not None and self.generation == 0:
            raise ValueError(
                "the first cast cannot be skipped, because there are no codes yet; call "
                "refresh(masters) first"
            )
        self._check(masters)
        if skip is not None:
            flag = torch.as_tensor(skip, dtype=torch.bool, device=self._device)
            skip = flag.reshape(())
        histories = {h for weight in self._weights for h in weight.state.histories.values()}
        roll([history.to(self._device) for history in histories], skip)
        self._cast(masters, skip)
        self.applied += 1 if skip is None else ~skip

    @torch.no_grad()
    def refresh(self, masters: Sequence[Tensor]) -> None:
        """Cast, gather and finish outside a step: at the start, after a load, for an evaluation."""
        self._check(masters)
        self._cast(masters, None)
        self.gather()
        self.finish()

    def _check(self, masters: Sequence[Tensor]) -> None:
        if self._plan is not None and self._plan.knows(masters):
            return
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

    def _cast(self, masters: Sequence[Tensor], skip: Tensor | None) -> None:
        Work(self._channels).wait()
        if self._plan is None:
            self._cast_rows(masters, skip)
        else:
            self._plan.cast_(masters, self.group, self._tensor_group, skip)
        self.generation, self._initial = self.generation + 1, None

    def _cast_rows(self, masters: Sequence[Tensor], skip: Tensor | None) -> None:
        """Cast each piece as the rows that cover it, without kernels."""
        masters = [master.detach().reshape(-1) for master in masters]
        pairs = [
            (weight, fragment)
            for weight, master in zip(self._weights, masters)
            for fragment in weight.fragments(master, self.rank)
        ]
        crosses = self.world > 1 and any(
            self._dense or f.cuts.shares_statistics(e) for _, f in pairs for e in f.encodings
        )
        spans = any(w.spans_parts(e) for w, f in pairs for e in f.encodings)
        counters.add_each("amax all-reduce", ("sync",) * (crosses + spans))
        by_fragment = cast_master_weights(
            [fragment for _, fragment in pairs],
            self.group,
            [[w.factor(e.direction) for e in f.encodings] for w, f in pairs],
            self._dense,
            self._tensor_group,
        )
        copies: list[tuple[Tensor, Tensor]] = []
        for (weight, fragment), casts in zip(pairs, by_fragment):
            for encoding, cast in zip(fragment.encodings, casts):
                copies += self._copies(weight, fragment, encoding, cast, skip)
        for weight, master in zip(self._weights, masters):
            if weight.gathers_values:
                values = master.to(weight.wire_dtype).view(torch.uint8)
                copies.append((self._run(weight.name, None, "values"), values))
        for target, values in copies:
            target.copy_(values if skip is None else torch.where(skip, target, values))

    def _copies(
        self,
        weight: SyncedWeight,
        fragment: Fragment,
        encoding: Encoding,
        cast: Encoded,
        skip: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of what one encoding of a piece writes; records its amax."""
        direction, scale = encoding.direction, cast.scale
        amax = cast.amax if cast.tensor_amax is None else cast.tensor_amax
        history, copies = weight.history(direction), []
        if history is not None and amax is not None:
            history.record(amax if skip is None else torch.where(skip, 0.0, amax))
        if direction in weight.amaxes and amax is not None:
            copies.append((weight.amaxes[direction], amax.view_as(weight.amaxes[direction])))
        if weight.gathers_values:
            return copies
        copies.append((self._run(weight.name, direction, "codes"), cast.data))
        copies += (
            (target, getattr(cast, name)) for name, target in weight.staged[direction].items()
        )
        if scale is not None and (direction, "scale") in weight.wire_tensors:
            start, end = weight.wire_tensors[direction, "scale"].map.run(self.rank)
            before = fragment.block_rows(encoding).start * scale.shape[1]
            run = scale.reshape(-1)[start - before : end - before].view(torch.uint8)
            copies.append((self._run(weight.name, direction, "scale"), run))
        return copies

    def _run(self, name: str, direction: Direction | None, part: str) -> Tensor:
        """uint8: this rank's run of a wire tensor in its segment."""
        channel, p = self._places[name, direction, part]
        first, end = channel.segments.wire_tensors[p].span(self.rank)
        return channel.segment[channel.segments.offsets[self.rank][p] :][: end - first]

    def _channels_of(self, directions: Iterable[Direction]) -> list[GatherBuffer]:
        served = frozenset(directions)
        if not served or not served <= BOTH:
            raise ValueError(f"directions are fq.ROWWISE and fq.COLUMNWISE, got {directions}")
        return [c for c in self._channels if c.serves & served]

    def gather(
        self, directions: Sequence[Direction] = tuple(Direction), async_op: bool = False
    ) -> Work | None:
        """All-gather the segments that serve these directions, in place.

        async_op:  return without waiting; wait for the result, or call `finish`.
        Raises StaleWeightError before the first cast.
        """
        channels = self._channels_of(directions)
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

    def gathered(self, directions: Sequence[Direction] = tuple(Direction)) -> None:
        """Declare that the trainer gathered these directions into its bound buffers.

        Raises StaleWeightError if no buffer is bound or nothing was cast.
        """
        channels = self._channels_of(directions)
        if self.generation == 0 or not all(channel.is_bound for channel in channels):
            raise StaleWeightError(
                "gathered() without a cast, or without buffers: call cast_; bind what buffers() "
                "asks for"
            )
        for channel in channels:
            channel.gathered = self.generation

    @torch.no_grad()
    def finish(self, directions: Sequence[Direction] = tuple(Direction)) -> None:
        """Build the weights' storages from the gathered bytes, for directions that are not ready.

        Raises StaleWeightError, and changes nothing, for a direction that was not gathered since
        the last cast.
        """
        channels = self._channels_of(directions)
        late = [d for d in Direction if d in directions and self._ready[d] != self.generation]
        needed = [c for c in channels if c.serves & set(late)]
        if self.generation == 0 or any(c.gathered != self.generation for c in needed):
            raise StaleWeightError(
                f"finish({[d.value for d in directions]}) before their gather of generation "
                f"{self.generation}; call gather(), or gathered() after an all-gather of your own"
            )
        Work(channels).wait()
        for channel in needed:
            channel.allocate_codes()
        copied = (c for c in needed if not c.is_in_place)
        pieces = {key: c.pieces(p) for c in copied for p, key in enumerate(c.keys)}
        torch_compat.copy_all([pair for w in self._weights for pair in w.writes(late, pieces)])
        for weight in self._weights:
            weight.derive(late)
        self._ready.update(dict.fromkeys(late, self.generation))
        for channel in channels:
            if self._are_of(channel.serves, self.generation):
                channel.drop()

    def _are_of(self, directions: Iterable[Direction], generation: int) -> bool:
        """The codes of these directions are those of a cast; 0: they are released."""
        return all(self._ready[d] == generation for d in directions)

    def release(self, directions: Sequence[Direction] = tuple(Direction)) -> None:
        """Free the codes of these directions until the next gather and finish."""
        channels = self._channels_of(directions)
        for channel in channels:
            channel.wait()
            channel.drop()
            channel.gathered = 0
        self._ready.update(dict.fromkeys(directions, 0))
        for channel in channels:
            if self._are_of(channel.serves, 0):
                channel.free()
        for weight in self._weights:
            weight.weight.free([d for d in Direction if self._are_of(weight.shares(d), 0)])

    def check_ready(self, name: str, direction: Direction) -> None:
        """Raise StaleWeightError unless the codes of a direction are those of the last cast."""
        if self.generation == 0 or self._ready[direction] != self.generation:
            is_gathered = all(c.gathered == self.generation for c in self._channels_of([direction]))
            state = "gathered" if is_gathered else "cast"
            raise StaleWeightError(
                f"{name}: the {direction.value} codes are of generation {self._ready[direction]} "
                f"and generation {self.generation} is {state if self.generation else 'planned'}, "
                f"not finished; call gather and finish for {direction.value}, or refresh, before a "
                "product reads it"
            )

    # Checkpoints and text #

    def state_dict(self) -> dict:
        """Fingerprint and number of applied steps; save it with the masters and `fq.state_dict`."""
        return {"fingerprint": self.fingerprint, "applied": self.applied.clone()}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict` at any world size, cuts and transport; call `refresh(masters)` next.

        Raises ValueError, and changes nothing, if other weights, formats or rounding were saved.
        """
        fingerprint, applied = state.get("fingerprint"), state.get("applied")
        if fingerprint != self.fingerprint:
            raise ValueError(
                "the checkpoint is of other weights, formats or rounding (fingerprint "
                f"{fingerprint}, here {self.fingerprint}); plan the sync with the recipe that was "
                "saved, or leave this state out to change it"
            )
        if not (
            isinstance(applied, Tensor)
            and applied.dtype is torch.int64
            and applied.dim() == 0
            and int(applied) >= 0
        ):
            raise ValueError(
                f"applied of the saved state is {applied!r}, wanted a number of steps, int64 []; "
                "give what state_dict gave"
            )
        self.applied.copy_(applied)

    def describe(self) -> str:
        """The plan as text: wire tensors and bytes per channel, reductions, and how pieces are
        cast."""
        lines = []
        for channel in self._channels:
            used = sum(wire.nbytes for wire in channel.segments.wire_tensors)
            lines.append(
                f"{channel.served}: {len(channel.keys)} wire tensors, {used} bytes in {self.world} "
                f"segments of {channel.segments.size}"
            )
            lines[-1] += "" if channel.codes is None else ", read where they are gathered"
        reduced = "nothing"
        if any(w.staged for w in self._weights):
            reduced = "every amax" if self._dense else "amaxes of cut blocks"
        spans = any(w.spans_parts(e) for w in self._weights for e in w.quantizer.encodings.values())
        if spans and self._tensor_group is not None:
            reduced += f"; of whole tensors, over {self._tensor_group.size()} parts"
        why = self.unsupported_reason
        cast = "by kernels" if why is None else f"of covering rows, because {why}"
        return "\n".join([*lines, f"reduced at each cast: {reduced}", f"cast {cast}"])

    def __repr__(self) -> str:
        return (
            f"WeightSync({len(self._weights)} weights, rank {self.rank} of {self.world}, "
            f"generation {self.generation})"
        )


class Work(NamedTuple):
    """All-gathers in flight."""

    channels: list[GatherBuffer]

    def wait(self) -> None:
        for channel in self.channels:
            channel.wait()
