# SPDX-License-Identifier: Apache-2.0
"""The tensor subclass: it moves bytes, never decodes on its own, and survives copies, files and
other processes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import fsdp_quant as fq
from dist_tests.laws import FORMAT_NAMES, QUANTIZERS, assert_same_bytes, assert_same_storage, values
from fsdp_quant.encoded_matrix import BUFFERS
from fsdp_quant.formats import COLUMNWISE, ROWWISE, Direction
from fsdp_quant.gemm import StaleWeightError
from fsdp_quant.ops import dispatch, reference
from fsdp_quant.ops.layout import COMPACT, NATIVE
from fsdp_quant.quantizer import HybridQuantizer, Quantizer, hybrid_of
from fsdp_quant.storage import Storage, to_layout
from fsdp_quant.tensor.quantized_tensor import QuantizedTensor
from fsdp_quant.tensor.subclasses import AtenTable, aten

TENSORS = {
    "both": lambda: HybridQuantizer("mxfp8", "nvfp4").quantize(values(33, 48)),
    "one storage": lambda: hybrid_of("fp8_128x128").quantize(values(33, 48)),
    "rowwise only": lambda: HybridQuantizer("nvfp4", None).quantize(values(33, 48)),
    "columnwise only": lambda: HybridQuantizer(None, "fp8_row").quantize(values(33, 48)),
    "rotated columns only": lambda: HybridQuantizer(
        None, Quantizer("nvfp4", rotation=True)
    ).quantize(values(33, 48)),
    "identity": lambda: hybrid_of("identity").quantize(values(33, 48)),
    "made by hand": lambda: QuantizedTensor(by_hand(ROWWISE), by_hand(COLUMNWISE)),
}

each_tensor = pytest.mark.parametrize("name", sorted(TENSORS))


def by_hand(direction: Direction) -> Storage:
    """A storage that no quantizer made: code k is e4m3 bits, one scale of 2 a row."""
    fmt = Quantizer("fp8_row").fmt
    data = (torch.arange(33 * 48) % 0x7F).to(torch.uint8).view(33, 48)
    scale = torch.full(fmt.scale_shape((33, 48), direction), 2.0)
    return Storage(fmt, direction, (33, 48), data, scale, None, torch.bfloat16)


def assert_same_tensor(got: QuantizedTensor, want: QuantizedTensor, what: str = "tensor") -> None:
    assert isinstance(got, QuantizedTensor), what
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), what
    assert_same_storage(got.rowwise, want.rowwise, f"{what} rowwise")
    assert_same_storage(got.columnwise, want.columnwise, f"{what} columnwise")
    assert_same_bytes(got.dequantize(), want.dequantize(), what)


def pointers(tensor: QuantizedTensor) -> list[int]:
    sides = (tensor.rowwise, tensor.columnwise)
    return [
        b.untyped_storage().data_ptr() for s in sides if s is not None for b in s.buffers().values()
    ]


@pytest.fixture
def no_decoding(monkeypatch):
    """Decoding raises something that no test expects."""

    def decode(*args, **kwargs):
        raise AssertionError("decoded silently")

    for module, names in (
        (reference, ("decode", "decode_codes", "decode_scale")),
        (dispatch, ("decode",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, decode)


# Copies and files #

COPIES: dict[str, Callable] = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "to the same device": lambda t: t.to("cpu", copy=True),
}


@each_tensor
@pytest.mark.parametrize("how", sorted(COPIES))
def test_copies_are_equal(name: str, how: str):
    """Otherwise a checkpoint, an EMA or a worker process holds another weight."""
    want = TENSORS[name]()
    got = COPIES[how](want)
    assert_same_tensor(got, want, f"{name} by {how}")
    if how != "copy":
        assert not set(pointers(got)) & set(pointers(want)), "the copy shares memory"
    assert_same_tensor(want, TENSORS[name](), f"{name} after {how}")


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_save_and_load_with_weights_only(name: str):
    """Otherwise a checkpoint needs the unsafe loader, or another option of the format is read
    back."""
    for quantizer in (hybrid_of(QUANTIZERS[name]), HybridQuantizer(QUANTIZERS[name], "nvfp4")):
        want = {
            "weight": quantizer.quantize(values(33, 48)),
            "other": quantizer.quantize(values(2, 5, 16)),
        }
        file = io.BytesIO()
        torch.save(want, file)
        file.seek(0)
        got = torch.load(file, weights_only=True)
        for key in want:
            assert_same_tensor(got[key], want[key], f"{name} {key}")


def test_storages_travel_alone():
    """Otherwise what a module saves for its backward cannot be offloaded or sent."""
    for name, quantizer in QUANTIZERS.items():
        for direction in Direction:
            want = quantizer.storage(values(40, 48), direction).narrow(5, 20)
            file = io.BytesIO()
            torch.save(want, file)
            file.seek(0)
            for got in (
                pickle.loads(pickle.dumps(want)),
                copy.deepcopy(want),
                torch.load(file, weights_only=True),
            ):
                assert_same_storage(got, want, f"{name} {direction.value}")
                assert got.row0 == 5
                assert_same_bytes(got.dequantize(), want.dequantize(), name)


def test_one_storage_stays_one():
    """Otherwise a copy of a square-block weight takes twice the memory, and an update of one side
    misses the other."""
    for name in ("fp8_tensor", "fp8_128x128", "mxfp8_32x32", "nvfp4_16x16"):
        for how, make in {
            **COPIES,
            "slice": lambda t: t[3:20],
            "view": lambda t: t.view(3, 11, 48),
        }.items():
            got = make(hybrid_of(name).quantize(values(33, 48)))
            assert got.columnwise.data.data_ptr() == got.rowwise.data.data_ptr(), f"{name} by {how}"


def test_parameters_stay_parameters():
    """Otherwise a copied or pickled module has a weight that is no parameter."""
    for requires_grad in (False, True):
        parameter = nn.Parameter(TENSORS["both"](), requires_grad=requires_grad)
        assert isinstance(parameter, QuantizedTensor)
        for how, make in {"deepcopy": copy.deepcopy, "pickle": COPIES["pickle"]}.items():
            got = make(parameter)
            assert got.requires_grad is requires_grad, how
            assert_same_storage(got.rowwise, parameter.rowwise, how)
            assert isinstance(got, nn.Parameter), how


def test_state_lives_in_the_storages():
    """Otherwise an alias of a gathered weight keeps old codes after a refill, or a refill is undone
    by a copy."""
    tensor = TENSORS["both"]()
    aliases = [
        tensor.detach(),
        tensor.view(3, 11, 48),
        tensor[:],
        nn.Parameter(tensor),
        copy.copy(tensor),
    ]
    before = tensor.clone()
    HybridQuantizer("mxfp8", "nvfp4").update(tensor, values(33, 48, seed=5))
    want = HybridQuantizer("mxfp8", "nvfp4").quantize(values(33, 48, seed=5))
    for alias in aliases:
        assert_same_storage(alias.rowwise, want.rowwise)
        assert_same_storage(alias.columnwise, want.columnwise)
    assert not torch.equal(before.dequantize(), tensor.dequantize())


def test_flatten_and_unflatten_keep_everything():
    """Otherwise compiled graphs and FSDP2 rebuild a tensor with other codes."""
    for name, make in TENSORS.items():
        want = make()
        names, context = want.__tensor_flatten__()
        inner = {n: getattr(want, n) for n in names}
        got = QuantizedTensor.__tensor_unflatten__(inner, context, want.shape, want.stride())
        assert_same_tensor(got, want, name)
        assert set(pointers(got)) == set(pointers(want))
        shown = [t.data_ptr() for t in inner.values()]
        assert sorted(shown) == sorted(set(pointers(want))), f"{name}: every memory, once"


# The table of operators #

MOVES: dict[
    str, tuple[Callable, slice | None]
] = {  # operator -> rows of the result (None: all, perhaps reshaped)
    "detach": (Tensor.detach, None),
    "view 3-D": (lambda x: x.view(3, 11, 48), None),
    "view -1": (lambda x: x.view(-1, 48), None),
    "view -1 in the middle": (lambda x: x.view(3, -1, 48), None),
    "reshape": (lambda x: x.reshape(11, 3, 48), None),
    "unflatten": (lambda x: x.unflatten(0, (3, 11)), None),
    "as_strided": (lambda x: x.as_strided((33, 48), (48, 1)), None),
    "contiguous": (Tensor.contiguous, None),
    "clone": (Tensor.clone, None),
    "same dtype": (Tensor.bfloat16, None),
    "full slice": (lambda x: x[:], None),
    "slice of all columns": (lambda x: x[:, :], None),
    "slice": (lambda x: x[5:20], slice(5, 20)),
    "slice of one": (lambda x: x[16:17], slice(16, 17)),
    "slice to the end": (lambda x: x[-5:], slice(28, 33)),
    "slice beyond the end": (lambda x: x[30:90], slice(30, 33)),
    "empty slice": (lambda x: x[9:9], slice(9, 9)),
    "empty slice beyond the end": (lambda x: x[40:50], slice(33, 33)),
    "backward slice": (lambda x: x[20:4], slice(20, 20)),
    "slice of a slice": (lambda x: x[7:30][10:13], slice(17, 20)),
    "narrow": (lambda x: x.narrow(0, 3, 9), slice(3, 12)),
    "first of split": (lambda x: x.split(10)[0], slice(0, 10)),
    "last of split": (lambda x: x.split(10)[3], slice(30, 33)),
    "split by sizes": (lambda x: x.split([1, 0, 32])[2], slice(1, 33)),
    "chunk": (lambda x: x.chunk(4)[2], slice(18, 27)),
    "tensor_split": (lambda x: x.tensor_split(3)[1], slice(11, 22)),
}


@pytest.mark.parametrize("operator", sorted(MOVES))
@each_tensor
def test_operators_that_move_bytes(name: str, operator: str):
    """Otherwise FSDP2 and checkpoints see other rows than they cut; one-direction tensors have the
    same shapes."""
    run, rows = MOVES[operator]
    tensor = TENSORS[name]()
    want = tensor.dequantize()
    if rows is not None and name == "rotated columns only":
        with pytest.raises(ValueError, match="rotation mixes rows"):
            run(tensor)
        return
    got = run(tensor)
    expected = run(want)
    assert isinstance(got, QuantizedTensor)
    assert got.shape == expected.shape
    assert got.stride() == expected.contiguous().stride()
    assert (got.rowwise is None, got.columnwise is None) == (
        tensor.rowwise is None,
        tensor.columnwise is None,
    )
    assert_same_bytes(got.dequantize(), expected, f"{name} {operator}")
    for storage in (got.rowwise, got.columnwise):
        if storage is not None:
            in_rows = want if rows is None else want[rows]
            assert tuple(storage.shape) == tuple(in_rows.shape)
            whole = tensor.rowwise if storage.direction is ROWWISE else tensor.columnwise
            decoded = whole.dequantize() if rows is None else whole.dequantize()[rows]
            assert_same_bytes(
                storage.dequantize(), decoded, f"{name} {operator} {storage.direction.value}"
            )


@each_tensor
def test_operators_move_bytes_in_inference_mode(name: str):
    """If false, an evaluation under inference_mode, which has no views of weights and leaves
    composite operators whole, ends in an error of torch."""
    tensor = TENSORS[name]()
    for operator, (run, rows) in MOVES.items():
        if rows is None or name != "rotated columns only":
            with torch.inference_mode():
                got = run(tensor)
            assert_same_bytes(got.dequantize(), run(tensor).dequantize(), f"{name} {operator}")


@pytest.mark.parametrize("operator", sorted(set(MOVES)))
def test_operators_that_move_bytes_do_not_decode(operator: str, no_decoding):
    """Otherwise a view costs a decode of the whole weight."""
    for name, make in TENSORS.items():
        if MOVES[operator][1] is None or name != "rotated columns only":
            MOVES[operator][0](make())


PLAIN: dict[str, Callable] = {
    "new_zeros": lambda x: x.new_zeros(3, 4),
    "zeros_like": torch.zeros_like,
    "new_empty": lambda x: x.new_empty(5),
    "empty_like": torch.empty_like,
    "new_zeros of a dtype": lambda x: x.new_zeros((2, 2), dtype=torch.float32),
}


@pytest.mark.parametrize("operator", sorted(PLAIN))
def test_new_tensors_are_plain(operator: str, no_decoding):
    """Otherwise gradients and optimizer states are quantized."""
    for make in TENSORS.values():
        got, like = PLAIN[operator](make()), PLAIN[operator](values(33, 48))
        assert type(got) is Tensor
        assert (got.shape, got.dtype, got.device) == (like.shape, like.dtype, like.device)
        if "zeros" in operator:
            assert_same_bytes(got, like)


REFUSED: dict[str, Callable] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "mul": lambda x: x * x,
    "matmul": lambda x: x @ torch.ones(48, 2),
    "linear": lambda x: F.linear(torch.ones(2, 48), x),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "float": Tensor.float,
    "half": Tensor.half,
    "to fp32": lambda x: x.to(torch.float32),
    "type": lambda x: x.type(torch.float32),
    "t": Tensor.t,
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "relu": torch.relu,
    "abs": Tensor.abs,
    "sum": Tensor.sum,
    "norm": Tensor.norm,
    "isnan": Tensor.isnan,
    "eq": lambda x: x == x,
    "equal": lambda x: torch.equal(x, x),
    "select": lambda x: x[3],
    "index": lambda x: x[torch.tensor([1, 2])],
    "unbind": Tensor.unbind,
    "iterate": list,
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "mul_": lambda x: x.mul_(2),
    "zero_": Tensor.zero_,
    "fill_": lambda x: x.fill_(1),
    "copy_ into": lambda x: x.copy_(torch.zeros(33, 48)),
    "copy_ from": lambda x: torch.zeros(33, 48).copy_(x),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": Tensor.squeeze,
    "expand": lambda x: x.expand(2, 33, 48),
    "flatten": Tensor.flatten,
    "view of other columns": lambda x: x.view(48, 33),
    "view flat": lambda x: x.view(-1),
    "view as bytes": lambda x: x.view(torch.uint8),
    "narrow columns": lambda x: x.narrow(1, 0, 5),
    "slice columns": lambda x: x[:, 1:3],
    "split columns": lambda x: x.split(8, 1),
    "step": lambda x: x[::2],
    "as_strided transposed": lambda x: x.as_strided((48, 33), (1, 48)),
    "as_strided part": lambda x: x.as_strided((3, 48), (48, 1)),
    "as_strided offset": lambda x: x.as_strided((33, 48), (48, 1), 48),
    "ones_like": torch.ones_like,
    "rand_like": torch.rand_like,
    "cut of 3-D": lambda x: x.view(3, 11, 48)[1:2],
}


@pytest.mark.parametrize("operator", sorted(REFUSED))
def test_other_operators_raise_and_name_dequantize(operator: str, no_decoding):
    """Otherwise a weight is decoded behind the user's back, slowly, and the quantized path looks as
    if it ran; or an optimizer that was given frozen codes is told to convert fewer layers."""
    for name, make in TENSORS.items():
        with pytest.raises(NotImplementedError, match=r"dequantize\(\)") as error:
            REFUSED[operator](make())
        if "is not defined" in str(error.value):
            assert "fq.integrations.peft.freeze" in str(error.value)
        assert not operator.endswith("_") or "fq.unfreeze(model)" in str(error.value)


@pytest.mark.parametrize(
    "operator", [Tensor.tolist, Tensor.numpy, bool], ids=["tolist", "numpy", "bool"]
)
def test_values_do_not_leak_to_python(operator: Callable, no_decoding):
    """Otherwise printing or exporting decodes; torch itself refuses these."""
    for make in TENSORS.values():
        with pytest.raises((NotImplementedError, RuntimeError)):
            operator(make())


def test_printing_does_not_decode(no_decoding):
    """Otherwise a debugger or a log line decodes a weight, or reads freed memory."""
    for make in TENSORS.values():
        tensor = make()
        assert "QuantizedTensor" in repr(tensor) and "[33, 48]" in str(tensor)
        assert tensor.numel() == 33 * 48 and len(tensor) == 33 and tensor.is_contiguous()


def test_moving_to_another_device_moves_every_buffer():
    """Otherwise `module.to(device)` fails, or leaves scales behind."""
    for name, make in TENSORS.items():
        moved = make().to("meta")
        assert moved.device.type == "meta", name
        for storage in (moved.rowwise, moved.columnwise):
            if storage is not None:
                assert {b.device.type for b in storage.buffers().values()} == {"meta"}, name


def test_zero_rows_have_views_and_cuts():
    """Otherwise the empty shard of a short weight breaks FSDP2 on one rank only."""
    for name in FORMAT_NAMES:
        tensor = hybrid_of(name).quantize(torch.zeros(0, 48, dtype=torch.bfloat16))
        for got in (
            tensor.detach(),
            tensor.view(0, 48),
            tensor[0:3],
            tensor.clone(),
            tensor[:],
            *tensor.split([0, 0]),
        ):
            assert isinstance(got, QuantizedTensor) and tuple(got.shape) == (0, 48), name
            assert tuple(got.dequantize().shape) == (0, 48), name


# One direction, by hand, freed #


def test_missing_direction_raises_and_names_it():
    """Otherwise a backward multiplies the forward's storage, or None."""
    for formats, held, missing in (
        (("mxfp8", None), ROWWISE, COLUMNWISE),
        ((None, "mxfp8"), COLUMNWISE, ROWWISE),
    ):
        tensor = HybridQuantizer(*formats).quantize(values(33, 48))
        assert tensor.storage_for(held) is getattr(tensor, held.value)
        with pytest.raises(ValueError, match=f"no {missing.value} storage"):
            tensor.storage_for(missing)


