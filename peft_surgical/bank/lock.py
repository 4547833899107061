"""A lock that many holders share as long as they want the same thing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Hold:
    """One use of the lock, from the wait to its end. Any thread may end it, as any may step a generator."""

    key: Hashable
    alone: bool
    thread: int
    is_over: bool = False


_CHANGE = "a change of the bank"
"""The key of who holds the lock alone and leaves the key in place as it is."""

_within: ContextVar[tuple[_Hold, ...]] = ContextVar("within", default=())
"""The holds that were begun in this context: by this thread, unless it runs each job in a context of its own."""


class SwitchLock:
    """Any number of holders may share the lock for one key; for another key, all of them must have let go.

    Whoever finds another key in place when all have let go calls `switch` with it; if that raises, no key is in place.
    First come, first served, except that all who wait for the key that was just switched to go in together.
    """

    def __init__(self, switch: Callable[[Hashable], None]):
        self._switch = switch
        # to enter a condition itself takes Python code, in which an interrupt would leave it locked for good
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._queue: list[_Hold] = []
        self._holds: list[_Hold] = []
        self._switching: _Hold | None = None
        self._key: Hashable = object()
        self.seconds_waited = 0.0
        keep_whole_in_forks(self, self._mutex)

    @contextmanager
    def held(self, key: Hashable, *, alone: bool = False) -> Iterator[None]:
        """Wait for the lock and hold it for a key within the block; `alone`: not with others for this key."""
        hold = _Hold(key, alone, threading.get_ident())
        try:
            self._enter(hold)
            yield
        finally:
            try:
                self._leave(hold)
            except KeyboardInterrupt:
                self._leave(hold)
                raise

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the lock alone within the block, whatever key is in place; it stays in place."""
        with self.held(_CHANGE, alone=True):
            yield

    def forget_key(self) -> None:
        """Let no key be in place any more, so that the next holder switches. To be called by a sole holder."""
        self._key = object()

    def forget_other_threads(self) -> None:
        """Called in a forked child, which has none of its parent's other threads."""
        here = threading.get_ident()
        if self._switching is not None and self._switching.thread != here:
            self._switching, self._key = None, object()
        self._queue = [hold for hold in self._queue if hold.thread == here]
        self._holds = [hold for hold in self._holds if hold.thread == here]

    # ---- entering and leaving

    def _enter(self, hold: _Hold) -> None:
        started = time.perf_counter()
        with self._mutex:
            if self._is_nested(hold):
                self._holds.append(hold)
            else:
                self._queue.append(hold)
                self._admit()
                while hold not in self._holds and not self._may_switch(hold):
                    self._changed.wait()
                self.seconds_waited += time.perf_counter() - started
                if hold not in self._holds:
                    self._switching = hold
        if self._switching is hold:
            self._finish_switch(hold)
        _within.set((*(other for other in _within.get() if not other.is_over), hold))

    def _finish_switch(self, hold: _Hold) -> None:
        if hold.key is not _CHANGE:
            self._switch(hold.key)
        with self._mutex:
            if hold.key is not _CHANGE:
                self._key = hold.key
            self._switching = None
            for other in [hold] if hold.alone else [h for h in self._queue if h.key == hold.key and not h.alone]:
                self._queue.remove(other)
                self._holds.append(other)
            self._changed.notify_all()

    def _leave(self, hold: _Hold) -> None:
        """End a hold, wherever it has got to: it may be in the queue or in the middle of a switch, or have ended."""
        with self._mutex:
            if self._switching is hold:  # the switch has failed
                self._switching, self._key = None, object()
            for holds in (self._queue, self._holds):
                if hold in holds:
                    holds.remove(hold)
            hold.is_over = True
            self._admit()
            self._changed.notify_all()
        _within.set(tuple(other for other in _within.get() if not other.is_over))

    def _may_switch(self, hold: _Hold) -> bool:
        return self._queue[0] is hold and not self._holds and self._switching is None

    def _admit(self) -> None:
        """Let those at the head of the queue in who want the key that is in place."""
        if self._switching is not None or any(hold.alone for hold in self._holds):
            return
        while self._queue and not self._queue[0].alone and self._queue[0].key == self._key:
            self._holds.append(self._queue.pop(0))

    def _is_nested(self, hold: _Hold) -> bool:
        """Whether a hold for the same key is there that cannot end while this one waits."""
        is_in_loop = _is_in_event_loop()  # whose coroutines have contexts of their own
        outer = next((h for h in self._holds if h in _within.get() or (is_in_loop and h.thread == hold.thread)), None)
        if outer is not None and (outer.key != hold.key or hold.alone):
            raise RuntimeError(
                f"This thread is within {outer.key} already and cannot switch to {hold.key} before it has left. Use "
                "one task after the other (a stream counts until it ends or is closed), or tasks in different threads."
            )
        return outer is not None


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---- os.fork: the child has the thread that forked and no other

_mutexes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_forking = threading.local()


def keep_whole_in_forks(thing: Any, mutex: Any) -> None:
    """Let forks wait for a thing's re-entrant mutex; in the child, `thing.forget_other_threads()` is called."""
    _mutexes[thing] = mutex


def _before_fork() -> None:
    _forking.mutexes = list(_mutexes.items())
    for _, mutex in _forking.mutexes:
        mutex.acquire()


def _after_fork(in_child: bool) -> None:
    for thing, mutex in _forking.mutexes:
        if in_child:
            thing.forget_other_threads()
        mutex.release()
    _forking.mutexes = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(in_child=False),
        after_in_child=lambda: _after_fork(in_child=True),
    )
