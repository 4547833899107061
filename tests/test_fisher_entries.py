"""What each sample contributes to a norm, estimated from some entries of its squared gradient."""

from __future__ import annotations

import pytest
import torch

from peft_surgical.fisher_entries import EntryKeeper, Generators, KeptEntries
from peft_surgical.sample_gradients import DenseGradients, ProductGradients, RowGradients


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


def estimate(gradients, count, seed, together=1):
    """Several parameters with the same gradients are drawn from together."""
    keeper, kept = EntryKeeper(Generators(seed)), [KeptEntries() for _ in range(together)]
    for one in kept:
        keeper.keep(one, 0, gradients, count)
    keeper.flush()
    _, diagonal = exact(gradients)
    return [one.products(diagonal, 1.0, gradients.samples) for one in kept]


@pytest.mark.parametrize(
    "gradients",
    [product(9, 5, 70, 40), product(3, 1, 80, 70), table(6, 5, 90, 50)],
    ids=["linear", "1 token", "table"],
)
def test_estimates_are_right_on_average(gradients):
    mean = torch.stack([e for seed in range(100) for e in estimate(gradients, 256, seed, together=3)]).mean(0)
    wanted, _ = exact(gradients)
    assert torch.allclose(mean, wanted, rtol=0.1, atol=0.02 * float(wanted.max()))


def test_a_single_estimate_is_close():
    gradients = product(20, 12, 300, 200)
    wanted, _ = exact(gradients)
    (found,) = estimate(gradients, 1024, seed=0)
    assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.95


@pytest.mark.parametrize(
    "gradients", [product(5, 4, 6, 7), DenseGradients(torch.randn(5, 2000))], ids=["linear", "bias"]
)
def test_small_parameters_are_kept_whole(gradients):
    wanted, _ = exact(gradients)
    (found,) = estimate(gradients, 1024, seed=0)
    assert torch.allclose(found, wanted, rtol=1e-5)


def test_the_passes_and_the_parts_of_a_batch_add_up():
    whole, parts = torch.randn(6, 50), KeptEntries()
    keeper = EntryKeeper(Generators(0))
    for _ in range(2):  # two rows of an objective
        keeper.keep(parts, 0, DenseGradients(whole[:4]))
        keeper.keep(parts, 4, DenseGradients(whole[4:]))
    wanted, diagonal = exact(DenseGradients(whole))
    assert torch.allclose(parts.products(diagonal, 0.5, 6), wanted, rtol=1e-5)


def test_gradients_of_zero_are_drawn_without_complaint():
    gradients = ProductGradients(torch.zeros(4, 3, 50), torch.randn(4, 3, 60))
    (found,) = estimate(gradients, 256, seed=0)
    assert torch.equal(found, torch.zeros(4, dtype=torch.float64))
