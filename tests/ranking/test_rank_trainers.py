"""What a trainer trains on, and losses of a model's own: each ranking against a plain loop, one row at a time through
the collator and `compute_loss`."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from datasets import Dataset, IterableDataset
from distributed.launch import launch_well
from peft import LoraConfig, get_peft_model
from tiny_chat import make_language_rows, pairs, save_language_model
from tiny_task import make_rows, save_base
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from peft_surgical import rank_layers
from peft_surgical.fisher.batches import PadRight
from peft_surgical.layers import find_stacks, unwrap


ROWS = [{"input_ids": list(range(3, 3 + n)), "labels": n % 2, "text": "not for the model"} for n in (2, 9, 4, 7, 3, 8)]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return save_language_model(tmp_path_factory.mktemp("language"))


@pytest.fixture
def arguments(tmp_path):
    def make(kind=TrainingArguments, **options):
        usual = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        return kind(**usual, **{"per_device_train_batch_size": 3} | options)

    return make


def rank(source, *arguments, **options):
    return rank_layers(source, *arguments, progress=False, **options)


def loop(model, loss, samples):
    """The score of each layer of the first stack by its definition; the model's own gradients are put back."""
    model = unwrap(model)
    layers = [layer.module for layer in next(iter(find_stacks(model).values())).layers]
    total = [{} for _ in layers]
    for number, sample in enumerate(samples):
        transformers.set_seed(number)
        model.zero_grad()
        loss(sample).backward()
        for squares, layer in zip(total, layers, strict=True):
            for name, p in layer.named_parameters():
                if p.grad is not None and "lora_" not in name:
                    squares[name] = squares.get(name, 0) + p.grad.double().square() / len(samples)
    model.zero_grad()
    return [math.sqrt(sum(float(t.square().sum()) for t in squares.values())) for squares in total]


def loop_of(trainer, *, sums=False):
    """The same for a trainer: each of its rows by itself, in evaluation mode. `sums`: over the tokens of a row."""
    other = copy.copy(trainer)
    loader = other.get_train_dataloader()
    for module in modules_of(trainer):
        module.eval()
    count = {"num_items_in_batch": torch.tensor(1)} if sums else {}
    rows = [loader.collate_fn([loader.dataset[n]]) for n in range(len(loader.dataset))]
    return loop(trainer.model, lambda row: other.compute_loss(trainer.model, dict(row), **count), rows)


def modules_of(trainer):
    return [m for m in vars(trainer).values() if isinstance(m, nn.Module)]


def frozen(modules):
    return [(type(m).__name__, m.training, [p.requires_grad for p in m._parameters.values() if p is not None])
            for module in modules for m in module.modules()]  # fmt: skip


def state(trainer):
    """All that a ranking might change of a trainer."""
    values = {k: repr(v) for k, v in vars(trainer).items() if isinstance(v, (dict, list, int, float, str))}
    modules = modules_of(trainer)
    weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    numbers = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
    loaders = len(trainer.accelerator._dataloaders)
    return values, frozen(modules), weights, grads, numbers, loaders, vars(trainer.args).copy()


def check(trainer, expected, how, **options):
    """A ranking is what is expected, got in that way, and the trainer is left as it was."""
    for module in modules_of(trainer):
        module.train()
    for p in unwrap(trainer.model).parameters():
        p.grad = torch.ones_like(p)
    before = state(trainer)
    ranking = rank(trainer, **options)
    after = state(trainer)
    assert ranking.scores == pytest.approx(expected, rel=1e-5)
    assert (ranking.record["labels"], ranking.record["engine"]) == how
    assert before[:2] == after[:2]
    assert before[4:] == after[4:]
    torch.testing.assert_close(before[2:4], after[2:4], rtol=0, atol=0)
    return ranking


LIKELIHOOD, LOSS = ("given", "hooks"), ("loss", "loop")


# ---- Trainer


