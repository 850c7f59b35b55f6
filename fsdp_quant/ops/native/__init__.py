# SPDX-License-Identifier: Apache-2.0
"""Python wrappers of the compiled operators, in one file per domain, as in csrc/api.

`dispatch` and the modules call them (`doctor` calls `supported`). `extension` loads the library. An
operator receives an `Encoding` as one integer (`pack_encoding`); `encoding_shapes` returns the
shapes of the buffers of an encoding. csrc/api/encoding.cpp alone defines the bits of the integer
and what operators allocate.
"""

from ..capability import BLACKWELL as BLACKWELL
from ..capability import ELEMENTS as ELEMENTS
from ..capability import HOPPER as HOPPER
from .encoding import *
from .fakes import *
from .gemms import *
from .gradients import *
from .layouts import *
from .norms import *
from .optimizers import *
from .quantization import *
from .routing import *
from .steps import *
