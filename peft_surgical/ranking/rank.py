"""Layers ranked for a task by a score, and how sure their order is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm

from peft_surgical.distributed import check_not_prepared, check_same_weights, gather, rank, world_size
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.draw import Draw
from peft_surgical.fisher.model_state import at_rest, same_random_numbers
from peft_surgical.fisher.objective import LossObjective
from peft_surgical.layers import Stack, choose_stack, unwrap
from peft_surgical.ranking.ranking import LayerRanking, estimate_uncertainty, kendall_tau
from peft_surgical.ranking.samples import read_samples, read_trainer
from peft_surgical.ranking.scores import AGGREGATIONS, LayerScores, Score, ScoreRequest, find_score


def rank_layers(
    model: Any,
    data: Any = None,
    *,
    num_samples: int = 100,
    score: str = "fisher",
    labels: str = "given",
    aggregation: str = "frobenius",
    batch_size: int = 16,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    seed: int = 0,
    stack: str | None = None,
    progress: bool = True,
    unit: str = "sequence",
    draws: int = 1,
    log_likelihood: Callable[[Any, Mapping[str, Any]], Tensor] | str | None = None,
    head_inits: int = 0,
    engine: str = "auto",
    ignore_index: int = -100,
    verify: bool = True,
    head_seeds: int | None = None,
) -> LayerRanking:
    """Rank the layers of a model for a task by a score, by default the Fisher information (Lodha et al. 2023, 3.1).

    The model is left as it was in every respect. Of a `PeftModel` the base is ranked.

    Args:
        model: The model, with the task's head; or a trainer (`Trainer`, TRL's, `SentenceTransformerTrainer`), which
            has its own data, collator and loss and is left as it was, too.
        data: A `datasets.Dataset`, a sequence or an iterable of samples, or a `DataLoader`, of batches. A sample is a
            dict of features or a pair (x, y): x is what the model's forward takes first, or a dict, y the labels. Not
            needed for `"last"`, `"first"`, `"alternate"`, `"random"` and `"snr"`. Where the length is known, samples
            are drawn at random.
        num_samples: How many samples are read, at most.
        score: `"fisher"`, `"grad_norm"`, `"rgn"`, `"snr"`, `"last"`, `"first"`, `"alternate"`, `"random"`, or one
            added by `register_score`.
        labels: For the Fisher, y is `"given"` by the data, `"sampled"` from the model (then no labels are needed), or
            averaged over all classes, `"exact"`.
        aggregation: How the diagonal of a layer becomes one number. `"frobenius"`: its norm. `"frobenius_per_tensor"`:
            the sum of the norms of the layer's tensors. `"trace"`: its sum. `"mean"`: its mean.
        batch_size: Samples to a batch. It changes speed and memory, not the scores.
        data_collator: Makes a batch of features, as for `Trainer`. By default features are padded to the longest.
        seed: Seed of the draw, of sampled labels and of the estimates of uncertainty.
        stack: Name of the stack of layers, for models that have several.
        progress: Whether to show a progress bar.
        unit: `"sequence"`: a sample's log-likelihood is the sum over its labelled tokens. `"token"`: each labelled
            token is a sample, with a backward pass for each position. `"batch"`: a whole batch is a sample, of
            `batch_size` rows or as the trainer's or the `DataLoader` makes it; for losses that compare samples.
        draws: Labels drawn for each sample if they are sampled.
        log_likelihood: What to differentiate in place of the task's log p(y|x): `(outputs, batch) -> (N,)`. Or
            `"loss"`: the loss that the trainer or the model computes of a sample by itself. So it is by default where
            a trainer's loss is not log p(y|x), and for a model whose head is of no known task.
        head_inits: Average over so many freshly initialized heads. A head that was not trained makes part of the
            gradient random; the ranking then tells how far the order depends on it. 0 keeps the model's head.
        engine: How the Fisher is computed: as many layers at a time as fit in memory (`"auto"`), all layers in one
            pass over the samples (`"hooks"`), a pass for each layer (`"layer_major"`), or plain autograd for each
            sample (`"loop"`). The scores are the same. A loss is always differentiated by the last.
        ignore_index: The label of tokens without one. What `attention_mask` hides never counts as a label nor as
            context; for data without a mask whose labels hold the padding token, give that token.
        verify: Whether to check one sample, on one module of each kind, against plain autograd on the sample alone.
            What it finds is an error, or a slower way if a sample depends on the others of its batch.
        head_seeds: The former name of `head_inits`.

    Returns:
        The ranking.

    Raises:
        ValueError: An option is unknown; the model has several stacks and none is named; the data lack labels; a
            gradient is not finite, or no layer gets one, as from a loss that compares samples, of one of them.
        TypeError: The data are of another kind.

    Example:

        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> data = [{"input_ids": [2, i, 3], "label": i % 2} for i in range(4, 24)]
        >>> ranking = rank_layers(BertForSequenceClassification(config), data, num_samples=10, progress=False)
        >>> sorted(ranking.order), ranking.record["num_samples"]
        ([0, 1, 2], 10)
    """
    chosen = find_score(score)
    head_inits = head_inits if head_seeds is None else head_seeds
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} is unknown; allowed are {', '.join(map(repr, AGGREGATIONS))}.")
    training = read_trainer(model)
    if training is not None and (data is not None or data_collator is not None):
        raise ValueError("A trainer has its own data and collator. Rank it alone, or trainer.model with other data.")
    model = model if training is None else training.model
    check_not_prepared(model, "rank_layers", but_for="DDP")
    check_same_weights(model)
    base, layers = unwrap(model), choose_stack(model, stack)
    record = _record(base, score, chosen, seed=seed)
    with nullcontext() if training is None else at_rest(training.other_modules()):
        batches: list[Batch] = []
        objective = None
        if chosen.needs_data:
            if data is None and training is None:
                raise ValueError(f"score={score!r} needs data: rank_layers(model, data, ...).")
            if training is not None:
                data, data_collator = training.data(unit == "batch")
            draw = Draw(data, base, num_samples, data_collator, seed, rank(), world_size(), training is not None)
            objective, batches = read_samples(
                base, layers.layers[-1], draw, training, batch_size=batch_size, labels=labels, unit=unit, draws=draws,
                seed=seed, log_likelihood=log_likelihood, ignore_index=ignore_index, verify=verify,
            )  # fmt: skip
            own = "log_likelihood" if log_likelihood is not None else labels
            record |= {"labels": "loss" if isinstance(objective, LossObjective) else own, "aggregation": aggregation}
            record |= {"unit": unit, "draws": draws, "head_seeds": head_inits}
        verify = verify and not isinstance(objective, LossObjective)
        request = ScoreRequest(base, layers.layers, batches, objective, aggregation, seed, engine, verify=verify)
        results = list(_score(request, chosen, head_inits, progress))
    ranking = _make_ranking(layers, results, record, seed)
    return gather(ranking)[0]  # the same on all processes, to the last bit


def _score(request: ScoreRequest, score: Score, head_inits: int, progress: bool) -> Iterator[LayerScores]:
    if head_inits < 0 or (head_inits and not score.needs_data):
        raise ValueError(f"head_inits={head_inits!r}; allowed are integers from 0 on, for scores that look at data.")
    hidden = not progress or rank() > 0
    with tqdm(desc="ranking layers", unit=" samples", disable=hidden, delay=1e-3) as bar:  # none without steps
        request = replace(request, progress=bar)
        if not head_inits:
            yield score.function(request)
        for n in range(head_inits):
            with reinitialized_head(request.model, request.seed + n):
                yield score.function(request)


@contextmanager
def reinitialized_head(model: nn.Module, seed: int) -> Iterator[None]:
    """A context in which the model's head is initialized anew; its parameters are put back afterwards."""
    base: Any = unwrap(model)
    owners: list[Any] = _head_modules(base)
    originals = [(module, dict(module._parameters)) for module in owners]
    try:
        for module in owners:
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        with same_random_numbers(base.parameters(), seed), torch.no_grad():
            for module in owners:
                if hasattr(base, "_init_weights"):
                    base._init_weights(module)
                elif hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        yield
    finally:
        for module, parameters in originals:
            module._parameters.update(parameters)


