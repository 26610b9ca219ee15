"""Judge serving: how a judge's engine shares itself among requests. One contract for simulated and emulated judges.

A service is told which requests join and how much time it had; it says when something of its own is due and which
requests are done. Two of them. ``CurveService``: each of n active requests advances at 1/t(n). ``TokenService``: a
request takes turns; a turn may fetch pictures (beside everything else), reads its prompt (pictures and text, one
request at a time, while no other writes), then writes tokens, each of n writers one token per t_step(n). Lengths are
drawn per request name, so all placements and serving modes meet the same verdicts. A service knows no clock and no
schedule, and nothing of what a verdict says.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stagebreaker.profiles.table import Profile, Verdicts

K = TypeVar("K")
V = TypeVar("V")
_NONE_LEFT = 1e-9


@dataclass(frozen=True)
class Turn:
    """One turn of a verdict on one kind of GPU: us to fetch, us to read, tokens to write."""

    fetch_us: float
    read_us: float
    tokens: int


class Service(Protocol):
    """A judge's engine; times are us of time that the engine had."""

    def join(self, request: str) -> None:
        """A request arrives."""

    def due_us(self) -> int | None:
        """Whole us until the next change if nothing joins; None while nothing is active."""

    def advance(self, elapsed_us: float, *, paused: bool = False) -> list[str]:
        """Let time pass, no further than ``due_us``; ``paused``: the GPU did something else. Requests that are done."""


class CurveService:
    """n active requests advance at 1/t(n) each; ``curve_us`` gives t(n)."""

    def __init__(self, curve_us: Mapping[int, float]) -> None:
        self.curve_us = curve_us
        self.left: dict[str, float] = {}

    def join(self, request: str) -> None:
        """It is active at once."""
        self.left[request] = 1.0

    def due_us(self) -> int | None:
        """The one with the least left."""
        if not self.left:
            return None
        return math.ceil(min(self.left.values()) * self.curve_us[len(self.left)] - 1e-6)

    def advance(self, elapsed_us: float, *, paused: bool = False) -> list[str]:
        """All active requests alike."""
        if paused or not self.left:
            return []
        whole_us = self.curve_us[len(self.left)]
        done = [request for request, left in self.left.items() if left * whole_us - elapsed_us <= 1e-6]
        share = elapsed_us / whole_us if whole_us else 1.0
        self.left = {request: left - share for request, left in self.left.items() if request not in done}
        return done


@dataclass
class TokenService:
    """Turns of fetching, reading and writing; beyond ``most_active`` requests wait for one to be done."""

    turns: Mapping[str, tuple[Turn, ...]]
    step_us: Mapping[int, float]
    """Requests that write -> us per token."""
    most_active: int | None = None
    _waiting: deque[str] = field(default_factory=deque)
    _fetching: dict[str, float] = field(default_factory=dict)
    _reading: dict[str, float] = field(default_factory=dict)
    """In the order they are read; only the first advances."""
    _writing: dict[str, float] = field(default_factory=dict)
    _turn: dict[str, int] = field(default_factory=dict)

    def join(self, request: str) -> None:
        """It starts its first turn, or waits for room."""
        if self.most_active is not None and len(self._turn) >= self.most_active:
            self._waiting.append(request)
        else:
            self._take_turn(request, 0)

    def _take_turn(self, request: str, number: int) -> None:
        self._turn[request] = number
        turn = self.turns[request][number]
        if turn.fetch_us:
            self._fetching[request] = turn.fetch_us
        else:
            self._reading[request] = turn.read_us

    def due_us(self) -> int | None:
        """The next fetch, read or last token."""
        due = list(self._fetching.values())
        if self._reading:
            due.append(next(iter(self._reading.values())))
        elif self._writing:
            due.append(min(self._writing.values()) * self.step_us[len(self._writing)])
        return math.ceil(min(due) - 1e-6) if due else None

    def advance(self, elapsed_us: float, *, paused: bool = False) -> list[str]:
        """Fetches go on beside everything; then the first to be read, or all that write."""
        finished: list[str] = []
        fetched = self._less(self._fetching, elapsed_us)
        if paused:
            pass
        elif self._reading:
            first = next(iter(self._reading))
            self._reading[first] -= elapsed_us
            if self._reading[first] <= _NONE_LEFT:
                del self._reading[first]
                self._writing[first] = float(self.turns[first][self._turn[first]].tokens)
        elif self._writing:
            step_us = self.step_us[len(self._writing)]
            for request in self._less(self._writing, elapsed_us / step_us if step_us else math.inf):
                if self._turn[request] + 1 < len(self.turns[request]):
                    self._take_turn(request, self._turn[request] + 1)
                else:
                    del self._turn[request]
                    finished.append(request)
        for request in fetched:
            self._reading[request] = self.turns[request][self._turn[request]].read_us
        for _ in finished:
            if self._waiting:
                self._take_turn(self._waiting.popleft(), 0)
        return finished

    @staticmethod
    def _less(left: dict[str, float], amount: float) -> list[str]:
        """Take ``amount`` from all; those with none left leave, in the order they were out."""
        for request in left:
            left[request] -= amount
        none = [request for request, rest in left.items() if rest <= _NONE_LEFT * max(1.0, amount)]
        none.sort(key=left.__getitem__)  # the earliest first, where a pause has let several by
        for request in none:
            del left[request]
        return none


def serve_all_us(service: Service, requests: Iterable[str]) -> int:
    """Whole us that requests take together if nothing else happens: t(b) of this batch."""
    for request in requests:
        service.join(request)
    total = 0
    while (due := service.due_us()) is not None:
        service.advance(due)
        total += due
    return total


# -- verdicts ------------------------------------------------------------------------------------------------


def draw_tokens(verdicts: Verdicts, request: str) -> tuple[int, ...]:
    """Tokens of each turn that ``request`` takes. Depends on nothing but the seed and the request's name."""
    source = random.Random(f"{verdicts.seed}:{request}")
    drawn = [(source.gauss(0.0, 1.0), source.random()) for _ in verdicts.turns]
    tokens = []
    for number, (deviation, chance) in enumerate(drawn):
        length = round(verdicts.tokens_per_turn * math.exp(verdicts.sigma * deviation))
        tokens.append(min(max(1, length), verdicts.max_tokens))
        if number < len(verdicts.ends_after) and chance < verdicts.ends_after[number]:
            break
    return tuple(tokens)


def turns_of(profile: Profile, gpu_kind: str, request: str) -> tuple[Turn, ...]:
    """The turns of a request on a kind of GPU. Raises ``InputError`` where the profile lacks a cost."""
    verdicts = profile.verdicts
    assert verdicts is not None
    made = []
    for turn, tokens in zip(verdicts.turns, draw_tokens(verdicts, request), strict=False):
        read = turn.frames * profile.duration_us("judge_encode", gpu_kind) if turn.frames else 0
        read += profile.duration_us("judge_prefill", gpu_kind, turn.prompt_tokens)
        made.append(Turn(turn.fetch_us, read, tokens))
    return tuple(made)


class Lazy(dict[K, V]):
    """Values worked out when they are first needed."""

    def __init__(self, work_out: Callable[[K], V]) -> None:
        self.work_out = work_out

    def __missing__(self, key: K) -> V:
        """Work it out and keep it."""
        self[key] = self.work_out(key)
        return self[key]
