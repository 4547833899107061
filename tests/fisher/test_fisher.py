"""The engines against the oracle: every family, label mode, aggregation, precision and engine."""

from __future__ import annotations

import fisher_oracle
import pytest
import tiny_models
import torch
from fisher_cases import assert_same_norms, case
from torch import nn

from peft_surgical.fisher import contributions, gradients, listen
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import Layer
from peft_surgical.ranking.scores import AGGREGATIONS, aggregate


STACKS = [(f, None) for f in tiny_models.FAMILIES if f not in tiny_models.SEQ2SEQ]
STACKS += [(f, stack) for f in tiny_models.SEQ2SEQ for stack in ("encoder", "decoder")]
# these compute some steps in float32 even in a float64 model, so that a batch and its samples differ a little
LOOSE = {"mixtral": 1e-5, "gemma3": 1e-6}
FOUR = [("bert", None), ("gpt2", None), ("t5", "encoder"), ("t5", "decoder"), ("vit", None)]


@pytest.fixture(autouse=True)
def t5_computes_in_its_own_precision(monkeypatch):
    """T5's norm takes its variance in float32, also in a float64 model: the rounding would hide an error of 1e-9."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr("transformers.models.t5.modeling_t5.T5LayerNorm.forward", forward)


def measure(c, engine="hooks", **options):
    objective = make_objective(c.model, **{k: options.pop(k) for k in ("labels", "unit", "draws") if k in options})
    return layer_fisher(c.model, c.layers, [c.batch], objective, engine=engine, **options)


@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
@pytest.mark.parametrize(("family", "stack"), STACKS)
def test_every_family_equals_the_oracle(family, stack, engine):
    c = case(family, stack)
    assert_same_norms(measure(c, engine), c.squares(), LOOSE.get(family, 1e-12))


@pytest.mark.parametrize("together", [2000, 2**23])
@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
@pytest.mark.parametrize(("family", "stack"), FOUR)
def test_gradients_that_are_taken_up_together_as_on_a_gpu_are_the_same(family, stack, engine, together, monkeypatch):
    for module in (contributions, listen, gradients):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
    for module in (contributions, listen):
        monkeypatch.setattr(module, "_TOGETHER", together)
    c = case(family, stack)
    assert_same_norms(measure(c, engine), c.squares(), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("family", "stack"), FOUR)
def test_every_aggregation_equals_the_oracle(family, stack, dtype, tolerance):
    c = case(family, stack, dtype=dtype)
    truth = case(family, stack).squares()
    for aggregation in AGGREGATIONS:
        diagonal = aggregation.startswith("frobenius")
        for engine in ("hooks", "layer_major", "loop"):
            scores = aggregate(measure(c, engine, diagonal=diagonal), aggregation).scores
            expected = [fisher_oracle.score(s, aggregation) for s in truth]
            assert scores == pytest.approx(expected, rel=tolerance), (aggregation, engine)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_exact_labels_equal_the_class_weighted_loop(family, classes):
    c = case(family, num_labels=classes)
    for engine in ("hooks", "layer_major"):
        assert_same_norms(measure(c, engine, labels="exact"), c.squares(fisher_oracle.exact), 1e-12)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_exact_labels_equal_the_class_weighted_loop_in_a_classifier_of_a_language_model(family):
    head = {"gpt2": "GPT2ForSequenceClassification", "t5": "T5ForSequenceClassification"}[family]
    options = {"eos_token_id": 1} if family == "t5" else {}
    c = case(family, "decoder" if family == "t5" else None, head=head, num_labels=3, **options)
    if family == "t5":  # it reads its sentence vector at the end token, and has to have one in each sample
        ids = c.batch.inputs["input_ids"].clone()
        ids[torch.arange(len(ids)), c.batch.inputs["attention_mask"].sum(1) - 1] = 1
        c.batch.inputs["input_ids"] = ids
    assert_same_norms(measure(c, labels="exact"), c.squares(fisher_oracle.exact), 1e-12)


def test_exact_labels_take_one_backward_pass_fewer_than_classes():
    c = case("bert", num_labels=3)
    outputs = c.model(**{k: v for k, v in c.batch.inputs.items() if k != "labels"})
    assert make_objective(c.model, labels="exact")(outputs, c.batch).values.shape == (2, len(c.batch))


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(("family", "stack"), FOUR)
def test_sampled_labels_equal_the_oracle_with_the_same_labels(family, stack, draws, monkeypatch):
    from peft_surgical.fisher import tasks

    drawn = []
    original = tasks.Categorical.draw

    def draw(self, uniform):
        drawn.append(original(self, uniform))
        return drawn[-1]

    monkeypatch.setattr(tasks.Categorical, "draw", draw)
    c = case(family, stack)
    found = measure(c, labels="sampled", draws=draws)
    assert len(drawn) == draws
    number = iter(range(len(c.batch)))
    labels = c.batch.inputs["labels"]

    def terms(outputs, sample):
        n = next(number) % len(c.batch)
        log_p = outputs.logits.log_softmax(-1)[0]
        for y in drawn:
            if labels.dim() == 1:
                yield 1 / draws, log_p[y[n, 0]]
            else:
                shift = 1 if family == "gpt2" else 0
                slots = [t for t in range(len(log_p) - shift) if labels[n, t + shift] != -100]
                yield 1 / draws, sum(log_p[t, y[n, t]] for t in slots)

    assert_same_norms(found, c.squares(terms), 1e-12)


def test_tokens_as_samples_equal_their_plain_definition():
    c = case("gpt2")
    squares = c.squares(fisher_oracle.causal_tokens)
    count = int((c.batch.inputs["labels"][:, 1:] != -100).sum())
    for engine in ("hooks", "layer_major"):
        scores = aggregate(measure(c, engine, unit="token"), "frobenius").scores
        assert scores == pytest.approx([fisher_oracle.score(s, "frobenius", count=count) for s in squares], rel=1e-9)


@pytest.mark.parametrize("aggregation", ["frobenius", "trace"])
@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
def test_what_each_sample_contributes_is_the_product_with_the_mean(engine, aggregation):
    c = case("bert", samples=6)
    found = aggregate(measure(c, engine, diagonal=aggregation == "frobenius"), aggregation)
    for squares, by_sample, total in zip(c.squares(), found.contributions, found.scores, strict=True):
        flat = torch.cat([s.flatten(1) for s in squares.values()], 1)
        mean = flat.mean(0)
        exact = flat @ mean / mean.norm() if aggregation == "frobenius" else flat.sum(1)
        assert by_sample.mean() == pytest.approx(total)
        # tiny tensors are kept whole, so that nothing is estimated here
        torch.testing.assert_close(by_sample, exact, rtol=1e-9, atol=0)


def test_a_batch_is_no_average():
    # the gradients of opposite labels nearly cancel in a batch, and must not in the mean of squares
    c = case("bert", samples=2)
    c.batch.inputs["labels"] = torch.tensor([0, 1])
    c.batch.inputs["input_ids"] = c.batch.inputs["input_ids"][:1].expand(2, -1)
    c.batch.inputs["attention_mask"] = torch.ones_like(c.batch.inputs["input_ids"])
    parts = [c.batch.select(0, 1), c.batch.select(1, 2)]
    objective = make_objective(c.model)
    scores = [
        aggregate(layer_fisher(c.model, c.layers, batches, objective, engine="hooks"), "frobenius").scores
        for batches in ([c.batch], parts)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)
    assert scores[0] == pytest.approx([fisher_oracle.score(s, "frobenius") for s in c.squares()], rel=1e-9)


@pytest.mark.parametrize("engine", ["hooks", "layer_major"])
@pytest.mark.parametrize(
    ("family", "side"),
    [("bert", "right"), ("modernbert", "right"), ("gpt2", "right"), ("gpt2", "left"), ("xlnet", "left")],
)
def test_padding_does_not_change_a_samples_contribution(family, side, engine):
    # a model reads its sentence vector at the first token or at the last, which tells on which side it can be padded
    c = case(family, head="GPT2ForSequenceClassification" if family == "gpt2" else None, samples=3)
    ids = c.batch.inputs["input_ids"][:, :5].clamp_min(3)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1])}
    padding = torch.full_like(ids[:, :4], getattr(c.model.config, "pad_token_id", 0) or 0)
    columns = [(ids, torch.ones_like(ids)), (padding, torch.zeros_like(padding))]
    padded_ids, mask = (torch.cat(x, 1) for x in zip(*(columns if side == "right" else columns[::-1]), strict=True))
    padded = whole | {"input_ids": padded_ids, "attention_mask": mask}
    if family == "gpt2":
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    objective = make_objective(c.model)
    scores = [
        aggregate(layer_fisher(c.model, c.layers, [Batch(b, (0, 1, 2))], objective, engine=engine), "frobenius")
        for b in (whole, padded)
    ]
    torch.testing.assert_close(scores[0].contributions, scores[1].contributions, rtol=1e-9, atol=0)


def test_a_parameter_shared_within_a_layer_gets_its_summed_gradient_once():
    c = case("bert")
    for layer in c.layers:
        attention = layer.module.attention.self
        attention.key.weight = attention.query.weight
    found = measure(c)
    assert "attention.self.key.weight" not in found.layers[0]
    assert_same_norms(found, c.squares(), 1e-12)


def test_a_parameter_shared_between_layers_counts_for_the_first():
    c = case("bert")
    first, second = (layer.module.intermediate.dense for layer in c.layers[:2])
    second.weight = first.weight
    for engine in ("hooks", "layer_major"):
        assert_same_norms(measure(c, engine), c.squares(), 1e-12)


def test_a_parameter_shared_with_the_embeddings_gets_both_gradients():
    c = case("gpt2")
    model = c.model
    model.transformer.h[0].mlp.tied = nn.Linear(tiny_models.WIDTH, tiny_models.VOCABULARY, bias=False).double()
    model.transformer.h[0].mlp.tied.weight = model.transformer.wte.weight  # a layer owns the embedding table too
    mlp = model.transformer.h[0].mlp
    plain = type(mlp).forward

    def forward(x):
        return plain(mlp, x) + mlp.tied(x).softmax(-1) @ mlp.tied.weight.detach()

    mlp.forward = forward
    assert_same_norms(measure(c), c.squares(), 1e-12)


def test_one_layer_at_a_time_follows_what_is_computed_between_layers():
    class Glued(nn.Module):
        """Layers with a scaling and a shortcut between them, and an output that reads all of them."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            states = [x]
            for layer in self.layers:
                states.append(layer(2 * states[-1].sin() + states[max(0, len(states) - 2)]))
            return sum(states)

    model = Glued().double()
    batch = Batch({"x": torch.randn(4, 3, dtype=torch.float64), "labels": torch.tensor([0, 1, 2, 1])}, (0, 1, 2, 3))
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    objective = make_objective(model)
    one, other = (
        aggregate(layer_fisher(model, layers, [batch], objective, engine=engine), "frobenius").scores
        for engine in ("layer_major", "loop")
    )
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(("room", "passes"), [(99.0, 1), (3.5, 2), (1.5, 4), (0.0, 4)])
@pytest.mark.parametrize("labels", ["given", "exact"])
def test_auto_takes_as_many_layers_at_a_time_as_fit_with_the_same_scores_to_the_bit(room, passes, labels, monkeypatch):
    c = case("bert", num_labels=3)
    whole = aggregate(measure(c, "hooks", labels=labels), "frobenius")
    one = 8 * sum(p.numel() for p in c.layers[0].module.parameters())
    monkeypatch.setattr("peft_surgical.fisher.measure.free_bytes", lambda device: 2 * room * one)
    found = measure(c, "auto", labels=labels)
    assert (found.engine, found.passes) == ("hooks", passes)
    scores = aggregate(found, "frobenius")
    assert scores.scores == whole.scores
    assert torch.equal(scores.contributions, whole.contributions)
    assert (scores.samples, scores.counts.tolist()) == (whole.samples, whole.counts.tolist())
    assert measure(c, "auto", diagonal=False).passes == 1


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "mixtral", "albert"])
def test_one_layer_at_a_time_gives_the_same_scores_to_the_bit(family):
    c = case(family, dtype=torch.float32)
    whole, single = (aggregate(measure(c, engine), "frobenius") for engine in ("hooks", "layer_major"))
    assert single.record["passes"] == len(c.layers)
    assert single.scores == whole.scores


