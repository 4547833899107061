"""Rankings over training, and of several tasks or scores, side by side."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from peft_surgical.ranking.plots import plot_ranks
from peft_surgical.ranking.rank import rank_layers
from peft_surgical.ranking.ranking import LayerRanking, kendall_tau


@dataclass(frozen=True)
class RankingComparison:
    """Several rankings of the same layers, side by side.

    Args:
        names: The name of each ranking.
        ranks: For each ranking the rank of each layer, 1 for the best.
        deviations: For each ranking the mean over layers of |rank - rank in the first ranking|: the deviation of Lodha
            et al. 2023, figures 4 and 5.
        taus: For each ranking Kendall's tau between its scores and those of the first.
        common_top: For each k from 1 on, how many layers all rankings have among their best k.
    """

    names: list[str]
    ranks: list[list[int]]
    deviations: list[float]
    taus: list[float]
    common_top: list[int]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw rank and deviation over the rankings, as Lodha et al. 2023 do in figures 2 to 5.

        Args:
            path: Where to write; the ending says the format.

        Raises:
            ImportError: matplotlib is not there.
        """
        plot_ranks(path, self.ranks, self.names)

    def __str__(self) -> str:
        width = max(9, *(len(name) for name in self.names))
        rows = [("layer", *self.names)]
        rows += [(str(i), *(str(r[i]) for r in self.ranks)) for i in range(len(self.ranks[0]))]
        rows += [("deviation", *(f"{d:.2f}" for d in self.deviations))]
        rows += [("tau", *(f"{t:.2f}" for t in self.taus))]
        lines = ["  ".join(f"{cell:>{width}}" for cell in row) for row in rows]
        return "\n".join([f"Ranks (1: best); deviation and Kendall's tau are from {self.names[0]!r}.", "", *lines])


def compare_rankings(rankings: Sequence[LayerRanking], names: Sequence[str] | None = None) -> RankingComparison:
    """Compare rankings of the same layers, to see how stable an order is (Lodha et al. 2023, section 4 and figures
    2-5).

    Args:
        rankings: Two or more; the first is what the others are compared with.
        names: A name for each. By default the epoch that `RankingCallback` noted, or a number.

    Returns:
        The comparison, with a table as text and a plot.

    Raises:
        ValueError: There are fewer than two, or they are of different stacks.

    Example:

        >>> before, after = LayerRanking("encoder", [3.0, 1.0, 2.0]), LayerRanking("encoder", [3.0, 2.0, 1.0])
        >>> comparison = compare_rankings([before, after], ["epoch 0", "epoch 1"])
        >>> comparison.ranks, comparison.deviations
        ([[1, 3, 2], [1, 2, 3]], [0.0, 0.6666666666666666])
    """
    rankings = list(rankings)
    if len(rankings) < 2:
        raise ValueError(f"compare_rankings got {len(rankings)} rankings; it needs two or more.")
    shapes = {(r.stack, len(r.scores)) for r in rankings}
    if len(shapes) > 1:
        raise ValueError(
            f"The rankings are of different layers: {sorted(shapes)} (stack, layers). Compare like with like."
        )
    if names is None:
        epochs = [r.record.get("epoch") for r in rankings]
        names = [f"{i}" if epoch is None else f"epoch {epoch:g}" for i, epoch in enumerate(epochs)]
    if len(names) != len(rankings):
        raise ValueError(f"{len(names)} names are given for {len(rankings)} rankings.")
    layers = range(len(rankings[0].scores))
    ranks = [[r.order.index(layer) + 1 for layer in layers] for r in rankings]
    deviations = [sum(abs(a - b) for a, b in zip(r, ranks[0], strict=True)) / len(layers) for r in ranks]
    taus = [kendall_tau(rankings[0].scores, r.scores) for r in rankings]
    common = [len(set.intersection(*(set(r.top(k)) for r in rankings))) for k in range(1, len(layers) + 1)]
    return RankingComparison([*names], ranks, deviations, taus, common)


class RankingCallback(TrainerCallback):
    """Ranks the layers at chosen epochs of a `Trainer` run, without disturbing it (Lodha et al. 2023, section 4).

    Args:
        data: The samples, as for `rank_layers`. Every ranking sees the same ones.
        epochs: When: 0 is before the first step, 1 after the first epoch. None: always, also when a run ends within an
            epoch, at 2.25, say.
        folder: Where to write each ranking, as `ranking-epoch-1.json`. None: nowhere.
        **options: Options of `rank_layers`.

    Attributes:
        rankings: The rankings so far; `record["epoch"]` tells when each was made. For `compare_rankings`.

    Example:

        >>> callback = RankingCallback([], epochs=(0, 2), num_samples=50)
        >>> callback.rankings
        []
    """

    def __init__(
        self, data: Any, epochs: Collection[int] | None = None, folder: str | Path | None = None, **options: Any
    ):
        self.data, self.epochs, self.folder = data, epochs, folder
        self.options = {"progress": False} | options
        self.rankings: list[LayerRanking] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.epoch:  # a resumed run has been here before
            self._rank(model, 0, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        epoch = round(state.epoch, 6)
        self._rank(model, int(epoch) if epoch == int(epoch) else epoch, state)

    def _rank(self, model: Any, epoch: float, state: Any) -> None:
        if self.epochs is not None and epoch not in self.epochs:
            return
        ranking = rank_layers(model, self.data, **self.options)
        ranking = replace(ranking, record=ranking.record | {"epoch": epoch})
        self.rankings.append(ranking)
        if self.folder is not None and state.is_world_process_zero:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            ranking.save(Path(self.folder) / f"ranking-epoch-{epoch}.json")
