"""Files of tensors: safetensors, read tensor by tensor and written whole or not at all."""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"
HEADER = "peft_surgical"  # the entry in a file's metadata that holds a `Header`
READERS = 4  # threads that read a file: one reads at half of what the memory gives, or less
_PAGE = 4096  # bytes
_ASIDE = ".writing"


@dataclass(frozen=True)
class Header:
    """What this package adds to an adapter's file."""

    base: dict[str, Any]  # see `describe_base`
    checksums: dict[str, int]  # by the tensors' names in the file
    tied: dict[str, str] = field(default_factory=dict)
    """By their plain names, tensors that are stored once, under the plain name of another one."""

    def __post_init__(self) -> None:
        if not all(isinstance(value, dict) for value in (self.base, self.checksums, self.tied)):
            raise ValueError("base, checksums and tied must be objects")

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> Header | None:
        """The header in a file's metadata; None of a file that another program wrote."""
        return cls(**json.loads(metadata[HEADER])) if HEADER in metadata else None

    @property
    def saved(self) -> str:
        """What `adapter_config.json` knows the file by."""
        return f"{zlib.crc32(json.dumps({**self.checksums, **self.tied}, sort_keys=True).encode()):08x}"

    def check(self, name: str, found: int) -> None:
        """Check a tensor's checksum."""
        if self.checksums.get(name) != found:
            raise ValueError(f"the tensor {name!r} is damaged: its checksum is wrong")


def checksum(dtype: str, shape: Sequence[int], data: np.ndarray) -> int:
    """A checksum of a tensor: of its dtype, its shape, and the sums of each 4 KiB, which take a third of the time."""
    whole = len(data) // _PAGE * _PAGE
    start = zlib.crc32(f"{dtype}{list(shape)}".encode())
    if whole:
        words = np.frombuffer(data[:whole].data, "<u8").reshape(-1, _PAGE // 8)
        start = zlib.crc32(words.sum(1, dtype="<u8").data, start)
    return zlib.crc32(data[whole:].data, start)


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Put a file or a tensor before what is wrong with it within the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


class TensorFile(Mapping[str, torch.Tensor]):
    """A safetensors file, memory-mapped. Tensors that have a checksum are checked when they are read."""

    header: Header | None  # the record of the base and the checksums; None of a file that another program wrote
    stored_as: dict[str, str]  # by a name in `names_in_file`, where it is another: the one that the file has

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self.path = Path(path)
        self._opened: Any = None
        self.header = self._read_header()
        self.names_in_file = {present_name(name): name for name in self._file.keys()}
        self.stored_as = {}

    @property
    def _file(self) -> Any:
        opened = self._opened
        try:  # no cached_property: up to Python 3.11 its class has one lock, which a forked child may find locked
            opened = self._opened = opened or safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} cannot be read as a safetensors file ({error}). Copy it again.") from error
        return opened

    def close(self) -> None:
        """Let go of the file until a tensor is asked for."""
        self._opened = None

    def also_as(self, name: str, other: str, present_name: Callable[[str], str] = lambda name: name) -> None:
        """Let a tensor have another name as well; `present_name` gives what that is called here."""
        self.stored_as[other] = self._key(name)
        self.names_in_file[present_name(other)] = other

    def _key(self, name: str) -> str:
        name = self.names_in_file[name]
        return self.stored_as.get(name, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names_in_file)

    def __len__(self) -> int:
        return len(self.names_in_file)

    def __contains__(self, name: object) -> bool:
        return name in self.names_in_file

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._key(name)
        tensor = self._file.get_tensor(key)
        if self.header is not None:
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            try:
                self.header.check(key, checksum(self._file.get_slice(key).get_dtype(), tensor.shape, data))
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}. Copy it again.") from None
        return tensor

    def spec(self, name: str) -> Spec:
        """Dtype and shape of a tensor, from the header alone."""
        entry = self._file.get_slice(self._key(name))
        if entry.get_dtype() not in DTYPES:
            raise ValueError(
                f"{self.path}: the tensor {name!r} has the dtype {entry.get_dtype()}, which is not known."
            )
        return Spec(DTYPES[entry.get_dtype()], tuple(entry.get_shape()))

    def meta(self, name: str) -> torch.Tensor:
        """A tensor on the meta device: shape, dtype and size in bytes, without reading it."""
        spec = self.spec(name)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def _read_header(self) -> Header | None:
        try:
            return Header.parse(self._file.metadata() or {})
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.path}: its metadata are damaged ({error}). Copy it again.") from error


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside another one, to write a file or a folder to, which takes the other's place when the block ends.

    What killed writers left there is removed first. A folder takes the place of one that is empty or missing by one
    rename; else its files go there one by one, `config.json` last and missing meanwhile.
    """
    path = Path(os.path.abspath(path))
    mark = f"{socket.gethostname()}-"
    for left in path.parent.glob(f".{glob.escape(path.name)}.{glob.escape(mark)}*{_ASIDE}"):
        if not psutil.pid_exists(int(left.name.removesuffix(_ASIDE).rpartition("-")[2])):
            _remove(left)
    aside = path.with_name(f".{path.name}.{mark}{os.getpid()}{_ASIDE}")
    try:
        yield aside
        _put_in_place(aside, path)
    finally:
        _remove(aside)


def _put_in_place(aside: Path, path: Path) -> None:
    if not aside.is_dir() or not path.exists() or not any(path.iterdir()):
        os.replace(aside, path)
        return
    names = sorted((file.name for file in aside.iterdir()), key=lambda name: (name.endswith("config.json"), name))
    if "config.json" in names:  # the files of a checkpoint: no one must read the old ones' with the new ones
        for pattern in ("config.json", "model*.safetensors*"):
            for stale in path.glob(pattern):
                stale.unlink()
    for name in names:
        os.replace(aside / name, path / name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a safetensors file whole or not at all, with any new file's mode; gives its tensors' bytes."""
    whole: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:  # the format has no tensors that share memory
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        whole[name] = tensor
    save_file(whole, path, metadata={"format": "pt"})
    reset_mode(Path(path))
    return sum(tensor.nbytes for tensor in whole.values())


