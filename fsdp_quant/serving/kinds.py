# SPDX-License-Identifier: Apache-2.0
"""The formats that inference servers read: a row per format, with the words of each target.

Sources: as in `layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import FORMATS, ROWWISE, Format, format_of

# target of `fq.export` -> field of `Kind` without which the target does not hold a format
_NEEDED = {"compressed-tensors": "weights", "modelopt": "algorithms", "fp8": "fp8"}
TARGETS = (*_NEEDED, "dequantized")


@dataclass(frozen=True, eq=False)
class Kind:
    """A format as servers name it.

    format:      of the codes and scales in a file; scales are any numbers.
    weights:     arguments of weights in compressed-tensors' words.
    square:      format of square blocks that is written so too, every scale repeated per row.
    inputs:      arguments of inputs that are scaled dynamically, where they differ.
    packing:     `format` in compressed-tensors' words.
    algorithms:  `quant_algo` in modelopt's words (with static scales of inputs, else).
    fp8:         `quantization_config` of the target "fp8".
    """

    name: str
    format: Format
    weights: dict[str, Any]
    square: Format | None = None
    inputs: dict[str, Any] | None = None
    packing: str = "float-quantized"
    algorithms: tuple[str | None, str] | None = None
    fp8: dict[str, Any] | None = None

    def is_held_by(self, target: str) -> bool:
        return getattr(self, _NEEDED[target]) is not None

    @property
    def is_two_level(self) -> bool:
        """Servers multiply merged layers (q, k and v) with one second-level scale, and scale inputs
        by amaxes of the checkpoint or not at all."""
        return self.format.tensor_scale

    @property
    def takes_input_amax(self) -> bool:
        """A server may quantize inputs with an amax of the checkpoint."""
        return self.format.spans_tensor

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """That scales have in files, ours first."""
        if self.format.has_fp32_scales:
            return torch.float32, torch.bfloat16, torch.float16
        return (torch.float8_e4m3fn,) if self.is_two_level else (torch.uint8, torch.float8_e8m0fnu)

    def scale_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """That scales of a weight [N, K] have in files, ours last; empty: no whole blocks."""
        blocks = self.format.scale_shape(shape, ROWWISE)
        if blocks is None:
            return []
        shapes: dict[str, list[tuple[int, ...]]] = {
            "tensor": [(), (1, 1), (1,)],
            "channel": [(shape[0],), (shape[0], 1)],
            "block": [(blocks[0], 1, blocks[1], 1), blocks],
        }
        return shapes.get(self.name, [blocks])

    def has_scales(self, scale: Tensor, shape: tuple[int, int]) -> bool:
        """Return whether a weight [N, K] in a file may have these scales."""
        return scale.dtype in self.scale_dtypes and tuple(scale.shape) in self.scale_shapes(shape)

    def rows_per_scale(self, fmt: Format) -> int:
        """How many rows of scales a server needs for one block row of `fmt`."""
        return (fmt.block[0] or 1) // (self.format.block[0] or 1)


def _groups(bits: int, size: int, scale_dtype: str, strategy: str = "group") -> dict[str, Any]:
    types = {"scale_dtype": scale_dtype, "zp_dtype": scale_dtype}
    return {"num_bits": bits, "strategy": strategy, "group_size": size} | types


_TOKEN = {"num_bits": 8, "strategy": "token"}
KINDS = {
    kind.name: kind
    for kind in (
        # Not in the target "fp8": vLLM reads its scale as `weight_scale`, transformers as
        # `weight_scale_inv`.
        Kind(
            "tensor",
            FORMATS["fp8_tensor"],
            weights={"num_bits": 8, "strategy": "tensor"},
            inputs=_TOKEN,
            algorithms=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
        ),
        Kind(
            "channel",
            FORMATS["fp8_row"],
            weights={"num_bits": 8, "strategy": "channel"},
            inputs=_TOKEN,
            algorithms=(None, "FP8_PER_CHANNEL_PER_TOKEN"),
        ),
        Kind(
            "block",
            format_of("fp8_128x128", pow2=False),
            weights={"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
            inputs={"num_bits": 8, "strategy": "group", "group_size": 128},
            algorithms=(None, "FP8_PB_WO"),
            fp8={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        ),
        Kind(
            "mxfp8",
            FORMATS["mxfp8"],
            weights=_groups(8, 32, "torch.uint8"),
            square=FORMATS["mxfp8_32x32"],
            packing="mxfp8-quantized",
            algorithms=(None, "MXFP8"),
            fp8={"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]},
        ),
        Kind(
            "mxfp4",
            FORMATS["mxfp4"],
            weights=_groups(4, 32, "torch.uint8"),
            packing="mxfp4-pack-quantized",
        ),
        Kind(
            "nvfp4",
            FORMATS["nvfp4"],
            weights=_groups(4, 16, "torch.float8_e4m3fn", "tensor_group"),
            square=FORMATS["nvfp4_16x16"],
            packing="nvfp4-pack-quantized",
            algorithms=("NVFP4", "W4A16_NVFP4"),
        ),
    )
}
_BY_DECODING = {
    fmt.decoding: kind for kind in KINDS.values() for fmt in (kind.format, kind.square) if fmt
}


def kind_of(fmt: Format) -> Kind | None:
    """The kind that layers of this format are written as, or None."""
    return _BY_DECODING.get(fmt.decoding)
