from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import random
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from adapters import rewrite
from peft import IA3Config, LoraConfig, PolyConfig, PromptTuningConfig, VBLoRAConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import batch, build

from peft_surgical import StratifiedConfig, SurgicalConfig
from peft_surgical.bank import DeltaBank, memory
from peft_surgical.bank.lock import SwitchLock
from peft_surgical.bank.memory import Layout, LruBudget, NoRoomError, TaskFile, parse_budget
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.safetensors_io import Spec


CONFIGS = {
    "last": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[2, 3]),
    "first": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[0]),
    "part": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[1], target_modules=["query", "LayerNorm"]),
    "extra": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[3], extra_modules=["bert.pooler", "bert.embeddings"]),
    "lossless": lambda: SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2], encoding="lossless"),
    "spafit": lambda: StratifiedConfig(
        task_type="SEQ_CLS", n1=0, n2=1, target_modules=["query", "value"], r=4, init_lora_weights=False
    ),
    "lora": lambda: LoraConfig(task_type="SEQ_CLS", target_modules=["query", "dense"], init_lora_weights=False),
    "dora": lambda: LoraConfig(
        task_type="SEQ_CLS", target_modules=["value"], r=2, use_dora=True, init_lora_weights=False
    ),
}
X = batch("bert", labels=False)


def base(labels: int = 2, dtype: torch.dtype = torch.float32):
    """The same encoder whatever the number of labels."""
    model = build("bert", num_labels=labels)
    model.bert.load_state_dict(build("bert").bert.state_dict())
    return model.to(dtype)


def save_task(folder: Path, name: str, config, *, labels: int = 2, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Save a task; gives what its own model answers."""
    model = get_peft_model(base(labels, dtype), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        answer = model(**X).logits
    model.save_pretrained(folder / name)
    return answer


def ask(bank, name: str | None) -> torch.Tensor:
    with bank.task(name) as model, torch.no_grad():
        return model(**X).logits


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Eight tasks of three methods, with what each answers."""
    folder = tmp_path_factory.mktemp("tasks")
    answers = {name: save_task(folder, name, config(), seed=i) for i, (name, config) in enumerate(CONFIGS.items())}
    answers["five"] = save_task(folder, "five", SurgicalConfig(task_type="SEQ_CLS", layers=[3]), labels=5)
    answers["lora5"] = save_task(folder, "lora5", CONFIGS["lora"](), labels=5, seed=9)
    return folder, answers


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Fifty SURGICAL tasks that tune one or two layers each."""
    folder = tmp_path_factory.mktemp("many")
    answers = {}
    for i in range(50):
        layers = [i % 4, (i + 1 + i // 4) % 4]
        config = SurgicalConfig(task_type="SEQ_CLS", layers=sorted(set(layers)))
        answers[f"task {i}"] = save_task(folder, f"task {i}", config, seed=i)
    return folder, answers


def wait_until_it_waits(thread: threading.Thread) -> None:
    """Wait until a thread waits for the model."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
        if stack and stack[-1].name == "wait" and any("/bank/lock" in frame.filename for frame in stack[-3:]):
            return
        assert thread.is_alive()
        time.sleep(0.001)
    raise AssertionError("it does not wait")


def start_and_wait(thread: threading.Thread) -> None:
    """Start a thread, and wait until it waits for the model."""
    thread.start()
    wait_until_it_waits(thread)


def fill(bank, folder: Path, names) -> DeltaBank:
    for name in names:
        bank.add(name, folder / name)
    return bank


# ---- right answers


def test_every_task_answers_as_its_own_model_does_in_any_order(tasks):
    folder, answers = tasks
    model = base()
    alone = model(**X).logits.detach()
    bank = fill(DeltaBank(model), folder, answers)
    order = random.Random(0)
    for name in [*answers, *order.choices([*answers, None], k=60)]:
        assert torch.equal(ask(bank, name), alone if name is None else answers[name]), name


@pytest.mark.parametrize("first", ["spafit", "lora", "last"])
def test_methods_may_come_in_any_order(first, tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, [first, *(name for name in answers if name != first)])
    for name in [first, *reversed(answers), first]:
        assert torch.equal(ask(bank, name), answers[name]), name


def test_labels_follow_the_task(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "five"])
    bank.add("lora5", folder / "lora5")
    bank.add("named", folder / "lora5", labels={"num_labels": 5, "id2label": dict(enumerate("abcde"))})
    for name, count in [("last", 2), ("five", 5), (None, 2), ("lora5", 5), ("last", 2)]:
        with bank.task(name) as model:
            assert model.config.num_labels == model.num_labels == count
            assert len(model.config.id2label) == count
    with bank.task("named") as model:
        assert model.config.id2label[4] == "e"
        assert model.config.label2id["e"] == 4


