"""Write the adapters, the ranking and the run of this folder, and what they must say when they are read again.

Run on commit d04e385, the last one of version 0.1.0, with its `tests/` on the path:

    python write.py FOLDER

The present version only reads them, see `test_written_by_0_1_0.py`. All tensors are test data: made-up numbers in
models of a few thousand weights, trained on nothing. They come from whole numbers, not from a random number generator,
so that every version of torch makes the same bases and none has to be kept here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from peft_surgical import LayerRanking, StratifiedConfig, SurgicalConfig, rank_layers


_BERT = {"vocab_size": 70, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
_BERT |= {"max_position_embeddings": 64, "pad_token_id": 0}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": 70, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}

# name -> (class of the model, options of its config)
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", _BERT),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "t5": ("T5ForConditionalGeneration", _T5),
}
TASKS = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
OWNING = "owning"  # the base that is made of `OwningLayer`
_STRATA = [{"layers": [0], "tune": "bitfit"}, {"layers": [1], "tune": "full"}, {"layers": [2], "tune": "lora"}]
_NORM_STRATA = [{"layers": [0], "tune": "norm"}, *_STRATA[1:]]
_TWO_STACKS = {
    "encoder": [{"layers": [0], "tune": "norm"}, {"layers": [1], "tune": "full"}],
    "decoder": [{"layers": [0], "tune": "frozen"}, {"layers": [1], "tune": "lora"}],
}
_OWNING_STRATA = [{"layers": [0], "tune": "frozen"}, {"layers": [1], "tune": "full"}]

# name -> (base, method, options of the adapter's config)
ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"surgical-{encoding}": ("bert", "SURGICAL", {"layers": [1], "encoding": encoding})
        for encoding in ("values", "lossless", "bf16", "int8", "int4", "sign")
    },
    "surgical-llama": ("llama", "SURGICAL", {"layers": [-1]}),
    "surgical-two-stacks": ("t5", "SURGICAL", {"layers": {"encoder": [1], "decoder": [0]}, "encoding": "int8"}),
    "surgical-own-tensors": (OWNING, "SURGICAL", {"layers": [1]}),
    "surgical-ranked": ("bert", "SURGICAL", {"top_k": 1}),
    "surgical-five-labels": ("bert", "SURGICAL", {"layers": [2], "encoding": "int4"}),
    "stratified": ("bert", "STRATIFIED", {"strata": _STRATA, "target_modules": ["query"], "r": 2}),
    "stratified-lossless": (
        "llama",
        "STRATIFIED",
        {"strata": _NORM_STRATA, "target_modules": ["q_proj"], "r": 2, "encoding": "lossless"},
    ),
    "stratified-two-stacks": ("t5", "STRATIFIED", {"strata": _TWO_STACKS, "target_modules": ["q"], "r": 2}),
    "stratified-own-tensors": (OWNING, "STRATIFIED", {"strata": _OWNING_STRATA, "r": 2, "encoding": "sign"}),
}
LABELS_OF_ADAPTER = {"surgical-five-labels": 5}  # the base at hand has two
EXPECTED = "expected.json"  # in each folder
RANKING = "ranking.json"
RUN, RUN_BASE, RUN_DATA = "run", "base", "data"


class OwningLayer(nn.Module):
    """A layer that owns tensors itself, as those of BEiT own their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(8, 16))
        self.dense = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dense(torch.tanh(x @ self.matrix))


class OwningModel(nn.Module):
    """Two such layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OwningLayer(), OwningLayer()])
        self.classifier = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x)


def make_base(name: str, **options: Any) -> nn.Module:
    """A base model, the same numbers with every version of torch."""
    if name == OWNING:
        return fill(OwningModel()).eval()
    cls_name, defaults = BASES[name]
    cls = getattr(transformers, cls_name)
    model = cls(cls.config_class(**{**defaults, **options}))
    return fill(model).eval()


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Give every parameter numbers that follow from its name."""
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and name.endswith("weight")
        parameter.copy_(numbers(name, parameter.shape) / 256 + is_scale)
    return model


def numbers(name: str, shape: torch.Size) -> torch.Tensor:
    """Whole numbers from -128 to 128, which look random and are the same everywhere."""
    i = torch.arange(shape.numel()) + zlib.crc32(name.encode()) % 65521
    return ((i * i * 7919 + i * 104729) % 65521 % 257 - 128).reshape(shape).float()


