"""The sweeps over architectures, on some that differ in kind; all of them are run by the benchmark."""

from __future__ import annotations

import pytest


pytest.importorskip("transformers.conversion_mapping", reason="the sweeps are those of transformers 5")

from benchmarks.architectures import merged_checkpoints, ranking, round_trip  # noqa: E402
from benchmarks.architectures.tiny_models import architectures, over  # noqa: E402


ENTRIES = {entry.model_type: entry for entry in architectures()}
FEW = ["bert", "qwen3_moe", "encoder-decoder"]
MORE = [
    "ernie4_5_moe",
    "zamba",
    "clip",
    "mamba",
    "led",
    "convnext",
    "jamba",
    "qwen2_5_vl",
    "xlnet",
    "swin",
]
MORE += ["mbart", "bloom", "funnel"]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_round_trip_is_right_wherever_that_of_lora_is(name):
    row = round_trip.round_trip(ENTRIES[name])
    assert {round_trip.outcome(row, method) for method in round_trip.METHODS[:2]} <= {"right", "LoRA fails as well"}, (
        row
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_5_vl", "llava", "deepseek_v3"])
def test_merged_checkpoints_are_as_their_base(name, tmp_path):
    assert merged_checkpoints.try_merge(ENTRIES[name], tmp_path)["result"] == "as its base"


def _die(entry):
    raise SystemExit(3)


def test_what_ends_one_process_does_not_end_the_sweep():
    [(entry, row)] = over(_die, [ENTRIES["bert"]])
    assert entry.model_type == "bert"
    assert "SystemExit" in row["crash"]


RANKED = [
    "bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "modernbert", "convbert", "xlnet",
    "xlm", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "llama", "qwen2", "gemma2", "mixtral", "deepseek_v3", "mamba",
    "t5", "bart", "whisper", "vit", "convnext", "regnet", "cvt", "wav2vec2",
]  # fmt: skip
QUICK = ("bert", "llama", "mixtral", "convnext", "convbert")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RANKED])
def test_rankings_equal_a_loop_over_samples_that_differentiates_the_models_own_loss(name):
    found = ranking.examine(ENTRIES[name])
    assert found["outcome"] == "right", found
