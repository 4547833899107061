"""A combined adapter is the base plus the weighted differences of others, or PEFT's pruned variants of that."""

from __future__ import annotations

import pytest
import torch
from adapters import METHODS, TASKS, add, base_outputs, make, make_config, merged_state, outputs, plain, save, shake
from peft import PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils import merge_utils
from tiny_models import build


EXACT = {"SURGICAL": "linear", "STRATIFIED": "cat"}
CASES = [(method, family) for method in METHODS for family in TASKS]
cases = pytest.mark.parametrize(("method", "family"), CASES)


def two(method: str, family: str, one=(1, 2), other=(1, 2), **options) -> PeftModel:
    model = make(method, family, one, name="rte", **options)
    return add(model, method, family, other, name="cola", **options)


def combined_state(model, weights, combine) -> dict[str, torch.Tensor]:
    base = build_state(model)
    states = [merged_state(model, name) for name in ("rte", "cola")]
    return {
        key: (base[key].double() + combine([s[key].double() - base[key].double() for s in states], weights)).float()
        for key in base
    }


def build_state(model) -> dict[str, torch.Tensor]:
    with model.disable_adapter():
        return {k: v.clone() for k, v in build(model.family).state_dict().items()}


@cases
@pytest.mark.parametrize("weights", [(0.3, 0.5), (1.0, -1.0), (1.0, 1.0)])
def test_the_sum_is_the_base_plus_the_weighted_differences(method, family, weights):
    model = two(method, family)
    model.family = family
    model.add_weighted_adapter(["rte", "cola"], list(weights), "both", combination_type=EXACT[method])
    wanted = combined_state(model, weights, lambda ds, ws: sum(w * d for d, w in zip(ds, ws, strict=True)))
    torch.testing.assert_close(outputs(model, family, "both"), outputs(plain(family, wanted), family))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["linear", "svd"])
def test_loras_sum_is_cut_to_the_best_of_its_rank(family, kind):
    model = two("STRATIFIED", family)
    model.family = family
    model.add_weighted_adapter(["rte", "cola"], [0.3, 0.5], "both", combination_type=kind)
    wanted = combined_state(model, [0.3, 0.5], lambda ds, ws: sum(w * d for d, w in zip(ds, ws, strict=True)))
    base = build(family).state_dict()
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            assert module.r["both"] == 2
            u, s, v = torch.linalg.svd((wanted[f"{path}.weight"] - base[f"{path}.weight"]).double())
            cut = u[:, :2] * s[:2] @ v[:2]
            wanted[f"{path}.weight"] = (base[f"{path}.weight"].double() + cut).float()
    torch.testing.assert_close(
        outputs(model, family, "both"), outputs(plain(family, wanted), family), rtol=1e-4, atol=1e-5
    )


@cases
@pytest.mark.parametrize("kind", ["linear", "exact"])
def test_weights_one_and_zero_are_the_adapters_and_the_base(method, family, kind):
    model = two(method, family)
    kind = EXACT[method] if kind == "exact" else kind
    for name, weights in {"first": [1, 0], "second": [0, 1], "none": [0, 0]}.items():
        model.add_weighted_adapter(["rte", "cola"], weights, name, combination_type=kind)
    exact = {"rtol": 0, "atol": 0} if method == "SURGICAL" else {"rtol": 1e-4, "atol": 1e-5}  # LoRA's products
    torch.testing.assert_close(outputs(model, family, "first"), outputs(model, family, "rte"), **exact)
    torch.testing.assert_close(outputs(model, family, "second"), outputs(model, family, "cola"), **exact)
    torch.testing.assert_close(outputs(model, family, "none"), base_outputs(family), **exact)


