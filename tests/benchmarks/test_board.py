from __future__ import annotations

import json
import statistics
import sys

from benchmarks.step import board


def test_the_board_measures_a_method_of_each_kind(tmp_path, monkeypatch, capsys):
    chosen = ["LoRA r=32", "full", "rotating, rounded at rest"]
    monkeypatch.setattr(sys, "argv", ["board", "--check", "--methods", *chosen, "--output", str(tmp_path)])
    board.main()
    record = json.loads((tmp_path / "step_board-CPU-check.json").read_text())
    assert [row["method"] for row in record["rows"]] == chosen
    lora, full, rotating = record["rows"]
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32  # attention, feed-forward, norms
    assert lora["trained"] == 28 * 32 * (2 * 32 + 32 + 16)
    assert full["trained"] == 28 * layer + 128 * 32 + 32
    assert rotating["trained"] == 2 * layer
    assert 28 * layer * 2 < rotating["file_bytes"] < 28 * layer * 4  # bfloat16, with a header
    assert all(len(row["seconds"]) == record["batches"] == 4 for row in record["rows"])
    assert "| full | 0.3 |" in capsys.readouterr().out


def test_lengths_are_those_of_the_published_runs():
    lengths = board.draw_lengths(board.BUCKETS)
    assert len(lengths) == 5000
    rows = [length for batch in lengths for length in batch]
    assert abs(statistics.mean(rows) - 209.9) < 2
    assert max(rows) <= board.LONGEST
    assert all(sorted(bucket, reverse=True) == bucket for bucket in (sum(lengths[:20], []), sum(lengths[20:40], [])))
