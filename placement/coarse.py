"""Coarse search: a good placement of a count space too large, or wanted too often, to be simulated as a whole.

A grid in every region (GPU split and scoring mode), then descent from the best points, one count at a time. Every
placement is simulated exactly; that a better one was not missed is not proved. Tests compare it with the whole space
where that is quick.
"""

from __future__ import annotations

import math
from itertools import product

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.memory import Memory
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import Assigner, build_graph
from stagebreaker.sim.workload import Cluster, Workload

DESCENTS = 4
"""In how many regions (GPU split and scoring mode) descent starts from the best point of the grid."""
Counts = tuple[int, ...]
"""Decodes moved, then per mini-batch replays moved, then, where there are any, forward-only replays moved."""


class Simulated:
    """Placements of one schedule, split and scoring mode, which share a graph."""

    def __init__(self, base: Placement, workload: Workload, profile: Profile, cluster: Cluster) -> None:
        graph = build_graph(workload, base)
        self._index, self._assign = GraphIndex(graph, profile), Assigner(workload, base, graph)
        self._costs = Costs(graph, profile, cluster, workload.trained_steps)
        self._memory = Memory(workload, graph, profile, cluster)

    def step_us(self, placement: Placement) -> int | None:
        """None: it does not fit into memory."""
        assignment = self._assign(placement)
        if self._memory.worst(assignment) is not None:
            return None
        return step_us(self._index, assignment, self._costs)


def coarse_placement(workload: Workload, profile: Profile, cluster: Cluster, space: Space) -> tuple[Placement, int]:
    """A good placement and its step time in us: the best of a grid in every region, then descent one count at a time.

    Regions whose lower bound is above what was found already are left out. The grid holds the placement that moves
    nothing, so with scoring on arrival in the space the result is never worse than ``merged_replay``. Raises
    ``InputError`` if nothing that is tried fits into memory.
    """
    costs = StepCosts.on(workload, profile, cluster)
    bounds = sorted((max(region_bound(r, costs).values()), n) for n, r in enumerate(space.regions))
    tried: list[tuple[_Descent, Counts]] = []
    best_us = math.inf
    for bound_us, n in bounds:
        if bound_us > best_us:  # nothing in this region, nor in those to come, can be as good
            break
        region = space.regions[n]
        search = _Descent(region, Simulated(region.base(), workload, profile, cluster))
        tried.append((search, min(search.grid(), key=search.cost)))
        best_us = min(best_us, search.cost(tried[-1][1])[0])
    tried.sort(key=lambda item: item[0].cost(item[1]))
    search, counts = min(
        ((search, search.descend(start)) for search, start in tried[:DESCENTS]), key=lambda item: item[0].cost(item[1])
    )
    step = search.cost(counts)[0]
    if step == math.inf:
        raise InputError(f"no placement that was tried on {len(cluster.gpus)} GPUs fits into memory; take larger GPUs")
    return search.placement(counts), int(step)


class _Descent:
    """A search of one region."""

    def __init__(self, region: Region, simulated: Simulated) -> None:
        self.region, self.simulated, self.base = region, simulated, region.base()
        workload = region.workload
        self.train = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
        self.forward = list(region.forward_only) if any(region.forward_only) else []
        self.limits = (workload.candidates, *self.train, *self.forward)
        self._known: dict[Counts, tuple[float, tuple[object, ...]]] = {}

    def placement(self, counts: Counts) -> Placement:
        """The placement that moves these."""
        workload, end = self.region.workload, 1 + len(self.train)
        forward = counts[end:]
        update: dict[str, object] = {"vae_moved": counts[0], "train_moved": counts[1:end]}
        update["old_moved"] = forward if workload.old_logprob_source != "rollout" else ()
        update["ref_moved"] = forward if workload.reference_replay else ()
        return self.base.model_copy(update=update)

    def cost(self, counts: Counts) -> tuple[float, tuple[object, ...]]:
        """Step time in us, infinite where it does not fit; then the order of ties."""
        if counts not in self._known:
            placement = self.placement(counts)
            step = self.simulated.step_us(placement)
            self._known[counts] = (math.inf if step is None else step, placement.key())
        return self._known[counts]

    def grid(self) -> list[Counts]:
        """Thirds of the decodes, none to half of all replays."""
        candidates, forwards = self.region.workload.candidates, (0, 2) if self.forward else (0,)
        return [
            (candidates * v // 3, *(n * t // 6 for n in self.train), *(n * f // 4 for n in self.forward))
            for v, t, f in product(range(4), (0, 2, 3), forwards)
        ]

    def descend(self, at: Counts) -> Counts:
        """Change one count at a time, each to its best value, until none gets better."""
        while True:
            start = at
            for axis, limit in enumerate(self.limits):
                at = min(((*at[:axis], n, *at[axis + 1 :]) for n in range(limit + 1)), key=self.cost)
            if at == start:
                return at
