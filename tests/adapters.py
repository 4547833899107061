"""Adapters of both methods on tiny models, for the tests of what can be done with adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import batch, build
from torch import nn

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.files.check import add_header


METHODS = ["SURGICAL", "STRATIFIED"]
TASKS = {
    "bert": "SEQ_CLS",
    "gpt2": "CAUSAL_LM",
    "llama": "CAUSAL_LM",
    "mixtral": "CAUSAL_LM",
    "t5": "SEQ_2_SEQ_LM",
    "vit": None,
}
WITHOUT_BIASES = ("llama", "mixtral", "t5")


def make_config(method: str, family: str, layers: Iterable[int], **options):
    """A config that tunes just these layers: in full, or stratified with LoRA in the last of them."""
    layers = sorted(layers)
    options.setdefault("task_type", TASKS[family])
    if family == "vit":
        options.setdefault("modules_to_save", ["classifier"])
    if method == "SURGICAL":
        chosen = {"decoder": layers} if family == "t5" else layers
        return SurgicalConfig(layers=chosen, **options)
    without_lora = "norm" if family in WITHOUT_BIASES else "bitfit"
    strata = [{"layers": [i for i in range(4) if i not in layers], "tune": "frozen"}]
    strata.append({"layers": layers[-1:], "tune": "lora"})
    if layers[:-1]:
        strata.append({"layers": layers[:-1], "tune": without_lora})
    strata = [stratum for stratum in strata if stratum["layers"]]
    options.setdefault("target_modules", attention(family))
    return StratifiedConfig(strata={"decoder": strata} if family == "t5" else strata, r=2, **options)


def attention(family: str) -> list[str]:
    return {
        "bert": ["query", "value"],
        "gpt2": ["c_attn"],
        "t5": ["q", "v"],
        "vit": ["q_proj", "v_proj"] if _has("vit", "q_proj") else ["query", "value"],
    }.get(family, ["q_proj", "v_proj"])


def _has(family: str, name: str) -> bool:
    return any(path.endswith(f".{name}") for path, _ in build(family).named_modules())


def make(method: str, family: str, layers: Iterable[int], *, name: str = "default", seed: int = 1, **options):
    """A model with one adapter that is off its start."""
    torch.manual_seed(seed)  # LoRA starts at random
    model = get_peft_model(build(family), make_config(method, family, layers, **options), adapter_name=name)
    return shake(model, name, seed).eval()


def add(model: PeftModel, method: str, family: str, layers: Iterable[int], *, name: str, seed: int = 2, **options):
    """One more adapter that is off its start."""
    model.add_adapter(name, make_config(method, family, layers, **options))
    return shake(model, name, seed).eval()


def shake(model: nn.Module, adapter: str, seed: int = 1) -> nn.Module:
    """Move all trained tensors of an adapter, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{adapter}." in name or name.endswith(f".{adapter}"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def save(model: PeftModel, folder: Path, name: str = "default") -> Path:
    model.save_pretrained(folder, selected_adapters=[name])
    return folder if name == "default" else folder / name


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **of_base) -> None:
    """Write other tensors, or other facts of the base, into a saved adapter, with checksums that fit."""
    path = folder / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        base = json.loads(file.metadata()["peft_surgical"])["base"] | of_base
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "saved": add_header(path, base)}))


@torch.no_grad()
def outputs(model: nn.Module, family: str, adapter: str | None = None, seed: int = 0, **kwargs) -> torch.Tensor:
    """The logits of a batch, with an adapter or (None) as the model stands."""
    if adapter is not None:
        model.set_adapter(adapter)
    inputs = batch(family, seed=seed, labels=family == "t5")
    return model(**inputs, **kwargs).logits


@torch.no_grad()
def base_outputs(family: str, seed: int = 0) -> torch.Tensor:
    return outputs(build(family), family, seed=seed)


def merged_state(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """The weights of the plain model that an adapter stands for. The oracle for what adapters compute."""
    model = copy.deepcopy(model)
    model.set_adapter(adapter)
    return model.merge_and_unload().state_dict()


def plain(family: str, state: dict[str, torch.Tensor]) -> nn.Module:
    model = build(family)
    model.load_state_dict(state)
    return model
