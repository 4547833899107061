"""SPAFIT from the command line: the config that a job describes, and strata by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft import TaskType
from torch import nn

from peft_surgical.methods.stratified.config import StratifiedConfig
from peft_surgical.methods.stratified.strata import resolve_strata
from peft_surgical.methods.stratified.tensors import choose
from peft_surgical.ranking.rank import LayerRanking


if TYPE_CHECKING:
    from peft_surgical.training.job import TrainingJob

SHARES = (0.2, 0.4)  # of SPAFIT-4-9, in proportion
RANK, ALPHA, DROPOUT = 64, 128, 0.0  # Arora & Wang (2024), section 4


def default_counts(depth: int, group_2: str = "bitfit") -> dict[str, int]:
    """How many of `depth` ranked layers get LoRA and how many the next less: 5 and 4 of 12, in proportion.

    Example:

        >>> default_counts(12), default_counts(3, "norm")
        ({'lora': 5, 'bitfit': 4}, {'lora': 1, 'norm': 1})
    """
    return {"lora": max(1, depth * 5 // 12), group_2: max(1, depth // 3)}


def make_config(job: TrainingJob, ranking: LayerRanking | None = None, head: list[str] | None = None):
    """The config that a job with `--method spafit` describes.

    Args:
        job: The job.
        ranking: The ranking, if the job names one.
        head: The modules of the task's head.

    Raises:
        ValueError: The job's options do not go together.
    """
    options: dict[str, Any] = {
        "task_type": TaskType.SEQ_CLS,
        "modules_to_save": head,
        "r": RANK if job.lora_r is None else job.lora_r,
        "lora_alpha": ALPHA if job.lora_alpha is None else job.lora_alpha,
        "lora_dropout": DROPOUT if job.lora_dropout is None else job.lora_dropout,
        "group_2": job.group_2,
    }
    if job.target_modules:
        options["target_modules"] = list(job.target_modules)
    if ranking is not None:
        counts = default_counts(len(ranking.scores), job.group_2)
        return StratifiedConfig.by_ranking(ranking, **counts, **options)
    if job.preset is not None:
        return StratifiedConfig.spafit(job.preset, **options)
    n1, n2 = (job.n1, job.n2) if job.n1 is not None or job.n2 is not None else SHARES
    return StratifiedConfig(n1=n1, n2=n2, **options)


def check_strata(job: TrainingJob, model: nn.Module) -> None:
    """Check that a job's strata fit the model, before anything is written or computed.

    Raises:
        ValueError: They do not.
    """
    if job.method == "spafit" and job.ranking is None:
        choose(resolve_strata(model, make_config(job)), lambda path: False)


def describe_strata_by_rank(ranking: LayerRanking, group_2: str = "bitfit") -> str:
    """The strata that `StratifiedConfig.by_ranking` makes of a ranking with the default counts, in words.

    Args:
        ranking: The ranking.
        group_2: What is tuned in the layers that come after those with LoRA, `"bitfit"` or `"norm"`.

    Example:

        >>> print(describe_strata_by_rank(LayerRanking(stack="encoder", scores=[0.1, 0.9, 0.2, 0.5])))
        Strata by rank: LoRA on layer 1, bias terms of layer 3, layers 0, 2 frozen.
        In Python: StratifiedConfig.by_ranking(ranking, lora=1, bitfit=1)
    """
    counts = default_counts(len(ranking.scores), group_2)
    names = {"lora": "LoRA on", "bitfit": "bias terms of", "norm": "norms of"}
    order, parts = ranking.order, []
    for tune, count in counts.items():
        parts.append(f"{names[tune]} {_layers(order[:count])}")
        order = order[count:]
    if order:
        parts.append(f"{_layers(order)} frozen")
    how = ", ".join(f"{tune}={count}" for tune, count in counts.items())
    return f"Strata by rank: {', '.join(parts)}.\nIn Python: StratifiedConfig.by_ranking(ranking, {how})"


def _layers(indices: list[int]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
