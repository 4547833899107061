"""While one adapter is trained, the base's own tensors that it has copies of lie in host memory.

A CPU has no other memory. So what is sent away is kept aside here, and NaN put in its place: whatever computes with
it, saves or checks it without having it brought back is seen.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import batch, build

from peft_surgical import StratifiedConfig, SurgicalConfig, rank_layers
from peft_surgical.copies import host
from peft_surgical.copies.module import TunedModule
from peft_surgical.distributed import leave_base_out_of_units


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Makes the CPU pass for an accelerator."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(tensor):
        stand_in = torch.full_like(tensor, float("nan"))
        kept[stand_in.data_ptr()] = (stand_in, tensor)
        return stand_in

    monkeypatch.setattr(host, "_HOSTS", ())
    monkeypatch.setattr(host, "to_host", to_host)
    monkeypatch.setattr(host, "to_device", lambda tensor, device: kept[tensor.data_ptr()][1])


def step(model, family="bert", seed=0):
    model.train()
    torch.manual_seed(seed)
    model(**batch(family, seed=seed)).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()


def logits(model, family="bert", **options):
    model.eval()
    with torch.no_grad():
        return model(**batch(family), **options).logits


def tuned(family="bert", steps=2, **options):
    base = build(family)
    kind = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM"}[family]
    model = get_peft_model(copy.deepcopy(base), SurgicalConfig(task_type=kind, layers=[1, 2], **options))
    for seed in range(steps):
        step(model, family, seed)
    return base.eval(), model


def away(model):
    """The matrices of the base that lie in host memory."""
    modules = [(path, m) for path, m in model.named_modules() if isinstance(m, TunedModule)]
    return {f"{path}.{name}" for path, m in modules for name in m._away}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_training_is_the_same_and_needs_none_of_the_matrices_of_the_base(family):
    _, model = tuned(family)
    matrices = {
        f"{path}.{name}"
        for path, m in model.named_modules()
        if isinstance(m, TunedModule)
        for name in m.copied_names()
        if m.base_layer.get_parameter(name).dim() > 1
    }
    assert away(model) == matrices != set()
    _, other = tuned(family, base_copies="device")
    assert not away(other)
    assert torch.equal(logits(model, family), logits(other, family))
    assert away(model), "evaluating the adapter needs none of them either"


USES = {
    "disabled": lambda model, folder: _disabled(model),
    "merged and unmerged": lambda model, folder: _merged(model),
    "unloaded": lambda model, folder: logits(model.unload()),
    "a second adapter": lambda model, folder: _second(model),
    "deleted": lambda model, folder: _deleted(model),
    "rows of the base": lambda model, folder: logits(model, adapter_names=["__base__"] * len(batch("bert")["labels"])),
    "saved as differences": lambda model, folder: _saved(model, folder),
    "moved": lambda model, folder: _disabled(model.to(torch.float64).to(torch.float32)),
    "its weights read": lambda model, folder: _disabled(model, read=True),
}


def _disabled(model, read=False):
    with model.disable_adapter():
        if read:
            module = next(
                m for m in model.modules() if isinstance(m, TunedModule) and isinstance(m.weight, torch.Tensor)
            )
            assert torch.isfinite(module.weight).all()
        return logits(model)


def _merged(model):
    adapted = logits(model)
    model.merge_adapter()
    assert torch.equal(logits(model), adapted)
    model.unmerge_adapter()
    return _disabled(model)


def _second(model):
    model.add_adapter("other", SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3]))
    step(model)
    model.set_adapter("other")
    step(model)
    assert not away(model), "one of two adapters is trained"
    return _disabled(model)


def _deleted(model):
    model.delete_adapter("default")
    return logits(model.base_model.model)


def _saved(model, folder):
    model.peft_config["default"].encoding = "lossless"
    adapted = logits(model)
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(build("bert"), folder)
    assert torch.equal(logits(loaded), adapted)
    return _disabled(model)


@pytest.mark.parametrize("is_left_out", [False, True], ids=["", "left out of FSDP2's units"])
@pytest.mark.parametrize("use", USES)
def test_what_needs_the_base_has_it_brought_back(use, is_left_out, tmp_path):
    base, model = tuned()
    if is_left_out:
        leave_base_out_of_units(model, torch.device("cpu"))
        step(model)
    assert away(model)
    assert torch.equal(USES[use](model, tmp_path), logits(base))


def test_ranking_a_trained_model_and_loading_into_it_are_the_same(tmp_path):
    found = []
    for base_copies in ("auto", "device"):
        _, model = tuned(base_copies=base_copies)
        rows = [{name: value[i] for name, value in batch("bert").items()} for i in range(4)]
        scores = rank_layers(model, rows, num_samples=4).scores
        model.peft_config["default"].encoding = "lossless"
        model.save_pretrained(tmp_path / base_copies)
        step(model, seed=7)
        load_adapter = {"adapter_name": "default", "is_trainable": True}
        model.load_adapter(tmp_path / base_copies, **load_adapter)
        step(model, seed=8)
        found.append((scores, logits(model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_it_stays_while_every_step_needs_it_and_goes_again_afterwards():
    _, model = tuned(steps=1)
    for seed in range(2):  # as in DPO
        _disabled(model)
        step(model, seed=seed)
        assert not away(model)
    step(model)
    assert away(model)


def test_host_sends_it_away_at_every_step():
    _, model = tuned(steps=1, base_copies="host")
    _disabled(model)
    step(model)
    assert away(model)


def test_a_model_that_ddp_is_yet_to_wrap_stays_on_one_device(monkeypatch):
    _, model = tuned(steps=0)
    monkeypatch.setattr(host, "world_size", lambda: 2)
    model.train()
    assert not away(model)
    monkeypatch.setattr(host, "ddp_around", lambda model: [model])
    model.train()
    assert away(model), "it leaves without a forward pass, of which a compiled model would not tell"


def test_the_first_step_of_one_of_several_processes_sends_it_away(monkeypatch):
    _, model = tuned(steps=0)
    monkeypatch.setattr(host, "world_size", lambda: 2)
    step(model)
    assert away(model)


def test_tied_and_first_parameters_stay():
    model = get_peft_model(build("llama"), SurgicalConfig(layers=[0], extra_modules=["model.embed_tokens"]))
    step(model, "llama")
    assert away(model)
    assert not any("embed_tokens" in name for name in away(model))


def test_strata_and_a_copy_of_the_model():
    base = build("bert")
    config = StratifiedConfig(strata=[{"layers": "0-2", "tune": "bitfit"}, {"layers": [3], "tune": "full"}])
    model = get_peft_model(copy.deepcopy(base), config)
    step(model)
    assert away(model)
    assert torch.equal(_disabled(copy.copy(model)), logits(base.eval()))


def test_lora_is_left_alone():
    model = get_peft_model(build("bert"), LoraConfig(target_modules=["query"]))
    step(model)
    assert not away(model)


def test_an_unknown_place_is_named():
    with pytest.raises(ValueError, match="base_copies='gpu' must be one of 'auto', 'host', 'device'"):
        SurgicalConfig(layers=[0], base_copies="gpu")
