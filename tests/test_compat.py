"""What the package takes from the private parts of PEFT, transformers and PyTorch."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import peft
import pytest
import torch
from adapters import make, save
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from safetensors import SafetensorError
from tiny_models import build
from torch import nn

import peft_surgical
from peft_surgical import StratifiedModel, SurgicalModel, compat
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.methods.stratified.layers import LoraLinear, StratifiedModule


PACKAGE = Path(peft_surgical.__file__).parent
LISTED = [(place, name) for place, names in compat.PRIVATE_NAMES.items() for name in names]


@pytest.mark.parametrize(("place", "name"), LISTED, ids=lambda value: value)
def test_each_name_is_checked_when_the_package_is_imported(place, name, monkeypatch):
    module, _, cls = place.partition(":")
    owner = import_module(module)
    owner = getattr(owner, cls) if cls else owner
    if place == "torch:Tensor":
        pytest.skip("PyTorch's own classes cannot be changed")
    for holder in owner.__mro__ if isinstance(owner, type) else [owner]:
        if name in vars(holder):
            monkeypatch.delattr(holder, name)
    with pytest.raises(ImportError, match=rf"peft {peft.__version__}.* has no {name}.*pip install"):
        compat.check_private_names()


def test_an_attribute_of_instances_is_checked_too(monkeypatch):
    monkeypatch.setattr(compat, "LoraLayer", lambda base: nn.Identity())
    with pytest.raises(ImportError, match="Identity has no _caches"):
        compat.check_private_names()


@pytest.mark.parametrize("version", ["0.20.1.dev0", "0.19.1"])
def test_an_older_release_that_has_all_names_is_refused_too(version, monkeypatch):
    monkeypatch.setattr(peft, "__version__", version)
    with pytest.raises(ImportError, match=rf"peft {version}.*too old.*pip install"):
        compat.check_private_names()


def test_the_oldest_release_is_the_one_that_is_installed_with():
    assert f'"peft>={compat.OLDEST_PEFT}",' in (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_no_other_file_imports_a_private_name():
    foreign = ("peft", "transformers", "torch", "accelerate", "huggingface_hub", "datasets")
    found = [
        f"{path.relative_to(PACKAGE)}: {node.module}.{alias.name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "compat.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in foreign
        for alias in node.names
        if alias.name.startswith("_") or any(part.startswith("_") for part in (node.module or "").split("."))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SurgicalModel, BaseTuner),
        (StratifiedModel, LoraModel),
        (TunedModule, BaseTunerLayer),
        (TunedInPlace, BaseTunerLayer),
        (StratifiedModule, BaseTunerLayer),
        (LoraLinear, LoraLayer),
    ],
)
def test_each_private_method_that_is_overridden_is_listed(ours, theirs):
    own = {
        name
        for cls in ours.__mro__
        if cls.__module__.startswith("peft_surgical.")
        for name in vars(cls)
        if name.startswith("_") and not name.startswith(("__", "_abc")) and hasattr(theirs, name)
    }
    overridden = {name for name in own if not hasattr(nn.Module, name)}
    assert overridden <= {name for _, name in LISTED}


# ---- what private functions compute


def test_pefts_svd_gives_the_best_approximation_of_a_sum():
    """By singular values in float64: the sum of weight * scaling * B A, cut to a rank."""
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(7, 5)), LoraConfig(r=2, lora_alpha=6, target_modules=["0"]))
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=3, target_modules=["0"]))
    layer = model.base_model.model[0]
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    names, weights, rank = ["default", "other"], [0.7, -1.5], 2
    a, b = model.base_model._svd_generalized_task_arithmetic_weighted_adapter(
        "svd", names, weights, rank, layer, torch.empty(rank, 7), torch.empty(5, rank), None, "total", clamp=None
    )
    terms = [
        weight * layer.scaling[name] * (layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double())
        for name, weight in zip(names, weights, strict=True)
    ]
    u, s, v = torch.linalg.svd(sum(terms))
    best = u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank]
    assert torch.allclose(b.double() @ a.double(), best, atol=1e-4)


def test_peft_takes_an_adapters_name_out_of_a_key_and_puts_it_in():
    key = "base_model.model.fc.lora_A.weight"
    named = compat.insert_adapter_name({key: torch.zeros(1)}, "rte", "lora_")
    assert list(named) == ["base_model.model.fc.lora_A.rte.weight"]
    assert BaseTuner._remove_adapter_name_from_key(next(iter(named)), "rte") == key


def test_pefts_matching_of_names():
    config = LoraConfig(target_modules=["fc"], exclude_modules=["last.fc"])
    matches = import_module("peft.tuners.tuners_utils").check_target_module_exists
    assert matches(config, "first.fc")
    assert not matches(config, "first.fc2")
    assert isinstance(matches(config, "last.fc"), compat.ExcludedModule)


def test_pefts_submodules():
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1)})})
    parent, target, name = compat.get_submodules(model, "a.b")
    assert (parent, target, name) == (model["a"], model["a"]["b"], "b")


# ---- reading to the CPU


def test_adapters_of_other_methods_are_read_as_peft_reads_them(tmp_path, monkeypatch):
    """No more look-ups of their configs than PEFT makes itself: with names on the hub each is a request."""
    stock = peft_model.load_peft_weights.__wrapped__
    get_peft_model(build("bert"), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    looked_up, devices = [], []
    original = PeftConfig._get_peft_type.__func__

    def counted(cls, *args, **kwargs):
        looked_up.append(args)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(PeftConfig, "_get_peft_type", classmethod(counted))
    PeftModel.from_pretrained(build("bert"), tmp_path, torch_device="cpu")
    ours = len(looked_up)
    with monkeypatch.context() as without:
        without.setattr(peft_model, "load_peft_weights", lambda *a, **k: (devices.append(k), stock(*a, **k))[1])
        looked_up.clear()
        PeftModel.from_pretrained(build("bert"), tmp_path, torch_device="cpu")
    assert ours == len(looked_up)
    assert devices


@pytest.mark.parametrize("as_text", [True, False])
def test_adapters_of_this_package_are_read_to_the_cpu(as_text, tmp_path, monkeypatch):
    folder = save(make("SURGICAL", "bert", [1]), tmp_path)
    states = []
    ours, stock = peft_model.load_peft_weights, peft_model.load_peft_weights.__wrapped__
    monkeypatch.setattr(peft_model, "load_peft_weights", lambda *a, **k: (states.append(ours(*a, **k)), states[-1])[1])
    PeftModel.from_pretrained(build("bert"), str(folder) if as_text else folder, torch_device="meta")
    [state] = states
    assert state.keys() == stock(folder, "cpu").keys()
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    with pytest.raises(SafetensorError, match="meta"):
        stock(folder, "meta")  # PEFT's own reads to the device that it is told
