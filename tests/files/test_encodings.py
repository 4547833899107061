from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from adapters import rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import batch, build

from peft_surgical import SurgicalConfig
from peft_surgical.convert.convert import distil_scales
from peft_surgical.files.adapter import decode_tensors, encode_tensor
from peft_surgical.files.encodings import ENCODINGS, GROUP, difference


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LOSSY = [name for name, encoding in ENCODINGS.items() if encoding.lossy]
EXACT = ["values", "lossless", "rows", "columns"]


def bound(encoding: str, trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """How far each entry may be off after a lossy encoding, from the definitions in the docs."""
    step = difference(trained, base)
    # the difference, the decoded difference and the sum are each rounded to float32
    rounding = (trained.abs().double() + base.abs().double()) * 2.0**-23 + 2.0**-126
    if encoding == "bf16":
        return step.abs() * 2.0**-8 + rounding
    if encoding == "int8":
        return step.abs().amax(-1, keepdim=True) / 127 * 0.501 + rounding
    if encoding == "int4":
        flat = step.abs().reshape(-1)
        groups = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).reshape(-1, GROUP)
        half = groups.amax(-1, keepdim=True) / 7 * (0.5 * (1 + 2.0**-7))
        return half.expand(-1, GROUP).reshape(-1)[: flat.numel()].reshape(step.shape) + rounding
    assert encoding == "sign"
    return torch.maximum(step.abs(), step.abs().mean(-1, keepdim=True)) * (1 + 2.0**-20) + rounding


def as_bytes(tensor: torch.Tensor) -> bytes:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern at all: NaNs with payloads, infinities, denormals, both zeros."""
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def round_trip(trained: torch.Tensor, base: torch.Tensor, encoding: str) -> torch.Tensor:
    return decode_tensors(encode_tensor("weight", trained, base, encoding), {"weight": base})["weight"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", EXACT)
def test_exact_encodings_restore_every_bit_pattern(encoding, dtype):
    trained, base = random_bits(dtype, (32, 24), 0), random_bits(dtype, (32, 24), 1)
    decoded = round_trip(trained, base, encoding)
    assert decoded.dtype == dtype
    assert decoded.shape == trained.shape
    assert as_bytes(decoded) == as_bytes(trained)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lossless_packs_special_values_beside_ordinary_ones_bit_for_bit(dtype):
    base = torch.randn(64, 64, dtype=torch.float64).to(dtype)
    trained = (base.double() * 1.001).to(dtype)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.finfo(dtype)
    trained[0, :5] = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), -0.0, info.smallest_normal / 4], dtype=dtype
    )
    payload = trained[1, :1].clone().fill_(float("nan")).view(bits) + 5  # a NaN with a payload
    trained[1, 0] = payload.view(dtype)[0]
    parts = encode_tensor("weight", trained, base, "lossless")
    assert list(parts) == ["weight:lossless"]
    assert parts["weight:lossless"].numel() < trained.numel() * dtype.itemsize
    decoded = decode_tensors(parts, {"weight": base})["weight"]
    assert as_bytes(decoded) == as_bytes(trained)
    assert decoded[1, :1].view(bits) == payload


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 9), max_size=3), seed=st.integers(0, 99), encoding=st.sampled_from([*ENCODINGS]))
def test_any_shape_comes_back(shape, seed, encoding):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    trained = base + 0.01 * torch.randn(shape, generator=generator)
    decoded = round_trip(trained, base, encoding)
    assert decoded.shape == trained.shape
    if trained.ndim < 2 or not trained.numel() or encoding in EXACT:
        assert torch.equal(decoded, trained)
    else:
        assert bool(((decoded - trained).abs() <= bound(encoding, trained, base)).all())


@pytest.mark.parametrize("trained_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("base_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("encoding", LOSSY)
def test_lossy_encodings_keep_within_their_bound(encoding, base_dtype, trained_dtype):
    base = torch.randn(48, 100, dtype=torch.float64).to(base_dtype)
    # steps of very different sizes, from row to row and inside one
    step = torch.randn(48, 100, dtype=torch.float64) * 10.0 ** torch.randint(-6, 1, (48, 1))
    trained = (base.double() + step).to(trained_dtype)
    parts = encode_tensor("weight", trained, base, encoding)
    error = (decode_tensors(parts, {"weight": base})["weight"].double() - trained.double()).abs()
    allowed = bound(encoding, trained, base)
    assert bool((error <= allowed).all())
    if "weight" in parts:  # two bytes are no less than the two bytes of the values
        assert (encoding, trained_dtype.itemsize) == ("bf16", 2)
        assert not error.any()
    elif trained_dtype.itemsize > 2:
        assert float((error / allowed).max()) > 0.5  # the bound is a tight one


def slow_int4(trained: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The int4 encoding again, entry by entry in plain Python."""
    flat = (trained.astype(np.float64) - base.astype(np.float64)).reshape(-1)
    out = np.zeros_like(flat)
    for start in range(0, len(flat), 64):
        group = flat[start : start + 64]
        scale = float(torch.tensor(float(np.float32(max(abs(group)))) / 7).to(torch.bfloat16))
        for i, value in enumerate(group):
            code = min(7, max(-7, round(float(np.float32(value)) / scale)))
            out[start + i] = code * scale
    return base + out.reshape(base.shape).astype(np.float32)


