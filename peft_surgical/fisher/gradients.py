"""Gradients of many samples with respect to one parameter, in the form in which they are cheapest to square.

The gradient of sample n for a linear map's weight is a product, `G[n].T @ A[n]`, that need not be written out; for an
embedding table it has few rows; for a bias or a gain it is small enough to be stored. A parameter that is used several
times in one forward pass gets one of these for each use, and `join` adds them up before anything is squared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from peft_surgical.fisher.squares import SquareQueue, on_cpu, sum_type, widen


_CHUNK_ELEMENTS = 2**22
"""Entries of written-out gradients that exist at a time."""


class SampleGradients(ABC):
    """The gradients of some samples with respect to one parameter."""

    samples: int
    shape: tuple[int, ...]  # of the parameter
    example: Tensor  # with their type and device

    @property
    def device(self) -> torch.device:
        return self.example.device

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """The shape of a sum of squares: that of the parameter, as a matrix if it has more dimensions."""
        if len(self.shape) == 2:
            return self.shape
        return (self.shape[0], prod(self.shape[1:])) if len(self.shape) > 2 else (self.size,)

    @abstractmethod
    def dense(self, first: int, stop: int) -> Tensor:
        """The gradients of samples `first` to `stop`, written out, (stop - first, *shape)."""

    @abstractmethod
    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The gradients at some entries, (N, M), of the parameter as a matrix: M rows and columns."""

    def add_squares(self, out: Tensor, queue: SquareQueue) -> None:
        """Add the sum over samples of the squared gradients to `out`, which has the parameter's shape as a matrix."""
        for part in self._parts():
            out.add_(part.to(out.dtype).square_().sum(0).view_as(out))

    def squared_norms(self) -> Tensor:
        """The squared norm of each sample's gradient, (N,)."""
        return torch.cat([widen(part).reshape(len(part), -1).square().sum(1) for part in self._parts()])

    def _parts(self) -> Iterator[Tensor]:
        step = max(1, _CHUNK_ELEMENTS // max(1, prod(self.shape)))
        for first in range(0, self.samples, step):
            yield self.dense(first, min(first + step, self.samples))


class DenseGradients(SampleGradients):
    """Gradients that are stored, (N, *shape)."""

    def __init__(self, gradients: Tensor):
        self.gradients = self.example = gradients
        self.samples, self.shape = len(gradients), gradients.shape[1:]

    def dense(self, first: int, stop: int) -> Tensor:
        return self.gradients[first:stop]

    def add_squares(self, out: Tensor, queue: SquareQueue, then: Callable[[Tensor], None] | None = None) -> None:
        """See `SquareQueue.add_gradients` for `then`."""
        queue.add_gradients(out, self.gradients, then)

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.gradients.flatten(1)[:, rows * self.sum_shape[-1] + columns]


class ProductGradients(SampleGradients):
    """Gradients that are products over tokens: `left[n].T @ right[n]`.

    Args:
        left: (N, T, O), for a linear map the gradients at its outputs.
        right: (N, T, I), for a linear map its inputs.
        shape: Shape of the parameter, (O, I) by default; any other with O * I entries whose first dimension is O.
        lengths: Rows to use of each sample, (N,); the others are zero in `left`. All by default.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: Sequence[int] | None = None, lengths: Tensor | None = None):
        self.left, self.right, self.lengths = left, right, lengths
        self.samples, self.example = len(left), left
        self.shape = tuple(shape or (left.shape[-1], right.shape[-1]))

    def dense(self, first: int, stop: int) -> Tensor:
        left, right = widen(self.left[first:stop]), widen(self.right[first:stop])
        return (left.transpose(1, 2) @ right).view(-1, *self.shape)

    def add_squares(self, out: Tensor, queue: SquareQueue) -> None:
        queue.add_products(out, self.left, self.right, self.lengths)

    def squared_norms(self) -> Tensor:
        tokens, rows, columns = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if tokens * (rows + columns) > rows * columns:
            return super().squared_norms()
        left, right = widen(self.left), widen(self.right)
        # |G^T A|^2 = <G G^T, A A^T>: products of tokens with tokens, no gradient is written out
        return (left @ left.transpose(1, 2)).mul_(right @ right.transpose(1, 2)).sum((1, 2))

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        if not on_cpu(self.left):  # where it would have to wait for the number of different ones
            products = self.left.index_select(2, rows) * self.right.index_select(2, columns)
            return products.sum(1, dtype=sum_type(products.dtype))
        row, row_position = rows.unique(return_inverse=True)
        column, column_position = columns.unique(return_inverse=True)
        block = widen(self.left[:, :, row]).transpose(1, 2) @ widen(self.right[:, :, column])
        return block[:, row_position, column_position]


class RowGradients(SampleGradients):
    """Gradients of a table of which each sample uses few rows.

    Args:
        rows: Numbers of the rows used, (N, T).
        gradients: The gradient that each use adds to its row, (N, T, H).
        height: Rows of the table, V; the parameter's shape is (V, H).
    """

    def __init__(self, rows: Tensor, gradients: Tensor, height: int):
        self.rows, self.gradients = rows, gradients
        self.samples, self.shape, self.example = len(rows), (height, gradients.shape[-1]), gradients

    def dense(self, first: int, stop: int) -> Tensor:
        rows, gradients = self.rows[first:stop], widen(self.gradients[first:stop])
        out = gradients.new_zeros(stop - first, *self.shape)
        return out.scatter_add_(1, rows[..., None].expand_as(gradients), gradients)

    def add_squares(self, out: Tensor, queue: SquareQueue) -> None:
        rows, sums = self._sums()
        out.index_add_(0, rows % self.shape[0], sums.to(out.dtype).square_())

    def squared_norms(self) -> Tensor:
        rows, sums = self._sums()
        return sums.new_zeros(self.samples).index_add_(0, rows // self.shape[0], sums.square().sum(1))

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        out = []
        for mine, gradients in zip(self.rows, self.gradients, strict=True):
            used = mine[:, None] == rows
            out.append((widen(gradients)[:, columns] * used).sum(0))
        return torch.stack(out)

    def _sums(self) -> tuple[Tensor, Tensor]:
        """The pairs of sample and row that occur, as sample * height + row, and their summed gradients."""
        offset = torch.arange(self.samples, device=self.rows.device)[:, None] * self.shape[0]
        pairs, position = (self.rows + offset).flatten().unique(return_inverse=True)
        gradients = widen(self.gradients).flatten(0, 1)
        return pairs, gradients.new_zeros(len(pairs), self.shape[1]).index_add_(0, position, gradients)


class SummedGradients(SampleGradients):
    """The sum of gradients in different forms, as for an embedding table that is also the output layer."""

    def __init__(self, terms: Sequence[SampleGradients]):
        self.terms = terms
        self.samples, self.shape, self.example = terms[0].samples, terms[0].shape, terms[0].example

    def dense(self, first: int, stop: int) -> Tensor:
        return torch.stack([term.dense(first, stop).view(-1, *self.shape) for term in self.terms]).sum(0)

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.stack([term.at(rows, columns) for term in self.terms]).sum(0)


def join(terms: Sequence[SampleGradients]) -> SampleGradients:
    """The sum of the gradients that a parameter gets from its uses."""
    first = terms[0]
    if len(terms) == 1:
        return first
    if all(isinstance(term, ProductGradients) for term in terms):
        left = torch.cat([term.left for term in terms], 1)  # type: ignore[attr-defined]
        right = torch.cat([term.right for term in terms], 1)  # type: ignore[attr-defined]
        return ProductGradients(left, right, first.shape)
    if all(isinstance(term, DenseGradients) for term in terms):
        return DenseGradients(torch.stack([term.gradients for term in terms]).sum(0))  # type: ignore[attr-defined]
    return SummedGradients(terms)
