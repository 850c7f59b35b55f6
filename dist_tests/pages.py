# SPDX-License-Identifier: Apache-2.0
"""Run the programs of a page of docs/, and compare what they print with what the page says.

A block that begins with ```python runs. A block ```text behind it is all that it prints. A block
```py does not run: `test_pages.EXCERPTS` says why.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(kind, text, its first line) of each block of a page, in order."""
    text = page.read_text()
    return [
        (match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in _BLOCK.finditer(text)
    ]


def run_page(page: Path, scope: dict, only: slice = slice(None)) -> dict:
    """Run the python blocks of a page in `scope`, one after another; returns it. A traceback has
    the lines of the page.

    only:  which of the blocks, text blocks included.
    Raises AssertionError where a text block is not what the block before it printed.
    """
    scope |= {"__name__": "page"}
    printed = ""
    for kind, text, line in blocks(page)[only]:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), scope)
            printed = out.getvalue()
        elif kind == "text":
            assert _words(printed) == _words(text), f"{page.name}:{line} prints\n{printed}"
    return scope


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]
