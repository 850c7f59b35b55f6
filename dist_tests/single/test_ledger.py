# SPDX-License-Identifier: Apache-2.0
"""What `bench.llama` counts without a GPU: what compiled layers save for their backward (--ledger),
and the work of a token; and the turns of `bench.host`."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests.bench import host, ledger, llama
from fsdp_quant import recipes

D, HIDDEN, TOKENS = 64, 128, 256


class Block(nn.Module):
    """A norm, attention, and SwiGLU; [1, TOKENS, D] -> the same."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-6)
        self.qkv, self.o = nn.Linear(D, 3 * D, False), nn.Linear(D, D, False)
        self.gate, self.up = nn.Linear(D, HIDDEN, False), nn.Linear(D, HIDDEN, False)
        self.down = nn.Linear(HIDDEN, D, False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, TOKENS, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o(y.transpose(1, 2).reshape(1, TOKENS, D))
        return self.down(F.silu(self.gate(y)) * self.up(y))


def captured(recipe: fq.Recipe | None) -> ledger.Captured:
    torch.manual_seed(0)
    block = Block().bfloat16()
    x = torch.randn(1, TOKENS, D).bfloat16().requires_grad_()
    with ledger.on_gpu() if recipe else contextlib.nullcontext():
        block = fq.convert(block, recipe) if recipe else block
        return ledger.capture(block, lambda: block(x))


def units(rows: list[ledger.Saved], kind: str = ledger.COMPUTED) -> float:
    return ledger.total(rows, kind) / (D * TOKENS)


def test_a_layer_that_saves_its_inputs_computes_them_again_from_what_is_saved_anyway():
    """If false, a compiled layer keeps codes, or a second copy in bf16, of what its backward can
    quantize again, keeps values where codes are smaller, or the ledger counts memory twice."""
    amax = 4 / D
    # q, k and v; y of attention, and its sums; rstd; gate; up
    shared = 6 + 2 + 4 * amax + amax + 4 + 4
    plain = ledger.saved(captured(None))
    assert abs(units(plain) - (shared + 2 + 2 + 4)) < 0.01  # outputs of the norm, of o, of SwiGLU
    assert units(plain, ledger.GIVEN) == 2  # x

    graphs = {s: captured(recipes.fp8_current(save_original_input=s)) for s in (None, True)}
    rows = ledger.saved(graphs[None])
    found = [r.source for r in rows if r.dtype == "uint8" and r.size >= D * TOKENS]
    assert sorted(found) == ["down", "gate", "o", "qkv"]
    assert abs(units(rows) - (shared + 3 + 2)) < 0.01
    # The codes of gate's input, which a product wrote, are smaller than its values.
    assert abs(units(ledger.saved(graphs[True])) - (shared + 1 + 3 * amax)) < 0.01
    moved = {
        s: sum(ledger.quantizing_bytes(g, TOKENS) for g in (of.forward, of.backward))
        for s, of in graphs.items()
    }
    # Operands are read twice, and those that are computed twice are written twice.
    assert moved[True] - moved[None] == (2 * 3 + 4 + 2 + 4) * D * TOKENS


def test_a_layer_saves_no_codes_of_weights():
    """If false, codes of a weight that both directions share live from the forward to the
    backward: a byte per weight, where other formats quantize weights again."""
    for saves_input in (None, True):
        of_blocks, of_tensor = (
            [r.size for r in ledger.saved(captured(recipe)) if r.dtype == "uint8"]
            for recipe in (
                recipes.fp8_block(save_original_input=saves_input),
                recipes.fp8_current(save_original_input=saves_input),
            )
        )
        assert sorted(of_blocks) == sorted(of_tensor)


def test_a_token_is_multiplied_by_its_experts_alone():
    """If false, a mixture's MFU counts experts that a token does not visit, and exceeds 1."""
    weights = {}
    for experts in (8, 16):
        options = ["--tiny", "--tokens", "64", "--model", "mixtral", "--experts", str(experts)]
        args = llama.parser().parse_args([*options, "--layers", "2"])
        args.size = llama.TINY
        net = llama.model(args, torch.device("cpu"))
        router = 2 * experts * 64
        weights[experts] = llama.flops_of_token(net, 64) / 6 - router
    assert weights[8] == weights[16]


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """If false, `bench.host` times a model in a row, whose host may have slowed down, or times the
    compilation too."""
    taken, step_of = [], host.step_of

    def noted(arm: llama.Arm, *args):
        step = step_of(arm, *args)
        return lambda: (taken.append(arm.name), step())

    arguments = ["--tiny", "--layers", "1", "--backend", "aot_eager", "--arms", "bf16"]
    monkeypatch.setattr(sys, "argv", ["host", *arguments, "--steps", "2"])
    monkeypatch.setattr(host, "step_of", noted)
    host.main()
    assert taken == ["bf16 compiled", "bf16 eager"] * 3
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("bf16 compiled ") and " 1.000 " in first
    assert second.startswith("bf16 eager ")
    torch.compiler.reset()
