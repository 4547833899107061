"""The sums of squared per-sample gradients, on every path, against float64 `einsum`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_surgical.fisher import squares
from peft_surgical.fisher.squares import SquareQueue, sum_normalized


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])
ERRORS = {"highest": 2e-5, "high": 1e-2, "medium": 1e-2}
"""What float32 may cost under each setting of `torch.set_float32_matmul_precision`, relative to the norm."""

sizes = st.integers(1, 40)


@st.composite
def problems(draw, size=sizes):
    """G, A and lengths, in a type, with rows of zeros, and not always contiguous."""
    n, t, o, i = (draw(size) for _ in range(4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    g, a = (torch.randn(n, t, width, generator=generator, dtype=torch.float64) for width in (o, i))
    if draw(st.booleans()):
        g[torch.rand(n, t, generator=generator) < draw(st.sampled_from([0.2, 0.9]))] = 0
    lengths = draw(st.none() | st.lists(st.integers(0, t), min_size=n, max_size=n))
    for sample, length in zip(g, lengths or [], strict=False):
        sample[length:] = 0
    layout = draw(st.sampled_from([contiguous, transposed, sliced, padded]))
    return layout(g.to(dtype)), layout(a.to(dtype)), lengths


def contiguous(x):
    return x


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x):
    return torch.stack([x, x + 1], dim=1)[:, 0]


def padded(x):
    return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]


def oracle(g, a):
    return torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum(0)


def error(value, reference):
    return float((value.double() - reference).norm() / reference.norm().clamp_min(1e-30))


def start_of(g, a):
    """A sum that has already something in it, float64 for float64."""
    shape = (g.shape[2], a.shape[2])
    return torch.ones(shape, dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)


def accumulate(out, g, a, lengths=None):
    queue = SquareQueue()
    queue.add_products(out, g, a, None if lengths is None else torch.tensor(lengths))
    queue.flush()
    return out


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_products_are_squared_for_each_sample_and_added(device, problem):
    g, a, lengths = problem[0].to(device), problem[1].to(device), problem[2]
    out = start_of(g, a)
    accumulate(out, g, a, lengths)
    assert error(out, oracle(g, a) + 1) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_multiplying_samples_in_chunks_gives_the_same(device, problem):
    g, a = problem[0].to(device), problem[1].to(device)
    out = start_of(g, a)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squares, "CHUNK_ELEMENTS", 3 * out.numel())
        squares.add_by_chunk(out, g, a)
    assert error(out, oracle(g, a) + 1) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=30)
@given(first=problems(), second=problems(), gradients=st.lists(st.tuples(sizes, sizes), max_size=4))
def test_what_waits_is_added_once_and_to_its_own_sum(device, first, second, gradients):
    queue, sums, wanted = SquareQueue(), [], []
    for g, a, lengths in (first, second, first):
        g, a = g.to(device), a.to(device)
        sums.append(start_of(g, a))
        wanted.append(oracle(g, a) + 1)
        queue.add_products(sums[-1], g, a, None if lengths is None else torch.tensor(lengths))
    lengths = None if first[2] is None else torch.tensor(first[2])
    queue.add_products(sums[0], first[0].to(device), first[1].to(device), lengths)
    wanted[0] = 2 * wanted[0] - 1
    for samples, size in gradients:
        g = torch.randn(samples, size, device=device)
        sums.append(torch.ones(size, device=device))
        wanted.append(1 + 2 * g.double().square().sum(0))
        queue.add_gradients(sums[-1], g)
        queue.add_gradients(sums[-1], g)
    queue.flush()
    queue.flush()
    for value, reference in zip(sums, wanted, strict=True):
        assert error(value, reference) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ERRORS)
def test_precisions_cost_what_they_promise_and_repeat_to_the_bit(device, setting, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    g, a = torch.randn(20, 70, 130, device=device), torch.randn(20, 70, 100, device=device)
    once, twice = (accumulate(torch.zeros_like(g[0].T @ a[0]), g, a) for _ in "ab")
    assert error(once, oracle(g, a)) < ERRORS[setting]
    assert torch.equal(once, twice)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=30)
@given(n=sizes, t=sizes, width=sizes, center=st.booleans(), seed=st.integers(0, 2**20))
def test_gradients_of_a_normalisation_are_those_of_autograd(device, n, t, width, center, seed):
    generator = torch.Generator().manual_seed(seed)
    g, x = (torch.randn(n, t, width, generator=generator, dtype=torch.float64) for _ in "gx")
    norm = torch.nn.LayerNorm(width, eps=1e-3) if center else torch.nn.RMSNorm(width, eps=1e-3)
    norm = norm.double()
    wanted = []
    for one_g, one_x in zip(g, x, strict=True):
        grads = torch.autograd.grad((norm(one_x) * one_g).sum(), list(norm.parameters()))
        wanted.append(torch.stack([*grads, one_g.sum(0)][:2]))
    got = sum_normalized(g.float().to(device), x.float().to(device), 1e-3, center=center)
    assert torch.allclose(got.cpu().double(), torch.stack(wanted), atol=1e-3, rtol=1e-4)


def test_rows_without_gradient_cost_no_product(monkeypatch):
    products = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **options: products.append(args[0].shape[1]) or mm(*args, **options)
    )
    g, a = torch.randn(4, 9, 5), torch.randn(4, 9, 6)
    g[0] = 0  # nothing
    g[1, 1:] = 0  # one row: no product of its own
    g[2, 4:] = 0
    out = accumulate(torch.zeros(5, 6), g, a)
    assert products == [4, 9]
    assert error(out, oracle(g, a)) < 1e-6


def test_a_gradient_that_is_not_a_number_is_not_skipped():
    g, a = torch.zeros(2, 3, 4), torch.randn(2, 3, 5)
    g[1, 2, 3] = torch.nan
    assert accumulate(torch.zeros(4, 5), g, a)[3].isnan().all()


def test_no_samples_and_no_tokens_add_nothing():
    for n, t in ((0, 3), (3, 0)):
        out = accumulate(torch.zeros(4, 5), torch.randn(n, t, 4), torch.randn(n, t, 5))
        assert torch.equal(out, torch.zeros(4, 5))


def test_products_are_rounded_only_where_torch_may_round_its_own(monkeypatch):
    for setting, operand in (("highest", torch.float32), ("high", torch.bfloat16), ("medium", torch.bfloat16)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        assert squares.operand_type(torch.float32) == operand
        assert squares.operand_type(torch.float64) == torch.float64


def test_a_card_that_cannot_run_the_kernel_gets_the_fallback(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", None)
    squares.kernel_works.cache_clear()
    assert not squares.kernel_works(torch.float32, torch.device("cuda:0"))


INTERPRETED = """
import torch
from peft_surgical.fisher import squares
from peft_surgical.fisher import triton as fisher_triton

