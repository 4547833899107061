"""Combine LoRA's matrices as PEFT does; see `weighted` for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer


PRUNINGS = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
LORA_COMBINATIONS = ("linear", "cat", "svd", *PRUNINGS, *(f"{pruning}_svd" for pruning in PRUNINGS))


@dataclass(frozen=True)
class LoraCombination:
    """How the differences that LoRA makes are combined.

    LoRA's difference is a product of two matrices. A weighted sum of such products is the product of the matrices put
    side by side (`"cat"`), whose rank is the sum of the ranks: exact. All others compute the combined difference and
    cut it to a lower rank, as well as that rank allows.

    Args:
        kind: One of `LORA_COMBINATIONS`. Those with `svd` in their name cut to `svd_rank`, or the highest of the
            ranks; the others need equal ranks and keep them.
        svd_rank: The rank to cut to.
        svd: Further options of PEFT for the decomposition: `clamp`, `full_matrices`, `driver`.
        density: The share of values that pruning keeps.
        majority_sign_method: See PEFT.
    """

    kind: str
    svd_rank: int | None = None
    svd: dict[str, Any] | None = None
    density: float | None = None
    majority_sign_method: str = "total"

    def __post_init__(self) -> None:
        if self.kind not in LORA_COMBINATIONS:
            raise ValueError(f"combination_type={self.kind!r}: allowed are {', '.join(LORA_COMBINATIONS)}.")

    @property
    def kind_of_copies(self) -> str:
        """What the combination means for whole tensors, which have no rank to cut."""
        return "linear" if self.kind in ("cat", "svd") else self.kind.removesuffix("_svd")

    def set_rank(self, united: LoraConfig, configs: Sequence[LoraConfig]) -> None:
        """Give a config the rank of the result, and scaling 1.

        Raises:
            ValueError: The ranks differ and the combination needs equal ones, or LoRA makes no plain sum.
        """
        for option in ("use_dora", "lora_bias"):
            if any(getattr(config, option) for config in configs):
                raise ValueError(f"Adapters with {option}=True cannot be combined: they are no sums of differences.")
        ranks = [max([config.r, *(config.rank_pattern or {}).values()]) for config in configs]
        if self.kind == "cat":
            rank = sum(ranks)
        elif self.kind.endswith("svd"):
            rank = self.svd_rank or max(ranks)
        elif len(set(ranks)) == 1:
            rank = ranks[0]
        else:
            raise ValueError(
                f"combination_type={self.kind!r} needs adapters of one rank, but these have {ranks}. Use 'cat', which "
                "is exact, or 'svd'."
            )
        united.r = united.lora_alpha = rank
        united.rank_pattern, united.alpha_pattern, united.use_rslora = {}, {}, False
        united.init_lora_weights = True

    def combine(
        self, tuner: Any, layer: LoraLayer, adapters: Sequence[str], weights: Sequence[float], adapter_name: str
    ) -> None:
        """Write the combination of adapters into the matrices of another adapter."""
        a, b = _matrices(layer, adapter_name)
        chosen = [(name, weight) for name, weight in zip(adapters, weights, strict=True) if name in layer.r]
        if sum(layer.r[name] for name, _ in chosen) <= layer.r[adapter_name] and self.kind in ("linear", "cat", "svd"):
            _put_side_by_side(layer, chosen, a, b)
            return
        kind = "svd" if self.kind in ("linear", "svd") else f"{self.kind.removesuffix('_svd')}_svd"
        a.data, b.data = tuner._svd_generalized_task_arithmetic_weighted_adapter(
            kind,
            [name for name, _ in chosen],
            [weight for _, weight in chosen],
            layer.r[adapter_name],
            layer,
            a,
            b,
            self.density,
            self.majority_sign_method,
            **{"clamp": None, **(self.svd or {})},
        )


def _put_side_by_side(
    layer: LoraLayer, chosen: Sequence[tuple[str, float]], target_a: torch.Tensor, target_b: torch.Tensor
) -> None:
    target_a.data.zero_()
    target_b.data.zero_()
    start = 0
    for name, weight in chosen:
        a, b = _matrices(layer, name)
        rows = slice(start, start + a.shape[0])
        target_a.data[rows] = a.data * (weight * layer.scaling[name])
        target_b.data[:, rows] = b.data
        start += a.shape[0]


def _matrices(layer: LoraLayer, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if adapter_name in layer.lora_A:
        a: Any = layer.lora_A[adapter_name]
        b: Any = layer.lora_B[adapter_name]
        return a.weight, b.weight
    return layer.lora_embedding_A[adapter_name], layer.lora_embedding_B[adapter_name]
