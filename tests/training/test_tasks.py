from __future__ import annotations

import datetime

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tiny_task import make_rows, save_data, save_tokenizer

from peft_surgical.training.common import load_tokenizer
from peft_surgical.training.data import find_split, read_splits, split_rows, train_test_split
from peft_surgical.training.evaluation import compute_metrics
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.tasks import encode, make_task


# reading


def test_every_format_gives_the_same_rows(tmp_path):
    rows = Dataset.from_dict({"text": ['a "b", c', "d\te"], "label": ["x", "y"]})
    rows.to_csv(str(tmp_path / "a.csv"))
    rows.to_csv(str(tmp_path / "a.tsv"), sep="\t")
    rows.to_json(str(tmp_path / "a.jsonl"))
    rows.to_parquet(str(tmp_path / "a.parquet"))
    for ending in ("csv", "tsv", "jsonl", "parquet"):
        splits = read_splits(str(tmp_path / f"a.{ending}"))
        assert list(splits) == ["train"]
        assert splits["train"][:] == rows[:], ending


def test_a_file_named_after_a_split_is_that_split(tmp_path):
    make_rows(4, 0).to_parquet(str(tmp_path / "validation.parquet"))
    assert list(read_splits(str(tmp_path / "validation.parquet"))) == ["validation"]
    make_rows(4, 0).to_parquet(str(tmp_path / "valuations.parquet"))
    assert list(read_splits(str(tmp_path / "valuations.parquet"))) == ["train"]


def test_a_folder_gives_its_splits_and_joins_shards(tmp_path):
    make_rows(4, 0).to_parquet(str(tmp_path / "train-00000-of-00002.parquet"))
    make_rows(6, 1).to_parquet(str(tmp_path / "train-00001-of-00002.parquet"))
    make_rows(2, 2).to_json(str(tmp_path / "dev.jsonl"))
    (tmp_path / "README.md").write_text("not data")
    assert {name: len(rows) for name, rows in read_splits(str(tmp_path)).items()} == {"train": 10, "dev": 2}


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    DatasetDict({"train": make_rows(4, 0), "test": make_rows(2, 1)}).save_to_disk(str(tmp_path / "d"))
    assert {name: len(rows) for name, rows in read_splits(str(tmp_path / "d")).items()} == {"train": 4, "test": 2}


def test_another_encoding_is_named_when_a_csv_is_not_utf8(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes("text,label\ncafé,x\nthé,y\n".encode("latin-1"))
    with pytest.raises(ValueError, match="--encoding"):
        read_splits(str(file))
    assert read_splits(str(file), encoding="latin-1")["train"]["text"][:] == ["café", "thé"]


def test_a_quotation_mark_in_a_tsv_takes_no_other_lines_with_it(tmp_path):
    rows = {"text": ['"a', "b", 'c"', '"d" e', "f\u2028g"], "label": [0, 1, 0, 1, 0]}
    lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in zip(*rows.values(), strict=True))]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_splits(str(tmp_path / "train.tsv"))["train"][:] == rows


