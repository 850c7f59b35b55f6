"""Quantized parameters under `fully_shard`: bytes, updates and checkpoints of high-precision ones; masters in the optimizer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.multi.test_fsdp_bytes import Parallel, _derived_slots
from dist_tests.multi.test_fsdp_training import RECIPES
from dist_tests.single import hopper
from fsdp_quant.counters import counters
from fsdp_quant.recipe import Role
from fsdp_quant.tensor.fsdp_hooks import FSDPHooks
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.torch_compat import local_of

DERIVED = fq.Recipe("derived", _derived_slots, (("col", "nvfp4"), ("row", "mxfp8")))
ROLE = Role("linear", "weight", "blocks.0.up")
ALL = RECIPES | {"delayed": fq.recipes.fp8_delayed(length=2), "derived": DERIVED}


def quantized(net: nn.Module, recipe: fq.Recipe) -> nn.Module:
    with fq.quantized_model_init(recipe):
        return fq.convert(net, recipe)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local high-precision values of a parameter or of an optimizer's state."""
    local = local_of(tensor)
    return local.inner if isinstance(local, FSDPHooks) else local.detach()


def _adam(net: nn.Module, **options) -> fq.optim.FusedAdam:
    return fq.optim.FusedAdam(net.parameters(), lr=1e-2, **options)


def _models(recipe: fq.Recipe, dtype: torch.dtype = torch.float32, **options):
    """(ordinary, quantized) models of the same weights, sharded."""
    ordinary, ours = nets.build().to(dtype), nets.build().to(dtype)
    return nets.shard(fq.convert(ordinary, recipe), **options), nets.shard(quantized(ours, recipe), **options)


def _same_bytes_on_the_wire(rank: int, world: int, pairs, k: int) -> int:
    """Codes as products read them, before and after the optimizer took the masters, against the whole weight's."""
    checked = 0
    rows = sorted({1, 31, 33, 96, 5 * world + 1, max(world - 1, 1)})
    for i, (row, col) in enumerate(pairs):
        torch.manual_seed(i)
        net, recipe = Parallel(rows, k), nets.pair_recipe(row, col)
        whole = [layer.weight.detach().clone() for layer in net.layers]
        outer = nn.Sequential(fully_shard(quantized(net, recipe)))
        fully_shard(outer)
        for taken in (False, True):
            if taken:
                optimizer = fq.optim.FusedAdam(outer.parameters(), lr=0.0, weight_decay=0.0)
            x = laws.values(4, k, dtype=torch.float32).requires_grad_()
            with nets.recorded_weights() as seen:
                outer(x).sum().backward()
            for direction, storage, kind in seen:
                assert kind == "QuantizedTensor", f"gathered a {kind}"
                weight = next(w for w in whole if w.shape[0] == storage.shape[0])
                want = nets.expected_storages(recipe, "", weight)[direction]
                laws.assert_same_storage(
                    storage, want, f"world {world}, {row}/{col}, rows {storage.shape[0]}, {direction}, taken {taken}"
                )
                checked += 1
        optimizer.step()
    return checked


@pytest.mark.parametrize("world", [1, 3, 4])
def test_quantized_parameters_gather_the_bytes_of_the_whole_weight(world):
    """If false, a quantized parameter is another weight than a high-precision one, or depends on the number of ranks."""
    results = run_ranks(world, _same_bytes_on_the_wire, laws.sample(laws.PAIRS, 29), 40)
    assert all(r == results[0] > 0 for r in results)


def _trains_alike(rank: int, world: int) -> None:
    pairs = {f"{r}/{c}": nets.pair_recipe(r, c) for r, c in laws.sample(laws.PAIRS, 47)}
    for label, recipe in (dict(laws.every_second(list(ALL.items()), world)) | pairs).items():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if label in ("delayed", "nvfp4") else 1]:
            ordinary, ours = _models(recipe, dtype)
            a, b = _adam(ordinary), _adam(ours)
            for step in range(3):
                with fq.token_offset(0):
                    results = []
                    for net, optimizer in ((ordinary, a), (ours, b)):
                        fq.begin_step(step)
                        counters.reset()
                        with nets.recorded_collectives() as wire:
                            y = net(nets.batch(step, rank=rank).to(dtype))
                            y.square().mean().backward()
                        gathers = [seen for seen in wire if seen[0] == "all_gather"]
                        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
                        results.append((y.detach(), gathers, counters.of("gather"), fq.plan(net).weight_bytes))
                laws.assert_same_bytes(results[1][0], results[0][0], f"world {world}, {label}, {dtype}: output of step {step}")
                assert results[0][1:] == results[1][1:], f"{label}: gathers differ: {results}"
            for (name, p), q in zip(ordinary.named_parameters(), ours.parameters()):
                master = a.state[p].get("master", p), b.state[q].get("master", q)
                want, got = (plain(t) for t in master)
                laws.assert_same_bytes(got, want, f"world {world}, {label}, {dtype}: master of {name}")
                for moment in ("exp_avg", "exp_avg_sq"):
                    laws.assert_same_bytes(
                        b.state[q][moment]._local_tensor, a.state[p][moment]._local_tensor, f"{label}: {moment} of {name}"
                    )


