# SPDX-License-Identifier: Apache-2.0
"""Orders of passes that plain FSDP2 bears: prefetches, first forwards under inference_mode, several
blocks in one checkpoint."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import DEVICE, run_ranks
from dist_tests.multi.test_tensor_parallel_meshes import pair_of_layers

RECIPES = (fq.recipes.hybrid("mxfp8", "nvfp4"), fq.recipes.fp8_current(), fq.recipes.identity())


def _model(recipe: fq.Recipe, quantized: bool = False, hidden=(64, 48, 33)) -> nets.Net:
    with fq.quantized_model_init(recipe) if quantized else contextlib.nullcontext():
        return nets.shard(fq.convert(nets.build(hidden=hidden), recipe))


def _optimizer(net: nn.Module, quantized: bool) -> torch.optim.Optimizer:
    return fq.optim.FusedAdam(net.parameters(), lr=1e-2) if quantized else nets.adam(net)


def _run(
    net: nets.Net, x: torch.Tensor, order, groups: bool = False, reentrant: bool = False
) -> torch.Tensor:
    """The blocks in this order, inside the forward of the root; groups: each entry is checkpointed
    as one."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        def of(group, x):
            for i in group:
                x = net.blocks[i](x)
            return x

        for group in order:
            x = checkpoint(of, group, x, use_reentrant=reentrant) if groups else of(group, x)
        return net.head(x)

    net.forward = forward
    return net(x)


def _trained(
    recipe: fq.Recipe, quantized: bool, run, prepare=lambda net: None, rank: int = 0
) -> list[torch.Tensor]:
    """Outputs and weights of three steps."""
    net = _model(recipe, quantized)
    optimizer, seen = _optimizer(net, quantized), []
    prepare(net)
    for step in range(3):
        with fq.token_offset(0):
            fq.begin_step(step)
            y = run(net, nets.batch(step, rank=rank).requires_grad_())
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(y.detach())
    return [*seen, *nets.full_state(net).values()]


def _same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, pair in enumerate(zip(got, want, strict=True)):
        laws.assert_same_bytes(*pair, f"{what}: value {i}")


def _cyclic(net: nets.Net) -> None:
    blocks = list(net.blocks)
    for block, following in zip(blocks, blocks[1:] + blocks[:1]):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _first_prefetches_second(net: nets.Net) -> None:
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])


def _prefetches(rank: int, world: int) -> None:
    cases = {
        "cyclic": (_cyclic, [[0, 1, 2]]),
        "A, B, A": (_first_prefetches_second, [[0, 1, 0]]),
        "A, B, A of cycles": (_cyclic, [[0, 1, 0]]),
    }
    for recipe in RECIPES:
        for what, (prepare, order) in cases.items():
            # of high-precision parameters CI runs them in test_fsdp_lockstep.py
            ways = (False, True) if laws.EVERYTHING else (True,)
            for quantized in ways if recipe is not RECIPES[-1] else ways[:-1]:
                run = functools.partial(_run, order=order)
                want, got = (
                    _trained(recipe, quantized, run, p, rank) for p in (lambda net: None, prepare)
                )
                _same(got, want, f"{recipe}, {what}, quantized {quantized}")


def test_explicit_prefetches_change_nothing():
    """If false, a block that is gathered for its next forward lacks the codes of its backward, or
    has those of another step."""
    run_ranks(2, _prefetches)


def _several_blocks_in_one_checkpoint(rank: int, world: int) -> None:
    for recipe in RECIPES:
        want = _trained(recipe, False, functools.partial(_run, order=[[0, 1], [2]]), rank=rank)
        for reentrant in (False, True):
            run = functools.partial(_run, order=[[0, 1], [2]], groups=True, reentrant=reentrant)
            _same(_trained(recipe, False, run, rank=rank), want, f"{recipe}, reentrant {reentrant}")


def test_one_checkpoint_over_several_blocks_trains_alike():
    """If false, a block that is gathered inside another one's backward lacks rowwise codes, or
    keeps those of its forward."""
    run_ranks(2, _several_blocks_in_one_checkpoint)


