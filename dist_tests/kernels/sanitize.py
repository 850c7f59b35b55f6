# SPDX-License-Identifier: Apache-2.0
"""Every kernel instance once, on small tensors, for the sanitizers; compared with the reference on
the CPU afterwards.

    python -m dist_tests.kernels.sanitizers                 all parts under the tools of
                                                            compute-sanitizer
    python -m dist_tests.kernels.sanitize PART [--filled]   one part without a tool

Parts: instances, the kernels that do not multiply; products, the GEMMs; steps, whole modules twice,
to the same bits. The GPU runs nothing else but copies. --filled: new memory holds NaN, so that a
result that no kernel wrote differs. Exits with 1, and names what differs, where bytes are not the
reference's (norms, activations and products: values within a bound).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import fsdp_quant as fq
from dist_tests import laws, pieces
from dist_tests import product_error as estimates
from dist_tests.kernels import expected, sanitize_products
from dist_tests.kernels.entries import DONE, SHAPES, differences, on_device, run, values
from dist_tests.kernels.expected import BF16, FP16, FP32, MADE, encoded
from dist_tests.single.hopper import Operators, replaced_operators
from fsdp_quant import recipes
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction, Encoding, Format, ceil_div, format_of
from fsdp_quant.linear.call import Call
from fsdp_quant.linear.plan import GemmPlan, build_plan
from fsdp_quant.linear.routes import Around
from fsdp_quant.ops import anchoring, gradient_codes, layout, native, norm, reference, routing
from fsdp_quant.ops.capability import arch_of, spreads
from fsdp_quant.ops.gradient_codes import GradientLayout
from fsdp_quant.ops.norm import ACTIVATIONS, NormSpec
from fsdp_quant.ops.product_error import PROBED_STEPS
from fsdp_quant.optim import compact
from fsdp_quant.optim.fused_adam import Stored, adam_update
from fsdp_quant.quantizer import HybridQuantizer

# Tiles for more than one round of the GPU.
MANY = (130, 26000)
PIECE = (300, 136)
RECIPES = ("fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4")  # of modules
KEY = torch.tensor([5, 3, 77, 1, 9])


# The operators #


def quantize(
    names: tuple[str | None, str | None],
    shape=SHAPES[0],
    dtype=BF16,
    round_to_bf16=False,
    factor=None,
    transposed=False,
    scale_layout=native.COMPACT,
    row0=0,
    given=False,
    tensor_given=False,
    in_parts=False,
) -> None:
    """Codes and scales of one or both directions; factor: of a history; given: statistics that are
    the caller's, or the tensor's amax alone; in_parts: amaxes of parts of the tensor."""
    x = values(shape, dtype)
    seen = x.to(BF16) if round_to_bf16 else x
    encodings = [MADE[n].encoding(d) for n, d in zip(names, Direction) if n is not None]
    encs = [
        torch.tensor([factor]) if factor is not None and e.fmt.block == (None, None) else None
        for e in encodings
    ]
    stats = (
        [reference.statistics(reference.prepared(seen, e), e, row0) for e in encodings]
        if given or tensor_given
        else None
    )
    amaxes = [None if tensor_given else amax for amax, _ in stats or ()]
    if in_parts:
        amaxes = [torch.cat([amax / 2, amax, amax / 4]) for amax in amaxes]
    passed = stats and [(on_device(a), on_device(t)) for a, (_, t) in zip(amaxes, stats)]
    made = native.quantize(
        on_device(x),
        encodings,
        row0,
        round_to_bf16,
        passed,
        [on_device(KEY)] * len(encodings),
        [on_device(enc) for enc in encs],
        [transposed and e.direction is COLUMNWISE for e in encodings],
        scale_layout,
    )

    def want() -> list[Tensor]:
        wanted = []
        for i, (e, enc) in enumerate(zip(encodings, encs)):
            w = encoded(seen, e, row0=row0, stats=stats and stats[i], key=KEY, enc=enc)
            turned = transposed and e.direction is COLUMNWISE
            rows, cols = e.fmt.padded_shape(shape, e.direction)
            if scale_layout == native.OPERAND:
                codes, scale = anchoring.e4m3_operand(
                    w.data, w.scale, w.tensor_amax, e.fmt, e.direction, cols
                )
                wanted += [(codes.t() if turned else codes).contiguous(), scale, w.tensor_amax]
                continue
            bits = e.fmt.element.bits
            data = w.data if not turned else layout.repack(w.data, bits, rows, cols)
            wanted.append(data.contiguous())
            wanted.append(
                w.scale
                if scale_layout == native.COMPACT
                else scale_of(e, w.scale, (rows, cols), scale_layout)
            )
            wanted += [w.tensor_amax] if e.fmt.tensor_scale else []
            wanted += [amaxes[i] if in_parts else w.amax] if e.fmt.scale_leaves_contraction else []
        return wanted

    through = " through bf16" if round_to_bf16 else ""
    text = f"quantize {names} {list(shape)} {dtype}{through}, factor {factor}, row0 {row0}"
    run(
        f"{text}, transposed {transposed}, layout {scale_layout}, given {given} {tensor_given}",
        [t for m in made for t in m],
        want,
    )


def scale_of(e: Encoding, scale: Tensor, shape: tuple[int, int], scale_layout: int) -> Tensor:
    """A scale as a tensor core reads it, flat."""
    turned = scale.t() if e.direction is COLUMNWISE else scale  # [line blocks, blocks]
    if e.fmt.scale_leaves_contraction:
        return turned.flatten()
    if e.fmt.scale == "fp32" and scale_layout == native.BLACKWELL and spreads(e.fmt):
        return layout.swizzle_128x4(
            layout.spread_scales(turned, shape[1 - e.direction.contraction_dim], e.fmt.block[0])
        )
    if e.fmt.scale == "fp32":
        return layout.pad_to(turned.t() if e.fmt.block[0] == 1 else turned, 1, 4).flatten()
    if scale_layout == native.HOPPER:
        return turned.flatten()
    lines = shape[1 - e.direction.contraction_dim]
    return layout.swizzle_128x4(turned.repeat_interleave(e.fmt.block[0], 0)[:lines])


def of_run(x: Tensor, e: Encoding, length: int | None) -> tuple[Tensor, ...]:
    if length != native.OF_TENSOR:
        return anchoring.anchored(x, e, length)
    made = reference.encode(x, reference.statistics(x, e)[0], None, e)
    codes, scale = anchoring.anchored_codes(*made, e.fmt, e.direction, whole=True)
    return codes, scale.view(1, 1), x.abs().amax().float().view(1)


def anchored(
    name: str, directions: tuple[Direction, ...], runs: tuple[int | None, ...], dtype=BF16
) -> None:
    for shape in SHAPES:
        x, encodings = values(shape, dtype), [MADE[name].encoding(d) for d in directions]
        made = native.quantize_anchored(on_device(x), encodings, runs, dtype is FP32)

        def want(x=x, encodings=encodings) -> list[Tensor]:
            return [t for e, length in zip(encodings, runs) for t in of_run(x.to(BF16), e, length)]

        text = f"quantize_anchored {name} {directions} {runs} {list(shape)} {dtype}"
        run(text, [t for m in made for t in m], want)


def product_error() -> None:
    """Of operands of every kind of scale, in a step that is looked at."""
    fmt, step = (
        MADE["mxfp8"].fmt,
        on_device(torch.tensor([0, PROBED_STEPS, 0, -1, 0])),
    )
    for (m, n, k), blocks in (((64, 48, 128), (None, 1)), ((200, 70, 1040), (128, 512))):
        operands = []
        for lines, block in zip((m, n), blocks):
            data = torch.randint(0, 120, (lines, k), dtype=torch.uint8)
            shape = (
                (1,)
                if block is None
                else (lines,)
                if block == 1
                else (-(-k // block), -(-lines // 4) * 4)
            )
            block = (None, None) if block is None else (1, None) if block == 1 else (1, block)
            operands.append(
                (data, torch.rand(shape), Format("operand", fmt.element, block, "fp32", pow2=True))
            )
        guard = on_device(torch.zeros(3, 2))
        made = [
            native.Operand(on_device(data), on_device(scale), fmt) for data, scale, fmt in operands
        ]
        if blocks == (None, 1):
            watch = native.Watch(native.packed_counts((True, True)), step, guard, 1)
            native.gemm(*made, BF16, None, False, None, None, watch)
        else:  # no kernel multiplies these
            expected.look(*made, (True, True), step, guard, 1)

        def want(operands=operands) -> list[Tensor]:
            return [
                torch.stack(
                    (
                        torch.zeros(2),
                        estimates.product_error(*operands, (True, True), 1, True),
                        torch.zeros(2),
                    )
                )
            ]

        run(f"product_error {m} {n} {k} {blocks}", [guard], want, 1e-5)


def anchor_codes(name: str) -> None:
    for shape in SHAPES:
        for direction in Direction:
            e, x = MADE[name].encoding(direction), values(shape)
            w = encoded(x * torch.linspace(0, 1, shape[1], dtype=BF16) ** 9, e)
            exact = e.fmt.decodes_exactly_to_e4m3
            runs = (native.OF_TENSOR,) if e.fmt.pow2 or exact else (native.OF_TENSOR, 0, 128)
            for transposed, anchor_run in itertools.product((False, True), runs):
                how, amax = (
                    (e.fmt, direction, transposed, anchor_run),
                    on_device(w.tensor_amax) if exact else None,
                )
                made = native.anchor_codes(
                    on_device(w.data), on_device(w.scale), amax, shape[1], *how
                )

                def want(
                    e=e,
                    w=w,
                    transposed=transposed,
                    anchor_run=anchor_run,
                    exact=exact,
                    cols=shape[1],
                ) -> list[Tensor]:
                    if exact:
                        codes, lines = anchoring.e4m3_operand(
                            w.data, w.scale, w.tensor_amax, e.fmt, e.direction, cols
                        )
                    else:
                        whole, along = (
                            anchor_run == native.OF_TENSOR,
                            anchor_run if anchor_run > 0 else None,
                        )
                        codes, lines = anchoring.anchored_codes(
                            w.data, w.scale, e.fmt, e.direction, whole, cols, along
                        )
                    return [codes.t() if transposed else codes, lines]

                what = (
                    f"{name} {direction} {list(shape)}, transposed {transposed}, run {anchor_run}"
                )
                run(f"anchor_codes {what}", made, want)
                of = [on_device(w.data)] * 2, [on_device(w.scale)] * 2, [amax] * 2, [shape[1]] * 2
                for made in native.multi_tensor_anchor(*of, *how):
                    run(f"anchor_group {what}", made, want)


def statistics(names: tuple[str, str], dtype=BF16, row0=0) -> None:
    for shape in SHAPES:
        x, encodings = values(shape, dtype), [MADE[n].encoding(d) for n, d in zip(names, Direction)]
        made = native.statistics(on_device(x), encodings, row0, False)
        run(
            f"statistics {names} {list(shape)} {dtype} from row {row0}",
            [t for m in made for t in m],
            lambda x=x, es=encodings: [
                t
                for e in es
                for t in reference.statistics(reference.prepared(x, e), e, row0)
                if t is not None
            ],
        )


def whole_numbers(*shape: int) -> Tensor:
    """bf16 values of which any sum is exact in fp32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(shape[0])).to(BF16)