def _head_modules(model: nn.Module) -> list[nn.Module]:
    """The modules outside the base model of transformers that own parameters which the base does not."""
    base = getattr(model, "base_model", None)
    inside = set(base.modules()) if isinstance(base, nn.Module) and base is not model else set(model.modules())
    shared = {id(p) for p in base.parameters()} if isinstance(base, nn.Module) else set()
    found = [
        module
        for module in model.modules()
        if module not in inside
        and any(p is not None for p in module._parameters.values())
        and not any(id(p) in shared for p in module._parameters.values())
    ]
    if not found:
        raise ValueError(
            f"head_inits initializes the head anew, and {type(model).__name__} has no head with parameters of its "
            "own. Use head_inits=0."
        )
    return found


def _make_ranking(layers: Stack, results: Sequence[LayerScores], record: dict[str, Any], seed: int) -> LayerRanking:
    scores = torch.tensor([r.scores for r in results], dtype=torch.float64).mean(0).tolist()
    first = results[0]
    sure: dict[str, Any] = {}
    if first.contributions is not None and first.counts is not None:
        contributions = torch.stack([r.contributions for r in results if r.contributions is not None]).mean(0)
        by_sample = torch.tensor(first.samples).argsort()  # the same in a distributed run
        sure = estimate_uncertainty(contributions[:, by_sample], first.counts[by_sample], seed)
    taus = [kendall_tau(a.scores, b.scores) for a, b in combinations(results, 2)]
    return LayerRanking(
        stack=layers.name,
        scores=scores,
        head_tau=sum(taus) / len(taus) if taus else None,
        record=record | {"num_samples": len(first.samples)} | first.record,
        **sure,
    )


def _record(model: nn.Module, name: str, score: Score, seed: int) -> dict[str, Any]:
    config = getattr(model, "config", None)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "")
    return {
        "score": name,
        "definition": score.definition,
        "seed": seed,
        "model": {
            "class": type(model).__name__,
            "name": getattr(config, "_name_or_path", "") or "",
            "type": getattr(config, "model_type", ""),
            "dtype": dtype,
        },
        "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
    }
