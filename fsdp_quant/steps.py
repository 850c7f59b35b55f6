# SPDX-License-Identifier: Apache-2.0
"""`fq.steps`: count and skip steps, and save the state that outlives them.

A model counts its steps itself; a trainer calls these to count them by hand.

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "fp8_delayed")
>>> fq.steps.begin_step(1, model=model)
>>> model(torch.ones(2, 64)).sum().backward()
>>> fq.steps.skip_step(model)                       # the optimizer does not apply this step
"""

from .context import token_offset
from .linear.training_steps import backward_dw, begin_step, skip_step, sync
from .training.training_state import TrainingState, load_state_dict, share_amaxes, state_dict

__all__ = [
    "TrainingState",
    "backward_dw",
    "begin_step",
    "load_state_dict",
    "share_amaxes",
    "skip_step",
    "state_dict",
    "sync",
    "token_offset",
]
