"""Every line that something runs, for an interrupt, or a fork, at each of them."""

from __future__ import annotations

import functools
import linecache
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType

import pytest


Line = tuple[str, int]
"""A file, and a line of it."""


def on_each_line(run: Callable[[], object], reached: Callable[[Line], None], files: tuple[str, ...]) -> None:
    """Call a function before each line at which an interrupt can come, in this thread.

    Args:
        run: What runs the lines.
        reached: The function.
        files: Parts of the names of files; lines of others do not count.
    """
    begun: set[tuple[FrameType, int]] = set()
    counts = functools.cache(lambda name: any(part in name for part in files))

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if not counts(name):
            return None
        start = linecache.getline(name, number).lstrip()
        # no interrupt can come at `try:`, nor where the line of a `with` is reached again at its end
        is_end = start.startswith("with ") and (frame, number) in begun
        begun.add((frame, number))
        if event == "line" and not is_end and not start.startswith("try:"):
            reached((name, number))
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
        begun.clear()


def some_of(lines: list, count: int) -> list:
    """As many lines, drawn always the same way."""
    return random.Random(0).sample(lines, min(count, len(lines)))


def interrupt(run: Callable[[], object], is_here: Callable[[Line], bool], files: tuple[str, ...]) -> None:
    """Run something, with Ctrl-C at the first line for which `is_here` is true."""

    def reached(line: Line) -> None:
        if is_here(line):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        on_each_line(run, reached, files)
