"""What an adapter's model card says that PEFT's does not: how to load it, which layers it has and why these."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft.utils import PeftType

from peft_surgical.compat import install
from peft_surgical.files.safetensors_io import written_aside
from peft_surgical.layers import unwrap
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.ranking.ranking import as_ranking


TAG = "peft-surgical"
CARD_FILE = "README.md"

_TRAINED = {
    "bitfit": "the bias terms",
    "norm": "the norms",
    "columns": "{columns} input columns",
    "lora": "LoRA (r={r})",
    "full": "all weights",
}


@dataclass
class AdapterCard:
    """Where the card of an adapter lies, and what the adapter's config does not say."""

    folder: Path
    adapter_name: str  # PEFT saves the adapter "default" in this folder, any other in a folder of its name inside
    base_class: type
    is_saved: bool = False  # the adapter has been saved there

    @property
    def subfolder(self) -> str:
        return "" if self.adapter_name == "default" else self.adapter_name

    def section(self, config: Any, tools: Sequence[str] = (), then: str = "") -> str:
        """The part of the card that is this package's; `tools` of transformers and lines of code may be added."""
        code = loading_code(
            self.base_class, place_of(config.base_model_name_or_path, self.folder), config.revision,
            method=PeftType(config.peft_type).value, subfolder=self.subfolder, tools=tools,
        )  # fmt: skip
        return f"""{_mark(self.adapter_name)}
## Load {f"`{self.subfolder}`" if self.subfolder else "it"}

PEFT alone does not know the method of this adapter: without the first line below ({install()}),
it stops with `KeyError: '{PeftType(config.peft_type).value}'`. In the folder of this card:

```python
{code}{then and f"{chr(10)}{then}"}
```

On the hub, the repository's name takes the place of `"."`.

{describe_choice(config)}
{_END}"""

    def write(self, config: Any) -> None:
        """Put the section into the card, in place of an earlier one."""
        file = self.folder / CARD_FILE
        if file.is_file():
            self.is_saved = True
            text = file.read_text(encoding="utf-8")
            _write(file, put_section(text, _mark(self.adapter_name), self.section(config)))


def write_card(of_peft: Callable[[Any, Any], None], model: Any, output_dir: Any) -> None:
    """After PEFT has written the card, add the tag of this package; an adapter's section comes when it is saved.

    It comes at once where that was before, and the card was written anew, as by `Trainer.create_model_card`.
    """
    of_peft(model, output_dir)
    folder, base_class = Path(output_dir), type(unwrap(model))
    configs = {name: config for name, config in model.peft_config.items() if isinstance(config, DeltaConfig)}
    if configs:
        card = ModelCard.load(folder / CARD_FILE)
        card.data["tags"] = sorted({*(card.data.get("tags") or []), TAG})
        _write(folder / CARD_FILE, str(card))
    for name, config in configs.items():
        before, config.card = config.card, AdapterCard(folder, name, base_class)
        if before is not None and before.is_saved and before.folder == folder:
            config.card.write(config)


