"""Swapping an adapter from disk into the tensors of another: right values, same tensors, one compilation."""

from __future__ import annotations

import copy
import pickle
import signal

import pytest
import torch
from adapters import METHODS, TASKS, base_outputs, make, outputs, save, shake
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from tiny_models import build
from torch.overrides import TorchFunctionMode

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.methods.hotswap import prepare_model_for_hotswap


cases = pytest.mark.parametrize(("method", "family"), [(m, f) for m in METHODS for f in TASKS])


def identities(model) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}


@cases
def test_swapping_gives_the_other_adapter_in_the_same_tensors(method, family, tmp_path):
    first, second = make(method, family, [1, 2], seed=1), make(method, family, [1, 2], seed=2)
    paths = [save(model, tmp_path / str(i)) for i, model in enumerate([first, second])]
    model = PeftModel.from_pretrained(build(family), paths[0]).eval()
    before = identities(model)
    assert torch.equal(outputs(model, family), outputs(first, family))
    for path, wanted in [(paths[1], second), (paths[0], first), (paths[1], second)]:
        hotswap_adapter(model, path, adapter_name="default")
        assert torch.equal(outputs(model, family), outputs(wanted, family))
    assert identities(model) == before
    with model.disable_adapter():
        assert torch.equal(outputs(model, family), base_outputs(family))


class PressAt(TorchFunctionMode):
    """Press Ctrl-C after a copy of values."""

    def __init__(self, number: int):
        super().__init__()
        self.left = number

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.left -= function is torch.Tensor.copy_
        if self.left == 0 and function is torch.Tensor.copy_:
            signal.raise_signal(signal.SIGINT)
        return result


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_waits_for_the_end_of_a_swap(method, tmp_path):
    first, second = make(method, "bert", [1, 2], seed=1), make(method, "bert", [1, 2], seed=2)
    paths = [save(model, tmp_path / str(i)) for i, model in enumerate([first, second])]
    model = PeftModel.from_pretrained(build("bert"), paths[0]).eval()
    with pytest.raises(KeyboardInterrupt), PressAt(2):
        hotswap_adapter(model, paths[1], adapter_name="default")
    assert torch.equal(outputs(model, "bert"), outputs(second, "bert"))


@cases
def test_an_adapter_of_other_layers_fits_once_there_is_room(method, family, tmp_path):
    first, second = make(method, family, [1], seed=1), make(method, family, [2, 3], seed=2)
    paths = [save(model, tmp_path / str(i)) for i, model in enumerate([first, second])]
    model = PeftModel.from_pretrained(build(family), paths[0]).eval()
    with pytest.raises((ValueError, RuntimeError)):
        hotswap_adapter(model, paths[1], adapter_name="default")
    assert torch.equal(outputs(model, family), outputs(first, family))
    prepare_model_for_hotswap(model, adapters=[paths[1]])
    assert torch.equal(outputs(model, family), outputs(first, family))
    before = identities(model)
    for path, wanted in [(paths[1], second), (paths[0], first)]:
        hotswap_adapter(model, path, adapter_name="default")
        torch.testing.assert_close(outputs(model, family), outputs(wanted, family), rtol=1e-5, atol=1e-6)
    assert identities(model) == before
    again = PeftModel.from_pretrained(build(family), save(model, tmp_path / "again")).eval()
    assert torch.equal(outputs(again, family), outputs(model, family))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_can_be_copied_and_pickled_after_a_swap(method, tmp_path):
    first, second = make(method, "bert", [1, 2], seed=1), make(method, "bert", [1, 2], seed=2)
    paths = [save(model, tmp_path / str(i)) for i, model in enumerate([first, second])]
    model = PeftModel.from_pretrained(build("bert"), paths[0]).eval()
    prepare_model_for_hotswap(model, adapters=[paths[1]])
    for path in (paths[1], paths[0], paths[1]):
        hotswap_adapter(model, path, adapter_name="default")
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(outputs(again, "bert"), outputs(model, "bert"))


