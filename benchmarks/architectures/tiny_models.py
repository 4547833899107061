"""Every architecture of the installed transformers, tiny and random, from its config alone.

python -m benchmarks.architectures.tiny_models            # which can be built, and why others cannot
python -m benchmarks.architectures.tiny_models bert zamba

    for entry in architectures():
        model = build(entry)                              # float32, evaluation mode
        model(**batch(model, entry, lengths=(7, 4, 2))).loss

`over(function, entries)` calls a function for each entry in a process of its own, so that a crash or a model that
hangs ends nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto


class Architecture(NamedTuple):
    """One class of transformers with a loss."""

    model_type: str
    task: str
    class_name: str


# What comes first is taken where a model type has several classes.
TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "multimodal-lm": "MULTIMODAL_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "image-classification": "IMAGE_CLASSIFICATION",
    "audio-classification": "AUDIO_CLASSIFICATION",
    "video-classification": "VIDEO_CLASSIFICATION",
    "ctc": "CTC",
    "audio-frame-classification": "AUDIO_FRAME_CLASSIFICATION",
    "audio-xvector": "AUDIO_XVECTOR",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "document-question-answering": "DOCUMENT_QUESTION_ANSWERING",
    "visual-question-answering": "VISUAL_QUESTION_ANSWERING",
    "multiple-choice": "MULTIPLE_CHOICE",
    "next-sentence": "NEXT_SENTENCE_PREDICTION",
    "semantic-segmentation": "SEMANTIC_SEGMENTATION",
    "object-detection": "OBJECT_DETECTION",
    "contrastive": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "masked-image": "MASKED_IMAGE_MODELING",
    "time-series": "TIME_SERIES_PREDICTION",
    "pretraining": "PRETRAINING",
}
_TEXT_LOSSES = ("causal-lm", "seq2seq", "masked-lm", "image-text-to-text", "multimodal-lm", "pretraining")


def architectures(*, all_tasks: bool = False, tasks: Iterable[str] | None = None) -> list[Architecture]:
    """The classes of transformers' auto-model mappings that have a loss, sorted by model type.

    Args:
        all_tasks: Every class; else the first in the order of `TASKS` of each model type.
        tasks: Keys of `TASKS`; all by default.
    """
    found: dict[str, list[Architecture]] = {}
    for task in tasks or TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES", {})
        for model_type, classes in names.items():
            for name in [classes] if isinstance(classes, str) else classes:
                known = found.setdefault(model_type, [])
                if name not in [entry.class_name for entry in known]:
                    known.append(Architecture(model_type, task, name))
    return [
        entry for model_type in sorted(found) for entry in (found[model_type] if all_tasks else found[model_type][:1])
    ]


# ---- configs

VOCABULARY, LAYERS, HEADS, WIDTH = 99, 4, 4, 32
_SMALL: list[tuple[str, int]] = [  # the first pattern that matches a number's name gives its value
    (r"head_dim(_.*)?|.*_head_dim|d_kv|attention_head_size|kv_channels", WIDTH // HEADS),
    (r"(?!.*type).*vocab_size.*", VOCABULARY),
    (r"(num_)?(key_value_heads|kv_heads|.*_key_value_heads)", 2),
    (r".*(attention_heads|num_heads|n_heads?|_num_heads|num_attn_heads|num_linear_.*_heads)", HEADS),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r".*(experts_per_tok|experts_topk|top_?k|topk_experts|moe_k|num_selected_experts)", 2),
    (r".*(n_routed_experts|num_(local_)?experts|n_experts|moe_num_experts|num_local_experts|n_shared_experts)", 4),
    (
        r"(?!.*(per|every|idx|index|start|step)).*(hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_blocks|depth)",
        LAYERS,
    ),
    (r".*(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|ffn_hidden_size|mlp_dim|ff_dim|feedforward.*)", 2 * WIDTH),
    (r".*image_size", 32),
    (r"patch_size", 8),
    (
        r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|embedding_dim|projection_dim|encoder_dim|decoder_dim|proj_dim|lora_rank|_rank)",
        WIDTH,
    ),
    (r"dim|emb_dim|n_embed|embed_size|projection_size|output_dim|out_dim|in_dim|proj_size|.*_hidden_size_.*", WIDTH),
    (r"max_(source_|target_)?position(_embedding)?s|n_positions|max_seq_len(gth)?|seq_length|n_ctx", 128),
    (r"sliding_window|local_attention|attention_window|window_size_.*", 8),
    (r"num_conv_pos_embeddings", 16),
    (r"num_queries", 8),
]
_PER_LAYER = "layer_types|layers_block_type|mlp_layer_types|block_types|layers_types"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# what names do not tell
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "reformer": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "xlnet": {"d_head": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4, "n_mamba_heads": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 32},
    "dpt": {"neck_hidden_sizes": [8, 8, 8, 8], "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "zamba2": {"mamba_ngroups": 1, "n_mamba_heads": 8},
    "gemma3n_text": {"intermediate_size": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "bailing_hybrid": {"num_experts": 8},
    "kimi_linear": {"num_experts": 8},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"rope_parameters": _ROPE}),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga", "colqwen2"),
        {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    ),
    "blenderbot": {"encoder_layers": 4, "decoder_layers": 4},
    "efficientnet": {"num_blocks": 4, "width_coefficient": 0.25, "depth_coefficient": 0.3},
    "align": {"vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.3}},
    "wav2vec2-bert": {"feature_projection_input_dim": 80},
    "swin": {"num_heads": [2, 2, 4, 4], "window_size": 2, "image_size": 64},
}


def tiny_config(entry: Architecture, level: int = 0) -> Any:
    """The smallest config of a model type that is tried at a level: 0 changes most, 2 only depth and vocabulary."""
    kind = configuration_auto.CONFIG_MAPPING[entry.model_type]
    options = _shrink(kind(), level)
    for name, value in SPECIAL.get(entry.model_type, {}).items():
        is_part = isinstance(value, dict) and isinstance(options.get(name), dict)
        options[name] = {**options[name], **value} if is_part else value
    if any(entry.task.endswith(end) for end in ("classification", "xvector", "segmentation")):
        options["num_labels"] = 3
    config = kind(**options)
    expected = getattr(transformers, entry.class_name).config_class
    if isinstance(expected, type) and not isinstance(config, expected):
        config = config.get_text_config(decoder=True)  # the class is of a part of what the config describes
    if getattr(config, "is_encoder_decoder", False) or "seq2seq" in entry.task:
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    return config


_KEPT = (
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "auto_map",
    "_name_or_path",
)


def _shrink(config: Any, level: int) -> dict[str, Any]:
    """The options that are to be smaller than by default; what is derived from them is not among them."""
    present, options = config.to_dict(), {}
    for name, value in present.items():
        own = config.__dict__.get(name, value)
        if name in _KEPT or name.startswith("_"):
            continue
        if isinstance(own, transformers.PretrainedConfig):
            options[name] = {"model_type": own.model_type, **_shrink(own, level)}
        elif name in ("out_features", "out_indices", "stage_names"):
            continue  # of a backbone, which are those of all its layers
        elif name.endswith(("_token_id", "_token_index", "_token_ids")):
            options[name] = _token(name, value)
        elif re.fullmatch(r"(num_)?(.*_)?(key_value_heads|kv_heads)", name) and value == present.get(
            "num_attention_heads"
        ):
            options[name] = HEADS  # no groups: multi-head or latent attention
        else:
            options[name] = _small(name, value, level)
    depth = next(
        (options[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(options.get(n), int)), None
    )
    for name, value in present.items():
        if isinstance(value, list) and depth and re.search(_PER_LAYER, name):
            kinds = list(dict.fromkeys(value))
            options[name] = (kinds * depth)[:depth]
        elif name == "per_layer_config" and value and depth:
            small = {key: _small(key, v, level) for key, v in next(iter(value.values())).items()}
            options[name] = {depth - 1: small}
    return {name: value for name, value in options.items() if value != present[name] or isinstance(value, dict)}


def _token(name: str, value: Any) -> Any:
    if isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(map(ord, name)) % 20  # special tokens are the last of the vocabulary
    return [_token(f"{name}{i}", v) for i, v in enumerate(value)] if isinstance(value, list) else value


def _small(name: str, value: Any, level: int) -> Any:
    if isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        if name in ("depths", "num_layers", "layers", "num_block_repeats"):
            return [min(v, 2) for v in value]
        if (
            re.fullmatch(r".*(hidden_sizes|embed_dims?|embed_dim|dims|channels|out_features_dim|conv_dim)", name)
            and level < 2
        ):
            return [max(8, v // max(1, min(value) // 16) // 8 * 8) for v in value]
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for position, (pattern, small) in enumerate(_SMALL):
        if re.fullmatch(pattern, name):
            if level == 2 and small not in (VOCABULARY, LAYERS):
                return value
            if level == 1 and position == 0:
                return value
            return min(value, small) if value > 0 else value
    return value


# ---- models

_LARGEST = 40_000_000


def build(entry: Architecture, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny random model in evaluation mode, whose loss is finite on `batch(model, entry)`.

    Args:
        entry: One of `architectures()`.
        seed: Of the weights.
        dtype: Of the weights.

    Returns:
        The model, in evaluation mode.

    Raises:
        RuntimeError: No config that was tried gives a model with a loss; the reasons of each try.
    """
    reasons = []
    for level in range(3):
        try:
            config = tiny_config(entry, level)
            model = _create(entry, config, seed, dtype)
            with torch.no_grad():
                loss = loss_of(model(**batch(model, entry)))
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss is {loss}")
        except Exception as error:
            reasons.append(f"level {level}: {type(error).__name__}: {str(error).strip()[:200]}{_where(error)}")
        else:
            return model
    raise RuntimeError("\n".join(reasons))


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _create(entry: Architecture, config: Any, seed: int, dtype: torch.dtype) -> nn.Module:
    kind = getattr(transformers, entry.class_name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > _LARGEST:
        raise RuntimeError(f"{size} parameters")
    torch.manual_seed(seed)
    model = kind(config).to(dtype).eval()
    _spread(model, seed)
    return model


def _spread(model: nn.Module, seed: int) -> None:
    """Gives tensors that start as all zeros or all ones values of their own, and others that start empty."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if not torch.isfinite(parameter).all() or parameter.abs().max() > 100:
                parameter.copy_(0.02 * noise)
            elif parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.add_(0.02 * noise)


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output, whatever it is called."""
    loss = output.loss if getattr(output, "loss", None) is not None else output[0]
    if loss.numel() != 1:
        raise RuntimeError("no loss")
    return loss.reshape(())


# ---- batches


def batch(
    model: nn.Module,
    entry: Architecture,
    seed: int = 0,
    lengths: Sequence[int] = (8, 5, 3),
    padding_side: str = "right",
) -> dict[str, Any]:
    """Inputs with labels, one row for each length.

    Args:
        model: A model of `build`.
        entry: What it was built from.
        seed: Of the inputs.
        lengths: Tokens of each text; images and sounds only have as many rows.
        padding_side: `"right"` or `"left"`: where a text's pads stand; the attention mask hides them, labels are -100.

    Returns:
        What `model(**batch)` takes.
    """
    make = _Batch(model, entry, seed, lengths, padding_side)
    return make.inputs()


_NEEDED = {"bros": ("bbox",), "vilt": ("pixel_values",), "blip": ("pixel_values",), "git": ("pixel_values",)}


class _Batch:
    def __init__(self, model: nn.Module, entry: Architecture, seed: int, lengths: Sequence[int], side: str):
        self.model, self.entry, self.lengths, self.side = model, entry, lengths, side
        self.config = model.config
        self.random = torch.Generator().manual_seed(seed)
        self.rows = len(lengths)
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.takes = inspect.signature(model.forward).parameters

    def inputs(self) -> dict[str, Any]:
        task, takes = self.entry.task, self.takes
        main = self.model.main_input_name
        made: dict[str, Any] = {}
        if task in ("contrastive",):
            made = {**self.text(), "pixel_values": self.image()}
        elif main in ("input_ids", "decoder_input_ids"):
            made = self.text()
        elif main == "pixel_values":
            made = {"pixel_values": self.image()}
            if task in _TEXT_LOSSES and "input_ids" in takes:
                made.update(self.text())
        elif main in ("pixel_values_videos",):
            made = {main: self.image(frames=True)}
        elif main in ("input_values", "input_features", "audio_values"):
            made = self.audio(main)
        else:
            raise RuntimeError(f"no rule for the input {main}")
        for needed in ("bbox", "image", "pixel_values"):
            is_needed = takes[needed].default is inspect.Parameter.empty if needed in takes else False
            is_needed |= needed in _NEEDED.get(self.entry.model_type, ())
            if is_needed and needed not in made:
                if needed == "bbox":
                    made["bbox"] = torch.zeros((*made["input_ids"].shape, 4), dtype=torch.long)
                else:
                    made[needed] = self.image()
        made.update(self.labels(made))
        return made

    def integers(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def get(self, *names: str) -> Any:
        """A setting of the config or of one of its parts."""
        parts = [self.config]
        for part in parts:
            parts += [
                v for v in vars(part).values() if isinstance(v, transformers.PretrainedConfig) and v not in parts
            ]
        for name in names:
            for part in parts:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return None

    def text(self) -> dict[str, torch.Tensor]:
        width = max(self.lengths)
        ids = self.integers(70, self.rows, width, low=5)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(self.lengths):
            mask[row, slice(0, length) if self.side == "right" else slice(width - length, width)] = 1
        pad = self.get("pad_token_id")
        ids = ids.masked_fill(mask == 0, pad if isinstance(pad, int) and 0 <= pad < VOCABULARY else 0)
        made = {"input_ids": ids, "attention_mask": mask}
        if self.entry.task == "multiple-choice":
            made = {name: value[:, None].repeat(1, 2, 1) for name, value in made.items()}
            made["input_ids"][:, 1, 0] += 1
        if (
            self.entry.task != "contrastive"
            and "attention_mask" not in self.takes
            and not any(p.kind is p.VAR_KEYWORD for p in self.takes.values())
        ):
            del made["attention_mask"]
        return made

    def image(self, frames: bool = False) -> torch.Tensor:
        size = self.get("image_size", "img_size", "crop_size") or 32
        height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
        channels = self.get("num_channels", "in_channels", "in_chans") or 3
        if frames or self.entry.task == "video-classification":
            return self.floats(self.rows, self.get("num_frames", "frames_per_clip") or 2, channels, height, width)
        return self.floats(self.rows, channels, height, width)

    def audio(self, main: str) -> dict[str, torch.Tensor]:
        if self.entry.model_type in ("speecht5", "wavlm", "unispeech-sat") or (
            main == "input_values" and self.get("num_mel_bins") is None
        ):
            return {main: self.floats(self.rows, 8000)}
        mels = self.get("num_mel_bins", "input_feat_per_channel", "feature_size", "num_mel") or 80
        frames = self.get("max_length") if main == "input_values" else None
        positions = self.get("max_source_positions")
        if frames:
            return {main: self.floats(self.rows, frames, mels)}
        if "whisper" in self.entry.class_name.lower():
            return {main: self.floats(self.rows, mels, 2 * positions)}
        return {main: self.floats(self.rows, 64, mels)}

    def labels(self, made: dict[str, Any]) -> dict[str, Any]:
        task, ids = self.entry.task, made.get("input_ids")
        classes = self.config.num_labels
        if task in (
            "sequence-classification",
            "image-classification",
            "audio-classification",
            "video-classification",
            "audio-xvector",
        ):
            return {"labels": self.integers(classes, self.rows)}
        if task == "token-classification" and ids is not None:
            labels = self.integers(classes, *ids.shape)
            return {
                "labels": labels.masked_fill(made["attention_mask"] == 0, -100) if "attention_mask" in made else labels
            }
        if task in ("question-answering", "document-question-answering"):
            at = 0 if self.side == "right" else -1
            at = at % ids.shape[1]
            return {"start_positions": torch.full((self.rows,), at), "end_positions": torch.full((self.rows,), at)}
        if task == "multiple-choice":
            return {"labels": self.integers(2, self.rows)}
        if task == "next-sentence":
            return {"labels": self.integers(2, self.rows)}
        if task == "contrastive":
            return {"return_loss": True}
        if task == "ctc":
            return {"labels": self.integers(VOCABULARY - 1, self.rows, 3, low=1)}
        if task == "semantic-segmentation":
            return {"labels": self.integers(classes, self.rows, *made["pixel_values"].shape[-2:])}
        if task == "object-detection":
            boxes = [
                {"class_labels": self.integers(2, 2), "boxes": torch.full((2, 4), 0.3, dtype=self.dtype)}
                for _ in self.lengths
            ]
            return {"labels": boxes}
        if task == "visual-question-answering":
            return {"labels": torch.rand((self.rows, classes), generator=self.random)}
        if task == "audio-frame-classification":
            with torch.no_grad():
                frames = self.model(**made).logits.shape[1]
            return {"labels": torch.nn.functional.one_hot(self.integers(classes, self.rows, frames), classes)}
        if task == "masked-image":
            size = self.get("image_size")
            patch = self.get("patch_size")
            return {"bool_masked_pos": self.integers(2, self.rows, (size // patch) ** 2).bool()}
        if task == "speech-seq2seq":
            return {"labels": self.integers(70, self.rows, 5, low=5)}
        if task in _TEXT_LOSSES and ids is not None:
            labels = ids.clone()
            if "attention_mask" in made:
                labels = labels.masked_fill(made["attention_mask"] == 0, -100)
            if "labels" in self.takes:
                made_labels = {"labels": labels}
                if "next_sentence_label" in self.takes:
                    made_labels["next_sentence_label"] = self.integers(2, self.rows)
                if "sentence_order_label" in self.takes:
                    made_labels["sentence_order_label"] = self.integers(2, self.rows)
                return made_labels
        if "labels" in self.takes and "pixel_values" in made:  # a picture that becomes a text
            return {"labels": self.integers(70, self.rows, 5, low=5)}
        return {}


# ---- one process for each


def over(
    function: Callable[[Architecture], dict[str, Any]],
    entries: Sequence[Architecture],
    *,
    seconds: float = 60,
    processes: int = 1,
) -> Iterator[tuple[Architecture, dict[str, Any]]]:
    """Calls a function for each entry in a forked process of its own, in order.

    Args:
        function: Returns a dict that JSON can hold.
        entries: What it is called with.
        seconds: Until it is ended.
        processes: How many run at a time.

    Yields:
        The entry and what was returned; `{"crash": why}` where the process raised, died or took too long.
    """
    for family in ("bert", "llama", "mixtral", "vit", "wav2vec2"):  # what all share is imported once, before the forks
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with ThreadPoolExecutor(processes) as pool:
        yield from zip(entries, pool.map(lambda entry: _one(function, entry, seconds), entries), strict=True)


def _one(function: Callable[[Architecture], dict[str, Any]], entry: Architecture, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, entry, there))
    process.start()
    there.close()
    start = time.monotonic()
    try:
        answer = json.loads(here.recv()) if here.poll(seconds) else {"crash": f"took longer than {seconds} s"}
    except EOFError:
        process.join(10)
        answer = {"crash": f"ended with exit code {process.exitcode}"}
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join()
    return {**answer, "seconds": round(time.monotonic() - start, 1)}


def _answer(function: Callable[[Architecture], dict[str, Any]], entry: Architecture, there: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stderr = open(os.devnull, "w")
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        answer = function(entry)
    except BaseException as error:
        answer = {"crash": f"{type(error).__name__}: {error}{_where(error)}"[:2000]}
    there.send(json.dumps(answer))
    there.close()


def _try(entry: Architecture) -> dict[str, Any]:
    model = build(entry)
    loss = loss_of(model(**batch(model, entry, padding_side="left")))
    loss.backward()
    return {"parameters": sum(p.numel() for p in model.parameters()), "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all by default")
    parser.add_argument("--all-tasks", action="store_true", help="every class, not only the first of each model type")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    entries = [
        e
        for e in architectures(all_tasks=options.all_tasks)
        if e.model_type in options.model_types or not options.model_types
    ]
    counts: Counter[str] = Counter()
    for entry, row in over(_try, entries, processes=options.processes):
        counts["cannot be built" if "crash" in row else "built"] += 1
        print(*entry, row, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
