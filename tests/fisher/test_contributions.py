"""What each sample contributes to a norm, estimated from some entries of its squared gradient."""

from __future__ import annotations

import pytest
import torch

from peft_surgical.fisher.contributions import (
    WHOLE_VECTOR,
    EntryKeeper,
    KeptEntries,
    choose_entries,
    estimate_products,
)
from peft_surgical.fisher.gradients import DenseGradients, ProductGradients, RowGradients
from peft_surgical.fisher.squares import SquareQueue
from peft_surgical.fisher.sums import DiagonalSum, new_sum


def product(samples, tokens, height, width, seed=0):
    """A product some of whose rows, columns and samples are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(samples, tokens, size, generator=generator) for size in (height, width))
    scale = torch.linspace(0.1, 2, samples)[:, None, None]
    return ProductGradients(left * scale * torch.linspace(0, 2, height) ** 3, right * torch.linspace(0, 2, width) ** 3)


def table(samples, tokens, height, width):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, height, (samples, tokens), generator=generator)
    return RowGradients(rows, torch.randn(samples, tokens, width, generator=generator), height)


def exact(gradients):
    squares = gradients.dense(0, gradients.samples).flatten(1).double().square()
    return squares @ squares.sum(0), squares.sum(0).float()


def estimate(gradients, seed, together=1, parts=1):
    """The entries are chosen from the first part of the samples; several parameters have the same gradients."""
    keeper, kept = EntryKeeper(torch.Generator().manual_seed(seed)), [KeptEntries() for _ in range(together)]
    queue, step = SquareQueue(), -(-gradients.samples // parts)
    dense = gradients.dense(0, gradients.samples)
    for one in kept:
        total = new_sum(gradients)
        for first in range(0, gradients.samples, step):
            part = gradients if parts == 1 else DenseGradients(dense[first : first + step])
            part.add_squares(total, queue)
            keeper.keep(one, first, part, total, queue)
    keeper.flush()
    _, diagonal = exact(gradients)
    return list(estimate_products(kept, [diagonal] * together, [1.0] * together, gradients.samples))


def each_start(monkeypatch, number):
    """Takes the sampler's random start through equal steps, so that a mean over them is that over all starts."""
    for step in range(number):
        start = (step + 0.5) / number
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda shape, start=start, **options: torch.full(shape, start))
            yield step


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "gradients",
    [product(9, 5, 70, 40), product(3, 1, 80, 70), table(6, 9, 30, 50), DenseGradients(torch.randn(6, 1500))],
    ids=["linear", "1 token", "table", "vector"],
)
def test_estimates_are_right_on_average(gradients, parts, monkeypatch):
    starts = each_start(monkeypatch, 128)
    mean = torch.stack([estimate(gradients, seed, parts=parts)[0] for seed in starts]).mean(0)
    wanted, _ = exact(gradients)
    assert torch.allclose(mean, wanted, rtol=0.05, atol=0.005 * float(wanted.max()))


def test_estimates_of_parameters_that_wait_together_are_those_of_each(monkeypatch):
    gradients = product(9, 5, 70, 40)
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, 0.3))
    (alone,) = estimate(gradients, 0)
    for one in estimate(gradients, 0, together=3, parts=1):
        assert torch.allclose(one, alone)


def test_single_estimates_are_close():
    gradients = product(20, 12, 300, 200)
    wanted, _ = exact(gradients)
    found = [estimate(gradients, seed, parts=4)[0] for seed in range(20)]
    close = [float(torch.corrcoef(torch.stack([one, wanted]))[0, 1]) for one in found]
    assert sum(close) / len(close) > 0.85
    assert min(close) > 0.5


def test_a_parameter_that_is_one_number_is_kept_whole():
    total, queue, values = DiagonalSum(EntryKeeper(torch.Generator())), SquareQueue(), torch.randn(5)
    total.add(DenseGradients(values), 0, queue)
    queue.flush()
    assert torch.allclose(total.sum, values.square().sum())
    assert torch.equal(total.kept.squares[0], values.square()[:, None])


def test_the_entries_that_make_up_much_of_the_sum_are_always_there():
    diagonals = torch.rand(3, 50, 40) ** 60
    for seed in range(20):
        chosen = choose_entries(diagonals, 64, torch.Generator().manual_seed(seed))
        for diagonal, entries in zip(diagonals, chosen, strict=True):
            large = (0.9 * diagonal.flatten() > diagonal.sum() / 64).nonzero()[:, 0]
            assert len(large) > 5
            assert set(large.tolist()) <= set(entries.index.tolist())
            assert torch.equal(entries.rows * 40 + entries.columns, entries.index)


def test_how_often_an_entry_is_there_is_as_its_weight_says(monkeypatch):
    diagonals, steps = torch.rand(1, 6, 5, dtype=torch.float64) ** 4, 1000
    counts, weights = torch.zeros(30), torch.zeros(30, dtype=torch.float64)
    for _ in each_start(monkeypatch, steps):
        (entries,) = choose_entries(diagonals, 8, torch.Generator())
        counts += torch.bincount(entries.index, minlength=30)
        weights[entries.index] = entries.weight
    # of equidistant points, as many lie in an interval as it is long, give or take one
    assert ((counts * weights / steps - 1).abs() <= weights / steps + 1e-6).all()
    assert weights.max() < steps / 10


def test_the_same_seed_chooses_the_same_entries():
    diagonals = torch.rand(2, 50, 40)
    one, two = (choose_entries(diagonals, 64, torch.Generator().manual_seed(3)) for _ in "ab")
    assert all(torch.equal(a.index, b.index) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    "gradients", [product(5, 4, 6, 7), DenseGradients(torch.randn(5, 1000))], ids=["linear", "bias"]
)
def test_small_parameters_are_kept_whole(gradients):
    wanted, _ = exact(gradients)
    (found,) = estimate(gradients, seed=0)
    assert torch.allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("size", [50, 5000])
def test_the_passes_and_the_parts_of_a_batch_add_up(size):
    whole, sums, queue = torch.randn(6, size), DiagonalSum(EntryKeeper(torch.Generator())), SquareQueue()
    sums.start(6)
    for _ in range(2):  # two rows of an objective
        for first, stop in ((0, 4), (4, 6)):
            sums.add(DenseGradients(whole[first:stop]), first, queue)
        queue.flush()
        sums.keeper.flush()
    entries = sums.kept.entries
    assert (entries is None) == (size <= WHOLE_VECTOR)
    index = torch.arange(size) if entries is None else entries.index
    weight = 1 if entries is None else entries.weight
    wanted = (whole[:, index].double().square() * weight * sums.sum[index]).sum(1) * 2
    assert torch.allclose(sums.sum, 2 * whole.square().sum(0))
    assert torch.allclose(estimate_products([sums.kept], [sums.sum], [1.0], 6)[0], wanted, rtol=1e-5)


def test_gradients_of_zero_are_drawn_without_complaint():
    gradients = ProductGradients(torch.zeros(4, 3, 50), torch.randn(4, 3, 60))
    (found,) = estimate(gradients, seed=0)
    assert torch.equal(found, torch.zeros(4, dtype=torch.float64))
