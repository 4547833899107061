"""What version 0.1.0 wrote is read bit for bit: adapters of both methods, a ranking, and a run of training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_task import save_data
from transformers import AutoModelForSequenceClassification
from written_by_0_1_0 import write

from peft_surgical import DeltaBank, LayerRanking, convert_adapter, inspect_adapter
from peft_surgical.training import TrainingJob, evaluate


FOLDER = Path(write.__file__).parent


def expected(folder: Path) -> dict:
    return json.loads((folder / write.EXPECTED).read_text())


def digests(model: PeftModel) -> dict[str, str]:
    return {name: write.digest(tensor) for name, tensor in write.tensors_of(model).items()}


def assert_close(logits: list, wanted: list) -> None:
    # what the tensors make of a batch depends on the processor in the last bits
    torch.testing.assert_close(torch.tensor(logits), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", write.ADAPTERS)
def test_an_adapter_is_loaded_bit_for_bit(name):
    model = write.load(FOLDER, name)
    wanted = expected(FOLDER / name)
    assert_close(write.logits_of(model, write.ADAPTERS[name][0]), wanted["logits"])
    assert digests(model) == wanted["tensors"]


@pytest.mark.parametrize("name", [name for name in write.ADAPTERS if write.ADAPTERS[name][0] == "bert"])
def test_an_adapter_is_served_by_a_bank(name):
    bank = DeltaBank(write.make_base("bert"))
    bank.add("task", FOLDER / name)
    with bank.task("task") as model:
        assert_close(write.logits_of(model, "bert"), expected(FOLDER / name)["logits"])


@pytest.mark.parametrize("name", [name for name in write.ADAPTERS if "encoding" in write.ADAPTERS[name][2]])
def test_an_encoded_adapter_is_inspected_and_written_again_as_values(name, tmp_path):
    base, _, options = write.ADAPTERS[name]
    assert options["encoding"] in {e for group in inspect_adapter(FOLDER / name).groups for e in group.encodings}
    if base == write.OWNING:
        return  # not a model of transformers, so there is no checkpoint of it
    write.make_base(base).save_pretrained(tmp_path / "base")
    convert_adapter(FOLDER / name, tmp_path / "values", "values", base=tmp_path / "base")
    again = PeftModel.from_pretrained(write.make_base(base), str(tmp_path / "values"))
    assert digests(again) == expected(FOLDER / name)["tensors"]


def test_a_ranking_is_read_and_is_the_one_in_the_adapter_that_it_chose():
    ranking = LayerRanking.load(FOLDER / write.RANKING)
    assert json.loads(json.dumps(ranking.to_dict())) == json.loads((FOLDER / write.RANKING).read_text())
    config = write.load(FOLDER, "surgical-ranked").peft_config["default"]
    assert config.layers == ranking.top(1)
    assert LayerRanking.from_dict(config.ranking_record) == ranking


def test_a_run_is_read_and_measured_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / write.RUN, write.RUN)
    write.make_run_base(Path(write.RUN_BASE))
    save_data(Path(write.RUN_DATA), train=40, validation=12)
    job = TrainingJob.load(write.RUN)
    assert (job.model, job.data, job.method, job.top_k) == (write.RUN_BASE, write.RUN_DATA, "surgical", 1)
    wanted = expected(Path(write.RUN))
    found = evaluate(write.RUN)
    assert found.metrics == pytest.approx(wanted["metrics"])
    assert_close(found.outputs.tolist(), wanted["logits"])
    base = AutoModelForSequenceClassification.from_pretrained(write.RUN_BASE, num_labels=2)
    assert digests(PeftModel.from_pretrained(base, write.RUN)) == wanted["tensors"]
