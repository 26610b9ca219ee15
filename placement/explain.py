"""Why a plan is as it is: what each GPU does and waits for, what one change would do, how two plans differ.

It reads plans and simulates; it searches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagebreaker.placement.report import budget_json, budgets_of, placement_line, replay
from stagebreaker.placement.space import Region
from stagebreaker.sim.critical import by_kind, critical_path
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.memory import Memory
from stagebreaker.sim.plan import SCORING, Placement, Plan
from stagebreaker.sim.schedules import SCHEDULES, build


def explanation(plan: Plan, name: str) -> dict[str, Any]:
    """One schedule of a plan: GPUs, what binds, the critical path by kind in us, what one change would do."""
    timeline, graph = replay(plan, name)
    gpus = []
    for use in timeline.use(graph):
        tasks: dict[str, int] = {}
        for row in timeline.spans(use.lane.name):
            tasks[row.kind] = tasks.get(row.kind, 0) + 1
        gpus.append(
            {
                "gpu": use.lane.name,
                "kind": plan.cluster.gpus[use.lane.index].kind,
                "tasks": tasks,
                "busy_us": use.busy_us,
                "overhead_us": use.overhead_us,
                "idle_us": use.idle_us,
            }
        )
    return {
        "schedule": name,
        "step_us": timeline.makespan_us,
        "placement": placement_line(plan.schedules[name].placement, plan.workload),
        "gpus": gpus,
        "binds": max(gpus, key=lambda g: (g["busy_us"], g["gpu"]))["gpu"],
        "critical_path_us": by_kind(critical_path(timeline, graph)),
        "one_change": [{"change": what, "step_us": step} for what, step in one_change(plan, name)],
        "memory": [budget_json(budget) for budget in budgets_of(plan, name)],
    }


def one_change(plan: Plan, name: str) -> list[tuple[str, int]]:
    """What one change of the schedule's placement would make of the step, in us, the best first.

    One count by one, the scoring mode, or one GPU from one role to the other; changes that do not fit into memory are
    left out. Empty for a schedule in which nothing can be changed.
    """
    placement, found = plan.schedules[name].placement, []
    if SCHEDULES[name].everywhere:
        return []
    for what, other in _changes(plan, placement):
        graph, assignment = build(plan.workload, other)
        if Memory(plan.workload, graph, plan.profile, plan.cluster).worst(assignment) is None:
            timeline = simulate(graph, assignment, plan.profile, plan.cluster, plan.workload.trained_steps)
            found.append((what, timeline.makespan_us))
    return sorted(found, key=lambda item: item[1])


def _changes(plan: Plan, p: Placement) -> Iterator[tuple[str, Placement]]:
    for mode in SCORING:
        if mode != p.scoring:
            yield f"scoring {mode}", p.model_copy(update={"scoring": mode})
    if p.splits:  # parts stand on GPUs by name: nothing else can change alone
        yield "no candidate split", p.model_copy(update={"splits": ()})
        return
    for actors in (p.actors - 1, p.actors + 1):
        rewards = p.actors + p.rewards - actors
        if actors >= 1 and rewards >= 1:
            what = f"{actors} actor + {rewards} reward GPUs"
            yield what, p.model_copy(update={"actors": actors, "rewards": rewards})
    if SCHEDULES[p.schedule].movable:
        region = Region(plan.workload, p.actors, p.rewards, p.scoring)
        names = [
            "decodes moved",
            *(f"training tasks of mini-batch {m} moved" for m in range(plan.workload.mini_batches)),
        ]
        names += [f"forward-only replays of mini-batch {m} moved" for m in range(plan.workload.mini_batches)]
        counts = region.counts(p)
        for other in region.neighbours(p):
            n = next(n for n, (a, b) in enumerate(zip(counts, region.counts(other), strict=True)) if a != b)
            yield f"{region.counts(other)[n]} {names[n]} instead of {counts[n]}", other


def differences(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """(what, in the first, in the second) of everything in which two plans differ; empty if they are alike."""
    found: list[tuple[str, str, str]] = []

    def compare(what: str, first: object, second: object) -> None:
        if first != second:
            found.append((what, str(first), str(second)))

    for field in type(a.workload).model_fields:
        compare(f"workload.{field}", getattr(a.workload, field), getattr(b.workload, field))
    compare("GPUs", len(a.cluster.gpus), len(b.cluster.gpus))
    compare("GPU kinds", sorted({g.kind for g in a.cluster.gpus}), sorted({g.kind for g in b.cluster.gpus}))
    compare("profile", a.profile.name, b.profile.name)
    if a.profile.name == b.profile.name and a.profile_sha256 != b.profile_sha256:
        compare("profile contents", a.profile_sha256[:12], b.profile_sha256[:12])
    compare("best", a.best, b.best)
    for name in dict.fromkeys((*a.schedules, *b.schedules)):
        one, other = a.schedules.get(name), b.schedules.get(name)
        if one is None or other is None:
            compare(name, "planned" if one else "-", "planned" if other else "-")
            continue
        compare(f"{name}: step, us", one.step_us, other.step_us)
        compare(
            f"{name}: placement", placement_line(one.placement, a.workload), placement_line(other.placement, b.workload)
        )
        moved = [t for t, lane in one.lane_of.items() if t in other.lane_of and other.lane_of[t] != lane]
        if moved:
            compare(f"{name}: tasks on other GPUs", f"{len(moved)}, the first is {moved[0]}", other.lane_of[moved[0]])
    return found
