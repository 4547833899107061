"""What others store of a fine-tune, written anew: XOR and zstd (BitX of ZipLLM), and codes without zstd."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file

from peft_surgical.files.encodings import ENCODINGS


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, (bytes of an entry, entries)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.itemsize).T


def write_bitx(trained: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], path: Path) -> None:
    """XOR with the base's bits, byte by byte of the entries, which is smaller than entry by entry; packed by zstd."""
    stored = {}
    for name, tensor in trained.items():
        if name in base and base[name].shape == tensor.shape:
            mixed = np.ascontiguousarray(bits(tensor) ^ bits(base[name].to(tensor.dtype)))
            packed = zstandard.ZstdCompressor(level=3).compress(mixed.data)
            tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        stored[name] = tensor
    save_file(stored, path)


def read_bitx(path: Path, trained: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors again; `trained` has their dtypes."""
    found = {}
    for name, tensor in load_file(path).items():
        if name in base and base[name].shape == trained[name].shape:
            start = bits(base[name].to(trained[name].dtype))
            mixed = np.frombuffer(zstandard.ZstdDecompressor().decompress(tensor.numpy().tobytes()), np.uint8)
            raw = np.ascontiguousarray((mixed.reshape(start.shape) ^ start).T)
            tensor = torch.from_numpy(raw).view(trained[name].dtype).reshape(trained[name].shape)
        found[name] = tensor
    return found


def without_zstd(trained: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], encoding: str) -> int:
    """The bytes of an encoding's codes and step sizes as they are, and of what stays plain."""
    total = 0
    for name, tensor in trained.items():
        own = base.get(name)
        is_coded = tensor.ndim > 1 and own is not None and own.shape == tensor.shape
        parts = ENCODINGS[encoding].encode(tensor, own).values() if is_coded and own is not None else [tensor]
        total += sum(part.nbytes for part in parts)
    return total
