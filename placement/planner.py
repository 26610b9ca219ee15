"""The planner: workload, cluster and profile in; plan and certificate out.

It simulates every other schedule at each GPU split, searches the count space, and compares all at the split of the
winner, so that a gain is stated over the best schedule a user could have without reward-asynchronous training.
The plan's best schedule is the fastest of all, ours or not; on a tie, the one that is not ours. A schedule that does
not fit into memory, that only the simulator can do (``lean``) or that is other mathematics (``one_step_off``) is shown
and never best.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagebreaker.placement.bounds import StepCosts, any_schedule_us
from stagebreaker.placement.certificate import Certificate, certify
from stagebreaker.placement.finer import Finer, refine, starts
from stagebreaker.placement.search import Method, Progress, SearchResult, check_space, probe_scoring, quiet, search
from stagebreaker.placement.space import SCHEDULE, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.memory import Budget, Memory
from stagebreaker.sim.plan import SCORING, Placement, Plan, ScheduledPlan, Scoring
from stagebreaker.sim.schedules import SCHEDULES, build, why_not
from stagebreaker.sim.timeline import Timeline
from stagebreaker.sim.workload import Cluster, Workload


@dataclass(frozen=True)
class ScheduleSummary:
    """One row of the schedule table; utilisations are busy shares, None where a role has no GPU of its own."""

    step_us: int
    best_split_step_us: int
    speedup_vs_colocated: float | None
    speedup_vs_async_reward: float | None
    speedup_vs_best_baseline: float | None
    actor_utilisation: float | None
    reward_utilisation: float | None
    gap: float | None
    """Step time over the bound for any schedule, less 1; None for schedules that it says nothing about."""
    off_policy: bool
    """It trains what an older adapter rolled out: its speedups are over other mathematics."""


@dataclass(frozen=True)
class Planned:
    """A finished planning problem."""

    plan: Plan
    certificate: Certificate
    result: SearchResult
    timelines: dict[str, Timeline]
    graphs: dict[str, StepGraph]
    summary: dict[str, ScheduleSummary]
    best_baseline: str | None
    """None: none of the others fits into memory."""
    any_schedule_bound_us: int
    unfit: dict[str, Budget]
    """Schedules that do not fit at the plan's split: the GPU that lacks most."""
    finer: Finer | None = None
    """What splitting candidates by step found, where it was asked for."""


def make_plan(
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    split: tuple[int, int] | None = None,
    scoring: tuple[Scoring, ...] | None = None,
    progress: Progress = quiet,
    method: Method = "auto",
    finer: bool = False,
    min_gain: float = 0.0,
) -> Planned:
    """Find the best placement and compare every schedule with it. ``InputError`` before the search, not after it,
    unless nothing fits into memory: no placement and, at the split, no other schedule.

    Without ``scoring`` the one mode is searched that looks best on a coarse grid (``search.probe_scoring``). ``finer``
    goes on from the count space's best placements, under every scoring mode, and splits candidates by step. A schedule
    of ours is chosen where it is at least ``min_gain`` (0.02: 2 %) faster than the best that is not.
    """
    workload.check_profile(profile)
    gpus = sum(split) if split else len(cluster.gpus)
    check_space(workload, cluster, profile, Space.of(workload, gpus, split, scoring or ("one_batch",)), method)
    space = Space.of(workload, gpus, split, scoring or (probe_scoring(workload, cluster, profile, gpus, split),))
    splits = [(a, gpus - a) for a in range(1, gpus)]
    names = [n for n in SCHEDULES if why_not(n, workload) is None]
    tried = {n: _best_split(n, splits, workload, cluster, profile) for n in names if n != SCHEDULE}
    others = {n: found for n, found in tried.items() if found is not None}
    result = search(workload, cluster, profile, space, progress, method)
    fine = _refined(result, workload, cluster, profile, gpus, split, progress, method) if finer else None
    best_split = {SCHEDULE: fine.step_us if fine else result.best.step_us} if result.regions else {}
    best_split |= {n: step for n, (step, _) in others.items()}
    if not any(SCHEDULES[n].eligible for n in best_split):
        raise InputError(result.nothing_fits())
    winner = _worthwhile(best_split, min_gain)
    ours = fine.placement if fine else result.best.best if result.regions else result.nearest.nearest
    placements = {SCHEDULE: ours}
    own = others[winner][1] if not (split or winner == SCHEDULE or SCHEDULES[winner].everywhere) else ours
    timelines, graphs, scheduled, unfit = {}, {}, {}, {}
    for name in names:
        if name not in placements:
            variants = _variants(name, own.actors, own.rewards, published=True)
            quickest = _quickest(variants, workload, cluster, profile)
            placements[name] = quickest[1] if quickest else variants[0]
        graph, assignment = build(workload, placements[name])
        timeline = simulate(graph, assignment, profile, cluster, workload.trained_steps)
        timelines[name], graphs[name] = timeline, graph
        budget = Memory(workload, graph, profile, cluster).worst(assignment)
        if budget is not None:
            unfit[name] = budget
        scheduled[name] = ScheduledPlan(
            placement=placements[name],
            step_us=timeline.makespan_us,
            lane_of=dict(assignment.lane_of),
            order=dict(assignment.order),
            best_split_step_us=best_split.get(name),
        )
    fitting = {n: item.step_us for n, item in scheduled.items() if n not in unfit and SCHEDULES[n].eligible}
    if not fitting:
        raise InputError(result.nothing_fits())
    best = _worthwhile(fitting, min_gain)
    theirs = {n: step for n, step in best_split.items() if SCHEDULES[n].eligible and not SCHEDULES[n].ours}
    baseline = _fastest(theirs) if theirs else None
    anything = any_schedule_us(workload, gpus, StepCosts.on(workload, profile, cluster, divisible=finer))
    plan = Plan(
        best=best,
        lower_bound_us=result.lower_bound_us if best == SCHEDULE and not finer else anything,
        workload=workload,
        cluster=cluster,
        profile=profile,
        workload_sha256=workload.digest(),
        profile_sha256=profile.digest(),
        schedules=scheduled,
    )
    summary = _summaries(scheduled, timelines, graphs, best_split[baseline] if baseline else None, anything)
    certificate = certify(workload, cluster, profile, result)
    return Planned(plan, certificate, result, timelines, graphs, summary, baseline, anything, unfit, fine)