def reset_mode(file: Path) -> None:
    """Give a file the permissions of any new one; safetensors leaves its files readable to their owner alone."""
    new = file.with_name(f".{file.name}.new")
    new.touch()
    file.chmod(new.stat().st_mode)
    new.unlink()


def write_checkpoint(
    folder: str | os.PathLike,
    plan: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor],
    max_shard_size: int | None,
    place: Mapping[str, str] | None = None,
) -> None:
    """Write a model's tensors as transformers does: one file, or several and an index; one is in memory at a time.

    `plan` has their shapes and dtypes. They are divided by `max_shard_size`, in bytes, or go to the files in `place`.
    If anything fails, what is in the folder stays as it is.
    """
    if place is None:
        assert max_shard_size is not None
        place = split_torch_state_dict_into_shards(dict(plan), max_shard_size=max_shard_size).tensor_to_filename
    files = sorted(set(place.values()))
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as aside:
        for file in files:
            write_tensors(Path(aside, file), {name: read(name) for name in plan if place[name] == file})
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(t.nbytes for t in plan.values())}, "weight_map": dict(place)}
            Path(aside, _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            files.append(_INDEX)
        for stale in ("model.safetensors", _INDEX):
            Path(folder, stale).unlink(missing_ok=True)
        for file in files:
            os.replace(Path(aside, file), Path(folder, file))


def download(name: str, patterns: Sequence[str]) -> Path:
    """Fetch the files of a model on the hub that match, and give their folder."""
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file. Give a folder as save_pretrained writes it.")
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:  # no name of a repository
        raise ValueError(f"There is no folder {name}.") from error
    except Exception as error:  # offline, no such repository, not a name at all: the hub library has many kinds
        raise ValueError(
            f"{name} is neither a folder nor a model on the hub that can be downloaded ({error})."
        ) from error
