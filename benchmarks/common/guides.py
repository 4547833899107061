"""Put the tables of the results into the guides, between `<!-- results: NAME -->` and `<!-- end of results -->`.

python -m benchmarks.common.guides docs/*.md  # after new results
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.device import RESULTS


_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.S)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The results that a page shows: their name, and what is shown of them."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[2], match[3].strip()


def table_of(name: str) -> str:
    """The table of a file of results, made by the benchmark that its name begins with."""
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    family, _, file = name.partition("-")[0].partition("_")
    return importlib.import_module(f"benchmarks.{family}.{file}").table(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        text = page.read_text(encoding="utf-8")
        filled = _BLOCK.sub(lambda match: f"{match[1]}\n{table_of(match[2])}\n\n{match[4]}", text)
        page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
