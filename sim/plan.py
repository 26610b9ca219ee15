"""Placement and Plan: where each task runs, and the document that carries the decision to the executor.

A ``Placement`` is a point of the count space: GPU split, scoring mode, how many decodes, training and forward-only
replays of each mini-batch move to reward GPUs. ``plan.json`` embeds workload, cluster and profile, one placement per
schedule and the task lists they expand to, so that running needs nothing else and a changed file is noticed.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stagebreaker.profiles.document import Document, InputError, Model
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.workload import Cluster, Workload

Scoring = Literal["on_arrival", "per_mini_batch", "one_batch"]
SCORING: tuple[Scoring, ...] = ("on_arrival", "per_mini_batch", "one_batch")
Count = Annotated[int, Field(ge=0)]


class Split(Model):
    """One candidate's grad_replay in parts: part j covers denoising ``steps[j]`` and runs on lane ``lanes[j]``."""

    candidate: Count
    steps: tuple[tuple[Count, ...], ...]
    lanes: tuple[str, ...]


class Placement(Model):
    """One point of the count space.

    The *first* ``vae_moved`` decodes and the *last* ``train_moved[m]`` training tasks of mini-batch m run on reward
    GPUs; ``ref_moved`` and ``old_moved`` likewise move forward-only replays. ``splits`` divide single candidates
    further and override ``train_moved`` for them.
    """

    schedule: str
    actors: Annotated[int, Field(ge=1)]
    rewards: Count
    scoring: Scoring = "one_batch"
    vae_moved: Count = 0
    train_moved: tuple[Count, ...] = ()
    ref_moved: tuple[Count, ...] = ()
    old_moved: tuple[Count, ...] = ()
    splits: tuple[Split, ...] = ()

    def check(self, workload: Workload) -> None:
        """Raise ``InputError`` where a count is out of range for this workload."""
        if self.vae_moved > workload.candidates:
            raise InputError(
                f"vae_moved={self.vae_moved} must be in 0..{workload.candidates} "
                f"(batch of {workload.candidates} candidates)"
            )
        for name in ("train_moved", "ref_moved", "old_moved"):
            moved: tuple[int, ...] = getattr(self, name)
            if moved and len(moved) != workload.mini_batches:
                raise InputError(
                    f"{name}={list(moved)} must have one entry per mini-batch (mini_batches={workload.mini_batches})"
                )
            for m, count in enumerate(moved):
                size = len(workload.mini_batch_members(m))
                if count > size:
                    raise InputError(f"{name}[{m}]={count} must be in 0..{size} (mini-batch {m} has {size} candidates)")
        if (self.vae_moved or any(self.train_moved) or any(self.ref_moved) or any(self.old_moved)) and not self.rewards:
            raise InputError("tasks are moved to reward GPUs but rewards=0; give the plan a reward GPU")
        for split in self.splits:
            self._check_split(split, workload)

    def _check_split(self, split: Split, workload: Workload) -> None:
        if split.candidate >= workload.candidates:
            raise InputError(f"splits: candidate {split.candidate} must be in 0..{workload.candidates - 1}")
        covered = sorted(k for part in split.steps for k in part)
        if (
            covered != list(range(workload.trained_steps))
            or not all(split.steps)
            or len(split.steps) != len(split.lanes)
        ):
            raise InputError(
                f"splits: the parts of candidate {split.candidate} cover steps {covered} on {len(split.lanes)} lanes; "
                f"they must cover each of 0..{workload.trained_steps - 1} once, one lane per part"
            )

    def key(self) -> tuple[object, ...]:
        """Total order among placements of equal step time: fewer moves first, then the smaller counts."""
        moved = (self.vae_moved, *self.train_moved, *self.ref_moved, *self.old_moved)
        return (sum(moved), self.rewards, SCORING.index(self.scoring), moved)


class ScheduledPlan(Model):
    """One schedule of a plan: its placement, what it expands to, and what the simulator predicts."""

    placement: Placement
    step_us: Count
    lane_of: dict[str, str]
    order: dict[str, tuple[str, ...]]
    best_split_step_us: Count | None = None


class Plan(Document):
    """plan.json."""

    WHAT: ClassVar[str] = "plan"
    best: str
    lower_bound_us: Count
    workload: Workload
    cluster: Cluster
    profile: Profile
    workload_sha256: str
    profile_sha256: str
    schedules: dict[str, ScheduledPlan]

    def check_digests(self) -> None:
        """Raise ``InputError`` if workload or profile are not those that were planned."""
        for what, document, claimed in (
            ("workload", self.workload, self.workload_sha256),
            ("profile", self.profile, self.profile_sha256),
        ):
            if document.digest() != claimed:
                raise InputError(f"the plan's {what} was changed after planning ({what}_sha256 differs); plan again")
