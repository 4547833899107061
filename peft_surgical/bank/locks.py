"""A lock that many threads hold together as long as they want the same thing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class _Ticket:
    key: Hashable
    alone: bool
    is_admitted: bool = field(default=False)


_KEEP = object()


class SwitchLock:
    """Any number of threads may hold the lock for one key; for another key, all of them must have let go.

    Whoever finds another key in place when all have let go switches it. First come, first served, except that all who
    wait for the key that was just switched to go in together.

    Args:
        switch: Called with the new key while no thread holds the lock. If it raises, no key is in place.

    Example:

        >>> keys = []
        >>> lock = SwitchLock(keys.append)
        >>> lock.acquire("a"); lock.acquire("a")
        >>> lock.release(); lock.release()
        >>> lock.acquire("b")
        >>> keys
        ['a', 'b']
    """

    def __init__(self, switch: Callable[[Hashable], None]):
        self._switch = switch
        self._changed = threading.Condition()
        self._queue: list[_Ticket] = []
        self._is_switching = False
        self._is_alone = False
        self._key: Hashable = object()
        self._holders = 0
        self._mine = threading.local()
        self.seconds_waited = 0.0

    def acquire(self, key: Hashable, *, alone: bool = False) -> None:
        """Wait for the lock and hold it.

        Args:
            key: What it is to be held for.
            alone: Whether no other thread may hold it at the same time, not even for the same key.

        Raises:
            RuntimeError: This thread holds the lock already, for another key.
        """
        held = getattr(self._mine, "held", None)
        if held is not None:
            if held[0] != key or alone:
                raise RuntimeError(
                    f"This thread already uses {held[0]!r} and cannot switch to {key!r} before it is done with it."
                )
            held[1] += 1
            return
        started = time.perf_counter()
        ticket = _Ticket(key, alone)
        with self._changed:
            self._queue.append(ticket)
            self._admit()
            while not ticket.is_admitted and not self._may_switch(ticket):
                self._changed.wait()
            self.seconds_waited += time.perf_counter() - started
            if not ticket.is_admitted:
                self._is_switching = True
        if not ticket.is_admitted:
            self._switch_to(ticket)
        self._mine.held = [key, 1]

    def release(self) -> None:
        """Let go of the lock, as often as it was acquired."""
        held = self._mine.held
        held[1] -= 1
        if held[1]:
            return
        self._mine.held = None
        with self._changed:
            self._holders -= 1
            self._is_alone = False
            self._admit()
            self._changed.notify_all()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the lock alone for a while, whatever key is in place; it stays in place."""
        self.acquire(_KEEP, alone=True)
        try:
            yield
        finally:
            self.release()

    def forget(self) -> None:
        """Let no key be in place any more. Only for who holds the lock alone."""
        self._key = object()

    def _switch_to(self, ticket: _Ticket) -> None:
        try:
            if ticket.key is not _KEEP:
                self._switch(ticket.key)
        except BaseException:
            with self._changed:
                self._queue.remove(ticket)
                self._key = object()
                self._is_switching = False
                self._changed.notify_all()
            raise
        with self._changed:
            if ticket.key is not _KEEP:
                self._key = ticket.key
            self._is_switching = False
            self._enter(ticket)
            if not ticket.alone:
                for other in [t for t in self._queue if t.key == ticket.key and not t.alone]:
                    self._enter(other)
            self._changed.notify_all()

    def _may_switch(self, ticket: _Ticket) -> bool:
        return self._queue[0] is ticket and not self._holders and not self._is_switching

    def _admit(self) -> None:
        """Let those at the head of the queue in who want the key that is in place."""
        while self._queue and not (self._is_switching or self._is_alone or self._queue[0].alone):
            if self._queue[0].key != self._key:
                return
            self._enter(self._queue[0])

    def _enter(self, ticket: _Ticket) -> None:
        self._queue.remove(ticket)
        ticket.is_admitted = True
        self._is_alone = ticket.alone
        self._holders += 1
