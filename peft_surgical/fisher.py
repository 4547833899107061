"""The diagonal Fisher information of a model's layers (Lodha et al. 2023, section 3.1), at the price of a backward
pass.

For each parameter F = mean_n sum_k (d v_kn / d theta)^2, where the values v_kn of sample n come from an objective
(`log_likelihood.py`). How it is computed:

1. `find_units` (`fisher_units.py`) runs the model on one sample and on two, and finds the modules to listen to.
2. `GradientListener` (`fisher_hooks.py`) hooks them: inputs are kept in the forward pass, gradients at the outputs
   arrive in the backward pass. No gradient of a weight is asked of autograd. A rule for each kind of module
   (`fisher_rules.py`) turns the two into the gradients of single samples (`sample_gradients.py`); modules without a
   rule are computed again for each sample (`fisher_local.py`).
3. The gradients are squared and added to a sum over samples at once (`fisher_kernel.py`, `fisher_sums.py`). Nothing of
   the size of a weight is kept for a sample.
4. A model for whose sums there is no room goes layer by layer (`layer_major.py`).

Batches hold samples of like length (`batches.py`), and rows of tokens without a gradient are skipped, so that padding
costs next to nothing and never changes a sample's contribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from peft_surgical.batches import LABELS, Batch, forward_names, token_lengths
from peft_surgical.fisher_hooks import GradientListener, NotFinite, SamplesInUnequalShares
from peft_surgical.fisher_sums import DiagonalSum, NormSum, TensorFisher
from peft_surgical.fisher_units import CannotTellSamplesApart, Unit, find_units
from peft_surgical.layers import Layer, find_stacks, unwrap
from peft_surgical.log_likelihood import Objective, Rows
from peft_surgical.model_state import untouched


logger = logging.getLogger(__name__)

ENGINES = ("auto", "hooks", "layer_major", "loop")


@dataclass(frozen=True)
class LayerFisher:
    """The diagonal Fisher of one layer.

    Args:
        tensors: That of each of its parameters, by name.
    """

    tensors: dict[str, TensorFisher]


@dataclass(frozen=True)
class FisherMeasurement:
    """The diagonal Fisher of some layers, and the samples it was measured on.

    Args:
        layers: One for each layer.
        samples: The number of each sample in the draw, in the order of `TensorFisher.shares`.
        counts: What each sample added to the divisor, (N,) float64.
        engine: How it was measured.
    """

    layers: list[LayerFisher]
    samples: list[int]
    counts: Tensor
    engine: str


def layer_fisher(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    objective: Objective,
    *,
    diagonal: bool = True,
    engine: str = "auto",
    shares: bool = True,
    seed: int = 0,
    on_batch: Callable[[int], Any] = lambda samples: None,
) -> FisherMeasurement:
    """Measure the diagonal Fisher of layers.

    Args:
        model: The model. Nothing about it is changed, whatever happens.
        layers: The layers, from `resolve_layers`.
        batches: The samples, from `draw_batches`.
        objective: What is differentiated, from `make_objective`.
        diagonal: Whether the norm of the diagonal is wanted. False measures only its trace, which takes no memory of
            the size of the layers.
        engine: `"hooks"`, `"layer_major"` (one layer at a time), `"loop"` (plain autograd, one sample at a time;
            slow), or `"auto"`.
        shares: Whether to estimate what each sample contributes to the norms.
        seed: Seed of that estimate, and of the global random numbers while data are read.
        on_batch: Called with the number of samples after each batch.

    Returns:
        The measurement.

    Raises:
        ValueError: An option is unknown; there are no samples; a value or a gradient is not finite; no layer gets a
            gradient; a parameter has no data.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; allowed are {', '.join(map(repr, ENGINES))}.")
    model = unwrap(model)
    parameters = layer_parameters(layers)
    measure = _LoopMeasure if engine == "loop" else _HookMeasure
    with untouched(model, seed):
        job = measure(model, layers, parameters, objective, diagonal, shares, seed)
        for batch in batches:
            job.add(batch.to(job.device))
            on_batch(len(batch))
        return job.result()


