"""Parts that zstd has packed, changed rows, and the smallest encoding within a bound, against slow oracles."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
import zstandard
from adapters import make, rewrite
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import batch, build

from peft_surgical import DeltaBank, convert_adapter, inspect_adapter
from peft_surgical.files.adapter import decode_tensors, encode_tensor
from peft_surgical.files.encodings import ENCODINGS
from peft_surgical.files.packing import pack


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8, torch.bool),
]
LOSSY = [name for name, encoding in ENCODINGS.items() if encoding.lossy]
PARTS = {name: list(encoding.dtypes) for name, encoding in ENCODINGS.items()}
WEIGHTS = "adapter_model.safetensors"


def as_bytes(tensor: torch.Tensor) -> bytes:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def any_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern at all: NaNs with payloads, infinities, denormals, both zeros."""
    size = int(np.prod(shape)) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    return torch.from_numpy(np.random.default_rng(seed).integers(0, top, size, np.uint8)).view(dtype).reshape(shape)


def nbytes(parts) -> int:
    return sum(part.numel() * part.itemsize for part in parts.values())


def rows_in(part: torch.Tensor) -> tuple[int, list[int]]:
    """The number of rows, and those that are stored, read in plain Python."""
    data = part.numpy().tobytes()
    planes = zstandard.ZstdDecompressor().decompress(data[16:])
    count = len(planes) // 8
    gaps = [int.from_bytes(bytes(planes[plane * count + i] for plane in range(8)), "little") for i in range(count)]
    return int.from_bytes(data[:8], "little"), list(itertools.accumulate(gaps))


