"""`predict` for runs of labelled text; test_language.py has it for language models."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from tiny_task import LABELS, save_base, save_data

from peft_surgical.training import TrainingJob, evaluate, predict, train


def test_predict_tells_labels_and_their_probabilities(tmp_path):
    folder, rows = save_base(tmp_path / "base"), save_data(tmp_path / "data")
    job = TrainingJob(model=str(folder), data=str(rows), output=str(tmp_path / "out"), method="last", max_steps=2)
    train(job)
    measured = evaluate(job.output)
    said = list(predict(job.output, data=str(rows), split="validation"))
    odds = np.exp(measured.outputs) / np.exp(measured.outputs).sum(-1, keepdims=True)
    assert [row["prediction"] for row in said] == measured.predictions
    for i, label in enumerate(LABELS):
        assert [row[f"probability of {label}"] for row in said] == pytest.approx(odds[:, i].tolist(), rel=1e-4)
    assert [row["text"] for row in said] == measured.data["text"][:]
    alone = next(predict(job.output, [measured.data["text"][0]]))
    assert alone == said[0]


def test_predict_takes_two_texts_at_a_time_and_tells_an_amount(tmp_path):
    folder, rows = save_base(tmp_path / "base"), save_data(tmp_path / "data", pair=True, regression=True)
    job = TrainingJob(model=str(folder), data=str(rows), output=str(tmp_path / "out"), method="last", max_steps=2)
    train(job)
    measured = evaluate(job.output)
    first = [measured.data[name][0] for name in ("text", "text_pair")]
    (row,) = predict(job.output, first)
    assert row == {"sentence1": first[0], "sentence2": first[1], "prediction": pytest.approx(measured.predictions[0])}
    with pytest.raises(ValueError, match="two texts .* give --text twice for each pair. It is there 1 times"):
        predict(job.output, first[:1])
    with pytest.raises(ValueError, match="either --text or --data"):
        predict(job.output)
    Dataset.from_dict({"sentence1": ["w1"]}).to_parquet(str(tmp_path / "half.parquet"))
    with pytest.raises(ValueError, match="no column 'sentence2'; the columns are .*--text-column"):
        predict(job.output, data=str(tmp_path / "half.parquet"))