@pytest.mark.parametrize("world", [2, 3])
def test_quantized_parameters_train_as_high_precision_ones(world):
    """If false, a low-precision parameter loses updates, or its codes are those of another step."""
    run_ranks(world, _trains_alike)


def _one_collective(rank: int, world: int) -> list:
    ordinary, ours = _models(RECIPES["nvfp4"])
    optimizer = _adam(ours)
    nets.train_step(ours, optimizer, 0, rank)
    with nets.recorded_collectives() as seen:
        y = ours(nets.batch(1, rank=rank))
        y.square().mean().backward()
        assert not [kind for kind, _ in seen if kind == "all_reduce"], "statistics are shared by the step, not by a gather"
        del seen[:]
        optimizer.step()
        assert [kind for kind, _ in seen] == ["all_reduce"], f"one collective a shard group and step: {seen}"
        ours(nets.batch(2, rank=rank))
    return seen


def test_a_step_shares_statistics_in_one_collective():
    """If false, ranks pay a collective a weight, or those with empty shards hang the others."""
    lists = run_ranks(4, _one_collective)
    assert all(seen == lists[0] for seen in lists)


def _masters_are_let_go(rank: int, world: int) -> None:
    torch.manual_seed(3)
    cpu = quantized(nets.Net(), RECIPES["mxfp8/nvfp4"])
    nets.shard(cpu)
    with torch.device("meta"):
        meta = quantized(nets.Net(), RECIPES["mxfp8/nvfp4"])
    nets.shard(meta)
    try:
        _adam(meta)
        raise AssertionError("an optimizer took masters from the meta device")
    except ValueError as error:
        assert "meta device" in str(error)
    meta.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in meta.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, p), q in zip(cpu.named_parameters(), meta.parameters()):
        values = [plain(t) for t in (p, q)]
        assert values[0].numel() == 0 or values[1].abs().max() > 0 or "bias" in name, f"{name} was not initialized"
        with torch.no_grad():
            q._local_tensor.copy_(values[0])
    a, b = _adam(cpu), _adam(meta)
    for net in (cpu, meta):
        weights = [local_of(p) for p in net.parameters() if isinstance(local_of(p), QuantizedTensor)]
        assert len(weights) == 5
        assert all(w._content.values is None for w in weights), "initial values were kept beside the optimizer's masters"
    for step in range(2):
        got, want = nets.train_step(meta, b, step), nets.train_step(cpu, a, step)
        laws.assert_same_bytes(got, want, f"meta against CPU initialization, step {step}")
    kept = [weakref.ref(o) for o in (meta, *meta.parameters(), *(local_of(s["exp_avg"]) for s in b.state.values()))]
    del net, weights, module, p, q, meta, b
    gc.collect()
    assert not [type(o).__name__ for ref in kept if (o := ref()) is not None], "alive after their model"


def test_masters_come_from_initial_values_and_are_held_once():
    """If false, deferred initialization trains other weights, or a quantized model needs more memory than a bf16 one."""
    run_ranks(3, _masters_are_let_go)


def _refused(rank: int, world: int) -> str:
    _, net = _models(RECIPES["nvfp4"])
    optimizer = torch.optim.AdamW(net.parameters())
    net(nets.batch(rank=rank)).square().mean().backward()
    before = nets.full_state(net)
    try:
        optimizer.step()
    except ValueError as error:
        for name, value in nets.full_state(net).items():
            laws.assert_same_bytes(value, before[name], f"{name} after a refused step")
        return str(error)
    return "not refused"


def test_an_optimizer_without_masters_is_refused_at_its_step():
    """If false, updates below a format's step are lost without a word."""
    errors = run_ranks(2, _refused)
    assert len(set(errors)) == 1 and "fq.optim.FusedAdam" in errors[0] and "AdamW" in errors[0], errors


def _checkpoints(rank: int, world: int, folder: str) -> None:
    """Ten steps = five, save, load into a model of either kind, five."""
    recipe, final = RECIPES["mxfp8/nvfp4"], {}
    for source in (0, 1):
        net = _models(recipe)[source]
        optimizer = _adam(net)
        for step in range(3):
            nets.train_step(net, optimizer, step, rank)
        model, optim = get_state_dict(net, optimizer)
        assert all(type(local_of(v)) is torch.Tensor for v in model.values()), "a checkpoint holds a class of ours"
        path = f"{folder}/{source}"
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
        for step in range(3, 5):
            nets.train_step(net, optimizer, step, rank)
        final["straight", source] = nets.full_state(net)
        for target in (0, 1):
            other = _models(recipe)[target]
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(0.5)
            again = _adam(other)
            model, optim = get_state_dict(other, again)
            dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
            set_state_dict(other, again, model_state_dict=model, optim_state_dict=optim)
            for step in range(3, 5):
                nets.train_step(other, again, step, rank)
            final[source, target] = nets.full_state(other)
        plain = {k: v.full_tensor() for k, v in get_state_dict(net, optimizer)[0].items()}
        nn.Module.load_state_dict(nets.build(), plain)  # strict, into nn.Linear
    want = final["straight", 0]
    for label, state in final.items():
        for name, value in want.items():
            laws.assert_same_bytes(state[name], value, f"{label}: {name}")


