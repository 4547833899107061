"""Results as JSON: single files, and files with one record per line that several processes may add to."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any


def write(file: Path, content: Any) -> None:
    """Write JSON; the file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(json.dumps(rounded(content)) + "\n")
    part.replace(file)


def append(file: Path, record: dict[str, Any]) -> None:
    """Add a line to a file, in one piece, so that lines of several processes do not mix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(rounded(record)) + "\n").encode()
    target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(target, line) != len(line):
            raise OSError(f"The disk is full: {file} ends in half a line. Take it out.")
    finally:
        os.close(target)


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file; none if it is not there."""
    return list(_parsed(file, file.stat().st_mtime_ns, file.stat().st_size)) if file.exists() else []


@lru_cache(maxsize=64)
def _parsed(file: Path, *_version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rounded(content: Any) -> Any:
    """Numbers to six digits, so that files stay small."""
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    return [rounded(value) for value in content] if isinstance(content, (list, tuple)) else content
