"""The planner: workload, cluster and profile in; plan and certificate out.

It searches the count space, then simulates every other schedule at the plan's own GPU split and at each schedule's
own best one, so that a gain is stated over the best schedule a user could have without reward-asynchronous training.
The plan's best schedule is the fastest of all, ours or not; on a tie, the one that is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagebreaker.placement.bounds import StepCosts, any_schedule_us
from stagebreaker.placement.certificate import Certificate, certify
from stagebreaker.placement.search import SearchResult, search
from stagebreaker.placement.space import SCHEDULE, Space
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import Placement, Plan, ScheduledPlan, Scoring
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.timeline import Timeline
from stagebreaker.sim.workload import Cluster, Workload


@dataclass(frozen=True)
class ScheduleSummary:
    """One row of the schedule table; utilisations are busy shares, None where a role has no GPU of its own."""

    step_us: int
    best_split_step_us: int
    speedup_vs_colocated: float
    speedup_vs_async_reward: float
    speedup_vs_best_baseline: float
    actor_utilisation: float | None
    reward_utilisation: float | None
    gap: float | None
    """Step time over the bound for any schedule, less 1."""


@dataclass(frozen=True)
class Planned:
    """A finished planning problem."""

    plan: Plan
    certificate: Certificate
    result: SearchResult
    timelines: dict[str, Timeline]
    graphs: dict[str, StepGraph]
    summary: dict[str, ScheduleSummary]
    best_baseline: str
    any_schedule_bound_us: int


def make_plan(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    split: tuple[int, int] | None = None,
    scoring: tuple[Scoring, ...] = ("one_batch",),
    tick: Callable[[int], None] = lambda _: None,
) -> Planned:
    """Find the best placement and compare every schedule with it."""
    workload.check_profile(profile)
    gpus = len(cluster.gpus)
    space = Space.of(workload, gpus, split, scoring)
    result = search(workload, cluster, profile, space, tick)
    placements = {SCHEDULE: result.best.best}
    best_split = {SCHEDULE: result.best.step_us}
    own = result.best.best
    timelines, graphs, scheduled = {}, {}, {}
    for name in SCHEDULES:
        placements.setdefault(name, _at_split(name, own.actors, own.rewards))
        graph, assignment = build(workload, placements[name])
        timeline = simulate(graph, assignment, profile, cluster, workload.trained_steps)
        if name not in best_split:
            best_split[name] = _best_split_us(name, workload, cluster, profile, gpus)
        timelines[name], graphs[name] = timeline, graph
        scheduled[name] = ScheduledPlan(
            placement=placements[name],
            step_us=timeline.makespan_us,
            lane_of=dict(assignment.lane_of),
            order=dict(assignment.order),
            best_split_step_us=best_split[name],
        )
    best = min(SCHEDULES, key=lambda n: (scheduled[n].step_us, SCHEDULES[n].ours, list(SCHEDULES).index(n)))
    baseline = min(
        (n for n in SCHEDULES if not SCHEDULES[n].ours),
        key=lambda n: (best_split[n], list(SCHEDULES).index(n)),
    )
    anything = any_schedule_us(workload, gpus, StepCosts(workload, profile, cluster.gpus[0].kind))
    plan = Plan(
        best=best,
        lower_bound_us=result.lower_bound_us if best == SCHEDULE else anything,
        workload=workload,
        cluster=cluster,
        profile=profile,
        workload_sha256=workload.digest(),
        profile_sha256=profile.digest(),
        schedules=scheduled,
    )
    summary = _summaries(scheduled, timelines, graphs, best_split[baseline], anything)
    certificate = certify(workload, cluster, profile, result)
    return Planned(plan, certificate, result, timelines, graphs, summary, baseline, anything)


def _at_split(name: str, actors: int, rewards: int) -> Placement:
    return Placement(schedule=name, actors=actors, rewards=rewards, scoring="on_arrival")


def _best_split_us(name: str, workload: Workload, cluster: Cluster, profile: Profile, gpus: int) -> int:
    splits = [(gpus - 1, 1)] if SCHEDULES[name].everywhere else [(a, gpus - a) for a in range(1, gpus)]
    steps = []
    for actors, rewards in splits:
        graph, assignment = build(workload, _at_split(name, actors, rewards))
        steps.append(simulate(graph, assignment, profile, cluster, workload.trained_steps).makespan_us)
    return min(steps)


def _summaries(
    scheduled: dict[str, ScheduledPlan],
    timelines: dict[str, Timeline],
    graphs: dict[str, StepGraph],
    baseline_us: int,
    bound_us: int,
) -> dict[str, ScheduleSummary]:
    colocated, async_reward = scheduled["colocated"].step_us, scheduled["async_reward"].step_us
    return {
        name: ScheduleSummary(
            step_us=item.step_us,
            best_split_step_us=item.best_split_step_us or item.step_us,
            speedup_vs_colocated=colocated / item.step_us,
            speedup_vs_async_reward=async_reward / item.step_us,
            speedup_vs_best_baseline=baseline_us / item.step_us,
            actor_utilisation=timelines[name].utilisation("actor", graphs[name]),
            reward_utilisation=timelines[name].utilisation("reward", graphs[name]),
            gap=item.step_us / bound_us - 1 if bound_us else None,
        )
        for name, item in scheduled.items()
    }
