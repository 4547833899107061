"""What a trained model says to texts that nothing is known about: the job of `predict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from peft_surgical.training.common import load_tokenizer, load_trained, max_length
from peft_surgical.training.data import find_split, read_splits
from peft_surgical.training.evaluation import read_run
from peft_surgical.training.formats import find_format, instruction_chat, split_prompt
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.options import CAUSAL_LM
from peft_surgical.training.prepare import require_trl


def predict(
    folder: str | Path,
    texts: Sequence[str] = (),
    *,
    data: str | None = None,
    split: str | None = None,
    text_columns: Sequence[str] = (),
    model: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Ask what `peft-surgical train` saved. Each answer is the same as if it was asked for alone.

    Args:
        folder: The folder that training wrote.
        texts: Texts to label, two at a time for a task with two texts; or prompts for a language model, which are put
            as the rows of the training were: in a chat as the user's message.
        data: Data to read texts from in place of `texts`, in the columns of the training. Of a chat the last answer
            is asked for anew.
        split: The split of the data; the test split, else the first one, if not given.
        text_columns: What the data call the columns of the training, in their order, if otherwise.
        model: The base model, if it lies elsewhere now.
        max_new_tokens: The most tokens that a language model says.
        temperature: How random its answers are; 0: always the likeliest token.
        seed: Seed of these random answers.

    Returns:
        One row after the other: the texts and the `prediction`; for classes also the probability of each, under
        `probability of NAME`; for language models `prompt` and `answer`.

    Raises:
        ValueError: The folder is not that of a finished run, there is nothing to ask, or a prompt is too long for the
            model; then none is answered.
    """
    job, task = read_run(folder)
    job = dataclasses.replace(job, model=model or job.model, seed=seed)
    if bool(texts) == (data is not None):
        raise ValueError("Give either --text or --data: what the model is asked.")
    is_language = task["kind"] == CAUSAL_LM
    asked = task["text_columns"][:1] if is_language else task["text_columns"]
    named = text_columns or asked
    if len(named) != len(asked):
        raise ValueError(f"--text-column {' '.join(named)}: name what the data call {asked}, in this order.")
    rows = None if data is None else _read_rows(job, data, split, named)
    if is_language:
        require_trl()
        prompts = [*texts] if rows is None else _read_prompts(task, rows, named[0])
        return _answer(folder, job, task, prompts, max_new_tokens, temperature)
    if rows is not None:
        return _label(folder, job, task, [tuple(row[column] or "" for column in named) for row in rows])
    if len(texts) % len(asked):
        raise ValueError(
            f"The model was trained on the two texts {asked}: give --text twice for each pair. It is there "
            f"{len(texts)} times."
        )
    return _label(folder, job, task, [tuple(texts[i : i + len(asked)]) for i in range(0, len(texts), len(asked))])


@torch.inference_mode()
def _label(
    folder: str | Path, job: TrainingJob, task: dict[str, Any], rows: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, Any]]:
    labels = task["labels"]
    tokenizer = load_tokenizer(job.model)
    model = load_trained(str(folder), job.model, labels, tokenizer, dtype=job.dtype)
    length = max_length(job, tokenizer, model)
    for row in rows:
        inputs = tokenizer(*row, truncation=True, max_length=length, return_tensors="pt")
        out = model(**inputs).logits[0].float()
        said = dict(zip(task["text_columns"], row, strict=True))
        if labels:
            odds = dict(zip(labels, out.softmax(-1).tolist(), strict=True))
            more = {f"probability of {name}": value for name, value in odds.items()}
            yield {**said, "prediction": max(odds, key=odds.__getitem__), **more}
        else:
            yield {**said, "prediction": out.item()}


def _answer(
    folder: str | Path,
    job: TrainingJob,
    task: dict[str, Any],
    prompts: Sequence[Any],
    max_new_tokens: int,
    temperature: float,
) -> Iterator[dict[str, Any]]:
    from peft_surgical.training.language import PromptTooLong, answer, encode_prompt, load_language_model

    tokenizer = load_tokenizer(str(folder))
    model = load_language_model(job, folder)
    for number, prompt in enumerate(prompts, 1):  # before any is answered: answers take long, and would be lost
        try:
            encode_prompt(model, tokenizer, prompt, task["form"])
        except PromptTooLong as error:
            raise PromptTooLong(f"Prompt {number} of {len(prompts)}: {error} Shorten it, or leave it out.") from error
    for prompt in prompts:
        said = answer(model, tokenizer, prompt, task["form"], max_new_tokens=max_new_tokens, temperature=temperature)
        yield {"prompt": prompt if isinstance(prompt, str) else prompt[-1]["content"], "answer": said}


def _read_rows(job: TrainingJob, data: str, split: str | None, columns: Sequence[str]) -> Dataset:
    splits = read_splits(data, encoding=job.encoding)
    name = split or find_split(splits, "test") or next(iter(splits))
    if name not in splits:
        raise ValueError(f"--split {name}: the splits are {[*splits]}.")
    there = splits[name].column_names
    if missing := [column for column in columns if column not in there]:
        raise ValueError(
            f"--data {data}: there is no column {missing[0]!r}; the columns are {there}. Name what the model was "
            "trained on with --text-column."
        )
    return splits[name]


def _read_prompts(task: dict[str, Any], rows: Dataset, column: str) -> list[Any]:
    if find_format(task["text_columns"]) == ("messages",):
        return [split_prompt({"messages": chat})[0] for chat in rows[column]]
    if task["form"] == "instruction":
        more = rows["input"][:] if "input" in rows.column_names else [None] * len(rows)
        pairs = zip(rows[column][:], more, strict=True)
        return [instruction_chat(*pair)[0]["content"] for pair in pairs]
    return rows[column][:]
