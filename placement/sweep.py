"""Branch and bound over one region of the count space, many placements at a time.

A placement of the count space only chooses, task by task, between a home GPU and a reward GPU, and every queue keeps
the order of ``sim.schedules.Assigner``. So one pass over the tasks in that order, with numpy arrays over placements in
place of numbers, gives all their step times. A count enters when the first task that depends on it comes up; partial
placements whose bound is above the incumbent are dropped then, with everything below them. A transfer is charged its
own time but not its turn on the link, which can only shorten a step of fixed orders: what comes out is a lower bound,
a few transfers below the step time, and what it does not exclude is evaluated exactly by the max-plus recurrence.

Requests that a judge serves as they arrive stand in no queue. They depend on the decodes moved and on nothing else
while no link is busy with two transfers (``is_calm``), so the simulator tells their ends once per number of decodes.
It needs GPUs of one kind and does not know memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagebreaker.placement.space import Region
from stagebreaker.sim.dataflow import CONTROL_KINDS, REQUEST, StepGraph, Task
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import Assigner

Times = NDArray[np.int64]
CHUNK = 8_000
"""Partial placements carried on together: enough for numpy, few enough for a core's cache."""
BEAM = 200
"""Partial placements that the first dive keeps, to find a good incumbent."""


@dataclass(frozen=True)
class _Where:
    """A task's GPU: ``moved`` where the count ``dim`` is above ``above``, else ``home`` (always without a ``dim``)."""

    home: int
    moved: int = -1
    dim: int = -1
    above: int = 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """The GPUs it may be on."""
        return (self.home,) if self.dim < 0 else (self.home, self.moved)


@dataclass(frozen=True)
class _Step:
    """One task. Users: (2 x task, + 1 for it when moved; us on the link from home; us on the link from ``moved``)."""

    task: int
    duration_us: int
    where: _Where | None
    users: tuple[tuple[int, int, int], ...]
    tail_us: int
    """From its end to the step's, at least."""
    ends_us: Times | None = None
    """A served request: when it is done, by the number of decodes moved."""


@dataclass
class _State:
    """Partial placements; us."""

    counts: dict[int, Times]
    free: list[Times]
    ready: dict[int, Times]
    far: Times
    """The latest end that is certain."""

    def __len__(self) -> int:
        return len(self.far)

    def take(self, chosen: NDArray[np.intp]) -> _State:
        """Some of them, or each several times."""
        return _State(
            {dim: count[chosen] for dim, count in self.counts.items()},
            [free[chosen] for free in self.free],
            {task: at[chosen] for task, at in self.ready.items()},
            self.far[chosen],
        )


@dataclass
class Tally:
    """What became of a region's placements: evaluated one by one (as a lower bound at least), or pruned by a bound."""

    evaluated: int = 0
    pruned: dict[str, int] = field(default_factory=dict)

    def prune(self, bound: str, placements: int) -> None:
        """Count what a bound excluded."""
        if placements:
            self.pruned[bound] = self.pruned.get(bound, 0) + placements


Found = tuple[int, tuple[object, ...], Placement]
"""Step time, tie-breaking key, placement."""


def is_calm(region: Region, index: GraphIndex, costs: Costs) -> bool:
    """Whether no transfer before training can meet another on its link, whatever moves: each is over before the next
    task of its GPU ends, so when videos reach their judge depends on the decodes moved alone.
    """
    tasks = index.graph.tasks
    sizes = {data: size for users in index.users for _, data, size in users if data}
    kinds = ("embeddings", "latents", "trajectory", "frames")
    embeddings, latents, trajectory, frames = (costs.transfer_us(sizes.get(kind, 0)) for kind in kinds)
    sent = (embeddings * region.actors + latents + trajectory, frames * region.rewards)
    between = (t for t in tasks if t.kind in ("generate", "vae_decode", "old_replay", "ref_replay", "grad_replay"))
    return max(sent) <= min(costs.task_us(task, 0) for task in between)