def _linear_layers(recipe: fq.Recipe, quantized: bool, **options) -> nn.Module:
    """Without norms: FSDP2 gathers their weights as inference tensors, which autograd saves in no
    later forward."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(nets.K, 48), nn.ReLU(), nn.Linear(48, 33), nn.ReLU(), nn.Linear(33, 8)
    )
    with fq.quantized_model_init(recipe) if quantized else contextlib.nullcontext():
        fq.convert(layers, recipe)
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer, **options)
    return layers


def _inference_first(rank: int, world: int) -> None:
    for recipe in RECIPES:
        for quantized in (False, True)[: 1 if recipe is RECIPES[-1] else 2]:
            seen = []
            for first in (None, torch.no_grad, torch.inference_mode):
                net = _linear_layers(recipe, quantized)
                if first is not None:
                    with first():
                        outputs = [net(nets.batch(7)).clone() for _ in range(2)]
                    laws.assert_same_bytes(*outputs, f"{recipe}, {first.__name__}: twice")
                    net.reshard()  # so that the optimizer is given the sharded parameters
                optimizer, values = _optimizer(net, quantized), []
                for step in range(2):
                    values.append(nets.train_step(net, optimizer, step, rank))
                    if first is not None:
                        with first(), fq.token_offset(0):
                            net(nets.batch(8))
                seen.append([*values, *nets.full_state(net).values()])
            for got in seen[1:]:
                _same(
                    got,
                    seen[0],
                    f"{recipe}, quantized {quantized}: trained after a forward without gradients",
                )


def _inference_of_offloaded(rank: int, world: int) -> None:
    for recipe, quantized in itertools.product(RECIPES[:2], (False, True)):
        outputs = []
        for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
            net = _linear_layers(recipe, quantized, **options)
            optimizer = _optimizer(net, quantized)
            for step in range(2):
                nets.train_step(net, optimizer, step, rank)
                with torch.inference_mode(), fq.token_offset(0):
                    outputs.append(net(nets.batch(8)).clone())
        _same(outputs[2:], outputs[:2], f"{recipe}, quantized {quantized}: offloaded")


def test_offloaded_weights_are_evaluated_under_inference_mode():
    """If false, FSDP2 asks plain tensors, to which it copied shards, for their hooks."""
    run_ranks(2, _inference_of_offloaded)


def test_a_first_forward_under_inference_mode_is_like_any_other():
    """If false, a rollout worker's model cannot be trained, or multiplies codes that it made for
    the rollout."""
    run_ranks(2, _inference_first)  # of one rank, plain FSDP2 fails in torch's own copy


class Autoencoder(nn.Module):
    """Is trained by its call, or by a method, which may fail midway."""

    def __init__(self, layer=lambda n, k, name: nn.Linear(n, k)):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec = layer(40, 48, name="enc"), layer(48, 33, name="dec")
        self.fails = False

    def rebuild(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enc(x))
        if self.fails:
            raise KeyError("midway")
        return self.dec(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rebuild(x)


def _losses(net: Autoencoder, run, fails: bool = False) -> list[torch.Tensor]:
    """Outputs, gradients of the input, and amax histories, of steps with growing inputs; between
    the second and the third the weights are replaced by larger ones."""
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=1e-2), []
    for step in range(5):
        x = (laws.values(8, 40, seed=step, dtype=torch.float32) * 4.0**step).requires_grad_()
        with fq.token_offset(0):
            if fails and step:
                net.fails = True
                with contextlib.suppress(KeyError):
                    run(x)
                net.fails = False
                fq.skip_step(net)
            y = run(x)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [y.detach(), x.grad]
        if step == 1:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(8.0)
    state = fq.state_dict(net)
    return [
        *seen,
        torch.tensor(state["step"]),
        *(t for h in state["histories"].values() for t in h.values()),
    ]


def _every_program(rank: int, world: int) -> None:
    recipes = fq.recipes.fp8_delayed(length=3), fq.recipes.nvfp4(), fq.recipes.fp8_current()
    for turn, recipe in enumerate(recipes):
        whole = fq.convert(Autoencoder(), recipe)
        want = _losses(whole, whole)
        programs = {
            "call": lambda net: net,
            "method": lambda net: net.rebuild,
            "eval": lambda net: net.eval(),
            "reentrant": lambda net: lambda x: checkpoint(net, x, use_reentrant=True),
            "failed call": lambda net: net,
            "failed method": lambda net: net.rebuild,
        }
        ways = list(itertools.product(programs, (False, True)))
        turns = [way for i, way in enumerate(ways) if (i % 2 + i // 2 + turn) % 2]
        for name, is_built in ways if laws.EVERYTHING else turns:
            if is_built:
                net = Autoencoder(functools.partial(fq.Linear, recipe=recipe))
            else:
                net = fq.convert(Autoencoder(), recipe)
            for part in (net.enc, net.dec, net):
                fully_shard(part)
            register_fsdp_forward_method(net, "rebuild")
            got = _losses(net, programs[name](net), name.startswith("failed"))
            _same(got, want, f"{recipe}, {name}, built directly {is_built}")


def test_every_program_that_trains_has_the_bits_of_the_whole_model():
    """If false, a root that is trained by a method has the statistics or scales of an earlier
    forward, layers that are built directly roll their histories after the gather, or a failed pass
    leaves weights gathered."""
    run_ranks(2, _every_program)


def _statistics_of_parts_again(rank: int, world: int) -> None:
    """Weights that each rank scales by another factor, so that the amaxes of blocks that cuts
    divide change every step."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("shard", "tp"))
    x = laws.values(4, 40, dtype=torch.float32).requires_grad_()
    for pair in (("nvfp4_16x16", "nvfp4_16x16"), ("fp8_128x128", "mxfp8"), ("nvfp4", "fp8_tensor")):

        def made(pair=pair) -> nn.Module:
            net = fq.convert(pair_of_layers(), nets.pair_recipe(*pair))
            parallelize_module(
                net,
                mesh["tp"],
                {"0": fq.parallel.ColwiseParallel(), "1": fq.parallel.RowwiseParallel()},
            )
            return fully_shard(net, mesh=mesh["shard"])

        def codes(net: nn.Module) -> list:
            with nets.recorded_weights() as seen, fq.token_offset(0):
                net(x).sum().backward()
            return seen

        net = made()
        for step in range(3):
            fresh = made()
            with torch.no_grad():
                for p, q in zip(net.parameters(), fresh.parameters()):
                    q.to_local().copy_(p.to_local())
            for (direction, got, _), (_, want, _) in zip(codes(net), codes(fresh), strict=True):
                laws.assert_same_storage(got, want, f"{pair}, forward {step}, {direction}")
            for p in net.parameters():
                p.to_local().data.mul_(1.0 + 0.3 * (rank + step))


