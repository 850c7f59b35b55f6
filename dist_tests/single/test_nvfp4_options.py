# SPDX-License-Identifier: Apache-2.0
"""NVFP4 with a second-level scale per row, and with block scales chosen by error (4over6)."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fsdp_quant as fq
from dist_tests.laws import assert_same_bytes, assert_same_storage, values
from dist_tests.single import hopper
from fsdp_quant import recipes
from fsdp_quant.counters import counters
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, format_of
from fsdp_quant.linear.plan import build_plan
from fsdp_quant.ops import dispatch, native, opaque
from fsdp_quant.ops.capability import gemm_domain, unsupported_reason
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.scaling import RowCuts
from fsdp_quant.storage import Placement, Storage

FORMATS = {
    f"{name} {rule} {per} {error}": format_of(
        name, scale_rule=rule, scale_per=per, four_over_six=error
    )
    for name, per in (("nvfp4", "tensor"), ("nvfp4", "row"), ("nvfp4_16x16", "tensor"))
    for rule, error in itertools.product(("nearest", "fp8_exact"), ("off", "mse", "mae"))
    if (per, error) != ("tensor", "off")
}
ROW = format_of("nvfp4", scale_per="row")
each_format = pytest.mark.parametrize("name", FORMATS)

# A second definition, in numpy #

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)


def nearest(v: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest number, ties to the even index."""
    i = np.clip(np.searchsorted(grid, v), 1, len(grid) - 1)
    below, above = v - grid[i - 1], grid[i] - v
    return np.where((below < above) | ((below == above) & (i % 2 == 1)), i - 1, i)


def block_scale(target: np.ndarray, exact: bool) -> np.ndarray:
    """e4m3 codes of targets; exact: of 1, 1.25, 1.5 or 2 times the target's power of two."""
    if exact:
        mantissa, exponent = np.frexp(target)
        s = 2 * mantissa
        chosen = np.select([s >= F32(1.8), s >= F32(1.4), s >= F32(1.15)], [2, 1.5, 1.25], 1)
        target = np.where(target == 0, 0, chosen * 2.0 ** (exponent - 1))
    return nearest(np.minimum(target, 448), E4M3)


