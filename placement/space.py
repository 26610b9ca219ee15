"""The count space: every placement the planner considers, with its size by formula.

For each GPU split (a, r) with a + r = N, both at least 1, and each scoring mode: how many of the first decodes move to
reward GPUs, how many of each mini-batch's last training tasks, and, where there are forward-only replays, how many of
each mini-batch's last ones (old and reference replay of a candidate move together). GPUs of one role are alike, so
counts with round-robin assignment stand for all placements that differ only in GPU names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from stagebreaker.profiles.document import InputError
from stagebreaker.sim.plan import Placement, Scoring
from stagebreaker.sim.workload import Workload

SCHEDULE = "stagebreaker"


@dataclass(frozen=True)
class Region:
    """The placements of one GPU split and scoring mode; all of them share one step graph."""

    workload: Workload
    actors: int
    rewards: int
    scoring: Scoring

    @property
    def forward_only(self) -> tuple[int, ...]:
        """Per mini-batch: the number of candidates that have forward-only replays."""
        w = self.workload
        old = [
            w.old_logprob_source == "recompute" or (w.old_logprob_source == "first_replay" and m > 0)
            for m in range(w.mini_batches)
        ]
        return tuple(len(w.mini_batch_members(m)) if old[m] or w.reference_replay else 0 for m in range(w.mini_batches))

    @property
    def size(self) -> int:
        """(B+1) x prod_m(|mb_m|+1) [x prod_m(|mb_m|+1) over the mini-batches with forward-only replays]."""
        w = self.workload
        training = prod(len(w.mini_batch_members(m)) + 1 for m in range(w.mini_batches))
        return (w.candidates + 1) * training * prod(n + 1 for n in self.forward_only)

    def base(self) -> Placement:
        """The placement that moves nothing."""
        return Placement(schedule=SCHEDULE, actors=self.actors, rewards=self.rewards, scoring=self.scoring)

    @property
    def most(self) -> tuple[int, ...]:
        """Greatest value of each count: decodes, training per mini-batch, forward-only replays per mini-batch."""
        w = self.workload
        return (w.candidates, *(len(w.mini_batch_members(m)) for m in range(w.mini_batches)), *self.forward_only)

    def placement(self, counts: Sequence[int]) -> Placement:
        """The placement with these counts, in the order of ``most``, each within it."""
        w = self.workload
        train, forward = tuple(counts[1 : 1 + w.mini_batches]), tuple(counts[1 + w.mini_batches :])
        if not any(self.forward_only):
            forward = ()
        # Counts within ``most`` need no validation; constructing without it keeps the enumeration fast.
        return Placement.model_construct(
            schedule=SCHEDULE,
            actors=self.actors,
            rewards=self.rewards,
            scoring=self.scoring,
            vae_moved=counts[0],
            train_moved=train,
            old_moved=forward if w.old_logprob_source != "rollout" else (),
            ref_moved=forward if w.reference_replay else (),
            splits=(),
        )

    def placements(self) -> Iterator[Placement]:
        """Every placement once, in lexicographic order of counts."""
        return map(self.placement, product(*(range(n + 1) for n in self.most)))

    def counts(self, p: Placement) -> tuple[int, ...]:
        """The counts of a placement, in the order of ``most``."""
        none = (0,) * self.workload.mini_batches
        return (p.vae_moved, *(p.train_moved or none), *(p.old_moved or p.ref_moved or none))

    def contains(self, p: Placement) -> bool:
        """Whether ``placements`` lists it."""
        counts = self.counts(p)
        if len(counts) != len(self.most) or any(c > n for c, n in zip(counts, self.most, strict=True)):
            return False
        return self.placement(counts) == p

    def neighbours(self, p: Placement) -> list[Placement]:
        """Placements that move one more or one less of one kind."""
        counts = self.counts(p)
        return [
            self.placement((*counts[:n], other, *counts[n + 1 :]))
            for n, (count, most) in enumerate(zip(counts, self.most, strict=True))
            for other in (count - 1, count + 1)
            if 0 <= other <= most
        ]


@dataclass(frozen=True)
class Space:
    """All regions of one planning problem."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, workload: Workload, gpus: int, split: tuple[int, int] | None, scoring: tuple[Scoring, ...]) -> Space:
        """Every split of ``gpus`` into actors and reward GPUs, or the one given, under each scoring mode."""
        if gpus < 2:
            raise InputError(f"gpus={gpus} must be at least 2: one actor and one reward GPU")
        splits = [split] if split else [(a, gpus - a) for a in range(1, gpus)]
        return cls(tuple(Region(workload, a, r, mode) for a, r in splits for mode in scoring))

    @property
    def size(self) -> int:
        """Number of placements, by formula."""
        return sum(region.size for region in self.regions)
