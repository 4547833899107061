"""The bank on a GPU: pinned host memory, copies on a stream of their own, and CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch
from test_bank import CONFIGS, X, fill, hammer, save_task, size_on_device
from test_bank import ask as ask_on_cpu
from test_bank import base as base_on_cpu

from peft_surgical import SurgicalConfig
from peft_surgical.bank import DeltaBank


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")
ON_GPU = {name: tensor.to(DEVICE) for name, tensor in X.items()} if torch.cuda.is_available() else {}


def base(labels: int = 2) -> torch.nn.Module:
    return base_on_cpu(labels).to(DEVICE)


def ask(bank, name: str | None) -> torch.Tensor:
    with bank.task(name) as model, torch.no_grad():
        return model(**ON_GPU).logits


def ask_on_own_stream(bank, name: str) -> torch.Tensor:
    """As every thread does that has set a stream for itself."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = ask(bank, name)
    stream.synchronize()
    return found


def assert_right(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks of several methods, and lossy ones, with what each answers on the CPU."""
    folder = tmp_path_factory.mktemp("tasks")
    answers = {name: save_task(folder, name, config(), seed=i) for i, (name, config) in enumerate(CONFIGS.items())}
    answers["five"] = save_task(folder, "five", SurgicalConfig(task_type="SEQ_CLS", layers=[3]), labels=5)
    return folder, answers


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Twelve tasks of one size, with what each answers on the CPU."""
    folder = tmp_path_factory.mktemp("alike")
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[1])
    answers = {f"t{i}": save_task(folder, f"t{i}", config, seed=i) for i in range(12)}
    return folder, answers, size_on_device(folder, "t0")


@pytest.mark.parametrize("budgets", [(None, None), (60_000, None), (60_000, 60_000), (60_000, 0)])
def test_every_task_answers_as_its_own_model_does(budgets, tasks):
    folder, answers = tasks
    model = base()
    alone = ask(DeltaBank(base()), None).cpu()
    bank = fill(DeltaBank(model, *budgets), folder, answers)
    for name in [*answers, *random.Random(0).choices([*answers, None], k=40)]:
        assert_right(ask(bank, name), alone if name is None else answers[name], str(name))
    stats = bank.stats()
    assert budgets[0] is None or stats.device_peak <= budgets[0]
    assert budgets[1] is None or stats.host_peak <= budgets[1]


@pytest.mark.parametrize("encoding", ["bf16", "int8", "int4", "sign", "lossless"])
def test_encoded_tasks_are_decoded_on_the_gpu(encoding, tmp_path):
    save_task(tmp_path, encoding, SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2], encoding=encoding))
    wanted = ask_on_cpu(fill(DeltaBank(base_on_cpu()), tmp_path, [encoding]), encoding)
    for host in (None, 0):
        assert_right(ask(fill(DeltaBank(base(), host_budget=host), tmp_path, [encoding]), encoding), wanted)


def test_host_memory_is_pinned_and_a_host_hit_reads_no_file(alike):
    folder, answers, size = alike
    bank = fill(DeltaBank(base(), device_budget=size), folder, answers)
    for name in answers:
        assert_right(ask(bank, name), answers[name], name)
    before = bank.stats()
    for name in answers:
        assert_right(ask(bank, name), answers[name], name)
    after = bank.stats()
    assert after.bytes_read == before.bytes_read
    assert after.host_hits - before.host_hits == len(answers)
    assert after.device_peak == size


def test_a_prefetch_overlaps_with_forwards_and_is_waited_for(alike):
    folder, answers, size = alike
    bank = fill(DeltaBank(base(), device_budget=2 * size), folder, answers)
    names = list(answers)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        with bank.task(name) as model, torch.no_grad():
            torch.cuda._sleep(2_000_000)
            found = model(**ON_GPU).logits
            bank.prefetch(following).result(10)
        assert_right(found, answers[name], name)
    hits = bank.stats().device_hits
    assert_right(ask(bank, names[0]), answers[names[0]])
    assert bank.stats().device_hits == hits + 1


def test_memory_that_a_running_forward_reads_is_not_given_away(alike):
    folder, answers, size = alike
    bank = fill(DeltaBank(base(), device_budget=size), folder, answers)
    names = list(answers)
    bank.activate(names[0])
    torch.cuda.synchronize()
    found = {}
    for name in names:  # each is evicted while its forward has not even begun on the GPU
        with bank.task(name) as model, torch.no_grad():
            torch.cuda._sleep(20_000_000)
            found[name] = model(**ON_GPU).logits
    for name in names:
        assert_right(found[name], answers[name], name)


def test_threads_with_streams_of_their_own_get_only_right_answers(alike):
    folder, answers, size = alike
    bank = fill(DeltaBank(base(), device_budget=4 * size, host_budget=6 * size), folder, answers)
    count, wrong = hammer(
        bank,
        answers,
        threads=8,
        seconds=3,
        mix=lambda chance: chance.choice(list(answers)),
        ask=ask_on_own_stream,
        is_right=lambda found, wanted: torch.allclose(found.cpu(), wanted, atol=1e-4, rtol=1e-4),
    )
    assert wrong == []
    assert count >= 40
    assert bank.stats().device_peak <= 4 * size


def test_a_cuda_graph_over_a_compiled_bank_goes_on_with_every_task(alike):
    folder, answers, _ = alike
    bank = fill(DeltaBank(base(), compiled=True), folder, answers)
    names = list(answers)
    bank.activate(names[0])
    with torch.no_grad():
        for _ in range(3):
            bank.model(**ON_GPU)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = bank.model(**ON_GPU).logits
    for name in [*names, *random.Random(0).choices(names, k=100)]:
        with bank.task(name):
            graph.replay()
            found = logits.clone()
        assert_right(found, answers[name], name)
