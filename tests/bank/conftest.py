from __future__ import annotations

import itertools

import pytest
from test_bank import CONFIGS, save_task

from peft_surgical import SurgicalConfig


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Three versions of three tasks, in the folders `a 0`, `a 1` and so on, with what each answers."""
    folder = tmp_path_factory.mktemp("versions")
    answers = {}
    for i, (name, version) in enumerate(itertools.product("abc", range(3))):
        config = CONFIGS["lora"]() if name == "c" else SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2 + i % 2])
        answers[f"{name} {version}"] = save_task(folder, f"{name} {version}", config, seed=i)
    return folder, answers