def test_a_csv_with_other_separators_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("text;label\na text, with a comma;good\n")
    with pytest.raises(ValueError, match=r"a.csv: it has semicolons between its columns. Save it with commas"):
        read_splits(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_words_that_pandas_takes_for_nothing_are_read_as_written(tmp_path, ending):
    rows = {
        "text": ["None", "a", "null", "b", None, "c"],
        "label": ["NA", "null", "None", "nan", "yes", None],
        "number": [1.0, None, 3.0, None, 5.0, 6.0],
        "empty": [None] * 6,
    }
    lines = [[*rows], *zip(*rows.values(), strict=True)]
    lines[2] = (*lines[2][:2], "NA", None)  # among numbers it is none
    text = "\n".join(
        ("," if ending == "csv" else "\t").join("" if v is None else str(v) for v in line) for line in lines
    )
    (tmp_path / f"a.{ending}").write_text(text + "\n")
    splits = read_splits(str(tmp_path / f"a.{ending}"))
    assert splits["train"].to_dict() == rows
    assert make_task(splits, label_column="label", text_columns=["text"]).labels == (
        "NA",
        "None",
        "nan",
        "null",
        "yes",
    )
    (tmp_path / f"b.{ending}").write_text("label\nNA\nnull\n")
    assert read_splits(str(tmp_path / f"b.{ending}"))["train"]["label"][:] == ["NA", "null"]


@pytest.mark.parametrize(
    ("ending", "text"), [("csv", ""), ("csv", "text,label\n"), ("json", ""), ("json", "[]"), ("jsonl", "\n")]
)
def test_a_file_without_rows_is_named(tmp_path, ending, text):
    (tmp_path / f"a.{ending}").write_text(text)
    with pytest.raises(ValueError, match=f"--data .*a.{ending}: the file has no rows"):
        read_splits(str(tmp_path / f"a.{ending}"))


@pytest.mark.parametrize("name", ["nowhere.csv", "./nowhere", "/nowhere/at/all"])
def test_a_missing_path_is_said_to_be_missing(name):
    with pytest.raises(ValueError, match="no such file or folder"):
        read_splits(name)


def test_folders_without_data_or_with_a_split_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        read_splits(str(tmp_path))
    make_rows(2, 0).to_parquet(str(tmp_path / "train.parquet"))
    make_rows(2, 0).to_json(str(tmp_path / "train.jsonl"))
    with pytest.raises(ValueError, match="'train' is there twice"):
        read_splits(str(tmp_path))


def test_a_name_the_hub_does_not_give_is_an_error_that_says_both():
    with pytest.raises(ValueError, match="neither a file nor a folder here, and the hub"):
        read_splits("no-such-owner/no-such-set")


@pytest.mark.parametrize(
    ("names", "role", "found"),
    [
        (["train", "dev", "validation"], "validation", "validation"),
        (["train", "validation_matched", "validation_mismatched"], "validation", "validation_matched"),
        (["training", "test"], "train", "training"),
        (["train", "test"], "validation", None),
    ],
)
def test_splits_are_found_by_role(names, role, found):
    assert find_split(names, role) == found


# columns and labels


def task_of(columns, features=None, **options):
    features = features and Features({k: features.get(k, Value("string")) for k in columns})
    return make_task({"train": Dataset.from_dict(columns, features=features)}, **options)


@pytest.mark.parametrize(
    ("columns", "texts", "unused"),
    [
        (["premise", "hypothesis"], ("premise", "hypothesis"), ()),
        (["question", "sentence"], ("question", "sentence"), ()),
        (["id", "text"], ("text",), ("id",)),
        (["tweet"], ("tweet",), ()),
        (["word", "sentence1", "sentence2"], ("sentence1", "sentence2"), ("word",)),
    ],
)
def test_text_columns_are_found(columns, texts, unused):
    task = task_of({**{c: ["a", "b"] for c in columns}, "label": ["x", "y"]})
    assert (task.text_columns, task.unused_columns) == (texts, unused)


def test_named_columns_are_taken_in_the_order_given():
    data = {"one": ["a", "b"], "two": ["c", "d"], "three": ["e", "f"], "kind": ["x", "y"]}
    task = task_of(data, text_columns=["three", "one"], label_column="kind")
    assert task.split("train")[0] == {"text": "e", "text_pair": "a", "labels": 0}
    assert task.unused_columns == ("two",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "which column holds the text.*--text-column"),
        ({"text_columns": ["nope"]}, "no such column; the columns are"),
        ({"text_columns": ["a", "b", "label"]}, "one text or two"),
        ({"text_columns": ["a"], "label_column": "nope"}, "no such column"),
    ],
)
def test_columns_that_are_not_clear_are_asked_for(options, message):
    with pytest.raises(ValueError, match=message):
        task_of({"a": ["1", "2"], "b": ["3", "4"], "label": ["x", "y"]}, **options)


def test_a_label_column_is_found_by_its_type_or_asked_for():
    data = {"text": ["a", "b"], "mood": [0, 1]}
    assert task_of(data, {"mood": ClassLabel(names=["x", "y"])}).label_column == "mood"
    with pytest.raises(ValueError, match="--label-column"):
        task_of(data)


@pytest.mark.parametrize(
    ("values", "kind", "labels", "ids"),
    [
        (["no", "yes", "no"], "classification", ("no", "yes"), [0, 1, 0]),
        ([3, 1, 3], "classification", ("1", "3"), [1, 0, 1]),
        ([True, False, True], "classification", ("False", "True"), [1, 0, 1]),
        ([0.5, 2.0, 3.0], "regression", (), [0.5, 2.0, 3.0]),
    ],
)
def test_the_kind_is_told_from_the_labels(values, kind, labels, ids):
    task = task_of({"text": ["a", "b", "c"], "label": values})
    assert (task.kind, task.labels, task.split("train")["labels"][:]) == (kind, labels, ids)


