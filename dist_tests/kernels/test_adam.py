# SPDX-License-Identifier: Apache-2.0
"""Adam's kernels against their definitions on a CPU, bit for bit, and the captured step of
quantized parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws
from dist_tests.kernels import expected
from dist_tests.kernels.expected import BF16, DEVICE, FP32
from fsdp_quant.formats import Direction
from fsdp_quant.ops import native, reference
from fsdp_quant.optim import compact
from fsdp_quant.optim.fused_adam import SCALARS, Stored, adam_update, scalars_on_device

pytestmark = pytest.mark.skipif(expected.WHY_NOT is not None, reason=expected.WHY_NOT or "")

SIZES = (0, 1, 3, 4, 1023, 4096, 4097, 8191, 70001)
# keep, coupled, first, beta2, second, root_correction, minus_step_size, eps
ROWS = torch.tensor(
    [
        [1 - 1e-4, 0.0, 0.1, 0.999, 1e-3, 0.0316, -1e-2, 1e-8],
        [1.0, 0.01, 0.6, 0.95, 0.05, 0.8, -1e-3, 1e-6],
        [0.9, 0.0, 1.0, 0.0, 1.0, 1.0, -1.0, 0.0],
    ],
    device="cpu",
)


def tensors(
    size: int, seed: int, grad: torch.dtype, moments: torch.dtype, rounded: bool, kind: str
) -> list[Tensor | None]:
    """(master, grad, first, second, rounded) on the host; some rounded parameters are not their
    masters rounded."""
    p, g, m, v = (laws.values(size, seed=seed + i, dtype=FP32, kind=kind) for i in range(4))
    r = None
    if rounded:
        r = p.to(BF16)
        r[::7] = r[::7] * 1.5
    return [p, g.to(grad), (m * 0.1).to(moments), (v * 0.1).square().to(moments), r]


def offset(t: Tensor | None, by: int) -> Tensor | None:
    """A copy on the device that begins `by` elements into its memory."""
    return None if t is None else torch.cat([t.new_zeros(by), t]).to(DEVICE)[by:]


def launched(
    made: list[list],
    rows: list[int],
    by: int,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> list[list]:
    on_device = [[offset(t, by) for t in one] for one in made]
    p, g, m, v, r = map(list, zip(*on_device))
    native.adam(native.AdamStep(p, g, m, v, rows, ROWS, scale, skip), r if r[0] is not None else ())
    return [[None if t is None else t.cpu() for t in one] for one in zip(p, m, v, r)]


@pytest.mark.parametrize(
    ("grad", "moments", "rounded"), itertools.product((FP32, BF16), (FP32, BF16), (False, True))
)
@pytest.mark.parametrize("by", [0, 1])
def test_adam_equals_its_definition(grad, moments, rounded, by):
    """If false, a GPU trains another model than the definition, or sizes and alignment matter."""
    made = [
        tensors(n, i, grad, moments, rounded, ("gauss", "tiny", "heavy")[i % 3])
        for i, n in enumerate(SIZES * 3)
    ]
    rows = [i % len(ROWS) for i in range(len(made))]
    for scale in (None, torch.tensor([512.0])):
        got = launched(made, rows, by, scale)
        for one, row, result in zip(made, rows, got):
            want = adam_update(*one, ROWS[row], None if scale is None else scale[0])
            if rounded:
                want = (*want, want[0].to(BF16))
            for name, a, b in zip(("master", "exp_avg", "exp_avg_sq", "rounded"), result, want):
                laws.assert_same_bytes(
                    a, b.to(a.dtype), f"{name} of {one[0].numel()}, {SCALARS} {ROWS[row].tolist()}"
                )


# Shapes of moments in codes: whole blocks, tails, rows that are no multiple of four elements, more
# than two dims.
BLOCK_SHAPES = ((16, 256), (5, 1024), (3, 300), (70, 33), (1, 257), (9, 8, 40), (0, 64), (260, 1))


def stored(
    shape, seed: int, grad: torch.dtype, moments: torch.dtype, master: str, kind: str
) -> tuple[Tensor, Stored]:
    """(grad, what is stored) on the host. moments: uint8 for codes; master: "alone", "rounded" or
    "remainder"."""
    p, g, m, v = (laws.values(*shape, seed=seed + i, dtype=FP32, kind=kind) for i in range(4))
    scales = ()
    if moments is torch.uint8:
        (m, first), (v, second) = (
            compact.encode(m * 0.1),
            compact.encode((v * 0.1).abs(), is_root=True),
        )
        scales = first, second
    else:
        m, v = (m * 0.1).to(moments), (v * 0.1).square().to(moments)
    rounded = None
    if master == "rounded":
        rounded = p.to(BF16)
        rounded[::7] = rounded[::7] * 1.5
    elif master == "remainder":
        rounded, p = compact.split(p)
    return g.to(grad), Stored(p, m, v, rounded, *scales)


def moved(t: Tensor | None, by: int) -> Tensor | None:
    """A copy on the device that begins `by` elements into its memory, or as many remainders."""
    if t is None:
        return None
    flat = t.flatten()
    return offset(flat, 2 * by if t.dtype is torch.uint8 and t.shape[-1] == 2 else by).view(t.shape)


@pytest.mark.parametrize(
    ("moments", "master"),
    [
        (torch.uint8, "alone"),
        (torch.uint8, "rounded"),
        (torch.uint8, "remainder"),
        (FP32, "remainder"),
        (BF16, "remainder"),
    ],
)
@pytest.mark.parametrize("grad", [FP32, BF16])
@pytest.mark.parametrize("by", [0, 1])
def test_compact_states_equal_their_definition(grad, moments, master, by):
    """If false, codes of moments or remainders of masters that a GPU writes are read as others."""
    shapes = BLOCK_SHAPES if moments is torch.uint8 else [(n,) for n in SIZES]
    made = [
        stored(s, i, grad, moments, master, ("gauss", "tiny", "heavy")[i % 3])
        for i, s in enumerate(shapes * 3)
    ]
    made += [stored((4, 512), 99, grad, moments, master, "gauss")] * (moments is torch.uint8)
    made[-1][0][0] = 0  # and a block without gradients
    rows = [i % len(ROWS) for i in range(len(made))]
    for scale, skip in ((None, None), (torch.tensor([512.0]), None), (None, torch.ones(1))):
        on_device = [[moved(t, by) for t in (g, *of)] for g, of in made]
        g, p, m, v, *rest = map(list, zip(*on_device))
        native.adam(
            native.AdamStep(p, g, m, v, rows, ROWS, scale, skip),
            *([] if of[0] is None else of for of in rest),
        )
        for (grad_of, of), row, result in zip(made, rows, on_device):
            want = (
                of
                if skip is not None
                else of.updated(grad_of, ROWS[row], None if scale is None else scale[0])
            )
            for name, a, b in zip(Stored._fields, result[1:], want):
                if b is not None:
                    laws.assert_same_bytes(
                        a.cpu(),
                        b,
                        f"{name} of {list(grad_of.shape)}, {ROWS[row].tolist()}, {scale}, {skip}",
                    )


def test_a_nan_stays_one_in_compact_states():
    """If false, an overflow is hidden by its codes, or the bits of a NaN carry into a parameter's
    sign."""
    g, of = stored((4, 512), 0, FP32, torch.uint8, "remainder", "gauss")
    g[0, 3], g[2, 300] = float("nan"), float("inf")
    given = [t.clone().to(DEVICE) for t in of]
    p, m, v, r, first, second = given
    native.adam(
        native.AdamStep([p], [g.to(DEVICE)], [m], [v], [0], ROWS, None, None),
        [r],
        [first],
        [second],
    )
    want = of.updated(g, ROWS[0])
    got = Stored(*(t.cpu() for t in given))
    for name in ("rounded", "first_scale", "second_scale"):
        a, b = (getattr(one, name).float() for one in (got, want))
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), name
    for codes, scale in (("first", "first_scale"), ("second", "second_scale")):
        a, b = (compact.decode(getattr(one, codes), getattr(one, scale)) for one in (got, want))
        assert torch.equal(a.isnan(), b.isnan()) and a.isnan().any(), codes


def test_adam_of_more_tensors_than_a_launch_holds():
    """If false, the second launch updates the first's tensors."""
    made = [tensors(5 + i % 3, i, FP32, FP32, False, "gauss") for i in range(1000)]
    rows = [i % len(ROWS) for i in range(len(made))]
    for one, row, result in zip(made, rows, launched(made, rows, 0)):
        for a, b in zip(result, adam_update(*one, ROWS[row])):
            laws.assert_same_bytes(a, b)