def test_half_precision_computes_in_the_dtype_of_the_base(tmp_path):
    answers = {
        name: save_task(tmp_path, name, CONFIGS[name](), dtype=torch.bfloat16) for name in ("last", "lora", "lossless")
    }
    bank = fill(DeltaBank(base(dtype=torch.bfloat16)), tmp_path, answers)
    for name in [*answers, *reversed(answers)]:
        assert torch.equal(ask(bank, name), answers[name]), name
    copies = sum(t.nbytes for n, t in load_file(tmp_path / "last" / "adapter_model.safetensors").items())
    bank = fill(DeltaBank(base(dtype=torch.bfloat16)), tmp_path, ["last"])
    bank.activate("last")
    assert bank.stats().device_bytes < 0.75 * copies + 256 * 40  # the file has float32


def test_quantised_tasks_are_decoded(tmp_path):
    values = save_task(tmp_path, "values", SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2]))
    for encoding in ("bf16", "int8"):
        save_task(tmp_path, encoding, SurgicalConfig(task_type="SEQ_CLS", layers=[1, 2], encoding=encoding))
    for host in (0, None, "1MB"):
        bank = fill(DeltaBank(base(), host_budget=host), tmp_path, ["int8", "bf16"])
        for encoding in ("bf16", "int8"):
            torch.testing.assert_close(ask(bank, encoding), values, atol=2e-3, rtol=0)
            assert not torch.equal(ask(bank, encoding), values)


def test_other_methods_of_peft_are_taken_too(tmp_path):
    config = IA3Config(task_type="SEQ_CLS", target_modules=["query"], feedforward_modules=[], init_ia3_weights=False)
    answer = save_task(tmp_path, "ia3", config)
    surgical = save_task(tmp_path, "last", CONFIGS["last"]())
    bank = fill(DeltaBank(base()), tmp_path, ["last", "ia3"])
    for name, wanted in [("ia3", answer), ("last", surgical), ("ia3", answer)]:
        assert torch.equal(ask(bank, name), wanted), name


def test_a_surgical_task_may_come_after_two_other_methods_on_the_same_modules(tmp_path):
    ia3 = IA3Config(task_type="SEQ_CLS", target_modules=["query"], feedforward_modules=[], init_ia3_weights=False)
    configs = {"lora": CONFIGS["lora"](), "ia3": ia3, "last": CONFIGS["last"](), "spafit": CONFIGS["spafit"]()}
    answers = {name: save_task(tmp_path, name, config) for name, config in configs.items()}
    bank = fill(DeltaBank(base()), tmp_path, answers)
    for name in [*answers, *answers]:
        assert torch.equal(ask(bank, name), answers[name]), name


def test_the_bases_own_tensors_are_never_written_to(tasks):
    folder, answers = tasks
    model = base()
    own = model.state_dict(keep_vars=True)
    before = {name: tensor.clone() for name, tensor in own.items()}
    bank = fill(DeltaBank(model, device_budget=60_000), folder, answers)
    for name in [*answers, *answers]:
        ask(bank, name)
    assert all(torch.equal(own[name], before[name]) for name in before)


# ---- several tasks in one batch


def test_rows_of_one_batch_may_belong_to_different_tasks(tasks):
    folder, answers = tasks
    model = base()
    alone = model(**X).logits.detach()
    bank = fill(DeltaBank(model), folder, answers)
    ask(bank, "first")
    for names in (["last", "lora", "__base__", "spafit"], ["part", "part", "last", "__base__"], ["__base__"] * 4):
        with bank.batch(names) as served, torch.no_grad():
            logits = served(**X).logits
        for row, name in enumerate(names):
            wanted = alone if name == "__base__" else answers[name]
            torch.testing.assert_close(logits[row], wanted[row], atol=1e-6, rtol=1e-5)
    assert torch.equal(ask(bank, "first"), answers["first"])


def test_a_batch_of_tasks_that_cannot_be_is_refused(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, answers)
    with pytest.raises(ValueError, match="differ in size and cannot share a batch"), bank.batch(["last", "five"]):
        pass
    with pytest.raises(ValueError, match="There is no task 'lost'"), bank.batch(["last", "lost"]):
        pass
    assert torch.equal(ask(bank, "last"), answers["last"])


