"""The example service: right answers under many threads, and faults of one task that leave the others alone."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_task import WORDS, save_base
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from peft_surgical import SurgicalConfig
from peft_surgical.bank import DeltaBank


pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
testclient = pytest.importorskip("fastapi.testclient")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve  # noqa: E402


@pytest.fixture
def service(tmp_path):
    """A client of the service, the logits that each task's own model gives, and where the adapters are."""
    save_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    texts = [" ".join(random.Random(i).choices(WORDS, k=5)) for i in range(4)]
    wanted = {}
    for i, name in enumerate(["alpha", "beta", "gamma", "delta", "gone"]):
        torch.manual_seed(i)
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2 + i % 2)
        surgical = SurgicalConfig(task_type="SEQ_CLS", layers=[i % 4])
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
        model = get_peft_model(base, lora if name == "delta" else surgical).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for text in texts:
                wanted[name, text] = model(**tokenizer(text, return_tensors="pt")).logits[0].tolist()
        model.save_pretrained(tmp_path / "adapters" / name)
    (tmp_path / "adapters" / "bad").mkdir()
    (tmp_path / "adapters" / "bad" / "adapter_config.json").write_text("{}")
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    bank = DeltaBank(base, device_budget=60_000)
    serve.add_all(bank, tmp_path / "adapters")
    with testclient.TestClient(serve.serve_bank(bank, tokenizer)) as client:
        yield client, wanted, tmp_path / "adapters"


def test_every_answer_under_load_is_the_one_of_the_tasks_own_model(service):
    client, wanted, _ = service
    asked = random.Random(0).choices([*wanted], k=60)

    def ask(question):
        task, text = question
        return client.post("/predict", json={"task": task, "text": text}).json()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))
    for question, answer in zip(asked, answers, strict=True):
        assert list(answer["logits"].values()) == wanted[question]
        assert answer["label"] == max(answer["logits"], key=answer["logits"].get)
    stats = client.get("/stats").json()
    assert stats["device_peak"] <= 60_000
    assert stats["switches"] > 1


def test_what_is_wrong_with_one_task_does_not_touch_the_others(service):
    client, wanted, folder = service
    assert client.get("/tasks").json() == ["alpha", "beta", "delta", "gamma", "gone"]  # "bad" was left out
    assert client.post("/predict", json={"task": "lost", "text": "w1"}).status_code == 404
    (folder / "gone" / "adapter_model.safetensors").unlink()
    for _ in range(2):
        answer = client.post("/predict", json={"task": "gone", "text": "w1"})
        assert answer.status_code == 503
        assert "Task 'gone'" in answer.json()["detail"]
    task, text = next(iter(wanted))
    answer = client.post("/predict", json={"task": task, "text": text})
    assert list(answer.json()["logits"].values()) == wanted[task, text]


@pytest.mark.parametrize(
    "body",
    [
        '{"task": "alpha", "text": NaN}',
        '{"task": NaN, "text": "w1"}',
        '{"task": "alpha", "text": "w1 \\ud800"}',
        '{"task": "\\udfff", "text": "w1"}',
        '{"task": "alpha", "text": "w1", "text_pair": "\\ud800"}',
        '{"task": "alpha", "text": "' + "w1 " * 10_000 + '"}',
        '{"task": "alpha", "text": "' + "w1 " * 7_000_000 + '"}',
        '{"\\ud800": 1}',
        "[" * 100_000,
        "{",
        "",
        "\xff",
    ],
    ids=lambda body: f"{body[:40]} {len(body)}",
)
def test_what_cannot_be_answered_is_refused(body, service):
    client, wanted, _ = service
    answer = client.post("/predict", content=body.encode("latin-1"), headers={"content-type": "application/json"})
    assert answer.status_code == (400 if body in ("[" * 100_000, "\xff") else 422), answer.text
    assert len(answer.text) < 1000
    task, text = next(iter(wanted))
    assert client.post("/predict", json={"task": task, "text": text}).status_code == 200
