"""Search: the best placement of the count space, by simulating every one that fits into memory.

Nothing is skipped: each placement is simulated, or counted as over a GPU's memory (``sim.memory``), or the space is
refused by name before the first. Ties go to the placement that moves least (``Placement.key``), so the same input
always gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.memory import Budget, Memory, gigabytes
from stagebreaker.sim.plan import Placement, Scoring
from stagebreaker.sim.schedules import Assigner, build_graph
from stagebreaker.sim.workload import Cluster, Workload

LIMIT = 200_000
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

    ``infeasible``: placements over a GPU's memory, which were not simulated.
    """

    region: Region
    best: Placement
    step_us: int
    runner_up: tuple[int, Placement] | None
    simulated: int
    bounds: dict[str, int]
    infeasible: int = 0


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
    def infeasible(self) -> int:
        """Placements over a GPU's memory."""
        return sum(r.infeasible for r in self.regions) + sum(r.region.size for r in self.too_large)


def search(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    space: Space,
    progress: Progress = quiet,
) -> SearchResult:
    """Simulate every placement that fits. Raises ``InputError`` as ``check_space``."""
    check_space(cluster, space)
    with progress("simulating placements", space.size) as tick:
        found = [_region(workload, cluster, profile, region, tick) for region in space.regions]
    regions = tuple(r for r in found if isinstance(r, RegionResult))
    too_large = tuple(r for r in found if isinstance(r, TooLarge))
    return SearchResult(space, regions, too_large)


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

    def step_us(self, placement: Placement) -> int | Budget:
        """Step time, or the budget that is furthest over its GPU's memory."""
        assignment = self._assign(placement)
        return self._memory.worst(assignment) or step_us(self._index, assignment, self._costs)


def check_space(cluster: Cluster, space: Space) -> None:
    """Raise ``InputError`` for a space over ``LIMIT`` or GPUs of more than one kind."""
    if space.size > LIMIT:
        raise InputError(
            f"the space has {space.size} placements, over the {LIMIT} that are enumerated; narrow it with "
            f"--actors and --rewards, fewer candidates, fewer mini-batches, or a single --scoring mode"
        )
    kinds = sorted({gpu.kind for gpu in cluster.gpus})
    if len(kinds) > 1:
        raise InputError(f"the cluster mixes GPU kinds {', '.join(kinds)}; plan for GPUs of one kind")


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
    bounds = region_bound(region, StepCosts(workload, profile, cluster.gpus[0].kind))
    runner_up = (best[1][0], best[1][2]) if len(best) > 1 else None
    return RegionResult(region, best[0][2], best[0][0], runner_up, simulated, bounds, infeasible)
