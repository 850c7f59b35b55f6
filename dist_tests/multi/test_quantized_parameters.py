# SPDX-License-Identifier: Apache-2.0
"""Quantized parameters under `fully_shard`: bytes, updates and checkpoints of high-precision ones;
masters in the optimizer."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, on_cpu, run_ranks
from dist_tests.multi.test_fsdp_bytes import Parallel, _derived_slots
from dist_tests.multi.test_fsdp_features import FEATURES, Feature, mesh, named, refusals
from dist_tests.multi.test_fsdp_features import RECIPES as MODES
from dist_tests.multi.test_fsdp_training import RECIPES
from dist_tests.single import hopper
from fsdp_quant.counters import counters
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.recipe import Role
from fsdp_quant.tensor.fsdp_hooks import FSDPHooks
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.torch_compat import local_of, managed_params_of

DERIVED = fq.Recipe("derived", _derived_slots, (("col", "nvfp4"), ("row", "mxfp8")))
ROLE = Role("linear", "weight", "blocks.0.up")
ALL = RECIPES | {"delayed": fq.recipes.fp8_delayed(length=2), "derived": DERIVED}
BOTH_DTYPES = ("delayed", "nvfp4") if laws.EVERYTHING else ("nvfp4",)


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
    return nets.shard(fq.convert(ordinary, recipe), **options), nets.shard(
        quantized(ours, recipe), **options
    )


def _same_bytes_on_the_wire(rank: int, world: int, pairs, k: int) -> int:
    """Codes as products read them, before and after the optimizer took the masters, against the
    whole weight's."""
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
                    storage,
                    want,
                    f"world {world}, {row}/{col}, rows {storage.shape[0]}, {direction}, taken "
                    f"{taken}",
                )
                checked += 1
        optimizer.step()
    return checked


@pytest.mark.parametrize("world", laws.every_second([1, 3, 4], 0))
def test_quantized_parameters_gather_the_bytes_of_the_whole_weight(world):
    """If false, a quantized parameter is another weight than a high-precision one, or depends on
    the number of ranks."""
    results = run_ranks(world, _same_bytes_on_the_wire, laws.sample(laws.PAIRS, 29), 40)
    assert all(r == results[0] > 0 for r in results)


def _trains_alike(rank: int, world: int) -> None:
    pairs = {f"{r}/{c}": nets.pair_recipe(r, c) for r, c in laws.sample(laws.PAIRS, 61)}
    for label, recipe in (dict(laws.every_second(list(ALL.items()), world)) | pairs).items():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if label in BOTH_DTYPES else 1]:
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
                        results.append(
                            (y.detach(), gathers, counters.of("gather"), fq.plan(net).weight_bytes)
                        )
                laws.assert_same_bytes(
                    results[1][0],
                    results[0][0],
                    f"world {world}, {label}, {dtype}: output of step {step}",
                )
                assert results[0][1:] == results[1][1:], f"{label}: gathers differ: {results}"
            for (name, p), q in zip(ordinary.named_parameters(), ours.parameters()):
                master = a.state[p].get("master", p), b.state[q].get("master", q)
                want, got = (plain(t) for t in master)
                laws.assert_same_bytes(
                    got, want, f"world {world}, {label}, {dtype}: master of {name}"
                )
                for moment in ("exp_avg", "exp_avg_sq"):
                    laws.assert_same_bytes(
                        b.state[q][moment]._local_tensor,
                        a.state[p][moment]._local_tensor,
                        f"{label}: {moment} of {name}",
                    )