def test_a_tensor_decodes_without_its_quantizer():
    """Otherwise a tensor that was saved, sent or handed on decodes only where its recipe is."""
    for name, quantizer in QUANTIZERS.items():
        tensor = quantizer.quantize(values(33, 48))
        found, seen = [tensor._pair], set()
        while found:  # all that it holds
            held = found.pop()
            assert not isinstance(held, Quantizer | HybridQuantizer), f"{name} holds {held}"
            if id(held) not in seen and not isinstance(held, type | Tensor):
                seen.add(id(held))
                found += gc.get_referents(held)
        for s in (tensor.rowwise, tensor.columnwise):
            by_hand = Storage(
                s.fmt, s.direction, s.shape, *(s.buffers().get(b) for b in BUFFERS), dtype=s.dtype
            )
            assert_same_bytes(by_hand.dequantize(), s.dequantize(), name)


def test_dequantize_prefers_the_rows():
    """Otherwise evaluation reads the backward's format."""
    tensor = TENSORS["both"]()
    assert_same_bytes(tensor.dequantize(), tensor.rowwise.dequantize())
    assert_same_bytes(
        TENSORS["columnwise only"]().dequantize(),
        TENSORS["columnwise only"]().columnwise.dequantize(),
    )
    assert tensor.dequantize(torch.float32).dtype is torch.float32
    assert_same_bytes(tensor.view(3, 11, 48).dequantize(), tensor.dequantize().view(3, 11, 48))


