"""Strata on a base whose weights are quantised to 4 bits by bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import batch, build
from transformers import BertForSequenceClassification, BitsAndBytesConfig

from peft_surgical import StratifiedConfig


def _why_not() -> str:
    try:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
        layer.load_state_dict(torch.nn.Linear(64, 64).state_dict())
        layer.to("cpu")(torch.zeros(1, 64))
    except ImportError:
        return "bitsandbytes is not installed"
    except Exception as error:
        return f"bitsandbytes does not compute on this CPU: {error!r}"
    return ""


WHY_NOT = _why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def quantised(tmp_path):
    build("bert", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")

    def load():
        settings = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["classifier"]
        )
        model = BertForSequenceClassification.from_pretrained(tmp_path / "base", quantization_config=settings)
        for module in model.modules():  # what is packed for inference on some CPUs cannot be trained afterwards
            module.support_avx512bf16_for_cpu = False
        return model.eval()

    return load


def logits(model):
    with torch.no_grad():
        return model.eval()(**batch("bert")).logits


def spafit(**options):
    return StratifiedConfig(n1=0, n2=1, r=2, task_type="SEQ_CLS", **options)


def test_lora_and_biases_train_save_and_load_on_a_4_bit_base(quantised, tmp_path):
    base = quantised()
    query = base.bert.encoder.layer[3].attention.self.query
    assert query.weight.dtype == torch.uint8
    expected = logits(base)
    model = get_peft_model(base, spafit())
    assert torch.equal(logits(model), expected)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in trained.values())
    start = {name: p.detach().clone() for name, p in trained.items()}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    model.train()
    for _ in range(10):
        loss = model(**batch("bert")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, start[name]) for name, p in trained.items())
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    after = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(trained)
    loaded = PeftModel.from_pretrained(quantised(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), after)
    plain, fresh = model.unload(), quantised()
    plain.classifier = fresh.classifier  # PEFT's rule: the active adapter's head stays
    assert torch.equal(logits(plain), expected)


def test_an_adapter_of_a_4_bit_base_goes_onto_the_same_base_unquantised_and_back(quantised, tmp_path):
    get_peft_model(quantised(), spafit()).save_pretrained(tmp_path / "adapter")
    plain = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(plain, tmp_path / "adapter")
    plain = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    get_peft_model(plain, spafit()).save_pretrained(tmp_path / "adapter")
    PeftModel.from_pretrained(quantised(), tmp_path / "adapter")


def test_a_full_stratum_of_quantised_layers_is_refused(quantised):
    base = quantised()
    strata = [{"layers": "0-2", "tune": "bitfit"}, {"layers": [3], "tune": "full"}]
    with pytest.raises(ValueError, match=r"layer\.3\.attention\.self\.query\.weight is quantised .*tune='lora'"):
        get_peft_model(base, StratifiedConfig(strata=strata))
    assert not any("lora" in name for name, _ in base.named_modules())


def test_merging_into_4_bits_is_pefts_own(quantised):
    model = get_peft_model(quantised(), spafit(init_weights=False))
    unmerged = logits(model)
    model.merge_adapter()
    assert not torch.equal(logits(model), unmerged)  # rounded to 4 bits again
    model.unmerge_adapter()
    biases = [p for name, p in model.named_parameters() if name.endswith("base_layer.bias")]
    fresh = dict(quantised().named_parameters())
    assert biases
    for name, parameter in model.base_model.model.named_parameters():
        name = name.replace(".base_layer", "")
        if name.endswith("bias") and name in fresh:
            assert torch.equal(parameter, fresh[name])
