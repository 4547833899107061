"""Many adapters on one resident base: switching, disabling, deleting, merging."""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model
from tiny_models import batch, build, hidden_states

from peft_surgical import SurgicalConfig


LAYERS = {"task1": [1], "task2": [2], "task12": [1, 2], "task03": [0, 3]}


def perturb(model, adapter):
    """Move an adapter's tensors off their start, as training would."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{adapter}." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


def resident(family="bert", task_type="SEQ_CLS", dtype=torch.float32):
    """A base with four adapters on different layers, and the state it had before."""
    base = build(family).to(dtype).requires_grad_(False)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = None
    for name, layers in LAYERS.items():
        config = SurgicalConfig(task_type=task_type, layers=layers)
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        perturb(model, name)
    return model.eval(), before


def logits(model, family="bert"):
    with torch.no_grad():
        return model(**batch(family)).logits


def alone(model, tmp_path, family="bert", dtype=torch.float32):
    """Each adapter's logits on a base of its own."""
    model.save_pretrained(tmp_path)
    out = {}
    for name in model.peft_config:
        base = build(family).to(dtype).requires_grad_(False)
        out[name] = logits(PeftModel.from_pretrained(base, tmp_path / name), family)
    return out


def original(model, before):
    """Whether the base's own tensors are as they were, behind the wrappers."""
    state = {
        name.replace(".base_layer", "").replace(".original_module", ""): value
        for name, value in model.get_base_model().state_dict().items()
    }
    return all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "task_type"), [("bert", "SEQ_CLS"), ("gpt2", "CAUSAL_LM"), ("mixtral", "CAUSAL_LM")]
)
def test_two_hundred_switches_leave_the_base_and_every_adapter_as_they_were(family, task_type, tmp_path):
    model, before = resident(family, task_type)
    expected = alone(model, tmp_path, family)
    with model.disable_adapter():
        base_logits = logits(model, family)
    choose = random.Random(0)
    for _ in range(200):
        name = choose.choice([*LAYERS, None])
        if name is None:
            with model.disable_adapter():
                assert torch.equal(logits(model, family), base_logits)
        else:
            model.set_adapter(name)
            assert torch.equal(logits(model, family), expected[name])
    assert original(model, before)


def test_disable_adapter_nests_and_survives_an_exception():
    model, before = resident()
    model.set_adapter("task12")
    active = logits(model)
    with model.disable_adapter():
        outer = logits(model)
        with model.disable_adapter():
            assert torch.equal(logits(model), outer)
        assert torch.equal(logits(model), outer)
    with pytest.raises(RuntimeError, match="in the middle"), model.disable_adapter():
        raise RuntimeError("in the middle")
    assert not torch.equal(active, outer)
    assert torch.equal(logits(model), active)
    assert original(model, before)


def test_deleting_and_unloading_leave_the_base(tmp_path):
    model, before = resident()
    expected = alone(model, tmp_path)
    model.set_adapter("task12")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.delete_adapter("task12")
    # the oldest remaining adapter is active, on every module
    assert model.active_adapter == "task1"
    assert torch.equal(logits(model), expected["task1"])
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".task1." in name for name in trainable)
    model.delete_adapter("task2")
    assert original(model, before)
    assert not any(".task2." in name or ".task12." in name for name, _ in model.named_parameters())
    plain = model.unload()
    for name, value in plain.state_dict().items():
        if not name.startswith("classifier"):
            assert torch.equal(value, before[name]), name
    assert not hasattr(plain, "peft_config")


def test_deleting_frees_the_tensors():
    model, _ = resident()
    gc.collect()
    start = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(5):
        model.add_adapter("more", SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2]))
        model.delete_adapter("more")
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= start


@pytest.mark.parametrize("state", ["active", "merged"])
def test_a_new_adapter_starts_from_the_original_base(state):
    model, before = resident()
    model.set_adapter("task12")
    if state == "merged":
        model.merge_adapter()
    model.add_adapter("new", SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2]))
    for name, parameter in model.named_parameters():
        if ".surgical_params.new." in name:
            base_name = name.removeprefix("base_model.model.").replace(".surgical_params.new", "").replace("|", ".")
            assert torch.equal(parameter, before[base_name]), name
    if state == "merged":
        model.unmerge_adapter()
    assert original(model, before)


def test_a_layer_that_the_active_adapter_does_not_have_uses_the_base():
    model, _ = resident()
    seen = []

    def remember(module, args, output):
        seen.append(hidden_states(output))

    model.get_base_model().bert.encoder.layer[0].register_forward_hook(remember)
    with model.disable_adapter():
        logits(model)
    for name in ("task1", "task03"):
        model.set_adapter(name)
        logits(model)
    base, without_layer_0, with_layer_0 = seen
    assert torch.equal(without_layer_0, base)
    assert not torch.equal(with_layer_0, base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(LAYERS))
def test_merging_equals_the_adapter_and_unmerging_the_base_bit_for_bit(dtype, name, tmp_path):
    model, before = resident(dtype=dtype)
    model.set_adapter(name)
    active = logits(model)
    with model.disable_adapter():
        base_logits = logits(model)
    model.merge_adapter()
    assert torch.equal(logits(model), active)
    model.unmerge_adapter()
    assert torch.equal(logits(model), active)
    with model.disable_adapter():
        assert torch.equal(logits(model), base_logits)
    assert original(model, before)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), active)
    assert list(merged.state_dict()) == list(before)
    assert all(value.dtype == dtype for value in merged.state_dict().values())
    # an ordinary checkpoint, with no trace of the adapter
    merged.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("adapter*"))
    assert torch.equal(logits(type(merged).from_pretrained(tmp_path, dtype=dtype).requires_grad_(False)), active)


def test_adapters_on_different_layers_are_active_together():
    model, _ = resident("gpt2", "CAUSAL_LM")
    model.base_model.set_adapter(["task1", "task2"])
    together = logits(model, "gpt2")
    plain = build("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for adapter in ("task1", "task2"):
                if f".surgical_params.{adapter}." in name:
                    name_in_base = name.removeprefix("base_model.model.").replace(f".surgical_params.{adapter}", "")
                    plain.get_parameter(name_in_base).copy_(parameter)
    torch.testing.assert_close(together, logits(plain, "gpt2"), rtol=1e-5, atol=1e-6)


def test_heads_of_different_sizes_share_one_base(tmp_path):
    expected = {}
    for name, labels in (("two", 2), ("five", 5)):
        base = build("bert", num_labels=labels, id2label={i: f"{name}-{i}" for i in range(labels)})
        base.bert.load_state_dict(build("bert").bert.state_dict())
        model = get_peft_model(base.requires_grad_(False), SurgicalConfig(task_type="SEQ_CLS", layers=[1]))
        perturb(model, "default")
        model.save_pretrained(tmp_path / name)
        expected[name] = logits(model)
    model = PeftModel.from_pretrained(build("bert").requires_grad_(False), tmp_path / "two", adapter_name="two")
    model.load_adapter(tmp_path / "five", adapter_name="five")
    for name, labels in (("five", 5), ("two", 2), ("five", 5)):
        model.set_adapter(name)
        assert torch.equal(logits(model), expected[name])
        assert model.config.num_labels == labels
        assert model.config.id2label[labels - 1] == f"{name}-{labels - 1}"
        assert torch.isfinite(model(**batch("bert")).loss)  # the loss reshapes by the number of labels
    with model.disable_adapter():
        assert logits(model).shape == (4, 2)
        assert model.config.id2label[1] == "LABEL_1"
