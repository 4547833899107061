"""Every code sample of the documentation runs, and every command line shown exists.

The python blocks of a page run from top to bottom in one namespace, as a reader would type them. What a reader is
assumed to have (`model`, `base`, `tokenizer`, `train_dataset`, `eval_dataset`, `collator`, `args`, a task `cola`)
is made here, small and random. A page may hold lines that only the test sees, in a comment: `<!-- test` ... `-->`.
Checkpoint names resolve to tiny local ones, as the working directory has folders of these names.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny_models
import torch
import transformers
import typer
from peft import get_peft_model
from tiny_chat import save_language_model
from tokenizers import Tokenizer, models, pre_tokenizers

import peft_surgical
from peft_surgical import SurgicalConfig


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
CHECKPOINT = "google-bert/bert-base-cased"
RECIPES = {  # page -> the packages that it needs beside those of the tests
    "chat": ["trl"],
    "dpo": ["trl"],
    "reward": ["trl"],
    "embeddings": ["sentence_transformers"],
    "quantised": ["bitsandbytes"],
}
WORDS = "a the film was good bad dull fine not very plot cast and but i liked hated it".split()

_CODE = re.compile(r"^( *)(?:```python[^\n]*\n(.*?)^ *```|<!-- test\n(.*?)^ *-->)", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(
    r"^ *```(?:bash|shell|console)\n(.*?)^ *```|^    ((?:pip|peft-surgical|accelerate) [^\n]*)", re.M | re.S
)
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_of(page: Path) -> str:
    """The code of a page, each line at its own line number, so that errors point into the page."""
    text = page.read_text()
    lines: list[str] = []
    for match in _CODE.finditer(text):
        start = text.count("\n", 0, match.start()) + 1
        lines += [""] * (start - len(lines))
        lines += [line.removeprefix(match[1]) for line in (match[2] or match[3] or "").splitlines()]
    return "\n".join(lines)


def commands_of(page: Path) -> list[list[str]]:
    """The calls of `peft-surgical` that a page shows, as arguments."""
    text = "\n".join(block or line for block, line in _SHELL.findall(page.read_text()))
    text = text.replace("\\\n", " ")
    calls = []
    for line in re.split(r"\n|&&", text):
        words = shlex.split(line, comments=True)
        if "peft-surgical" in words:
            calls.append(words[words.index("peft-surgical") + 1 :])
    return calls


def save_checkpoint(folder: Path, layers: int) -> None:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    tiny_models.build("bert", bare=True, num_hidden_layers=layers).save_pretrained(folder)


def save_models_of_recipes(folder: Path) -> None:
    """The checkpoints that the recipes name: a decoder, an encoder of sentences, one of images, one of speech."""
    save_language_model(folder / "google/gemma-3-270m", "gemma3", hidden_size=64, head_dim=32, intermediate_size=64)
    save_checkpoint(folder / "sentence-transformers/all-MiniLM-L6-v2", layers=6)
    vit = tiny_models.build("vit", bare=True, num_hidden_layers=12)
    vit.save_pretrained(folder / "google/vit-base-patch16-224-in21k")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": [8, 8], "conv_stride": [4, 20], "conv_kernel": [8, 40], "num_conv_pos_embeddings": 8}
    config = transformers.Wav2Vec2Config(
        **small, **convolutions, num_conv_pos_embedding_groups=2, classifier_proj_size=8, mask_time_prob=0.0
    )
    transformers.Wav2Vec2Model(config).save_pretrained(folder / "facebook/wav2vec2-base")


def save_its_runs() -> None:
    """What the commands of the quick start have trained."""
    for run, layers in (("reviews", "spread:33%"), ("mails", "last:1")):
        name = "sentence-transformers/all-MiniLM-L6-v2"
        base = transformers.AutoModelForSequenceClassification.from_pretrained(name)
        get_peft_model(base, SurgicalConfig(task_type="SEQ_CLS", layers=layers)).save_pretrained(f"runs/{run}")


def make_dataset(tokenizer: Any, rows: int, seed: int) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (rows,), generator=generator).tolist()
    texts = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())
        for length in lengths
    ]
    labels = torch.randint(0, 2, (rows,), generator=generator).tolist()
    encoded = [dict(tokenizer(text)) for text in texts]
    return datasets.Dataset.from_list([{**row, "labels": label} for row, label in zip(encoded, labels, strict=True)])


@pytest.fixture
def namespace(tmp_path, monkeypatch) -> dict[str, Any]:
    """What a reader of the documentation has before its first line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    save_checkpoint(tmp_path / CHECKPOINT, layers=12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)

    def load() -> torch.nn.Module:
        torch.manual_seed(0)
        return transformers.AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=2).eval()

    tuned = get_peft_model(load(), SurgicalConfig(task_type="SEQ_CLS", layers="last:1"))
    tuned.save_pretrained("cola")
    args = transformers.TrainingArguments(
        "runs", max_steps=2, per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True
    )
    return {
        "model": load(),
        "base": load(),
        "tokenizer": tokenizer,
        "train_dataset": make_dataset(tokenizer, 120, seed=0),
        "eval_dataset": make_dataset(tokenizer, 16, seed=1),
        "collator": transformers.DataCollatorWithPadding(tokenizer),
        "args": args,
    }


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page).strip()], ids=page_id)
def test_code_samples_run(page, namespace, tmp_path):
    if page.parent.name == "recipes" or page.stem in ("index", "quick-start"):
        for package in RECIPES.get(page.stem, []):
            pytest.importorskip(package)
        save_models_of_recipes(tmp_path)
    if page.stem == "quick-start":
        save_its_runs()
    exec(compile(code_of(page), str(page), "exec"), namespace)