@pytest.mark.parametrize("world", laws.every_second([2, 3], 1))
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
        assert not [kind for kind, _ in seen if kind == "all_reduce"], (
            "statistics are shared by the step, not by a gather"
        )
        del seen[:]
        optimizer.step()
        assert [kind for kind, _ in seen] == ["all_reduce"], (
            f"one collective a shard group and step: {seen}"
        )
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
    meta.to_empty(device=DEVICE)
    torch.manual_seed(3)
    for module in meta.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, p), q in zip(cpu.named_parameters(), meta.parameters()):
        values = [plain(t) for t in (p, q)]
        assert values[0].numel() == 0 or values[1].abs().max() > 0 or "bias" in name, (
            f"{name} was not initialized"
        )
        with torch.no_grad():
            q._local_tensor.copy_(values[0])
    a, b = _adam(cpu), _adam(meta)
    for net in (cpu, meta):
        weights = [
            local_of(p) for p in net.parameters() if isinstance(local_of(p), QuantizedTensor)
        ]
        assert len(weights) == 5
        assert all(w._content.values is None for w in weights), (
            "initial values were kept beside the optimizer's masters"
        )
    for step in range(2):
        got, want = nets.train_step(meta, b, step), nets.train_step(cpu, a, step)
        laws.assert_same_bytes(got, want, f"meta against CPU initialization, step {step}")
    kept = [
        weakref.ref(o)
        for o in (meta, *meta.parameters(), *(local_of(s["exp_avg"]) for s in b.state.values()))
    ]
    del net, weights, module, p, q, meta, b
    gc.collect()
    assert not [type(o).__name__ for ref in kept if (o := ref()) is not None], (
        "alive after their model"
    )


def test_masters_come_from_initial_values_and_are_held_once():
    """If false, deferred initialization trains other weights, or a quantized model needs more
    memory than a bf16 one."""
    run_ranks(3, _masters_are_let_go)


def _refused(rank: int, world: int) -> list[str]:
    """What ordinary parameters are refused, and an optimizer without masters; masters that are gone
    with theirs."""

    def without_masters(net: nn.Module) -> list:
        net(nets.batch(rank=rank)).square().mean().backward()
        optimizer = torch.optim.AdamW(net.parameters())
        before = {name: plain(p).clone() for name, p in net.named_parameters()}

        def step() -> None:
            try:
                optimizer.step()
            finally:
                for name, p in net.named_parameters():
                    laws.assert_same_bytes(plain(p), before[name], f"{name} after a refused step")
                net.zero_grad()

        return [step, lambda: fq.optim.FusedAdam(net.parameters())]

    errors = refusals(rank, world, quantized, fq.optim.FusedAdam, without_masters)
    net = _models(RECIPES["nvfp4"])[1]
    optimizer = _adam(net)
    want = nets.train_step(net, optimizer, 0), net(nets.batch())
    del optimizer
    gc.collect()
    laws.assert_same_bytes(net(nets.batch()), want[1], "codes of a model whose masters are gone")
    saved = net.state_dict()["head.weight"].full_tensor()
    laws.assert_same_bytes(
        saved, net.head.weight.full_tensor(), "a parameter that is saved without its master"
    )
    for use in (lambda: torch.nn.init.zeros_(net.head.weight), lambda: _adam(net)):
        try:
            use()
        except (StaleWeightError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_refusals_of_quantized_parameters_are_the_same_on_every_rank():
    """If false, updates below a format's step are lost without a word, or one rank raises while
    another waits."""
    results = run_ranks(2, _refused)
    wanted = (
        "gathered now",
        "fq.set_recipe",
        "another",
        "AdamW holds no fp32 master",
        "another optimizer holds",
        "gone",
        "",
    )
    assert results[0] == results[1] and len(results[0]) == len(wanted), results
    for text, part in zip(results[0], wanted):
        assert part in text, (part, text)


def _checkpoints(rank: int, world: int, folder: str) -> None:
    """Five steps = three, save, load into a model of either kind, two."""
    for label in laws.every_second(["mxfp8/nvfp4", "delayed"], 1):
        recipe, final = ALL[label], {}
        for source in (0, 1):
            net = _models(recipe)[source]
            optimizer = _adam(net)
            for step in range(3):
                nets.train_step(net, optimizer, step, rank)
            model, optim = get_state_dict(net, optimizer)
            assert all(type(local_of(v)) is torch.Tensor for v in model.values()), (
                "a checkpoint holds a class of ours"
            )
            path, rest = f"{folder}/{label}/{source}", fq.state_dict(net)
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
                fq.load_state_dict(other, rest)
                for step in range(3, 5):
                    nets.train_step(other, again, step, rank)
                final[source, target] = nets.full_state(other)
            values = {k: v.full_tensor() for k, v in get_state_dict(net, optimizer)[0].items()}
            nn.Module.load_state_dict(nets.build(), values)  # strict, into nn.Linear
        want = final["straight", 0]
        for way, state in final.items():
            for name, value in want.items():
                laws.assert_same_bytes(state[name], value, f"{label}, {way}: {name}")


def test_checkpoints_pass_between_both_kinds_of_parameters(tmp_path):
    """If false, a run cannot resume, or a quantized model's checkpoint loses what its codes cannot
    say."""
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
        state |= {
            f"{name}.{k}": optimizer.state[p][k].full_tensor() for k in ("exp_avg", "exp_avg_sq")
        }
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
    for p in net.parameters():
        torch.from_dlpack(plain(p)).mul_(0.5)  # moves no version
    fq.sync(net)
    check("a write past all versions and fq.sync")
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


def _adopted(rank: int, world: int) -> None:
    recipe, full = RECIPES["mxfp8/nvfp4"], nets.build(seed=1).state_dict()
    places = {
        "": {},
        "HSDP": mesh(world, 1),
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())},
    }
    cases = ("meta", ""), ("meta", "offload"), (DEVICE, "HSDP")
    for kind, (device, place) in itertools.product((fq.convert, quantized), cases):
        what, given = f"{kind.__name__}, {device}, {place}", {}
        for _ in range(2):  # another model loads the dict too
            with torch.device(device):
                net = nets.build()
            nets.shard(kind(net, recipe), **places[place])
            given = given or {
                n: nn.Parameter(distribute_tensor(full[n].clone(), p.device_mesh, p.placements))
                for n, p in net.state_dict().items()
            }
            net.load_state_dict(given, assign=True)
            assert {type(local_of(t)) for t in given.values()} == {torch.Tensor}, what
            shards = {n: t for n, p in net.named_parameters() if is_ours(t := local_of(p))}
            assert len(shards) == 5 and {t.state.name for t in shards.values()} == {*shards}, what
            assert all(t.state.holds_codes is (kind is quantized) for t in shards.values()), what
        nets.assert_equals_fresh(net, recipe, what)


