# SPDX-License-Identifier: Apache-2.0
"""One forward, one backward (1F1B) between the stages of a pipeline: at most as many live
micro-batches as remaining stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks


def run_pipeline(
    ranks: Ranks,
    micro_batches: Iterable[int],
    forward: Callable[[int, Tensor | None], Tensor],
    like: Tensor,
    before: Callable[[int, str], None],
    backward: bool = True,
) -> None:
    """Run the micro-batches through this rank's stage.

    forward:  (micro-batch, output of the previous stage, None at the first) -> input of the
              next stage; at the last stage the loss.
    like:     a tensor like those sent between stages.
    before:   called with (micro-batch, "forward" or "backward") before each of these.
    """
    stage, last = ranks.forward.rank(), ranks.sizes.pipeline - 1
    todo, alive, sending = deque(micro_batches), deque(), []

    def received(group: dist.ProcessGroup, source: int) -> Tensor:
        tensor = torch.empty_like(like)
        dist.irecv(tensor, group=group, group_src=source).wait()
        return tensor

    def send(tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        tensor = tensor.contiguous()  # kept until it is sent
        sending.append((dist.isend(tensor, group=group, group_dst=to), tensor))

    def run_forward() -> None:
        micro_batch = todo.popleft()
        x = None if ranks.is_first else received(ranks.forward, stage - 1).requires_grad_(backward)
        before(micro_batch, "forward")
        y = forward(micro_batch, x)
        if not ranks.is_last:
            send(y.detach(), ranks.forward, stage + 1)
        if backward:
            alive.append((micro_batch, x, y))

    def run_backward() -> None:
        micro_batch, x, y = alive.popleft()
        dy = None if ranks.is_last else received(ranks.backward, stage + 1)
        before(micro_batch, "backward")
        y.backward(dy)
        if x is not None:
            send(x.grad, ranks.backward, stage - 1)

    while todo:
        run_forward()
        if len(alive) > last - stage:
            run_backward()
    while alive:
        run_backward()
    for work, _ in sending:
        work.wait()
