"""Each stratum alone trains bit for bit as what it stands for."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import batch, build

from peft_surgical import StratifiedConfig, SurgicalConfig, find_stacks
from peft_surgical.methods.stratified.tensors import is_norm


def steps(model, family, count=20, *, autocast=None, seed=0):
    """Train; the losses, and afterwards the trained tensors."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for _, p in trained], lr=1e-2, weight_decay=0.01)
    torch.manual_seed(seed)
    losses = []
    model.train()
    for step in range(count):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(**batch(family, seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, trained


def logits(model, family):
    model.eval()
    with torch.no_grad():
        return model(**batch(family, seed=99)).logits


def readable(name):
    for part in (
        ".base_layer",
        ".own_tensors",
        "base_model.model.",
        ".lora_tuned.default",
        ".surgical_params.default",
    ):
        name = name.replace(part, "")
    return name.replace("|", ".").replace(".modules_to_save.default", "")


def plain(family, wanted):
    """The base with only some parameters trainable, as plain PyTorch has it."""
    model = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted(name))
    return model


def assert_same_training(ours, theirs, family, **options):
    our_losses, our_tensors = steps(ours, family, **options)
    their_losses, their_tensors = steps(theirs, family, **options)
    assert our_losses == their_losses
    found = {readable(name): p for name, p in our_tensors}
    expected = {readable(name): p for name, p in their_tensors}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], p) for name, p in expected.items())
    assert torch.equal(logits(ours, family), logits(theirs, family))


def layer_paths(model, layers):
    return [
        f"{layer.path}." for stack in find_stacks(model).values() for layer in stack.layers if layer.index in layers
    ]


# ---- LoRA


LORA = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.2},
    "ranks": {"rank_pattern": {"query": 4, "q_proj": 4, "c_attn": 4}, "alpha_pattern": {"value": 1}},
    "gaussian": {"init_lora_weights": "gaussian"},
    "random": {"init_lora_weights": False},
}
TARGETS = {
    "bert": ["query", "key", "value"],
    "gpt2": ["c_attn", "attn.c_proj"],
    "llama": ["q_proj", "k_proj", "v_proj"],
    "mixtral": ["q_proj", "o_proj"],
}


def lora_pair(family, **options):
    targets = TARGETS[family]
    strata = [{"layers": "0-1", "tune": "frozen"}, {"layers": "2-3", "tune": "lora", "bias": "none"}]
    torch.manual_seed(1)
    ours = get_peft_model(build(family), StratifiedConfig(strata=strata, target_modules=targets, r=2, **options))
    torch.manual_seed(1)
    config = LoraConfig(target_modules=targets, layers_to_transform=[2, 3], r=2, **options)
    return ours, get_peft_model(build(family), config)


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:The following")
def test_the_lora_stratum_is_pefts_lora_bit_for_bit(family, options):
    ours, theirs = lora_pair(family, **options)
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(2)
        model(**batch(family)).loss.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], grad) for name, grad in expected.items())
    assert torch.equal(logits(ours, family), logits(theirs, family))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("family", TARGETS)
def test_the_lora_stratum_trains_as_pefts_lora(family):
    assert_same_training(*lora_pair(family), family)


def test_the_lora_stratum_trains_as_pefts_lora_on_a_bfloat16_base():
    torch.manual_seed(1)
    strata = [{"layers": "0-1", "tune": "frozen"}, {"layers": "2-3", "tune": "lora", "bias": "none"}]
    ours = get_peft_model(build("bert").bfloat16(), StratifiedConfig(strata=strata, variant="I", r=2))
    torch.manual_seed(1)
    config = LoraConfig(target_modules=TARGETS["bert"], layers_to_transform=[2, 3], r=2)
    assert_same_training(ours, get_peft_model(build("bert").bfloat16(), config), "bert")


# ---- bias terms


