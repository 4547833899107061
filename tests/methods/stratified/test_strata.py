"""What users may write for strata, what it means on a model, and what is refused."""

from __future__ import annotations

import ast
import logging
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import get_peft_model
from tiny_models import TwoTowers, build

from peft_surgical import StratifiedConfig
from peft_surgical.methods.stratified.strata import groups, plain_strata, resolve_strata


BERT_II = ["attention.output.dense", "key", "query", "value"]


def strata_of(model, **options):
    return plain_strata(resolve_strata(model, StratifiedConfig(**options)), model)


def lora(layers, targets=BERT_II, bias="other"):
    return {"layers": layers, "tune": "lora", "target_modules": sorted(targets), "bias": bias}


@pytest.mark.parametrize(
    "options",
    [
        {"n1": 1, "n2": 3},
        {"n1": 2 / 8, "n2": 4 / 8},
        {"n1": 1, "n2": 0.5},
        {"n1": np.int64(1), "n2": np.int32(3)},
        {
            "strata": [
                {"layers": "4-", "tune": "lora"},
                {"layers": "0-1", "tune": "frozen"},
                {"layers": (3, 2), "tune": "bitfit"},
            ]
        },
        {
            "variant": "II",
            "strata": [
                {"layers": "first:25%", "tune": "frozen"},
                {"layers": [-6, -5], "tune": "bitfit"},
                {"layers": "last:4", "tune": "lora", "bias": "other"},
            ],
        },
        {"n1": 1, "n2": 3, "target_modules": BERT_II},
    ],
)
def test_every_way_to_say_it_gives_the_same_strata(options):
    model = build("bert", num_hidden_layers=8)
    assert strata_of(model, **options) == [
        {"layers": [0, 1], "tune": "frozen"},
        {"layers": [2, 3], "tune": "bitfit"},
        lora([4, 5, 6, 7]),
    ]


def test_strata_are_stored_in_the_config_and_mean_the_same_when_read_again():
    model = build("bert")
    config = get_peft_model(model, StratifiedConfig(n1=0, n2=1, variant="I")).peft_config["default"]
    assert config.strata == [
        {"layers": [0], "tune": "frozen"},
        {"layers": [1], "tune": "bitfit"},
        lora([2, 3], ["key", "query", "value"]),
    ]
    assert (config.n1, config.n2, config.variant) == (None, None, None)
    assert strata_of(build("bert"), strata=config.strata) == config.strata


def test_group_2_may_tune_norms_instead_of_bias_terms():
    strata = strata_of(build("llama"), n1=0, n2=1, group_2="norm")
    assert [stratum["tune"] for stratum in strata] == ["frozen", "norm", "lora"]


def test_variant_two_is_the_default():
    assert strata_of(build("bert"), n1=0, n2=1)[-1]["target_modules"] == BERT_II


@given(depth=st.integers(3, 60), share_1=st.floats(0.02, 0.97), share_2=st.floats(0.03, 0.98))
def test_fractions_are_rounded_to_the_nearest_layer(depth, share_1, share_2):
    first, second = groups(share_1, share_2, depth)
    assert abs(first - share_1 * depth) <= 0.5 + 1e-9
    assert abs(second - share_2 * depth) <= 0.5 + 1e-9


@given(depth=st.integers(3, 60), data=st.data())
def test_an_index_is_the_last_layer_of_its_group(depth, data):
    n1 = data.draw(st.integers(0, depth - 3))
    n2 = data.draw(st.integers(n1 + 1, depth - 2))
    assert groups(n1, n2, depth) == (n1 + 1, n2 + 1)
    # an index meant for another depth counts as a fraction
    other = data.draw(st.integers(1, 60))
    assert groups(n1, n2, other, reference=depth)[0] == math.floor((n1 + 1) / depth * other + 0.5)


def test_the_papers_groups_are_a_fifth_and_two_fifths():
    assert groups(0.2, 0.4, 24) == groups(4, 9, 24)


# ---- several stacks