def slow_int8(trained: np.ndarray, base: np.ndarray) -> np.ndarray:
    out = base.astype(np.float64).copy()
    for row in range(len(base)):
        delta = [float(t) - float(b) for t, b in zip(trained[row], base[row], strict=True)]
        scale = max(map(abs, delta)) / 127
        for column, value in enumerate(delta):
            out[row, column] += round(value / scale) * scale
    return out


def slow_sign(trained: np.ndarray, base: np.ndarray) -> np.ndarray:
    out = base.astype(np.float64).copy()
    for row in range(len(base)):
        delta = [float(t) - float(b) for t, b in zip(trained[row], base[row], strict=True)]
        scale = sum(map(abs, delta)) / len(delta)
        for column, value in enumerate(delta):
            out[row, column] += scale if value > 0 else -scale
    return out


@pytest.mark.parametrize(("encoding", "oracle"), [("int8", slow_int8), ("int4", slow_int4), ("sign", slow_sign)])
def test_rounded_encodings_equal_an_entry_by_entry_oracle(encoding, oracle):
    base = torch.randn(20, 37)
    trained = base + torch.randn(20, 37) * 0.01
    np.testing.assert_allclose(
        round_trip(trained, base, encoding).numpy(), oracle(trained.numpy(), base.numpy()), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize(
    ("encoding", "share"), [("values", 1.0), ("bf16", 0.5), ("int8", 0.26), ("int4", 0.14), ("sign", 0.04)]
)
def test_encodings_are_as_small_as_promised(encoding, share):
    base = torch.randn(768, 768)
    parts = encode_tensor("weight", base + 0.001 * torch.randn(768, 768), base, encoding)
    assert sum(p.numel() * p.itemsize for p in parts.values()) <= share * base.numel() * 4 + 8


def test_lossless_is_smaller_than_values_for_a_small_step_and_never_larger():
    base = torch.randn(256, 256)
    small = encode_tensor("weight", base * (1 + 1e-4 * torch.randn(256, 256)), base, "lossless")
    assert small["weight:lossless"].numel() < 0.7 * base.numel() * 4
    hopeless = encode_tensor("weight", random_bits(torch.float32, (256, 256), 3), base, "lossless")
    assert list(hopeless) == ["weight"]


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_plain_in_lossy_encodings(encoding, special):
    base = torch.randn(8, 64)
    trained = base + 0.01
    trained[3, 5] = special
    parts = encode_tensor("weight", trained, base, encoding)
    assert list(parts) == ["weight"]
    assert as_bytes(parts["weight"]) == as_bytes(trained)


def test_the_file_tells_the_norms_of_error_and_difference():
    base = torch.randn(30, 70)
    trained = base + 0.01 * torch.randn(30, 70)
    parts = encode_tensor("weight", trained, base, "int4")
    decoded = decode_tensors(parts, {"weight": base})["weight"]
    expected = [float((decoded - trained).double().norm()), float((trained - base).double().norm())]
    torch.testing.assert_close(parts["weight:error"], torch.tensor(expected), rtol=1e-4, atol=0)


def test_lossless_refuses_another_base():
    base = torch.randn(16, 16)
    parts = encode_tensor("weight", base * 1.0001, base, "lossless")
    other = base.clone()
    other[7, 7] += 1e-3
    with pytest.raises(ValueError, match="'weight' cannot be decoded: the checksum is wrong"):
        decode_tensors(parts, {"weight": other})


# ---- through PEFT's own saving and loading


def tuned_bert(encoding: str, dtype: torch.dtype = torch.float32, **options):
    config = SurgicalConfig(task_type="SEQ_CLS", layers=[1, 3], encoding=encoding, **options)
    model = get_peft_model(build("bert").to(dtype), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    return model.eval()


def live(model, adapter: str) -> dict[str, torch.Tensor]:
    return {
        name.replace(f".{adapter}.", "."): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if f".{adapter}." in name
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("encoding", ["values", *ENCODINGS])
def test_an_encoded_adapter_loads_through_peft_under_any_name_within_its_bound(encoding, dtype, tmp_path):
    model = tuned_bert(encoding, dtype)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["encoding"] == encoding

    loaded = PeftModel.from_pretrained(build("bert").to(dtype), tmp_path, adapter_name="rte")
    loaded.load_adapter(tmp_path, adapter_name="again", low_cpu_mem_usage=True)
    wanted = live(model, "default")
    for adapter in ("rte", "again"):
        found = live(loaded, adapter)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.dtype == wanted[name].dtype
            plain = encoding in EXACT or tensor.ndim < 2 or "classifier" in name
            if plain:
                assert as_bytes(tensor) == as_bytes(wanted[name]), name
            else:
                path = name.removeprefix("base_model.model.").rpartition(".surgical_params")[0]
                base = build("bert").to(dtype).get_submodule(path).weight
                off = (tensor - wanted[name]).abs()
                assert bool((off <= bound(encoding, wanted[name], base)).all()), name
                assert bool(off.any()), name  # rounding did happen


@pytest.mark.parametrize("encoding", LOSSY)
def test_biases_norms_and_heads_are_never_rounded(encoding, tmp_path):
    model = tuned_bert(encoding)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    plain = {name for name in tensors if ":" not in name}
    assert {n.partition("layer.1.")[2].removesuffix("_zstd") for n in tensors if "layer.1." in n and ":" in n} == {
        f"{module}.surgical_params.weight:{suffix}"
        for module in (
            *("attention.self.query", "attention.self.key", "attention.self.value"),
            *("attention.output.dense", "intermediate.dense", "output.dense"),
        )
        for suffix in [*ENCODINGS[encoding].part_shapes((1, 1)), "error"]
    }
    assert {"base_model.model.classifier.weight", "base_model.model.classifier.bias"} <= plain
    assert all(tensors[name].ndim == 1 for name in plain if "classifier" not in name)


def test_encoded_and_plain_adapters_of_two_methods_live_side_by_side(tmp_path):
    x = batch("bert", labels=False)
    answers = {}
    for encoding in ("values", "lossless", "int8"):
        model = tuned_bert(encoding)
        model.save_pretrained(tmp_path / encoding)
        answers[encoding] = model(**x).logits
    model = PeftModel.from_pretrained(build("bert"), tmp_path / "int8", adapter_name="as_int8")
    for encoding in ("values", "lossless"):
        model.load_adapter(tmp_path / encoding, adapter_name=f"as_{encoding}")
    for encoding in ("lossless", "int8", "values", "lossless"):
        model.set_adapter(f"as_{encoding}")
        logits = model(**x).logits
        torch.testing.assert_close(logits, answers[encoding], atol=0 if encoding != "int8" else 1e-3, rtol=0)


def test_encoding_may_be_chosen_after_training_and_an_old_config_has_values(tmp_path):
    model = tuned_bert("values")
    model.peft_config["default"].encoding = "int8"
    model.save_pretrained(tmp_path)
    assert any(":int8" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    model.peft_config["default"].encoding = "values"
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["encoding"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path)
    assert all(
        as_bytes(a) == as_bytes(b)
        for a, b in zip(live(loaded, "default").values(), live(model, "default").values(), strict=True)
    )


def test_loading_an_encoded_state_leaves_it_unchanged():
    model = tuned_bert("lossless")
    state = get_peft_model_state_dict(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        set_peft_model_state_dict(tuned_bert("lossless"), state)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_a_merged_adapter_is_encoded_against_the_bases_own_values(tmp_path):
    model = tuned_bert("lossless")
    wanted = live(model, "default")
    model.merge_adapter()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path)
    assert all(as_bytes(t) == as_bytes(wanted[n]) for n, t in live(loaded, "default").items())


def test_lossless_on_a_base_of_another_dtype_says_what_to_do_and_int8_loads(tmp_path):
    tuned_bert("lossless").save_pretrained(tmp_path / "lossless")
    with pytest.raises(
        ValueError, match=r"surgical_params\.weight' cannot be decoded: .*bfloat16.*Load the base in the dtype"
    ):
        PeftModel.from_pretrained(build("bert").bfloat16(), tmp_path / "lossless")
    model = tuned_bert("int8")
    model.save_pretrained(tmp_path / "int8")
    loaded = PeftModel.from_pretrained(build("bert").bfloat16(), tmp_path / "int8")
    for name, tensor in live(loaded, "default").items():
        torch.testing.assert_close(tensor.float(), live(model, "default")[name], atol=0.01, rtol=0.01)


# ---- faults


def break_file(folder, change) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    rewrite(folder, tensors)


def drop_scale(tensors):
    del tensors[next(name for name in tensors if name.endswith(":int8_scale"))]


def cut_codes(tensors):
    name = next(name for name in tensors if name.endswith(":int8"))
    tensors[name] = tensors[name][:1].clone()


def rename(tensors):
    name = next(name for name in tensors if name.endswith(":int8"))
    tensors[name.replace(":int8", ":int3")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_scale, "lacks the tensor .*weight:int8_scale'"),
        (cut_codes, r"weight:int8' has shape \(1, \d+\), this model needs \(\d+, \d+\)"),
        (rename, "its parts .*int3.* are of no known encoding .*newer version"),
    ],
)
def test_a_faulty_encoded_file_is_refused_before_the_model_is_changed(change, message, tmp_path):
    tuned_bert("int8").save_pretrained(tmp_path)
    break_file(tmp_path, change)
    base = build("bert")
    names = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, tmp_path)
    assert [name for name, _ in base.named_modules()] == names


def test_an_encoded_adapter_on_another_base_fails_on_the_fingerprint_first(tmp_path):
    tuned_bert("lossless").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trained on another base model"):
        PeftModel.from_pretrained(build("bert", seed=1), tmp_path)


def test_a_flipped_byte_in_a_lossless_tensor_is_noticed(tmp_path):
    tuned_bert("lossless").save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entry = next(value for name, value in header.items() if name.endswith(":lossless"))
    data[8 + length + (entry["data_offsets"][0] + entry["data_offsets"][1]) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ValueError, match=":lossless' is damaged: its checksum is wrong"):
        PeftModel.from_pretrained(build("bert"), tmp_path)
    tensors = load_file(path)
    rewrite(tmp_path, tensors)  # with checksums that fit
    with pytest.raises(ValueError, match="adapter_model.safetensors: .*cannot be decoded"):
        PeftModel.from_pretrained(build("bert"), tmp_path)


def test_an_unknown_encoding_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match="'int5' is not known; allowed are values, auto, lossless, rows, columns, bf16, int8, int4, sign",
    ):
        SurgicalConfig(layers=[0], encoding="int5")