def test_adam_of_special_values_and_skipped_steps():
    """If false, an overflow is hidden, or enters what a skipped step must leave alone."""
    made = [tensors(4096, i, BF16, BF16, True, "gauss") for i in range(2)]
    made[0][1][5], made[0][1][9] = float("nan"), float("inf")
    (p, m, v, _), _ = launched(made, [0, 0], 0)
    want = adam_update(*made[0], ROWS[0])
    for a, b in zip((p, m, v), want):
        assert torch.equal(a.float().isnan(), b.to(a.dtype).isnan()) and not a[:5].isnan().any()
    for one, result in zip(made, launched(made, [0, 0], 0, skip=torch.ones(1))):
        for a, b in zip(result, (one[0], *one[2:])):
            laws.assert_same_bytes(a, b, "after a skipped step")


# Rows and where the first lies in the whole weight: tails, cut blocks, a shard without rows, rows
# that are not aligned.
SHAPES = (
    (128, 128, 0),
    (1, 4, 0),
    (33, 160, 32),
    (7, 17, 5),
    (257, 130, 128),
    (300, 1023, 96),
    (0, 64, 10),
    (129, 64, 384),
)
SIDES = (
    ("mxfp8", "mxfp8"),
    ("fp8_1x128", "mxfp8"),
    ("fp8_128x128", "fp8_128x128"),
    ("fp8_tensor", "fp8_row"),
    ("nvfp4", "nvfp4"),
)