def test_n1_and_n2_apply_to_each_stack_of_an_encoder_decoder_model_by_fraction_and_say_so(caplog):
    model = build("bart", encoder_layers=8, decoder_layers=4)
    with caplog.at_level(logging.WARNING):
        strata = strata_of(model, n1=1, n2=3, variant="I")
    assert [(s["layers"], s["tune"]) for s in strata["encoder"]] == [
        ([0, 1], "frozen"),
        ([2, 3], "bitfit"),
        ([4, 5, 6, 7], "lora"),
    ]
    assert [(s["layers"], s["tune"]) for s in strata["decoder"]] == [
        ([0], "frozen"),
        ([1], "bitfit"),
        ([2, 3], "lora"),
    ]
    assert "fractions of its depth" in caplog.text
    assert "decoder: 0-0 frozen, 1-1 bitfit, 2- lora" in caplog.text


def test_strata_per_stack():
    model = build("bart")
    strata = strata_of(
        model,
        strata={
            "decoder": [{"layers": "0-2", "tune": "frozen"}, {"layers": "3-", "tune": "full"}],
            "encoder": [{"layers": "all", "tune": "bitfit"}],
        },
    )
    assert strata["encoder"] == [{"layers": [0, 1, 2, 3], "tune": "bitfit"}]
    assert strata["decoder"][1] == {"layers": [3], "tune": "full"}


def test_a_stack_that_is_not_named_stays_frozen():
    model = build("t5")
    strata = {"decoder": [{"layers": "all", "tune": "norm"}]}
    model = get_peft_model(model, StratifiedConfig(strata=strata))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".decoder." in name for name in trained)


def test_one_stratum_for_all_layers_means_every_stack():
    strata = strata_of(build("t5"), strata=[{"layers": "all", "tune": "lora", "bias": "none"}], variant="I")
    assert list(strata) == ["encoder", "decoder"]
    assert strata["encoder"] == [lora([0, 1, 2, 3], ["q", "k", "v"], "none")] == strata["decoder"]


def test_a_list_of_strata_on_a_model_with_several_stacks_lists_them():
    strata = [{"layers": "0-1", "tune": "frozen"}, {"layers": "2-", "tune": "bitfit"}]
    with pytest.raises(ValueError, match=r"several stacks.*encoder.*decoder"):
        strata_of(build("bart"), strata=strata)


@pytest.mark.parametrize("options", [{"n1": 0, "n2": 1}, {"strata": [{"layers": "all", "tune": "full"}]}])
def test_a_model_with_several_towers_is_asked_for_the_stack(options):
    with pytest.raises(ValueError, match=r"several stacks.*strata=.*vision_tower.*language_model"):
        strata_of(TwoTowers(), **options)


# ---- what is refused


@pytest.mark.parametrize(
    ("strata", "message"),
    [
        ([{"layers": "0-1", "tune": "frozen"}, {"layers": [3], "tune": "bitfit"}], r"\[2\].*no stratum"),
        ([{"layers": "0-2", "tune": "frozen"}, {"layers": "2-3", "tune": "bitfit"}], "Layer 2 .*two strata.*'frozen'"),
        ([{"layers": "0-3", "tune": "frozen"}, {"layers": [], "tune": "bitfit"}], "no layer"),
        ([{"layers": "0-3", "tune": "frozen"}, {"layers": "4-", "tune": "bitfit"}], "'4-' chooses no layer"),
        ([{"layers": "0-9", "tune": "bitfit"}], "no layer 9"),
        ({"decoder": [{"layers": "all", "tune": "bitfit"}]}, "no stack .*'decoder'"),
        (
            {
                "encoder": [{"layers": "all", "tune": "bitfit"}],
                "bert.encoder.layer": [{"layers": "all", "tune": "norm"}],
            },
            "twice",
        ),
    ],
)
def test_strata_that_do_not_cover_the_layers_once_are_refused(strata, message):
    with pytest.raises(ValueError, match=message):
        strata_of(build("bert"), strata=strata)


