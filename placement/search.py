"""Search: the best placement of the count space, and what became of every other one.

Small spaces are simulated whole. In larger ones regions with queues in fixed order go through branch and bound
(``sweep``); SimPy then confirms winner, runner-up and a sample of what was excluded. Other large ones (a memory to be
kept, GPUs of several kinds, busy links) are refused by name before anything is simulated. Each placement is simulated,
evaluated, pruned by a named bound, or counted as over a GPU's memory (``sim.memory``). Ties go to the placement that
moves least (``Placement.key``), so the same input always gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.space import Region, Space
from stagebreaker.placement.sweep import Found, Sweep, Tally, is_calm, two_best
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import REQUEST
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, run, step_us
from stagebreaker.sim.memory import Budget, Memory, gigabytes
from stagebreaker.sim.plan import Placement, Scoring
from stagebreaker.sim.recurrence import Recurrence
from stagebreaker.sim.schedules import Assigner, build_graph
from stagebreaker.sim.workload import Cluster, Workload

LIMIT = 200_000
"""How many placements are simulated at most."""
SMALL = 5_000
"""Spaces up to this size are simulated whole unless asked otherwise."""
SAMPLE = 32
"""Placements of each region under branch and bound that SimPy simulates as a check."""
Method = Literal["auto", "exhaustive", "bound"]
METHODS: tuple[Method, ...] = ("auto", "exhaustive", "bound")
_PREFERRED: tuple[Scoring, ...] = ("one_batch", "on_arrival", "per_mini_batch")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""``with progress(what, total) as advance``, as ``profiles.cli.progress``."""


