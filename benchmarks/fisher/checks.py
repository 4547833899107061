"""Is the Fisher right on this GPU? The kernels against float64, and each engine against plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fisher import ours
from benchmarks.fisher.cases import SETTINGS, Setting, build_case
from benchmarks.fisher.other_ways import Case, layer_scores, naive_loop
from peft_surgical.fisher import squares


LIMITS = {"highest": 1e-5, "high": 1e-2}
"""What float32 may cost under each setting of `torch.set_float32_matmul_precision`, relative to the norm."""

SHAPES = ((5, 32, 32, 48), (4, 40, 33, 17), (3, 1, 5, 7), (9, 200, 264, 136), (20, 128, 256, 384), (1, 70, 80, 16))
"""Samples, tokens, outputs, inputs."""


def check() -> None:
    """Check everything; raises at the first thing that is wrong."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for precision, limit in LIMITS.items():
            torch.set_float32_matmul_precision(precision)
            worst = max(kernel_error(dtype, shape, padded) for shape in SHAPES for padded in (False, True))
            report(f"kernel, {dtype}, {precision}", worst, limit if dtype == torch.float32 else 1e-5)
        torch.set_float32_matmul_precision("highest")
        report(f"normalisations, {dtype}", max(normalisation_error(dtype, center) for center in (True, False)), 1e-5)
    for name in ("tiny", "tiny-llama", "tiny-llama, classes"):
        check_engines(name)


def report(what: str, error: float, limit: float) -> None:
    """Print an error, and raise if it is too large or not a number."""
    print(f"  {what}: error {error:.1e}, allowed {limit:.0e}", flush=True)
    assert error < limit, what


def kernel_error(dtype: torch.dtype, shape: tuple[int, int, int, int], padded: bool) -> float:
    """The error of the sum of squared products, relative to its norm."""
    n, t, o, i = shape
    g, a = (torch.randn(n, t, width, device="cuda").to(dtype) for width in (o, i))
    assert squares.has_kernel(g, torch.float32), f"no kernel for {dtype}"
    lengths = torch.tensor([max(0, t - 19 * k) if padded else t for k in range(n)], device="cuda")
    g = g * (torch.arange(t, device="cuda") < lengths[:, None])[..., None]
    exact = torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum(0)
    once, twice = torch.zeros(2, o, i, device="cuda")
    for out in (once, twice):
        queue = squares.SquareQueue()
        queue.add_products(out, g, a, lengths if padded else None)
        queue.flush()
    assert torch.equal(once, twice), "two runs differ"
    return relative(once, exact)


def normalisation_error(dtype: torch.dtype, center: bool) -> float:
    """The error of the gradients of a LayerNorm or an RMSNorm."""
    g, x = (torch.randn(7, 50, 768, device="cuda").to(dtype) for _ in "gx")
    exact = squares.sum_normalized(g.double(), x.double(), 1e-5, center=center)
    return relative(squares.sum_normalized(g, x, 1e-5, center=center), exact)


def relative(value: Tensor, exact: Tensor) -> float:
    """Distance over norm."""
    return float((value.double() - exact).norm() / exact.norm())


def check_engines(name: str, device: str = "cuda") -> None:
    """Each engine on a tiny model, in three types, against a loop over samples in float64."""
    tiny = next(s for s in SETTINGS if s.name == name)
    wanted = exact_scores(build_case(Setting(name, tiny.model, device, torch.float64, mixed=True, batch=16)))
    engines: dict[str, Callable[[Case], list[float]]] = {
        "hooks": lambda case: ours.engine(case, "hooks"),
        "hooks with contributions": lambda case: ours.engine(case, "hooks", contributions=True),
        "hooks without Triton": lambda case: without_kernel(case),
        "a pass for each layer": lambda case: ours.engine(case, "layer_major"),
        "rank_layers": lambda case: ours.whole(case, 16),
    }
    for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        case = build_case(Setting(name, tiny.model, device, dtype, mixed=True, batch=16))
        for engine, run in engines.items():
            found = run(case)
            worst = max(abs(f / w - 1) for f, w in zip(found, wanted, strict=True))
            report(f"{name}, {engine}, {dtype}", worst, limit)


def without_kernel(case: Case) -> list[float]:
    """The hook engine as on a machine without Triton."""
    with ours.without_kernel():
        return ours.engine(case, "hooks")


def exact_scores(case: Case) -> list[float]:
    """The scores in float64: a loop over samples that shares no code with ours. Changes the type of the model."""
    case.model.to(torch.float64)
    return layer_scores(case, naive_loop(case))
