"""Language models: loaded, trained and measured with TRL's `SFTTrainer`, and asked."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jinja2 import TemplateError
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

from peft_surgical.distributed import shard_by_layer, this_process
from peft_surgical.training.common import Diverged, JointCheckpoints, load_tokenizer, max_length
from peft_surgical.training.data import Task
from peft_surgical.training.formats import as_plain_text, instruction_chat, split_prompt
from peft_surgical.training.job import TrainingJob


logger = logging.getLogger(__name__)

SAMPLE_ANSWERS = 3


def load_language_model(job: TrainingJob, folder: str | Path | None = None) -> Any:
    """Load the base of a job; with a folder, what the job trained, ready to answer."""
    is_adapter = folder is not None and (Path(folder) / "adapter_config.json").exists()
    source = job.model if folder is None or is_adapter else str(folder)
    dtype = job.dtype if job.dtype == "auto" else getattr(torch, job.dtype)
    more: dict[str, Any] = {}
    if job.load_in_4bit:
        compute = torch.bfloat16 if job.bf16 or job.dtype == "auto" else dtype
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
        more["device_map"] = {"": this_process().device}
    set_seed(job.seed)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **more)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {source}: no language model could be loaded from there: {error}") from error
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes 0.50 loses the order of scales when it saves
    if not getattr(model, "is_quantized", False):
        model.to(this_process().device)
    if folder is None:
        _check_causal(model, source)
    return model if folder is None else (PeftModel.from_pretrained(model, folder) if is_adapter else model).eval()


@torch.inference_mode()
def _check_causal(model: Any, source: str | Path) -> None:
    """Refuse an encoder, which sees what it is to predict: its output for a token depends on later ones."""
    if model.device.type == "meta" or any(hasattr(p, "ds_id") for p in model.parameters()):  # no whole weights
        return
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]], device=model.device) % model.config.get_text_config().vocab_size
    first, second = model(input_ids=ids).logits[:, 1].float()
    if not torch.allclose(first, second, rtol=1e-2, atol=1e-3 * float(first.abs().max())):
        raise ValueError(
            f"--model {source}: {type(model).__name__} reads a text from both sides, so it cannot learn to go on with "
            "one. Name a decoder; or if the texts have labels, their column with --label-column."
        )


def load_language_tokenizer(job: TrainingJob, task: Task) -> Any:
    """The tokenizer of a job, with the chat template that the job names."""
    tokenizer = load_tokenizer(job.model)
    if job.chat_template is not None:
        tokenizer.chat_template = Path(job.chat_template).read_text(encoding="utf-8")
    if task.form == "chat" and tokenizer.chat_template is None:
        raise ValueError(
            f"--model {job.model}: its tokenizer has no chat template, and the rows are chats. Choose a model made "
            "for chats, or give a template with --chat-template FILE."
        )
    if job.assistant_only_loss and (task.form == "text" or tokenizer.chat_template is None):
        raise ValueError(
            "--assistant-only-loss needs chats. Of `prompt` and `completion` the completion alone is learnt anyway."
        )
    return tokenizer


class LanguageTrainer(JointCheckpoints, SFTTrainer):
    """TRL's trainer, which counts each token once where it measures: a loss over rows depends on how they are batched.

    A batch of evaluation is one row.
    """

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        loss: Any = super().prediction_step(model, inputs, True, ignore_keys)[0]
        tokens = (inputs["labels"][:, 1:] != -100).sum().to(loss.device)
        return None, (loss * tokens).float().reshape(1), tokens.reshape(1)


def make_language_trainer(
    job: TrainingJob, model: Any, tokenizer: Any, arguments: Mapping[str, Any], rows: Dataset, **options: Any
) -> Any:
    """TRL's trainer for the rows of a task, which it turns into tokens; `options` go to it."""
    length = max_length(job, tokenizer, model, default=1024)
    config = {
        "gradient_checkpointing": False,  # TRL's default is another
        "packing": job.packing,
        "eval_packing": False,
        "assistant_only_loss": job.assistant_only_loss,
        "max_length": length,
        **arguments,
        "per_device_eval_batch_size": 1,
    }
    given = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    try:
        trainer: Any = LanguageTrainer(
            model=model,
            args=SFTConfig(**config),
            processing_class=tokenizer,
            train_dataset=rows,
            compute_metrics=lambda p: compute_perplexity(np.asarray(p.predictions), np.asarray(p.label_ids)),
            **options,
        )
    except TemplateError as error:
        raise ValueError(f"The chat template does not take a row of the data: {error}") from error
    for parameter, values in given.items():
        parameter.data = values  # on a quantised base TRL rounds to bfloat16, where small steps on weights are lost
    trainer.remove_callback(PrinterCallback)
    shard_by_layer(trainer.accelerator, model)
    _tell_what_is_cut(rows, trainer.train_dataset, length, packed=config["packing"])
    return trainer


def encode_language(job: TrainingJob, model: Any, tokenizer: Any, rows: Dataset) -> tuple[Dataset, Any]:
    """The rows as tokens with labels, each by itself, as they are trained on; and what pads them into a batch."""
    arguments = {"report_to": [], "bf16": False, "packing": False, "disable_tqdm": True}
    arguments |= {"use_cpu": this_process().device.type == "cpu"}
    with tempfile.TemporaryDirectory() as folder:  # a trainer makes one
        trainer = make_language_trainer(job, model, tokenizer, {**arguments, "output_dir": folder}, rows)
    vars(model).pop("forward", None)  # TRL's own, with a fused head
    return trainer.train_dataset.select_columns(["input_ids", "labels"]), trainer.data_collator


