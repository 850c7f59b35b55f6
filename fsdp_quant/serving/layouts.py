"""How servers lay out the rowwise codes of a weight [N, K]: names, shapes and conventions, as data.

[Note: scale conventions]
`Storage.scale` is a decode scale: value = element * scale (* D for a second level, D = 1 / S). Servers differ:

    weight_scale, weight_scale_inv     decode scales, whatever the name says
    weight_scale_2 (modelopt)          D, decode
    weight_global_scale (compressed-tensors)  S, encode: value = element * (weight_scale / weight_global_scale)
    input_scale                        decode: amax / 448, nvfp4 amax / 2688
    input_global_scale                 encode: 2688 / amax

4-bit codes lie two a byte, the first one in the low bits, everywhere. Square blocks of 16 or 32 rows have one scale per row here.

Sources: compressed-tensors 0.20 (compressors, quantization.quant_scheme); vLLM (quantization/modelopt.py, fp8.py,
compressed_tensors/schemes); transformers 5.24 (quantizer_finegrained_fp8.py); Model Optimizer (export/quant_utils.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import E2M1, E4M3, FORMATS, ROWWISE, Format, format_of
from ..ops import reference
from ..storage import Storage

TARGETS = ("compressed-tensors", "modelopt", "fp8", "dequantized")


class Kind(NamedTuple):
    """What servers call a format.

    name:      key of the tables below.
    rows:      that share a scale in the format, where servers want a scale per row.
    multiples: of N and K that servers read.
    """

    name: str
    rows: int = 1
    multiples: tuple[int, int] = (1, 1)


_KINDS = {
    FORMATS[fmt].decoding: kind for fmt, kind in (
        ("fp8_tensor", Kind("tensor")),
        ("fp8_row", Kind("channel")),
        ("fp8_128x128", Kind("block", multiples=(1, 128))),
        ("mxfp8", Kind("mxfp8", multiples=(1, 32))),
        ("mxfp8_32x32", Kind("mxfp8", 32, (1, 32))),
        ("mxfp4", Kind("mxfp4", multiples=(1, 32))),
        ("nvfp4", Kind("nvfp4", multiples=(1, 16))),
        ("nvfp4_16x16", Kind("nvfp4", 16, (1, 16))),
    )
}
_HELD = {
    "compressed-tensors": {"tensor", "channel", "block", "mxfp8", "mxfp4", "nvfp4"},
    "modelopt": {"tensor", "channel", "block", "mxfp8", "nvfp4"},
    "fp8": {"block", "mxfp8"},  # per tensor, vLLM reads `weight_scale` and transformers `weight_scale_inv`
}
# As read from a file: scales are any numbers.
_READ = {
    "tensor": FORMATS["fp8_tensor"], "channel": FORMATS["fp8_row"], "block": format_of("fp8_128x128", pow2=False),
    "mxfp8": FORMATS["mxfp8"], "mxfp4": FORMATS["mxfp4"], "nvfp4": FORMATS["nvfp4"],
}


def kind_of(fmt: Format, target: str, name: str, shape: tuple[int, int]) -> Kind:
    """How `target` holds a weight of this format. Raises ValueError, naming the weight, where it does not."""
    kind = _KINDS.get(fmt.decoding)
    if kind is None or kind.name not in _HELD[target]:
        held = [n for n, f in FORMATS.items() if (k := _KINDS.get(f.decoding)) is not None and k.name in _HELD[target]]
        raise ValueError(
            f"{name} is {fmt} in the forward, which format={target!r} does not hold; it holds {', '.join(held)}: give "
            "the layer one of them by fq.set_recipe, or export format='dequantized'"
        )
    rows, cols = 128 if target == "modelopt" and kind.name == "block" else kind.multiples[0], kind.multiples[1]
    if shape[0] % rows or shape[1] % cols:
        raise ValueError(
            f"{name} is {list(shape)}, and servers read {fmt} of multiples of {[rows, cols]}; leave the layer out of "
            "fq.convert by skip=, or export format='dequantized'"
        )
    return kind


def has_merged_scale(kind: Kind) -> bool:
    """Servers multiply merged layers (q, k and v) by the scale of one of them, so theirs must be one."""
    return kind.name == "nvfp4"


def input_factor(kind: Kind) -> float:
    """What the amax of an input is encoded to."""
    return E2M1.max * E4M3.max if kind.name == "nvfp4" else E4M3.max


def takes_input_amax(kind: Kind) -> bool:
    """A server may quantize inputs by an amax of the checkpoint; those of other kinds have scales of their own blocks."""
    return kind.name in ("tensor", "nvfp4")


def tensors_of(storage: Storage, kind: Kind, target: str, input_amax: float | None = None) -> dict[str, Tensor]:
    """The tensors that a server reads for a weight, by the last part of their names.

    storage:     compact rowwise codes [N, K]; on the meta device, tensors without values.
    input_amax:  largest magnitude of the layer's input, for a static scale of it; None: inputs are scaled dynamically.
    """
    data, scale = storage.data, storage.scale
    if kind.rows > 1:
        scale = scale.repeat_interleave(kind.rows, 0)[: storage.shape[0]]
    name, packed = kind.name, storage.fmt.bits == 4
    data = data if packed else data.view(torch.float8_e4m3fn)
    scale = scale.view(torch.float8_e4m3fn) if name == "nvfp4" else scale
    found = {"weight_packed" if packed and target == "compressed-tensors" else "weight": data}
    if target == "compressed-tensors":
        found["weight_scale"] = scale.reshape(1) if name == "tensor" else scale
    elif target == "fp8":
        found["weight_scale_inv"] = scale
    else:
        if name == "tensor":
            scale = scale.reshape(()) if input_amax else scale.reshape(1).expand(storage.shape[0])
        elif name == "channel":
            scale = scale[:, 0]
        found["weight_scale"] = scale[:, None, :, None] if name == "block" else scale
    if name == "nvfp4" and target == "compressed-tensors":
        found["weight_global_scale"] = reference.tensor_encode_factor(storage.tensor_amax, storage.fmt)
    elif name == "nvfp4":
        found["weight_scale_2"] = reference.tensor_decode_scale(storage.tensor_amax, storage.fmt).reshape(())
    if input_amax:
        shape, encodes = (1,) if target == "compressed-tensors" else (), name == "nvfp4" and target == "compressed-tensors"
        factor = input_factor(kind) / input_amax if encodes else input_amax / input_factor(kind)
        found["input_global_scale" if encodes else "input_scale"] = torch.full(shape, factor, device=data.device)
    return found


# Configurations #

class Scheme(NamedTuple):
    """A kind, and how inputs of its layers are quantized: False: they are not; None: dynamically; True: by a static scale."""

    kind: Kind
    static: bool | None


def scheme_of(kind: Kind, quantizes_input: bool, input_amax: float | None) -> Scheme:
    """nvfp4 inputs need a static scale."""
    if input_amax:
        return Scheme(kind, True)
    return Scheme(kind, None if quantizes_input and kind.name != "nvfp4" else False)


_FLOAT = {"type": "float", "symmetric": True}
_STRATEGIES = {
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "channel": {"num_bits": 8, "strategy": "channel"},
    "block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
    "nvfp4": {
        "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    },
}
_OF_INPUTS = {  # where they differ from those of weights
    "tensor": {"num_bits": 8, "strategy": "token"}, "channel": {"num_bits": 8, "strategy": "token"},
    "block": {"num_bits": 8, "strategy": "group", "group_size": 128},
}
_PACKINGS = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
_ALGORITHMS = {"block": "FP8_PB_WO", "mxfp8": "MXFP8"}


def _arguments(scheme: Scheme) -> tuple[dict, dict | None]:
    """(of weights, of inputs) in compressed-tensors' words."""
    name = scheme.kind.name
    weights = _FLOAT | _STRATEGIES[name] | {"dynamic": False}
    if scheme.static is False:
        return weights, None
    if scheme.static:
        dynamic = "local" if name == "nvfp4" else False
        return weights, _FLOAT | _STRATEGIES[name] | {"dynamic": dynamic, "observer": "static_minmax"}
    return weights, _FLOAT | _OF_INPUTS.get(name, _STRATEGIES[name]) | {"dynamic": True, "observer": None}


