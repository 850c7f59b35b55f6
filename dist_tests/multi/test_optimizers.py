# SPDX-License-Identifier: Apache-2.0
"""`fq.optim.wrap` under `fully_shard`, and optimizers that shard by themselves.

The law is that of single/test_optimizers.py, among ranks: sharded quantized parameters train as
sharded plain ones do, byte for byte, and every rank issues the same collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.optimizers import (
    CASES,
    Averaged,
    Averaging,
    Container,
    convert,
    in_backward,
    step_once,
)

RECIPES = {
    "mxfp8/nvfp4": fq.recipes.hybrid("mxfp8", "nvfp4"),
    "fp8_current": fq.recipes.fp8_current(),
    "fp8_delayed": fq.recipes.fp8_delayed(length=2),
}
# Optimizers that do not take DTensors, over plain parameters neither: part of what they raise.
NO_DTENSORS = {
    "sgd_fused": "does not have a sharding strategy",
    "adafactor_loop": "in-place operations that require placement changes",
    "adafactor_foreach": "in-place operations that require|does not have a sharding strategy",
    "lbfgs": "",
    "bitsandbytes_adamw8bit": "",
    "bitsandbytes_lion8bit": "",
}
SHARDED = [name for name in CASES if name not in NO_DTENSORS]


def sharded(recipe: str, quantized: bool, large: bool = False) -> nn.Module:
    """large: shards of two ranks have 4096 elements, which 8-bit optimizers want."""
    sizes = {"hidden": (128,), "k": 64} if large else {}
    return nets.shard(convert(nets.build(**sizes), RECIPES[recipe], quantized))


def train(net: nn.Module, optimizer, rank: int, steps=range(3)) -> list[Tensor]:
    outputs = []
    for step in steps:
        with fq.token_offset(0):
            fq.begin_step(step)
            x = nets.batch(step, rank=rank, k=net.head.in_features).to(net.head.weight.dtype)
            outputs.append(step_once(net, optimizer, x, False))
    return outputs


def assert_same_run(pair, outputs, rank: int, what: str) -> None:
    """Outputs, values, and the output of the codes that the last step left."""
    for step, (got, want) in enumerate(zip(*outputs, strict=True)):
        laws.assert_same_bytes(got, want, f"{what}: output of step {step}")
    states = [nets.full_state(net) for net in pair]
    for name, value in states[1].items():
        laws.assert_same_bytes(states[0][name], value, f"{what}: {name}")
    with torch.no_grad(), fq.token_offset(0):
        last = []
        for net in pair:
            fq.begin_step(99)
            last.append(net(nets.batch(99, rank=rank, k=net.head.in_features)))
            for module in (net, *net.blocks):
                module.reshard()
    laws.assert_same_bytes(*last, f"{what}: output of the last step's codes")


class Stepped(Container):
    """Members step as gradients arrive; what is called a step here is none."""

    def step(self, closure: Callable | None = None) -> None:
        pass


def _hooked(net: nn.Module, cls: type) -> torch.optim.Optimizer:
    return Stepped(in_backward(net, cls))


def _contained(net: nn.Module, cls: type) -> torch.optim.Optimizer:
    return Container([cls(module.parameters(), lr=0.1) for module in (*net.blocks, net.head)])


def _averaged(net: nn.Module, cls: type) -> torch.optim.Optimizer:
    averaging = Averaging if cls is torch.optim.SGD else fq.optim.wrap(Averaging)
    return Averaged([averaging(net.parameters(), lr=0.3)])


def _of_case(name: str) -> Callable:
    case = CASES[name]
    return lambda net, cls: cls(case.parameters(net.parameters()), **case.options)


WAYS = {name: (_of_case(name), name) for name in SHARDED}
WAYS |= {
    "hooks in the backward": (_hooked, "sgd_loop"),
    "methods of the class": (_averaged, "sgd_loop"),
    "a container": (_contained, "adamw_foreach"),
    "FusedAdam, hooks in the backward": (_hooked, None),
    "FusedAdam, a container": (_contained, None),
}


IN_CI = ("sgd_foreach", "adamw_fused", "muon", *[way for way in WAYS if way not in CASES])


def _trains_alike(rank: int, world: int, ways: list[tuple[str, str]]) -> None:
    for name, recipe in ways:
        make, case = WAYS[name]
        cls = fq.optim.FusedAdam if case is None else CASES[case].cls
        large = case is not None and CASES[case].compiles
        pair = [sharded(recipe, quantized, large) for quantized in (True, False)]
        optimizers = [make(n, c) for n, c in zip(pair, (fq.optim.wrap(cls), cls))]
        outputs = [train(net, o, rank) for net, o in zip(pair, optimizers)]
        assert_same_run(pair, outputs, rank, f"{name}, {recipe}, world {world}")


def _ways() -> list[tuple[str, str]]:
    if laws.EVERYTHING:
        pairs = [(way, recipe) for way in WAYS for recipe in RECIPES]
        return [pair for pair in pairs if pair != ("methods of the class", "fp8_delayed")]
    return [(way, list(RECIPES)[i % len(RECIPES)]) for i, way in enumerate(IN_CI)]


@pytest.mark.parametrize("world", [2, 3] if laws.EVERYTHING else [2])
def test_wrapped_optimizers_train_shards_as_plain_ones(world: int) -> None:
    """If false, an optimizer works in one process alone, or ranks multiply codes of old masters."""
    run_ranks(world, _trains_alike, _ways())


def _takes_no_dtensors(rank: int, world: int, names: list[str]) -> list[list[str]]:
    """What each of these raises of plain sharded parameters, and of quantized ones."""
    found = []
    for name in names:
        case, texts = CASES[name], []
        for quantized in (False, True):
            net = sharded("mxfp8/nvfp4", quantized)
            try:
                cls = fq.optim.wrap(case.cls) if quantized else case.cls
                optimizer = cls(case.parameters(net.parameters()), **case.options)
                step_once(net, optimizer, nets.batch(), case.closure)
            except pytest.skip.Exception:
                break
            except Exception as error:  # of whatever kind the library raises
                texts.append(f"{type(error).__name__}: {error}")
            else:
                texts.append("nothing")
        found.append(texts)
    return found


@pytest.mark.skipif(not laws.EVERYTHING, reason="13 s; FSDP_QUANT_ALL_PAIRS=1 runs it")
def test_optimizers_that_take_no_dtensors_are_those_of_the_page() -> None:
    """If false, docs/optimizers.md says of an optimizer that it cannot be sharded, and it can."""
    names = list(NO_DTENSORS)
    for rank, found in enumerate(run_ranks(2, _takes_no_dtensors, names)):
        for name, texts in zip(names, found, strict=True):
            for text in texts:
                wanted = text != "nothing" and re.search(NO_DTENSORS[name], text)
                assert wanted, f"rank {rank}, {name}: {text}"


# Checkpoints #


# name -> (dtype of parameters, whether they are quantized, how to make the optimizer)
ADAM, CODES = torch.optim.AdamW, {"moment_dtype": torch.float8_e4m3fn}
SAVED = {
    "plain": (torch.float32, False, lambda ps: ADAM(ps, lr=0.02)),
    "wrapped": (torch.float32, True, lambda ps: fq.optim.wrap(ADAM)(ps, lr=0.02)),
    "8-bit": (torch.float32, True, lambda ps: fq.optim.FusedAdam(ps, lr=0.02, **CODES)),
    "8-bit, remainders": (
        torch.bfloat16,
        False,
        lambda ps: fq.optim.FusedAdam(ps, lr=0.02, store_param_remainders=True, **CODES),
    ),
}


def _resharded(rank: int, world: int, folder: str, passes: list[tuple], saves: bool) -> list[dict]:
    """Of each pass: two steps, saved; or loaded from there at another world size, and two more."""
    return [
        _one_pass(f"{folder}/{source}", source if saves else target, saves)
        for source, target in passes
    ]


def _one_pass(path: str, name: str, saves: bool) -> dict[str, Tensor]:
    dtype, quantized, make = SAVED[name]
    net = nets.build(hidden=(128,), k=64).to(dtype)
    net = nets.shard(convert(net, RECIPES["mxfp8/nvfp4"], quantized))
    optimizer = make(net.parameters())
    if saves:
        train(net, optimizer, 0, range(2))
    model, optim = get_state_dict(net, optimizer)
    if saves:
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
    else:
        dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    found = nets.full_state(net)
    for name, p in net.named_parameters():
        for key, value in optimizer.state[p].items():
            if key != "master":
                found[f"{name}.{key}"] = nets.full(value)
    train(net, optimizer, 0, range(2, 4))
    return found | {f"after: {k}": v for k, v in nets.full_state(net).items()}


def test_checkpoints_reshard(tmp_path) -> None:
    """If false, masters or moments depend on the ranks, or the kind of parameter, that saved."""
    passes = [("plain", "wrapped"), *((name, name) for name in SAVED if "8-bit" in name)]
    passes += [("wrapped", "plain"), ("wrapped", "wrapped")] if laws.EVERYTHING else []
    saved = run_ranks(1, _resharded, str(tmp_path), passes, True)[0]
    loaded = run_ranks(2, _resharded, str(tmp_path), passes, False)[0]
    for (source, target), before, after in zip(passes, saved, loaded):
        assert any("exp_avg_codes" in name for name in before) == ("8-bit" in source)
        for name, value in before.items():
            laws.assert_same_bytes(after[name], value, f"{source}, {target}: {name}")


# ZeRO: ranks hold all parameters, and states of some #


def _zero(rank: int, world: int) -> str:
    """Plain masters: as one optimizer on every rank. Returns what quantized parameters are told."""
    results = []
    for sharding in (True, False):
        net = fq.convert(nets.build(), RECIPES["mxfp8/nvfp4"])
        of = DistributedDataParallel(net)
        if sharding:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.02)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        outputs = []
        for step in range(3):
            with fq.token_offset(0):
                fq.begin_step(step)
                outputs.append(of(nets.batch(step, rank=rank)))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((outputs, net.state_dict()))
    (outputs, values), (wanted, others) = results
    for step, (got, want) in enumerate(zip(outputs, wanted)):
        laws.assert_same_bytes(got, want, f"output of step {step}")
    for name, value in others.items():
        laws.assert_same_bytes(values[name], value, name)
    net = convert(nets.build(), RECIPES["mxfp8/nvfp4"], True)
    of = fq.optim.wrap(torch.optim.AdamW)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), of, lr=0.02)
    net(nets.batch()).sum().backward()
    with pytest.raises(ValueError) as error:
        optimizer.step()
    return str(error.value)


def test_zero_redundancy_optimizer_takes_plain_masters() -> None:
    """If false, a rank multiplies codes of weights that another rank has updated since."""
    for text in run_ranks(2, _zero):
        assert "is a quantized parameter" in text and "fully_shard" in text, text