def inputs(base: str) -> dict[str, torch.Tensor]:
    """A batch that a base takes."""
    if base == OWNING:
        return {"x": numbers("x", torch.Size((2, 8))) / 128}
    ids = 3 + numbers("ids", torch.Size((2, 6))).long().abs() % 60
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | (
        {"labels": ids[:, :4].clone()} if base == "t5" else {}
    )


def tensors_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """The trained tensors of the one adapter of a model, by the names that plain ones have in its file."""
    model.peft_config["default"].encoding = "values"
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def digest(tensor: torch.Tensor) -> str:
    """What tells whether two tensors are equal bit for bit, dtype and shape included."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{hashlib.sha256(data).hexdigest()[:16]}"


@torch.no_grad()
def logits_of(model: nn.Module, base: str) -> list:
    """The logits of `inputs`, of whose rows and columns the first few suffice."""
    logits = model(**inputs(base))
    logits = getattr(logits, "logits", logits)
    return logits[(slice(2),) * (logits.ndim - 1) + (slice(8),)].double().tolist()


def load(folder: Path, name: str) -> PeftModel:
    """An adapter of this folder on its base."""
    return PeftModel.from_pretrained(make_base(ADAPTERS[name][0]), str(folder / name)).eval()


def _write_adapter(folder: Path, name: str, ranking: LayerRanking) -> None:
    base, method, options = ADAPTERS[name]
    options = {"task_type": TASKS.get(base), "modules_to_save": ["classifier"] if base == OWNING else None, **options}
    if "top_k" in options:
        options["ranking"] = ranking
    config = (SurgicalConfig if method == "SURGICAL" else StratifiedConfig)(**options)
    labels = {"num_labels": LABELS_OF_ADAPTER[name]} if name in LABELS_OF_ADAPTER else {}
    model = get_peft_model(make_base(base, **labels), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                start = numbers(key, parameter.shape) / 256 if "lora_A" in key or "lora_B" in key else parameter
                parameter.copy_(start + numbers(f"step of {key}", parameter.shape) / 2**12)
    model.save_pretrained(folder / name)
    (folder / name / "README.md").unlink()
    loaded = load(folder, name)
    expected = {
        "tensors": {key: digest(tensor) for key, tensor in tensors_of(loaded).items()},
        "logits": logits_of(loaded, base),
    }
    (folder / name / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


def make_run_base(folder: Path) -> None:
    """The base of the run and its tokenizer."""
    from tiny_task import save_tokenizer

    make_base("bert").bert.save_pretrained(folder)
    save_tokenizer(folder)


def _write_run(folder: Path) -> None:
    """A run as `peft-surgical train` writes it, all paths relative to the folder above it."""
    from tiny_task import save_data

    from peft_surgical.training import TrainingJob, evaluate, train

    os.chdir(folder)
    make_run_base(Path(RUN_BASE))
    save_data(Path(RUN_DATA), train=40, validation=12)
    options: dict[str, Any] = {"method": "surgical", "top_k": 1, "samples": 8, "epochs": 1, "learning_rate": 1e-2}
    train(TrainingJob(model=RUN_BASE, data=RUN_DATA, output=RUN, **options))
    again = evaluate(RUN)
    loaded = PeftModel.from_pretrained(
        transformers.AutoModelForSequenceClassification.from_pretrained(RUN_BASE, num_labels=2), RUN
    )
    expected = {
        "tensors": {key: digest(tensor) for key, tensor in tensors_of(loaded).items()},
        "metrics": again.metrics,
        "logits": again.outputs.tolist(),
    }
    Path(RUN, EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")
    shutil.rmtree(RUN_BASE)
    shutil.rmtree(RUN_DATA)


def main(folder: Path) -> None:
    """Write everything."""
    rows = inputs("bert") | {"labels": torch.tensor([0, 1])}
    samples = [{key: value[i] for key, value in rows.items()} for i in range(2)] * 4
    ranking = rank_layers(make_base("bert"), samples, num_samples=8, batch_size=4, progress=False)
    ranking.save(folder / RANKING)
    for name in ADAPTERS:
        _write_adapter(folder, name, ranking)
    _write_run(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
