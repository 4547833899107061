"""`StratifiedConfig`: how the layers of a model are divided, and the presets of the SPAFIT paper.

Arora & Wang (2024), "SPAFIT: Stratified Progressive Adaptation Fine-tuning for Pre-trained Large Language Models".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig

from peft_surgical.compat import add_peft_type
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.methods.resolve import plain_spec
from peft_surgical.methods.stratified.attention_names import VARIANTS
from peft_surgical.methods.stratified.strata import BIASES, check_columns, check_depth_marks, check_form
from peft_surgical.ranking.ranking import as_ranking


CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")


@dataclass
class StratifiedConfig(DeltaConfig, LoraConfig):
    """How the layers of a model are tuned, in strata. For those with LoRA every option of `LoraConfig` holds, but for
    `alora_invocation_tokens`.

    Say it in one of these ways, all of which are resolved to `strata` when the adapter is made:

    - `n1` and `n2`, SPAFIT's three groups (section 3.2 of the paper): frozen, bias terms, LoRA with bias terms beside;
    - `strata`, a list of dicts such as `{"layers": "0-4", "tune": "frozen"}`, which together cover all layers;
    - `StratifiedConfig.by_ranking`, `.spafit`, `.full_lora`, `.full_bitfit`;
    - `target_modules` alone: LoRA on these modules anywhere in the model, as in `LoraConfig`.

    Args:
        n1: The index of the last layer of group 1, inclusive, or the fraction of the depth where the group ends.
        n2: Likewise for group 2.
        group_2: How group 2 is tuned: `"bitfit"`, as in the paper, or `"norm"`, for models without bias terms.
        strata: The strata. `tune` is `"frozen"`, `"bitfit"` (all bias terms), `"norm"` (weights and biases of norms),
            `"columns"` (some input columns of each linear module), `"lora"` or `"full"` (all weights). A stratum with
            LoRA may name its own `"target_modules"` and `"bias"`, one with columns `"target_modules"` and `"columns"`.
            A dict of lists by stack for models with several stacks; stacks that are not named stay frozen. With all
            of them frozen the head alone is trained, or what `modules_to_save` names.
        variant: The attention's modules that get LoRA if `target_modules` does not name others: `"I"` for query, key
            and value, `"II"` (the default) for the attention's output too.
        bias_beside_lora: The bias terms that are trained in a stratum with LoRA: those of the `"other"` sub-layers,
            the ones without LoRA (SPAFIT's choice), of `"all"`, or `"none"`. `LoraConfig.bias` is another thing, which
            changes the base model, and must stay `"none"` here.
        add_bias: Whether linear modules without a bias get one, zero at the start, where biases are tuned.
        columns: How many input columns of each linear module, or which share of them, a stratum with columns trains
            that does not say so itself; a random choice (PaCA, Woo et al. 2025).
        columns_seed: Of the choice of columns.
        init_weights: False starts off the base's values. For tests only.
        ranking_record: How the layers were chosen: the ranking, as plain data. Set by `by_ranking`.

    Raises:
        ValueError: Options that contradict one another.
        TypeError: An option of the wrong kind.

    Example:

        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(num_hidden_layers=5, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(config)
        >>> model = get_peft_model(model, StratifiedConfig(task_type="SEQ_CLS", n1=0.2, n2=0.4, variant="I"))
        >>> for stratum in model.peft_config["default"].strata:
        ...     print(stratum["layers"], stratum["tune"])
        [0] frozen
        [1] bitfit
        [2, 3, 4] lora
    """

    n1: int | float | None = None
    n2: int | float | None = None
    group_2: str = "bitfit"
    strata: Any = None
    variant: str | None = None
    bias_beside_lora: str = "other"
    add_bias: bool = False
    columns: int | float = 16
    columns_seed: int = 0
    init_weights: bool = True
    ranking_record: dict | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = add_peft_type("STRATIFIED")
        if tokens := getattr(self, "alora_invocation_tokens", None):
            raise ValueError(
                f"alora_invocation_tokens={tokens!r}: StratifiedConfig has no activated LoRA. Use peft's LoraConfig."
            )
        if self.init_weights is False:
            self.init_lora_weights = False
        if self.n1 is not None or self.n2 is not None:
            if self.strata is not None:
                raise ValueError(
                    f"n1={self.n1!r}, n2={self.n2!r} and strata={self.strata!r} all divide the layers. Drop one."
                )
            self.n1, self.n2 = check_depth_marks(self.n1, self.n2)
        if self.strata is not None:
            check_form(self.strata)
            self.strata = _plain_strata(self.strata)  # so that the config can be saved before it is used
        if self.is_stratified:
            self._refuse_options_for_all_layers()
        elif self.variant is not None or self.add_bias:
            option = "variant" if self.variant is not None else "add_bias"
            raise ValueError(f"{option}={getattr(self, option)!r} has no meaning without n1 and n2, or strata.")
        if self.group_2 not in ("bitfit", "norm"):
            raise ValueError(f"group_2={self.group_2!r}: allowed are 'bitfit' and 'norm'.")
        check_columns(self.columns)
        if self.bias_beside_lora not in BIASES:
            raise ValueError(f"bias_beside_lora={self.bias_beside_lora!r}: allowed are {', '.join(BIASES)}.")
        if self.variant is not None and self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}: allowed are {', '.join(VARIANTS)}.")
        if self.variant is not None and self.target_modules is not None:
            raise ValueError("variant and target_modules both choose the modules with LoRA. Drop one.")
        start = "kasa" if getattr(self, "kasa_config", None) else self.init_lora_weights
        if isinstance(start, str) and start.startswith(CHANGES_BASE):
            warnings.warn(
                f"init_lora_weights={start!r} changes the base model's weights, so that disabling or "
                "unloading the adapter does not give the base back, and other adapters on it see another base.",
                stacklevel=2,
            )

    @property
    def is_stratified(self) -> bool:
        """Whether the layers are divided; if not, this is LoRA alone."""
        return self.strata is not None or self.n1 is not None

    def _refuse_options_for_all_layers(self) -> None:
        if self.bias != "none":
            raise TypeError(  # as for an option that does not exist; PEFT's own tests tell methods without it by that
                f"bias={self.bias!r} would train the base model's own biases, in all layers. Use "
                f"bias_beside_lora={'all' if self.bias == 'all' else 'other'!r}, or a 'bias' in each stratum."
            )
        for name in ("layers_to_transform", "layers_pattern", "layer_replication", "target_parameters"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} and {'n1, n2' if self.strata is None else 'strata'} both say "
                    "which layers are tuned. Drop one."
                )

    # ---- the paper's models, and strata from a ranking

    @classmethod
    def spafit(cls, name: str, **options: Any) -> StratifiedConfig:
        """One of the paper's models (section 4): `SPAFIT-N1-N2-I` or `-II`, with r = 64 and alpha = 128.

        Args:
            name: E.g. `"SPAFIT-4-9-II"`: layers 0 to 4 frozen, 5 to 9 bias terms, from 10 on LoRA on query, key, value
                and the attention's output, with the bias terms of the feed-forward sub-layers.
            **options: Further options of the config. `target_modules` stands for the variant on models whose attention
                modules are not known by name.

        Raises:
            ValueError: The name is not of this form.

        Example:

            >>> config = StratifiedConfig.spafit("SPAFIT-4-9-II", task_type="SEQ_CLS")
            >>> config.n1, config.n2, config.variant, config.r
            (4, 9, 'II', 64)
        """
        match = re.fullmatch(r"SPAFIT-(\d+)-(\d+)-(I|II)", name)
        if not match:
            raise ValueError(
                f"{name!r} is not a SPAFIT model; allowed is SPAFIT-N1-N2-I or -II, e.g. 'SPAFIT-4-9-II'."
            )
        return cls(n1=int(match[1]), n2=int(match[2]), **_with_variant(match[3], options))

    @classmethod
    def full_lora(cls, variant: str, **options: Any) -> StratifiedConfig:
        """The paper's baseline with LoRA in all layers and no bias terms (section 4), with r = 64 and alpha = 128.

        Args:
            variant: `"I"` for query, key and value, `"II"` for the attention's output too.
            **options: Further options of the config.

        Example:

            >>> StratifiedConfig.full_lora("I").strata
            [{'layers': 'all', 'tune': 'lora', 'bias': 'none'}]
        """
        strata = [{"layers": "all", "tune": "lora", "bias": "none"}]
        return cls(strata=strata, **_with_variant(variant, options))

    @classmethod
    def full_bitfit(cls, **options: Any) -> StratifiedConfig:
        """The paper's baseline with bias terms in all layers (section 4).

        Its count of 31.52 M parameters for BERT-large can only be reached with embeddings and pooler trained in full;
        here the bias terms of the layers are trained, and the task's head.

        Args:
            **options: Further options of the config.

        Example:

            >>> StratifiedConfig.full_bitfit().strata
            [{'layers': 'all', 'tune': 'bitfit'}]
        """
        return cls(strata=[{"layers": "all", "tune": "bitfit"}], **options)

    @classmethod
    def by_ranking(
        cls, ranking: Any, *, lora: int = 0, bitfit: int = 0, norm: int = 0, full: int = 0, **options: Any
    ) -> StratifiedConfig:
        """Strata by a ranking: the best layers get the most parameters, the rest stay frozen.

        Args:
            ranking: A `LayerRanking`, or the path or the contents of a saved one.
            lora: How many layers get LoRA: the best ones, after those of `full`.
            bitfit: How many of the next layers get their bias terms trained.
            norm: How many of the next layers get their norms trained.
            full: How many layers are trained in full, the best of all.
            **options: Further options of the config.

        Raises:
            ValueError: The counts are negative, all zero, or more than there are layers.

        Example:

            >>> from peft_surgical import LayerRanking
            >>> ranking = LayerRanking(stack="encoder", scores=[0.1, 0.9, 0.2, 0.5])
            >>> for stratum in StratifiedConfig.by_ranking(ranking, lora=1, bitfit=2).strata["encoder"]:
            ...     print(stratum)
            {'layers': [1], 'tune': 'lora'}
            {'layers': [2, 3], 'tune': 'bitfit'}
            {'layers': [0], 'tune': 'frozen'}
        """
        if not hasattr(ranking, "order"):
            ranking = as_ranking(ranking)
        order = [int(layer) for layer in ranking.order]
        counts = {"full": full, "lora": lora, "bitfit": bitfit, "norm": norm}  # in the order in which they are served
        numbers = counts.values()
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or not any(numbers):
            raise ValueError(f"{counts} must be numbers of layers, 0 or more and not all 0.")
        if sum(numbers) > len(order):
            raise ValueError(f"{counts} asks for more layers than the {len(order)} that were ranked.")
        strata, start = [], 0
        for tune, count in [*counts.items(), ("frozen", len(order) - sum(numbers))]:
            if count:
                strata.append({"layers": sorted(order[start : start + count]), "tune": tune})
            start += count
        stack = getattr(ranking, "stack", None)
        options.setdefault("ranking_record", ranking.to_dict())
        return cls(strata={stack: strata} if stack else strata, **options)


def _with_variant(variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """A preset's options: the paper's r and alpha, and the variant unless `target_modules` stands for it."""
    chosen = {} if options.get("target_modules") is not None else {"variant": variant}
    return {"r": 64, "lora_alpha": 128, **chosen, **options}


def _plain_strata(strata: Any) -> Any:
    if isinstance(strata, Mapping):
        return {stack: _plain_strata(items) for stack, items in strata.items()}
    return [{key: plain_spec(value) if key == "layers" else value for key, value in item.items()} for item in strata]
