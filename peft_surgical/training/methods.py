"""The ways of fine-tuning that the command line offers, as a table: what is trained, and how fast.

Nothing heavy is imported until a model is made ready: the help of the command line is built from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from torch import nn

    from peft_surgical.methods.stratified.config import StratifiedConfig
    from peft_surgical.ranking.ranking import LayerRanking

Options = Mapping[str, Any]
"""The fields of a `TrainingJob` that its method names in `Method.options`."""
Head = list[str] | None
"""The modules of the task's head, for `modules_to_save`."""


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning.

    Args:
        adapt: Takes a model, the options, the ranking if there is one, and the modules of the task's head; returns the
            model to train.
        about: What is trained, in a few words.
        learning_rate: The default learning rate.
        options: The fields of `TrainingJob` that only some methods understand, and this one does.
        ranks: Tells from the options whether the layers are chosen by a ranking.
        check: Takes the options, and the model once it is loaded; raises a `ValueError` if they do not go together.
    """

    adapt: Callable[[nn.Module, Options, LayerRanking | None, Head], nn.Module]
    about: str
    learning_rate: float
    options: frozenset[str] = frozenset()
    ranks: Callable[[Options], bool] = lambda options: False
    check: Callable[[Options, nn.Module | None], None] = lambda options, model: None


def default_top_k(depth: int) -> int:
    """How many layers to tune in a model of `depth` layers: 5 of 12 as in Lodha et al. (2023), in proportion.

    Example:

        >>> [default_top_k(depth) for depth in (6, 12, 24)]
        [2, 5, 10]
    """
    return max(1, depth * 5 // 12)


def adapt_surgical(model: nn.Module, options: Options, ranking: LayerRanking | None, head: Head) -> nn.Module:
    """All weights of the layers that are ranked highest, or named (Lodha et al., 2023)."""
    if ranking is None:
        return _tune_layers(model, head, layers=_in_stack(options, options["layers"]))
    return _tune_layers(model, head, ranking=ranking, top_k=options["top_k"] or default_top_k(len(ranking.scores)))


def check_layers(options: Options, model: nn.Module | None) -> None:
    """Check that the model has the layers that are named, or as many as the ranking that is named.

    Raises:
        ValueError: It has not.
    """
    from peft_surgical.layers import choose_stack, resolve_layers
    from peft_surgical.ranking.ranking import LayerRanking

    if model is None:
        return
    layers, file, top_k = (options.get(name) for name in ("layers", "ranking", "top_k"))
    if layers is not None:
        resolve_layers(model, _in_stack(options, layers))
        return
    ranking = LayerRanking.load(file) if file is not None else None
    stack = choose_stack(model, options.get("stack") if ranking is None else ranking.stack)
    depth = len(stack)
    if ranking is not None and len(ranking.scores) != depth:
        raise ValueError(f"--ranking {file} ranks {len(ranking.scores)} layers; {stack.name} has {depth}.")
    if top_k is not None and top_k > depth:
        raise ValueError(f"--top-k {top_k}: {stack.name} has {depth} layers; allowed are 1 to {depth}.")


def adapt_last(model: nn.Module, options: Options, ranking: LayerRanking | None, head: Head) -> nn.Module:
    """All weights of the last layers, a quarter of them by default (Lee et al., 2019)."""
    last = f"last:{options['top_k']}" if options["top_k"] else "last:25%"
    return _tune_layers(model, head, layers=_in_stack(options, last))


def adapt_head(model: nn.Module, options: Options, ranking: LayerRanking | None, head: Head) -> nn.Module:
    """The task's head alone."""
    from peft import get_peft_model

    from peft_surgical.methods.stratified.config import StratifiedConfig

    strata = [{"layers": "all", "tune": "frozen"}]
    return get_peft_model(model, StratifiedConfig(task_type="SEQ_CLS", strata=strata, modules_to_save=head))


