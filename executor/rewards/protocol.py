"""What a judge is asked and what it answers.

A judge scores a batch of requests in one call and answers each with an outcome, in order. A video that cannot
be scored is Unscorable with a reason, never a low score: what happens to its group then is the workload's
choice. It does not know models, prompts or how a reply is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class Request:
    """One scoring request. key names it in logs and errors; frames is one video, or two for a pair.


    Each video is [n_frames, height, width, 3], uint8; the two videos of a pair must have one shape.
    """

    key: str
    frames: tuple[np.ndarray, ...]
    prompt: str

    def __post_init__(self) -> None:
        if len(self.frames) not in (1, 2):
            raise ValueError(f"request {self.key} has {len(self.frames)} videos, must have 1 (pointwise) or 2 (pair)")


@dataclass(frozen=True)
class Scored:
    """A reward. dims: the parts it was made of; meta: what else is worth keeping (a reply, its length)."""

    value: float
    dims: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), *self.dims.items()):
            if not math.isfinite(number):
                raise ValueError(f"{name}={number} of a score must be finite; return Unscorable instead")


@dataclass(frozen=True)
class Unscorable:
    """No reward can be given; the reason is for a person."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("an unscorable outcome needs a reason")


Outcome = Scored | Unscorable


class Judge(Protocol):
    def score(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome per request: outcome i belongs to request i."""
        ...
