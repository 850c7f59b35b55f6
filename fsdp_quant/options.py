# SPDX-License-Identifier: Apache-2.0
"""Options: which values they accept, in a table per class, checked where a user writes them.

A numpy scalar counts as the Python number of its value; a bool is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option. words: describe the values that `accepts` accepts."""

    words: str
    accepts: Callable[[Any], bool]

    def read(self, name: str, value: object) -> Any:
        """Return the value. Raises ValueError, naming the option, for a value that it does not
        accept."""
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.words}, got {value!r}")
        return value


def integer(least: int, most: float = math.inf) -> Option:
    words = f"an integer >= {least}" if most == math.inf else f"an integer from {least} to {most}"
    return Option(words, lambda v: type(v) is int and least <= v <= most)


def number(least: float, most: float = math.inf) -> Option:
    words = f"a number >= {least}" if most == math.inf else f"a number between {least} and {most}"
    return Option(words, lambda v: type(v) in (int, float) and least <= v <= most)


def flag() -> Option:
    return Option("True or False", lambda v: type(v) is bool)


def text() -> Option:
    return Option("a str", lambda v: isinstance(v, str))


def function() -> Option:
    return Option("a function or None", lambda v: v is None or callable(v))


def read_all(table: Mapping[str, Option], **values: object) -> None:
    """Raise ValueError, naming the argument, for a value that its option does not accept."""
    for name, value in values.items():
        table[name].read(name, value)


def choice(*values: object) -> Option:
    """Accept one of these values, of the same type: 1 is not True."""
    words = f"one of {values}" if len(values) > 2 else " or ".join(map(repr, values))
    return Option(words, lambda v: any(type(v) is type(w) and v == w for w in values))


def check(value: object, table: Mapping[str, Option], prefix: str = "") -> None:
    """Check the fields of a frozen dataclass, and store what was read.

    Raises ValueError, naming the field.
    """
    for name, option in table.items():
        object.__setattr__(value, name, option.read(prefix + name, getattr(value, name)))
