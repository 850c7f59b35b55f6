# SPDX-License-Identifier: Apache-2.0
"""The buffer protocol: slices that decode as the whole does, placements, and GEMM layouts index by
index."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dist_tests.golden import oracle
from dist_tests.laws import QUANTIZERS, assert_same_bytes, assert_same_storage, values
from fsdp_quant import encoded_matrix
from fsdp_quant import storage as storage_module
from fsdp_quant.formats import COLUMNWISE, FORMATS, ROWWISE, Direction
from fsdp_quant.ops import dispatch, gemm_layout, layout
from fsdp_quant.ops.capability import ARCHITECTURES, anchors
from fsdp_quant.quantizer import Quantizer
from fsdp_quant.storage import Placement, Storage, to_gemm_operands, to_layout, to_storage

WITH_RHT = {**QUANTIZERS, "nvfp4_rht": Quantizer("nvfp4", rotation=True)}
ARCHS = tuple(ARCHITECTURES)

each_quantizer = pytest.mark.parametrize("name", sorted(WITH_RHT))
each_direction = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)


def rows_mix(storage: Storage) -> bool:
    return storage.fmt.rotated and storage.direction is COLUMNWISE


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Let every device be of this architecture."""
    for module in (storage_module, encoded_matrix):
        monkeypatch.setattr(module, "arch_of", lambda device: arch)


# The buffer protocol #


@each_quantizer
@pytest.mark.parametrize("wanted", (layout.COMPACT, layout.NATIVE, layout.ANCHORED))
def test_rows_of_an_operand_are_the_operand_of_the_rows(name: str, wanted: str, monkeypatch):
    """Otherwise a product that is made a few rows at a time is another one."""
    whole = WITH_RHT[name].storage(values(256, 512, kind="heavy"), ROWWISE)
    pretend(monkeypatch, "sm_90a")
    if wanted == layout.ANCHORED and not anchors(whole.fmt):
        return
    one, rows = to_layout(whole, wanted), whole.narrow(128, 64)
    part = one.operand_rows(128, 64)
    serves_several = (whole.fmt.block[0] or 1) > 1
    # and no product here reads them so
    no_line = wanted == layout.NATIVE and whole.fmt.scale in ("e8m0", "e4m3")
    assert (part is None) == (serves_several or no_line), whole.describe()
    if part is not None:
        want = to_layout(replace(rows, row0=0), wanted)
        for buffer, tensor in want.buffers().items():
            assert_same_bytes(
                getattr(part, buffer), tensor, f"{whole.describe()} {wanted} {buffer}"
            )


@each_direction
@pytest.mark.parametrize("name", sorted(n for n, q in QUANTIZERS.items() if anchors(q.fmt)))
def test_anchored_operands_decode_to_the_values(name: str, direction: Direction):
    """Otherwise a line or a run takes the scale of another, where lines are no multiple of 4, or a
    file of them is refused."""
    g = torch.Generator().manual_seed(0)
    x = (1 + torch.randint(0, 8, (50, 702), generator=g) / 8) * 2.0 ** torch.randint(
        -2, 3, (50, 702), generator=g
    )
    compact = QUANTIZERS[name].storage(x, direction)
    for wanted in layout.ANCHORS:
        anchored = compact.to_gemm_operand(wanted)
        assert_same_bytes(
            anchored.decode().contiguous(), compact.decode().contiguous(), anchored.describe()
        )
        anchored.check()
        for scale in (anchored.scale.view(-1)[:-1], torch.cat([anchored.scale.view(-1)] * 2)):
            with pytest.raises(ValueError, match="scale of .* is torch.float32"):
                replace(anchored, scale=scale).check()


