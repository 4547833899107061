"""What a data set for a language model holds is found out from its columns."""

from __future__ import annotations

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from tiny_chat import make_language_rows

from peft_surgical.training.formats import make_language_task
from peft_surgical.training.tasks import make_task


CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


@pytest.mark.parametrize(
    ("form", "columns", "said"),
    [
        ("messages", ("messages",), "chat"),
        ("chat prompt", ("prompt", "completion"), "chat"),
        ("prompt", ("prompt", "completion"), "text"),
        ("instruction", ("instruction", "input", "output"), "instruction"),
        ("text", ("text",), "text"),
    ],
)
def test_a_format_is_known_by_its_columns(form, columns, said):
    task = make_task({"train": make_language_rows(3, 0, form)})
    assert (task.kind, task.text_columns, task.form, task.label_column) == ("causal-lm", columns, said, None)
    assert len(task.split("train")) == 3


def test_of_several_formats_the_richest_is_read_and_other_texts_are_told():
    rows = {"messages": [CHAT], "prompt": ["w1"], "text": ["w1 w2"], "id": [1]}
    task = make_task({"train": Dataset.from_dict(rows)})
    assert task.text_columns == ("messages",)
    assert task.unused_columns == ("prompt", "text")
    assert task.split("train").column_names == ["messages"]


def test_a_text_column_of_any_name_can_be_named():
    rows = Dataset.from_dict({"body": ["w1 w2"], "id": [3]})
    task = make_task({"train": rows}, kind="causal-lm", text_columns=("body",))
    assert task.split("train")[0] == {"text": "w1 w2"}


def test_text_with_labels_stays_classification_and_text_beside_other_columns_is_asked_about():
    rows = {"text": ["a", "b"], "label": ["x", "y"]}
    assert make_task({"train": Dataset.from_dict(rows)}).kind == "classification"
    assert make_task({"train": Dataset.from_dict(rows)}, kind="causal-lm").form == "text"
    with pytest.raises(ValueError, match="with --label-column; or, to train a language model .*--task causal-lm"):
        make_task({"train": Dataset.from_dict({"text": ["a", "b"], "stars": [1, 2]})})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"prompt": ["w1"], "chosen": ["w2"], "rejected": ["w3"]},
            "'chosen' holds preferences, as for DPO, .*Supported",
        ),
        ({"conversations": [[{"from": "human", "value": "w1"}]]}, "'conversations' .*Supported are `messages`"),
        ({"messages": [CHAT], "tools": ["[]"]}, "'tools' holds tools, which is not supported. Supported are"),
        ({"messages": ["w1"]}, "'messages' holds .*not text. Supported are"),
        ({"messages": [[{"from": "human", "value": "w1"}]]}, "no chat of messages with a role and a text as content"),
        (
            {"messages": [[{"role": "user", "content": [{"type": "text", "text": "w1"}]}]]},
            "no chat of messages with a role and a text as content",
        ),
        ({"prompt": [CHAT[:1]], "completion": ["w2"]}, "'prompt' holds .*not text"),
        ({"prompt": ["w1"], "completion": ["w2"], "label": [True]}, "Say --task classification, or --task causal-lm"),
        ({"tokens": [["w1"]], "ner_tags": [[1]]}, "No column is called label .*train a language model on `messages`"),
        ({"text": ["w1"], "labels": [[0, 1]]}, "several labels a row, as for multi-label .* are not"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_in_a_line_that_names_what_is(rows, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_task({"train": Dataset.from_dict(rows)})
    assert "\n" not in str(refused.value)


def test_rows_without_content_are_left_out_and_told(caplog):
    rows = Dataset.from_dict({"prompt": ["w1", None, "w3", "w4"], "completion": ["w2", "w2", " ", "w5"]})
    task = make_language_task({"train": rows})
    assert task.split("train")["prompt"][:] == ["w1", "w4"]
    assert "2 of 4 rows of 'train' lack `prompt` and `completion` and are left out" in caplog.text
    with pytest.raises(ValueError, match="none of the splits"):
        make_language_task({"train": Dataset.from_dict({"text": ["", " "]})})


def test_labels_that_are_classes_by_type_are_seen_too():
    features = Features({"instruction": Value("string"), "output": Value("string"), "kind": ClassLabel(names=["a"])})
    rows = Dataset.from_dict({"instruction": ["w1"], "output": ["w2"], "kind": [0]}, features=features)
    with pytest.raises(ValueError, match="`instruction` and `output`, .*the label 'kind'"):
        make_task({"train": rows})
