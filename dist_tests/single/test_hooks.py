# SPDX-License-Identifier: Apache-2.0
"""fq.hooks: weights whose masters lie in pieces, cut at any element, over virtual ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests.laws import (
    EVERYTHING,
    OTHER,
    PAIRS,
    QUANTIZERS,
    as_bytes,
    assert_same_bytes,
    assert_same_storage,
    sample,
    values,
)
from dist_tests.virtual import VirtualRanks
from examples.mini_megatron.flat import FlatLayout
from examples.mini_megatron.ranks import Ranks, Sizes, on_virtual_ranks
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE, SCALE_BYTES, Direction
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.hooks import (
    ShardMap,
    SyncItem,
    WeightSync,
    describe,
    plan_weight_sync,
    token_alignment,
)
from fsdp_quant.ops.layout import pack
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.scaling import AmaxHistory, DelayedScaling
from fsdp_quant.tensor.quantized_weight import QuantizedWeight, QuantizedWeightState
from fsdp_quant.weight_sync.cast import codes_of_run, rows_of_codes
from fsdp_quant.weight_sync.shard_map import ALIGNMENT, Segments, WireTensor

WAYS = [(transport, stats) for transport in ("codes", "highprec") for stats in ("dense", "halo")]
DELAYED = Quantizer("fp8_tensor", scaling=DelayedScaling(length=3))


@pytest.fixture(autouse=True)
def fresh_step():
    """docs/flat_buffers.md counts steps by hand."""
    yield
    STEP.step, STEP.counted_by_hand = 0, False


def quantized(
    name: str,
    master: Tensor,
    hybrid: HybridQuantizer,
    compute_dtype=torch.bfloat16,
    dtype=torch.bfloat16,
) -> QuantizedWeight:
    return QuantizedWeightState(name, hybrid, tuple(master.shape), compute_dtype).wrapped(
        master.to(dtype)
    )


def piece(master: Tensor, shards: ShardMap, rank: int) -> Tensor:
    start, end = shards.run(rank)
    return master.reshape(-1)[start:end]


def random_cuts(draw: random.Random, numel: int, world: int, policy: str) -> ShardMap:
    if policy == "even":
        inner = [numel * r // world for r in range(1, world)]
    elif policy == "empty":
        inner = sorted(draw.choices([0, numel // 3, numel], k=world - 1))
    elif policy == "one element":
        at = draw.randint(0, max(numel - world, 0))
        inner = [min(at + r, numel) for r in range(world - 1)]
    else:
        inner = sorted(c | (policy == "odd") for c in draw.choices(range(numel), k=world - 1))
    return ShardMap((0, *(min(c, numel) for c in inner), numel))


POLICIES = ("even", "random", "odd", "empty", "one element")


def synced(
    world: int,
    masters: dict[str, Tensor],
    hybrids: dict[str, HybridQuantizer],
    shards: dict[str, ShardMap],
    transport: str,
    stats: str,
    compute_dtype=torch.bfloat16,
    dtype=torch.bfloat16,
) -> list[list[QuantizedWeight]]:
    """The weights of every rank after a refresh."""

    def on_rank(group):
        weights = [quantized(n, m, hybrids[n], compute_dtype, dtype) for n, m in masters.items()]
        sync = plan_weight_sync(
            [SyncItem(w.state.name, w, shards[w.state.name]) for w in weights],
            group,
            transport,
            stats,
            compute_dtype,
        )
        sync.refresh([piece(m, shards[n], group.rank()) for n, m in masters.items()])
        calls = [name for name, _ in group.calls]
        assert calls.count("all_reduce") <= 2, (
            f"the plan takes one all-reduce and a cast one, got {calls}"
        )
        return weights

    return VirtualRanks(world).run(on_rank)


def assert_published(
    weights: list[list[QuantizedWeight]],
    name: str,
    hybrid: HybridQuantizer,
    seen: Tensor,
    what: str,
) -> None:
    want, _ = hybrid.storages(seen)
    for rank, of in enumerate(weights):
        weight = next(w for w in of if w.state.name == name)
        for direction in Direction:
            assert_same_storage(
                weight.storage_for(direction),
                want[direction],
                f"{what}, rank {rank} {direction.value}",
            )


# Law 43: bytes #


@settings(max_examples=600 if EVERYTHING else 45, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_pieces_give_the_bytes_of_the_whole(seed: int):
    """Otherwise what a rank multiplies depends on how many ranks there are, and on where a trainer
    cuts its buffers."""
    draw = random.Random(seed)
    world = draw.randint(1, 8)
    masters, hybrids, shards = {}, {}, {}
    for i in range(draw.randint(1, 2)):
        name, (row, col) = f"w{i}", draw.choice(PAIRS)
        rows, cols = draw.choice(
            [(1, 1), (1, 40), (40, 1), (5, 7), (33, 17), (40, 48), (133, 34), (130, 129)]
        )
        masters[name] = values(
            rows,
            cols,
            seed=draw.randint(0, 99),
            kind=draw.choice(["gauss", "heavy"]),
            dtype=torch.float32,
        )
        hybrids[name] = HybridQuantizer(row, col, draw.choice(["original", "rowwise_dequantized"]))
        shards[name] = random_cuts(draw, rows * cols, world, draw.choice(POLICIES))
    transport, stats = draw.choice([*WAYS, ("auto", "dense")])
    weights = synced(world, masters, hybrids, shards, transport, stats)
    for name, master in masters.items():
        what = (
            f"{hybrids[name]} {list(master.shape)} cut at {shards[name].cuts}, {transport}, {stats}"
        )
        assert_published(weights, name, hybrids[name], master.to(torch.bfloat16), what)


@pytest.mark.parametrize("pair", sample(PAIRS, 11), ids="-".join)
def test_transports_and_statistics_give_the_same_bytes(pair):
    """Otherwise a setting that should only move bytes changes the model."""
    master, hybrid = values(50, 34, kind="outliers", dtype=torch.float32), HybridQuantizer(*pair)
    for transport, stats in WAYS:
        shards = {"w": ShardMap((0, 1, 35, 35, 833, 1700))}
        weights = synced(5, {"w": master}, {"w": hybrid}, shards, transport, stats)
        assert_published(weights, "w", hybrid, master.to(torch.bfloat16), f"{transport} {stats}")


@pytest.mark.parametrize("name", sorted(QUANTIZERS | OTHER))
def test_options_of_formats_survive_any_cut(name: str):
    """Otherwise an option (powers of two, e5m2, the floor rule) is lost on the way, or rare values
    depend on the cut."""
    hybrid = HybridQuantizer(*[(QUANTIZERS | OTHER)[name]] * 2)
    draw = random.Random(name)
    for kind, bad in (
        ("tiny", None),
        ("gauss", 0.0),
        ("gauss", math.nan),
        ("heavy", -math.inf),
        ("gauss", 2.0**-133),
    ):
        master = values(35, 33, kind=kind, dtype=torch.float32)
        if bad is not None:
            master[3:20, 5:29:3] = bad
        shards = {"w": random_cuts(draw, master.numel(), 4, "odd")}
        transport, stats = draw.choice(WAYS[:2])
        weights = synced(4, {"w": master}, {"w": hybrid}, shards, transport, stats)
        assert_published(
            weights,
            "w",
            hybrid,
            master.to(torch.bfloat16),
            f"{name} {bad} {shards['w'].cuts} {stats}",
        )


@pytest.mark.parametrize("transport,stats", WAYS)
def test_rounding_is_the_recipes(transport: str, stats: str):
    """Otherwise masters are rounded to bf16 although the recipe says not to, or an fp32 side loses
    bits on the wire."""
    master = values(40, 48, kind="heavy", dtype=torch.float32)
    shards = {"w": ShardMap((0, 333, 1920))}
    hybrid = HybridQuantizer("mxfp8", "nvfp4")
    weights = synced(2, {"w": master}, {"w": hybrid}, shards, transport, stats, compute_dtype=None)
    want, _ = hybrid.storages(master)
    for d in Direction:
        got = replace(weights[1][0].storage_for(d), dtype=torch.float32)
        assert_same_storage(got, want[d])
    mixed = HybridQuantizer("identity", "fp8_1x128")
    (weight,) = synced(
        2, {"w": master}, {"w": mixed}, shards, transport, stats, dtype=torch.float32
    )[0]
    assert_same_bytes(weight.rowwise.data, master)
    want, _ = mixed.storages(master.to(torch.bfloat16))
    assert_same_bytes(weight.columnwise.data, want[COLUMNWISE].data)


PARTS = [
    (("fp8_tensor", "nvfp4"), 0),
    (("nvfp4_16x16", "nvfp4_16x16"), 1),
    ((DELAYED, DELAYED), 1),
    (("mxfp8", DELAYED), 0),
]


def cast_parts(
    pair, dim: int, transport: str, stats: str, shared: bool = True, device: str = "cpu"
) -> list[list[Tensor]]:
    """Decoded codes, rowwise and columnwise, of the parts of a weight cut along `dim`, by rank of a
    grid of 2 x 2."""
    master = values(64, 96, kind="outliers", dtype=torch.float32).to(device)

    def on_rank(ranks: Ranks) -> list[Tensor]:
        part = master.chunk(2, dim)[ranks.tensor.rank()].contiguous()
        shards = ShardMap((0, 1333 - 10 * ranks.tensor.rank(), part.numel()))
        weight = quantized("w", part, HybridQuantizer(*pair))
        parts = ranks.tensor if shared else None
        sync = plan_weight_sync(
            [("w", weight, shards)], ranks.data, transport, stats, tensor_group=parts
        )
        mine = piece(part, shards, ranks.data.rank())
        for change in (1.0, -2.0):
            sync.cast_([mine * change])
        sync.cast_([mine * 9.0], skip=torch.tensor(1.0))
        sync.gather()
        sync.finish()
        return [weight.storage_for(d).dequantize().cpu() for d in Direction]

    return on_virtual_ranks(Sizes(data=2, tensor=2), on_rank)


def whole_of_parts(pair, dim: int) -> list[Tensor]:
    seen, hybrid = (
        (values(64, 96, kind="outliers", dtype=torch.float32) * -2.0).to(torch.bfloat16),
        HybridQuantizer(*pair),
    )
    history = AmaxHistory(DELAYED.scaling, 448.0)
    history.record(seen.float().abs().amax() / 2)
    history.roll()
    factors = {d: history.encode_scale for d in hybrid.delayed_directions}
    want, _ = hybrid.storages(seen, factors=factors)
    return [want[d].dequantize() for d in Direction]


@pytest.mark.parametrize(("transport", "stats"), WAYS)
def test_parts_have_the_scales_of_the_whole(transport: str, stats: str, device: str = "cpu"):
    """Otherwise a weight that tensor parallelism cuts has other codes under a trainer's sync than
    under fully_shard, and a grid trains another model than one rank."""
    for pair, dim in PARTS:
        want = [whole.chunk(2, dim) for whole in whole_of_parts(pair, dim)]
        for rank, got in enumerate(cast_parts(pair, dim, transport, stats, device=device)):
            for d, direction in enumerate(Direction):
                what = (
                    f"{pair} cut along {dim}, {transport}, {stats}, rank {rank} {direction.value}"
                )
                assert_same_bytes(got[d], want[d][rank % 2], what)


def test_parts_alone_have_other_scales():
    """Negative control of the law above."""
    for pair, dim in PARTS:
        want, got = whole_of_parts(pair, dim), cast_parts(pair, dim, "codes", "dense", shared=False)
        assert any(not torch.equal(got[t][1], want[1].chunk(2, dim)[t]) for t in range(2)), pair


def test_a_negative_control_sees_a_cut():
    """Otherwise the laws above pass for a cast that shares no statistic."""
    master = values(32, 32, dtype=torch.float32)
    master[20, 3] = 500.0
    whole, alone = (Quantizer("mxfp8").storage(x, COLUMNWISE) for x in (master, master[:16]))
    assert not torch.equal(alone.data, whole.data[:16])


def test_runs_of_codes_put_together_are_the_tensor():
    """Otherwise a cut inside a byte drops a code, or carries one of another rank."""
    draw = random.Random(3)
    for rows, cols, bits in itertools.product((1, 3, 6), (1, 2, 5, 8), (4, 6, 8)):
        codes = torch.randint(0, 2**bits, (rows, cols), dtype=torch.uint8)
        whole = pack(codes, bits)
        flat = torch.zeros(math.ceil(rows * cols * bits / 8), dtype=torch.uint8)
        cuts = random_cuts(draw, rows * cols, 4, "random")
        for rank in range(4):
            start, end = cuts.run(rank)
            first, last = start // cols, -(-end // cols) if end > start else start // cols
            got = codes_of_run(whole[first:last], bits, start, end - start, cols)
            if end > start:
                flat[start * bits // 8 : math.ceil(end * bits / 8)] |= got
            else:
                assert got.numel() == 0
        assert_same_bytes(rows_of_codes(flat, bits, rows, cols), whole)


def codes_in_place(pair, world: int, device: str = "cpu") -> None:
    """Weights of a flat buffer that ranks share evenly, over two steps; then in the trainer's
    memory."""
    rows, hybrid = (64, 32, 96), HybridQuantizer(*pair)
    starts, share = (
        list(itertools.accumulate((64 * r for r in rows), initial=0)),
        64 * sum(rows) // world,
    )
    masters = [values(r, 64, seed=r, dtype=torch.float32).to(device) for r in rows]
    shards = [
        ShardMap(tuple(min(max(share * r - a, 0), b - a) for r in range(world + 1)))
        for a, b in itertools.pairwise(starts)
    ]

    def on_rank(group):
        weights = [quantized(f"w{i}", m, hybrid) for i, m in enumerate(masters)]
        items = [SyncItem(w.state.name, w, s) for w, s in zip(weights, shards)]
        # parameters of a flat buffer lie the other way round
        sync = plan_weight_sync(items[::-1], group, "codes")
        own = [piece(m, s, group.rank()) for m, s in zip(masters, shards)][::-1]
        assert (
            sync.describe().count("read where they are gathered")
            == len(sync._channels)
            == len(hybrid.encodings)
        )
        held = {c.codes.untyped_storage().data_ptr() for c in sync._channels}
        given = [
            torch.zeros(want.nbytes, dtype=torch.uint8, device=device) for want in sync.buffers()
        ]

        def check(factor: float, directions=tuple(Direction)) -> None:
            for weight, master in zip(weights, masters):
                want, _ = hybrid.storages((master * factor).to(torch.bfloat16))
                for d in directions:
                    got = weight.storage_for(d)
                    assert_same_storage(
                        got, want[d], f"{pair} {world} {weight.state.name} {d.value} {factor}"
                    )
                    assert got.data.untyped_storage().data_ptr() in held or (
                        hybrid.is_derived and d is COLUMNWISE
                    )

        for factor in (1.0, -2.0):
            sync.cast_([m * factor for m in own])
            sync.gather(async_op=True)
            with pytest.raises(StaleWeightError):
                weights[0].storage_for(ROWWISE)
            sync.finish()
            check(factor)
        sync.cast_([m * 5.0 for m in own], skip=torch.tensor(1.0))
        for d in Direction:
            sync.gather([d])
            sync.finish([d])
        check(-2.0)
        sync.release([COLUMNWISE])
        check(-2.0, [ROWWISE])
        sync.release([ROWWISE])
        assert all(c.codes.untyped_storage().size() == 0 for c in sync._channels)
        sync.gather()
        sync.finish()
        held = {c.codes.untyped_storage().data_ptr() for c in sync._channels}
        check(-2.0)
        sync.bind(given)
        check(-2.0)
        sync.refresh([m * 3.0 for m in own])
        for memory in given:  # it has served
            memory.fill_(0xA5)
        check(3.0)

    VirtualRanks(world).run(on_rank)


IN_PLACE = [
    ("mxfp8", "fp8_tensor"),
    ("mxfp8", "nvfp4"),
    ("nvfp4_16x16", "nvfp4_16x16"),
    ("identity", "fp8_row"),
    ("fp8_row", "mxfp8", "rowwise_dequantized"),
]


@pytest.mark.parametrize("world", [2, 3, 4, 6] if EVERYTHING else [3, 6])
@pytest.mark.parametrize("pair", IN_PLACE, ids="-".join)
def test_codes_are_read_where_they_were_gathered(pair, world: int):
    """Otherwise codes of a flat buffer are copied once more, or products read memory that was
    freed, or is the trainer's."""
    codes_in_place(pair, world)