class Weighted(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop = nn.Dropout(0.5)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        self.seen = [*getattr(self, "seen", ()), len(labels)]
        weight = torch.tensor([1.0, 5.0], dtype=torch.double)
        return (
            nn.functional.cross_entropy(self.drop(model(**inputs).logits), labels, reduction="none") * weight[labels]
        ).mean()


def margin(outputs, labels, num_items_in_batch=None):
    return outputs.logits[:, 0].mul(labels - 0.5).exp().sum()


@pytest.mark.parametrize(
    ("kind", "options", "more", "how"),
    [
        (Trainer, {}, {}, LIKELIHOOD),
        (Trainer, {"label_smoothing_factor": 0.2}, {}, LOSS),
        (Trainer, {}, {"compute_loss_func": margin}, LOSS),
        (Weighted, {}, {}, LOSS),
    ],
)
def test_a_trainer_is_ranked_by_its_loss(kind, options, more, how, arguments):
    model = tiny_models.build("bert", hidden_dropout_prob=0.3).double()
    data = Dataset.from_list(ROWS) if more else ROWS
    trainer = kind(model, arguments(**options), train_dataset=data, data_collator=PadRight(model), **more)
    check(trainer, loop_of(trainer), how)


def test_a_trainer_of_another_scores_and_options(arguments):
    model = tiny_models.build("bert").double()
    options = {"train_dataset": ROWS, "data_collator": PadRight(model)}
    plain, own = Trainer(model, arguments(), **options), Weighted(model, arguments(), **options)
    rows = [{k: v for k, v in row.items() if k != "text"} for row in ROWS]
    for more in ({"labels": "exact"}, {"score": "rgn"}, {"num_samples": 3, "aggregation": "trace"}):
        assert rank(plain, **more).scores == pytest.approx(rank(model, rows, **more).scores, rel=1e-9)

    def weighted(outputs, batch):
        log_p = outputs.logits.log_softmax(-1)[torch.arange(len(batch["labels"])), batch["labels"]]
        return log_p * (1 + 4 * batch["labels"])

    for more in ({"score": "grad_norm"}, {"aggregation": "trace"}, {"head_inits": 2}):
        expected = rank(model, rows, log_likelihood=weighted, **more)
        assert rank(own, **more).scores == pytest.approx(expected.scores, rel=1e-6)
        assert rank(own, log_likelihood=weighted, **more).scores == pytest.approx(expected.scores, rel=1e-6)
    by_loss = rank(plain, log_likelihood="loss")
    assert by_loss.record["engine"] == "loop"
    assert by_loss.scores == pytest.approx(rank(plain).scores, rel=1e-6)


def test_rows_that_stream_are_read_no_further_than_asked_for(arguments):
    model = tiny_models.build("bert").double()
    stream = IterableDataset.from_generator(lambda: (yield from ROWS))
    options = {"data_collator": PadRight(model)}
    streaming = Trainer(model, arguments(max_steps=1), train_dataset=stream, **options)
    first = Trainer(model, arguments(), train_dataset=ROWS[:4], **options)
    assert rank(streaming, num_samples=4).scores == pytest.approx(rank(first).scores, rel=1e-6)


def test_where_steps_weigh_tokens_alike_so_does_the_ranking(arguments):
    model = tiny_models.build("llama").double()
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in ROWS]
    for factor, how in ((0.0, LIKELIHOOD), (0.1, LOSS)):
        smooth = arguments(label_smoothing_factor=factor)
        trainer = Trainer(model, smooth, train_dataset=rows, data_collator=PadRight(model))
        modern = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 15)  # its smoother counts items
        check(trainer, loop_of(trainer, sums=modern or not factor), how)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"data": ROWS}, "A trainer has its own data and collator. Rank it alone"),
        ({"train_dataset": None}, {}, "requires a train_dataset"),
        ({"compute_loss_func": margin}, {"labels": "sampled"}, "labels='sampled' is for log p"),
        ({"compute_loss_func": margin}, {"unit": "token", "ignore_index": 0}, "unit='token', ignore_index=0 is for"),
        ({"compute_loss_func": lambda *_, **__: 1 / torch.zeros(2)}, {}, r"loss of sample \d .* is \(2,\); needed"),
        ({"compute_loss_func": lambda *_, **__: {}["completions"]}, {}, "by itself cannot .*KeyError: 'completions'"),
        ({}, {"log_likelihood": "own"}, "log_likelihood='own'; allowed are a function"),
    ],
)
def test_a_trainer_that_cannot_be_ranked_is_refused(change, options, message, arguments):
    model = tiny_models.build("bert")
    trainer = Trainer(model, arguments(), **{"train_dataset": ROWS, "data_collator": PadRight(model)} | change)
    with pytest.raises(ValueError, match=message):
        rank(trainer, **options)


