"""Which modules a config means, by PEFT's own matching of names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft.tuners.tuners_utils import check_target_module_exists

from peft_surgical.compat import ExcludedModule


@dataclass
class Matching:
    """The fields of a config that PEFT's matching of names reads."""

    target_modules: Any
    exclude_modules: Any
    modules_to_save: Any
    target_parameters: Any = None
    layers_to_transform: Any = None
    layers_pattern: Any = None

    @classmethod
    def of(cls, config: Any) -> Matching:
        return cls(config.target_modules or [], config.exclude_modules, config.modules_to_save)


def is_excluded(path: str, config: Any) -> bool:
    """Whether a config excludes a module, or one that it is in."""
    matching = Matching([], config.exclude_modules, None)
    parts = path.split(".")
    return any(
        isinstance(check_target_module_exists(matching, ".".join(parts[: i + 1])), ExcludedModule)
        for i in range(len(parts))
    )
