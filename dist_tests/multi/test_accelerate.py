"""accelerate's FSDP2 path, which matches an optimizer's parameters by their memory before and after it shards them."""

from __future__ import annotations

import os

import pytest
import torch

import fsdp_quant as fq
from dist_tests.multi.harness import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def _train(rank: int, world: int, recipe: str | None, mixed_precision: str) -> tuple[int, list[str], list[float]]:
    """(distinct parameters of the optimizer, names that three steps did not change, losses)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    for state in (AcceleratorState, PartialState):  # accelerate takes this path for GPUs alone
        state._shared_state["distributed_type"] = DistributedType.FSDP
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    accelerator.scaler = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, use_cache=False,
    ))
    if recipe is not None:
        fq.convert(model, getattr(fq.recipes, recipe)(), skip=["lm_head"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, losses = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}
    distinct = len({id(p) for group in optimizer.param_groups for p in group["params"]})
    return distinct, [name for name, value in before.items() if torch.equal(after[name].float(), value.float())], losses


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_trains_every_parameter(mixed_precision: str):
    """If false, accelerate's optimizer steps parameters that the model does not have, and most weights never change."""
    for distinct, unchanged, losses in run_ranks(2, _train, "mxfp8", mixed_precision):
        assert distinct == 21 and unchanged == [], (distinct, unchanged)
        assert losses[2] < losses[0]