def test_checkpoints_pass_between_both_kinds_of_parameters(tmp_path):
    """If false, a run cannot resume, or a quantized model's checkpoint loses what its codes cannot say."""
    run_ranks(2, _checkpoints, str(tmp_path))


def _resharded(rank: int, world: int, folder: str, save: bool) -> dict | None:
    net = _models(RECIPES["nvfp4"])[1]
    optimizer = _adam(net, moment_dtype=torch.bfloat16)
    if save:
        for step in range(2):
            nets.train_step(net, optimizer, step)
    model, optim = get_state_dict(net, optimizer)
    if save:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    else:
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    state = nets.full_state(net)
    for name, p in net.named_parameters():
        state |= {f"{name}.{k}": optimizer.state[p][k].full_tensor() for k in ("exp_avg", "exp_avg_sq")}
    assert all(v.dtype is torch.bfloat16 for k, v in state.items() if "exp_avg" in k)
    with nets.recorded_weights() as seen:
        net(nets.batch())
    return state | {f"codes {i}": s.data.clone() for i, (_, s, _) in enumerate(seen)}


def test_checkpoints_load_at_another_world_size(tmp_path):
    """If false, masters or moments depend on how many ranks saved them."""
    saved = run_ranks(3, _resharded, str(tmp_path), True)[0]
    loaded = run_ranks(2, _resharded, str(tmp_path), False)[0]
    for name, value in saved.items():
        laws.assert_same_bytes(loaded[name], value, f"{name} of 3 ranks, loaded by 2")


def _events(rank: int, world: int) -> None:
    """Changes by hand, loads and changes of recipe reach the codes, as those of a fresh model."""
    net, recipe = _models(RECIPES["mxfp8/nvfp4"])[1], RECIPES["mxfp8/nvfp4"]
    optimizer = _adam(net)
    nets.train_step(net, optimizer, 0)

    def check(what: str) -> None:
        nets.assert_equals_fresh(net, recipe, what)

    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    fq.sync(net)
    check("an in-place edit and fq.sync")
    net.load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()})
    check("load_state_dict")
    for recipe in (RECIPES["fp8_block"], RECIPES["nvfp4"], fq.recipes.identity(), DERIVED):
        fq.set_recipe(net, recipe)
        check(f"set_recipe({recipe})")
        nets.train_step(net, optimizer, 1)
        check(f"a step under {recipe}")


def test_events_reach_the_codes():
    """If false, a gather sends codes of an earlier master or recipe."""
    run_ranks(3, _events)


def _encodes_in_groups(rank: int, world: int) -> None:
    """On an emulated GPU: a step encodes all weights of an encoding in one launch, and gathers encode nothing.

    Adam takes two: of parameters that are their masters rounded, and of masters alone.
    """
    for label in ("mxfp8/nvfp4", "fp8_current/fp8_row", "fp8_block"):
        with hopper.emulated() as gpu:
            outputs = []
            for kind in (fq.convert, quantized):
                net = nets.shard(kind(nets.build(hidden=(64, 64)).to(torch.bfloat16), ALL[label]))
                optimizer = _adam(net)
                for step in range(3):
                    fq.begin_step(step)
                    gpu.calls.clear()
                    y = net(nets.batch(0, rows=16).to(torch.bfloat16))
                    y.float().square().mean().backward()
                    gathered = gpu.count("quantize_group")
                    optimizer.step()
                outputs.append(y)
            launches, wanted = [gpu.count(name) for name in ("quantize_group", "adam")], len(ALL[label].hybrid(ROLE).encodings)
            assert [gathered, *launches] == [0, wanted, 2], f"{label}: {gathered} {launches}, {wanted} encodings"
            laws.assert_same_bytes(outputs[1], outputs[0], f"{label}: output")


def test_a_step_encodes_all_weights_at_once():
    """If false, the write-back costs the host a launch a weight, or a gather encodes again."""
    run_ranks(2, _encodes_in_groups)


def _skipped(rank: int, world: int) -> None:
    for capturable in (False, True):
        net = _models(RECIPES["fp8_current/fp8_row"])[1]
        optimizer = _adam(net, capturable=capturable)
        nets.train_step(net, optimizer, 0)
        before = nets.full_state(net), [t.clone() for s in optimizer.state.values() for t in map(local_of, s.values())]
        net(nets.batch(1)).square().mean().backward()
        optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.full((1,), 2.0)
        optimizer.step()
        after = nets.full_state(net), [t.clone() for s in optimizer.state.values() for t in map(local_of, s.values())]
        for name, value in before[0].items():
            laws.assert_same_bytes(after[0][name], value, f"{name} after a skipped step")
        for got, want in zip(after[1], before[1]):
            laws.assert_same_bytes(got, want, "optimizer state after a skipped step")


def test_a_skipped_step_changes_nothing():
    """If false, an overflow found by a GradScaler enters the masters or moments."""
    run_ranks(2, _skipped)