def half_still(dtype: torch.dtype = torch.float32, shape=(96, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """A base, and values of which training in low precision left most where they were."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator).to(dtype)
    step = 0.01 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    return (base + step.to(dtype)), base


def unpacked(tensors: dict[str, torch.Tensor], shapes) -> dict[str, torch.Tensor]:
    """The form that files had before parts were packed, entry by entry in plain Python."""
    old = {}
    for key, tensor in tensors.items():
        name, _, suffix = key.partition(":")
        if not suffix.endswith("_zstd"):
            old[key] = tensor
            continue
        suffix = suffix.removesuffix("_zstd")
        encoding = next(e for e in ENCODINGS.values() if suffix in e.dtypes)
        planes = zstandard.ZstdDecompressor().decompress(tensor.numpy().tobytes())
        size = encoding.dtypes[suffix].itemsize
        count = len(planes) // size
        data = bytes(planes[plane * count + i] for i in range(count) for plane in range(size))
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(encoding.dtypes[suffix])
        old[f"{name}:{suffix}"] = whole.reshape(encoding.part_shapes(shapes[name])[suffix])
    return old


# ---- packed parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("encoding", LOSSY)
def test_parts_are_packed_where_that_makes_them_smaller_and_decode_to_the_same(encoding, dtype):
    trained, base = half_still(dtype)
    parts = encode_tensor("w", trained, base, encoding)
    old = unpacked(parts, {"w": base.shape})
    plain = ENCODINGS[encoding].encode(trained, base)
    assert {key.partition(":")[2] for key in old} == {*plain, "error"}
    assert all(as_bytes(old[f"w:{suffix}"]) == as_bytes(part) for suffix, part in plain.items())
    assert nbytes(parts) < 0.9 * nbytes(old)
    assert all(part.numel() < old[key.removesuffix("_zstd")].nbytes for key, part in parts.items() if "_zstd" in key)
    decoded = decode_tensors(parts, {"w": base})["w"]
    assert as_bytes(decoded) == as_bytes(decode_tensors(old, {"w": base})["w"])
    again = encode_tensor("w", trained, base, encoding)
    assert {key: as_bytes(part) for key, part in parts.items()} == {key: as_bytes(t) for key, t in again.items()}


def test_what_zstd_does_not_make_smaller_stays_as_it_is():
    base = torch.zeros(64, 128)
    trained = any_bits(torch.int8, (64, 128), 0).float()
    trained[:, 0] = 127
    parts = encode_tensor("w", trained, base, "int8")
    assert "w:int8" in parts
    assert parts["w:int8"].shape == (64, 128)


@pytest.mark.parametrize("encoding", [*LOSSY, "lossless"])
def test_files_from_before_parts_were_packed_are_read_in_every_way(encoding, tmp_path):
    model = make("SURGICAL", "bert", [1, 3], encoding=encoding)
    with torch.no_grad():  # most entries stay, so that there is something to pack
        for name, parameter in model.named_parameters():
            if "surgical" in name and parameter.ndim > 1:
                origin = model.get_submodule(name.rpartition(".surgical_params")[0]).base_layer.weight
                parameter[:, 3:] = origin[:, 3:]
    model.save_pretrained(tmp_path / "new")
    build("bert").save_pretrained(tmp_path / "base")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    tensors = load_file(tmp_path / "new" / WEIGHTS)
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "base/model.safetensors").items()}
    by_key = {key.partition(":")[0]: key for key in tensors}
    of_copy = {
        key: shapes.get(key.removeprefix("base_model.model.").replace("surgical_params.", "")) for key in by_key
    }
    rewrite(tmp_path / "old", unpacked(tensors, of_copy))
    assert any("_zstd" in key for key in tensors) == (encoding != "lossless")
    assert not any("_zstd" in key for key in load_file(tmp_path / "old" / WEIGHTS))

    x, answers, values = batch("bert", labels=False), [], []
    for name in ("new", "old"):
        loaded = PeftModel.from_pretrained(build("bert"), tmp_path / name).eval()
        for host in (0, "10MB"):
            bank = DeltaBank(build("bert"), host_budget=host)
            bank.add("task", tmp_path / name)
            with bank.task("task") as served, torch.no_grad():
                answers.append(served(**x).logits)
        with torch.no_grad():
            answers.append(loaded(**x).logits)
        convert_adapter(tmp_path / name, tmp_path / f"{name}-values", "values", base=tmp_path / "base")
        values.append(load_file(tmp_path / f"{name}-values" / WEIGHTS))
        convert_adapter(tmp_path / name, tmp_path / f"{name}-again", "lossless", base=tmp_path / "base")
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert all(as_bytes(values[0][key]) == as_bytes(values[1][key]) for key in values[0])
    found = [inspect_adapter(tmp_path / name) for name in ("new", "old")]
    assert [g.values_nbytes for g in found[0].groups] == [g.values_nbytes for g in found[1].groups]
    assert [g.error for g in found[0].groups] == [g.error for g in found[1].groups]
    assert found[0].nbytes < found[1].nbytes or encoding == "lossless"


def damaged(tensors: dict[str, torch.Tensor], how: str) -> None:
    key = next(key for key in tensors if key.endswith(":int8_zstd"))
    packed = tensors[key]
    if how == "both":
        tensors[key.removesuffix("_zstd")] = torch.zeros(4, 4, dtype=torch.int8)
    elif how == "dtype":
        tensors[key] = packed.to(torch.int8)
    elif how == "cut":
        tensors[key] = packed[: len(packed) // 2].clone()
    elif how == "bomb":  # a few bytes that unpack to many more than the tensor has
        tensors[key] = torch.frombuffer(bytearray(zstandard.compress(bytes(2**24))), dtype=torch.uint8)
    else:
        tensors[key] = torch.zeros(0, dtype=torch.uint8)


def serve(folder) -> None:
    bank = DeltaBank(build("bert"))
    bank.add("task", folder)
    bank.activate("task")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("both", "has a tensor .*int8', which is no part of 'int8'"),
        ("dtype", "int8_zstd' has the dtype int8, which must be uint8"),
        ("cut", "packed data are damaged"),
        ("bomb", "they hold 16777216 bytes instead of"),
        ("empty", "packed data are damaged"),
    ],
)
def test_a_damaged_packed_part_is_refused_by_model_and_bank(how, message, tmp_path):
    model = make("SURGICAL", "bert", [1], encoding="int8")
    with torch.no_grad():
        weight = model.base_model.model.bert.encoder.layer[1].output.dense
        weight.surgical_params["default"]["weight"][:, 2:] = weight.base_layer.weight[:, 2:]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    damaged(tensors, how)
    rewrite(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(build("bert"), tmp_path)
    with pytest.raises(ValueError, match=message):
        serve(tmp_path)


# ---- changed rows


@pytest.mark.parametrize("shape", [(40, 6), (40, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_changed_rows_are_stored_and_every_bit_comes_back(dtype, shape):
    base = any_bits(dtype, shape, 0)
    trained = base.clone()
    other = any_bits(dtype, shape, 1)
    changed = [0, 7, 39]
    raw, new = (np.frombuffer(as_bytes(t), np.uint8).reshape(len(base), -1).copy() for t in (trained, other))
    raw[changed] = new[changed]
    trained = torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape)
    parts = ENCODINGS["rows"].encode(trained, base)
    assert rows_in(parts["rows"]) == (40, changed)
    decoded = ENCODINGS["rows"].decode(parts, base)
    assert (decoded.dtype, decoded.shape) == (dtype, base.shape)
    assert as_bytes(decoded) == as_bytes(trained)


def test_a_zero_whose_sign_changed_and_a_nan_that_did_not_are_told_apart():
    base = torch.zeros(300, 64)
    base[5] = float("nan")
    trained = base.clone()
    trained[9, 3] = -0.0
    parts = encode_tensor("w", trained, base, "rows")
    assert rows_in(parts["w:rows"]) == (300, [9])
    assert as_bytes(decode_tensors(parts, {"w": base})["w"]) == as_bytes(trained)
    same = encode_tensor("w", base.clone(), base, "rows")  # nothing changed
    assert as_bytes(decode_tensors(same, {"w": base})["w"]) == as_bytes(base)


@pytest.mark.parametrize("shape", [(24, 40), (5, 40, 3)], ids=str)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.float8_e4m3fn, torch.float8_e5m2)], ids=str)
def test_only_changed_columns_are_stored_and_every_bit_comes_back(dtype, shape):
    base, other = any_bits(dtype, shape, 3), any_bits(dtype, shape, 4)
    trained = base.clone()
    for column in (5, 39):
        trained[:, column] = other[:, column]
    parts = ENCODINGS["columns"].encode(trained, base)
    assert rows_in(parts["columns"]) == (40, [5, 39])
    decoded = ENCODINGS["columns"].decode(parts, base)
    assert (decoded.dtype, decoded.shape) == (dtype, base.shape)
    assert as_bytes(decoded) == as_bytes(trained)
    same = ENCODINGS["columns"].encode(base.clone(), base)
    assert as_bytes(ENCODINGS["columns"].decode(same, base)) == as_bytes(base)


def test_columns_refuse_another_base_and_numbers_that_are_none():
    base = torch.randn(24, 40)
    trained = base.clone()
    trained[:, 7] += 1
    parts = encode_tensor("w", trained, base, "columns")
    other = base.clone()
    other[3, 7] += 1
    with pytest.raises(ValueError, match="checksum is wrong"):
        decode_tensors(parts, {"w": other})
    for total, numbers in ((40, []), (39, [7]), (40, [7, 0]), (40, [41]), (40, [-1]), (40, [2**62] * 4)):
        header = torch.tensor([total, 0]).view(torch.uint8)
        wrong = {**parts, "w:columns": torch.cat([header, pack(torch.tensor(numbers, dtype=torch.int64))])}
        with pytest.raises(ValueError, match="'w' cannot be decoded: its (numbers|packed)"):
            decode_tensors(wrong, {"w": base})


def test_rows_are_about_as_large_as_what_changed_and_never_larger_than_values():
    base = torch.randn(1000, 64)
    trained = base.clone()
    trained[::100] += 1.0
    parts = encode_tensor("w", trained, base, "rows")
    assert nbytes(parts) <= 10 * (64 * 4 + 2) + 100
    assert list(encode_tensor("w", any_bits(torch.float32, (40, 64), 0), base[:40], "rows")) == ["w"]


@pytest.mark.parametrize("change", ["another row", "dtype", "longer"])
def test_rows_refuse_another_base(change):
    base = torch.randn(50, 8)
    trained = base.clone()
    trained[3] += 1
    parts = encode_tensor("w", trained, base, "rows")
    other = {"another row": base.index_fill(0, torch.tensor([20]), 1.0), "dtype": base.bfloat16()}.get(
        change, torch.cat([base, base])
    )
    with pytest.raises(ValueError, match=r"'w' cannot be decoded: .*(checksum|numbers of rows)"):
        decode_tensors(parts, {"w": other})


@pytest.mark.parametrize("gaps", [[3, 0], [7, -4], [-1], [50], [], [1] * 51, [2**62, 2**62, 2**62, 2**62]])
@pytest.mark.parametrize("header", [[50, None], [50], [], [51, None]], ids=str)
def test_rows_that_are_no_rows_are_refused(header, gaps):
    base = torch.randn(50, 8)
    trained = base.clone()
    trained[3] += 1
    parts = encode_tensor("w", trained, base, "rows")
    crc = parts["w:rows"][8:16].clone().view(torch.int64)
    start = torch.tensor([int(crc) if number is None else number for number in header], dtype=torch.int64)
    gaps = gaps if header == [50, None] else [3]
    damaged = torch.cat([start.view(torch.uint8), pack(torch.tensor(gaps, dtype=torch.int64))])
    with pytest.raises(ValueError, match="'w' cannot be decoded"):
        decode_tensors({**parts, "w:rows": damaged}, {"w": base})


def test_few_changed_embeddings_are_saved_served_converted_and_inspected(tmp_path):
    options = {"task_type": "SEQ_CLS", "extra_modules": ["bert.embeddings.word_embeddings"]}
    model = make("SURGICAL", "bert", [2], encoding="auto", **options)
    embeddings = model.base_model.model.bert.embeddings.word_embeddings
    with torch.no_grad():
        embeddings.surgical_params["default"]["weight"].copy_(embeddings.base_layer.weight)
        embeddings.surgical_params["default"]["weight"][[1, 5]] += 0.5
    model.save_pretrained(tmp_path / "auto")
    key = "base_model.model.bert.embeddings.word_embeddings.surgical_params.weight"
    assert rows_in(load_file(tmp_path / "auto" / WEIGHTS)[f"{key}:rows"])[1] == [1, 5]
    x = batch("bert", labels=False)
    with torch.no_grad():
        wanted = model(**x).logits
        loaded = PeftModel.from_pretrained(build("bert"), tmp_path / "auto").eval()
        assert torch.equal(loaded(**x).logits, wanted)
        for host in (0, "10MB"):
            bank = DeltaBank(build("bert"), host_budget=host)
            bank.add("task", tmp_path / "auto")
            with bank.task("task") as served:
                assert torch.equal(served(**x).logits, wanted)
    build("bert").save_pretrained(tmp_path / "base")
    convert_adapter(tmp_path / "auto", tmp_path / "values", "values", base=tmp_path / "base")
    plain, found = inspect_adapter(tmp_path / "values"), inspect_adapter(tmp_path / "auto")
    assert found.values_nbytes == plain.nbytes
    assert next(g for g in found.groups if "embeddings" in g.name).encodings == ("rows",)
    convert_adapter(tmp_path / "values", tmp_path / "again", "auto", base=tmp_path / "base")
    again = load_file(tmp_path / "again" / WEIGHTS)
    assert {k: as_bytes(t) for k, t in again.items()} == {
        k: as_bytes(t) for k, t in load_file(tmp_path / "auto" / WEIGHTS).items()
    }


# ---- the smallest within a bound


def relative_error(trained: torch.Tensor, base: torch.Tensor, decoded: torch.Tensor) -> float:
    """In NumPy and float64."""
    a, b, c = (t.double().numpy() for t in (trained, base, decoded))
    return float(np.sqrt(((c - a) ** 2).sum()) / np.sqrt(((a - b) ** 2).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_error", [0.0, 0.001, 0.003, 0.01, 0.08, 0.2, 0.7])
def test_auto_takes_the_smallest_that_keeps_the_bound(max_error, dtype):
    for trained, base in (half_still(dtype), (half_still(dtype)[1] * 1.01, half_still(dtype)[1])):
        sizes = {"values": trained.nbytes}
        for name, encoding in ENCODINGS.items():
            parts = encode_tensor("w", trained, base, name)
            decoded = decode_tensors(parts, {"w": base})["w"]
            errors = [relative_error(trained, base, form) for form in (decoded, decoded.to(dtype))]
            if "w" not in parts and (max(errors) <= max_error if encoding.lossy and max_error else not encoding.lossy):
                sizes[name] = nbytes(parts)
        chosen = encode_tensor("w", trained, base, "auto", max_error)
        assert nbytes(chosen) == min(sizes.values())
        decoded = decode_tensors(chosen, {"w": base})["w"]
        for form in (decoded, decoded.to(dtype)):
            assert relative_error(trained, base, form) <= max_error * (1 + 1e-9)
        if not max_error:
            assert as_bytes(decoded) == as_bytes(trained)


def test_the_bound_counts_what_rounding_to_the_dtype_adds():
    base = torch.full((64, 64), 1.5, dtype=torch.bfloat16)  # the next ones are 2^-7 away
    moves = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.6).bfloat16()
    trained = base + 2.0**-7 * moves
    signs = decode_tensors(encode_tensor("w", trained, base, "sign"), {"w": base})["w"]
    assert relative_error(trained, base, signs) < 0.7 < relative_error(trained, base, signs.bfloat16())
    decoded = decode_tensors(encode_tensor("w", trained, base, "auto", 0.7), {"w": base})["w"]
    assert relative_error(trained, base, decoded.bfloat16()) <= 0.7


def test_auto_without_an_error_restores_what_a_rounded_encoding_restores_but_for_the_sign_of_zero():
    base = torch.zeros(64, 64)
    base[:, ::2] = -0.0
    trained = base.clone()
    trained[0, 1::2] = 127.0 * torch.randint(-1, 2, (32,))
    rounded = decode_tensors(encode_tensor("w", trained, base, "int8"), {"w": base})["w"]
    assert torch.equal(rounded, trained)
    assert as_bytes(rounded) != as_bytes(trained)
    exact = decode_tensors(encode_tensor("w", trained, base, "auto"), {"w": base})["w"]
    assert as_bytes(exact) == as_bytes(trained)


def test_auto_is_exact_where_a_value_is_not_finite():
    trained, base = half_still()
    trained[2, 2] = float("nan")
    parts = encode_tensor("w", trained, base, "auto", 0.5)
    assert as_bytes(decode_tensors(parts, {"w": base})["w"]) == as_bytes(trained)


@pytest.mark.parametrize("encoding", ["int8", "auto"])
def test_an_error_that_cannot_be_kept_is_refused_and_nothing_is_written(encoding, tmp_path):
    wrong = {"int8": (0.1,), "auto": (-0.1, 1.0, float("nan"), "x")}[encoding]
    model = make("SURGICAL", "bert", [1])
    model.save_pretrained(tmp_path / "delta")
    build("bert").save_pretrained(tmp_path / "base")
    for max_error in wrong:
        with pytest.raises(ValueError, match="max_error="):
            convert_adapter(
                tmp_path / "delta", tmp_path / "out", encoding, max_error=max_error, base=tmp_path / "base"
            )
        with pytest.raises(ValueError, match="max_error="):
            make("SURGICAL", "bert", [1], encoding=encoding, max_error=max_error)
        model.peft_config["default"].encoding, model.peft_config["default"].max_error = encoding, max_error
        with pytest.raises(ValueError, match="max_error="):
            model.save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out" / WEIGHTS).exists()


def test_a_saved_adapter_keeps_the_bound_that_its_config_names(tmp_path):
    model = make("SURGICAL", "bert", [1, 3], encoding="auto", max_error=0.1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    errors = {key: tensor.tolist() for key, tensor in tensors.items() if key.endswith(":error")}
    assert errors
    assert all(error <= 0.1 * moved for error, moved in errors.values())
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path)
    assert loaded.peft_config["default"].max_error == 0.1
    assert max(group.error for group in inspect_adapter(tmp_path).groups) <= 0.1