def layer_parameters(layers: Sequence[Layer]) -> list[dict[str, nn.Parameter]]:
    """The base's parameters of each layer, by name. One that several layers share counts for the first of them."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {name: p for name, p in _base_parameters(layer.module) if id(p) not in seen}
        seen |= {id(p) for p in own.values()}
        found.append(own)
    return found


class _Measure:
    """Sums over batches; subclasses say how a batch is added."""

    engine = ""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        parameters: list[dict[str, nn.Parameter]],
        objective: Objective,
        diagonal: bool,
        shares: bool,
        seed: int,
    ):
        self.model, self.layers, self.parameters, self.objective = model, layers, parameters, objective
        self.device = _device(model)
        generator = torch.Generator(self.device).manual_seed(seed) if shares else None
        self.sums = {
            id(p): DiagonalSum(generator) if diagonal else NormSum() for group in parameters for p in group.values()
        }
        self.samples: list[int] = []
        self.counts: list[Tensor] = []
        self.names = forward_names(model)
        self.heard = False

    def forward(self, batch: Batch) -> Any:
        return self.model(**model_inputs(self.model, batch, self.names))

    def rows(self, batch: Batch) -> Rows:
        """Run the model, and what is to be differentiated."""
        rows = self.objective(self.forward(batch), batch)
        bad = ~torch.isfinite(rows.values.detach()).all(0)
        if bad.any():
            sample = batch.index[int(bad.nonzero()[0])]
            raise ValueError(
                f"The log-likelihood of sample {sample} of the draw is not finite. Look at its inputs and labels, or "
                "measure in float32."
            )
        return rows

    def result(self) -> FisherMeasurement:
        if not self.samples:
            raise ValueError(
                "There are no samples: the data are empty, or num_samples is too small for the processes."
            )
        if not self.heard:
            raise ValueError(_NO_GRADIENT)
        counts = torch.cat(self.counts)
        found = []
        for layer, group in zip(self.layers, self.parameters, strict=True):
            tensors = {
                name: self.sums[id(p)].result(p.numel(), float(counts.sum()), len(self.samples))
                for name, p in group.items()
            }
            for name, tensor in tensors.items():
                if not torch.isfinite(torch.tensor(tensor.trace)):
                    raise ValueError(
                        f"The squared gradients of {layer.path}.{name} overflow. Measure in float32, or on other data."
                    )
            found.append(LayerFisher(tensors))
        if not any(t.trace for layer_fisher in found for t in layer_fisher.tensors.values()):
            raise ValueError(_NO_GRADIENT)
        return FisherMeasurement(found, self.samples, counts, self.engine)


_NO_GRADIENT = (
    "No layer gets a gradient: what is differentiated does not depend on the layers. Look for a detach() or a "
    "no_grad() "
    "between them and the outputs."
)


class _HookMeasure(_Measure):
    engine = "hooks"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.units: dict[int, list[Unit]] = {}
        single_stack = len(find_stacks(self.model)) == 1
        encoder_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        self.skips_padding = single_stack and not encoder_decoder and self.device.type != "cpu"

    def add(self, batch: Batch) -> None:
        try:
            self._add(batch)
        except (CannotTellSamplesApart, SamplesInUnequalShares) as error:
            logger.info("Samples cannot be told apart in %s: they are taken one at a time.", error)
            for n in range(len(batch)):
                self._add(batch.select(n, n + 1))

    def _add(self, batch: Batch, checked: bool = False) -> None:
        units = self._units(batch)
        samples = len(batch)
        tokens, lengths = self._lengths(batch)
        with GradientListener(units, self.sums, checked=checked) as listener:
            listener.start(samples, tokens, lengths)
            values, counts = self.rows(batch)
            if not listener.anchors or not values.requires_grad:
                raise ValueError(_NO_GRADIENT)
            for total in self.sums.values():
                total.start(samples)
            for k, row in enumerate(values):
                keep = k + 1 < len(values)
                grads = torch.autograd.grad(row.sum(), listener.anchors, retain_graph=keep, allow_unused=True)
                if not checked and any(g is not None and not torch.isfinite(g).all() for g in grads):
                    self._explain(batch)
                listener.finish()
            self.heard = self.heard or listener.heard
        self.samples += batch.index
        self.counts.append(counts.double().cpu())

    def _units(self, batch: Batch) -> list[Unit]:
        samples = min(len(batch), 2)
        if samples not in self.units:
            parameters = [p for group in self.parameters for p in group.values()]
            modules = [layer.module for layer in self.layers]
            self.units[samples] = find_units(
                self.model, modules, parameters, lambda n: self.forward(batch.select(0, n)), samples
            )
        return self.units[samples]

    def _lengths(self, batch: Batch) -> tuple[int, Tensor | None]:
        lengths = token_lengths(batch) if self.skips_padding else None
        return (0, None) if lengths is None else (batch.inputs["attention_mask"].shape[1], lengths)

    def _explain(self, batch: Batch) -> None:
        try:
            self._add(batch, checked=True)
        except NotFinite as error:
            sample = batch.index[error.sample]
            raise ValueError(
                f"The gradient of sample {sample} of the draw is not finite at the output of {error.module}. Look at "
                "its inputs and labels, or measure in float32."
            ) from None
        raise ValueError("A gradient is not finite. Measure in float32.")


class _LoopMeasure(_Measure):
    """Plain autograd, one sample at a time."""

    engine = "loop"

    def add(self, batch: Batch) -> None:
        from peft_surgical.fisher_kernel import PendingSquares
        from peft_surgical.sample_gradients import DenseGradients

        pending = PendingSquares()
        parameters = [p for group in self.parameters for p in group.values()]
        for n in range(len(batch)):
            sample = batch.select(n, n + 1)
            for p in parameters:
                p.requires_grad_()
            values, counts = self.rows(sample)
            for total in self.sums.values():
                total.start(1)
            for k, row in enumerate(values):
                grads = torch.autograd.grad(row.sum(), parameters, retain_graph=k + 1 < len(values), allow_unused=True)
                for p, g in zip(parameters, grads, strict=True):
                    if g is not None:
                        self.heard = True
                        self.sums[id(p)].add(DenseGradients(g[None]), 0, pending)
                pending.flush()
            self.samples += sample.index
            self.counts.append(counts.double().cpu())


def model_inputs(model: nn.Module, batch: Batch, names: set[str] | None) -> dict[str, Any]:
    """The part of a batch that goes into the model. Labels do not, so that it computes no loss of its own."""
    inputs = {k: v for k, v in batch.inputs.items() if k not in LABELS and (names is None or k in names)}
    labels = batch.inputs.get("labels")
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if (
        prepare
        and labels is not None
        and "decoder_input_ids" not in inputs
        and (names and "decoder_input_ids" in names)
    ):
        inputs["decoder_input_ids"] = prepare(labels=labels)
    return inputs


def _base_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module, without those of adapters."""
    yield from ((prefix + name, p) for name, p in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer):
            child = child.get_base_layer()
        elif isinstance(child, AuxiliaryTrainingWrapper):
            child = child.original_module
        yield from _base_parameters(child, f"{prefix}{name}.")


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