def test_a_batch_of_the_base_and_a_task_with_a_head_of_another_size_is_refused(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "five", "lora5"])
    bank.add("told wrongly", folder / "lora5", labels={"num_labels": 2})
    for names in (["five", "__base__"], ["lora5", "last"], ["told wrongly", "last"], ["__base__", "five", "five"]):
        with pytest.raises(ValueError, match="differ in size and cannot share a batch"), bank.batch(names):
            pass
    with bank.batch(["five", "lora5", "five", "five"]) as model, torch.no_grad():
        torch.testing.assert_close(model(**X).logits[1], answers["lora5"][1], atol=1e-6, rtol=1e-5)


def test_the_names_of_a_batch_may_come_from_a_generator(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "lora"])
    names = ["last", "lora", "lora", "last"]
    with bank.batch(name for name in names) as model, torch.no_grad():
        logits = model(**X).logits
    for row, name in enumerate(names):
        torch.testing.assert_close(logits[row], answers[name][row], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "names", [["lora"], ["lora", "last"], ["lora"] * 5, ["lora", "last", "__base__"], ["__base__"] * 3]
)
def test_a_batch_with_more_or_fewer_rows_than_names_is_refused(names, tasks):
    folder, _ = tasks
    bank = fill(DeltaBank(base()), folder, ["lora", "last"])
    with bank.batch(names) as model, torch.no_grad(), pytest.raises(ValueError, match=f"4 rows.*{len(names)}"):
        model(**X)
    ask(bank, "lora")


