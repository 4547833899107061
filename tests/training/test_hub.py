from __future__ import annotations

import json
import threading

import pytest
import torch
from fake_hub import FakeHub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from peft import PeftModel
from tiny_task import save_base, save_data
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from peft_surgical.cli import app
from peft_surgical.training import TrainingJob, TrainingRun, train


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    return {"model": str(save_base(folder / "base")), "data": str(save_data(folder / "data"))}


@pytest.fixture
def job(places, tmp_path):
    usual = {**places, "output": str(tmp_path / "out"), "method": "last", "max_steps": 1, "push_to_hub": "rte"}
    return lambda **options: TrainingJob(**{**usual, **options})


def forget_sessions():
    getattr(_http, "reset_sessions", lambda: None)()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = FakeHub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    asked = {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
    for name, value in {**asked, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)  # before version 1
    monkeypatch.setattr("transformers.utils.hub._is_offline_mode", False, raising=False)  # before version 5
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    forget_sessions()  # which are offline once one was made so, before version 1
    yield server
    forget_sessions()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("options", [{}, {"method": "full"}, {"method": "surgical", "layers": "auto"}])
def test_what_is_saved_is_pushed_and_loads_elsewhere(hub, job, tmp_path, options):
    asked = job(keep_checkpoints=True, **options)
    train(asked)
    saved = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.is_file()}
    assert hub.repositories == {"me/rte": saved}
    load = AutoModelForSequenceClassification.from_pretrained
    here, there = (
        load(place) if asked.method == "full" else PeftModel.from_pretrained(load(asked.model), place)
        for place in (asked.output, "me/rte")
    )
    ids = torch.tensor([[2, 5, 9, 3]])
    assert torch.equal(here.eval()(ids).logits, there.eval()(ids).logits)


@pytest.mark.parametrize("kept", [True, False])
def test_a_finished_run_is_pushed_when_it_is_resumed(hub, job, kept):
    train(job(push_to_hub="rte" if kept else None))
    hub.repositories.clear()
    train(job(), resume=True)
    assert "adapter_model.safetensors" in hub.repositories["me/rte"]


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("rte", None, "--push-to-hub rte: you are not logged in. Run `hf auth login`"),
        ("you/rte", "hf_secret", "--push-to-hub you/rte: .*403"),
        ("a/b/c", "hf_secret", "--push-to-hub a/b/c: Repo id must be"),
    ],
)
def test_a_login_or_a_name_that_will_not_do_is_told_before_the_model_is_loaded(
    hub, job, tmp_path, monkeypatch, name, token, message
):
    loader = AutoModelForSequenceClassification
    monkeypatch.setattr(loader, "from_pretrained", lambda *a, **k: pytest.fail("loaded a model"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=message):
        TrainingRun(job(push_to_hub=name))
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


def test_a_push_that_fails_keeps_the_run_and_tells_the_command_that_tries_again(hub, places, tmp_path):
    def run(*arguments: str, code: int) -> str:
        done = CliRunner().invoke(app, ["train", *arguments])
        assert done.exit_code == code, done.output
        return done.output

    out = tmp_path / "my out"
    hub.refused = ("/commit/",)
    options = ["--model", places["model"], "--data", places["data"], "--method", "last", "--max-steps", "1"]
    said = run(*options, "--output", str(out), "--push-to-hub", "rte", code=2)
    assert "accuracy" in said  # the results come first
    again = f"peft-surgical train --output '{out}' --resume --push-to-hub rte"
    assert again in said
    assert (out / "metrics.json").exists()
    assert "push_to_hub" not in (out / "run.yaml").read_text()  # it would write over what is there
    hub.refused = ()
    said = run("--output", str(out), "--resume", "--push-to-hub", "rte", code=0)
    assert f"Pushed to {hub.url}/me/rte" in said
    results = json.loads(hub.repositories["me/rte"]["metrics.json"])
    assert results == json.loads((out / "metrics.json").read_text())
