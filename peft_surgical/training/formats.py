"""Text for language models: what the columns hold is found out, and brought into one of the forms that TRL takes.

These are `messages` (a chat), `prompt` and `completion` (two texts, or two parts of a chat), and `text`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset

from peft_surgical.training.data import Task, check_columns, find_split, is_text
from peft_surgical.training.options import CAUSAL_LM


logger = logging.getLogger(__name__)

FORMATS = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))
"""The columns that make text for a language model, the first that are there."""
SUPPORTED = (
    "`messages` (a chat: role and content), `prompt` and `completion`, `instruction` (with or without `input`) and "
    "`output`, or `text`"
)
OTHERS = {
    "chosen": "preferences, as for DPO",
    "rejected": "preferences, as for DPO",
    "conversations": "a chat under another name",
    "image": "images",
    "images": "images",
    "tools": "tools",
}
"""Columns that would be trained on wrongly, or not at all, and what they are."""


def find_format(columns: Sequence[str]) -> tuple[str, ...] | None:
    """The columns among those given that make text for a language model, or None.

    Example:

        >>> find_format(["id", "instruction", "input", "output"]), find_format(["sentence", "label"])
        (('instruction', 'input', 'output'), None)
    """
    found = next((wanted for wanted in FORMATS if set(wanted) <= set(columns)), None)
    if found == ("instruction", "output") and "input" in columns:
        return ("instruction", "input", "output")
    return found


def is_for_language_model(data: Dataset, labels: Sequence[str]) -> bool:
    """Whether data that nothing was said about are text for a language model. `text` beside other columns is not.
    `labels` is what columns with labels are called."""
    found = find_format(data.column_names)
    if found == ("text",):
        return data.column_names == ["text"]
    labelled = [c for c, f in data.features.items() if c in labels or isinstance(f, ClassLabel)]
    if found and labelled:
        raise ValueError(
            f"The data has {_listed(found)}, which a language model learns, and the label {labelled[0]!r}. "
            f"Say --task classification, or --task {CAUSAL_LM}, which does not use the label."
        )
    return bool(found) or (not labelled and any(column in OTHERS for column in data.column_names))


def make_language_task(splits: Mapping[str, Dataset], columns: Sequence[str] = ()) -> Task:
    """Bring text for a language model into one form: `messages`, or `prompt` and `completion`, or `text`; instructions
    become the two sides of a chat. Rows without content are left out.

    The columns to read are found if not given. A single column of any name is plain text.

    Example:

        >>> data = Dataset.from_dict({"instruction": ["Add."], "input": ["1 and 2"], "output": ["3"]})
        >>> task = make_language_task({"train": data})
        >>> task.form, task.split("train")[0]["prompt"]
        ('instruction', [{'role': 'user', 'content': 'Add.\\n\\n1 and 2'}])
    """
    reference = splits[find_split(splits, "train") or next(iter(splits))]
    other = next((column for column in OTHERS if column in reference.column_names), None)
    if other and not columns:
        raise ValueError(f"Column {other!r} holds {OTHERS[other]}, which is not supported. Supported are {SUPPORTED}.")
    check_columns(reference, columns)
    found = find_format(columns or reference.column_names) or (tuple(columns) if len(columns) == 1 else None)
    if found is None:
        given = f"--text-column {' '.join(columns)}" if columns else f"The columns {reference.column_names}"
        raise ValueError(f"{given}: not supported as text for a language model. Supported are {SUPPORTED}.")
    form = _form(reference, found)
    made = {}
    for name, data in splits.items():
        if set(found) <= set(data.column_names):
            rows = _with_content(name, data, found)
            if len(rows):
                made[name] = _normalise(rows, found, form)
    if not made:
        raise ValueError(f"{_listed(found)}: none of the splits {[*splits]} has a row with content there.")
    strings = [c for c, f in reference.features.items() if is_text(f) and c not in found]
    return Task(CAUSAL_LM, found, None, (), tuple(strings), made, form)


def as_plain_text(rows: Dataset) -> Dataset:
    """Instructions as text, for a tokenizer without a chat template: an empty line comes after each part.

    Example:

        >>> rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Add."}],
        ...                            "completion": [{"role": "assistant", "content": "3"}]}])
        >>> as_plain_text(rows)[0]
        {'prompt': 'Add.\\n\\n', 'completion': '3'}
    """
    texts = [(row["prompt"][0]["content"] + "\n\n", row["completion"][0]["content"]) for row in rows]
    prompts, completions = zip(*texts, strict=True)
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def split_prompt(row: Mapping[str, Any]) -> tuple[Any, str | None]:
    """What a model is asked by a row, and what the row has as the answer, if it has one.

    Example:

        >>> split_prompt({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})
        ([{'role': 'user', 'content': 'Hi'}], 'Hello')
        >>> split_prompt({"text": "Once upon a time there was a queen who had no crown"})
        ('Once upon a time there was', ' a queen who had no crown')
    """
    if "messages" in row:
        chat = row["messages"]
        last = max((i for i, message in enumerate(chat) if message["role"] == "assistant"), default=len(chat))
        return chat[:last], chat[last]["content"] if last < len(chat) else None
    if "prompt" in row:
        answer = row.get("completion")
        return row["prompt"], answer if isinstance(answer, str) or not answer else answer[-1]["content"]
    words = row["text"].split(" ")
    half = " ".join(words[: len(words) // 2])
    return half, row["text"][len(half) :]


def instruction_chat(instruction: str, more: str | None = None) -> list[dict[str, str]]:
    """An instruction, with what it is about, as the user's side of a chat."""
    return [{"role": "user", "content": f"{instruction}\n\n{more}" if more else instruction}]


