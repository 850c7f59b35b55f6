# SPDX-License-Identifier: Apache-2.0
"""`fq.set_gradient_reduction`: FSDP2 reduces what the gradients of the plain program give, piece by
piece, by the codes of `ops.gradient_codes`; its features train as with its own reduction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.nn.utils import clip_grad_norm_

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi import nets
from dist_tests.multi.harness import run_ranks
from dist_tests.multi.test_fsdp_features import FEATURES, mesh, named
from fsdp_quant.context import STEP
from fsdp_quant.ops.gradient_codes import (
    GRADIENT_FORMATS,
    GradientLayout,
    decode_gradients,
    encode_gradients,
    gradient_keys,
)
from fsdp_quant.ops.rng import tensor_id
from fsdp_quant.tensor.torch_compat import in_state_dict, managed_params_of

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# What is expected, parameter by parameter #


def exchanged(
    sent: list[Tensor],
    format: str,
    what: str,
    senders: list[int],
    factor: float,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The piece of each owner of the sum of one gradient, in the first reduction of the step.

    sent:     the gradient of each rank.
    what:     parameter and stage, by which random bits are keyed.
    senders:  the ranks.
    """
    layout = GradientLayout((tuple(sent[0].shape),), len(sent), format)
    buffers = []
    for rank, grad in zip(senders, sent):
        ident = torch.tensor([tensor_id(f"{what} {rank}")])
        keys = gradient_keys(STEP.on(grad.device), ident, torch.full((4,), -1))
        buffers.append(encode_gradients([grad], layout, keys))
    pieces = []
    for owner in range(len(sent)):
        pieces.append(torch.empty(layout.numels[0], dtype=dtype))
        received = torch.stack([buffer[owner] for buffer in buffers])
        decode_gradients(received, layout, pieces[-1], factor)
    return pieces


def expected(grads: list[Tensor], name: str, format: str, copies: int = 1) -> Tensor:
    """The average of one gradient over all ranks, which keep so many copies of their shards."""
    shards = len(grads) // copies
    of_copies = [
        exchanged(
            grads[first : first + shards],
            format,
            f"{name} gradient shards",
            list(range(first, first + shards)),
            1 / shards,
        )
        for first in range(0, len(grads), shards)
    ]
    pieces = of_copies[0]
    if copies > 1:
        pieces = []
        for shard, sums in enumerate(zip(*of_copies)):
            ranks = list(range(shard, len(grads), shards))
            what = f"{name} gradient replicas"
            total = exchanged(list(sums), format, what, ranks, 1 / copies, torch.bfloat16)
            pieces.append(torch.cat(total)[: len(sums[0])].float())
    return torch.cat(pieces)[: grads[0].numel()].view(grads[0].shape)


def plain_gradients(net: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    """Of every rank: those of a plain bf16 copy of the net."""
    net(x).square().mean().backward()
    of_all: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, {name: p.grad.cpu() for name, p in net.named_parameters()})
    return [{name: grad.to(x.device) for name, grad in grads.items()} for grads in of_all]


def reduced(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}


# Laws #


