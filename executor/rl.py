"""One RL step as the controller sees it: orders for workers, advantages from scores, adapter versions.

Mini-batch m trains under adapter version v + m, where v is the version the step began with; rollouts and old log-probs
stay at v. Rewards can be recorded and given again, because a judge's verdict may depend on its batch, and equality of
gradients is only claimed for equal rewards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.executor.rewards.protocol import Outcome, Scored, Unscorable
from stagebreaker.executor.worker import Order
from stagebreaker.sim.dataflow import StepGraph, Task
from stagebreaker.sim.workload import Workload

_TRAINING = ("loss_replay", "grad_replay", "fold", "update")
_PASSED_ON = ("advantage", "old_replay", "loss_replay")
"""Kinds whose small results a worker needs; others stay with the controller."""


def prompts_of_step(prompts: tuple[str, ...], workload: Workload, rl_step: int) -> tuple[str, ...]:
    """One prompt per group: a seeded shuffle of the list, taken in turn, reshuffled every pass."""
    chosen = []
    for n in range(rl_step * workload.groups, (rl_step + 1) * workload.groups):
        order = list(range(len(prompts)))
        random.Random(f"{workload.seed}/{n // len(prompts)}").shuffle(order)
        chosen.append(prompts[order[n % len(prompts)]])
    return tuple(chosen)


@dataclass
class RLStep:
    """Implements ``controller.Step``. ``recorded`` gives rewards by request name instead of the judge's."""

    workload: Workload
    graph: StepGraph
    algorithm: Algorithm
    rl_step: int
    version: int
    prompts: tuple[str, ...]
    recorded: Mapping[str, float | None] | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    candidate_rewards: dict[int, float | None] = field(default_factory=dict)
    advantages: dict[int, float] = field(default_factory=dict)
    masked: dict[int, str] = field(default_factory=dict)

    def order(self, task: Task, values: Mapping[str, Any]) -> Order:
        """The worker's order for one task."""
        trained = task.kind in _TRAINING
        version = self.version + (task.mini_batch or 0 if trained else 0)
        passed = {name: value for name, value in values.items() if name.split(":")[0] in _PASSED_ON}
        parts = self._parts(task.mini_batch) if task.kind in ("fold", "update") and task.mini_batch is not None else {}
        return Order(task, self.rl_step, version, self.prompts, passed, parts)

    def _parts(self, mini_batch: int) -> dict[int, int]:
        """Number of gradients per candidate: more than one where a replay is split."""
        members = self.workload.mini_batch_members(mini_batch)
        return {i: sum(need.data is not None for need in self.graph.by_id[f"fold:{i}"].needs) for i in members}

    def control(self, task: Task, values: Mapping[str, Any]) -> Any:
        """Barriers are nothing but order; an advantage is computed from every score it needs."""
        if task.kind != "advantage":
            return None
        outcomes: dict[str, Outcome] = {}
        for value in values.values():
            outcomes.update(value)
        w = self.workload
        members = self._scope(int(task.id.split(":")[1]))
        groups = sorted({w.group_of(i) for i in members})
        needed = [i for g in groups for i in w.group_members(g)]
        scores = {i: self._reward(i, outcomes) for i in needed}
        found = self.algorithm.advantages(
            scores,
            {i: w.group_of(i) for i in needed},
            scope=w.advantage_scope,
            on_unscorable=w.on_unscorable,
            mini_batches={i: w.mini_batch_of(i) for i in members},
        )
        self.candidate_rewards.update(scores)
        self.advantages.update({i: a for i, a in found.values.items() if i in members})
        self.masked.update({i: reason for i, reason in found.masked.items() if i in members})
        return {"values": {str(i): a for i, a in found.values.items()}}

    def _scope(self, number: int) -> range:
        """Candidates of an advantage task."""
        w = self.workload
        if w.advantage_scope == "group":
            return w.group_members(number)
        return w.mini_batch_members(number) if w.advantage_scope == "minibatch" else range(w.candidates)

    def _reward(self, candidate: int, outcomes: Mapping[str, Outcome]) -> float | None:
        """Its own score, or for pairs the share of comparisons it wins; None if any of them has no score."""
        if self.workload.reward_shape != "all_pairs":
            return self._score(str(candidate), outcomes)
        wins = []
        for name in sorted(outcomes):  # a sum in one order, whichever verdict came first
            first, second = (int(v) for v in name.split("-"))
            if candidate in (first, second):
                value = self._score(name, outcomes)
                wins.append(None if value is None else value if candidate == first else 1.0 - value)
        known = [win for win in wins if win is not None]
        return sum(known) / len(known) if len(known) == len(wins) else None

    def _score(self, name: str, outcomes: Mapping[str, Outcome]) -> float | None:
        outcome = outcomes[name]
        if isinstance(outcome, Unscorable):
            self.reasons[name] = outcome.reason
        value = outcome.value if isinstance(outcome, Scored) else None
        if self.recorded is not None:
            value = self.recorded[name]
        self.rewards[name] = value
        return value