def adapt_lora(model: nn.Module, options: Options, ranking: LayerRanking | None, head: Head) -> nn.Module:
    """LoRA of PEFT, on the modules that PEFT chooses for the model, else on all linear ones (Hu et al., 2022)."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    known = str(getattr(model.config, "model_type", "")) in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    lora = _lora_options(options, rank=8, alpha=16, dropout=0.1)
    targets = None if known else "all-linear"
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=targets, modules_to_save=head, **lora))


def adapt_spafit(model: nn.Module, options: Options, ranking: LayerRanking | None, head: Head) -> nn.Module:
    """Groups of layers from the bottom up, or by rank: frozen, bias terms, LoRA (Arora and Wang, 2024)."""
    from peft import get_peft_model

    return get_peft_model(model, spafit_config(options, ranking, head))


def check_spafit(options: Options, model: nn.Module | None) -> None:
    """Check that the groups of layers can be made, and fit the model once it is loaded.

    Raises:
        ValueError: They cannot, or do not.
    """
    from peft_surgical.methods.stratified.strata import resolve_strata
    from peft_surgical.methods.stratified.tensors import choose

    if options["ranking"] is not None:
        check_layers(options, model)
    else:
        config = spafit_config(options)
        if model is not None:
            choose(resolve_strata(model, config), lambda path: False)


def spafit_config(options: Options, ranking: LayerRanking | None = None, head: Head = None) -> StratifiedConfig:
    """The config that the options of `--method spafit` describe.

    Raises:
        ValueError: The options do not go together.
    """
    from peft_surgical.methods.stratified.config import StratifiedConfig

    more: dict[str, Any] = {
        "task_type": "SEQ_CLS",
        "modules_to_save": head,
        "group_2": options["group_2"],
        **_lora_options(options, rank=64, alpha=128, dropout=0.0),  # Arora & Wang (2024), section 4
    }
    if options["target_modules"]:
        more["target_modules"] = [*options["target_modules"]]
    if ranking is not None:
        return StratifiedConfig.by_ranking(ranking, **spafit_counts(len(ranking.scores), options["group_2"]), **more)
    if options["preset"] is not None:
        return StratifiedConfig.spafit(options["preset"], **more)
    n1, n2 = options["n1"], options["n2"]
    if n1 is None and n2 is None:
        n1, n2 = 0.2, 0.4  # of SPAFIT-4-9, in proportion
    return StratifiedConfig(n1=n1, n2=n2, **more)


def spafit_counts(depth: int, group_2: str = "bitfit") -> dict[str, int]:
    """How many of `depth` ranked layers get LoRA, and how many after them get less: 5 and 4 of 12, in proportion.

    Example:

        >>> spafit_counts(12), spafit_counts(3, "norm")
        ({'lora': 5, 'bitfit': 4}, {'lora': 1, 'norm': 1})
    """
    return {"lora": default_top_k(depth), group_2: max(1, depth // 3)}


def describe_strata_by_rank(ranking: LayerRanking, group_2: str = "bitfit") -> str:
    """The strata that `StratifiedConfig.by_ranking` makes of a ranking with the default counts, in words.

    Example:

        >>> from peft_surgical.ranking.ranking import LayerRanking
        >>> print(describe_strata_by_rank(LayerRanking(stack="encoder", scores=[0.1, 0.9, 0.2, 0.5])))
        Strata by rank: LoRA on layer 1, bias terms of layer 3, layers 0, 2 frozen.
        In Python: StratifiedConfig.by_ranking(ranking, lora=1, bitfit=1)
    """

    def listed(indices: list[int]) -> str:
        return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"

    counts = spafit_counts(len(ranking.scores), group_2)
    names = {"lora": "LoRA on", "bitfit": "bias terms of", "norm": "norms of"}
    order, parts = ranking.order, []
    for tune, count in counts.items():
        parts.append(f"{names[tune]} {listed(order[:count])}")
        order = order[count:]
    if order:
        parts.append(f"{listed(order)} frozen")
    how = ", ".join(f"{tune}={count}" for tune, count in counts.items())
    return f"Strata by rank: {', '.join(parts)}.\nIn Python: StratifiedConfig.by_ranking(ranking, {how})"


def _tune_layers(model: nn.Module, head: Head, **choice: Any) -> nn.Module:
    from peft import get_peft_model

    from peft_surgical.methods.surgical import SurgicalConfig

    return get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS", modules_to_save=head, **choice))


def _in_stack(options: Options, layers: Any) -> Any:
    return {options["stack"]: layers} if options["stack"] else layers


def _lora_options(options: Options, *, rank: int, alpha: int, dropout: float) -> dict[str, Any]:
    """LoRA's options, with the defaults of a method."""
    defaults = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    given = {"r": options["lora_r"], "lora_alpha": options["lora_alpha"], "lora_dropout": options["lora_dropout"]}
    return defaults | {name: value for name, value in given.items() if value is not None}


_RANKING = {"ranking", "samples", "score", "fisher_labels", "aggregation", "head_seeds"}
_LORA = {"lora_r", "lora_alpha", "lora_dropout"}

METHODS: dict[str, Method] = {
    # learning rate: Lodha et al. (2023), appendix A.1
    "surgical": Method(
        adapt_surgical,
        "all weights of the layers that matter most",
        5e-5,
        frozenset({"top_k", "layers", "stack", *_RANKING}),
        ranks=lambda options: options["layers"] is None,
        check=check_layers,
    ),
    "last": Method(
        adapt_last, "all weights of the last layers", 5e-5, frozenset({"top_k", "stack"}), check=check_layers
    ),
    # Arora and Wang (2024), section 5
    "full": Method(lambda model, *rest: model, "all weights", 2e-5),
    "head": Method(adapt_head, "the task's head alone", 1e-3),
    # learning rate: Arora and Wang (2024), appendix A.2
    "spafit": Method(
        adapt_spafit,
        "lower layers frozen, bias terms in the middle, LoRA above",
        6e-5,
        frozenset({"preset", "n1", "n2", "group_2", "target_modules", "ranking", *_LORA}),
        ranks=lambda options: options["ranking"] is not None,
        check=check_spafit,
    ),
    # Hu et al. (2022), table 9
    "lora": Method(adapt_lora, "LoRA", 4e-4, frozenset(_LORA)),
}
"""All methods by name. To add one: a function that makes a model ready, and a line here."""