def _form(data: Dataset, columns: Sequence[str]) -> str:
    """`"chat"`, `"instruction"` or `"text"`: how a prompt is put to the model."""
    first = data.features[columns[0]]
    chats = [c for c in columns if not is_text(data.features[c])]
    if columns[0] == "instruction":
        if chats:
            raise ValueError(f"Column {chats[0]!r} holds {data.features[chats[0]]}, not text.")
        return "instruction"
    if is_text(first) and not chats and columns[0] != "messages":
        return "text"
    if columns[0] not in ("messages", "prompt") or len(chats) != len(columns):
        raise ValueError(f"Column {columns[0]!r} holds {first}, not text. Supported are {SUPPORTED}.")
    for column in columns:
        chat: Any = next((chat for chat in data[column] if chat), None)
        fits = isinstance(chat, list) and isinstance(chat[0], dict) and {"role", "content"} <= {*chat[0]}
        if not fits or not all(isinstance(message["content"] or "", str) for message in chat):
            raise ValueError(
                f"Column {column!r} holds {str(chat)[:80]!r}: no chat of messages with a role and a text as content. "
                f"Supported are {SUPPORTED}."
            )
    return "chat"


def _with_content(split: str, data: Dataset, columns: Sequence[str]) -> Dataset:
    needed = [data[column][:] for column in columns if column != "input"]
    keep = [
        i
        for i, row in enumerate(zip(*needed, strict=True))
        if all(value and (not isinstance(value, str) or value.strip()) for value in row)
    ]
    if len(keep) < len(data):
        logger.warning(
            "%d of %d rows of %r lack %s and are left out.", len(data) - len(keep), len(data), split, _listed(columns)
        )
    return data.select(keep)


def _normalise(rows: Dataset, columns: Sequence[str], form: str) -> Dataset:
    if form == "instruction":
        more = rows["input"][:] if "input" in columns else [None] * len(rows)
        prompts = [instruction_chat(*both) for both in zip(rows["instruction"][:], more, strict=True)]
        completions = [[{"role": "assistant", "content": text}] for text in rows["output"][:]]
        return Dataset.from_dict({"prompt": prompts, "completion": completions})
    rows = rows.select_columns([*columns])
    is_other = form == "text" and len(columns) == 1 and columns[0] != "text"
    return rows.rename_column(columns[0], "text") if is_other else rows


def _listed(columns: Sequence[str]) -> str:
    return " and ".join(f"`{column}`" for column in columns if column != "input")