def upload_with_card(of_peft: Callable[..., Any], model: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """`push_to_hub` of transformers writes its own card over PEFT's; what PEFT and this package say goes into it."""
    if any(isinstance(config, DeltaConfig) for config in model.peft_config.values()):
        model.create_or_update_model_card(working_dir)
    return of_peft(model, working_dir, *args, **kwargs)


def loading_code(
    base_class: type | str,
    base: str | None,
    revision: str | None = None,
    *,
    method: str | None,
    options: str = "",
    subfolder: str = "",
    tools: Sequence[str] = (),
) -> str:
    """Python that loads a base model, whose class or the name of one of transformers is given, with further options,
    and the adapter in the present folder or a subfolder. `method` is the adapter's, if it is one of this package;
    `tools` are other names to import from transformers."""
    name = base_class if isinstance(base_class, str) else base_class.__name__
    revision = f", revision={_quoted(revision)}" if revision else ""
    load = f"{name}.from_pretrained({_quoted(base)}{revision}{options})"
    if base is None or not (isinstance(base_class, str) or base_class.__module__.startswith("transformers.")):
        load, name = f"...  # load the {name} that this was trained on", ""
    names = ", ".join(sorted({name, *tools} - {""}))
    there = f", subfolder={_quoted(subfolder)}, adapter_name={_quoted(subfolder)}" if subfolder else ""
    lines = [
        f"import peft_surgical  # makes {method} known to PEFT" if method else "",
        "from peft import PeftModel",
        f"from transformers import {names}" if names else "",
        f"\nbase = {load}",
        f'model = PeftModel.from_pretrained(base, "."{there})',
    ]
    return "\n".join(line for line in lines if line)


def place_of(base: str | None, folder: Path) -> str | None:
    """A base's name on the hub or its absolute path as they are, a relative path as seen from a folder."""
    if not base or os.path.isabs(base) or not os.path.isdir(base):
        return base or None
    return os.path.relpath(base, folder)


def _number(columns: int | float | None) -> str:
    return f"{columns:.0%} of the" if isinstance(columns, float) else str(columns)


def describe_choice(config: Any) -> str:
    """What an adapter trains and how its layers were chosen, in a few sentences.

    Example:

        >>> from peft_surgical import SurgicalConfig
        >>> describe_choice(SurgicalConfig(layers=[3, 5], modules_to_save=["score"])).split(". ")[0]
        'Trained: all weights in layers 3, 5; all of `score`'
    """
    strata = getattr(config, "strata", None)
    layers = getattr(config, "layers", None)
    if strata is not None:
        trained = [
            f"{_TRAINED[item['tune']].format(r=config.r, columns=_number(item.get('columns')))}"
            f"{_of(item.get('target_modules'))} in {_layers(item['layers'], stack)}"
            for stack, items in (strata.items() if isinstance(strata, Mapping) else [("", strata)])
            for item in items
            if item["tune"] != "frozen"
        ]
    elif layers is not None:
        inside = "; ".join(_layers(*item) for item in _by_stack(layers))
        trained = [f"all weights{_of(config.target_modules)} in {inside}"]
    else:
        what = _TRAINED["lora" if hasattr(config, "r") else "full"].format(r=getattr(config, "r", None))
        trained = [f"{what}{_of(config.target_modules)}"]
    saved = config.resolution.shapes if config.resolution is not None else None
    whole = [*(getattr(config, "extra_modules", None) or []), *(config.modules_to_save or [])]
    whole = [name for name in whole if saved is None or any(f".{name}." in f".{tensor}" for tensor in saved)]
    trained += [f"all of {_names(whole)}"] if whole else []
    how = ""
    if strata is not None or layers is not None:
        how = (
            " The layers were named, not ranked." if config.ranking_record is None else _ranked(config.ranking_record)
        )
    return f"Trained: {'; '.join(trained) or 'nothing'}. The rest is the base model's.{how}"


def put_section(text: str, mark: str, section: str) -> str:
    """A card with a section in place of the earlier one of its mark, else before the first heading of level 2.

    Example:

        >>> print(put_section("# Mine\\n\\nA text.\\n\\n## More\\n", "<!-- a -->", "<!-- a -->\\nnew\\n<!-- end -->"))
        # Mine
        <BLANKLINE>
        A text.
        <BLANKLINE>
        <!-- a -->
        new
        <!-- end -->
        <BLANKLINE>
        ## More
        <BLANKLINE>
    """
    earlier = re.compile(rf"^{re.escape(mark)}$.*?^{re.escape(_END)}$", re.MULTILINE | re.DOTALL)
    if earlier.search(text):
        return earlier.sub(lambda _: section, text, count=1)
    is_code = is_section = False
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        is_code ^= line.startswith(("```", "~~~"))
        is_section = line.startswith(_START) or (is_section and not line.startswith(_END))
        if line.startswith("## ") and not is_code and not is_section:
            return f"{''.join(lines[:number])}{section}\n\n{''.join(lines[number:])}"
    return f"{text.rstrip()}\n\n{section}\n"


_START, _END = f"<!-- {TAG} ", f"<!-- end {TAG} -->"


def _mark(adapter_name: str) -> str:
    return f"{_START}{adapter_name}: written anew at each save; write outside of it -->"


def _write(file: Path, text: str) -> None:
    with written_aside(file) as new:
        new.write_text(text, encoding="utf-8")


def _ranked(record: Any) -> str:
    try:
        title = str(as_ranking(record)).partition("\n")[0]
    except (ValueError, TypeError, LookupError, AttributeError):  # a stranger's; saving must not end for it
        title = "see adapter_config.json"
    return f" The layers were chosen by a ranking: {title}."


def _by_stack(layers: Any) -> Collection[tuple[Any, str]]:
    return [(chosen, stack) for stack, chosen in layers.items()] if isinstance(layers, Mapping) else [(layers, "")]


def _layers(layers: Any, stack: str) -> str:
    listed = [str(layer) for layer in layers] if isinstance(layers, list) else [f"`{layers}`", ""]
    return (
        f"layer{'s' if len(listed) > 1 else ''} {', '.join(filter(None, listed))}{f' of the {stack}' if stack else ''}"
    )


def _of(modules: Any) -> str:
    return f" of {_names([modules] if isinstance(modules, str) else sorted(modules))}" if modules else ""


def _names(modules: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in modules)


def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)
