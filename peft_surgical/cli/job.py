"""A job from a command line: its fields as options, and where their values come from."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from peft_surgical.training.job import JOB_FILE, JOB_OPTIONS, TrainingJob
from peft_surgical.training.options import flag


_MODEL = Annotated[str | None, typer.Argument(metavar="MODEL", help="The base model; the same as --model.")]
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="A YAML file with options by name, such as the run.yaml of a run. What is given beside it comes first.",
        rich_help_panel="The run",
    ),
]


def job_parameters(names: Collection[str]) -> Iterator[inspect.Parameter]:
    """Fields of `TrainingJob` as parameters that Typer makes options of, and what else `job_of_options` takes."""

    def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    yield inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    yield parameter("base", _MODEL)
    for field in dataclasses.fields(TrainingJob):
        if field.name not in names:
            continue
        kind, option = JOB_OPTIONS[field.name]
        is_required = field.default is dataclasses.MISSING
        default, text = (None, f"{option.help} (required)") if is_required else (field.default, option.help)
        if field.name in READERS or is_required:
            kind = str | None
        elif get_origin(kind) is tuple:
            kind, default = list[str] | None, None
        shown = typer.Option(
            *(option.names or (flag(field.name),)),
            help=text,
            rich_help_panel=option.panel,
            autocompletion=_completion(option.choices) if option.choices else None,
        )
        yield parameter(field.name, Annotated[kind, shown], default)
    if {*names} == {*JOB_OPTIONS}:
        yield parameter("config", _CONFIG)


def _completion(choices: Iterable[str]) -> Callable[..., list[str]]:
    """How a shell completes the value of an option."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def job_of_options(options: dict[str, Any], names: Collection[str], defaults: Mapping[str, Any]) -> TrainingJob:
    """The job that a command line describes, whose options are taken out of `options`.

    What is given comes first, then what the file of `--config` says, then, if a run is resumed, its job, then the
    command's own defaults.
    """
    context, base, config = options.pop("context"), options.pop("base"), options.pop("config", None)
    given = {name: options.pop(name) for name in names}
    # by name: typer may carry its own copy of click
    sources = {name: getattr(context.get_parameter_source(name), "name", "") for name in given}
    given = read_job_fields({name: value for name, value in given.items() if sources[name] == "COMMANDLINE"})
    if base is not None and given.setdefault("model", base) != base:
        raise ValueError(f"{base} and --model {given['model']} are two models. Drop one.")
    fields = {**defaults, **(read_config(config) if config else {}), **given}
    if options.get("resume") and "output" in fields and (Path(fields["output"]) / JOB_FILE).exists():
        fields = {**dataclasses.asdict(TrainingJob.load(fields["output"])), **fields}
    required = [field.name for field in dataclasses.fields(TrainingJob) if field.default is dataclasses.MISSING]
    if missing := [flag(name) for name in required if name not in fields]:
        raise ValueError(f"Missing: {', '.join(missing)}. What they are, {context.command_path} --help tells.")
    return TrainingJob(**fields)


def read_job_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `TrainingJob` from a command's options, read from text where the option holds some."""
    fields = {}
    for name, value in options.items():
        if name in READERS and value is not None:
            try:
                value = READERS[name](value)
            except ValueError as error:
                raise ValueError(f"{flag(name)} {value}: {error}") from None
        elif get_origin(JOB_OPTIONS[name][0]) is tuple:
            value = tuple(value or ())
        fields[name] = value
    return fields


def read_config(file: Path) -> dict[str, Any]:
    """The fields of a `TrainingJob` that a YAML file has, under the names of the command line's options."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {file} holds no options by name, such as `epochs: 3`.")
    fields = {}
    for key, value in content.items():
        written = str(key).removeprefix("--").replace("-", "_")
        if written not in KEYS:
            near = get_close_matches(written, KEYS, 1) or ["peft-surgical train --help"]
            raise ValueError(f"--config {file}: {key!r} is no option of a job; see {near[0]}.")
        if (name := KEYS[written]) in fields:
            raise ValueError(f"--config {file}: {key!r} is there twice, under two of its names. Drop one.")
        if value is not None:
            fields[name] = _of_its_kind(f"--config {file}: {key}: {value}", name, value)
    return fields


def _of_its_kind(given: str, name: str, value: Any) -> Any:
    kind = JOB_OPTIONS[name][0]
    kinds = {*get_args(kind), kind}
    if isinstance(value, list) and (get_origin(kind) is tuple or name == "layers"):
        return tuple(value)
    if get_origin(kind) is tuple:
        return (str(value),)
    try:
        if isinstance(value, bool) or bool in kinds:
            right = isinstance(value, bool) and bool in kinds
        elif name in READERS:
            return READERS[name](str(value))
        elif float in kinds:
            return float(value)  # YAML takes 5e-5 for a text
        else:
            right = isinstance(value, int) if int in kinds else isinstance(value, (str, int, float))
    except (TypeError, ValueError):
        right = False
    if not right:
        wanted = next(what for type_, what in _WANTED.items() if type_ in kinds)
        raise ValueError(f"{given}: allowed is {wanted}.")
    return str(value) if str in kinds else value


_WANTED = {bool: "true or false", float: "a number", int: "a whole number", str: "a text"}


def read_layers(text: str) -> str | tuple[int | str, ...]:
    """Read layers as they are written on a command line: a word, or numbers and ranges with commas between."""
    parts = [part.strip() for part in text.split(",")]
    items = tuple(int(part) if part.lstrip("-").isdigit() else part for part in parts)
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def read_depth(text: str) -> int | float:
    """Read a layer's index, or a fraction of the depth."""
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError("allowed are a layer's index and a fraction such as 0.2.") from None


KEYS = {
    name.removeprefix("--").replace("-", "_"): field
    for field, (_, option) in JOB_OPTIONS.items()
    for name in (flag(field), *option.names)
}
"""The field of `TrainingJob` that an option means, by the name that it has on the command line, and by the field's."""

READERS: dict[str, Callable[[str], Any]] = {"layers": read_layers, "n1": read_depth, "n2": read_depth}
"""How the fields that are written as text on the command line are read."""
