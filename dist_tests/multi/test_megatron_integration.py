# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's layers and its gather of parameters among ranks, without Megatron: its protocol
over our own flat buffers."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.multi.harness import DEVICE, run_ranks
from dist_tests.single import hopper
from dist_tests.single.test_megatron_integration import BF16, HYBRID, Config, normal
from examples.mini_megatron.flat import FlatLayout
from fsdp_quant.counters import counters
from fsdp_quant.formats import Direction
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.integrations.megatron import ColumnParallelLinear, RowParallelLinear, weight_proxies
from fsdp_quant.integrations.megatron.gather import GathersCodes, gather_codes, shard_map
from fsdp_quant.linear.operands import weight_storages
from fsdp_quant.ops import native

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="its configuration initializes weights on the CPU"
)
# bf16 sums of products in another order, rounded to bf16 twice (2^-9 each), of which a row layer's
# sum adds one a rank.
TOLERANCE = 8e-3
S, B, H, FFN = 64, 2, 64, 128


# Tensor parallelism #


def mlp(
    group, sequence_parallel: bool, recipe: fq.Recipe, **options
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Both layers, of the same values at every number of ranks."""
    config = Config(
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=1 if group is None else group.size(),
    )
    shared = {"config": config, "init_method": normal, "tp_group": group, "recipe": recipe}
    torch.manual_seed(0)
    up = ColumnParallelLinear(H, FFN, name="up", skip_bias_add=False, **shared, **options)
    down = RowParallelLinear(
        FFN, H, name="down", bias=True, input_is_parallel=True, skip_bias_add=False, **shared
    )
    with torch.no_grad():
        down.bias.copy_(laws.values(H, seed=5))
    return up, down


def close(got: Tensor, want: Tensor, what: str) -> None:
    error = float(
        (got.detach().float() - want.detach().float()).norm() / want.detach().float().norm()
    )
    assert error < TOLERANCE, f"{what}: {error:.1e}"


def passed(up, down, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = down(torch.relu(up(x)[0]))[0]
    y.backward(dy)
    return [y, x.grad, up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad]


def shared_layers(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x, dy = laws.values(S, B, H, seed=1, dtype=BF16), laws.values(S, B, H, seed=2, dtype=BF16)
    for name in ("mxfp8", "fp8_current"):
        recipe = fq.recipes.by_name(name)
        want = passed(*(layer for layer in mlp(None, False, recipe)), x, dy)
        for sequence in (False, True):

            def mine(t: Tensor, cut: bool = sequence) -> Tensor:
                return t.chunk(world)[rank] if cut else t

            up, down = mlp(group, sequence, recipe)
            counters.reset()
            got = passed(up, down, mine(x), mine(dy))
            what = f"{name}, sequence_parallel={sequence}"
            close(got[0], mine(want[0]), f"{what}: y")
            close(got[1], mine(want[1]), f"{what}: dx")
            for i, dim in ((2, 0), (3, 0), (4, 1)):
                close(got[i], want[i].chunk(world, dim)[rank], f"{what}: gradient {i}")
            summed = got[5].float()
            if sequence:  # of this rank's rows: Megatron sums it, told by the attribute
                assert down.bias.sequence_parallel
                dist.all_reduce(summed)
            close(summed, want[5], f"{what}: bias")
            if sequence and name == "mxfp8":
                gathered = counters.of("sequence gather")
                assert gathered and not any("high precision" in key for key in gathered), gathered
            # Scales of whole tensors are shared, so codes are those of one process.
            whole = mlp(None, False, recipe)[0]
            a, b = (
                weight_storages(
                    layer.weight, [Direction.ROWWISE], layer.plan, layer._weight_state, BF16
                )[Direction.ROWWISE]
                for layer in (up, whole)
            )
            laws.assert_same_bytes(a.dequantize(), b.dequantize().chunk(world)[rank], what)


def joined_and_split(rank: int, world: int) -> None:
    group, x = dist.group.WORLD, laws.values(S, B, H, seed=1, dtype=BF16)
    config = Config(tensor_model_parallel_size=world)
    shared = {"init_method": normal, "recipe": HYBRID, "skip_bias_add": True}
    torch.manual_seed(0)
    alone = ColumnParallelLinear(H, FFN, config=Config(), name="up", **shared)
    torch.manual_seed(0)
    joined = ColumnParallelLinear(
        H, FFN, config=config, name="up", gather_output=True, tp_group=group, **shared
    )
    y, bias = joined(x)
    close(y, alone(x)[0], "gather_output")
    assert (
        bias.shape == (FFN // world,)
        and joined(x, runtime_gather_output=False)[0].shape[-1] == FFN // world
    )
    laws.assert_same_bytes(joined.weight.data, alone.weight.data.chunk(world)[rank])
    y.sum().backward()
    alone(x)[0].sum().backward()
    close(joined.weight.grad, alone.weight.grad.chunk(world)[rank], "its weight")
    torch.manual_seed(0)
    split = RowParallelLinear(
        H,
        FFN,
        config=config,
        name="down",
        bias=False,
        input_is_parallel=False,
        tp_group=group,
        **shared,
    )
    torch.manual_seed(0)
    whole = RowParallelLinear(
        H, FFN, config=Config(), name="down", bias=False, input_is_parallel=True, **shared
    )
    results = []
    for layer in (split, whole):
        mine = x.clone().requires_grad_()
        y = layer(mine)[0]
        y.sum().backward()
        results.append((y, mine.grad))
    for got, want, what in zip(*results, ("y", "dx")):
        close(got, want, f"input_is_parallel=False: {what}")


def communicate_themselves(rank: int, world: int) -> None:
    """Megatron's shared experts set `explicit_expert_comm` of layers that exist
    (moe_shared_expert_overlap): x is gathered before the layers, and y summed behind them."""
    group, recipe = dist.group.WORLD, fq.recipes.mxfp8()
    x, dy = laws.values(S, B, H, seed=1, dtype=BF16), laws.values(S, B, H, seed=2, dtype=BF16)
    for sequence in (False, True):
        want = passed(*mlp(None, False, recipe), x, dy)
        up, down = mlp(group, sequence, recipe)
        up.explicit_expert_comm = down.explicit_expert_comm = down.skip_bias_add = True
        counters.reset()
        got = passed(up, down, x, dy)[:2]
        assert not counters.of("sequence gather")
        for part, added, whole, what in zip(got, (down.bias, 0), want, ("y", "dx")):
            summed = part.detach().float()
            dist.all_reduce(summed)
            what = f"explicit_expert_comm, sequence_parallel={sequence}: {what}"
            close(summed + added, whole, what)


def tensor_parallelism(rank: int, world: int) -> None:
    shared_layers(rank, world)
    joined_and_split(rank, world)
    communicate_themselves(rank, world)


def test_layers_that_ranks_share_are_whole_layers():
    """If false, a model of Megatron's computes something else under tensor or sequence
    parallelism."""
    run_ranks(2, tensor_parallelism)


# The gather of parameters #


class BucketGroup:
    """Megatron's protocol of a bucket group: buckets of flat values, of which each rank brings its
    part."""

    def __init__(self, buckets, group, log):
        self.buckets, self.intra_distributed_optimizer_instance_group, self.log = (
            buckets,
            group,
            log,
        )
        self.param_gather_handle, self.param_gather_dispatched = None, False

    def start_param_sync(self, force_sync: bool = False) -> None:
        group = self.intra_distributed_optimizer_instance_group
        for bucket in self.buckets:
            shard = bucket.param_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.param_data, shard, group=group)
        self.param_gather_dispatched = True
        self.log.append(self)

    def finish_param_sync(self) -> None:
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None


class DDP(nn.Module):
    """What Megatron's DDP does to parameters: they move into flat buffers, by the layout of
    `mini_megatron`."""

    def __init__(self, module: nn.Module, group, bucket_size: int):
        super().__init__()
        self.module, self.group, self.log, rank = module, group, [], group.rank()
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)
        params = dict(module.named_parameters())
        self.layout = FlatLayout(
            {n: p.numel() for n, p in params.items()}, group.size(), bucket_size
        )
        self.flat = torch.zeros(self.layout.numel, dtype=BF16)
        self.bucket_groups, self.expert_parallel_bucket_groups = [], []
        by_bucket: dict[int, list[str]] = {}
        for name in params:
            by_bucket.setdefault(self.layout._bucket_of[name], []).append(name)
        for i, bucket in enumerate(self.layout.buckets):
            names = by_bucket[i]
            starts = {params[n]: self.layout.starts[n] - bucket.start for n in names}
            places = {p: (start, start + p.numel()) for p, start in starts.items()}
            data = self.flat[bucket.start : bucket.end]
            made = SimpleNamespace(
                params_list=list(places), param_to_index=places, param_data=data, grad_data=data
            )
            for param, (start, end) in places.items():
                old = param.data
                param.data = data[start:end].view(old.shape)
                param.data.copy_(old)
            self.bucket_groups.append(BucketGroup([made], group, self.log))
        for name, param in params.items():
            start, end = self.layout.shards(name).run(rank)
            param.main_param = (
                param.detach().view(-1)[start:end].float().clone() if end > start else None
            )


class Net(nn.Module):
    def __init__(self, recipe: fq.Recipe, tp_group=None, **options):
        super().__init__()
        torch.manual_seed(0)
        ranks = 1 if tp_group is None else tp_group.size()
        config = Config(tensor_model_parallel_size=ranks, **options)
        shared = {
            "config": config,
            "init_method": normal,
            "recipe": recipe,
            "bias": True,
            "tp_group": tp_group,
        }
        self.norm = nn.RMSNorm(H, dtype=BF16)
        self.up = ColumnParallelLinear(H, FFN, name="up", **shared)
        self.down = RowParallelLinear(
            FFN, H, name="down", input_is_parallel=True, skip_bias_add=False, **shared
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))[0]))[0]


def stepped(ddp: DDP, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Gradients summed over ranks, as Megatron reduces them; masters step, and write the values
    that this rank owns."""
    optimizer.zero_grad()
    if ddp.ddp_config.align_param_gather:  # the schedule of interleaved stages starts all of them
        for group in ddp.bucket_groups:
            group.start_param_sync()
    for group in ddp.bucket_groups:
        group.finish_param_sync()
    ddp.module(x).square().mean().backward()
    fq.steps.backward_dw(ddp.module)
    for name, param in ddp.module.named_parameters():
        grad = param.main_grad if hasattr(param, "main_grad") else param.grad
        assert (grad is not param.grad) == (param.grad is None), f"{name}: fused, and yet in .grad"
        dist.all_reduce(grad, group=ddp.group)
        start, end = ddp.layout.shards(name).run(ddp.group.rank())
        if end > start:
            param.main_param.grad = grad.view(-1)[start:end].float()
        param.grad = None
        if hasattr(param, "main_grad"):
            param.main_grad = torch.zeros_like(param.main_grad)
    optimizer.step()
    for name, param in ddp.module.named_parameters():
        start, end = ddp.layout.shards(name).run(ddp.group.rank())
        if end > start:
            ddp.layout.view(ddp.flat, name)[start:end].data.copy_(param.main_param)
    for group in ddp.bucket_groups:
        group.param_gather_dispatched = False


def gathered(
    rank: int,
    world: int,
    recipe: fq.Recipe,
    transport: str,
    in_parts: bool = False,
    delays: bool = False,
    fuses: bool = False,
    aligns: bool = False,
) -> None:
    """in_parts:  the ranks hold parts of every weight, and each is a data-parallel group of its
    own. delays: wgrads of layers whose codes are gathered. fuses: those of both runs. aligns: the
    schedule starts the gathers of both, in place of the layers."""
    group, tp_group, x = dist.group.WORLD, None, laws.values(S, B, H, seed=1, dtype=BF16)
    if in_parts:
        group, tp_group = [dist.new_group([r]) for r in range(world)][rank], group
    # The second run gathers values, and is the reference.
    runs = []
    for codes in (True, False):
        options = {"delay_wgrad_compute": delays and codes, "gradient_accumulation_fusion": fuses}
        ddp = DDP(Net(recipe, tp_group, **options), group, bucket_size=6000)
        ddp.ddp_config.delay_wgrad_compute = delays and codes
        ddp.ddp_config.align_param_gather = aligns
        for param in weight_proxies(ddp.module) if fuses else ():
            param.main_grad = torch.zeros(param.shape)
        for bucket_group in ddp.bucket_groups:
            for bucket in bucket_group.buckets:
                for param in bucket.params_list:  # our own rule and this one, of Megatron's buckets
                    name = next(n for n, p in ddp.module.named_parameters() if p is param)
                    assert shard_map(bucket, param, group.size()) == ddp.layout.shards(name)
        masters = [p.main_param for p in ddp.module.parameters() if p.main_param is not None]
        optimizer = torch.optim.AdamW(masters, lr=1e-2)
        chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(config=SimpleNamespace())])
        if codes:
            gather_codes(
                [ddp],
                chained,
                transport=transport,
                stats="halo" if transport == "codes" else "dense",
            )
        outputs = []
        for _ in range(3):
            stepped(ddp, optimizer, x)
            for bucket_group in ddp.bucket_groups:
                bucket_group.finish_param_sync()
            outputs.append(ddp.module(x).detach())
        runs.append((ddp, outputs))
    (ddp, got), (reference, want) = runs
    for step, (a, b) in enumerate(zip(got, want)):
        laws.assert_same_bytes(a, b, f"{recipe}, {transport}: step {step}")
    assert {type(g) for g in ddp.log} <= {BucketGroup}
    assert len(reference.log) == (6 if aligns else 4) * len(reference.bucket_groups)
    laws.assert_same_bytes(
        ddp.module.norm.weight.data, reference.module.norm.weight.data, "a norm travels as values"
    )
    with pytest.raises(StaleWeightError, match=r"start_param_sync\(force_sync=True\)"):
        ddp.module.state_dict()
    for bucket_group in ddp.bucket_groups:
        bucket_group.start_param_sync(force_sync=True)
    for key, value in reference.module.state_dict().items():
        if value is not None:
            laws.assert_same_bytes(ddp.module.state_dict()[key], value, key)
    laws.assert_same_bytes(ddp.module(x), want[-1], "after a forced sync")
    assert torch.equal(
        next(iter(weight_proxies(ddp.module).values()))[1].synced.state.weight_sync.applied,
        torch.tensor(7 if aligns else 5),
    )


