"""The ways of fine-tuning that the command line offers, as a table: what is trained, and how fast.

Nothing heavy is imported until a model is made ready: the help of the command line is built from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

    from peft_surgical.methods.stratified.config import StratifiedConfig
    from peft_surgical.methods.surgical import SurgicalConfig
    from peft_surgical.ranking.ranking import LayerRanking

AUTO = "auto"
"""The layers of a job that tries several choices of them."""

Options = Mapping[str, Any]
"""The fields of a `TrainingJob` that its method names in `Method.options`."""
Shared = Mapping[str, Any]
"""What the configs of all methods say alike: `task_type`, and the modules of the task's head as `modules_to_save`."""


@dataclass(frozen=True)
class Method:
    """A way of fine-tuning."""

    configure: Callable[[nn.Module, Options, LayerRanking | None, Shared], PeftConfig | None]
    """PEFT's config for a model, from the options, the ranking if there is one, and what all configs say alike; None
    where all weights are trained."""
    about: str  # what is trained, in a few words
    learning_rate: float  # the default, as our evidence chose it (docs/results.md)
    options: frozenset[str] = frozenset()  # the fields of `TrainingJob` that not all methods understand, and this does
    check: Callable[[Options, nn.Module | None], None] = lambda options, model: None
    """A `ValueError` if the options, and the model once it is loaded, do not go together."""
    decoder_rate: float | None = None  # the default for decoders, where it is another

    @property
    def rates(self) -> str:
        """The default learning rates in words."""
        decoders = f" (decoders {self.decoder_rate:g})" if self.decoder_rate is not None else ""
        return f"{self.learning_rate:g}{decoders}"


