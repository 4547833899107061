"""An interrupt at each line that an operation on adapters runs: afterwards it is done or not begun, and works again.

Ten of the lines of each operation, unless PEFT_SURGICAL_LINES says how many.
"""

from __future__ import annotations

import copy
import functools
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import METHODS, base_outputs, make, make_config, outputs, save
from lines import Line, interrupt, on_each_line, some_of
from peft import PeftModel, get_peft_model
from tiny_models import build
from torch import nn

from peft_surgical import RotateLayers
from peft_surgical.copies import host
from peft_surgical.files.check import checked


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LINES = int(os.environ.get("PEFT_SURGICAL_LINES", 10))
LAYERS = {
    "SURGICAL": {"one": [1, 2], "two": [2, 3], "new": [0, 2], "other one": [1, 2]},
    "STRATIFIED": {"one": [1, 2], "two": [1, 2], "new": [0, 2], "other one": [1, 2]},
}
# at these the first adapter is in the model and not guarded: an error says so when it is made again
UNGUARDED = (
    *("self._autocast =", "super()._cast_adapter_dtype"),
    *("given, kept =", "if fills :=", "kept.remove", "is_first =", "with whole_or_not_at_all(model.base"),
)
TRACED = ("/peft_surgical/",)

Run = Callable[[], object]


def lines_of(run: Run) -> list[Line]:
    """Some of the lines that something runs."""
    found: dict[Line, None] = {}
    on_each_line(run, lambda line: found.setdefault(line), TRACED)
    return some_of([*found], LINES)


def without(model: PeftModel) -> torch.Tensor:
    with model.disable_adapter():
        return outputs(model, "bert")


class Adapters:
    """A model with the adapters "one", which is active, and "two"; the file of another; what each of them answers."""

    def __init__(self, method: str, folder: Path):
        self.method = method
        made = {name: make(method, "bert", layers, seed=i) for i, (name, layers) in enumerate(LAYERS[method].items())}
        self.files = {name: save(model, folder / name) for name, model in made.items()}
        self.base = build("bert").eval()
        self.model = PeftModel.from_pretrained(copy.deepcopy(self.base), self.files["one"], "one")
        self.model.load_adapter(self.files["two"], "two")
        self.answers = {name: outputs(model, "bert") for name, model in made.items()}
        self.alone = base_outputs("bert")

    # ---- operations, each of which gives the model that then answers otherwise

    def load(self, model: PeftModel) -> nn.Module:
        model.load_adapter(self.files["new"], "new")
        return model

    def add(self, model: PeftModel) -> nn.Module:
        torch.manual_seed(0)
        model.add_adapter("new", make_config(self.method, "bert", [0, 2]))
        return model

    def combine(self, model: PeftModel) -> nn.Module:
        kind = "cat" if self.method == "STRATIFIED" else "linear"
        model.add_weighted_adapter(["one", "two"], [0.3, 0.7], "new", combination_type=kind)
        return model

    def delete(self, model: PeftModel) -> nn.Module:
        if "two" in model.peft_config:
            model.delete_adapter("two")
        return model

    def delete_active(self, model: PeftModel) -> nn.Module:
        if "one" in model.peft_config:
            model.delete_adapter("one")
        return model

    def switch(self, model: PeftModel) -> nn.Module:
        model.set_adapter("two")
        return model

    def disable(self, model: PeftModel) -> nn.Module:
        with model.disable_adapter():
            pass
        return model

    def reload(self, model: PeftModel) -> nn.Module:
        model.load_adapter(self.files["other one"], "one")
        return model

    def load_first(self, base: nn.Module) -> nn.Module:
        return PeftModel.from_pretrained(base, self.files["one"])

    def make_first(self, base: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(base, make_config(self.method, "bert", [0, 2]))

    def unload(self, model: PeftModel) -> nn.Module:
        return model.unload()

    def merge_and_unload(self, model: PeftModel) -> nn.Module:
        return model.merge_and_unload()

    # ---- after an interrupt

    def check(self, model: Any, name: str, done: nn.Module) -> None:
        assert checked.state is None
        if name.endswith("first"):
            assert torch.equal(outputs(model, "bert"), self.alone)
        elif name.endswith("unload"):
            # where some modules are merged the answer is the same but for LoRA's rounding
            either = self.answers["one"], outputs(done, "bert")
            assert any(torch.allclose(outputs(model, "bert"), answer, atol=1e-5) for answer in either)
            if any(path.endswith("base_layer") for path, _ in model.named_modules()):
                assert torch.allclose(without(model), self.alone, atol=1e-6)
        else:
            active = model.active_adapter
            before = ("other one", "one") if name == "reload" else (active,)
            assert model.active_adapters == [active]
            assert any(torch.equal(outputs(model, "bert"), self.answers[either]) for either in before)
            assert torch.equal(without(model), self.alone)
            assert "new" not in model.peft_config
            if active == "one":
                assert flags(model) == flags(self.model)
            for known in model.peft_config.keys() - ({"one"} if name == "reload" else set()):
                assert torch.equal(outputs(model, "bert", known), self.answers[known])
            model.set_adapter(active)
        again = getattr(self, name)(model).eval()
        assert again.state_dict().keys() == done.state_dict().keys()
        adapter = "new" if "new" in getattr(done, "peft_config", {}) else None
        assert torch.equal(outputs(again, "bert", adapter), outputs(done, "bert", adapter))


def flags(model: PeftModel) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters() if ".one." in name}


