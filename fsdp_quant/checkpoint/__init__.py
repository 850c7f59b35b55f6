# SPDX-License-Identifier: Apache-2.0
"""Codes in checkpoints: fingerprints, storages as DTensors, and files of exact codes.

A training checkpoint holds masters: a load encodes them again, at any world size, and the
fingerprint shows whether the codes are the same. Codes themselves are written for inference, or to
be inspected. A safetensors file has metadata: under the weight's name, JSON of the format's fields,
direction, shape and dtype; under "fsdp_quant", digests of every tensor and of these texts, so that
a load names the tensor of a flipped bit.

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
>>> fq.checkpoint.export_safetensors(model, "codes.safetensors", codes=True)
>>> fq.checkpoint.load_safetensors("codes.safetensors")["0.weight"].rowwise.fmt.name
'mxfp8'
"""

import sys
from types import ModuleType

from .code_hash import fingerprint, fingerprints
from .files import export_safetensors, load_safetensors, publish, replacing
from .verification import RANKS, SAVED_BY, SKIPPED, Verified, of_rank, verify
from .weights import LocalWeight, code_tensors, prepared, storage_tensors

__all__ = [
    "RANKS",
    "SAVED_BY",
    "SKIPPED",
    "LocalWeight",
    "Verified",
    "code_tensors",
    "export_safetensors",
    "fingerprint",
    "fingerprints",
    "load_safetensors",
    "of_rank",
    "prepared",
    "publish",
    "replacing",
    "storage_tensors",
    "verify",
]


class _Codes(ModuleType):
    """This module, which other libraries have a function of the name of."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Raise TypeError with what to call."""
        raise TypeError(
            "fq.checkpoint is a module, of codes in checkpoints, and was called; recompute "
            "activations with torch.utils.checkpoint.checkpoint(function, *args, "
            "use_reentrant=False), or recompute='gate_up' of fq.convert and fq.LayerNormMLP"
        )


sys.modules[__name__].__class__ = _Codes