def test_names_that_mean_something_else_are_refused(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last"])
    with pytest.raises(ValueError, match="cannot be called '__base__'"):
        bank.add("__base__", folder / "first")
    with pytest.raises(ValueError, match="names='last' must be a list"), bank.batch("last"):
        pass
    assert torch.equal(ask(bank, "last"), answers["last"])


# ---- budgets


def size_on_device(folder: Path, name: str) -> int:
    bank = fill(DeltaBank(base()), folder, [name])
    bank.activate(name)
    return bank.stats().device_bytes


def storages(model) -> dict[int, int]:
    """The memory that a model's parameters lie in: bytes by address."""
    gc.collect()
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def buffers_alive(bank) -> int:
    """The bytes of all memory that tasks' tensors in the model lie in."""
    return sum(storages(bank.model).values()) - sum(storages(base()).values())


def test_budgets_are_kept_and_counted_and_the_least_recently_used_goes_first(tmp_path):
    names = [f"t{i}" for i in range(6)]
    answers = {
        n: save_task(tmp_path, n, SurgicalConfig(task_type="SEQ_CLS", layers=[1]), seed=i) for i, n in enumerate(names)
    }
    size = size_on_device(tmp_path, "t0")
    bank = fill(DeltaBank(base(), device_budget=2 * size, host_budget=4 * size), tmp_path, names)
    for name in names:
        assert torch.equal(ask(bank, name), answers[name])
        assert bank.stats().device_bytes <= 2 * size
        assert buffers_alive(bank) <= 2 * size
    stats = bank.stats()
    assert (stats.device_peak, stats.host_peak) == (2 * size, 4 * size)
    assert (stats.disk_hits, stats.device_evictions, stats.host_evictions) == (6, 4, 2)
    ask(bank, "t4")  # on the device
    assert (bank.stats().device_hits, bank.stats().host_hits) == (1, 0)
    ask(bank, "t3")  # in host memory, and t5 leaves the device for it
    assert (bank.stats().device_hits, bank.stats().host_hits) == (1, 1)
    ask(bank, "t4")
    assert bank.stats().device_hits == 2
    ask(bank, "t0")  # only on disk
    assert bank.stats().disk_hits == 7
    assert all(torch.equal(ask(bank, name), answers[name]) for name in names)


def test_a_budget_of_one_task_is_enough(tmp_path):
    names = ["a", "b"]
    answers = {
        n: save_task(tmp_path, n, SurgicalConfig(task_type="SEQ_CLS", layers=[1]), seed=i) for i, n in enumerate(names)
    }
    size = size_on_device(tmp_path, "a")
    bank = fill(DeltaBank(base(), device_budget=size), tmp_path, names)
    for name in "abab":
        assert torch.equal(ask(bank, name), answers[name])
    assert bank.stats().device_peak == size
    bank = DeltaBank(base(), device_budget=size - 1)
    with pytest.raises(NoRoomError, match=rf"Task 'a': .*needs {size:,} bytes .*device budget of {size - 1:,}"):
        bank.add("a", tmp_path / "a")  # it could never be used
    assert "a" not in bank
    with (
        pytest.raises(NoRoomError, match="Task 'b'"),
        fill(DeltaBank(base(), size), tmp_path, names).batch(["a", "b", "a", "b"]),
    ):
        pass


def test_a_task_takes_over_the_memory_of_the_one_that_leaves_for_it(tmp_path):
    answers = {
        n: save_task(tmp_path, n, SurgicalConfig(task_type="SEQ_CLS", layers=layers), seed=i)
        for i, (n, layers) in enumerate({"a": [1], "b": [2], "two": [0, 1]}.items())
    }
    size = size_on_device(tmp_path, "a")
    bank = fill(DeltaBank(base(), device_budget=2 * size), tmp_path, answers)
    for name in ("a", "two", "a", "b", "two", "b", "a"):
        assert torch.equal(ask(bank, name), answers[name]), name
        assert buffers_alive(bank) <= 2 * size
    model = base()
    own = storages(model)
    bank = fill(DeltaBank(model, device_budget=size), tmp_path, ["a", "b"])
    places = set()
    for name in "abab":
        assert torch.equal(ask(bank, name), answers[name]), name
        places |= storages(model).keys() - own.keys()
    assert len(places) == 1


def test_nothing_is_left_of_removed_tasks(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last"])
    ask(bank, "last")
    before = sum(1 for _ in bank.model.modules()), buffers_alive(bank)
    fill(bank, folder, ["first", "lora", "five"])
    for _ in range(2):
        for name in ("first", "lora", "five", "last"):
            ask(bank, name)
    for name in ("first", "lora", "five"):
        bank.remove(name)
    assert "first" not in bank
    assert list(bank) == ["last"]
    with pytest.raises(ValueError, match="There is no task 'first'. Tasks: last"):
        ask(bank, "first")
    assert torch.equal(ask(bank, "last"), answers["last"])
    assert buffers_alive(bank) == before[1]
    fill(bank, folder, ["first"])
    assert torch.equal(ask(bank, "first"), answers["first"])


def test_adding_and_removing_leaves_a_constant_number_of_tensors(many):
    folder, answers = many
    bank = DeltaBank(base())
    counts = []
    for i, name in enumerate(list(answers)[:24]):
        bank.add(name, folder / name)
        assert torch.equal(ask(bank, name), answers[name])
        bank.remove(name)
        if i % 8 == 7:
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]


# ---- registering


class CountedFile:
    """A file that counts the bytes that are read of it."""

    def __init__(self, file, counts: dict[str, int]):
        self._file, self._counts = file, counts

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._counts[self._file.name] = self._counts.get(self._file.name, 0) + len(data)
        return data

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self._file.close()


def test_two_hundred_tasks_are_registered_by_their_headers_alone(tmp_path, monkeypatch):
    kinds = ["last", "first", "lora", "extra"]
    for name in kinds:
        save_task(tmp_path, name, CONFIGS[name]())
    headers = {}
    for i in range(200):
        shutil.copytree(tmp_path / kinds[i % 4], tmp_path / f"t{i}")
        path = tmp_path / f"t{i}" / "adapter_model.safetensors"
        headers[str(path)] = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    counts: dict[str, int] = {}
    monkeypatch.setattr(memory, "open", lambda path, mode: CountedFile(open(path, mode), counts), raising=False)
    for read in ("read", "__getitem__"):
        monkeypatch.setattr(TaskFile, read, lambda *_: pytest.fail("values were read"))
    bank = DeltaBank(base())
    for i in range(200):
        bank.add(f"t{i}", tmp_path / f"t{i}")
    assert counts == headers
    stats = bank.stats()
    assert (stats.tasks, stats.bytes_read, stats.device_bytes, stats.host_bytes) == (200, 0, 0, 0)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("method", ["last", "lora"])
def test_what_is_damaged_fails_alone_and_by_name(method, readers, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "READERS", readers)
    monkeypatch.setattr(memory, "_WORTH_A_READER", 1)
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["first", "lora"])
    for name in ("cut", "gone", "swapped", "broken"):
        shutil.copytree(folder / method, tmp_path / name)
    weights = "adapter_model.safetensors"
    data = (tmp_path / "cut" / weights).read_bytes()
    (tmp_path / "cut" / weights).write_bytes(data[:-10])
    with pytest.raises(ValueError, match="Task 'cut': .*cannot be read as a safetensors file .*not fully covered"):
        bank.add("cut", tmp_path / "cut")
    with pytest.raises(ValueError, match="Task 'none': There is no folder .*none"):
        bank.add("none", tmp_path / "none")
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="Task 'broken': .*adapter_config.json"):
        bank.add("broken", tmp_path / "broken")

    bank.add("gone", tmp_path / "gone")
    bank.add("swapped", tmp_path / "swapped")
    (tmp_path / "gone" / weights).unlink()
    (tmp_path / "swapped" / weights).write_bytes(data)
    for name in ("gone", "swapped", "gone"):
        with pytest.raises(ValueError, match=f"Task '{name}': .*cannot be read"):
            ask(bank, name)
        assert torch.equal(ask(bank, "first"), answers["first"])
    assert bank.stats().failures == 3
    assert torch.equal(ask(bank, "lora"), answers["lora"])


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("host_budget", [0, "1MB"])
@pytest.mark.parametrize("name", ["last", "lossless", "lora"])
def test_a_file_that_is_overwritten_while_it_is_read_is_an_error(
    name, host_budget, readers, tasks, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "READERS", readers)
    monkeypatch.setattr(memory, "_WORTH_A_READER", 1)
    folder, answers = tasks
    shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / name / "adapter_model.safetensors"
    other = save_task(tmp_path, "other", CONFIGS[name](), seed=77)
    os.utime(path, (0, 10**9))
    read_all, calls = memory.read_all, itertools.count()

    def overwritten(*args):
        read_all(*args)
        if next(calls) == 4:
            with open(path, "r+b") as target:
                target.write((tmp_path / "other" / "adapter_model.safetensors").read_bytes())

    bank = fill(DeltaBank(base(), host_budget=host_budget), folder, ["first"])
    bank.add(name, tmp_path / name)
    monkeypatch.setattr(memory, "read_all", overwritten)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"Task '{name}': .*was changed after the bank read its header"):
            ask(bank, name)
    assert torch.equal(ask(bank, "first"), answers["first"])
    bank.remove(name)
    bank.add(name, tmp_path / "other")
    assert torch.equal(ask(bank, name), other)


