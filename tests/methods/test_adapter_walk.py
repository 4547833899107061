"""Long random sequences of everything that can be done with adapters, against plain models with weights from a dict.

What each adapter's weights are is kept in a dictionary beside the model: read off once after training, carried over by
loading, combining and swapping. After every step a plain model of transformers with these weights must give the same
answer: bit for bit for SURGICAL, to rounding where LoRA adds a product.

PEFT_SURGICAL_WALKS=10000 pytest tests/methods/test_adapter_walk.py -k many
"""

from __future__ import annotations

import copy
import os
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from adapters import TASKS, attention, make_config
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from tiny_models import batch, build


FAMILIES = ["bert", "llama", "t5", "vit"]
METHODS = ["SURGICAL", "STRATIFIED", "LORA"]
STEPS = 60
Weights = dict[str, torch.Tensor]

_COPY = re.compile(r"base_model\.model\.(.+?)(\.own_tensors)?\.(?:surgical_params|lora_tuned)\.(\w+)\.([^.]+)")
_LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(\w+)\.weight")
_HEAD = re.compile(r"base_model\.model\.(.+)\.modules_to_save\.(\w+)\.(.+)")


class Walk:
    """One sequence. `adapters` says what weights each adapter stands for, `saved` what each folder does."""

    def __init__(self, family: str, method: str, seed: int, folder: Path):
        self.family, self.method, self.folder = family, method, folder
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.base = build(family).eval()
        self.base_weights = {name: tensor.clone() for name, tensor in self.base.state_dict().items()}
        self.inputs = batch(family)
        self.log: list[str] = []
        self.answered: tuple[Weights, torch.Tensor] = {}, torch.empty(0)
        self.saved: dict[Path, tuple[Weights, tuple[int, ...]]] = {}
        self.count = 0
        self.start()

    # ---- what the model is at present

    def start(self) -> None:
        self.adapters: dict[str, Weights] = {}
        self.layers: dict[str, tuple[int, ...]] = {}
        self.active, self.is_enabled, self.merged = "", True, ""
        self.op_add()

    def new_name(self) -> str:
        self.count += 1
        return f"task{self.count}"

    def config(self, layers: tuple[int, ...]):
        if self.method == "LORA":
            # no head: PEFT makes one for a task type, and that of its own is not what this compares
            return LoraConfig(r=2, target_modules=attention(self.family), task_type=TASKS[self.family])
        return make_config(self.method, self.family, layers)

    def read(self, adapter: str) -> Weights:
        """The weights that an adapter stands for, from its tensors alone."""
        weights = {name: tensor.clone() for name, tensor in self.base_weights.items()}
        factors: dict[str, Weights] = {}
        for name, tensor in self.model.state_dict().items():
            if (match := _COPY.fullmatch(name)) and match[3] == adapter:
                weights[f"{match[1].replace('.base_layer', '')}.{match[4].replace('|', '.')}"] = tensor.clone()
            elif (match := _HEAD.fullmatch(name)) and match[2] == adapter:
                weights[f"{match[1]}.{match[3]}"] = tensor.clone()
            elif (match := _LORA.fullmatch(name)) and match[3] == adapter:
                factors.setdefault(match[1], {})[match[2]] = tensor
        config = self.model.peft_config[adapter]
        for path, factor in factors.items():
            name = f"{path.replace('.base_layer', '')}.weight"
            product = factor["B"].double() @ factor["A"].double() * (config.lora_alpha / config.r)
            weights[name] = (weights[name].double() + product).float()
        return weights

    def expected(self) -> Weights:
        if self.merged:
            return self.adapters[self.merged]
        return self.adapters[self.active] if self.is_enabled else self.base_weights

    @torch.no_grad()
    def check(self, model=None, dtype: torch.dtype = torch.float32) -> None:
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        weights = self.expected()
        if self.answered[0] is not weights or self.answered[1].dtype != dtype:  # no such dictionary is ever changed
            self.base.load_state_dict(weights)
            self.answered = weights, self.base.to(dtype)(**inputs).logits
            self.base.float()
        right = self.answered[1]
        model = self.model if model is None else model
        was_training = model.training
        seen = model.eval()(**inputs).logits
        model.train(was_training)
        # PEFT's LoRA subtracts when it is unmerged, so that its base drifts
        is_exact = self.method == "SURGICAL" or (self.method == "STRATIFIED" and not self.is_enabled)
        if not (torch.equal(right, seen) if is_exact else torch.allclose(right, seen, atol=2e-4, rtol=2e-4)):
            raise AssertionError(f"differs by {(right - seen).abs().max():.1e}")

    # ---- what can be done; each returns False if it has no meaning now

    def op_add(self):
        if self.merged or not self.is_enabled or len(self.adapters) >= 4:
            return False
        name = self.new_name()
        same = self.method != "SURGICAL"
        layers = (1, 3) if same else tuple(sorted(self.random.sample(range(4), self.random.choice([1, 2]))))
        if not self.adapters:
            base = build(self.family).eval()
            base.load_state_dict(self.base_weights)
            self.model = get_peft_model(base, self.config(layers), adapter_name=name)
            self.active = name
        else:
            self.model.add_adapter(name, self.config(layers))
        self.adapters[name], self.layers[name] = self.read(name), layers
        assert all(torch.equal(t, self.adapters[name][n]) for n, t in self.base_weights.items())

    def op_train(self):
        if self.merged or not self.is_enabled:
            return False
        self.model.set_adapter(self.active)  # one that was loaded for inference
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        inputs = {**batch(self.family, seed=self.random.randrange(99))}
        self.model(**inputs).loss.backward()
        torch.optim.SGD(trained, lr=0.3).step()
        self.model.zero_grad()
        before = self.adapters[self.active]
        self.adapters[self.active] = self.read(self.active)
        assert any(not torch.equal(t, before[n]) for n, t in self.adapters[self.active].items()), "nothing was trained"

    def op_set(self):
        if self.merged or not self.is_enabled:
            return False
        self.active = self.random.choice(list(self.adapters))
        self.model.set_adapter(self.active)

    def op_disable(self):
        if self.merged or not self.is_enabled:
            return False
        self.model.base_model.disable_adapter_layers()
        self.is_enabled = False

    def op_enable(self):
        if self.is_enabled:
            return False
        self.model.base_model.enable_adapter_layers()
        self.is_enabled = True

    def op_disabled_for_a_while(self):
        if self.merged or not self.is_enabled:
            return False
        with self.model.disable_adapter():
            self.is_enabled = False
            self.check()
        self.is_enabled = True

    def op_merge(self):
        if self.merged or not self.is_enabled:
            return False
        self.model.merge_adapter()
        self.merged = self.active

    def op_unmerge(self):
        if not self.merged:
            return False
        self.model.unmerge_adapter()
        self.merged = ""

    def op_delete(self):
        if self.merged or not self.is_enabled or len(self.adapters) < 2:
            return False
        name = self.random.choice(list(self.adapters))
        self.model.delete_adapter(name)
        del self.adapters[name], self.layers[name]
        if name == self.active:
            [self.active] = self.model.active_adapters
            assert self.active == next(iter(self.adapters)) or self.method == "LORA"  # which takes them by name

    def op_save(self):
        if self.merged:
            return False
        name = self.random.choice(list(self.adapters))
        place = self.folder / f"save{len(self.saved)}"
        self.model.save_pretrained(place, selected_adapters=[name])
        self.saved[place / name] = self.adapters[name], self.layers[name]

    def op_load(self):
        if self.merged or not self.is_enabled or not self.saved or len(self.adapters) >= 4:
            return False
        path, name = self.random.choice(list(self.saved)), self.new_name()
        self.model.load_adapter(path, name, is_trainable=self.random.random() < 0.5)
        self.adapters[name], self.layers[name] = self.saved[path]

    def op_hotswap(self):
        name = self.random.choice(list(self.adapters))
        alike = [path for path, (_, layers) in self.saved.items() if layers == self.layers[name]]
        if self.merged or not self.is_enabled or not alike or (self.method, self.family) == ("LORA", "bert"):
            return False  # PEFT swaps no heads
        path = self.random.choice(alike)
        hotswap_adapter(self.model, str(path), name, torch_device="cpu")
        self.adapters[name] = self.saved[path][0]

    def op_weighted(self):
        if self.merged or not self.is_enabled or not 2 <= len(self.adapters) <= 3:
            return False
        names, name = self.random.sample(list(self.adapters), 2), self.new_name()
        if (self.method, self.family) == ("LORA", "bert"):
            return False  # PEFT combines no heads
        if self.method != "SURGICAL" and len({self.model.peft_config[n].r for n in names}) > 1:
            return False
        weights = [self.random.choice([0.5, 1.0, -0.5]) for _ in names]
        kind = {} if self.method == "SURGICAL" else {"combination_type": "cat"}
        self.model.base_model.add_weighted_adapter(names, weights, name, **kind)
        wanted = {}
        for key, base in self.base_weights.items():
            sources = [self.adapters[n][key].double() - base.double() for n in names]
            wanted[key] = (base.double() + sum(w * d for w, d in zip(weights, sources, strict=True))).to(base.dtype)
        seen = self.read(name)
        for key, tensor in wanted.items():
            torch.testing.assert_close(seen[key], tensor, atol=1e-5, rtol=1e-4)
        self.adapters[name] = seen
        self.layers[name] = tuple(sorted({i for n in names for i in self.layers[n]}))
        if self.method != "SURGICAL":
            self.layers[name] = (-self.count,)  # of another rank

    def op_state(self):
        if self.merged:
            return False
        name = self.random.choice(list(self.adapters))
        if self.random.random() < 0.5:
            state = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()
            self.model.load_state_dict(state)
        else:
            state = {k: t.clone() for k, t in get_peft_model_state_dict(self.model, adapter_name=name).items()}
            set_peft_model_state_dict(self.model, state, adapter_name=name)

    def op_mode(self):
        self.model.train(self.random.random() < 0.5)

    def op_cast(self):
        if self.merged:
            return False
        self.model.double()
        self.check(dtype=torch.float64)
        self.model.float()

    def op_deepcopy(self):
        self.model = copy.deepcopy(self.model)

    def op_fresh_load(self):
        if self.merged or not self.is_enabled or not self.saved:
            return False
        path, name = self.random.choice(list(self.saved)), self.new_name()
        base = build(self.family).eval()
        self.model = PeftModel.from_pretrained(base, path, adapter_name=name)
        weights, layers = self.saved[path]
        self.adapters, self.layers, self.active = {name: weights}, {name: layers}, name

    def op_unload(self):
        if self.merged or not self.is_enabled or self.random.random() < 0.7:
            return False
        if self.random.random() < 0.5:
            self.check(self.model.merge_and_unload())
        else:
            plain = self.model.unload()
            for name, tensor in plain.state_dict().items():
                same = torch.equal if self.method == "SURGICAL" else torch.allclose  # LoRA's unmerge subtracts
                if self.method == "LORA" and name.startswith("classifier."):
                    continue  # PEFT leaves the trained head
                assert same(tensor, self.base_weights[name]), f"{name} of the base"
        self.start()

    # ----

    def run(self, steps: int = STEPS) -> None:
        ops = [name for name in dir(self) if name.startswith("op_")]
        done = 0
        while done < steps:
            name = self.random.choice(ops)
            self.log.append(name.removeprefix("op_"))
            if getattr(self, name)() is False:
                self.log.pop()
                continue
            done += 1
            self.check()
            trained = [n for n, p in self.model.named_parameters() if p.requires_grad]
            assert all(any(f".{adapter}." in n for adapter in self.adapters) for n in trained), "the base is trained"


def walk(seed: int, folder: Path) -> None:
    family = FAMILIES[seed % 4]
    method = METHODS[seed // 4 % 3]
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(PeftModel, "create_or_update_model_card", lambda self, folder: None)  # a tenth of the time
        one = Walk(family, method, seed, folder)
        try:
            one.run()
        except Exception as error:
            raise AssertionError(f"walk {seed}, {family}, {method}, after {', '.join(one.log)}: {error!r}") from error


@pytest.mark.parametrize("seed", range(8))
def test_sixty_random_steps_equal_a_plain_model_at_each(seed, tmp_path):
    walk(seed, tmp_path)


@pytest.mark.slow
def test_many_random_walks(tmp_path):
    for seed in range(100, 100 + int(os.environ.get("PEFT_SURGICAL_WALKS", "16"))):
        walk(seed, tmp_path / str(seed))