@contextmanager
def quiet(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress that nobody sees."""
    yield lambda _: None


@dataclass(frozen=True)
class RegionResult:
    """What the search found in one region; ``bounds`` are lower bounds in us by name.

    ``infeasible``: placements over a GPU's memory, which were not simulated. Under branch and bound ``best`` is the
    best that was met: the region's own optimum, unless a bound or another region excluded that.
    """

    region: Region
    best: Placement
    step_us: int
    runner_up: tuple[int, Placement] | None
    simulated: int
    bounds: dict[str, int]
    infeasible: int = 0
    evaluated: int = 0
    pruned: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TooLarge:
    """A region of which no placement fits: the one that lacks least, and its GPU that lacks most."""

    region: Region
    nearest: Placement
    budget: Budget


@dataclass(frozen=True)
class SearchResult:
    """The optimum over all regions, with everything needed to certify it.

    ``regions`` are those with a placement that fits, ``too_large`` the others; there may be no ``best``.
    """

    space: Space
    regions: tuple[RegionResult, ...]
    too_large: tuple[TooLarge, ...] = ()

    @property
    def best(self) -> RegionResult:
        """The region with the optimum. Raises ``InputError`` if no placement fits into memory."""
        if not self.regions:
            raise InputError(self.nothing_fits())
        return min(self.regions, key=lambda r: (r.step_us, r.best.key()))

    @property
    def lower_bound_us(self) -> int:
        """No placement that fits is faster: the least over regions of each region's largest bound; 0 if none fits."""
        return min((max(result.bounds.values()) for result in self.regions), default=0)

    @property
    def nearest(self) -> TooLarge:
        """Of the regions where nothing fits, the one that lacks least."""
        return min(self.too_large, key=lambda r: (r.budget.over_bytes, r.nearest.key()))

    def nothing_fits(self) -> str:
        """What to say then: the placement that lacks least, and its tightest GPU."""
        found = self.nearest
        return (
            f"none of the {self.space.size} placements fits into memory; the nearest, on {found.region.actors} actor + "
            f"{found.region.rewards} reward GPUs, lacks {gigabytes(found.budget.over_bytes)}: {found.budget.short()}; "
            f"take GPUs with more memory, lower lora_rank or resolution, or more mini_batches"
        )

    @property
    def simulated(self) -> int:
        """Placements simulated."""
        return sum(result.simulated for result in self.regions)

    @property
    def evaluated(self) -> int:
        """Placements evaluated by branch and bound."""
        return sum(result.evaluated for result in self.regions)

    @property
    def pruned(self) -> dict[str, int]:
        """Placements excluded, by bound."""
        names = sorted({name for result in self.regions for name in result.pruned})
        return {name: sum(result.pruned.get(name, 0) for result in self.regions) for name in names}

    @property
    def infeasible(self) -> int:
        """Placements over a GPU's memory."""
        return sum(r.infeasible for r in self.regions) + sum(r.region.size for r in self.too_large)


def search(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    space: Space,
    progress: Progress = quiet,
    method: Method = "auto",
) -> SearchResult:
    """The optimum of a space. Raises ``InputError`` as ``check_space``."""
    check_space(workload, cluster, profile, space, method)
    bounded = {r for r in space.regions if _is_bounded(workload, cluster, profile, space, r, method)}
    found: dict[Region, RegionResult | TooLarge] = {}
    with progress("searching placements", space.size) as tick:
        for region in space.regions:
            if region not in bounded:
                found[region] = _region(workload, cluster, profile, region, tick)
        found |= _branch_and_bound(workload, cluster, profile, bounded, list(found.values()), tick)
    in_order = [found[region] for region in space.regions]
    regions = tuple(r for r in in_order if isinstance(r, RegionResult))
    return SearchResult(space, regions, tuple(r for r in in_order if isinstance(r, TooLarge)))


def _is_bounded(
    workload: Workload, cluster: Cluster, profile: Profile, space: Space, region: Region, method: Method
) -> bool:
    """Whether a region goes through branch and bound: memory must be of no concern, links calm if a judge serves."""
    if method == "exhaustive" or (method == "auto" and space.size <= SMALL):
        return False
    return _Simulated(workload, cluster, profile, region).can_sweep


def _branch_and_bound(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    regions: Iterable[Region],
    others: Sequence[RegionResult | TooLarge],
    tick: Callable[[int], None],
) -> dict[Region, RegionResult]:
    """The most promising region first, so that its optimum excludes most of the others."""
    costs = StepCosts.on(workload, profile, cluster)
    bounds = {region: region_bound(region, costs) for region in regions}
    best: list[Found] = []
    for r in others:
        if isinstance(r, RegionResult):
            best += [(r.step_us, r.best.key(), r.best)]
            best += [(r.runner_up[0], r.runner_up[1].key(), r.runner_up[1])] if r.runner_up else []
    found = {}
    checks: list[tuple[Region, _Simulated]] = []
    for region in sorted(bounds, key=lambda r: (max(bounds[r].values()), r.actors, r.scoring)):
        simulated, tally = _Simulated(workload, cluster, profile, region), Tally()
        best = two_best(best)
        own = simulated.sweep().optimum(best, tally)
        best += own
        second = (own[1][0], own[1][2]) if len(own) > 1 else None
        found[region] = RegionResult(
            region, own[0][2], own[0][0], second, 0, bounds[region], 0, tally.evaluated, dict(tally.pruned)
        )
        checks.append((region, simulated))
        tick(region.size)
    for region, simulated in checks:
        _confirm(found[region], two_best(best), simulated, workload.seed)
    return found


def _confirm(result: RegionResult, best: list[Found], simulated: _Simulated, seed: int) -> None:
    """SimPy on the best that was met, and on placements at random, none of which may be faster than the winner."""
    claims = {result.best.key(): (result.best, result.step_us)}
    if result.runner_up is not None:
        claims[result.runner_up[1].key()] = result.runner_up[1], result.runner_up[0]
    for placement, step in claims.values():
        if (took := simulated.step_us(placement)) != step:
            raise RuntimeError(f"branch and bound says {step} us of {placement}, the simulator {took}")
    draw = random.Random(f"{seed}:{result.region.actors}:{result.region.scoring}")
    for _ in range(SAMPLE):
        placement = result.region.placement([draw.randint(0, n) for n in result.region.most])
        took = simulated.step_us(placement)
        if not isinstance(took, Budget) and (took, placement.key()) < best[0][:2]:
            raise RuntimeError(f"branch and bound missed {placement}: {took} us")


def probe_scoring(
    workload: Workload, cluster: Cluster, profile: Profile, gpus: int, split: tuple[int, int] | None
) -> Scoring:
    """The scoring mode that looks best on a coarse grid of counts over every GPU split; on a tie, one batch.

    The grid holds the placement that moves nothing, so the mode it picks is never worse than merged_replay. What does
    not fit into memory is left out; if that is all of the grid, one batch.
    """
    members = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
    decodes = sorted({workload.candidates * n // 3 for n in range(4)})
    counts = [(vae, tuple(train)) for vae, *train in product(decodes, *({0, n // 3} for n in members))]
    found: dict[Scoring, int] = {}
    for mode in _PREFERRED:
        steps = []
        for region in Space.of(workload, gpus, split, (mode,)).regions:
            base, simulated = region.base(), _Simulated(workload, cluster, profile, region)
            tried = [simulated.step_us(base.model_copy(update={"vae_moved": v, "train_moved": t})) for v, t in counts]
            steps += [found_us for found_us in tried if not isinstance(found_us, Budget)]
        if steps:
            found[mode] = min(steps)
    return min(found or _PREFERRED[:1], key=lambda mode: (found.get(mode, 0), _PREFERRED.index(mode)))


class _Simulated:
    """One region's graph, made once for all its placements."""

    def __init__(self, workload: Workload, cluster: Cluster, profile: Profile, region: Region) -> None:
        base = region.base()
        graph = build_graph(workload, base)
        self._index, self._assign = GraphIndex(graph, profile), Assigner(workload, base, graph)
        self._costs = Costs(graph, profile, cluster, workload.trained_steps)
        self._memory = Memory(workload, graph, profile, cluster)
        self._region, self._cluster, self._served = region, cluster, bool(graph.of_kind(REQUEST))

    @property
    def can_sweep(self) -> bool:
        """Whether branch and bound is valid here (``sweep``)."""
        if len({gpu.kind for gpu in self._cluster.gpus}) > 1:  # a moved task would have another duration
            return False
        return not self._memory.limited and (not self._served or is_calm(self._region, self._index, self._costs))

    def sweep(self) -> Sweep:
        """Branch and bound over the region."""
        if self._served:
            return Sweep(self._region, self._index, self._costs, self._assign, self._simulated_us, self._served_us)
        recurrence = Recurrence(self._index.graph, self._costs)
        return Sweep(
            self._region, self._index, self._costs, self._assign, lambda p: recurrence.step_us(self._assign(p))
        )

    def _simulated_us(self, placement: Placement) -> int:
        return step_us(self._index, self._assign(placement), self._costs)

    def _served_us(self, decodes_moved: int) -> dict[str, int]:
        """When each request is done if so many decodes move."""
        placement = self._region.placement((decodes_moved, *(0 for _ in self._region.most[1:])))
        timeline = run(self._index, self._assign(placement), self._costs)
        return {row.task: row.end_us for row in timeline.rows if row.kind == REQUEST}

    def step_us(self, placement: Placement) -> int | Budget:
        """Step time, or the budget that is furthest over its GPU's memory."""
        assignment = self._assign(placement)
        return self._memory.worst(assignment) or step_us(self._index, assignment, self._costs)


def check_space(workload: Workload, cluster: Cluster, profile: Profile, space: Space, method: Method = "auto") -> None:
    """Raise ``InputError`` for a space of which more than ``LIMIT`` would be simulated."""
    if space.size <= LIMIT:
        return
    whole = [r for r in space.regions if not _is_bounded(workload, cluster, profile, space, r, method)]
    count = sum(region.size for region in whole)
    if count > LIMIT:
        how = "narrow it with --actors and --rewards, fewer candidates or mini-batches"
        if method == "exhaustive":
            how += ", or leave --search out"
        elif profile.memory_bytes:
            how += ", or leave the cluster's memory_bytes out"
        raise InputError(
            f"{count} of the space's {space.size} placements would be simulated, the limit is {LIMIT}; {how}"
        )


def _region(
    workload: Workload, cluster: Cluster, profile: Profile, region: Region, tick: Callable[[int], None]
) -> RegionResult | TooLarge:
    simulate = _Simulated(workload, cluster, profile, region)
    best: list[tuple[int, tuple[object, ...], Placement]] = []
    nearest: tuple[int, tuple[object, ...], Placement, Budget] | None = None
    simulated = infeasible = 0
    for placement in region.placements():
        if (simulated + infeasible) % 500 == 499:
            tick(500)
        found = simulate.step_us(placement)
        if isinstance(found, Budget):
            infeasible += 1
            if nearest is None or (found.over_bytes, placement.key()) < nearest[:2]:
                nearest = (found.over_bytes, placement.key(), placement, found)
            continue
        simulated += 1
        if len(best) < 2 or found <= best[-1][0]:
            best = sorted([*best, (found, placement.key(), placement)], key=lambda item: item[:2])[:2]
    tick((simulated + infeasible) % 500)
    if nearest is not None and not best:
        return TooLarge(region, nearest[2], nearest[3])
    bounds = region_bound(region, StepCosts.on(workload, profile, cluster))
    runner_up = (best[1][0], best[1][2]) if len(best) > 1 else None
    return RegionResult(region, best[0][2], best[0][0], runner_up, simulated, bounds, infeasible)
