"""Rankings that are right or refused: padding on either side, hidden labels, rules that do not fit, samples that
depend on others. The truth is a plain loop over samples without padding, on the model's own loss."""

from __future__ import annotations

import signal
import sys

import pytest
import tiny_models
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from peft_surgical import rank_layers
from peft_surgical.fisher import DenseGradients, rules
from peft_surgical.fisher.batches import Batch
from peft_surgical.fisher.engine import Runner
from peft_surgical.fisher.guard import agree_with_loss
from peft_surgical.fisher.measure import layer_fisher
from peft_surgical.fisher.objective import make_objective
from peft_surgical.layers import choose_stack, find_stacks


LENGTHS = (5, 11, 3, 8)
TEXTS = [torch.randint(3, 99, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def rank(model, data, **options):
    return rank_layers(model, data, progress=False, **{"batch_size": 4} | options).scores


def padded(rows: list[dict], side: str, labels_at_pads: int = -100) -> dict[str, torch.Tensor]:
    """A collator's batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, fill: int) -> torch.Tensor:
        values = [list(row[name]) for row in rows]
        pads = [[fill] * (longest - len(v)) for v in values]
        return torch.tensor([v + p if side == "right" else p + v for v, p in zip(values, pads, strict=True)])

    rows = [{**row, "ones": [1] * len(row["input_ids"])} for row in rows]  # a mask of the data's would be kept
    batch = {"input_ids": column("input_ids", 0), "attention_mask": column("ones", 0)}
    if isinstance(rows[0]["labels"], list):
        return batch | {"labels": column("labels", labels_at_pads)}
    return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


def texts(model) -> list[dict]:
    """Samples of a causal model or a classifier."""
    causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    return [{"input_ids": ids, "labels": list(ids) if causal else n % 2} for n, ids in enumerate(TEXTS)]


def truth(model, samples, factor) -> list[float]:
    """The trace of each layer's Fisher, from the model's own loss of each sample alone, times its number of labels."""
    layers = [layer.module for layer in next(iter(find_stacks(model).values())).layers]
    flat = [p for layer in layers for p in layer.parameters()]
    total = [0.0] * len(layers)
    for sample in samples:
        loss = model(**sample).loss * factor(sample)
        grads = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        for n, layer in enumerate(layers):
            total[n] += sum(
                float(g.square().sum()) for g in (next(grads) for _ in layer.parameters()) if g is not None
            )
    return [t / len(samples) for t in total]


def alone(row: dict) -> dict[str, torch.Tensor]:
    return padded([row], "right")


FAMILIES = ["gpt2", "llama", "bert", "xlnet"]  # absolute and relative positions, and one that reads the last token


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_scores_what_it_does_alone_whatever_side_is_padded(family, batch_size, side):
    model = tiny_models.build(family).double().eval()
    rows = texts(model)
    labels = (lambda s: s["labels"].shape[1] - 1) if isinstance(rows[0]["labels"], list) else (lambda s: 1)
    expected = truth(model, [alone(row) for row in rows], labels)
    for fill in (-100, 0):  # labels at pads that a collator left as padding do not count either
        found = rank(
            model, rows, aggregation="trace", batch_size=batch_size,
            data_collator=lambda part, fill=fill: padded(part, side, fill),
        )  # fmt: skip
        assert found == pytest.approx(expected, rel=1e-5)


def test_without_a_mask_the_label_of_padding_can_be_named():
    model = tiny_models.build("gpt2").double().eval()
    rows = texts(model)

    def collate(part):
        longest = max(TEXTS, key=len)  # so that each sample has padding
        rows = [*part, {"input_ids": longest, "labels": longest}]
        batch = padded(rows, "right", labels_at_pads=0)
        return {name: batch[name][: len(part)] for name in ("input_ids", "labels")}

    rows = [row for row in rows if len(row["input_ids"]) < 11]
    expected = truth(model, [alone(row) for row in rows], lambda s: s["labels"].shape[1] - 1)
    found = rank(model, rows, aggregation="trace", data_collator=collate, ignore_index=0)
    assert found == pytest.approx(expected, rel=1e-5)
    assert rank(model, rows, aggregation="trace", data_collator=collate) != pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("engine", ["hooks", "loop"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BartForCausalLM", {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}),
        ("XLMWithLMHeadModel", {"emb_dim": 16, "n_layers": 2, "n_heads": 2}),
    ],
)
def test_labels_are_read_where_the_models_own_loss_reads_them(name, options, engine):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=99, max_position_embeddings=32, **options)).double().eval()
    rows = [row | {"labels": list(row["input_ids"])} for row in texts(model)]
    expected = truth(model, [alone(row) for row in rows], lambda s: s["labels"].shape[1])
    stack = next(iter(find_stacks(model)))
    found = rank(
        model, rows, aggregation="trace", data_collator=lambda part: padded(part, "right"), stack=stack, engine=engine
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_no_log_likelihood_is_refused():
    class SquaredForSequenceClassification(transformers.BertForSequenceClassification):
        def forward(self, input_ids, attention_mask=None, labels=None):
            out = super().forward(input_ids, attention_mask)
            if labels is not None:
                out.loss = out.logits.square().mean()
            return out

    model = tiny_models.build("bert")
    model.__class__ = SquaredForSequenceClassification
    rows = texts(model)
    with pytest.raises(
        ValueError, match=r"Squared\w+ computes a loss of .*: its loss is another one. Give log_likelihood="
    ):
        rank(model, rows, data_collator=lambda part: padded(part, "right"))
    assert rank(model, rows, data_collator=lambda part: padded(part, "right"), verify=False)


# ---- what a rule cannot know


class Layered(nn.Module):
    """Two layers of one block and a class for each sample."""

    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(2).mean(2) if x.dim() > 3 else x.mean(1))


def images(n=6):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 5, 5, generator=generator, dtype=torch.double), "labels": i % 3} for i in range(n)]


class Normed(nn.Module):
    """What is normed without a rule is written to in place afterwards, in three ways."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), how
        self.norm.running_mean += 0.1

    def forward(self, x):
        out = self.norm(self.conv(x))
        if self.how == "relu":
            return nn.functional.relu(out, inplace=True)
        if self.how == "residual":
            out += x
            return out
        out[:, 0] = 0
        return out


@pytest.mark.parametrize("how", ["relu", "residual", "written"])
def test_outputs_that_are_written_to_in_place_keep_their_gradient(how):
    model = Layered(lambda: Normed(how)).double().eval()
    assert rank(model, images()) == pytest.approx(rank(model, images(), engine="loop"), rel=1e-9)


class ChannelsLastOrFirst(nn.LayerNorm):
    """One class, and a layout for each instance, as ConvNeXt's."""

    def __init__(self, first):
        super().__init__(4)
        self.first = first

    def forward(self, x):
        if not self.first:
            return super().forward(x)
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("size", [5, 4])  # four places along each dimension fit a wrong axis too
def test_each_instance_of_a_class_is_looked_at(size):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = ChannelsLastOrFirst(False), ChannelsLastOrFirst(True)
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return x + self.first(self.conv(x).relu())

    model = Layered(Block).double().eval()
    data = [row | {"x": row["x"][:, :size, :size]} for row in images()]
    assert rank(model, data) == pytest.approx(rank(model, data, engine="loop"), rel=1e-9)


class Gated(nn.Module):
    """A root mean square norm that may be given a gate beside its input, as Mamba's."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x, gate=None):
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.mark.parametrize("as_keyword", [True, False])
def test_an_input_beside_the_first_is_not_overlooked(as_keyword):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.norm = nn.Linear(4, 4), Gated()

        def forward(self, x):
            return self.norm(x, gate=self.inside(x)) if as_keyword else self.norm(x, self.inside(x))

    model = Layered(Block).double()
    data = [{"x": torch.randn(3, 4, dtype=torch.double), "labels": n % 3} for n in range(6)]
    assert rank(model, data, verify=False) == pytest.approx(rank(model, data, engine="loop"), rel=1e-9)


class Doubled(nn.Linear):
    pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rule_that_is_wrong_is_named(dtype, monkeypatch):
    def wrong(module, inputs, grad_output):
        right = rules.linear(module, inputs, grad_output)
        return {name: DenseGradients(g.dense(0, g.samples) * 2) for name, g in right.items()}

    monkeypatch.setitem(rules.RULES, Doubled, wrong)
    model = Layered(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Doubled(4, 4))).to(dtype)
    data = [{"x": torch.randn(n, 4, dtype=dtype), "labels": n % 3} for n in (7, 7, 7)]
    with pytest.raises(ValueError, match=r"not that of autograd, in layers\.\d\.2 \(Doubled; .*engine='loop'"):
        rank(model, data)
    assert rank(model, data, verify=False)
    assert rank(model, data, engine="loop")


class Faint(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + 1e-4 * self.factor * x


def test_a_gradient_below_the_last_digit_of_the_others_gives_no_alarm(monkeypatch):
    """It is rounding, and another in each batch, as that of Doge's decay in bfloat16."""

    def twice(module, inputs, grad_output):
        return {"factor": DenseGradients(2e-4 * (inputs * grad_output).flatten(1, -2).sum(1))}

    monkeypatch.setitem(rules.RULES, Faint, twice)
    data = [{"x": torch.randn(n, 4), "labels": n % 3} for n in (7, 7, 7)]
    model = Layered(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Faint()))
    with pytest.raises(ValueError, match="not that of autograd"):
        rank(model, data)
    assert rank(model.bfloat16(), [{**row, "x": row["x"].bfloat16()} for row in data])


class Mixing(nn.Module):
    """Between the two layers a sample is scaled by the size of its batch, which no gradient tells."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x):
        return self.inside(x) + 0.1 * len(x) * x.square()


@pytest.mark.parametrize("score", ["fisher", "grad_norm", "rgn"])
def test_samples_that_depend_on_others_are_taken_one_at_a_time(score, caplog):
    model = Layered(Mixing).double()
    data = [{"x": torch.randn(3, 4, dtype=torch.double), "labels": n % 3} for n in range(6)]
    assert rank(model, data, score=score) == pytest.approx(rank(model, data, score=score, batch_size=1), rel=1e-9)
    assert "Samples are taken one at a time" in caplog.text


@pytest.mark.parametrize("score", ["fisher", "grad_norm"])
def test_a_loss_over_the_batch_is_refused(score):
    model = tiny_models.build("bert").double()
    rows = texts(model)

    def contrastive(outputs, batch):
        unit = nn.functional.normalize(outputs.logits, dim=-1)
        return (unit @ unit.T / 0.1).log_softmax(-1).diagonal()

    collate = {"data_collator": lambda part: padded(part, "right")}
    with pytest.raises(ValueError, match="log_likelihood= of a sample depends on the rest of its batch"):
        rank(model, rows, score=score, log_likelihood=contrastive, **collate)

    def own(outputs, batch):
        return outputs.logits.log_softmax(-1)[torch.arange(len(batch["labels"])), batch["labels"]]

    assert rank(model, rows, log_likelihood=own, **collate) == pytest.approx(rank(model, rows, **collate), rel=1e-9)


@pytest.mark.parametrize("score", ["fisher", "grad_norm"])
def test_a_model_that_draws_random_numbers_is_warned_of(score, caplog):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model = Layered(lambda: nn.Sequential(Noisy(4, 4), nn.Tanh())).double()
    data = [{"x": torch.randn(3, 4, dtype=torch.double), "labels": n % 3} for n in range(4)]
    assert rank(model, data, score=score)
    assert "random in evaluation mode" in caplog.text


@pytest.mark.parametrize("labels", ["given", "sampled", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "mixtral", "vit", "roberta"])
def test_no_false_alarm(family, dtype, labels, caplog):
    model = tiny_models.build(family).to(dtype)
    batch = tiny_models.batch(family, 6)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    if labels == "exact" and batch["labels"].dim() == 2:
        pytest.skip("a row for each word")
    stack = "encoder" if family == "t5" else None
    for score in ("fisher", "grad_norm"):
        data = {"data_collator": lambda n: {k: v[n] for k, v in batch.items()}}
        rank(model, list(range(6)), labels=labels, stack=stack, score=score, **data)
    assert "one at a time" not in caplog.text


# ---- what the checks cost


def count_passes(model, *data, **options) -> int:
    """The forward passes of a ranking."""
    passes = []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    rank(model, *data, **options)
    handle.remove()
    return len(passes)


@pytest.mark.parametrize("labels", ["given", "sampled", "exact"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart", "vit"])
def test_the_checks_take_one_forward_pass_together(family, labels):
    model, batch = tiny_models.build(family), tiny_models.batch(family, 6)
    if labels == "exact" and batch["labels"].dim() == 2:
        pytest.skip("a row for each word")
    options = {"data_collator": lambda n: {k: v[n] for k, v in batch.items()}, "labels": labels}
    options |= {"stack": "encoder"} if family == "bart" else {}
    numbers = list(range(6))
    assert count_passes(model, numbers, **options) == count_passes(model, numbers, verify=False, **options) + 1


@pytest.mark.parametrize("how", ["doubles", "stops", "no loss"])
def test_a_model_that_does_something_else_with_labels_raises_no_alarm(how, caplog):
    class OtherForSequenceClassification(transformers.BertForSequenceClassification):
        def forward(self, input_ids, attention_mask=None, labels=None):
            out = super().forward(input_ids, attention_mask)
            if labels is not None and how == "stops":
                raise ValueError("no labels, please")
            if labels is not None and how == "doubles":
                out.logits = 2 * out.logits
                out.loss = nn.functional.cross_entropy(out.logits, labels)
            return out

    model = tiny_models.build("bert")
    model.__class__ = OtherForSequenceClassification
    rows, options = texts(model), {"data_collator": lambda part: padded(part, "right")}
    assert rank(model, rows, **options) == rank(model, rows, verify=False, **options)
    extra = count_passes(model, rows, **options) - count_passes(model, rows, verify=False, **options)
    assert extra == (1 if how == "no loss" else 2)
    assert not caplog.text


def test_what_a_sample_adds_by_itself_is_kept_without_a_graph_and_only_until_it_is_compared():
    model = tiny_models.build("bert").eval().requires_grad_(False)
    layers = choose_stack(model, None).layers
    batch = Batch(tiny_models.batch("bert", 6), tuple(range(6)))

    def norms(objective):
        return [t.norm for layer in layer_fisher(model, layers, [batch], objective).layers for t in layer.values()]

    expected = norms(make_objective(model))
    objective = agree_with_loss(Runner(model, make_objective(model)), [batch], layers[-1])
    ((sample, squares),) = objective.alone.items()
    assert 0 < len(squares) < len(list(layers[-1].module.parameters()))
    assert not any(s.requires_grad for s in squares.values())
    assert not any(p.requires_grad for p in model.parameters())
    for known in (squares, {key: 2 * s for key, s in squares.items()}):  # as of a head that was initialized anew since
        objective.alone[sample] = known
        assert norms(objective) == expected
        assert not objective.alone


# ---- data


def test_pairs_are_taken_for_inputs_and_labels():
    model = Layered(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()
    data = [(torch.randn(3, 4, dtype=torch.double), n % 3) for n in range(6)]
    expected = rank(model, [{"x": x, "labels": y} for x, y in data])
    assert rank(model, DataLoader(data, batch_size=2)) == pytest.approx(expected, rel=1e-9)
    assert rank(model, DataLoader(_Stream(data), batch_size=2)) == pytest.approx(expected, rel=1e-9)


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class Packed(nn.Module):
    """Patches of all images end to end, as Qwen2-VL's; `sizes` tells how many belong to each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, pixel_values, sizes):
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return self.head(torch.stack([part.mean(0) for part in pixel_values.split(sizes.tolist())]))


def test_samples_that_are_packed_end_to_end_are_batches_of_their_own():
    model = Packed().double()
    generator = torch.Generator().manual_seed(1)
    data = [
        {"pixel_values": torch.randn(n, 4, generator=generator, dtype=torch.double), "sizes": n, "labels": n % 3}
        for n in (3, 5, 2, 4)
    ]

    def collate(rows):
        columns = {name: torch.tensor([row[name] for row in rows]) for name in ("sizes", "labels")}
        return columns | {"pixel_values": torch.cat([row["pixel_values"] for row in rows])}

    expected = rank(model, data, data_collator=collate, batch_size=1, engine="loop")
    assert rank(model, data, data_collator=collate) == pytest.approx(expected, rel=1e-9)
    stream = DataLoader(_Stream(data), batch_size=2, collate_fn=collate)
    with pytest.raises(ValueError, match=r"2 samples with 8 rows of pixel_values.*batch_size=1"):
        rank(model, stream)
    with pytest.raises(ValueError, match="pixel_values has the shapes"):
        rank(model, data)


@pytest.mark.parametrize("engine", ["hooks", "loop"])
def test_an_encoder_decoder_without_a_helper_for_labels_can_be_ranked(engine):
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=6,
        max_target_positions=16, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).double().eval()
    sounds = torch.randn(4, 8, 12, dtype=torch.double)
    labels = [ids[:5] for ids in TEXTS]
    samples = [{"input_features": sounds[n : n + 1], "labels": torch.tensor([labels[n]])} for n in range(4)]

    def collate(numbers):
        longest = max(len(labels[n]) for n in numbers)
        rows = [labels[n] + [-100] * (longest - len(labels[n])) for n in numbers]
        return {"input_features": sounds[numbers], "labels": torch.tensor(rows)}

    expected = truth(model, samples, lambda s: s["labels"].shape[1])
    found = rank(model, list(range(4)), data_collator=collate, stack="encoder", aggregation="trace", engine=engine)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_scores_as_its_dequantised_weights(bits, tmp_path):
    """Also on a CPU, where 4-bit weights are packed in evaluation and lose their backward pass."""
    pytest.importorskip("bitsandbytes")
    options = {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    tiny_models.build("llama", **options).save_pretrained(tmp_path)
    kind = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}[bits]
    config = transformers.BitsAndBytesConfig(**kind)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    rows = texts(model)
    found = rank(model, rows, data_collator=lambda part: padded(part, "right"))
    expected = rank(model.dequantize().float(), rows, data_collator=lambda part: padded(part, "right"))
    assert found == pytest.approx(expected, rel=1e-4 if bits == 4 else 0.05)  # 8 bits round the inputs too


