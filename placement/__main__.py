"""stagebreaker-plan: choose where every task of a step runs, and prove the choice.

Without a sub-command it plans; ``verify`` checks a certificate from nothing, ``simulate`` replays a plan, ``explain``
says what binds. Needs neither torch nor ray.
"""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from stagebreaker.profiles.cli import (
    CheckFailedError,
    VersionFlag,
    check_file,
    check_folder,
    console,
    print_json,
    progress,
    run_app,
    seconds,
    share,
    table,
)
from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.profiles.table import Profile

app = typer.Typer(help=__doc__, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def plan(
    context: typer.Context,
    workload: Annotated[str, typer.Option(help="A shipped workload's name, or a YAML file.")] = "tiny-dancegrpo",
    profile: Annotated[
        str | None,
        typer.Option(
            help="A profile.json, or a shipped profile's name. "
            "Default: ./profile.json if it is of this workload, else the workload's own."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of equal GPUs. Default: the workload's.")] = None,
    actors: Annotated[int | None, typer.Option(help="Fix the number of actor GPUs.")] = None,
    rewards: Annotated[int | None, typer.Option(help="Fix the number of reward GPUs.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster.yaml instead of --gpus.")] = None,
    scoring: Annotated[
        str,
        typer.Option(help="on_arrival, per_mini_batch or one_batch; all of them; or auto: the one that looks best."),
    ] = "auto",
    search: Annotated[
        str,
        typer.Option(help="exhaustive: simulate every placement; bound: branch and bound; auto: whichever suits."),
    ] = "auto",
    min_gain: Annotated[
        float, typer.Option(help="Keep the best schedule that is not ours unless ours is faster by this share (0.02).")
    ] = 0.0,
    finer: Annotated[
        bool, typer.Option("--finer", help="Go on from there and split candidates' replays by denoising step.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a workload field: key=value (repeatable).")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for plan.json, certificate.json, timeline.csv, trace.json, timeline.png.")
    ] = Path("plan"),
    as_json: JsonFlag = False,
    _version: VersionFlag = False,
) -> None:
    """Plan a workload on a cluster."""
    if context.invoked_subcommand is not None:
        return
    from stagebreaker.placement.planner import make_plan
    from stagebreaker.placement.report import report, show, write_outputs
    from stagebreaker.sim.workload import load_workload

    started = time.monotonic()
    check_folder(out)
    chosen = load_workload(workload, tuple(set_ or ()))
    costs, origin = find_profile(profile, chosen.name, chosen.profile)
    machines = _cluster(costs, cluster, gpus, actors, rewards, chosen.default_gpus)
    split = _split(len(machines.gpus), actors, rewards)
    modes = _scoring(scoring)
    planned = make_plan(chosen, machines, costs, split, modes, progress, _method(search), finer, _gain(min_gain))
    write_outputs(planned, out)
    if as_json:
        print_json(report(planned, time.monotonic() - started))
    else:
        show(planned, origin, out, time.monotonic() - started)


def find_profile(source: str | None, workload: str, default: str | None) -> tuple[Profile, str]:
    """The profile to plan with, and where it came from."""
    local = Path("profile.json")
    if source is None and local.exists():
        found = Profile.load(local)
        if found.workload == workload:
            return found, str(local)
    name = source or default
    if name is None:
        raise InputError(
            f"no --profile given and ./profile.json is not there or of another workload; "
            f"run stagebreaker-profile --workload {workload}"
        )
    folder = resources.files("stagebreaker.profiles.data")
    shipped = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    if name in shipped:
        import json

        return Profile.parse(json.loads((folder / f"{name}.json").read_text("utf-8")), name), f"shipped profile {name}"
    if not Path(name).suffix and "/" not in name:
        raise InputError(f"profile {name!r} is neither a shipped profile nor a file; {nearest(name, shipped)}")
    return Profile.load(Path(name)), name


def _cluster(
    profile: Profile,
    file: Path | None,
    gpus: int | None,
    actors: int | None,
    rewards: int | None,
    default: int,
) -> Any:
    from stagebreaker.sim.workload import Cluster

    if file is not None:
        if gpus is not None:
            raise InputError("--cluster and --gpus both say how many GPUs there are; give one of them")
        return Cluster.load(file)
    if actors is not None and rewards is not None:
        if gpus is not None and gpus < actors + rewards:
            raise InputError(missing_gpus(actors + rewards, gpus))
        if gpus is not None and gpus != actors + rewards:
            raise InputError(
                f"--actors {actors} and --rewards {rewards} make {actors + rewards} GPUs, --gpus says {gpus}"
            )
        gpus = actors + rewards
    kind = profile.gpu_kinds[0]
    return Cluster.equal(gpus if gpus is not None else default, kind.name, kind.memory_bytes)


def _split(gpus: int, actors: int | None, rewards: int | None) -> tuple[int, int] | None:
    if actors is None and rewards is None:
        return None
    a = actors if actors is not None else gpus - cast(int, rewards)
    r = rewards if rewards is not None else gpus - a
    if a < 1 or r < 1:
        raise InputError(f"--actors {a} and --rewards {r} must both be at least 1 (GPUs: {gpus})")
    if a + r > gpus:
        raise InputError(missing_gpus(a + r, gpus))
    return a, r


def missing_gpus(needed: int, there: int) -> str:
    """What to say when a split needs more GPUs than there are."""
    return f"needs {needed} GPUs, the cluster has {there}: missing {needed - there}; give more or lower --actors"


def _gain(value: float) -> float:
    if not 0 <= value <= 10:
        raise InputError(f"--min-gain {value:g} must be between 0 and 10; 0.02 is 2 %")
    return value


def _method(text: str) -> Any:
    from stagebreaker.placement.search import METHODS

    if text not in METHODS:
        raise InputError(f"--search {text!r} is unknown; {nearest(text, METHODS)}")
    return text


def _scoring(text: str) -> Any:
    from stagebreaker.sim.plan import SCORING

    if text == "auto":
        return None
    if text == "all":
        return SCORING
    if text not in SCORING:
        raise InputError(f"--scoring {text!r} is unknown; {nearest(text, (*SCORING, 'all', 'auto'))}")
    return (text,)


@app.command()
def verify(certificate: Annotated[Path, typer.Argument(help="A certificate.json.")], as_json: JsonFlag = False) -> None:
    """Check a certificate from nothing; exit 1 if anything in it cannot be confirmed."""
    from stagebreaker.placement.certificate import Certificate
    from stagebreaker.placement.certificate import verify as check
    from stagebreaker.placement.report import placement_line

    found = Certificate.load(certificate)
    problems = check(found)
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    if problems:
        raise CheckFailedError(f"{certificate}: {'; '.join(problems)}")
    if as_json:
        return
    said = f"confirmed: {found.space_size} placements of the stagebreaker schedule, "
    if found.best is None or found.step_us is None:
        console().print(f"{said}none of which fits into memory")
        return
    console().print(
        f"{said}best {seconds(found.step_us)} "
        f"({placement_line(found.best, found.workload)}), lower bound {seconds(found.lower_bound_us)}"
    )


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    schedule: Annotated[str | None, typer.Option(help="One of the plan's schedules. Default: its best.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the timeline as CSV.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a plan again; exit 1 if it no longer takes the time it says."""
    from stagebreaker.placement.report import budget_json, budget_table, budgets_of, idle_cells, replay
    from stagebreaker.sim.export import write_csv
    from stagebreaker.sim.plan import Plan

    if out is not None:
        check_file(out)
    plan = Plan.load(plan_file)
    name = plan.best if schedule is None else schedule
    timeline, graph = replay(plan, name)
    if out is not None:
        write_csv(timeline, out)
    if timeline.makespan_us != plan.schedules[name].step_us:
        raise CheckFailedError(
            f"{plan_file}: {name} takes {timeline.makespan_us} us, the plan says {plan.schedules[name].step_us}"
        )
    uses = timeline.use(graph)
    if as_json:
        lanes = [
            {"gpu": u.lane.name, "busy_us": u.busy_us, "overhead_us": u.overhead_us, "idle_us": u.idle_us} for u in uses
        ]
        memory = [budget_json(budget) for budget in budgets_of(plan, name)]
        shown = {"schedule": name, "step_us": timeline.makespan_us, "lanes": lanes}
        print_json(shown | ({"memory": memory} if memory else {}))
        return
    rows = [
        (
            u.lane.name,
            share(u.busy_us / timeline.makespan_us),
            seconds(u.overhead_us),
            *idle_cells(u.idle_us),
        )
        for u in uses
    ]
    console().print(
        table(
            f"{name}: step {seconds(timeline.makespan_us)}",
            ("GPU", "busy", "switch", "idle", "waits for"),
            rows,
        )
    )
    if held := budgets_of(plan, name):
        console().print(budget_table(held))


@app.command()
def reproduce(
    out: Annotated[
        Path | None, typer.Option(help="Folder for fig3.png, fig9.png, fig16.png and reproduced.csv.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The published results (Figures 3, 9 and 16) beside what the simulator makes of the fitted profiles."""
    from stagebreaker.placement.report import reproduction_table
    from stagebreaker.placement.reproduce import rows_of, simulated, write_reproduction
    from stagebreaker.sim.published import all_cases

    if out is not None:
        check_folder(out)
    with progress("simulating the published settings", len(all_cases())) as tick:
        cases = simulated(tick=tick)
    rows = rows_of(cases)
    written = write_reproduction(cases, out) if out is not None else ()
    if as_json:
        print_json(rows)
        return
    screen = console()
    screen.print(reproduction_table(rows))
    for figure in ("fig16", "fig9", "fig3"):
        chosen = [row for row in rows if str(row["id"]).startswith(f"{figure}.")]
        screen.print(f"{figure}: {sum(bool(row['ok']) for row in chosen)} of {len(chosen)} rows within tolerance")
    screen.print("rows marked in fit were used to fit the costs: their agreement is in-sample")
    screen.print(
        "colocated and async_reward make one more forward-only pass (old_logprob_source=recompute), which is inferred"
    )
    if written:
        screen.print(f"wrote {', '.join(written)} to {out}/")


@app.command()
def extrapolate(
    out: Annotated[Path, typer.Option(help="Folder for predictions.csv and predictions-<sweep>.png.")] = Path("docs"),
    as_json: JsonFlag = False,
) -> None:
    """Predict speedups beyond the fitted settings: sweeps with the fitted costs scaled by roofline (a minute)."""
    from stagebreaker.placement.predictions import all_settings, draw, predictions, refused, summary, to_csv
    from stagebreaker.profiles.document import write_atomic

    check_folder(out)
    with progress("predicting settings", len(all_settings())) as tick:
        predicted = predictions(tick)
    write_atomic(out / "predictions.csv", to_csv(predicted))
    draw(predicted, out)
    ranges, skipped = summary(predicted), refused()
    if as_json:
        print_json({"ranges": ranges, "refused": [{"setting": str(one), "why": why} for one, why in skipped.items()]})
        return
    rows = [
        (
            f"{row['sweep']}={row['value']}",
            str(row["pairs"]),
            *(f"{row[f'vs_{one}_low']:.2f} to {row[f'vs_{one}_high']:.2f}" for one in ("colocated", "async_reward")),
        )
        for row in ranges
    ]
    screen = console()
    title = "stagebreaker, predicted (low to high over pairs)"
    screen.print(table(title, ("setting", "pairs", "vs colocated", "vs async_reward"), rows))
    for one, why in skipped.items():
        screen.print(f"refused: {one}: {why}")
    screen.print("fitted costs, scaled by roofline: nothing here was measured")
    screen.print(f"wrote predictions.csv and a figure per sweep to {out}/")


@app.command()
def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    schedule: Annotated[str | None, typer.Option(help="One of the plan's schedules. Default: its best.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Which GPU does what and waits for what, what binds, and what one change would do."""
    from stagebreaker.placement.explain import explanation
    from stagebreaker.placement.report import budget_table, budgets_of, critical_line, idle_cells, replay
    from stagebreaker.placement.space import SCHEDULE
    from stagebreaker.sim.plan import Plan

    plan = Plan.load(plan_file)
    name = plan.best if schedule is None else schedule
    found = explanation(plan, name)
    if as_json:
        print_json(found)
        return
    step, screen = found["step_us"], console()
    rows = [
        (
            gpu["gpu"],
            gpu["kind"],
            ", ".join(f"{count} {kind}" for kind, count in gpu["tasks"].items()),
            share(gpu["busy_us"] / step),
            *idle_cells(gpu["idle_us"]),
        )
        for gpu in found["gpus"]
    ]
    screen.print(table(f"{name}: {found['placement']}", ("GPU", "kind", "tasks", "busy", "idle", "waits for"), rows))
    if held := budgets_of(plan, name):
        screen.print(budget_table(held))
    busy = next(gpu["busy_us"] for gpu in found["gpus"] if gpu["gpu"] == found["binds"])
    screen.print(f"The step takes {seconds(step)}. {found['binds']} binds: it is busy {share(busy / step)} of it.")
    screen.print(critical_line(*replay(plan, name)))
    changes = [(c["change"], seconds(c["step_us"]), f"{c['step_us'] / step - 1:+.1%}") for c in found["one_change"]]
    if changes:
        screen.print(table("what one change would make of it", ("change", "step", ""), changes))
    if name == plan.best:
        where = "placement of the count space" if name == SCHEDULE else "schedule"
        if plan.schedules[name].placement.splits:
            where = "schedule, with candidates split as it likes,"
        screen.print(f"No {where} takes less than {seconds(plan.lower_bound_us)}.")


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Another.")],
    as_json: JsonFlag = False,
) -> None:
    """In what two plans differ."""
    from stagebreaker.placement.explain import differences
    from stagebreaker.sim.plan import Plan

    found = differences(Plan.load(first), Plan.load(second))
    if as_json:
        print_json([{"what": what, "first": one, "second": other} for what, one, other in found])
    elif not found:
        console().print("the plans are alike")
    else:
        console().print(table("differences", ("what", str(first), str(second)), found))


def main() -> None:
    """Entry point of stagebreaker-plan."""
    run_app(app)


if __name__ == "__main__":
    main()