def encoded(x: np.ndarray, fmt: fq.Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(magnitudes [rows, cols], scale codes [block rows, block cols], second-level amaxes) of
    finite x in whole rowwise blocks."""
    high, wide = fmt.block
    exact, x = fmt.scale_rule == "fp8_exact", x.astype(F32)
    blocks = x.reshape(x.shape[0] // high, high, -1, wide).swapaxes(1, 2)
    amax = np.abs(blocks).max((2, 3))
    of_tensor = amax.max(1) if fmt.scale_per == "row" else amax.max().reshape(1)
    most = 384 if exact else 448
    with np.errstate(divide="ignore", over="ignore"):
        S = np.where(of_tensor == 0, F32(1), F32(6 * most) / of_tensor).astype(F32)
        S = np.minimum(S, np.finfo(F32).max)[:, None]
        target = amax * (S * (F32(1) / F32(6)))
        candidates = []
        for room in (F32(1), F32(1.5)):
            code = block_scale(np.minimum(target * room, most), exact)
            scale = E4M3[code]
            enc = F32(1) / (scale.astype(F32) * (F32(1) / S))
            enc = np.minimum(enc, np.finfo(F32).max)[:, :, None, None]
            scaled = np.abs(blocks) * enc
            q = E2M1[nearest(np.minimum(scaled, F32(6)).astype(np.float64), E2M1)]
            n = np.rint(np.minimum(np.abs(scaled.astype(np.float64) - q), 4) * 2**20)
            power = 2 if fmt.four_over_six == "mse" else 1
            error = (n**power).sum((2, 3)) * scale**power
            candidates.append((code, q, np.where(scale == 0, np.inf, error)))
    (code, q, six), (code4, q4, four) = candidates
    if fmt.four_over_six != "off":
        code = np.where(four < six, code4, code)
        q = np.where((four < six)[:, :, None, None], q4, q)
    return q.swapaxes(1, 2).reshape(x.shape), code, of_tensor


@each_format
@pytest.mark.parametrize("direction", Direction)
def test_codes_are_those_of_a_second_definition(name: str, direction: Direction):
    """If false, the bytes are not those of the definition, and no kernel can equal them."""
    fmt, chosen = FORMATS[name], 0
    for kind, dtype in (("gauss", torch.bfloat16), ("heavy", torch.float32)):
        x = values(64, 96, kind=kind, dtype=dtype)
        x[:16] *= 2.0**-14  # block scales of few bits, and of zero
        x[32:48, 16:32] = 0
        got = Quantizer(fmt).storage(x, direction)
        rows = x if direction is ROWWISE else x.t()
        q, code, amax = encoded(rows.float().numpy(), fmt)
        plain = Quantizer(fq.Format(fmt.name, fmt.element, fmt.block, "e4m3", tensor_scale=True))
        scale = got.scale if direction is ROWWISE else got.scale.t()
        assert np.array_equal(scale.numpy(), code), name
        assert np.array_equal(got.tensor_amax.numpy(), amax), name
        elements = Storage(
            fmt, direction, got.shape, got.data, torch.full_like(got.scale, 0x38), None, x.dtype
        ).decode()
        elements = elements if direction is ROWWISE else elements.t()
        assert np.array_equal(elements.abs().numpy(), q), name
        chosen += int((got.scale != plain.storage(x, direction).scale).sum())
    assert chosen or fmt.block[0] > 1, "no block differs from plain: the test shows nothing"


# Laws #


@pytest.mark.parametrize("error", ["mse", "mae"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("rule", ["nearest", "fp8_exact"])
def test_no_block_has_a_larger_error_than_plain(name: str, error: str, rule: str):
    """If false, 4over6 makes some blocks worse; the law holds to the 2^-20 of a step in which
    errors are measured."""
    x, power = values(256, 256, kind="heavy", dtype=torch.float32), 2 if error == "mse" else 1
    x[:16] *= 2.0**-17
    plain = format_of(name, scale_rule=rule)
    chosen = format_of(plain, four_over_six=error)
    errors = []
    for fmt in (plain, chosen):
        got = Quantizer(fmt).storage(x, ROWWISE).dequantize(torch.float32)
        distance = (got.double() - x.double()).abs() ** power
        outer, block = fmt.block
        errors.append(distance.unflatten(0, (-1, outer)).unflatten(2, (-1, block)).sum((1, 3)))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert plain.block[0] > 1 or errors[1].sum() < errors[0].sum()


@each_format
@pytest.mark.parametrize("direction", Direction)
def test_blocks_of_zeros_nan_and_infinity(name: str, direction: Direction):
    """If false, an overflow becomes a number, or reaches values that share no scale with it."""
    fmt, x = FORMATS[name], values(64, 64, dtype=torch.float32)
    x = x if direction is ROWWISE else x.t().contiguous()

    def rows(t: Tensor) -> Tensor:
        return t if direction is ROWWISE else t.t()

    zeros = Quantizer(fmt).storage(torch.zeros_like(x), direction)
    assert not zeros.dequantize().any() and zeros.scale.unique().tolist() == [0]
    clean = rows(Quantizer(fmt).storage(x, direction).dequantize())
    for bad in (math.nan, math.inf, -math.inf):
        damaged = x.clone()
        rows(damaged)[20, 5] = bad
        got = rows(Quantizer(fmt).storage(damaged, direction).dequantize())
        if fmt.has_row_scales:
            others = torch.arange(64) != 20
            assert got[20].isnan().all() and torch.equal(got[others], clean[others])
        else:
            assert got.isnan().all()
    assert not Quantizer(fmt).storage(x[:0], direction).dequantize().numel()


ROWS = {
    "nvfp4 row": recipes.nvfp4(scale_per="row"),
    "nvfp4 row 4over6": recipes.nvfp4(scale_per="row", four_over_six="mse"),
    "nvfp4 row exact": recipes.nvfp4(scale_per="row", scale_rule="fp8_exact", four_over_six="mae"),
    "mxfp8/nvfp4 row": recipes.hybrid("mxfp8", "nvfp4", scale_per="row"),
}


def _outputs(module: nn.Module, x: Tensor, dy: Tensor, *args) -> tuple[Tensor, Tensor]:
    fq.begin_step(0)
    x = x.clone().requires_grad_()
    y = module(x, *args)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("name", [*ROWS, "nvfp4"])
def test_tokens_do_not_change_earlier_tokens(name: str):
    """If false, a token's output or input gradient depends on later tokens of its batch, in linear
    layers or experts; the control `nvfp4` shows that the test would see it."""
    recipe, seen = ROWS.get(name, recipes.nvfp4()), []
    x, dy = values(64, 96, dtype=torch.float32), values(64, 32, seed=1, dtype=torch.float32)
    later_x, later_dy = x.clone(), dy.clone()
    later_x[40:] *= 100
    later_dy[40:] *= 100
    torch.manual_seed(0)
    linear = fq.convert(nn.Sequential(nn.Linear(96, 32)), recipe)
    experts = fq.GroupedLinear(2, 96, 32, recipe=recipe)
    for module, args in ((linear, ()), (experts, ([48, 16],))):
        was, now = _outputs(module, x, dy, *args), _outputs(module, later_x, later_dy, *args)
        seen += [torch.equal(a[:40], b[:40]) for a, b in zip(was, now)]
    assert seen == [name in ROWS] * 4, seen


# Storages #


def test_scales_of_rows_are_cut_with_their_rows():
    """If false, rows of a storage are decoded with scales of others, or a rank gathers a wrong
    buffer."""
    x, fmt = values(64, 96), format_of("nvfp4", scale_per="row")
    row, column = (Quantizer(fmt).storage(x, d) for d in Direction)
    assert row.tensor_amax.shape == (64,) and column.tensor_amax.shape == (96,)
    assert row.placements(32)["tensor_amax"] is Placement.SHARD
    assert column.placements(32)["tensor_amax"] is Placement.REPLICATE
    for storage in (row, column):
        storage.check()
        again = torch.cat([storage.narrow(s, 32).dequantize() for s in (0, 32)])
        assert_same_bytes(again, storage.dequantize(), str(storage))
        zeros = Storage.zeros(fmt, storage.direction, (64, 96), x.dtype, "cpu")
        assert zeros.geometry == storage.geometry
        assert {n: b.shape for n, b in zeros.buffers().items()} == {
            n: b.shape for n, b in storage.buffers().items()
        }
    piece = row.operand_rows(16, 16)
    assert piece is not None
    assert_same_storage(piece, Quantizer(fmt).storage(x[16:32], ROWWISE), "operand rows")
    factored, outside = row.factored_operand()
    assert_same_bytes(factored.float() * outside[:, None], row.decode(), "factored")
    whole = Quantizer(fmt).quantize(x)
    assert_same_bytes(whole[8:24].dequantize(), whole.dequantize()[8:24], "a slice of a tensor")


@pytest.mark.parametrize("direction", Direction)
def test_operators_of_graphs_have_the_shapes_of_their_results(direction: Direction):
    """If false, a compiled graph allocates or reads second-level scales of another shape."""
    fmt = format_of("nvfp4", scale_per="row", four_over_six="mse")
    encoding, shapes = Quantizer(fmt, rotation=True).encoding(direction), []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode, opaque.tracing():
            x = torch.ones(40, 96)
            codes = opaque.encode(x, None, None, None, None, encoding, 0)
            made = (*codes, *opaque.statistics(x, encoding, 0))
            shapes.append([None if t is None else (t.shape, t.dtype) for t in made])
    assert shapes[0] == shapes[1]


# What is refused, and what plans say #


def rows_of_weights(role: fq.Role) -> fq.Format:
    return format_of("nvfp4", scale_per="row")


def test_what_means_nothing_is_refused_by_name():
    """If false, a setting is ignored, or fails in a forward or on one rank alone."""
    for make, message in (
        (
            lambda: format_of("nvfp4_16x16", scale_per="row"),
            r"nvfp4_16x16 has e4m3 scales of \(16, 16\) blocks",
        ),
        (lambda: format_of("mxfp8", scale_per="row"), "defined for a second-level scale"),
        (lambda: format_of("nvfp4", scale_per="rows"), "scale_per must be 'tensor' or 'row'"),
        (
            lambda: format_of("mxfp4", four_over_six="mse"),
            "four_over_six='mse' is defined for e2m1",
        ),
        (lambda: format_of("nvfp4", four_over_six=True), "four_over_six must be"),
        (
            lambda: Quantizer(format_of("nvfp4", four_over_six="mse"), rounding="stochastic"),
            "stochastic.*needs four_over_six='off'",
        ),
        (lambda: recipes.mxfp8(scale_per="row"), "scale_per='row' needs a 4-bit format"),
        (lambda: recipes.nvfp4(four_over_six="max"), "nvfp4: four_over_six must be"),
        (
            lambda: fq.convert(nn.Linear(64, 32), fq.CustomRecipe(rows_of_weights)),
            "a weight has one second-level scale.*pass scale_per='tensor'",
        ),
        (_encode_inside_a_block, "begin inside a block"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
            pytest.fail(f"not refused: {message}")
    assert recipes.nvfp4(scale_per="tensor", four_over_six="off") == recipes.nvfp4()


def _encode_inside_a_block() -> None:
    encoding = Quantizer(format_of("nvfp4", four_over_six="mse")).encoding(COLUMNWISE)
    dispatch.encode(values(24, 32), [encoding], None, row0=8)


def test_recipes_say_it_of_the_slots_that_have_it():
    """If false, a switch reaches a slot that it is not for, or none."""
    plan = build_plan(recipes.nvfp4(scale_per="row", four_over_six="mae-weights"), "m")
    both = plan.weight, plan.input, plan.grad_output
    facts = [
        (q.fmt.scale_per, q.fmt.four_over_six) for hybrid in both for q in hybrid.sides.values()
    ]
    assert facts == [("tensor", "mae")] * 2 + [("row", "off")] * 4
    shown = str(fq.plan(fq.convert(nn.Sequential(nn.Linear(64, 32)), "nvfp4")))
    assert "per row" not in shown and "4over6" not in shown
    recipe = recipes.nvfp4(scale_per="row", four_over_six="mse")
    shown = str(fq.plan(fq.convert(nn.Sequential(nn.Linear(64, 32)), recipe)))
    assert "scale per row" in shown and "4over6 mse" in shown


@pytest.mark.parametrize("rule", ["nearest", "fp8_exact"])
def test_chosen_scales_are_multiplied_as_others(rule: str):
    """If false, kernels do not choose scales, or products of chosen ones leave the tensor cores."""
    plain = [format_of(name, scale_rule=rule) for name in ("nvfp4", "nvfp4_16x16")]
    chosen = [format_of(fmt, four_over_six="mse") for fmt in plain]
    assert unsupported_reason(chosen[0]) is None is unsupported_reason(chosen[1])
    for arch in ("sm_90a", "sm_100f"):
        was, now = (
            gemm_domain(*pair, torch.bfloat16, arch, compiled=True)[0] for pair in (plain, chosen)
        )
        assert now == was
    wide = format_of("nvfp4", block=(1, 32), four_over_six="mse")
    assert "no kernel for four_over_six='mse'" in str(unsupported_reason(wide))
    pieces = native.unsupported_pieces_reason(
        Quantizer(chosen[1]).encoding(ROWWISE), torch.bfloat16, 64
    )
    assert "a block's error" in str(pieces)


def test_products_of_row_scales_are_of_decoded_values():
    """If false, a product that knows one scale a tensor is called with codes of scales per row."""
    fmt, weight = format_of("nvfp4", scale_per="row"), format_of("nvfp4_16x16", four_over_six="mse")
    assert unsupported_reason(fmt) is None
    encoding = Quantizer(fmt).encoding(ROWWISE)
    assert not native.encodes_group(encoding, torch.bfloat16, False)
    assert "from a row" in str(native.unsupported_pieces_reason(encoding, torch.bfloat16, 64))
    for arch in ("sm_90a", "sm_100f"):
        domain, reason = gemm_domain(fmt, weight, torch.bfloat16, arch, compiled=True)
        assert (domain, arch in reason) == ("bf16", True)


def test_a_gpu_quantizes_rows_by_kernels():
    """If false, scales per row are the reference's where kernels run, multiplied as one of the
    tensor, or of another shape in a graph."""
    recipe, ran = recipes.nvfp4(scale_per="row", four_over_six="mse"), []
    x, dy = (values(48, n, seed=n, dtype=torch.bfloat16) for n in (64, 32))
    for on_gpu in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
        with hopper.emulated() if on_gpu else contextlib.nullcontext():
            layer = fq.convert(layer, recipe)
            counters.reset()
            ran.append(_outputs(layer, x, dy))
            by = {by for *_, by in counters.of("quantize")}
        assert by == {"native" if on_gpu else "reference"}
    for on_cpu, got in zip(*ran):
        assert (got - on_cpu).norm() <= 1e-2 * on_cpu.norm()
    with hopper.emulated() as operators:
        sides = [native.pack_encoding(Quantizer(ROW).encoding(d)) for d in Direction]
        for name, rest in (
            ("quantize", (0.0, 0.0, 0, False, *[None] * 8)),
            ("statistics", (0, False)),
        ):
            made = (
                native.FAKES[name](x, *sides, *rest),
                getattr(operators, name)(x, *sides, *rest),
            )
            fake, real = ([(t.shape, t.dtype) for t in tensors] for tensors in made)
            assert fake == real


def test_cuts_inside_blocks_are_known():
    """If false, `fully_shard` sends codes that differ from those of the whole weight."""
    encoding = Quantizer(format_of("nvfp4_16x16", four_over_six="mse")).encoding(ROWWISE)
    assert RowCuts.chunked(96, 4).cut_block_rows(encoding)  # 24 rows a rank
    assert not RowCuts.chunked(96, 3).cut_block_rows(encoding)
