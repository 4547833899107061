"""Strata whose linear modules get some input columns trained: training, files, switching, merging."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors import safe_open
from tiny_models import batch, build
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical import DeltaBank, StratifiedConfig, merge_checkpoint
from peft_surgical.copies.columns import ColumnTensors, draw_columns, input_dim
from peft_surgical.methods.card import describe_choice


KINDS = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "vit": "SEQ_CLS"}


def config_for(family, columns=3, **options):
    strata = [{"layers": "0-1", "tune": "frozen"}, {"layers": "2-", "tune": "columns", "columns": columns}]
    strata = {"encoder": strata, "decoder": strata} if family == "t5" else strata
    return StratifiedConfig(strata=strata, task_type=KINDS[family], **options)


def train(model, family, steps=3, keep=lambda model: None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        model(**batch(family, seed=step)).loss.backward()
        keep(model)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def linears(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}


def logits(model, family):
    model.eval()
    with torch.no_grad():
        return model(**batch(family)).logits


def oracle(base, family, chosen, heads):
    """The whole weights trained, with the gradient of all but the drawn columns set to zero."""
    base.requires_grad_(False)
    masks = {}
    for path in chosen:
        module = base.get_submodule(path)
        module.weight.requires_grad_(True)
        masks[path] = torch.zeros_like(module.weight)
        masks[path].index_fill_(input_dim(module), torch.tensor(draw_columns(path, module, 3, 0)), 1)
    for head in heads:
        base.get_submodule(head).requires_grad_(True)

    def keep(model):
        for path, mask in masks.items():
            model.get_submodule(path).weight.grad *= mask

    return train(base, family, keep=keep)


@pytest.mark.parametrize("family", KINDS)
def test_training_equals_whole_weights_with_their_other_columns_held(family):
    base = build(family)
    model = get_peft_model(copy.deepcopy(base), config_for(family))
    chosen = [
        path.removeprefix("base_model.model.")
        for path, module in model.named_modules()
        if any(isinstance(entry, ColumnTensors) for entry in getattr(module, "lora_tuned", {}).values())
    ]
    assert len(chosen) >= 2 * 4
    count = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "modules_to_save" not in n)
    weights = {path: base.get_submodule(path).weight.shape for path in chosen}
    assert count == sum(3 * shape[1 - input_dim(base.get_submodule(path))] for path, shape in weights.items())
    heads = ["classifier"] if KINDS[family] == "SEQ_CLS" else []
    plain = oracle(copy.deepcopy(base), family, chosen, heads)
    train(model, family)
    with model.disable_adapter():
        assert torch.equal(logits(model, family), logits(base.eval(), family)) or heads
    adapted = logits(model, family)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged, family), adapted)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], value, rtol=2e-4, atol=2e-5)
    for path in chosen:  # what is not drawn is the base's, bit for bit
        module = base.get_submodule(path)
        rest = [i for i in range(module.weight.shape[input_dim(module)]) if i not in draw_columns(path, module, 3, 0)]
        now = merged.get_submodule(path).weight.index_select(input_dim(module), torch.tensor(rest))
        assert torch.equal(now, module.weight.index_select(input_dim(module), torch.tensor(rest)))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("encoding", ["values", "int8"])
def test_a_saved_adapter_holds_the_columns_alone_and_loads_bit_for_bit(family, encoding, tmp_path):
    base = build(family)
    model = train(get_peft_model(copy.deepcopy(base), config_for(family)), family)
    model.peft_config["default"].encoding = encoding
    adapted = logits(model, family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        keys = [key for key in file.keys() if "lora_tuned" in key]  # noqa: SIM118
    assert {key.partition(":")[2] for key in keys} <= {"columns", "columns_lossless", "rows", "rows_lossless"}
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(logits(loaded, family), adapted)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    third = PeftModel.from_pretrained(copy.deepcopy(base), again, is_trainable=True)
    assert any(isinstance(module, ColumnTensors) for module in third.modules())
    assert torch.equal(logits(third, family), adapted)
    # training goes on as if it had not stopped
    assert torch.equal(logits(train(third, family), family), logits(train(model, family), family))


def test_two_tasks_are_switched_combined_and_deleted(tmp_path):
    base = build("bert")
    answers = {}
    for seed in range(2):
        model = get_peft_model(copy.deepcopy(base), config_for("bert", columns_seed=seed))
        answers[seed] = logits(train(model, "bert", steps=2 + seed), "bert")
        model.save_pretrained(tmp_path / str(seed))
    model = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "0", adapter_name="task0")
    model.load_adapter(tmp_path / "1", adapter_name="task1")
    for seed in (1, 0, 1):
        model.set_adapter(f"task{seed}")
        assert torch.equal(logits(model, "bert"), answers[seed])
    model.add_weighted_adapter(["task0"], [1.0], "same")
    model.set_adapter("same")
    assert torch.equal(logits(model, "bert"), answers[0])
    model.set_adapter("task0")
    model.delete_adapter("same")
    with pytest.raises(ValueError, match="in ways that no one configuration can express together, e.g. .*dense"):
        model.add_weighted_adapter(["task0", "task1"], [0.5, 0.5], "both")
    names = ["task0", "task1", "task0", "task1"]
    with torch.no_grad():
        rows = model.eval()(**batch("bert"), adapter_names=names).logits
    torch.testing.assert_close(rows, torch.stack([answers[int(name[-1])][i] for i, name in enumerate(names)]))


def test_files_of_columns_are_served_merged_and_swapped_in(tmp_path):
    base = build("bert")
    base.save_pretrained(tmp_path / "base")
    answers = {}
    for seed in range(2):
        model = get_peft_model(copy.deepcopy(base), config_for("bert", columns_seed=seed))
        answers[seed] = logits(train(model, "bert", steps=2 + seed), "bert")
        model.save_pretrained(tmp_path / str(seed))
    bank = DeltaBank(copy.deepcopy(base).eval())
    for seed in range(2):
        bank.add(f"task{seed}", tmp_path / str(seed))
    for seed in (0, 1, 0):
        with bank.task(f"task{seed}") as served, torch.no_grad():
            assert torch.equal(served(**batch("bert")).logits, answers[seed])
    merge_checkpoint(tmp_path / "base", tmp_path / "0", tmp_path / "merged")
    assert torch.equal(logits(type(base).from_pretrained(tmp_path / "merged"), "bert"), answers[0])
    model = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "0")
    hotswap_adapter(model, str(tmp_path / "1"), "default")
    assert torch.equal(logits(model, "bert"), answers[1])
    trained = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "0", is_trainable=True)
    with pytest.raises(ValueError, match="has room for no others"):
        hotswap_adapter(trained, str(tmp_path / "1"), "default")


def test_it_is_trained_beside_other_strata_and_on_a_base_in_half_precision():
    strata = [
        {"layers": [0], "tune": "columns", "columns": 0.25, "target_modules": ["q_proj", "v_proj"]},
        {"layers": [1], "tune": "norm"},
        {"layers": [2], "tune": "full"},
        {"layers": [3], "tune": "frozen"},
    ]
    base = build("llama").to(torch.bfloat16)
    model = get_peft_model(copy.deepcopy(base), StratifiedConfig(strata=strata, task_type="CAUSAL_LM"))
    entry = next(m for m in model.modules() if isinstance(m, ColumnTensors))
    assert entry.columns.dtype is torch.float32
    train(model, "llama")
    adapted = logits(model, "llama")
    assert json.loads(json.dumps(model.peft_config["default"].strata))[0]["columns"] == 0.25
    assert not torch.equal(adapted, logits(base, "llama"))
    assert "25% of the input columns of `q_proj`, `v_proj` in layer 0" in describe_choice(model.peft_config["default"])
    assert torch.equal(logits(model.merge_and_unload(), "llama"), adapted)


def test_layers_compiled_one_by_one_train_the_same_columns(tmp_path):
    base, compiled = build("bert"), build("bert")
    layers = compiled.bert.encoder.layer
    for index in range(len(layers)):
        layers[index] = torch.compile(layers[index], backend="eager")
    model = train(get_peft_model(compiled, config_for("bert")), "bert")
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    assert torch.equal(logits(loaded, "bert"), logits(model, "bert"))


def test_a_warning_where_one_loaded_for_inference_is_trained_whole(tmp_path):
    get_peft_model(build("bert"), config_for("bert")).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(build("bert"), tmp_path)
    model.set_adapter("default")
    with pytest.warns(UserWarning, match="whole weights are trained where its config chose columns"):
        train(model, "bert", steps=1)


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ValueError, match="columns=0 must be how many"):
        StratifiedConfig(strata=[{"layers": "all", "tune": "columns", "columns": 0}])
    with pytest.raises(ValueError, match="columns=1.5 must be how many"):
        StratifiedConfig(n1=0.2, n2=0.4, columns=1.5)
    with pytest.raises(ValueError, match="columns=1000 of .*query.*, which has 16 inputs"):
        get_peft_model(build("bert"), config_for("bert", columns=1000))
    tied = build("bert")
    tied.bert.encoder.layer[3].output.dense.weight = tied.bert.encoder.layer[2].output.dense.weight
    with pytest.raises(ValueError, match="layer.2.output.dense.weight is shared with another module"):
        get_peft_model(tied, config_for("bert"))
    packed = build("bert")
    packed.bert.encoder.layer[2].output.dense.weight = nn.Parameter(torch.zeros(256, 1, dtype=torch.uint8), False)
    with pytest.raises(ValueError, match="layer.2.output.dense.weight is quantised"):
        get_peft_model(packed, config_for("bert"))
    with pytest.raises(ValueError, match="'bias' has no meaning"):
        StratifiedConfig(strata=[{"layers": "all", "tune": "columns", "bias": "all"}])
    model = train(get_peft_model(build("bert"), config_for("bert")), "bert")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "columns_seed": 5}))
    with pytest.raises(ValueError, match="differs from the base in other columns than the 3 that are trained here"):
        PeftModel.from_pretrained(build("bert"), tmp_path, is_trainable=True)


@pytest.mark.slow
def test_compiled_training_is_the_same():
    model = get_peft_model(build("llama"), config_for("llama"))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for one in (model, compiled):
        one.train()
        one(**batch("llama")).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, msg=name)
