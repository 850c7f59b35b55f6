# SPDX-License-Identifier: Apache-2.0
"""Small models, recorders and oracles that the multi-rank laws share."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests import laws
from fsdp_quant.context import STEP
from fsdp_quant.formats import COLUMNWISE, ROWWISE
from fsdp_quant.linear import call, fused
from fsdp_quant.linear.plan import build_plan
from fsdp_quant.quantizer import HybridQuantizer, Quantizer
from fsdp_quant.recipe import Role
from fsdp_quant.roles import slot_ids

K = 32


def pair_slots(role: Role, rowwise: str, columnwise: str):
    """qfactory: every tensor gets `rowwise` for the forward and `columnwise` for the backward."""
    if role.tensor_type not in ("input", "weight", "grad_output"):
        return None
    return HybridQuantizer(Quantizer(rowwise), Quantizer(columnwise))


def pair_recipe(rowwise: str, columnwise: str, **options) -> fq.Recipe:
    return fq.Recipe(
        "pair", pair_slots, (("columnwise", columnwise), ("rowwise", rowwise)), **options
    )


class Block(nn.Module):
    """Residual two-layer MLP [*, K] -> [*, K] with a norm (a parameter that is not quantized)."""

    def __init__(self, hidden: int, k: int = K):
        super().__init__()
        self.norm = nn.LayerNorm(k)
        self.up, self.down = nn.Linear(k, hidden), nn.Linear(hidden, k, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding-free stack of blocks and a head; `recompute` checkpoints each block."""

    def __init__(self, hidden=(33, 48), k: int = K, out: int = 5, recompute: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(h, k) for h in hidden)
        self.head = nn.Linear(k, out)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def build(seed: int = 0, **kwargs) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs)


def shard(net: Net, by=fully_shard, **kwargs) -> Net:
    for block in net.blocks:
        by(block, **kwargs)
    return by(net, **kwargs)


class WholeWeightLinear(nn.Linear):
    """The oracle: a plain parameter, gathered in high precision by FSDP2 and quantized whole on
    every rank."""

    def forward(self, x):
        save = self.weight.requires_grad and torch.is_grad_enabled()
        of_call = call.Call(self._plan, save, STEP.on(x.device), self._ids.to(x.device))
        return fused.linear(x, self.weight, self.bias, of_call)


def as_oracle(net: nn.Module, recipe: fq.Recipe) -> nn.Module:
    for name, module in net.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = WholeWeightLinear
            module._plan, module._ids = build_plan(recipe, name), slot_ids(name)
    return net


def batch(step: int = 0, rows: int = 16, rank: int = 0, k: int = K) -> torch.Tensor:
    return laws.values(rows, k, seed=100 + step * 17 + rank, dtype=torch.float32)


def adam(net: nn.Module) -> torch.optim.AdamW:
    """AdamW that takes lists of tensors, as on a GPU: DTensors are dispatched once an operation,
    not once a parameter."""
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)


def train_step(net, optimizer, step: int, rank: int = 0, micro_batches: int = 1) -> torch.Tensor:
    """One step on seeded data; returns the last output. Random bits do not depend on the number of
    ranks."""
    with fq.token_offset(0):
        fq.begin_step(step)
        for micro in range(micro_batches):
            y = net(batch(step * 10 + micro, rank=rank))
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole high-precision value of a (sharded) parameter."""
    plain = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return (
        plain.detach().clone()
        if type(plain) is torch.Tensor
        else torch.empty(0).new_tensor(plain.detach().tolist())
    )


def full_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state dict; every rank must call it."""

    def whole(v: torch.Tensor) -> torch.Tensor:  # NCCL gathers no shards that were offloaded
        return (
            v.to(v.device_mesh.device_type).full_tensor() if hasattr(v, "full_tensor") else v
        ).clone()

    return {k: whole(v) for k, v in net.state_dict().items()}


def assert_equals_fresh(net: Net, recipe: fq.Recipe, what: str) -> None:
    """The output of a sharded net is that of a fresh one with the same masters; every rank must
    call it."""
    fresh = build()
    fresh.load_state_dict(full_state(net))
    shard(fq.convert(fresh, recipe))
    x = batch(7)
    with torch.no_grad():
        laws.assert_same_bytes(net(x), fresh(x), f"output after {what}")
    for module in (net, *net.blocks):
        module.reshard()


@contextlib.contextmanager
def recorded_weights():
    """Collect (direction, clone of the weight's storage) of every product that reads a weight."""
    seen = []
    original = call.weight_operands

    def recording(weight, *options):
        storages = original(weight, *options)
        seen.extend(
            (direction, s.map(torch.clone), type(weight).__name__)
            for direction, s in storages.items()
        )
        return storages

    call.weight_operands = recording
    try:
        yield seen
    finally:
        call.weight_operands = original


@contextlib.contextmanager
def recorded_collectives():
    """Collect (operation, bytes of the result) of every collective of this rank, in order."""
    seen: list[tuple[str, int]] = []
    names = [
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_reduce",
    ]
    originals = {n: getattr(dist, n) for n in names if hasattr(dist, n)}

    def recorder(name, original):
        def call(output, *args, **kwargs):
            kind = name.replace("_into_tensor", "").replace("_tensor", "").replace("_single", "")
            if "output" in kwargs:
                output = kwargs["output"]
            seen.append((kind, output.numel() * output.element_size()))
            return original(output, *args, **kwargs)

        def call_keywords(*args, **kwargs):
            if args:
                return call(*args, **kwargs)
            output = kwargs.pop("output", None)
            if output is None:
                output = kwargs.pop("output_tensor")
            return call(output, **kwargs)

        return call_keywords

    for name, original in originals.items():
        setattr(dist, name, recorder(name, original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def expected_storages(
    recipe: fq.Recipe, name: str, weight: torch.Tensor, dtype=torch.float32
) -> dict:
    """Direction -> storage of quantizing the whole weight in one process."""
    hybrid = recipe.hybrid(Role("linear", "weight", name))
    made = {}
    for direction in (ROWWISE, COLUMNWISE):
        quantized = hybrid.side(direction).fmt.is_quantized
        source = (
            weight.to(recipe.compute_dtype or weight.dtype)
            if quantized or hybrid.is_derived
            else weight.to(dtype)
        )
        made[direction] = hybrid.storages(source, [direction])[0][direction]
    return made
