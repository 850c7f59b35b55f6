# SPDX-License-Identifier: Apache-2.0
"""Every quantized weight of a model, whatever module has it, is planned, held, fingerprinted,
verified, and compared among ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import kinds
from dist_tests.laws import assert_same_bytes
from dist_tests.multi.harness import on_cpu, run_ranks
from dist_tests.multi.test_agreement import what_each_says
from fsdp_quant import recipes
from fsdp_quant.tensor.model_weights import ModelWeight, quantized_weights

pytest.importorskip("transformers")


def layer_names(weight: ModelWeight) -> list[str]:
    """Qualified names of its layers, as `fq.plan` prints them."""
    if not weight.state.packed:
        return [weight.path]
    first = weight.module.first_expert
    experts = range(first, first + len(weight.layers))
    return [f"{weight.path}.{e}".lstrip(".") for e in experts]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_the_iterator_yields_the_matrices_that_the_plan_prints(kind: str):
    """If false, a kind of weight is multiplied as codes, and forgotten by all that iterates over
    weights."""
    model = kinds.converted(kind, "mxfp8")
    weights = quantized_weights(model)
    planned = list(dict.fromkeys(row.module for row in fq.plan(model).gemms))
    assert sorted(name for w in weights for name in layer_names(w)) == sorted(planned)
    for weight in weights:
        assert model.get_parameter(weight.name) is weight.parameter
        states = [layer.runtime.weight_state for layer in weight.layers]
        assert states == weight.state.matrices
    if kind in kinds.PLAIN:
        model.requires_grad_(False)
        if kind == "linear":
            fq.freeze(model)
        assert [w.name for w in quantized_weights(model)] == [w.name for w in weights]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_other_values_of_every_kind_of_weight_are_found(kind: str, tmp_path: Path, capsys):
    """If false, damaged or other weights pass `verify`, or a load."""
    model = kinds.converted(kind, "mxfp8")
    state = fq.state_dict(model)
    fq.load_state_dict(model, state)
    count = len(state["codes"])
    dcp.save({"model": model.state_dict(), "fq": state}, checkpoint_id=tmp_path / "whole")
    verified = fq.checkpoint.verify(tmp_path / "whole")
    assert not verified.problems
    assert f"codes of {count} of {count} weights encoded again" in str(verified)
    for weight in quantized_weights(model):
        values = {name: t.clone() for name, t in model.state_dict().items()}
        with torch.no_grad():
            weight.parameter.copy_(torch.randn(weight.parameter.shape))
        with pytest.raises(ValueError, match="are not those that were saved"):
            fq.load_state_dict(model, state)
        folder = tmp_path / weight.name
        dcp.save({"model": model.state_dict(), "fq": state}, checkpoint_id=folder)
        assert fq.checkpoint.verify(folder).problems, weight.name
        model.load_state_dict(values)
    fq.load_state_dict(model, state)


def kinds_are_shared(rank: int, world: int) -> None:
    """One function of both laws: each rank imports the modules once."""
    for kind in kinds.KINDS:
        held_and_fingerprinted(kind)
    for kind in kinds.PLAIN:
        compared(kind, rank, world)


def held_and_fingerprinted(kind: str) -> None:
    whole, sharded = kinds.converted(kind, "mxfp8"), kinds.converted(kind, "mxfp8")
    fully_shard(sharded)
    prints = fq.checkpoint.fingerprints(sharded)
    assert prints == fq.checkpoint.fingerprints(whole), kind
    assert len(prints) == sum(len(w.state.matrices) for w in quantized_weights(whole)), kind
    want = kinds.step(whole)
    with fq.hold(sharded):
        for got in (kinds.step(sharded), kinds.step(sharded)):
            for a, b in zip(got, want, strict=True):
                assert_same_bytes(a, b, f"{kind}: held shards")
        if kind != "parameters":  # they are codes already
            with torch.no_grad():
                quantized_weights(sharded)[0].parameter.mul_(2)
            with pytest.raises(fq.StaleWeightError, match="was written inside fq.hold"):
                kinds.step(sharded)
    assert all(w.state.held is None for w in quantized_weights(sharded))


def compared(kind: str, rank: int, world: int) -> None:
    mx, other = recipes.mxfp8(), recipes.fp8_row()
    first = quantized_weights(kinds.converted(kind, mx))[0].path
    odd = recipes.per_layer(mx, {first: other})
    later = recipes.schedule(mx, (5, None, other))
    for recipe, said in ((odd, "of fp8_row("), (later, " of schedule(")):
        model = kinds.converted(kind, recipe if rank == world - 1 else mx)
        fully_shard(model)
        texts = what_each_says(lambda model=model: model(kinds.batch()))
        assert texts == [texts[0]] * world and texts[0] is not None, (kind, texts)
        assert texts[0].startswith("ranks disagree: ") and said in texts[0], (kind, texts)


@on_cpu
def test_ranks_share_every_kind_of_weight():
    """If false, fq.hold of a sharded model raises though nothing was written, or multiplies what
    was; or a state does not name the codes of a weight, or names others for other world sizes; or
    ranks train weights of other formats in silence, or wait for each other at the step in which one
    of them switches."""
    run_ranks(2, kinds_are_shared)
