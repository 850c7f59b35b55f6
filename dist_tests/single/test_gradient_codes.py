# SPDX-License-Identifier: Apache-2.0
"""Codes of gradients, without ranks: where they lie, what they decode to, and on which bits they
are rounded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_tests import laws
from dist_tests.single import hopper
from fsdp_quant.formats import ROWWISE, Encoding
from fsdp_quant.ops import gradient_codes, reference, rng
from fsdp_quant.ops.gradient_codes import (
    GRADIENT_FORMATS,
    GradientLayout,
    decode_gradients,
    encode_gradients,
    gradient_keys,
)

CODES = [name for name in GRADIENT_FORMATS if name != "bf16"]
# uneven cuts, empty pieces, rows that a piece does not fill, one that it does
SHAPES = ((5, 300), (7,), (1, 2, 3), (33, 32), (16, 128))
WORLD = 3


def gradients(seed: int = 0, shapes=SHAPES, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [
        laws.values(math.prod(s), 1, seed=seed + i, dtype=dtype).view(s)
        for i, s in enumerate(shapes)
    ]


def keys_of(names: list[str], step: int = 0, rank: int = 0) -> Tensor:
    """Of the first reduction of a step."""
    fields = torch.tensor([0, step, 0, -1, rank])
    idents = torch.tensor([rng.tensor_id(f"{name} {rank}") for name in names])
    return gradient_keys(fields, idents, torch.full((4,), -1))


def layout_of(name: str, shapes=SHAPES, world: int = WORLD) -> GradientLayout:
    return GradientLayout(tuple(shapes), world, name)


def pieces_of(grad: Tensor, world: int) -> Tensor:
    """[world, n] as FSDP2 cuts dim 0."""
    rows = -(-len(grad) // world) * world
    return F.pad(grad.reshape(len(grad), -1), (0, 0, 0, rows - len(grad))).view(world, -1)


def decoded(buffers: list[Tensor], layout: GradientLayout, factor: float = 1.0) -> list[Tensor]:
    """The sum of what ranks with these buffers sent, fp32 [world, n] of each gradient."""
    parts = []
    for owner in range(layout.world):
        out = torch.full((sum(layout.numels),), math.nan)
        received = torch.stack([b[owner] for b in buffers])
        decode_gradients(received, layout, out, factor)
        parts.append(out.split(layout.numels))
    return [torch.stack(of_one) for of_one in zip(*parts)]


def alone(buffer: Tensor, layout: GradientLayout) -> list[Tensor]:
    """The values of one rank's buffer: others send zeros."""
    zero = torch.zeros_like(buffer)
    others = layout.sections(zero)
    if others.scale is not None and layout.fmt.has_fp32_scales:
        others.scale.fill_(1)
    return decoded([buffer, *[zero] * (layout.world - 1)], layout)


@pytest.mark.parametrize("name", GRADIENT_FORMATS)
def test_a_buffer_is_the_references_storage_of_each_owners_rows(name: str):
    """If false, the documented layout is not what kernels and other ranks read."""
    layout, grads = layout_of(name), gradients()
    keys = keys_of(list("abcde"))
    buffer = encode_gradients(grads, layout, keys if layout.is_stochastic else None)
    assert buffer.shape == (WORLD, layout.nbytes) and layout.nbytes % 16 == 0
    row, start = layout.row, 0
    used = torch.zeros(layout.nbytes, dtype=torch.bool)
    for i, grad in enumerate(grads):
        pieces = pieces_of(grad, WORLD)
        rows = F.pad(pieces, (0, -pieces.shape[1] % row)).view(-1, row)
        if name == "bf16":
            wanted = (rows.view(torch.uint8), None, None)
        else:
            encoding = Encoding(layout.fmt, ROWWISE, stochastic=True)
            stats = reference.statistics(rows, encoding)
            wanted = (*reference.encode(rows, *stats, encoding, key=keys[i]), stats[1])
        count = len(rows) // WORLD
        offsets = 0, layout.scale_offset, layout.amax_offset
        for offset, part in zip(offsets, wanted):
            if part is None:
                continue
            part = part.view(torch.uint8).view(len(rows), -1)
            begin, size = offset + start * part.shape[1], count * part.shape[1]
            got = buffer[:, begin : begin + size]
            laws.assert_same_bytes(got, part.view(WORLD, size), f"{name} {i} {offset}")
            used[begin : begin + size] = True
        start += count
    assert start == layout.rows and not buffer[:, ~used].any()


@pytest.mark.parametrize("name", CODES)
def test_each_value_is_within_a_step_of_its_gradient_and_zero_stays(name: str):
    """If false, a summand is further from the gradient than the format's neighbours, or weights
    without a gradient move."""
    grads = gradients()
    grads[3][:, :16] = 0
    layout = layout_of(name)
    values = alone(encode_gradients(grads, layout, keys_of(list("abcde"))), layout)
    for grad, got in zip(grads, values):
        want, row = pieces_of(grad, WORLD).float(), layout.row
        blocks = F.pad(want, (0, -want.shape[1] % row)).view(-1, row)
        amax = blocks.abs().amax(1, keepdim=True).expand(-1, row).reshape(WORLD, -1)
        amax = amax[:, : want.shape[1]]
        # of a value's binade, and of the smallest numbers of a block or row
        mantissa, least = (1, 1 / 6) if layout.fmt.bits == 4 else (3, 2.0**-17)
        bound = want.abs() * 2.0**-mantissa + amax * least
        assert ((got - want).abs() <= bound).all(), name
        assert not got[want == 0].any()


