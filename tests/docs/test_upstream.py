"""The patches for PEFT apply where a checkout is at hand, and their experiments go through its harness's steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from tiny_models import build
from transformers import GenerationConfig, get_cosine_schedule_with_warmup


PATCHES = Path(__file__).parents[2] / "docs" / "upstream"
STEPS = 3
TRAINED = {"alternate": [*range(1, 22, 2)], "spread": [*range(2, 28, 4)], "spafit": [*range(6, 28)]}


def files_of(patch: Path) -> dict[str, str]:
    """The files that a patch makes anew, and the lines that it adds to others, by path."""
    found = {}
    for part in patch.read_text().split("diff --git ")[1:]:
        path = re.search(r"^\+\+\+ b/(.*)$", part, re.M)[1]
        found[path] = "".join(f"{line[1:]}\n" for line in part.splitlines() if re.match(r"\+(?!\+\+ )", line))
    return found


@pytest.mark.parametrize("name", ["entry_points", "method_comparison"])
def test_the_patches_apply(name):
    tree = os.environ.get("PEFT_SURGICAL_PEFT_TREE")
    if not tree:
        pytest.skip("no checkout of PEFT: set PEFT_SURGICAL_PEFT_TREE")
    patch = str(PATCHES / f"{name}.patch")
    done = subprocess.run(["git", "apply", "--check", patch], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_harness_gets_one_line_and_three_experiments():
    files = files_of(PATCHES / "method_comparison.patch")
    places = [re.fullmatch(r"method_comparison/MetaMathQA/(?:experiments/(\w+)/llama-3.2-3B-)?(.*)", f) for f in files]
    assert [place[1] for place in places if place[2].endswith(".json")] == ["stratified"] * 2 + ["surgical"] * 4
    code = files["method_comparison/MetaMathQA/run.py"]
    assert re.fullmatch(r"import peft_surgical  # noqa: F401.*\n", code)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    for path, text in files_of(PATCHES / "method_comparison.patch").items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder / "method_comparison" / "MetaMathQA" / "experiments"


def mean_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


@pytest.mark.parametrize("experiment", ["surgical/alternate", "surgical/spread", "stratified/spafit"])
def test_the_harness_s_steps_on_a_tiny_model(experiment, experiments, tmp_path):
    method, name = experiment.split("/")
    folder = experiments / method / f"llama-3.2-3B-{name}"
    exec((experiments.parent / "run.py").read_text(), {})  # the one line; without it PEFT ends in a KeyError
    # `main` of run.py, `get_model` and `get_optimizer_and_scheduler` of utils.py, with default_training_params.json
    peft_config: Any = PeftConfig.from_pretrained(folder)
    parameters = json.loads((folder / "training_params.json").read_text())["optimizer_kwargs"]
    base = build("llama", num_hidden_layers=28, intermediate_size=16).to(torch.bfloat16)
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    rows = torch.randint(5, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    loss_of_base = mean_loss(base, rows)
    model: Any = get_peft_model(base, peft_config, autocast_adapter_dtype=True)
    optimizer = torch.optim.AdamW(model.parameters(), **parameters)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    trained, _ = model.get_nb_trainable_parameters()
    layers = {int(key.split(".layers.")[1].split(".")[0]) for key, p in model.named_parameters() if p.requires_grad}
    assert sorted(layers) == TRAINED[name]
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    # `train`
    model.eval()
    with model.disable_adapter():
        assert torch.equal(mean_loss(model, rows), loss_of_base)
    model.train()
    start = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows}
        model(**batch, num_items_in_batch=rows.numel()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    moved = {key for key, p in model.named_parameters() if key in start and not torch.equal(p, start[key])}
    assert moved == start.keys()
    with model.disable_adapter():
        assert torch.equal(mean_loss(model, rows), loss_of_base)
    with torch.inference_mode():
        generation = GenerationConfig(max_new_tokens=3, pad_token_id=0, eos_token_id=1)
        answers = model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), generation_config=generation)
    assert answers.shape[0] == 4
    # `get_file_size` and `log_results`
    model.save_pretrained(tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert 4 * trained < size < 4 * trained + 120_000  # float32 by autocast_adapter_dtype, and a header
    json.dumps({k: list(v) if isinstance(v, set) else v for k, v in peft_config.to_dict().items()})
    again = build("llama", num_hidden_layers=28, intermediate_size=16).to(torch.bfloat16)
    assert all(torch.equal(tensor, before[key]) for key, tensor in again.state_dict().items())
    assert torch.equal(mean_loss(PeftModel.from_pretrained(again, tmp_path), rows), mean_loss(model, rows))