# ---- TRL


def make_trl(kind, folder, arguments, data, *, lora=False, **options):
    trl = pytest.importorskip("trl")
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)).double()
    args = arguments(getattr(trl, f"{kind}Config"), bf16=False, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return getattr(trl, f"{kind}Trainer")(model, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("form", "options", "how"),
    [
        ("prompt", {}, LIKELIHOOD),
        ("messages", {"assistant_only_loss": True}, LIKELIHOOD),
        ("text", {"packing": True, "max_length": 24}, LIKELIHOOD),
        ("text", {"packing": True, "max_length": 24, "loss_type": "dft"}, LOSS),
        ("prompt", {"label_smoothing_factor": 0.1}, LOSS),
    ],
)
def test_an_sft_trainer_is_ranked_by_its_loss(form, options, how, language_model, arguments):
    trainer = make_trl("SFT", language_model, arguments, make_language_rows(6, 0, form), **options)
    check(trainer, loop_of(trainer, sums=True), how)


def preferences(count=5):
    both = pairs(count, 0)
    texts = {"prompt": [q for q, _ in both], "chosen": [f" {a}" for _, a in both]}
    return Dataset.from_dict({**texts, "rejected": [" w1 w2 w3"[: 3 + 3 * (n % 2)] for n in range(count)]})


@pytest.mark.parametrize("options", [{}, {"loss_type": "ipo"}, {"precompute_ref_log_probs": True}])
def test_a_dpo_trainer_is_ranked_by_its_loss(options, language_model, arguments):
    trainer = make_trl("DPO", language_model, arguments, preferences(), **options)
    with torch.no_grad():
        for p in trainer.model.parameters():  # the model has moved away from its reference
            p.add_(0.05 * torch.randn_like(p))
    check(trainer, loop_of(trainer), LOSS)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_of_a_trainer_with_an_adapter_the_base_is_ranked(kind, language_model, arguments):
    data = preferences() if kind == "DPO" else make_language_rows(5, 0, "prompt")
    trainer = make_trl(kind, language_model, arguments, data, lora=True)
    plain = make_trl(kind, language_model, arguments, data)
    check(trainer, loop_of(plain, sums=kind == "SFT"), LOSS if kind == "DPO" else LIKELIHOOD)


# ---- sentence-transformers


def make_sentences(folder, arguments, loss, data, **options):
    st = pytest.importorskip("sentence_transformers")
    model = st.SentenceTransformer(folder, device="cpu")
    args = arguments(st.SentenceTransformerTrainingArguments, **options)
    size = {"num_labels": 2, "sentence_embedding_dimension": tiny_models.WIDTH} if loss == "SoftmaxLoss" else {}
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    loss = getattr(losses, loss)(model, **size)
    return st.SentenceTransformerTrainer(model, args=args, train_dataset=data, loss=loss)


def sentences(*columns):
    rows = make_rows(6, 0, pair=True)
    values = {"a": rows["sentence1"], "b": rows["sentence2"], "c": rows["sentence1"][::-1], "label": rows["label"]}
    return Dataset.from_dict({name: values[name] for name in columns})


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory):
    return str(save_base(tmp_path_factory.mktemp("sentences")))


@pytest.mark.parametrize(
    ("loss", "columns"),
    [
        ("CosineSimilarityLoss", ("a", "b", "label")),
        ("SoftmaxLoss", ("a", "b", "label")),
        ("TripletLoss", ("a", "b", "c")),
        ("MultipleNegativesRankingLoss", ("a", "b", "c")),
        ("CachedMultipleNegativesRankingLoss", ("a", "b", "c")),
    ],
)
def test_a_trainer_of_sentences_is_ranked_by_its_loss(loss, columns, sentence_model, arguments):
    trainer = make_sentences(sentence_model, arguments, loss, sentences(*columns))
    check(trainer, loop_of(trainer), LOSS)


