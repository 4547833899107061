"""Combine adapters into a new one: the base plus a weighted sum of differences, or PEFT's pruned variants of that.

LoRA's matrices are combined as PEFT combines them, see `LoraCombination`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.utils import merge_utils
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.methods.wrappers import whole_or_not_at_all


PRUNINGS = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
COMBINATIONS = ("linear", *PRUNINGS)
LORA_COMBINATIONS = ("linear", "cat", "svd", *PRUNINGS, *(f"{pruning}_svd" for pruning in PRUNINGS))


@dataclass(frozen=True)
class LoraCombination:
    """How the differences that LoRA makes are combined.

    LoRA's difference is a product of two matrices. A weighted sum of such products is the product of the matrices put
    side by side (`"cat"`), whose rank is the sum of the ranks: exact. All others compute the combined difference and
    cut it to a lower rank, as well as that rank allows: those with `svd` in their name to `svd_rank`, or the highest
    of the ranks; the others need equal ranks and keep them.
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
        """Give a config the rank of the result, and scaling 1."""
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

    def combine(self, tuner: Any, layer: LoraLayer, weights: Mapping[str, float], adapter_name: str) -> None:
        """Write the combination of adapters, by their weights, into the matrices of another adapter."""
        a, b = _matrices(layer, adapter_name)
        chosen = {name: weight for name, weight in weights.items() if name in layer.r}
        for target, source in zip((a, b), _matrices(layer, next(iter(chosen))), strict=True):
            target.data = target.data.to(source.dtype)  # PEFT makes new ones in the base's
        rank = layer.r[adapter_name]
        if sum(layer.r[name] for name in chosen) <= rank and self.kind in ("linear", "cat", "svd"):
            _put_side_by_side(layer, chosen, a, b)
            return
        kind = "svd" if self.kind in ("linear", "svd") else f"{self.kind.removesuffix('_svd')}_svd"
        made = tuner._svd_generalized_task_arithmetic_weighted_adapter(
            kind, [*chosen], [*chosen.values()], rank, layer, a, b, self.density, self.majority_sign_method,
            **{"clamp": None, **(self.svd or {})},
        )  # fmt: skip
        a.data, b.data = (matrix.to(target.dtype) for matrix, target in zip(made, (a, b), strict=True))


def _put_side_by_side(
    layer: LoraLayer, weights: Mapping[str, float], target_a: torch.Tensor, target_b: torch.Tensor
) -> None:
    target_a.data.zero_()
    target_b.data.zero_()
    start = 0
    for name, weight in weights.items():
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


Combine = Callable[..., torch.Tensor]  # makes one of several differences and their weights


def add_weighted_adapter(
    tuner: Any,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: str = "linear",
    density: float | None = None,
    majority_sign_method: str = "total",
    lora: LoraCombination | None = None,
) -> None:
    """Add an adapter that combines others; see `DeltaTuner.add_weighted_adapter`.

    `lora` says how LoRA's matrices are combined, if the adapters have any.
    """
    combine = _combination(combination_type, density, majority_sign_method)
    _check(tuner, adapters, weights, adapter_name)
    by_name = dict(zip(adapters, weights, strict=True))
    united = united_config(tuner, {name: tuner.peft_config[name] for name in adapters})
    if lora is not None:
        lora.set_rank(united, [tuner.peft_config[name] for name in adapters])
    with whole_or_not_at_all(tuner, [*tuner.peft_config]), torch.no_grad():
        tuner.peft_config[adapter_name] = united
        tuner.inject_adapter(tuner.model, adapter_name)
        for module in tuner.model.modules():
            if isinstance(module, TunedModule) and adapter_name in module.tuned:
                _combine_copies(module, by_name, adapter_name, combine)
            elif isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
                _combine_heads(module, by_name, adapter_name, combine)
            elif isinstance(module, LoraLayer) and adapter_name in module.r and lora is not None:
                lora.combine(tuner, module, by_name, adapter_name)