@pytest.mark.parametrize(
    ("strata", "error", "message"),
    [
        ([], ValueError, "empty list"),
        ({"encoder": []}, ValueError, "empty list for 'encoder'"),
        ("all", TypeError, "list of dicts"),
        ({"layers": "all", "tune": "full"}, TypeError, "list of dicts"),
        (["all"], TypeError, "must be a dict"),
        ([{"layers": "all"}], ValueError, "lacks 'tune'"),
        ([{"tune": "full"}], ValueError, "lacks 'layers'"),
        ([{"layers": "all", "tune": "bias"}], ValueError, "allowed are frozen, bitfit, norm, columns, lora, full"),
        ([{"layers": "all", "tune": "full", "bias": "all"}], ValueError, "'bias' has no meaning"),
        (
            [{"layers": "all", "tune": "bitfit", "target_modules": ["q"]}],
            ValueError,
            "'target_modules' has no meaning",
        ),
        ([{"layers": "all", "tune": "lora", "r": 4}], ValueError, "'r' has no meaning"),
        ([{"layers": "all", "tune": "lora", "bias": "some"}], ValueError, "allowed are other, all, none"),
        ([{"layers": {"decoder": [1]}, "tune": "full"}], ValueError, "around the strata.*'decoder'"),
    ],
)
def test_strata_of_the_wrong_form_are_refused_without_a_model(strata, error, message):
    with pytest.raises(error, match=message):
        StratifiedConfig(strata=strata)


@pytest.mark.parametrize(
    ("n1", "n2", "error", "message"),
    [
        (1, None, ValueError, "together"),
        (None, 1, ValueError, "together"),
        (2, 1, ValueError, "below n2"),
        (1, 1, ValueError, "below n2"),
        (0.5, 0.2, ValueError, "below n2"),
        (-1, 2, ValueError, "0 or more"),
        (0, 1.0, ValueError, "between 0 and 1"),
        (True, 2, TypeError, "bool"),
        ("1", 2, TypeError, "str"),
    ],
)
def test_marks_that_cannot_be_are_refused_without_a_model(n1, n2, error, message):
    with pytest.raises(error, match=message):
        StratifiedConfig(n1=n1, n2=n2)


@pytest.mark.parametrize(("n1", "n2"), [(0, 3), (1, 30), (0.1, 0.5), (0.5, 0.55), (1, 0.5), (0.2, 0.9)])
def test_a_group_without_layers_is_refused(n1, n2):
    with pytest.raises(ValueError, match=r"group without layers.*layers 0 to 3.*strata="):
        strata_of(build("bert"), n1=n1, n2=n2)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("bert", {"num_hidden_layers": depth}) for depth in (1, 2, 3, 4, 12, 24)),
        *(("t5", {"num_layers": 12, "num_decoder_layers": depth}) for depth in (2, 3, 12)),
    ],
)
def test_what_the_error_about_groups_advises_fits_the_model(family, options):
    model = build(family, **options)
    with pytest.raises(ValueError, match="leave a group without layers") as error:
        resolve_strata(model, StratifiedConfig(n1=40, n2=41))
    fitting = re.search(r"n1=(\d+) and n2=(\d+) fit", str(error.value))
    assert (fitting is None) == (min(options.values()) < 3)
    if fitting is not None:
        assert resolve_strata(model, StratifiedConfig(n1=int(fitting[1]), n2=int(fitting[2])))
    strata = ast.literal_eval(re.search(r"strata=(.*)\.$", str(error.value))[1])
    assert resolve_strata(model, StratifiedConfig(strata=strata))


def test_a_model_whose_attention_is_not_known_lists_its_linear_modules():
    with pytest.raises(ValueError, match=r"target_modules=.*ff\.layer_1, ff\.layer_2"):
        strata_of(build("xlnet"), n1=0, n2=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["nothing"]}, r"Layer 2 of the stratum .*none of target_modules.*attention.self.query"),
        ({"exclude_modules": ["query", "key", "value", "attention.output.dense"]}, "none of target_modules"),
    ],
)
def test_a_stratum_without_any_module_for_lora_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(build("bert"), StratifiedConfig(n1=0, n2=1, **options))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral", "modernbert", "t5"])
def test_a_stratum_without_biases_names_itself_and_the_ways_out(family):
    model = build(family)
    with pytest.raises(ValueError, match=r"Layer 1 of the stratum .*'bitfit'.*no bias terms.*norm.*add_bias=True"):
        get_peft_model(model, StratifiedConfig(n1=0, n2=1))
    assert not hasattr(model, "peft_config")
    assert not any("lora" in name for name, _ in model.named_modules())


def test_a_target_that_matches_nothing_beside_one_that_does_is_refused():
    with pytest.raises(ValueError, match="'qery'"):
        get_peft_model(build("bert"), StratifiedConfig(n1=0, n2=1, target_modules=["qery", "value"]))