def test_what_does_not_fit_the_base_is_refused_when_added(tasks, tmp_path):
    folder, _ = tasks
    bank = fill(DeltaBank(base()), folder, ["first"])
    model = get_peft_model(build("bert", seed=3), CONFIGS["last"]())
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="Task 'other': .*trained on another base model: .*other values"):
        bank.add("other", tmp_path / "other")
    model = get_peft_model(build("bert", num_hidden_layers=6), CONFIGS["last"]())
    model.save_pretrained(tmp_path / "deep")
    with pytest.raises(ValueError, match="Task 'deep': .*number of layers"):
        bank.add("deep", tmp_path / "deep")
    shutil.copytree(folder / "last", tmp_path / "less")
    tensors = load_file(tmp_path / "less" / "adapter_model.safetensors")
    dropped = sorted(tensors)[5]
    del tensors[dropped]
    rewrite(tmp_path / "less", tensors)
    with pytest.raises(ValueError, match=f"Task 'less': .*lacks the tensor '{dropped}'"):
        bank.add("less", tmp_path / "less")
    with pytest.raises(ValueError, match="There is a task 'first' already"):
        bank.add("first", folder / "first")
    assert list(bank) == ["first"]


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_2", "olora", "loftq", "corda", "lora_ga", "kasa"])
def test_a_lora_that_changes_the_base_is_refused_when_added(method, tmp_path):
    settings = {"kasa_config": {}} if method == "kasa" else {"init_lora_weights": method}
    if method == "loftq":
        settings["loftq_config"] = {"loftq_bits": 4}
    save_task(tmp_path, method, CONFIGS["lora"]())
    path = tmp_path / method / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    bank = DeltaBank(base())
    with pytest.raises(ValueError, match=f"Task '{method}': .*{method}.* changes the base's own weights"):
        bank.add(method, tmp_path / method)
    assert list(bank) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 3], [1, 4]]),
        ("alora_invocation_tokens", [7, 8]),
        ("arrow_config", {"router_temperature": 1.0}),
    ],
)
def test_an_option_that_changes_more_than_modules_is_refused_when_added(option, value, tasks, tmp_path):
    shutil.copytree(tasks[0] / "lora", tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), option: value}))
    bank = DeltaBank(base())
    with pytest.raises(ValueError, match=f"Task 'lora': A DeltaBank does not take {option}, which .*with PeftModel"):
        bank.add("lora", tmp_path / "lora")
    assert list(bank) == []


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        PolyConfig(task_type="SEQ_CLS", target_modules=["query"], r=2),
        VBLoRAConfig(task_type="SEQ_CLS", target_modules=["query"], num_vectors=8, vector_length=8),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_a_method_that_needs_more_than_its_modules_is_refused_when_added(config, tmp_path):
    get_peft_model(base(), config).save_pretrained(tmp_path / "task")
    bank = DeltaBank(base())
    with pytest.raises(ValueError, match=f"does not take {config.peft_type.value}, .* with PeftModel. A bank takes"):
        bank.add("task", tmp_path / "task")
    assert list(bank) == []


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_lora_that_changed_the_base_is_served_once_it_is_converted(method, tmp_path):
    model = get_peft_model(base(), LoraConfig(target_modules=["query"], r=2, init_lora_weights=method)).eval()
    model.peft_config["default"].init_lora_weights = True  # as PEFT wants it before a conversion
    model.save_pretrained(tmp_path / "begun")
    model.peft_config["default"].init_lora_weights = method
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" in name:
                parameter.mul_(1.5)
        answer = model(**X).logits
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
    bank = fill(DeltaBank(base()), tmp_path, ["plain"])
    torch.testing.assert_close(ask(bank, "plain"), answer, atol=1e-5, rtol=0)


