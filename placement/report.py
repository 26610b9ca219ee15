"""What a user gets out of a finished plan: files, one JSON object, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from stagebreaker.placement.planner import Planned
from stagebreaker.placement.space import SCHEDULE
from stagebreaker.profiles.cli import check_folder, console, ratio, seconds, share, table
from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import Placement, Plan
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.timeline import Timeline
from stagebreaker.sim.workload import Workload


def write_outputs(planned: Planned, out: Path) -> None:
    """plan.json, certificate.json, timeline.csv, trace.json and timeline.png in ``out``."""
    from stagebreaker.sim.export import write_csv, write_trace
    from stagebreaker.sim.plot import gantts, save_figure

    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    best = planned.plan.best
    planned.plan.save(out / "plan.json")
    planned.certificate.save(out / "certificate.json")
    write_csv(planned.timelines[best], out / "timeline.csv")
    write_trace(out / "trace.json", {"predicted": planned.timelines[best]}, planned.graphs[best])
    shown = list(dict.fromkeys(["colocated", "async_reward", planned.best_baseline, "merged_replay", "stagebreaker"]))
    axes = gantts({name: planned.timelines[name] for name in shown}, planned.graphs)
    save_figure(axes[0].figure, out / "timeline.png")


def report(planned: Planned, elapsed_s: float) -> dict[str, Any]:
    """The object ``--json`` prints."""
    plan, best = planned.plan, planned.plan.schedules[planned.plan.best]
    p, certificate = best.placement, planned.certificate
    return {
        "schedules": {name: asdict(row) for name, row in planned.summary.items()},
        "best": {
            "schedule": plan.best,
            "step_us": best.step_us,
            "speedup_vs_best_baseline": planned.summary[plan.best].speedup_vs_best_baseline,
            "best_baseline": planned.best_baseline,
            "actors": p.actors,
            "rewards": p.rewards,
            "scoring": p.scoring,
            "vae_moved": p.vae_moved,
            "train_moved": list(p.train_moved) or [0] * plan.workload.mini_batches,
            "ref_moved": list(p.ref_moved),
            "old_moved": list(p.old_moved),
        },
        "lower_bound_us": plan.lower_bound_us,
        "any_schedule_bound_us": planned.any_schedule_bound_us,
        "gap": best.step_us / plan.lower_bound_us - 1 if plan.lower_bound_us else None,
        "space_size": certificate.space_size,
        "simulated": certificate.simulated,
        "evaluated": certificate.evaluated,
        "pruned": certificate.pruned,
        "infeasible": certificate.infeasible,
        "profile_provenance": plan.profile.provenance,
        "seconds": round(elapsed_s, 3),
    }


def show(planned: Planned, origin: str, out: Path, elapsed_s: float) -> None:
    """Tables for people."""
    plan, screen = planned.plan, console()
    columns = (
        "schedule",
        "step",
        "best split",
        "vs colocated",
        "vs async_reward",
        "vs best other",
        "actors",
        "rewards",
        "over bound",
    )
    rows = [
        (
            f"{'>' if name == plan.best else ' '} {name}{'*' if SCHEDULES[name].ours else ''}",
            seconds(s.step_us),
            seconds(s.best_split_step_us),
            ratio(s.speedup_vs_colocated),
            ratio(s.speedup_vs_async_reward),
            ratio(s.speedup_vs_best_baseline),
            share(s.actor_utilisation),
            share(s.reward_utilisation),
            share(s.gap),
        )
        for name, s in planned.summary.items()
    ]
    gpus = len(plan.cluster.gpus)
    screen.print(
        table(f"{plan.workload.name} on {gpus} GPUs, {plan.profile.provenance} costs ({origin})", columns, rows)
    )
    best = plan.schedules[plan.best]
    bound, c = plan.lower_bound_us, planned.certificate
    screen.print("best split: the schedule at the GPU split that suits it best; actors, rewards: busy share")
    screen.print(f"* ours, needs training before the scores are in; best other: {planned.best_baseline}")
    screen.print(f"over bound: any schedule of these tasks takes at least {seconds(planned.any_schedule_bound_us)}")
    screen.print(f"best: {plan.best}, {placement_line(best.placement, plan.workload)}")
    gain = ratio(planned.summary[plan.best].speedup_vs_best_baseline)
    if SCHEDULES[plan.best].ours:
        what = f"{gain} over {planned.best_baseline}, the best schedule that is not ours"
    else:
        what = f"no benefit from training before the scores are in; {SCHEDULE} would take "
        what += seconds(plan.schedules[SCHEDULE].step_us)
    screen.print(f"step {seconds(best.step_us)}: {what}")
    where = "any placement of the count space" if plan.best == SCHEDULE else "any schedule"
    gap = 100 * (best.step_us / max(bound, 1) - 1)
    screen.print(f"{where} takes at least {seconds(bound)}: this one is {gap:.1f} % above")
    screen.print(f"count space: {c.space_size} placements by formula, {c.simulated} simulated, in {elapsed_s:.1f} s")
    screen.print(f"wrote plan.json, certificate.json, timeline.csv, trace.json, timeline.png to {out}/")


def placement_line(p: Placement, workload: Workload) -> str:
    """One line about a placement."""
    if SCHEDULES[p.schedule].everywhere:
        return f"all {p.actors + p.rewards} GPUs in every role"
    text = f"{p.actors} actor + {p.rewards} reward GPUs, scoring {p.scoring}"
    if not SCHEDULES[p.schedule].movable:
        return text
    text += f"; on reward GPUs: {p.vae_moved} of {workload.candidates} decodes"
    text += f", training tasks per mini-batch {list(p.train_moved) or [0] * workload.mini_batches}"
    if any(p.ref_moved) or any(p.old_moved):
        text += f", forward-only replays {list(p.ref_moved or p.old_moved)}"
    return text


def reproduction_table(rows: Sequence[Mapping[str, str | float | bool]]) -> Table:
    """Published and reproduced ranges, row by row."""

    def span(row: Mapping[str, str | float | bool], side: str) -> str:
        low, high = row[f"{side}_low"], row[f"{side}_high"]
        return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"

    def error(row: Mapping[str, str | float | bool]) -> str:
        ends = [(float(row[f"reproduced_{end}"]), float(row[f"published_{end}"])) for end in ("low", "high")]
        return " / ".join(dict.fromkeys(f"{100 * (got / want - 1):+.1f} %" for got, want in ends))

    cells = [
        (
            str(row["id"]),
            span(row, "published"),
            span(row, "reproduced"),
            error(row),
            "yes" if row["in_fit"] else "no",
            "yes" if row["ok"] else "NO",
        )
        for row in rows
    ]
    return table("published results", ("row", "published", "reproduced", "error", "in fit", "ok"), cells)


def idle_cells(idle_us: dict[str, int]) -> tuple[str, str]:
    """Idle time of a lane, and its three largest causes."""
    causes = sorted(((us, cause) for cause, us in idle_us.items() if us), reverse=True)
    return seconds(sum(idle_us.values())), ", ".join(f"{cause} {seconds(us)}" for us, cause in causes[:3])


def replay(plan: Plan, name: str) -> tuple[Timeline, StepGraph]:
    """(timeline, graph) of one schedule of a plan. Raises ``InputError`` if its task lists were changed."""
    if name not in plan.schedules:
        raise InputError(f"schedule {name!r} is not in the plan; {nearest(name, plan.schedules)}")
    item = plan.schedules[name]
    graph, assignment = build(plan.workload, item.placement)
    if dict(assignment.lane_of) != item.lane_of or dict(assignment.order) != item.order:
        raise InputError(f"{name}: the plan's task lists are not those of its placement; plan again, do not edit them")
    return simulate(graph, assignment, plan.profile, plan.cluster, plan.workload.trained_steps), graph
