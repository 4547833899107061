"""Several stratified adapters with different strata on one base: switching, merging, deleting, unloading."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import batch, build
from torch import nn

from peft_surgical import StratifiedConfig


# one layer each way, so that every pair of adapters meets on some module
ADAPTERS = {
    "spafit": {"n1": 0, "n2": 1, "variant": "I"},
    "all": {"strata": [{"layers": "all", "tune": "lora", "bias": "all"}]},
    "bitfit": {"strata": [{"layers": "all", "tune": "bitfit"}]},
    "mixed": {
        "strata": [
            {"layers": [0], "tune": "full"},
            {"layers": [1], "tune": "norm"},
            {"layers": [2], "tune": "full"},
            {"layers": [3], "tune": "lora", "bias": "none"},
        ]
    },
}
FAMILIES = ["bert", "deberta-v2", "gpt2", "vit", "mixtral"]


def config(name, family="bert", **options):
    if family == "mixtral":
        options |= {"add_bias": True} if name != "lora" else {}
    return StratifiedConfig(**ADAPTERS[name], r=2, init_weights=False, **options)


def resident(names, family="bert", dtype=torch.float32, **options):
    """A base with these adapters, added in this order, and the state that the base had before."""
    base = build(family).to(dtype).requires_grad_(False)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = None
    for name in names:
        torch.manual_seed(len(name))  # the same adapter whenever it comes
        if model is None:
            model = get_peft_model(base, config(name, family, **options), adapter_name=name)
        else:
            model.add_adapter(name, config(name, family, **options))
    return model.eval(), before


def logits(model, family="bert"):
    with torch.no_grad():
        return model(**batch(family)).logits


def is_untouched(model, before):
    state = {
        name.replace(".base_layer", "").replace(".original_module", ""): value
        for name, value in model.base_model.model.state_dict().items()
    }
    return all(torch.equal(state[name], value) for name, value in before.items())


def alone(family="bert", dtype=torch.float32, **options):
    return {name: logits(resident([name], family, dtype, **options)[0], family) for name in ADAPTERS}


@pytest.mark.parametrize("family", FAMILIES)
def test_switching_gives_each_adapter_and_the_base_bit_for_bit(family):
    expected = alone(family)
    model, before = resident(ADAPTERS, family)
    base_logits = logits(build(family), family)
    assert len({value.sum().item() for value in expected.values()} | {base_logits.sum().item()}) == 5
    choose = random.Random(0)
    for _ in range(40):
        name = choose.choice([*ADAPTERS, None])
        if name is None:
            with model.disable_adapter():
                assert torch.equal(logits(model, family), base_logits)
        else:
            model.set_adapter(name)
            assert torch.equal(logits(model, family), expected[name])
    assert is_untouched(model, before)


@pytest.mark.parametrize(
    "order",
    [
        order if number % 6 == 0 else pytest.param(order, marks=pytest.mark.slow)
        for number, order in enumerate(itertools.permutations(ADAPTERS))
    ],
)
def test_the_order_of_arrival_makes_no_difference(order, tmp_path):
    expected = alone()
    model, _ = resident(order)
    model.save_pretrained(tmp_path)
    for name in order:
        model.set_adapter(name)
        assert torch.equal(logits(model), expected[name])
        loaded = PeftModel.from_pretrained(build("bert"), tmp_path / name)
        assert torch.equal(logits(loaded.eval()), expected[name])


@pytest.mark.parametrize("order", [["spafit", "all", "bitfit", "mixed"], ["mixed", "bitfit", "all", "spafit"]])
def test_files_do_not_depend_on_other_adapters(order, tmp_path):
    model, _ = resident(order)
    model.save_pretrained(tmp_path / "together")
    for name in order:
        resident([name])[0].save_pretrained(tmp_path / "alone")
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "together" / name / file).read_bytes() == (
                tmp_path / "alone" / name / file
            ).read_bytes()


@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral"])
def test_loading_one_after_another_is_as_loading_each_alone(family, tmp_path):
    expected = alone(family)
    for name in ADAPTERS:
        resident([name], family)[0].save_pretrained(tmp_path)
    for order in (list(ADAPTERS), list(ADAPTERS)[::-1]):
        model = PeftModel.from_pretrained(build(family), tmp_path / order[0], adapter_name=order[0])
        for name in order[1:]:
            model.load_adapter(tmp_path / name, adapter_name=name)
        for name in order:
            model.set_adapter(name)
            assert torch.equal(logits(model.eval(), family), expected[name])


# ---- merging


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_merging_is_exact_within_a_tolerance_and_undone_exactly(family, name):
    model, before = resident(ADAPTERS, family)
    model.set_adapter(name)
    expected = logits(model, family)
    model.merge_adapter()
    assert not is_untouched(model, before) or (family, name) == ("mixtral", "bitfit")  # these biases are added ones
    torch.testing.assert_close(logits(model, family), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert is_untouched(model, before)
    assert torch.equal(logits(model, family), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_merging_rounds_once(dtype, autocast, options):
    base = build("bert").to(dtype)
    start = {name: value.clone() for name, value in base.state_dict().items()}
    settings = ADAPTERS["spafit"] if options.get("use_dora") else ADAPTERS["all"]
    conf = StratifiedConfig(**settings, r=2, init_weights=False, **options)
    model = get_peft_model(base, conf, autocast_adapter_dtype=autocast).eval()
    # the same adapter in float64
    exact = get_peft_model(build("bert").double(), StratifiedConfig(**settings, r=2, **options)).eval()
    exact.base_model.model.load_state_dict(model.base_model.model.state_dict())
    exact.merge_adapter()
    model.merge_adapter()
    merged, wanted = model.get_base_model().state_dict(), exact.get_base_model().state_dict()
    for name in start:
        key = next(k for k in merged if k.replace(".base_layer", "") == name)
        rounded = wanted[key].to(dtype)
        # float32 in between: at a tie the last bit may fall the other way
        assert (merged[key] == rounded).float().mean() > 0.99
        torch.testing.assert_close(merged[key], rounded, rtol=torch.finfo(dtype).eps, atol=1e-7)
    model.unmerge_adapter()
    assert is_untouched(model, start)


@pytest.mark.parametrize("names", list(itertools.permutations(["mixed", "all", "bitfit"], 2)))
def test_several_active_adapters_merge_to_what_they_give_unmerged(names):
    model, before = resident(ADAPTERS)
    model.base_model.set_adapter(list(names))
    expected = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    # one by one, in any order, is the same as together
    for name in names:
        model.merge_adapter([name])
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert is_untouched(model, before)
    assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:The merged model has biases")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_merge_and_unload_gives_a_plain_model(family, name, tmp_path):
    model, _ = resident([name], family)
    expected = logits(model, family)
    merged = model.merge_and_unload()
    assert type(merged) is type(build(family))
    torch.testing.assert_close(logits(merged, family), expected, rtol=0, atol=1e-5)
    assert not any("lora" in key for key in merged.state_dict())
    if family != "mixtral" or name == "mixed":
        assert merged.state_dict().keys() == build(family).state_dict().keys()


def test_merging_twice_warns_and_changes_nothing():
    model, _ = resident(["all", "mixed"])
    model.merge_adapter()
    merged = logits(model)
    with pytest.warns(UserWarning, match="already merged"):
        model.merge_adapter()
    assert torch.equal(logits(model), merged)


def test_a_failed_check_of_merged_values_leaves_the_base_alone():
    model, before = resident(["all"])
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "3.attention.self.value.lora_B" in n)[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    assert is_untouched(model, before)


def test_added_biases_are_merged_into_the_architecture_and_taken_out_again():
    model, before = resident(["bitfit"], "mixtral")
    linear = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    assert linear.bias is None
    model.merge_adapter()
    assert linear.bias.shape == (16,)
    model.unmerge_adapter()
    assert linear.bias is None
    assert is_untouched(model, before)
    with pytest.warns(UserWarning, match="biases that its architecture does not have"):
        merged = model.merge_and_unload()
    assert merged.model.layers[1].self_attn.q_proj.bias is not None


def test_an_adapter_that_comes_while_others_are_merged_starts_from_the_base():
    expected = alone()
    model, before = resident(["all"])
    model.merge_adapter()
    torch.manual_seed(len("mixed"))
    with pytest.warns(UserWarning, match="Unmerging them first"):
        model.add_adapter("mixed", config("mixed"))
    model.set_adapter("mixed")
    assert torch.equal(logits(model), expected["mixed"])
    assert is_untouched(model, before)


# ---- disabling, deleting, unloading


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merged", [False, True])
def test_disabling_and_unloading_give_the_base_bit_for_bit(family, merged):
    base_logits = logits(build(family), family)
    model, before = resident(ADAPTERS, family)
    if merged:
        model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model, family), base_logits)
    if merged:
        model.merge_adapter()
    plain = model.unload()
    assert torch.equal(logits(plain, family), base_logits)
    state = plain.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not any(isinstance(m, nn.Module) and "forward" in m.__dict__ for m in plain.modules())


@pytest.mark.parametrize("order", [list(ADAPTERS), list(ADAPTERS)[::-1]])
@pytest.mark.filterwarnings("ignore:Adapter .* was active")
def test_deleting_leaves_the_others_as_they_were(order):
    expected = alone()
    model, before = resident(ADAPTERS)
    remaining = list(ADAPTERS)
    for name in order[:-1]:
        model.delete_adapter(name)
        remaining.remove(name)
        assert not any(f".{name}." in key for key in model.state_dict())
        for other in remaining:
            model.set_adapter(other)
            assert torch.equal(logits(model), expected[other])
    model.delete_adapter(order[-1])
    assert is_untouched(model, before)
    # PEFT's own wrapper cannot do without an adapter
    assert torch.equal(logits(model.base_model.model), logits(build("bert")))


def test_a_deleted_adapter_may_come_again_as_another_variant_of_lora():
    model, _ = resident(["bitfit"])
    model.add_adapter("lora", StratifiedConfig(n1=0, n2=1, r=2, use_dora=True))
    model.delete_adapter("lora")
    torch.manual_seed(0)
    model.add_adapter("lora", StratifiedConfig(n1=0, n2=1, r=2, init_weights=False))
    model.set_adapter("lora")
    again = logits(model)
    torch.manual_seed(0)
    fresh = get_peft_model(build("bert"), StratifiedConfig(n1=0, n2=1, r=2, init_weights=False)).eval()
    assert torch.equal(again, logits(fresh))


def test_stock_peft_can_do_none_of_this_with_biases():
    base = build("bert")
    base_logits = logits(base)
    model = get_peft_model(base, LoraConfig(target_modules=["query"], bias="all"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith("bias"):
                parameter.add_(1.0)
    with model.disable_adapter():
        assert not torch.equal(logits(model.eval()), base_logits)
    with pytest.raises(ValueError, match="only 1 adapter with bias"):
        model.add_adapter("second", LoraConfig(target_modules=["query"], bias="all"))


# ---- training one of several


@pytest.mark.parametrize("name", ADAPTERS)
def test_training_one_adapter_moves_nothing_else(name):
    model, before = resident(ADAPTERS)
    model.set_adapter(name)
    model.train()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(f".{name}." in key for key in trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(**batch("bert")).loss.backward()
    optimizer.step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, start[key])}
    assert moved <= trained
    assert is_untouched(model, before)


def test_rows_of_one_batch_may_belong_to_different_adapters():
    model, _ = resident(ADAPTERS)
    names = ["mixed", "spafit", "__base__", "bitfit"]
    data = batch("bert", labels=False)
    with torch.no_grad():
        mixed = model(**data, adapter_names=names).logits
        for row, name in enumerate(names):
            one = {key: value[row : row + 1] for key, value in data.items()}
            if name == "__base__":
                with model.disable_adapter():
                    expected = model(**one).logits
            else:
                model.set_adapter(name)
                expected = model(**one).logits
            torch.testing.assert_close(mixed[row : row + 1], expected, rtol=0, atol=1e-6)