def test_room_for_all_layers(tmp_path):
    paths = [save(make("SURGICAL", "bert", [i], seed=i), tmp_path / str(i)) for i in range(4)]
    model = PeftModel.from_pretrained(build("bert"), paths[0], is_trainable=True).eval()
    prepare_model_for_hotswap(model, layers="all")
    assert model.peft_config["default"].layers == [0, 1, 2, 3]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".default." in name}
    for i, path in enumerate(paths):
        hotswap_adapter(model, path, adapter_name="default")
        assert torch.equal(outputs(model, "bert"), outputs(make("SURGICAL", "bert", [i], seed=i), "bert"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("other_layers", [False, True])
def test_a_compiled_model_is_compiled_once(method, other_layers, tmp_path):
    first = make(method, "llama", [1], seed=1)
    second = make(method, "llama", [2] if other_layers else [1], seed=2)
    paths = [save(model, tmp_path / str(i)) for i, model in enumerate([first, second])]
    model = PeftModel.from_pretrained(build("llama"), paths[0]).eval()
    if other_layers:
        prepare_model_for_hotswap(model, adapters=paths[1:])
    if method == "STRATIFIED":
        prepare_model_for_compiled_hotswap(model)
    graphs = []

    def counting_backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(model, backend=counting_backend)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for path, wanted in [(None, first), (paths[1], second), (paths[0], first), (paths[1], second)]:
            if path is not None:
                hotswap_adapter(model, path, adapter_name="default")
            logits = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(logits, wanted(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
            graphs_at_first = graphs_at_first if path is not None else len(graphs)  # noqa: F821
    assert graphs
    assert len(graphs) == graphs_at_first
    torch._dynamo.reset()


def test_labels_and_further_training_follow_the_swap(tmp_path):
    second = make("SURGICAL", "bert", [1], seed=2)
    second.peft_config["default"].labels["id2label"] = {0: "no", 1: "yes"}
    path = save(second, tmp_path)
    model = make("SURGICAL", "bert", [1], seed=1)
    hotswap_adapter(model, path, adapter_name="default")
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert [n for n, p in model.named_parameters() if p.requires_grad]


def test_an_encoded_adapter_is_decoded(tmp_path):
    second = make("SURGICAL", "bert", [1], seed=2)
    second.peft_config["default"].encoding = "lossless"
    path = save(second, tmp_path)
    model = make("SURGICAL", "bert", [1], seed=1)
    hotswap_adapter(model, path, adapter_name="default")
    assert torch.equal(outputs(model, "bert"), outputs(second, "bert"))


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_fit_is_refused_and_changes_nothing(method, tmp_path):
    model = make(method, "bert", [1], seed=1)
    path = save(make(method, "bert", [1], seed=2), tmp_path / "other")
    with torch.no_grad():
        for parameter in model.get_base_model().bert.encoder.layer[1].parameters():
            parameter.add_(1e-3)  # another base now
    changed = outputs(model, "bert")
    with pytest.raises(ValueError, match="another base model"):
        hotswap_adapter(model, path, adapter_name="default")
    with pytest.raises(ValueError, match="no adapter 'rte'"):
        hotswap_adapter(model, path, adapter_name="rte")
    assert torch.equal(outputs(model, "bert"), changed)
    model = make(method, "bert", [1], seed=1)
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        hotswap_adapter(model, path, adapter_name="default")


@pytest.mark.parametrize("pattern", [{"alpha_pattern": {"query": 7}}, {"rank_pattern": {"query": 1}}])
def test_scalings_by_pattern_are_refused(pattern, tmp_path):
    config = StratifiedConfig(task_type="SEQ_CLS", n1=0, n2=1, **pattern)
    first, second = (shake(get_peft_model(build("bert"), copy.copy(config)), "default", seed) for seed in (1, 2))
    wanted = outputs(first, "bert")
    with pytest.raises(ValueError, match="passes over. Load it beside 'default'"):
        hotswap_adapter(first, save(second, tmp_path / "second"), adapter_name="default")
    assert torch.equal(outputs(first, "bert"), wanted)


def test_methods_are_not_mixed(tmp_path):
    lora = get_peft_model(build("bert"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    path = save(lora, tmp_path)
    model = make("SURGICAL", "bert", [1])
    with pytest.raises(ValueError, match="Incompatible PEFT types"):
        hotswap_adapter(model, path, adapter_name="default")


def test_pefts_own_hot_swap_of_lora_is_as_before(tmp_path):
    def lora(seed):
        model = get_peft_model(build("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        return shake(model, "default", seed).eval()

    second = lora(2)
    path = save(second, tmp_path)
    model = lora(1)
    hotswap_adapter(model, path, adapter_name="default")
    assert torch.equal(outputs(model, "llama"), outputs(second, "llama"))


def test_only_a_peft_model_of_ours_can_be_prepared():
    with pytest.raises(TypeError, match="BertForSequenceClassification"):
        prepare_model_for_hotswap(build("bert"), layers="all")
    lora = get_peft_model(build("bert"), LoraConfig(target_modules=["query"]))
    with pytest.raises(TypeError, match="SURGICAL or STRATIFIED"):
        prepare_model_for_hotswap(lora, layers="all")
    with pytest.raises(ValueError, match="says nothing about strata"):
        prepare_model_for_hotswap(make("STRATIFIED", "bert", [1]), layers="all")


def test_room_keeps_the_precision_of_the_copies(tmp_path):
    base = build("llama").to(torch.bfloat16)
    model = get_peft_model(base, SurgicalConfig(task_type="CAUSAL_LM", layers=[1]))
    prepare_model_for_hotswap(model, layers="all")
    assert {p.dtype for n, p in model.named_parameters() if ".default." in n} == {torch.float32}
    model = get_peft_model(build("llama").to(torch.bfloat16), SurgicalConfig(layers=[1]), autocast_adapter_dtype=False)
    prepare_model_for_hotswap(model, layers="all")
    assert {p.dtype for n, p in model.named_parameters() if ".default." in n} == {torch.bfloat16}
