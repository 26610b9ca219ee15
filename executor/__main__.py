"""stagebreaker-run: execute a plan and lay what was measured beside what was predicted.

Without a sub-command it runs; ``compare`` reads a finished run, ``check-gradients`` checks that the kernels compute the
same gradient. A run that breaks off says which task on which GPU, and leaves a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from stagebreaker.profiles.cli import (
    CheckFailedError,
    InterruptedRunError,
    RunFailedError,
    VersionFlag,
    check_folder,
    console,
    print_json,
    progress,
    ratio,
    run_app,
    seconds,
    table,
)
from stagebreaker.profiles.document import InputError, nearest, read_mapping, write_atomic

app = typer.Typer(help=__doc__, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)
SHORTEST_US, MOST_SCALE = 100_000, 10
"""An emulated step is at least this long, and at most so many times the real one."""
MISS = 1.25
"""A step that is off by more gets a remark."""
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Option(help="A plan.json.")] = Path("plan/plan.json"),
    schedule: Annotated[str | None, typer.Option(help="One of the plan's schedules. Default: its best.")] = None,
    backend: Annotated[
        str, typer.Option(help="ray: one process per GPU; inline: this process; emulated: actors that sleep.")
    ] = "ray",
    steps: Annotated[int, typer.Option(help="RL steps, after a warm-up step that changes nothing.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for metrics, timeline, trace, checkpoints and the adapter.")] = Path(
        "run"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16. Default: the profile's.")] = "profile",
    workload: Annotated[str | None, typer.Option(help="Refuse the plan unless it is for this workload.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Refuse the plan unless it fits this cluster.yaml.")] = None,
    replay_rewards: Annotated[
        Path | None, typer.Option(help="Take rewards from another run's folder instead of the judge.")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Emulated seconds per second. Default: a step of 4 s.")
    ] = None,
    as_json: JsonFlag = False,
    _version: VersionFlag = False,
) -> None:
    """Run a plan."""
    if context.invoked_subcommand is not None:
        return
    from stagebreaker.sim.plan import Plan

    found = Plan.load(plan)
    _check(found, backend, steps, workload, cluster)
    from stagebreaker.executor import runner

    program = runner.Program.of(found, found.best if schedule is None else schedule)
    facts = {"schedule": program.schedule, "workload_sha256": found.workload_sha256, "backend": backend}
    what = f"running {program.schedule} on {backend}, a warm-up and {steps} steps"
    if backend == "emulated":
        used = {"--resume": resume, "--dtype": dtype != "profile", "--replay-rewards": replay_rewards is not None}
        _refuse("emulated", used, "there is nothing but time in an emulated run")
        scale = _scale(time_scale, found.schedules[program.schedule].step_us)
        _prepare(out, False, facts, plan)
        with progress(what, steps + 1) as tick:
            result = _emulated(program, steps, scale, out, tick)
    else:
        _refuse(backend, {"--time-scale": time_scale is not None}, "real engines take the time they take")
        where, precision = _device(device, dtype, found.profile.dtype)
        recorded = _recorded(replay_rewards, steps, program.requests()) if replay_rewards else None
        _prepare(out, resume, {**facts, "dtype": precision}, plan)
        options = runner.RunOptions(steps, out, where, precision, resume, recorded=recorded)
        with progress(what, steps + 1) as tick:
            result = _interruptible(lambda: runner.train(program, backend, options, tick), out)
    _write(result, out)
    if as_json:
        print_json(report(result))
    else:
        show(result, out)


def _interruptible(train: Callable[[], Any], out: Path) -> Any:
    """Ctrl-C, SIGTERM or SIGINT from a script stop the workers; what is finished can be resumed."""
    from stagebreaker.executor.checkpoint import latest

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return train()
    except KeyboardInterrupt:
        found = latest(out)
        how = f"resume after step {found[0]} with --resume --out {out}" if found else "no step was finished"
        raise InterruptedRunError(f"interrupted; {how}") from None


def _check(plan: Any, backend: str, steps: int, workload: str | None, cluster: Path | None) -> None:
    from stagebreaker.sim.workload import Cluster, load_workload

    if backend not in ("ray", "inline", "emulated"):
        raise InputError(f"--backend {backend!r} is unknown; {nearest(backend, ('ray', 'inline', 'emulated'))}")
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    if workload is not None:
        _same("workload", plan.workload.model_dump(), load_workload(workload).model_dump())
    if cluster is not None:
        have = Cluster.load(cluster)
        need = len(plan.cluster.gpus)
        if len(have.gpus) < need:
            raise InputError(
                f"the plan needs {need} GPUs, the cluster has {len(have.gpus)}: missing {need - len(have.gpus)}"
            )
        _same("cluster", plan.cluster.model_dump(), have.model_dump())


def _same(what: str, planned: dict[str, Any], given: dict[str, Any]) -> None:
    for field, value in planned.items():
        if given.get(field) != value:
            mine, other = (
                text if len(text) <= 80 else f"{text[:77]}..." for text in map(repr, (value, given.get(field)))
            )
            raise InputError(f"the plan's {what} has {field}={mine}, the given one {other}; plan again for it")


def _refuse(backend: str, used: dict[str, bool], why: str) -> None:
    for option, given in used.items():
        if given:
            raise InputError(f"{option} has no meaning with --backend {backend}: {why}; leave it out")


def _scale(given: float | None, step_us: int) -> float:
    """Emulated seconds per second; by default a step of 4 s. Below SHORTEST_US a step is all calls and no sleep."""
    scale = given if given is not None else 4_000_000 / max(1, step_us)
    least = SHORTEST_US / max(1, step_us)
    if given is not None and not least <= scale <= MOST_SCALE:
        raise InputError(
            f"--time-scale {given:g} must be between {least:.3g} and {MOST_SCALE}: a step of {seconds(step_us)} "
            f"would take {seconds(round(step_us * (given if given > 0 else 0)))} here; leave it out for a step of 4 s"
        )
    return scale


def _prepare(out: Path, resume: bool, facts: dict[str, str], plan: Path) -> None:
    """The run's folder, with the plan and what the run is, so that only the same run can be resumed in it."""
    check_folder(out)
    begun = out / "run.json"
    if resume:
        _check_resumed(begun, facts)
    elif any((out / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise InputError(f"--out {out} holds a run; continue it with --resume, or give another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(begun, json.dumps(facts, indent=2) + "\n")
    if plan.resolve() != (out / "plan.json").resolve():
        shutil.copyfile(plan, out / "plan.json")


def _check_resumed(begun: Path, facts: dict[str, str]) -> None:
    """Where and on what backend a resumed run goes on is free; what it computes, to the bit, is not."""
    if not begun.exists():
        raise InputError(f"--resume: {begun.parent} holds no run; run without --resume")
    before = read_mapping(begun)
    for name, value in facts.items():
        if name != "backend" and before.get(name) != value:
            raise InputError(
                f"--resume: the run in {begun.parent} has {name}={before.get(name)}, this one {value}; "
                f"give the same, or another --out"
            )


def _device(device: str, dtype: str, profiled: str) -> tuple[str, str]:
    from stagebreaker.executor.device import pick

    return pick(device, dtype if dtype != "profile" else profiled)


def _emulated(program: Any, steps: int, scale: float, out: Path, tick: Any) -> Any:
    from stagebreaker.executor import runner

    try:
        return runner.emulate(program, steps, scale, out, tick)
    except RuntimeError as error:
        raise RunFailedError(f"{program.schedule}: {error}") from error


def _recorded(folder: Path, steps: int, requests: set[str]) -> list[dict[str, float | None]]:
    lines = read_metrics(folder)
    if len(lines) < steps:
        raise InputError(f"--replay-rewards {folder} has {len(lines)} steps, the run wants {steps}; give fewer --steps")
    recorded: list[dict[str, float | None]] = [line.get("sb/rewards", {}) for line in lines[:steps]]
    for n, rewards in enumerate(recorded, start=1):
        if set(rewards) != requests:
            raise InputError(
                f"--replay-rewards {folder}: step {n} does not score the requests of this plan; "
                f"give a run of the same workload"
            )
    return recorded


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, one object per step."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise InputError(f"{folder} holds no metrics.jsonl; give the folder of a finished run")
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{file}:{number}: not JSON ({error.msg}); mend or delete that line") from None
    return lines


def _write(result: Any, out: Path) -> None:
    """What a run leaves in its folder, beside metrics and checkpoints."""
    from stagebreaker.executor.checkpoint import latest
    from stagebreaker.executor.record import middle
    from stagebreaker.sim.export import write_csv, write_trace
    from stagebreaker.sim.plot import gantts, save_figure

    if not result.timelines:
        return
    measured = result.timelines[middle(result.timelines)]
    sides = {"predicted": predicted(result.program), "measured": measured}
    write_csv(measured, out / "timeline.csv")
    write_trace(out / "trace.json", sides, result.program.graph)
    graphs = dict.fromkeys(sides, result.program.graph)
    save_figure(gantts(sides, graphs)[0].figure, out / "timeline.png")
    write_atomic(out / "report.json", json.dumps(report(result), indent=2) + "\n")
    newest = latest(out)
    if newest is not None:
        shutil.rmtree(out / "adapter", ignore_errors=True)
        shutil.copytree(newest[1] / "adapter", out / "adapter")


def predicted(program: Any) -> Any:
    """The simulator's timeline of the schedule that ran."""
    from stagebreaker.sim.engine import simulate

    plan = program.plan
    return simulate(program.graph, program.assignment, plan.profile, plan.cluster, plan.workload.trained_steps)


def report(result: Any) -> dict[str, Any]:
    """The object ``--json`` prints."""
    return {
        "steps": len(result.timelines),
        "step_us": result.step_us,
        "predicted_step_us": result.predicted_step_us,
        "schedule": result.program.schedule,
        "backend": result.backend,
        "adapter_sha256": result.adapter_sha256,
        "reward_mean": [line.get("critic/rewards/mean") for line in result.metrics],
    }


def show(result: Any, out: Path) -> None:
    """Tables for people."""
    from stagebreaker.executor.record import compare as match
    from stagebreaker.executor.record import middle

    screen = console()
    if not result.timelines:
        screen.print(f"nothing left to do: {out} has all the steps asked for; give more --steps to go on")
        return
    guess = result.predicted_step_us
    rows = [
        (
            str(line["step"]),
            seconds(us),
            seconds(guess),
            ratio(us / guess, ""),
            _number(line.get("critic/rewards/mean")),
            _number(line.get("actor/grad_norm")),
        )
        for line, us in zip(result.metrics, result.step_us, strict=True)
    ]
    screen.print(
        table(
            f"{result.program.schedule} on {result.backend}",
            ("step", "measured", "predicted", "ratio", "mean reward", "grad norm"),
            rows,
        )
    )
    found = match(predicted(result.program), result.timelines[middle(result.timelines)])
    screen.print(_kinds_table(found))
    median = int(statistics.median(result.step_us))
    screen.print(
        f"step: predicted {seconds(guess)}, measured {seconds(median)} (median of {len(result.step_us)}), "
        f"ratio {median / guess:.3f}"
    )
    if result.backend == "inline" and len(result.program.graph.lanes) > 1:
        screen.print("inline runs one task at a time: compare tasks with the prediction, not steps")
    elif not 1 / MISS <= median / guess <= MISS:
        screen.print("far from the prediction: other load now or when it was profiled? profile and plan again")
    adapter = ", adapter" if (out / "adapter").exists() else ""
    screen.print(f"wrote metrics.jsonl, timeline.csv, trace.json, timeline.png{adapter} to {out}/")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _kinds_table(found: Any) -> Any:
    rows = [
        (k.kind, str(k.tasks), seconds(k.predicted_us), seconds(k.measured_us), ratio(k.ratio, "")) for k in found.kinds
    ]
    unmatched = f", {len(found.unmatched)} without a partner" if found.unmatched else ""
    return table(
        f"{found.matched} tasks matched by id{unmatched} (medians)",
        ("task", "count", "predicted", "measured", "ratio"),
        rows,
    )


@app.command()
def compare(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: JsonFlag = False,
) -> None:
    """Predicted against measured, kind by kind, of a finished run."""
    from stagebreaker.executor.record import compare as match
    from stagebreaker.executor.runner import Program
    from stagebreaker.sim.export import read_csv
    from stagebreaker.sim.plan import Plan
    from stagebreaker.sim.timeline import Timeline

    done = read_mapping(folder / "report.json")
    program = Program.of(Plan.load(folder / "plan.json"), done["schedule"])
    measured = Timeline.of_frame(read_csv(folder / "timeline.csv"), program.graph.lanes)
    found = match(predicted(program), measured)
    if as_json:
        kinds = [
            {
                "kind": k.kind,
                "tasks": k.tasks,
                "predicted_us": k.predicted_us,
                "measured_us": k.measured_us,
                "ratio": k.ratio,
            }
            for k in found.kinds
        ]
        print_json(
            {
                "schedule": done["schedule"],
                "matched": found.matched,
                "unmatched": list(found.unmatched),
                "kinds": kinds,
            }
        )
        return
    console().print(_kinds_table(found))


@app.command("check-gradients")
def check_gradients(
    workload: Annotated[str, typer.Option(help="A shipped workload's name, or a YAML file.")] = "tiny-dancegrpo",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a workload field: key=value (repeatable).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare every kernel with the stage-centric reference; exit 1 beyond 1e-12 (float64) or 1e-5 (float32)."""
    from stagebreaker.sim.workload import load_workload

    chosen = load_workload(workload, tuple(set_ or ()))
    from stagebreaker.executor.gradients import ROUNDS, TOLERANCE, check

    with progress("comparing kernels, a precision and a sampler at a time", ROUNDS) as tick:
        cases = check(chosen, tick)
    worst = {dtype: max(case.max_rel_error for case in cases if case.dtype == dtype) for dtype in TOLERANCE}
    ok = all(worst[dtype] <= limit for dtype, limit in TOLERANCE.items())
    if as_json:
        print_json({"cases": len(cases), "max_rel_error": worst, "ok": ok})
    else:
        rows = [
            (
                case.name,
                case.dtype,
                f"{case.max_rel_error:.1e}",
                "yes" if case.same_bits else "no",
                str(case.clipped),
            )
            for case in cases
        ]
        console().print(
            table(
                f"{len(cases)} cases against the stage-centric reference",
                ("case", "dtype", "max rel error", "same bits", "units clipped"),
                rows,
            )
        )
    if not ok:
        raise CheckFailedError(f"gradients differ by {worst}, the limits are {TOLERANCE}")


def main() -> None:
    """Entry point of stagebreaker-run."""
    run_app(app)


if __name__ == "__main__":
    main()
