"""Certificate: what was searched, what was found, and enough to check it again from nothing.

``verify`` recounts the space by listing it, evaluates the winner and the runner-up with the max-plus recurrence (other
code than the engine that found them, where nothing is served dynamically), looks for a better placement at random,
and compares the bounds. It raises no error: it returns the list of what does not match.
"""

from __future__ import annotations

import random
from typing import Annotated, ClassVar

from pydantic import Field

from stagebreaker.placement.bounds import StepCosts, region_bound
from stagebreaker.placement.search import SearchResult
from stagebreaker.placement.space import Region
from stagebreaker.profiles.document import Document, InputError, Model
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.engine import Costs, simulate
from stagebreaker.sim.plan import Placement, Scoring
from stagebreaker.sim.recurrence import recurrence_us
from stagebreaker.sim.schedules import build
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
    best: Placement
    step_us: Count
    runner_up: Placement | None
    runner_up_step_us: Count | None
    lower_bound_us: Count
    regions: tuple[CertifiedRegion, ...]


FORMULA = (
    "sum over GPU splits and scoring modes of (B+1) x prod_m(|mb_m|+1) [x prod_m(|mb_m|+1) with forward-only replays]"
)


def certify(workload: Workload, cluster: Cluster, profile: Profile, result: SearchResult) -> Certificate:
    """Write down a finished search."""
    best = result.best
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
        evaluated=0,
        pruned={},
        infeasible={},
        best=best.best,
        step_us=best.step_us,
        runner_up=second[2] if second else None,
        runner_up_step_us=second[0] if second else None,
        lower_bound_us=result.lower_bound_us,
        regions=regions,
    )


def verify(certificate: Certificate, samples: int = 50) -> list[str]:
    """What in the certificate cannot be confirmed; empty if all of it can."""
    c = certificate
    problems = []
    accounted = c.simulated + c.evaluated + sum(c.pruned.values()) + sum(c.infeasible.values())
    if accounted != c.space_size:
        problems.append(f"space_size={c.space_size} but {accounted} placements are accounted for")
    if sum(r.size for r in c.regions) != c.space_size:
        problems.append(f"space_size={c.space_size} but the regions add up to {sum(r.size for r in c.regions)}")
    if sum(r.simulated for r in c.regions) != c.simulated:
        problems.append(f"simulated={c.simulated} but the regions add up to {sum(r.simulated for r in c.regions)}")
    if not c.regions or len({(r.actors, r.rewards, r.scoring) for r in c.regions}) != len(c.regions):
        return [*problems, "the regions must be at least one, and each another"]
    for region in c.regions:
        try:
            problems += _verify_region(c, region, samples)
        except InputError as error:  # a region or placement that this workload and cluster do not have
            problems.append(f"{_region_name(region)}: {error}")
    return problems + _verify_winner(c)


def _verify_winner(c: Certificate) -> list[str]:
    """The claims over all regions; what they rest on has been checked region by region."""
    problems = []
    first = min(c.regions, key=lambda r: (r.step_us, r.best.key()))
    bound_us = min(max(r.bounds_us.values(), default=0) for r in c.regions)
    if c.step_us != first.step_us:
        problems.append(f"step_us={c.step_us} is not the least of the regions' ({first.step_us})")
    if c.best != first.best:
        problems.append(f"best is {_short(c.best)}, the best of the regions is {_short(first.best)}")
    if c.lower_bound_us != bound_us:
        problems.append(f"lower_bound_us={c.lower_bound_us} but the regions' bounds give {bound_us}")
    if c.lower_bound_us > c.step_us:
        problems.append(f"lower_bound_us={c.lower_bound_us} is above step_us={c.step_us}")
    if (c.runner_up is None) != (c.runner_up_step_us is None) or (c.runner_up is None) != (c.space_size == 1):
        problems.append("runner_up and runner_up_step_us must both be there, unless the space has one placement")
    elif c.runner_up is not None and c.runner_up_step_us is not None:
        if (c.runner_up_step_us, c.runner_up.key()) <= (c.step_us, c.best.key()):
            problems.append(f"runner_up {_short(c.runner_up)} comes before best {_short(c.best)}")
        problems += _verify_claim(c, c.runner_up, c.runner_up_step_us)
    return problems


def _verify_claim(c: Certificate, placement: Placement, claimed_us: int) -> list[str]:
    try:
        found = evaluate(c, placement)
    except InputError as error:
        return [f"placement {_short(placement)}: {error}"]
    if found != claimed_us:
        return [f"placement {_short(placement)} takes {found} us, the certificate says {claimed_us}"]
    return []


def evaluate(c: Certificate, placement: Placement) -> int:
    """Step time by the recurrence, or by the engine where requests are served on arrival."""
    graph, assignment = build(c.workload, placement)
    if placement.scoring == "on_arrival":
        return simulate(graph, assignment, c.profile, c.cluster, c.workload.trained_steps).makespan_us
    return recurrence_us(graph, assignment, Costs(graph, c.profile, c.cluster, c.workload.trained_steps))


def _verify_region(c: Certificate, claimed: CertifiedRegion, samples: int) -> list[str]:
    a, r, gpus = claimed.actors, claimed.rewards, len(c.cluster.gpus)
    if a < 1 or r < 1 or a + r > gpus:
        return [f"{_region_name(claimed)}: no split of {gpus} GPUs into actors and reward GPUs"]
    region = Region(c.workload, a, r, claimed.scoring)
    listed = list(region.placements())
    name = _region_name(claimed)
    problems = []
    if claimed.best not in listed:
        problems.append(f"{name}: best {_short(claimed.best)} is not a placement of this region")
    else:
        problems += _verify_claim(c, claimed.best, claimed.step_us)
    if len(listed) != claimed.size:
        problems.append(f"{name}: size={claimed.size} but listing it gives {len(listed)}")
    bounds = region_bound(region, StepCosts(c.workload, c.profile, c.cluster.gpus[0].kind))
    if bounds != claimed.bounds_us:
        problems.append(f"{name}: the bounds are {bounds}, the certificate says {claimed.bounds_us}")
    drawn = random.Random(c.workload.seed).sample(listed, min(samples, len(listed)))
    for placement in drawn:
        found = evaluate(c, placement)
        if found < claimed.step_us:
            problems.append(
                f"{name}: placement {_short(placement)} takes {found} us, less than the best ({claimed.step_us})"
            )
        if found < max(bounds.values()):
            problems.append(f"{name}: placement {_short(placement)} takes {found} us, less than the lower bound")
    return problems


def _region_name(r: CertifiedRegion) -> str:
    return f"{r.actors}+{r.rewards} {r.scoring}"


def _short(p: Placement) -> str:
    moved = f"vae {p.vae_moved} train {list(p.train_moved)} ref {list(p.ref_moved)} old {list(p.old_moved)}"
    return f"{p.actors}+{p.rewards} {p.scoring} {moved}"
