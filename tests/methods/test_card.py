"""The model card: code that runs where it lies, in PEFT's own card, beside whatever its user has written there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapters import METHODS, add, make_config, outputs, shake
from forks import run_forked
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tiny_models import batch, build
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import hub

from peft_surgical import LayerRanking, StratifiedConfig, SurgicalConfig
from peft_surgical.methods.card import describe_choice, put_section


methods = pytest.mark.parametrize("method", METHODS)
LAYERS = "layers 1, 2"


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family in ("bert", "t5", "vit"):
        build(family).save_pretrained(folder / family)
    return folder


def tuned(method: str, place: str, name: str = "default", layers=(1, 2), **options) -> PeftModel:
    """A model from a folder with an adapter that is off its start."""
    family = os.path.basename(place)
    base = type(build(family)).from_pretrained(place)
    return shake(get_peft_model(base, make_config(method, family, layers, **options), adapter_name=name), name).eval()


def code_of(folder: Path, number: int = 0) -> str:
    return re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)[number]


def run_code(folder: Path, code: str, family: str, expected: torch.Tensor) -> None:
    os.chdir(folder)
    scope: dict = {}
    exec(code, scope)
    assert torch.equal(outputs(scope["model"], family), expected)


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("name", ["default", "rte"])
@methods
def test_the_code_runs_where_it_lies(method, name, is_relative, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(bases)
    model = tuned(method, "bert" if is_relative else str(bases / "bert"), name)
    model.save_pretrained(tmp_path)
    done = run_forked(run_code, tmp_path, code_of(tmp_path), "bert", outputs(model, "bert"))
    assert done.code == 0, done.output


@pytest.mark.parametrize("family", ["t5", "vit"])
def test_the_code_names_the_very_class_of_the_base(family, bases, tmp_path):
    model = tuned("SURGICAL", str(bases / family))
    model.save_pretrained(tmp_path)
    done = run_forked(run_code, tmp_path, code_of(tmp_path), family, outputs(model, family))
    assert done.code == 0, done.output


def test_each_adapter_that_is_saved_has_a_section(bases, tmp_path):
    model = tuned("SURGICAL", str(bases / "bert"))
    for name, layer in (("rte", 0), ("cola", 3)):
        add(model, "SURGICAL", "bert", [layer], name=name)
    model.save_pretrained(tmp_path, selected_adapters=["default", "rte"])
    text = (tmp_path / "README.md").read_text()
    assert re.findall("^## Load .*", text, re.M) == ["## Load it", "## Load `rte`"]
    assert LAYERS in text
    assert "layer 0;" in text
    assert "cola" not in text
    model.set_adapter("rte")
    done = run_forked(run_code, tmp_path, code_of(tmp_path, 1), "bert", outputs(model, "bert"))
    assert done.code == 0, done.output
    model.save_pretrained(tmp_path, selected_adapters=["cola"])  # the others are still there
    assert len(re.findall("^## Load ", (tmp_path / "README.md").read_text(), re.M)) == 3


@methods
def test_what_a_user_writes_stays_and_only_the_section_changes(method, bases, tmp_path):
    model = tuned(method, str(bases / "bert"))
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "peft-surgical" in card.data.tags
    assert card.data.library_name == "peft"
    assert card.text.index("# Model Card") < card.text.index("## Load it") < card.text.index("## Model Details")
    assert f"KeyError: '{method}'" in card.text
    card.data["license"] = "mit"
    card.text = card.text.replace("## Load it", "## Mine now, in vain") + "\n## Results\n\n55 \\1 \\g<0>\n"
    card.save(tmp_path / "README.md")
    other = tuned(method, str(bases / "bert"), layers=(0, 3))
    other.save_pretrained(tmp_path)
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert "\n## Results\n\n55 \\1 \\g<0>" in again.text
    assert again.text.count("## Load it") == 1
    assert "Mine now" not in again.text
    assert describe_choice(other.peft_config["default"]) in again.text
    before = (tmp_path / "README.md").read_bytes()
    other.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    ("card", "first"),
    [
        ("# Mine\n", "# Mine\n"),
        ("---\nlicense: mit\n---\n```\n## no heading\n```\n\n## Mine\n", "```\n## no heading\n```\n"),
        ("", ""),
    ],
)
def test_a_card_of_any_form_gets_the_section_once(card, first, bases, tmp_path):
    (tmp_path / "README.md").write_text(card)
    model = tuned("SURGICAL", str(bases / "bert"))
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    text = ModelCard.load(tmp_path / "README.md").text
    assert text.count("## Load it") == 1
    assert text.strip().startswith(first.strip())
    assert text.index("## Load it") < (text.index("## Mine") if "## Mine" in text else len(text))


@pytest.mark.parametrize("name", ["default", "rte"])
def test_the_trainer_keeps_the_section(name, bases, tmp_path):
    model = tuned("SURGICAL", str(bases / "bert"), name)
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 1, "save_steps": 1}
    rows = [{key: value[0] for key, value in batch("bert", n=1).items()}] * 2
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags=["mine"])  # as push_to_hub does, from nothing
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        card = ModelCard.load(folder / "README.md")
        assert "peft-surgical" in card.data.tags
        assert card.text.count("\n## Load ") == 1
    assert "generated automatically" in (tmp_path / "README.md").read_text()
    done = run_forked(run_code, tmp_path, code_of(tmp_path), "bert", outputs(model.eval(), "bert"))
    assert done.code == 0, done.output


def test_a_section_may_hold_what_means_something_in_a_pattern():
    text, mark = "# Mine\n\n<!-- a -->\nold\n<!-- end peft-surgical -->\n", "<!-- a -->"
    section = f"{mark}\nC:\\1\n<!-- end peft-surgical -->"
    assert put_section(text, mark, section) == f"# Mine\n\n{section}\n"


class Pushed(Exception):
    """Instead of an upload: the text of the card."""


@pytest.mark.parametrize("name", ["default", "rte"])
def test_what_is_pushed_has_the_section_and_the_text_of_the_card_on_the_hub(name, bases, monkeypatch):
    def push(path_or_fileobj, path_in_repo):
        if path_in_repo == "README.md":
            raise Pushed(Path(path_or_fileobj).read_text())

    repository = SimpleNamespace(repo_id="a/b", create_repo=lambda *args, **kwargs: repository)
    monkeypatch.setattr(hub, "hf_api", lambda: repository, raising=False)
    monkeypatch.setattr(PeftModel, "_create_repo", lambda *args, **kwargs: "a/b", raising=False)  # transformers 4
    there = ModelCard("---\nlicense: mit\n---\n# Mine\n\n## Results\n")
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: there)
    monkeypatch.setattr(hub, "CommitOperationAdd", push)
    with pytest.raises(Pushed) as pushed:
        tuned("SURGICAL", str(bases / "bert"), name).push_to_hub("a/b")
    card = ModelCard(str(pushed.value))
    assert re.findall("^#+ (?:Load|Mine|Results)", card.text, re.M) == ["# Mine", "## Load", "## Results"]
    assert (card.data.license, card.data.library_name) == ("mit", "peft")
    assert "peft-surgical" in card.data.tags


def test_other_processes_write_nothing(bases, tmp_path):
    tuned("SURGICAL", str(bases / "bert")).save_pretrained(tmp_path, is_main_process=False)
    assert not any(tmp_path.iterdir())


def test_a_config_by_itself_touches_no_card(bases, tmp_path):
    model = tuned("SURGICAL", str(bases / "bert"))
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for folder in "ab":
        (tmp_path / folder / "README.md").write_text("mine\n")
    for config in (SurgicalConfig(layers=[0]), model.peft_config["default"]):
        config.save_pretrained(str(tmp_path / "b"))
    for folder in "ab":
        assert (tmp_path / folder / "README.md").read_text() == "mine\n"


def test_lora_has_peft_s_card_alone(bases, tmp_path):
    base = type(build("bert")).from_pretrained(bases / "bert")
    get_peft_model(base, LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    assert "surgical" not in (tmp_path / "README.md").read_text()


@methods
def test_the_config_names_the_package_whatever_a_file_said(method, bases, tmp_path):
    tuned(method, str(bases / "bert")).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    written = json.loads(file.read_text())
    assert written["library"] == "peft_surgical>=0.2"
    for said in ({"library": ["of a stranger"]}, {}):
        file.write_text(json.dumps({**{key: written[key] for key in written if key != "library"}, **said}))
        assert PeftConfig.from_pretrained(tmp_path).library == "peft_surgical>=0.2"


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("base", [build("bert"), OwnModel()], ids=lambda base: type(base).__name__)
def test_a_base_that_the_code_cannot_load_is_left_to_the_reader(base, tmp_path):
    get_peft_model(base, SurgicalConfig(layers=[0])).save_pretrained(tmp_path)
    code = code_of(tmp_path)
    assert f"base = ...  # load the {type(base).__name__} that this was trained on" in code
    compile(code, "card", "exec")


def test_the_choice_in_words():
    measured = {"score": "rgn", "num_samples": 7}
    record = LayerRanking("encoder", [0.1, 0.9, 0.5], record=measured).to_dict()
    lora = {"layers": [2], "tune": "lora", "target_modules": ["v", "q"]}
    biases = {"layers": "all", "tune": "bitfit"}
    frozen = {"layers": [0, 1], "tune": "frozen"}
    for config, words in (
        (SurgicalConfig(layers={"decoder": [0, 2]}), "all weights in layers 0, 2 of the decoder. The rest"),
        (SurgicalConfig(layers=[1], ranking_record=record), ": rgn of the 3 layers of encoder, 7 samples."),
        (SurgicalConfig(layers=[1], ranking_record={"scores": 3}), "by a ranking: see adapter_config.json."),
        (SurgicalConfig(target_modules=["b", "a"]), "all weights of `a`, `b`. The rest"),
        (SurgicalConfig(layers="last:2"), "in layers `last:2`. The rest is the base model's. The layers were named"),
        (StratifiedConfig(strata=[frozen, lora], r=4), "Trained: LoRA (r=4) of `q`, `v` in layer 2. The rest"),
        (StratifiedConfig(strata={"decoder": [biases]}), "the bias terms in layers `all` of the decoder. The rest"),
        (StratifiedConfig(target_modules=["q"], r=4, modules_to_save=["head"]), "LoRA (r=4) of `q`; all of `head`."),
        (StratifiedConfig(strata=[{**frozen, "layers": "all"}]), "Trained: nothing."),
    ):
        assert words in describe_choice(config)