def default_top_k(depth: int) -> int:
    """How many layers to tune in a model of `depth` layers: 5 of 12 as in Lodha et al. (2023), in proportion.

    Example:

        >>> [default_top_k(depth) for depth in (6, 12, 24)]
        [2, 5, 10]
    """
    return max(1, depth * 5 // 12)


def configure_surgical(model: nn.Module, options: Options, ranking: LayerRanking | None, shared: Shared) -> PeftConfig:
    """All weights of the layers that are named or rank highest (Lodha et al., 2023), else of layers at equal
    distances."""
    from peft_surgical.methods.surgical import DEFAULT_LAYERS

    layers, top_k = options["layers"], options["top_k"]
    if ranking is not None:
        return _tune_layers(options, shared, ranking=ranking, top_k=top_k or default_top_k(len(ranking.scores)))
    if layers is None:
        by_default = "all" if options["rotate_every"] else DEFAULT_LAYERS
        layers = f"spread:{top_k}" if top_k else by_default
    return _tune_layers(options, shared, layers=_in_stack(options, layers))


def check_layers(options: Options, model: nn.Module | None) -> None:
    """Check that the model has the layers that are named, or as many as the ranking that is named."""
    from peft_surgical.layers import choose_stack, resolve_layers
    from peft_surgical.methods.trainer import CHOICES
    from peft_surgical.ranking.ranking import LayerRanking

    if model is None:
        return
    layers, file, top_k = (options.get(name) for name in ("layers", "ranking", "top_k"))
    if layers is not None:
        for choice in CHOICES if layers == AUTO else [layers]:
            resolve_layers(model, _in_stack(options, choice))
        return
    ranking = LayerRanking.load(file) if file is not None else None
    if ranking is not None:
        ranking.check_model(model, f"--ranking {file}")
    stack = choose_stack(model, options.get("stack") if ranking is None else ranking.stack)
    if top_k is not None and top_k > len(stack):
        raise ValueError(f"--top-k {top_k}: {stack.name} has {len(stack)} layers; allowed are 1 to {len(stack)}.")


def check_tuned_layers(options: Options, model: nn.Module | None) -> None:
    """Check that the model has such layers, and they such modules."""
    from peft_surgical.methods.surgical import resolve_surgical

    check_layers(options, model)
    if model is not None and options["target_modules"]:
        resolve_surgical(_tune_layers(options, {}, layers=_in_stack(options, "all")), model)


def configure_last(model: nn.Module, options: Options, ranking: LayerRanking | None, shared: Shared) -> PeftConfig:
    """All weights of the last layers, a quarter of them by default (Lee et al., 2019)."""
    last = f"last:{options['top_k']}" if options["top_k"] else "last:25%"
    return _tune_layers(options, shared, layers=_in_stack(options, last))


def configure_head(model: nn.Module, options: Options, ranking: LayerRanking | None, shared: Shared) -> PeftConfig:
    """The task's head alone."""
    from peft_surgical.methods.stratified.config import StratifiedConfig

    return StratifiedConfig(strata=[{"layers": "all", "tune": "frozen"}], **shared)


def configure_columns(model: nn.Module, options: Options, ranking: LayerRanking | None, shared: Shared) -> PeftConfig:
    """Some input columns of the linear modules of all layers (Woo et al., 2025)."""
    from peft_surgical.methods.stratified.config import StratifiedConfig

    return StratifiedConfig(strata=[{"layers": "all", "tune": "columns"}], columns=options["columns"] or 32, **shared)


def configure_lora(model: nn.Module, options: Options, ranking: LayerRanking | None, shared: Shared) -> PeftConfig:
    """LoRA of PEFT, on the modules that PEFT chooses for the model, else on all linear ones (Hu et al., 2022)."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    known = str(getattr(model.config, "model_type", "")) in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    lora = _lora_options(options, rank=8, alpha=16, dropout=0.1)
    return LoraConfig(target_modules=None if known else "all-linear", **shared, **lora)


def check_spafit(options: Options, model: nn.Module | None) -> None:
    """Check that the groups of layers can be made, and fit the model once it is loaded."""
    from peft_surgical.methods.stratified.strata import resolve_strata
    from peft_surgical.methods.stratified.tensors import choose

    if options["ranking"] is not None:
        check_layers(options, model)
    else:
        config = configure_spafit(model, options, None, {})
        if model is not None:
            choose(resolve_strata(model, config), config)


def configure_spafit(
    model: nn.Module | None, options: Options, ranking: LayerRanking | None, shared: Shared
) -> StratifiedConfig:
    """Groups of layers from the bottom up, or by rank: frozen, bias terms, LoRA (Arora and Wang, 2024)."""
    from peft_surgical.methods.stratified.config import StratifiedConfig

    more: dict[str, Any] = {
        **shared,
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
    """How many of `depth` ranked layers get LoRA, and how many after them get less: 5 and 4 of 12, in proportion."""
    return {"lora": default_top_k(depth), group_2: max(1, depth // 3)}


def describe_strata_by_rank(ranking: LayerRanking, group_2: str = "bitfit") -> str:
    """The strata that `StratifiedConfig.by_ranking` makes of a ranking with the default counts, in words."""
    from peft_surgical.methods.stratified.config import StratifiedConfig

    counts, parts = spafit_counts(len(ranking.scores), group_2), []
    words = {"lora": "LoRA on {}", "bitfit": "bias terms of {}", "norm": "norms of {}", "frozen": "{} frozen"}
    for stratum in StratifiedConfig.by_ranking(ranking, **counts).strata[ranking.stack]:
        layers = stratum["layers"]
        named = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        parts.append(words[stratum["tune"]].format(named))
    how = ", ".join(f"{tune}={count}" for tune, count in counts.items())
    return f"Strata by rank: {', '.join(parts)}.\nIn Python: StratifiedConfig.by_ranking(ranking, {how})"


def _tune_layers(options: Options, shared: Shared, **choice: Any) -> SurgicalConfig:
    from peft_surgical.methods.surgical import SurgicalConfig

    modules = [*options["target_modules"]] or None
    return SurgicalConfig(dequantize=options["dequantize"], target_modules=modules, **shared, **choice)


def _in_stack(options: Options, layers: Any) -> Any:
    return {options["stack"]: layers} if options["stack"] else layers


def _lora_options(options: Options, *, rank: int, alpha: int, dropout: float) -> dict[str, Any]:
    """LoRA's options, with the defaults of a method."""
    defaults = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    given = {"r": options["lora_r"], "lora_alpha": options["lora_alpha"], "lora_dropout": options["lora_dropout"]}
    return defaults | {name: value for name, value in given.items() if value is not None}


ROUNDED = {"stochastic_rounding"}
OF_TURNS = {"rotate_every", "rotate_layers"}
OF_A_RANKING = {"samples", "fisher_labels", "aggregation", "head_seeds"}
_LORA = {"lora_r", "lora_alpha", "lora_dropout"}

METHODS: dict[str, Method] = {
    "surgical": Method(
        configure_surgical,
        "all weights of some layers",
        1e-4,
        frozenset({"top_k", "layers", "target_modules", "stack", "dequantize", *OF_TURNS, *ROUNDED})
        | {"ranking", "score", *OF_A_RANKING},
        check=check_tuned_layers,
        decoder_rate=5e-5,
    ),
    "last": Method(
        configure_last,
        "all weights of the last layers",
        1e-4,
        frozenset({"top_k", "target_modules", "stack", "dequantize", *ROUNDED}),
        check=check_tuned_layers,
        decoder_rate=5e-5,
    ),
    "full": Method(lambda *given: None, "all weights", 5e-5, frozenset(ROUNDED), decoder_rate=1e-5),
    "head": Method(configure_head, "the task's head alone", 3e-4),
    "spafit": Method(
        configure_spafit,
        "lower layers frozen, bias terms in the middle, LoRA above",
        2e-4,
        frozenset({"preset", "n1", "n2", "group_2", "target_modules", "ranking", *_LORA}),
        check=check_spafit,
    ),
    "columns": Method(configure_columns, "some columns of each linear module", 3e-4, frozenset({"columns"})),
    "lora": Method(configure_lora, "LoRA", 3e-4, frozenset(_LORA)),
}
"""All methods by name. To add one: a function that makes PEFT's config, and a line here."""
