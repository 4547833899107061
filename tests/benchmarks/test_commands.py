"""Every command line of a benchmark that a page or a docstring shows: its module is there and takes the options."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks/README.md"]
PAGES += sorted((ROOT / "benchmarks").rglob("*.py"))
_COMMAND = re.compile(r"python -m (benchmarks\.[\w.]+)((?:\\\n|[^`\n])*)")


class Parsed(Exception):
    """The command line was taken."""


def commands_of(page: Path) -> list[tuple[str, str]]:
    """The modules of benchmarks that a page calls, and their arguments."""
    found = []
    for module, rest in _COMMAND.findall(page.read_text(encoding="utf-8")):
        arguments = re.split(r"&&|\s#", rest.replace("\\\n", " "))[0].strip()
        found.append((module.rstrip("."), arguments))
    return found


SHOWN = sorted({command for page in PAGES for command in commands_of(page)})


def test_pages_show_commands_of_every_family():
    families = {file.parent.name for file in (ROOT / "benchmarks").glob("*/__init__.py")}
    assert {module.split(".")[1] for module, _ in SHOWN} == families
    shown = {module for module, _ in commands_of(ROOT / "benchmarks/README.md")}
    measured = {file.name.partition("-")[0] for file in (ROOT / "benchmarks/results").glob("*.json")}
    assert {f"benchmarks.{name.replace('_', '.', 1)}" for name in measured} <= shown


def load(module: str) -> Any:
    """A module of the benchmarks; skips the test where it needs Triton and that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("needs Triton")


@pytest.mark.parametrize(("module", "arguments"), SHOWN, ids=map(" ".join, SHOWN))
def test_a_command_takes_the_options_that_are_shown(module, arguments, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *given):
        options = parse(parser, *given)
        show = getattr(options, "show", None)
        assert show is None or (ROOT / show).exists()
        raise Parsed

    monkeypatch.setattr(sys, "argv", [module, *shlex.split(arguments)])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed):
        load(module).main()
