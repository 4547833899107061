"""A surgical adapter as a LoRA of some rank, beside NumPy's singular values and the weights that PEFT merges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters import TASKS
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import batch, build
from typer.testing import CliRunner

from peft_surgical import StratifiedConfig, SurgicalConfig, approximate_lora
from peft_surgical.cli import app


def shaken(folder, family: str, *, layers=(1, 3), dtype: torch.dtype = torch.float32, **options):
    """The weights before and after, of an adapter in a folder beside its base."""
    base = build(family).to(dtype)
    base.save_pretrained(folder / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    base.name_or_path = str(folder / "base")
    config = SurgicalConfig(task_type=TASKS[family], layers=list(layers), **options)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder / "delta")
    return before, model.merge_and_unload().state_dict()


def layer_error(before, after, merged, layer: str) -> float:
    names = [name for name in before if layer in name]
    lost, whole = (
        np.sqrt(sum(np.square((a[n] - b[n]).float().double().numpy()).sum() for n in names))
        for a, b in ((after, merged), (after, before))
    )
    return lost / whole


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("rank", [2, 40])
def test_the_errors_are_those_of_the_merged_weights(family, rank, tmp_path):
    before, after = shaken(tmp_path, family)
    found = approximate_lora(tmp_path / "delta", tmp_path / "lora", rank)
    loaded = PeftModel.from_pretrained(build(family), tmp_path / "lora")
    assert type(loaded.peft_config["default"]) is LoraConfig
    merged = loaded.merge_and_unload().state_dict()
    assert [name.rpartition(" ")[2] for name in found.errors] == ["1", "3"]
    for name, error in found.errors.items():
        expected = layer_error(before, after, merged, f".{name.rpartition(' ')[2]}.")
        assert error == pytest.approx(expected, rel=1e-3, abs=1e-6)
    same = [n for n in before if torch.equal(before[n], merged[n])]
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    heads = [n for n in found.left_out if n.startswith("classifier")]
    assert set(found.left_out) == {n for n in changed if n in same} | set(heads)
    for name in set(changed) - set(found.left_out):
        delta = (after[name] - before[name]).double().numpy()
        left, values, right = np.linalg.svd(delta, full_matrices=False)
        nearest = (left[:, :rank] * values[:rank]) @ right[:rank]
        assert np.allclose((merged[name] - before[name]).numpy(), nearest, atol=1e-6)


def test_in_half_precision_the_errors_count_what_rounding_loses(tmp_path):
    shaken(tmp_path, "llama", dtype=torch.bfloat16, target_modules=["q_proj"])
    found = approximate_lora(tmp_path / "delta", tmp_path / "lora", 16)
    assert all(1e-4 < error < 1e-2 for error in found.errors.values()), found
    assert found.left_out == []


@pytest.mark.parametrize("encoding", ["lossless", "int8"])
def test_encoded_adapters_are_decoded_first(encoding, tmp_path):
    shaken(tmp_path, "llama", encoding=encoding, target_modules=["q_proj"])
    found = approximate_lora(tmp_path / "delta", tmp_path / "lora", 16)
    assert all(error < 1e-5 for error in found.errors.values())


def test_fused_experts_of_a_layer_are_left_out(tmp_path):
    shaken(tmp_path, "mixtral", layers=[1])
    found = approximate_lora(tmp_path / "delta", tmp_path / "lora", 16)
    loaded = PeftModel.from_pretrained(build("mixtral"), tmp_path / "lora").eval()
    with torch.no_grad():
        assert torch.isfinite(loaded(**batch("mixtral")).loss)
    (error,) = found.errors.values()
    assert 0 < error < 1
    fused = any(name.endswith("gate_up_proj") for name in build("mixtral").state_dict())  # since transformers 5
    assert any("experts" in name for name in found.left_out) == fused


def test_what_cannot_be_approximated_is_refused_and_nothing_written(tmp_path):
    shaken(tmp_path, "bert", target_modules=["LayerNorm"])
    with pytest.raises(ValueError, match="changed no matrix of a linear module"):
        approximate_lora(tmp_path / "delta", tmp_path / "lora", 4)
    with pytest.raises(ValueError, match="rank=0 is not allowed"):
        approximate_lora(tmp_path / "delta", tmp_path / "lora", 0)
    get_peft_model(build("bert"), StratifiedConfig(task_type="SEQ_CLS", n1=0, n2=1)).save_pretrained(tmp_path / "s")
    with pytest.raises(ValueError, match="is a STRATIFIED adapter"):
        approximate_lora(tmp_path / "s", tmp_path / "lora", 4)
    assert not (tmp_path / "lora").exists()


def test_the_command_shows_the_errors_and_what_is_left_out(tmp_path):
    shaken(tmp_path, "bert")
    arguments = ["export-lora", str(tmp_path / "delta"), "-o", str(tmp_path / "lora"), "--rank", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "error at rank 2" in result.output
    assert "left out: classifier.weight" in result.output
    assert CliRunner().invoke(app, [*arguments, "--head"]).exit_code == 2