def _as_expected(rank: int, world: int, copies: int) -> None:
    failed: list[str] = []
    x = nets.batch(rank=rank).bfloat16()
    grads = plain_gradients(nets.build(out=4).bfloat16(), x)
    for format in GRADIENT_FORMATS if copies == 1 or laws.EVERYTHING else ("bf16", "nvfp4"):
        with named(f"{format}, world {world}, {copies} copies", failed):
            shapes = mesh(copies, world // copies) if copies > 1 else {}
            whole = fully_shard(nets.build(out=4), mp_policy=BF16, **shapes)
            for net in (nets.shard(nets.build(out=4), mp_policy=BF16, **shapes), whole):
                fq.set_gradient_reduction(net, format)
                fq.reset_receipt()
                net(x).square().mean().backward()
                for name, got in reduced(net).items():
                    want = expected([g[name] for g in grads], name, format, copies)
                    laws.assert_same_bytes(got, want, name)
            _sums_in_order(reduced(whole), grads, format, copies)
            local = torch.cat([p.grad.to_local().flatten() for p in whole.parameters()]).cpu()
            others: list = [None] * world
            dist.all_gather_object(others, local)
            laws.assert_same_bytes(local, others[rank % (world // copies)], "copies")
    if copies > 1:
        with named("ranks beside those that share the parameters", failed):
            _beside(rank, mesh(copies, world // copies)["mesh"])
    assert not failed, "\n".join(failed)


def _beside(rank: int, axes: DeviceMesh) -> None:
    """Ranks of the second axis, as those of tensor parallelism, compute the same gradients."""
    shards, of_same = (axes[name] for name in axes.mesh_dim_names or ())
    net = nets.shard(nets.build(), mp_policy=BF16, mesh=shards)
    fq.set_gradient_reduction(net, "nvfp4")
    _backward(net, shards.get_local_rank())
    local = torch.cat([p.grad.to_local().flatten() for p in net.parameters()])
    first = local.clone()
    dist.broadcast(first, group=of_same.get_group(), group_src=0)
    laws.assert_same_bytes(local, first, "gradients")


def _sums_in_order(got: dict[str, Tensor], grads: list[dict], format: str, copies: int) -> None:
    """Without the functions that are tested."""
    if format == "bf16" and copies == 1:
        for name, value in got.items():
            total = grads[0][name].float()
            for other in grads[1:]:
                total = total + other[name].float()
            laws.assert_same_bytes(value, total * (1 / len(grads)), name)


@pytest.mark.parametrize("world, copies", [(3, 1), (4, 2)])
def test_gradients_are_those_of_the_plain_program_through_the_codes(world: int, copies: int):
    """If false, the sum is not that of the fp32 values in the order of ranks, or its bits depend on
    which modules FSDP2 groups; copies of a shard differ."""
    run_ranks(world, _as_expected, copies)


# Features #

# torch's fp32 sum of two summands has one order. Left out: those whose gradients are not bf16, or
# whose sums travel between copies.
SAME_BITS = [
    name
    for name in FEATURES
    if name not in ("accumulation, reduced once", "shared axis of one", "replicate")
    and not name.startswith(("AdamW", "SGD", "average", "two models"))
]


def twins(change: Callable, convert: Callable, **shard) -> list[nn.Module]:
    """Two equal nets: torch reduces the gradients of the second."""
    made = []
    for _ in range(2):
        net = nets.build()
        torch.manual_seed(1)
        change(net)
        convert(net)
        made.append(nets.shard(net, **({"mp_policy": BF16} | shard)))
    fq.set_gradient_reduction(made[0], "bf16")
    return made


def _quantized(net: nn.Module) -> None:
    with fq.quantized_model_init("mxfp8"):
        fq.convert(net, "mxfp8")


def _compiled(net: nn.Module) -> None:
    net.blocks[1].compile(backend="aot_eager")


def _divided(net: nn.Module, by_sums: bool) -> None:
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(by_sums)


def _two_groups() -> dict:
    """Biases have a mesh of their own."""
    device = torch.get_default_device().type
    first, second = (DeviceMesh.from_group(dist.new_group([0, 1]), device) for _ in range(2))
    of_biases = _fsdp_common.ShardPlacementResult(
        Shard(0), _fsdp_common.FSDPMeshInfo(second, shard_mesh_dim=0)
    )
    return {"mesh": first, "shard_placement_fn": lambda p: of_biases if p.dim() == 1 else None}


def _features(rank: int, world: int) -> None:
    failed: list[str] = []

    def trains(what: str, pair: list[nn.Module], step: Callable, optimizer: Callable) -> None:
        optimizers = [optimizer(net.parameters()) for net in pair]
        for number in range(2):
            got, want = (step(n, o, number, rank) for n, o in zip(pair, optimizers))
            laws.assert_same_bytes(got, want, f"{what}: step {number}")
        states = [nets.full_state(net) for net in pair]
        for key, value in states[1].items():
            laws.assert_same_bytes(states[0][key], value, f"{what}: {key}")

    adam = FEATURES["clip, foreach"].optimizer
    for name in laws.sample(SAME_BITS, 3):
        with named(name, failed):
            feature = FEATURES[name]
            pair = twins(feature.change, lambda net: fq.convert(net, "mxfp8"), **feature.shard(2))
            for net in pair:
                feature.after(net)
            trains(name, pair, feature.step, feature.optimizer)
    own = {
        "a model that is not converted": (lambda net: None, lambda net: None, {}),
        "quantized parameters": (lambda net: None, _quantized, {}),
        "a compiled block": (_compiled, lambda net: fq.convert(net, "mxfp8"), {}),
        "shards of dim 1": (
            lambda net: setattr(net, "head", nn.Linear(nets.K, 6, bias=False)),
            lambda net: None,
            {"shard_placement_fn": lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None},
        ),
        "reduce_dtype bf16": (
            lambda net: None,
            lambda net: None,
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
        ),
        "reduce_dtype None": (
            lambda net: None,
            lambda net: None,
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        ),
    }
    if hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.13
        own["several groups of a module"] = (lambda net: None, lambda net: None, _two_groups())
    for name, (change, convert, options) in own.items():
        with named(name, failed):
            optimizer = fq.optim.FusedAdam if convert is _quantized else adam
            trains(name, twins(change, convert, **options), nets.train_step, optimizer)
    for by_sums in (False, True):
        with named(f"divide factor, sums {by_sums}", failed):
            pair = twins(lambda net: None, lambda net: None)
            _divided(pair[0], by_sums)
            _divided(pair[1], True)  # gloo scales no summands
            trains("divide factor", pair, nets.train_step, adam)
    assert not failed, "\n".join(failed)


def test_features_train_as_with_torchs_reduction():
    """If false, a feature of FSDP2 reads another sum, or fails, with gradients that we send."""
    run_ranks(2, _features)


def _rest(rank: int, world: int) -> None:
    failed: list[str] = []
    for law in (_accumulates, _counts, _arrives, _refuses, _hooks, _of_half, _of_replicas):
        with named(law.__name__, failed):
            law(rank, world)
    assert not failed, "\n".join(failed)


def _backward(net: nn.Module, rank: int, micro: int = 0) -> None:
    net(nets.batch(micro, rank=rank).bfloat16()).square().mean().backward()


def _accumulates(rank: int, world: int) -> None:
    """Gradients of two micro-batches that are reduced once are summed in fp32 and rounded to bf16;
    reduced each time, their sums are added, and codes are rounded on other bits. A step that begins
    again has its bits, and so have modules in wrappers."""
    for format in ("bf16", "mxfp8"):
        net, plain = nets.build(), nets.build().bfloat16()
        net.blocks[0] = checkpoint_wrapper(net.blocks[0])
        net = nets.shard(net, mp_policy=BF16)
        fq.set_gradient_reduction(net, format)
        of_ranks = []
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1)
            _backward(net, rank, micro)
            plain.zero_grad()
            of_ranks.append(plain_gradients(plain, nets.batch(micro, rank=rank).bfloat16()))
        for name, got in reduced(net).items():
            name = in_state_dict(name)
            sums = [a[name].float() + b[name].float() for a, b in zip(*of_ranks)]
            laws.assert_same_bytes(got, expected(sums, name, format), name)
    _backward(net, rank)
    other = nets.shard(nets.build(), mp_policy=BF16)
    fq.set_gradient_reduction(other, "mxfp8")
    seen = []
    for step in (1, None, 1, 2, 1):
        fq.begin_step(step)
        other.zero_grad()
        _backward(other, rank)
        seen.append(reduced(other)["head.weight"])
    assert not any(torch.equal(seen[0], seen[i]) for i in (1, 3))
    for i in (2, 4):
        laws.assert_same_bytes(seen[i], seen[0], "a repeated step")


def _counts(rank: int, world: int) -> None:
    """The bytes that were sent are those that the plan counts."""
    for format in GRADIENT_FORMATS:
        net = nets.shard(fq.convert(nets.build(), "mxfp8"), mp_policy=BF16)
        before = fq.plan(net).gradient_bytes
        fq.set_gradient_reduction(net, format)
        planned = fq.plan(net)
        fq.reset_receipt()
        _backward(net, rank)
        sent = {("backward", "shards", format): planned.gradient_bytes[0]}
        assert fq.receipt().gradients == sent and planned.gradient_bytes[1] == 0
        assert f"{planned.gradient_bytes[0]:,} B to shards" in str(planned)
        elements = sum(-(-len(p) // 2) * 2 * p[0].numel() for p in net.parameters())
        assert before == (4 * elements, 0), before
        assert fq.inspection.plan.ModelPlan.of_facts(planned.facts()) == planned
        fq.set_gradient_reduction(net, "fp32")
        assert fq.plan(net).gradient_bytes == before
        fq.reset_receipt()
        _backward(net, rank)
        assert not fq.receipt().gradients


def _arrives(rank: int, world: int) -> None:
    """One rank has a NaN, or an infinity: all ranks' scalers leave the step out."""
    device = torch.get_default_device().type
    for format in GRADIENT_FORMATS:
        net = nets.shard(nets.build(), mp_policy=BF16)
        fq.set_gradient_reduction(net, format)
        weights = nets.full_state(net)
        optimizer, scaler = nets.adam(net), torch.amp.GradScaler(device, init_scale=4.0)
        for bad in (math.nan, math.inf):
            loss = net(nets.batch(rank=rank).bfloat16()).square().mean()
            (scaler.scale(loss) * (bad if rank else 1.0)).backward()
            norm = clip_grad_norm_(net.parameters(), 1.0).full_tensor()
            assert not norm.isfinite(), (format, bad, norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 1.0
        for key, value in nets.full_state(net).items():
            laws.assert_same_bytes(value, weights[key], f"{format}: {key}")


def _refuses(rank: int, world: int) -> None:
    net = nets.shard(nets.build(), mp_policy=BF16)

    def refused(model: nn.Module, format: str, *words: str) -> None:
        with pytest.raises(ValueError) as error:
            fq.set_gradient_reduction(model, format)
        assert all(word in str(error.value) for word in words), error.value

    refused(nets.build(), "bf16", "fully_shard")
    numbers = nn.Module()
    numbers.w = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    refused(fully_shard(numbers), "bf16", "w is torch.complex64", "view_as_real")
    fq.set_gradient_reduction(numbers, "fp32")
    refused(net, "int8", "'int8'", "fp32, bf16, fp8_1x128, mxfp8, nvfp4")
    refused(net, "bf16" if rank else "nvfp4", "'nvfp4' on rank 0 and 'bf16' on rank 1", "give")
    refused(net, "int8" if rank else "nvfp4", "rank 1", "'int8'")
    net.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    refused(net, "bf16", "ProcessGroupAllocReduceScatter")


def _hooks(rank: int, world: int) -> None:
    """A hook sees the sum, as a plain tensor; unused parameters of one rank are zeros."""
    can_differ = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
    pair = twins(lambda net: net.add_module("extra", nn.Linear(nets.K, nets.K)), lambda net: None)
    for net in pair:
        seen: list[Tensor] = []
        for module in (net, *net.blocks):
            module.set_all_reduce_hook(lambda grad, seen=seen: seen.append(grad.clone()))
            if can_differ:
                module.set_reduce_scatter_unused_params(True)
        extra = [net.extra] if can_differ and rank else []
        used = [*net.blocks, *extra, net.head]
        net.forward = nn.Sequential(*used).forward
        net.seen = seen
        _backward(net, rank)
        assert all(type(grad) is Tensor for grad in seen)
    got, want = map(reduced, pair)
    assert got.keys() == want.keys() and len(pair[0].seen) == len(pair[1].seen)
    for name, value in want.items():
        laws.assert_same_bytes(got[name], value, name)


def _of_half(rank: int, world: int) -> None:
    """FSDP2 divides before and after it sums fp16."""
    policy = MixedPrecisionPolicy(torch.float16, torch.float16)
    for format, error in (("bf16", 2**-8), ("mxfp8", 2**-3)):
        pair = twins(lambda net: None, lambda net: None, mp_policy=policy)
        fq.set_gradient_reduction(pair[0], format)
        for net in pair:
            net(nets.batch(rank=rank).half()).square().mean().backward()
        got, want = map(reduced, pair)
        for name, value in want.items():
            assert (got[name] - value).norm() <= error * value.norm(), name


def _reduce_again(group: dist.ProcessGroup, grad: Tensor) -> None:
    assert grad.data_ptr()
    dist.all_reduce(grad, dist.ReduceOp.MAX, group)


def _of_replicas(rank: int, world: int) -> None:
    """Copies without shards: nothing is scattered, and gradients that are not summed yet add up. A
    hook reduces plain tensors, over the same ranks too, and may pass their memory to kernels."""
    for by, shapes in ((replicate, {}), (fully_shard, mesh(2, 1))):
        net = nets.shard(nets.build(), by, mp_policy=BF16, **shapes)
        fq.set_gradient_reduction(net, "mxfp8")
        group = managed_params_of(net)[0].param.mesh_info.replicate_process_group
        for module in (net, *net.blocks):
            module.set_all_reduce_hook(functools.partial(_reduce_again, group))
        of_ranks = []
        plain = nets.build().bfloat16()
        for micro in range(2):
            for module in (net, *net.blocks):
                module.set_requires_all_reduce(micro == 1)
            fq.reset_receipt()
            _backward(net, rank, micro)
            plain.zero_grad()
            of_ranks.append(plain_gradients(plain, nets.batch(micro, rank=rank).bfloat16()))
            assert set(fq.receipt().gradients) == {
                ("backward", "replicas", f) for f in ("mxfp8", "bf16") if micro
            }
        for name, p in net.named_parameters():
            sums = [a[name].float() + b[name].float() for a, b in zip(*of_ranks)]
            pieces = [s.flatten() for s in sums]
            what = f"{name} gradient replicas"
            total = exchanged(pieces, "mxfp8", what, [0, 1], 0.5, torch.bfloat16)
            want = torch.cat(total)[: p.numel()].float().view(p.shape)
            laws.assert_same_bytes(p.grad.full_tensor(), want, name)


def test_accumulation_steps_receipts_overflows_hooks_and_refusals():
    """If false, a step is rounded as another one or counted wrongly, an overflow trains the model,
    or ranks with other formats wait for each other."""
    run_ranks(2, _rest)
