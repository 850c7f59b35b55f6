# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's GPTModel, trained by its schedules, DDP and distributed optimizer: its layers in
bf16, and ours. On CPUs `_cpu_for_cuda` stands in for the device that its code names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dist_tests.contract.megatron import config
from dist_tests.contract.on_ranks import Curve, Run, tokens
from fsdp_quant.integrations.megatron import gpt_layer_spec
from fsdp_quant.integrations.megatron.gather import GathersCodes, gather_codes

BATCH, MICRO_BATCHES, VOCABULARY, EXPERTS = 8, 2, 256, 4


class _OnCPU(TorchFunctionMode):
    """Tensors that are made on "cuda", or moved there, are the CPU's; their types' names are
    CUDA's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@contextlib.contextmanager
def _cpu_for_cuda() -> Iterator[None]:
    stream = mock.MagicMock()
    stands_in = dict(
        current_device=lambda: "cpu",
        current_stream=lambda *_: stream,
        Stream=lambda *_, **__: stream,
        stream=lambda *_: contextlib.nullcontext(),
        synchronize=lambda *_: None,
        manual_seed=lambda *_: None,
        get_rng_state=lambda *_: torch.zeros(1),
    )
    tracker = tensor_parallel.random
    with (
        mock.patch.multiple(torch.cuda, **stands_in),
        mock.patch.object(
            tracker.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()
        ),
        mock.patch.object(tracker, "_set_cuda_rng_state", lambda *_, **__: None),
        _OnCPU(),
    ):
        yield


class _Norm(nn.RMSNorm):
    """With sequence parallelism, which Megatron's wrapper of torch's norms refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class _Attention(nn.Module):
    """torch's causal attention, [S, B, heads, N]: Megatron's own writes the scores to memory."""

    def __init__(self, config: Any, *_, **__):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_, **__) -> Tensor:
        heads = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def _spec(arm: str, experts: int | None) -> Any:
    if arm == "bf16":
        spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    else:
        grouped = experts is not None
        spec = gpt_layer_spec(arm, num_experts=experts, moe_grouped_gemm=grouped)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    spec.submodules.self_attention.submodules.core_attention = _Attention
    return spec