@pytest.mark.parametrize("kind", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_a_loss_that_is_nothing_on_one_sample_is_ranked_by_whole_batches(kind, sentence_model, arguments):
    trainer = make_sentences(sentence_model, arguments, kind, sentences("a", "b"), per_device_train_batch_size=2)
    for score in ("fisher", "grad_norm"):
        with pytest.raises(ValueError, match="loss of one sample by itself.*in-batch negatives.*unit='batch'"):
            rank(trainer, score=score)
    loader = copy.copy(trainer).get_train_dataloader()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batches = list(loader)
    assert len(batches) == 3
    trainer.model.eval()
    expected = loop(trainer.model, lambda batch: trainer.compute_loss(trainer.model, dict(batch)), batches)
    check(trainer, expected, LOSS, unit="batch")


# ---- losses of a model's own


def speech():
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(4, 4), num_feat_extract_layers=2, feat_extract_norm="layer",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    rows = [{"input_values": torch.randn(160 + 32 * n).double(), "labels": [1 + n, 2, 3]} for n in range(3)]
    return transformers.Wav2Vec2ForCTC(config), rows, None


def detection():
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=[16, 16],
        patch_size=8, num_detection_tokens=4, num_labels=3, use_mid_position_embeddings=False,
    )  # fmt: skip
    boxes = [torch.rand(n, 4) / 4 + 0.3 for n in (1, 2, 3)]
    labels = [{"class_labels": torch.arange(len(b)), "boxes": b} for b in boxes]
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": label} for label in labels]

    def collate(rows):
        return {"pixel_values": torch.stack([r["pixel_values"] for r in rows]), "labels": [r["labels"] for r in rows]}

    return transformers.YolosForObjectDetection(config), rows, collate


def segmentation():
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8], num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], strides=[4, 2], patch_sizes=[7, 3],
        num_attention_heads=[1, 1], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip
    rows = [{"pixel_values": torch.randn(3, 32, 32).double(), "labels": torch.randint(3, (32, 32))} for _ in range(3)]
    return transformers.SegformerForSemanticSegmentation(config), rows, None


def masked():  # draws random numbers
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {f"decoder_{name}": value for name, value in sizes.items()}
    rows = [{"pixel_values": torch.randn(3, 16, 16).double()} for _ in range(3)]
    return (
        transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes, image_size=16, patch_size=4)),
        rows,
        None,
    )


