"""A lock that many holders share as long as they want the same thing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


PREFETCH = "bank-prefetch"  # how the names of threads begin that never hold the lock


@dataclass(eq=False)
class _Hold:
    """One use of the lock, from the wait for it to its end. Any thread may end it, as any thread may step a generator.

    Args:
        key: What the lock is held for.
        alone: Whether nobody else may hold it meanwhile.
        frame: The `id` of the frame whose `with` block it is.
        thread: The thread that asked for it.
    """

    key: Hashable
    alone: bool
    frame: int
    thread: int


class _AnyKey:
    """The key of who holds the lock alone and leaves the key in place as it is."""

    def __str__(self) -> str:
        return "a change of the bank"


_ANY = _AnyKey()


class SwitchLock:
    """Any number of holders may share the lock for one key; for another key, all of them must have let go.

    Whoever finds another key in place when all have let go switches it. First come, first served, except that all who
    wait for the key that was just switched to go in together.

    Args:
        switch: Called with the new key while nobody holds the lock. If it raises, no key is in place.

    Example:

        >>> keys = []
        >>> lock = SwitchLock(keys.append)
        >>> with lock.held("a"), lock.held("a"):
        ...     pass
        >>> with lock.held("b"):
        ...     keys
        ['a', 'b']
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
        keep_whole_in_forks(self)

    @contextmanager
    def held(self, key: Hashable, *, alone: bool = False) -> Iterator[None]:
        """Wait for the lock and hold it within the block.

        Args:
            key: What it is to be held for.
            alone: Whether nobody else may hold it at the same time, not even for the same key.

        Raises:
            RuntimeError: The block is inside another one for another key, or this thread waits for itself.
        """
        hold = _Hold(key, alone, id(_user_frame()), threading.get_ident())
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
        with self.held(_ANY, alone=True):
            yield

    def forget_key(self) -> None:
        """Let no key be in place any more, so that the next holder switches. To be called by a sole holder."""
        self._key = object()

    # ---- os.fork

    def before_fork(self) -> None:
        """Keep other threads out, so that the child finds no half-done change."""
        self._mutex.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; in the child, without the threads that exist in the parent only."""
        if in_child:
            here = threading.get_ident()
            if self._switching is not None and self._switching.thread != here:
                self._switching, self._key = None, object()
            self._queue = [hold for hold in self._queue if hold.thread == here]
            self._holds = [hold for hold in self._holds if hold.thread == here]
        self._mutex.release()

    # ---- entering and leaving

    def _enter(self, hold: _Hold) -> None:
        started = time.perf_counter()
        with self._mutex:
            if self._is_nested(hold):
                self._holds.append(hold)
                return
            self._queue.append(hold)
            self._admit()
            while hold not in self._holds and not self._may_switch(hold):
                self._refuse_waiting_for_itself(hold)
                self._changed.wait()
            self.seconds_waited += time.perf_counter() - started
            if hold in self._holds:
                return
            self._switching = hold
        if hold.key is not _ANY:
            self._switch(hold.key)
        with self._mutex:
            if hold.key is not _ANY:
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
            self._admit()
            self._changed.notify_all()

    def _may_switch(self, hold: _Hold) -> bool:
        return self._queue[0] is hold and not self._holds and self._switching is None

    def _admit(self) -> None:
        """Let those at the head of the queue in who want the key that is in place."""
        if self._switching is not None or any(hold.alone for hold in self._holds):
            return
        while self._queue and not self._queue[0].alone and self._queue[0].key == self._key:
            self._holds.append(self._queue.pop(0))

    # ---- threads that would wait for themselves

    def _is_nested(self, hold: _Hold) -> bool:
        """Whether a block around this one holds the lock for the same key."""
        if not self._holds:
            return False
        stack = set(_frames_from(sys._getframe(1)))
        outer = next((other for other in self._holds if other.frame in stack), None)
        if outer is not None and (outer.key != hold.key or hold.alone):
            raise RuntimeError(_within(outer, hold))
        return outer is not None

    def _refuse_waiting_for_itself(self, hold: _Hold) -> None:
        """Refuse to wait for a generator that only this thread can step."""
        outer = next((other for other in self._holds if other.thread == hold.thread), None)
        if outer is not None and (_is_in_event_loop() or _is_only_thread()):
            raise RuntimeError(_within(outer, hold))


def _within(outer: _Hold, hold: _Hold) -> str:
    return (
        f"This thread is within {outer.key} already and cannot switch to {hold.key} before it has left. Use one task "
        "after the other, or tasks in different threads."
    )


def _user_frame() -> FrameType:
    """The frame whose `with` block is being entered: the first one that is no context manager's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (_is_managing(frame) or _is_managing(frame.f_back)):
        frame = frame.f_back
    return frame


def _is_managing(frame: FrameType) -> bool:
    package, _, _ = __name__.rpartition(".")
    module = frame.f_globals.get("__name__", "")
    return module in (contextlib.__name__, package, f"{package}.bank", __name__) or frame.f_code.co_name == "__enter__"


def _frames_from(frame: FrameType | None) -> Iterator[int]:
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _is_only_thread() -> bool:
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return all(thread.name.startswith(PREFETCH) for thread in others)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---- os.fork: the child has the thread that forked and no other

_whole_in_forks: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.local()


def keep_whole_in_forks(thing: Any) -> None:
    """Call a thing's `before_fork()` and `after_fork(in_child=...)` whenever the process forks."""
    _whole_in_forks.add(thing)


def _before_fork() -> None:
    _forking.things = list(_whole_in_forks)
    for thing in _forking.things:
        thing.before_fork()


def _after_fork(in_child: bool) -> None:
    for thing in _forking.things:
        thing.after_fork(in_child=in_child)
    _forking.things = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(in_child=False),
        after_in_child=lambda: _after_fork(in_child=True),
    )
