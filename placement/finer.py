"""Finer placements: one candidate's grad_replay in parts, by denoising step, on any GPUs; found by local search.

Whole candidates come in rounds: six on four actors take two. Units (candidate, step) are independent, so a GPU may
replay some steps of a candidate and its part is folded with the others; each part pays one rebuild of the KV context.
The search starts from the best placements of the count space under every scoring mode. Per mini-batch it takes steps
from the GPU that ends last and gives them to another, as long as the simulated step, or else the last of those ends,
comes sooner. The result is simulated exactly and never worse than where it started; that nothing better exists is not
proved, but the bound for divisible candidates (``bounds``) says how much better anything could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stagebreaker.placement.search import SearchResult
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, run
from stagebreaker.sim.memory import Memory
from stagebreaker.sim.plan import Placement, Split
from stagebreaker.sim.schedules import build
from stagebreaker.sim.timeline import Timeline
from stagebreaker.sim.workload import Cluster, Workload

Parts = dict[int, dict[str, int]]
"""Candidate -> lane -> how many of its trained steps are replayed there; which ones does not matter for time."""

Score = tuple[int, tuple[tuple[int, ...], ...]]
"""Step time, then per mini-batch when its replays end, GPU by GPU, the last first: less is better."""


@dataclass(frozen=True)
class Finer:
    """What the local search ended with."""

    placement: Placement
    step_us: int
    evaluated: int
    whole_us: int
    """Step time of the best placement it started from, every candidate whole."""


NEAR = 1.15
"""Descents also start from the best placement of every region that is within this factor of the best one."""


def starts(results: Sequence[SearchResult]) -> list[Placement]:
    """Where to start from: of every search (one per scoring mode) the best, and the best of each region near it."""
    least = min(result.best.step_us for result in results if result.regions)
    return [r.best for result in results for r in result.regions if r.step_us <= NEAR * least]


def refine(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    placements: Sequence[Placement],
    tick: Callable[[int], None] = lambda _: None,
) -> Finer:
    """The best of local searches from each placement, all of which fit into memory."""
    found = []
    for start in placements:
        found.append(_Descent(workload, cluster, profile, start).go())
        tick(1)
    best = min(found, key=lambda one: (one.step_us, len(one.placement.splits)))
    evaluated, whole = sum(one.evaluated for one in found), min(one.whole_us for one in found)
    return Finer(best.placement, best.step_us, evaluated, whole)


class _Descent:
    def __init__(self, workload: Workload, cluster: Cluster, profile: Profile, start: Placement) -> None:
        self.workload, self.cluster, self.profile = workload, cluster, profile
        self.start, self.evaluated = start, 0
        self.all_steps = workload.trained_steps

    def go(self) -> Finer:
        """Mini-batch by mini-batch, then once more, since a later one may have made room."""
        parts: Parts = {}
        score, timeline = self._try(parts)
        whole = timeline.makespan_us
        for _ in range(2):
            before = score
            for m in range(self.workload.mini_batches):
                parts, score, timeline = self._balance(m, parts, score, timeline)
            if score == before:
                break
        step = timeline.makespan_us
        for candidate in list(parts):  # what only evened out the ends, and not the step, goes back
            without = {other: lanes for other, lanes in parts.items() if other != candidate}
            if self._try(without)[0][0] <= step:
                parts = without
        return Finer(self._placement(parts), step, self.evaluated, whole)

    def _balance(self, m: int, parts: Parts, score: Score, timeline: Timeline) -> tuple[Parts, Score, Timeline]:
        while True:
            better = None
            for trial in self._moves(m, parts, timeline):
                found, made = self._try(trial)
                if found < (better[1] if better else score):
                    better = trial, found, made
            if better is None:
                return parts, score, timeline
            parts, score, timeline = better

    def _moves(self, m: int, parts: Parts, timeline: Timeline) -> Iterator[Parts]:
        """Some steps of a candidate from the GPU whose replays of this mini-batch end last to each other one."""
        ends = {lane.name: 0 for lane in timeline.lanes}
        held: dict[str, dict[int, int]] = {lane: {} for lane in ends}
        for row in timeline.rows:
            if row.kind == "grad_replay" and row.mini_batch == m and row.candidate is not None:
                ends[row.gpu] = max(ends[row.gpu], row.end_us)
                held[row.gpu][row.candidate] = len(row.steps.split()) or self.all_steps
        last = max(ends, key=lambda lane: (ends[lane], lane))
        for candidate, steps in held[last].items():
            now = parts.get(candidate, {last: steps})
            for lane in sorted(ends, key=lambda name: (ends[name], name)):
                for count in range(1, steps + 1) if lane != last else ():
                    moved = {**now, last: steps - count, lane: now.get(lane, 0) + count}
                    yield {**parts, candidate: {name: n for name, n in moved.items() if n}}

    def _placement(self, parts: Parts) -> Placement:
        splits = []
        for candidate, lanes in sorted(parts.items()):
            steps, first = [], 0
            for _, count in sorted(lanes.items()):
                steps.append(tuple(range(first, first + count)))
                first += count
            splits.append(Split(candidate=candidate, steps=tuple(steps), lanes=tuple(sorted(lanes))))
        return self.start.model_copy(update={"splits": tuple(splits)})

    def _try(self, parts: Parts) -> tuple[Score, Timeline]:
        """Score and timeline; what does not fit into memory is infinitely slow."""
        self.evaluated += 1
        placement = self._placement(parts)
        graph, assignment = build(self.workload, placement)
        costs = Costs(graph, self.profile, self.cluster, self.workload.trained_steps)
        timeline = run(GraphIndex(graph, self.profile), assignment, costs)
        if parts and Memory(self.workload, graph, self.profile, self.cluster).worst(assignment) is not None:
            return (_NEVER, ()), timeline
        ends: dict[int, dict[str, int]] = {m: {} for m in range(self.workload.mini_batches)}
        for row in timeline.rows:
            if row.kind == "grad_replay" and row.mini_batch is not None:
                ends[row.mini_batch][row.gpu] = max(ends[row.mini_batch].get(row.gpu, 0), row.end_us)
        return (timeline.makespan_us, tuple(tuple(sorted(e.values(), reverse=True)) for e in ends.values())), timeline


_NEVER = 10**18