def contrastive():
    text = {
        "vocab_size": 99,
        "max_position_embeddings": 16,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "eos_token_id": 2,
    }
    text |= {"num_attention_heads": 2, "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1}
    image = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    image |= {"image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    rows = [{"input_ids": [1, n + 3, 5, 2], "pixel_values": torch.randn(3, 16, 16)} for n in range(5)]
    return transformers.CLIPModel(config), rows, None


@pytest.mark.parametrize("make", [speech, detection, segmentation, masked])
def test_a_model_without_a_known_head_is_ranked_by_its_own_loss(make, caplog):
    if make is detection:
        pytest.importorskip("scipy")
    torch.manual_seed(0)
    model, rows, collate = make()
    model = (model if make is detection else model.double()).eval()  # its loss knows no float64
    stack = next(iter(find_stacks(model)))
    with caplog.at_level(logging.WARNING):
        ranking = rank(model, rows, data_collator=collate, stack=stack, num_samples=3)
    assert "has no head for a known task" in caplog.text
    drawn = torch.randperm(3, generator=torch.Generator().manual_seed(0)).tolist()
    samples = [(collate or PadRight(model))([rows[n]]) for n in drawn]
    assert ranking.scores == pytest.approx(loop(model, lambda sample: model(**sample).loss, samples), rel=1e-5)
    assert ranking.record["labels"] == "loss"
    loader = DataLoader(rows, batch_size=2, collate_fn=collate or PadRight(model))
    assert rank(model, loader, stack=stack).scores == ranking.scores
    loader = DataLoader(rows, batch_sampler=[[0, 1], [2]], collate_fn=collate or PadRight(model))
    with pytest.raises(ValueError, match="gives 2 samples at a time.*batch_size=1, or rank by whole batches"):
        rank(model, loader, stack=stack)


def test_a_contrastive_model_is_ranked_by_whole_batches():
    torch.manual_seed(0)
    model, rows, _ = contrastive()
    model.eval()
    stack = next(iter(find_stacks(model)))
    with pytest.raises(ValueError, match="in-batch negatives, as in CLIP"):
        rank(model, rows, stack=stack)
    drawn = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [PadRight(model)([rows[n] for n in part]) for part in (drawn[:2], drawn[2:4])]  # the last is not whole
    expected = loop(model, lambda batch: model(**batch, return_loss=True).loss, batches)
    assert rank(model, rows, stack=stack, unit="batch", batch_size=2).scores == pytest.approx(expected, rel=1e-5)
    loader = DataLoader(rows, batch_sampler=[drawn[:2], drawn[2:4]], collate_fn=PadRight(model))
    assert rank(model, loader, stack=stack, unit="batch").scores == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_no_likelihood_may_be_asked_for_and_a_bare_model_has_none():
    model = tiny_models.build("bert").double()
    rows = [{k: v for k, v in row.items() if k != "text"} for row in ROWS]
    assert rank(model, rows, log_likelihood="loss").scores == pytest.approx(rank(model, rows).scores, rel=1e-6)
    with pytest.raises(ValueError, match="BertModel computes no loss of its own.*log_likelihood="):
        rank(tiny_models.build("bert", bare=True), rows)
    with pytest.raises(ValueError, match="no head for a known task"):
        rank(tiny_models.build("bert", bare=True), rows, labels="sampled")


# ---- pairs


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_any_iterable_of_pairs():
    model = Classifier().double()
    data = [(torch.randn(4).double(), n % 3) for n in range(7)]
    expected = loop(
        model, lambda pair: nn.functional.cross_entropy(model(pair[0][None]), torch.tensor([pair[1]])), data
    )
    columns = [torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])]
    kinds = {
        "list": data,
        "generator": (pair for pair in data),
        "dicts": [({"x": x}, y) for x, y in data],
        "arrays": [(x.numpy(), np.int64(y)) for x, y in data],
        "dataset": TensorDataset(*columns),
        "loader": DataLoader(TensorDataset(*columns), batch_size=3),
    }
    for kind, pairs_ in kinds.items():
        assert rank(model, pairs_).scores == pytest.approx(expected, rel=1e-6), kind
    endless = ((torch.ones(4).double() * n, n % 3) for n in iter(int, 1))
    assert rank(model, endless, num_samples=3).record["num_samples"] == 3
    with pytest.raises(ValueError, match=r"logits have shape .* for 2 samples"):  # batches where samples are due
        rank(model, [(columns[0][:3], columns[1][:3]), (columns[0][3:6], columns[1][3:6])])


# ---- processes


def rank_unevenly(folder, out):
    """Five rows in two processes, with a loss that gathers metrics from all of them."""

    def make(kind, **options):
        return kind(output_dir=str(out), report_to="none", use_cpu=True, **options)

    trainer = make_trl("SFT", folder, make, make_language_rows(5, 0, "prompt"), loss_type="dft")
    return rank(trainer).scores


def test_processes_share_the_rows_of_a_trainer(language_model, tmp_path):
    pytest.importorskip("trl")
    launch_well("ddp", [__file__, str(language_model), str(tmp_path)])
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert found[0] == found[1] == pytest.approx(rank_unevenly(language_model, tmp_path), rel=1e-6)


if __name__ == "__main__":
    scores = rank_unevenly(*sys.argv[1:])
    Path(sys.argv[2], f"{torch.distributed.get_rank()}.json").write_text(json.dumps(scores))
