"""An adapter trains as plain freezing does: what processes send each other is the same, and under FSDP2 every bit."""

from __future__ import annotations

import json

import pytest
from forks import run_forked

from benchmarks.distributed.pairs import table
from distributed.beside_plain import CASES
from distributed.launch import skip_if_missing, torchrun


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    skip_if_missing("fsdp2")
    folder = tmp_path_factory.mktemp("pairs")
    options = ["--models", "llama-tiny", "--length", "8", "--batches", "2", "--pairs", "1", "--traffic"]
    command = ["--nproc_per_node=2", "--standalone", "-m", "benchmarks.distributed.pairs", *options]
    finished = run_forked(torchrun, [*command, "--output", str(folder)], env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.code == 0, finished.output[-6000:]
    return json.loads((folder / "distributed_pairs-2-CPU.json").read_text())


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_sends_what_a_step_of_plain_freezing_sends(record, engine):
    surgical, columns = (row for row in record["rows"] if row["engine"] == engine)
    ours, plain = surgical["ours"]["traffic"], surgical["plain"]["traffic"]
    assert ours["calls"] == plain["calls"]
    # of a norm's weight both are gathered, which here is 0.3 % of a layer and in a large model nothing
    assert ours["bytes"] == pytest.approx(plain["bytes"], rel=0.004 if engine == "fsdp2" else 0)
    reduced = "allreduce" if engine == "ddp" else "reduce_scatter_base"
    assert columns["ours"]["traffic"]["bytes"][reduced] < columns["plain"]["traffic"]["bytes"][reduced] / 2


def test_the_table_has_a_line_for_each_row(record):
    lines = [line for line in table(record).splitlines() if line.startswith("| llama-tiny")]
    assert len(lines) == len(record["rows"]) == 4
    assert "llama-tiny, fsdp2, surgical 5" in lines[0]
    assert "| 1.00" in lines[0][-10:]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    skip_if_missing("fsdp2")
    folder = tmp_path_factory.mktemp("beside_plain")
    finished = run_forked(
        torchrun, ["--nproc_per_node=2", "--standalone", "-m", "distributed.beside_plain", str(folder)]
    )
    assert finished.code == 0, finished.output[-6000:]
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("family", CASES)
def test_under_fsdp2_an_adapter_takes_the_steps_of_plain_freezing_and_the_base_stays(found, family):
    facts = found[family]
    assert facts["left out"] > 0
    assert facts["trained"] == facts["trained by plain freezing"] != facts["trained before"]
    assert facts["logits of the base"] == facts["logits of the plain base"] != facts["logits"]
    assert facts["logits"] == facts["logits by plain freezing"]
    assert facts["after the base was used"] == facts["after, by plain freezing"] != facts["trained"]
    assert "merging needs whole ones" in facts["merging"]
