"""Each example notebook runs from top to bottom, and keeps the outputs and plots of such a run.

Its cells run here as a script, in a fork, with few rows; the outputs in the file are those of a Jupyter kernel.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import types
from pathlib import Path

import pytest
from forks import run_forked


NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))


def cells_of(notebook: Path) -> list[tuple[str, dict]]:
    """The source of each code cell, and the cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [("".join(cell["source"]), cell) for cell in cells if cell["cell_type"] == "code"]


def run_cells(notebook: Path, folder: Path) -> None:
    import matplotlib

    matplotlib.use("template")  # whose show() does nothing
    sys.modules["IPython.display"] = types.SimpleNamespace(Image=lambda path, **_: Path(path).read_bytes())  # type: ignore
    tempfile.tempdir = str(folder)
    code = "\n".join(source for source, _ in cells_of(notebook))
    code, replaced = re.subn(r"^ROWS = \d+", "ROWS = 12", code, flags=re.MULTILINE)
    assert replaced == 1
    exec(compile(code, notebook.name, "exec"), {"__name__": "__main__"})


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("demo_packages")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_in_order_without_a_warning(notebook, tmp_path):
    finished = run_forked(run_cells, notebook, tmp_path)
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_of_one_run_are_kept(notebook):
    cells = cells_of(notebook)
    assert [cell["execution_count"] for _, cell in cells] == list(range(1, len(cells) + 1))
    for source, cell in cells:
        outputs = cell["outputs"]
        assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs), source
        prints = re.search(r"^ *print\(", source, re.MULTILINE) is not None
        draws = re.search(r"^(plt\.show|Image)\(", source, re.MULTILINE) is not None
        assert any(output["output_type"] == "stream" for output in outputs) == prints, source
        assert any("image/png" in output.get("data", {}) for output in outputs) == draws, source
        texts = [output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs]
        assert not re.search(r"/(tmp|home|Users|root|work)\b|site-packages|it/s", json.dumps(texts)), source
    assert any("plt.show" in source for source, _ in cells)
    assert notebook.stat().st_size < 150_000