def test_lora_that_does_not_fit_fails_when_it_is_used(tasks, tmp_path):
    folder, answers = tasks
    shutil.copytree(folder / "lora", tmp_path / "rank")
    config = json.loads((tmp_path / "rank" / "adapter_config.json").read_text())
    (tmp_path / "rank" / "adapter_config.json").write_text(json.dumps({**config, "r": 4}))
    shutil.copytree(folder / "lora", tmp_path / "targets")
    (tmp_path / "targets" / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["query"]}))
    bank = fill(DeltaBank(base()), tmp_path, ["rank", "targets"])
    bank.add("lora", folder / "lora")
    for _ in range(2):
        with pytest.raises(ValueError, match="Task 'rank': .*has shape .*this model needs"):
            ask(bank, "rank")
    with pytest.raises(ValueError, match="Task 'targets': .*has a tensor .*configuration does not account for"):
        ask(bank, "targets")
    assert torch.equal(ask(bank, "lora"), answers["lora"])


def test_a_model_with_adapters_and_odd_budgets_are_refused(tasks):
    with pytest.raises(ValueError, match="has adapters already.*unload"):
        DeltaBank(get_peft_model(base(), CONFIGS["last"]()))
    for budget in ("much", -1, 1.5, True):
        with pytest.raises(ValueError, match="must be a number of bytes"):
            DeltaBank(base(), device_budget=budget)
    assert parse_budget("1KiB") == 1024


# ---- threads


def hammer(
    bank, answers, *, threads: int, seconds: float, mix, ask=ask, is_right=torch.equal
) -> tuple[int, list[str]]:
    """Let many threads ask for random tasks, five each at least; gives the number of answers and what was wrong."""
    wrong: list[str] = []
    done = [0] * threads
    deadline = time.monotonic() + seconds

    def work(number: int) -> None:
        chance = random.Random(number)
        while (time.monotonic() < deadline or done[number] < 5) and not wrong:
            name = mix(chance)
            try:
                if not is_right(ask(bank, name), answers[name]):
                    wrong.append(f"{name}: another answer")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            done[number] += 1
            if chance.random() < 0.05:
                bank.prefetch(mix(chance))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(seconds + 300)
    assert not any(worker.is_alive() for worker in workers)
    return sum(done), wrong


@pytest.mark.parametrize("host_budget", [0, 200_000])
def test_sixteen_threads_on_fifty_tasks_get_only_right_answers(host_budget, many):
    # 60 s each with PEFT_SURGICAL_HAMMER=60
    folder, answers = many
    seconds = float(os.environ.get("PEFT_SURGICAL_HAMMER", 3))
    bank = fill(DeltaBank(base(), device_budget=150_000, host_budget=host_budget), folder, answers)
    names = list(answers)
    count, wrong = hammer(
        bank, answers, threads=16, seconds=seconds, mix=lambda c: names[min(int(c.expovariate(0.1)), 49)]
    )
    assert wrong == []
    stats = bank.stats()
    assert count >= 80
    assert stats.device_peak <= 150_000
    assert stats.host_peak <= host_budget
    assert stats.device_evictions > 10
    assert buffers_alive(bank) <= 150_000


def test_threads_of_different_methods_get_only_right_answers(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base(), device_budget=120_000), folder, answers)
    count, wrong = hammer(bank, answers, threads=6, seconds=2, mix=lambda c: c.choice(list(answers)))
    assert wrong == []
    assert count >= 30


