# SPDX-License-Identifier: Apache-2.0
"""What anchors add to a product's error, as the guard estimates it, against exact products of the
same operands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dist_tests import laws
from dist_tests.product_error import product_error
from fsdp_quant.encoded_matrix import EncodedMatrix
from fsdp_quant.formats import E4M3, E5M2, ROWWISE, Encoding, Format, anchored_format, format_of
from fsdp_quant.ops import reference
from fsdp_quant.ops.layout import (
    ANCHOR_RUNS,
    ANCHORED_128,
    ANCHORED_TENSOR,
    ANCHORED_TILE,
    ANCHORS,
    ANCHORS_OF_BOTH,
)
from fsdp_quant.recipe import Recipe
from fsdp_quant.storage import Storage

BF16 = torch.bfloat16
TOLERANCE = Recipe.__dataclass_fields__["anchor_tolerance"].default
SIZE, DEPTH = 256, 4096


def exact(x: Tensor, fmt: Format) -> Storage:
    e = Encoding(fmt, ROWWISE)
    made = reference.encode(x, *reference.statistics(x, e), e)
    return Storage(fmt, ROWWISE, tuple(x.shape), *made, None, x.dtype)


def anchored(x: Tensor, fmt: Format, rung: str, is_weight: bool) -> EncodedMatrix:
    """As a product on this rung reads an activation, or a weight, whose codes are made first."""
    if is_weight:
        return exact(x, fmt).to_gemm_operand(rung)
    rung = ANCHORED_128 if rung == ANCHORED_TILE else rung
    of = anchored_format(fmt, ANCHOR_RUNS.get(rung), whole=rung == ANCHORED_TENSOR)
    e = Encoding(of, ROWWISE)
    codes, scale = reference.encode(x, *reference.statistics(x, e), e)
    scale = scale.flatten() if ANCHOR_RUNS.get(rung) is None else scale.t().contiguous()
    return EncodedMatrix(fmt, ROWWISE, tuple(x.shape), codes, scale, None, x.dtype, 0, rung)


def measured(
    a: Tensor, b: Tensor, rung: str, fmt: Format, is_weight: bool = True
) -> tuple[float, float, float]:
    """(what anchors add to the worst row, and to the worst column, over the error of the formats,
    of exact products; what is estimated)."""
    own = [exact(t, fmt).decode().double() for t in (a, b)]
    of = anchored(a, fmt, rung, False), anchored(b, fmt, rung, is_weight)
    made = [s.decode().double() for s in of]
    want, formats, lost = (x @ w.t() for x, w in ((a.double(), b.double()), own, made))
    rows, cols = (
        ((lost - formats).norm(dim=d) / (formats - want).norm(dim=d)).max().item() for d in (1, 0)
    )
    runs = [None if s.operand_format.block[1] is None else s.scale for s in of]
    if of[1].layout == ANCHORED_TILE:  # a scale for each of its lines
        runs[1] = runs[1].t().repeat_interleave(128, 1)[:, : len(of[1].data)]
    extra, own_error = product_error(
        *((s.data, r, s.operand_format) for s, r in zip(of, runs)),
        (True, True),
        of_tokens=is_weight,
    ).tolist()
    return rows, cols, math.sqrt(extra / own_error)


def judged(
    case: str, a: Tensor, b: Tensor, fmt: Format = format_of("mxfp8"), is_weight: bool = True
) -> dict[str, bool]:
    """Rung -> does the guard fire? It must where rows lose five times the tolerance, and must not
    where neither they nor columns lose half of it."""
    fired = {}
    for rung in ANCHORS if is_weight else ANCHORS_OF_BOTH:
        rows, cols, estimate = measured(a, b, rung, fmt, is_weight)
        fired[rung] = estimate > TOLERANCE
        assert fired[rung] or rows <= 5 * TOLERANCE, (
            f"{case}, {rung}: silent at {rows:.2g} (estimated {estimate:.2g})"
        )
        assert not fired[rung] or max(rows, cols) >= TOLERANCE / 2, (
            f"{case}, {rung}: fires at {rows:.2g}, {cols:.2g} ({estimate:.2g})"
        )
    return fired


def spread(*shape: int, sigma: float, seed: int = 1) -> Tensor:
    return (sigma * laws.values(*shape, seed=seed, dtype=torch.float32)).exp()


def gauss(seed: int = 0, rows: int = SIZE) -> Tensor:
    return laws.values(rows, DEPTH, seed=seed, dtype=torch.float32)


def one_channel(x: Tensor, factor: float) -> Tensor:
    x = x.clone()
    x[:, 7] *= factor
    return x


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    x, w = gauss(), gauss(2) * 0.02
    made = {"gauss": (x, w)}
    for sigma in (1, 2, 3, 4):
        made[f"blocks of sizes lognormal({sigma})"] = (
            x * spread(SIZE, DEPTH // 32, sigma=sigma).repeat_interleave(32, 1),
            w,
        )
        made[f"rows of sizes lognormal({sigma})"] = x * spread(SIZE, 1, sigma=sigma), w
    for sigma in (1, 2, 3):
        c = spread(1, DEPTH, sigma=sigma)
        made[f"columns of sizes lognormal({sigma})"] = x * c, w
        made[f"columns of sizes lognormal({sigma}), over those of the weight"] = x * c, w / c
    made["one channel times 1e5"] = one_channel(x, 1e5), w
    made["one channel times 1e5, its weights over 1e5"] = one_channel(x, 1e5), one_channel(w, 1e-5)
    made["half zeros"] = x.relu(), w
    made["heavy tails"] = laws.values(SIZE, DEPTH, kind="heavy", dtype=torch.float32), w
    return {name: (a.to(BF16), b.to(BF16)) for name, (a, b) in made.items()}


CASES = cases()


@pytest.mark.parametrize("case", laws.sample(list(CASES), 3))
def test_the_guard_fires_on_what_products_lose_and_on_nothing_else(case: str):
    """If false, products go on losing bits, or leave tensor cores that serve them."""
    fired = judged(case, *CASES[case])
    balanced = "over those" in case and "(1)" not in case or "over 1e5" in case
    # only where both operands meet does one exponent a line lose bits
    assert fired["anchored"] == balanced, fired
    if case in ("gauss", "half zeros", "heavy tails", "columns of sizes lognormal(1)"):
        assert not any(fired.values())


@pytest.mark.parametrize("name", ["mxfp8", "fp8_1x128"])
def test_what_is_estimated_is_what_products_lose(name: str):
    """If false, the tolerance of a recipe is no share of an error."""
    for sigma in (1.25, 1.5, 1.75):
        c, x = spread(1, DEPTH, sigma=sigma), gauss()
        true, _, estimate = measured(
            (x * c).to(BF16), (gauss(2) / c).to(BF16), ANCHORED_TENSOR, format_of(name), False
        )
        assert 0.2 * true <= estimate <= 2 * true, (sigma, true, estimate)


def test_products_of_a_trained_layer_stay():
    """If false, the gradients that training has go to bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 128),
        nn.LayerNorm(128),
        nn.Linear(128, 512),
        nn.SiLU(),
        nn.Linear(512, 256),
    )
    optimizer, data = (
        torch.optim.AdamW(model.parameters(), 1e-2),
        torch.randint(0, 256, (30, 1025)) // 3,
    )
    seen: dict[str, Tensor] = {}
    model[4].register_forward_pre_hook(lambda m, args: seen.__setitem__("x", args[0].detach()))
    model[4].register_full_backward_hook(lambda m, dx, dy: seen.__setitem__("dy", dy[0].detach()))
    for tokens in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
        optimizer.step()
    x, dy, w = (t.to(BF16) for t in (seen["x"], seen["dy"], model[4].weight.detach()))
    assert not any(judged("fprop", x, w).values())
    assert not judged("dgrad", dy, w.t().contiguous())["anchored"]
    fired = judged("wgrad", dy.t().contiguous(), x.t().contiguous(), is_weight=False)
    assert not fired["anchored 512"]


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_operands_with_their_own_scales_lose_nothing(element):
    """If false, a product is moved for the format that its recipe asked for."""
    a, b = CASES["one channel times 1e5, its weights over 1e5"]
    fmt = format_of("mxfp8", element=element)
    of = anchored(a, fmt, "anchored", False), anchored(b, fmt, "anchored", True)
    sums = [
        product_error(*((s.data, None, s.operand_format) for s in of), counted)[0].item()
        for counted in ((False, False), (True, False), (False, True), (True, True))
    ]
    assert 0 == sums[0] <= min(sums[1:3]) and 0 < max(sums[1:3]) <= sums[3]