@pytest.mark.parametrize("sides", SIDES, ids="/".join)
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("grad", [FP32, BF16])
def test_adam_group_equals_the_update_and_then_the_encoder(sides, grad, moments):
    """If false, a step leaves codes, or statistics, that are not those of the masters it wrote."""
    encodings = tuple(fq.HybridQuantizer(*sides).encodings.values())
    passes = any(e.fmt.scale_leaves_contraction or e.fmt.tensor_scale for e in encodings)
    made = []
    for i, (r, c, _) in enumerate(SHAPES):
        one = tensors(r * c, i, grad, moments, False, ("gauss", "tiny", "heavy")[i % 3])
        made.append([None if t is None else t.view(r, c) for t in one])
    row0, rows = [start for *_, start in SHAPES], [i % 2 for i in range(len(SHAPES))]
    for statistics, skip in itertools.product({True, passes}, (None, torch.ones(1))):
        p, g, m, v, _ = map(
            list, zip(*([None if t is None else t.to(DEVICE) for t in one] for one in made))
        )
        step = native.AdamStep(p, g, m, v, rows, ROWS, None, skip)
        if statistics:  # block amaxes of every other one
            results = native.adam_statistics(
                step, encodings, row0, [[bool(i % 2)] * len(encodings) for i in range(len(p))]
            )
        else:
            results = native.adam_codes(step, encodings, row0, [[None] * len(encodings)] * len(p))
        for i, (one, result) in enumerate(zip(made, results)):
            new = (one[0], *one[2:4]) if skip is not None else adam_update(*one, ROWS[rows[i]])
            what = f"{sides}, {SHAPES[i]}, skipped {skip is not None}"
            for name, a, b in zip(("master", "exp_avg", "exp_avg_sq"), (p[i], m[i], v[i]), new):
                laws.assert_same_bytes(a.cpu(), b.to(a.dtype), f"{name}: {what}")
            for e, got in zip(encodings, result) if one[0].numel() else ():
                x = new[0].to(BF16)
                want = reference.statistics(x, e, row0[i])
                if statistics:
                    want = (want[0] if i % 2 else None, want[1])
                else:
                    want = reference.encode(x, *want, e, row0[i], None, None)
                for a, b in zip(got, want, strict=True):
                    assert (a is None) == (b is None), what
                    if a is not None:
                        laws.assert_same_bytes(a.cpu(), b, f"{e}, statistics {statistics}: {what}")


def test_adam_group_of_more_tensors_than_a_launch_holds():
    """If false, the second launch updates or encodes the first's tensors."""
    made = [
        [t.view(8, 16) for t in tensors(128, i, FP32, FP32, False, "gauss")[:4]] for i in range(200)
    ]
    p, g, m, v = map(list, zip(*([t.to(DEVICE) for t in one] for one in made)))
    (encoding,) = fq.HybridQuantizer("fp8_128x128", "fp8_128x128").encodings.values()
    step = native.AdamStep(p, g, m, v, [0] * 200, ROWS, None, None)
    for one, ((data, scale),) in zip(
        made, native.adam_codes(step, [encoding], [0] * 200, [[None]] * 200)
    ):
        x = adam_update(*one, None, ROWS[0])[0].to(BF16)
        for a, b in zip(
            (data, scale),
            reference.encode(x, *reference.statistics(x, encoding, 0), encoding, 0, None, None),
        ):
            laws.assert_same_bytes(a.cpu(), b)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_count_equals_its_definition(decoupled):
    """If false, steps that a GPU counts scale updates differently."""
    for lr, found in itertools.product(
        (1.3e-3, torch.tensor(1.3e-3, device=DEVICE)), (None, 0.0, 1.0)
    ):
        group = {
            "lr": lr,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "decoupled_weight_decay": decoupled,
        }
        found = None if found is None else torch.tensor([found], device=DEVICE)
        a, b = (
            [torch.tensor(float(i % 1000), device=DEVICE) for i in range(2100)] for _ in range(2)
        )
        got = native.adam_count(a, found, lr, 0.9, 0.95, 1e-8, 0.1, decoupled)
        want = scalars_on_device(group, b, found)
        laws.assert_same_bytes(got, want, f"scalars, found_inf {found}")
        laws.assert_same_bytes(torch.stack(a), torch.stack(b), "steps")


