"""Ways to get the diagonal Fisher of a model's layers other than ours, for `speed.py`, without any of its code.

Each takes a `Case` and returns the diagonal of every parameter of the layers, summed over samples, or None if it
computes no Fisher (the plain forward and backward pass that all others are compared to).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


Diagonal = dict[str, Tensor]


@dataclass
class Case:
    """A model, its data, and the parameters whose Fisher is wanted.

    Args:
        model: The model, in eval mode, on its device.
        layers: Path of the list of layers.
        batches: Samples in the order given, all padded to the same length.
        sorted_batches: The same samples by length, each batch cut to its longest.
        samples: Each sample by itself, not padded.
        causal: Whether the model predicts the next token rather than a class.
    """

    model: nn.Module
    layers: str
    batches: list[dict[str, Tensor]]
    sorted_batches: list[dict[str, Tensor]]
    samples: list[dict[str, Tensor]]
    causal: bool

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if name.startswith(self.layers)}

    def with_model(self, model: nn.Module) -> Case:
        """The same data for another model."""
        device = next(model.parameters()).device
        moved = [[{k: v.to(device) for k, v in b.items()} for b in bs] for bs in self.all_batches]
        return Case(model, self.layers, *moved, self.causal)

    @property
    def all_batches(self) -> list[list[dict[str, Tensor]]]:
        return [self.batches, self.sorted_batches, self.samples]


def log_likelihood(logits: Tensor, batch: dict[str, Tensor], causal: bool) -> Tensor:
    """The log-likelihood of each sample's label, (N,); of a text, the sum over its tokens but the first."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not causal:
        return logits.log_softmax(-1).gather(1, batch["labels"][:, None])[:, 0]
    tokens = batch["input_ids"][:, 1:]
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens.flatten(), reduction="none")
    return -(loss.view_as(tokens) * batch["attention_mask"][:, 1:]).sum(1)


def evaluate(case: Case, batch: dict[str, Tensor]) -> Tensor:
    """Run the model on a batch; returns the sum of the samples' log-likelihoods."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if case.causal:
        inputs["use_cache"] = False
    return log_likelihood(case.model(**inputs).logits, batch, case.causal).sum()


@contextlib.contextmanager
def only_layers_need_gradients(case: Case) -> Iterator[list[nn.Parameter]]:
    """Everything else is frozen meanwhile, and all gradients are dropped at the end."""
    wanted = list(case.parameters.values())
    for p in case.model.parameters():
        p.requires_grad_(False)
    for p in wanted:
        p.requires_grad_(True)
    try:
        yield wanted
    finally:
        for p in case.model.parameters():
            p.grad = None
            p.requires_grad_(False)


def floor_padded(case: Case) -> None:
    """A plain forward and backward pass over batches: what one step of full fine-tuning of the layers would take."""
    with only_layers_need_gradients(case):
        for batch in case.batches:
            evaluate(case, batch).backward()


def floor_sorted(case: Case) -> None:
    """The same over batches of samples of like length."""
    with only_layers_need_gradients(case):
        for batch in case.sorted_batches:
            evaluate(case, batch).backward()


def published_loop(case: Case) -> Diagonal:
    """The published algorithm: one padded sample at a time, no attention mask, the raw logit's gradient squared."""
    diagonal = {name: torch.zeros_like(p) for name, p in case.model.named_parameters()}
    for p in case.model.parameters():
        p.requires_grad_(True)
    for batch in case.batches:
        for ids, label in zip(batch["input_ids"], batch["labels"], strict=True):
            case.model.zero_grad()
            case.model(ids[None]).logits[0, label].backward()
            for name, p in case.model.named_parameters():
                if p.grad is not None:
                    diagonal[name] += p.grad**2
    case.model.zero_grad()
    return {name: diagonal[name] for name in case.parameters}