@pytest.mark.parametrize("values", [[1.0, 0.0, 1.0], list(range(60))])
def test_numbers_that_may_be_either_are_asked_about(values):
    columns = {"text": ["a"] * len(values), "label": values}
    with pytest.raises(ValueError, match="--task classification or --task regression"):
        task_of(columns)
    assert task_of(columns, kind="regression").split("train")["labels"][:] == values
    assert len(task_of(columns, kind="classification").labels) == len(set(values))


def test_class_names_come_from_the_file():
    task = task_of({"text": ["a", "b"], "label": [1, 0]}, {"label": ClassLabel(names=["no", "yes"])})
    assert task.labels == ("no", "yes")


def test_labels_of_other_splits_are_matched_by_name_not_by_id():
    train = make_rows(4, 0)
    swapped = Dataset.from_dict(
        {"text": ["a", "b"], "label": [0, 1]},
        features=Features({"text": Value("string"), "label": ClassLabel(names=["good", "bad"])}),
    )
    task = make_task({"train": train, "validation": swapped})
    assert task.labels == ("bad", "good")
    assert task.split("validation")["labels"][:] == [1, 0]


def test_an_unknown_label_and_a_single_class_are_refused():
    splits = {
        "train": Dataset.from_dict({"text": ["a", "b"], "label": ["x", "y"]}),
        "validation": Dataset.from_dict({"text": ["a"], "label": ["z"]}),
    }
    with pytest.raises(ValueError, match="'validation' holds the label 'z'"):
        make_task(splits)
    with pytest.raises(ValueError, match="single class 'x'"):
        task_of({"text": ["a", "b"], "label": ["x", "x"]})


def test_a_column_that_a_split_lacks_and_infinite_amounts_are_named():
    splits = {"train": make_rows(4, 0), "dev": make_rows(4, 1).rename_column("text", "words")}
    with pytest.raises(ValueError, match="'dev' has no column 'text', as the others do; it has .*words"):
        make_task(splits)
    with pytest.raises(ValueError, match="'dev' has no column 'label', as the others do; it has .*'text'"):
        make_task({"train": make_rows(4, 0), "dev": make_rows(4, 1).remove_columns("label")})
    data = Dataset.from_dict({"text": ["a", "b"], "label": [1.5, float("inf")]})
    with pytest.raises(ValueError, match="'train' holds the label inf"):
        make_task({"train": data}, kind="regression")


def test_classes_are_no_amounts():
    with pytest.raises(ValueError, match="not amounts"):
        task_of({"text": ["a", "b"], "label": [0, 1]}, {"label": ClassLabel(names=["x", "y"])}, kind="regression")
    with pytest.raises(ValueError, match="not a number"):
        task_of({"text": ["a", "b"], "label": ["1", "many"]}, kind="regression")


def test_rows_and_splits_without_labels_are_left_out():
    labels = ClassLabel(names=["x", "y"])
    features = Features({"text": Value("string"), "label": labels})
    task = make_task(
        {
            "train": Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, None, 1]}, features=features),
            "test": Dataset.from_dict({"text": ["d", "e"], "label": [-1, -1]}, features=features),
        }
    )
    assert task.split("train")["text"][:] == ["a", "c"]
    with pytest.raises(ValueError, match="no labelled rows called 'test'.*'train'"):
        task.split("test")


def test_missing_text_becomes_empty_text():
    task = task_of({"text": ["a", None], "label": ["x", "y"]})
    assert task.split("train")["text"][:] == ["a", ""]


