"""The settings of surgical fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peft_surgical.compat import add_peft_type
from peft_surgical.layer_specs import plain_spec
from peft_surgical.methods.config import DeltaConfig


@dataclass
class SurgicalConfig(DeltaConfig):
    """Which layers are fine-tuned in full; all others are frozen.

    Say it in one of three ways: `layers`, or `ranking` with `top_k`, or `target_modules` alone. Whatever is given is
    resolved to plain layer numbers when the adapter is made, and stored so: loading needs no data and never ranks.

    Args:
        layers: The layers, e.g. `[3, 5, -1]`, `"last:3"`, `"last:25%"`, `"4-9"`, `{"decoder": "last:2"}`; see
            `resolve_layers`.
        ranking: A `LayerRanking` (Lodha et al. 2023, section 3.1), or the path or the contents of a saved one.
        top_k: How many of the ranking's layers to tune, the best first.
        target_modules: Narrows the choice to these modules inside the chosen layers (names or a regular expression as
            in `LoraConfig`). Without `layers` or `ranking`: the modules to tune, anywhere in the model.
        exclude_modules: Modules to leave frozen, by name or regular expression.
        extra_modules: Modules outside the layers that are tuned like them, by their path, e.g. `["bert.pooler"]`.
        modules_to_save: Further modules to train in full and to save, as in `LoraConfig`. The head of a task with
            labels is among them by itself.
        dequantize: Whether a quantised linear module in the chosen layers gets copies in the dtype that it was
            quantised from. If not, it is an error.
        init_weights: False starts the copies off the base's values. For tests only.
        ranking_record: How the layers were chosen: the ranking, as plain data. Set when the adapter is made.

    Raises:
        ValueError: Options that contradict one another.

    Example:

        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(num_hidden_layers=6, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(config)
        >>> model = get_peft_model(model, SurgicalConfig(task_type="SEQ_CLS", layers="last:2"))
        >>> model.peft_config["default"].layers
        [4, 5]
    """

    layers: Any = field(default=None, metadata={"help": "The layers to tune, e.g. [3, -1], 'last:3', 'last:25%'."})
    ranking: Any = field(default=None, metadata={"help": "A LayerRanking, or the path or contents of a saved one."})
    top_k: int | None = field(default=None, metadata={"help": "How many of the ranking's layers to tune."})
    target_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Narrows the choice to these modules inside the layers."}
    )
    exclude_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Modules to leave frozen."}
    )
    extra_modules: list[str] | None = field(default=None, metadata={"help": "Modules outside the layers, by path."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Further modules to train in full."})
    dequantize: bool = field(default=False, metadata={"help": "Whether quantised modules get plain copies."})
    init_weights: bool = field(default=True, metadata={"help": "False starts off the base's values, for tests."})
    ranking_record: dict | None = field(default=None, metadata={"help": "How the layers were chosen."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = add_peft_type("SURGICAL")
        self.target_modules = (
            set(self.target_modules) if isinstance(self.target_modules, list) else self.target_modules
        )
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        # plain data, so that the config can be saved before it is used
        self.layers = plain_spec(self.layers)
        if isinstance(self.ranking, os.PathLike):
            self.ranking = os.fspath(self.ranking)
        if self.layers is not None and self.ranking is not None:
            raise ValueError("layers and ranking both choose the layers. Give one of them.")
        if self.top_k is not None and self.ranking is None:
            raise ValueError(
                f"top_k={self.top_k} counts the layers of a ranking, but ranking is None. Give ranking=..."
            )
        if self.ranking is not None and self.top_k is None:
            raise ValueError("ranking needs top_k=...: how many of its layers to tune.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of layers, 1 or more.")


def as_ranking(ranking: Any) -> Any:
    """A ranking, from itself, the path of a saved one, or its record.

    Raises:
        TypeError: It is none of these.
    """
    from peft_surgical.ranking.rank import LayerRanking

    if isinstance(ranking, (str, os.PathLike)):
        return LayerRanking.load(ranking)
    if isinstance(ranking, Mapping):
        return LayerRanking.from_dict(dict(ranking))
    if isinstance(ranking, LayerRanking):
        return ranking
    raise TypeError(
        f"ranking is a {type(ranking).__name__}; allowed are a LayerRanking, the path of a saved one, or its "
        "to_dict()."
    )
