"""Certificate: what was searched, what was found, and enough to check it again from nothing.

``verify`` counts the space again (small regions by listing them), evaluates the winner and the runner-up with the
max-plus recurrence (other code than the engine and than branch and bound, where nothing is served dynamically), looks
for a better placement among the winner's neighbours and at random, prunes again what was pruned, counts again what is
over a GPU's memory, and compares the bounds. It raises no error: it returns the list of what does not match.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, ClassVar

from pydantic import Field

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.search import SearchResult, search
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.document import Document, InputError, Model
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.engine import Costs, simulate
from stagebreaker.sim.memory import Memory
from stagebreaker.sim.plan import Placement, Scoring
from stagebreaker.sim.recurrence import recurrence_us
from stagebreaker.sim.schedules import Assigner, build, build_graph
from stagebreaker.sim.workload import Cluster, Workload

Count = Annotated[int, Field(ge=0)]


class CertifiedRegion(Model):
    """One GPU split and scoring mode; ``size`` = simulated + evaluated + all pruned + all infeasible."""

    actors: Count
    rewards: Count
    scoring: Scoring
    size: Count
    simulated: Count
    best: Placement
    step_us: Count
    bounds_us: dict[str, Count]
    infeasible: Count = 0
    evaluated: Count = 0
    pruned: dict[str, Count] = Field(default_factory=dict)

    @property
    def bounded(self) -> bool:
        """Branch and bound went through it; else everything that fits was simulated."""
        return self.simulated == 0


class LargeRegion(Model):
    """A GPU split and scoring mode of which no placement fits into memory."""

    actors: Count
    rewards: Count
    scoring: Scoring
    size: Count


class Certificate(Document):
    """certificate.json."""

    WHAT: ClassVar[str] = "certificate"
    formula: str
    workload: Workload
    cluster: Cluster
    profile: Profile
    space_size: Count
    simulated: Count
    evaluated: Count
    pruned: dict[str, Count]
    infeasible: dict[str, Count]
    best: Placement | None
    """None, as ``step_us``: no placement fits into memory."""
    step_us: Count | None
    runner_up: Placement | None
    runner_up_step_us: Count | None
    lower_bound_us: Count
    regions: tuple[CertifiedRegion, ...]
    too_large: tuple[LargeRegion, ...] = ()


FORMULA = (
    "sum over GPU splits and scoring modes of (B+1) x prod_m(|mb_m|+1) [x prod_m(|mb_m|+1) with forward-only replays]"
)


def certify(workload: Workload, cluster: Cluster, profile: Profile, result: SearchResult) -> Certificate:
    """Write down a finished search."""
    best = result.best if result.regions else None
    others = [(r.step_us, r.best.key(), r.best) for r in result.regions if r is not best]
    others += [(r.runner_up[0], r.runner_up[1].key(), r.runner_up[1]) for r in result.regions if r.runner_up]
    second = min(others, key=lambda item: item[:2], default=None)
    regions = tuple(
        CertifiedRegion(
            actors=r.region.actors,
            rewards=r.region.rewards,
            scoring=r.region.scoring,
            size=r.region.size,
            simulated=r.simulated,
            best=r.best,
            step_us=r.step_us,
            bounds_us=r.bounds,
            infeasible=r.infeasible,
            evaluated=r.evaluated,
            pruned=dict(r.pruned),
        )
        for r in result.regions
    )
    return Certificate(
        formula=FORMULA,
        workload=workload,
        cluster=cluster,
        profile=profile,
        space_size=result.space.size,
        simulated=result.simulated,
        evaluated=result.evaluated,
        pruned=result.pruned,
        infeasible={"memory": result.infeasible} if result.infeasible else {},
        best=best.best if best else None,
        step_us=best.step_us if best else None,
        runner_up=second[2] if second else None,
        runner_up_step_us=second[0] if second else None,
        lower_bound_us=result.lower_bound_us,
        regions=regions,
        too_large=tuple(
            LargeRegion(actors=a, rewards=b, scoring=mode, size=size)
            for a, b, mode, size in (
                (r.region.actors, r.region.rewards, r.region.scoring, r.region.size) for r in result.too_large
            )
        ),
    )


def verify(certificate: Certificate, samples: int = 50) -> list[str]:
    """What in the certificate cannot be confirmed; empty if all of it can."""
    c = certificate
    problems = [] if c.formula == FORMULA else [f"formula is not {FORMULA!r}"]
    problems += _verify_pruning(c)
    accounted = c.simulated + c.evaluated + sum(c.pruned.values()) + sum(c.infeasible.values())
    if accounted != c.space_size:
        problems.append(f"space_size={c.space_size} but {accounted} placements are accounted for")
    everything: list[CertifiedRegion | LargeRegion] = [*c.regions, *c.too_large]
    size, over = (
        sum(r.size for r in everything),
        sum(r.infeasible for r in c.regions) + sum(r.size for r in c.too_large),
    )
    if size != c.space_size:
        problems.append(f"space_size={c.space_size} but the regions add up to {size}")
    if over != sum(c.infeasible.values()) or set(c.infeasible) - {"memory"}:
        problems.append(f"infeasible={c.infeasible} but over the regions {over} placements are over a GPU's memory")
    for what, claimed, added in (
        ("simulated", c.simulated, sum(r.simulated for r in c.regions)),
        ("evaluated", c.evaluated, sum(r.evaluated for r in c.regions)),
        ("pruned", c.pruned, _pruned(c)),
    ):
        if claimed != added:
            problems.append(f"{what}={claimed} but the regions add up to {added}")
    if not everything or len({(r.actors, r.rewards, r.scoring) for r in everything}) != len(everything):
        return [*problems, "the regions must be at least one, and each another"]
    for region in everything:
        try:
            problems += _verify_region(c, region, samples)
        except InputError as error:  # a region or placement that this workload and cluster do not have
            problems.append(f"{_region_name(region)}: {error}")
    if not c.regions:
        empty = (c.best, c.step_us, c.runner_up, c.runner_up_step_us, c.lower_bound_us) == (None, None, None, None, 0)
        return problems + ([] if empty else ["no region has a placement that fits, but there is a best"])
    return problems + _verify_winner(c)


def _verify_pruning(c: Certificate) -> list[str]:
    """Branch and bound once more: the same placements must be excluded by the same bounds."""
    if not any(r.bounded for r in c.regions):
        return []
    try:
        space = Space(tuple(Region(c.workload, r.actors, r.rewards, r.scoring) for r in c.regions))
        again = search(c.workload, c.cluster, c.profile, space, method="bound")
    except (InputError, RuntimeError) as error:
        return [f"the search cannot be repeated: {error}"]
    problems = []
    for claimed, found in zip(c.regions, again.regions, strict=False):
        if claimed.bounded and (claimed.evaluated, claimed.pruned) != (found.evaluated, dict(found.pruned)):
            problems.append(
                f"{_region_name(claimed)}: evaluated={claimed.evaluated} pruned={claimed.pruned}, again it is "
                f"{found.evaluated} and {dict(found.pruned)}"
            )
    return problems


def _pruned(c: Certificate) -> dict[str, int]:
    names = {name for r in c.regions for name in r.pruned}
    return {name: sum(r.pruned.get(name, 0) for r in c.regions) for name in names}


def _verify_winner(c: Certificate) -> list[str]:
    """The claims over all regions; what they rest on has been checked region by region."""
    problems = []
    first = min(c.regions, key=lambda r: (r.step_us, r.best.key()))
    bound_us = min(max(r.bounds_us.values(), default=0) for r in c.regions)
    if c.step_us != first.step_us:
        problems.append(f"step_us={c.step_us} is not the least of the regions' ({first.step_us})")
    if c.step_us is None or c.best is None:
        return [*problems, f"best is missing, the best of the regions is {_short(first.best)}"]
    if c.best != first.best:
        problems.append(f"best is {_short(c.best)}, the best of the regions is {_short(first.best)}")
    if c.lower_bound_us != bound_us:
        problems.append(f"lower_bound_us={c.lower_bound_us} but the regions' bounds give {bound_us}")
    if c.lower_bound_us > c.step_us:
        problems.append(f"lower_bound_us={c.lower_bound_us} is above step_us={c.step_us}")
    alone = c.simulated + c.evaluated + sum(c.pruned.values()) == 1
    if (c.runner_up is None) != (c.runner_up_step_us is None) or (c.runner_up is None) != alone:
        problems.append("runner_up and runner_up_step_us must both be there, unless there is one placement only")
    elif c.runner_up is not None and c.runner_up_step_us is not None:
        known = {
            (r.actors, r.rewards, r.scoring): Region(c.workload, r.actors, r.rewards, r.scoring) for r in c.regions
        }
        region = known.get((c.runner_up.actors, c.runner_up.rewards, c.runner_up.scoring))
        if region is None or not region.contains(c.runner_up):
            return [*problems, f"runner_up {_short(c.runner_up)} is not a placement of the space"]
        others = [(r.step_us, r.best.key()) for r in c.regions if r.best != c.best]
        if any(other < (c.runner_up_step_us, c.runner_up.key()) for other in others):
            problems.append(f"runner_up {_short(c.runner_up)} is beaten by the best of another region")
        if (c.runner_up_step_us, c.runner_up.key()) <= (c.step_us, c.best.key()):
            problems.append(f"runner_up {_short(c.runner_up)} comes before best {_short(c.best)}")
        problems += _verify_claim(c, c.runner_up, c.runner_up_step_us)
    return problems


def _verify_claim(c: Certificate, placement: Placement, claimed_us: int) -> list[str]:
    try:
        found = evaluate(c, placement)
    except InputError as error:
        return [f"placement {_short(placement)}: {error}"]
    graph, assignment = build(c.workload, placement)
    budget = Memory(c.workload, graph, c.profile, c.cluster).worst(assignment)
    if budget is not None:
        return [f"placement {_short(placement)} does not fit: {budget.short()}"]
    if found != claimed_us:
        return [f"placement {_short(placement)} takes {found} us, the certificate says {claimed_us}"]
    return []


def evaluate(c: Certificate, placement: Placement) -> int:
    """Step time by the recurrence, or by the engine where requests are served on arrival."""
    graph, assignment = build(c.workload, placement)
    if placement.scoring == "on_arrival":
        return simulate(graph, assignment, c.profile, c.cluster, c.workload.trained_steps).makespan_us
    return recurrence_us(graph, assignment, Costs(graph, c.profile, c.cluster, c.workload.trained_steps))


def _verify_region(c: Certificate, claimed: CertifiedRegion | LargeRegion, samples: int) -> list[str]:
    a, r, gpus = claimed.actors, claimed.rewards, len(c.cluster.gpus)
    name = _region_name(claimed)
    if a < 1 or r < 1 or a + r > gpus:
        return [f"{name}: no split of {gpus} GPUs into actors and reward GPUs"]
    region = Region(c.workload, a, r, claimed.scoring)
    if isinstance(claimed, CertifiedRegion) and claimed.bounded:
        return _verify_bounded(c, region, claimed, samples)
    listed = list(region.placements())
    fitting = _fitting(c, region, listed)
    problems = []
    if len(listed) != claimed.size:
        problems.append(f"{name}: size={claimed.size} but listing it gives {len(listed)}")
    if isinstance(claimed, LargeRegion):
        return problems + ([f"{name}: {len(fitting)} placements fit into memory"] if fitting else [])
    if len(listed) - len(fitting) != claimed.infeasible:
        problems.append(
            f"{name}: infeasible={claimed.infeasible} but {len(listed) - len(fitting)} are over a GPU's memory"
        )
    if len(fitting) != claimed.simulated:
        problems.append(f"{name}: simulated={claimed.simulated} but {len(fitting)} placements fit into memory")
    if claimed.best not in fitting:
        problems.append(
            f"{name}: best {_short(claimed.best)} is over a GPU's memory"
            if claimed.best in listed
            else f"{name}: best {_short(claimed.best)} is not a placement of this region"
        )
    else:
        problems += _verify_claim(c, claimed.best, claimed.step_us)
    return problems + _verify_bounds(c, region, claimed, fitting, samples)


def _verify_bounded(c: Certificate, region: Region, claimed: CertifiedRegion, samples: int) -> list[str]:
    """A region that went through branch and bound."""
    name, problems = _region_name(claimed), []
    size = math.prod(n + 1 for n in region.most)
    accounted = claimed.evaluated + sum(claimed.pruned.values()) + claimed.infeasible
    if not size == claimed.size == accounted:
        problems.append(f"{name}: {size} placements, the certificate says {claimed.size} and accounts for {accounted}")
    if not region.contains(claimed.best):
        return [*problems, f"{name}: best {_short(claimed.best)} is not a placement of this region"]
    problems += _verify_claim(c, claimed.best, claimed.step_us)
    near = [p for p in region.neighbours(claimed.best) if evaluate(c, p) < (c.step_us or 0)]
    problems += [f"{name}: placement {_short(p)} is faster than the winner" for p in near[:1]]
    draw = random.Random(c.workload.seed)
    drawn = [region.placement([draw.randint(0, n) for n in region.most]) for _ in range(samples)]
    return problems + _verify_bounds(c, region, claimed, drawn, samples)


def _fitting(c: Certificate, region: Region, listed: list[Placement]) -> list[Placement]:
    """The placements that are over no GPU's memory."""
    graph = build_graph(c.workload, region.base())
    memory, assign = Memory(c.workload, graph, c.profile, c.cluster), Assigner(c.workload, region.base(), graph)
    return [p for p in listed if memory.worst(assign(p)) is None] if memory.limited else listed


