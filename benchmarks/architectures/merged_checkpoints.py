"""Whether a merged checkpoint has the names, shapes, dtypes and files of its base, on every architecture.

python -m benchmarks.architectures.merged_checkpoints                # those whose checkpoints transformers converts
python -m benchmarks.architectures.merged_checkpoints mixtral llava --keep FOLDER
python -m benchmarks.architectures.merged_checkpoints --load FOLDER  # under an older transformers: does it load them?
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import get_peft_model
from safetensors import safe_open

from benchmarks.architectures.round_trip import Trip, difference, outputs, train
from benchmarks.architectures.tiny_models import Architecture, architectures, batch, build, over
from benchmarks.common.device import parse_options, result_file
from benchmarks.common.table_format import table as markdown
from peft_surgical import merge_checkpoint


def header(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    """File, shape and dtype of each tensor of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = (path.name, part.get_shape(), part.get_dtype())
    return found


def try_merge(entry: Architecture, folder: Path) -> dict[str, Any]:
    """What came of merging an adapter on one architecture."""
    warnings.simplefilter("ignore")
    pristine = build(entry)
    inputs = batch(pristine, entry)
    pristine.save_pretrained(folder / "base", max_shard_size="60KB")
    base = type(pristine).from_pretrained(folder / "base").eval()
    if difference(outputs(pristine, inputs), outputs(base, inputs)):
        return {"result": "transformers itself does not save and load it"}
    model = get_peft_model(base, Trip("SURGICAL", pristine, entry, inputs).config(0)).eval()
    train(model, inputs)
    right = outputs(model, inputs)
    model.save_pretrained(folder / "adapter")
    merge_checkpoint(folder / "base", folder / "adapter", folder / "merged")
    before, after = header(folder / "base"), header(folder / "merged")
    again, told = type(pristine).from_pretrained(folder / "merged", output_loading_info=True)
    torch.save({"entry": tuple(entry), "inputs": inputs, "right": right}, folder / "answers.pt")
    row = {"converted": bool(_converts(pristine)), "files": len({file for file, _, _ in before.values()})}
    if before != after:
        odd = [name for name in {*before, *after} if before.get(name) != after.get(name)]
        return {**row, "result": "other names or shapes", "why": sorted(odd)[:5]}
    if told["missing_keys"] or difference(right, outputs(again.eval(), inputs)):
        return {**row, "result": "other answers", "why": sorted(told["missing_keys"])[:5]}
    return {**row, "result": "as its base"}


def _converts(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model, add_legacy=False)


def try_load(folder: Path) -> dict[str, Any]:
    """Whether this transformers loads a checkpoint that was merged under another."""
    saved = torch.load(folder / "answers.pt", weights_only=False)
    kind = getattr(transformers, saved["entry"][2], None)
    if kind is None:
        return {"result": "unknown to this transformers"}
    # how the base loads is the control
    seen = {}
    for name in ("base", "merged"):
        model, told = kind.from_pretrained(folder / name, output_loading_info=True)
        seen[name] = [
            sorted(told["missing_keys"])[:5],
            difference(saved["right"], outputs(model.eval(), saved["inputs"])),
        ]
    (missing, apart), (missing_in_base, _) = seen["merged"], seen["base"]
    if missing != missing_in_base:
        return {"result": "keys missing", "why": missing}
    if missing_in_base:
        return {"result": "the base has keys missing as well", "why": missing_in_base}
    return {"result": "loads" if apart < 1e-5 else "other answers", "difference": apart}


def table(record: Mapping[str, Any]) -> str:
    """The counts as a table in Markdown."""
    rows = [row for row in record["rows"] if "crash" not in row]
    kinds = list(Counter(row["result"] for row in rows))
    head = (
        f"transformers {record['transformers']}: {len(rows)} architectures whose checkpoints are converted in loading"
    )
    head += f"; {len(record['rows']) - len(rows)} cannot be built, or took too long."
    counts = Counter(row["result"] for row in rows)
    return "\n".join(
        [head, "", markdown(["the merged checkpoint", ""], [[kind, str(counts[kind])] for kind in kinds])]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all whose checkpoints are converted by default")
    parser.add_argument("--keep", type=Path, help="a folder that the checkpoints are kept in")
    parser.add_argument("--load", type=Path, help="load what was kept, and compare its answers")
    parser.add_argument("--processes", type=int, default=1)
    options = parse_options(parser, table)
    rows = []
    for name, row in _loaded(options.load) if options.load else _merged(options):
        rows.append({"model_type": name, **row})
        print(name, row, flush=True)
    record = {"transformers": transformers.__version__, "rows": rows}
    print(table(record))
    if not options.model_types and not options.load:
        result_file(options.output, "architectures_merged_checkpoints").write_text(json.dumps(record, indent=1) + "\n")


def _loaded(kept: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    folders = {folder.name: folder for folder in sorted(kept.iterdir()) if (folder / "answers.pt").exists()}
    entries = [Architecture(name, "", "") for name in folders]
    for entry, row in over(lambda entry: try_load(folders[entry.model_type]), entries):
        yield entry.model_type, row


def _merged(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    def run(entry: Architecture) -> dict[str, Any]:
        if options.keep:
            return try_merge(entry, options.keep / entry.model_type)
        with tempfile.TemporaryDirectory() as folder:
            return try_merge(entry, Path(folder))

    def is_converted(entry: Architecture) -> bool:
        return any(get_checkpoint_conversion_mapping(name) for name in (entry.model_type, entry.class_name))

    wanted = options.model_types
    entries = [entry for entry in architectures() if (entry.model_type in wanted if wanted else is_converted(entry))]
    for entry, row in over(run, entries, processes=options.processes):
        yield entry.model_type, row


if __name__ == "__main__":
    main()
