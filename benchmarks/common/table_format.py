"""Tables in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


MISSING = "-"
INTERVALS = "± over tasks (± over seeds)"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers on the right."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def points(value: float, digits: int = 1, sign: bool = False) -> str:
    """A share as points."""
    return MISSING if math.isnan(value) else f"{100 * value:{'+' if sign else ''}.{digits}f}"


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number."""
    return MISSING if math.isnan(value) else f"{value:{'+' if sign else ''}.{digits}f}"
