# SPDX-License-Identifier: Apache-2.0
"""The contract of `fsdp_quant.integrations.megatron` with Megatron-Core's package, or a checkout of
Megatron-LM, on the CPU, with two gloo ranks:

    [FSDP_QUANT_MEGATRON=/path/of/Megatron-LM] python -m dist_tests.contract.megatron

Every check runs Megatron's own code beside ours. Its DDP allocates on the CPU
(`torch.cuda.current_device` is replaced), its tracker of CUDA random states has none, and what
needs a GPU for certain (reduce-scatters, the constructor of its optimizer) is left out. Ends with
an error if a check fails.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import fields

# before Megatron's `examples`, which are a package and would hide ours
FlatLayout = importlib.import_module("examples.mini_megatron.flat").FlatLayout
if "FSDP_QUANT_MEGATRON" in os.environ:
    sys.path.insert(0, os.environ["FSDP_QUANT_MEGATRON"])
if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # noqa: E402
from megatron.core.models.backends import BackendSpecProvider  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import fsdp_quant as fq  # noqa: E402
from dist_tests.laws import assert_same_bytes, values  # noqa: E402
from fsdp_quant.integrations import megatron as ours  # noqa: E402
from fsdp_quant.integrations.megatron import gather  # noqa: E402
from fsdp_quant.integrations.megatron.config import HONOURED  # noqa: E402

BF16, H, FFN, S, B = torch.bfloat16, 64, 128, 64, 2
HYBRID = fq.recipes.hybrid(forward="mxfp8", backward="fp8_block")


def config(**options) -> TransformerConfig:
    given = {
        "num_layers": 2,
        "hidden_size": H,
        "ffn_hidden_size": FFN,
        "num_attention_heads": 4,
        "params_dtype": BF16,
        "bf16": True,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "normalization": "RMSNorm",
        "persist_layer_norm": False,
        "pipeline_dtype": BF16,
    }
    return TransformerConfig(**{**given, **options})


def say(fact: str) -> None:
    if dist.get_rank() == 0:
        print(f"    {fact}", flush=True)


# Names #


def check_signatures() -> None:
    """Megatron calls our constructors and methods with its arguments."""
    for method in ("forward", "_forward_impl"):
        theirs, mine = (
            inspect.signature(getattr(layer, method)).parameters
            for layer in (tensor_parallel.RowParallelLinear, ours.RowParallelLinear)
        )
        assert list(theirs)[:3] == list(mine)[:3], (method, theirs, mine)
    for builder, mine in (
        (experts.GroupedLinearFc1Builder, ours.ColumnParallelGroupedLinear),
        (experts.GroupedLinearFc2Builder, ours.RowParallelGroupedLinear),
    ):
        want, got = (
            inspect.signature(builder.__call__).parameters,
            inspect.signature(mine.__init__).parameters,
        )
        want = {name for name, p in want.items() if p.kind is not p.POSITIONAL_ONLY}
        assert want <= set(got), (mine, want - set(got))
    provider = ours.SpecProvider(HYBRID)
    missing = [
        name for name in BackendSpecProvider.__abstractmethods__ if not hasattr(provider, name)
    ]
    assert not missing, missing


def check_settings() -> None:
    """What we refuse is what Megatron calls so."""
    for table, owner in (
        (HONOURED, TransformerConfig),
        (gather._TESTED_DDP, DistributedDataParallelConfig),
        (gather._TESTED_OPTIMIZER, OptimizerConfig),
    ):
        known = {f.name for f in fields(owner)}
        for name in sorted(set(table) - known):
            say(f"{owner.__name__} of this checkout has no {name}: nothing to refuse")
    ddp = inspect.getsource(DistributedDataParallel)
    for name in ("skip_backward_post_hook", "register_wgrad_accumulation_and_reduce_hooks"):
        assert name in ddp, f"its DDP no longer reads {name}, of weights that backward_dw computes"
    for name in ("start_param_sync", "finish_param_sync"):
        assert callable(getattr(_ParamAndGradBucketGroup, name))
    assert list(inspect.signature(_ParamAndGradBucketGroup.start_param_sync).parameters) == [
        "self",
        "force_sync",
    ]


# Layers #


def init(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)


def layers_of(kind: str, cls: type, cfg: TransformerConfig, **options) -> nn.Module:
    torch.manual_seed(1)
    if kind == "column":
        return cls(H, FFN, config=cfg, init_method=init, bias=True, gather_output=False, **options)
    return cls(FFN, H, config=cfg, init_method=init, bias=True, input_is_parallel=True, **options)


def check_layers(sequence_parallel: bool) -> None:
    """With the identity recipe our layers hold, mark, save and compute what Megatron's do, among
    tensor-parallel ranks."""
    cfg = config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    group, rank = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    native = {
        "column": tensor_parallel.ColumnParallelLinear,
        "row": tensor_parallel.RowParallelLinear,
    }
    mine = {"column": ours.ColumnParallelLinear, "row": ours.RowParallelLinear}
    for kind in native:
        for skip in (False, True):
            want = layers_of(kind, native[kind], cfg, skip_bias_add=skip, tp_group=group)
            got = layers_of(kind, mine[kind], cfg, skip_bias_add=skip, tp_group=group)
            for name, p in want.named_parameters():
                q = got.get_parameter(name)
                assert_same_bytes(q.data, p.data, f"{kind}.{name}")
                assert vars(q) == vars(p), f"{kind}.{name}: {vars(q)} {vars(p)}"
            assert list(got.state_dict()) == list(want.state_dict())
            got.load_state_dict(want.state_dict())
            want.load_state_dict(got.state_dict())
            metadata = {
                "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
            }
            a, b = (layer.sharded_state_dict("l.", (), metadata) for layer in (got, want))
            assert a.keys() == b.keys(), (a.keys(), b.keys())
            for key in a:
                for fact in (
                    "key",
                    "global_shape",
                    "global_offset",
                    "axis_fragmentations",
                    "replica_id",
                ):
                    assert getattr(a[key], fact, None) == getattr(b[key], fact, None), (key, fact)
            x = values(S, B, H if kind == "column" else FFN, seed=2, dtype=BF16)
            cut = (0 if sequence_parallel else None) if kind == "column" else -1
            x = x if cut is None else x.chunk(2, cut)[rank].contiguous()
            results = []
            for layer in (got, want):
                leaf = x.clone().requires_grad_()
                y, bias = layer(leaf)
                y = y if bias is None else y + bias
                y.backward(values(*y.shape, seed=3, dtype=BF16))
                results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
            for i, (p, q) in enumerate(zip(*results)):
                error = float((p - q).float().norm() / q.float().norm())
                # bf16 products, and sums over two ranks, that are rounded in another order: 2^-8 of
                # the norm.
                assert error < 2**-8, f"{kind}, skip_bias_add={skip}, {i}: {error}"


def model_of(spec, cfg: TransformerConfig) -> GPTModel:
    torch.manual_seed(3)
    return GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        vocab_size=128,
        max_sequence_length=S,
        position_embedding_type="rope",
        parallel_output=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def loss_of(model: nn.Module, seed: int = 4) -> Tensor:
    torch.manual_seed(seed)
    tokens = torch.randint(128, (B, S))
    mask = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    return (
        model(tokens, torch.arange(S).expand(B, S), mask, labels=tokens.roll(-1, 1)).float().mean()
    )


def check_checkpoint(model: nn.Module, native: nn.Module) -> None:
    """Distributed checkpoints of both hold the same tensors, and the same objects, which a load
    wants, cut alike, by the same names."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    facts = []
    for one in (model, native):
        tensors = [
            t
            for t in one.sharded_state_dict(metadata=metadata).values()
            if hasattr(t, "global_offset")
        ]
        facts.append(
            sorted(
                (t.key, tuple(t.global_shape), tuple(t.global_offset), tuple(t.replica_id))
                for t in tensors
            )
        )
    assert facts[0] == facts[1], [
        fact for fact in facts[0] + facts[1] if (fact in facts[0]) != (fact in facts[1])
    ]


