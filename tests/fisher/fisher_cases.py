"""Tiny models with samples and what to differentiate, for the tests of the Fisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fisher_oracle
import tiny_models
import torch
import transformers
from torch import Tensor, nn

from peft_surgical.fisher.batches import Batch
from peft_surgical.layers import Layer, resolve_layers


# transformers 4 takes T5's softmax in float32, also in a float64 model
T5_ROUNDS_AT = 1e-5 if transformers.__version__.startswith("4.") else 0.0


@dataclass
class Case:
    """A model, a batch and the oracle's way to read the model's outputs."""

    model: nn.Module
    layers: list[Layer]
    batch: Batch
    terms: Callable[[Any, dict[str, Tensor]], fisher_oracle.Terms]
    squares_of: dict[Any, list[dict[str, Tensor]]] = field(default_factory=dict)

    def squares(self, terms: Callable | None = None) -> list[dict[str, Tensor]]:
        """The oracle's squared gradients of each layer."""
        terms = terms or self.terms
        if terms not in self.squares_of:
            modules = [layer.module for layer in self.layers]
            self.squares_of[terms] = fisher_oracle.sample_squares(self.model, modules, self.singles(), terms)
        return self.squares_of[terms]

    def singles(self) -> list[dict[str, Tensor]]:
        """The samples as batches of one without padding, with what the decoder of a seq2seq model reads."""
        inputs = dict(self.batch.inputs)
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare and inputs["labels"].dim() == 2:
            inputs["decoder_input_ids"] = prepare(labels=inputs["labels"])
        return [self._alone({k: v[n : n + 1] for k, v in inputs.items()}) for n in range(len(self.batch))]

    def _alone(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = sample.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return sample
        decoder = ("labels", "decoder_input_ids") if getattr(self.model.config, "is_encoder_decoder", False) else ()
        of_tokens = {k for k, v in sample.items() if v.shape == mask.shape and k not in decoder}
        return {k: v[mask.bool()][None] if k in of_tokens else v for k, v in sample.items()}


def case(
    family: str,
    stack: str | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    samples: int = 4,
    head: str | None = None,
    **options: Any,
) -> Case:
    """A case of a family with its usual task."""
    if family == "mixtral":
        options.setdefault("experts_implementation", "eager")  # the grouped product knows no float64
    model = tiny_models.build(family, head=head, **options).to(dtype)
    inputs = tiny_models.batch(family, samples)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    terms = fisher_oracle.given
    if family in tiny_models.CAUSAL and head is None:
        terms = fisher_oracle.causal
    elif family in tiny_models.SEQ2SEQ and head is None:
        terms = fisher_oracle.tokenwise
    elif family in tiny_models.CAUSAL + tiny_models.SEQ2SEQ:
        inputs["labels"] = torch.arange(samples) % 2
    return Case(model, resolve_layers(model, "all", stack), Batch(inputs, tuple(range(samples))), terms)


def norms(squares: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The norm of each parameter's diagonal."""
    return [{name: float(s.mean(0).double().norm()) for name, s in layer.items()} for layer in squares]


def assert_same_norms(found, squares: list[dict[str, Tensor]], tolerance: float) -> None:
    """Compare a measurement with the oracle, parameter by parameter, relative to the layer's norm."""
    for tensors, expected in zip(found.layers, norms(squares), strict=True):
        scale = sum(v**2 for v in expected.values()) ** 0.5
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            rounded = name.startswith("layer.") and T5_ROUNDS_AT
            if name.endswith("norm.weight"):  # a root mean square norm takes float32, also in a float64 model
                rounded = 1e-6
            allowed = max(tolerance, rounded)
            assert abs(tensor.norm - expected[name]) <= allowed * scale, name
