"""What each sample contributes to a norm, estimated from some entries of its squared gradient."""

from __future__ import annotations

import pytest
import torch

from peft_surgical.fisher.entries import EntryKeeper, Generators, KeptEntries, choose_entries
from peft_surgical.fisher.kernel import PendingSquares
from peft_surgical.fisher.sample_gradients import DenseGradients, ProductGradients, RowGradients
from peft_surgical.fisher.sums import Zeros


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
    keeper, kept = EntryKeeper(Generators(seed)), [KeptEntries() for _ in range(together)]
    pending, step = PendingSquares(), -(-gradients.samples // parts)
    dense = gradients.dense(0, gradients.samples)
    for one in kept:
        total = Zeros().take(gradients)
        for first in range(0, gradients.samples, step):
            part = gradients if parts == 1 else DenseGradients(dense[first : first + step])
            part.add_squares(total, pending)
            keeper.keep(one, first, part, total, pending)
    keeper.flush()
    _, diagonal = exact(gradients)
    return [one.products(one.weighted(diagonal), gradients.samples).double() for one in kept]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "gradients",
    [product(9, 5, 70, 40), product(3, 1, 80, 70), table(6, 9, 30, 50), DenseGradients(torch.randn(6, 1500))],
    ids=["linear", "1 token", "table", "vector"],
)
def test_estimates_are_right_on_average(gradients, parts):
    mean = torch.stack([e for seed in range(150) for e in estimate(gradients, seed, 3, parts)]).mean(0)
    wanted, _ = exact(gradients)
    assert torch.allclose(mean, wanted, rtol=0.1, atol=0.02 * float(wanted.max()))


def test_a_single_estimate_is_close():
    gradients = product(20, 12, 300, 200)
    wanted, _ = exact(gradients)
    (found,) = estimate(gradients, seed=0, parts=4)
    assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.95


def test_the_largest_entries_are_all_there():
    diagonals = torch.rand(3, 50, 40)
    for diagonal, entries in zip(diagonals, choose_entries(diagonals, 64, torch.Generator()), strict=True):
        assert set(diagonal.flatten().topk(32).indices.tolist()) == set(entries.index[:32].tolist())
        assert (entries.weight[:32] == 1).all()


@pytest.mark.parametrize(
    "gradients", [product(5, 4, 6, 7), DenseGradients(torch.randn(5, 1000))], ids=["linear", "bias"]
)
def test_small_parameters_are_kept_whole(gradients):
    wanted, _ = exact(gradients)
    (found,) = estimate(gradients, seed=0)
    assert torch.allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("size", [50, 2000])
def test_the_passes_and_the_parts_of_a_batch_add_up(size):
    whole, parts, total = DenseGradients(torch.randn(6, size)), KeptEntries(), torch.zeros(size)
    keeper, pending = EntryKeeper(Generators(0)), PendingSquares()
    for _ in range(2):  # two rows of an objective
        for first, stop in ((0, 4), (4, 6)):
            part = DenseGradients(whole.dense(first, stop))
            part.add_squares(total, pending)
            keeper.keep(parts, first, part, total, pending)
    index = torch.arange(size) if parts.entries is None else parts.entries.index
    weight = 1 if parts.entries is None else parts.entries.weight
    wanted = (whole.at(index).double().square() * weight * total[index]).sum(1) * 2
    assert torch.allclose(parts.products(parts.weighted(total), 6).double(), wanted, rtol=1e-5)


def test_gradients_of_zero_are_drawn_without_complaint():
    gradients = ProductGradients(torch.zeros(4, 3, 50), torch.randn(4, 3, 60))
    (found,) = estimate(gradients, seed=0)
    assert torch.equal(found, torch.zeros(4, dtype=torch.float64))
