"""`dequantize=True` trains plain copies of quantised modules; everything else about them stays as it is."""

from __future__ import annotations

import pytest
import torch
from adapters import outputs, save, shake
from peft import PeftModel, get_peft_model
from tiny_models import batch, build
from torch import nn
from transformers import BertForSequenceClassification, BitsAndBytesConfig

from peft_surgical import SurgicalConfig, rank_layers
from peft_surgical.copies.variants import dequantised_weight, is_quantised


class Linear8(nn.Module):
    """A linear module with weights in 8 bits, for the CPU."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def dequantize(self) -> torch.Tensor:
        return self.weight.to(self.scale.dtype) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dequantize(), self.bias)


def quantise(model: nn.Module) -> nn.Module:
    for layer in (model.bert.encoder if hasattr(model, "bert") else model.model).modules():
        for name, child in list(layer.named_children()):
            if type(child) is nn.Linear:
                setattr(layer, name, Linear8(child))
    return model.eval()


def quantised(family: str = "bert", dtype: torch.dtype = torch.float32) -> nn.Module:
    return quantise(build(family).to(dtype))


def config(family: str = "bert", **options) -> SurgicalConfig:
    task = "SEQ_CLS" if family == "bert" else "CAUSAL_LM"
    return SurgicalConfig(task_type=task, layers=[1, 2], **{"dequantize": True, **options})


def dequantised(model: nn.Module) -> nn.Module:
    """The plain model that the quantised one stands for."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear8):
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight.data = child.dequantize()
                if child.bias is not None:
                    linear.bias.data = child.bias.data
                setattr(module, name, linear)
    return model


def test_the_way_out_is_named_where_a_quantised_module_is_refused():
    model = quantised()
    with pytest.raises(ValueError, match=r"layer\.1\..*quantised Linear8.*dequantize=True"):
        get_peft_model(model, config(dequantize=False))
    get_peft_model(model, config(dequantize=False, target_modules=["LayerNorm"]))


def test_an_unknown_quantised_module_is_refused_all_the_same():
    model = build("bert")
    weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.uint8), requires_grad=False)
    model.bert.encoder.layer[1].output.dense.weight = weight
    with pytest.raises(ValueError, match="how to dequantise this module is not known"):
        get_peft_model(model, config())


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_training_equals_that_of_the_dequantised_model(family):
    torch.manual_seed(0)
    models = [
        get_peft_model(quantised(family), config(family)),
        get_peft_model(dequantised(quantised(family)), config(family, dequantize=False)),
    ]
    assert torch.equal(outputs(models[0], family), outputs(quantised(family), family))
    losses = []
    for model in models:
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            loss = model(**batch(family, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert torch.equal(outputs(models[0].eval(), family), outputs(models[1].eval(), family))
    with models[0].disable_adapter():
        assert torch.equal(outputs(models[0], family), outputs(quantised(family), family))


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_saving_loading_and_the_plain_base(low_cpu_mem_usage, tmp_path):
    model = shake(get_peft_model(quantised(), config()), "default").eval()
    path = save(model, tmp_path)
    again = PeftModel.from_pretrained(quantised(), path, low_cpu_mem_usage=low_cpu_mem_usage).eval()
    assert torch.equal(outputs(again, "bert"), outputs(model, "bert"))
    PeftModel.from_pretrained(build("bert"), path)  # the same base, not quantised
    other = quantised()
    with torch.no_grad():
        other.bert.encoder.layer[1].output.LayerNorm.weight.add_(1)
    with pytest.raises(ValueError, match="another base model"):
        PeftModel.from_pretrained(other, path)


def test_adapters_side_by_side_merging_and_unloading():
    model = shake(get_peft_model(quantised(), config(), adapter_name="rte"), "rte", seed=1)
    model.add_adapter("cola", config())
    shake(model, "cola", seed=2).eval()
    one, other, base = outputs(model, "bert", "rte"), outputs(model, "bert", "cola"), outputs(quantised(), "bert")
    assert len({round(float(x.sum()), 3) for x in (one, other, base)}) == 3
    model.merge_adapter(["rte"])
    assert torch.equal(outputs(model, "bert", "rte"), one)
    model.unmerge_adapter()
    assert torch.equal(outputs(model, "bert", "rte"), one)
    with model.disable_adapter():
        assert torch.equal(outputs(model, "bert"), base)
    model.set_adapter("cola")
    plain = model.merge_and_unload()
    torch.testing.assert_close(outputs(plain, "bert"), other, rtol=1e-6, atol=1e-6)
    assert type(plain.bert.encoder.layer[1].output.dense) is nn.Linear
    assert type(plain.bert.encoder.layer[0].output.dense) is Linear8
    model = shake(get_peft_model(quantised(), config()), "default").eval()
    unloaded = model.unload()
    assert torch.equal(outputs(unloaded, "bert"), base)
    assert type(unloaded.bert.encoder.layer[1].output.dense) is Linear8


def test_several_active_adapters_add_their_differences():
    model = shake(get_peft_model(quantised("llama"), config("llama"), adapter_name="one"), "one", seed=1)
    model.add_adapter("two", config("llama"))
    shake(model, "two", seed=2).eval()
    model.base_model.set_adapter(["one", "two"])
    both = outputs(model, "llama")
    model.add_weighted_adapter(["one", "two"], [1, 1], "sum")
    torch.testing.assert_close(outputs(model, "llama", "sum"), both)


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast):
    model = get_peft_model(quantised("llama", torch.bfloat16), config("llama"), autocast_adapter_dtype=autocast)
    wanted = torch.float32 if autocast else torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {wanted}
    assert outputs(model, "llama").dtype == torch.bfloat16
    torch.testing.assert_close(outputs(model, "llama"), outputs(quantised("llama", torch.bfloat16), "llama"))
    model.train()(**batch("llama")).loss.backward()


def test_a_compiled_model_gives_the_same():
    model = shake(get_peft_model(quantised("llama"), config("llama")), "default").eval()
    ids = torch.tensor([[5, 6, 7]])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, wanted)
    torch._dynamo.reset()


