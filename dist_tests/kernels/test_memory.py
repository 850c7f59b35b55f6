# SPDX-License-Identifier: Apache-2.0
"""What a training step holds on a GPU: tensors are let go when they have served, and only where
nobody else has them."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp_quant as fq
from dist_tests.kernels.test_gemm import RECIPES
from dist_tests.laws import assert_same_bytes, values
from fsdp_quant import recipes
from fsdp_quant.context import STEP
from fsdp_quant.models.norm_op import activate
from fsdp_quant.ops import native
from fsdp_quant.ops.norm import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not native.is_available_on(torch.device("cuda")),
    reason="needs the compiled kernels and a GPU",
)
BF16 = torch.bfloat16
MIB = 2**20


def on_gpu(*shape: int, seed: int = 0) -> Tensor:
    return values(*shape, seed=seed, dtype=BF16).cuda()


def gradients(
    kind: int, is_deferred: bool, x: Tensor, dh: Tensor, holder: str
) -> tuple[list[Tensor], list[bool]]:
    """dg and du of act(x + 1) * (x + 2), and whether each is where its operand was; holder: who has
    the operands besides."""
    g, u = x + 1, x + 2
    places, made, are_there = [g.data_ptr(), u.data_ptr()], [None, None], [False, False]

    def see(i: int, gradient: Tensor) -> None:
        made[i], are_there[i] = gradient.clone(), gradient.data_ptr() == places[i]

    for i, t in enumerate((g, u)):
        t.register_hook(functools.partial(see, i))
    outputs, of_outputs = (
        [
            native.activate(g, u, kind, unmaterialized=True)[0]
            if is_deferred
            else activate(g, u, kind)[0]
        ],
        [dh],
    )
    kept = [g, u.detach()] if holder == "user" else []
    if holder == "graph":
        outputs, of_outputs = (
            [*outputs, g.square(), u.square()],
            [dh, torch.zeros_like(dh), torch.zeros_like(dh)],
        )
    del g, u, t
    torch.autograd.backward(outputs, of_outputs, retain_graph=holder == "retained")
    for t, added in zip(kept, (1, 2)):
        assert_same_bytes(t.detach(), x.detach() + added, f"x + {added}")
    return made, are_there


@pytest.mark.parametrize("is_deferred", (False, True))
def test_gradients_take_the_memory_of_gate_and_up_where_nobody_else_has_it(is_deferred: bool):
    """If false, a block's widest tensors are there twice in its backward; or what a user or another
    node holds is written."""
    x, dh, kind = (
        on_gpu(64, 256).requires_grad_(),
        on_gpu(64, 256, seed=1),
        ACTIVATIONS["swiglu"].kind,
    )
    want, are_there = gradients(kind, is_deferred, x, dh, "nobody")
    assert are_there == [True, True]
    for holder in ("user", "graph", "retained"):
        got, are_there = gradients(kind, is_deferred, x, dh, holder)
        assert are_there == [False, False], holder
        for a, b in zip(got, want):
            # adding another node's zeros takes the sign of -0.0
            assert_same_bytes(a + 0, b + 0, holder)


def peak_of(module: torch.nn.Module, x: Tensor, dy: Tensor, steps: int = 3) -> int:
    """Largest memory of a step beyond the model, in bytes; a step ends with a write of the
    parameters."""
    optimizer, before = torch.optim.SGD(module.parameters(), lr=0.0), torch.cuda.memory_allocated()
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        module(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_codes_of_a_weight_are_let_go_when_they_have_served():
    """If false, an unsharded model holds twice the codes that its backward multiplies, and those to
    the end of the step."""
    x, dy = on_gpu(64, 1024), on_gpu(64, 1024, seed=1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024, bias=False, dtype=BF16) for _ in range(8))
    ).cuda()
    fq.convert(model, recipes.fp8_block())
    # Eight weights of 1 MiB a direction; gradients 2 MiB each. A node holds one direction, and
    # frees it as its gradient is
    # made: 8 gradients at the end of the backward; the rest for activations and what one forward
    #       quantizes.
    assert peak_of(model, x, dy) < 8 * 2 * MIB + 3 * MIB


# Offload #


def net(name: str, checkpointed: bool | None = None, layers: int = 6) -> torch.nn.Module:
    """checkpointed: every layer, reentrant or not; None: none."""
    torch.manual_seed(0)
    options = {"residual": True, "bias": False, "normalization": "RMSNorm"}
    options |= {"device": "cuda", "dtype": BF16}
    made = torch.nn.ModuleList(
        fq.LayerNormMLP(256, 512, recipe=RECIPES[name](), name=f"{i}", **options)
        for i in range(layers)
    )
    made.append(torch.nn.Linear(256, 256, device="cuda", dtype=BF16))

    def forward(x: Tensor) -> Tensor:
        for layer in made:
            x = (
                layer(x)
                if checkpointed is None
                else checkpoint(layer, x, use_reentrant=checkpointed)
            )
        return x

    made.forward = forward
    return made


def grads(module: torch.nn.Module, context, retain: bool = False) -> list[Tensor]:
    STEP.step = 0
    STEP.publish()
    module.zero_grad()
    x, dy = on_gpu(512, 256, seed=4).requires_grad_(), on_gpu(512, 256, seed=5)
    with context:
        y = module(x)
    if retain:
        y.backward(dy, retain_graph=True)
        module.zero_grad()
        x.grad = None
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("name", list(RECIPES))
def test_offloading_changes_no_bit(name: str):
    """If false, saved tensors come back before they have left, or as those of another layer."""
    want = grads(net(name), contextlib.nullcontext())
    for checkpointed in (None, True, False):
        module = net(name, checkpointed)
        for in_flight in (0, 2**20, 2**30):
            offload = fq.memory.offload(module, min_bytes=0, in_flight=in_flight)
            for retain in (False, True) if checkpointed is None else (False,):
                for i, (got, wanted) in enumerate(zip(grads(module, offload, retain), want)):
                    assert_same_bytes(
                        got.cpu(),
                        wanted.cpu(),
                        f"{name}, {checkpointed}, {in_flight}, retained {retain}: {i}",
                    )


def test_offloaded_tensors_leave_the_device_and_nothing_grows():
    """If false, offloading costs copies and saves no memory, or keeps some of it at each step."""
    module, x = net("fp8_current", layers=12), on_gpu(8192, 256)
    offload, held, before = fq.memory.offload(module, min_bytes=2**16, in_flight=2 * 2**20), [], 0
    plain = contextlib.nullcontext()
    for context in (plain, plain, plain, offload, offload, offload):
        if len(held) == 4:  # workspaces are there
            before = held[3]
        with context:
            y = module(x)
        held.append(torch.cuda.memory_allocated() - before)
        y.backward(x)
        module.zero_grad()
        del y
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
    kept, offloaded = held[4], held[6::2]
    # A layer keeps 4 + 2 + 8 + 8 + 4 MiB; statistics stay.
    assert kept > 12 * 25 * MIB and max(offloaded) < 12 * MIB + 20 * MIB, held
    assert max(held[5::2]) <= MIB, held
    assert sum(ref() is not None for ref in offload._copies) == 0


def test_a_write_to_a_tensor_that_leaves_is_refused():
    """If false, the host gets a mixture of old and new values."""
    x = on_gpu(512, 512).requires_grad_()
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        fq.memory.offload(min_bytes=0),
    ):
        y = x * 2
        z = y * y
        y.mul_(2)
    del z
