"""The published figures, and how each of their numbers is read off simulated timelines.

``data/published.csv`` holds Figures 3, 9 and 16 of the paper; a row's metric is a function of the steps of one case,
that is one algorithm and judge at one batch. A row over several pairs is its low and its high over them. One thing is
inferred, not published: ``colocated`` and ``async_reward`` recompute the old log-probabilities, the schedules that
train before the scores take them from the rollout (otherwise async_train cannot be as fast as it is).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import OVERHEAD_KINDS, REQUEST, Assignment, StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.timeline import Row, Timeline
from stagebreaker.sim.workload import Cluster, Workload, load_workload

ACTORS, REWARDS = 4, 2
PAIRS = ("dancegrpo-urflex", "dancegrpo-vrt", "kvpo-urflex", "kvpo-vrt")
BASELINES = ("colocated", "async_reward", "async_train", "merged_replay")
"""The published schedules in which nothing moves."""
ROLLOUT = ("encode_prompt", "generate", "vae_decode")
TRAINING = ("old_replay", "ref_replay", "loss_replay", "grad_replay", "fold", "update")

Steps = Mapping[str, Timeline]
"""Schedule -> the timeline of one step, all of one case."""


@dataclass(frozen=True)
class Case:
    """One algorithm and judge at one batch; groups and mini-batches are halves of the batch."""

    pair: str
    candidates: int

    def workload(self, schedule: str) -> Workload:
        """The workload as ``schedule`` ran it: old log-probabilities as inferred for it."""
        late = not SCHEDULES[schedule].early
        overrides = (
            f"candidates={self.candidates}",
            f"group_size={self.candidates // 2}",
            "mini_batches=2",
            f"old_logprob_source={'recompute' if late else 'rollout'}",
        )
        return load_workload(self.pair, overrides)


CASES: dict[str, tuple[Case, ...]] = {
    "default": tuple(Case(pair, 12) for pair in PAIRS),
    "dancegrpo-vrt-24": (Case("dancegrpo-vrt", 24),),
}
"""The workload column -> what it was measured on."""


@dataclass(frozen=True)
class Published:
    """One published number, or its range over the pairs."""

    id: str
    workload: str
    metric: str
    low: float
    high: float
    used_in_fit: bool

    @property
    def cases(self) -> tuple[Case, ...]:
        """What the number is of."""
        return CASES[self.workload]

    def read(self, steps: Mapping[Case, Steps]) -> tuple[float, float]:
        """(low, high) over the row's cases; the largest twice where only the largest is published."""
        values = [METRICS[self.metric](steps[case]) for case in self.cases]
        return (max(values) if self.id.endswith("_max") else min(values)), max(values)


def published() -> tuple[Published, ...]:
    """All rows, in the order of the file."""
    text = (resources.files("stagebreaker.sim.data") / "published.csv").read_text("utf-8")
    return tuple(
        Published(r["id"], r["workload"], r["metric"], float(r["low"]), float(r["high"]), r["used_in_fit"] == "yes")
        for r in csv.DictReader(text.splitlines())
    )


def shipped_profile(name: str) -> Profile:
    """A profile that ships with the package."""
    file = resources.files("stagebreaker.profiles.data") / f"{name}.json"
    return Profile.parse(json.loads(file.read_text("utf-8")), f"shipped profile {name}")


def step_of(case: Case, placement: Placement, profile: Profile) -> Timeline:
    """One step of a case on six GPUs."""
    graph, assignment, trained_steps = _built(case, placement)
    cluster = Cluster.equal(ACTORS + REWARDS, profile.gpu_kinds[0].name)
    return simulate(graph, assignment, profile, cluster, trained_steps)


@lru_cache(maxsize=64)
def _built(case: Case, placement: Placement) -> tuple[StepGraph, Assignment, int]:
    """Graph, assignment and trained steps: they do not depend on costs."""
    workload = case.workload(placement.schedule)
    return *build(workload, placement), workload.trained_steps


def steps_of(case: Case, placement: Placement, profile: Profile) -> dict[str, Timeline]:
    """The schedules in which nothing moves, their rewards scored on arrival, and ``placement``'s."""
    still = (Placement(schedule=name, actors=ACTORS, rewards=REWARDS, scoring="on_arrival") for name in BASELINES)
    return {p.schedule: step_of(case, p, profile) for p in (*still, placement)}


def all_cases() -> tuple[Case, ...]:
    """Everything that numbers were published of, each once."""
    return tuple(case for group in CASES.values() for case in group)


# -- reading timelines -----------------------------------------------------------------------------------------


def _spans(timeline: Timeline, role: str, kinds: Iterable[str]) -> list[Row]:
    return [row for row in timeline.rows if row.role == role and row.kind in kinds and "link:" not in row.gpu]


def _length(rows: Iterable[Row]) -> int:
    return sum(row.end_us - row.start_us for row in rows)


def _count(timeline: Timeline, role: str) -> int:
    return sum(lane.role == role for lane in timeline.lanes)


def speedup(steps: Steps, schedule: str, over: str) -> float:
    """How many times as fast ``schedule`` is."""
    return steps[over].makespan_us / steps[schedule].makespan_us


