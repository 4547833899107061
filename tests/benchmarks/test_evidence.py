"""The evidence benchmarks on a tiny random model and made-up tasks: the parts against oracles, and the whole."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import re
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy import stats
from tiny_models import build
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from benchmarks.evidence import (
    cell_tables,
    cells,
    criteria,
    decoders,
    findings,
    jobs,
    layer_tables,
    methods,
    models,
    plans,
    plots,
    probes,
    prompts,
    records,
    run,
    scheduler,
    size_tables,
    tables,
    tangent_kernels,
    tasks,
    training,
    warm_start,
)
from benchmarks.evidence.turns import make_trainee
from peft_surgical.ranking.rank import rank_layers


WORDS = [f"w{i}" for i in range(90)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special)


def texts(n: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(n)]


def write_task(folder: Path, columns: dict, rows: int) -> None:
    folder.mkdir(parents=True)
    for split, n in (("train", rows), ("validation", rows // 2)):
        made = {name: make(n) for name, make in columns.items()}
        pd.DataFrame({**made, "idx": range(n)}).to_parquet(folder / f"{split}.parquet")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny model and three tasks."""
    root = tmp_path_factory.mktemp("place")
    build("mpnet", num_hidden_layers=6, max_position_embeddings=256).save_pretrained(root / "tiny")
    make_tokenizer().save_pretrained(root / "tiny")
    single = {"sentence": lambda n: texts(n, n), "label": lambda n: [i % 2 for i in range(n)]}
    write_task(root / "data/glue/cola", single, 40)
    pair = {f"sentence{i}": lambda n, i=i: texts(n, n + i) for i in (1, 2)}
    write_task(root / "data/glue/rte", {**pair, "label": single["label"]}, 40)
    choices = {name: lambda n, i=i: texts(n, n + i) for i, name in enumerate(("premise", "choice1", "choice2"))}
    choices |= {
        "question": lambda n: ["cause", "effect"] * (n // 2),
        "label": lambda n: [i // 2 % 2 for i in range(n)],
    }
    write_task(root / "data/superglue/copa", choices, 40)
    return root


@pytest.fixture
def one_thread():
    """Several threads add up in another order, and AdamW scales up such rounding where a gradient is near 0."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(place: Path, command: str, *options: str) -> None:
    common = ["--model", str(place / "tiny"), "--data", str(place / "data"), "--cache", str(place / "cache")]
    common += ["--results", str(place / "results"), "--tasks", "cola", "copa", "--processes", "0"]
    run.main([command, *common, *options])


def loaded(place: Path, task: str) -> tuple:
    rows = tasks.load(task, make_tokenizer(), place / "data")
    made = tasks.TASKS[task]
    return rows, models.load(str(place / "tiny"), made.outputs, choices=made.choices)


# ---- tasks


def test_a_tenth_of_each_class_is_held_out_the_same_every_time(place):
    train = pd.DataFrame({"label": [0] * 70 + [1] * 30})
    kept, held_out = tasks._cut(tasks.TASKS["cola"], train)
    assert sorted([*kept, *held_out]) == list(range(100))
    assert train["label"].iloc[held_out].value_counts().to_dict() == {0: 7, 1: 3}
    assert [a.tolist() for a in tasks._cut(tasks.TASKS["cola"], train)] == [kept.tolist(), held_out.tolist()]


def test_sentences_of_one_schema_stay_on_one_side():
    said = [f"{n} is what {n}a {n}b {n}c {n}d {n}e and {word}" for n in WORDS for word in ("w", "w", "v", "u")]
    train = pd.DataFrame({"sentence1": said, "label": 0})
    kept, held_out = tasks._cut(tasks.TASKS["wnli"], train)
    sides = [{text.split()[0] for text in train["sentence1"].iloc[side]} for side in (kept, held_out)]
    assert not sides[0] & sides[1]
    assert len(held_out) == len(said) // 10


def test_rows_of_one_paragraph_stay_on_one_side():
    train = pd.DataFrame({"paragraph": [f"p{i // 5}" for i in range(100)], "label": 0})
    kept, held_out = tasks._cut(tasks.TASKS["multirc"], train)
    sides = [set(train["paragraph"].iloc[side]) for side in (kept, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 2


def test_large_tasks_are_cut():
    kept, held_out = tasks._cut(replace(tasks.TASKS["sst2"], rows=50), pd.DataFrame({"label": [0, 1] * 100}))
    assert (len(kept), len(held_out)) == (45, 5)


def test_spans_are_marked():
    wic = pd.DataFrame({"sentence1": ["a place ."], "sentence2": ["placed"], "start1": [2], "end1": [7]})
    assert tasks._wic(wic.assign(start2=0, end2=6)) == (['a "place" .'], ['"placed"'])
    wsc = pd.DataFrame(
        {"text": ["Mark lied. He did"], "span2_index": [2], "span2_text": ["He"], "span1_text": ["Mark"]}
    )
    assert tasks._wsc(wsc) == (['Mark lied. "He" did'], ["Mark"])


def test_both_choices_are_encoded_with_the_premise(place):
    rows = loaded(place, "copa")[0].train
    frame = pd.read_parquet(place / "data/superglue/copa/train.parquet")
    tokenizer = make_tokenizer()
    kept, _ = tasks._cut(tasks.TASKS["copa"], frame)
    row = frame.iloc[kept[3]]
    expected = tokenizer(f"{row['premise']} {tasks.CHOICE_QUESTIONS[row['question']]}", row["choice2"])["input_ids"]
    assert rows.inputs["input_ids"][3, 1, : len(expected)].tolist() == expected
    assert rows.features()[3]["input_ids"].shape == (2, int(rows.lengths[3]))


def test_metrics():
    labels = torch.tensor([1, 1, 0, 0])
    rows = tasks.Rows({}, torch.zeros(4), labels, torch.tensor([0, 0, 1, 1]))
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    found = tasks.score(tasks.TASKS["multirc"], logits, rows)
    assert found == pytest.approx({"accuracy": 0.75, "f1": 2 / 3, "matthews": 3**-0.5, "exact_match": 0.5})
    amounts = tasks.Rows({}, torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.arange(4))
    assert tasks.score(tasks.TASKS["stsb"], labels[:, None].float(), amounts)["spearman"] == pytest.approx(-(0.8**0.5))


# ---- training


def test_batches_hold_every_row_in_like_lengths():
    lengths = torch.arange(1, 101) % 37 + 1
    allowed = [8, 16, 32, 40]
    batches = list(training.draw_batches(lengths, 16, allowed, torch.Generator().manual_seed(0)))
    rows = torch.cat([index for index, _ in batches])
    assert len(rows) == 112
    assert set(rows.tolist()) == set(range(100))
    assert all(int(lengths[index].max()) <= length for index, length in batches)
    assert len({length for _, length in batches}) > 2


def test_the_learning_rate_rises_and_falls():
    shares = [training.schedule(step, 100) for step in range(1, 101)]
    assert shares[5] == 1.0
    assert shares[0] == pytest.approx(1 / 6)
    assert shares[-1] == pytest.approx(1 / 95)
    assert shares[6:] == sorted(shares[6:], reverse=True)


def test_models_in_step_train_as_each_alone(place):
    rows, model = loaded(place, "cola")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def trained(names: list[str]) -> list[list[torch.Tensor]]:
        group = [training.Trainee(methods.adapt(copy.deepcopy(model), name), 1e-3) for name in names]
        for _ in training.train(group, rows.train, batch=16, epochs=2, seed=3):
            pass
        return [trainee.parameters for trainee in group]

    together = trained(["layers-1.2", "head"])
    for name, parameters in zip(["layers-1.2", "head"], together, strict=True):
        for a, b in zip(parameters, trained([name])[0], strict=True):
            assert torch.equal(a, b)


def test_a_step_is_adamw_on_the_mean_loss_with_clipping(place, one_thread):
    rows, model = loaded(place, "cola")
    model.eval()
    plain = copy.deepcopy(model)
    trainee = training.Trainee(model.requires_grad_(True), 1e-2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=5e-3, weight_decay=0.01)
    index = torch.arange(8)
    inputs = training.cut(rows.train, index, 16)
    for _ in range(3):
        trainee.set_rate(0.5)
        trainee.step(inputs, rows.train.labels[index])
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(**inputs, labels=rows.train.labels[index]).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)


def test_the_best_epoch_comes_back_and_training_stops_after_it(place):
    rows, model = loaded(place, "cola")
    trainee = training.Trainee(methods.adapt(model, "head"), 1e-3)
    task = tasks.TASKS["cola"]
    scripted = iter([0.1, 0.5, 0.3, 0.2, 0.4, 0.9])
    weights = []

    def observe(task, rows, steps):
        value = next(scripted)
        trainee.history.append({})
        weights.append([p.detach().clone() for p in trainee.parameters])
        if trainee.best is None or value > trainee.best.rank[0]:
            trainee.best = training.Best((value, 0.0), len(trainee.history), weights[-1])

    trainee.observe = observe
    training.fit([trainee], task, rows.train, rows.held_out, seed=0)
    assert len(weights) == 5
    assert all(torch.equal(a, b) for a, b in zip(trainee.parameters, weights[1], strict=True))


def test_predictions_do_not_depend_on_padding_or_order(place):
    rows, model = loaded(place, "cola")
    some = rows.train.take(torch.tensor([5, 3, 9]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        alone = [model.eval()(**training.cut(some, torch.tensor([i]), int(some.lengths[i]))).logits for i in range(3)]
    torch.testing.assert_close(training.predict(model, some), torch.cat(alone).float(), atol=2e-2, rtol=0)


class Recorded(TorchDispatchMode):
    """Notes the operations that wait for the GPU or copy from the CPU, which a CUDA graph may not hold."""

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any(name in str(function) for name in ("lift_fresh", "local_scalar", "nonzero", "is_pinned")):
            self.waits.append(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="the benchmarks' workaround is for the masks of transformers 5"
)
@pytest.mark.parametrize("tuning", ["full", "layers-0.4", "lora-II", "spafit-2-4-II"])
@pytest.mark.parametrize("task", ["cola", "copa"])
def test_a_step_can_become_a_cuda_graph(place, task, tuning, monkeypatch):
    rows, model = loaded(place, task)
    trainee = training.Trainee(methods.adapt(model, tuning), 1e-3)
    index = torch.arange(4)
    inputs, labels = training.cut(rows.train, index, 16), rows.train.labels[index]
    trainee.step(inputs, labels)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    with Recorded() as recorded:
        trainee.step(inputs, labels)
    assert recorded.waits == []
    with Recorded() as recorded:
        float(torch.tensor(1.0))
    assert len(recorded.waits) == 2


def test_mpnet_computes_as_transformers_has_it(place):
    rows, model = loaded(place, "cola")
    with torch.no_grad():
        model.mpnet.encoder.relative_attention_bias.weight.normal_()
    plain = type(model).from_pretrained(place / "tiny").eval()
    plain.load_state_dict(model.state_dict())
    inputs = training.cut(rows.train, torch.arange(6), 16)
    assert (inputs["attention_mask"] == 0).any()
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        model.mpnet.encoder.relative_attention_bias.weight.zero_()  # a copy does not compute with the original's
    torch.testing.assert_close(copied(**inputs).logits, plain(**inputs).logits, rtol=0, atol=1e-6)
    copied(**inputs).logits.sum().backward()
    plain(**inputs).logits.sum().backward()
    for a, b in zip(copied.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_frozen_weights_in_half_precision_change_nothing(place):
    rows, model = loaded(place, "cola")
    inputs = training.cut(rows.train, torch.arange(6), 16)
    for tuning in ("layers-3.4", "spafit-2-3-I"):
        adapted = methods.adapt(copy.deepcopy(model), tuning).eval()
        before = training.logits_of(adapted, inputs)
        halved = training.halve_frozen(copy.deepcopy(adapted))
        assert any(p.dtype == torch.bfloat16 for p in halved.parameters())
        assert all(p.dtype == torch.float32 for p in halved.parameters() if p.requires_grad)
        assert torch.equal(training.logits_of(halved, inputs), before)


# ---- methods


def test_plans_become_layers():
    orders = {"fisher": [5, 3, 4, 1, 0, 2]}
    assert methods.resolve("fisher:3", orders) == "layers-3.4.5"
    assert methods.resolve("fisher:-2", orders) == "layers-0.2"
    assert methods.resolve("strata-II-lora:2-bitfit:1/fisher", orders) == "strata-II-lora.3.5-bitfit.4"
    assert methods.resolve("lora-II", orders) == "lora-II"
    every_other = cells.fixed_orders(6)
    assert methods.resolve("bf16-stochastic:3", every_other) == "layers-1.3.5-bf16-stochastic"
    assert methods.family("layers-1.3.5-bf16") == "layers"
    assert cells.cell_names(["bf16", "bf16-stochastic"], [3]) == ["bf16:3", "bf16-stochastic:3"]


STRATA = "strata-II-lora.1.2-bitfit.5"


def test_layers_can_take_turns(place):
    rows, model = loaded(place, "cola")
    before, name = copy.deepcopy(model).state_dict(), "turns-1-3-ascending"
    trainee = make_trainee(methods.adapt(model, name), 1e-3, name, seed=0)
    (steps,) = training.train([trainee], rows.train, batch=-(-len(rows.train) // 7), epochs=1, seed=0)
    assert 3 < steps < 10
    trainee.best = training.Best((1.0, 0.0), 1, [p.detach().clone() for p in trainee.parameters])
    trainee.restore()
    assert all(p.requires_grad for p in trainee.parameters)
    after = trainee.model.merge_and_unload().state_dict()
    moved = [name for name in before if ".layer." in name and not torch.equal(before[name], after[name])]
    assert {name.split(".layer.")[1][0] for name in moved} == {str(turn) for turn in range(-(-steps // 3))}


def test_small_steps_in_bfloat16_are_lost_by_rounding_to_the_nearest_alone(place):
    rows, model = loaded(place, "cola")
    moved = {}
    for name in ("layers-1.3", "layers-1.3-bf16", "layers-1.3-bf16-stochastic"):
        trainee = make_trainee(methods.adapt(copy.deepcopy(model), name), 1e-6, name, seed=0)
        before = [p.detach().clone() for p in trainee.parameters]
        for _ in training.train([trainee], rows.train, batch=4, epochs=1, seed=0):
            pass
        pairs = zip(trainee.parameters, before, strict=True)
        moved[name] = sum(bool((now != old).any()) for now, old in pairs if now.ndim > 1)
        assert {p.dtype for p in trainee.parameters} == {torch.bfloat16 if "bf16" in name else torch.float32}
    assert moved["layers-1.3-bf16"] < moved["layers-1.3-bf16-stochastic"] <= moved["layers-1.3"]


@pytest.mark.parametrize(
    "tuning",
    [
        "full",
        "head",
        "layers-0.4",
        "layers-0.4-bf16",
        "layers-0.4-bf16-stochastic",
        "turns-2-50-random",
        "lora-I",
        "lora-16",
        "columns-2",
        "bitfit",
        "attention",
        "mlp",
        "spafit-2-4-I",
        STRATA,
    ],
)
def test_every_method_trains_what_it_says(place, tuning):
    _, model = loaded(place, "cola")
    head = sum(p.numel() for p in model.classifier.parameters())
    ready = methods.adapt(model, tuning)
    trained = {name for name, p in ready.named_parameters() if p.requires_grad}
    layers = {int(name.split(".layer.")[1].split(".")[0]) for name in trained if ".layer." in name}
    expected = {
        "head": set(),
        **dict.fromkeys(("layers-0.4", "layers-0.4-bf16", "layers-0.4-bf16-stochastic"), {0, 4}),
        "spafit-2-4-I": {3, 4, 5},
        STRATA: {1, 2, 5},
    }
    assert layers == expected.get(tuning, set(range(6)))
    size = methods.size(ready)
    if tuning != "columns-2":  # whose file is encoded
        assert size["delta_bytes"] == (2 if "bf16" in tuning else 4) * size["trained_parameters"]
    assert size["head_parameters"] == head


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "roberta", "gemma3"])
def test_attention_and_mlp_are_the_linear_maps_of_the_layers(architecture):
    model, parts = build(architecture), {}
    for tuning in ("attention", "mlp"):
        methods.adapt(model, tuning)
        parts[tuning] = {n for n, p in model.named_parameters() if p.requires_grad and re.search(r"layers?\.\d", n)}
    maps = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and re.search(r"layers?\.\d", n)}
    assert not parts["attention"] & parts["mlp"]
    assert {n.rsplit(".", 1)[0] for part in parts.values() for n in part if "_norm" not in n} == maps


def test_the_smallest_rate_within_a_standard_error_of_the_best_is_chosen():
    far, near, best = [0.50, 0.60, 0.55], [0.71, 0.85, 0.60], [0.67, 0.87, 0.63]
    behind = [b - n for b, n in zip(best, near, strict=True)]
    mean = sum(behind) / 3
    error = (sum((x - mean) ** 2 for x in behind) / 2 / 3) ** 0.5
    assert 0 < mean < error  # by the definition of the rule
    assert plans.choose({3e-4: best, 1e-4: near, 1e-5: far}) == 1e-4
    assert plans.choose({1e-4: best, 3e-4: near}) == 1e-4
    assert plans.choose({1e-4: [0.70, 0.84, 0.60], 3e-4: [0.71, 0.85, 0.61]}) == 3e-4


@pytest.mark.parametrize("depth", [6, 12])
def test_plans_fit_the_depth(depth):
    orders = {score: list(range(depth)) for score in plans.all_scores()}
    named = [methods.resolve(plan, orders) for question in "16853" for plan in plans.plans(question, depth)]
    named += [methods.resolve(plan, orders) for plan in methods.representatives(depth).values()]
    numbers = [int(n) for name in named if not name.startswith("lora") for n in re.findall(r"\d+", name)]
    assert max(numbers) == depth - 1
    assert ("spafit-4-8-II" in named, "spafit-1-2-II" in named) == (depth == 12, depth == 6)


# ---- criteria


def test_leave_one_out_is_what_refitting_gives(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    kernel = features @ features.T
    monkeypatch.setattr(tangent_kernels, "RIDGES", torch.tensor([0.3], dtype=torch.float64))
    centred = features - features.mean(0)
    ridge = 0.3 * float(torch.linalg.eigvalsh(centred @ centred.T).mean())
    with_one = torch.cat([features, torch.ones(12, 1, dtype=torch.float64)], 1)
    penalty = ridge * torch.eye(6, dtype=torch.float64)
    penalty[5, 5] = 0  # the constant is free; centring all the data is the same
    errors = []
    for i in range(12):
        rest = [j for j in range(12) if j != i]
        a, y = with_one[rest], targets[rest]
        weights = torch.linalg.solve(a.T @ a + penalty, a.T @ y)
        errors.append((with_one[i] @ weights - targets[i]).square().mean())
    expected = float(torch.stack(errors).mean()) / float((targets - targets.mean(0)).square().mean())
    assert tangent_kernels.leave_one_out(kernel, targets) == pytest.approx(expected, rel=1e-6)


def test_sketched_gradients_are_exact_where_matrices_are_small(place):
    rows, model = loaded(place, "cola")
    model.eval()
    modules = [m for m in model.mpnet.encoder.layer[2].modules() if isinstance(m, nn.Linear)]
    some = rows.train.take(torch.arange(5))
    sketches = tangent_kernels.sketched_gradients(model, modules, some, seed=0)
    for module in modules:
        expected = []
        for i in range(5):
            logits = model(**training.cut(some, torch.tensor([i]), int(some.lengths[i]))).logits[0]
            expected.append(torch.autograd.grad(logits[1] - logits[0], module.weight)[0].flatten())
        torch.testing.assert_close(sketches[module][0], torch.stack(expected), rtol=1e-3, atol=1e-6)


def test_moments_give_the_librarys_fisher(place, monkeypatch):
    rows, model = loaded(place, "cola")
    monkeypatch.setattr(criteria, "warm_head", lambda model, rows, seed: copy.deepcopy(model))
    options = {"num_samples": 20, "progress": False}
    ours = rank_layers(model, rows.train.features(), score="fisher_warm", **options).scores
    theirs = rank_layers(model, rows.train.features(), score="fisher", **options).scores
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours != pytest.approx(rank_layers(model, rows.train.features(), score="fisher_relative", **options).scores)


@pytest.mark.parametrize("score", criteria.CRITERIA)
def test_a_criterion_leaves_the_model_alone_and_orders_all_layers(place, score, monkeypatch):
    monkeypatch.setattr(warm_start, "HEAD_STEPS", 2)
    monkeypatch.setattr(probes, "PROBE_STEPS", 2)
    rows, model = loaded(place, "copa")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = rank_layers(model, rows.train.features(), score=score, num_samples=24, progress=False)
    assert sorted(found.order) == list(range(6))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# ---- findings


def test_intervals_are_students_over_tasks_and_welchs_over_seeds():
    values = [[1.0, 2.5, 0.5], [-3.0, -1.0], [4.0, 9.0, 5.0, 6.5]]
    found = findings.Difference(values)
    means = [np.mean(seeds) for seeds in values]
    over_tasks = stats.ttest_1samp(means, 0).confidence_interval()
    assert (found.mean - found.over_tasks, found.mean + found.over_tasks) == pytest.approx(tuple(over_tasks))
    assert (found.better, found.worse) == (2, 1)
    a, b = values[0], values[2]
    over_seeds = stats.ttest_ind(a, [-x for x in b], equal_var=False).confidence_interval()  # of the sum of two means
    two = findings.Difference([a, b])
    assert (two.mean - two.over_seeds, two.mean + two.over_seeds) == pytest.approx([x / 2 for x in over_seeds])
    assert np.isnan(findings.Difference([[1.0], [2.0, 3.0]]).over_seeds)
    assert np.isnan(findings.Difference([[], [2.0, 3.0]]).mean)


def test_a_tie_is_a_tie():
    found = findings.Difference([[0.1, 0.2, -0.3], [1.0], [-1.0, -2.0]])
    assert float(np.mean(found.values[0])) != 0.0  # the sum is rounded
    assert (found.better, found.worse) == (1, 1)


def test_effects_are_what_dummies_for_tasks_and_seeds_give():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"task": ["a", "b", "c"] * 20, "seed": [0] * 30 + [1] * 30, "pairs": rng.integers(0, 4, 60)})
    frame[3] = rng.integers(0, 2, 60).astype(float)
    frame["value"] = (
        2.0 * frame["pairs"] - frame[3] + rng.normal(size=60) + frame["task"].map({"a": 5, "b": 0, "c": 9})
    )
    found, drawn = layer_tables._effects(frame, ["a", "b", "c"], ["pairs", 3])
    dummies = pd.get_dummies(frame["task"] + frame["seed"].astype(str)).to_numpy(float)
    full = np.hstack([frame[["pairs", 3]].to_numpy(float), dummies])
    assert found == pytest.approx(np.linalg.lstsq(full, frame["value"].to_numpy(), rcond=None)[0][:2])
    assert drawn.shape == (1000, 2)
    alone = [layer_tables._effects(frame, [task], ["pairs", 3])[0] for task in "abc"]
    assert all(np.abs(drawn - one).sum(1).min() < 1e-9 for one in alone)  # a draw may name one task three times


def test_a_trial_keeps_what_is_best_on_held_out_rows(tmp_path):
    orders = {"alternate": [1, 3, 0, 2], "middle": [2, 1, 0, 3], "last": [3, 2, 1, 0]}
    for score, order in orders.items():
        ranking = {"task": "rte", "seed": 0, "score": score, "order": order, "scores": [0.0] * 4}
        records.append(tmp_path / "rankings.jsonl", ranking)
    records.write(tmp_path / "rates.json", {"chosen": {"layers": 1e-4}, "held_out": {}})
    for layer, held_out, loss, validation in ((1, 0.8, 0.6, 0.5), (2, 0.8, 0.5, 0.4), (3, 0.7, 0.1, 0.9)):
        run_of_layer = {"task": "rte", "tuning": f"layers-{layer}", "seed": 0, "rate": 1e-4, "metric": "accuracy"}
        measured = {"held_out": {"accuracy": held_out, "loss": loss}, "validation": {"accuracy": validation}}
        records.append(tmp_path / "runs/rte.jsonl", run_of_layer | measured)
    results = findings.Results(tmp_path)
    assert results.k == 1
    assert results.mean("trial", "rte") == 0.4


def test_times_are_compared_with_full_tuning_of_the_same_run(tmp_path):
    for slow, tunings in ((1.0, ("full", "lora-16", "layers-3")), (2.0, ("full", "layers-3"))):  # a slower device
        seconds = {name: slow * (0.02 if name == "full" else 0.01) for name in tunings}
        same = {"peak_bytes": None, "trained_parameters": 1, "delta_bytes": 4}
        timed = {name: {"step_seconds": s, "graph_seconds": s} | same for name, s in seconds.items()}
        records.append(tmp_path / "cost.jsonl", {"methods": timed})
    rows = [row.split("|")[1:7] for row in size_tables.costs(findings.Results(tmp_path)).splitlines()[2:]]
    found = {row[0].strip(): tuple(map(float, row[4:6])) for row in rows}
    assert found == {"full": (40.0, 1.0), "lora-16": (10.0, 0.5), "layers-3": (20.0, 0.5)}
    assert size_tables.costs(findings.Results(tmp_path / "nothing")) == ""


# ---- the whole


def test_learning_rates_are_tried_with_nothing_in_the_cache(place, tmp_path, monkeypatch):  # whatever the tasks
    for module in (plans, run):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola",))
    begun: list[jobs.Job] = []
    monkeypatch.setattr(scheduler.Pool, "do", lambda self, some: begun.extend(some))
    call(place, "rates", "--tasks", "copa", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "results"))
    tried = {(method, rate) for job in begun for method, rate in zip(job.items, job.rates, strict=True)}
    assert {job.task for job in begun} == {"cola"}
    assert len(tried) == sum(len(methods.RATES[family]) for family in methods.representatives(6))


def best_at(rate: float):
    """What stands for training: the held-out metric falls with the distance from a rate."""

    def train(place: jobs.Place, job: jobs.Job) -> None:
        for tuning, tried in zip(job.items, job.rates, strict=True):
            held_out = {"accuracy": -abs(np.log(tried / rate)), "loss": 0.0}
            record = {"task": job.task, "tuning": tuning, "rate": tried, "seed": job.seed, "metric": "accuracy"}
            records.append(place.runs_file(job.task), record | {"held_out": held_out})

    return train


@pytest.mark.parametrize("best", [5e-5, 1e-4, 1e-3, 1e-5])
def test_the_rate_of_a_cell_has_a_worse_one_on_either_side(place, tmp_path, monkeypatch, best):
    for module in (cells, run):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola", "rte"))
    monkeypatch.setitem(jobs.JOBS, "train", best_at(best))
    called = ("cells", "--methods", "last", "spread", "full", "--k", "2", "--results", str(tmp_path))
    call(place, *called, "--seeds", "0", "1")
    for tuning in ("layers-4.5", "layers-1.4", "full"):
        runs = [r for r in records.read(tmp_path / "runs/cola.jsonl") if r["tuning"] == tuning]
        tried = {r["rate"] for r in runs if r["seed"] == 0}
        assert min(tried) < best < max(tried)
        other = [r["rate"] for name in ("cola", "copa") for r in records.read(tmp_path / f"runs/{name}.jsonl")
                 if (r["tuning"], r["seed"]) == (tuning, 1)]  # fmt: skip
        assert other == [best, best]
        assert [r["rate"] for r in records.read(tmp_path / "runs/copa.jsonl") if r["tuning"] == tuning] == [best, best]
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")}
    call(place, *called, "--seeds", "0", "1")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")} == before


def test_the_table_of_cells_pairs_each_with_full_tuning(tmp_path, monkeypatch):
    for module in (cells, cell_tables):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola", "rte"))
    for task, ahead in (("cola", 0.02), ("rte", -0.05)):
        for tuning, more in (("full", 0.0), ("layers-15.16.17", ahead)):
            for rate in (2e-5, 5e-5, 1e-4, 2e-4):
                held_out = {"accuracy": 0.9 - abs(np.log(rate / 5e-5)), "loss": 0.0}
                same = {"task": task, "seed": 0, "metric": "accuracy", "held_out": held_out}
                own = {"tuning": tuning, "rate": rate, "validation": {"accuracy": 0.5 + more}}
                records.append(tmp_path / f"runs/{task}.jsonl", same | own)
        ranking = {"task": task, "seed": 0, "score": "snr", "order": list(range(18)), "scores": [0.0] * 18}
        records.append(tmp_path / "rankings.jsonl", ranking)
    monkeypatch.setattr(cells, "default_counts", lambda depth: [3])
    row = next(r for r in cell_tables.cells_table(findings.Results(tmp_path)).splitlines() if r.startswith("| last "))
    assert [cell.strip() for cell in row.split("|")[1:6]] == ["last", "3", "5e-05", "2", "48.50"]
    assert "-1.50 ±" in row
    assert "1:1" in row


def test_a_choice_of_layers_is_paired_with_another_by_task_and_seed(tmp_path, monkeypatch):
    for module in (cells, cell_tables):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola", "rte"))
    spread, last = "layers-1.4.7.10.13.16", "layers-12.13.14.15.16.17"
    points_of = {  # by task, and by seed where there is a run
        "full": {"cola": [0.5, 0.6], "rte": [0.5], "wic": [0.7]},
        spread: {"cola": [0.52, 0.6], "rte": [0.47, 0.9], "wic": [0.8]},
        last: {"cola": [0.4, 0.55], "rte": [0.5, 0.8]},
    }
    for tuning, by_task in points_of.items():
        for task, by_seed in by_task.items():
            for seed, value in enumerate(by_seed):
                for rate in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4):
                    held_out = {"accuracy": 0.9 - abs(np.log(rate / 5e-5)), "loss": 0.0}
                    same = {
                        "task": task,
                        "seed": seed,
                        "metric": "accuracy",
                        "held_out": held_out,
                        "plain": [2.0, 2.5],
                    }
                    own = {"tuning": tuning, "rate": rate, "validation": {"accuracy": value}}
                    records.append(tmp_path / f"gemma3/runs/{task}.jsonl", same | own)
    ranking = {"seed": 0, "score": "snr", "order": list(range(18)), "scores": [0.0] * 18}
    for task in ("cola", "rte", "wic"):
        records.append(tmp_path / "gemma3/rankings.jsonl", ranking | {"task": task})
    monkeypatch.setattr(cells, "SHARED", ("last",))
    monkeypatch.setattr(cell_tables, "MODELS", {"gemma3": "Gemma"})
    results = findings.Results(tmp_path / "gemma3")
    every = cell_tables.choices_table(results).splitlines()
    # (1, -3, 10): the mean over seeds of each task that both have
    mean, half = findings.interval([1, -3, 10])
    assert f"| layers at equal distances | {mean:+.1f} ± {half:.1f} |" in every
    against = next(row for row in cell_tables.pairs_table(results).splitlines() if "last" in row)
    assert against.split("|")[2].strip().startswith("+6.00 ±")  # 8.5 on cola, 3.5 on rte
    assert "| all weights | 5e-05 | 55.0 | 50.0 | 70.0 |" in cell_tables.tasks_table(results).splitlines()
    halves = {row.split("|")[1].strip(): row.split("|")[2:4] for row in cell_tables.halves_table(results).splitlines()}
    found = [half.split("±")[0].strip() for half in halves["layers at equal distances"]]
    assert found == ["+2.67", "-"]  # 1, -3 and 10
    neighbours = layer_tables.neighbours(results).splitlines()[2]
    assert neighbours.startswith("| all runs, 9 | -1.2 (")  # 12, 5, -3 and 10 points for the five pairs of the last


def test_a_cell_at_a_given_rate_does_not_ask_held_out_rows(tmp_path):
    for tuning, points_at in (("full", {1e-5: 0.5}), ("layers-1.4", {2e-5: 0.4, 5e-5: 0.7})):
        for rate, value in points_at.items():
            record = {"task": "cola", "seed": 0, "metric": "accuracy", "tuning": tuning, "rate": rate}
            records.append(tmp_path / "runs/cola.jsonl", record | {"validation": {"accuracy": value}})
    ranking = {"task": "cola", "seed": 0, "score": "snr", "order": list(range(6)), "scores": [0.0] * 6}
    records.append(tmp_path / "rankings.jsonl", ranking)
    measured = cell_tables.CellValues(findings.Results(tmp_path))
    for rate, ahead in (("5e-05", 20.0), ("2e-05", -10.0)):
        assert measured.difference(f"spread:2@{rate}", "full@1e-05").mean == pytest.approx(ahead)


def test_the_best_of_three_choices_is_that_of_the_held_out_rows(tmp_path, monkeypatch):
    for module in (cells, cell_tables):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola", "rte"))
    monkeypatch.setattr(cells, "SHARED", ("spread",))
    right = {  # of the held-out rows, and of those of validation, for each task
        "full": {"cola": (0.9, 0.5), "rte": (0.9, 0.5)},
        "layers-1.4.7.10.13.16": {"cola": (0.7, 0.40), "rte": (0.9, 0.52)},
        "layers-1.3.5.7.9.11": {"cola": (0.8, 0.43), "rte": (0.8, 0.60)},
        "layers-6.7.8.9.10.11": {"cola": (0.6, 0.50), "rte": (0.8, 0.70)},
    }
    for tuning, by_task in right.items():
        for task, (held_out, validation) in by_task.items():
            for rate in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4):
                measured = {"accuracy": held_out - abs(np.log(rate / 5e-5)), "loss": 0.0}
                record = {"task": task, "seed": 0, "metric": "accuracy", "plain": [2.0, 2.5], "held_out": measured}
                record |= {"tuning": tuning, "rate": rate, "validation": {"accuracy": validation}}
                records.append(tmp_path / f"runs/{task}.jsonl", record)
    for task in ("cola", "rte"):
        ranking = {"seed": 0, "score": "snr", "order": list(range(18)), "scores": [0.0] * 18, "task": task}
        records.append(tmp_path / "rankings.jsonl", ranking)
    rows = [row for row in cell_tables.pairs_table(findings.Results(tmp_path)).splitlines() if "the best of" in row]
    minus = {row.split(" - ")[1].split(" |")[0]: row.split("|")[2].split()[0] for row in rows}
    seed = "the best seed of all weights by held-out rows"
    assert minus == {"layers at equal distances": "+1.50", "all weights": "-2.50", seed: "-2.50"}  # 3 and 0, -7 and 2


def test_one_cell_is_one_command(place, tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "copa", replace(tasks.TASKS["copa"], epochs=1, revision=3))
    records.append(tmp_path / "runs/copa.jsonl", {"task": "copa", "tuning": "layers-5", "rate": 1e-3, "seed": 0})
    options = ("--results", str(tmp_path), "--cache", str(tmp_path / "cache"))
    call(place, "cells", "--methods", "fisher", "--k", "1", "--rate", "1e-3", "--tasks", "copa", *options)
    (ranked,) = [r for r in records.read(tmp_path / "rankings.jsonl") if r["task"] == "copa"]
    *_, run_ = records.read(tmp_path / "runs/copa.jsonl")
    assert (run_["tuning"], run_["rate"], run_["revision"]) == (f"layers-{ranked['order'][0]}", 1e-3, 3)
    assert not (tmp_path / "runs/cola.jsonl").exists()


def test_jobs_that_fail_are_not_begun_again(tmp_path, monkeypatch):
    fork = multiprocessing.get_context("fork")  # a new interpreter imports for ten seconds
    monkeypatch.setattr(scheduler.multiprocessing, "get_context", lambda method: fork)
    place = jobs.Place("", tmp_path, tmp_path, tmp_path, "cpu")
    job = jobs.Job("train", "nothing of that name", 0, ("full",), (1.0,))
    with scheduler.Pool(place, 1) as pool:
        assert pool.do(more=lambda busy: [] if busy else [job]) == 0


@pytest.fixture(scope="module")
def decoder(place) -> Path:
    """What `decoders.unpack` makes, of a tiny random model, with prompts of the made-up tasks."""
    folder, tokenizer = place / "decoder", make_tokenizer()
    build("gemma3", vocab_size=len(tokenizer), sliding_window=512).save_pretrained(folder)
    (folder / "tasks").mkdir()
    for name in ("cola", "rte", "copa"):
        rows = [prompts.encode(name, frame, tokenizer) for frame in tasks.frames(name, place / "data")]
        torch.save(tasks.TaskData(*rows), folder / f"tasks/{name}-1.pt")
    (folder / "answers.json").write_text(json.dumps(dict.fromkeys(("cola", "rte", "copa", "stsb"), [30, 7])))
    torch.save(torch.randint(4, 90, (6, 12), generator=torch.Generator().manual_seed(0)), folder / "plain.pt")
    return folder


def test_a_decoder_answers_as_transformers_has_it(decoder):
    rows = decoders.read(decoder, "rte").validation
    plain, model = decoders.plain_model(decoder).eval(), decoders.load(decoder, "rte").eval()
    with torch.no_grad():
        logits = model(**rows.inputs).logits
        amounts = decoders.load(decoder, "stsb").eval()(**rows.inputs).logits
        for row, ids in enumerate(rows.inputs["input_ids"]):
            alone = plain(input_ids=ids[None, : int(rows.lengths[row])]).logits[0, -1]
            torch.testing.assert_close(logits[row, :2], alone[[30, 7]])
            torch.testing.assert_close(logits[row].logsumexp(0), alone.logsumexp(0))
            torch.testing.assert_close(amounts[row, 0], alone[[30, 7]].softmax(0)[1])
    ids = decoders.plain_text(decoder)
    with torch.no_grad():
        loss = float(plain(ids, labels=ids).loss)
    assert decoders.plain_loss(plain, ids, batch=4) == pytest.approx(loss, rel=1e-2)


def test_layers_of_a_decoder_are_ranked_by_the_loss_on_the_answer(decoder):
    rows = decoders.read(decoder, "copa").train.take(torch.arange(4))
    plain, model = decoders.plain_model(decoder).eval(), decoders.load(decoder, "copa").eval()
    for row, feature in enumerate(decoders.features(decoder, "copa", rows)):
        one = rows.take(torch.tensor([row]))
        loss = training.task_loss(model(**one.inputs).logits, one.labels)
        torch.testing.assert_close(plain(**{name: t[None] for name, t in feature.items()}).loss, loss)


@pytest.mark.parametrize("tuning", ["full", "layers-0.2", "layers-0.2-bf16", "lora-16", "mlp"])
def test_a_step_of_a_decoder_can_become_a_cuda_graph(decoder, tuning):
    rows = decoders.read(decoder, "rte").train.take(torch.arange(4))
    trainee = training.Trainee(training.halve_frozen(methods.adapt(decoders.load(decoder, "rte"), tuning)), 1e-3)
    inputs = training.cut(rows, torch.arange(4), 64)
    trainee.step(inputs, rows.labels)
    with Recorded() as recorded:
        trainee.step(inputs, rows.labels)
    assert recorded.waits == []


def test_a_decoder_goes_the_same_way(place, decoder, tmp_path, monkeypatch):
    monkeypatch.setitem(prompts.TASKS, "copa", replace(prompts.TASKS["copa"], epochs=1))
    scores = ("lowest_fisher_sampled", "fisher_after_epoch")
    wanted = ("full", "lora-16", "mlp", "norms", *scores, "spread", "last", *methods.HALVED)
    common = ["--model", str(decoder), "--data", str(place / "data"), "--tasks", "copa", "--processes", "0"]
    common += ["--results", str(tmp_path), "--rate", "1e-3", "--k", "2", "--methods", *wanted]
    run.main(["cells", *common])
    found = {r["tuning"]: r for r in records.read(tmp_path / "runs/copa.jsonl")}
    ranked, tuned = records.read(tmp_path / "rankings.jsonl")
    lowest = methods.layers_name(ranked["order"][-2:])
    after = methods.layers_name(tuned["order"][:2])
    halved = {f"layers-1.3-{name}" for name in methods.HALVED}
    assert set(found) == {"full", "lora-16", "mlp", "norms", lowest, after, "layers-1.3", "layers-2.3", *halved}
    model = decoders.plain_model(decoder)
    mlp = sum(p.numel() for n, p in model.named_parameters() if ".mlp." in n)
    assert found["mlp"]["trained_parameters"] == mlp
    assert found["full"]["trained_parameters"] == sum(p.numel() for p in model.parameters())
    assert found["mlp"]["head_parameters"] == 0
    before, after = found["full"]["plain"]
    assert before == pytest.approx(found["mlp"]["plain"][0])
    assert before != after


def test_layers_are_ranked_after_an_epoch_of_tuning_all_weights(place, tmp_path):
    there = jobs.Place(str(place / "tiny"), place / "data", tmp_path, place / "cache", "cpu")
    scores = []
    for rate in (0.0, 1e-2):
        jobs.rank_job(there, jobs.Job("rank", "cola", 0, ("fisher", "fisher_after_epoch"), (rate,)))
        before, after = [r["scores"] for r in records.read(tmp_path / "rankings.jsonl")[-2:]]
        scores.append((before, after))
    (untuned, same), (again, tuned) = scores
    assert untuned == same == again
    data = there.rows("cola")
    trainee = training.Trainee(methods.adapt(there.load("cola", 0), "full"), 1e-2)
    for epoch, _ in enumerate(training.train([trainee], data.train, batch=32, epochs=5, seed=0), 1):
        ranking = rank_layers(trainee.model, data.train.features(), num_samples=100, progress=False)
        assert (ranking.scores == pytest.approx(tuned, rel=1e-4)) == (epoch == 1)


def test_ways_to_choose_layers_can_share_a_rate(place, tmp_path, monkeypatch):
    for module in (cells, run):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola", "rte"))
    monkeypatch.setitem(jobs.JOBS, "train", best_at(1e-4))
    shared = ("--share", "last", "spread")
    call(place, "cells", "--methods", "middle", "--k", "2", "--results", str(tmp_path), *shared)
    tried = {tuning: set() for tuning in ("layers-4.5", "layers-1.4", "layers-2.3")}
    for r in records.read(tmp_path / "runs/cola.jsonl"):
        tried[r["tuning"]].add(r["rate"])
    assert tried["layers-4.5"] == tried["layers-1.4"] == {5e-5, 1e-4, 2e-4}
    assert tried["layers-2.3"] == {1e-4}


def test_results_do_not_go_to_those_of_the_documentation(monkeypatch):
    monkeypatch.chdir(findings.RESULTS.parents[2])
    options = run._arguments(["all", "--model", "models/mpnet", "--data", "data"])
    assert not options.results.resolve().is_relative_to(findings.RESULTS.parent)


def test_a_run_with_nothing_to_do_says_how_to_do_it_anew(place, monkeypatch, capsys):
    monkeypatch.setattr(run, "phases", lambda *_: iter([[], []]))
    call(place, "all")
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert "--results" in said


@pytest.mark.slow
def test_the_whole_runs_once_and_is_not_repeated(place, monkeypatch):
    for name in ("cola", "copa"):
        monkeypatch.setitem(tasks.TASKS, name, replace(tasks.TASKS[name], epochs=1))
    for module in (plans, run):
        monkeypatch.setattr(module, "RATE_TASKS", ("cola",))
    monkeypatch.setattr(plans, "plans", lambda question, depth: ["full", "fisher:2", "fisher:-1", "lora-I"])
    monkeypatch.setattr(methods, "RATES", {name: rates[:1] for name, rates in methods.RATES.items()})
    monkeypatch.setattr(jobs, "SAMPLE_SIZES", (1, 10))
    monkeypatch.setattr(jobs, "SAMPLE_DRAWS", 1)
    monkeypatch.setattr(warm_start, "HEAD_STEPS", 2)
    scores = ["fisher", "random0", "published_code", "fisher_warm"]
    call(place, "all", "--scores", *scores, "--questions", "1", "--seeds", "0", "1")
    call(place, "track", "--tasks", "copa")
    call(place, "samples", "--tasks", "copa")
    results = place / "results"
    sampled = [ranking for r in records.read(results / "samples.jsonl") for ranking in r["rankings"]]
    assert {"given", "sampled", "exact", "head", "warm head"} == {ranking["kind"] for ranking in sampled}
    assert len(sampled) == 2 * (3 * 3 + 2 * 5)  # two tasks; 1, 10 and all samples; two kinds of five heads
    before = {file: file.stat().st_mtime_ns for file in results.rglob("*.json*")}
    every = records.read(results / "runs/copa.jsonl")
    runs = {r["tuning"]: r for r in every if r["seed"] == 0}
    assert len(runs) == 4
    rankings = {(r["task"], r["score"], r["seed"]): r["order"] for r in records.read(results / "rankings.jsonl")}
    assert len(rankings) == 2 * (4 + 3)  # the costly one with the first seed only
    for command in ("rates", "rank", "train"):
        call(place, command, "--scores", *scores, "--questions", "1", "--seeds", "0", "1")
    for command in ("track", "samples"):
        call(place, command, "--tasks", "copa")
    after = {file: file.stat().st_mtime_ns for file in results.rglob("*.json*")}
    assert {f for f in after if after[f] != before.get(f)} <= {results / "rates.json"}
    ranked = rankings["copa", "fisher", 0]
    made = runs[methods.layers_name(ranked[:2])]
    assert made["metric"] == "accuracy"
    assert made["validation"]["accuracy"] in [i / 20 for i in range(21)]

    page = place / "page.md"
    page.write_text("before\n<!-- table lodha -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(
        plots, "PLOTS", {name: plots.PLOTS[name] for name in ("lodha-relative", "published", "tracked")}
    )
    tables.main(["results", "--results", str(place), "--page", str(page)])
    plots.main(["results", "--results", str(place), "--figures", str(place / "figures")])
    row = next(line for line in page.read_text().splitlines() if "Fisher, top 2" in line)
    later = methods.layers_name(rankings["copa", "fisher", 1][:2])
    second = next(r for r in every if (r["tuning"], r["seed"]) == (later, 1))
    mean = (made["validation"]["accuracy"] + second["validation"]["accuracy"]) / 2
    assert f"**{100 * mean:.1f}**" in row or f" {100 * mean:.1f} " in row
    assert "old" not in page.read_text()
    assert page.read_text().endswith("<!-- end -->\nafter\n")
    assert len(list((place / "figures").glob("*.png"))) == 4


def test_jobs_are_begun_in_order_as_long_as_they_end_in_time():
    queue = [jobs.Job("train", "rte", 0, weight=w) for w in (5.0, 1.0, 2.0)]
    assert scheduler.next_job(queue, 3.0).weight == 1.0
    assert scheduler.next_job(queue, 9.0).weight == 5.0
    assert scheduler.next_job(queue, 1.0) is None
    assert len(queue) == 1


def test_processes_share_the_gpus_in_turn(monkeypatch, tmp_path):
    shown = []

    class Context:
        def Pipe(self):
            return None, types.SimpleNamespace(close=lambda: None)

        def Process(self, **_):
            return types.SimpleNamespace(start=lambda: shown.append(os.environ["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.setattr(scheduler.multiprocessing, "get_context", lambda _: Context())
    place = jobs.Place("", tmp_path, tmp_path, tmp_path, "cuda")
    for before, expected in ((None, "0123"), ("4,5", "45")):
        if before:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(scheduler.torch.cuda, "device_count", expected.__len__)
        shown.clear()
        pool = scheduler.Pool(place, 16)
        for number in range(16):
            pool._start(number)
        assert shown == list(expected) * (16 // len(expected))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_a_job_that_is_too_large_is_done_in_halves(tmp_path, monkeypatch):
    fork = scheduler.multiprocessing.get_context("fork")  # at once; a GPU needs new interpreters
    monkeypatch.setattr(scheduler.multiprocessing, "get_context", lambda _: fork)
    place = jobs.Place("", tmp_path, tmp_path, tmp_path, "cpu")
    job = jobs.Job("train", "rte", 0, ("full", "head", "bitfit"), (1.0, 2.0, 3.0), weight=4.0)
    first, second = scheduler.halves(job)
    assert (first.items, first.rates, second.items, second.rates) == (
        ("full",),
        (1.0,),
        ("head", "bitfit"),
        (2.0, 3.0),
    )
    assert scheduler.halves(first) == []
    with scheduler.Pool(place, 1) as pool:
        old = pool.workers[0].process
        pool.do([jobs.Job("train", "nothing of that name", 0, ("full", "head"), (1.0, 1.0))])
        assert pool.workers[0].process is not old  # an error ends a process, and another takes its place
        assert pool.workers[0].process.is_alive()


def test_full_memory_is_seen_behind_what_it_broke():
    first, later = torch.OutOfMemoryError(), RuntimeError("capturing stream has unjoined work")
    later.__context__ = first
    assert scheduler.is_out_of_memory(later)
    assert not scheduler.is_out_of_memory(RuntimeError("another"))


def test_a_model_travels_in_parts(place, tmp_path):
    parts = models.pack(place / "tiny", tmp_path / "carry", mib=0.02)
    assert len(parts) > 1
    models.unpack(parts, tmp_path / "tiny")
    original, travelled = (models.load(str(folder), 2) for folder in (place / "tiny", tmp_path / "tiny"))
    for a, b in zip(original.mpnet.parameters(), travelled.mpnet.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)
    damaged = bytearray(parts[0].read_bytes())
    damaged[300] ^= 1
    with pytest.raises(Exception, match="CRC|zip|Error|decompress|code"):
        models.unpack([bytes(damaged), *parts[1:]], tmp_path / "damaged")
