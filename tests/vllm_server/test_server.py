"""Tasks in a real vLLM server on the CPU: answers of each task, what is refused, and what breaks off.

The oracle is vLLM itself with the merged checkpoint of each task. vLLM is no dependency, and its versions of other
packages are its own, so these tests run in an environment of their own: see README.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from adapters import make_config, shake
from peft import get_peft_model
from tiny_chat import save_language_model
from transformers import AutoModelForCausalLM

from peft_surgical import merge_checkpoint


if getattr(importlib.util.find_spec("vllm"), "origin", None) is None:  # a folder of this name is no vLLM
    pytest.skip("vLLM is not installed; see tests/README.md", allow_module_level=True)
httpx = pytest.importorskip("httpx")
from fake_vllm import running  # noqa: E402

from peft_surgical.vllm.client import NO_REUSE, ServedTasks  # noqa: E402
from peft_surgical.vllm.router import create_router  # noqa: E402


TASKS = [f"task{number}" for number in range(20)]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1}
FAMILIES = {"llama": SIZES, "qwen3": {**SIZES, "head_dim": 32}, "gpt2": {"hidden_size": 64}, "mixtral": SIZES}
FAMILIES["gemma3"] = {**FAMILIES["qwen3"], "tie_word_embeddings": True}
HTTP = httpx.Client(timeout=120, limits=NO_REUSE, trust_env=False)
SECONDS = float(os.environ.get("PEFT_SURGICAL_STRESS", 10))
# one block and a half, so that a prefix of another task's would be noticed
PROMPT = [5 + i % 60 for i in range(48)]
ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
OPTIONS = ["--enforce-eager", "--max-model-len=64", "--block-size=32", "--dtype=float32", "--served-model-name=base"]
ORACLE = """
import json, sys
from vllm import LLM, SamplingParams

base, merged, prompt, tasks, fresh = json.loads(sys.argv[1])
options = dict(enforce_eager=True, max_model_len=64, block_size=32, dtype="float32")

def ask(llm):
    sampling = SamplingParams(max_tokens=4, logprobs=5, prompt_logprobs=0, temperature=0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    given = [next(iter(at.values())).logprob for at in found.prompt_logprobs[1:]]
    chosen = found.outputs[0]
    return [given, [at[token].logprob for at, token in zip(chosen.logprobs, chosen.token_ids)]]

llm = LLM(base, **options)
answers = {"base": ask(llm)}
for task in tasks:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{merged}/{task}"})
    llm.reset_prefix_cache()
    answers[task] = ask(llm)
for task in fresh:
    answers[f"{task} fresh"] = ask(LLM(f"{merged}/{task}", **options))
print("ANSWERS" + json.dumps(answers))
"""

EXCHANGE = """
import json, sys
from vllm import LLM, SamplingParams

base, tasks, merged, prompt, dtype = json.loads(sys.argv[1])
extension = "peft_surgical.vllm.worker.TaskWorker"
llm = LLM(base, enforce_eager=True, max_model_len=64, dtype=dtype, worker_extension_cls=extension)

def ask():
    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=4, logprobs=5, temperature=0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    return [{str(token): one.logprob for token, one in at.items()} for at in found.logprobs]

ask()  # the first pass may round in another way than all later ones
said = {"start": ask(), "problems": []}
for name in ["task0", "task3", None, "task1", "task3"]:
    told = llm.collective_rpc("serve_adapter", kwargs={"folder": name and f"{tasks}/{name}"})
    said["problems"] += [worker["problem"] for worker in told]
    said[name or "base"] = ask()
for name in ["task0", "task1", "task3"]:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{merged}/{name}"})
    said[f"{name} merged"] = ask()
print("ANSWERS" + json.dumps(said))
"""


@dataclass
class Served:
    """A server, its files, and the log-probabilities that each task's merged checkpoint has in vLLM."""

    folder: Path
    process: subprocess.Popen
    address: str
    wanted: dict[str, list]

    @property
    def client(self) -> ServedTasks:
        return ServedTasks(self.address, self.folder / "tasks")


def save_tasks(folder: Path, family: str, count: int = len(TASKS), dtype: torch.dtype = torch.float32) -> None:
    """A base, adapters of both methods and several encodings, and their merged checkpoints."""
    save_language_model(folder / "base", family, **FAMILIES[family])
    AutoModelForCausalLM.from_pretrained(folder / "base").to(dtype).save_pretrained(folder / "base")
    kind = "gpt2" if family == "gpt2" else "llama"
    for number, task in enumerate(TASKS[:count]):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
        method = "STRATIFIED" if number % 4 == 3 else "SURGICAL"
        layers = random.Random(number).sample(range(4), 1 + number % 3)
        encoding = ["values", "lossless", "int8"][number % 3] if method == "SURGICAL" else "values"
        model = get_peft_model(base, make_config(method, kind, layers, encoding=encoding))
        shake(model, "default", number).save_pretrained(folder / "tasks" / task)
        merge_checkpoint(folder / "base", folder / "tasks" / task, folder / "merged" / task)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**kept, **ENV, **more}


