"""Files of tensors that are read and written one tensor at a time, so that no whole model is ever in memory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


class TensorFile:
    """A safetensors file, memory-mapped.

    Args:
        path: The file.
        present_name: What a tensor is called here, by its name in the file.

    Raises:
        ValueError: It cannot be read as a safetensors file.
    """

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self.path = Path(path)
        try:
            self._file = safe_open(self.path, framework="pt")
            self._names = {present_name(name): name for name in self._file.keys()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as a safetensors file ({error}). Copy it again.") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(self._names[name])

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file.get_slice(self._names[name]).get_shape())

    def nbytes(self, name: str) -> int:
        """The size of a tensor in the file, in bytes."""
        return self.shape(name).numel() * self.dtype(name).itemsize

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in the file."""
        return DTYPES[self._file.get_slice(self._names[name]).get_dtype()]


class Checkpoint:
    """A model as `save_pretrained` writes it: `config.json` and one or several files of tensors.

    Args:
        source: A folder, or the name of a model on the hub. Safetensors files, sharded or not, and PyTorch's own are
            understood.

    Raises:
        ValueError: There is no such checkpoint, or a file of it is missing or damaged. The message names it.
    """

    def __init__(self, source: str | os.PathLike):
        self.source = os.fspath(source)
        self.folder = Path(source) if os.path.isdir(source) else _download_checkpoint(self.source)
        if (self.folder / "adapter_config.json").exists() and not (self.folder / "config.json").exists():
            raise ValueError(f"{self.source} is an adapter; a checkpoint of a whole model is needed here.")
        config = self.folder / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.source} has no config.json, so it is no checkpoint of a transformers model.")
        self.config: dict[str, Any] = json.loads(config.read_text())
        self._where: dict[str, Any] = {}
        for path in self._weight_files():
            is_safe = path.suffix == ".safetensors"
            file = TensorFile(path) if is_safe else torch.load(path, mmap=True, weights_only=True)
            self._where.update(dict.fromkeys(file, file))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name][name]

    def shape(self, name: str) -> torch.Size:
        file = self._where[name]
        return file.shape(name) if isinstance(file, TensorFile) else file[name].shape

    def nbytes(self, name: str) -> int:
        """The size of a tensor, in bytes."""
        file = self._where[name]
        return file.nbytes(name) if isinstance(file, TensorFile) else file[name].nbytes

    def side_files(self) -> list[Path]:
        """The tokenizer's and other small files beside config and weights."""
        found = [path for pattern in _SIDE_FILES for path in sorted(self.folder.glob(pattern))]
        return [path for path in found if path.name != "config.json" and not path.name.endswith(".index.json")]

    def _weight_files(self) -> list[Path]:
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if missing := [n for n in names if not (self.folder / n).is_file()]:
                    raise ValueError(f"{self.source} lacks {missing[0]}, which {index.name} lists. Copy it again.")
                return [self.folder / n for n in names]
            if (self.folder / name).is_file():
                return [self.folder / name]
        raise ValueError(f"{self.source} has no model.safetensors or pytorch_model.bin, whole or sharded.")


class TensorWriter:
    """Writes a safetensors file one tensor at a time; the file appears whole, when closed without an error.

    Args:
        path: The file to write.

    Example:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TensorWriter(f"{folder}/a.safetensors") as writer:
        ...         writer.write("x", torch.zeros(2))
        ...     TensorFile(f"{folder}/a.safetensors")["x"]
        tensor([0., 0.])
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.nbytes = 0
        # tensors of like alignment lie together, the widest first: the format has no padding
        self._parts = {size: tempfile.TemporaryFile(dir=self.path.parent) for size in (8, 4, 2, 1)}
        self._entries: dict[int, list[tuple[str, dict[str, Any], int]]] = {size: [] for size in self._parts}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        size = flat.numel() * flat.itemsize
        self._entries[flat.itemsize].append((name, entry, size))
        self._parts[flat.itemsize].write(flat.view(torch.uint8).numpy().data)
        self.nbytes += size

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            for part in self._parts.values():
                part.close()

    def _finish(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entries in self._entries.values():
            for name, entry, size in entries:
                header[name] = {**entry, "data_offsets": [offset, offset + size]}
                offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(aside, "wb") as out:
                out.write(len(text).to_bytes(8, "little") + text)
                for part in self._parts.values():
                    part.seek(0)
                    shutil.copyfileobj(part, out, 1 << 24)
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)


class CheckpointWriter:
    """Writes a model's tensors as transformers does: one file, or several and an index.

    Args:
        folder: Where to write.
        max_shard_size: The size in bytes that no file exceeds, unless by one tensor alone.
    """

    def __init__(self, folder: str | os.PathLike, max_shard_size: int):
        self.folder = Path(folder)
        self.max_shard_size = max_shard_size
        self._shards: list[tuple[TensorWriter, list[str]]] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        nbytes = self._shards[-1][0].nbytes if self._shards else 0
        if not self._shards or (nbytes and nbytes + tensor.nbytes > self.max_shard_size):
            self._finish_shard()
            self._shards.append((TensorWriter(self.folder / f".shard-{len(self._shards)}.safetensors"), []))
        writer, names = self._shards[-1]
        writer.write(name, tensor)
        names.append(name)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, error_type: object, *details: object) -> None:
        if error_type is None:
            self._finish_shard()
            self._name_shards()
        elif self._shards:
            self._shards[-1][0].__exit__(error_type, *details)
        for writer, _ in self._shards:
            writer.path.unlink(missing_ok=True)

    def _finish_shard(self) -> None:
        if self._shards:
            self._shards[-1][0].__exit__(None, None, None)

    def _name_shards(self) -> None:
        count = len(self._shards)
        for stale in ("model.safetensors", "model.safetensors.index.json"):
            (self.folder / stale).unlink(missing_ok=True)
        if count == 1:
            os.replace(self._shards[0][0].path, self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for i, (writer, names) in enumerate(self._shards, start=1):
            file = f"model-{i:05}-of-{count:05}.safetensors"
            os.replace(writer.path, self.folder / file)
            where.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": sum(w.nbytes for w, _ in self._shards)}, "weight_map": where}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def download(name: str, patterns: Sequence[str]) -> Path:
    """Fetch the files of a model on the hub that match, and give their folder.

    Raises:
        ValueError: There is no such model, or it cannot be had from here.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # offline, no such repository, not a name at all: the hub library has many kinds
        raise ValueError(
            f"{name} is neither a folder nor a model on the hub that can be had from here ({error})."
        ) from error


def _download_checkpoint(name: str) -> Path:
    folder = download(name, [*_SIDE_FILES, "*.safetensors"])
    return folder if any(folder.glob("*.safetensors")) else download(name, [*_SIDE_FILES, "*.bin"])
