"""A plan against what a real run of the same job holds in its steps and writes, each counted here by other means."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_chat import save_language_data, save_language_model
from tiny_task import save_base, save_data
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from typer.testing import CliRunner

import peft_surgical.training.planning as planning
from peft_surgical import convert_adapter
from peft_surgical.cli import app
from peft_surgical.files import adapter
from peft_surgical.files.encodings import ENCODINGS
from peft_surgical.training import Plan, TrainingJob, TrainingRun, plan
from peft_surgical.training.common import JointCheckpoints


ROWS = 8


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, dict[str, str]]:
    """Models with data of which one batch is all that is trained on."""
    base = save_base(tmp_path_factory.mktemp("base"))
    data = save_data(tmp_path_factory.mktemp("data"), train=ROWS, validation=4)
    chat = save_language_data(tmp_path_factory.mktemp("chat"), train=ROWS, validation=4)
    language = save_language_model(tmp_path_factory.mktemp("language"))
    return {
        "labels": {"model": str(base), "data": str(data)},
        "chats": {"model": str(language), "data": str(chat)},
    }


@pytest.fixture
def job(places, tmp_path):
    def make(kind: str = "labels", **options) -> TrainingJob:
        usual = {"output": str(tmp_path / "out"), "batch_size": ROWS, "select_on": "none", "max_steps": 2}
        return TrainingJob(**{**places[kind], **usual, **options})

    return make


class Count(TrainerCallback):
    """Bytes of a run's gradients and of its optimizer's states, added up tensor by tensor."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.requires_grad)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        states = [value for entry in optimizer.state.values() for value in entry.values()]
        self.optimizer = sum(value.numel() * value.element_size() for value in states if torch.is_tensor(value))


def measure(job: TrainingJob, monkeypatch) -> tuple[dict[str, int], Path]:
    """What two real steps of a run hold, and the file that it writes."""
    count = Count()
    step = JointCheckpoints.training_step

    def hooked(self, model, *args, **kwargs):
        saved, own = {}, {p.untyped_storage()._cdata for p in itertools.chain(model.parameters(), model.buffers())}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage  # which keeps it, or its number might be given again
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = step(self, model, *args, **kwargs)
        count.activations = sum(len(storage) for storage in saved.values())
        return loss

    monkeypatch.setattr(JointCheckpoints, "training_step", hooked)
    run = TrainingRun(job, callbacks=[count])
    run.fit()
    run.finish()
    loader = AutoModelForCausalLM if run.is_language else AutoModelForSequenceClassification
    base = loader.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    weights = sum(t.numel() * t.element_size() for t in itertools.chain(base.parameters(), base.buffers()))
    all_held = itertools.chain(run.model.parameters(), run.model.buffers())
    copies = sum(t.numel() * t.element_size() for t in all_held) - weights
    (file,) = Path(job.output).glob("*.safetensors")
    return {"weights": weights, "copies": copies, **vars(count)}, file