def test_one_thread_cannot_use_two_tasks_at_once_but_one_twice(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    with bank.task("last"):
        with bank.task("last") as model, torch.no_grad():
            assert torch.equal(model(**X).logits, answers["last"])
        with pytest.raises(RuntimeError, match="cannot switch"), bank.task("first"):
            pass
        with torch.no_grad():
            assert torch.equal(bank.model(**X).logits, answers["last"])
    assert torch.equal(ask(bank, "first"), answers["first"])


def test_who_waits_for_a_task_that_is_removed_is_told_so(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    told: list[str] = []

    def ask_for_first() -> None:
        try:
            ask(bank, "first")
        except ValueError as error:
            told.append(str(error))

    threads = [threading.Thread(target=bank.remove, args=("first",)), threading.Thread(target=ask_for_first)]
    with bank.task("last"):
        for thread in threads:
            start_and_wait(thread)
    for thread in threads:
        thread.join(30)
    assert len(told) == 1
    assert "There is no task 'first'" in told[0]
    assert torch.equal(ask(bank, "last"), answers["last"])


@pytest.mark.parametrize("compiled", [False, True])
def test_forwards_within_inference_mode_work(compiled, tasks):
    folder, answers = tasks
    budget = None if compiled else 60_000
    bank = fill(DeltaBank(base(), device_budget=budget, host_budget=60_000, compiled=compiled), folder, answers)
    for name in [*answers, *answers]:
        with torch.inference_mode(), bank.task(name) as model:
            assert torch.equal(model(**X).logits, answers[name]), name
    ask(bank, "first")
    assert torch.equal(ask(bank, "last"), answers["last"])


def test_prefetch_brings_a_task_without_switching(tasks):
    folder, answers = tasks
    bank = fill(DeltaBank(base()), folder, ["last", "first"])
    with bank.task("last") as model, torch.no_grad():
        bank.prefetch("first").result(10)
        assert torch.equal(model(**X).logits, answers["last"])
    assert bank.stats().disk_hits == 2
    hits = bank.stats().device_hits
    assert torch.equal(ask(bank, "first"), answers["first"])
    assert bank.stats().device_hits == hits + 1
    with pytest.raises(ValueError, match="no task 'lost'"):
        bank.prefetch("lost")


def test_a_prefetch_never_takes_the_room_of_the_active_task(tmp_path):
    for i, name in enumerate("ab"):
        save_task(tmp_path, name, SurgicalConfig(task_type="SEQ_CLS", layers=[1]), seed=i)
    bank = fill(DeltaBank(base(), device_budget=size_on_device(tmp_path, "a")), tmp_path, "ab")
    with bank.task("a"):
        bank.prefetch("b").result(10)
        assert bank.stats().device_evictions == 0


# ---- compiled


def counting_backend():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    return backend, compiled


def test_a_compiled_model_is_never_compiled_again_over_a_hundred_switches(many):
    folder, answers = many
    names = list(answers)[:10]
    torch._dynamo.reset()
    bank = fill(DeltaBank(base(), device_budget=200_000, compiled=True), folder, names)
    backend, compiled = counting_backend()
    model = torch.compile(bank.model, backend=backend, fullgraph=True)
    chance = random.Random(0)
    for name in [*names, *chance.choices(names, k=100)]:
        with bank.task(name), torch.no_grad():
            assert torch.equal(model(**X).logits, answers[name]), name
    assert len(compiled) == 1
    assert bank.stats().device_peak <= 200_000


def test_tensors_keep_their_identity_in_a_compiled_bank(many):
    folder, answers = many
    names = list(answers)[:4]
    bank = fill(DeltaBank(base(), compiled=True), folder, names)
    bank.activate(names[0])
    before = [(id(p), p.data_ptr()) for p in bank.model.parameters()]
    for name in names:
        assert torch.equal(ask(bank, name), answers[name])
    assert [(id(p), p.data_ptr()) for p in bank.model.parameters()] == before


def test_a_compiled_bank_compiles_once_per_size_of_heads_and_kind_of_task(tasks):
    folder, answers = tasks
    names = ["last", "five", "first", "lora"]
    torch._dynamo.reset()
    bank = fill(DeltaBank(base(), compiled=True), folder, names)
    backend, compiled = counting_backend()
    model = torch.compile(bank.model, backend=backend)
    counts = []
    for name in [*names, *names, *reversed(names)]:
        with bank.task(name), torch.no_grad():
            torch.testing.assert_close(model(**X).logits, answers[name], atol=1e-6, rtol=1e-5)
        counts.append(len(compiled))
    assert counts[len(names) - 1] == counts[-1]
    assert counts[:3] == [1, 2, 2]  # a head of another size, then the first one again


def test_a_task_that_tunes_further_modules_makes_room_for_itself(tasks, caplog):
    folder, answers = tasks
    bank = fill(DeltaBank(base(), compiled=True), folder, ["last"])
    assert torch.equal(ask(bank, "last"), answers["last"])
    bank.add("first", folder / "first")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(ask(bank, "first"), answers["first"])
    assert "compiled anew" in caplog.text
    assert torch.equal(ask(bank, "last"), answers["last"])
    with pytest.raises(ValueError, match="one task in the model at a time"), bank.batch(["last"] * 4):
        pass


# ---- the parts


def test_a_lock_lets_readers_of_one_key_in_together_and_serves_keys_in_order():
    order: list[str] = []
    lock = SwitchLock(lambda key: order.append(str(key)))
    inside = threading.Barrier(3, timeout=10)

    def read(key, barrier=None):
        with lock.held(key):
            if barrier:
                barrier.wait()

    threads = [threading.Thread(target=read, args=("a", inside)) for _ in range(2)]
    for thread in threads:
        thread.start()
    with lock.held("a"):
        inside.wait()  # three at once
        waiting = [threading.Thread(target=read, args=(key,)) for key in ("b", "c", "b", "a")]
        for thread in waiting:
            start_and_wait(thread)
        assert order == ["a"]
    for thread in (*threads, *waiting):
        thread.join(10)
    assert order == ["a", "b", "c", "a"]  # both who wanted b went in together


def test_a_switch_that_fails_leaves_no_key_in_place():
    keys = []

    def switch(key):
        keys.append(key)
        if key == "bad":
            raise ValueError("no")

    lock = SwitchLock(switch)
    with lock.held("a"):
        pass
    with pytest.raises(ValueError, match="no"), lock.held("bad"):
        pass
    with lock.held("a"):
        pass
    assert keys == ["a", "bad", "a"]
    with lock.exclusively():
        pass
    with lock.held("a"):
        pass
    assert keys == ["a", "bad", "a"]


def test_a_budget_refuses_without_giving_anything_up():
    given_up = []
    memory = LruBudget("device", 100, given_up.append)
    for name in "ab":
        memory.reserve(name, 40)
        memory.put(name, name)
    assert memory.get("a") == "a"
    with pytest.raises(NoRoomError):
        memory.reserve("c", 101)
    with pytest.raises(NoRoomError):
        memory.reserve("c", 60, keep={"a", "b"})
    assert given_up == []
    memory.reserve("c", 50)
    assert given_up == ["b"]
    assert (memory.used, memory.peak) == (90, 90)


def test_nothing_that_a_module_keeps_holds_a_removed_tasks_memory(tmp_path):
    """A norm that is not PyTorch's own keeps what it computed with last."""
    tuned = get_peft_model(build("llama"), SurgicalConfig(task_type="CAUSAL_LM", layers=[1]))
    tuned.save_pretrained(tmp_path / "t")
    bank = DeltaBank(build("llama"))
    bank.add("t", tmp_path / "t")
    with bank.task("t") as active, torch.no_grad():
        active(torch.tensor([[1, 2, 3]]))
    buffer = bank._cache.on_device.get(bank._tasks["t"]).buffer
    place = buffer.untyped_storage().data_ptr()
    twins = [m._kept_twin for m in bank.model.modules() if isinstance(m, TunedModule)]
    kept = [twin._kept[1] for twin in twins if twin._kept[1] is not None]
    assert kept
    assert all(module.weight.untyped_storage().data_ptr() == place for module in kept)
    bank.remove("t")
    assert not any(twin._kept[1] for twin in twins)


def test_a_file_is_read_into_aligned_places(tmp_path):
    tensors = {
        "a": torch.randn(3),
        "b": torch.randint(0, 9, (5,), dtype=torch.int8),
        "c": torch.randn(2, 2).bfloat16(),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    task_file = TaskFile(tmp_path / "x.safetensors")
    layout = Layout({name: task_file.spec(name) for name in ("b", "c")})
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    task_file.read(layout, buffer)
    views = layout.views(buffer)
    assert all(torch.equal(views[name], tensors[name]) for name in ("b", "c"))
    assert all(offset % 256 == 0 for offset in layout.offsets.values())
    assert Spec(torch.bfloat16, (2, 2)).nbytes == 8