def _verify_bounds(
    c: Certificate, region: Region, claimed: CertifiedRegion, fitting: list[Placement], samples: int
) -> list[str]:
    """The bounds again, and placements drawn at random: none is faster than the best or the bounds."""
    name, problems = _region_name(claimed), []
    bounds = region_bound(region, StepCosts.on(c.workload, c.profile, c.cluster))
    if bounds != claimed.bounds_us:
        problems.append(f"{name}: the bounds are {bounds}, the certificate says {claimed.bounds_us}")
    for placement in random.Random(c.workload.seed).sample(fitting, min(samples, len(fitting))):
        found = evaluate(c, placement)
        least = (c.step_us or 0) if claimed.bounded else claimed.step_us
        if found < least:
            problems.append(f"{name}: placement {_short(placement)} takes {found} us, less than the best ({least})")
        if found < max(bounds.values()):
            problems.append(f"{name}: placement {_short(placement)} takes {found} us, less than the lower bound")
    return problems


def _region_name(r: CertifiedRegion | LargeRegion) -> str:
    return f"{r.actors}+{r.rewards} {r.scoring}"


def _short(p: Placement) -> str:
    moved = f"vae {p.vae_moved} train {list(p.train_moved)} ref {list(p.ref_moved)} old {list(p.old_moved)}"
    return f"{p.actors}+{p.rewards} {p.scoring} {moved}"