def test_freed_storages_are_not_decoded():
    """Otherwise a weight that FSDP2 resharded decodes to whatever lies in its memory now."""
    tensor = TENSORS["both"]()
    columnwise = tensor.columnwise.dequantize()
    tensor.rowwise.data.untyped_storage().resize_(0)
    assert_same_bytes(tensor.dequantize(), columnwise)
    tensor.columnwise.data.untyped_storage().resize_(0)
    with pytest.raises(StaleWeightError, match="rowwise codes were freed"):
        tensor.dequantize()


class _NoFreedReads(TorchDispatchMode):
    """Refuses operators that would read memory that was freed; views and sizes do not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = not func._schema.is_mutable and any(
            a.alias_info is not None for a in func._schema.arguments
        )
        if not is_view and func is not aten.is_pinned.default:
            for t in tree_flatten((args, kwargs))[0]:
                if type(t) is Tensor and t.numel():
                    assert t.untyped_storage().size(), f"{func} reads freed memory"
        return func(*args, **(kwargs or {}))


def _saved(value: object) -> None:
    torch.save(value, io.BytesIO())


def _each_storage(fn: Callable) -> Callable:
    return lambda t: [fn(s) for s in (t.rowwise, t.columnwise) if s is not None]


READS: dict[str, Callable] = {
    **COPIES,
    **{name: lambda t, run=run: run(t).clone() for name, (run, _) in MOVES.items()},
    **PLAIN,
    "save": _saved,
    "print": repr,
    "dequantize": lambda t: t.dequantize(),
    "dequantize a slice": lambda t: t[3:20].dequantize(),
    "storage_for": lambda t: [t.storage_for(d) for d in Direction],
    "decode rowwise": lambda t: t.matrix_for(ROWWISE).dequantize(),
    "decode columnwise": lambda t: t.matrix_for(COLUMNWISE).dequantize(),
    "operands": lambda t: [t.operand_for(d, lay) for d in Direction for lay in (COMPACT, NATIVE)],
    "copy_": lambda t: t.copy_(t.clone()),
    "share": lambda t: (t.share_memory_(), t.is_shared(), t.is_pinned()),
    "flatten": lambda t: t.__tensor_flatten__(),
    "storages decoded": _each_storage(lambda s: s.dequantize()),
    "storages multiplied": _each_storage(lambda s: s.operand()),
    "storages factored": _each_storage(lambda s: s.factored_operand()),
    "storages mapped": _each_storage(lambda s: s.map(torch.clone)),
    "storages copied": _each_storage(copy.deepcopy),
    "storages saved": _each_storage(_saved),
    "storages laid out": _each_storage(lambda s: to_layout(s, NATIVE)),
}


def test_nothing_reads_memory_that_was_freed():
    """If false, code that copies or saves a weight inside the forward of its `fully_shard` block,
    where the other direction is freed, ends the process, or reads what another tensor wrote."""
    hybrids = {"mxfp8/nvfp4": HybridQuantizer("mxfp8", "nvfp4")}
    refusals = StaleWeightError, ValueError, NotImplementedError, RuntimeError
    for name, quantizer in {**QUANTIZERS, **hybrids}.items():
        for freed in ({ROWWISE}, {COLUMNWISE}, set(Direction)):
            survivors = set()
            tensor = hybrid_of(quantizer).quantize(values(33, 48))
            for direction in freed:
                tensor._pair.get(direction).data.untyped_storage().resize_(0)
            for how, read in READS.items():
                with _NoFreedReads():
                    try:
                        read(tensor)
                        survivors.add(how)
                    except refusals as error:
                        refused = isinstance(error, StaleWeightError) or "freed" not in str(error)
                        assert refused, f"{name}: {how}: {error}"
            is_alive = len(freed) < 2 and not tensor._pair.shares_data
            assert ("dequantize" in survivors) is is_alive, f"{name}, {freed}: {survivors}"
            assert ("clone" in survivors) is ("save" in survivors) is is_alive, name


def test_hand_made_tensors_are_checked():
    """Otherwise storages of two different tensors are taken for one."""
    row = by_hand(ROWWISE)
    assert tuple(QuantizedTensor(row, shape=(3, 11, 48)).shape) == (3, 11, 48)
    with pytest.raises(ValueError, match="rowwise or a columnwise storage, got neither"):
        QuantizedTensor()
    other = Quantizer("fp8_row").storage(values(32, 48), COLUMNWISE)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        QuantizedTensor(row, other)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        QuantizedTensor(
            row, Quantizer("fp8_row").storage(values(33, 48, dtype=torch.float32), COLUMNWISE)
        )
    for shape in ((3, 10, 48), (33 * 48,), (48, 33)):
        with pytest.raises(ValueError, match="does not flatten"):
            QuantizedTensor(row, shape=shape)
    assert_same_bytes(
        QuantizedTensor(row).dequantize()[0, :3].float(),
        2.0 * torch.tensor([0.0, 2.0**-9, 2.0**-8]),
    )


def test_one_handler_an_operator():
    """Otherwise a second registration silently replaces the first."""
    table = AtenTable()

    @table.implements(aten.detach.default)
    def first(func, tensor):
        return tensor

    with pytest.raises(ValueError, match="detach.*already: first"):
        table.implements(aten.alias.default, aten.detach.default)(first)
    assert table.get(aten.detach.default) is first
    assert table.get(aten.t.default) is None


def test_pinning_is_asked_of_every_buffer():
    """If false, FSDP2 cannot offload a quantized parameter to pinned memory."""
    hybrid = HybridQuantizer(Quantizer("mxfp8"), Quantizer("nvfp4"))
    assert hybrid.quantize(torch.ones(32, 64)).is_pinned() is False


@each_tensor
def test_copy_moves_the_bytes_of_equal_storages(name: str):
    """If false, a buffer of codes cannot be filled in place, or a copy changes or mixes codes and
    scales."""
    target, source = TENSORS[name](), TENSORS[name]()
    for storage in filter(None, (source.rowwise, source.columnwise)):
        storage.data.copy_(storage.data.flip(0))
    before, version = pointers(target), target._version
    assert target.copy_(source) is target
    assert_same_tensor(target, source)
    assert pointers(target) == before and target._version > version


def test_copy_of_other_storages_is_refused_and_says_what_to_do():
    """If false, codes of one format are read as those of another, or half a tensor is written."""
    target = TENSORS["both"]()
    before = [b.clone() for s in (target.rowwise, target.columnwise) for b in s.buffers().values()]
    for other in (
        hybrid_of("mxfp8").quantize(values(33, 48, seed=3)),
        HybridQuantizer("mxfp8", None).quantize(values(33, 48)),
        HybridQuantizer("mxfp8", "nvfp4").quantize(values(66, 48)),
    ):
        with pytest.raises((ValueError, RuntimeError), match="HybridQuantizer.update|must match"):
            target.copy_(other)
    with pytest.raises(
        NotImplementedError, match="holds codes and no quantizer.*HybridQuantizer.update"
    ):
        target.copy_(values(33, 48))
    for buffer, want in zip(
        [b for s in (target.rowwise, target.columnwise) for b in s.buffers().values()], before
    ):
        assert_same_bytes(buffer, want, "after refused copies")


@each_tensor
def test_memory_of_codes_is_shared_between_processes(name: str):
    """If false, share_memory_() reads a storage that is not there, and the process dies."""
    tensor = TENSORS[name]()
    want = tensor.dequantize()
    assert not tensor.is_shared() and tensor.share_memory_() is tensor and tensor.is_shared()
    assert_same_bytes(tensor.dequantize(), want, "shared")
    module = nn.Module()
    module.weight = nn.Parameter(TENSORS[name](), requires_grad=False)
    module.share_memory()
    assert module.weight.is_shared()


@each_tensor
def test_codes_have_no_address_of_values(name: str):
    """If false, who matches parameters by address matches all with all, and who writes there writes
    nowhere."""
    with pytest.raises(
        ValueError, match=r"no address of torch.bfloat16 values.*rowwise\.data\.data_ptr\(\)"
    ):
        TENSORS[name]().data_ptr()
    with pytest.raises(ValueError, match="no address"):  # its copy would be uninitialized memory
        StateDictStager().stage({"weight": TENSORS[name]()})


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_penalty_of_decoded_values_reaches_the_parameter(is_compiled: bool):
    """If false, a penalty beside the loss has no gradient, in silence; or a frozen weight gets
    one."""

    def penalty(weight: Tensor) -> Tensor:
        return weight.dequantize().square().sum()

    run = torch.compile(penalty, backend="aot_eager", fullgraph=True) if is_compiled else penalty
    for recipe in ["mxfp8"] if is_compiled else ["fp8_current", "fp8_block", "mxfp8/nvfp4"]:
        with fq.quantized_model_init(recipe):
            weight = fq.Linear(48, 32, recipe=recipe).weight
        run(weight).backward()
        assert_same_bytes(weight.grad, 2 * weight.dequantize().detach(), recipe)
        with torch.no_grad():
            assert not weight.dequantize().requires_grad
        frozen = nn.Parameter(weight.detach(), requires_grad=False)
        assert not run(frozen).requires_grad and frozen.grad is None
    torch._dynamo.reset()


def test_a_parameter_is_rebuilt_by_its_class():
    """If false, accelerate's offload of a model with codes ends in an error."""
    for name, make in TENSORS.items():
        for tensor in (nn.Parameter(make(), requires_grad=False), torch.ones(2, 3)):
            rebuilt = QuantizedTensor(tensor, requires_grad=False)
            assert isinstance(rebuilt, nn.Parameter) and not rebuilt.requires_grad
            assert isinstance(rebuilt, QuantizedTensor) is isinstance(tensor, QuantizedTensor), name