def _compressed_tensors(schemes: dict[str, Scheme], ignore: list[str]) -> dict:
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme._replace(kind=scheme.kind._replace(rows=1)), []).append(name)
    made, packings = {}, []
    for i, (scheme, names) in enumerate(groups.items()):
        weights, inputs = _arguments(scheme)
        packings.append(_PACKINGS.get(scheme.kind.name, "float-quantized"))
        made[f"group_{i}"] = {
            "targets": ["Linear"] if len(groups) == 1 else names, "weights": weights, "input_activations": inputs,
            "output_activations": None, "format": packings[-1],
        }
    return {
        "quant_method": "compressed-tensors", "format": packings[0] if len(set(packings)) == 1 else "mixed-precision",
        "quantization_status": "compressed", "config_groups": made, "ignore": ignore, "kv_cache_scheme": None,
    }


def _modelopt(scheme: Scheme, ignore: list[str]) -> dict:
    name = scheme.kind.name
    algorithm = _ALGORITHMS.get(name) or (
        ("NVFP4" if scheme.static else "W4A16_NVFP4") if name == "nvfp4"
        else "FP8" if scheme.static else "FP8_PER_CHANNEL_PER_TOKEN"
    )
    size = {"group_size": _STRATEGIES[name]["group_size"]} if "group_size" in _STRATEGIES[name] else {}
    weights, inputs = (
        None if a is None else {k: a[k] for k in ("dynamic", "num_bits", "type", "group_size") if k in a}
        for a in _arguments(scheme)
    )
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, **size, "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "producer": {"name": "fsdp_quant"},
    }


