"""Fleets of full fine-tunes as adapters: each answers as its checkpoint does, and one that fails leaves the others."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import FAMILIES, batch, build
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification
from typer.testing import CliRunner

from peft_surgical import DeltaBank, inspect_adapter
from peft_surgical.cli import app
from peft_surgical.convert import pack
from peft_surgical.convert.pack import pack_checkpoints


LABELS = {"two": 2, "three": 3, "one": 1}


def save_fleet(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A bare base and full fine-tunes of it, with heads of different sizes; few rows of the embeddings changed."""
    build("bert", bare=True).to(dtype).save_pretrained(folder / "base")
    for seed, (name, labels) in enumerate(LABELS.items()):
        torch.manual_seed(seed)
        model = BertForSequenceClassification.from_pretrained(folder / "base", num_labels=labels, dtype=dtype)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                rows = slice(seed, seed + 3) if "embeddings.weight" in path else slice(None)
                parameter[rows] += (0.02 * torch.randn_like(parameter[rows])).to(dtype)
        model.save_pretrained(folder / "tunes" / name)
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Path:
    return save_fleet(tmp_path_factory.mktemp("fleet"))


def alone(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a fine-tune answers that transformers loads."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "tunes" / name, dtype=dtype).eval()
    model = copy.deepcopy(model)  # mapped weights may lie at any address, and kernels round otherwise at some
    with torch.no_grad():
        return model(**batch("bert", labels=False)).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bank_serves_a_packed_fleet_bit_for_bit(dtype, tmp_path, fleet):
    folder = fleet if dtype == torch.float32 else save_fleet(tmp_path, dtype)
    found = pack_checkpoints(folder / "base", [folder / "tunes"], tmp_path / "packed")
    assert [packed.name for packed in found] == sorted(LABELS)
    assert not found.failed
    bank = DeltaBank(AutoModelForSequenceClassification.from_pretrained(folder / "base", dtype=dtype))
    for packed in found:
        file = folder / "tunes" / packed.name / "model.safetensors"
        assert 0 < file.stat().st_size - packed.nbytes_tuned < 20_000  # the header
        assert packed.nbytes == inspect_adapter(tmp_path / "packed" / packed.name).nbytes < packed.nbytes_tuned
        assert (packed.layers, packed.difference) == (4, 0.0)
        bank.add(packed.name, tmp_path / "packed" / packed.name)
    for name in [*LABELS, *LABELS]:
        with bank.task(name) as model, torch.no_grad():
            assert torch.equal(model(**batch("bert", labels=False)).logits, alone(folder, name, dtype))
    text = str(found)
    assert all(word in text for word in (*LABELS, "layers changed", "bytes before", "equal"))


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit"])
def test_inputs_are_made_up_for_decoders_pairs_and_images(family, tmp_path):
    build(family).save_pretrained(tmp_path / "base")
    cls = getattr(transformers, FAMILIES[family][3])
    model = cls.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "1" in n and p.ndim > 1).mul_(1.5)
    model.save_pretrained(tmp_path / "tuned")
    assert pack_checkpoints(tmp_path / "base", [tmp_path / "tuned"], tmp_path / "out")[0].difference == 0.0


def test_an_error_within_the_bound_is_told(fleet, tmp_path):
    exact = pack_checkpoints(fleet / "base", [fleet / "tunes" / "two"], tmp_path / "exact")[0]
    x = batch("bert", labels=False)
    found = pack_checkpoints(fleet / "base", [fleet / "tunes" / "two"], tmp_path / "off", max_error=0.2, inputs=x)[0]
    assert found.nbytes < exact.nbytes
    bank = DeltaBank(AutoModelForSequenceClassification.from_pretrained(fleet / "base"))
    bank.add("two", tmp_path / "off" / "two")
    with bank.task("two") as model, torch.no_grad():
        off = (model(**x).logits - alone(fleet, "two")).abs().max()
    assert found.difference == pytest.approx(float(off), rel=1e-3)
    assert 0 < found.difference < 0.1


def broken_fleet(fleet: Path, folder: Path) -> None:
    shutil.copytree(fleet / "tunes", folder / "tunes")
    build("gpt2").save_pretrained(folder / "tunes" / "another-kind")
    shutil.copytree(folder / "tunes" / "two", folder / "tunes" / "cut")
    file = folder / "tunes" / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def test_what_cannot_be_packed_names_itself_and_leaves_the_others(fleet, tmp_path):
    broken_fleet(fleet, tmp_path)
    found = pack_checkpoints(fleet / "base", [tmp_path / "tunes"], tmp_path / "packed")
    assert sorted(packed.name for packed in found.failed) == ["another-kind", "cut"]
    reasons = {packed.name: packed.error for packed in found.failed}
    assert "one architecture" in reasons["another-kind"]
    assert "model.safetensors cannot be read" in reasons["cut"]
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == sorted(LABELS)
    assert str(found).count("not packed") == 2


def test_an_adapter_that_answers_otherwise_is_not_kept(fleet, tmp_path, monkeypatch):
    pack_checkpoints(fleet / "base", [fleet / "tunes" / "two"], tmp_path / "packed")
    before = {path.name: path.read_bytes() for path in (tmp_path / "packed" / "two").iterdir()}

    other = BertForSequenceClassification.from_pretrained(fleet / "tunes" / "two")
    with torch.no_grad():
        other.bert.encoder.layer[1].output.dense.weight[0, 0] += 0.5
    other.save_pretrained(tmp_path / "other")
    right = pack.diff_checkpoints
    monkeypatch.setattr(pack, "diff_checkpoints", lambda b, t, o, **k: right(b, tmp_path / "other", o, **k))
    found = pack_checkpoints(fleet / "base", [fleet / "tunes" / "two"], tmp_path / "packed")
    assert "with its adapter, the base answers otherwise" in found.failed[0].error
    assert {path.name: path.read_bytes() for path in (tmp_path / "packed" / "two").iterdir()} == before
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["two"]


def test_what_would_be_mixed_up_or_written_over_is_refused_before_anything_is_written(fleet, tmp_path):
    with pytest.raises(ValueError, match="have one name"):
        pack_checkpoints(fleet / "base", [fleet / "tunes", fleet / "tunes" / "two"], tmp_path / "x")
    with pytest.raises(ValueError, match="holds something else than an adapter"):
        pack_checkpoints(fleet / "base", [fleet / "tunes"], fleet / "tunes")
    with pytest.raises(ValueError, match="encoding='int5' is not known"):
        pack_checkpoints(fleet / "base", [fleet / "tunes"], tmp_path / "x", encoding="int5")
    assert not (tmp_path / "x").exists()


def test_the_command_shows_what_was_saved_and_what_was_not(fleet, tmp_path):
    broken_fleet(fleet, tmp_path)
    arguments = ["pack", fleet / "base", tmp_path / "tunes", "-o", tmp_path / "out", "--max-error", "0.1"]
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "2 of 5 were not packed" in " ".join(result.output.split())
    assert all(name in result.output for name in (*LABELS, "another-kind", "cut", "off by"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(LABELS)