def refused(rank: int, world: int) -> None:
    ddp = DDP(Net(HYBRID), dist.group.WORLD, bucket_size=6000)
    good = SimpleNamespace(config=SimpleNamespace())
    for change, optimizer, words in (
        ({"overlap_param_gather": False}, good, "ddp_config.overlap_param_gather=False"),
        ({"fp8_param_gather": True}, good, "ddp_config.fp8_param_gather=True"),
        ({"num_distributed_optimizer_instances": 2}, good, "num_distributed_optimizer_instances=2"),
        (
            {},
            SimpleNamespace(config=SimpleNamespace(use_precision_aware_optimizer=True)),
            "use_precision_aware_optimizer=True",
        ),
    ):
        before, ddp.ddp_config = (
            ddp.ddp_config,
            SimpleNamespace(**{**vars(ddp.ddp_config), **change}),
        )
        with pytest.raises(ValueError, match=f"{words} was not tested"):
            gather_codes([ddp], optimizer)
        ddp.ddp_config = before
    delayed = DDP(Net(fq.recipes.fp8_delayed()), dist.group.WORLD, bucket_size=6000)
    with pytest.raises(ValueError, match="(up|down): delayed scaling was not tested"):
        gather_codes([delayed], good)
    assert {type(g) for g in delayed.bucket_groups} == {BucketGroup}
    assert delayed.module(laws.values(S, B, H, seed=1, dtype=BF16)).isfinite().all()
    with pytest.raises(ValueError, match="no weights of our layers"):
        gather_codes([DDP(nn.Linear(8, 8, dtype=BF16), dist.group.WORLD, 64)], good)
    gather_codes([ddp], good)
    for bucket_group in ddp.bucket_groups:
        bucket_group.start_param_sync(force_sync=True)
    with pytest.raises(ValueError, match="gather codes already; call gather_codes once"):
        gather_codes([ddp], good)
    assert ddp.module(laws.values(S, B, H, seed=1, dtype=BF16)).isfinite().all()
    for bucket_group in ddp.bucket_groups:
        bucket_group.param_gather_dispatched = False
        for bucket in bucket_group.buckets:
            for param in bucket.params_list:
                param.main_param = None
    with pytest.raises(RuntimeError, match="keeps no main_param"):
        for bucket_group in ddp.bucket_groups:
            bucket_group.finish_param_sync()