def test_encoding_marks_pairs_and_cuts_to_length(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    task = task_of({"sentence1": ["w1 w2 w3 w4", "w1"], "sentence2": ["w5", "w6"], "label": ["x", "y"]})
    rows = encode(task.split("train"), tokenizer, max_length=6)
    assert rows[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert len(rows[0]["input_ids"]) == 6
    assert len(rows[1]["input_ids"]) == 5
    assert rows["labels"][:] == [0, 1]


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    save_tokenizer(tmp_path, pad_token=None)
    assert load_tokenizer(str(tmp_path)).pad_token == "[SEP]"


# held-out rows


def texts(data):
    return set(data["text"][:])


def split(task, **options):
    return split_rows(task, TrainingJob(model="m", data="d", output="o", **options))


def test_parts_share_no_row_and_none_is_lost():
    task = make_task({"train": make_rows(50, 1), "validation": make_rows(20, 2)})
    parts = split(task, held_out=0.2)
    assert (len(parts.train), len(parts.selection), len(parts.evaluation)) == (40, 10, 20)
    assert texts(parts.train) | texts(parts.selection) == texts(task.split("train"))
    assert not texts(parts.train) & texts(parts.selection)
    assert texts(parts.evaluation) == texts(task.split("validation"))
    assert parts.overlap == 0
    assert not parts.optimistic


def test_without_a_validation_split_the_evaluation_rows_are_cut_off_first():
    task = make_task({"train": make_rows(50, 1)})
    parts = split(task, held_out=0.2)
    assert (len(parts.train), len(parts.selection), len(parts.evaluation)) == (32, 8, 10)
    assert len(texts(parts.train) | texts(parts.selection) | texts(parts.evaluation)) == 50
    # how the checkpoint is chosen does not move the rows that are measured
    assert texts(split(task, held_out=0.2, select_on="none").evaluation) == texts(parts.evaluation)


def test_choosing_on_the_evaluation_rows_is_called_optimistic():
    task = make_task({"train": make_rows(50, 1), "validation": make_rows(20, 2), "test": make_rows(10, 3)})
    assert split(task, select_on="validation").optimistic
    honest = split(task, select_on="validation", eval_split="test")
    assert (len(honest.selection), len(honest.evaluation), honest.optimistic) == (20, 10, False)
    assert len(honest.train) == 50


def test_rows_of_the_evaluation_that_were_trained_on_are_counted():
    train = make_rows(50, 1)
    parts = split(make_task({"train": train, "validation": train.select(range(7))}), select_on="none")
    assert parts.overlap == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_split": "train"}, "--eval-split train"),
        ({"select_on": "train"}, "--select-on train"),
        ({"select_on": "nowhere"}, "--select-on nowhere: allowed are held-out, none, validation"),
        ({"held_out": 0.001}, "--held-out 0.001 of 50 rows is 0 rows"),
    ],
)
def test_parts_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        split(make_task({"train": make_rows(50, 1), "validation": make_rows(20, 2)}), **options)


def test_a_task_without_training_rows_is_refused():
    with pytest.raises(ValueError, match="no training split"):
        split(make_task({"validation": make_rows(20, 2)}))


def test_a_cut_keeps_the_mix_of_classes():
    data = make_task({"train": make_rows(100, 1)}).split("train").select([*range(0, 100, 2), *range(1, 20, 2)])
    rest, cut = train_test_split(data, 0.2, seed=0)
    assert sum(cut["labels"][:]) / len(cut) == pytest.approx(sum(data["labels"][:]) / len(data), abs=0.05)
    assert len(rest) + len(cut) == len(data)


def test_a_cut_of_amounts_and_of_rare_classes_works():
    features = Features({"labels": ClassLabel(names=["x", "y"])})
    rare = Dataset.from_dict({"labels": [0] * 9 + [1]}, features=features)
    assert [len(part) for part in train_test_split(rare, 0.2, seed=0)] == [8, 2]


def test_a_limit_on_training_rows_leaves_the_others_alone():
    task = make_task({"train": make_rows(50, 1), "validation": make_rows(20, 2)})
    whole, limited = split(task), split(task, max_train_samples=10)
    assert len(limited.train) == 10
    assert texts(limited.train) < texts(whole.train)
    assert texts(limited.selection) == texts(whole.selection)


# metrics, against their definitions


def test_metrics_of_two_classes_equal_their_definitions():
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(200, 2)), draw.integers(0, 2, 200)
    predicted = logits.argmax(1)
    tp, tn = ((predicted == t) & (targets == t) for t in (1, 0))
    tp, tn = int(tp.sum()), int(tn.sum())
    fp, fn = int((predicted > targets).sum()), int((predicted < targets).sum())
    metrics = compute_metrics(logits, targets)
    assert metrics["accuracy"] == pytest.approx((tp + tn) / 200)
    assert metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    matthews = (tp * tn - fp * fn) / np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert metrics["matthews"] == pytest.approx(matthews)


