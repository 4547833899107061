"""Kinds of fault that users report of saving and loading adapters; each test has the id of its kind in the name."""

from __future__ import annotations

import json
import warnings

import peft
import pytest
import torch
import transformers
from adapters import METHODS, make, make_config, outputs, rewrite, save, shake
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import VOCABULARY, batch, build
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig


methods = pytest.mark.parametrize("method", METHODS)


def reloaded(family: str, path, **options) -> PeftModel:
    return PeftModel.from_pretrained(build(family, **options), path).eval()


def size(model: nn.Module, names: set[str]) -> int:
    return sum(p.numel() * p.itemsize for name, p in model.named_parameters() if name in names)


@methods
def test_L1_only_what_changed_is_written(method, tmp_path):
    options = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 256}
    layers = [5] if method == "SURGICAL" else None
    strata = [{"layers": "0-4", "tune": "frozen"}, {"layers": [5], "tune": "full"}]
    config = SurgicalConfig(task_type="SEQ_CLS", layers=layers) if layers else StratifiedConfig(
        task_type="SEQ_CLS", strata=strata
    )  # fmt: skip
    model = shake(get_peft_model(build("bert", **options), config), "default").eval()
    path = save(model, tmp_path)
    changed = size(model, {name for name, p in model.named_parameters() if p.requires_grad})
    assert (path / "adapter_model.safetensors").stat().st_size <= 1.1 * changed
    assert torch.equal(outputs(reloaded("bert", path, **options), "bert"), outputs(model, "bert"))


HEADS = [
    ("bert", "BertForSequenceClassification", "SEQ_CLS", {}),
    ("bert", "BertForTokenClassification", "TOKEN_CLS", {}),
    ("bert", "BertForQuestionAnswering", "QUESTION_ANS", {}),
    ("bert", "BertForMultipleChoice", None, {"modules_to_save": ["classifier"]}),
    ("gpt2", "GPT2ForSequenceClassification", "SEQ_CLS", {}),
    ("distilbert", "DistilBertForSequenceClassification", "SEQ_CLS", {}),  # of two modules
    ("roberta", "RobertaForSequenceClassification", "SEQ_CLS", {}),  # a module of two
]


@methods
@pytest.mark.parametrize(("family", "head", "task", "options"), HEADS)
def test_L2_every_head_is_saved_and_comes_back(method, family, head, task, options, tmp_path):
    attention = {"distilbert": ["q_lin"], "gpt2": ["c_attn"]}.get(family, ["query"])
    if method == "SURGICAL":
        config = SurgicalConfig(task_type=task, layers=[1], **options)
    else:
        config = StratifiedConfig(task_type=task, n1=0, n2=1, target_modules=attention, **options)
    model = shake(get_peft_model(build(family, head=head), config), "default").eval()
    heads = [n for n, p in model.named_parameters() if "modules_to_save" in n and p.requires_grad]
    assert heads
    path = save(model, tmp_path)
    base = build(family, head=head)
    with torch.no_grad():  # another random head
        for name, parameter in base.named_parameters():
            if not name.startswith(f"{base.base_model_prefix}."):
                parameter.add_(1.0)
    again = PeftModel.from_pretrained(base, path).eval()
    inputs = {"input_ids": batch("bert")["input_ids"]}
    if head == "BertForMultipleChoice":
        inputs = {"input_ids": inputs["input_ids"][None]}
    with torch.no_grad():
        found, wanted = again(**inputs), model(**inputs)
    assert found.keys() == wanted.keys()
    for name in {"logits", "start_logits", "end_logits"} & set(found):
        assert torch.equal(found[name], wanted[name])


@methods
def test_L4_loading_leaves_the_given_state_alone(method):
    state = get_peft_model_state_dict(make(method, "bert", [1, 2]))
    before = {name: value.clone() for name, value in state.items()}
    wanted = outputs(make(method, "bert", [1, 2]), "bert")
    for _ in range(2):
        model = make(method, "bert", [1, 2], seed=5)
        set_peft_model_state_dict(model, state)
        assert torch.equal(outputs(model, "bert"), wanted)
        assert state.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in state.items())


@methods
def test_L5_another_base_is_refused_and_the_same_in_another_dtype_is_not(method, tmp_path):
    path = save(make(method, "bert", [1, 2]), tmp_path)
    for base, difference in [
        (build("bert", seed=1), "other values"),
        (build("bert", num_hidden_layers=6), "number of layers"),
        (build("roberta"), "model type"),
    ]:
        names = list(dict(base.named_modules()))
        with pytest.raises(ValueError, match=f"another base model.*{difference}"):
            PeftModel.from_pretrained(base, path)
        assert list(dict(base.named_modules())) == names
    PeftModel.from_pretrained(build("bert").to(torch.bfloat16), path)
    record = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**record, "check_base": False}))
    PeftModel.from_pretrained(build("bert", seed=1), path)