# ---- messages and interrupts


def test_a_head_of_zeros_is_named():
    model = tiny_models.build("bert")
    nn.init.zeros_(model.classifier.weight)
    with pytest.raises(ValueError, match=r"since classifier\.weight is all zeros"):
        rank(model, texts(model), data_collator=lambda part: padded(part, "right"))


def test_ctrl_c_at_any_moment_leaves_nothing_behind():
    """At every 211th line that runs, in turn: no hook is left, and every flag is as it was."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        stopped = _stop_at_many_moments()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert stopped > 20


def _stop_at_many_moments() -> int:
    model = tiny_models.build("bert", num_hidden_layers=2).train()
    rows = texts(model)
    before = [(m.training, len(m._forward_hooks)) for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    stopped = 0
    for stop in range(3, 10**6, 211):
        count = 0

        def trace(frame, event, argument, stop=stop):
            nonlocal count
            if event == "line":
                count += 1
                if count == stop:
                    signal.raise_signal(signal.SIGINT)
            name = frame.f_code.co_filename
            return trace if "peft_surgical" in name or name.endswith(("module.py", "contextlib.py")) else None

        sys.settrace(trace)
        try:
            rank(model, rows, data_collator=lambda part: padded(part, "right"), batch_size=2)
        except KeyboardInterrupt:
            stopped += 1
        else:
            break
        finally:
            sys.settrace(None)
        assert [(m.training, len(m._forward_hooks)) for m in model.modules()] == before, stop
        assert [p.requires_grad for p in model.parameters()] == flags, stop
    return stopped
