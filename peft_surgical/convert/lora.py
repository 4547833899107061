"""A stock LoRA adapter that comes as near as its rank allows to what a SURGICAL one changed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.convert.change import locate_tensors, table
from peft_surgical.convert.convert import base_of, write_beside
from peft_surgical.convert.merge import tensors_of_base
from peft_surgical.files.adapter import method_of
from peft_surgical.files.encodings import difference
from peft_surgical.methods.config import naming_adapter, open_adapter
from peft_surgical.names import PREFIX


@dataclass(frozen=True)
class LoraApproximation:
    """How near `approximate_lora` came.

    Args:
        rank: Of the LoRA matrices.
        errors: By layer (or module outside the layers), what LoRA lacks of the difference to the base, as norms:
            0 where it has all of it, 1 where it has none. Biases and norms of the layer count.
        left_out: The tensors of which LoRA has nothing, by their names in the base: biases, norms, embeddings, heads.
        nbytes: The size of the tensors that were written.
    """

    rank: int
    errors: dict[str, float]
    left_out: list[str]
    nbytes: int

    def __str__(self) -> str:
        return table(("layer", f"error at rank {self.rank}"), [(n, f"{e:.3f}") for n, e in self.errors.items()])


def approximate_lora(
    adapter: str | os.PathLike, output: str | os.PathLike, rank: int, *, base: str | os.PathLike | None = None
) -> LoraApproximation:
    """Write what a SURGICAL adapter changed as a stock LoRA adapter, for servers that take nothing else.

    Each matrix's difference to the base is cut to its largest singular values, which no matrix of this rank comes
    nearer to (Eckart & Young 1936). Look at the errors, and measure the result on the task before it is served.

    Args:
        adapter: Its folder, or its name on the hub.
        output: The folder to write to, another one.
        rank: Of the LoRA matrices; servers have a limit.
        base: The base that it was trained on; by default the one that its config names.

    Raises:
        ValueError: The adapter is not a SURGICAL one, changed no matrix of a linear module, the rank is below 1, a
            file is damaged, or the base is another one.
    """
    saved = open_adapter(adapter)
    if saved.config.peft_type != "SURGICAL":
        raise ValueError(
            f"{saved.source} is a {method_of(saved.config)} adapter; SURGICAL ones are approximated by LoRA. "
            "export_lora writes the LoRA part of a STRATIFIED one (export-lora without --rank)."
        )
    if rank < 1:
        raise ValueError(f"rank={rank} is not allowed. Give 1 or more.")
    with naming_adapter(saved.config):
        old = tensors_of_base(base_of(saved, base), saved)
    places = locate_tensors(old.model)
    tensors: dict[str, torch.Tensor] = {}
    paths: set[str] = set()
    left_out: list[str] = []
    norms: dict[tuple[str, int], tuple[float, float]] = {}  # by layer, of what LoRA lacks and of the whole difference
    transposed = False
    for entry in saved.entries:
        own = old.get(entry.name) if entry.is_copy else None
        if own is None:  # the task's head
            left_out.append(entry.name)
            continue
        trained = saved.decode(entry, own)
        path, _, key = entry.name.rpartition(".")
        module = old.model.get_submodule(path)
        lacking = delta = difference(trained, own)
        # not their subclasses: of MultiheadAttention's own kind only the weight is used, and LoRA would do nothing
        if key == "weight" and type(module) in (nn.Linear, Conv1D):
            paths.add(path)
            is_transposed = isinstance(module, Conv1D)
            transposed = transposed or is_transposed
            up, down = _factors(delta.mT if is_transposed else delta, rank, trained.dtype)
            tensors |= {f"{PREFIX}{path}.lora_A.weight": down, f"{PREFIX}{path}.lora_B.weight": up}
            product = up.to(delta.dtype) @ down.to(delta.dtype)
            lacking = delta - (product.mT if is_transposed else product)
        else:
            left_out.append(entry.name)
        _, stack, layer, _ = places[entry.name]
        place = (path, -1) if stack is None or layer is None else (stack, layer)
        lost, whole = norms.get(place, (0.0, 0.0))
        norms[place] = math.hypot(lost, float(lacking.norm())), math.hypot(whole, float(delta.norm()))
    if not paths:
        raise ValueError(f"{saved.source} changed no matrix of a linear module, which is all that LoRA adds to.")
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=sorted(paths), fan_in_fan_out=transposed)
    config.base_model_name_or_path = saved.config.base_model_name_or_path
    nbytes = write_beside(saved, Path(output), config, tensors)
    errors = {
        name if layer < 0 else f"{name} {layer}": lost / whole if whole else 0.0
        for (name, layer), (lost, whole) in sorted(norms.items())
    }
    return LoraApproximation(rank, errors, left_out, nbytes)


def _factors(delta: torch.Tensor, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices (out, rank) and (rank, in) whose product is nearest to delta; zeros where it has a smaller rank."""
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    roots = values[:rank].sqrt()
    missing = rank - len(roots)
    up, down = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return (
        nn.functional.pad(up, (0, missing)).to(dtype).contiguous(),
        nn.functional.pad(down, (0, 0, 0, missing)).to(dtype).contiguous(),
    )
