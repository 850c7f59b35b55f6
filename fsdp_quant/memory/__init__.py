# SPDX-License-Identifier: Apache-2.0
"""Where a step's memory goes. `offload`: to the host between forward and backward.

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
>>> with fq.memory.offload(model):
...     y = model(torch.ones(2, 64))
>>> y.sum().backward()
"""

from .offload import offload

__all__ = ["offload"]