def naive_loop(case: Case) -> Diagonal:
    """As good as a loop over samples gets: only the layers' gradients, no padding, one call to square and add all."""
    with only_layers_need_gradients(case) as wanted:
        wide = torch.promote_types(wanted[0].dtype, torch.float32)
        total = [torch.zeros_like(p, dtype=wide) for p in wanted]
        for sample in case.samples:
            gradients = [g.to(wide) for g in torch.autograd.grad(evaluate(case, sample), wanted)]
            torch._foreach_addcmul_(total, gradients, gradients)
        return dict(zip(case.parameters, total, strict=True))


def vmap_of_grad(case: Case, chunk: int = 8) -> Diagonal:
    """`torch.func`: the per-sample gradients of a few samples at a time."""
    values = {name: p.detach() for name, p in case.parameters.items()}

    def one(values: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        ids, mask = sample["input_ids"][None], sample["attention_mask"].bool()
        # the mask in the form that the model would make of it, which vmap cannot make
        inputs = {"input_ids": ids, "attention_mask": mask.expand(1, 1, len(mask), len(mask))}
        logits = functional_call(case.model, values, (), inputs).logits
        return log_likelihood(logits, {"labels": sample["labels"][None]}, causal=False).sum()

    per_sample = vmap(grad(one), in_dims=(None, 0))
    diagonal = {n: torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32)) for n, v in values.items()}
    for batch in case.sorted_batches:
        for start in range(0, len(batch["labels"]), chunk):
            gradients = per_sample(values, {k: v[start : start + chunk] for k, v in batch.items()})
            for name, g in gradients.items():
                diagonal[name] += g.to(diagonal[name].dtype).square_().sum(0)
    return diagonal


def opacus(case: Case, chunk: int = 8) -> Diagonal:
    """Per-sample gradients by Opacus. It hooks training mode only, so the model is in it, without dropout."""
    from opacus import GradSampleModule

    model = copy.deepcopy(case.model).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(case.layers))
    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum", strict=False)
    mine = case.with_model(model)
    diagonal = {name: torch.zeros_like(p) for name, p in mine.parameters.items()}
    for batch in case.sorted_batches:
        for start in range(0, len(batch["labels"]), chunk):
            piece = {k: v[start : start + chunk] for k, v in batch.items()}
            inputs = {"input_ids": piece["input_ids"], "attention_mask": piece["attention_mask"]}
            log_likelihood(wrapped(**inputs).logits, piece, case.causal).sum().backward()
            for name, p in mine.parameters.items():
                diagonal[name] += p.grad_sample.square().sum(0)
                p.grad_sample, p.grad = None, None
    return diagonal


def backpack(case: Case, chunk: int = 8) -> Diagonal:
    """Per-sample gradients by BackPACK, which knows `Linear` but no `LayerNorm`: those are left out."""
    from backpack import backpack as context
    from backpack import extend
    from backpack.extensions import BatchGrad

    model = copy.deepcopy(case.model)
    linears = {n: m for n, m in model.named_modules() if n.startswith(case.layers) and isinstance(m, nn.Linear)}
    for p in model.parameters():
        p.requires_grad_(False)
    for module in linears.values():
        module.requires_grad_(True)
        extend(module)
    mine = case.with_model(model)
    wanted = {f"{n}.{k}": p for n, m in linears.items() for k, p in m.named_parameters()}
    diagonal = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for batch in case.sorted_batches:
        for start in range(0, len(batch["labels"]), chunk):
            piece = {k: v[start : start + chunk] for k, v in batch.items()}
            with context(BatchGrad()):
                evaluate(mine, piece).backward()
            for name, p in wanted.items():
                diagonal[name] += p.grad_batch.square().sum(0)
                del p.grad_batch
                p.grad = None
    return diagonal


def layer_scores(case: Case, diagonal: Diagonal) -> list[float]:
    """The norm over all entries of each layer's mean, the layers in order."""
    sums: dict[int, float] = {}
    for name, values in diagonal.items():
        number = int(name[len(case.layers) + 1 :].split(".")[0])
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / len(case.samples)
        sums[number] = sums.get(number, 0.0) + norm**2
    return [sums[number] ** 0.5 for number in sorted(sums)]


Method = Callable[[Case], "Diagonal | list[float] | None"]