@pytest.mark.filterwarnings("ignore:.* trained tensors have had no gradient")  # of XLNet: unused
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "distilbert", "gpt2", "vit", "xlnet", "bart"])
def test_the_bitfit_stratum_trains_as_plain_biases(family):
    chosen = layer_paths(build(family), [1, 2])
    both = {"layers": "1-2", "tune": "bitfit"}, {"layers": [0, 3], "tune": "frozen"}
    strata = {"encoder": [*both], "decoder": [*both]} if family == "bart" else [*both]
    ours = get_peft_model(build(family), StratifiedConfig(strata=strata))
    model = build(family)
    unused = {n for n, p in model.named_parameters() if n.endswith(("r_s_bias",))}  # no segments, no gradient

    def wanted(name):
        return name.endswith("bias") and any(name.startswith(path) for path in chosen)

    theirs = plain(family, wanted)
    if unused:  # AdamW skips tensors without a gradient in both
        assert family == "xlnet"
    assert_same_training(ours, theirs, family)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bitfit_stratum_trains_as_plain_biases_under_autocast(dtype):
    ours = get_peft_model(build("bert"), StratifiedConfig.full_bitfit())
    theirs = plain("bert", lambda name: ".layer." in name and name.endswith("bias"))
    assert_same_training(ours, theirs, "bert", autocast=dtype)


def test_the_head_is_trained_beside_the_biases():
    ours = get_peft_model(build("bert"), StratifiedConfig.full_bitfit(task_type="SEQ_CLS"))
    theirs = plain("bert", lambda n: n.startswith("classifier") or (".layer." in n and n.endswith("bias")))
    assert_same_training(ours, theirs, "bert")


@pytest.mark.parametrize("family", ["llama", "modernbert", "t5"])
def test_added_biases_start_at_zero_and_train_as_biases_of_the_architecture(family):
    ours = get_peft_model(build(family), StratifiedConfig(strata=[{"layers": "all", "tune": "bitfit"}], add_bias=True))
    base = build(family)
    assert torch.equal(logits(ours, family), logits(base, family))
    theirs = build(family).requires_grad_(False)
    for stack in find_stacks(theirs).values():
        for layer in stack.layers:
            for module in layer.module.modules():
                if isinstance(module, torch.nn.Linear):
                    module.bias = torch.nn.Parameter(torch.zeros(module.out_features))
    assert_same_training(ours, theirs, family)


# ---- norms and whole layers


@pytest.mark.parametrize("family", ["bert", "llama", "qwen3", "modernbert", "t5", "mixtral"])
def test_the_norm_stratum_trains_as_plain_norms(family):
    model = build(family)
    norms = {f"{name}." for name, module in model.named_modules() if is_norm(module)}
    chosen = layer_paths(model, range(4))
    ours = get_peft_model(model, StratifiedConfig(strata=[{"layers": "all", "tune": "norm"}]))
    theirs = plain(
        family, lambda n: any(n.startswith(x) for x in norms) and any(n.startswith(path) for path in chosen)
    )
    assert_same_training(ours, theirs, family)


@pytest.mark.filterwarnings("ignore:.* trained tensors have had no gradient")  # of XLNet: unused
@pytest.mark.parametrize("family", ["bert", "xlnet", "gpt2", "mixtral", "vit"])
def test_the_full_stratum_trains_as_a_surgical_config(family):
    strata = [{"layers": [0, 2], "tune": "frozen"}, {"layers": [1, 3], "tune": "full"}]
    ours = get_peft_model(build(family), StratifiedConfig(strata=strata, task_type=None))
    theirs = get_peft_model(build(family), SurgicalConfig(layers=[1, 3]))
    assert_same_training(ours, theirs, family)


# ---- all together


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_same_with_checkpointing(family, reentrant):
    def gradients(checkpointing):
        torch.manual_seed(1)
        config = StratifiedConfig(n1=0, n2=1, r=2, init_weights=False, add_bias=family == "llama")
        model = get_peft_model(build(family), config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model(**batch(family)).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    with_it, without = gradients(True), gradients(False)
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[name], grad) for name, grad in without.items())


def test_the_backward_pass_ends_above_the_frozen_layers():
    model = get_peft_model(build("bert"), StratifiedConfig(n1=1, n2=2, r=2)).train()
    seen = []
    for i, layer in enumerate(model.get_base_model().bert.encoder.layer):
        layer.register_forward_hook(
            lambda module, args, out, i=i: seen.append((i, (out[0] if isinstance(out, tuple) else out).requires_grad))
        )
    model(**batch("bert"))
    assert seen == [(0, False), (1, False), (2, True), (3, True)]
