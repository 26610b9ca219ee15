"""Scores to advantages: A_i = (r_i - mean of its group) / (std + eps), float64, unbiased std.

``scope`` says which scores the std is taken over: the candidate's ``group``, its ``minibatch`` or the
``batch``; the mean is always the group's. A score that is None, NaN or infinite is *unscorable*, never 0: the
policy ``on_unscorable`` fails, drops the whole group, or masks the candidate, which then leaves mean, std and
the normaliser. Equal scores give exactly 0, whatever rounding their mean suffers. It does not know how scores
were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stagebreaker.profiles.document import InputError

SCOPES = ("group", "minibatch", "batch")
ON_UNSCORABLE = ("fail", "drop_group", "mask_candidate")


class UnscorableError(ValueError):
    """A candidate has no score and the policy is to fail."""


@dataclass(frozen=True)
class Advantages:
    """Advantage of every surviving candidate, and the reason why each other one is masked."""

    values: dict[int, float]
    masked: dict[int, str]


def advantages(
    scores: Mapping[int, float | None],
    groups: Mapping[int, int],
    *,
    scope: str = "group",
    on_unscorable: str = "fail",
    eps: float = 1e-8,
    mini_batches: Mapping[int, int] | None = None,
) -> Advantages:
    """Advantages of all candidates in ``scores``; ``groups`` and ``mini_batches`` map candidate to its set.

    Every group must be whole, and have two candidates at least: the std of one is undefined. Under scope
    ``minibatch`` a candidate without a mini-batch counts for its group's mean only and gets no advantage.
    """
    _validate(scores, groups, scope, on_unscorable, mini_batches)
    pool_of = {"group": groups, "minibatch": mini_batches or groups, "batch": dict.fromkeys(scores, 0)}[scope]
    masked = _unscorable(scores, groups, on_unscorable)
    _mask_lone(masked, scores, {"group": groups, scope: pool_of})
    r = {i: float(s) for i, s in sorted(scores.items()) if s is not None and i not in masked}
    pooled = [i for i in r if i in pool_of]
    std_of = {i: std for pool in _by_set(pooled, pool_of).values() for i, std in _stds(r, pool).items()}
    values = {}
    for members in _by_set(r, groups).values():
        tied = len({r[i] for i in members}) == 1
        mean = float(np.mean([r[i] for i in members]))
        for i in (i for i in members if i in std_of):
            values[i] = 0.0 if tied or std_of[i] == 0 else (r[i] - mean) / (std_of[i] + eps)
    return Advantages(dict(sorted(values.items())), dict(sorted(masked.items())))


def _stds(r: Mapping[int, float], pool: list[int]) -> dict[int, float]:
    """The pool's unbiased standard deviation for each of its members; exactly 0 for tied scores."""
    rewards = np.array([r[i] for i in pool], dtype=np.float64)
    return dict.fromkeys(pool, 0.0 if rewards.max() == rewards.min() else float(rewards.std(ddof=1)))


def _by_set(candidates: Iterable[int], set_of: Mapping[int, int]) -> dict[int, list[int]]:
    """{set: its candidates}, both rising."""
    members: dict[int, list[int]] = {}
    for i in sorted(candidates, key=lambda i: (set_of[i], i)):
        members.setdefault(set_of[i], []).append(i)
    return members


def _mask_lone(masked: dict[int, str], scores: Iterable[int], kinds: Mapping[str, Mapping[int, int]]) -> None:
    """Mask candidates that are left alone in a set: one score has no spread. One may strand another."""
    before = -1
    while before != len(masked):
        before = len(masked)
        for kind, set_of in kinds.items():
            for s, members in _by_set((i for i in scores if i not in masked and i in set_of), set_of).items():
                if len(members) == 1:
                    masked[members[0]] = f"the only scored candidate of {kind} {s}"


def _unscorable(scores: Mapping[int, float | None], groups: Mapping[int, int], policy: str) -> dict[int, str]:
    """{masked candidate: reason} under ``policy``."""
    bad = {i: f"unscorable (score {s})" for i, s in sorted(scores.items()) if s is None or not math.isfinite(s)}
    if bad and policy == "fail":
        raise UnscorableError(
            f"no usable score for candidates {list(bad)}; "
            f"set on_unscorable to drop_group or mask_candidate to train without them"
        )
    if policy == "drop_group":
        lost = {groups[i]: i for i in sorted(bad, reverse=True)}
        for i in scores:
            if groups[i] in lost:
                bad.setdefault(i, f"group {groups[i]} dropped: candidate {lost[groups[i]]} is unscorable")
    return bad


def _validate(
    scores: Mapping[int, float | None],
    groups: Mapping[int, int],
    scope: str,
    on_unscorable: str,
    mini_batches: Mapping[int, int] | None,
) -> None:
    if scope not in SCOPES:
        raise InputError(f"advantage_scope={scope!r} must be one of {', '.join(SCOPES)}")
    if on_unscorable not in ON_UNSCORABLE:
        raise InputError(f"on_unscorable={on_unscorable!r} must be one of {', '.join(ON_UNSCORABLE)}")
    if scope == "minibatch" and mini_batches is None:
        raise InputError("advantage_scope=minibatch needs mini_batches, the mini-batch of every candidate")
    missing = sorted(set(scores) - set(groups))
    if missing:
        raise InputError(f"candidates {missing} have a score but no entry in groups")
    absent = sorted(i for i, g in groups.items() if i not in scores and g in {groups[j] for j in scores})
    if absent:
        raise InputError(f"candidates {absent} belong to a scored group but have no score; give None if unscorable")
    kinds = {"group": groups} | ({scope: mini_batches} if scope == "minibatch" and mini_batches else {})
    for kind, set_of in kinds.items():
        for s, members in _by_set((i for i in scores if i in set_of), set_of).items():
            if len(members) < 2:
                raise InputError(f"{kind} {s} has one candidate ({members[0]}); an advantage needs at least two")
