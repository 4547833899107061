from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from adapters import shake
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import batch, build
from transformers import BertForSequenceClassification

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.bank import DeltaBank
from peft_surgical.convert.convert import convert_adapter, export_lora
from peft_surgical.convert.diff import diff_checkpoints
from peft_surgical.convert.inspect import compare_adapters, inspect_adapter
from peft_surgical.convert.merge import merge_checkpoint
from peft_surgical.files.encodings import ENCODINGS


def save_adapter(folder, name: str = "delta", layers=(1, 3), encoding: str = "values", seed: int = 0, **options):
    """An adapter on the base in `folder / "base"`, with random steps."""
    if not (folder / "base").exists():
        build("bert").save_pretrained(folder / "base")
    base = BertForSequenceClassification.from_pretrained(folder / "base")
    config = SurgicalConfig(task_type="SEQ_CLS", layers=list(layers), encoding=encoding, **options)
    model = get_peft_model(base, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    return model


# ---- inspect


@pytest.mark.parametrize("encoding", ["values", *ENCODINGS])
def test_inspect_tells_sizes_encodings_and_the_error_of_each_layer(encoding, tmp_path):
    model = save_adapter(tmp_path, encoding=encoding)
    found = inspect_adapter(tmp_path / "delta")
    tensors = load_file(tmp_path / "delta" / "adapter_model.safetensors")
    assert found.nbytes == sum(t.nbytes for t in tensors.values())
    assert [group.name for group in found.groups] == ["bert.encoder.layer.1", "bert.encoder.layer.3", "classifier"]
    assert [group.tensors for group in found.groups] == [16, 16, 2]
    copies = model.base_model.model.bert.encoder.layer
    assert found.groups[0].values_nbytes == sum(p.nbytes for n, p in copies[1].named_parameters() if "surgical" in n)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path / "delta")
    base, after, exact = (
        torch.cat(
            [p.detach().flatten() for n, p in m.bert.encoder.layer[3].named_parameters() if part in n and p.ndim > 1]
        )
        for m, part in (
            (build("bert"), ""),
            (loaded.base_model.model, "surgical"),
            (model.base_model.model, "surgical"),
        )
    )
    expected = float((after - exact).norm() / (exact - base).norm())
    assert found.groups[1].error == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert (found.groups[1].error == 0) == (encoding in ("values", "lossless", "rows", "columns"))
    assert encoding in found.groups[0].encodings
    assert found.groups[2].encodings == ("values",)
    text = str(found)
    assert f"encoding: {encoding}" in text
    assert "layers: [1, 3]" in text
    assert "bert.encoder.layer.3" in text