def test_the_readme_has_samples_and_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "get_peft_model" in code_of(ROOT / "README.md")
    for command in ('pip install ".[demo]" && peft-surgical demo', 'pip install ".[test]" && pytest'):
        assert len(re.findall(rf"^ *{re.escape(command)}$", readme, re.MULTILINE)) == 1


def test_nobody_is_sent_to_an_index_which_has_no_such_package():
    for file in [*PAGES, *(ROOT / "peft_surgical").glob("**/*.py"), *(ROOT / "examples").glob("**/*")]:
        if file.suffix in (".md", ".py", ".ipynb"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"pip install (-U )?[\\\"']*(peft-surgical|\{TAG)", text), file


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_command_lines_name_commands_and_options_that_exist(page):
    from peft_surgical.cli import app

    commands = typer.main.get_command(app).commands
    for name, *arguments in commands_of(page):
        if name == "--help":
            continue
        assert name in commands, f"{page_id(page)} shows 'peft-surgical {name}'"
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        shown = {word.partition("=")[0] for word in arguments if word.startswith("-")}
        assert shown <= known | {"--help"}, f"{page_id(page)} shows 'peft-surgical {name}' with other options"


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "examples").glob("**/*.ipynb")], ids=page_id)
def test_links_between_pages_lead_somewhere(page):
    for link in _LINK.findall(page.read_text()):
        target = link.partition("#")[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), f"{page_id(page)} links to {link}"


def test_files_that_pages_name_are_there():
    folders = [ROOT / folder for folder in (".", "docs", "benchmarks", "peft_surgical", "tests")]
    for page in (*PAGES, ROOT / "benchmarks/README.md", ROOT / "tests/README.md"):
        for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|yaml|ipynb))`", page.read_text()):
            assert any((folder / name).exists() for folder in folders), f"{page_id(page)} names {name}"


def test_every_id_of_a_test_is_explained():
    files = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    used = set(re.findall(r"def test_([A-Z]\d+)_", files))
    explained = re.findall(r"^\| ([A-Z]\d+) \|", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    assert sorted(used) == sorted(explained)


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: peft_surgical\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(peft_surgical.__all__)