def test_statistics_of_parts_are_taken_again_each_forward():
    """If false, padded slots of parts under tensor parallelism hold the amaxes of an earlier
    forward."""
    run_ranks(4, _statistics_of_parts_again)


def _delayed_steps(sharded: bool, reshards: bool, is_lone: bool) -> list[torch.Tensor]:
    """Outputs and weights of steps by hand, of two forwards each. is_lone: the first has no
    backward."""
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2))).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(laws.values(32, 32, seed=i, dtype=torch.float32))
    fq.convert(net, fq.recipes.fp8_delayed())
    for module in (*net, net) if sharded else ():
        fully_shard(module, reshard_after_forward=reshards)
    optimizer, outputs = torch.optim.SGD(net.parameters(), lr=0.5), []
    for step in range(3):
        fq.begin_step(step, model=net)
        xs = [laws.values(32, 32, seed=9 + 2 * step + i, dtype=torch.float32) for i in range(2)]
        ys = [net(x * (1 + step + i)) for i, x in enumerate(xs)]
        for y in ys[is_lone:]:
            y.square().mean().backward()
        outputs += ys
        optimizer.step()
        optimizer.zero_grad()
    weights = (p.full_tensor() if sharded else p for p in net.parameters())
    return [t.detach() for t in (*outputs, *weights)]


def _steps_by_hand(rank: int, world: int) -> None:
    for reshards, is_lone in ((True, False), (False, True)):
        got, want = (_delayed_steps(sharded, reshards, is_lone) for sharded in (True, False))
        for a, b in zip(got, want, strict=True):
            laws.assert_same_bytes(a, b, f"reshards {reshards}, lone {is_lone}")


def test_begin_step_makes_the_passes_of_delayed_scaling_one_step():
    """If false, weights that are gathered again between two forwards and their backwards, or stay
    gathered, have other codes than without fully_shard, and nothing helps."""
    run_ranks(2, _steps_by_hand)