@methods
def test_L6_a_refused_second_adapter_leaves_everything_as_it_was(method, tmp_path):
    path = save(make(method, "bert", [2, 3]), tmp_path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(name for name in tensors if "layer.2" in name)
    rewrite(path, {**tensors, name: tensors[name][:1]})
    model = make(method, "bert", [1, 2], name="first")
    before = outputs(model, "bert")
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    configs = {name: config.to_dict() for name, config in model.peft_config.items()}
    with pytest.raises(ValueError, match="has shape"):
        model.load_adapter(path, adapter_name="second")
    assert torch.equal(outputs(model, "bert"), before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {name: config.to_dict() for name, config in model.peft_config.items()} == configs


TIED = [
    ({"target_modules": ["embed_tokens"]}, False),
    ({"target_modules": ["lm_head"]}, False),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    ({"target_modules": ["embed_tokens", "lm_head"]}, True),
]


@methods
@pytest.mark.parametrize(("options", "stays_tied"), TIED)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_L7_a_tied_head_is_untied_on_purpose(method, options, stays_tied, tmp_path):
    def base() -> nn.Module:
        return build("qwen3", tie_word_embeddings=True)

    config = {"SURGICAL": SurgicalConfig, "STRATIFIED": StratifiedConfig}[method]
    model = shake(get_peft_model(base(), config(task_type="CAUSAL_LM", **options)), "default").eval()
    wanted = outputs(model, "qwen3")
    again = PeftModel.from_pretrained(base(), save(model, tmp_path / "adapter")).eval()
    assert torch.equal(outputs(again, "qwen3"), wanted)
    model.merge_adapter()
    torch.testing.assert_close(outputs(model, "qwen3"), wanted, rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(outputs(model, "qwen3"), outputs(base(), "qwen3"))
    merged = model.merge_and_unload()
    assert merged.config.tie_word_embeddings == (stays_tied and method == "SURGICAL")
    merged.save_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(plain, "qwen3"), wanted, rtol=1e-5, atol=1e-5)


class Twins(nn.Module):
    """A layer with two tied modules and a weight that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.turned = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.turned.weight = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x):
        return self.turned(self.two(torch.tanh(self.one(x))))


class Toy(nn.Module):
    def __init__(self, name: str = "layers"):
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        setattr(self, name, nn.ModuleList(Twins() for _ in range(3)))

    def forward(self, x):
        for layer in getattr(self, self.name):
            x = layer(x)
        return x


def toy_config(method: str):
    if method == "SURGICAL":
        return SurgicalConfig(layers=[1])
    strata = [{"layers": [0], "tune": "frozen"}, {"layers": [1], "tune": "full"}]
    return StratifiedConfig(strata=[*strata, {"layers": [2], "tune": "lora", "target_modules": ["turned"]}])


@methods
def test_L8_tied_and_turned_weights_are_saved(method, tmp_path):
    x = torch.randn(2, 4)
    model = shake(get_peft_model(Toy(), toy_config(method)), "default").eval()
    layer = model.get_base_model().layers[1]
    assert layer.one.weight is layer.two.weight
    again = PeftModel.from_pretrained(Toy(), save(model, tmp_path)).eval()
    assert torch.equal(again(x), model(x))
    layer = again.get_base_model().layers[1]
    assert layer.one.weight is layer.two.weight


@methods
def test_L10_a_resized_vocabulary_is_not_in_the_file_and_its_size_is_checked(method, tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(VOCABULARY + 10)
    model = shake(get_peft_model(base, make_config(method, "llama", [3])), "default").eval()
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in names)
    with pytest.raises(ValueError, match=rf"resize_token_embeddings\({VOCABULARY + 10}\)"):
        PeftModel.from_pretrained(build("llama"), tmp_path / "adapter")
    with warnings.catch_warnings(record=True) as caught:  # PEFT's own rule, with its warning
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path / "with")
    assert any("resized" in str(w.message) for w in caught)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again.resize_token_embeddings(VOCABULARY + 10)
    again = PeftModel.from_pretrained(again, tmp_path / "with").eval()
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))


@methods
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_L11_what_is_loaded_takes_the_dtype_of_the_model(method, low_cpu_mem_usage, autocast, tmp_path):
    path = save(make(method, "llama", [1, 2]), tmp_path)
    base = build("llama").to(torch.bfloat16)
    options = {"low_cpu_mem_usage": low_cpu_mem_usage, "autocast_adapter_dtype": autocast}
    model = PeftModel.from_pretrained(base, path, **options).eval()
    wanted = torch.float32 if autocast else torch.bfloat16
    assert {p.dtype for name, p in model.named_parameters() if ".default." in name} == {wanted}
    assert outputs(model, "llama").dtype == torch.bfloat16


@methods
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_L12_weights_go_to_the_device_of_the_model_and_nowhere_else(method, low_cpu_mem_usage, tmp_path, monkeypatch):
    path = save(make(method, "bert", [1, 2], seed=2), tmp_path)
    model = make(method, "bert", [1], name="first")
    wanted = outputs(make(method, "bert", [1, 2], seed=2), "bert")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peft.utils.infer_device() == "cuda"
    model.load_adapter(path, adapter_name="second", low_cpu_mem_usage=low_cpu_mem_usage)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(outputs(model.eval(), "bert", "second"), wanted)


@methods
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [True, False])
def test_L13_one_rule_for_dtypes(method, dtype, autocast, tmp_path):
    base = build("llama").to(dtype)
    model = get_peft_model(base, make_config(method, "llama", [1, 2]), autocast_adapter_dtype=autocast)
    master = torch.float32 if autocast else dtype
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {master}
    path = save(shake(model, "default"), tmp_path)
    assert {t.dtype for t in load_file(path / "adapter_model.safetensors").values()} == {master}
    again = PeftModel.from_pretrained(build("llama").to(dtype), path, autocast_adapter_dtype=autocast)
    assert {p.dtype for name, p in again.named_parameters() if ".default." in name} == {master}
    assert torch.equal(outputs(again.eval(), "llama"), outputs(model.eval(), "llama"))


# L14, resuming, and L15, the best model under another name: test_trainer.py
def test_L14_resuming_is_tested_where_the_trainer_is():
    import test_trainer

    assert test_trainer.test_two_steps_and_two_more_are_four


def test_L15_the_best_model_is_tested_where_the_trainer_is():
    import test_trainer

    assert test_trainer.test_the_best_model_is_loaded_at_the_end


# L16, losses of evaluation and pipelines: test_trainer.py, test_adapter_api.py
def test_L16_losses_and_pipelines_are_tested_where_the_trainer_and_the_api_are():
    import test_adapter_api
    import test_trainer

    assert test_trainer.test_evaluation_has_a_loss_for_every_task
    assert test_adapter_api.test_pipelines_give_the_labels_of_the_model


@methods
def test_L18_renamed_modules_are_an_error_and_may_be_mapped(method, tmp_path):
    x = torch.randn(2, 4)
    model = shake(get_peft_model(Toy(), toy_config(method)), "default").eval()
    path = save(model, tmp_path)
    with pytest.raises(ValueError, match=r"no tensor 'layers\.1.*key_mapping"):
        PeftModel.from_pretrained(Toy("blocks"), path)
    config = PeftConfig.from_pretrained(path)
    config.key_mapping = {r"^layers\.": "blocks."}
    again = PeftModel.from_pretrained(Toy("blocks"), path, config=config).eval()
    assert torch.equal(again(x), model(x))
    third = PeftModel.from_pretrained(Toy("blocks"), save(again, tmp_path / "again")).eval()  # as if never renamed
    assert torch.equal(third(x), model(x))


@methods
def test_L19_tasks_with_different_numbers_of_labels_share_one_base(method, tmp_path):
    paths = {}
    for labels in (2, 5):
        base = build("bert", num_labels=labels)
        base.bert.load_state_dict(build("bert").bert.state_dict())  # the head's size changes all random numbers
        model = get_peft_model(base, make_config(method, "bert", [1, 2]))
        paths[labels] = save(shake(model, "default", labels).eval(), tmp_path / str(labels))
        paths[labels, "logits"] = outputs(model, "bert")
    model = PeftModel.from_pretrained(build("bert"), paths[2], adapter_name="two")
    model.load_adapter(paths[5], adapter_name="five")
    for labels, name in [(2, "two"), (5, "five"), (2, "two")]:
        logits = outputs(model.eval(), "bert", name)
        assert logits.shape == (4, labels)
        assert torch.equal(logits, paths[labels, "logits"])
        assert model.config.num_labels == len(model.config.id2label) == labels
