# SPDX-License-Identifier: Apache-2.0
"""Every private torch name that the library uses, for torch 2.11 and later: a file per part of
torch."""

from .autograd import *
from .collectives import *
from .fsdp2 import *
from .graphs import *
from .modules import *
from .observers import *
from .reductions import *
from .tensors import *
