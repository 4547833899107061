"""The ways to write a trained tensor as a difference to the base's, exact or rounded, by name.

`encoded_tensors` applies them to an adapter's tensors. The names stand in files and configs.
"""

from __future__ import annotations

from peft_surgical.files.encoding import Encoding
from peft_surgical.files.lossless import Lossless
from peft_surgical.files.rounded import Bfloat16, Int4, Int8, Sign


ENCODINGS: dict[str, type[Encoding]] = {
    "lossless": Lossless,
    "bf16": Bfloat16,
    "int8": Int8,
    "int4": Int4,
    "sign": Sign,
}


def find_encoding(name: str) -> type[Encoding]:
    """The encoding with a name.

    Raises:
        ValueError: There is none.
    """
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r} is not known; allowed are {', '.join(['values', *ENCODINGS])}.")
    return ENCODINGS[name]
