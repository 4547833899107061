"""log p(y|x) of every task, and the rows that stand for its expectation over labels."""

from __future__ import annotations

import math

import fisher_oracle
import pytest
import tiny_models
import torch
from fisher_cases import assert_same_norms
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peft_surgical import rank_layers
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective, uniform_numbers
from peft_surgical.fisher.tasks import Bernoulli, Categorical, Gaussian, class_factors
from peft_surgical.layers import resolve_layers


LENGTH = 7


def text(n: int = 4, **columns) -> dict[str, torch.Tensor]:
    return {k: v for k, v in tiny_models.batch("bert", n, LENGTH).items() if k != "labels"} | columns


def objective_of(model, inputs, **options):
    batch = Batch(inputs, tuple(range(len(inputs["input_ids"]))))
    outputs = model(**{k: v for k, v in inputs.items() if k not in ("labels", "start_positions", "end_positions")})
    return make_objective(model, **options)(outputs, batch)


def transformers_loss(model, inputs, n):
    """What transformers itself computes for one sample, a mean over labels."""
    return float(model(**{k: v[n : n + 1] for k, v in inputs.items()}).loss)


def build(head: str, family: str = "bert", **options) -> nn.Module:
    return tiny_models.build(family, head=head, **options).double()


TASKS = {
    "sequence classification": ("BertForSequenceClassification", {"num_labels": 3}, {"labels": [0, 1, 2, 1]}, 1),
    "multiple choice": ("BertForMultipleChoice", {}, {"labels": [0, 2, 1, 1]}, 1),
    "token classification": ("BertForTokenClassification", {"num_labels": 3}, {"labels": "tokens"}, None),
    "masked language model": ("BertForMaskedLM", {}, {"labels": "tokens"}, None),
    "question answering": (
        "BertForQuestionAnswering",
        {},
        {"start_positions": [0, 1, 2, 1], "end_positions": [1, 1, 3, 2]},
        2,
    ),
    "next sentence": ("BertForNextSentencePrediction", {}, {"labels": [0, 1, 1, 0]}, 1),
    "multi-label": (
        "BertForSequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"labels": [[0.0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]]},
        3,
    ),
}


def task(name: str):
    head, options, columns, slots = TASKS[name]
    model, inputs = build(head, **options), text()
    for column, values in columns.items():
        if values == "tokens":
            high = 3 if "Token" in head else tiny_models.VOCABULARY
            values = torch.randint(high, (4, LENGTH)).where(inputs["attention_mask"].bool(), -100)
            values[:, ::3] = -100
        inputs[column] = torch.as_tensor(values)
    if "MultipleChoice" in head:
        inputs |= {k: torch.stack([inputs[k], inputs[k].flip(0), inputs[k].roll(1, 0)], 1) for k in text()}
    return model, inputs, slots