def column_sums() -> None:
    for shape in (*SHAPES, MANY):
        x = whole_numbers(*shape)
        run(
            f"column_sums {list(shape)}",
            [native.column_sums(on_device(x))],
            lambda x=x: [x.float().sum(0).to(BF16)],
        )


def group(name: str, direction: Direction, dtype=BF16) -> None:
    """Statistics and codes of three tensors, the codes into one buffer."""
    e, shapes, row0 = (
        MADE[name].encoding(direction),
        (SHAPES[0], SHAPES[1], (129, 257)),
        [0, 33, 100],
    )
    x = [values(shape, dtype) for shape in shapes]
    stats = [reference.statistics(one.to(BF16), e, start) for one, start in zip(x, row0)]
    side, columnwise, ops, device_x = (
        native.pack_encoding(e),
        direction is COLUMNWISE,
        native.encoding._ops,
        [on_device(one) for one in x],
    )
    made = ops.statistics_group(device_x, side, columnwise, row0, dtype is FP32)
    run(
        f"statistics_group {name} {direction} {dtype}",
        made,
        lambda: [t for s in stats for t in s if t is not None],
    )
    amax, tensor_amax = ([on_device(s[i]) for s in stats] for i in range(2))
    whole = torch.full((1 << 19,), 0xA5, dtype=torch.uint8)
    staging, data_at, scale_at = (
        on_device(whole),
        [0, 1 << 17, 1 << 18],
        [3 << 17, 7 << 16, 15 << 15],
    )
    ops.quantize_group(
        device_x,
        side,
        columnwise,
        0.0,
        row0,
        amax,
        tensor_amax,
        [],
        [],
        staging,
        data_at,
        scale_at,
        dtype is FP32,
    )

    def want() -> list[Tensor]:
        for one, start, s, d, at in zip(x, row0, stats, data_at, scale_at):
            w = encoded(one.to(BF16), e, row0=start, stats=s)
            for place, buffer in ((d, w.data), (at, w.scale)):
                of_bytes = buffer.contiguous().reshape(-1).view(torch.uint8)
                whole[place : place + of_bytes.numel()] = of_bytes
        return [whole]

    run(f"quantize_group {name} {direction} {dtype}", [staging], want)