class Sweep:
    """One region, made ready once. ``exact_us`` gives a placement's step time; ``served_us`` the end of every served
    request (by task) for a number of decodes moved, where there are requests.
    """

    def __init__(
        self,
        region: Region,
        index: GraphIndex,
        costs: Costs,
        assign: Assigner,
        exact_us: Callable[[Placement], int],
        served_us: Callable[[int], Mapping[str, int]] | None = None,
    ) -> None:
        graph = index.graph
        self.region, self.assign, self.lanes, self.most = region, assign, len(graph.lanes), region.most
        self.exact_us, self.served_us = exact_us, served_us
        rollouts = {assign.lanes.index(home) for task, _, home, *_ in assign.tasks if task.startswith("generate:")}
        self._others = sorted(rollouts - {0})
        """Actors that roll out, and so hold the policy whatever moves, besides the one that updates."""
        self.steps = self._steps(graph, index, costs)
        durations = [step.duration_us for step in self.steps]
        self.work_us = [sum(durations[k:]) for k in range(len(durations) + 1)]
        self.last_us = 0 if region.workload.selects else durations[-1]
        """The last update, where all other work is over before it: dropped candidates' replays may run on."""

    def optimum(self, rivals: list[Found], tally: Tally) -> list[Found]:
        """The two best of this region, unless ``rivals`` (the two best elsewhere) beat them: then the best it met.

        Every placement of the region is counted in ``tally``. Whatever is pruned is no better than the second best of
        region and rivals together.
        """
        own: list[Found] = []
        for lower_us, placement in self._dive():
            if lower_us <= _limit(rivals, own) or not own:
                own = _better(own, placement, self.exact_us(placement))
        near: list[tuple[int, Placement]] = []
        limit_us = _limit(rivals, own)
        for state in self._leaves(limit_us, tally):
            tally.evaluated += len(state)
            near += [(int(state.far[n]), self._placement(state, int(n))) for n in np.flatnonzero(state.far <= limit_us)]
        for lower_us, placement in sorted(near, key=lambda item: (item[0], item[1].key())):
            if lower_us > _limit(rivals, own):
                break
            own = _better(own, placement, self.exact_us(placement))
        return own

    # -- the graph as steps ------------------------------------------------------------------------------------

    def _steps(self, graph: StepGraph, index: GraphIndex, costs: Costs) -> list[_Step]:
        where = self._where(graph)
        order, ends = self._order(graph, index), self._served(graph)
        tails = self._tails(graph, index, costs, order)
        return [
            _Step(
                n,
                _duration_us(graph.tasks[n], costs),
                where[n],
                tuple(self._users(n, where, index, costs)),
                tails[n],
                ends.get(graph.tasks[n].id),
            )
            for n in order
        ]

    def _served(self, graph: StepGraph) -> dict[str, Times]:
        requests = [task.id for task in graph.of_kind(REQUEST)]
        if not requests or self.served_us is None:
            return {}
        tables = [self.served_us(moved) for moved in range(self.most[0] + 1)]
        return {task: np.array([table[task] for table in tables], dtype=np.int64) for task in requests}

    def _where(self, graph: StepGraph) -> list[_Where | None]:
        w, lanes = self.region.workload, {lane.name: n for n, lane in enumerate(graph.lanes)}
        found: dict[str, _Where] = {}
        for name, movable, home, follows, _ in self.assign.tasks:
            task, here = graph.by_id[name], lanes[home]
            i = task.candidate
            dim = above = -1
            if movable and i is not None and task.kind in ("vae_decode", "grad_replay", "old_replay", "ref_replay"):
                m = w.mini_batch_of(i)
                first = task.kind == "vae_decode"
                dim = 0 if first else 1 + m if task.kind == "grad_replay" else 1 + w.mini_batches + m
                above = i if first else w.mini_batch_members(m).stop - 1 - i
            reward = self.region.actors + (i or 0) % self.region.rewards
            found[name] = found[follows] if follows else _Where(here, reward, dim, above) if dim >= 0 else _Where(here)
        for name, home in self.assign.requests.items():
            found[name] = _Where(lanes[home])
        return [found.get(task.id) for task in graph.tasks]

    def _order(self, graph: StepGraph, index: GraphIndex) -> list[int]:
        """The order of all queues, requests after the decodes, the controller's own tasks as soon as they can be."""
        missing, order = list(index.needs), []

        def done(n: int) -> None:
            order.append(n)
            for user, _, _ in index.users[n]:
                missing[user] -= 1
                if not missing[user] and graph.tasks[user].kind in CONTROL_KINDS:
                    done(user)

        early = [name for name, *_, is_early in self.assign.tasks if is_early]
        late = [name for name, *_, is_early in self.assign.tasks if not is_early]
        for name in (*early, *self.assign.requests, *late):
            n = index.index[name]
            if missing[n]:
                raise ValueError(f"task {name} stands in a queue before something it needs")
            done(n)
        return order

    def _users(
        self, n: int, where: list[_Where | None], index: GraphIndex, costs: Costs
    ) -> Iterator[tuple[int, int, int]]:
        """An update, on the first actor, sends to the others one by one, and to reward GPUs after them."""
        here = where[n]
        for user, data, size in index.users[n]:
            there = where[user]
            for side, lane in enumerate(there.lanes if there else (-1,)):
                us = costs.transfer_us(size) if data and here and there else 0
                if index.update[n] and lane > 0:
                    us *= sum(actor <= lane for actor in self._others) + (lane >= self.region.actors)
                delays = [us if lane != from_lane else 0 for from_lane in (here.lanes if here else (lane,))]
                yield 2 * user + side, delays[0], delays[-1]

    def _tails(self, graph: StepGraph, index: GraphIndex, costs: Costs, order: list[int]) -> list[int]:
        """Longest way to the end, without links; later mini-batches train whole candidates in rounds."""
        w = self.region.workload
        us = [_duration_us(task, costs) for task in graph.tasks]
        sync_us = costs.transfer_us(index.adapter_bytes) * len(self._others)
        replay = {m: costs.task_us(t, 0) for t in graph.of_kind("grad_replay") if (m := t.mini_batch) is not None}
        rounds = [-(-len(w.trained_members(m)) // self.lanes) for m in range(w.mini_batches)]
        tails = [0] * len(us)
        for n in reversed(order):
            tails[n] = max((us[user] + tails[user] for user, _, _ in index.users[n]), default=0)
            task = graph.tasks[n]
            if task.kind == "update" and task.mini_batch is not None and not index.users[n]:
                tails[n] = sync_us
            elif task.kind == "update" and task.mini_batch is not None:
                m = task.mini_batch + 1
                tails[n] += (rounds[m] - 1) * replay[m]
        return tails

    # -- sweeping ----------------------------------------------------------------------------------------------

    def _start(self) -> _State:
        zero = np.zeros(1, dtype=np.int64)
        return _State({}, [zero] * self.lanes, {}, zero)

    def _advance(self, s: _State, step: _Step) -> None:
        """One task of every placement."""
        here, late = step.where, None
        if here is None:
            end = s.ready.pop(2 * step.task, s.far * 0)
        elif step.ends_us is not None:
            end = step.ends_us[s.counts[0]]
            s.free[here.home] = np.maximum(s.free[here.home], end)
            s.ready.pop(2 * step.task)
        elif here.dim < 0:
            start = s.free[here.home]
            if 2 * step.task in s.ready:
                start = np.maximum(start, s.ready.pop(2 * step.task))
            end = s.free[here.home] = start + step.duration_us
        else:
            late = s.counts[here.dim] > here.above
            at_home, moved = s.free[here.home], s.free[here.moved]
            start = np.where(late, moved, at_home)
            if 2 * step.task in s.ready:
                ready = np.where(late, s.ready.pop(2 * step.task + 1), s.ready.pop(2 * step.task))
                start = np.maximum(start, ready)
            end = start + step.duration_us
            s.free[here.moved], s.free[here.home] = np.where(late, end, moved), np.where(late, at_home, end)
        s.far = np.maximum(s.far, end + step.tail_us)
        for user, from_home_us, from_moved_us in step.users:
            if late is None or from_home_us == from_moved_us:
                at = end + from_home_us
            else:
                at = end + np.where(late, from_moved_us, from_home_us)
            before = s.ready.get(user)
            s.ready[user] = at if before is None else np.maximum(before, at)

    def _missing(self, s: _State, step: _Step) -> int | None:
        """The count that has to be chosen before a step."""
        dim = 0 if step.ends_us is not None else -1 if step.where is None else step.where.dim
        return dim if dim >= 0 and dim not in s.counts else None

    def _branch(self, s: _State, dim: int) -> _State:
        values = self.most[dim] + 1
        branched = s.take(np.repeat(np.arange(len(s)), values))
        branched.counts[dim] = np.tile(np.arange(values, dtype=np.int64), len(s))
        return branched

    def _below(self, s: _State) -> int:
        """Placements below each partial one."""
        return math.prod(most + 1 for dim, most in enumerate(self.most) if dim not in s.counts and most)

    def _bounds(self, s: _State, k: int) -> dict[str, Times]:
        """Lower bounds before step ``k``: what is certain to come after; all work left, spread over all GPUs."""
        work = (sum(s.free[1:], s.free[0]) + self.work_us[k] - self.last_us) // self.lanes + self.last_us
        return {"chain": s.far, "work": work}

    def _dive(self) -> Iterator[tuple[int, Placement]]:
        """Good placements and their lower bounds, by keeping the most promising partial ones only."""
        s = self._start()
        for k, step in enumerate(self.steps):
            dim = self._missing(s, step)
            if dim is not None:
                s = self._branch(s.take(self._promising(s, k)), dim)
            self._advance(s, step)
        for n in self._promising(s, len(self.steps))[:8]:
            yield int(s.far[n]), self._placement(s, int(n))

    def _promising(self, s: _State, k: int) -> NDArray[np.intp]:
        return np.argsort(np.maximum.reduce(list(self._bounds(s, k).values())), kind="stable")[:BEAM]

    def _leaves(self, limit_us: float, tally: Tally) -> Iterator[_State]:
        """Whole placements, in chunks, that no bound has excluded on the way."""
        stack = [(0, self._start())]
        while stack:
            k, s = stack.pop()
            while k < len(self.steps) and len(s):
                dim = self._missing(s, self.steps[k])
                if dim is None:
                    self._advance(s, self.steps[k])
                    k += 1
                    continue
                s = self._pruned(s, k, limit_us, tally)
                piece = max(1, CHUNK // (self.most[dim] + 1))
                for start in range(piece, len(s), piece):
                    stack.append((k, s.take(np.arange(start, min(start + piece, len(s))))))
                s = self._branch(s.take(np.arange(min(piece, len(s)))), dim)
            if len(s):
                yield s

    def _pruned(self, s: _State, k: int, limit_us: float, tally: Tally) -> _State:
        """Those that no bound excludes; a placement counts for the first bound that excludes it."""
        keep = np.ones(len(s), dtype=bool)
        for name, bound in self._bounds(s, k).items():
            kept = keep & (bound <= limit_us)
            tally.prune(name, int(np.count_nonzero(keep) - np.count_nonzero(kept)) * self._below(s))
            keep = kept
        return s.take(np.flatnonzero(keep))

    def _placement(self, s: _State, n: int) -> Placement:
        return self.region.placement([int(s.counts[d][n]) if d in s.counts else 0 for d in range(len(self.most))])


def _duration_us(task: Task, costs: Costs) -> int:
    """A served request has no duration of its own: its end is told."""
    return 0 if task.kind in (*CONTROL_KINDS, REQUEST) else costs.task_us(task, 0)


def _better(best: list[Found], placement: Placement, step_us: int) -> list[Found]:
    """The two best of what there was and one more."""
    if any(placement == other for _, _, other in best):
        return best
    return two_best([*best, (step_us, placement.key(), placement)])


def two_best(found: list[Found]) -> list[Found]:
    """By step time, then by what moves least."""
    return sorted(found, key=lambda item: item[:2])[:2]


def _limit(rivals: list[Found], own: list[Found]) -> float:
    """Step time of the second best so far: what is above it is neither winner nor runner-up."""
    best = two_best([*rivals, *own])
    return best[1][0] if len(best) == 2 else math.inf