def _model(forward: str, backward: str) -> nn.Module:
    torch.manual_seed(0)
    recipe = fq.recipes.hybrid(forward, backward)
    with fq.quantized_model_init(recipe):
        net = nn.Sequential(
            nn.Linear(256, 384), nn.LayerNorm(384), nn.Linear(384, 128, bias=False)
        ).to(DEVICE)
        return fq.convert(net, recipe)


@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("mxfp8", "mxfp8")], ids="/".join)
def test_captured_steps_equal_eager_ones(pair):
    """If false, a CUDA graph repeats the first step, or leaves the codes of an earlier master."""
    fq.begin_step(0)
    results = []
    for captured in (False, True):
        net = _model(*pair)
        optimizer = fq.optim.FusedAdam(
            net.parameters(), lr=torch.tensor(1e-2, device=DEVICE), capturable=True
        )
        for i, p in enumerate(net.parameters()):
            p.grad = laws.values(p.numel(), seed=i, dtype=FP32).view(p.shape).to(DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        step = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for _ in range(3):
            step()
        slots = [net[i].weight._pair for i in (0, 2)]  # as the graph left them, not made anew
        codes = [
            b.clone()
            for s in slots
            for st in (s.rowwise, s.columnwise)
            for b in st.buffers().values()
        ]
        masters = [net[i].weight.inner.clone() for i in (0, 2)]
        for master, i in zip(masters, (0, 2)):
            want = fq.HybridQuantizer(*pair).quantize(master.to(BF16))
            for d in Direction:
                for name, buffer in getattr(want, d.value).buffers().items():
                    got = getattr(net[i].weight._pair, d.value).buffers()[name]
                    laws.assert_same_bytes(got, buffer, f"captured {captured}: {d} {name}")
        results.append(masters + codes + [s["step"].clone() for s in optimizer.state.values()])
    for got, want in zip(results[1], results[0]):
        laws.assert_same_bytes(got, want, "captured against eager")


@pytest.mark.parametrize("pair", [("mxfp8", "nvfp4"), ("fp8_tensor", "fp8_tensor")], ids="/".join)
@pytest.mark.parametrize("kind", ["AdamW", "8-bit FusedAdam"])
def test_captured_steps_of_masters_write_their_codes(pair, kind):
    """If false, a graph of a wrapped optimizer, or of one with moments in codes, leaves codes of
    old masters."""
    net, lr = _model(*pair), torch.tensor(1e-2, device=DEVICE)
    if kind == "AdamW":
        optimizer = fq.optim.wrap(torch.optim.AdamW)(net.parameters(), lr=lr, capturable=True)
    else:
        optimizer = fq.optim.FusedAdam(
            net.parameters(), lr=lr, capturable=True, moment_dtype=torch.float8_e4m3fn
        )
    for i, p in enumerate(net.parameters()):
        p.grad = laws.values(p.numel(), seed=i, dtype=FP32).view(p.shape).to(DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        before = net[0].weight.inner.clone()
        graph.replay()
        assert not torch.equal(before, net[0].weight.inner)
        for i in (0, 2):
            want = fq.HybridQuantizer(*pair).quantize(net[i].weight.inner.to(BF16))
            for d in Direction:
                for name, buffer in getattr(want, d.value).buffers().items():
                    got = getattr(net[i].weight._pair, d.value).buffers()[name]
                    laws.assert_same_bytes(got, buffer, f"{pair}: {d} {name}")


def test_writes_are_seen():
    """If false, codes or graphs made from a parameter outlive its update."""
    p = nn.Parameter(torch.ones(64, device=DEVICE))
    optimizer = fq.optim.FusedAdam([p])
    p.grad = torch.ones_like(p)
    before = p._version
    optimizer.step()
    assert p._version > before
