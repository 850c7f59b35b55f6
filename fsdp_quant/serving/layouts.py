# SPDX-License-Identifier: Apache-2.0
"""Server layouts of the rowwise codes of a weight [N, K]: names, shapes and scale conventions.

[Note: scale conventions]
`Storage.scale` is a decode scale: value = element * scale (* D for a second level, D = 1 / S).
Servers differ:

    weight_scale, weight_scale_inv             decode, whatever the name says
    weight_scale_2 (modelopt)                  decode: D
    weight_global_scale (compressed-tensors)   encode: S; they divide weight_scale by it
    input_scale                                decode: amax / 448, of nvfp4 amax / 2688
    input_global_scale                         encode: 2688 / amax

4-bit codes are stored two per byte, the first one in the low bits, everywhere. Square blocks of 16
or 32 rows have one scale per row here.

Sources: compressed-tensors 0.20, compressors and quantization/quant_scheme; vLLM, quantization/
modelopt.py, fp8.py and compressed_tensors/schemes; transformers 5.24, quantizer_finegrained_fp8.py;
Model Optimizer, export/quant_utils.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import E2M1, E4M3, FORMATS, ROWWISE, Format
from ..ops import reference
from ..storage import Storage
from .kinds import KINDS, Kind, kind_of


def kind_in(target: str, fmt: Format, name: str, shape: tuple[int, int]) -> Kind:
    """The kind of a weight of this format in `target`.

    Raises ValueError, naming the weight, if the target has none.
    """
    kind = kind_of(fmt)
    if kind is None or not kind.is_held_by(target):
        held = [n for n, f in FORMATS.items() if (k := kind_of(f)) and k.is_held_by(target)]
        raise ValueError(
            f"{name} is {fmt} in the forward, which format={target!r} does not hold; it holds "
            f"{', '.join(held)}: give the layer one of them by fq.set_recipe, or export "
            "format='dequantized'"
        )
    rows = 128 if (target, kind.name) == ("modelopt", "block") else 1
    cols = kind.format.block[1] or 1
    if shape[0] % rows or shape[1] % cols:
        raise ValueError(
            f"{name} is {list(shape)}, and servers read {fmt} of multiples of {[rows, cols]}; "
            "leave the layer out of fq.convert by skip=, or export format='dequantized'"
        )
    return kind


def tensors_of(
    storage: Storage, kind: Kind, target: str, input_amax: float | None = None
) -> dict[str, Tensor]:
    """The tensors that a server reads for a weight, by the last part of their names.

    storage:     compact rowwise codes [N, K]; on the meta device, tensors without values.
    input_amax:  largest magnitude of the layer's input, for a static scale; None: dynamic scales.
    """
    data, scale, tensor_amax = storage.data, storage.scales, storage.tensor_amax
    rows = kind.rows_per_scale(storage.fmt)
    if rows > 1:
        first = storage.row0 % rows
        scale = scale.repeat_interleave(rows, 0)[first : first + storage.shape[0]]
    packed = storage.fmt.bits == 4
    data = data if packed else data.view(torch.float8_e4m3fn)
    scale = scale.view(torch.float8_e4m3fn) if kind.name == "nvfp4" else scale
    codes = "weight_packed" if packed and target == "compressed-tensors" else "weight"
    factor = "weight_scale_inv" if target == "fp8" else "weight_scale"
    tensors = {codes: data, factor: _shaped(scale, kind, target, storage.shape[0], input_amax)}
    encodes = (kind.name, target) == ("nvfp4", "compressed-tensors")
    if tensor_amax is not None and encodes:
        tensors["weight_global_scale"] = reference.tensor_encode_scale(tensor_amax, storage.fmt)
    elif tensor_amax is not None:
        D = reference.tensor_decode_scale(tensor_amax, storage.fmt)
        tensors["weight_scale_2"] = D.reshape(())
    if input_amax:
        largest = E2M1.max * E4M3.max if kind.name == "nvfp4" else E4M3.max
        input_scale = torch.full(
            (1,) if target == "compressed-tensors" else (),
            largest / input_amax if encodes else input_amax / largest,
            dtype=torch.float32,
            device=data.device,
        )
        tensors["input_global_scale" if encodes else "input_scale"] = input_scale
    return tensors


def _shaped(scale: Tensor, kind: Kind, target: str, rows: int, input_amax: float | None) -> Tensor:
    """Scales of a weight of `rows` rows in the shape that a target gives them."""
    if kind.name == "tensor" and target == "modelopt":
        return scale.reshape(()) if input_amax else scale.reshape(1).expand(rows)
    if kind.name == "tensor" and target == "compressed-tensors":
        return scale.reshape(1)
    if kind.name == "channel" and target == "modelopt":
        return scale[:, 0]
    if kind.name == "block" and target == "modelopt":
        return scale[:, None, :, None]
    return scale


# Reading #

# Last parts of the names of a weight's tensors.
CODES = ("weight_packed", "weight")
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")


class Scales(NamedTuple):
    """What the tensors of a weight say beside its codes: format, [N, K], scales of that format,
    tensor amax."""

    fmt: Format
    shape: tuple[int, int]
    scale: Tensor
    tensor_amax: Tensor | None


def read_storage(
    name: str,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    fmt: Format | None = None,
) -> Storage:
    """The rowwise codes of a weight [N, K] from the tensors of `tensors_of`; see `read_scales`.

    dtype:    that the storage decodes to.
    """
    fmt, shape, scale, amax = read_scales(name, tensors, fmt)
    data = _either(name, tensors, CODES)[1].view(torch.uint8).to(device).contiguous()
    amax = None if amax is None else amax.to(device)
    return Storage(fmt, ROWWISE, shape, data, scale.to(device).contiguous(), amax, dtype)


def read_scales(name: str, tensors: dict[str, Tensor], fmt: Format | None = None) -> Scales:
    """The format and scales of a weight [N, K] from the tensors of `tensors_of`.

    tensors:  by the last part of their names; codes may be on the meta device.
    fmt:      of a recipe, whose options (powers of two, square blocks) the scales must satisfy;
              None: read what the file has.

    A second-level scale that no tensor amax encodes to exactly is off by one fp32 ulp.
    Raises ValueError, naming the tensor, for another shape or dtype than the format has, for
    negative and non-finite scales, and for tensors that the format lacks.
    """
    kind, shape = _kind_in_file(name, tensors, fmt)
    role, scale = _either(name, tensors, SCALES[:2])
    read = kind.format
    check_range(name, role, scale, above_zero=read.has_fp32_scales)
    scale = scale.float() if read.has_fp32_scales else scale.view(torch.uint8)
    scale = scale.reshape(read.scale_shape(shape, ROWWISE) or ())
    if fmt is not None:
        read, scale = fmt, _scale_as(fmt, scale, kind, shape[0], name)
    if not kind.is_two_level:
        if unexpected := [n for n in SCALES[2:] if n in tensors]:
            raise ValueError(f"{name}: {kind.name} has no second-level scale, got {unexpected[0]}")
        return Scales(read, shape, scale, None)
    role, second = _either(name, tensors, SCALES[2:])
    if second.numel() != 1 or second.dtype is not torch.float32:
        raise ValueError(f"{name}: {role} is {list(second.shape)} {second.dtype}; wanted one fp32")
    second = second.reshape(1)
    check_range(name, role, second, above_zero=True)
    decode = second if role == "weight_scale_2" else reference.divide(1.0, second)
    return Scales(read, shape, scale, _amax_of(decode, read))


def _kind_in_file(
    name: str, tensors: dict[str, Tensor], fmt: Format | None
) -> tuple[Kind, tuple[int, int]]:
    """Return the kind of a weight in a file, and its [N, K]. Raises as `read_scales`."""
    _, codes = _either(name, tensors, CODES)
    role, scale = _either(name, tensors, SCALES[:2])
    packed = codes.dtype in (torch.uint8, torch.int8)
    if codes.dim() != 2 or not (packed or codes.dtype is torch.float8_e4m3fn):
        listed = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in tensors.items())
        raise ValueError(
            f"{name}: no format that this reads has {listed}; it reads fp8 (e4m3), mxfp8, mxfp4 "
            "and nvfp4"
        )
    shape = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    kinds = [kind for kind in KINDS.values() if (kind.format.bits == 4) == packed]
    fits = [kind for kind in kinds if kind.has_scales(scale, shape)]
    if not fits:
        shapes = ((kind, kind.scale_shapes(shape)) for kind in kinds)
        accepted = [f"{list(s[-1])} {k.scale_dtypes[0]} ({k.name})" for k, s in shapes if s]
        raise ValueError(
            f"{name}: {role} is {list(scale.shape)} {scale.dtype}, and a weight {list(shape)} of "
            f"{codes.dtype} has scales {' or '.join(accepted)}"
        )
    # Of a small weight several kinds, which decode alike.
    written = None if fmt is None else kind_of(fmt)
    return written if written in fits else fits[0], shape


def _either(name: str, tensors: dict[str, Tensor], roles: tuple[str, ...]) -> tuple[str, Tensor]:
    """The one tensor of these roles. Raises ValueError for none and for two."""
    present = [role for role in roles if role in tensors]
    if len(present) != 1:
        raise ValueError(
            f"{name}: a weight has one of {' and '.join(roles)}, got {', '.join(tensors)}"
        )
    return present[0], tensors[present[0]]


def check_range(name: str, role: str, scale: Tensor, above_zero: bool = False) -> None:
    """Raise ValueError unless scales are finite and not negative."""
    values = scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale
    values = values.float()
    bad = ~(values.isfinite() & (values > 0 if above_zero else values >= 0))
    if bad.any():
        raise ValueError(
            f"{name}: {role} holds {values[bad][0].item()} ({int(bad.sum())} of {bad.numel()} "
            f"scales); scales are finite and {'positive' if above_zero else 'not negative'}"
        )


def _amax_of(decode: Tensor, fmt: Format) -> Tensor:
    """fp32 [1]: the tensor amax whose decode scale is nearest to `decode`."""
    ulps = torch.arange(-4, 5, dtype=torch.int32, device=decode.device)
    near = ((decode * fmt.largest_scaled).view(torch.int32) + ulps).clamp(min=0).view(torch.float32)
    distance = (reference.tensor_decode_scale(near, fmt) - decode).abs()
    return near[distance.nan_to_num(nan=torch.inf).argmin()].reshape(1)


def _scale_as(fmt: Format, scale: Tensor, kind: Kind, rows: int, name: str) -> Tensor:
    """Scales of a file in the shape of a recipe's format.

    Raises ValueError, naming the weight, for scales that the format excludes.
    """
    written, tensor = kind_of(fmt), KINDS["tensor"]
    repeats = torch.equal(scale, scale[:1].expand_as(scale))
    if written is tensor and kind is KINDS["channel"] and repeats:  # as modelopt's files have it
        kind, scale = tensor, scale[:1]
    if written is not kind:
        raise ValueError(
            f"{name} is {kind.format} in the file and {fmt} in the recipe; give the layer the "
            "file's format"
        )
    block_rows = kind.rows_per_scale(fmt)
    if block_rows > 1:
        per_row, scale = scale, scale[::block_rows]
        if not torch.equal(scale.repeat_interleave(block_rows, 0)[:rows], per_row):
            raise ValueError(
                f"{name} has a scale per row in the file, and {fmt} of the recipe one per "
                f"{block_rows} rows"
            )
    if not reference.has_scales_of(scale, fmt):
        raise ValueError(
            f"{name} has scales in the file that {fmt} of the recipe excludes; use the format "
            "without that option"
        )
    return scale