# Law 44: ownership #


def check_owners(segments: Segments) -> None:
    """The byte ranges of the segments contain every element once, from its owner."""
    for p, wire in enumerate(segments.wire_tensors):
        bits = 0  # of the wire tensor that were found, in order
        for rank in range(wire.map.ranks):
            start, end = wire.map.run(rank)
            if start == end:
                continue
            first, last = wire.span(rank)
            offset, following = segments.offsets[rank][p : p + 2]
            assert bits == start * wire.bits and (offset - first) % ALIGNMENT == 0
            assert offset + last - first <= following <= segments.size
            assert 8 * first <= start * wire.bits < 8 * (first + 1)
            assert 8 * (last - 1) < end * wire.bits <= 8 * last
            bits = end * wire.bits
        assert bits == wire.map.numel * wire.bits


def test_every_element_is_published_once_by_its_owner():
    """Otherwise elements that no rank casts are gathered, and never trained: flat buffers at worlds
    with odd factors, mixed 4- and 8-bit weights, padding to 2^16."""
    draw = random.Random(44)
    for world in (1, 2, 3, 5, 6, 7, 8, 12):
        for pad in (math.lcm(world, 128), math.lcm(world, 128, 2**16)):
            sizes = [draw.choice([64, 96 * 3, 4097, 16 * 1024]) for _ in range(6)]
            starts = list(itertools.accumulate([-(-s // 64) * 64 for s in sizes], initial=0))
            shard = -(-starts[-1] // pad) * pad // world
            wire_tensors = []
            for i, (start, size) in enumerate(zip(starts, sizes)):
                bounds = [min(max(r * shard - start, 0), size) for r in range(world + 1)]
                wire_tensors.append(WireTensor(f"w{i}", (4, 8, 16)[i % 3], ShardMap(tuple(bounds))))
            segments = Segments(tuple(wire_tensors), world)
            check_owners(segments)
            for wire in wire_tensors:
                owners = [[] for _ in range(wire.map.numel)] if wire.map.numel < 5000 else None
                covered = 0
                for rank in range(world):
                    start, end = wire.map.run(rank)
                    first, last = wire.span(rank)
                    covered += end - start
                    assert (
                        not end > start
                        or first * 8 <= start * wire.bits
                        and end * wire.bits <= last * 8
                    )
                    for element in range(start, end) if owners else ():
                        owners[element].append(rank)
                assert covered == wire.map.numel and (
                    owners is None or all(len(o) == 1 for o in owners)
                )


def test_scales_belong_to_the_owner_of_their_first_element():
    """Otherwise two ranks publish a scale, or one publishes what it cannot know."""
    draw = random.Random(5)
    for _ in range(60):
        rows, cols, world = draw.randint(1, 70), draw.randint(1, 70), draw.randint(1, 6)
        cuts = random_cuts(draw, rows * cols, world, draw.choice(POLICIES))
        for quantizer in (
            QUANTIZERS[n] for n in ("mxfp8", "nvfp4_16x16", "fp8_row", "fp8_tensor", "mxfp8_32x32")
        ):
            for direction in Direction:
                encoding = quantizer.encoding(direction)
                b0, b1 = encoding.fmt.dims(direction)
                first = [
                    r * cols + c
                    for r in range(0, rows, b0 or rows)
                    for c in range(0, cols, b1 or cols)
                ]
                want = [sum(f < cut for f in first) for cut in cuts.cuts]
                assert list(cuts.of_scales(encoding, (rows, cols)).cuts) == want, (
                    cuts,
                    encoding,
                    rows,
                    cols,
                )


def test_cuts_that_are_no_ownership_are_refused():
    """Otherwise overlapping or missing ownership becomes stale or doubly written elements."""
    for cuts in ((0,), (1, 9), (0, 5, 4, 9)):
        with pytest.raises(ValueError, match="start at 0 and never fall"):
            ShardMap(cuts)


# Laws 45, 47: steps, skipped steps, stale codes #


def bytes_of(sync: WeightSync, weights: list[QuantizedWeight]) -> list[Tensor]:
    """Every byte that a step may change: segments, staged statistics, histories, storages, the
    count of steps."""
    kept = [c.segment for c in sync._channels] + [sync.applied]
    kept += [t for w in sync._weights for s in w.staged.values() for t in s.values()]
    kept += [
        t for w in weights for h in w.state.histories.values() for t in (h.amaxes, h.encode_scale)
    ]
    kept += [b for w in weights for d in Direction for b in w._pair.get(d).buffers().values()]
    return [as_bytes(t) for t in kept]


@pytest.mark.parametrize("transport,stats", WAYS)
def test_a_skipped_step_leaves_no_trace(transport: str, stats: str):
    """Otherwise an overflow on one rank moves scales, codes or histories of a step that was not
    applied."""
    master, bad = (
        values(33, 34, dtype=torch.float32),
        values(33, 34, seed=7, kind="outliers", dtype=torch.float32),
    )
    good = values(33, 34, seed=8, dtype=torch.float32)
    shards = ShardMap((0, 17, 17, 700, 33 * 34))

    def run(group, steps):
        hybrids = HybridQuantizer(DELAYED, "nvfp4"), HybridQuantizer("mxfp8", "mxfp8")
        weights = [quantized(name, master, hybrid) for name, hybrid in zip("ab", hybrids)]
        activations = weights[0].state.history("layer", "input", ROWWISE, DELAYED)
        sync = plan_weight_sync(
            [SyncItem(w.state.name, w, shards) for w in weights], group, transport, stats
        )
        sync.refresh([piece(master, shards, group.rank())] * 2)
        for values_, amax, skip in steps:
            activations.record(torch.tensor([amax]))
            before = bytes_of(sync, weights)
            sync.cast_([piece(values_, shards, group.rank())] * 2, skip=torch.tensor([skip]))
            sync.gather()
            sync.finish()
            if skip:
                activations_slot = activations.amaxes[0].item()
                assert activations_slot == 0.0, "amaxes of the skipped step are kept"
                activations.amaxes[0] = amax
                for got, want in zip(bytes_of(sync, weights), before):
                    assert torch.equal(got, want)
                activations.amaxes[0] = 0.0
        return bytes_of(sync, weights), int(sync.applied), sync.generation

    with_skips = [
        (good, 3.0, 0.0),
        (bad, 1e4, 1.0),
        (bad, 9e4, 1.0),
        (master, 2.0, 0.0),
        (good, 5.0, 0.0),
    ]
    got = VirtualRanks(4).run(lambda g: run(g, with_skips))
    want = VirtualRanks(4).run(lambda g: run(g, [s for s in with_skips if not s[2]]))
    for (a, applied, attempts), (b, *_) in zip(got, want):
        assert applied == 3 and attempts == 6
        for x, y in zip(a, b):
            assert torch.equal(x, y)


def test_delayed_scaling_follows_applied_steps():
    """Otherwise the history rolls with attempts, or each rank has another scale."""
    series = [values(20, 20, seed=s, dtype=torch.float32) * (s + 1) for s in range(6)]
    skipped = (2, 3)
    shards, hybrid = ShardMap((0, 133, 400)), HybridQuantizer(DELAYED, DELAYED)
    history, want = AmaxHistory(DELAYED.scaling, 448.0), []
    for s, master in enumerate(series):
        if s and s not in skipped:
            history.roll()
        if s not in skipped:
            made, amaxes = hybrid.storages(
                master.to(torch.bfloat16), factors={ROWWISE: history.encode_scale}
            )
            history.record(amaxes[ROWWISE])
        want.append(made)

    def on_rank(group):
        weight = quantized("w", series[0], hybrid)
        sync = plan_weight_sync([SyncItem("w", weight, shards)], group, "codes")
        for s, master in enumerate(series):
            mine = [piece(master, shards, group.rank())]
            sync.cast_(mine, skip=torch.tensor(float(s in skipped))) if s else sync.refresh(mine)
            sync.gather()
            sync.finish()
            for d in Direction:
                assert_same_storage(weight.storage_for(d), want[s][d], f"step {s} {d.value}")

    VirtualRanks(2).run(on_rank)


def test_codes_are_read_only_when_ready():
    """Otherwise a product reads codes of an older step, or of half a gather: first use, between the
    calls, one direction alone, a forced sync twice, chained syncs."""
    master = values(8, 32, dtype=torch.float32)
    one, other = (quantized(n, master, HybridQuantizer("mxfp8", "nvfp4")) for n in ("one", "other"))
    sync, chained = (
        plan_weight_sync([SyncItem(w.state.name, w, ShardMap((0, 256)))], None)
        for w in (one, other)
    )

    def ready(weight: QuantizedWeight) -> list[bool]:
        found = []
        for d in Direction:
            try:
                weight.storage_for(d)
                found.append(True)
            except StaleWeightError as error:
                text = rf"{weight.state.name}: the {d.value} codes are of generation \d+ and "
                assert re.match(text, str(error)), error
                found.append(False)
        return found

    flat = [master.reshape(-1)]
    assert ready(one) == [False, False]
    for call in (sync.gather, sync.finish):
        with pytest.raises(StaleWeightError):
            call()
    sync.cast_(flat)
    with pytest.raises(StaleWeightError, match="before their gather of generation 1"):
        sync.finish()
    assert ready(one) == [False, False]
    sync.gather([ROWWISE])
    assert ready(one) == [False, False]
    sync.finish([ROWWISE])
    assert ready(one) == [True, False] and ready(other) == [False, False]
    with pytest.raises(StaleWeightError, match=r"\['columnwise'\]"):
        sync.finish([COLUMNWISE])
    work = sync.gather([COLUMNWISE], async_op=True)
    work.wait()
    sync.finish()
    assert ready(one) == [True, True]
    chained.refresh(flat)
    sync.cast_(flat)
    assert ready(one) == [False, False] and ready(other) == [True, True]
    sync.refresh(flat)
    before = [as_bytes(b) for d in Direction for b in one.storage_for(d).buffers().values()]
    sync.refresh(flat)
    sync.finish()
    assert all(
        torch.equal(a, as_bytes(b))
        for a, b in zip(
            before, (b for d in Direction for b in one.storage_for(d).buffers().values())
        )
    )
    with pytest.raises(StaleWeightError, match="write or save the masters"):
        one.copy_(master)


def test_only_the_weight_itself_is_published():
    """Otherwise a copy (of a moved model) is read as current, although no later step writes it."""
    master = values(64, 32, dtype=torch.float32)
    weight = quantized("w", master, HybridQuantizer("mxfp8", "nvfp4"))
    sync = plan_weight_sync([("w", weight, ShardMap((0, 2048)))], None)
    sync.refresh([master.reshape(-1)])
    rows, alias = weight[16:32], weight.detach()
    for copy_of in (torch.clone, torch.Tensor.float, copy.deepcopy):
        with pytest.raises(
            (NotImplementedError, StaleWeightError), match="published by a weight sync"
        ):
            copy_of(weight)
    sync.cast_([-master.reshape(-1)])
    for view in (rows, alias):
        with pytest.raises(StaleWeightError):
            view.storage_for(ROWWISE)
    sync.gather()
    sync.finish()
    want, _ = HybridQuantizer("mxfp8", "nvfp4").storages(-master.to(torch.bfloat16))
    for d in Direction:
        assert_same_storage(alias.storage_for(d), want[d])
        assert_same_bytes(rows.storage_for(d).dequantize(), want[d].dequantize()[16:32])


@pytest.mark.parametrize("name", ["hybrid", "fp8_delayed", "fp8_block"])
def test_a_layer_trains_as_with_its_own_optimizer(name: str, device: str = "cpu"):
    """Otherwise fq.Linear cannot run on a trainer's weights, or a trainer's step is another than
    that of fq.optim.FusedAdam: codes, masters, and histories of weights, activations and
    gradients."""
    recipe = (
        fq.recipes.hybrid("mxfp8", "nvfp4") if name == "hybrid" else getattr(fq.recipes, name)()
    )
    with fq.quantized_model_init(recipe):
        ours, theirs = (
            fq.Linear(
                48, 32, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe, name="it"
            )
            for _ in range(2)
        )
    theirs.load_state_dict(ours.state_dict())
    sync = plan_weight_sync([("w", ours.weight, ShardMap((0, 32 * 48)))], None)
    master = torch.nn.Parameter(sync.init_masters()[0])
    sync.refresh([master])
    adam, their_adam = (fq.optim.FusedAdam([p], lr=0.1) for p in (master, theirs.weight))
    assert_same_bytes(master.detach(), their_adam.state[theirs.weight]["master"].reshape(-1))
    for step in range(3):
        x = values(8, 48, seed=step).to(device)
        outputs = [layer(x) for layer in (ours, theirs)]
        assert_same_bytes(*(y.detach() for y in outputs), f"step {step}")
        for y in outputs:
            y.square().sum().backward()
        assert_same_bytes(ours.weight.grad, theirs.weight.grad)
        master.grad = ours.weight.grad.float().reshape(-1)
        adam.step()
        their_adam.step()
        ours.weight.grad = theirs.weight.grad = None
        sync.cast_([master])
        with pytest.raises(StaleWeightError):
            ours(x)
        sync.gather()
        sync.finish()
        for key, mine in ours._weight_state.histories.items():
            of = theirs._weight_state.histories[key]
            assert_same_bytes(mine.amaxes, of.amaxes, f"{key}")
            assert_same_bytes(mine.encode_scale, of.encode_scale, f"{key}")
    for d in Direction:
        assert_same_storage(ours.weight.storage_for(d), theirs.weight.storage_for(d))


def test_codes_alone_train_with_main_grads_as_plain_parameters():
    """If false, parameters that are codes under a distributed optimizer of Megatron's kind keep
    values in high precision, or train on other gradients than plain parameters."""
    sizes, kept = (160, 96), {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16}
    layout = FlatLayout({"up": 160 * 96, "down": 160 * 96}, 1, 1 << 14)
    runs = []
    for codes in (True, False):
        torch.manual_seed(0)
        scope = fq.quantized_model_init("mxfp8") if codes else contextlib.nullcontext()
        with scope:
            up = fq.Linear(96, 160, False, recipe="mxfp8", name="up", **kept)
            down = fq.Linear(
                160, 96, False, recipe="mxfp8", name="down", delay_wgrad_compute=codes, **kept
            )
        weights, grads = {"up": up.weight, "down": down.weight}, layout.zeros("cpu")
        for name, weight in weights.items():
            weight.main_grad = layout.view(grads, name).view(weight.shape)
        if codes:
            sync = plan_weight_sync([(n, w, layout.shards(n)) for n, w in weights.items()], None)
            masters = sync.init_masters()
            sync.refresh(masters)
            alive = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
            of_weights = [t for t in alive if sorted(t.shape) == sorted(sizes)]
            assert not [t for t in of_weights if t.dtype is torch.bfloat16], "values are kept"
        else:
            masters = [w.detach().float().reshape(-1) for w in weights.values()]
        optimizer = torch.optim.AdamW(masters, lr=0.01)
        seen = []
        for step in range(3):
            for micro_batch in range(2):
                y = down(up(values(32, 96, seed=2 * step + micro_batch)).relu())
                y.square().sum().backward()
                seen.append(y.detach())
            for _ in range(2):
                down.backward_dw()
            seen.append(grads.clone())
            for master, name in zip(masters, weights):
                master.grad = layout.view(grads, name)
            optimizer.step()
            grads.zero_()
            if codes:
                sync.cast_(masters)
                sync.gather()
                sync.finish()
            else:
                for weight, master in zip(weights.values(), masters):
                    weight.data.copy_(master.view(weight.shape))
        runs.append(seen)
    for i, (got, want) in enumerate(zip(*runs)):
        assert_same_bytes(got, want, f"{i}")


def test_the_page_trains():
    """Otherwise the first thing that a user copies from docs/flat_buffers.md does not run."""
    page = (Path(fq.__file__).parents[1] / "docs/flat_buffers.md").read_text()
    scope: dict = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert int(scope["sync"].applied) == 3 and scope["sync"].generation == 4


def test_fingerprints_are_those_of_other_weights():
    """Otherwise a checkpoint cannot say whether codes are the same after FSDP2 and a flat buffer
    trade places."""
    recipe, cuts = fq.recipes.hybrid("mxfp8", "nvfp4"), ShardMap((0, 32 * 48))
    with fq.quantized_model_init(recipe):
        model = torch.nn.Sequential(fq.Linear(48, 32, dtype=torch.bfloat16, recipe=recipe))
    plain = torch.nn.Sequential(fq.Linear(48, 32, dtype=torch.bfloat16, recipe=recipe))
    plain.load_state_dict(model.state_dict())
    sync = plan_weight_sync([("w", model[0].weight, cuts)], None)
    sync.refresh(sync.init_masters())
    assert fq.state_dict(model)["codes"] == fq.state_dict(plain)["codes"]
    with pytest.raises(StaleWeightError, match="write or save the masters"):
        model.state_dict()


@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("fp8_128x128", "fp8_128x128")], ids="-".join)
def test_passes_gather_what_they_multiply_and_let_it_go(pair):
    """Otherwise a trainer that shards parameters keeps whole weights, or a backward reads codes
    that were freed."""
    master, hybrid = values(33, 34, dtype=torch.float32), HybridQuantizer(*pair)
    shards = ShardMap((0, 700, 33 * 34))

    def on_rank(group):
        weight = quantized("w", master, hybrid)
        sync = plan_weight_sync([("w", weight, shards)], group, "codes", "halo")
        sync.cast_([piece(master, shards, group.rank())])
        want, _ = hybrid.storages(master.to(torch.bfloat16))
        for _ in range(2):
            for d, other in ((ROWWISE, COLUMNWISE), (COLUMNWISE, ROWWISE)):
                sync.gather([d], async_op=True)
                sync.finish([d])
                assert_same_storage(weight.storage_for(d), want[d])
                with pytest.raises(StaleWeightError):
                    weight.storage_for(other)
                sync.release([d])
                with pytest.raises(StaleWeightError):
                    weight.storage_for(d)
                with pytest.raises(StaleWeightError, match="before their gather"):
                    sync.finish([d])
        whole = [
            b for s in (weight._pair.rowwise, weight._pair.columnwise) for b in s.buffers().values()
        ]
        assert all(b.untyped_storage().size() == 0 for b in whole) and all(
            c.buffer is None for c in sync._channels
        )

    VirtualRanks(2).run(on_rank)


# What is planned #


def test_collectives_follow_from_the_plan_alone():
    """Otherwise ranks with empty pieces hang the others, or a step has a collective a weight."""
    masters = [values(33, 40, seed=s, dtype=torch.float32) for s in range(3)]
    hybrids = [
        HybridQuantizer(*p)
        for p in (("mxfp8", "nvfp4"), ("nvfp4_16x16", "nvfp4_16x16"), ("fp8_row", "identity"))
    ]
    shards = ShardMap((0, 0, 1320, 1320))
    for stats in ("dense", "halo"):

        def on_rank(group):
            weights = [quantized(f"w{i}", m, h) for i, (m, h) in enumerate(zip(masters, hybrids))]
            sync = plan_weight_sync(
                [(w.state.name, w, shards) for w in weights], group, "codes", stats
            )
            del group.calls[:]
            sync.cast_([piece(m, shards, group.rank()) for m in masters])
            assert [name for name, _ in group.calls] == ["all_reduce"]
            sync.gather([ROWWISE])
            sync.gather([COLUMNWISE])
            sync.finish()
            sent = [size * 3 for name, size in group.calls if name == "all_gather"]
            rowwise, columnwise = (
                sum(b.nbytes for b in sync.buffers() if d in b.directions) for d in Direction
            )
            assert sum(sent) == rowwise + columnwise, (
                "bytes on the wire are not those that were planned"
            )
            return group.calls

        calls = VirtualRanks(3).run(on_rank)
        assert calls[0] == calls[1] == calls[2]


def test_the_wire_has_the_bytes_of_the_formats():
    """Otherwise a hybrid's parameter gather costs more than its formats: 1.6 bytes an element for
    mxfp8 and nvfp4."""
    master = torch.zeros(512, 512)

    def bytes_of(world, pair, **options):
        def on_rank(group):
            weight = quantized("w", master, HybridQuantizer(*pair))
            shards = ShardMap(tuple(master.numel() * r // world for r in range(world + 1)))
            return (
                sum(
                    b.nbytes
                    for b in plan_weight_sync([("w", weight, shards)], group, **options).buffers()
                )
                / master.numel()
            )

        return VirtualRanks(world).run(on_rank)[0]

    for pair in (
        ("mxfp8", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("nvfp4_16x16", "nvfp4_16x16"),
        ("fp8_tensor", "mxfp8"),
    ):
        hybrid = HybridQuantizer(*pair)
        encodings = hybrid.encodings.values()
        codes = sum(e.fmt.element.bits / 8 for e in encodings)
        scales = sum(
            math.prod(e.fmt.scale_shape(master.shape, e.direction)) * SCALE_BYTES[e.fmt.scale]
            for e in encodings
        )
        padding = 4 * 2 * 2 * 16 / master.numel()  # a run is padded to 16 bytes, on each of 4 ranks
        assert 0 <= bytes_of(4, pair, transport="codes", stats="dense") - codes <= padding
        halo = bytes_of(4, pair, transport="codes", stats="halo")
        assert 0 <= halo - codes - scales / master.numel() <= padding
        assert bytes_of(4, pair, transport="highprec") == 2.0
        assert bytes_of(4, pair, stats="halo") == min(halo, 2.0), (
            "auto does not send the fewest bytes"
        )
    assert abs(bytes_of(4, ("mxfp8", "nvfp4"), stats="halo") - 1.594) < 0.01


def test_a_trainers_buffers_and_its_own_gather():
    """Otherwise bytes around a segment are written, or an all-gather that the trainer runs is not
    the one that we would."""
    master, hybrid = values(33, 34, dtype=torch.float32), HybridQuantizer("mxfp8", "nvfp4")
    shards = ShardMap((0, 17, 700, 33 * 34))
    memory = {}

    def on_rank(group):
        weight = quantized("w", master, hybrid)
        sync = plan_weight_sync([("w", weight, shards)], group, "codes", "halo")
        flat = [torch.full((want.nbytes + 64,), 0xA5, dtype=torch.uint8) for want in sync.buffers()]
        sync.bind([f[16:] for f in flat])
        with pytest.raises(fq.StaleWeightError, match="without a cast"):
            sync.gathered()
        memory[group.rank()] = flat
        sync.cast_([piece(master, shards, group.rank())])
        for want, f in zip(sync.buffers(), flat):
            own = f[16 + group.rank() * want.segment :][: want.segment]
            f[16 : 16 + want.nbytes] = torch.cat(group.exchange(own))
        sync.gathered()
        sync.finish()
        for want, f in zip(sync.buffers(), flat):
            assert (f[:16] == 0xA5).all() and (f[16 + want.nbytes :] == 0xA5).all(), (
                "bytes around the buffer were written"
            )
        return [weight]

    assert_published(VirtualRanks(3).run(on_rank), "w", hybrid, master.to(torch.bfloat16), "bound")


def test_checkpoints_of_other_weights_are_refused():
    """Otherwise a run goes on with codes of another format or rounding, or another cut is taken for
    another model."""
    master = values(8, 32, dtype=torch.float32)

    def plan(
        group,
        cuts,
        hybrid=HybridQuantizer("mxfp8", "nvfp4"),
        compute_dtype=torch.bfloat16,
        **options,
    ):
        weight = quantized("w", master, hybrid, compute_dtype)
        return plan_weight_sync(
            [("w", weight, ShardMap(cuts))], group, compute_dtype=compute_dtype, **options
        )

    sync = plan(None, (0, 256))
    sync.refresh([master.reshape(-1)])
    sync.cast_([master.reshape(-1)])
    state = sync.state_dict()

    def on_rank(group):
        again = plan(group, (0, 3, 256), stats="halo", transport="highprec")
        again.load_state_dict(state)
        assert int(again.applied) == 1

    VirtualRanks(2).run(on_rank)
    for applied in (
        None,
        1,
        torch.tensor(-1),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor(1.0),
    ):
        with pytest.raises(ValueError, match="applied of the saved state is"):
            sync.load_state_dict(state | {"applied": applied})
    assert int(sync.applied) == 1
    for changed in ({"hybrid": HybridQuantizer("mxfp8", "mxfp8")}, {"compute_dtype": None}):
        with pytest.raises(ValueError, match="other weights, formats or rounding"):
            plan(None, (0, 256), **changed).load_state_dict(state)


# Bad input #


def refused(words: str, items, group=None, **options) -> None:
    weights = [w for _, w, _ in items if isinstance(w, QuantizedWeight)]
    before = [w.inner.clone() for w in weights if w.state.weight_sync is None]
    with pytest.raises(ValueError, match=words):
        plan_weight_sync(items, group, **options)
    assert all(
        torch.equal(w.inner, b)
        for w, b in zip((w for w in weights if w.state.weight_sync is None), before)
    )


def test_bad_plans_are_refused_and_change_no_weight():
    """Otherwise a trainer's mistake shows as a hang or as wrong weights, many steps later."""
    master = values(8, 32, dtype=torch.float32)
    whole, hybrid = ShardMap((0, 256)), HybridQuantizer("mxfp8", "nvfp4")
    good = quantized("w", master, hybrid)
    refused(
        "is no quantized parameter; build the model under fq.quantized_model_init",
        [("w", master, whole)],
    )
    refused(
        "shards are of 255 elements on 1 ranks; wanted 256 on 1", [("w", good, ShardMap((0, 255)))]
    )
    refused("shards are of 256 elements on 2 ranks", [("w", good, ShardMap((0, 4, 256)))])
    refused("in the items twice", [("w", good, whole), ("v", good, whole)])
    refused("transport is one of .* got 'fp8'", [("w", good, whole)], transport="fp8")
    refused("stats one of .* 'none'", [("w", good, whole)], stats="none")
    refused(
        "quantizes from torch.bfloat16, and compute_dtype=None",
        [("w", good, whole)],
        compute_dtype=None,
    )
    rotated = quantized("r", master, HybridQuantizer("nvfp4", Quantizer("nvfp4", rotation=True)))
    refused(
        r"r.columnwise is .*nvfp4\(RHT\), rotated, which mixes elements",
        [("w", good, whole), ("r", rotated, whole)],
    )
    stochastic = quantized(
        "s", master, HybridQuantizer(Quantizer("nvfp4", rounding="stochastic"), "mxfp8")
    )
    refused("s.rowwise is .*, rounded stochastically", [("s", stochastic, whole)])
    taken = quantized("t", master, hybrid)
    kept = taken.detach_master()
    refused("another optimizer holds the master of t", [("t", taken, whole)])
    assert kept is not None and good.state.weight_sync is None
    plan_weight_sync([("w", good, whole)], None)
    refused("another weight sync holds the master of w", [("w", good, whole)])
    with pytest.raises(ValueError, match="another weight sync"):
        good.detach_master()


def test_a_bad_plan_on_one_rank_is_refused_on_every_rank():
    """Otherwise the other ranks wait in the first collective."""
    master, hybrid = values(8, 32, dtype=torch.float32), HybridQuantizer("mxfp8", "nvfp4")
    for cuts, words in (
        ((0, 3, 255), "rank 1 cannot go on.*: w: the shards are of 255 elements"),
        (
            (0, 5, 256),
            r"w is .* cut at \(0, 3, 256\), values travel on rank 0 "
            r"and .* cut at \(0, 5, 256\), values travel on rank 1",
        ),
    ):
        bad = ShardMap(cuts)
        told = [None] * 2

        def on_rank(group):
            weight = quantized("w", master, hybrid)
            shards = bad if group.rank() else ShardMap((0, 3, 256))
            with pytest.raises(ValueError) as caught:
                plan_weight_sync([("w", weight, shards)], group)
            told[group.rank()] = str(caught.value)
            assert weight.state.weight_sync is None

        VirtualRanks(2).run(on_rank)
        assert re.search(words, told[0]) and told[1] == told[0], told


def test_parts_are_planned_alike_or_by_none():
    """Otherwise ranks of other parts wait in a cast, or a part has a scale that its layer does not
    mean."""
    master = values(8, 32, dtype=torch.float32)
    whole = ShardMap((0, 3, 256))

    def on_rank(ranks: Ranks, how: str) -> str:
        weight = quantized("w", master, HybridQuantizer("fp8_tensor", "mxfp8"))
        weight.state.tensor_group, told = ranks.tensor, "planned"
        items, parts, is_odd = (
            [SyncItem("w", weight, whole)],
            ranks.tensor,
            ranks.tensor.rank() == 1,
        )
        if how == "alone":
            parts = None
        elif how == "is_part" and is_odd:
            items = [items[0]._replace(is_part=False)]
        elif how == "one fails" and ranks.rank == 3:
            items = [items[0]._replace(shards=ShardMap((0, 3, 255)))]
        elif how == "other names" and is_odd:
            items = [items[0]._replace(name="v")]
        try:
            sync = plan_weight_sync(items, ranks.data, tensor_group=parts)
            assert "of whole tensors, over 2 parts" in sync.describe()
        except ValueError as error:
            told = str(error)
        assert (weight.state.weight_sync is None) == (told != "planned")
        return told

    alone = "w is one of 2 parts of a weight.*rowwise fp8_tensor.*pass tensor_group=, "
    alone += "the group of its layer"
    other_names = "ranks plan other weight syncs: rank 0 has w, .* where rank 1 has v, "
    for how, words in (
        ("well", ["planned"] * 4),
        ("alone", [alone] * 4),
        ("is_part", [f"rank [01] cannot go on, so no rank does: {alone}"] * 4),
        ("one fails", ["rank 1 cannot go on, so no rank does: w: the shards are of 255"] * 4),
        ("other names", [other_names] * 4),
    ):
        for got, want in zip(
            on_virtual_ranks(Sizes(data=2, tensor=2), lambda ranks, how=how: on_rank(ranks, how)),
            words,
        ):
            assert re.search(want, got), (how, got)


def test_a_weight_is_under_a_sync_or_under_fully_shard():
    """Otherwise one of the two gathers codes that the other has made, and products read those of an
    earlier step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def net() -> torch.nn.Module:
            with fq.quantized_model_init(fq.recipes.mxfp8()):
                return fq.convert(
                    torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), fq.recipes.mxfp8()
                )

        def plan(model: torch.nn.Module) -> WeightSync:
            return plan_weight_sync([("w", model[0].weight, ShardMap((0, 1024)))], dist.group.WORLD)

        synced, sharded = net(), fully_shard(net())
        sync = plan(synced)
        with pytest.raises(
            ValueError,
            match="published by a weight sync.*to fully_shard or to a weight sync, not to both",
        ):
            fully_shard(synced)
        assert isinstance(synced[0].weight, QuantizedWeight)
        sync.refresh(sync.init_masters())
        synced(torch.randn(4, 32))
        with pytest.raises(
            ValueError, match="w is a DTensor.*to fully_shard or to a weight sync, not to both"
        ):
            plan(sharded)
        sharded(torch.randn(4, 32))
    finally:
        dist.destroy_process_group()


def test_recipes_that_change_published_weights_are_refused():
    """Otherwise the next product finds formats that nobody has cast, or a recipe is half
    changed."""
    recipes, x = fq.recipes, values(4, 32)
    with fq.quantized_model_init(recipes.mxfp8()):
        model = torch.nn.Sequential(
            *(
                fq.Linear(
                    32, 32, bias=False, dtype=torch.bfloat16, recipe=recipes.mxfp8(), name=name
                )
                for name in ("free", "synced")
            )
        )
    sync = plan_weight_sync([("w", model[1].weight, ShardMap((0, 1024)))], None)
    sync.refresh(sync.init_masters())
    before = fq.state_dict(model)["fingerprint"], model(x)
    high_precision_later = recipes.schedule(recipes.mxfp8(), (5, None, recipes.identity()))
    for other in (
        recipes.hybrid("mxfp8", "nvfp4"),
        recipes.mxfp8(compute_dtype=None),
        high_precision_later,
    ):
        with pytest.raises(
            ValueError,
            match="synced.weight is published by a weight sync that was planned for .*mxfp8",
        ):
            fq.set_recipe(model, other)
        assert fq.state_dict(model)["fingerprint"] == before[0]
        assert_same_bytes(model(x), before[1], f"{other}")
    products = recipes.mxfp8(accuracy="exact")
    fq.set_recipe(model, products)
    assert model[1].recipe == products
    assert_same_bytes(model(x), before[1])


def test_bad_calls_change_nothing():
    """Otherwise a master of the wrong length moves every byte behind it, or a bound buffer
    overwrites its neighbour."""
    master = values(8, 32, dtype=torch.float32)
    weight = quantized("w", master, HybridQuantizer(DELAYED, "nvfp4"))
    sync = plan_weight_sync([("w", weight, ShardMap((0, 256)))], None, "codes")
    flat = master.reshape(-1)
    with pytest.raises(ValueError, match="first cast cannot be skipped"):
        sync.cast_([flat], skip=torch.tensor(0.0))
    sync.refresh([flat])
    with pytest.raises(RuntimeError, match="initial values are gone"):
        sync.init_masters()
    before = bytes_of(sync, [weight])
    for masters, words in (
        ([], "a master for each of 1 weights, got 0"),
        ([flat[1:]], r"owns the 256 elements \[0, 256\), got a master of 255"),
        ([flat.int()], "the master is torch.int32"),
        ([master.t()], "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            sync.cast_(masters)
    sizes = [b.nbytes for b in sync.buffers()]
    room = torch.zeros(sum(sizes) + 64, dtype=torch.uint8)
    for buffers, words in (
        ([room], "wants 2 buffers"),
        ([room[: sizes[0] - 1], room[512:]], "too small: wanted at least"),
        ([room[1:], room[2:]], "no multiple of 16"),
        ([room, room], "buffers overlap"),
        ([room.float(), room], r"wanted contiguous uint8"),
    ):
        with pytest.raises(ValueError, match=words):
            sync.bind(buffers)
    with pytest.raises(ValueError, match="fq.ROWWISE and fq.COLUMNWISE"):
        sync.gather(["rowwise"])
    assert (
        all(torch.equal(a, b) for a, b in zip(bytes_of(sync, [weight]), before))
        and sync.generation == 1
    )
    weight.storage_for(ROWWISE)


# What a trainer asks #


def test_parameters_describe_themselves():
    """Otherwise a trainer lays out buffers by a guess."""
    facts = describe(quantized("w", torch.zeros(8, 32), HybridQuantizer("mxfp8", "nvfp4")))
    assert (
        facts.is_quantized
        and facts.shape == (8, 32)
        and facts.wire_bits == {"rowwise": 8, "columnwise": 4}
    )
    square = describe(
        quantized("w", torch.zeros(8, 32), HybridQuantizer("nvfp4_16x16", "nvfp4_16x16"))
    )
    assert (
        square.wire_bits == {"rowwise": 4}
        and square.formats["columnwise"] == "nvfp4_16x16 (the rowwise storage)"
    )
    derived = describe(
        quantized("w", torch.zeros(8, 32), HybridQuantizer("mxfp8", "nvfp4", "rowwise_dequantized"))
    )
    assert derived.formats["columnwise"] == "nvfp4 (of the decoded rowwise storage)"
    assert not describe(torch.nn.Parameter(torch.zeros(3))).is_quantized


def test_token_alignment_holds_for_every_part_of_a_hybrid():
    """Otherwise experts are padded for one of the formats, and blocks of the other cross into the
    next expert."""
    recipes = fq.recipes
    for recipe, want in (
        (recipes.mxfp8(), 32),
        (recipes.hybrid("mxfp8", "nvfp4"), 16),
        (recipes.hybrid("nvfp4", "mxfp8"), 32),
        (recipes.fp8_block(), 128),
        (recipes.fp8_current(), 1),
        (recipes.identity(), 1),
        (recipes.hybrid("mxfp8", "fp8_block"), 128),
    ):
        assert token_alignment(recipe, "layers.0.up") == want, recipe