@pytest.mark.parametrize("name", TASKS)
def test_given_labels_have_the_likelihood_that_transformers_computes(name):
    model, inputs, slots = task(name)
    values, counts = objective_of(model, inputs)
    assert values.shape == (1, 4)
    assert counts.tolist() == [1] * 4
    whole = dict(inputs)
    if "question" in name:
        # transformers does not keep the answer off the padding, so that it is compared without
        whole = {k: v for k, v in inputs.items() if k != "attention_mask"}
        values, _ = objective_of(model, whole)
    for n in range(4):
        labelled = int((inputs["labels"][n] != -100).sum()) if slots is None else slots
        assert float(values[0, n]) == pytest.approx(-transformers_loss(model, whole, n) * labelled, rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
def test_texts_have_the_likelihood_of_all_their_tokens(family):
    model, inputs = tiny_models.build(family).double(), tiny_models.batch(family)
    if family != "gpt2":
        inputs["labels"][1, 3:] = -100
    batch = Batch(inputs, tuple(range(4)))
    from peft_surgical.fisher.batches import forward_names, model_inputs
    from peft_surgical.fisher.engine import Runner

    assert "labels" not in model_inputs(model, batch, forward_names(model))
    objective = make_objective(model)
    values, _ = objective(Runner(model, objective).forward(batch), batch)
    for n in range(4):
        labels = inputs["labels"][n, 1:] if family == "gpt2" else inputs["labels"][n]
        count = int((labels != -100).sum())
        assert float(values[0, n].detach()) == pytest.approx(-transformers_loss(model, inputs, n) * count, rel=1e-5)


def test_regression_is_gaussian_with_variance_one():
    model, inputs = build("BertForSequenceClassification", num_labels=1), text(labels=torch.tensor([0.5, 1, -1, 3]))
    mean = model(**text()).logits[:, 0]
    expected = torch.distributions.Normal(mean, 1).log_prob(inputs["labels"].double())
    torch.testing.assert_close(objective_of(model, inputs).values[0], expected)


def test_an_answer_never_lies_on_padding():
    model, inputs, _ = task("question answering")
    padded = {k: torch.cat([v, v.new_zeros(4, 3)], 1) if v.dim() == 2 else v for k, v in inputs.items()}
    for labels in ("given", "sampled"):
        values = [objective_of(model, x, labels=labels).values for x in (inputs, padded)]
        torch.testing.assert_close(*values)


def test_an_answer_that_was_cut_off_is_ignored_as_in_transformers():
    model, inputs, _ = task("question answering")
    values = objective_of(model, inputs | {"start_positions": torch.tensor([LENGTH + 3, 1, 2, 1])}).values
    assert torch.isfinite(values).all()


# ---- expectations


@settings(max_examples=40, deadline=None)
@given(classes=st.integers(2, 7), scale=st.floats(0, 60))
def test_factors_give_the_covariance_of_a_softmax(classes, scale):
    logits = torch.randn(3, classes, dtype=torch.float64) * scale
    p, f = logits.softmax(-1), class_factors(logits)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(f.transpose(1, 2) @ f, expected, rtol=1e-9, atol=1e-12)


def expectation(log_probs, logits):
    """Sum over outcomes of p (d log p / d logits)^2, by autograd."""
    total = torch.zeros_like(logits)
    for log_p in log_probs:
        (g,) = torch.autograd.grad(log_p.sum(), logits, retain_graph=True)
        p = log_p.detach().exp()
        total += g**2 * p.view(*p.shape, *[1] * (g.dim() - p.dim()))
    return total


def squares_of_rows(rows, logits):
    total = torch.zeros_like(logits)
    for row in rows:
        (g,) = torch.autograd.grad(row.sum(), logits, retain_graph=True)
        total += g**2
    return total


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_exact_rows_are_the_expectation_over_classes(classes):
    logits = torch.randn(4, 1, classes, dtype=torch.float64, requires_grad=True)
    rows = Categorical(logits).exact_rows()
    assert rows.shape == (classes - 1, 4, 1)
    log_p = logits.log_softmax(-1)
    expected = expectation([log_p[..., c] for c in range(classes)], logits)
    torch.testing.assert_close(squares_of_rows(rows, logits), expected)


def test_exact_rows_are_the_expectation_over_yes_and_no():
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    distribution = Bernoulli(logits)
    outcomes = [distribution.log_prob(torch.full((4, 3), float(y))) for y in (0, 1)]
    torch.testing.assert_close(squares_of_rows(distribution.exact_rows(), logits), expectation(outcomes, logits))


def test_exact_rows_are_the_expectation_over_numbers():
    mean = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    # (d log p / d mean)^2 = (y - mean)^2, whose expectation is the variance
    torch.testing.assert_close(squares_of_rows(Gaussian(mean).exact_rows(), mean), torch.ones_like(mean))


@pytest.mark.parametrize(
    "name",
    [
        "sequence classification",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("multiple choice", "token classification", "multi-label")),
    ],
)
def test_many_draws_come_near_the_expectation(name):
    model, inputs, _ = task(name)
    layers = resolve_layers(model, "all")
    batch = Batch(inputs, tuple(range(4)))
    exact, sampled = (
        [sum(t.trace for t in layer.values()) for layer in layer_fisher(model, layers, [batch], o).layers]
        for o in (make_objective(model, labels="exact"), make_objective(model, labels="sampled", draws=120))
    )
    assert sampled == pytest.approx(exact, rel=0.2)


def test_token_labels_are_independent_so_that_exact_rows_are_those_of_each_token():
    model, inputs, _ = task("token classification")

    def terms(outputs, sample):
        log_p = outputs.logits.log_softmax(-1)[0]
        for t in range(LENGTH):
            if sample["labels"][0, t] != -100:
                for c in range(3):
                    yield float(log_p[t, c].detach().exp()), log_p[t, c]

    layers = resolve_layers(model, "all")
    found = layer_fisher(model, layers, [Batch(inputs, tuple(range(4)))], make_objective(model, labels="exact"))
    samples = [{k: v[n : n + 1] for k, v in inputs.items()} for n in range(4)]
    squares = fisher_oracle.sample_squares(model, [layer.module for layer in layers], samples, terms)
    assert_same_norms(found, squares, 1e-9)


# ---- draws


