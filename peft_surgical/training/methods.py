"""The ways of fine-tuning that the command line offers, as a table: what is trained, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peft import LoraConfig, TaskType, get_peft_model
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from peft_surgical.methods.stratified.config import StratifiedConfig
from peft_surgical.methods.surgical import SurgicalConfig
from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training import spafit


if TYPE_CHECKING:
    from peft_surgical.training.job import TrainingJob

Adapt = Callable[[nn.Module, "TrainingJob", LayerRanking | None, "list[str] | None"], nn.Module]
"""Takes a model, the job, the ranking if there is one, and the modules of the task's head; returns what to train."""


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning.

    Args:
        adapt: Makes a model ready to be trained.
        about: What is trained, in a few words.
        learning_rate: The default learning rate.
        options: The fields of `TrainingJob` that only some methods understand, and this one does.
        ranks: Tells whether a job's layers are chosen by a ranking.
    """

    adapt: Adapt
    about: str
    learning_rate: float
    options: frozenset[str] = frozenset()
    ranks: Callable[[TrainingJob], bool] = lambda job: False


def default_top_k(depth: int) -> int:
    """How many layers to tune in a model of `depth` layers: 5 of 12 as in Lodha et al. (2023), in proportion.

    Example:

        >>> [default_top_k(depth) for depth in (6, 12, 24)]
        [2, 5, 10]
    """
    return max(1, depth * 5 // 12)


def adapt_surgical(
    model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None
) -> nn.Module:
    """All weights of the layers that are ranked highest, or named (Lodha et al., 2023)."""
    if ranking is None:
        layers = {job.stack: job.layers} if job.stack else job.layers
        config = SurgicalConfig(task_type=TaskType.SEQ_CLS, layers=layers, modules_to_save=head)
    else:
        top_k = job.top_k or default_top_k(len(ranking.scores))
        config = SurgicalConfig(task_type=TaskType.SEQ_CLS, ranking=ranking, top_k=top_k, modules_to_save=head)
    return get_peft_model(model, config)


def adapt_last(model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None) -> nn.Module:
    """All weights of the last layers, a fourth of them if not told (Lee et al., 2019)."""
    last = f"last:{job.top_k}" if job.top_k else "last:25%"
    layers = {job.stack: last} if job.stack else last
    return get_peft_model(model, SurgicalConfig(task_type=TaskType.SEQ_CLS, layers=layers, modules_to_save=head))


def adapt_head(model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None) -> nn.Module:
    """The task's head alone."""
    frozen = [{"layers": "all", "tune": "frozen"}]
    config = StratifiedConfig(task_type=TaskType.SEQ_CLS, strata=frozen, modules_to_save=head)
    return get_peft_model(model, config)


def adapt_full(model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None) -> nn.Module:
    """Every weight; what is saved is a whole model."""
    return model


def adapt_lora(model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None) -> nn.Module:
    """LoRA of PEFT, on the modules that PEFT chooses for the model, else on all linear ones (Hu et al., 2022)."""
    known = str(getattr(model.config, "model_type", "")) in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=8 if job.lora_r is None else job.lora_r,
        lora_alpha=16 if job.lora_alpha is None else job.lora_alpha,
        lora_dropout=0.1 if job.lora_dropout is None else job.lora_dropout,
        target_modules=None if known else "all-linear",
        modules_to_save=head,
    )
    return get_peft_model(model, config)


def adapt_spafit(
    model: nn.Module, job: TrainingJob, ranking: LayerRanking | None, head: list[str] | None
) -> nn.Module:
    """Groups of layers from the bottom up, or by rank: frozen, bias terms, LoRA (Arora and Wang, 2024)."""
    return get_peft_model(model, spafit.make_config(job, ranking, head))


METHODS: dict[str, Method] = {
    # learning rate: Lodha et al. (2023), appendix A.1
    "surgical": Method(
        adapt_surgical,
        "all weights of the layers that matter most",
        5e-5,
        frozenset(
            {"top_k", "layers", "stack", "ranking", "samples", "score", "fisher_labels", "aggregation", "head_seeds"}
        ),
        ranks=lambda job: job.layers is None,
    ),
    "last": Method(adapt_last, "all weights of the last layers", 5e-5, frozenset({"top_k", "stack"})),
    # Arora and Wang (2024), section 5
    "full": Method(adapt_full, "all weights", 2e-5),
    "head": Method(adapt_head, "the task's head alone", 1e-3),
    # learning rate: Arora and Wang (2024), appendix A.2
    "spafit": Method(
        adapt_spafit,
        "lower layers frozen, bias terms in the middle, LoRA above",
        6e-5,
        frozenset(
            {"preset", "n1", "n2", "group_2", "target_modules", "ranking", "lora_r", "lora_alpha", "lora_dropout"}
        ),
        ranks=lambda job: job.ranking is not None,
    ),
    # Hu et al. (2022), table 9
    "lora": Method(adapt_lora, "LoRA", 4e-4, frozenset({"lora_r", "lora_alpha", "lora_dropout"})),
}
"""All methods by name. To add one: a function that makes a model ready, and a line here."""
