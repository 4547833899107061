from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tensor_checks import Counted, assert_same_bits
from tiny_models import FAMILIES, build

from peft_surgical.files.checkpoint import Checkpoint, ModelTensors, empty_model
from peft_surgical.files.safetensors_io import TensorFile, write_checkpoint, write_tensors


# ---- read


@pytest.mark.parametrize("old_format", [False, True])
def test_pytorchs_own_files_are_read_in_both_of_their_formats(old_format, tmp_path):
    build("bert").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    found = Checkpoint(tmp_path)
    assert_same_bits({name: found[name] for name in found}, state)
    assert all(found.meta(name).shape == t.shape and found.meta(name).dtype == t.dtype for name, t in state.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a file of tensors", "cannot be read as a PyTorch file of tensors"),
        ({"state_dict": {"a": torch.zeros(2)}}, "holds something else than tensors by name"),
        ({"a": Exception}, "cannot be read as a PyTorch file of tensors"),  # code is never run
    ],
    ids=["damaged", "nested", "code"],
)
def test_what_pytorchs_files_may_not_hold_is_named_in_one_line(content, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin {message}") as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_damaged_json_is_named(name, tmp_path):
    build("bert").save_pretrained(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} cannot be read as JSON"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_checkpoint_is_read_by_the_names_of_its_model(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    found = ModelTensors(checkpoint, empty_model(checkpoint))
    assert found.unknown == []
    assert_same_bits({name: found[name] for name in found}, model.state_dict())
    assert all(found.meta(name).shape == t.shape and found.meta(name).dtype == t.dtype for name, t in found.items())


# ---- written


def test_never_more_than_one_file_of_a_checkpoint_is_in_memory(tmp_path):
    tensors = Counted({f"t{i}": torch.full((10,), float(i)) for i in range(7)})
    plan = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, plan, tensors.__getitem__, max_shard_size=85)
    assert tensors.most_bytes == 80
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 280}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    write_checkpoint(tmp_path, plan, tensors.__getitem__, max_shard_size=1000)
    assert not (tmp_path / "model.safetensors.index.json").exists()  # which would tell of the old files
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_a_written_file_holds_every_dtype_and_shape(tmp_path):
    tied = torch.randn(4)
    tensors = {
        "a": torch.randint(0, 9, (3,), dtype=torch.int8),
        "b": torch.randn(5, dtype=torch.bfloat16),
        "c": torch.randn(2, 3, dtype=torch.float64),
        "d": torch.randn(()),
        "e": torch.zeros(0, 4),
        "f": torch.randn(3, dtype=torch.complex64),
        "turned": torch.randn(4, 3).t(),
        "tied": tied,
        "tied too": tied,
        "a part of it": tied[1:],
    }
    assert write_tensors(tmp_path / "x.safetensors", tensors) == sum(t.nbytes for t in tensors.values())
    for found in (load_file(tmp_path / "x.safetensors"), TensorFile(tmp_path / "x.safetensors")):
        assert {*found} == tensors.keys()
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    file = TensorFile(tmp_path / "x.safetensors")
    assert all(
        (file.meta(n).shape, file.meta(n).dtype, file.meta(n).nbytes) == (t.shape, t.dtype, t.nbytes)
        for n, t in file.items()
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_written_files_have_the_permissions_of_any_new_file(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(2)})
        write_checkpoint(tmp_path, {"a": torch.zeros(2, device="meta")}, lambda name: torch.zeros(2), 100)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert files == dict.fromkeys(["x.safetensors", "model.safetensors"], 0o666 & ~umask)


def test_a_checkpoint_that_fails_half_way_leaves_what_was_there(tmp_path):
    tensors = {name: torch.randn(9) for name in "abc"}
    plan = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def fail_at_b(name: str) -> torch.Tensor:
        if name == "b":
            raise RuntimeError("stop")
        return tensors[name]

    for size, files in ((40, 4), (1000, 1)):
        with pytest.raises(RuntimeError, match="stop"):
            write_checkpoint(tmp_path, plan, fail_at_b, size)
        assert list(tmp_path.iterdir()) == []
        write_checkpoint(tmp_path, plan, tensors.__getitem__, size)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert len(before) == files
        with pytest.raises(RuntimeError, match="stop"):
            write_checkpoint(tmp_path, plan, fail_at_b, size)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        for path in tmp_path.iterdir():
            path.unlink()
