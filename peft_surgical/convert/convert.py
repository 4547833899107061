"""Adapters in another form: another encoding, with step sizes that were learned (BitDelta), or the LoRA part alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from tqdm import tqdm

from peft_surgical.convert.merge import tensors_of_base
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import AdapterFile, encode_tensor, method_of, write_adapter
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.files.encodings import check_encoding, difference
from peft_surgical.methods.config import naming_adapter, open_adapter


def convert_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    encoding: str,
    *,
    max_error: float = 0.0,
    base: str | os.PathLike | None = None,
    progress: bool = False,
) -> int:
    """Write an adapter again with another encoding.

    Args:
        adapter: Its folder, or its name on the hub.
        output: The folder to write to, another one.
        encoding: `"values"`, `"lossless"`, `"rows"`, `"bf16"`, `"int8"`, `"int4"`, `"sign"`, or `"auto"` for the
            smallest of them.
        max_error: With `"auto"`, the most that each tensor may be off, as a part of its difference to the base (norm
            over norm, L2); 0 restores every bit. It counts from the adapter as it is.
        base: The base that it was trained on; by default the one that its config names.
        progress: Whether to show a progress bar.

    Returns:
        The size of the tensors that were written, in bytes.

    Raises:
        ValueError: The encoding is not known, the error cannot be, the adapter holds no copies of the base's tensors
            (LoRA alone), a file is missing or damaged, or the base is another one.
    """
    check_encoding(encoding, max_error)
    saved = open_adapter(adapter)
    if not any(entry.is_copy for entry in saved.entries):
        raise ValueError(f"{saved.source} holds no tuned copies of the base's tensors, so there is nothing to encode.")
    with naming_adapter(saved.config):
        old = tensors_of_base(base_of(saved, base), saved)
    config: Any = saved.config
    config.encoding, config.max_error = encoding, max_error
    tensors: dict[str, torch.Tensor] = {}
    for entry in tqdm(saved.entries, "Converting", disable=not progress):
        own = old.get(entry.name) if entry.is_copy else None
        tensors.update(encode_tensor(entry.key, saved.decode(entry, own), own, encoding, max_error))
    return write_beside(saved, output, config, tensors)


def export_lora(adapter: str | os.PathLike, output: str | os.PathLike, *, head: bool = False) -> list[str]:
    """Write the LoRA part of a STRATIFIED adapter as a stock LoRA adapter, for servers that take only that.

    Args:
        adapter: Its folder, or its name on the hub.
        output: The folder to write to, another one.
        head: Whether the task's head goes along, in `modules_to_save`. Stock PEFT takes that, servers do not.

    Returns:
        The tensors that are left out, by their names in the base: tuned biases and norms, and the head. Without them
        the exported adapter computes something else, so this list should be looked at.

    Raises:
        ValueError: The adapter is not a STRATIFIED one, or has neither LoRA nor a head to go along.
    """
    saved = open_adapter(adapter)
    if saved.config.peft_type != "STRATIFIED":
        raise ValueError(
            f"{saved.source} is a {method_of(saved.config)} adapter; only STRATIFIED ones have a LoRA part to "
            "export. merge_checkpoint writes a whole checkpoint, which every server takes; approximate_lora (--rank) "
            "a LoRA adapter that comes near."
        )
    taken = [entry for entry in saved.entries if ".lora_" in entry.key and not entry.is_copy]
    others = [entry for entry in saved.entries if not entry.is_copy and entry not in taken] if head else []
    if not taken and not others:
        raise ValueError(f"{saved.source} has no LoRA, only tuned copies: there is nothing to export.")
    paths = sorted({entry.name.partition(".lora_")[0] for entry in taken})
    known = {field.name for field in fields(LoraConfig)}
    options = {name: value for name, value in saved.config.to_dict().items() if name in known}
    config = LoraConfig(**{**options, "peft_type": "LORA", "target_modules": paths or DUMMY_TARGET_MODULES})
    if not others:  # by the task type or the tokens PEFT would look for their tensors
        config.modules_to_save = config.task_type = config.trainable_token_indices = None
    kept = [*taken, *others]
    write_beside(saved, output, config, {entry.key: saved.file[entry.key] for entry in kept})
    return [entry.name for entry in saved.entries if entry not in kept]


def base_of(saved: AdapterFile, base: str | os.PathLike | None = None) -> Checkpoint:
    """The checkpoint of an adapter's base, by default the one that the adapter's config names."""
    source = base or saved.config.base_model_name_or_path
    if not source:
        raise ValueError(f"{saved.source} does not name its base. Give base=... (--base).")
    return Checkpoint(source)


def write_beside(
    saved: AdapterFile, output: str | os.PathLike, config: PeftConfig, tensors: Mapping[str, torch.Tensor]
) -> int:
    """Write an adapter that is made from another; gives the size of its tensors in bytes."""
    folder = Path(output)
    if folder.resolve() == Path(saved.folder).resolve():
        raise ValueError(f"output={str(output)!r} is the adapter itself. Name another folder.")
    return write_adapter(folder, config, tensors, saved.config.auto_mapping)


# ---- learned step sizes


@dataclass(frozen=True)
class Distillation:
    """What `distil_scales` achieved."""

    before: float  # mean squared error of the outputs with the mean difference of each row as its step size
    after: float  # the same with the step sizes that were found


@dataclass
class _Signs:
    """One tensor as base, signs and a step size per row; the step size is what is learned, as a factor."""

    parameter: nn.Parameter
    base: torch.Tensor
    signs: torch.Tensor
    start: torch.Tensor
    log_factor: torch.Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter, base: torch.Tensor) -> _Signs:
        delta = difference(parameter.detach(), base.detach())
        start = delta.abs().mean(-1, keepdim=True)
        signs = torch.where(delta > 0, 1.0, -1.0)
        return cls(parameter, base.detach().float(), signs, start, torch.zeros_like(start, requires_grad=True))

    def tensor(self) -> torch.Tensor:
        """The tensor with the present step sizes."""
        return self.base + self.signs * (self.start * self.log_factor.exp())


def distil_scales(
    model: PeftModel,
    batches: Iterable[Mapping[str, Any]],
    *,
    epochs: int = 4,
    learning_rate: float = 0.02,
    progress: bool = False,
) -> Distillation:
    """Put the active adapter's matrices into the form that the `sign` encoding holds, with the best step sizes.

    Each matrix becomes base plus or minus one step size per row (Liu et al. 2024, BitDelta, section 3.2). The step
    sizes start as the mean difference of their row and are learned so that the model's outputs stay near those of the
    adapter as it was trained; labels are not needed. Biases, norms and the head stay as they are. Saving the adapter
    with `encoding="sign"`, which is set, then loses nothing more.

    Args:
        model: The model with the trained adapter active. The adapter is changed.
        batches: A few batches of inputs as the model takes them, e.g. a `DataLoader`; `labels` in them are ignored.
        epochs: How often to go over the batches.
        learning_rate: Adam's, of the logarithm of the step sizes.
        progress: Whether to show a progress bar.

    Returns:
        How far the outputs were off before and after.

    Raises:
        ValueError: No batch was given, or the active adapter has no matrix to encode.

    Example:

        >>> from peft import get_peft_model
        >>> from peft_surgical import SurgicalConfig
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = get_peft_model(BertModel(config), SurgicalConfig(layers=[1], init_weights=False))
        >>> found = distil_scales(model, [{"input_ids": torch.tensor([[1, 2, 3]])}])
        >>> found.after <= found.before
        True
    """
    adapter = model.active_adapters[0]
    matrices = _matrices(model, adapter)
    inputs = [{k: v for k, v in batch.items() if k not in ("labels", "label")} for batch in batches]
    inputs = send_to_device(inputs, next(model.parameters()).device)
    if not matrices or not inputs:
        what = f"adapter {adapter!r} has no matrix to encode" if inputs else "there is no batch to imitate it on"
        raise ValueError(f"No step sizes can be found: {what}.")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            wanted = [output_of(model(**x)).float() for x in inputs]
        before = _error(model, matrices, inputs, wanted)
        best, factors = before, [m.log_factor.detach().clone() for m in matrices.values()]
        optimizer = torch.optim.Adam([m.log_factor for m in matrices.values()], lr=learning_rate)
        for _ in tqdm(range(epochs), disable=not progress, desc="Distilling"):
            for x, target in zip(inputs, wanted, strict=True):
                optimizer.zero_grad()
                with torch.enable_grad():
                    _loss(model, matrices, x, target).backward()
                optimizer.step()
            error = _error(model, matrices, inputs, wanted)
            if error < best:
                best, factors = error, [m.log_factor.detach().clone() for m in matrices.values()]
    finally:
        model.train(was_training)
    with torch.no_grad():
        for matrix, factor in zip(matrices.values(), factors, strict=True):
            matrix.log_factor = factor
            matrix.parameter.copy_(matrix.tensor())
    config: Any = model.peft_config[adapter]
    config.encoding, config.max_error = "sign", 0.0
    return Distillation(before, best)


def _matrices(model: nn.Module, adapter: str) -> dict[str, _Signs]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, _Signs] = {}
    for module in model.modules():
        if isinstance(module, TunedModule) and adapter in module.tuned:
            entry = module.tuned[adapter].wake()
            for key in entry.names:
                copy, base = entry[key], module.original(key)
                if isinstance(copy, nn.Parameter) and copy.ndim >= 2 and copy.is_floating_point():
                    found.setdefault(names[id(copy)], _Signs.of(copy, base))
    return found


def output_of(result: Any) -> torch.Tensor:
    """What a model answers: its logits, or its first output."""
    logits = getattr(result, "logits", None)
    return logits if logits is not None else result[0]


def _loss(
    model: nn.Module, matrices: Mapping[str, _Signs], x: Mapping[str, Any], target: torch.Tensor
) -> torch.Tensor:
    tensors = {name: matrix.tensor().to(matrix.parameter.dtype) for name, matrix in matrices.items()}
    output = output_of(torch.func.functional_call(model, tensors, (), dict(x)))
    return (output.float() - target).square().mean()


@torch.no_grad()
def _error(model: nn.Module, matrices: Mapping[str, _Signs], inputs: list, wanted: list) -> float:
    losses = [_loss(model, matrices, x, target) for x, target in zip(inputs, wanted, strict=True)]
    return float(torch.stack(losses).mean())