def test_a_pass_keeps_sums_of_its_own_layers_alone(monkeypatch):
    from peft_surgical.fisher.sums import LayerSums

    c, alive = case("bert"), []
    original = LayerSums.results

    def results(self, count):
        mine = {id(p) for group in self.parameters for p in group.values()}
        alive.append([total.sum is not None for key, total in self.by_id.items() if key in mine])
        assert set(self.by_id) == mine
        return original(self, count)

    monkeypatch.setattr(LayerSums, "results", results)
    measure(c, "layer_major")
    assert len(alive) == len(c.layers)
    assert all(any(group) for group in alive)


def test_layers_that_nothing_depends_on_have_no_score_of_their_own_in_any_engine():
    class Early(nn.Module):
        """Reads what the second of three layers gives."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            states = [x]
            for layer in self.layers:
                states.append(layer(states[-1]).tanh())
            return states[2]

    model = Early().double()
    batch = Batch({"x": torch.randn(4, 3, dtype=torch.float64), "labels": torch.tensor([0, 1, 2, 1])}, (0, 1, 2, 3))
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    scores = [
        aggregate(layer_fisher(model, layers, [batch], make_objective(model), engine=engine), "frobenius").scores
        for engine in ("loop", "hooks", "layer_major")
    ]
    assert scores[0][2] == 0 < min(scores[0][:2])
    assert scores[1] == pytest.approx(scores[0], rel=1e-12)
    assert scores[2] == scores[1]


def test_a_trace_takes_no_memory_of_the_size_of_the_layers(monkeypatch):
    from peft_surgical.fisher.sums import DiagonalSum

    monkeypatch.setattr(DiagonalSum, "add", lambda self, *_: pytest.fail("a sum was allocated"))
    measure(case("bert"), diagonal=False)


def test_experts_in_a_list_get_the_tokens_that_are_routed_to_them():
    class Routed(nn.Module):
        """Two experts; each token goes to one of them, in an order that mixes samples."""

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            flat = self.norm(x).flatten(0, 1)
            choice = flat.argmax(-1) % 3
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                rows = (choice == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(flat[rows]))
            return x + out.view_as(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Routed() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.mean(1)

    model = Model().double()
    batch = Batch({"x": torch.randn(4, 6, 4, dtype=torch.float64), "labels": torch.tensor([0, 1, 2, 1])}, (0, 1, 2, 3))
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    one, other = (
        layer_fisher(model, layers, [batch], make_objective(model), engine=engine) for engine in ("hooks", "loop")
    )
    for a, b in zip(one.layers, other.layers, strict=True):
        assert {k: t.norm for k, t in a.items()} == pytest.approx({k: t.norm for k, t in b.items()}, rel=1e-12)


@pytest.mark.parametrize("samples", [7, 8, 16])
def test_a_dimension_that_happens_to_equal_the_batch_is_not_taken_for_it(samples):
    # T5's position bias is (tokens, tokens, heads): with as many samples as tokens the shapes alone would mislead
    c = case("t5", "encoder", samples=samples)
    assert_same_norms(measure(c), c.squares(), 1e-12)


def test_an_input_that_is_written_to_in_place_is_found_out():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

        def forward(self, x):
            x = x * 1
            for layer in self.layers:
                y = layer(x)
                x.add_(y)
            return x

    model = InPlace()
    batch = Batch({"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 1])}, (0, 1, 2, 3))
    layers = [Layer("layers", i, f"layers.{i}", m) for i, m in enumerate(model.layers)]
    with pytest.raises(RuntimeError, match="written to in place"):
        layer_fisher(model, layers, [batch], make_objective(model), engine="hooks")