@cases
def test_adapters_on_other_layers_become_their_union(method, family, tmp_path):
    model = two(method, family, [1], [2, 3], **({"modules_to_save": None} if family == "vit" else {}))
    if family == "bert":  # both train the head, so one of them must not
        head = model.base_model.model.classifier
        head.modules_to_save["cola"].load_state_dict(head.original_module.state_dict())
    model.add_weighted_adapter(["rte", "cola"], [1, 1], "both", combination_type="linear")
    one, other, base = merged_state(model, "rte"), merged_state(model, "cola"), build(family).state_dict()
    union = {key: one[key] if not torch.equal(one[key], base[key]) else other[key] for key in base}
    exact = {"rtol": 0, "atol": 0} if method == "SURGICAL" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(outputs(model, family, "both"), outputs(plain(family, union), family), **exact)
    again = PeftModel.from_pretrained(build(family), save(model, tmp_path, "both")).eval()
    torch.testing.assert_close(outputs(again, family), outputs(model, family, "both"), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("kind", ["ties", "magnitude_prune"])
def test_pruned_combinations_are_those_of_peft_on_each_tensor(family, kind):
    model = two("SURGICAL", family, [1], [1, 2])
    model.family = family
    model.add_weighted_adapter(["rte", "cola"], [0.7, 0.9], "both", combination_type=kind, density=0.4)

    def combine(differences, weights):
        # an adapter that does not tune a tensor has no say in it
        chosen = [(d, w) for d, w in zip(differences, weights, strict=True) if d.any()]
        if not chosen:
            return torch.zeros_like(differences[0])
        weights = torch.tensor([w for _, w in chosen], dtype=torch.float64)
        return getattr(merge_utils, kind)([d for d, _ in chosen], weights, density=0.4)

    wanted = combined_state(model, [0.7, 0.9], combine)
    torch.testing.assert_close(outputs(model, family, "both"), outputs(plain(family, wanted), family))


def test_dare_keeps_a_share_of_the_differences_and_scales_it_up():
    model = two("SURGICAL", "bert")
    model.add_weighted_adapter(["rte"], [1.0], "dropped", combination_type="dare_linear", density=0.5)
    base, full, dropped = build("bert").state_dict(), merged_state(model, "rte"), merged_state(model, "dropped")
    kept = entries = 0
    for key, start in base.items():
        if torch.equal(start, full[key]):
            assert torch.equal(start, dropped[key])
            continue
        ratio = ((dropped[key] - start).double() / (full[key] - start).double()).flatten()
        is_kept = ratio.abs() > 1
        torch.testing.assert_close(ratio[is_kept], torch.full_like(ratio[is_kept], 2.0), rtol=1e-3, atol=0)
        assert not ratio[~is_kept].any()
        kept, entries = kept + int(is_kept.sum()), entries + len(ratio)
    assert abs(kept / entries - 0.5) < 0.03


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["ties", "dare_linear", "dare_ties", "magnitude_prune"])
@pytest.mark.filterwarnings("ignore:The density 1")
def test_nothing_is_pruned_with_density_one(method, kind):
    model = two(method, "bert")
    model.add_weighted_adapter(["rte"], [1.0], "same", combination_type=kind, density=1.0)
    torch.testing.assert_close(outputs(model, "bert", "same"), outputs(model, "bert", "rte"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_combined_adapter_is_saved_trained_and_switched_like_any_other(method, tmp_path):
    model = two(method, "bert", [1], [2])
    before = outputs(model, "bert", "rte")
    model.add_weighted_adapter(["rte", "cola"], [0.5, 0.5], "both")
    assert torch.equal(outputs(model, "bert"), before)  # it is not active by itself
    model.set_adapter("both")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".both" in name for name in trained)
    wanted = outputs(model, "bert", "both")
    assert not torch.allclose(wanted, before)
    again = PeftModel.from_pretrained(build("bert"), save(model, tmp_path, "both"))
    assert torch.equal(outputs(again.eval(), "bert"), wanted)


def test_choices_by_name_are_united_module_by_module(tmp_path):
    model = make("SURGICAL", "bert", [1], name="rte", target_modules=["query"])
    add(model, "SURGICAL", "bert", [2], name="cola", target_modules=["dense"])
    model.add_weighted_adapter(["rte", "cola"], [1.0, 0.0], "both")
    assert torch.equal(outputs(model, "bert", "both"), outputs(model, "bert", "rte"))
    tuned = {n.split(".surgical")[0] for n, _ in model.named_parameters() if ".both." in n and "surgical" in n}
    assert {name.rpartition(".layer.")[2] for name in tuned} == {
        "1.attention.self.query", "2.attention.output.dense", "2.intermediate.dense", "2.output.dense"
    }  # fmt: skip
    again = PeftModel.from_pretrained(build("bert"), save(model, tmp_path, "both"))
    assert torch.equal(outputs(again.eval(), "bert"), outputs(model, "bert", "both"))


def test_half_precision_masters_keep_their_dtype():
    model = make("SURGICAL", "llama", [1], name="rte").to(torch.bfloat16)
    model.add_weighted_adapter(["rte"], [0.5], "less")
    assert {p.dtype for name, p in model.named_parameters() if ".less." in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"adapters": ["rte", "mnli"]}, "no adapter 'mnli'"),
        ({"adapters": []}, "list of different adapters"),
        ({"adapters": ["rte", "rte"]}, "list of different adapters"),
        ({"weights": [1.0]}, "one number for each of the 2"),
        ({"adapter_name": "rte"}, "already"),
        ({"combination_type": "svd"}, "linear, ties"),
        ({"combination_type": "cat"}, "linear, ties"),
        ({"combination_type": "ties"}, "density=None"),
        ({"combination_type": "ties", "density": 1.5}, "density=1.5"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_the_model_alone(arguments, message):
    model = two("SURGICAL", "bert")
    before, names = outputs(model, "bert", "rte"), [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(
            **{"adapters": ["rte", "cola"], "weights": [0.5, 0.5], "adapter_name": "both", **arguments}
        )
    assert list(model.peft_config) == ["rte", "cola"]
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(outputs(model, "bert"), before)


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_different_sizes_are_refused_by_name(method, tmp_path):
    model = make(method, "bert", [1], name="rte")
    other = make_config(method, "bert", [1])
    other.labels = {"num_labels": 5, "id2label": None, "label2id": None, "problem_type": None}
    model.add_adapter("stsb", other)
    with pytest.raises(ValueError, match="classifier.*'rte': 2, 'stsb': 5"):
        model.add_weighted_adapter(["rte", "stsb"], [0.5, 0.5], "both")
    assert list(model.peft_config) == ["rte", "stsb"]


@pytest.mark.parametrize(
    ("strata", "options", "message"),
    [
        ([{"layers": "0-2", "tune": "frozen"}, {"layers": [3], "tune": "bitfit"}], {}, "Layer 3 of encoder is tuned"),
        (None, {"target_modules": ["query"]}, "with strata cannot be brought together"),
    ],
)  # fmt: skip
def test_strata_that_no_config_can_unite_are_refused(strata, options, message):
    from peft_surgical import StratifiedConfig

    model = make("STRATIFIED", "bert", [3], name="rte")
    model.add_adapter("cola", StratifiedConfig(task_type="SEQ_CLS", strata=strata, **options))
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(["rte", "cola"], [0.5, 0.5], "both")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"combination_type": "sum"}, "linear, cat, svd"), ({"combination_type": "linear"}, r"these have \[2, 4\]")],
)
def test_wrong_combinations_of_lora_are_refused(arguments, message):
    model = make("STRATIFIED", "bert", [3], name="rte")
    other = make_config("STRATIFIED", "bert", [3])
    other.r = 4
    model.add_adapter("cola", other)
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(["rte", "cola"], [0.5, 0.5], "both", **arguments)
    assert list(model.peft_config) == ["rte", "cola"]
    model.add_weighted_adapter(["rte", "cola"], [0.5, 0.5], "both", combination_type="cat")
    assert model.peft_config["both"].r == 6
    model.add_weighted_adapter(["rte", "cola"], [0.5, 0.5], "cut", svd_rank=1)
    assert model.peft_config["cut"].r == 1


