"""A fleet of full fine-tunes of one base as adapters, each checked by its answers."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from peft_surgical.convert.change import table
from peft_surgical.convert.convert import output_of
from peft_surgical.convert.diff import diff_checkpoints
from peft_surgical.convert.merge import adapted_model
from peft_surgical.files.checkpoint import Checkpoint
from peft_surgical.files.encodings import check_encoding
from peft_surgical.files.safetensors_io import written_aside
from peft_surgical.methods.config import open_adapter


@dataclass(frozen=True)
class Packed:
    """What became of one fine-tune."""

    name: str  # of the folder of its adapter
    source: str
    layers: int = 0  # how many changed
    nbytes_tuned: int = 0  # of the checkpoint's tensors
    nbytes: int = 0  # of the adapter's
    difference: float = math.nan  # the largest between the answers of the two; 0 if equal bit for bit
    error: str = ""  # why it was not packed


class Fleet(list[Packed]):
    """What became of all fine-tunes."""

    @property
    def failed(self) -> list[Packed]:
        """Those that were not packed."""
        return [packed for packed in self if packed.error]

    def __str__(self) -> str:
        done = [packed for packed in self if not packed.error]
        rows = [
            (
                p.name,
                str(p.layers),
                f"{p.nbytes_tuned:,}",
                f"{p.nbytes:,}",
                f"{p.nbytes / p.nbytes_tuned:.3f}",
                f"off by {p.difference:.1e}" if p.difference else "equal",
            )
            for p in done
        ]
        before, after = sum(p.nbytes_tuned for p in done), sum(p.nbytes for p in done)
        rows.append(("all", "", f"{before:,}", f"{after:,}", f"{after / before:.3f}" if before else "", ""))
        rows += [(p.name, "", "", "", "", "not packed") for p in self.failed]
        return table(("task", "layers changed", "bytes before", "bytes after", "of before", "answers"), rows)


def pack_checkpoints(
    base: str | os.PathLike,
    tuned: Iterable[str | os.PathLike],
    output: str | os.PathLike,
    *,
    encoding: str = "auto",
    max_error: float = 0.0,
    inputs: Mapping[str, torch.Tensor] | None = None,
    progress: bool = False,
) -> Fleet:
    """Turn full fine-tunes of one base into SURGICAL adapters, e.g. for a `DeltaBank`.

    Each becomes the folder `output/NAME` by `diff_checkpoints`, after base and adapter have answered as the checkpoint
    itself does, in the base's dtype: bit for bit, unless `max_error` or the encoding allows for more. One that cannot
    be packed leaves the others, and what was in its folder, as they are.

    Args:
        base: The base: a folder, or the name of a model on the hub.
        tuned: The fine-tunes, likewise; of a folder that is no checkpoint, the checkpoints in it.
        output: The folder for the adapters, which are called as the fine-tunes' folders.
        encoding: How the tensors are written, see `SurgicalConfig`.
        max_error: Likewise.
        inputs: What the models are asked, as they take it; by default made up, for models of text and of images.
        progress: Whether to show a progress bar.

    Returns:
        What became of each, with the reason where it was not packed.

    Raises:
        ValueError: The encoding is not known, two fine-tunes have one name, or a folder in `output` holds something
            else than an adapter.
    """
    check_encoding(encoding, max_error)
    before = Checkpoint(base)
    sources: dict[str, str] = {}
    for source in _checkpoints(tuned, before):
        name = Path(source).resolve().name if os.path.isdir(source) else source.rpartition("/")[2]
        folder = Path(output, name)
        if name in sources:
            raise ValueError(f"{sources[name]} and {source} have one name. Rename a folder, or pack them separately.")
        if folder.exists() and not (folder / "adapter_config.json").is_file() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds something else than an adapter. Name another output.")
        sources[name] = source
    Path(output).mkdir(parents=True, exist_ok=True)
    fleet = Fleet()
    for name, source in tqdm(sources.items(), "Packing", disable=not progress):
        try:
            fleet.append(_pack(before, source, Path(output, name), encoding, max_error, inputs))
        except Exception as error:  # of files of strangers, there is no end of kinds
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            fleet.append(Packed(name, source, error=f"{kind}{error}"))
    return fleet


def _checkpoints(tuned: Iterable[str | os.PathLike], base: Checkpoint) -> list[str]:
    found: list[str] = []
    for source in (os.fspath(source) for source in tuned):
        inside = [] if not os.path.isdir(source) else [path.parent for path in Path(source).glob("*/config.json")]
        if not inside or Path(source, "config.json").exists():
            found.append(source)
        else:
            found += [str(path) for path in sorted(inside) if path.resolve() != base.folder.resolve()]
    return found


def _pack(
    before: Checkpoint, source: str, folder: Path, encoding: str, max_error: float, inputs: Mapping[str, Any] | None
) -> Packed:
    with written_aside(folder) as aside:
        found = diff_checkpoints(before.source, source, aside, encoding=encoding, max_error=max_error)
        model = adapted_model(before, open_adapter(aside)).eval()
        cls: Any = type(model.get_base_model())
        own = (
            p.dtype for n, p in model.named_parameters() if "surgical_params" not in n and "modules_to_save" not in n
        )
        dtype = next((dtype for dtype in own if dtype.is_floating_point), torch.float32)
        inputs = inputs or _make_up(model.get_base_model())
        answer = _ask(model, inputs)
        del model  # one at a time
        wanted = _ask(cls.from_pretrained(Checkpoint(source).folder, dtype=dtype).eval(), inputs)
        difference = 0.0 if torch.equal(answer, wanted) else float((answer.double() - wanted.double()).abs().max())
        is_exact = encoding in ("values", "lossless", "rows") or (encoding == "auto" and not max_error)
        if not math.isfinite(difference) or (is_exact and difference):
            raise ValueError(f"{source}: with its adapter, the base answers otherwise (by up to {difference:.3g}).")
    layers = found.config.layers
    count = sum(map(len, layers.values())) if isinstance(layers, dict) else len(layers)
    return Packed(folder.name, source, count, found.nbytes_tuned, found.nbytes, difference)


def _make_up(model: Any) -> dict[str, torch.Tensor]:
    """Inputs for a model of text, two rows of 32 tokens, or of images, two of them."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size = config.image_size
        size = (size, size) if isinstance(size, int) else tuple(size)
        return {"pixel_values": torch.randn(2, config.num_channels, *size, generator=generator).to(model.dtype)}
    if model.main_input_name != "input_ids":
        raise ValueError(f"No {model.main_input_name} can be made up for a {type(model).__name__}. Give inputs=...")
    tokens = torch.randint(config.get_text_config().vocab_size, (2, 32), generator=generator)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return {**inputs, "decoder_input_ids": tokens} if config.is_encoder_decoder else inputs


@torch.no_grad()
def _ask(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    # of a copy: what is mapped from a file may lie at any address, and kernels round otherwise at some
    return output_of(copy.deepcopy(model)(**inputs))