@contextmanager
def serving(folder: Path, *options: str, **env: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server with both parts, as `docs/vllm.md` says; gives its process and its address."""
    port = str(random.Random(os.getpid()).randrange(20_000, 30_000) + len(list(folder.parent.iterdir())))
    parts = ["--worker-extension-cls=peft_surgical.vllm.worker.TaskWorker"]
    parts += ["--middleware=peft_surgical.vllm.middleware.EngineWatch"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder / 'base'}"]
    command += [f"--port={port}", "--host=127.0.0.1", *parts, *OPTIONS, *options]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(**env), cwd=folder, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "server.log").read_text()[-3000:]
            try:
                if HTTP.get(f"{address}/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield process, address
    finally:
        stop(process)


def stop(process: subprocess.Popen, patience: float = 60) -> list[str]:
    """End a server; gives the command lines of it and its children, as far as these did not go by themselves."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    names = {one.pid: " ".join(one.cmdline()) for one in family} | {process.pid: "api_server"}
    process.terminate()
    _, left = psutil.wait_procs([*family, psutil.Process(process.pid)] if family else family, patience)
    for one in left:
        one.kill()
    process.wait(30)
    return [names[one.pid] for one in left]


def ask(address: str, model: str = "base", task_prompt: list[int] = PROMPT) -> list:
    """The log-probabilities of the prompt's tokens and of the ones chosen after it."""
    body = {"model": model, "prompt": task_prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 5, "prompt_logprobs": 0}
    answer = HTTP.post(f"{address}/v1/completions", json=body)
    assert answer.is_success, answer.text
    choice = answer.json()["choices"][0]
    given = [next(iter(at.values()))["logprob"] for at in choice["prompt_logprobs"][1:]]
    return [given, choice["logprobs"]["token_logprobs"]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    save_tasks(folder, request.param)
    wanted = call(ORACLE, folder, str(folder / "base"), str(folder / "merged"), PROMPT, TASKS, [TASKS[1], TASKS[3]])
    with serving(folder) as (process, address):
        yield Served(folder, process, address, wanted)


def call(program: str, folder: Path, *arguments: Any) -> dict[str, Any]:
    """What a program says that runs vLLM in its own process."""
    found = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "ANSWERS" in found.stdout, found.stderr[-3000:]
    return json.loads(found.stdout.partition("ANSWERS")[2])


def distance(one: list, other: list) -> float:
    return max(abs(a - b) for part, same in zip(one, other, strict=True) for a, b in zip(part, same, strict=True))


def test_the_oracle_gives_what_a_fresh_server_gives_and_tells_tasks_apart(served):
    for task in (TASKS[1], TASKS[3]):
        assert served.wanted[task] == served.wanted[f"{task} fresh"]
    names = ["base", *TASKS]
    pairs = [(one, other) for one in names for other in names if one < other]
    assert min(distance(served.wanted[one], served.wanted[other]) for one, other in pairs) > 0.01


def test_every_task_answers_bit_for_bit_as_its_merged_checkpoint_over_a_hundred_switches(served):
    draw, client = random.Random(0), served.client
    assert ask(served.address) == served.wanted["base"]
    for task in [*TASKS, None, *(draw.choice([*TASKS, None]) for _ in range(100)), None]:
        client.switch(task)
        assert client.current() == task
        assert ask(served.address) == served.wanted[task or "base"], task


def test_what_is_refused_leaves_the_task_before(served, tmp_path):
    served.client.switch("task3")
    shutil.copytree(served.folder / "tasks" / "task1", tmp_path / "tasks" / "damaged")
    weights = tmp_path / "tasks" / "damaged" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    save_language_model(tmp_path / "base", "llama", **{**SIZES, "seed": 1})
    other = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), make_config("SURGICAL", "llama", [1])
    )
    other.save_pretrained(tmp_path / "tasks" / "stranger")
    shutil.copytree(served.folder / "tasks" / "task2", tmp_path / "tasks" / "cut")
    cut = tmp_path / "tasks" / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    client = ServedTasks(served.address, tmp_path / "tasks")
    problems = {"damaged": "damaged", "stranger": "another base model", "cut": "cannot be read|Copy it again"}
    for task, problem in problems.items():
        with pytest.raises(ValueError, match=f"(?s)'{task}' cannot be served: .*({problem})"):
            client.switch(task)
        assert ask(served.address) == served.wanted["task3"]
    assert served.client.current() == "task3"


def test_a_task_that_was_saved_anew_is_read_anew(served, tmp_path):
    client = ServedTasks(served.address, tmp_path)
    for source in ("task0", "task1"):
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        shutil.copytree(served.folder / "tasks" / source, tmp_path / "mine")
        client.switch(None)
        client.switch("mine")
        assert ask(served.address) == served.wanted[source]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", ["/pause", "/collective_rpc", "/reset_prefix_cache"])