@functools.cache
def adapters_of(method: str, folder: Path) -> Adapters:
    return Adapters(method, folder)


OPERATIONS = [
    *("load", "add", "combine", "delete", "delete_active", "switch", "disable", "reload"),
    *("load_first", "make_first", "unload", "merge_and_unload"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_done_or_not_begun(name, method, tmp_path_factory):
    made = adapters_of(method, tmp_path_factory.getbasetemp() / f"interrupted-{method}")
    start = made.base if name.endswith("first") else made.model
    run: Callable[[Any], nn.Module] = getattr(made, name)
    done = run(copy.deepcopy(start)).eval()
    for line in lines_of(functools.partial(run, copy.deepcopy(start))):
        if name.endswith("first") and linecache.getline(*line).lstrip().startswith(UNGUARDED):
            continue
        model = copy.deepcopy(start)
        interrupt(functools.partial(run, model), line.__eq__, TRACED)
        try:
            made.check(model, name, done)
        except BaseException as error:
            raise AssertionError(f"interrupted at {line}") from error


# ---- turns of layers


def train(model: PeftModel, callback: RotateLayers, values: dict[str, torch.Tensor]) -> None:
    """What Trainer asks of the callback in four steps; `values` are those that were trained last."""
    options = SimpleNamespace(save_strategy="no")
    optimizer = SimpleNamespace(param_groups=[{"params": [*model.parameters()]}], state={})
    callback.on_init_end(options, None, None, model=model)
    callback.on_train_begin(options, SimpleNamespace(global_step=0), None, model=model, optimizer=optimizer)
    for step in range(4):
        callback.on_step_begin(options, SimpleNamespace(global_step=step), None, model=model, optimizer=optimizer)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data * 1.001 + 1e-5
                values[name] = parameter.detach().clone()
    callback.on_train_end(options, SimpleNamespace(global_step=4), None, model=model)


@pytest.mark.parametrize("at_rest", ["host", "device", "rounded"])
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_training_loses_no_values(method, at_rest, monkeypatch):
    monkeypatch.setattr(host, "_HOSTS", ())  # the CPU passes for an accelerator
    start = get_peft_model(build("bert").bfloat16(), make_config(method, "bert", range(4)))
    own = {name: p.detach().clone() for name, p in start.named_parameters() if p.requires_grad}

    def same(found: torch.Tensor, value: torch.Tensor) -> bool:
        if at_rest == "rounded":
            return torch.equal(found.bfloat16(), value.bfloat16())
        return found.dtype == value.dtype and torch.equal(found, value)

    def make_callback() -> RotateLayers:
        return RotateLayers(2, 2, "ascending", at_rest=at_rest)

    for line in lines_of(functools.partial(train, copy.deepcopy(start), make_callback(), {})):
        model, callback, values = copy.deepcopy(start), make_callback(), dict(own)
        interrupt(functools.partial(train, model, callback, values), line.__eq__, TRACED)
        saved = model.state_dict()
        callback.on_init_end(None, None, None, model=model)
        parameters = dict(model.named_parameters())
        for name, value in values.items():
            assert same(saved[name], value), (line, name)
            assert same(parameters[name], value), (line, name)
            assert parameters[name].requires_grad, (line, name)
        options, state = SimpleNamespace(save_strategy="no"), SimpleNamespace(global_step=1)  # amid a turn
        optimizer = SimpleNamespace(param_groups=[{"params": [*model.parameters()]}], state={})
        callback.on_train_begin(options, state, None, model=model, optimizer=optimizer)
        callback.on_step_begin(options, state, None, model=model, optimizer=optimizer)
        assert model.base_model.resting, line
        frozen = {p for p in parameters.values() if not p.requires_grad}
        assert frozen.issuperset(model.base_model.resting), line
