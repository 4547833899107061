"""From a user's data to batches: what is drawn, in which order, how it is padded and cut."""

from __future__ import annotations

import datasets
import pytest
import tiny_models
import torch
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import default_data_collator

from peft_surgical.fisher.batches import Batch, PadRight, padded_right, token_lengths
from peft_surgical.fisher.draw import Draw


MODEL = tiny_models.build("bert")
ROWS = [{"input_ids": list(range(3, 3 + n)), "label": n % 2} for n in (2, 9, 4, 7, 3, 8, 5, 6)]


def draw(data, num_samples=100, batch_size=16, **options):
    return list(Draw(data, MODEL, num_samples, **options).batches(batch_size))


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


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        (SequentialSampler(range(3)), 3),
        (RandomSampler(range(3)), 3),
        (RandomSampler(range(8), num_samples=2), 2),
        (RandomSampler(range(3), replacement=True, num_samples=8), 8),
        (SequentialSampler(ROWS), 8),
    ],
)
@pytest.mark.parametrize("is_of_batches", [False, True])
def test_a_sampler_that_walks_over_some_of_the_rows_is_heeded(sampler, count, is_of_batches):
    walk = {"batch_sampler": BatchSampler(sampler, 2, False)} if is_of_batches else {"sampler": sampler}
    found = lengths(draw(DataLoader(ROWS, collate_fn=pad, **walk)))
    assert len(found) == count
    rows = [ROWS[row] if isinstance(row, int) else row for row in sampler.data_source]
    assert set(found) <= {len(row["input_ids"]) for row in rows}


class OwnLoader(DataLoader):
    pass


def _stream():
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset()


@pytest.mark.parametrize(
    "loader_of",
    [
        lambda rank: DataLoader(ROWS, 2, sampler=SequentialSampler(ROWS), collate_fn=pad),
        lambda rank: OwnLoader(ROWS, 2, collate_fn=pad),
        lambda rank: DataLoader(_stream(), 2, collate_fn=pad),
        lambda rank: DataLoader(ROWS, 2, sampler=DistributedSampler(ROWS, 2, rank), collate_fn=pad),
        lambda rank: DataLoader(
            ROWS, batch_sampler=BatchSampler(DistributedSampler(ROWS, 2, rank), 2, False), collate_fn=pad
        ),
        lambda rank: DataLoader(
            IterableDatasetShard(_stream(), 2, num_processes=2, process_index=rank), 2, collate_fn=pad
        ),
        lambda rank: prepare_data_loader(DataLoader(ROWS, 2, collate_fn=pad), num_processes=2, process_index=rank),
        lambda rank: prepare_data_loader(
            DataLoader(_stream(), 2, collate_fn=pad), num_processes=2, process_index=rank
        ),
    ],
)
def test_two_processes_read_each_row_of_a_loader_once_whoever_splits_it(loader_of):
    parts = [draw(loader_of(rank), rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(lengths(parts[0] + parts[1])) == list(range(2, 10))
    assert sorted(i for part in parts for batch in part for i in batch.index) == list(range(8))


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
    rows[1]["labels"][4] = 1  # what the mask hides is no answer
    assert draw(rows)[0].inputs["input_ids"].shape == (2, 3)


def test_padding_on_the_left_is_moved_to_the_right_with_all_that_belongs_to_tokens():
    batch = Batch(
        {
            "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
            "bbox": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]])[..., None].expand(2, 4, 4),
            "inputs_embeds": torch.tensor([[0.0, 0, 5, 6], [7, 8, 9, 3]])[..., None],
            "start_positions": torch.tensor([2, 0]),
            "end_positions": torch.tensor([3, 1]),
            "labels": torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]]),  # of four classes, not of tokens
        },
        (0, 1),
    )
    moved = padded_right(batch, None).inputs
    for name in ("input_ids", "bbox", "inputs_embeds"):
        assert moved[name].view(2, 4, -1)[..., 0].tolist() == [[5, 6, 0, 0], [7, 8, 9, 3]]
    assert moved["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert (moved["start_positions"].tolist(), moved["end_positions"].tolist()) == ([0, 0], [1, 1])
    assert moved["labels"] is batch.inputs["labels"]
    cut = padded_right(batch.select(0, 1), None).inputs
    assert {k: v.shape[1] for k, v in cut.items() if v.dim() > 1} == {
        "input_ids": 2, "attention_mask": 2, "bbox": 2, "inputs_embeds": 2, "labels": 4,
    }  # fmt: skip


def test_labels_of_a_decoder_stay_where_they_are():
    inputs = {
        "input_ids": torch.tensor([[0, 5], [7, 8]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "labels": torch.tensor([[1, 2], [3, 4]]),
        "decoder_input_ids": torch.tensor([[1, 2], [3, 4]]),
    }
    names = {"input_ids", "attention_mask", "decoder_input_ids", "labels"}
    moved = padded_right(Batch(inputs, (0, 1)), names).inputs
    assert moved["input_ids"].tolist() == [[5, 0], [7, 8]]
    assert moved["labels"] is inputs["labels"]
    assert moved["decoder_input_ids"] is inputs["decoder_input_ids"]
    assert padded_right(Batch(inputs, (0, 1)), names - {"decoder_input_ids"}).inputs["labels"].tolist()[0] == [2, 1]


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
        ("text", {}, TypeError, "data is a str; allowed are a datasets.Dataset, a sequence or an iterable"),
        (5, {}, TypeError, "data is a int; allowed are"),
        (ROWS, {"num_samples": 0}, ValueError, "num_samples=0; allowed are integers from 1 on"),
        (ROWS, {"batch_size": -1}, ValueError, "batch_size=-1"),
        (DataLoader(_Counting(), collate_fn=lambda rows: rows), {}, TypeError, "A batch is a list; needed is a dict"),
    ],
)
def test_data_that_cannot_be_used_are_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        draw(data, **options)
