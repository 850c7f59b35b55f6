# SPDX-License-Identifier: Apache-2.0
"""Statistics shared between ranks, by virtual ranks, and amax histories."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_tests.golden import oracle
from dist_tests.laws import QUANTIZERS, assert_same_bytes, assert_same_storage, every_second, values
from fsdp_quant import scaling
from fsdp_quant.formats import COLUMNWISE, FLT_MAX, ROWWISE, Direction, Encoding, format_of
from fsdp_quant.ops import dispatch, reference
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import (
    AmaxHistory,
    DelayedScaling,
    Fragment,
    RowCuts,
    reduce_amaxes,
    share_statistics,
)
from fsdp_quant.storage import Storage

WITH_OPTIONS = {
    **QUANTIZERS,
    "nvfp4_rht": Quantizer("nvfp4", rotation=True),
    "nvfp4_sr": Quantizer("nvfp4", rounding="stochastic"),
    "nvfp4_16x16_sr": Quantizer("nvfp4_16x16", rounding="stochastic"),
    "mxfp8_sr": Quantizer("mxfp8", rounding="stochastic"),
    "fp8_tensor_eps": Quantizer("fp8_tensor", eps=100.0),
}


def encodings_of(name: str) -> tuple[Encoding, ...]:
    """Those that can be cut along the rows: a rotation of the columns mixes rows."""
    quantizer = WITH_OPTIONS[name]
    return tuple(quantizer.encoding(d) for d in Direction if d is ROWWISE or not quantizer.rotation)


# Virtual ranks #


class VirtualGroup:
    """A process group of `world` ranks that run one after the other: a first pass over all of them
    collects what each sends, and a second one delivers the reduced values."""

    def __init__(self, world: int):
        self.world = world
        self.sent: list[list[Tensor]] = [[] for _ in range(world)]
        self.reduced: list[Tensor] | None = None
        self.rank = 0

    def size(self) -> int:
        return self.world

    def all_reduce(self, tensor: Tensor, op=None, group=None) -> None:
        assert group is self and op == dist.ReduceOp.MAX
        assert tensor.dtype is torch.int32, (
            "a float maximum loses a NaN, depending on where it sits"
        )
        call = len(self.sent[self.rank])
        self.sent[self.rank].append(tensor.clone())
        if self.reduced is not None:
            tensor.copy_(self.reduced[call])

    def run(self, on_rank: Callable[[int], object]) -> list:
        """The results of every rank."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scaling.dist, "all_reduce", self.all_reduce)
            for self.rank in range(self.world):
                on_rank(self.rank)
            calls = {len(sent) for sent in self.sent}
            assert len(calls) == 1, f"ranks made {calls} collectives: they would hang"
            self.reduced = [torch.stack(tensors).amax(0) for tensors in zip(*self.sent)]
            self.num_collectives = calls.pop()
            self.sent = [[] for _ in range(self.world)]
            results = []
            for self.rank in range(self.world):
                results.append(on_rank(self.rank))
            return results


def shards(
    x: Tensor, encodings: tuple[Encoding, ...], cuts: RowCuts, key: Tensor | None = None
) -> tuple[list[list[Storage]], int]:
    """(for each rank, for each encoding, its storage; how many collectives it took)."""
    group = VirtualGroup(len(cuts.bounds) - 1)

    def on_rank(rank: int) -> list[Storage]:
        start, stop = cuts.bounds[rank], cuts.bounds[rank + 1]
        mine = x[start:stop]
        (stats,) = share_statistics([Fragment(mine, encodings, cuts, rank)], group)
        keys = [None if key is None else key + torch.tensor([0, 0, 0, 0, start])] * len(encodings)
        made = [
            dispatch.encode(mine, [e], None if s is None else [s], start, [key])[0]
            for e, s, key in zip(encodings, stats, keys)
        ]
        return [Storage.of(m, e, mine.shape, x.dtype, start) for m, e in zip(made, encodings)]

    results = group.run(on_rank)
    return results, group.num_collectives


