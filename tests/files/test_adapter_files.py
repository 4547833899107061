"""The two files of an adapter: the record of the whole base, checksums, what belongs to the base, and whole saves."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from adapters import METHODS, make, outputs, rewrite, save
from peft import PeftConfig, PeftModel
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from tiny_models import VOCABULARY, build

from peft_surgical import (
    DeltaBank,
    SurgicalConfig,
    compare_adapters,
    convert_adapter,
    inspect_adapter,
    merge_checkpoint,
)
from peft_surgical.files.base import base_tensors
from peft_surgical.methods.resolve import check_patterns


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
methods = pytest.mark.parametrize("method", METHODS)
FAMILIES = ["bert", "gpt2", "llama", "mixtral", "t5", "vit"]


def ways_in(folder, method, family="bert"):
    """Every way to read an adapter onto a base, as functions of the base."""
    task = make(method, family, [1, 2])

    def swap(base):
        model = PeftModel(base, task.peft_config["default"].__class__.from_pretrained(save(task, folder / "like")))
        hotswap_adapter(model, str(folder / "adapter"), "default")

    def convert(base):
        base.save_pretrained(folder / "base")
        convert_adapter(folder / "adapter", folder / "out", "values", base=folder / "base")

    def merge(base):
        base.save_pretrained(folder / "base")
        merge_checkpoint(folder / "base", folder / "adapter", folder / "out")

    def compare(base):
        base.save_pretrained(folder / "base")
        compare_adapters(folder / "adapter", folder / "adapter", folder / "base")

    return {
        "from_pretrained": lambda base: PeftModel.from_pretrained(base, folder / "adapter"),
        "bank": lambda base: DeltaBank(base).add("task", folder / "adapter"),
        "hot swap": swap,
        "convert": convert,
        "merge": merge,
        "compare": compare,
    }


# ---- the record of the base


@methods
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_that_differs_in_any_tensor_is_refused_and_check_base_lets_it_in(family, method, tmp_path):
    path = save(make(method, family, [1, 2]), tmp_path)
    base = build(family).requires_grad_(False)
    heads = PeftConfig.from_pretrained(path).modules_to_save or []
    names = [n for n, t in base.named_parameters() if t.is_floating_point() and n.split(".")[0] not in heads]
    for name in {*names[:3], *names[3::17], names[-1]}:
        tensor = base.get_parameter(name)
        before = tensor.clone()
        tensor.data += 1e-3
        with pytest.raises(ValueError, match="trained on another base model: '.*' has other values"):
            PeftModel.from_pretrained(base, path)
        tensor.data.copy_(before)
    base.get_parameter(names[0]).data += 1e-3
    PeftModel.from_pretrained(base, path, check_base=False)


@methods
def test_a_config_that_was_read_by_pefts_own_class_is_checked_as_well(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    config = PeftConfig.from_pretrained(path)
    PeftModel.from_pretrained(build("bert"), path, config=config)
    other = build("bert")
    other.bert.embeddings.word_embeddings.weight.data += 1e-3
    with pytest.raises(ValueError, match="another base model: '.*word_embeddings.*' has other values"):
        PeftModel.from_pretrained(other, path, config=PeftConfig.from_pretrained(path))


@methods
@pytest.mark.parametrize("way", ["bank", "hot swap", "convert", "merge", "compare"])
def test_every_way_in_makes_the_check_of_the_whole_base(way, method, tmp_path):
    save(make(method, "bert", [1, 2]), tmp_path / "adapter")
    base = build("bert")
    ways_in(tmp_path, method)[way](build("bert"))
    base.bert.embeddings.word_embeddings.weight.data += 1e-3
    with pytest.raises(ValueError, match="adapter.*another base model: '.*word_embeddings.*' has other values"):
        ways_in(tmp_path, method)[way](base)


@methods
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["bert", "t5", "mixtral"])
def test_the_same_base_in_another_dtype_is_no_false_alarm_either_way(family, dtype, method, tmp_path):
    path = save(make(method, family, [1, 2]), tmp_path / "plain")
    PeftModel.from_pretrained(build(family).to(dtype), path)
    model = PeftModel.from_pretrained(build(family).to(dtype), path)
    PeftModel.from_pretrained(build(family), save(model, tmp_path / "again"))


@methods
def test_the_record_is_of_the_base_also_while_other_adapters_are_around_and_merged(method, tmp_path):
    plain = {name: tensor.clone() for name, tensor in base_tensors(build("bert")).items()}
    assert plain.keys() == build("bert").state_dict().keys()
    model = make(method, "bert", [1, 2])
    model.add_adapter(
        "other",
        SurgicalConfig(layers=[2, 3]) if method == "SURGICAL" else make(method, "bert", [3]).peft_config["default"],
    )
    assert all(torch.equal(tensor, plain[name]) for name, tensor in base_tensors(model.get_base_model()).items())
    if method == "SURGICAL":
        model.merge_adapter()
        assert all(torch.equal(tensor, plain[name]) for name, tensor in base_tensors(model.get_base_model()).items())


@methods
def test_rows_that_were_added_to_the_vocabulary_have_values_of_chance(method, tmp_path):
    base = build("bert")
    base.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    from peft import get_peft_model

    config = copy.copy(make(method, "bert", [1, 2]).peft_config["default"])
    config.resolution = config.record = None
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = build("bert")
    torch.manual_seed(7)
    again.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert not torch.equal(again.bert.embeddings.word_embeddings.weight, base.bert.embeddings.word_embeddings.weight)
    PeftModel.from_pretrained(again, tmp_path)


# ---- checksums


@methods
@pytest.mark.parametrize("encoding", ["values", "lossless", "int4"])
def test_a_bit_that_flipped_in_any_tensor_is_told_and_changes_nothing(encoding, method, tmp_path):
    path = save(make(method, "bert", [1, 3], encoding=encoding), tmp_path)
    data = (path / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    model = make(method, "bert", [1, 2], name="first")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bank = DeltaBank(build("bert"))
    for number, (name, entry) in enumerate(header.items()):
        if name == "__metadata__":
            continue
        damaged = bytearray(data)
        damaged[8 + length + sum(entry["data_offsets"]) // 2] ^= 1
        (path / WEIGHTS).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{WEIGHTS}.*is damaged: its checksum is wrong") as caught:
            model.load_adapter(path, "second")
        assert name in str(caught.value)
        assert model.state_dict().keys() == before.keys()
        assert "second" not in model.peft_config
        if name.endswith(":error"):
            continue  # which the bank has no use for
        bank.add(f"task{number}", path)
        with pytest.raises(ValueError, match="checksum is wrong"):
            bank.activate(f"task{number}")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_file_without_our_header_still_loads(tmp_path):
    model = make("SURGICAL", "bert", [1, 2])
    path = save(model, tmp_path)
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    model.peft_config["default"].save_pretrained(path)  # the record of the base goes where it finds a place
    from safetensors.torch import save_file

    save_file(tensors, path / WEIGHTS)
    assert torch.equal(outputs(PeftModel.from_pretrained(build("bert"), path), "bert"), outputs(model, "bert"))
    with pytest.raises(ValueError, match="other values"):
        PeftModel.from_pretrained(build("bert", seed=1), path)


# ---- one check for every way in


CHANGES = {
    "a layer is missing": lambda t: [t.pop(n) for n in list(t) if ".layer.1." in n],
    "the head is missing": lambda t: [t.pop(n) for n in list(t) if "classifier" in n],
    "another number of labels": lambda t: t.update(
        {n: torch.zeros(7, *v.shape[1:]) for n, v in t.items() if "classifier" in n}
    ),
    "scales of another shape": lambda t: t.update({n: torch.zeros(3) for n in t if n.endswith("_scale")}),
    "whole numbers": lambda t: t.update({n: v.to(torch.int32) for n, v in t.items() if ":" not in n}),
    "what no one knows": lambda t: t.update({"base_model.model.bert.pooler.dense.weight": torch.zeros(16, 16)}),
}


@pytest.mark.parametrize("way", ["from_pretrained", "bank", "convert", "merge", "compare", "hot swap"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_way_in_refuses_what_loading_refuses(change, way, tmp_path):
    path = save(make("SURGICAL", "bert", [1, 2], encoding="int8"), tmp_path / "adapter")
    tensors = load_file(path / WEIGHTS)
    CHANGES[change](tensors)
    rewrite(path, tensors)
    with pytest.raises(ValueError, match=str(path)):
        ways_in(tmp_path, "SURGICAL")[way](build("bert"))
    assert not (tmp_path / "out").exists()


def test_a_bomb_is_not_unpacked(tmp_path):
    path = save(make("SURGICAL", "bert", [1, 2], encoding="lossless"), tmp_path)
    tensors = load_file(path / WEIGHTS)
    for is_told in (True, False):
        bomb = zstandard.ZstdCompressor(write_content_size=is_told).compress(bytes(2**20))
        packed = torch.frombuffer(bytearray(b"float32".ljust(20) + bomb), dtype=torch.uint8)
        rewrite(path, {name: packed if name.endswith(":lossless") else t for name, t in tensors.items()})
        with pytest.raises(ValueError, match=f"{WEIGHTS}.*bytes instead of"):
            PeftModel.from_pretrained(build("bert"), path)
        bank = DeltaBank(build("bert"))
        bank.add("task", path)
        with pytest.raises(ValueError, match=f"{WEIGHTS}.*bytes instead of"):
            bank.activate("task")


# ---- what belongs to the base


@methods
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_embeddings_that_peft_saved_along_become_the_adapters_own(family, method, tmp_path):
    model = make(method, family, [1, 2])
    path = save(model, tmp_path / "plain")
    model.get_base_model().get_input_embeddings().weight.data += 1.0
    model.peft_config["default"].check_base = False
    model.save_pretrained(tmp_path / "along", save_embedding_layers=True)
    base = build(family)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    loaded = PeftModel.from_pretrained(base, tmp_path / "along", adapter_name="along").eval()
    assert torch.equal(outputs(loaded, family), outputs(model, family))
    loaded.load_adapter(path, "plain")
    plain = PeftModel.from_pretrained(build(family), path).eval()
    assert torch.equal(outputs(loaded, family, "plain"), outputs(plain, family))
    again = save(loaded, tmp_path / "again", "along")
    assert torch.equal(outputs(PeftModel.from_pretrained(build(family), again).eval(), family), outputs(model, family))
    base = loaded.unload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@methods
@pytest.mark.parametrize("name", ["bert.pooler.dense.bias", "bert.encoder.layer.0.output.dense.bias"])
def test_a_tensor_of_the_base_is_refused_by_name(name, method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    rewrite(path, {**load_file(path / WEIGHTS), f"base_model.model.{name}": torch.ones(16)})
    base = build("bert")
    with pytest.raises(ValueError, match=name):
        PeftModel.from_pretrained(base, path)
    assert all(torch.equal(tensor, build("bert").state_dict()[n]) for n, tensor in base.state_dict().items())


# ---- configs of strangers


@pytest.mark.parametrize(
    "field",
    [
        {"ranking": "/dev/zero", "top_k": 1, "layers": None},
        {"key_mapping": {"(a+)+$": "b"}},
        {"target_modules": "(.*)*x"},
        {"exclude_modules": ".*.*.*.*x"},
        {"labels": {"num_labels": 10**9}},
        {"labels": {"num_labels": 2, "id2label": {"0": "a"}}},
        {"layers": {"encoder": [[]]}},
        {"layers": [10**30]},
        {"modules_to_save": 3},
        {"base": {"vocab_size": 10**30}},
        {"peft_type": "NOTHING"},
        {"peft_type": []},
    ],
    ids=str,
)
def test_what_a_config_may_not_say_is_one_error_that_names_it(field, tmp_path):
    path = save(make("SURGICAL", "bert", [1, 2]), tmp_path)
    (path / CONFIG).write_text(json.dumps({**json.loads((path / CONFIG).read_text()), **field}))
    base = build("bert")
    with pytest.raises(ValueError, match=str(path)):
        PeftModel.from_pretrained(base, path)
    assert not any(hasattr(module, "base_layer") for module in base.modules())


@pytest.mark.parametrize("text", ["", "[]", "null", '{"a": ' + "[" * 100_000, " " * 2**24 + "{}"], ids=len)
def test_a_config_that_is_none_is_named(text, tmp_path):
    path = save(make("SURGICAL", "bert", [1, 2]), tmp_path)
    (path / CONFIG).write_text(text)
    for read in (lambda: PeftModel.from_pretrained(build("bert"), path), lambda: inspect_adapter(path)):
        with pytest.raises(ValueError, match=str(path)):
            read()


@pytest.mark.parametrize(
    "pattern", [r"(a+)+", r"(a|a)*b", r"(.*,){9}x", r".*.*.*.*", r"((a?){99}b)+", r"(x+x+)+y", "["]
)
def test_patterns_that_may_take_for_ever_are_refused(pattern):
    with pytest.raises(ValueError, match="could take very long|no regular expression"):
        check_patterns([pattern])


def test_patterns_as_they_are_written_are_not_refused():
    check_patterns([r".*\.(q|k|v|o)_proj", r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)", "query"])
    check_patterns(
        [r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$", r"^layers\.", r"(.*\.)?encoder\.layer\.[0-9]+"]
    )


# ---- saves are whole


@methods
def test_files_have_the_permissions_of_any_new_file(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    (tmp_path / "new").touch()
    assert {stat.S_IMODE((path / n).stat().st_mode) for n in (WEIGHTS, CONFIG, "new")} == {
        stat.S_IMODE((tmp_path / "new").stat().st_mode)
    }


def test_half_of_a_save_is_no_adapter(tmp_path):
    old, new = (
        save(make("SURGICAL", "bert", [1, 2]), tmp_path / "a"),
        save(make("SURGICAL", "bert", [1, 2], seed=9), tmp_path / "b"),
    )
    (old / WEIGHTS).write_bytes((new / WEIGHTS).read_bytes())
    for way in ("from_pretrained", "bank"):
        (tmp_path / "adapter").symlink_to(old) if way == "from_pretrained" else None
        with pytest.raises(ValueError, match="was not saved together"):
            ways_in(tmp_path, "SURGICAL")[way](build("bert"))
    with pytest.raises(ValueError, match="was not saved together"):
        inspect_adapter(old)


def write_for_ever(folder: Path, ready: Any) -> None:
    models = [make("SURGICAL", "bert", [1, 2], seed=seed) for seed in (1, 9)]
    ready.set()
    while True:
        for seed, model in enumerate(models):
            model.save_pretrained(folder / "saved")
            convert_adapter(folder / f"source{seed}", folder / "converted", "int8", base=folder / "base")
            merge_checkpoint(folder / "base", folder / f"source{seed}", folder / "merged")


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 12), marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_one_version_or_none(seed, tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    models = [make("SURGICAL", "bert", [1, 2], seed=seed) for seed in (1, 9)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / f"source{number}")
    wanted = [outputs(model, "bert") for model in models]
    fork: Any = multiprocessing.get_context("fork")
    for moment in [seed] if isinstance(seed, int) else seed:
        ready = fork.Event()
        writer = fork.Process(target=write_for_ever, args=(tmp_path, ready))
        writer.start()
        assert ready.wait(60)
        time.sleep(0.3 + 0.137 * moment)
        writer.kill()
        writer.join()
        for name in ("saved", "converted"):
            if (tmp_path / name / CONFIG).exists():
                try:
                    found = outputs(PeftModel.from_pretrained(build("bert"), tmp_path / name).eval(), "bert")
                except ValueError as error:
                    found = str(error)
                is_whole = isinstance(found, torch.Tensor) and any(torch.allclose(found, w, atol=0.05) for w in wanted)
                assert is_whole or "not saved together" in found
        if (tmp_path / "merged" / "config.json").exists():
            load_file(tmp_path / "merged" / "model.safetensors")
    models[0].save_pretrained(tmp_path / "saved")
    convert_adapter(tmp_path / "source0", tmp_path / "converted", "int8", base=tmp_path / "base")
    merge_checkpoint(tmp_path / "base", tmp_path / "source0", tmp_path / "merged")
    left = [name for _, folders, files in os.walk(tmp_path) for name in folders + files if name.endswith(".writing")]
    assert left == []