def united_config(tuner: Any, configs: Mapping[str, Any]) -> Any:
    """A config that chooses what any of several configs, resolved on the tuner's model, chooses."""
    first = next(iter(configs.values()))
    labels = {name: (config.labels or {}).get("num_labels") for name, config in configs.items()}
    if len(set(labels.values())) > 1:
        raise ValueError(
            f"The heads (modules_to_save={first.modules_to_save}) of these adapters have different numbers of labels, "
            f"{labels}, and cannot be brought together."
        )
    united = copy.copy(first)
    heads = [name for config in configs.values() for name in config.modules_to_save or []]
    united.modules_to_save = list(dict.fromkeys(heads)) or None
    united.ranking_record, united.base, united.inference_mode, united.init_weights = None, None, False, True
    vars(united).pop("_source", None)  # it is not read from a file
    tuner._unite_choice(united, list(configs.values()))
    _check_union(tuner, united, configs)
    return united


def _check_union(tuner: Any, united: Any, configs: Mapping[str, Any]) -> None:
    chosen = tuner._resolve(copy.copy(united), tuner.model)
    wanted = set().union(*(config.resolution.tensors() for config in configs.values()))
    if differing := sorted(chosen.tensors() ^ wanted):
        raise ValueError(
            f"The adapters {list(configs)} choose their modules in ways that no one configuration can express "
            f"together, e.g. {differing[0]}. Give them the same options besides their layers."
        )


def _combination(kind: str, density: float | None, majority_sign_method: str) -> Combine:
    if kind not in COMBINATIONS:
        raise ValueError(f"combination_type={kind!r}: allowed are {', '.join(COMBINATIONS)}.")
    if kind == "linear":
        return merge_utils.task_arithmetic
    if density is None or not 0 < density <= 1:
        raise ValueError(
            f"density={density!r}: combination_type={kind!r} needs the share of values to keep, above 0 and at most 1."
        )
    options = {"majority_sign_method": majority_sign_method} if kind.endswith("ties") else {}
    return partial(getattr(merge_utils, kind), density=density, **options)


def _check(tuner: Any, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
    if adapter_name in tuner.peft_config:
        raise ValueError(f"There is an adapter {adapter_name!r} already. Delete it, or choose another name.")
    if isinstance(adapters, str) or not adapters or len(set(adapters)) != len(adapters):
        raise ValueError(f"adapters={adapters!r} must be a list of different adapters.")
    if unknown := [name for name in adapters if name not in tuner.peft_config]:
        raise ValueError(f"There is no adapter {unknown[0]!r}. Adapters: {', '.join(tuner.peft_config)}.")
    if len(weights) != len(adapters):
        raise ValueError(f"weights={weights!r} must hold one number for each of the {len(adapters)} adapters.")
    for name, module in tuner.model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise ValueError(f"{name} is a {type(module).__name__}, whose adapters cannot be combined.")


def _combine_copies(module: TunedModule, weights: Mapping[str, float], adapter_name: str, combine: Combine) -> None:
    entry, tuned = module.tuned[adapter_name], module.tuned
    for name in entry.names:
        sources = [(tuned[a].wake()[name], w) for a, w in weights.items() if a in tuned and name in tuned[a]]
        # a buffer is a statistic, in which nothing is to be pruned
        how = combine if isinstance(module.base_tensor(name), nn.Parameter) else merge_utils.task_arithmetic
        entry.put(name, _combined(module.original(name), sources, how))


def _combine_heads(
    wrapper: ModulesToSaveWrapper, weights: Mapping[str, float], adapter_name: str, combine: Combine
) -> None:
    heads: Any = wrapper.modules_to_save
    base = wrapper.original_module.state_dict()
    states = [(heads[a].state_dict(), w) for a, w in weights.items() if a in heads]
    for name, target in heads[adapter_name].state_dict(keep_vars=True).items():
        target.data = _combined(base[name], [(state[name], w) for state, w in states], combine)


def _combined(base: torch.Tensor, sources: Sequence[tuple[torch.Tensor, float]], combine: Combine) -> torch.Tensor:
    """The base plus the combined differences, in float64, so that weight 1 gives the adapter's own values."""
    if not base.is_floating_point():
        return sources[0][0].clone()
    start = base.double()
    differences = [value.double() - start for value, _ in sources]
    weights = torch.tensor([w for _, w in sources], dtype=torch.float64, device=base.device)
    return (start + combine(differences, weights)).to(sources[0][0].dtype)