def assert_shards_equal_the_whole(x: Tensor, name: str, cuts: RowCuts) -> None:
    encodings = encodings_of(name)
    key = torch.tensor([5, 1, 77, 0, 0])
    whole = [WITH_OPTIONS[name].storage(x, e.direction, key) for e in encodings]
    made, num_collectives = shards(x, encodings, cuts, key)
    assert num_collectives <= 1
    for rank, storages in enumerate(made):
        start, length = cuts.bounds[rank], cuts.bounds[rank + 1] - cuts.bounds[rank]
        for got, storage in zip(storages, whole):
            what = f"{name} {got.direction.value} rows [{start}, {start + length}) of {cuts.bounds}"
            want = storage.narrow(start, length)
            assert_same_bytes(got.data, want.data, f"{what} codes")
            if length and want.scale is not None:
                assert_same_bytes(got.scale, want.scale, f"{what} scales")
            if want.tensor_amax is not None:
                assert_same_bytes(got.tensor_amax, want.tensor_amax, f"{what} tensor amax")
            assert_same_bytes(got.dequantize(), want.dequantize(), f"{what} decoded")


@pytest.mark.parametrize("name", sorted(WITH_OPTIONS))
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_fsdp_shards_equal_the_whole(name: str, world: int):
    """Otherwise the gathered weight is not the quantized master, and the model depends on the
    number of ranks."""
    for rows in every_second([1, 2, 31, 33, 96, 5 * world + 1], world):
        x = values(rows, 40, seed=rows, kind="outliers")
        assert_shards_equal_the_whole(x, name, RowCuts.chunked(rows, world))


@pytest.mark.parametrize("name", sorted(WITH_OPTIONS))
def test_random_cuts_equal_the_whole(name: str):
    """Otherwise an optimizer's odd fragments, empty ones too, get other scales than the tensor
    has."""
    draw = random.Random(f"cuts of {name}")
    for trial in range(6):
        rows, world = draw.choice([5, 40, 150, 290]), draw.randint(2, 6)
        inner = sorted(draw.choices(range(rows + 1), k=world - 1))
        if trial == 0:
            inner = [0] * (world - 1)  # all rows on the last rank
        elif trial == 1:
            inner = [17 % rows] * (world - 1)  # empty ranks in the middle of a block
        x = values(rows, 33, seed=trial, kind="heavy", dtype=torch.float32)
        assert_shards_equal_the_whole(x, name, RowCuts((0, *inner, rows)))