def test_dora_is_refused():
    model = make("STRATIFIED", "bert", [3], name="rte", use_dora=True)
    with pytest.raises(ValueError, match="use_dora=True cannot be combined"):
        model.add_weighted_adapter(["rte"], [0.5], "less")


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["cat", "linear", "svd", "magnitude_prune_svd"])
def test_in_half_precision_a_combination_is_saved_and_loaded_exactly(kind, autocast, tmp_path):
    # U10: PEFT makes a new LoRA in the base's dtype, and its decomposition gives float32
    model = get_peft_model(
        build("bert").bfloat16(),
        make_config("STRATIFIED", "bert", [1, 3]),
        adapter_name="a",
        autocast_adapter_dtype=autocast,
    )
    model.add_adapter("b", make_config("STRATIFIED", "bert", [1, 3]), autocast_adapter_dtype=autocast)
    shake(shake(model, "a", 1), "b", 2).eval()
    density = {"density": 0.5} if "prune" in kind else {}
    model.base_model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "sum", combination_type=kind, **density)
    loaded = PeftModel.from_pretrained(
        build("bert").bfloat16(), save(model, tmp_path, "sum"), autocast_adapter_dtype=autocast
    )
    assert torch.equal(outputs(loaded.eval(), "bert"), outputs(model, "bert", "sum"))
