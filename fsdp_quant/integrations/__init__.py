# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnsupportedDunderAll=false
"""What trainers plug in: `fq.integrations.<tool>` imports the tool at its first use, never with the
library.

>>> fq.integrations.transformers.Callback.__name__
'Callback'
"""

import importlib
from types import ModuleType

__all__ = [
    "accelerate",
    "lightning",
    "megatron",
    "megatron_gather",
    "peft",
    "torchtitan",
    "transformers",
]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"fsdp_quant.integrations has no {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