def stages(rank: int, world: int) -> None:
    """Each rank is a stage of a pipeline, alone in its data-parallel group: one may have an
    embedding alone. All refuse what one refuses, alone or in a group whose others would plan."""
    alone, together = [dist.new_group([r]) for r in range(world)][rank], dist.new_group()
    optimizer = SimpleNamespace(config=SimpleNamespace())
    chunk = DDP(Net(HYBRID) if rank else nn.Embedding(8, H, dtype=BF16), alone, bucket_size=6000)
    gather_codes([chunk], optimizer)
    assert any(isinstance(group, GathersCodes) for group in chunk.bucket_groups) == bool(rank)
    for group in chunk.bucket_groups:
        group.start_param_sync(force_sync=True)
    for group in (alone, together):
        chunk = DDP(Net(fq.recipes.fp8_delayed() if rank else HYBRID), group, bucket_size=6000)
        with pytest.raises(ValueError, match="(up|down): delayed scaling was not tested"):
            gather_codes([chunk], optimizer)
        assert {type(group) for group in chunk.bucket_groups} == {BucketGroup}


def parameter_gathers(rank: int, world: int) -> None:
    hybrid = fq.recipes.hybrid
    gathered(rank, world, hybrid("nvfp4", "mxfp8"), "codes", delays=True)
    gathered(rank, world, fq.recipes.fp8_current(), "highprec", aligns=True)
    gathered(rank, world, hybrid("nvfp4", "fp8_current"), "codes", in_parts=True, fuses=True)
    refused(rank, world)
    stages(rank, world)


def gathers_on_a_gpu(rank: int, world: int) -> None:
    no_cast = mock.patch.object(native, "unsupported_pieces_reason", lambda *_: "not emulated")
    with hopper.emulated("sm_90a") as gpu, no_cast:
        ddp = DDP(Net(fq.recipes.mxfp8()), dist.group.WORLD, bucket_size=60000)
        gather_codes([ddp], SimpleNamespace(config=SimpleNamespace()))
        for bucket_group in ddp.bucket_groups:
            bucket_group.start_param_sync(force_sync=True)
        before = gpu.count("anchor_codes")
        ddp.module(laws.values(S, B, H, seed=1, dtype=BF16)).sum().backward()
        assert len(gpu.steps()) == 4 and gpu.count("anchor_codes") == before


def test_codes_of_all_weights_are_laid_out_at_once():
    """If false, each layer converts its codes by itself, while its GEMM waits."""
    run_ranks(2, gathers_on_a_gpu)


def test_gathers_of_codes_are_gathers_of_values():
    """If false, a model whose parameters travel as codes trains on other weights than its optimizer
    has."""
    run_ranks(2, parameter_gathers)