def test_after_a_client_that_was_killed_the_next_one_goes_on(served, after, monkeypatch):
    client, whole = served.client, ServedTasks._ask
    client.switch("task5")

    def ask_until_killed(self, method, path, *arguments, **query):
        answer = whole(self, method, path, *arguments, **query)
        if path == after and "served_adapter" not in str(arguments):
            raise Killed
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ServedTasks, "_ask", ask_until_killed)
        with pytest.raises(Killed):
            client.switch("task6")
    for task in ("task6", "task5"):
        served.client.switch(task)
        assert ask(served.address) == served.wanted[task]


def test_sixteen_clients_with_mixed_tasks_get_no_other_tasks_answer(served):
    """Requests share batches, so bits may differ; the nearest task must be the one that was asked for."""
    names = ["base", *TASKS[:6]]
    deadline = time.monotonic() + SECONDS

    def ask_on(address: str, number: int) -> list[tuple[str, float, str]]:
        draw, found = random.Random(number), []
        while time.monotonic() < deadline:
            task = draw.choice(names)
            given = ask(address, task)
            near = min(names, key=lambda name: distance(served.wanted[name][:1], given[:1]))
            found.append((task, distance(served.wanted[task][:1], given[:1]), near))
        return found

    with running(create_router(served.client, seconds=0.5)) as address, ThreadPoolExecutor(16) as pool:
        answers = [one for found in pool.map(lambda number: ask_on(address, number), range(16)) for one in found]
        switches = HTTP.get(f"{address}/tasks").json()["switches"]
    assert all(near == task for task, _, near in answers)
    assert max(off for _, off, _ in answers) < 1e-4
    assert {task for task, _, _ in answers} == set(names)
    assert len(answers) > 1.5 * switches > 0
    print(f"{len(answers)} answers, {switches} switches in {SECONDS} s")


def test_a_server_that_is_told_to_end_in_a_switch_under_load_ends(served):
    """The last of this server: what comes after needs another."""
    draw = random.Random(0)

    def go_on(call: Callable[[], Any]) -> None:
        while True:
            call()

    with ThreadPoolExecutor(2) as pool:
        switching = pool.submit(go_on, lambda: served.client.switch(draw.choice(TASKS)))
        asking = pool.submit(go_on, lambda: ask(served.address))
        time.sleep(1)
        assert stop(served.process) == []
        with pytest.raises((RuntimeError, OSError), match=served.address):
            switching.result(60)
        assert isinstance(asking.exception(60), (httpx.HTTPError, AssertionError))
    assert served.process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def exchange(folder: Path, family: str, dtype: str) -> dict[str, Any]:
    save_tasks(folder, family, 4, getattr(torch, dtype))
    return call(EXCHANGE, folder, *(str(folder / part) for part in ("base", "tasks", "merged")), PROMPT, dtype)


# vLLM's "auto" serves float32 checkpoints in bfloat16, and on a CPU with AMX reloads their biases unrounded
@pytest.mark.parametrize(("family", "dtype"), [("gpt2", "float32"), ("gemma3", "bfloat16")])
def test_other_families_and_half_precision_answer_as_their_merged_checkpoints(family, dtype, tmp_path):
    said = exchange(tmp_path, family, dtype)
    assert said["problems"] == [None] * 5
    assert said["base"] == said["start"]
    for task in ("task0", "task1", "task3"):
        assert said[task] == said[f"{task} merged"] != said["base"]


def test_experts_are_refused(tmp_path):
    said = exchange(tmp_path, "mixtral", "float32")
    assert ["has experts" in str(problem) for problem in said["problems"]] == [True, True, False, True, True]
    assert said["task0"] == said["task3"] == said["base"] == said["start"]


def test_the_shards_of_two_workers_are_their_own_business(tmp_path_factory):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers of vLLM need two CPUs")
    folder = tmp_path_factory.mktemp("sharded")
    save_tasks(folder, "llama", 4)
    cores = sorted(os.sched_getaffinity(0))[:2]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}
    single: dict[str | None, list] = {}
    with serving(folder) as (_, address):
        client = ServedTasks(address, folder / "tasks")
        for task in [*client.tasks(), None]:
            client.switch(task)
            single[task] = ask(address)
    with serving(folder, "--tensor-parallel-size=2", **binding) as (_, address):
        client = ServedTasks(address, folder / "tasks")
        for task in [*client.tasks(), None, *client.tasks()]:
            client.switch(task)
            assert distance(ask(address), single[task]) < 1e-4
        (folder / "tasks" / "task1" / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(ValueError, match="cannot be served"):
            client.switch("task1")
        assert distance(ask(address), single["task3"]) < 1e-4
        client.switch("task2")
        assert distance(ask(address), single["task2"]) < 1e-4