def _global_name(name: str, model: GPTModel) -> str:
    """The same on any number of ranks, in modules of one expert and of several."""

    def layer(found: re.Match) -> str:
        return f"layers.{model.decoder.layers[int(found[1])].layer_number - 1}."

    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS
    first //= parallel_state.get_expert_model_parallel_world_size()
    name = re.sub(r"layers\.(\d+)\.", layer, name)
    name = re.sub(r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", name)
    return re.sub(r"(fc[12]\.weight)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first}", name)


@torch.no_grad()
def _set_values(run: Run, model: GPTModel) -> None:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, p in model.named_parameters():
        whole, dim = list(p.shape), getattr(p, "partition_dim", -1)
        is_cut = dim >= 0 and getattr(p, "tensor_model_parallel", False) and ".experts." not in name
        if is_cut:
            whole[dim] *= ranks
        new = run.values(_global_name(name, model), tuple(whole))
        p.copy_(new.chunk(ranks, dim)[rank] if is_cut else new)


def _mark_experts(cfg: Any, model: GPTModel) -> None:
    """As Megatron-Core 0.19 does: before, without EP, experts that TP does not cut learned on each
    rank from its rows alone (NVIDIA/Megatron-LM#5916)."""
    if cfg.expert_tensor_parallel_size != cfg.tensor_model_parallel_size:
        for name, p in model.named_parameters():
            if ".experts." in name:
                vars(p)["allreduce"] = False


class _Trained:
    """A model and what trains it."""

    def __init__(self, run: Run, arm: str, experts: int | None, codes: bool, **layout: Any):
        sizes = run.choose(
            dict(num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=2),
            dict(num_layers=4, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=4),
            dict(num_layers=4, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32),
        )
        self.length = run.choose({"n": 64}, {"n": 512}, {"n": 2048})["n"]
        if experts:
            moe = dict(
                num_moe_experts=experts,
                moe_ffn_hidden_size=sizes["ffn_hidden_size"],
                moe_router_topk=2,
                moe_router_dtype="fp32",
                moe_router_load_balancing_type="none",
                moe_token_dispatcher_type="alltoall" if run.on_gpu else "allgather",
                moe_grouped_gemm=arm != "bf16",
            )
            layout = moe | layout
        cfg = config(**sizes, add_bias_linear=False, **layout)
        cfg.use_cpu_initialization = not run.on_gpu
        first = parallel_state.is_pipeline_first_stage()
        last = parallel_state.is_pipeline_last_stage()
        count = cfg.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
        model = GPTModel(
            config=cfg,
            transformer_layer_spec=TransformerBlockSubmodules(
                [_spec(arm, experts)] * count, layer_norm=_Norm
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=self.length,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            parallel_output=True,
            share_embeddings_and_output_weights=False,
        )
        _set_values(run, model)
        _mark_experts(cfg, model)
        self.ddp = DistributedDataParallel(
            cfg,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
            ),
            Float16Module(cfg, model.cuda() if run.on_gpu else model),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
                lr=2e-4,
                weight_decay=0.0,
            ),
            [self.ddp],
        )
        cfg.finalize_model_grads_func = finalize_model_grads
        cfg.grad_scale_func = self.optimizer.scale_loss
        cfg.no_sync_func = self.ddp.no_sync
        if codes:
            gather_codes([self.ddp], self.optimizer)
            assert any(isinstance(group, GathersCodes) for group in self.ddp.bucket_groups)
        self.ddp.start_param_sync(force_sync=True)
        self.run = run

    def _forward(self, batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable]:
        rows = next(batches)
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        place = torch.arange(self.length, device=x.device).expand_as(x)
        mask = torch.ones(1, 1, self.length, self.length, dtype=torch.bool, device=x.device).triu(1)

        def loss_of(output: Tensor) -> tuple[Tensor, dict]:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}  # which the schedule divides in place

        return model(x, place, mask, labels=y), loss_of

    def step(self, i: int) -> float:
        rows = tokens(i, BATCH, self.length + 1, VOCABULARY, self.run.device)
        group = parallel_state.get_data_parallel_group()
        own = rows.chunk(group.size())[group.rank()].chunk(MICRO_BATCHES)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(own),
            model=[self.ddp],
            num_microbatches=MICRO_BATCHES,
            seq_length=self.length,
            micro_batch_size=len(own[0]),
            forward_only=False,
        )
        self.optimizer.step()
        known = [float(each["loss"]) for each in losses]
        return sum(known) / len(known) if known else float("nan")


def _arms(
    run: Run,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    experts: int | None = None,
    codes: bool = False,
    **layout: Any,
) -> dict[str, Curve]:
    tp, pp, ep = (min(n, run.world) for n in (tp, pp, ep))
    curves = {}
    with contextlib.nullcontext() if run.on_gpu else _cpu_for_cuda():
        etp = 1 if experts else None
        parallel_state.initialize_model_parallel(
            tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        layout |= dict(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        for arm in ("bf16", run.recipe):
            trained = _Trained(run, arm, experts, codes and arm != "bf16", **layout)
            curves[arm] = run.curve(trained.step)
    return curves


# TP 2 x DP of the other ranks, sequence parallelism, our gathers of codes
tensor = partial(_arms, tp=2, codes=True)
pipeline = partial(_arms, pp=2)
experts = partial(_arms, ep=2, experts=EXPERTS)
# Shared experts between the ranks of TP 2, which gather and sum beside the dispatcher
shared_experts = partial(
    _arms,
    tp=2,
    experts=EXPERTS,
    codes=True,
    moe_shared_expert_intermediate_size=256,
    moe_shared_expert_overlap=True,
    moe_token_dispatcher_type="alltoall",
)
