# SPDX-License-Identifier: Apache-2.0
"""Operators as compiled graphs hold them: schemas, tags, and fakes of fixed and symbolic lengths.

Nothing is launched: the tests run wherever the library loads, with a GPU or without.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import SAC_IGNORED_OPS

from dist_tests import laws
from dist_tests.single import hopper
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.ops import extension, native
from fsdp_quant.ops.layout import SPREAD_BLOCKS
from fsdp_quant.quantizer import Quantizer

pytestmark = pytest.mark.skipif(not extension.is_loaded(), reason="needs the compiled operators")

BF16, U8, FP32 = torch.bfloat16, torch.uint8, torch.float32
QUANTIZERS = laws.KERNEL_QUANTIZERS
SHAPES = ((1, 1), (7, 15), (33, 47), (128, 256), (129, 257), (200, 1000))

# What operators write, by the names of their arguments; all others write nothing.
WRITES = {
    "product_error": {"guard"},
    "watched_gemm": {"guard"},
    "quantize_group": {"record", "staging"},
    "quantize_group_out": {"record", "data", "scale"},
    "gemm_out": {"out"},
    "grouped_gemm": {"out", "flag"},
    "grouped_gemm_wgrad": {"out", "flag"},
    "anchor_group": {"out", "line_scale"},
    "relayout_group": {"out"},
    "record_amax": {"amaxes"},
    "adam": {"master", "first", "second", "rounded", "first_scale", "second_scale"},
    "adam_group": {"master", "first", "second", "out"},
    "adam_count": {"step"},
    "gradient_keys": {"counted"},
    "encode_gradients": {"buffer"},
    "decode_gradients": {"sum"},
}
NO_GRAPH = ("cast_pieces", "cast_scales")  # write through addresses in tables, which no schema says


def overload(name: str) -> torch._ops.OpOverload:
    name, _, which = name.partition(".")
    return getattr(getattr(torch.ops.fsdp_quant, name), which or "default")


@pytest.mark.parametrize("name", [name for name in native.FAKES if name not in NO_GRAPH])
def test_schemas_say_what_operators_write(name: str):
    """If false, functionalization drops a write, or torch.compile refuses the operator."""
    op = overload(name)
    written = {
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    assert written == WRITES.get(name, set())
    assert all(r.alias_info is None for r in op._schema.returns)
    assert torch.Tag.pt2_compliant_tag in op.tags
    refused = {"cudagraph_unsafe", "data_dependent_output", "dynamic_output_shape"}
    assert not refused & {t.name for t in op.tags}


def test_operators_that_write_through_tables_are_not_compliant():
    """If false, a graph may hold an operator that looks as if it wrote nothing, and is dropped."""
    for name in NO_GRAPH:
        assert torch.Tag.pt2_compliant_tag not in overload(name).tags


# Shapes #


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_shapes_are_those_that_formats_state(name: str):
    """If false, the C++ that allocates, formats.py and the emulated GPU mean different buffers."""
    emulators = {"sm_90a": hopper.Operators(), "sm_100f": hopper.Operators("sm_100f")}
    options = itertools.product(
        Direction, (False, True), (native.COMPACT, native.HOPPER, native.BLACKWELL), SHAPES, (0, 33)
    )
    for d, transposed, scale_layout, shape, row0 in options:
        e = QUANTIZERS[name].encoding(d)
        emulated = emulators["sm_100f" if scale_layout == native.BLACKWELL else "sm_90a"]
        if transposed and d is ROWWISE:
            continue
        packed = native.pack_encoding(e, transposed, scale_layout)
        fmt = e.fmt
        if fmt.bits == 6 and (transposed or scale_layout):
            with pytest.raises(ValueError, match="6-bit elements go with .* as compact codes"):
                native.encoding_shapes(packed, d is COLUMNWISE, shape, row0)
            continue
        alike = emulated.pack_encoding(
            fmt.element.name,
            fmt.scale,
            fmt.pow2,
            fmt.scale_rounding,
            fmt.scale_rule,
            *(b or 0 for b in fmt.block),
            e.stochastic,
            fmt.rotated,
            transposed,
            scale_layout,
        )
        if row0 and (transposed or scale_layout or (fmt.rotated and d is COLUMNWISE)):
            with pytest.raises(ValueError, match=f"a shard from row {row0} has compact storages"):
                native.encoding_shapes(packed, d is COLUMNWISE, shape, row0)
            continue
        got = native.encoding_shapes(packed, d is COLUMNWISE, shape, row0)
        want = emulated.encoding_shapes(alike, d is COLUMNWISE, *shape, row0)
        assert got == want, (d, transposed, scale_layout, shape, row0)
        if not (row0 or scale_layout):
            assert got.scale == got.amax == fmt.scale_shape(shape, d)
        if (name.startswith("mxfp8") and fmt.block == (1, 32)) and not (row0 or scale_layout):
            for run in (native.OF_TENSOR, 0, 128, 512):
                got = native.encoding_shapes(packed, d is COLUMNWISE, shape, run=run)
                assert got == emulated.encoding_shapes(alike, d is COLUMNWISE, *shape, run=run)


@pytest.mark.parametrize("name", [n for n, q in QUANTIZERS.items() if q.fmt.bits != 6])
def test_blackwell_scales_fill_tiles(name: str):
    """If false, a product on sm_100 reads behind its scales."""
    for d, shape in itertools.product(Direction, SHAPES):
        e = QUANTIZERS[name].encoding(d)
        packed = native.pack_encoding(e, d is COLUMNWISE, native.BLACKWELL)
        of = native.encoding_shapes(packed, d is COLUMNWISE, shape)
        if of.byte_scales:
            padded = e.fmt.padded_shape(shape, d)
            lines, length = padded[::-1] if d is COLUMNWISE else padded
            blocks = -(-length // e.fmt.block[1]) * (SPREAD_BLOCKS if e.fmt.has_fp32_scales else 1)
            assert of.scale == (-(-lines // 128) * 128 * (-(-blocks // 4) * 4),)


def test_products_are_planned_where_operators_take_them():
    """If false, a product is planned that the first step refuses, or the tensor cores of a GPU
    idle."""
    laws.assert_planned_as_taken(torch.ops.fsdp_quant.gemm_takes)


def test_integers_that_are_no_encoding_are_refused():
    """If false, an operator takes a number of another meaning for an encoding."""
    pack, shapes = torch.ops.fsdp_quant.pack_encoding, torch.ops.fsdp_quant.encoding_shapes
    good = ("e4m3", "fp32", False, "up", "nearest", 1, 128, False, False, False, 0)
    unknown_block = pack(*good[:6], 64, *good[7:])
    for packed, text in (
        (-1, "no encoding"),
        (7, "no encoding"),
        (1 << 40, "no encoding"),
        (0, "has no buffers"),
        (unknown_block, "blocks of .1, 64. with scale kind 0: no kernel"),
    ):
        with pytest.raises(ValueError, match=text):
            shapes(packed, False, 8, 8)
    assert shapes(pack(*good), False, 8, 8)[0] == [8, 8]
    for place, value, text in (
        (0, "e3m3", "element is e3m3"),
        (1, "e5m3", "scale is e5m3"),
        (5, -1, "outer -1; wanted 0 to 1023"),
        (6, 1 << 10, "contraction 1024; wanted 0 to 1023"),
    ):
        with pytest.raises(ValueError, match=text):
            pack(*good[:place], value, *good[place + 1 :])


# Graphs #


def empty(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def sides(name: str, transposed: bool = False, layout: int = native.COMPACT) -> tuple[int, int]:
    q = Quantizer(name)
    row, col = q.encoding(ROWWISE), q.encoding(COLUMNWISE)
    return native.pack_encoding(row, False, layout), native.pack_encoding(col, transposed, layout)


def calls() -> dict:
    """One call of each operator of graphs, of x [rows, 256]: name -> (inputs, operator of them)."""
    ops = torch.ops.fsdp_quant
    mx, row, two = sides("mxfp8"), sides("fp8_row", True, native.HOPPER), sides("nvfp4")
    u8 = {"dtype": U8}
    return {
        "quantize": ([empty(64, 256)], lambda x: ops.quantize(x, *row, 0.0, 0.0, 0, False)),
        "quantize nvfp4": ([empty(64, 256)], lambda x: ops.quantize(x, *two, 0.0, 0.0, 0, False)),
        "statistics": ([empty(64, 256)], lambda x: ops.statistics(x, *two, 0, False)),
        "quantize_anchored": (
            [empty(64, 256)],
            lambda x: ops.quantize_anchored(x, *mx, 128, 512, None, None, False),
        ),
        "column_sums": ([empty(64, 256)], lambda x: ops.column_sums(x)),
        "dequantize": (
            [empty(64, 256, **u8), empty(64, 8, **u8)],
            lambda x, s: ops.dequantize(x, s, None, mx[0], False, 256, 0, BF16),
        ),
        "transpose_codes": (
            [empty(64, 256, **u8)],
            lambda x: ops.transpose_codes(x, x.shape[0], 256, 8),
        ),
        "swizzle_scales": (
            [empty(64, 8, **u8)],
            lambda s: ops.swizzle_scales(s, s.shape[0], 1, False),
        ),
        "anchor_codes": (
            [empty(64, 256, **u8), empty(64, 8, **u8)],
            lambda x, s: ops.anchor_codes(x, s, None, mx[0], False, False, False, 256, 512),
        ),
        "gemm": (
            [empty(64, 256), empty(32, 256)],
            lambda a, b: ops.gemm(a, b, None, None, 0, 0, BF16),
        ),
        "norm": (
            [empty(64, 256), empty(256)],
            lambda x, w: ops.norm(x, w, None, 1e-6, False, False, False),
        ),
        "norm_backward": (
            [
                empty(64, 256),
                empty(64, 256),
                empty(256),
                empty(64, dtype=FP32),
                empty(0, dtype=FP32),
            ],
            lambda dy, x, w, rstd, mean: ops.norm_backward(
                dy, x, w, None, rstd, mean, False, False, False
            ),
        ),
        "activation": ([empty(64, 256), empty(64, 256)], lambda g, u: ops.activation(g, u, 1)),
        "activation_backward": (
            [empty(64, 256)] * 3,
            lambda dh, g, u: ops.activation_backward(dh, g, u, 1),
        ),
        "combine": (
            [empty(128, 256), empty(64, 2, dtype=torch.int64), empty(64, 2)],
            lambda rows, back, w: ops.combine(rows, back, w),
        ),
        "combine_backward": (
            [empty(64, 256), empty(64, 2, dtype=torch.int64), empty(64, 2)],
            lambda dout, back, w: ops.combine_backward(dout, None, back, w),
        ),
        "random_key": (
            [empty(5, dtype=torch.int64), empty(3, dtype=torch.int64), empty(64, 256)],
            lambda step, ids, x: ops.random_key(step, ids, 0, x.shape[0]),
        ),
        "tensor_decode_scale": (
            [empty(1, dtype=FP32)],
            lambda amax: ops.tensor_decode_scale(amax, two[0]),
        ),
    }


class Calling(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *inputs):
        return self.run(*inputs)


def exported(run, make, dynamic: bool):
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = make()
    shapes = None
    if dynamic:
        rows = Dim("rows", min=2)
        shapes = (tuple({0: rows} if t.dim() and t.shape[0] == 64 else {} for t in inputs),)
    program = export(Calling(run), tuple(inputs), dynamic_shapes=shapes, strict=True)
    return program, [
        n for n in program.graph.nodes if n.op == "call_function" and "fsdp_quant" in str(n.target)
    ]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize(
    "name",
    [
        "quantize",
        "quantize nvfp4",
        "statistics",
        "quantize_anchored",
        "column_sums",
        "dequantize",
        "transpose_codes",
        "swizzle_scales",
        "anchor_codes",
        "gemm",
        "norm",
        "norm_backward",
        "activation",
        "activation_backward",
        "combine",
        "combine_backward",
        "random_key",
        "tensor_decode_scale",
    ],
)
def test_a_graph_holds_the_operator_alone(name: str, dynamic: bool):
    """If false, a graph breaks at the operator, or is compiled again for each number of tokens."""
    with FakeTensorMode():
        run = calls()[name][1]
    _, nodes = exported(run, lambda: calls()[name][0], dynamic)
    assert [n.target for n in nodes] == [overload(name.split()[0])]
    made = nodes[0].meta["val"]
    for t in made if isinstance(made, (list, tuple)) else (made,):
        assert t.device.type == "cuda" and t.is_contiguous()
    if dynamic and name not in ("column_sums", "random_key", "tensor_decode_scale"):
        lengths = [
            n for t in (made if isinstance(made, (list, tuple)) else [made]) for n in t.shape
        ]
        assert any(isinstance(n, torch.SymInt) for n in lengths), (
            f"{name} has lost the symbolic length: {made}"
        )


def test_dynamo_packs_encodings_as_it_traces():
    """If false, `native.quantize` in a traced function breaks the graph, or packs at run time."""
    e, c = Quantizer("fp8_row").encoding(ROWWISE), Quantizer("mxfp8").encoding(COLUMNWISE)

    def run(x: Tensor) -> list:
        return [
            made[:2]
            for made in native.quantize(
                x, [e, c], 0, False, None, None, None, (False, True), (0, 1)
            )
        ]

    _, nodes = exported(run, lambda: [empty(64, 256)], True)
    assert [n.target for n in nodes] == [torch.ops.fsdp_quant.quantize.default]


def test_checkpoints_expect_no_check_that_some_steps_make():
    """If false, a selective checkpoint raises where the recomputation alone is in a probed step."""
    assert torch.ops.fsdp_quant.product_error.default in SAC_IGNORED_OPS


def test_functionalization_keeps_writes():
    """If false, an amax is never recorded in a compiled step, or the guard sees nothing."""

    def run(
        amaxes: Tensor, amax: Tensor, guard: Tensor, codes: Tensor, scale: Tensor, step: Tensor
    ) -> Tensor:
        torch.ops.fsdp_quant.record_amax(amaxes, amax)
        torch.ops.fsdp_quant.product_error(codes, codes, scale, scale, 9, 9, 3, step, guard, 1)
        return amaxes + 1

    def make() -> list:
        return [
            empty(4, dtype=FP32),
            empty(1, dtype=FP32),
            empty(3, 2, dtype=FP32),
            empty(64, 256, dtype=U8),
            empty(1, dtype=FP32),
            empty(5, dtype=torch.int64),
        ]

    program, _ = exported(run, make, False)
    program = program.run_decompositions({})
    written = [n.args[0] for n in program.graph.nodes if "auto_functionalized" in str(n.target)]
    assert written == [
        torch.ops.fsdp_quant.record_amax.default,
        torch.ops.fsdp_quant.product_error.default,
    ]
    assert set(program.graph_signature.user_inputs_to_mutate.values()) == {"inputs_0", "inputs_2"}
