"""What `peft-surgical plan` says of memory, beside the peak of a real training of the same job on this GPU.

    python -m benchmarks.step.plan                    # BERT-large, Llamas of 1 and 7 billion numbers
    python -m benchmarks.step.plan bert-large --methods full surgical
    python -m benchmarks.step.plan tiny               # seconds, also on a CPU, where no peak is measured

Models are made from configs and saved, for a job loads its model from a folder: 7 B take 14 GB of disk. Llamas are
trained as language models where TRL is installed, else as classifiers. The peak is PyTorch's own count over a run of
four steps, without plan's hooks and after plan's memory was given back. Writes `results/step_plan-<device>.json`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from benchmarks.common.device import device_name, parse_options, result_file
from benchmarks.step.shapes import SHAPES
from peft_surgical.training import TrainingJob, TrainingRun, plan


LARGE = {"batch_size": 4, "max_length": 512, "dtype": "bfloat16", "gradient_checkpointing": True}
# by name of the shape: the type, and the options of the job
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-large": ("bert", {"batch_size": 16, "max_length": 128}),
    "llama-1b": ("llama", {**LARGE, "gradient_checkpointing": False}),
    "llama-7b": ("llama", LARGE),
    "tiny": ("llama", {"batch_size": 2, "max_length": 16}),
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "surgical": {},
    "spafit": {"lora_r": 64, "group_2": "norm"},
    "lora": {},
}
STEPS = 4


def save_model(folder: Path, kind: str, shape: dict[str, int], dtype: str, *, language: bool) -> None:
    """A model with random weights and a tokenizer of whole words."""
    config = AutoConfig.for_model(kind, **shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        maker = AutoModelForCausalLM if language else AutoModel
        maker.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    words = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *(f"w{i}" for i in range(config.vocab_size - 3))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def measure(job: TrainingJob) -> dict[str, Any]:
    """What the plan says, and the peak of a real run."""
    planned = plan(job)
    gc.collect()
    found: dict[str, Any] = {"trained": planned.trained, "needs": planned.needs, "seconds": planned.seconds}
    found["planned"] = vars(planned.memory) | {"total": planned.memory.total}
    if torch.cuda.is_available() and planned.needs == "":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = TrainingRun(job)
        run.fit()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(MODELS)}; all but tiny if none is named")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options = parse_options(parser, table)
    transformers_logging.set_verbosity_error()
    language = find_spec("trl") is not None
    rows = []
    for name in options.shapes or [name for name in MODELS if name != "tiny"]:
        (kind, more), shape = MODELS[name], SHAPES[name]
        is_language = language and kind == "llama"
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder, "model"), kind, shape, more.get("dtype", "float32"), language=is_language)
            texts = [" ".join(f"w{(i * 7 + j) % 50}" for j in range(more["max_length"])) for i in range(64)]
            columns = {"text": texts} if is_language else {"text": texts, "label": ["a", "b"] * 32}
            Dataset.from_dict(columns).to_parquet(f"{folder}/train.parquet")
            places = {"model": f"{folder}/model", "data": f"{folder}/train.parquet", "select_on": "none"}
            for method in options.methods:
                own = (
                    METHODS[method]
                    if kind == "llama"
                    else {n: v for n, v in METHODS[method].items() if n != "group_2"}
                )
                job = TrainingJob(
                    **places,
                    output=f"{folder}/{method}",
                    method=method,
                    max_steps=STEPS,
                    **own,
                    **more,
                )
                rows.append({"model": name, "method": method, **measure(job)})
                shutil.rmtree(job.output, ignore_errors=True)  # the checkpoints of one alone may take 50 GB
                gc.collect()
                print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "peft")}
    record = {"device": device_name(), "language": language, "versions": versions, "rows": rows}
    file = result_file(options.output, "step_plan")
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(record)}\n\nwritten to {file}")


def table(record: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    parts = ("weights", "copies", "gradients", "optimizer", "activations", "total")
    lines = [
        f"| model | method | trained, M | {' | '.join(f'{part}, GB' for part in parts)} | peak, GB | off by |",
        f"|---|---|{'---:|' * (len(parts) + 3)}",
    ]
    for row in record["rows"]:
        planned, peak = row["planned"], row.get("peak_bytes")
        cells = [row["model"], row["method"], f"{row['trained'] / 1e6:.1f}"]
        cells += ["" if planned[part] is None else f"{planned[part] / 1e9:.2f}" for part in parts]
        cells += [f"{peak / 1e9:.2f}", f"{planned['total'] / peak - 1:+.1%}"] if peak else ["", row["needs"] or ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
