"""Some squared gradients of each sample, from which is estimated what it contributes to the norm of the diagonal.

To tell how sure a score is, samples are drawn anew many times (`uncertainty.py`), which needs the contribution of each
sample. The norm of F = mean_n d_n is a sum over samples: |F| = mean_n <F, d_n> / |F|, and to first order the norm of a
re-weighted mean is the re-weighted mean of these terms. But F is known only at the end, and the d_n are never kept. So
about a thousand entries of each d_n are, drawn so that the large ones are likely among them, and <F, d_n> is estimated
from those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peft_surgical.entry_draws import Entries, draw_blocks
from peft_surgical.sample_gradients import ProductGradients, SampleGradients


ENTRIES = 1024
"""Entries of a parameter that are kept of each sample."""

_WHOLE = 4096
"""Entries of a vector up to which it is kept whole."""

_TOGETHER = 2**22
"""Entries of the weights that are drawn from together: drawing takes many small operations."""


class Generators:
    """A random number generator for each device.

    Args:
        seed: Seed of all of them.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._made: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """That of a device."""
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(self.seed)
        return self._made[device]


@dataclass
class _Kept:
    """Squares of some samples.

    Args:
        first: The number of the first sample.
        entries: Which entries, M; None if all.
        squares: (samples, M).
    """

    first: int
    entries: Entries | None
    squares: Tensor


class KeptEntries:
    """What is kept of one parameter's gradients."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def add(self, first: int, entries: Entries | None, squares: Tensor) -> None:
        """Keep the squares of samples from number `first` on. Those at all entries add up."""
        last = self._kept[-1] if self._kept else None
        if entries is None and last is not None and last.entries is None and last.first == first:
            last.squares += squares
        else:
            self._kept.append(_Kept(first, entries, squares))

    def products(self, diagonal: Tensor | None, scale: float, samples: int) -> Tensor:
        """Estimates of <F, d_n> for each sample.

        Args:
            diagonal: F, flat. None if there was no gradient.
            scale: Factor for F, so that it is of moderate size.
            samples: How many samples there were, N.

        Returns:
            (N,) float64, on the device of F.
        """
        if diagonal is None:
            return torch.zeros(samples, dtype=torch.float64)
        out = diagonal.new_zeros(samples, dtype=torch.float64)
        for kept in self._kept:
            at = diagonal if kept.entries is None else diagonal[kept.entries.index] * kept.entries.weight
            out[kept.first : kept.first + len(kept.squares)] += torch.mv(kept.squares, at * scale)
        return out


class EntryKeeper:
    """Keeps entries for several parameters. They wait until there are enough of them to be drawn together.

    Args:
        generators: Random numbers.
    """

    def __init__(self, generators: Generators):
        self.generators = generators
        self._waiting: list[tuple[KeptEntries, int, ProductGradients, int]] = []

    def keep(self, kept: KeptEntries, first: int, gradients: SampleGradients, count: int = ENTRIES) -> None:
        """Keep some entries.

        Args:
            kept: Where to.
            first: The number of the first sample.
            gradients: The gradients; they must not change before `flush`.
            count: How many entries.
        """
        if isinstance(gradients, ProductGradients) and gradients.size > count:
            self._waiting.append((kept, first, gradients, count))
            if sum(waiting.size for _, _, waiting, _ in self._waiting) >= _TOGETHER:
                self.flush()
        elif gradients.size <= (count if isinstance(gradients, ProductGradients) else max(count, _WHOLE)):
            kept.add(first, None, _squares(gradients.dense(0, gradients.samples).flatten(1)))
        else:
            entries = gradients.draw(count, self.generators.on(gradients.device))
            kept.add(first, entries, _squares(gradients.at(entries)))

    def flush(self) -> None:
        """Draw what waits."""
        alike: dict[tuple, list[tuple[KeptEntries, int, ProductGradients, int]]] = {}
        for item in self._waiting:
            _, _, gradients, count = item
            alike.setdefault((gradients.device, gradients.example.dtype, gradients.samples, count), []).append(item)
        self._waiting.clear()
        for (device, *_, count), items in alike.items():
            factors = [(gradients.left, gradients.right) for _, _, gradients, _ in items]
            found = draw_blocks(factors, count, self.generators.on(device))
            for (kept, first, _, _), (entries, values) in zip(items, found, strict=True):
                kept.add(first, entries, values)


def _squares(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square()
