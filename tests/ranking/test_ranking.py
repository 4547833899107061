"""Rankings as a user sees them: scores against plain autograd, how sure they are, files, comparison, callback."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import torch.distributed as dist
from forks import run_forked
from peft import get_peft_model
from scipy.stats import kendalltau
from transformers import Trainer, TrainingArguments

from peft_surgical import LayerRanking, RankingCallback, SurgicalConfig, compare_rankings, rank_layers, resolve_layers


def samples(n=12, length=7):
    batch = tiny_models.batch("bert", n=n, length=length)
    return [{name: value[i] for name, value in batch.items()} for i in range(n)]


def log_likelihoods(model, data):
    for sample in data:
        inputs = {name: value[None] for name, value in sample.items()}
        label = inputs.pop("labels")
        yield torch.log_softmax(model(**inputs).logits, -1)[0, label[0]]


def mean_gradients(model, data):
    """For each layer the gradients of the mean log-likelihood, by plain autograd."""
    mean = sum(log_likelihoods(model, data)) / len(data)
    groups = [list(layer.module.parameters()) for layer in resolve_layers(model, "all")]
    grads = iter(torch.autograd.grad(mean, [p for group in groups for p in group]))
    return [([next(grads) for _ in group], group) for group in groups]


def norm(tensors):
    return float(torch.cat([t.detach().flatten() for t in tensors]).norm())


def score(model, name, data=(), **options):
    return rank_layers(model, list(data), score=name, num_samples=100, batch_size=5, progress=False, **options).scores


def test_gradient_scores_equal_plain_autograd():
    model, data = tiny_models.build("bert").double(), samples()
    expected = mean_gradients(model, data)
    assert score(model, "grad_norm", data) == pytest.approx([norm(g) for g, _ in expected], rel=1e-9)
    assert score(model, "rgn", data) == pytest.approx([norm(g) / norm(p) for g, p in expected], rel=1e-9)


def test_signal_to_noise_equals_numpy():
    model = tiny_models.build("bert").double()
    expected = []
    for layer in resolve_layers(model, "all"):
        ratios = []
        for parameter in layer.module.parameters():
            if parameter.dim() == 2:
                s = np.linalg.svd(parameter.detach().numpy(), compute_uv=False)
                sigma = (np.percentile(s, 75) - np.percentile(s, 25)) / 1.349
                edge = sigma * (1 + np.sqrt(min(parameter.shape) / max(parameter.shape)))
                is_noise = (s <= edge) | (np.arange(len(s)) == len(s) - 1)  # the smallest always
                ratios.append(s[~is_noise].sum() / s[is_noise].sum() / s.max())
        expected.append(np.mean(ratios))
    assert score(model, "snr") == pytest.approx(expected, rel=1e-9)


def test_a_signal_to_noise_ratio_is_finite_where_nothing_is_noise():
    model = tiny_models.build("bert", num_hidden_layers=3)
    for n, layer in enumerate(model.bert.encoder.layer):
        for p in layer.parameters():
            if p.dim() == 2:  # singular values close together, far above their spread
                u, _, v = torch.linalg.svd(p.detach(), full_matrices=False)
                p.data = u @ torch.diag(torch.linspace(10, 10 + n + 1, u.shape[1])) @ v
    scores = score(model, "snr")
    assert all(0 < s < 100 for s in scores)
    assert len(set(scores)) == 3


def test_scores_without_data():
    model = tiny_models.build("bert")
    assert rank_layers(model, None, score="last", progress=False).order == [3, 2, 1, 0]
    assert rank_layers(model, None, score="alternate", progress=False).order == [1, 3, 0, 2]
    assert rank_layers(model, None, score="first", progress=False).order == [0, 1, 2, 3]
    orders = {tuple(rank_layers(model, None, score="random", seed=s, progress=False).order) for s in range(8)}
    assert len(orders) > 1
    assert score(model, "random", seed=3) == score(model, "random", seed=3)


def test_intervals_are_those_of_an_explicit_bootstrap_of_the_trace():
    model, data = tiny_models.build("bert").double(), samples(30)
    ranking = rank_layers(model, data, aggregation="trace", num_samples=30, progress=False)
    layers = [list(layer.module.parameters()) for layer in resolve_layers(model, "all")]
    traces = []
    for value in log_likelihoods(model, data):
        grads = iter(torch.autograd.grad(value, [p for group in layers for p in group]))
        traces.append([sum(float(next(grads).square().sum()) for _ in group) for group in layers])
    traces = np.array(traces)
    assert ranking.scores == pytest.approx(traces.mean(0), rel=1e-9)
    draws = np.random.default_rng(0).integers(30, size=(4000, 30))
    resampled = traces[draws].mean(1)
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    for (found_low, found_high), a, b in zip(ranking.intervals, low, high, strict=True):
        assert found_low == pytest.approx(a, rel=0.1)
        assert found_high == pytest.approx(b, rel=0.1)
    ranks = (-resampled).argsort(1).argsort(1)
    for layer in range(4):
        expected = [(ranks[:, layer] < k).mean() for k in (1, 2, 3, 4)]
        assert ranking.top_probability[layer] == pytest.approx(expected, abs=0.06)


@pytest.mark.slow
def test_the_intervals_of_the_norm_are_near_those_of_repeated_draws():
    """The norm's bootstrap is linearised and estimated from some entries; it must tell the right scale."""
    model, data = tiny_models.build("bert").double(), samples(200, length=9)
    scores = []
    for part in range(20):
        own = data[10 * part : 10 * part + 10]
        scores.append(rank_layers(model, own, num_samples=10, progress=False).scores)
    spread = np.std(scores, axis=0)
    widths = []
    for part in range(20):
        ranking = rank_layers(model, data[10 * part : 10 * part + 10], num_samples=10, progress=False)
        widths.append([(high - low) / 3.92 for low, high in ranking.intervals])
    ratio = np.mean(widths, axis=0) / spread
    assert np.all(ratio > 0.4), ratio
    assert np.all(ratio < 2.5), ratio


