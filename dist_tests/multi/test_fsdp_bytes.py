# SPDX-License-Identifier: Apache-2.0
"""Law 3: codes gathered by FSDP2 are the bytes of quantizing the whole weight, for every pair, cut
and world."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from fsdp_quant.formats import COLUMNWISE, format_of
from fsdp_quant.quantizer import HybridQuantizer, Quantizer


class Parallel(nn.Module):
    """Linear layers of many row counts beside each other, in one FSDP group."""

    def __init__(self, rows: list[int], k: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for n in rows)

    def forward(self, x):
        return sum(layer(x).sum(-1, keepdim=True) for layer in self.layers)


def _gathered_equals_whole(rank: int, world: int, pairs, k: int) -> int:
    checked = 0
    rows = sorted({1, 31, 33, 96, 130, 5 * world + 1, max(world - 1, 1)})
    for i, (row, col) in enumerate(pairs):
        torch.manual_seed(i)
        net = Parallel(rows, k)
        with torch.no_grad():
            for layer in net.layers:
                layer.weight.copy_(
                    laws.values(
                        *layer.weight.shape, seed=i, kind=("gauss", "outliers", "heavy")[i % 3]
                    )
                )
        whole = [layer.weight.detach().clone() for layer in net.layers]
        recipe = nets.pair_recipe(row, col)
        fq.convert(net, recipe)
        outer = nn.Sequential(fully_shard(net))
        fully_shard(outer)
        with nets.recorded_weights() as seen:
            outer(laws.values(4, k, dtype=torch.float32).requires_grad_()).sum().backward()
        assert len(seen) == 2 * len(rows)
        expected = {w.shape[0]: nets.expected_storages(recipe, "", w) for w in whole}
        for direction, storage, kind in seen:
            assert kind == "QuantizedTensor", f"gathered a {kind}"
            want = expected[storage.shape[0]][direction]
            laws.assert_same_storage(
                storage, want, f"world {world}, {row}/{col}, rows {storage.shape[0]}, {direction}"
            )
            checked += 1
    return checked


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gather_equals_whole_for_every_pair(world):
    """If false, a model's weights depend on how many ranks it is sharded over."""
    # together every pair
    pairs = laws.diagonals(*{1: (1, 5, 7, 9), 2: (2, 6, 8, 10), 3: (0, 3), 4: (4,)}[world])
    others = [q.fmt for q in laws.OTHER.values()]  # and rows that are in no table
    pairs += list(zip(others, [*others[world:], *others[:world]]))
    results = run_ranks(world, _gathered_equals_whole, pairs, 40)
    assert all(r == results[0] > 2 * len(pairs) for r in results)


def _special_values(rank: int, world: int) -> None:
    """NaN, infinities, zero blocks and subnormals in one rank's rows, with blocks cut by the
    boundaries."""
    for name in laws.FORMAT_NAMES[1:]:
        for value in (float("nan"), float("inf"), -float("inf"), 0.0, 1e-40):
            recipe = nets.pair_recipe(name, name)
            layer = nn.Linear(40, 33, bias=False)
            with torch.no_grad():
                layer.weight.copy_(laws.values(33, 40))
                layer.weight[20:22, 3:9] = value
            whole = layer.weight.detach().clone()
            net = nn.Sequential(layer)
            fq.convert(net, recipe)
            fully_shard(net[0])
            fully_shard(net)
            with nets.recorded_weights() as seen:
                net(laws.values(4, 40, dtype=torch.float32).requires_grad_()).sum().backward()
            expected = nets.expected_storages(recipe, "0", whole)
            for direction, storage, _ in seen:
                laws.assert_same_storage(
                    storage, expected[direction], f"{name} with {value} {direction}"
                )


def test_gather_of_non_finite_weights_equals_whole():
    """If false, an overflow on one rank is seen by that rank only."""
    run_ranks(3, _special_values)


def _derived(rank: int, world: int) -> None:
    for row, col in [
        ("mxfp8", "nvfp4"),
        ("nvfp4", "fp8_tensor"),
        ("fp8_128x128", "mxfp8"),
        ("fp8_row", "identity"),
    ]:
        recipe = fq.Recipe("derived", _derived_slots, (("col", col), ("row", row)))
        net = nets.build()
        state = {
            n: m.weight.detach().clone() for n, m in net.named_modules() if isinstance(m, nn.Linear)
        }
        fq.convert(net, recipe)
        nets.shard(net)
        with nets.recorded_weights() as seen, nets.recorded_collectives() as wire:
            net(nets.batch()).sum().backward()
        for direction, storage, _ in seen:
            weight = next(w for w in state.values() if tuple(w.shape) == tuple(storage.shape))
            rowwise = HybridQuantizer(row, row).quantize(weight.bfloat16()).rowwise
            want = rowwise
            if direction is COLUMNWISE:
                source = rowwise.dequantize(torch.float32)
                source = source.bfloat16() if col != "identity" else source
                want = HybridQuantizer(col, col).quantize(source).columnwise
            laws.assert_same_storage(storage, want, f"{row}->{col} {direction}")
        gathers = [size for kind, size in wire if kind == "all_gather"]
        assert gathers[1:3] == gathers[3:5][::-1], (
            f"the backward gathers rowwise bytes again: {gathers}"
        )


