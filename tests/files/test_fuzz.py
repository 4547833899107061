"""Two hundred inputs of `fuzz.py`, or as many as `PEFT_SURGICAL_FUZZ` says."""

from __future__ import annotations

import os

import fuzz
import pytest


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return fuzz.World(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(10))
def test_any_input_gives_the_right_adapter_or_one_error_that_names_the_file(part, world):
    count = int(os.environ.get("PEFT_SURGICAL_FUZZ", "200")) // 10
    for seed in range(part * count, (part + 1) * count):
        fuzz.one_input(world, seed)