def is_ours(local: torch.Tensor) -> bool:
    return isinstance(local, FSDPHooks)


def test_assigned_weights_are_those_of_the_module():
    """If false, FSDP2's own load (meta device, `distribute_tensor`, assign=True) ends in an error,
    gathers high precision, or makes one state of two models that load one dict."""
    run_ranks(2, _adopted)


def _decoded(rank: int, world: int) -> None:
    for label in ("mxfp8/nvfp4", "fp8_current/fp8_row"):
        net = nets.shard(quantized(nets.build(), RECIPES[label]))
        weights = [p for p in net.parameters() if is_ours(local_of(p))]

        def check(p: torch.Tensor, what: str) -> None:
            laws.assert_same_bytes(p.to_local().dequantize().detach(), plain(p), what)
            laws.assert_same_bytes(local_of(p.dequantize()), plain(p), what)

        for p in weights:
            check(p, f"{label}: no codes yet")
        net(nets.batch(0))
        net.reshard()
        for p in weights:
            decoded = p.to_local().dequantize()
            assert not torch.equal(decoded, plain(p)) or not len(decoded), label
            decoded.square().sum().backward()
            laws.assert_same_bytes(local_of(p.grad), 2 * decoded.detach(), f"{label}: gradient")
            with torch.no_grad():
                p.mul_(2)
            check(p, f"{label}: written")


def test_a_shard_decodes_before_its_first_gather_and_after_writes():
    """If false, a penalty of a sharded quantized parameter has no gradient, or sees the codes of
    values that were replaced."""
    run_ranks(2, _decoded)