def test_f1_of_several_classes_is_the_mean_over_the_classes():
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(200, 3)), draw.integers(0, 3, 200)
    predicted = logits.argmax(1)
    each = [
        2 * ((predicted == c) & (targets == c)).sum() / ((predicted == c).sum() + (targets == c).sum())
        for c in range(3)
    ]
    assert compute_metrics(logits, targets)["f1"] == pytest.approx(np.mean(each))


def test_correlations_equal_their_definitions():
    draw = np.random.default_rng(0)
    targets = draw.normal(size=50).astype(np.float32)
    predicted = (targets + draw.normal(size=50)).astype(np.float32)
    metrics = compute_metrics(predicted[:, None], targets)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(predicted, targets)[0, 1], abs=1e-6)
    ranks = [values.argsort().argsort() for values in (predicted, targets)]
    assert metrics["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)


def test_a_correlation_with_constant_predictions_is_zero():
    targets = np.arange(5, dtype=np.float32)
    assert compute_metrics(np.ones((5, 1)), targets) == {"pearson": 0.0, "spearman": 0.0}


def test_outputs_that_are_not_finite_are_no_result():
    with pytest.raises(ValueError, match="--learning-rate"):
        compute_metrics(np.array([[np.nan, 1.0]]), np.array([1]))


# real files


@pytest.mark.parametrize(
    ("name", "texts", "labels", "rows"),
    [
        ("glue/rte", ("sentence1", "sentence2"), ("entailment", "not_entailment"), (2490, 277)),
        ("glue/cola", ("sentence",), ("unacceptable", "acceptable"), (8551, 1043)),
        ("glue/stsb", ("sentence1", "sentence2"), (), (5749, 1500)),
        ("superglue/cb", ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"), (250, 56)),
    ],
)
def test_real_tasks_are_read_without_naming_anything(task_data, name, texts, labels, rows):
    task = make_task(read_splits(str(task_data / name)))
    assert task.text_columns == texts
    assert task.labels == labels
    assert task.kind == ("classification" if labels else "regression")
    assert (len(task.split("train")), len(task.split("validation"))) == rows


def test_real_overlap_is_counted(task_data):
    task = make_task(read_splits(str(task_data / "glue/cola")))
    assert split(task).overlap == 16


def test_save_data_is_what_it_says(tmp_path):
    task = make_task(read_splits(str(save_data(tmp_path / "d", pair=True))))
    assert task.text_columns == ("sentence1", "sentence2")


# ---- labels that no classifier can learn


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ([["a", "b"], ["a"]], "(List|Sequence)"),
        ([[0, 1, 0], [1, 0, 0]], "(List|Sequence)"),
        ([{"start": 1}, {"start": 2}], "start"),
        ([b"a", b"b"], "binary"),
        ([datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)], "date"),
    ],
)
def test_labels_that_are_no_single_class_or_number_are_refused_in_a_line(labels, what):
    with pytest.raises(ValueError, match=f"'label' holds .*{what}.*one class or one number a row") as error:
        make_task({"train": Dataset.from_dict({"text": ["x", "y"], "label": labels})})
    assert "\n" not in str(error.value)


def test_a_named_text_column_must_hold_text():
    data = Dataset.from_dict({"words": [["a", "b"], ["c"]], "label": [0, 1]})
    with pytest.raises(ValueError, match="--text-column words: it holds .*not text"):
        make_task({"train": data}, text_columns=["words"])


@pytest.mark.parametrize("labels", [[f"a sentence no. {i}" for i in range(40)], [*range(40)]])
def test_values_most_of_which_occur_once_are_no_classes_unless_one_insists(labels):
    data = {"train": Dataset.from_dict({"text": ["x"] * 44, "target": labels + labels[:4]})}
    with pytest.raises(ValueError, match="40 different values in 44 rows, 36 of which occur once.*--task"):
        make_task(data)
    assert len(make_task(data, kind="classification").labels) == 40


@pytest.mark.parametrize(
    "labels", [["a", "b", "c"], [f"class {i % 30}" for i in range(60)], [*"aaaabbbbcdefghij"], [*range(5)]]
)
def test_few_or_frequent_classes_are_classes(labels):
    data = Dataset.from_dict({"text": ["x"] * len(labels), "label": labels})
    assert make_task({"train": data}).kind == "classification"