@pytest.mark.parametrize("name", sorted(WITH_OPTIONS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_non_finite_values_on_one_rank_equal_the_whole(name: str, bad: float):
    """Otherwise an overflow on one rank is hidden on the others, depending on which rank has it."""
    places = [0, 15, 16, 50, 95]
    for place in places if math.isnan(bad) else every_second(places, bad < 0):
        x = values(96, 40)
        x[place, 7] = bad
        encodings = encodings_of(name)
        key = torch.tensor([5, 1, 77, 0, 0])
        cuts = RowCuts.chunked(96, 4)
        made, _ = shards(x, encodings, cuts, key)
        for e, encoding in enumerate(encodings):
            whole = WITH_OPTIONS[name].storage(x, encoding.direction, key)
            what = f"{name} {encoding.direction.value} {bad} in row {place}"
            assert_same_bytes(torch.cat([m[e].data for m in made]), whole.data, what)
            got, want = torch.cat([m[e].dequantize() for m in made]), whole.dequantize()
            assert_same_bytes(got.isnan(), want.isnan(), what)
            assert_same_bytes(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0), what)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_two_tensors_share_one_collective(data):
    """Otherwise a step has a collective a weight, or slots of two weights are mixed up."""
    world = data.draw(st.integers(2, 5), "world")
    names = data.draw(
        st.lists(st.sampled_from(sorted(WITH_OPTIONS)), min_size=2, max_size=3), "names"
    )
    tensors, cuts = [], []
    for i, _ in enumerate(names):
        rows = data.draw(st.integers(1, 140), "rows")
        inner = sorted(
            data.draw(
                st.lists(st.integers(0, rows), min_size=world - 1, max_size=world - 1), "inner"
            )
        )
        tensors.append(values(rows, 24, seed=i, kind="outliers"))
        cuts.append(RowCuts((0, *inner, rows)))
    group = VirtualGroup(world)

    def on_rank(rank: int):
        fragments = [
            Fragment(x[c.bounds[rank] : c.bounds[rank + 1]], encodings_of(n), c, rank)
            for x, n, c in zip(tensors, names, cuts)
        ]
        return share_statistics(fragments, group)

    results = group.run(on_rank)
    shares = any(c.shares_statistics(e) for n, c in zip(names, cuts) for e in encodings_of(n))
    assert group.num_collectives == shares
    for t, (x, n, c) in enumerate(zip(tensors, names, cuts)):
        whole = dispatch.statistics(x, encodings_of(n))
        for e, (encoding, (amax, tensor_amax)) in enumerate(zip(encodings_of(n), whole)):
            b0 = encoding.fmt.dims(encoding.direction)[0]
            for rank in range(world):
                start, stop = c.bounds[rank], c.bounds[rank + 1]
                got = results[rank][t][e]
                if got is None:
                    assert not c.shares_statistics(encoding), (
                        f"{n}: statistics that cross a cut are not shared"
                    )
                    continue
                if tensor_amax is not None:
                    assert_same_bytes(got.tensor_amax, tensor_amax, f"{n} tensor amax")
                if amax is not None and (start < stop or b0 is None):
                    want = amax if b0 is None else amax[start // b0 : (stop - 1) // b0 + 1]
                    assert_same_bytes(
                        got.amax,
                        want,
                        f"{n} {encoding.direction.value} [{start}, {stop}) of {c.bounds}",
                    )


def test_aligned_cuts_need_no_collective():
    """Otherwise every step waits for a reduction that changes nothing."""
    x = values(256, 32)
    for name, direction, needed in [
        ("mxfp8", ROWWISE, False),
        ("mxfp8", COLUMNWISE, False),
        ("mxfp8_32x32", ROWWISE, False),
        ("fp8_128x128", ROWWISE, False),
        ("fp8_row", ROWWISE, False),
        ("identity", ROWWISE, False),
        ("fp8_row", COLUMNWISE, True),
        ("fp8_tensor", ROWWISE, True),
        ("nvfp4", ROWWISE, True),
    ]:
        _, calls = shards(x, (WITH_OPTIONS[name].encoding(direction),), RowCuts((0, 128, 256)))
        assert calls == needed, (name, direction)
    for name in ("mxfp8_32x32", "fp8_128x128"):
        _, calls = shards(x, (WITH_OPTIONS[name].encoding(ROWWISE),), RowCuts((0, 120, 256)))
        assert calls == 1, name
        _, calls = shards(x, (WITH_OPTIONS[name].encoding(ROWWISE),), RowCuts((0, 256)))
        assert calls == 0, name


def test_an_outlier_on_one_rank_moves_every_scale():
    """Negative control: without sharing, ranks would make other scales of one block, and the laws
    above would see."""
    x = values(64, 32)
    x[40] *= 1000
    for name in ("fp8_tensor", "nvfp4", "nvfp4_16x16", "fp8_128x128"):
        quantizer = WITH_OPTIONS[name]
        alone = quantizer.storage(x[:32], ROWWISE)
        made, _ = shards(x, (quantizer.encoding(ROWWISE),), RowCuts((0, 32, 64)))
        assert not torch.equal(alone.dequantize(), made[0][0].dequantize()), name


def statistics_of(x: Tensor, encoding: Encoding) -> dispatch.Statistics:
    """Those of a whole tensor."""
    return dispatch.Statistics(*reference.statistics(reference.prepared(x, encoding), encoding))


@pytest.mark.parametrize("name", sorted(n for n, q in WITH_OPTIONS.items() if q.fmt.has_scales))
def test_whole_statistics_are_every_block_on_every_rank(name: str):
    """Otherwise a trainer that asks for all scales gets those of another tensor, or zeros of rows
    that others hold."""
    tensors, encodings, cuts = (
        [values(50, 40, seed=1), values(50, 72, seed=2)],
        encodings_of(name),
        RowCuts((0, 7, 7, 50)),
    )
    group = VirtualGroup(3)

    def on_rank(rank: int) -> list:
        rows = slice(cuts.bounds[rank], cuts.bounds[rank + 1])
        return share_statistics(
            [Fragment(x[rows], encodings, cuts, rank) for x in tensors], group, all_blocks=True
        )

    for made in group.run(on_rank):
        for x, of in zip(tensors, made):
            for e, statistics in zip(encodings, of):
                amax, tensor_amax = statistics_of(x, e)
                assert_same_bytes(statistics.amax, amax, f"{name} {e.direction.value}")
                if tensor_amax is not None:
                    assert_same_bytes(
                        statistics.tensor_amax.view(-1),
                        tensor_amax.view(-1),
                        f"{name} {e.direction.value}, of the tensor",
                    )
    assert group.num_collectives == 1


@pytest.mark.parametrize(
    "name", ["fp8_tensor", "nvfp4", "nvfp4_16x16", "mxfp8_32x32", "fp8_128x128"]
)
@pytest.mark.parametrize("together", [False, True])
def test_parts_share_what_spans_them_and_nothing_else(name: str, together: bool):
    """Otherwise ranks of tensor parallelism scale by their part alone, or a block takes the amax of
    another part's.

    together: one group of the ranks of both parts, each part's rows cut inside a block; else of one
              rank per part.
    """
    parts, encodings = [values(64, 48, seed=3), values(64, 48, seed=4) * 8], encodings_of(name)
    cuts = RowCuts((0, 20, 64) if together else (0, 64))
    group = VirtualGroup(4 if together else 2)

    def on_rank(rank: int) -> list:
        part, piece = divmod(rank, 2) if together else (rank, 0)
        fragment = Fragment(
            parts[part][cuts.bounds[piece] : cuts.bounds[piece + 1]],
            encodings,
            cuts,
            piece,
            part=(part, 2),
        )
        made = (
            share_statistics([fragment], group)
            if together
            else share_statistics([fragment], None, parts=group)
        )
        return list(zip([fragment.block_rows(e) for e in encodings], made[0]))

    for rank, made in enumerate(group.run(on_rank)):
        for e, (blocks, statistics) in zip(encodings, made):
            own = [statistics_of(x, e) for x in parts]
            amax, tensor_amax = own[rank // 2 if together else rank]
            if e.fmt.tensor_scale:
                tensor_amax = torch.maximum(own[0].tensor_amax, own[1].tensor_amax)
                assert_same_bytes(
                    statistics.tensor_amax.view(-1),
                    tensor_amax.view(-1),
                    f"{name} {e.direction.value}, rank {rank}",
                )
            elif e.fmt.spans_tensor:
                amax = torch.maximum(own[0].amax, own[1].amax)
            if statistics is not None:  # what needs no other rank is not there
                assert_same_bytes(
                    statistics.amax, amax[blocks], f"{name} {e.direction.value} blocks, rank {rank}"
                )
            else:
                assert not e.fmt.spans_tensor and not (
                    together and 20 % (e.fmt.dims(e.direction)[0] or 64)
                )


def test_reduce_amaxes_keeps_nan_and_shapes():
    """Otherwise a NaN on one rank is dropped by a float maximum, or amaxes of two tensors are
    mixed."""
    per_rank = [
        [torch.tensor([[1.0, 5.0]]), torch.tensor([0.0])],
        [torch.tensor([[2.0, math.nan]]), torch.tensor([2.0**-149])],
        [torch.tensor([[math.inf, 7.0]]), torch.tensor([-math.nan]).abs()],
    ]
    group = VirtualGroup(3)
    for got in group.run(lambda rank: reduce_amaxes(per_rank[rank], group)):
        assert got[0].shape == (1, 2) and got[1].shape == (1,)
        assert got[0][0, 0] == math.inf and got[0][0, 1].isnan() and got[1].isnan().all()
    assert group.num_collectives == 1
    alone = reduce_amaxes(per_rank[0], None)
    assert all(a is b for a, b in zip(alone, per_rank[0]))
    assert reduce_amaxes([], group) == []


# Cuts #


def test_chunked_cuts_are_torch_chunk():
    """Otherwise shards lie elsewhere than FSDP2 puts them."""
    for rows in (1, 2, 5, 31, 33, 96, 97):
        for world in (1, 2, 3, 4, 7, 8, 100):
            cuts = RowCuts.chunked(rows, world)
            chunks = [len(c) for c in torch.zeros(rows, 1).chunk(world)]
            sizes = [b - a for a, b in zip(cuts.bounds, cuts.bounds[1:])]
            assert sizes == chunks + [0] * (world - len(chunks)) and cuts.rows == rows


def test_cut_blocks_are_those_that_two_ranks_hold():
    """Otherwise a scale is derived from a part of its block, or a collective carries what nobody
    needs."""
    draw = random.Random(0)
    for _ in range(300):
        rows, world = draw.randint(1, 300), draw.randint(1, 6)
        cuts = RowCuts((0, *sorted(draw.choices(range(rows + 1), k=world - 1)), rows))
        held = [set(range(a, b)) for a, b in zip(cuts.bounds, cuts.bounds[1:])]
        for name in ("mxfp8", "mxfp8_32x32", "fp8_128x128", "fp8_1x128", "nvfp4", "nvfp4_16x16"):
            for direction in Direction:
                encoding = WITH_OPTIONS[name].encoding(direction)
                b0 = encoding.fmt.dims(direction)[0]
                owners = [
                    sum(bool(h & set(range(s, s + b0))) for h in held) for s in range(0, rows, b0)
                ]
                want = [i for i, count in enumerate(owners) if count > 1]
                assert cuts.cut_block_rows(encoding) == tuple(want), (cuts.bounds, name, direction)
                if want:
                    assert cuts.shares_statistics(encoding)
    assert RowCuts((0, 50, 96)).cut_block_rows(WITH_OPTIONS["fp8_tensor"].encoding(ROWWISE)) == (0,)
    assert RowCuts((0, 96)).cut_block_rows(WITH_OPTIONS["fp8_tensor"].encoding(ROWWISE)) == ()
    assert not RowCuts((0, 50, 96)).shares_statistics(WITH_OPTIONS["identity"].encoding(ROWWISE))


# Amax histories #


def history(**options) -> AmaxHistory:
    return AmaxHistory(DelayedScaling(**options), 448.0)


@pytest.mark.parametrize("use, amax", [("max", 8.0), ("newest", 2.0)])
def test_a_shorter_history_scales_by_the_amaxes_that_it_keeps(use: str, amax: float):
    """Otherwise a recipe whose histories are shorter goes on with the scale of amaxes that it has
    dropped."""
    h = history(length=5)
    h.amaxes.copy_(torch.tensor([0.0, 2.0, 4.0, 8.0, 64.0]))
    h.encode_scale.fill_(448.0 / 64)
    continued = h.continued(DelayedScaling(length=3, use=use), 448.0)
    assert continued.amaxes.tolist() == [0.0, 2.0, 4.0]
    assert continued.encode_scale.item() == 448.0 / amax


def step(h: AmaxHistory, *amaxes: float) -> float:
    """Record these amaxes, apply the step, return the next factor."""
    for amax in amaxes:
        h.record(torch.tensor([[amax]]))
    h.roll()
    return h.encode_scale.item()


def test_history_derives_the_next_scale_from_the_largest():
    """Otherwise the scale of a step depends on itself, or an old outlier is kept for ever."""
    h = history(length=3)
    assert h.encode_scale.item() == 0.0
    h.record(torch.tensor([10.0]))
    h.record(torch.tensor([4.0]))
    assert h.encode_scale.item() == 0.0, "recording must not change the scale of the running step"
    assert h.amaxes.tolist() == [10.0, 0.0, 0.0]
    assert step(h) == np.float32(448) / np.float32(10)
    assert h.amaxes.tolist() == [0.0, 10.0, 0.0]
    assert step(h, 1.0, 3.0, 2.0) == np.float32(448) / np.float32(10)
    assert h.amaxes.tolist() == [0.0, 3.0, 10.0]
    assert step(h, 1.0) == np.float32(448) / np.float32(10)
    assert step(h, 1.0) == np.float32(448) / np.float32(3)
    assert step(h, 1.0) == np.float32(448)


def test_a_text_of_delayed_scaling_tells_its_options():
    """If false, `fq.plan` does not print, or two recipes have one text."""
    assert str(DelayedScaling(length=4)) == "max of 4"
    assert str(DelayedScaling(length=4, margin=2, use="newest")) == "newest of 4, margin 2"


def test_history_newest_and_length_one():
    """Otherwise use="newest" still remembers."""
    for h in (history(use="newest", length=4), history(length=1)):
        assert step(h, 7.0) == 64.0
        assert step(h, 3.5) == 128.0
        assert step(h) == 128.0, "a step that saw no amax keeps the scale"


def test_history_factor_is_one_division():
    """enc = (max /rn amax) / 2^margin; the margin is exact, the division is IEEE."""
    for margin in (0, 1, 3):
        for amax in (torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5).tolist():
            want = np.float32(448) / np.float32(amax) / np.float32(2**margin)
            assert step(history(margin=margin), amax) == want, (margin, amax)
    h = AmaxHistory(DelayedScaling(), 57344.0)
    assert step(h, 3.0) == np.float32(57344) / np.float32(3)


def test_history_stops_at_flt_max():
    """Otherwise a subnormal amax makes an infinite factor, and every code is NaN or saturated."""
    assert step(history(), 1e-40) == FLT_MAX
    assert 0 < step(history(margin=2), FLT_MAX) < 1e-35


def test_history_drops_what_is_not_finite():
    """Otherwise one overflow poisons every later scale."""
    h = history(length=4)
    h.record(torch.tensor([math.nan]))
    h.record(torch.tensor([math.inf]))
    assert h.amaxes[0] == 0.0
    assert step(h, 2.0, math.inf, math.nan) == 224.0
    assert h.amaxes.isfinite().all()


def test_history_of_zeros_stays_with_current_scaling():
    """Otherwise an all-zero first gradient fixes a factor of inf or NaN."""
    h = history()
    assert step(h, 0.0) == 0.0
    assert step(h, math.nan) == 0.0
    assert step(h, 7.0) == 64.0


@pytest.mark.parametrize("stays", [False, True])
def test_histories_roll_together_as_each_alone(stays: bool):
    """Otherwise a flag on the device skips a step that was good, keeps a bad one, or writes another
    layer's history."""

    def two() -> list[AmaxHistory]:
        made = []
        for amaxes in ((4.0, 3.0, 8.0), (0.0, 5.0, 1.0)):  # in the second nothing was recorded
            h = AmaxHistory(DelayedScaling(length=3), 448.0, stays)
            h.load_state_dict({"amaxes": torch.tensor(amaxes), "enc": torch.tensor([7.0])})
            made.append(h)
        return made

    def after(writes: list[tuple[Tensor, Tensor]], of: list[AmaxHistory]) -> list[list[float]]:
        for target, value in writes:
            target.copy_(value)
        return [[*h.amaxes.tolist(), h.encode_scale.item()] for h in of]

    rolled, dropped, kept = two(), two(), two()
    for h in rolled:
        h.roll()
    for h in dropped:
        h.discard_step()
    rolled, dropped, kept = (after([], of) for of in (rolled, dropped, kept))
    assert rolled == [[0.0, 4.0, 3.0, 56.0], [0.0, 5.0, 1.0, 7.0]] and kept == [
        [4.0, 3.0, 8.0, 7.0],
        [0.0, 5.0, 1.0, 7.0],
    ]
    assert dropped == [[4.0 * stays, 3.0, 8.0, 7.0], [0.0, 5.0, 1.0, 7.0]]
    for flag, want in ((False, rolled), (True, dropped)):
        of = two()
        assert after(AmaxHistory.advanced(of, torch.tensor(flag)), of) == want, f"skipped {flag}"
    for flag, want in ((False, rolled), (True, kept)):
        of = two()
        assert after(AmaxHistory.advanced_group(of, unchanged=torch.tensor(flag)), of) == want, (
            f"kept {flag}"
        )


def test_skipped_step_leaves_no_trace():
    """Otherwise the next good step differs from a run that never saw the bad batch."""
    good, bad = history(length=3), history(length=3)
    for h in (good, bad):
        step(h, 5.0)
    bad.record(torch.tensor([1e4]))
    bad.discard_step()
    for h in (good, bad):
        step(h, 2.0)
    assert_same_bytes(bad.amaxes, good.amaxes)
    assert_same_bytes(bad.encode_scale, good.encode_scale)


def test_history_survives_a_checkpoint():
    """Otherwise a resumed run scales by other factors than the run that was saved."""
    h, again = history(length=3), history(length=3)
    step(h, 5.0), h.record(torch.tensor([3.0]))
    again.load_state_dict(h.state_dict())
    for x in (h, again):
        step(x, 1.0)
    assert_same_bytes(again.amaxes, h.amaxes)
    assert_same_bytes(again.encode_scale, h.encode_scale)
    h.record(torch.tensor([9.0]))
    assert again.amaxes[0] == 0.0, "the loaded history shares memory with the saved one"
    with pytest.raises(
        ValueError, match=r"amaxes .* is torch.float32 \[3\] .*wanted float32 \[5\].*length"
    ):
        history(length=5).load_state_dict(h.state_dict())


@pytest.mark.parametrize(
    "options,words",
    [
        ({"length": 0}, "length must be an integer >= 1, got 0"),
        ({"use": "mean"}, "'max' or 'newest', got 'mean'"),
    ],
)
def test_meaningless_histories_are_refused(options: dict, words: str):
    """Otherwise a history without slots, or an unknown rule, fails in the middle of a step."""
    with pytest.raises(ValueError, match=words):
        DelayedScaling(**options)


# Delayed encoding #

DELAYED = Quantizer("fp8_tensor", scaling=DelayedScaling(length=4))


def test_first_use_is_current_scaling():
    """Otherwise the first step of training has arbitrary scales."""
    x = values(33, 48)
    empty = {d: torch.zeros(1) for d in Direction}
    made, amaxes = HybridQuantizer(DELAYED, DELAYED).storages(x, factors=empty)
    want = Quantizer("fp8_tensor").storage(x, ROWWISE)
    assert_same_storage(made[ROWWISE], want)
    assert_same_storage(made[COLUMNWISE], want.as_direction(COLUMNWISE))
    assert amaxes.keys() == {ROWWISE}, "one storage for both directions has one history"
    assert_same_bytes(amaxes[ROWWISE].reshape(1), x.abs().max().float().reshape(1))


def test_delayed_scale_is_that_of_the_history():
    """Codes are sat(x * enc) and the stored scale 1 /rn enc, whatever this step's amax; beyond it
    values saturate."""
    x = values(33, 48, kind="heavy")
    for enc in (448 / 3.0, 17.3, 1e-3):
        factor = torch.tensor([enc])
        made, _ = HybridQuantizer(DELAYED, DELAYED).storages(
            x, [ROWWISE], factors={ROWWISE: factor}
        )
        enc32 = factor.item()
        scaled = oracle.fl(x.double().numpy() * enc32)
        assert_same_bytes(
            made[ROWWISE].data, torch.from_numpy(oracle.cast(scaled, "e4m3")), f"enc {enc}"
        )
        assert made[ROWWISE].scale.item() == float(np.float32(1) / np.float32(enc32))


def test_delayed_scaling_does_not_hide_an_overflow():
    """Otherwise an infinite gradient saturates under an old scale, and the step is applied."""
    for bad in (math.inf, math.nan):
        x = values(33, 48)
        x[3, 5] = bad
        made, _ = HybridQuantizer(DELAYED, DELAYED).storages(
            x, [ROWWISE], factors={ROWWISE: torch.tensor([2.0])}
        )
        assert made[ROWWISE].dequantize().isnan().all()


def test_each_delayed_direction_has_its_own_factor():
    """Otherwise e4m3 rows and e5m2 columns of one hybrid use one history."""
    other = Quantizer(format_of("fp8_tensor", element="e5m2"), scaling=DelayedScaling())
    x = values(33, 48)
    factors = {ROWWISE: torch.tensor([4.0]), COLUMNWISE: torch.tensor([1024.0])}
    made, amaxes = HybridQuantizer(DELAYED, other).storages(x, factors=factors)
    assert made[ROWWISE].scale.item() == 2.0**-2 and made[COLUMNWISE].scale.item() == 2.0**-10
    assert amaxes.keys() == set(Direction)
    mixed, amaxes = HybridQuantizer(DELAYED, "mxfp8").storages(
        x, factors={ROWWISE: torch.tensor([4.0])}
    )
    assert mixed[ROWWISE].scale.item() == 2.0**-2 and amaxes.keys() == {ROWWISE}
    assert_same_storage(mixed[COLUMNWISE], Quantizer("mxfp8").storage(x, COLUMNWISE))


def test_delayed_powers_of_two_stay_powers_of_two():
    """Otherwise a format that promises powers of two keeps the promise in its first step only."""
    quantizer = Quantizer(format_of("fp8_tensor", pow2=True), scaling=DelayedScaling())
    h = AmaxHistory(quantizer.scaling, quantizer.fmt.element.max)
    step(h, 3.0)
    for factor in (torch.zeros(1), h.encode_scale):
        made, _ = HybridQuantizer(quantizer, None).storages(
            values(33, 48), factors={ROWWISE: factor}
        )
        assert math.frexp(made[ROWWISE].scale.item())[0] == 0.5


def test_delayed_and_current_differ_only_in_the_scale():
    """Otherwise a recipe that turns delayed scaling on changes formats or sizes."""
    assert DELAYED.fmt == Quantizer("fp8_tensor").fmt
    assert DELAYED != Quantizer("fp8_tensor") and replace(DELAYED, scaling="current") == Quantizer(
        "fp8_tensor"
    )
