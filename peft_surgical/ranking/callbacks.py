"""Watch a ranking over training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from peft_surgical.ranking.rank import LayerRanking, rank_layers


class RankingCallback(TrainerCallback):
    """Ranks the layers at chosen epochs of a `Trainer` run, without disturbing it (Lodha et al. 2023, section 4).

    Args:
        data: The samples, as for `rank_layers`. Every ranking sees the same ones.
        epochs: When: 0 is before the first step, 1 after the first epoch. None: always.
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

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not state.epoch:  # a resumed run has been here before
            self._rank(model, 0, state)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self._rank(model, round(state.epoch), state)

    def _rank(self, model: Any, epoch: int, state: Any) -> None:
        if self.epochs is not None and epoch not in self.epochs:
            return
        ranking = rank_layers(model, self.data, **self.options)
        ranking = replace(ranking, record=ranking.record | {"epoch": epoch})
        self.rankings.append(ranking)
        if self.folder is not None and state.is_world_process_zero:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            ranking.save(Path(self.folder) / f"ranking-epoch-{epoch}.json")