def test_inspect_reads_other_methods_and_names_what_is_damaged(tmp_path):
    model = get_peft_model(build("bert"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    model.save_pretrained(tmp_path)
    assert [group.name for group in inspect_adapter(tmp_path).groups][-1] == "classifier"
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read"):
        inspect_adapter(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match="has no adapter_model.safetensors"):
        inspect_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read \(JSONDecodeError"):
        inspect_adapter(tmp_path)


def test_what_a_config_says_wrong_is_said_wherever_an_adapter_is_read(tmp_path):
    save_adapter(tmp_path)
    config = json.loads((tmp_path / "delta" / "adapter_config.json").read_text())
    (tmp_path / "delta" / "adapter_config.json").write_text(json.dumps({**config, "encoding": "int99"}))
    message = "adapter_config.json in .*delta cannot be used: encoding='int99' is not known"
    with pytest.raises(ValueError, match=message):
        inspect_adapter(tmp_path / "delta")
    with pytest.raises(ValueError, match=message):
        convert_adapter(tmp_path / "delta", tmp_path / "x", "int8")
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_comparison_tells_what_two_adapters_share(tmp_path):
    save_adapter(tmp_path, "a", layers=[1, 3])
    save_adapter(tmp_path, "b", layers=[1, 2], seed=1)
    save_adapter(tmp_path, "c", layers=[1, 3], encoding="int8")
    found = {row[0]: row[1:] for row in compare_adapters(tmp_path / "a", tmp_path / "b").rows}
    assert found["bert.encoder.layer.2"][0] == 0
    assert found["bert.encoder.layer.3"][1] == 0
    assert found["bert.encoder.layer.1"][0] == found["bert.encoder.layer.1"][1] > 0
    assert not found["bert.encoder.layer.1"][2]
    same = compare_adapters(tmp_path / "a", tmp_path / "a", tmp_path / "base")
    assert all(equal for _, _, _, equal, _ in same.rows)
    assert same.rows[0][4] == pytest.approx(1)
    near = compare_adapters(tmp_path / "a", tmp_path / "c", tmp_path / "base")
    assert 0.999 < near.rows[0][4] < 1
    assert not near.rows[0][3]
    unlike = str(compare_adapters(tmp_path / "a", tmp_path / "b"))
    assert "only one" in unlike
    assert "nan" not in unlike  # no base, so no cosine
    assert str(compare_adapters(tmp_path / "a", tmp_path / "c")) == str(near)  # the config names the base
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="There is no folder .*base"):
        compare_adapters(tmp_path / "a", tmp_path / "c")


# ---- convert


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_converting_gives_the_file_that_training_with_the_encoding_would_have_given(encoding, tmp_path):
    model = save_adapter(tmp_path)
    convert_adapter(tmp_path / "delta", tmp_path / "converted", encoding, base=tmp_path / "base")
    model.peft_config["default"].encoding = encoding
    model.save_pretrained(tmp_path / "direct")
    files = [load_file(tmp_path / f / "adapter_model.safetensors") for f in ("converted", "direct")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    configs = [json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("converted", "direct")]
    assert configs[0] == configs[1]


def test_values_come_back_from_lossless_bit_for_bit(tmp_path):
    save_adapter(tmp_path)
    # the base is the one that the config names
    config = json.loads((tmp_path / "delta" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    convert_adapter(tmp_path / "delta", tmp_path / "small", "lossless")
    convert_adapter(tmp_path / "small", tmp_path / "back", "values")
    files = [load_file(tmp_path / f / "adapter_model.safetensors") for f in ("delta", "back")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_what_cannot_be_converted_says_why(tmp_path):
    save_adapter(tmp_path)
    with pytest.raises(ValueError, match="encoding='int3' is not known"):
        convert_adapter(tmp_path / "delta", tmp_path / "x", "int3")
    with pytest.raises(ValueError, match="is the adapter itself"):
        convert_adapter(tmp_path / "delta", tmp_path / "delta", "int8")
    build("bert", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="trained on another base"):
        convert_adapter(tmp_path / "delta", tmp_path / "x", "int8", base=tmp_path / "other")
    model = get_peft_model(build("bert"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    model.save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match="holds no tuned copies"):
        convert_adapter(tmp_path / "lora", tmp_path / "x", "int8", base=tmp_path / "base")
    assert not (tmp_path / "x").exists()


# ---- export


def stratified(folder):
    config = StratifiedConfig(
        task_type="SEQ_CLS", n1=0, n2=1, target_modules=["query", "value"], r=4, lora_alpha=8, init_lora_weights=False
    )
    model = get_peft_model(build("bert"), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def test_the_lora_part_of_a_stratified_adapter_loads_with_stock_peft(tmp_path):
    model = stratified(tmp_path / "delta")
    left_out = export_lora(tmp_path / "delta", tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert "strata" not in config
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path / "lora").eval()
    assert type(loaded.peft_config["default"]) is LoraConfig

    # what is left of the stratified model when all that is listed is put back to the base's values
    base = build("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_tuned" in name:
                path, _, key = name.removeprefix("base_model.model.").rpartition(".lora_tuned.default.")
                parameter.copy_(base.get_submodule(path.replace(".base_layer", "")).get_parameter(key))
    model.base_model.model.classifier.modules_to_save["default"].load_state_dict(base.classifier.state_dict())
    x = batch("bert", labels=False)
    with torch.no_grad():
        assert torch.equal(loaded(**x).logits, model(**x).logits)
        assert not torch.equal(loaded(**x).logits, base(**x).logits)
    assert {"classifier.weight", "classifier.bias"} <= set(left_out)
    assert all(name in base.state_dict() for name in left_out)
    kept = len(load_file(tmp_path / "lora" / "adapter_model.safetensors"))
    assert kept + len(left_out) == len(load_file(tmp_path / "delta" / "adapter_model.safetensors"))


def test_the_head_goes_along_if_asked_for(tmp_path):
    model = stratified(tmp_path / "delta")
    left_out = export_lora(tmp_path / "delta", tmp_path / "lora", head=True)
    assert not any("classifier" in name for name in left_out)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path / "lora")
    heads = [m.base_model.model.classifier.modules_to_save["default"].weight for m in (loaded, model)]
    assert torch.equal(*heads)


@pytest.mark.parametrize("head", [False, True])
def test_trained_tokens_go_along_with_the_head_and_else_are_listed(head, tmp_path):
    config = StratifiedConfig(
        task_type="SEQ_CLS", n1=0, n2=1, target_modules=["query"], trainable_token_indices={"word_embeddings": [3, 4]}
    )
    model = shake(get_peft_model(build("bert"), config), "default", 1)
    model.save_pretrained(tmp_path / "delta")
    left_out = export_lora(tmp_path / "delta", tmp_path / "lora", head=head)
    assert any("trainable_tokens_delta" in name for name in left_out) == (not head)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path / "lora").eval()
    wanted, found = (m.get_input_embeddings()(torch.tensor([3, 4])) for m in (model, loaded))
    assert torch.equal(wanted, found) == head


def test_only_stratified_adapters_have_a_lora_part_to_export(tmp_path):
    save_adapter(tmp_path)
    with pytest.raises(ValueError, match="is a SURGICAL adapter; only STRATIFIED ones.*merge_checkpoint"):
        export_lora(tmp_path / "delta", tmp_path / "lora")


def test_a_diff_can_be_inspected(tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    model = build("bert")
    with torch.no_grad():
        model.bert.pooler.dense.weight.add_(0.1)
        model.bert.encoder.layer[2].output.dense.weight.add_(0.1)
    model.save_pretrained(tmp_path / "tuned")
    diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    names = [group.name for group in inspect_adapter(tmp_path / "delta").groups]
    assert sorted(names) == ["bert.encoder.layer.2", "bert.pooler.dense", "classifier"]


# ---- modules that were renamed since


def rename_back(folder) -> None:
    """Make a saved adapter one from before a module of the base was renamed, whose config tells of it."""
    path = folder / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        before = json.loads(file.metadata()["peft_surgical"])
    save_file({name.replace(".layer.", ".block."): t for name, t in load_file(path).items()}, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    base = before["base"]
    base["tensors"] = {name.replace(".layer.", ".block."): mark for name, mark in base["tensors"].items()}
    config["base"], config["saved"] = base, None
    config["key_mapping"] = {r"encoder\.block\.": "encoder.layer."}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["values", "int8", "stratified"])
def test_renamed_modules_are_mapped_wherever_an_adapter_is_read(method, tmp_path):
    if method == "stratified":
        build("bert").save_pretrained(tmp_path / "base")
        stratified(tmp_path / "delta")
    else:
        save_adapter(tmp_path, encoding=method)
    x = batch("bert", labels=False)
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(base, tmp_path / "delta").eval()(**x).logits
    groups = inspect_adapter(tmp_path / "delta").groups
    rename_back(tmp_path / "delta")
    assert inspect_adapter(tmp_path / "delta").groups == groups

    merge_checkpoint(tmp_path / "base", tmp_path / "delta", tmp_path / "merged")
    merged = BertForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    bank = DeltaBank(BertForSequenceClassification.from_pretrained(tmp_path / "base"))
    bank.add("old", tmp_path / "delta")
    convert_adapter(tmp_path / "delta", tmp_path / "present", "values", base=tmp_path / "base")
    bank.add("present", tmp_path / "present")
    names = load_file(tmp_path / "present" / "adapter_model.safetensors")
    assert not any(".block." in name for name in names)
    with torch.no_grad():
        torch.testing.assert_close(merged(**x).logits, wanted, atol=1e-6, rtol=1e-5)
        for task in ("old", "present"):
            with bank.task(task) as model:
                torch.testing.assert_close(model(**x).logits, wanted, atol=1e-6, rtol=1e-5)


# ---- pages


class Cells(HTMLParser):
    """The rows of a page's tables as text, and what its tags ask for from elsewhere."""

    def __init__(self, file):
        super().__init__()
        self.rows, self.asked, self.inside = [], [], None
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.asked += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.inside = tag
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.inside = None if tag == self.inside else self.inside

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def words(text: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in text.splitlines()]


def test_a_page_has_the_cells_of_the_text_and_asks_for_nothing(tmp_path):
    save_adapter(tmp_path, "a", encoding="int8")
    save_adapter(tmp_path, "b", layers=[1, 2], seed=1)
    for found in (inspect_adapter(tmp_path / "a"), compare_adapters(tmp_path / "a", tmp_path / "b")):
        found.save_html(tmp_path / "page.html")
        page = Cells(tmp_path / "page.html")
        assert not page.asked
        assert len(page.rows) > 3
        assert all(row in words(str(found)) for row in page.rows)


def test_a_page_of_a_diff_has_layers_and_their_parts(tmp_path):
    model = save_adapter(tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path / "tuned")
    found = diff_checkpoints(tmp_path / "base", tmp_path / "tuned", tmp_path / "again")
    found.save_html(tmp_path / "page.html", "a <b> & c")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    rows = Cells(tmp_path / "page.html").rows
    assert all(row in rows for row in words(str(found.movement)) if len(row) == 4)
    parts = {tuple(row[:2]): float(row[2]) for row in rows if len(row) == 3 and row[0] != "layer"}
    for (stack, layer, part), moved in found.movement.by_part().items():
        assert parts[f"{stack} {layer}", part] == pytest.approx(moved, rel=1e-3)