def mean_error(name: str, keys: list[Tensor]) -> tuple[float, float]:
    """Mean square errors of one encoding, and of the mean over all keys, over the gradient's."""
    grads = gradients(shapes=((32, 128),), dtype=torch.float32)
    layout = layout_of(name, ((32, 128),), 1)
    each = [alone(encode_gradients(grads, layout, key), layout)[0].view(32, 128) for key in keys]
    errors = [(v - grads[0]).square().mean().item() for v in (each[0], torch.stack(each).mean(0))]
    return errors[0], errors[1]


@pytest.mark.parametrize("name", CODES)
def test_the_mean_over_keys_is_the_gradient(name: str, monkeypatch):
    """If false, the sum over steps has an error that does not average out: the mean square error
    of n encodings' mean is 1 / n of one's. A rounding that prefers one side is caught."""
    n = 32
    one, mean = mean_error(name, [keys_of(["w"], step) for step in range(n)])
    assert 0.8 < mean / one * n < 1.3, (one, mean)
    one, mean = mean_error(name, [keys_of(["w"], 1)] * n)
    assert mean == pytest.approx(one)  # the same key has the same bits
    bits = reference.random_bytes
    monkeypatch.setattr(reference, "random_bytes", lambda *args: bits(*args) // 2)
    one, mean = mean_error(name, [keys_of(["w"], step) for step in range(n)])
    assert mean / one * n > 2, (one, mean)


@pytest.mark.parametrize("name", GRADIENT_FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(name: str, bad: float):
    """If false, GradScaler and clipping see a finite gradient where there is none, and the step
    is taken."""
    grads, layout = gradients(), layout_of(name)
    grads[0][4, 7] = bad
    clean = encode_gradients(gradients(), layout, keys_of(list("abcde")))
    dirty = encode_gradients(grads, layout, keys_of(list("abcde")))
    for i, total in enumerate(decoded([clean, dirty, clean], layout)):
        seen = pieces_of(grads[i], WORLD).isfinite().logical_not()
        assert not total[seen].isfinite().any()
        # nothing beyond the piece that has it
        assert total.isfinite().all(1).tolist() == seen.logical_not().all(1).tolist()


@pytest.mark.parametrize("name", GRADIENT_FORMATS)
def test_pieces_are_summed_in_fp32_in_the_order_of_ranks(name: str):
    """If false, the sum depends on the order of arrival, or is rounded on the way."""
    layout, sent = layout_of(name), []
    for rank in range(WORLD):
        # binades apart, so that fp32 sums of another order differ
        grads = [
            g
            * 2.0 ** torch.randint(-20, 20, g.shape, generator=torch.Generator().manual_seed(rank))
            for g in gradients(10 * rank, dtype=torch.float32)
        ]
        sent.append(encode_gradients(grads, layout, keys_of(list("abcde"), 0, rank)))
    for i, got in enumerate(decoded(sent, layout, 1 / 3)):
        a, b, c = (alone(buffer, layout)[i] for buffer in sent)
        # `alone` has no -0
        laws.assert_same_bytes(got + 0.0, (a + b + c) * (1 / 3) + 0.0, f"{name} {i}")
        assert i or name != "bf16" or not torch.equal(a + b + c, c + b + a)
    out = torch.empty(sum(layout.numels), dtype=torch.bfloat16)
    wide = torch.empty_like(out, dtype=torch.float32)
    for result in (out, wide):
        decode_gradients(torch.stack([b[0] for b in sent]), layout, result)
    laws.assert_same_bytes(out, wide.bfloat16())


@pytest.mark.parametrize("name", GRADIENT_FORMATS)
def test_the_bits_of_a_gradient_do_not_depend_on_its_neighbours(name: str):
    """If false, what is trained depends on which modules `fully_shard` was called on."""
    grads, names = gradients(), list("abcde")
    together = encode_gradients(grads, layout_of(name), keys_of(names))
    for i in range(len(grads)):
        layout = layout_of(name, (SHAPES[i],))
        by_itself = encode_gradients(grads[i : i + 1], layout, keys_of(names[i : i + 1]))
        got, want = alone(together, layout_of(name))[i], alone(by_itself, layout)[0]
        laws.assert_same_bytes(got, want, names[i])


def test_each_reduction_has_its_own_random_bits():
    """If false, micro-batches of a step, or captured steps, are rounded alike, and their errors add
    up."""
    idents, counted = torch.tensor([5, 6]), torch.full((4,), -1)

    def keys(seed: int, step: int, micro_batch: int) -> list:
        return gradient_keys(
            torch.tensor([seed, step, micro_batch, 7, 1]), idents, counted
        ).tolist()

    seen = [keys(0, 0, 0), keys(0, 0, 0), keys(0, 0, 1), keys(0, 1, 0), keys(1, 1, 0)]
    assert seen[0] == [[0, 0, 5, 0, 0], [0, 0, 6, 0, 0]]
    assert len({tuple(key) for each in seen for key in each}) == 10
    assert keys(0, 0, 0) == seen[0]  # a step that is repeated has its bits
    with hopper.emulated() as operators:
        assert keys(0, 0, 0) == seen[1]
    assert operators.count("gradient_keys") == 1  # one launch, not one for each field
    assert set(gradient_codes.GRADIENT_FORMATS) == {"bf16", "fp8_1x128", "mxfp8", "nvfp4"}