@each_quantizer
@each_direction
def test_narrow_decodes_to_the_slice(name: str, direction: Direction):
    """Otherwise a shard of a quantized weight has other values than the rows it stands for,
    whatever block it cuts."""
    x = values(300, 48, kind="heavy")
    whole = WITH_RHT[name].storage(x, direction)
    if rows_mix(whole):
        pytest.skip("a rotated columnwise storage is not cut")
    decoded, scales = whole.decode(), whole.scale
    starts = [0, 1, 15, 16, 17, 31, 32, 127, 128, 129, 255, 256, 299, 300]
    for start in starts:
        for length in (0, 1, 16, 33, 128, 300 - start):
            if start + length > 300:
                continue
            cut = whole.narrow(start, length)
            what = f"{name} {direction.value} rows [{start}, {start + length})"
            assert tuple(cut.shape) == (length, 48) and cut.data.shape[0] == length, what
            assert_same_bytes(cut.decode(), decoded[start : start + length], what)
            assert_same_bytes(cut.dequantize(), whole.dequantize()[start : start + length], what)
            assert cut.row0 == start or length == 300
            for buffer, tensor in cut.buffers().items():
                parent = whole.buffers()[buffer]
                assert tensor.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr(), (
                    "a copy was made"
                )
            b0 = whole.fmt.dims(direction)[0]
            if scales is not None and b0 is not None and length:
                want = scales[start // b0 : (start + length - 1) // b0 + 1]
                assert_same_bytes(cut.scale, want, f"{what} scales")


@each_quantizer
@each_direction
def test_narrow_composes(name: str, direction: Direction):
    """Otherwise a slice of a shard reads the scales of another block."""
    whole = WITH_RHT[name].storage(values(300, 32), direction)
    if rows_mix(whole):
        pytest.skip("a rotated columnwise storage is not cut")
    for a, b in [(5, 3), (15, 17), (120, 16), (130, 1), (16, 16)]:
        outer = whole.narrow(a, 150)
        inner, want = outer.narrow(b, 40), whole.narrow(a + b, 40)
        assert_same_storage(inner, want, f"{name} {direction.value} [{a}+{b}]")
        assert inner.row0 == want.row0 == a + b
    assert whole.narrow(0, 300) is whole


def test_narrow_of_rotated_columns_is_refused():
    """Otherwise rows that the rotation mixed are taken for rows of the tensor."""
    storage = WITH_RHT["nvfp4_rht"].storage(values(48, 32), COLUMNWISE)
    assert storage.narrow(0, 48) is storage
    with pytest.raises(ValueError, match=r"rows \[16, 32\).*rotation mixes rows"):
        storage.narrow(16, 16)
    rowwise = WITH_RHT["nvfp4_rht"].storage(values(48, 32), ROWWISE)
    assert_same_bytes(rowwise.narrow(16, 16).dequantize(), rowwise.dequantize()[16:32])


@each_quantizer
@each_direction
def test_placements_say_how_shards_relate_to_the_whole(name: str, direction: Direction):
    """Otherwise a gather concatenates what is replicated, or misses the rows of a block that a cut
    divides."""
    rows = 384
    whole = WITH_RHT[name].storage(values(rows, 32), direction)
    if rows_mix(whole):
        pytest.skip("a rotated columnwise storage is not cut")
    for chunk in (1, 16, 24, 32, 48, 96, 128, 192, 384):
        placements = whole.placements(chunk)
        assert placements.keys() == whole.buffers().keys()
        shards = [whole.narrow(start, chunk) for start in range(0, rows, chunk)]
        for buffer, placement in placements.items():
            parts, want = [s.buffers()[buffer] for s in shards], whole.buffers()[buffer]
            if placement is Placement.SHARD:
                assert_same_bytes(torch.cat(parts), want, f"{name} {buffer} every {chunk}")
            elif placement is Placement.REPLICATE:
                assert all(part is want or torch.equal(part, want) for part in parts), (
                    f"{name} {buffer} every {chunk}"
                )
            else:
                overlaps = sum(len(part) for part in parts)
                assert overlaps > len(want), f"{name} {buffer} every {chunk}: nothing is shared"
        expected = Placement.SHARD
        b0 = whole.fmt.dims(direction)[0]
        if whole.scale is not None:
            expected = (
                Placement.REPLICATE
                if b0 is None
                else Placement.HALO
                if chunk % b0
                else Placement.SHARD
            )
            assert placements["scale"] is expected
        assert placements["data"] is Placement.SHARD
    assert Placement.HALO not in whole.placements().values()


@each_quantizer
def test_buffers_are_the_whole_state(name: str):
    """Otherwise a tensor rebuilt from its buffers, on another rank or from a file, decodes
    differently."""
    for direction in Direction:
        storage = WITH_RHT[name].storage(values(33, 48), direction)
        buffers = storage.buffers()
        assert storage.nbytes == sum(b.numel() * b.element_size() for b in buffers.values())
        empty = storage.map(torch.zeros_like)
        rebuilt = empty.with_buffers({name: b.clone() for name, b in buffers.items()})
        assert_same_storage(rebuilt, storage, name)
        assert_same_bytes(rebuilt.dequantize(), storage.dequantize())
        kept = empty.with_buffers(buffers)
        assert all(kept.buffers()[b] is tensor for b, tensor in buffers.items()), (
            "with_buffers copied"
        )
        assert storage.buffers() == buffers


@each_quantizer
@each_direction
def test_a_matrix_is_rebuilt_over_its_buffers(name: str, direction: Direction, monkeypatch):
    """If false, what a layer saves for its backward has lost its scales, or the amax of its
    tensor."""
    pretend(monkeypatch, "sm_90a")
    storage = WITH_RHT[name].storage(values(48, 64), direction)
    for made in (storage, storage.to_gemm_operand(layout.NATIVE)):
        buffers, of = list(made.buffers().values()), (made.fmt, direction, made.shape, made.dtype)
        again = storage_module.matrix_type(made.layout).over(buffers, *of, made.layout)
        assert type(again) is type(made) and again.geometry == made.geometry
        assert list(again.buffers().items()) == list(made.buffers().items())  # the same tensors


def test_dequantize_rounds_once_to_the_dtype_asked():
    """Otherwise decoding to bf16 passes through another dtype first."""
    for name, q in WITH_RHT.items():
        storage = q.storage(values(17, 32, kind="heavy"), ROWWISE)
        exact = storage.dequantize(torch.float32)
        assert storage.dequantize().dtype is torch.bfloat16
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert_same_bytes(storage.dequantize(dtype), exact.to(dtype), name)


def test_codes_serve_as_the_other_operand():
    """If false, the blocks of one direction are read as those of the other one."""
    for name, q in WITH_RHT.items():
        storage = q.storage(values(33, 48), ROWWISE)
        if not q.fmt.rotated:
            other = storage.as_direction(COLUMNWISE)
            assert (other.fmt == q.fmt) is (other.as_direction(ROWWISE).fmt.shares_storage)
            assert other.as_direction(ROWWISE).fmt == q.fmt
            assert_same_bytes(other.dequantize(), storage.dequantize(), name)
            assert_same_bytes(other.operand(), storage.operand().t(), name)
            assert other.data is storage.data
        else:
            with pytest.raises(ValueError, match="cannot serve as columnwise"):
                storage.as_direction(COLUMNWISE)


def test_freed_storage_says_so():
    """Otherwise a GEMM reads memory that was given back."""
    storage = Quantizer("mxfp8").storage(values(33, 48), ROWWISE)
    assert not storage.is_freed
    storage.data.untyped_storage().resize_(0)
    assert storage.is_freed
    assert not Quantizer("mxfp8").storage(torch.zeros(0, 48), ROWWISE).is_freed


# GEMM layouts #

SHAPES = [(1, 1), (7, 33), (33, 47), (96, 160), (130, 520), (300, 96)]


@each_quantizer
@each_direction
def test_gemm_layout_inverts(name: str, direction: Direction):
    """Otherwise codes cannot be taken back from what a kernel wrote, and padding is not told from
    values."""
    for shape, arch in itertools.product(SHAPES, ARCHS):
        storage = WITH_RHT[name].storage(values(*shape), direction)
        operand = storage.to_gemm_operand(layout.NATIVE, arch=arch)
        back = to_storage(operand, arch=arch)
        assert_same_storage(back, storage, f"{name} {direction.value} {arch} {shape}")
        for buffer, tensor in back.buffers().items():
            assert tensor.is_contiguous(), buffer
        again = storage.to_gemm_operand(layout.NATIVE, arch=arch)
        assert_same_bytes(again.data, operand.data)


@each_quantizer
@each_direction
def test_numbers_of_scales_are_those_of_the_layouts(name: str, direction: Direction):
    """If false, a file of operands is refused, or one whose scales are of other blocks is read
    beyond its memory."""
    for shape in SHAPES:
        storage = WITH_RHT[name].storage(values(*shape), direction)
        if storage.scale is None:
            return
        of = storage.padded_shape if direction is ROWWISE else storage.padded_shape[::-1]
        made = {storage.to_gemm_operand(layout.NATIVE, arch=a).scale.numel() for a in ARCHS}
        assert gemm_layout.scale_counts(storage.fmt, layout.NATIVE, *of) == made, shape
        for wanted in layout.ANCHORS if anchors(storage.fmt) else ():
            (count,) = gemm_layout.scale_counts(storage.fmt, wanted, *of)
            assert count == storage.to_gemm_operand(wanted).scale.numel(), (wanted, shape)


@each_quantizer
def test_gemm_layout_of_zero_rows_inverts(name: str):
    """Otherwise an expert without tokens breaks the GEMM's operands."""
    for direction, arch in itertools.product(Direction, ARCHS):
        storage = WITH_RHT[name].storage(torch.zeros(0, 48, dtype=torch.bfloat16), direction)
        back = to_storage(storage.to_gemm_operand(layout.NATIVE, arch=arch), arch=arch)
        assert_same_storage(back, storage, f"{name} {direction.value} {arch}")


def codes_of(storage: Storage) -> np.ndarray:
    """[outer, contraction], one code an entry."""
    data, bits = storage.data, storage.fmt.element.bits
    if bits < 8:
        data = torch.from_numpy(oracle.unpack(data.numpy(), bits, storage.padded_shape[1]))
    data = data.view(torch.int16) if data.dtype is torch.bfloat16 else data
    return (data if storage.direction is ROWWISE else data.t()).numpy()


@each_quantizer
@each_direction
def test_gemm_layout_data_is_k_major(name: str, direction: Direction):
    """Row i of the operand is output i: its codes are next to each other along the contraction,
    packed."""
    for shape, arch in itertools.product([(7, 33), (33, 47), (96, 160)], ARCHS):
        storage = WITH_RHT[name].storage(values(*shape), direction)
        data = storage.to_gemm_operand(layout.NATIVE, arch=arch).data
        want = codes_of(storage)
        assert data.is_contiguous()
        if storage.fmt.element.bits < 8:
            want = oracle.pack(want, storage.fmt.element.bits)
        got = data.view(torch.int16) if data.dtype is torch.bfloat16 else data
        assert_same_bytes(got, torch.from_numpy(want.copy()), f"{name} {direction.value} {shape}")


@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp8_e5m2", "mxfp8_32x32", "nvfp4", "nvfp4_16x16", "nvfp4_rht"]
)
@each_direction
def test_gemm_layout_scales_are_in_128x4_tiles(name: str, direction: Direction):
    """cuBLASLt reads scale (i, j) at (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4 of tile (i / 128, j
    / 4); all other bytes are padding, which must be zero. A square block's scale is repeated for
    each of its rows."""
    for shape in SHAPES:
        storage = WITH_RHT[name].storage(values(*shape, kind="outliers"), direction)
        flat = storage.to_gemm_operand(layout.NATIVE, arch="sm_100f").scale
        scale = storage.scale if direction is ROWWISE else storage.scale.t()
        outer = codes_of(storage).shape[0]
        blocks = scale.shape[1]
        tiles = -(-blocks // 4)
        want = torch.zeros(-(-outer // 128) * tiles * 512, dtype=torch.uint8)
        for i in range(outer):
            for j in range(blocks):
                offset = (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
                want[offset] = scale[i // storage.fmt.block[0], j]
        assert_same_bytes(flat, want, f"{name} {direction.value} {shape}")


@each_direction
def test_gemm_layout_fp32_scales(direction: Direction):
    """1x128: M-major [blocks, rup(outer, 4)]; 128x128: [outer blocks, rup(blocks, 4)];
    whole-contraction: [outer]."""
    for shape, arch in itertools.product(SHAPES, ARCHS):
        for name in (
            "fp8_tensor",
            "fp8_row",
            "fp8_1x128",
            "fp8_1x128_fp32",
            "fp8_128x128",
            "fp8_128x128_fp32",
        ):
            storage = WITH_RHT[name].storage(values(*shape, kind="outliers"), direction)
            got = storage.to_gemm_operand(layout.NATIVE, arch=arch).scale
            scale = (storage.scale if direction is ROWWISE else storage.scale.t()).numpy()
            if name.startswith("fp8_1x128"):
                want = np.zeros((scale.shape[1], -(-scale.shape[0] // 4) * 4), np.float32)
                want[:, : scale.shape[0]] = scale.T
            elif name.startswith("fp8_128x128"):
                want = np.zeros((scale.shape[0], -(-scale.shape[1] // 4) * 4), np.float32)
                want[:, : scale.shape[1]] = scale
            else:
                want = scale[:, 0].copy()
            assert_same_bytes(got, torch.from_numpy(want), f"{name} {direction.value} {shape}")
            assert got.is_contiguous()


@each_direction
def test_gemm_layout_block_scales_on_hopper(direction: Direction):
    """sm_90a has no tile layout for 8-bit scales: they are [outer, blocks], a square block's not
    repeated."""
    for name in ("mxfp8", "mxfp8_32x32", "nvfp4", "nvfp4_16x16"):
        storage = WITH_RHT[name].storage(values(96, 160), direction)
        want = storage.scale if direction is ROWWISE else storage.scale.t()
        assert_same_bytes(storage.to_gemm_operand(layout.NATIVE, arch="sm_90a").scale, want, name)


def test_operands_keep_the_tensor_amax():
    """The second-level scale multiplies the product as 1 / S, not as an amax."""
    for name in ("nvfp4", "nvfp4_16x16", "nvfp4_rht", "nvfp4_exact"):
        storage = WITH_RHT[name].storage(values(33, 48), ROWWISE)
        operand = storage.to_gemm_operand(layout.NATIVE, arch="sm_100f")
        want = torch.tensor(
            [oracle.tensor_scale(storage.tensor_amax.item(), oracle.SPECS[name])],
            dtype=torch.float32,
        )
        got = dispatch.tensor_decode_scale(operand.tensor_amax, operand.fmt)
        assert_same_bytes(got, want, name)


SPREAD_SHAPES = [(1, 1), (33, 47), (128, 128), (130, 300), (300, 512)]


@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_128x128"])
@each_direction
def test_spread_scales_are_those_of_mxfp8_and_the_same_numbers(
    name: str, direction: Direction, monkeypatch
):
    """If false, a product of Blackwell multiplies 32 elements by another block's scale, or by
    another number. cuBLASLt reads scale (i, j) of 32 elements as in the test above; four of them
    are a block of 128, and 128 rows those of a square one."""
    pretend(monkeypatch, "sm_100f")
    for shape, kind in itertools.product(
        SPREAD_SHAPES, ("outliers", "tiny", "inf and zeros", "extreme")
    ):
        what, x = f"{name} {direction.value} {shape} {kind}", values(*shape, kind=kind)
        if kind == "inf and zeros":
            x[: shape[0] // 2], x[-1, -1] = 0, torch.inf
        elif kind == "extreme":
            # scales of 2^-127, which are subnormal, to 2^119
            x = x * torch.logspace(-126, 120, shape[1], base=2)
            x = x.bfloat16()
        storage = WITH_RHT[name].storage(x, direction)
        made = storage.to_gemm_operand(layout.SPREAD)
        outer, contraction = codes_of(storage).shape
        scale = (storage.scale if direction is ROWWISE else storage.scale.t()).contiguous()
        assert_same_bytes(made.data, torch.from_numpy(codes_of(storage).copy()), what)
        tiles = -(-contraction // 128)
        want = torch.zeros(-(-outer // 128) * tiles * 512, dtype=torch.uint8)
        exponents = (np.frexp(scale.numpy())[1] + 126).astype(np.int64)  # scale = 2^(e - 127)
        exponents[~np.isfinite(scale.numpy())] = 255
        for i, j in itertools.product(range(outer), range(4 * tiles)):
            offset = (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            want[offset] = int(exponents[i // storage.fmt.block[0], j // 4])
        assert_same_bytes(made.scale, want, what)
        made.check()
        assert made.operand_format.block == (1, 32) and made.operand_format.scale == "e8m0"
        back = to_storage(made)
        assert back.layout == layout.COMPACT and made.operand_rows(0, 1) is None
        assert_same_bytes(back.scale, storage.scale, what)
        assert_same_bytes(made.decode(), storage.decode(), what)
        # what a product reads, decoded as MXFP8
        of_32 = layout.unswizzle_128x4(made.scale, outer, -(-contraction // 32))
        as_mx = Storage(
            made.operand_format,
            ROWWISE,
            (outer, contraction),
            made.data,
            of_32,
            None,
            storage.dtype,
        ).decode()
        assert_same_bytes(as_mx if direction is ROWWISE else as_mx.t(), storage.decode(), what)
        (grouped,) = to_gemm_operands([(storage, layout.SPREAD)], calls=[])
        assert_same_bytes(grouped.data, made.data, what)
        with pytest.raises(ValueError, match="scale of"):
            replace(made, scale=made.scale[:-1]).check()


def test_gemm_layout_refuses_what_it_cannot_lay_out():
    """Otherwise a shard's half blocks, or another arch's layout, reach a tensor core."""
    storage = Quantizer("mxfp8").storage(values(96, 64), COLUMNWISE)
    with pytest.raises(NotImplementedError, match="sm_75.*sm_80, sm_89, sm_90a, sm_100f, sm_120f"):
        storage.to_gemm_operand(layout.NATIVE, arch="sm_75")
    with pytest.raises(ValueError, match="shard from row 16"):
        storage.narrow(16, 32).to_gemm_operand(layout.NATIVE, arch="sm_90a")


@each_quantizer
@each_direction
def test_scales_are_laid_out_again(name: str, direction: Direction, monkeypatch):
    """If false, the scales of a gather are those of the last one, or memory that was taken again is
    read behind them."""
    for arch in ARCHS:
        pretend(monkeypatch, arch)
        storage, calls = WITH_RHT[name].storage(values(256, 640), direction), []
        (made,) = to_gemm_operands([(storage, layout.NATIVE)], calls=calls)
        fmt, in_tiles = storage.fmt, storage.fmt.scale != "fp32" and arch == "sm_100f"
        if in_tiles or not fmt.is_quantized or fmt.scale_leaves_contraction:
            assert not calls, "there is no copy"
        if fmt.name == "fp8_128x128":
            assert bool(calls) == (direction is COLUMNWISE or 640 // 128 % 4 != 0), (
                "a scale a tile lies as products read it, or turned"
            )
        if not calls:
            continue
        storage.scale.copy_(storage.scale.roll(1, 0).roll(1, 1))
        made.scale.fill_(3)  # as memory that was taken again
        for call in calls:
            call()
        assert any(t is made.scale for call in calls for t in call.out)
        want = storage.to_gemm_operand(layout.NATIVE).scale
        assert_same_bytes(made.scale, want, f"{name} {direction} on {arch}")


@pytest.mark.parametrize("outer", [1, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 8, 9])
def test_swizzle_inverts_and_pads_with_zero(outer: int, blocks: int):
    """Otherwise scales of one row are read for another."""
    scale = torch.randint(
        1, 255, (outer, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    flat = layout.swizzle_128x4(scale)
    assert flat.numel() == -(-outer // 128) * 128 * -(-blocks // 4) * 4
    assert int((flat != 0).sum()) == scale.numel()
    assert_same_bytes(layout.unswizzle_128x4(flat, outer, blocks), scale)


@pytest.mark.parametrize("bits", sorted(set(oracle.BITS.values())))
def test_repack_is_its_own_inverse(bits: int):
    """Otherwise the columnwise operand of a packed weight is scrambled, and extents that no
    container divides lose a row."""
    for rows, cols in [(1, 1), (1, 7), (7, 1), (15, 33), (16, 32), (33, 15)]:
        codes = torch.randint(
            0, 2**bits, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        packed = torch.from_numpy(oracle.pack(codes.numpy(), bits))
        turned = layout.repack(packed, bits, rows, cols)
        assert_same_bytes(
            turned, torch.from_numpy(oracle.pack(codes.t().numpy(), bits)), f"{rows} x {cols}"
        )
        assert_same_bytes(layout.repack(turned, bits, cols, rows), packed, f"{rows} x {cols}")


# Operands #


@each_quantizer
@each_direction
def test_factored_operand_times_its_scale_is_the_operand(name: str, direction: Direction):
    """Otherwise the bf16 domain and the definition multiply different numbers. The parts are exact
    in bf16; one fp32 multiplication by the scale left outside gives the operand, to the rounding of
    that multiplication."""
    storage = WITH_RHT[name].storage(values(33, 48, kind="heavy"), direction)
    if not storage.decodes_exactly_to_bf16:
        pytest.skip("no bf16 domain")
    inner, outside = storage.factored_operand()
    assert inner.dtype is torch.bfloat16
    got = inner.float() if outside is None else inner.float() * outside.reshape(-1, 1)
    assert_same_bytes(got, storage.operand().float(), name)


def operand_shape(shape: tuple[int, int], direction: Direction) -> tuple[int, int]:
    return shape if direction is ROWWISE else shape[::-1]


def test_operand_presents_outer_by_contraction():
    """Every product is NT in its storages' own axes, whatever the direction."""
    x = values(33, 48)
    for name in FORMATS:
        for direction in Direction:
            storage = Quantizer(name).storage(x, direction)
            assert tuple(storage.operand().shape) == operand_shape((33, 48), direction)
            want = storage.decode() if direction is ROWWISE else storage.decode().t()
            assert_same_bytes(storage.operand(), want, name)
    turned = replace(FORMATS["nvfp4"], rotated=True)
    # 33 rows, padded to 48
    assert tuple(Quantizer(turned).storage(x, COLUMNWISE).operand().shape) == (48, 48)


def test_storage_text_names_format_direction_and_shape():
    """Otherwise an error about a weight does not say which of its two storages is meant."""
    text = repr(Quantizer("mxfp8").storage(values(33, 48), COLUMNWISE))
    assert all(part in text for part in ("columnwise", "mxfp8", "[33, 48]")), text
    text = repr(Quantizer("mxfp8").quantize(values(33, 48)))
    assert all(part in text for part in ("rowwise=mxfp8", "columnwise=mxfp8", "[33, 48]")), text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_of_one_row_or_element_have_any_strides(dtype: torch.dtype):
    """torch calls them contiguous. If false, a gradient of a sum is not sent, a value is not saved,
    or codes of one expert are those of another."""
    x = torch.arange(12).to(dtype).view(2, 6)
    one, row = torch.ones((), dtype=dtype), x[:1, :3]
    for t in (one, one.expand(1), one.expand(1, 1), one.expand(0, 8), x[::2, :1], row, x[:1].t()):
        assert t.is_contiguous()
        want = t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
        assert torch.equal(layout.flat_bytes(t), want), f"{t.stride()}"
    joined = layout.adjoining([row, x[:1, 3:]])
    assert joined is not None and torch.equal(joined, torch.cat([row, x[:1, 3:]]))
