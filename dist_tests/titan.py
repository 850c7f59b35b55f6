# SPDX-License-Identifier: Apache-2.0
"""torchtitan 0.3.0 on CPUs, with the debug models and random tokens; to be imported before anything
of torchtitan.

torchtitan runs on GPUs and with a torch that is later than 2.13. What stands in for what is not
there, none of it near a linear layer. On CPUs: the device module, attention (flex_attention has no
backward there), averages of gloo. Everywhere: two functions of later torches (`set_timeout`; `step`
of a pipeline that is given micro-batches), and packages of its data that are not installed. With
torch 2.11: a class that only annotations name, an option of attention's masks that changes no
value, and the loss in one piece (its chunks read the head behind its norm, which that torch's FSDP2
frees). With FSDP_QUANT_TEST_DEVICE=cuda it runs on GPUs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import abc, machinery, util
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.attention import flex_attention

TORCH_2_11 = not hasattr(torch_fsdp, "DataParallelMeshDims")
if TORCH_2_11:
    torch_fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    _block_mask = flex_attention.create_block_mask

    def _create_block_mask(*args, separate_full_blocks=True, **kwargs):
        return _block_mask(*args, **kwargs)

    flex_attention.create_block_mask = _create_block_mask
from torchtitan.tools import utils  # noqa: E402


class _Absent(abc.MetaPathFinder, abc.Loader):
    """Packages that torchtitan imports for its own data, which is not read here."""

    names = {name for name in ("datasets", "tokenizers", "PIL") if util.find_spec(name) is None}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.names:
            return machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock()
        return module

    def exec_module(self, module) -> None:
        """Has no content."""


sys.meta_path.append(_Absent())
_CPU = SimpleNamespace(
    get_device_name=lambda device=None: "CPU",
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda device: None,
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 34),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=lambda: None,
)
ON_CPU = os.environ.get("FSDP_QUANT_TEST_DEVICE", "cpu") == "cpu"
if ON_CPU:
    utils.device_type, utils.device_module = "cpu", _CPU

from torchtitan import trainer as titan  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import activation_checkpoint, fsdp  # noqa: E402, F401
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel  # noqa: E402


def _attention(q, k, v, *, scale, enable_gqa, **_):
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    ), None


def _undivided(model) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(dist.get_backend() != "nccl")


def _step(self, *, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs) -> None:
    self._stage.has_backward = self._has_backward
    self._stage.clear_runtime_states()
    inputs = arg_mbs or [()] * self._n_microbatches
    self._step_microbatches(
        inputs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


if ON_CPU:
    FlexAttention.compiled_flex_attn = staticmethod(_attention)
fsdp.disable_fsdp_gradient_division = _undivided
dist_utils.set_pg_timeouts = lambda **_: None
PipelineScheduleSingle.step = _step
titan.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=titan.time.perf_counter)


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str):
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def get_vocab_size(self) -> int:
        return 256


class Tokens(BaseDataLoader):
    """Random rows of 256 tokens; those of a step are the same on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_,
    ):
        self.read, self.own = 0, (dp_rank, dp_world_size)
        self.size = local_batch_size, seq_len

    def __iter__(self):
        (rank, world), (rows, length) = self.own, self.size
        while True:
            generator = torch.Generator().manual_seed(self.read)
            ids = torch.randint(256, (rows * world, length + 1), generator=generator)[
                rank * rows :
            ][:rows]
            self.read += 1
            yield (
                {"input": ids[:, :-1], "positions": torch.arange(length).expand(rows, length)},
                ids[:, 1:].contiguous(),
            )

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state.get("read", 0)


MODELS = {
    "llama3": llama3_debugmodel,
    "llama3_8b": llama3_8b,
    "deepseek_v3": deepseek_v3_debugmodel,
}


def config(model: str = "llama3", folder: str = "outputs", **settings) -> titan.Trainer.Config:
    """The configuration of a model of two layers.

    settings:  by name, the dots written as two underscores: training__steps=3.
    """
    made = MODELS[model]()
    made.model_spec.model.layers = made.model_spec.model.layers[:2]
    made.tokenizer, made.dataloader, made.dump_folder = Tokenizer.Config(), Tokens.Config(), folder
    made.activation_checkpoint = None
    if TORCH_2_11:
        made.loss = made.loss.loss_fn
    settings = {
        "training__local_batch_size": 2,
        "training__seq_len": 64,
        "training__steps": 3,
        "training__disable_cuda_graphs": True,
        "parallelism__spmd_backend": "partial_dtensor",
        "debug__seed": 0,
        "debug__deterministic": True,
    } | settings
    for name, value in settings.items():
        *path, last = name.split("__")
        owner = made
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made