def wait_for_reward_share(timeline: Timeline) -> float:
    """Mean share of the step between an actor's last rollout task and its first training task."""
    waits = []
    for lane in (lane.name for lane in timeline.lanes if lane.role == "actor"):
        rows = [row for row in timeline.rows if row.gpu == lane]
        rollout = max(row.end_us for row in rows if row.kind in ROLLOUT)
        waits.append(min(row.start_us for row in rows if row.kind in TRAINING and row.end_us > row.start_us) - rollout)
    return sum(waits) / len(waits) / timeline.makespan_us


def busy_share(timeline: Timeline, role: str) -> float:
    """Share of the step in which the GPUs of a role work."""
    kinds = {row.kind for row in timeline.rows} - {REQUEST, *OVERHEAD_KINDS}
    return _length(_spans(timeline, role, kinds)) / (_count(timeline, role) * timeline.makespan_us)


def scoring_behind_rollout(timeline: Timeline) -> float:
    """Share of the scoring time that lies before the end of the last rollout task."""
    end_us = rollout_us(timeline)
    scoring = _spans(timeline, "reward", ["score"])
    hidden = sum(min(row.end_us, end_us) - min(row.start_us, end_us) for row in scoring)
    return hidden / _length(scoring)


def wasted_share(timeline: Timeline) -> float:
    """Share of all GPU time in which actors wait for rewards or reward GPUs idle.

    The published figure is this sum of the two published beside it; actors waiting for an update are not in it.
    """
    actors, rewards = _count(timeline, "actor"), _count(timeline, "reward")
    idle = actors * wait_for_reward_share(timeline) + rewards * (1 - busy_share(timeline, "reward"))
    return idle / (actors + rewards)


def rollout_us(timeline: Timeline) -> int:
    """When the actor GPUs are done with rollout tasks."""
    return max(row.end_us for row in _spans(timeline, "actor", ROLLOUT))


def training_us(timeline: Timeline) -> int:
    """Policy training time: from the first training task of an actor GPU to the end of the step."""
    starts = (row.start_us for row in _spans(timeline, "actor", TRAINING) if row.end_us > row.start_us)
    return timeline.makespan_us - min(starts)


def tail_after_scores(timeline: Timeline) -> float:
    """Share of the step after the last score."""
    return 1 - max(row.end_us for row in _spans(timeline, "reward", ["score"])) / timeline.makespan_us


def decode_share_of_rollout(timeline: Timeline) -> float:
    """Share of the actors' rollout time that is VAE decoding."""
    return _length(_spans(timeline, "actor", ["vae_decode"])) / _length(_spans(timeline, "actor", ROLLOUT))


def reward_train_share(timeline: Timeline) -> float:
    """Colocated: share of the step in which rewards are evaluated or the policy is trained; switches are neither."""
    scoring = _length(_spans(timeline, "all", ["score"])) / _count(timeline, "all")
    start_us = max(row.end_us for row in _spans(timeline, "all", ["switch"]))
    return (scoring + timeline.makespan_us - start_us) / timeline.makespan_us


def redundant_replay_share(timeline: Timeline) -> float:
    """Colocated: share of the GPU time in the replay that merging removes.

    Figure 3's share is three times what Figure 16's training cut leaves room for; no costs meet both.
    """
    return _length(_spans(timeline, "all", ["loss_replay"])) / (_count(timeline, "all") * timeline.makespan_us)


def _cut(before: float, after: float) -> float:
    return 1 - after / before


METRICS: dict[str, Callable[[Steps], float]] = {
    "reward_train_share": lambda s: reward_train_share(s["colocated"]),
    "redundant_replay_share": lambda s: redundant_replay_share(s["colocated"]),
    "async_reward_vs_colocated": lambda s: speedup(s, "async_reward", "colocated"),
    "async_train_vs_async_reward": lambda s: speedup(s, "async_train", "async_reward"),
    "async_train_vs_colocated": lambda s: speedup(s, "async_train", "colocated"),
    "merged_replay_vs_async_train": lambda s: speedup(s, "merged_replay", "async_train"),
    "merged_replay_vs_colocated": lambda s: speedup(s, "merged_replay", "colocated"),
    "stagebreaker_vs_colocated": lambda s: speedup(s, "stagebreaker", "colocated"),
    "stagebreaker_vs_async_reward": lambda s: speedup(s, "stagebreaker", "async_reward"),
    "wait_for_reward_share": lambda s: wait_for_reward_share(s["async_reward"]),
    "reward_gpu_busy": lambda s: busy_share(s["async_reward"], "reward"),
    "reward_overlap": lambda s: scoring_behind_rollout(s["async_reward"]),
    "wasted_gpu_time": lambda s: wasted_share(s["async_reward"]),
    "async_train_step_cut": lambda s: _cut(s["async_reward"].makespan_us, s["async_train"].makespan_us),
    "merged_training_cut": lambda s: _cut(training_us(s["async_train"]), training_us(s["merged_replay"])),
    "merged_reward_idle_tail": lambda s: tail_after_scores(s["merged_replay"]),
    "vae_share_of_rollout": lambda s: decode_share_of_rollout(s["async_reward"]),
    "stagebreaker_rollout_cut": lambda s: _cut(rollout_us(s["merged_replay"]), rollout_us(s["stagebreaker"])),
    "stagebreaker_training_cut": lambda s: _cut(training_us(s["merged_replay"]), training_us(s["stagebreaker"])),
    "stagebreaker_reward_util": lambda s: busy_share(s["stagebreaker"], "reward"),
}
