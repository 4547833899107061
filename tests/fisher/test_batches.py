"""From a user's data to batches: what is drawn, in which order, how it is padded and cut."""

from __future__ import annotations

import datasets
import pytest
import tiny_models
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from transformers import default_data_collator

from peft_surgical.fisher.batches import Batch, PadRight, draw_batches, token_lengths


MODEL = tiny_models.build("bert")
ROWS = [{"input_ids": list(range(3, 3 + n)), "label": n % 2} for n in (2, 9, 4, 7, 3, 8, 5, 6)]


def draw(data, **options):
    return list(draw_batches(data, MODEL, **{"num_samples": 100} | options))


def lengths(batches):
    return [int(row.sum()) for batch in batches for row in batch.inputs["attention_mask"]]


def test_batches_hold_samples_of_like_length_the_longest_first():
    batches = draw(ROWS, batch_size=3)
    assert lengths(batches) == [9, 8, 7, 6, 5, 4, 3, 2]
    assert [b.inputs["input_ids"].shape[1] for b in batches] == [9, 6, 3]
    assert sorted(i for b in batches for i in b.index) == list(range(8))


def test_a_draw_is_random_and_belongs_to_its_seed():
    def rows(seed):
        return [tuple(row.tolist()) for b in draw(ROWS, num_samples=4, seed=seed) for row in b.inputs["input_ids"]]

    assert rows(1) == rows(1)
    assert len({tuple(rows(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list, lambda rows: DataLoader(rows, collate_fn=pad)])
def test_all_kinds_of_data_with_a_length_give_the_same_draw(make):
    expected = draw(ROWS, num_samples=5)
    found = draw(make(ROWS), num_samples=5)
    for a, b in zip(expected, found, strict=True):
        assert a.index == b.index
        assert {k: v.tolist() for k, v in a.inputs.items()} == {k: v.tolist() for k, v in b.inputs.items()}


def pad(rows):
    return PadRight(MODEL)(rows)


def test_a_loader_that_draws_itself_is_read_in_its_own_order_and_no_further_than_asked_for():
    read = []

    class Endless(IterableDataset):
        def __iter__(self):
            n = 0
            while True:
                read.append(n)
                yield {"input_ids": torch.tensor([5, 6, n]), "labels": torch.tensor(0)}
                n += 1

    batches = draw(DataLoader(Endless(), batch_size=4, collate_fn=default_data_collator), num_samples=6)
    assert [b.inputs["input_ids"][:, 2].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]
    assert [b.index for b in batches] == [(0, 1, 2, 3), (4, 5)]
    assert len(read) == 8
    weighted = DataLoader(ROWS, sampler=WeightedRandomSampler([0.0] * 7 + [1.0], 5), collate_fn=pad)
    assert lengths(draw(weighted)) == [6] * 5


def test_columns_that_the_model_does_not_take_are_left_out():
    rows = [row | {"text": "some", "idx": 7} for row in ROWS]
    assert set(draw(rows)[0].inputs) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(ValueError, match=r"columns \['text'\].*Tokenize"):
        draw([{"text": "some"}])


def test_padding_is_the_models_token_and_ignored_labels():
    model = tiny_models.build("bart")
    rows = [{"input_ids": [5, 6, 7], "labels": [4, 4]}, {"input_ids": [5], "labels": [4, 4, 4]}]
    out = PadRight(model)(rows)
    assert out["input_ids"].tolist() == [[5, 6, 7], [5, 1, 1]]
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert out["labels"].tolist() == [[4, 4, -100], [4, 4, 4]]


def test_columns_of_nothing_but_padding_are_cut_off():
    rows = [
        {"input_ids": [5, 6, 0, 0, 0], "attention_mask": [1, 1, 0, 0, 0], "labels": [1, 1, -100, -100, -100]},
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [1, 1, 1, -100, -100]},
    ]
    (batch,) = draw(rows)
    assert all(v.shape == (2, 3) for v in batch.inputs.values())
    rows[1]["labels"][4] = 1  # an answer there would be lost
    assert draw(rows)[0].inputs["input_ids"].shape == (2, 5)
    left = [{"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1], "label": 0}]
    assert draw(left)[0].inputs["input_ids"].shape == (1, 3)


def test_lengths_are_known_where_padding_is_on_the_right():
    def of(mask):
        return token_lengths(Batch({"attention_mask": torch.tensor(mask)}, (0, 1)))

    assert of([[1, 1, 0], [1, 0, 0]]).tolist() == [2, 1]
    assert of([[0, 1, 1], [1, 1, 1]]) is None
    assert token_lengths(Batch({}, (0,))) is None


def test_processes_share_a_draw():
    whole = draw(ROWS, num_samples=7)
    parts = [draw(ROWS, num_samples=7, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(i for part in parts for b in part for i in b.index) == sorted(i for b in whole for i in b.index)
    stream = DataLoader(_Counting(), batch_size=2, collate_fn=default_data_collator)
    parts = [draw(stream, num_samples=7, rank=rank, world_size=3) for rank in range(3)]
    seen = [int(n) for part in parts for b in part for n in b.inputs["input_ids"][:, 0]]
    assert sorted(seen) == list(range(7))


class _Counting(IterableDataset):
    def __iter__(self):
        return iter({"input_ids": torch.tensor([n, 1]), "labels": torch.tensor(0)} for n in range(10))


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([], {}, ValueError, "no samples"),
        ("text", {}, TypeError, "data is a str; allowed are a datasets.Dataset, a sequence of feature dicts"),
        (iter(ROWS), {}, TypeError, "Wrap an iterable in a DataLoader"),
        (ROWS, {"num_samples": 0}, ValueError, "num_samples=0; allowed are integers from 1 on"),
        (ROWS, {"batch_size": -1}, ValueError, "batch_size=-1"),
        (DataLoader(_Counting(), collate_fn=lambda rows: rows), {}, TypeError, "gives a list; needed is a dict"),
    ],
)
def test_data_that_cannot_be_used_are_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        draw(data, **options)