def test_stock_lora_is_not_concerned(tmp_path):
    model = get_peft_model(
        build("bert"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path)
    assert not any(":" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    shutil.rmtree(tmp_path)


# ---- distilled step sizes


def test_distilled_steps_imitate_the_trained_model_better_also_on_other_batches(tmp_path):
    model = tuned_bert("values")
    model.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "surgical" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    other = batch("bert", 16, seed=99, labels=False)
    wanted = model(**other).logits
    heads = live(model, "default")
    model.peft_config["default"].encoding = "sign"
    model.save_pretrained(tmp_path / "plain")

    found = distil_scales(model, [batch("bert", 8, seed=i) for i in range(6)])
    assert found.after < 0.3 * found.before
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path / "distilled")
    errors = []
    for name in ("plain", "distilled"):
        logits = PeftModel.from_pretrained(build("bert"), tmp_path / name)(**other).logits
        errors.append(float((logits - wanted).square().mean()))
    assert errors[1] < 0.6 * errors[0]
    # the file holds just what was distilled, and only matrices were changed
    torch.testing.assert_close(
        PeftModel.from_pretrained(build("bert"), tmp_path / "distilled")(**other).logits,
        model(**other).logits,
        atol=1e-5,
        rtol=0,
    )
    after = live(model, "default")
    assert all(torch.equal(after[n], t) for n, t in heads.items() if t.ndim < 2 or "classifier" in n)


def test_distilling_nothing_is_an_error():
    with pytest.raises(ValueError, match="there is no batch"):
        distil_scales(tuned_bert("values"), [])
    model = get_peft_model(build("bert"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    with pytest.raises(ValueError, match="'default' has no matrix to encode"):
        distil_scales(model, [batch("bert")])