def _fp8(scheme: Scheme, ignore: list[str]) -> dict:
    own = {
        "block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "mxfp8": {"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]},
    }[scheme.kind.name]
    # transformers reads the first list, vLLM the second.
    return own | {"activation_scheme": "dynamic", "modules_to_not_convert": ignore, "ignored_layers": ignore}


def quantization_config(target: str, schemes: dict[str, Scheme], ignore: list[str]) -> dict:
    """`quantization_config` of config.json.

    schemes:  of each quantized layer, by its name in the checkpoint.
    ignore:   layers that are not quantized.

    Raises ValueError for several schemes in a target that has one for all layers.
    """
    if target == "compressed-tensors":
        return _compressed_tensors(schemes, ignore)
    alike = {scheme._replace(kind=scheme.kind._replace(rows=1)): name for name, scheme in schemes.items()}
    if len(alike) > 1:
        (one, a), (other, b), *_ = alike.items()
        raise ValueError(
            f"{a} and {b} differ ({one.kind.name} and {other.kind.name}, or one has an input_amax), and format={target!r} has "
            "one scheme for all layers; use format='compressed-tensors', or skip= layers of one scheme"
        )
    return (_modelopt if target == "modelopt" else _fp8)(next(iter(alike)), ignore)


def hf_quant_config(config: dict) -> dict:
    """The file hf_quant_config.json of modelopt, of its `quantization_config`."""
    own = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None, "exclude_modules": config["ignore"]}
    size = {"group_size": config["group_size"]} if "group_size" in config else {}
    return {"producer": config["producer"], "quantization": own | size}


# Reading #

# Names of a weight's tensors, by the last part: of which one holds codes, and the others scales.
CODES = ("weight_packed", "weight")
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")