def _encodes_in_groups(rank: int, world: int) -> None:
    """On an emulated GPU: a step makes all codes in a launch an encoding, or in Adam's own, and
    gathers encode nothing.

    Adam takes a launch for parameters that are their masters rounded, and one for quantized
    parameters: where every scale follows from a tile it makes their codes, else the statistics that
                codes follow from. Codes that a cut block needs
    other ranks for are of the second kind.
    """
    recipes = ALL | {"mxfp8": fq.recipes.mxfp8()}
    launches = {  # of (quantize_group, statistics_group, adam, adam_group)
        ("mxfp8", 64, 64): (0, 0, 1, 1),
        ("mxfp8", 96, 64): (2, 0, 1, 2),
        ("fp8_current/fp8_row", 64, 32): (2, 0, 1, 1),
        ("mxfp8/nvfp4", 64, 64): (2, 0, 1, 1),
        ("nvfp4", 96, 32): (1, 0, 1, 1),
        ("delayed", 64, 32): (1, 0, 1, 1),
    }
    for (label, size, k), wanted in launches.items():
        with hopper.emulated() as gpu:
            outputs = []
            for kind in (fq.convert, quantized):
                net = nets.build(hidden=(size, size), k=k, out=k).to(torch.bfloat16)
                net = nets.shard(kind(net, recipes[label]))
                optimizer = _adam(net)
                for step in range(2):
                    fq.begin_step(step)
                    gpu.calls.clear()
                    y = net(laws.values(16, k, seed=step))
                    y.float().square().mean().backward()
                    gathered = gpu.count("quantize_group")
                    optimizer.step()
                outputs.append(y)
            names = ("quantize_group", "statistics_group", "adam", "adam_group")
            made = tuple(gpu.count(name) for name in names)
            assert (gathered, made) == (0, wanted), (
                f"{label}, {size}, {k}: {gathered} {made}, wanted {wanted}"
            )
            laws.assert_same_bytes(outputs[1], outputs[0], f"{label}: output")


@on_cpu
def test_a_step_makes_codes_in_adams_launch_or_all_at_once():
    """If false, the write-back costs a pass over masters more than it must, or the host a launch a
    weight."""
    run_ranks(2, _encodes_in_groups)


ALIKE = [name for name in FEATURES if "AdamW" not in name and "SGD" not in name]


def _features(rank: int, world: int, names: list[str], shard: dict[str, tuple[int, ...]]) -> None:
    """Each feature trains quantized parameters as it trains high-precision ones, in losses, masters
    and moments."""
    failed: list[str] = []
    for i, name in enumerate([*names, *shard]):
        feature = (
            Feature(shard=lambda world, at=shard[name]: mesh(*at))
            if name in shard
            else FEATURES[name]
        )
        for label in (
            MODES
            if name in shard
            else laws.sample([*MODES, *MODES][i % len(MODES) :][: len(MODES)])
        ):
            if "delayed" in label and name == "average of weights":
                # codes of quantized parameters have the scale of the step that follows, as soon as
                # they are made
                continue
            with named(f"{name}, {label}, world {world}", failed):
                pair = []
                for kind in (fq.convert, quantized):
                    net = nets.build()
                    torch.manual_seed(1)
                    feature.change(net)
                    net = nets.shard(kind(net, MODES[label]), **feature.shard(world))
                    feature.after(net)
                    pair.append((net, fq.optim.FusedAdam(net.parameters(), lr=1e-2)))
                for step in range(3):
                    want, got = (
                        feature.step(net, optimizer, step, rank) for net, optimizer in pair
                    )
                    laws.assert_same_bytes(got, want, f"{name}, {label}: step {step}")
                (ordinary, a), (ours, b) = pair
                for (key, p), q in zip(ordinary.named_parameters(), ours.parameters()):
                    states = a.state.get(p, {}), b.state.get(q, {})
                    want, got = (plain(state.get("master", t)) for state, t in zip(states, (p, q)))
                    laws.assert_same_bytes(got, want, f"{name}, {label}: {key}")
                    for moment in ("exp_avg", "exp_avg_sq") if states[0] else ():
                        laws.assert_same_bytes(
                            plain(states[1][moment]), plain(states[0][moment]), f"{key}: {moment}"
                        )
                if name in shard:
                    mine = torch.cat([plain(p).flatten() for p in ours.parameters()])
                    other = [torch.empty_like(mine) for _ in range(shard[name][0])]
                    group = managed_params_of(ours)[0].param.mesh_info.replicate_process_group
                    torch.distributed.all_gather(other, mine, group=group)
                    for replica in other:
                        laws.assert_same_bytes(replica, mine, f"{name}, {label}: replicas")
    assert not failed, "\n".join(failed)


