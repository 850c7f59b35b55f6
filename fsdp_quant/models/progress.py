# SPDX-License-Identifier: Apache-2.0
"""A progress bar for long loops over layers; none without `rich` or a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

import torch.distributed as dist

try:
    from rich.console import Console
    from rich.progress import Progress
except ImportError:
    Progress = None

Item = TypeVar("Item")
PATIENCE = 5.0  # seconds without a bar


def progress(items: Collection[Item], label: str) -> Iterator[Item]:
    """Iterate over items; after `PATIENCE`, rank 0 shows a bar if stderr is a terminal."""
    began, bar = time.monotonic(), None
    is_first = not (dist.is_initialized() and dist.get_rank())
    try:
        for index, item in enumerate(items):
            late = time.monotonic() - began > PATIENCE
            if bar is None and late and Progress is not None and is_first and sys.stderr.isatty():
                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task(label, total=len(items))
                bar.start()
            if bar is not None:
                bar.update(task, completed=index)
            yield item
    finally:
        if bar is not None:
            bar.stop()
