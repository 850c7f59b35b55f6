# SPDX-License-Identifier: Apache-2.0
"""Low-precision training for stock PyTorch FSDP2, one format a direction. See README.md.

`import fsdp_quant` imports the operators. The rest needs torch.distributed.tensor and
torch._dynamo, which take a second: it is imported at the first use of a public name
(`fsdp_quant/public.py`).
"""

from typing import TYPE_CHECKING

# a submodule has the name of the function: it is bound before others import it
from .gemm import StaleWeightError, gemm

if TYPE_CHECKING:
    from .public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if not name.startswith("__") or name == "__all__":
        from .public import NAMES

        globals().update(NAMES, __all__=list(NAMES))
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from .public import NAMES

    return sorted({*globals(), *NAMES})
