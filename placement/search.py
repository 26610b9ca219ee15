"""Search: the best placement of the count space, by simulating every one.

Nothing is skipped: each placement is simulated, or the space is refused by name before the first. Ties go to the
placement that moves least (``Placement.key``), so the same input always gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import Assigner, build_graph
from stagebreaker.sim.workload import Cluster, Workload

LIMIT = 200_000


@dataclass(frozen=True)
class RegionResult:
    """What the search found in one region; ``bounds`` are lower bounds in us by name."""

    region: Region
    best: Placement
    step_us: int
    runner_up: tuple[int, Placement] | None
    simulated: int
    bounds: dict[str, int]


@dataclass(frozen=True)
class SearchResult:
    """The optimum over all regions, with everything needed to certify it."""

    space: Space
    regions: tuple[RegionResult, ...]

    @property
    def best(self) -> RegionResult:
        """The region with the optimum."""
        return min(self.regions, key=lambda r: (r.step_us, r.best.key()))

    @property
    def lower_bound_us(self) -> int:
        """No placement in the space is faster: the least over regions of each region's largest bound."""
        return min(max(result.bounds.values()) for result in self.regions)

    @property
    def simulated(self) -> int:
        """Placements simulated."""
        return sum(result.simulated for result in self.regions)


def search(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    space: Space,
    tick: Callable[[int], None] = lambda _: None,
) -> SearchResult:
    """Simulate every placement. ``tick(n)`` reports progress. Raises ``InputError`` for a space over ``LIMIT``."""
    if space.size > LIMIT:
        raise InputError(
            f"the space has {space.size} placements, over the {LIMIT} that are enumerated; narrow it with "
            f"--actors and --rewards, fewer candidates, fewer mini-batches, or a single --scoring mode"
        )
    return SearchResult(space, tuple(_region(workload, cluster, profile, region, tick) for region in space.regions))


def _region(
    workload: Workload, cluster: Cluster, profile: Profile, region: Region, tick: Callable[[int], None]
) -> RegionResult:
    base = region.base()
    graph = build_graph(workload, base)
    index, costs = GraphIndex(graph, profile), Costs(graph, profile, cluster, workload.trained_steps)
    assign = Assigner(workload, base, graph)
    best: list[tuple[int, tuple[object, ...], Placement]] = []
    simulated = 0
    for placement in region.placements():
        found = step_us(index, assign(placement), costs)
        simulated += 1
        if len(best) < 2 or found <= best[-1][0]:
            best = sorted([*best, (found, placement.key(), placement)], key=lambda item: item[:2])[:2]
        if simulated % 500 == 0:
            tick(500)
    tick(simulated % 500)
    bounds = region_bound(region, StepCosts(workload, profile, _one_kind(cluster)))
    runner_up = (best[1][0], best[1][2]) if len(best) > 1 else None
    return RegionResult(region, best[0][2], best[0][0], runner_up, simulated, bounds)


def _one_kind(cluster: Cluster) -> str:
    kinds = sorted({gpu.kind for gpu in cluster.gpus})
    if len(kinds) > 1:
        raise InputError(f"the cluster mixes GPU kinds {', '.join(kinds)}; plan for GPUs of one kind")
    return kinds[0]