def test_features_train_both_kinds_alike():
    """If false, a feature of FSDP2 works with high-precision parameters alone, or trains quantized
    ones differently."""
    run_ranks(2, _features, ALIKE if laws.EVERYTHING else ALIKE[::2], {})


def _features_on_an_emulated_gpu(rank: int, world: int) -> None:
    with hopper.emulated():
        _features(rank, world, ALIKE if laws.EVERYTHING else ALIKE[1::2], {})


@on_cpu
def test_features_train_both_kinds_alike_where_calls_are_made_again():
    """If false, a feature reads codes whose memory was given back, which crashes, or has those of
    another step."""
    run_ranks(2, _features_on_an_emulated_gpu)


def test_hybrid_sharding_trains_both_kinds_alike_and_replicas_agree():
    """If false, copies of a quantized shard drift apart."""
    run_ranks(4, _features, [], {"HSDP": (2, 2)})


def _skipped(rank: int, world: int) -> None:
    def bytes_of(net: nn.Module, optimizer, of_weights: bool = False) -> list[torch.Tensor]:
        """of_weights: without histories of activations, which roll as the next step begins, skipped
        or not."""
        weights = [
            local_of(p) for p in net.parameters() if isinstance(local_of(p), QuantizedTensor)
        ]
        sides = [
            side
            for w in weights
            for side in (w._pair.rowwise, w._pair.columnwise)
            if side is not None
        ]
        histories = [
            h
            for w in weights
            for h in w.state.histories.values()
            if h.keep_when_skipped or not of_weights
        ]
        states = [plain(t) for s in optimizer.state.values() for t in s.values()]
        kept = [
            *nets.full_state(net).values(),
            *states,
            *(b for side in sides for b in side.buffers().values()),
        ]
        kept += [t for h in histories for t in (h.amaxes, h.encode_scale)]
        return [t.clone() for t in kept]

    for label, capturable, gpu in (
        ("fp8_current/fp8_row", False, False),
        ("mxfp8/nvfp4", True, True),
        ("fp8_block", True, True),
        ("delayed", True, False),
    ):
        with hopper.emulated() if gpu and DEVICE == "cpu" else contextlib.nullcontext():
            pair = []
            for is_skipped in (False, True):
                torch.manual_seed(0)
                net = nets.shard(quantized(nets.build(), ALL[label]))
                optimizer = _adam(net, capturable=capturable)
                nets.train_step(net, optimizer, 0)
                if is_skipped:
                    before = bytes_of(net, optimizer, of_weights=True)
                    fq.begin_step(1)
                    (net(nets.batch(1)).square().mean() * 1e3).backward()
                    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.full((1,), 2.0)
                    optimizer.step()
                    del optimizer.found_inf, optimizer.grad_scale
                    optimizer.zero_grad()
                    fq.skip_step()
                    for i, (got, want) in enumerate(
                        zip(bytes_of(net, optimizer, of_weights=True), before, strict=True)
                    ):
                        laws.assert_same_bytes(
                            got, want, f"{label}: {i} of {len(before)} after a skipped step"
                        )
                nets.train_step(net, optimizer, 1)
                pair.append(bytes_of(net, optimizer))
            for got, want in zip(pair[1], pair[0], strict=True):
                laws.assert_same_bytes(got, want, f"{label}: a good step after a skipped one")


def test_a_skipped_step_changes_nothing():
    """If false, an overflow found by a GradScaler enters masters, moments, codes or histories, then
    or in the next step."""
    run_ranks(2, _skipped)