def _derived_slots(role, row: str, col: str):
    return HybridQuantizer(
        Quantizer(row),
        Quantizer(col),
        "rowwise_dequantized" if role.tensor_type == "weight" else "original",
    )


def test_derived_columnwise_is_made_from_gathered_rowwise_bytes():
    """If false, rowwise_dequantized multiplies other values in the backward, or gathers both
    directions."""
    run_ranks(3, _derived)


def _refused_weight(rank: int, world: int, quantizer: fq.HybridQuantizer) -> str:
    net = nets.build()
    fq.convert(net, fq.recipes.mxfp8())
    for m in net.modules():
        if isinstance(m, fq.Linear):
            m.runtime.plan = replace(m.plan, weight=quantizer)
            m._weight_state.set_quantizer(quantizer)
    nets.shard(net)
    try:
        net(nets.batch())
    except ValueError as error:
        return str(error)
    return "not refused"


REFUSED = {
    "rotation mixes rows": fq.HybridQuantizer("nvfp4", fq.Quantizer("nvfp4", rotation=True)),
    "cut blocks of 16 rows": fq.HybridQuantizer(
        *[fq.Quantizer(format_of("nvfp4_16x16", four_over_six="mse"))] * 2
    ),
}


def _gathered_by_error(pairs: list[tuple[fq.Format, fq.Format]]) -> None:
    for row, col in pairs:
        layer = nn.Linear(40, 96, bias=False)
        with torch.no_grad():
            layer.weight.copy_(laws.values(96, 40))
        whole, recipe = layer.weight.detach().clone(), nets.pair_recipe(row, col)
        net = fully_shard(fq.convert(nn.Sequential(layer), recipe))
        with nets.recorded_weights() as seen:
            net(laws.values(4, 40, dtype=torch.float32).requires_grad_()).sum().backward()
        expected = nets.expected_storages(recipe, "0", whole)
        for direction, storage, _ in seen:
            laws.assert_same_storage(storage, expected[direction], f"{row}/{col} {direction}")


def _refused_weights(rank: int, world: int) -> list[str]:
    vector, square = (format_of(name, four_over_six="mse") for name in ("nvfp4", "nvfp4_16x16"))
    _gathered_by_error([(vector, square), (square, vector)])
    return [_refused_weight(rank, world, quantizer) for quantizer in REFUSED.values()]


def test_layout_that_breaks_the_law_is_refused_alike_on_every_rank():
    """If false, one rank raises and the others wait for it until a timeout; or scales that a
    block's error chooses are refused, or other ones, where no cut divides a block."""
    start = time.time()
    errors = run_ranks(3, _refused_weights)
    for message, of_ranks in zip(REFUSED, zip(*errors)):
        assert len(set(of_ranks)) == 1, of_ranks
        assert message in of_ranks[0] and ".weight" in of_ranks[0], of_ranks
    assert time.time() - start < 60


def _int_reshard(rank: int, world: int) -> str:
    net = nets.build()
    fq.convert(net, fq.recipes.mxfp8())
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(net)
    try:
        net(nets.batch())
    except ValueError as error:
        return str(error)
    return "not refused"


def test_reshard_after_forward_int_is_refused_clearly():
    """If false, torch fails deep inside its gather with a count of tensors."""
    errors = run_ranks(4, _int_reshard)
    assert len(set(errors)) == 1 and "reshard_after_forward=<int>" in errors[0], errors


def _dim_1(rank: int, world: int) -> str:
    net = fq.convert(nets.build(hidden=(32, 48), out=4), fq.recipes.mxfp8())
    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}
    try:
        nets.shard(net, **by_columns)(nets.batch())
    except ValueError as error:
        return str(error)
    return "not refused"


def test_sharding_along_columns_is_refused_alike_on_every_rank():
    """If false, codes and scales of columns are gathered as those of rows."""
    errors = run_ranks(2, _dim_1)
    assert (
        len(set(errors)) == 1 and "sharded along dim 1" in errors[0] and ".weight" in errors[0]
    ), errors