reference = squares.sum_normalized
squares.has_kernel = lambda grad_outputs, dtype: dtype == torch.float32
fisher_triton.FLOAT32_PRODUCTS = "tf32"  # the interpreter knows no other way to split float32
assert_close = torch.testing.assert_close


def oracle(g, a):
    return torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum(0).float()


bulks, ways = set(), (True, False) if hasattr(fisher_triton.triton, "set_allocator") else (False,)
for bulk in ways:
    fisher_triton._has_copy_engine = lambda device, bulk=bulk: bulk
    fisher_triton.TILINGS.update(dict.fromkeys(fisher_triton.TILINGS, fisher_triton.Tiling(32, 16, 16, 4, 1)))
    for n, t, o, i in ((5, 32, 32, 48), (3, 40, 33, 17), (2, 70, 80, 16), (3, 1, 5, 7), (1, 20, 40, 24)):
        for dtype in (torch.float32, torch.float16):
            lengths = torch.tensor([max(0, t - 9 * k) for k in range(n)], dtype=torch.int32).roll(1)
            g, a = torch.randn(n, t, o).to(dtype), torch.randn(n, t, i).to(dtype)
            short = g * (torch.arange(t) < lengths[:, None])[..., None]
            dense, ragged = oracle(g, a), oracle(short, a)
            out, flipped = torch.ones(o, i), torch.ones(i, o)
            bulks.add(fisher_triton.make_job(out, g, a, None)[1].bulk)
            queue = squares.SquareQueue()
            queue.add_products(out, g, a)
            queue.add_products(flipped.T, g, a)
            queue.add_products(out, short, a, lengths)
            queue.add_products(out, g, a)
            queue.flush()
            assert_close(out, 1 + 2 * dense + ragged, rtol=1e-4, atol=1e-4)
            assert_close(flipped.T, 1 + dense, rtol=1e-4, atol=1e-4)
assert bulks == set(ways)

g, a = torch.randn(3, 20, 32), torch.randn(3, 20, 48)
for out in (torch.ones(32, 96)[:, :48], torch.ones(48, 64)[:, :32].T, torch.ones(32, 48, 2)[..., 0]):
    queue = squares.SquareQueue()
    queue.add_products(out, g, a)
    queue.flush()
    assert_close(out, 1 + oracle(g, a), rtol=1e-4, atol=1e-4)

torch.set_float32_matmul_precision("high")
queue, x = squares.SquareQueue(), torch.randn(3, 9, 16)
query, key = torch.zeros(16, 16), torch.zeros(16, 16)
queue.add_products(query, torch.randn(3, 9, 16), x)
queue.add_products(key, torch.randn(3, 9, 16), x[:])
(waiting,) = queue._products.values()
first, second = waiting.jobs
assert first.inputs is second.inputs and first.inputs.dtype == torch.bfloat16
torch.set_float32_matmul_precision("highest")

for center in (True, False):
    for width in (1, 33, 1500):
        g, x = torch.randn(3, 9, width), torch.randn(3, 9, width)
        wanted = reference(g.double(), x.double(), 1e-5, center=center).float()
        assert_close(reference(g, x, 1e-5, center=center), wanted, rtol=1e-4, atol=1e-4)
"""


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_tritons_tiles_fit_the_cards_that_get_them(monkeypatch):
    from peft_surgical.fisher import triton as fisher_triton

    monkeypatch.setattr(fisher_triton.tl, "make_tensor_descriptor", None, raising=False)  # as a new Triton has them
    monkeypatch.setattr(fisher_triton.triton, "set_allocator", None, raising=False)
    room = {(8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB for a program, by capability
    for capability, kib in room.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        bulk = fisher_triton._has_copy_engine.__wrapped__(torch.device("cuda"))
        assert bulk == (capability in ((9, 0), (10, 0)))
        for size in (2, 4):
            tiling = fisher_triton.TILINGS[size, bulk and size == 2]
            assert tiling.stages * (tiling.rows + tiling.columns) * tiling.tokens * size <= kib * 1024


@needs_triton
@pytest.mark.skipif(NUMPY >= (2, 4), reason="Triton's interpreter takes arrays for numbers, as NumPy did until 2.4")
def test_the_kernel_is_right_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
