"""Memory with a budget, which gives up what was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from accelerate.utils import convert_file_size_to_int


Value = TypeVar("Value")


class NoRoomError(ValueError):
    """Something does not fit into a budget, even with all that may be given up gone."""


class Tier(Generic[Value]):
    """Values by name whose sizes never exceed a budget together.

    Args:
        name: What to call it in errors.
        budget: The most bytes that it may hold; None for no limit.
        on_evict: Called with the name and the value of what is given up.

    Example:

        >>> tier = Tier("device", 100)
        >>> tier.reserve("a", 60); tier.put("a", "A")
        []
        >>> tier.reserve("b", 60)
        ['A']
        >>> "a" in tier, tier.used
        (False, 60)
    """

    def __init__(
        self, name: str, budget: int | None, on_evict: Callable[[str, Value], None] = lambda name, value: None
    ):
        self.name = name
        self.budget = budget
        self.used = 0
        self.peak = 0
        self.evictions = 0
        self._on_evict = on_evict
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._values: dict[str, Value] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> Value | None:
        """The value with a name, which is now the most recently used; None if there is none."""
        if name not in self._values:
            return None
        self._sizes.move_to_end(name)
        return self._values[name]

    def reserve(self, name: str, nbytes: int, keep: Collection[str] = ()) -> list[Value]:
        """Set room aside for a value, giving up others, the least recently used first.

        Args:
            name: The value's name.
            nbytes: Its size.
            keep: Names of values that must not be given up.

        Returns:
            The values that were given up.

        Raises:
            NoRoomError: It does not fit. Nothing is given up then.
        """
        given_up: list[str] = []
        if self.budget is not None:
            free = self.budget - self.used
            for other, size in self._sizes.items():
                if free >= nbytes:
                    break
                if other in self._values and other not in keep:
                    given_up.append(other)
                    free += size
            if free < nbytes:
                raise NoRoomError(
                    f"{name!r} needs {nbytes:,} bytes and does not fit into the {self.name} budget of "
                    f"{self.budget:,}, of which {self.used:,} are in use."
                )
        values = [self.evict(other) for other in given_up]
        self._sizes[name] = nbytes
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return values

    def put(self, name: str, value: Value) -> None:
        """Store the value for which room was set aside."""
        self._values[name] = value

    def evict(self, name: str) -> Value:
        """Give a value up, and return it."""
        value = self._values.pop(name)
        self.drop_reservation(name)
        self.evictions += 1
        self._on_evict(name, value)
        return value

    def drop_reservation(self, name: str) -> None:
        """Free the room that was set aside for a value."""
        self.used -= self._sizes.pop(name)


def parse_budget(budget: int | str | None) -> int | None:
    """A budget in bytes, e.g. of `"2GB"`; None stays None.

    Raises:
        ValueError: It is neither a number of bytes nor such a text.

    Example:

        >>> parse_budget("2GB"), parse_budget(10)
        (2000000000, 10)
    """
    if budget is None or (isinstance(budget, int) and budget >= 0 and not isinstance(budget, bool)):
        return budget
    try:
        return convert_file_size_to_int(str(budget) if isinstance(budget, str) else "")
    except ValueError:
        raise ValueError(
            f"budget={budget!r} must be a number of bytes, or a text such as '2GB' or '512MiB'."
        ) from None