# ---- bitsandbytes


@pytest.fixture(params=["4bit", "8bit"])
def bits_and_bytes(request, tmp_path):
    library = pytest.importorskip("bitsandbytes")
    try:
        library.nn.Linear4bit(64, 64, compute_dtype=torch.float32).to("cpu")(torch.zeros(1, 64))
    except Exception as error:
        pytest.skip(f"bitsandbytes does not compute on this machine: {error}")
    build("bert", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")
    options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    options = options if request.param == "4bit" else {"load_in_8bit": True}

    def load():
        settings = BitsAndBytesConfig(**options, llm_int8_skip_modules=["classifier"])
        model = BertForSequenceClassification.from_pretrained(tmp_path / "base", quantization_config=settings)
        for module in model.modules():  # what is packed for inference on some CPUs cannot be read afterwards
            module.support_avx512bf16_for_cpu = False
        return model.eval()

    return load


def test_bits_and_bytes(bits_and_bytes, tmp_path):
    base = bits_and_bytes()
    expected = outputs(base, "bert")
    with pytest.raises(ValueError, match="is a quantised Linear"):
        get_peft_model(base, config(dequantize=False))
    model = get_peft_model(base, config())
    torch.testing.assert_close(outputs(model, "bert"), expected, rtol=0.1, atol=0.05)  # theirs rounds the input too
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model.train()(**batch("bert")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    trained = outputs(model, "bert")
    with model.disable_adapter():
        assert torch.equal(outputs(model, "bert"), expected)
    again = PeftModel.from_pretrained(bits_and_bytes(), save(model, tmp_path / "adapter")).eval()
    assert torch.equal(outputs(again, "bert"), trained)


def test_a_ranking_through_a_quantised_base_is_that_of_the_weights_it_stands_for(bits_and_bytes):
    quantised = bits_and_bytes()
    plain = build("bert", hidden_size=64, intermediate_size=64)
    with torch.no_grad():
        for name, module in quantised.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                is_packed = own == "weight" and is_quantised(module)
                plain.get_submodule(name).get_parameter(own).copy_(
                    dequantised_weight(module) if is_packed else parameter
                )
    data = [{key: value[0] for key, value in batch("bert", n=1, seed=i).items()} for i in range(4)]
    through, wanted = (rank_layers(model, data, num_samples=4) for model in (quantised, plain))
    torch.testing.assert_close(torch.tensor(through.scores), torch.tensor(wanted.scores), rtol=0.01, atol=0)