def read_storage(
    name: str, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device | str, fmt: Format | None = None
) -> Storage:
    """The rowwise codes of a weight [N, K] from the tensors that a server reads, which `tensors_of` makes.

    tensors:  by the last part of their names, at least codes and a scale.
    dtype:    that the storage decodes to.
    fmt:      of a recipe, whose options (powers of two, square blocks) the codes must keep; None: as the file has them.

    A second level that no tensor amax encodes to exactly is off by an ulp of fp32.
    Raises ValueError, naming the weight, for tensors of another format.
    """
    codes = tensors.get("weight_packed", tensors.get("weight"))
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    packed = codes is not None and codes.dtype in (torch.uint8, torch.int8)
    if codes is None or scale is None or not (packed or codes.dtype is torch.float8_e4m3fn) or codes.dim() != 2:
        got = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in tensors.items())
        raise ValueError(f"{name}: no format that this reads has {got}; it reads fp8 (e4m3), mxfp8, mxfp4 and nvfp4")
    shape = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        kind, scale = "mxfp4" if packed else "mxfp8", scale.view(torch.uint8)
    elif packed:
        kind, scale = "nvfp4", scale.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        of_rows, wanted = scale.shape in ((shape[0],), (shape[0], 1)), None if fmt is None else _KINDS.get(fmt.decoding)
        fits = ["tensor"] * (scale.numel() == 1) + ["channel"] * of_rows + ["block"]  # of a small weight several, which decode alike
        kind, scale = wanted.name if wanted is not None and wanted.name in fits else fits[0], scale.float()
    read = _READ[kind]
    blocks = read.scale_shape(shape, ROWWISE)
    if scale.numel() != blocks[0] * blocks[1]:
        raise ValueError(f"{name} is {list(shape)}: {kind} has scales {list(blocks)}, the file has {list(scale.shape)}")
    scale = scale.reshape(blocks)
    if fmt is not None:
        read, scale = fmt, _scale_as(fmt, scale, kind, shape[0], name)
    amax = None
    if kind == "nvfp4":
        second, inverse = (tensors.get(n) for n in ("weight_scale_2", "weight_global_scale"))
        if (second is None) == (inverse is None):
            raise ValueError(f"{name}: nvfp4 has one of weight_scale_2 and weight_global_scale, got {', '.join(tensors)}")
        decode = reference.divide(1.0, inverse.float()) if second is None else second.float()
        amax = _amax_of(decode.reshape(1), read)
    data = codes.view(torch.uint8)
    buffers = (None if t is None else t.to(device).contiguous() for t in (data, scale, amax))
    return Storage(read, ROWWISE, shape, *buffers, dtype)


def _amax_of(decode: Tensor, fmt: Format) -> Tensor:
    """fp32 [1]: a tensor amax whose decode scale this is, or is nearest to."""
    bits = (decode * fmt.largest_scaled).view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32, device=decode.device)
    near = bits.clamp(min=0).view(torch.float32)
    distance = (reference.tensor_decode_scale(near, fmt) - decode).abs()
    return near[distance.nan_to_num(nan=torch.inf).argmin()].reshape(1)


def _scale_as(fmt: Format, scale: Tensor, kind: str, rows: int, name: str) -> Tensor:
    """Scales of a file as those of a recipe's format. Raises ValueError, naming the weight, where it has no such scales."""
    own = _KINDS.get(fmt.decoding)
    if own is not None and (own.name, kind) == ("tensor", "channel") and torch.equal(scale, scale[:1].expand_as(scale)):
        kind, scale = "tensor", scale[:1]  # as modelopt's files have it
    if own is None or own.name != kind:
        raise ValueError(f"{name} is {_READ[kind]} in the file and {fmt} in the recipe; give the layer the file's format")
    if own.rows > 1:
        whole, scale = scale, scale[:: own.rows]
        if not torch.equal(scale.repeat_interleave(own.rows, 0)[:rows], whole):
            raise ValueError(f"{name} has a scale per row in the file, and {fmt} of the recipe one per {own.rows} rows")
    if not reference.has_scales_of(scale, fmt):
        raise ValueError(f"{name} has scales in the file that {fmt} of the recipe excludes; use the format without that option")
    return scale