def test_draws_depend_on_the_sample_alone():
    valid = torch.tensor([[True, True, False, True]])
    alone = uniform_numbers(3, [7], 2, valid)
    padded = uniform_numbers(3, [4, 7], 2, torch.tensor([[True] * 6, [False, False, True, True, True, False]]))
    assert torch.equal(alone[:, 0, valid[0]], padded[:, 1, 2:5])
    assert not torch.equal(alone, uniform_numbers(4, [7], 2, valid))
    state = torch.random.get_rng_state()
    uniform_numbers(3, [7], 2, valid)
    assert torch.equal(state, torch.random.get_rng_state())


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.3, -1, 1.5]).log_softmax(-1).expand(20000, 1, 3)
    uniform = torch.rand(20000, 1, dtype=torch.float64)
    drawn = Categorical(logits).draw(uniform)
    frequency = torch.bincount(drawn.flatten(), minlength=3) / 20000
    torch.testing.assert_close(frequency, logits[0, 0].exp(), atol=0.02, rtol=0)
    assert Categorical(logits).draw(torch.ones(20000, 1)).max() == 2
    numbers = Gaussian(torch.full((20000, 1), 5.0)).draw(uniform)
    assert float(numbers.mean()) == pytest.approx(5, abs=0.05)
    assert float(numbers.std()) == pytest.approx(1, abs=0.05)
    yes = Bernoulli(torch.full((20000, 1), 1.0)).draw(uniform)
    assert float(yes.mean()) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


def test_sampled_and_exact_labels_need_none_in_the_data():
    model = tiny_models.build("bert")
    data = [{k: v[0] for k, v in text(1).items()} for _ in range(3)]
    for labels in ("sampled", "exact"):
        assert len(rank_layers(model, data, labels=labels, progress=False).scores) == 4
    with pytest.raises(ValueError, match="labels='given' needs labels"):
        rank_layers(model, data, progress=False)


# ---- refusals


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_exact_labels_of_a_language_model_are_refused_with_advice(family):
    inputs = tiny_models.batch(family)
    data = [{k: v[n] for k, v in inputs.items()} for n in range(4)]
    stack = "decoder" if family == "t5" else None
    with pytest.raises(ValueError, match=r"each word of the vocabulary.*'sampled' with draws="):
        rank_layers(tiny_models.build(family), data, labels="exact", stack=stack, progress=False)


def test_exact_labels_that_take_too_many_passes_are_refused():
    model, inputs = build("BertForSequenceClassification", num_labels=200), text(labels=torch.arange(4))
    with pytest.raises(ValueError, match=r"199 backward passes .* at most 128"):
        objective_of(model, inputs, labels="exact")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "argmax"}, r"'argmax' is unknown; allowed are 'given', 'sampled', 'exact'"),
        ({"unit": "word"}, r"'word' is unknown; allowed are 'sequence', 'token'"),
        ({"draws": 3}, r"draws=3 with labels='given'"),
        ({"draws": 0, "labels": "sampled"}, r"draws=0"),
        ({"log_likelihood": lambda outputs, batch: 0, "labels": "sampled"}, r"have no meaning"),
    ],
)
def test_options_that_are_unknown_or_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_objective(tiny_models.build("bert"), **options)


def test_a_model_without_a_head_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"BertModel has no head .*log_likelihood="):
        make_objective(tiny_models.build("bert", bare=True))


def test_integers_are_asked_for_where_the_labels_are_classes():
    with pytest.raises(ValueError, match="num_labels=1"):
        objective_of(build("BertForSequenceClassification"), text(labels=torch.tensor([0.5, 1.0, 0.0, 1.0])))


# ---- the user's own


def test_a_log_likelihood_of_the_users_own():
    model = tiny_models.build("bert", bare=True).double()
    inputs = text()

    def terms(outputs, sample):
        yield 1.0, outputs.last_hidden_state[0, 0].sum().tanh()

    def log_likelihood(outputs, batch):
        return outputs.last_hidden_state[:, 0].sum(-1).tanh()

    layers = resolve_layers(model, "all")
    batch = Batch(inputs, tuple(range(4)))
    found = layer_fisher(model, layers, [batch], make_objective(model, log_likelihood=log_likelihood))
    samples = [{k: v[n : n + 1] for k, v in inputs.items()} for n in range(4)]
    squares = fisher_oracle.sample_squares(model, [layer.module for layer in layers], samples, terms)
    assert_same_norms(found, squares, 1e-9)
    ranking = rank_layers(
        model,
        [{k: v[0] for k, v in s.items()} for s in samples],
        log_likelihood=log_likelihood,
        progress=False,
    )
    assert ranking.record["labels"] == "log_likelihood"


def test_a_mean_is_not_taken_for_a_log_likelihood_of_each_sample():
    with pytest.raises(ValueError, match=r"one log-likelihood for each, of shape \(3,\)"):
        rank_layers(
            tiny_models.build("bert"),
            [{k: v[0] for k, v in text(1).items()} for _ in range(3)],
            log_likelihood=lambda outputs, batch: outputs.logits.mean(),
            progress=False,
        )


def test_a_model_of_ones_own_that_returns_logits_is_a_classifier():
    model = tiny_models.TwoTowers()
    data = [
        {"pixel_values": torch.randn(3, 16, 16), "input_ids": torch.randint(3, 99, (5,)), "labels": n % 2}
        for n in range(4)
    ]
    for stack in ("vision_tower", "language_model"):
        ranking = rank_layers(model, data, stack=stack, progress=False)
        assert all(score > 0 for score in ranking.scores)
