"""What an option of the command line is, and the checks that options have in common. Nothing heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """What a field of `TrainingJob` means, and which values it may have."""

    help: str
    panel: str | None = None  # the part of the command line's help that it stands in
    names: tuple[str, ...] = ()  # on the command line, if not that of the field
    choices: Iterable[str] = ()
    kinds: tuple[str, ...] = ()  # of task that it goes with, if not with all
    positive: bool = False
    fraction: bool = False  # from 0 to below 1


def flag(name: str) -> str:
    """A field's name as it is written on the command line.

    Example:

        >>> flag("top_k")
        '--top-k'
    """
    return "--" + name.replace("_", "-")


def check_writable(option: str, path: str | Path, endings: Collection[str] = ()) -> None:
    """Make sure that a folder can be written later on; with endings, a file with one of them in a folder that exists.

    Raises:
        ValueError: It cannot be; the message names the option and says why.
    """
    path = Path(path).absolute()
    if endings and path.suffix.lower() not in endings:
        raise ValueError(f"{option} {path}: allowed are files ending in {', '.join(endings)}.")
    place = path.parent if endings else next(place for place in (path, *path.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"{option} {path}: {place} is not a folder.")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{option} {path}: {place} cannot be written to.")


def check_value(name: str, value: Any, option: Option) -> None:
    """Make sure that an option has a value that it may have.

    Raises:
        ValueError: It has not; the message names what is allowed.
    """
    if value is None:
        return
    if option.choices and value not in option.choices:
        raise ValueError(f"{flag(name)} {value}: allowed are {', '.join(option.choices)}.")
    if option.fraction and not 0 <= value < 1:
        raise ValueError(f"{flag(name)} {value}: allowed are fractions from 0 to below 1.")
    if option.positive and not value > 0:
        raise ValueError(f"{flag(name)} {value} must be above 0.")