def check_model(experts_of: int | None) -> None:
    """A GPT whose linear layers are ours is Megatron's own, with the identity recipe; and it trains
    with others."""
    options = (
        {"num_moe_experts": experts_of, "moe_ffn_hidden_size": FFN, "add_bias_linear": False}
        if experts_of
        else {}
    )
    if experts_of:
        options |= {"moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp32"}
    cfg = config(**options)
    native = model_of(
        get_gpt_layer_local_spec(num_experts=experts_of, normalization="RMSNorm"),
        copy.deepcopy(cfg),
    )
    results = []
    for recipe in (None, fq.recipes.identity(), HYBRID):
        grouped = [False, True] if experts_of and recipe is not None else [False]
        for moe_grouped_gemm in grouped:
            model = native
            if recipe is not None:
                its = copy.deepcopy(cfg)
                its.moe_grouped_gemm = moe_grouped_gemm
                spec = ours.gpt_layer_spec(
                    recipe, num_experts=experts_of, moe_grouped_gemm=moe_grouped_gemm
                )
                model = model_of(spec, its)
                state = native.state_dict()
                if moe_grouped_gemm:  # which has a parameter an expert in one layer
                    state = {
                        re.sub(r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", k): v
                        for k, v in state.items()
                    }
                    state = {k: v for k, v in state.items() if "local_experts" not in k}
                model.load_state_dict(state)
                assert (
                    len(ours.weight_proxies(model))
                    == (4 if not experts_of else 2 + 2 * experts_of) * cfg.num_layers
                )
                check_checkpoint(model, native)
            loss = loss_of(model)
            loss.backward()
            norm = (
                sum(
                    float(p.grad.float().square().sum())
                    for p in model.parameters()
                    if p.grad is not None
                )
                ** 0.5
            )
            results.append((float(loss), norm))
            for p in model.parameters():
                p.grad = None
    say(
        "losses and gradient norms, native first: "
        f"{[(round(a, 4), round(b, 4)) for a, b in results]}"
    )
    (loss, norm), (own, own_norm) = results[:2]
    assert (loss, norm) == (own, own_norm) and (not experts_of or results[2] == results[0]), results
    assert all(abs(other - loss) < 1e-2 * loss for other, _ in results), results


# Buffers #


def check_layout() -> None:
    """Who owns which elements: Megatron's layout and ranges, our implementation of its rules, and
    what syncs are planned from."""
    if not hasattr(DistributedOptimizer, "_compute_per_buffer_param_layout"):
        say("0.17 lays buckets out where it allocates them: check_gather compares what they hold")
        return
    torch.manual_seed(5)
    sizes = {f"p{i}": int(n) for i, n in enumerate(torch.randint(1, 5000, (23,)))}
    params = [nn.Parameter(torch.empty(n, dtype=BF16)) for n in sizes.values()]
    for ranks in (1, 2, 3, 4, 5, 6, 12, 64):
        for bucket_size in (1, 3000, 10**9):
            for high_bandwidth in (False, True):
                ddp_config = DistributedDataParallelConfig(
                    use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=high_bandwidth
                )
                theirs = DistributedOptimizer._compute_per_buffer_param_layout(
                    params, bucket_size, ranks, ddp_config
                )
                mine = FlatLayout(sizes, ranks, bucket_size, "even", high_bandwidth)
                assert [(b.start, b.end) for b in mine.buckets] == theirs.bucket_indices
                for name, p in zip(sizes, params):
                    start, end, bucket = theirs.param_index_map[p]
                    assert (start, end - start) == (mine.starts[name], sizes[name])
                    first, last = theirs.bucket_indices[bucket]
                    fake = FakeBucket({p: (start - first, end - first)}, last - first)
                    shards = gather.shard_map(fake, p, ranks)
                    assert shards == mine.shards(name)
                    for rank in range(ranks):
                        part = (last - first) // ranks
                        span = RangeOf(first + rank * part, part)
                        found = DistributedOptimizer._build_model_gbuf_param_range_map(
                            {p: (start, end, bucket)}, span, first
                        )
                        run = (
                            (found[p]["param"].start, found[p]["param"].end) if p in found else None
                        )
                        assert run == (
                            shards.run(rank) if shards.run(rank)[0] < shards.run(rank)[1] else None
                        )


class FakeBucket:
    """What `shard_map` reads of a bucket."""

    def __init__(self, places: dict, size: int):
        self.param_to_index, self.grad_data = places, torch.empty(size, device="meta")


class RangeOf:
    """A range as Megatron's optimizer describes one."""

    def __init__(self, start: int, size: int):
        self.start, self.end, self.size = start, start + size, size


class Trained:
    """A model in Megatron's DDP, its values written by Megatron's optimizer code, over two
    data-parallel ranks, or tensor parallel ones."""

    def __init__(self, recipe: fq.Recipe, codes: bool):
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        cfg = config(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size()
        )
        self.ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=20000,
        )
        self.ddp = DistributedDataParallel(
            cfg, self.ddp_config, model_of(ours.gpt_layer_spec(recipe), cfg)
        )
        # Its constructor takes CUDA tensors alone: its methods are run on attributes that it would
        # have made.
        self.optimizer = made = DistributedOptimizer.__new__(DistributedOptimizer)
        made.is_stub_optimizer, made.ddp_config, made.buffers = (
            False,
            self.ddp_config,
            self.ddp.buffers,
        )
        made.config = OptimizerConfig(
            bf16=True, use_distributed_optimizer=True, optimizer="adam", lr=1e-2
        )
        made.gbuf_ranges = [made._build_gbuf_range_map(buffer) for buffer in made.buffers]
        made.model_param_gbuf_map = made._build_model_param_gbuf_map(made.gbuf_ranges)
        own = list(made.model_param_gbuf_map)
        for p in self.ddp.module.parameters():
            p.main_param = None
        for p in own:
            span = made._get_model_param_range_map(p)["param"]
            p.main_param = p.detach().view(-1)[span.start : span.end].float().clone()
        made.model_float16_groups, made.shard_fp32_from_float16_groups = (
            [own],
            [[p.main_param for p in own]],
        )
        made.model_fp32_groups = made.shard_fp32_groups = []
        self.adam = torch.optim.AdamW([p.main_param for p in own], lr=1e-2)
        if codes:
            gather.gather_codes([self.ddp], made)

    def step(self, seed: int) -> float:
        self.ddp.zero_grad_buffer()
        with self.ddp.no_sync():  # Megatron's reduce-scatter waits for CUDA streams
            loss = loss_of(self.ddp, seed + 100 * self.group.rank())
            loss.backward()
        for buffer in self.ddp.buffers:
            dist.all_reduce(buffer.grad_data, group=self.group)
        for p in self.optimizer.model_float16_groups[0]:
            span = self.optimizer._get_model_param_range_map(p)["param"]
            p.main_param.grad = p.main_grad.view(-1)[span.start : span.end].float()
        self.adam.step()
        self.optimizer._copy_main_params_to_model_params()
        for group in self.ddp.bucket_groups:  # 0.17 does so in finish_grad_sync
            group.param_gather_dispatched = False
        return float(loss)


