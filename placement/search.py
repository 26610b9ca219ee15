"""Search: the best placement of the count space, by simulating every one.

Nothing is skipped: each placement is simulated, or the space is refused by name before the first. Ties go to the
placement that moves least (``Placement.key``), so the same input always gives the same plan.
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
    progress: Progress = quiet,
) -> SearchResult:
    """Simulate every placement. Raises ``InputError`` as ``check_space``."""
    check_space(cluster, space)
    with progress("simulating placements", space.size) as tick:
        regions = tuple(_region(workload, cluster, profile, region, tick) for region in space.regions)
    return SearchResult(space, regions)


def probe_scoring(
    workload: Workload, cluster: Cluster, profile: Profile, gpus: int, split: tuple[int, int] | None
) -> Scoring:
    """The scoring mode that looks best on a coarse grid of counts over every GPU split; on a tie, one batch.

    The grid holds the placement that moves nothing, so the mode it picks is never worse than merged_replay.
    """
    members = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
    decodes = sorted({workload.candidates * n // 3 for n in range(4)})
    counts = [(vae, tuple(train)) for vae, *train in product(decodes, *({0, n // 3} for n in members))]
    found: dict[Scoring, int] = {}
    for mode in _PREFERRED:
        steps = []
        for region in Space.of(workload, gpus, split, (mode,)).regions:
            base, simulated = region.base(), _Simulated(workload, cluster, profile, region)
            steps += [simulated.step_us(base.model_copy(update={"vae_moved": v, "train_moved": t})) for v, t in counts]
        found[mode] = min(steps)
    return min(_PREFERRED, key=lambda mode: (found[mode], _PREFERRED.index(mode)))


class _Simulated:
    """One region's graph, made once for all its placements."""

    def __init__(self, workload: Workload, cluster: Cluster, profile: Profile, region: Region) -> None:
        base = region.base()
        graph = build_graph(workload, base)
        self._index, self._assign = GraphIndex(graph, profile), Assigner(workload, base, graph)
        self._costs = Costs(graph, profile, cluster, workload.trained_steps)

    def step_us(self, placement: Placement) -> int:
        return step_us(self._index, self._assign(placement), self._costs)


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
) -> RegionResult:
    simulate = _Simulated(workload, cluster, profile, region)
    best: list[tuple[int, tuple[object, ...], Placement]] = []
    simulated = 0
    for placement in region.placements():
        found = simulate.step_us(placement)
        simulated += 1
        if len(best) < 2 or found <= best[-1][0]:
            best = sorted([*best, (found, placement.key(), placement)], key=lambda item: item[:2])[:2]
        if simulated % 500 == 0:
            tick(500)
    tick(simulated % 500)
    bounds = region_bound(region, StepCosts(workload, profile, cluster.gpus[0].kind))
    runner_up = (best[1][0], best[1][2]) if len(best) > 1 else None
    return RegionResult(region, best[0][2], best[0][0], runner_up, simulated, bounds)
