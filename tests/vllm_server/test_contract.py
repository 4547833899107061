"""What is used of vLLM, as its source has it, so that a change there is seen before a server is.

Source of the installed vLLM, or of unpacked releases: `PEFT_SURGICAL_VLLM=one/vllm:another/vllm`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import nn


def sources() -> list[Path]:
    if "PEFT_SURGICAL_VLLM" in os.environ:
        return [Path(folder) for folder in os.environ["PEFT_SURGICAL_VLLM"].split(":")]
    found = importlib.util.find_spec("vllm")
    return [Path(found.origin).parent] if found and found.origin else []


pytestmark = pytest.mark.skipif(not sources(), reason="vLLM is not installed; see tests/README.md")
PATCH = "model_executor/model_loader/checkpoint_weight_patch.py"
RELOAD = "model_executor/model_loader/reload/layerwise.py"
FUNCTIONS = [
    (PATCH, "load_checkpoint_weight_patches", ["model", "patches"]),
    (RELOAD, "initialize_layerwise_reload", ["model"]),
    (RELOAD, "finalize_layerwise_processing", ["model", "model_config"]),
    ("distributed/parallel_state.py", "get_world_group", []),
]
PATHS = ["/pause", "/resume", "/is_paused", "/collective_rpc", "/reset_prefix_cache"]


@pytest.fixture(params=sources(), ids=str)
def source(request) -> Path:
    return request.param


def find(file: Path, name: str) -> ast.AST:
    place: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        place = next(node for node in place.body if getattr(node, "name", None) == part)
    return place


@pytest.mark.parametrize(("file", "name", "wanted"), FUNCTIONS)
def test_the_functions_take_what_they_are_given(source, file, name, wanted):
    given = [argument.arg for argument in find(source / file, name).args.args]
    assert given[: len(wanted)] == wanted


def test_the_server_has_the_paths_that_the_client_asks(source):
    text = "\n".join(file.read_text() for file in (source / "entrypoints").rglob("*api_router.py"))
    assert [path for path in PATHS if f'("{path}")' not in text] == []
    assert 'PauseMode = Literal["abort", "wait", "keep"]' in (source / "v1/engine/__init__.py").read_text()
    assert "self.model_runner.get_model()" in (source / "v1/worker/gpu_worker.py").read_text()
    assert "worker_class.__bases__ = worker_class.__bases__ + (" in (source / "v1/worker/worker_base.py").read_text()
    assert '"%s: Failed to load weights"' in (source / RELOAD).read_text()
    assert "def errored(self) -> bool:" in (source / "v1/engine/async_llm.py").read_text()
    state = source / "entrypoints/launchers/api_server/app_state.py"
    assert "state.engine_client = engine_client" in state.read_text()


class Loading(nn.Module):
    """A model that fuses two tensors of its checkpoint, as vLLM's do."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            start = {"a.weight": 0, "b.weight": 2}[name]
            self.both.data[start : start + 2].copy_(tensor)
            yield "both"


def test_a_dense_patch_goes_through_the_models_own_loader(source):
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", source / PATCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, value = Loading(), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    patch = module.CheckpointWeightPatch("b.weight", (2, 3), torch.bfloat16, value.reshape(-1))
    assert module.load_checkpoint_weight_patches(model, [patch]) == {"both"}
    assert torch.equal(model.both.data, torch.cat([torch.zeros(2, 3), value.float()]))