def dequantize(name: str, direction: Direction, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        e = MADE[name].encoding(direction)
        w = encoded(values(shape), e)
        cols = e.fmt.padded_shape(shape, direction)[1]
        made = native.dequantize(
            on_device(w.data),
            on_device(w.scale),
            on_device(w.tensor_amax),
            e.fmt,
            direction,
            cols,
            0,
            dtype,
        )
        run(
            f"dequantize {name} {direction} {list(shape)} to {dtype}",
            [made],
            lambda e=e, w=w, cols=cols: [
                reference.decode(w.data, w.scale, w.tensor_amax, e.fmt, direction, cols).to(dtype)
            ],
        )


def transposes_and_swizzles() -> None:
    g = torch.Generator().manual_seed(0)
    sources, out, kinds, sizes, wanted = [], [], [], [], []
    for rows, cols in (*SHAPES, (256, 512)):
        data = torch.randint(0, 256, (rows, cols), generator=g, dtype=torch.uint8)
        nibbles = data[:, : ceil_div(cols, 2)].contiguous()
        if cols % 2:
            nibbles[:, -1] &= 0xF
        turned, turned_nibbles = data.t().contiguous(), layout.repack(nibbles, 4, rows, cols)
        run(
            f"transpose bytes [{rows}, {cols}]",
            [native.transpose_codes(on_device(data), rows, cols, 8)],
            lambda t=turned: [t],
        )
        run(
            f"transpose nibbles [{rows}, {cols}]",
            [native.transpose_codes(on_device(nibbles), rows, cols, 4)],
            lambda t=turned_nibbles: [t],
        )
        sources += [data, nibbles]
        wanted += [turned, turned_nibbles]
        kinds += [native.TRANSPOSE_BYTES, native.TRANSPOSE_NIBBLES]
        sizes += [(rows, cols, 0, 1)] * 2
        for kind, outer_block in (
            (native.SWIZZLE, 1),
            (native.SWIZZLE, 16),
            (native.SWIZZLE_TRANSPOSED, 1),
        ):
            lines = (data.t() if kind == native.SWIZZLE_TRANSPOSED else data).repeat_interleave(
                outer_block, 0
            )
            made = native.swizzle_scales(
                on_device(data), len(lines), outer_block, kind == native.SWIZZLE_TRANSPOSED
            )
            run(
                f"swizzle {kind} [{rows}, {cols}] blocks of {outer_block}",
                [made],
                lambda t=lines: [layout.swizzle_128x4(t)],
            )
            sources.append(data)
            wanted.append(layout.swizzle_128x4(lines))
            kinds.append(kind)
            sizes.append((rows, cols, len(lines), outer_block))
    out = [on_device(torch.zeros_like(w)) for w in wanted]
    native.encoding._ops.relayout_group(
        [on_device(s) for s in sources], out, kinds, *map(list, zip(*sizes))
    )
    run("relayout_group", out, lambda: wanted)


def adam(grad: torch.dtype, moments: torch.dtype, rounded: bool) -> None:
    row = torch.tensor([0.999, 0.0, 0.1, 0.999, 1e-3, 0.5, -1e-2, 1e-8])
    for size in (1, 4097, 8190):
        p, g, m, v = (laws.values(size, seed=i, dtype=FP32) for i in range(4))
        one = [
            p,
            g.to(grad),
            m.to(moments),
            v.square().to(moments),
            p.to(BF16) if rounded else None,
        ]
        new = adam_update(*one, row)
        want = [new[0], *(t.to(moments) for t in new[1:]), *([new[0].to(BF16)] if rounded else [])]
        made = [None if t is None else on_device(t) for t in one]
        step = native.AdamStep(*([t] for t in made[:4]), [0], row[None], None, None)
        native.adam(step, [made[4]] if rounded else ())
        run(
            f"adam of {size}: {grad} {moments} rounded {rounded}",
            [made[0], *made[2:][: 2 + rounded]],
            lambda w=want: w,
        )


def adam_codes(grad: torch.dtype, remainder: bool) -> None:
    """Moments in codes, and masters that are remainders."""
    row = torch.tensor([0.999, 0.0, 0.1, 0.999, 1e-3, 0.5, -1e-2, 1e-8])
    for shape in ((3, 256), (5, 301), (67, 130)):
        p, g, m, v = (laws.values(*shape, seed=i, dtype=FP32) for i in range(4))
        rounded, p = compact.split(p) if remainder else (None, p)
        (m, first), (v, second) = compact.encode(m), compact.encode(v.abs(), is_root=True)
        of = Stored(p, m, v, rounded, first, second)
        made = Stored(*(None if t is None else on_device(t) for t in of))
        step = native.AdamStep(
            [made.master],
            [on_device(g.to(grad))],
            [made.first],
            [made.second],
            [0],
            row[None],
            None,
            None,
        )
        native.adam(
            step, [made.rounded] if remainder else (), [made.first_scale], [made.second_scale]
        )
        want = [t for t in of.updated(g.to(grad), row) if t is not None]
        run(
            f"adam of codes {shape}: {grad} remainder {remainder}",
            [t for t in made if t is not None],
            lambda w=want: w,
        )


def adam_group(
    grad: torch.dtype, moments: torch.dtype, sides: tuple[str, str], statistics: bool
) -> None:
    row = torch.tensor([0.999, 0.0, 0.1, 0.999, 1e-3, 0.5, -1e-2, 1e-8])
    encodings = tuple(HybridQuantizer(*sides).encodings.values())
    p, g, m, v = (laws.values(67, 130, seed=i, dtype=FP32) for i in range(4))
    one = [p, g.to(grad), m.to(moments), v.square().to(moments)]
    x = adam_update(*one, None, row)[0].to(BF16)
    step = native.AdamStep(*([on_device(t)] for t in one), [0], row[None], None, None)
    stats = [reference.statistics(x, e, 32) for e in encodings]
    if statistics:
        made, want = native.adam_statistics(step, encodings, [32], [[True] * len(encodings)]), stats
    else:
        made = native.adam_codes(step, encodings, [32], [[None] * len(encodings)])
        want = [reference.encode(x, *s, e, 32, None, None) for s, e in zip(stats, encodings)]
    flat = [[t for of in some for t in of if t is not None] for some in (made[0], want)]
    run(f"adam_group {sides} {grad} {moments} statistics {statistics}", flat[0], lambda: flat[1])


def gradients(name: str, dtype: torch.dtype) -> None:
    """Of two owners: rows that they do not divide, a vector, more than a block."""
    grads = [laws.values(*s, seed=1, dtype=dtype) for s in ((37, 48), (5,), (130, 136))]
    layout = GradientLayout(tuple(tuple(g.shape) for g in grads), 2, name)
    keys = torch.stack([KEY + i for i in range(len(grads))]) * torch.tensor([1, 1, 1, 1, 0])
    given = [on_device(g) for g in grads]
    total = on_device(torch.empty(sum(layout.numels)))
    codes = gradient_codes.encode_gradients(given, layout, on_device(keys))
    gradient_codes.decode_gradients(codes, layout, total, 0.5)

    def want() -> list[Tensor]:
        out, wanted = torch.zeros(codes.shape, dtype=torch.uint8), torch.empty(total.shape)
        gradient_codes.reference_encode(grads, layout, keys, out)
        gradient_codes.reference_decode(out, layout, wanted, 0.5)
        return [*(t for t in layout.sections(out) if t is not None), wanted]

    run(f"gradients {name} {dtype}", [*layout.sections(codes), total], want)


def pieces_of(pair: tuple[str, str], cuts: tuple[int, ...], stats: str, dtype=FP32) -> None:
    """A cast of the piece of a tensor that a rank has, without what others would reduce."""
    made = pieces.cast_of_one_rank(
        pair, PIECE, (0, *cuts, PIECE[0] * PIECE[1]), stats, expected.DEVICE.type, dtype
    )

    def want() -> list[Tensor]:
        with pieces.kernels():
            return pieces.cast_of_one_rank(
                pair, PIECE, (0, *cuts, PIECE[0] * PIECE[1]), stats, "cpu", dtype
            )

    run(f"cast of pieces {pair} {cuts} {stats} {dtype}", made, want)


def activations(name: str, dtype: torch.dtype) -> None:
    kind, gated = ACTIVATIONS[name]
    for shape in ((200, 328), (33, 48)):
        dh, g, u = (laws.values(*shape, seed=i, dtype=dtype) for i in range(3))
        u = u if gated else None
        given = [on_device(t) for t in (dh, g, u)]
        h, amaxes = native.activation(*given[1:], kind)
        *gradients, of_gradients = native.activation_backward(*given, kind)

        def want(dh=dh, g=g, u=u) -> list[Tensor]:
            h, found = (
                norm.reference_activation(g, u, kind),
                norm.reference_activation_backward(dh, g, u, kind),
            )
            found = [t for t in found if t is not None]
            return [h, *found, *(t.float().abs().amax().view(1) for t in (h, *found))]

        made = [
            h,
            *gradients,
            amaxes[:1],
            *(a[:1] for a, t in zip(of_gradients, gradients) if t is not None),
        ]
        run(f"activation {name} {list(shape)} {dtype}", made, want, 2**-6)


def norms(dtype: torch.dtype, centred: bool) -> None:
    spec = NormSpec(1e-5, centred, not centred)
    for rows, cols in ((200, 328), (300, 2048), (33, 4096), (5, 16384)):
        x, dy, residual = (laws.values(rows, cols, seed=i, dtype=dtype) for i in range(3))
        weight, bias = (
            laws.values(cols, seed=3, dtype=dtype),
            laws.values(cols, seed=4, dtype=dtype) if centred else None,
        )
        given = [on_device(t) for t in (x, weight, bias)]
        y, rstd, mean, amax = native.norm(*given, *spec)
        back = native.norm_backward(
            on_device(dy), *given[:2], on_device(residual), rstd, mean, *spec[2:], bias is not None
        )

        def want(x=x, dy=dy, residual=residual, weight=weight, bias=bias) -> list[Tensor]:
            y, rstd, mean = norm.reference_norm(x, weight, bias, spec)
            # sums of rows in fp32
            wide = (None if t is None else t.float() for t in (dy, x, weight, bias, residual))
            gradients = norm.reference_norm_backward(*wide, rstd, mean, spec)
            found = [t.to(dtype) for t in gradients if t is not None]
            return [
                y,
                rstd,
                mean,
                y.float().abs().amax().view(1),
                *found,
                found[0].float().abs().amax().view(1),
            ]

        run(f"norm {spec} [{rows}, {cols}] {dtype}", [y, rstd, mean, amax, *back], want, 2**-6)


def routed(of_weights: torch.dtype) -> None:
    """Sums over experts, and their backward. Sums over columns are of whole numbers."""
    for tokens, copies, cols in ((70, 2, 24), (9, 8, 328), (5, 9, 2880)):
        g = torch.Generator().manual_seed(tokens)
        back = torch.randperm(tokens * copies, generator=g).view(tokens, copies)
        rows, dout = (whole_numbers(n, cols) for n in (tokens * copies, tokens))
        weights = laws.values(tokens, copies, dtype=of_weights)
        given = [on_device(t) for t in (dout, rows, back, weights)]
        made = [
            native.combine(*given[1:]),
            native.combine(*given[1:3], None),
            *native.combine_backward(*given),
            native.combine_backward(given[0], None, *given[2:])[0],
            native.combine_backward(given[0], None, given[2], None)[0],
        ]

        def want(dout=dout, rows=rows, back=back, weights=weights) -> list[Tensor]:
            drows, dweights = routing.reference_combine_backward(dout, rows, back, weights)
            sums = [routing.reference_combine(rows, back, w) for w in (weights, None)]
            ones, _ = routing.reference_combine_backward(dout, None, back, None)
            return [*sums, drows, dweights, drows, ones]

        run(f"combine [{tokens}, {copies}] of {cols}, {of_weights}", made, want)


def moved_rows() -> None:
    """Rows of buffers into one, and apart; an order of pieces."""
    for widths in ((4096, 128), (24, 5)):
        buffers = [torch.arange(70 * n, dtype=torch.uint8).view(70, n) for n in widths]
        order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
        given, index = [on_device(b) for b in buffers], on_device(order)
        packed = native.pack_rows(given, index)
        want = torch.cat(buffers, 1)[order]
        run(f"pack_rows {widths}", [packed], lambda want=want: [want])
        made = native.unpack_rows(packed, index, given)
        want = [*want[order].split(widths, 1)]
        run(f"unpack_rows {widths}", made, lambda want=want: want)
    ends, shifts = torch.tensor([3, 3, 8]), torch.tensor([5, 0, -3])
    made = native.piece_orders(on_device(ends), on_device(shifts), 8)
    want = [torch.tensor([5, 6, 7, 0, 1, 2, 3, 4]), torch.tensor([3, 4, 5, 6, 7, 0, 1, 2])]
    run("piece_orders", list(made), lambda: want)


# Of a linear layer's step #

# `context.STEP_FIELDS`, `operands.slot_ids`
STEP, IDS = (torch.tensor([5, 3, 1, -1, 2]), torch.tensor([77, 78, 79]))


def scalars(emulation: Operators) -> None:
    for slot in range(3):
        made = native.random_key(on_device(STEP), on_device(IDS), slot, 100)
        run(
            f"random_key {slot}",
            [made],
            lambda slot=slot: [emulation.random_key(STEP, IDS, slot, 100)],
        )
    counted, on_gpu = torch.full((4,), -1), on_device(torch.full((4,), -1))
    for step in (STEP, STEP, STEP + 1):
        made = [native.gradient_keys(on_device(step), on_device(IDS), on_gpu), on_gpu.clone()]
        keys = gradient_codes.reference_keys(step, IDS, counted)
        want = [keys, counted.clone()]
        run(f"gradient_keys {step[1]}", made, lambda want=want: want)
    for amax in (0.5, 7.0, math.inf, math.nan):
        history = torch.tensor([2.0, 9.0])
        given = on_device(history)
        native.record_amax(given, on_device(torch.tensor([amax])))
        emulation.record_amax(history, torch.tensor([amax]))
        run(f"record_amax {amax}", [given], lambda history=history: [history])
    amax = torch.tensor([3.0])
    fmt = MADE["nvfp4"].fmt
    run(
        "tensor_decode_scale",
        [native.tensor_decode_scale(on_device(amax), fmt)],
        lambda: [reference.tensor_decode_scale(amax, fmt)],
    )
    for ends in ([300, 300, 429, 1024], [0, 0, 0, 1024], list(range(8, 1025, 8))):
        ends = torch.tensor(ends, dtype=torch.int32)
        wrong = on_device(torch.zeros(1, dtype=torch.int64))
        groups = native.token_groups(on_device(ends), 1024, wrong, 7)

        def want(ends=ends) -> list[Tensor]:
            return [
                *in_use(native.TokenGroups(emulation.token_groups(ends, 1024), len(ends))),
                torch.zeros(1, dtype=torch.int64),
            ]

        run(f"token_groups of {len(ends)}", [*in_use(groups), wrong], want)


def in_use(groups: native.TokenGroups) -> list[Tensor]:
    """The tables of groups, without the rows that they leave free."""
    return [groups.sources[: int(groups.padded[-1]) // 128], groups.offsets, groups.padded]


def planned(emulation: Operators, plan: GemmPlan) -> tuple[int, SimpleNamespace]:
    """(number of the compiled step of a plan, what the emulation is told of it)."""
    resolved = plan.resolved(BF16, expected.DEVICE)

    def compiled() -> int:
        specs = plan._operand_specs(
            resolved.layouts, resolved.domains, BF16, arch_of(expected.DEVICE)
        )
        return native.linear_plan(specs, False, resolved.watched, plan.key)

    with replaced_operators(emulation):
        number = compiled()
    call = SimpleNamespace(
        number=number, step=STEP, ids=IDS, guard=None, **vars(emulation.plans[number])
    )
    return compiled(), call


def gated(emulation: Operators, name: str, activation: str, enc: float | None = None) -> None:
    """Codes of an activation that is quantized as it is made: those of what the activation's own
    kernel wrote."""
    plan = build_plan(recipes.by_name(name), "it")
    number, call = planned(emulation, plan)
    kind = ACTIVATIONS[activation].kind
    g, u = (on_device(laws.values(256, 384, seed=i)) for i in range(2))
    factors, history = (
        [] if enc is None else [torch.tensor([enc])],
        [] if enc is None else [torch.tensor([0.25, 4.0])],
    )
    given = [on_device(t.clone()) for t in history]
    step = Call(
        plan,
        True,
        on_device(STEP),
        on_device(IDS),
        factors=([on_device(f) for f in factors], [], []),
        histories=(given, [], []),
    )
    made = native.linear_gated((g, u, kind), number, step)
    h = native.activation(g, u, kind)[0]

    def want() -> list[Tensor]:
        call.factors, call.histories = (factors, []), (history, [])
        wanted = emulation._step_quantize(call, 0, h.cpu(), True, True)
        return [*(t for buffers in wanted.values() for t in buffers), *history]

    run(f"linear_gated {name} {activation} {enc}", [*made, *given], want)


# Of modules #


def two_steps(make: Callable[[], nn.Module], *args) -> list[Tensor]:
    fq.begin_step(0)
    torch.manual_seed(0)
    module, seen = make(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        x = on_device(laws.values(256, 256, seed=step)).requires_grad_()
        y = module(x, *args)
        y.backward(on_device(laws.values(*y.shape, seed=9)))
        seen += [y.detach(), x.grad, *(p.grad for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def module_step(what: str, make: Callable[[], nn.Module], *args) -> None:
    """Two optimizer steps of a module, twice: the same bits, all finite."""
    results = []
    for _ in range(2):
        with laws.kept_step():  # layers without names have the same random bits
            results.append(two_steps(make, *args))
    run(what, results[0], lambda: [torch.where(t.isfinite(), t, 0).cpu() for t in results[1]])


def bias_gradient(recipe: fq.Recipe, tokens: int) -> None:
    """Sums that quantizing a gradient makes on the way: of tiles behind a grid barrier, or of more
    than are resident."""
    layer = fq.Linear(64, 2064, device=expected.DEVICE, dtype=BF16, recipe=recipe)
    dy = whole_numbers(tokens, 2064)
    layer(on_device(laws.values(tokens, 64))).backward(on_device(dy))
    run(
        f"bias gradient {recipe} of {tokens} tokens",
        [layer.bias.grad],
        lambda: [dy.float().sum(0).to(BF16)],
    )


class SwiGLUExperts(nn.Module):
    """Packed experts that quantize SwiGLU and its gradient as they compute them, where they do."""

    def __init__(self, recipe: fq.Recipe, ffn: int):
        super().__init__()
        options = {"device": expected.DEVICE, "dtype": BF16, "packed": True, "recipe": recipe}
        self.first = fq.GroupedLinear(4, 256, 2 * ffn, False, name="first", **options)
        self.last = fq.GroupedLinear(4, ffn, 256, False, name="last", **options)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        order = torch.arange(len(x), device=x.device)
        shares = torch.linspace(-1, 1, len(x), device=x.device).view(-1, 1).requires_grad_()
        routes = order, order.view(-1, 1)
        y, h = self.first(x, ends, (), Around(True, routes, shares))
        if h is None:
            return self.last(y[:, : y.size(1) // 2], ends)
        return self.last(h, ends, (), Around(y, routes))


def every_step() -> None:
    cuda = {"device": expected.DEVICE, "dtype": BF16}
    for name in RECIPES:
        recipe = recipes.by_name(name)
        for options in (
            {},
            {"activation": "gelu", "bias": True, "normalization": "LayerNorm"},
            {"recompute": "gate_up"},
        ):
            make = functools.partial(
                fq.LayerNormMLP, 256, 384, residual=True, recipe=recipe, **cuda, **options
            )
            module_step(f"LayerNormMLP {name} {options}", make)
        for tokens in (208, 1040):
            bias_gradient(recipe, tokens)
        for splits in ([100, 0, 129, 27], on_device(torch.tensor([100, 100, 229, 256]))):
            make = functools.partial(
                fq.GroupedLinear, 4, 256, 384, recipe=recipe, packed=True, **cuda
            )
            module_step(f"GroupedLinear {name}", make, splits)
        back = torch.randperm(512, generator=torch.Generator().manual_seed(0))
        routes = [on_device(t) for t in (back.argsort(), back.view(256, 2))]
        splits = on_device(torch.tensor([200, 200, 329, 512]))
        module_step(f"GroupedLinear {name}, of routes", make, splits, routes)
        around = Around(False, routes)
        without = functools.partial(make, bias=False)
        module_step(f"GroupedLinear {name}, summed", without, splits, routes, around)
        for ffn in (208, 256):  # halves of a tile, and of whole ones
            make = functools.partial(SwiGLUExperts, recipe, ffn)
            module_step(f"SwiGLU of experts {name} {ffn}", make, splits // 2)


def every_instance() -> None:
    """One call at least for each kernel instance, and for each branch that another one takes in
    it."""
    plain8, blocks, plain4 = (
        ("fp8_128x128", "mxfp8_32x32"),
        ("fp8_1x128", "mxfp8", "nvfp4"),
        ("nvfp4_16x16",),
    )
    for shape in SHAPES:
        for name in plain8 + blocks + plain4 + ("mxfp8_e5m2", "fp8_1x128_fp32"):
            for names in ((name, None), (None, name), (name, name)):
                quantize(names, shape, transposed=shape == SHAPES[0])
                quantize(names, shape, given=True)
        for names in (
            ("mxfp8", "fp8_1x128"),
            ("fp8_128x128", "nvfp4"),
            ("mxfp8", "nvfp4_16x16"),
            ("nvfp4", "mxfp8"),
        ):
            quantize(names, shape)
        for name in ("fp8_tensor", "fp8_tensor_sr"):
            for names in ((name, None), (None, name), (name, name)):
                quantize(names, shape, given=True, in_parts=True)
        # statistics behind a grid barrier
        for name in ("fp8_tensor", "fp8_row", "nvfp4", "nvfp4_rht"):
            for names in ((name, None), (None, name), (name, name)):
                quantize(names, shape)
        for name in (
            "fp8_tensor_sr",
            "fp8_row_sr",
            "mxfp8_sr",
            "nvfp4_sr",
            "nvfp4_16x16_sr",
            "nvfp4_rht_sr",
            "fp8_tensor_e5m2_sr",
        ):
            quantize((name, name), shape)
            quantize((None, name), shape, transposed=True)
        for names in (
            ("nvfp4", "nvfp4"),
            ("nvfp4_sr", "nvfp4_rht_sr"),
            ("nvfp4_rht", None),
            ("nvfp4_16x16", "nvfp4_16x16"),
            ("nvfp4_mse", "nvfp4_row_exact_rht_sr"),
            ("nvfp4_16x16_mse", "nvfp4_16x16_mse"),
        ):
            for transposed in (False, True):  # runs of 16
                quantize(names, shape, transposed=transposed, tensor_given=True)
        for names in (
            ("nvfp4_exact", "nvfp4_exact"),
            ("nvfp4_exact_sr", "nvfp4_exact_rht_sr"),
            ("nvfp4_16x16_exact", "nvfp4_16x16_exact"),
        ):
            quantize(names, shape, tensor_given=True)
            for of in (names, (names[0], None), (None, names[1])):
                quantize(of, shape, transposed=True, scale_layout=native.OPERAND)
        for names in (
            ("mxfp8", "nvfp4_rht_sr"),
            ("mxfp8_sr", "nvfp4"),
            ("nvfp4_sr", "fp8_row"),
            ("nvfp4_exact_sr", "fp8_row"),
        ):
            quantize(names, shape)
        for factor in (0.0, 0.5):
            quantize(("fp8_tensor", "fp8_tensor"), shape, factor=factor)
            quantize(("fp8_tensor", "nvfp4"), shape, factor=factor)
        for dtype in (FP32, FP16):
            for names in (
                ("mxfp8", "fp8_row"),
                ("nvfp4", "nvfp4_rht_sr"),
                ("fp8_128x128", "nvfp4_16x16"),
                ("fp8_tensor_sr", "mxfp8_sr"),
            ):
                quantize(names, shape, dtype)
        quantize(("mxfp8", "fp8_row"), shape, FP32, round_to_bf16=True)
        for scale_layout in (native.HOPPER, native.BLACKWELL):
            for name in (
                "fp8_1x128",
                "fp8_128x128",
                "mxfp8",
                "mxfp8_32x32",
                "nvfp4",
                "nvfp4_16x16",
                "fp8_tensor",
                "fp8_row",
            ):
                quantize((name, name), shape, transposed=True, scale_layout=scale_layout)
        for name in ("mxfp8", "fp8_128x128", "nvfp4_16x16", "fp8_row"):
            quantize((name, name), shape, row0=33, given=True)
    for names in (
        ("mxfp8", "mxfp8"),
        ("fp8_tensor", "fp8_row"),
        ("nvfp4_rht_sr", "nvfp4_rht_sr"),
        ("nvfp4_16x16", "nvfp4_16x16"),
    ):
        quantize(names, MANY)
    for directions, runs in (
        ((ROWWISE,), (None,)),
        ((COLUMNWISE,), (128,)),
        ((ROWWISE, COLUMNWISE), (None, 128)),
        ((ROWWISE, COLUMNWISE), (native.OF_TENSOR,) * 2),
    ):
        anchored("mxfp8", directions, runs)
    anchored("mxfp8_e5m2", (ROWWISE, COLUMNWISE), (128, None), FP32)
    for name in (
        "mxfp8",
        "mxfp8_e5m2",
        "mxfp8_32x32",
        "mxfp6",
        "mxfp4",
        "fp8_128x128",
        "nvfp4_exact",
        "nvfp4_16x16_exact",
    ):
        anchor_codes(name)
    product_error()
    for names in (
        ("fp8_row", "nvfp4"),
        ("fp8_128x128", "mxfp8"),
        ("nvfp4_rht", "nvfp4_rht"),
        ("fp8_tensor", "nvfp4_16x16"),
    ):
        statistics(names)
        statistics(names, FP32)
    statistics(("fp8_128x128", "mxfp8"), row0=33)
    column_sums()
    for name in ("mxfp8", "fp8_row", "nvfp4", "nvfp4_16x16"):
        for direction in Direction:
            group(name, direction)
    group("mxfp8", ROWWISE, FP32)
    for name in ("fp8_row", "fp8_128x128", "mxfp8", "mxfp8_e5m2", "nvfp4", "nvfp4_16x16"):
        for direction, dtype in ((ROWWISE, BF16), (COLUMNWISE, FP32), (ROWWISE, FP16)):
            dequantize(name, direction, dtype)
    transposes_and_swizzles()
    for grad, moments, rounded in itertools.product((FP32, BF16), (FP32, BF16), (False, True)):
        adam(grad, moments, rounded)
        adam_codes(grad, rounded)
        adam_group(
            grad, moments, ("nvfp4", "fp8_row") if rounded else ("mxfp8", "fp8_1x128"), rounded
        )
    for pair in (
        ("fp8_tensor", "fp8_tensor"),
        ("fp8_row", "fp8_row"),
        ("fp8_1x128", "fp8_128x128"),
        ("mxfp8", "mxfp8"),
        ("nvfp4_16x16", "nvfp4_16x16"),
        ("nvfp4", "nvfp4"),
        ("mxfp8", "nvfp4"),
        ("nvfp4", "mxfp8"),
        ("identity", "mxfp8"),
        ("identity", "nvfp4"),
        (format_of("nvfp4_16x16", scale_rule="fp8_exact"),) * 2,
    ):
        for cuts, stats in (((5001, 40003), "halo"), ((5000, 40000), "dense"), ((), "dense")):
            pieces_of(pair, cuts, stats)
    pieces_of(("mxfp8", "nvfp4"), (5001, 40003), "halo", BF16)
    for dtype in (BF16, FP16, FP32):
        for name in gradient_codes.GRADIENT_FORMATS:
            gradients(name, dtype)
        for name, activation in ACTIVATIONS.items():
            if activation.has_kernel:
                activations(name, dtype)
        for centred in (False, True):
            norms(dtype, centred)
    for of_weights in (BF16, FP32):
        routed(of_weights)
    moved_rows()
    emulation = Operators()
    scalars(emulation)
    for activation in ("swiglu", "geglu"):
        for name in ("fp8_block", "mxfp8"):
            gated(emulation, name, activation)
        for enc in (0.0, 0.5):
            gated(emulation, "fp8_delayed", activation, enc)


PARTS = {
    "instances": every_instance,
    "products": sanitize_products.every_product,
    "steps": every_step,
}


def main() -> int:
    if expected.WHY_NOT is not None:
        print(f"nothing to do: {expected.WHY_NOT}")
        return 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--filled", action="store_true", help="new memory holds NaN")
    args = parser.parse_args()
    if args.filled:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    PARTS[args.part]()
    if expected.DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print(f"{len(DONE)} calls ran", flush=True)
    found = differences()
    print("\n".join(found) or "every byte is the reference's")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
