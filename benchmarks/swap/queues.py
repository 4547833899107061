"""Engines that serve many tasks, in simulated time: who waits how long, and how often the task is changed."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """A request for a task, and when it was answered, in seconds."""

    task: int
    came: float
    done: float = math.nan
    is_hit: bool = False  # its task was served, or on the card, when it came


@dataclass
class Replica(ABC):
    """An engine; a request comes by `take`, and what is due at `next_time` is done by `step`."""

    task: int | None = None  # the one that is served
    count: int = 0  # of requests that are not answered
    switches: int = 0
    switching: float = 0.0  # seconds

    @abstractmethod
    def take(self, request: Request, now: float) -> None:
        """A request comes."""

    @abstractmethod
    def next_time(self) -> float:
        """When something is due next, in seconds; infinity if nothing is."""

    @abstractmethod
    def step(self, now: float) -> Request | None:
        """Do what is due; gives the request that is answered by it, if one is."""


@dataclass
class Vllm(Replica):
    """A vLLM server behind this package's router.

    Args:
        cost: How long a switch takes once nothing runs, in seconds.
        alone: How long an answer takes, in seconds, while at most `together` run; more of them share the server.
        together: How many run side by side without slowing one another down.
        turn: How long a task keeps its turn while others wait, in seconds.
    """

    cost: float = 0.0
    alone: float = 1.0
    together: float = 1.0
    turn: float = 1.0
    _began: float = -math.inf
    _waiting: OrderedDict[int, list[Request]] = field(default_factory=OrderedDict)
    _running: deque[tuple[float, Request]] = field(default_factory=deque)  # with the progress at which each is done
    _progress: float = 0.0  # of every request that runs, in answers
    _at: float = 0.0
    _switch: tuple[float, int] | None = None  # its end, and the task

    def take(self, request: Request, now: float) -> None:
        self._pass(now)
        self.count += 1
        request.is_hit = self._switch is None and request.task == self.task
        self._waiting.setdefault(request.task, []).append(request)
        self._go_on(now)

    def next_time(self) -> float:
        if self._switch is not None:
            return self._switch[0]
        return self._at + (self._running[0][0] - self._progress) / self._rate() if self._running else math.inf

    def step(self, now: float) -> Request | None:
        if self._switch is not None:
            self.task, self._began, self._switch = self._switch[1], now, None
            self._let_through(now)
            self._go_on(now)
            return None
        self._pass(now)
        self.count -= 1
        request = self._running.popleft()[1]
        self._go_on(now)
        return request

    def _rate(self) -> float:
        return min(1.0, self.together / len(self._running)) / self.alone

    def _pass(self, now: float) -> None:
        if self._running:
            self._progress += (now - self._at) * self._rate()
        self._at = now

    def _go_on(self, now: float) -> None:
        if self._switch is not None or not self._waiting:
            return
        if [*self._waiting] == [self.task] or now < self._began + self.turn:
            self._let_through(now)
        if self._waiting and not self._running:
            task = next(iter(self._waiting))
            cost = self.cost if task != self.task else 0.0
            self._switch = now + cost, task
            self.switches += task != self.task
            self.switching += cost

    def _let_through(self, now: float) -> None:
        self._pass(now)
        for request in self._waiting.pop(self.task, []) if self.task is not None else []:
            self._running.append((self._progress + 1, request))


@dataclass
class Bank(Replica):
    """A `DeltaBank` in a service that answers one request at a time.

    Args:
        answer: How long an answer takes, in seconds.
        resident: How long a switch takes to a task that is on the card.
        from_host: How long it takes to one that is not.
        room: How many tasks the card has room for.
    """

    answer: float = 1.0
    resident: float = 0.0
    from_host: float = 0.0
    room: int = 1
    _queue: deque[Request] = field(default_factory=deque)
    _on_card: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _end: float = math.inf

    def take(self, request: Request, now: float) -> None:
        self.count += 1
        request.is_hit = request.task in self._on_card
        self._queue.append(request)
        if len(self._queue) == 1:
            self._begin(now)

    def next_time(self) -> float:
        return self._end

    def step(self, now: float) -> Request | None:
        self.count -= 1
        request = self._queue.popleft()
        self._end = math.inf
        if self._queue:
            self._begin(now)
        return request

    def _begin(self, now: float) -> None:
        task, cost = self._queue[0].task, 0.0
        if task != self.task:
            cost = self.resident if task in self._on_card else self.from_host
            self.switches += 1
        if task not in self._on_card and len(self._on_card) == self.room:
            self._on_card.popitem(last=False)
        self._on_card[task] = None
        self._on_card.move_to_end(task)
        self.task, self._end = task, now + cost + self.answer
        self.switching += cost


def simulate(
    replicas: Sequence[Replica],
    choose: Callable[[int], int],
    requests: Sequence[Request],
    again: Callable[[Request], Request | None] = lambda answered: None,
) -> list[Request]:
    """Let replicas answer requests; gives these in the order in which they were answered.

    Args:
        replicas: They are changed.
        choose: Gives the replica that a task's request goes to, which it may choose by the state of all.
        requests: In any order.
        again: What whoever has an answer asks next, if anything.
    """
    coming = [(request.came, number, request) for number, request in enumerate(requests)]
    heapq.heapify(coming)
    answered: list[Request] = []
    while True:
        replica = min(replicas, key=lambda replica: replica.next_time())
        now = replica.next_time()
        if coming and coming[0][0] <= now:
            now, _, request = heapq.heappop(coming)
            replicas[choose(request.task)].take(request, now)
        elif now < math.inf:
            if (done := replica.step(now)) is not None:
                done.done = now
                answered.append(done)
                if (following := again(done)) is not None:
                    heapq.heappush(coming, (following.came, len(requests) + len(answered), following))
        else:
            return answered


def zipf(tasks: int, exponent: float = 1.0) -> np.ndarray:
    """The shares of the requests that tasks have, the most frequent one first."""
    shares = np.arange(1.0, tasks + 1) ** -exponent
    return shares / shares.sum()


def traffic(shares: np.ndarray, rate: float, count: int, seed: int) -> list[Request]:
    """So many requests at random times, at a rate per second."""
    draw = np.random.default_rng(seed)
    times = draw.exponential(1 / rate, count).cumsum()
    return [Request(int(t), float(at)) for t, at in zip(draw.choice(len(shares), count, p=shares), times, strict=True)]


def route(way: str, replicas: Sequence[Replica], tasks: int, hot: int, seed: int) -> Callable[[int], int]:
    """How a balancer sends tasks to replicas: `"by task"`, `"hot ones anywhere"` (a few of them) or `"anywhere"`.

    Where it has the choice, it takes a replica that serves the task, or else the one with the fewest requests.
    """
    home = np.random.default_rng(seed).integers(len(replicas), size=tasks)
    few = {"by task": 0, "hot ones anywhere": hot, "anywhere": tasks}[way]

    def choose(task: int) -> int:
        if task >= few:
            return int(home[task])
        return min(range(len(replicas)), key=lambda i: (replicas[i].count, replicas[i].task != task))

    return choose