def evaluate_language(
    folder: str | Path, job: TrainingJob, task: Task, rows: Dataset, arguments: Mapping[str, Any]
) -> tuple[dict[str, float], Dataset, np.ndarray]:
    """What a job's model makes of rows of a task: the metrics, the rows with something to learn, and of each the sum
    of -log p and the number of its tokens (N, 2)."""
    tokenizer = load_tokenizer(str(folder))
    model = load_language_model(job, folder)
    rows = rows_for(tokenizer, task, rows)
    numbered = rows.add_column("row", [*range(len(rows))])
    trainer = make_language_trainer(job, model, tokenizer, {**arguments, "packing": False}, numbered)
    measured = rows.select(trainer.train_dataset["row"][:])  # those with something to learn within the length
    result = trainer.predict(trainer.train_dataset)
    outputs = np.stack([np.asarray(result.predictions), result.label_ids], axis=-1).astype(np.float64)
    return compute_perplexity(outputs[:, 0], outputs[:, 1]), measured, outputs


def compute_perplexity(losses: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """The mean loss over all tokens, and the perplexity, which is its exponential, from the sum of -log p over each
    row's tokens (N,), in nats, and how many tokens each row has that count (N,).

    Example:

        >>> compute_perplexity(np.log([4.0, 1.0]), np.array([1, 1]))
        {'loss': 0.6931471805599453, 'perplexity': 2.0}
    """
    if not np.isfinite(losses).all():
        raise Diverged("losses")
    loss = float(losses.sum(dtype=np.float64) / tokens.sum())
    return {"loss": loss, "perplexity": float(np.exp(loss))}


class PromptTooLong(ValueError):
    """A prompt fills all positions that a model has."""


@torch.inference_mode()
def answer(
    model: Any, tokenizer: Any, prompt: Any, form: str, *, max_new_tokens: int = 64, temperature: float = 0.0
) -> str:
    """What a model says to a prompt: a text, or the messages of a chat so far. `form` is how the model was trained:
    with `"chat"` and `"instruction"` a text becomes the user's message. With the temperature 0 each token is the
    likeliest one."""
    inputs = encode_prompt(model, tokenizer, prompt, form)
    length, most = inputs["input_ids"].shape[1], _positions(model)
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    chance: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature or None}
    if temperature == 0:
        chance |= {"top_p": None, "top_k": None}  # of the model's own settings, which have no meaning then
    said = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens if most is None else min(max_new_tokens, most - length),
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id,
        **chance,
    )
    return tokenizer.decode(said[0, length:], skip_special_tokens=True)


def encode_prompt(model: Any, tokenizer: Any, prompt: Any, form: str) -> dict[str, torch.Tensor]:
    """A prompt as `answer` puts it to a model, unless it is too long."""
    has_template = tokenizer.chat_template is not None
    if isinstance(prompt, str) and (form == "chat" or (form == "instruction" and has_template)):
        prompt = instruction_chat(prompt)
    if isinstance(prompt, str):
        text = f"{prompt}\n\n" if form == "instruction" and not prompt.endswith("\n\n") else prompt
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].shape[1] > 1 and inputs["input_ids"][0, -1] == tokenizer.eos_token_id:
            inputs = {name: values[:, :-1] for name, values in inputs.items()}  # a text that goes on
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = {name: values.to(model.device) for name, values in inputs.items() if name != "token_type_ids"}
    length, most = inputs["input_ids"].shape[1], _positions(model)
    if most is not None and length >= most:
        raise PromptTooLong(f"The prompt has {length} tokens, and with an answer the model reads at most {most}.")
    return inputs


def _positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def measure_beside(run: Any, rows: Dataset) -> dict[str, Any]:
    """What the base of a `TrainingRun` by itself reaches on rows, if it is still there, and answers to the first of
    them."""
    trainer, model = run.trainer, run.model
    found: dict[str, Any] = {}
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            base = trainer.evaluate(rows, metric_key_prefix="base")
        found["base"] = {name: base[f"base_{name}"] for name in ("loss", "perplexity")}
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return found  # the weights are in parts
    model.eval()
    asked = [split_prompt(row) for row in rows.select(range(min(SAMPLE_ANSWERS, len(rows))))]
    found["answers"] = []
    for prompt, reference in asked:
        with suppress(PromptTooLong):
            if prompt:
                said = answer(model, run.prepared.tokenizer, prompt, run.prepared.task.form)
                question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                found["answers"].append({"prompt": question, "answer": said, "reference": reference or ""})
    return found


def rows_for(tokenizer: Any, task: Task, rows: Dataset) -> Dataset:
    """The rows of a task as the tokenizer takes them: without a chat template instructions are plain text."""
    return as_plain_text(rows) if task.form == "instruction" and tokenizer.chat_template is None else rows


def _tell_what_is_cut(rows: Dataset, encoded: Dataset, length: int, *, packed: bool) -> None:
    if packed:
        lengths = [number for row in encoded["seq_lengths"] for number in row]
    else:
        lengths = [len(row) for row in encoded["input_ids"]]
        if lost := len(rows) - len(encoded):
            logger.warning("%d of %d rows have nothing to learn within %d tokens: left out.", lost, len(rows), length)
    if long := sum(number >= length for number in lengths):
        logger.warning("%d of %d rows fill --max-length %d; what is longer is cut.", long, len(rows), length)
