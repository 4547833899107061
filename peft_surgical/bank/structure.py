"""What the configs of SURGICAL adapters mean on one base, worked out once per layer and remembered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from peft_surgical.bank.files import Spec
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.base import check_base, check_tensors, describe_base, fingerprint, matches
from peft_surgical.layers import find_stacks
from peft_surgical.methods.heads import head_names, head_shapes, label_settings
from peft_surgical.methods.surgical import SurgicalConfig, SurgicalModel
from peft_surgical.names import OWN_TENSORS, PREFIX


Units = dict[str, tuple[list[str], bool]]
"""By path: the names of the tensors that are copied, and whether the module is a layer that keeps its place."""


class Structure:
    """A base model's layers, heads and fingerprint, for checking many adapters quickly.

    Args:
        tuner: The tuner of the model's SURGICAL adapters.
        base: The base's own tensors, by name.
    """

    def __init__(self, tuner: SurgicalModel, base: Mapping[str, torch.Tensor]):
        self._tuner = tuner
        self._model: Any = tuner.model
        self._base = base
        self._shape = describe_base(self._model, {})
        self._stacks = list(find_stacks(self._model))
        self._labels = label_settings(self._model).get("num_labels", 0)
        self._units: dict[Any, Units] = {}
        self._heads: dict[Any, dict[str, torch.Size]] = {}
        self._fingerprints: dict[str, str] = {}

    def check(self, config: SurgicalConfig, specs: Mapping[str, Spec], source: str) -> None:
        """Check that an adapter is for this base, and that its file holds just what its config says.

        Args:
            config: The adapter's config.
            specs: The tensors in its file once decoded, by plain name.
            source: What to call the file in errors.

        Raises:
            ValueError: It does not fit. The message names the first difference.
        """
        if config.check_base:
            self._check_base(config.base or {})
        expected = {f"{PREFIX}{name}": shape for name, shape in self.heads(config).items()}
        for path, (names, is_owner) in self.units(config).items():
            own = f".{OWN_TENSORS}" if is_owner else ""
            for name in names:
                key = f"{PREFIX}{path}{own}.{TunedModule.adapter_layer_names[0]}.{name.replace('.', '|')}"
                expected[key] = self._base[f"{path}.{name}"].shape
        shapes = {key: torch.Size(spec.shape) for key, spec in specs.items()}
        check_tensors(shapes, expected, source=source)

    def units(self, config: SurgicalConfig) -> Units:
        """The modules that an adapter has copies for."""
        if config.target_modules or config.exclude_modules or not config.layers:
            return self._choose(config)
        chosen: Units = {}
        for layer in _layers(config.layers, self._stacks):
            chosen.update(self._remembered(layer, config.modules_to_save))
        if config.extra_modules:
            any_layer = next(_layers(config.layers, self._stacks))
            for path in config.extra_modules:
                # an extra module alone is no valid choice, so it is worked out beside a layer
                for unit, what in self._remembered(any_layer, config.modules_to_save, path).items():
                    chosen.setdefault(unit, what)
        return chosen

    def heads(self, config: SurgicalConfig) -> dict[str, torch.Size]:
        """The shapes of the tensors of an adapter's head, by name in the base."""
        names = [*(config.modules_to_save or []), *head_names(self._model, config.task_type)]
        labels = (config.labels or {}).get("num_labels", self._labels)
        key = (*names, labels)
        if key not in self._heads:
            self._heads[key] = head_shapes(self._model, names, labels, self._labels)
        return self._heads[key]

    def _remembered(self, layer: tuple[str, int], heads: list[str] | None, extra: str | None = None) -> Units:
        key = (layer, tuple(heads or ()), extra)
        if key not in self._units:
            config = SurgicalConfig(
                layers={layer[0]: [layer[1]]}, modules_to_save=heads, extra_modules=[extra] if extra else None
            )
            self._units[key] = self._choose(config)
        return self._units[key]

    def _choose(self, config: SurgicalConfig) -> Units:
        chosen = self._tuner._choose_tensors(config, self._model)
        return {path: (names, path in config._owners) for path, names in chosen.items()}

    def _check_base(self, record: Mapping[str, Any]) -> None:
        wanted = record.get("tensors", {})
        is_alike = all(record.get(key) in (None, self._shape[key]) for key in ("model_type", "layers", "vocab_size"))
        if is_alike and all(name in self._base and self._matches(name, text) for name, text in wanted.items()):
            return
        known = {name: tensor for name, tensor in self._base.items() if name in wanted}
        check_base(record, self._model, known)  # says what differs

    def _matches(self, name: str, wanted: str) -> bool:
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(self._base[name])
        return self._fingerprints[name] == wanted or matches(wanted, self._base[name])


def _layers(layers: Any, stacks: list[str]) -> Iterator[tuple[str, int]]:
    """The layers in a saved config, which are plain numbers, with the names of their stacks."""
    by_stack = layers if isinstance(layers, Mapping) else {stacks[0]: layers}
    for stack, indices in by_stack.items():
        for index in indices:
            yield stack, index
