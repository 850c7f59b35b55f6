# SPDX-License-Identifier: Apache-2.0
"""Low-precision training for stock PyTorch FSDP2, one format per direction. See README.md.

`import fsdp_quant` imports the operators. The rest needs torch.distributed.tensor and
torch._dynamo, which take a second: it is imported at the first use of a public name
(`fsdp_quant/public.py`).
"""

from typing import TYPE_CHECKING

# a submodule has the name of the function: it is bound before others import it
from .gemm import StaleWeightError, gemm

if TYPE_CHECKING:
    from .inspection import reset_receipt
    from .numerics import *  # noqa: F403
    from .public import *  # noqa: F403
    from .steps import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if not name.startswith("__") or name == "__all__":
        from .public import ALIASES, NAMES

        globals().update(ALIASES, __all__=list(NAMES), **NAMES)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; docs/coming_from_*.md")


def __dir__() -> list[str]:
    from .public import NAMES

    return sorted({*NAMES, *filter(lambda name: name.startswith("__"), globals())})