def bytes_of_tensors(file: Path) -> int:
    content = file.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("labels", {"method": "surgical", "top_k": 2}),
        ("labels", {"method": "spafit", "lora_r": 2}),
        ("labels", {"method": "lora"}),
        ("labels", {"method": "full", "optim": "sgd"}),
        ("labels", {"method": "last", "dtype": "bfloat16", "optim": "adafactor"}),
        ("labels", {"method": "last", "dtype": "bfloat16", "stochastic_rounding": True}),
        ("chats", {"method": "surgical", "layers": (0, -1)}),
        ("chats", {"method": "lora"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_a_plan_is_what_a_real_step_holds_and_what_the_run_writes(job, monkeypatch, kind, options):
    if kind == "chats":
        pytest.importorskip("trl")
    asked = job(kind, **options)
    before = planning.TrainingRun(asked)
    before.adapt()
    known = planning.plan_before_steps(before)
    found = plan(asked)
    measured, file = measure(asked.__class__(**{**vars(asked), "output": f"{asked.output}-run"}), monkeypatch)
    assert {name: value for name, value in vars(found.memory).items() if name != "peak"} == measured
    assert found.files["values"] == bytes_of_tensors(file)
    assert found.memory.total == found.memory.peak
    assert known.files == found.files
    if "optim" not in options:
        assert vars(known.memory) == measured | {"activations": None, "peak": None}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("labels", {}),
        ("labels", {"gradient_checkpointing": True}),
        ("labels", {"method": "full"}),
        ("chats", {"method": "lora"}),
        ("chats", {"layers": (0, -1)}),
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_allocator(job, tmp_path, kind, options):
    """PyTorch's own record of what its allocator gave and took, in the second step of a real run."""
    if kind == "chats":
        pytest.importorskip("trl")
    asked = job(kind, **options)
    record = tmp_path / "trace.json"

    class Profile(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.profile = torch.profiler.profile(
                profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
            )
            if state.global_step == 1:
                self.profile.start()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                self.profile.stop()
                self.profile.export_chrome_trace(str(record))

    run = TrainingRun(asked, callbacks=[Profile()])
    run.fit()
    events = [e for e in json.loads(record.read_text())["traceEvents"] if e["name"] == "[memory]"]
    given = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    found = plan(asked).memory
    before = found.weights + found.copies + found.optimizer
    assert found.peak == pytest.approx(before + max(itertools.accumulate(given)), rel=0.1)


def test_sizes_in_other_encodings_are_the_most_that_converted_files_take(job, tmp_path, monkeypatch):
    asked = job(method="last", top_k=2)
    found = plan(asked)
    run = TrainingRun(asked)
    run.fit()
    run.finish()
    lossy = [name for name, encoding in ENCODINGS.items() if encoding.lossy]
    assert [*found.files] == ["values", *lossy]
    for name in lossy:
        convert_adapter(asked.output, tmp_path / name, encoding=name, base=asked.model)
        assert 0 < bytes_of_tensors(tmp_path / name / "adapter_model.safetensors") <= found.files[name], name
    pack = adapter.pack
    monkeypatch.setattr(adapter, "pack", lambda part: pack(part).repeat(100))  # so nothing is smaller by it
    for name in lossy:
        convert_adapter(asked.output, tmp_path / "most" / name, encoding=name, base=asked.model)
        assert found.files[name] == bytes_of_tensors(tmp_path / "most" / name / "adapter_model.safetensors"), name
    head = sum(p.nbytes for n, p in run.model.named_parameters() if "modules_to_save.default" in n)
    assert found.layer == (found.files["values"] - head) / 2
    assert found.layers == {"encoder": [2, 3]}


def test_what_would_need_less_is_what_its_own_plan_says(job):
    found = plan(job(top_k=1))
    assert [*found.smaller] == ["--batch-size 4", "--gradient-checkpointing"]
    assert found.smaller["--batch-size 4"] == plan(job(top_k=1, batch_size=4)).memory
    checkpointed = plan(job(top_k=1, gradient_checkpointing=True))
    assert found.smaller["--gradient-checkpointing"] == checkpointed.memory
    assert [*checkpointed.smaller] == ["--batch-size 4"]
    assert checkpointed.memory.activations < found.memory.activations


@pytest.mark.parametrize(("most", "needs"), [(4, "--batch-size 4"), (0, None)])
def test_what_does_not_fit_is_halved_until_it_does(job, monkeypatch, most, needs):
    compute, tried = JointCheckpoints.compute_loss, []

    def short_of_memory(self, model, inputs, *args, **kwargs):
        rows = len(inputs["input_ids"])
        tried.append((rows, model.is_gradient_checkpointing))
        if rows > most:
            raise torch.OutOfMemoryError("a GPU has no memory left")
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(JointCheckpoints, "compute_loss", short_of_memory)
    found = plan(job())
    assert found.needs == needs
    assert tried[:3] == [(8, False), (8, True), (4, False)]
    if needs:
        assert found.batch[0] == 4
        monkeypatch.undo()
        assert found.memory == plan(job(batch_size=4)).memory
    else:
        assert tried[-1] == (1, True)
        assert found.memory.activations is None


def test_an_epoch_is_as_many_batches_and_updates_as_it_takes(job, tmp_path, monkeypatch):
    rows = save_data(tmp_path / "rows", train=50, validation=4)
    seconds = itertools.count()
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    found = plan(job(data=str(rows), gradient_accumulation=2))
    assert found.seconds == 7 + 4  # 50 rows: 7 batches and 4 updates, of a second each


def test_the_longest_rows_are_measured(job, tmp_path):
    rows = save_data(tmp_path / "rows", train=200, validation=4)
    found = plan(job(data=str(rows)))
    assert found.batch == (8, 11)  # 9 words and two tokens around them
    assert found.memory.activations > plan(job(data=str(rows), max_length=6)).memory.activations


def test_the_command_takes_the_options_of_train_and_writes_nothing(job, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    asked = job()
    base = ["--data", asked.data, "--method", "surgical", "--top-k", "2", "--batch-size", "8", "--select-on", "none"]
    words = CliRunner().invoke(app, ["plan", asked.model, *base, "--score", "fisher", "--samples", "4"])
    picture = tmp_path_factory.mktemp("picture") / "plan.svg"
    more = ["--output", "out", "--plot", str(picture)]
    again = CliRunner().invoke(app, ["plan", "--model", asked.model, *base, *more])
    assert (words.exit_code, again.exit_code) == (0, 0), words.output + again.output
    assert [*tmp_path.iterdir()] == []
    found = plan(job(top_k=2))
    assert isinstance(found, Plan)
    assert (
        f"weights {found.memory.weights / 1000:.1f} kB, optimizer {found.memory.optimizer / 1000:.1f} kB"
        in again.output
    )
    assert f"{found.smaller['--batch-size 4'].total / 1000:.1f} kB with --batch-size 4" in again.output
    for text in ("as asked", "activations", "most at one time"):
        assert f"<!-- {text} -->" in picture.read_text()
    assert "num_samples" in words.output or "samples" in words.output


def test_a_plan_of_several_processes_is_refused(job, monkeypatch):
    process = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    monkeypatch.setattr(planning, "this_process", lambda: process)
    with pytest.raises(ValueError, match="measures one device: start it without accelerate launch"):
        plan(job())