def _refined(
    result: SearchResult,
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    gpus: int,
    split: tuple[int, int] | None,
    progress: Progress,
    method: Method,
) -> Finer | None:
    """Splitting candidates by step, from the best of every scoring mode; None if nothing fits into memory."""
    results = [result]
    searched = {region.scoring for region in result.space.regions}
    for mode in (mode for mode in SCORING if mode not in searched):
        space = Space.of(workload, gpus, split, (mode,))
        check_space(workload, cluster, profile, space, method)
        results.append(search(workload, cluster, profile, space, progress, method))
    if not any(one.regions for one in results):
        return None
    placements = starts(results)
    with progress("splitting candidates", len(placements)) as tick:
        return refine(workload, cluster, profile, placements, tick)


AS_PUBLISHED = ("async_reward", "async_train", "merged_replay")
"""Schedules that are shown with scores on arrival, as they were published; others with what suits them best."""


def _variants(name: str, actors: int, rewards: int, published: bool = False) -> list[Placement]:
    """A schedule at a split under every scoring mode that it has; as published, under its own."""
    modes = SCORING[:1] if SCHEDULES[name].everywhere or (published and name in AS_PUBLISHED) else SCORING
    return [Placement(schedule=name, actors=actors, rewards=rewards, scoring=mode) for mode in modes]


def _fastest(steps_us: dict[str, int]) -> str:
    """The fastest eligible schedule; on a tie one that is not ours, one that replays once, the first listed."""
    order = [name for name, s in SCHEDULES.items() if s.eligible]
    eligible = [name for name in steps_us if name in order]
    return min(eligible, key=lambda n: (steps_us[n], SCHEDULES[n].ours, not SCHEDULES[n].merged, order.index(n)))


def _worthwhile(steps_us: dict[str, int], min_gain: float) -> str:
    """The fastest, or, where that is ours and gains less than ``min_gain``, the fastest that is not."""
    fastest = _fastest(steps_us)
    theirs = {n: us for n, us in steps_us.items() if SCHEDULES[n].eligible and not SCHEDULES[n].ours}
    if not theirs or not SCHEDULES[fastest].ours:
        return fastest
    other = _fastest(theirs)
    return other if theirs[other] < steps_us[fastest] * (1 + min_gain) else fastest


def _best_split(
    name: str, splits: list[tuple[int, int]], workload: Workload, cluster: Cluster, profile: Profile
) -> tuple[int, Placement] | None:
    """(step time in us, placement) of a schedule at the split and scoring that suit it best.

    All splits are alike to ``everywhere``. None if it fits into memory at no split.
    """
    everywhere = SCHEDULES[name].everywhere
    variants = [p for a, r in (splits[-1:] if everywhere else splits) for p in _variants(name, a, r)]
    return _quickest(variants, workload, cluster, profile)


def _quickest(
    placements: list[Placement], workload: Workload, cluster: Cluster, profile: Profile
) -> tuple[int, Placement] | None:
    """(step time in us, placement) of the quickest that fits into memory; None if none does."""
    steps = []
    for placement in placements:
        graph, assignment = build(workload, placement)
        if Memory(workload, graph, profile, cluster).worst(assignment) is None:
            timeline = simulate(graph, assignment, profile, cluster, workload.trained_steps)
            steps.append((timeline.makespan_us, placement))
    return min(steps, key=lambda item: (item[0], item[1].key()), default=None)


def _over(reference_us: int | None, step_us: int) -> float | None:
    """Speedup; None for a step of no length, or over nothing."""
    return reference_us / step_us if step_us and reference_us is not None else None


def _summaries(
    scheduled: dict[str, ScheduledPlan],
    timelines: dict[str, Timeline],
    graphs: dict[str, StepGraph],
    baseline_us: int | None,
    bound_us: int,
) -> dict[str, ScheduleSummary]:
    colocated, async_reward = scheduled["colocated"].step_us, scheduled["async_reward"].step_us
    return {
        name: ScheduleSummary(
            step_us=item.step_us,
            best_split_step_us=item.best_split_step_us or item.step_us,
            speedup_vs_colocated=_over(colocated, item.step_us),
            speedup_vs_async_reward=_over(async_reward, item.step_us),
            speedup_vs_best_baseline=_over(baseline_us, item.step_us),
            actor_utilisation=timelines[name].utilisation("actor", graphs[name]),
            reward_utilisation=timelines[name].utilisation("reward", graphs[name]),
            gap=item.step_us / bound_us - 1 if bound_us and SCHEDULES[name].eligible else None,
            off_policy=SCHEDULES[name].off_policy,
        )
        for name, item in scheduled.items()
    }
