"""Print the dependencies of a pyproject.toml pinned to their lower bounds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib


def lower_bounds(pyproject: Path) -> list[str]:
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    bounds = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", dependency) for dependency in dependencies]
    if not all(bounds):
        raise SystemExit(f"a dependency has no lower bound: {dependencies}")
    return [f"{match[1]}=={match[2]}" for match in bounds if match]


if __name__ == "__main__":
    print(*lower_bounds(Path(sys.argv[1])))