def check_gather(ranks: str) -> None:
    """Training with codes gathered is training with values gathered, bit for bit, under Megatron's
    DDP and its hooks."""
    for recipe in (
        HYBRID,
        fq.recipes.hybrid("nvfp4", "mxfp8" if ranks == "data" else "fp8_current"),
    ):
        by_values, by_codes = Trained(recipe, False), Trained(recipe, True)
        changed = [type(g).__mro__[1] is gather.GathersCodes for g in by_codes.ddp.bucket_groups]
        losses = [[run.step(seed) for seed in range(4)] for run in (by_values, by_codes)]
        assert losses[0] == losses[1], losses
        assert any(changed)
        refused = False
        try:
            by_codes.ddp.module.state_dict()
        except fq.StaleWeightError:
            refused = True
        assert refused, "a state dict of stale values was handed out"
        for run in (by_values, by_codes):
            # as before a checkpoint or an evaluation
            run.ddp.disable_forward_pre_hook(param_sync=True)
        theirs = by_values.ddp.module.state_dict()
        for key, value in by_codes.ddp.module.state_dict().items():
            if isinstance(value, Tensor):
                assert_same_bytes(value, theirs[key], key)
        assert float(loss_of(by_codes.ddp)) == float(loss_of(by_values.ddp))
        for run in (by_values, by_codes):
            run.ddp.enable_forward_pre_hook()
        say(
            f"{recipe}: losses {[round(x, 4) for x in losses[1]]}, {sum(changed)} of "
            f"{len(changed)} bucket groups send codes"
        )


def on(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    failed = []

    def run(check, *arguments) -> None:
        name = f"{check.__name__}{arguments or ''}"
        if rank == 0:
            print(f"{name}: {check.__doc__.splitlines()[0]}", flush=True)
        try:
            check(*arguments)
        except Exception:
            failed.append(name)
            print(f"FAILED on rank {rank}: {name}\n{traceback.format_exc()}", flush=True)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if rank == 0:
        run(check_signatures)
        run(check_settings)
        run(check_layout)
    for sequence_parallel in (False, True):
        run(check_layers, sequence_parallel)
    run(check_gather, "tensor")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    run(check_model, None)
    run(check_model, 4)
    run(check_gather, "data")
    if failed:
        os._exit(1)
    dist.barrier()
    os._exit(0)  # gloo workers sometimes abort in their destructors


def main() -> None:
    print(__doc__.split("\n\n")[2])
    torch.cuda.current_device = lambda: "cpu"
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        ranks = [context.Process(target=on, args=(rank, f"{folder}/store")) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("the contract is broken: see above")
    print("the contract holds")


if __name__ == "__main__":
    main()
