"""What a user gets out of a finished plan: files, one JSON object, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from stagebreaker.placement.certificate import Certificate
from stagebreaker.placement.planner import Planned
from stagebreaker.placement.space import SCHEDULE
from stagebreaker.profiles.cli import check_folder, console, ratio, seconds, share, table
from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.critical import by_kind, critical_path
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.memory import Budget, budgets, gigabytes
from stagebreaker.sim.plan import Placement, Plan
from stagebreaker.sim.schedules import SCHEDULES, build, why_not
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
    baseline = [planned.best_baseline] if planned.best_baseline else []
    shown = list(dict.fromkeys(["colocated", "async_reward", *baseline, "merged_replay", "stagebreaker"]))
    axes = gantts({name: planned.timelines[name] for name in shown}, planned.graphs)
    save_figure(axes[0].figure, out / "timeline.png")


def report(planned: Planned, elapsed_s: float) -> dict[str, Any]:
    """The object ``--json`` prints."""
    plan, best = planned.plan, planned.plan.schedules[planned.plan.best]
    p, certificate = best.placement, planned.certificate
    unfit = {name: budget_json(budget) for name, budget in planned.unfit.items()}
    return {
        **({"unfit": unfit} if unfit else {}),
        "schedules": {name: asdict(row) for name, row in planned.summary.items()},
        "best": {
            "schedule": plan.best,
            "step_us": best.step_us,
            "speedup_vs_best_baseline": planned.summary[plan.best].speedup_vs_best_baseline,
            "best_baseline": planned.best_baseline,
            "videos_per_s": videos_per_s(plan.workload, best.step_us),
            "videos_per_gpu_s": videos_per_s(plan.workload, best.step_us) / len(plan.cluster.gpus),
            "actors": p.actors,
            "rewards": p.rewards,
            "scoring": p.scoring,
            "vae_moved": p.vae_moved,
            "train_moved": list(p.train_moved) or [0] * plan.workload.mini_batches,
            "ref_moved": list(p.ref_moved),
            "old_moved": list(p.old_moved),
        },
        **({"finer": {**finer_facts(planned), "evaluated": planned.finer.evaluated}} if planned.finer else {}),
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
        "vs async reward",
        "vs best other",
        "actors",
        "rewards",
        "over bound",
    )
    rows = [
        (
            f"{'>' if name == plan.best else ' '} {name}{'*' if SCHEDULES[name].ours else ''}{_label(name)}",
            "does not fit" if name in planned.unfit else seconds(s.step_us),
            "does not fit" if plan.schedules[name].best_split_step_us is None else seconds(s.best_split_step_us),
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
    screen.print("best split: the schedule at the GPU split and scoring that suit it best; actors, rewards: busy share")
    screen.print(f"* ours, needs training before the scores are in; best other: {planned.best_baseline or 'none fits'}")
    for remark in _remarks(plan):
        screen.print(remark)
    for name, budget in planned.unfit.items():
        screen.print(f"{name} does not fit into memory at this split: {budget.short()}", soft_wrap=True)
    screen.print(f"over bound: any schedule of these tasks takes at least {seconds(planned.any_schedule_bound_us)}")
    screen.print(f"best: {plan.best}, {placement_line(best.placement, plan.workload)}")
    gain = ratio(planned.summary[plan.best].speedup_vs_best_baseline)
    if SCHEDULES[plan.best].ours and planned.best_baseline is None:
        what = "no schedule that is not ours fits into memory"
    elif SCHEDULES[plan.best].ours:
        what = f"{gain} over {planned.best_baseline}, the best schedule that is not ours"
    else:
        ours = plan.schedules[SCHEDULE]
        worth = (ours.best_split_step_us or ours.step_us) < best.step_us
        what = "too little" if worth else "no"
        what += f" benefit from training before the scores are in; {SCHEDULE} would take {seconds(ours.step_us)}"
        what = f"{SCHEDULE} does not fit into memory" if SCHEDULE in planned.unfit else what
    screen.print(f"step {seconds(best.step_us)}: {what}")
    rate = videos_per_s(plan.workload, best.step_us)
    screen.print(f"{rate:.4g} videos/s, {rate / gpus:.4g} per GPU")
    if planned.finer is not None:
        facts = finer_facts(planned)
        screen.print(
            f"split by step: {facts['candidates_split']} candidates, by local search; {facts['share_off']:.1%} off "
            f"the count space's best (any scoring), {facts['over_bound']:.1%} over the bound for divisible candidates"
        )
    elif plan.best == SCHEDULE:
        screen.print(f"certified: no placement of the count space is faster (their bound alone says {seconds(bound)})")
    of = "count space" if plan.best == SCHEDULE else f"count space of {SCHEDULE}, which the certificate is about"
    screen.print(f"{of}: {c.space_size} placements by formula; {accounted(c)}; in {elapsed_s:.1f} s")
    if any(gpu.memory_bytes for gpu in plan.cluster.gpus) and not plan.profile.memory_bytes:
        screen.print("memory: not checked, the profile does not say what lies in it (predicted profiles do)")
    screen.print(f"wrote plan.json, certificate.json, timeline.csv, trace.json, timeline.png to {out}/")


def _label(name: str) -> str:
    """What a reader of the table must know of a schedule that is never the best."""
    if SCHEDULES[name].eligible:
        return ""
    return "\n    off-policy" if SCHEDULES[name].off_policy else " (simulated)"


def _remarks(plan: Plan) -> list[str]:
    """What a reader must know: why a schedule is never the best, or not in the table, and what is not compared."""
    remarks = []
    if len({gpu.kind for gpu in plan.cluster.gpus}) > 1:
        remarks.append("GPUs of several kinds: ours moves tasks in uneven shares, the others deal candidates evenly")
    for name, schedule in SCHEDULES.items():
        if (problem := why_not(name, plan.workload)) is not None:
            remarks.append(f"not shown: {problem}")
        elif schedule.off_policy:
            remarks.append(f"{name} trains what an older adapter rolled out: its speedup is over other mathematics")
        elif not schedule.runs:
            remarks.append(f"{name} is simulated only: no real engine runs it, so it is never the best")
    return remarks


def finer_facts(planned: Planned) -> dict[str, float]:
    """How a placement with split candidates compares."""
    assert planned.finer is not None
    step, whole, bound = planned.finer.step_us, planned.finer.whole_us, planned.any_schedule_bound_us
    return {
        "step_us": step,
        "whole_us": whole,
        "candidates_split": len(planned.finer.placement.splits),
        "share_off": 1 - step / max(1, whole),
        "over_bound": step / max(1, bound) - 1,
    }


def accounted(c: Certificate) -> str:
    """What became of every placement."""
    parts = [f"{c.simulated} simulated"] if c.simulated else []
    parts += [f"{c.evaluated} evaluated"] if c.evaluated else []
    parts += [f"{count} pruned by {name}" for name, count in c.pruned.items()]
    parts += [f"{count} over a GPU's {reason}" for reason, count in c.infeasible.items()]
    return ", ".join(parts)


def videos_per_s(workload: Workload, step_us: int) -> float:
    """Candidates rolled out per second of a step."""
    return workload.candidates * 1e6 / max(1, step_us)


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
    if p.splits:
        text += f"; {len(p.splits)} candidates placed one by one, {sum(len(s.lanes) > 1 for s in p.splits)} in parts"
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


def budgets_of(plan: Plan, name: str) -> tuple[Budget, ...]:
    """What each GPU holds at most under one schedule of a plan; none if its profile knows no memory."""
    graph, assignment = build(plan.workload, plan.schedules[name].placement)
    return budgets(plan.workload, graph, assignment, plan.profile, plan.cluster)


def budget_table(found: Sequence[Budget]) -> Table:
    """Every budget line by line; lanes with the same lines share them."""
    alike: dict[tuple[object, ...], list[Budget]] = {}
    for budget in found:
        alike.setdefault((budget.phase, budget.capacity_bytes, budget.lines), []).append(budget)
    rows = []
    for same in alike.values():
        budget = same[0]
        rows += [
            (", ".join(b.lane for b in same) if n == 0 else "", line.name, gigabytes(line.size_bytes), line.why)
            for n, line in enumerate(budget.lines)
        ]
        of = f"of {gigabytes(budget.capacity_bytes)}" if budget.capacity_bytes else "capacity not known"
        phase = f"; while the {budget.phase} is in" if budget.phase else ""
        verdict = "" if budget.fits else f", DOES NOT FIT by {gigabytes(budget.over_bytes)}"
        rows.append(("", "total", gigabytes(budget.total_bytes), f"{of}{verdict}{phase}"))
    made = table("memory per GPU, at most", ("GPU", "what", "size", "why"), rows)
    made.columns[1].justify = made.columns[3].justify = "left"
    return made


def budget_json(budget: Budget) -> dict[str, Any]:
    """One budget for machines."""
    return {
        "gpu": budget.lane,
        "phase": budget.phase,
        "total_bytes": budget.total_bytes,
        "capacity_bytes": budget.capacity_bytes,
        "fits": budget.fits,
        "lines": [line._asdict() for line in budget.lines],
    }


def critical_line(timeline: Timeline, graph: StepGraph) -> str:
    """The critical path by kind of task, from half a percent of the step on."""
    kinds = by_kind(critical_path(timeline, graph))
    whole = max(timeline.makespan_us, 1)
    named = {kind: us for kind, us in kinds.items() if 200 * us >= whole}
    rest = sum(kinds.values()) - sum(named.values())
    text = ", ".join(f"{kind} {share(us / whole)}" for kind, us in named.items())
    return f"Critical path: {text}" + (f", other {seconds(rest)}." if rest else ".")


def idle_cells(idle_us: dict[str, int]) -> tuple[str, str]:
    """Idle time of a lane, and its three largest causes."""
    causes = sorted(((us, cause) for cause, us in idle_us.items() if us), reverse=True)
    return seconds(sum(idle_us.values())), ", ".join(f"{cause} {seconds(us)}" for us, cause in causes[:3])


def replay(plan: Plan, name: str) -> tuple[Timeline, StepGraph]:
    """(timeline, graph) of one schedule of a plan. Raises ``InputError`` if the plan was edited."""
    if name not in plan.schedules:
        raise InputError(f"schedule {name!r} is not in the plan; {nearest(name, plan.schedules)}")
    item = plan.schedules[name]
    graph, assignment = build(plan.workload, item.placement)
    plan.check_digests()
    if dict(assignment.lane_of) != item.lane_of or dict(assignment.order) != item.order:
        raise InputError(f"{name}: the plan's task lists are not those of its placement; plan again, do not edit them")
    return simulate(graph, assignment, plan.profile, plan.cluster, plan.workload.trained_steps), graph
