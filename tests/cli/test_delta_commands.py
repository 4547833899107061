from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import build
from tiny_task import save_base, save_data
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification
from typer.testing import CliRunner

from peft_surgical import StratifiedConfig
from peft_surgical.cli import app


@pytest.fixture
def folder(tmp_path):
    """A folder with a bare base, a model tuned from it, and an adapter."""
    save_base(tmp_path / "base")
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    change(model, "layer.1.", "layer.3.")
    model.save_pretrained(tmp_path / "tuned")
    run("diff", tmp_path / "base", tmp_path / "tuned", "-o", tmp_path / "delta")
    return tmp_path


def change(model, *parts: str) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.add_(0.05 * torch.randn_like(parameter))


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_diff_shows_what_moved_and_merge_gives_it_back(folder):
    pictures = ["--plot", folder / "map.png", "--html", folder / "map.html"]
    words = run("diff", folder / "base", folder / "tuned", "-o", folder / "again", *pictures)
    assert "Saved layers [1, 3]" in words
    assert "encoder 3" in words
    assert (folder / "map.png").exists()
    assert "attention.<wbr>self.<wbr>query" in (folder / "map.html").read_text()
    words = run("merge", folder / "base", folder / "again", "-o", folder / "merged")
    assert "Saved a BertForSequenceClassification" in words
    wanted = load_file(folder / "tuned" / "model.safetensors")
    found = AutoModelForSequenceClassification.from_pretrained(folder / "merged").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (folder / "merged" / "tokenizer.json").exists()


def test_diff_of_a_part_tells_what_is_left_out(folder):
    words = run("diff", folder / "base", folder / "tuned", "-o", folder / "part", "--top-k", 1, "--encoding", "int8")
    assert "16 tensors that differ are left out" in words


def test_inspect_shows_one_adapter_or_compares_two(folder):
    words = run("inspect", folder / "delta", "--html", folder / "page.html")
    assert "bert.<wbr>encoder.<wbr>layer.<wbr>3" in (folder / "page.html").read_text()
    assert "--html" in run("inspect", folder / "delta", "--html", folder / "page.png", code=2)
    assert "peft_type: SURGICAL" in words
    assert "bert.encoder.layer.3" in words
    words = run("inspect", folder / "delta", folder / "delta", "--base", folder / "base")
    assert "equal" in words
    assert "1.000" in words


def test_convert_changes_the_encoding_both_ways(folder):
    words = run("convert", folder / "delta", "-o", folder / "small", "--encoding", "lossless")
    assert "encoding: lossless" in words
    run("convert", folder / "small", "-o", folder / "back", "--encoding", "values", "--base", folder / "base")
    files = [load_file(folder / name / "adapter_model.safetensors") for name in ("delta", "back")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_convert_distils_the_step_sizes_of_signs(folder):
    save_data(folder / "data")
    words = run(
        *("convert", folder / "delta", "-o", folder / "signs", "--encoding", "sign"),
        *("--distil", folder / "data", "--rows", 32, "--batch-size", 8),
    )
    before, after = (
        float(part.split()[0].rstrip(",")) for part in (words.split("outputs: ")[1], words.split("distilled ")[1])
    )
    assert after < 0.5 * before
    tensors = load_file(folder / "signs" / "adapter_model.safetensors")
    assert sum(name.endswith(":sign") for name in tensors) == 12
    model = PeftModel.from_pretrained(BertForSequenceClassification.from_pretrained(folder / "base"), folder / "signs")
    tuned = BertForSequenceClassification.from_pretrained(folder / "tuned")
    assert torch.equal(model.base_model.model.classifier.modules_to_save["default"].weight, tuned.classifier.weight)


def test_export_lora_lists_what_is_left_out(tmp_path):
    model = get_peft_model(build("bert"), StratifiedConfig(task_type="SEQ_CLS", n1=0, n2=1, target_modules=["query"]))
    model.save_pretrained(tmp_path / "delta")
    words = run("export-lora", tmp_path / "delta", "-o", tmp_path / "lora")
    assert "left out: classifier.weight" in words
    assert "left out: bert.encoder.layer.1.output.dense.bias" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nowhere"), "neither a folder nor a model on the hub"),
        (("inspect", "/no/where"), "There is no folder /no/where."),
        (("inspect", __file__), "is a file. Give a folder"),
        (("inspect", "{delta}", "{delta}", "{delta}"), "3 adapters were given"),
        (("convert", "{delta}", "-o", "{x}", "--encoding", "int3"), "encoding='int3' is not known"),
        (("convert", "{delta}", "-o", "{x}", "--encoding", "int8", "--distil", "y"), "--encoding sign, not for int8"),
        (("diff", "{base}", "{base}", "-o", "{x}"), "are equal"),
        (("merge", "{base}", "{delta}", "-o", "{base}"), "the base itself"),
        (("merge", "{base}", "{delta}", "-o", "{x}", "--dtype", "int8"), "allowed are float32"),
        (("export-lora", "{delta}", "-o", "{x}"), "only STRATIFIED ones"),
    ],
)
def test_mistakes_are_told_in_words(arguments, message, folder):
    places = {"base": folder / "base", "delta": folder / "delta", "x": folder / "x"}
    words = run(*(a.format(**places) for a in arguments), code=2)
    assert message in " ".join(words.split())
    assert not (folder / "x").exists()