def test_two_halves_of_like_samples_agree_and_of_one_sample_there_are_none():
    model, data = tiny_models.build("bert"), samples(1) * 20
    assert rank_layers(model, data, num_samples=20, progress=False).split_half_tau == pytest.approx(1.0)
    assert rank_layers(model, data[:1], num_samples=1, progress=False).split_half_tau is None


def test_redrawn_heads_leave_the_model_and_tell_how_stable_the_order_is():
    model, data = tiny_models.build("bert"), samples()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ranking = rank_layers(model, data, num_samples=12, head_inits=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert -1 <= ranking.head_tau <= 1
    assert "head" in str(ranking)
    assert ranking.scores != rank_layers(model, data, num_samples=12, progress=False).scores


def test_a_ranking_survives_its_file_and_chooses_the_same_layers(tmp_path):
    model = tiny_models.build("bert")
    ranking = rank_layers(model, samples(), num_samples=12, progress=False)
    ranking.save(tmp_path / "ranking.json")
    again = LayerRanking.load(tmp_path / "ranking.json")
    assert again == ranking
    json.dumps(ranking.to_dict())
    chosen = []
    for source in (ranking, str(tmp_path / "ranking.json"), ranking.to_dict()):
        config = SurgicalConfig(task_type="SEQ_CLS", ranking=source, top_k=2)
        adapted = get_peft_model(tiny_models.build("bert"), config)
        chosen.append(adapted.peft_config["default"].layers)
        assert adapted.peft_config["default"].ranking_record["scores"] == ranking.scores
    assert chosen == [sorted(ranking.top(2))] * 3
    assert sorted(ranking.order) == [0, 1, 2, 3]


PICKLED_BY_0_1_0 = (
    "gASVBwEAAAAAAACMI3BlZnRfc3VyZ2ljYWwucmFua2luZy5sYXllcl9yYW5raW5nlIwMTGF5ZXJSYW5raW5nlJOUKYGUfZQojAVz"
    "dGFja5SMB2VuY29kZXKUjAZzY29yZXOUXZQoRz/wAAAAAAAAR0AAAAAAAAAAZYwJaW50ZXJ2YWxzlF2UKEcAAAAAAAAAAEc/8AAA"
    "AAAAAIaURz/wAAAAAAAAR0AIAAAAAAAAhpRljA90b3BfcHJvYmFiaWxpdHmUTowOc3BsaXRfaGFsZl90YXWUTowIaGVhZF90YXWU"
    "Rz/gAAAAAAAAjAZyZWNvcmSUfZQojApoZWFkX3NlZWRzlEsCjARrZWVwlEsBdXViLg=="
)


def test_rankings_of_version_0_1_0_are_read():
    expected = LayerRanking(
        "encoder", [1.0, 2.0], [(0.0, 1.0), (1.0, 3.0)], head_tau=0.5, record={"head_seeds": 2, "keep": 1}
    )
    assert pickle.loads(base64.b64decode(PICKLED_BY_0_1_0)) == expected
    written = {"format": "peft_surgical.LayerRanking", "version": 1, "stack": "encoder", "scores": [1.0, 2.0]}
    written |= {"intervals": [[0.0, 1.0], [1.0, 3.0]], "top_probability": None, "split_half_tau": None}
    assert LayerRanking.from_dict(written | {"head_tau": 0.5, "record": {"head_seeds": 2, "keep": 1}}) == expected


def test_the_former_name_of_head_inits_is_understood():
    options = {"num_samples": 4, "progress": False}
    model, data = tiny_models.build("bert"), samples(4)
    assert rank_layers(model, data, head_seeds=2, **options) == rank_layers(model, data, head_inits=2, **options)


def test_the_table_and_the_plot(tmp_path):
    ranking = rank_layers(tiny_models.build("bert"), samples(), num_samples=12, progress=False)
    lines = str(ranking).splitlines()
    assert any(line.split() and line.split()[0] == "1" for line in lines)
    assert lines[-1].startswith("A certain order is not a better choice")
    assert "A certain order" not in str(LayerRanking("encoder", [1.0, 2.0]))
    ranking.plot(tmp_path / "ranking.png")
    assert (tmp_path / "ranking.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_of_rankings_follows_its_definition(tmp_path):
    scores = [[4.0, 3.0, 2.0, 1.0], [4.0, 2.0, 3.0, 1.0], [1.0, 2.0, 3.0, 4.0]]
    comparison = compare_rankings([LayerRanking("encoder", s) for s in scores], ["a", "b", "c"])
    assert comparison.ranks == [[1, 2, 3, 4], [1, 3, 2, 4], [4, 3, 2, 1]]
    assert comparison.deviations == [0.0, 0.5, 2.0]
    assert comparison.taus == pytest.approx([kendalltau(scores[0], s).statistic for s in scores])
    assert comparison.common_top == [0, 0, 2, 4]
    comparison.plot(tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").exists()
    with pytest.raises(ValueError, match="two or more"):
        compare_rankings([LayerRanking("encoder", scores[0])])


def test_the_callback_ranks_at_the_chosen_epochs_and_leaves_training_alone(tmp_path):
    data = samples(16)

    def train(callbacks):
        model = get_peft_model(tiny_models.build("bert"), SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3]))
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        return model.state_dict()

    callback = RankingCallback(data, epochs=(0, 3), folder=tmp_path / "rankings", num_samples=16)
    watched = train([callback])
    plain = train([])
    assert all(torch.equal(value, plain[name]) for name, value in watched.items())
    assert [r.record["epoch"] for r in callback.rankings] == [0, 3]
    assert sorted(path.name for path in (tmp_path / "rankings").iterdir()) == [
        "ranking-epoch-0.json",
        "ranking-epoch-3.json",
    ]
    assert len(compare_rankings(callback.rankings).ranks) == 2


@pytest.mark.parametrize(("steps", "epochs"), [(1, [0, 0.25]), (2, [0, 0.5]), (6, [0, 1, 1.5]), (8, [0, 1, 2])])
def test_a_run_that_ends_within_an_epoch_writes_over_no_ranking(steps, epochs, tmp_path):
    data = samples(16)
    callback = RankingCallback(data, folder=tmp_path / "rankings", num_samples=4)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=steps, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True
    )
    Trainer(tiny_models.build("bert"), arguments, train_dataset=data, callbacks=[callback]).train()
    assert [r.record["epoch"] for r in callback.rankings] == epochs
    assert {path.name for path in (tmp_path / "rankings").iterdir()} == {f"ranking-epoch-{e}.json" for e in epochs}


SCORED = (("fisher", "frobenius"), ("fisher", "trace"), ("rgn", "frobenius"))


def rank_in_processes(processes: int, folder: Path) -> None:
    torch.multiprocessing.start_processes(rank_with, (processes, folder), nprocs=processes, start_method="fork")


def rank_with(rank: int, processes: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    found = {
        name + aggregation: rank_layers(
            tiny_models.build("bert").double(),
            samples(13),
            num_samples=13,
            batch_size=4,
            score=name,
            aggregation=aggregation,
            progress=False,
        ).scores
        for name, aggregation in SCORED
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # The group ends with the process: PyTorch 2.6 ends one with Python's lock held and waits for threads that want it.


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_gives_the_ranking_of_one(processes, tmp_path):
    done = run_forked(rank_in_processes, processes, tmp_path)
    assert done.code == 0, done.output[-2000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert all(other == found[0] for other in found)
    model = tiny_models.build("bert").double()
    for score_name, aggregation in SCORED:
        alone = score(model, score_name, samples(13), aggregation=aggregation)
        assert found[0][score_name + aggregation] == pytest.approx(alone, rel=1e-6)
