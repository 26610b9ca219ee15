"""stagebreaker-profile: measure what every task of a workload costs on this machine.

Without a sub-command it profiles (this needs the engines); ``predict`` works a profile out from FLOPs and bytes for
hardware that is not at hand; ``compare`` lays two profiles side by side, ``merge`` puts two kinds of GPU into one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stagebreaker.profiles.cli import (
    VersionFlag,
    check_file,
    check_folder,
    console,
    print_json,
    progress,
    ratio,
    run_app,
    seconds,
    share,
    table,
)
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile

app = typer.Typer(help=__doc__, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def profile(
    context: typer.Context,
    workload: Annotated[str, typer.Option(help="A shipped workload's name, or a YAML file.")] = "tiny-dancegrpo",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16. Default: bfloat16 on cuda, else float32.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Samples per task.")] = 7,
    neighbours: Annotated[
        int | None,
        typer.Option(help="Busy processes beside the one that is timed. Default: on a CPU the plan's others."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a workload field: key=value (repeatable).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    as_json: JsonFlag = False,
    _version: VersionFlag = False,
) -> None:
    """Measure a workload's tasks on this machine."""
    if context.invoked_subcommand is not None:
        return
    from stagebreaker.sim.workload import load_workload

    chosen = load_workload(workload, tuple(set_ or ()))
    if repeats < 1:
        raise InputError(f"--repeats {repeats} must be at least 1")
    check_file(out)
    from stagebreaker.executor import profiling
    from stagebreaker.executor.device import pick

    where, precision = pick(device, dtype)
    beside = neighbours if neighbours is not None else (chosen.default_gpus - 1 if where == "cpu" else 0)
    if not 0 <= beside <= 64:
        raise InputError(f"--neighbours {beside} must be in 0..64")
    with progress("timing tasks", profiling.count(chosen)) as tick:
        measured = profiling.profile_workload(chosen, where, precision, repeats, beside, tick)
    measured.save(out)
    if as_json:
        print_json(summary(measured))
        return
    show(measured)
    console().print(f"wrote {out}")


def summary(found: Profile) -> dict[str, Any]:
    """The object ``--json`` prints."""
    return {
        "name": found.name,
        "provenance": found.provenance,
        "serving": found.serving,
        "tasks": [
            {
                "kind": t.kind,
                "gpu_kind": t.gpu_kind,
                "batch_size": t.batch_size,
                "median_us": t.median_us,
                "spread": round(t.spread, 4),
                "samples": len(t.samples_us),
            }
            for t in found.tasks
        ],
        "sizes_bytes": found.sizes_bytes,
        "link": found.link.model_dump(),
    }


def show(found: Profile) -> None:
    """A table for people."""
    rows = [
        (t.kind, t.gpu_kind, str(t.batch_size), seconds(t.median_us), share(t.spread), str(len(t.samples_us)))
        for t in found.tasks
    ]
    kinds = ", ".join(kind.model for kind in found.gpu_kinds)
    console().print(
        table(
            f"{found.name}: {found.provenance} on {kinds}",
            ("task", "GPU kind", "batch", "median", "spread", "samples"),
            rows,
        )
    )


@app.command()
def predict(
    workload: Annotated[str, typer.Option(help="A shipped workload's name, or a YAML file.")] = "dancegrpo-vrt",
    hardware: Annotated[str, typer.Option(help="A GPU of the hardware table.")] = "rtx-pro-5000-72gb",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a workload field: key=value (repeatable).")
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(help="Describe the judge token by token, verdict lengths log-normal with this spread (0: none)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    as_json: JsonFlag = False,
) -> None:
    """Predict a profile by FLOPs and bytes, for hardware that is not at hand; nothing is measured."""
    from stagebreaker.profiles.roofline import hardware_table
    from stagebreaker.sim.workload import load_workload, predicted_costs

    w = load_workload(workload, tuple(set_ or ()))
    check_file(out)
    where = hardware_table().find(hardware)
    predicted = predicted_costs(w, where, f"{w.name}-{hardware}-predicted", sigma)
    predicted.save(out)
    if as_json:
        print_json(summary(predicted))
        return
    show(predicted)
    console().print(f"wrote {out}: predicted, not measured")


@app.command()
def fit(
    out: Annotated[Path, typer.Option(help="Folder for fitted-<algorithm>-<judge>.json.")] = Path("fitted"),
    as_json: JsonFlag = False,
) -> None:
    """Fit the unknown costs to the published results (two minutes); say which of them the data identify."""
    from stagebreaker.placement.reproduce import best_placement
    from stagebreaker.sim.fit import fit as run
    from stagebreaker.sim.fit import fitted_profiles

    check_folder(out)
    found = run(best_placement, lambda line: print(line, file=sys.stderr))
    for pair, fitted in fitted_profiles(found).items():
        fitted.save(out / f"fitted-{pair}.json")
    if as_json:
        print_json({"costs_us": found.costs_us, "identified": found.identified, "objective": found.objective})
        return
    rows = [
        (name, seconds(round(us)), f"{us / found.unit_us:.4f}", _known(found.identified.get(name)))
        for name, us in found.costs_us.items()
    ]
    screen = console()
    screen.print(table("fitted costs", ("parameter", "cost", "units", "decided by the data"), rows))
    screen.print(f"unit: async_reward's step of dancegrpo-vrt at 24 candidates, {seconds(found.unit_us)}")
    screen.print("anchor of the absolute scale: one 21-latent-frame rollout is taken as 7.5 s; ratios fix no scale")
    left = [(f"{r.id} ({r.end})", f"{r.in_tolerances:+.2f}") for r in found.residuals]
    screen.print(table("residuals, in tolerances", ("row", "residual"), left))
    screen.print(f"wrote four profiles to {out}/")


def _known(part: float | None) -> str:
    return "anchor" if part is None else f"{100 * part:.0f} %"


@app.command()
def merge(
    first: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile.json.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="One of the same workload on another kind of GPU.")],
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.json"),
    as_json: JsonFlag = False,
) -> None:
    """Put profiles of two kinds of GPU into one, for a cluster that has both; the slower link counts."""
    a, b = Profile.load(first), Profile.load(second)
    check_file(out)
    merged = merged_profile(a, b)
    merged.save(out)
    if as_json:
        print_json(summary(merged))
        return
    show(merged)
    console().print(f"wrote {out}")


def merged_profile(a: Profile, b: Profile) -> Profile:
    """Both profiles' GPU kinds. Raises ``InputError`` where they are not of the same workload."""
    for field in ("workload", "settings", "serving", "dtype", "sizes_bytes", "memory_bytes", "verdicts"):
        one, other = getattr(a, field), getattr(b, field)
        if one != other:
            raise InputError(f"the profiles have {field}={one!r} and {other!r}; merge profiles of one workload")
    if both := {kind.name for kind in a.gpu_kinds} & {kind.name for kind in b.gpu_kinds}:
        raise InputError(f"both have GPU kind {', '.join(sorted(both))}; merge profiles of different GPUs")
    slower = max((a.link, b.link), key=lambda link: link.duration_us(10**9))
    same = a.provenance == b.provenance
    return a.model_copy(
        update={
            "name": f"{a.name}+{b.name}",
            "provenance": a.provenance if same else "provisional",
            "source": f"{a.provenance}: {a.source} {b.provenance}: {b.source}",
            "gpu_kinds": (*a.gpu_kinds, *b.gpu_kinds),
            "link": slower,
            "tasks": (*a.tasks, *b.tasks),
        }
    )


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A profile.json.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: JsonFlag = False,
) -> None:
    """Medians of two profiles side by side, second over first."""
    a, b = Profile.load(first), Profile.load(second)
    if len(a.gpu_kinds) == len(b.gpu_kinds) == 1 and a.gpu_kinds[0].name != b.gpu_kinds[0].name:
        there, here = b.gpu_kinds[0].name, a.gpu_kinds[0].name  # one GPU beside another: by task and batch
        b = b.model_copy(update={"tasks": tuple(t.model_copy(update={"gpu_kind": here}) for t in b.tasks)})
        print(f"{there} beside {here}", file=sys.stderr)
    keys = {(t.kind, t.gpu_kind, t.batch_size): t for t in a.tasks}
    others = {(t.kind, t.gpu_kind, t.batch_size): t for t in b.tasks}
    both = [key for key in keys if key in others]
    lines = [
        {
            "kind": k[0],
            "gpu_kind": k[1],
            "batch_size": k[2],
            "first_us": keys[k].median_us,
            "second_us": others[k].median_us,
            "ratio": _ratio(others[k].median_us, keys[k].median_us),
        }
        for k in both
    ]
    alone = sorted(f"{k[0]} on {k[1]} at batch {k[2]}" for k in keys.keys() ^ others.keys())
    if as_json:
        print_json({"tasks": lines, "only_in_one": alone})
        return
    rows = [
        (
            str(line["kind"]),
            str(line["gpu_kind"]),
            str(line["batch_size"]),
            seconds(keys[k].median_us),
            seconds(others[k].median_us),
            ratio(_ratio(others[k].median_us, keys[k].median_us)),
        )
        for k, line in zip(both, lines, strict=True)
    ]
    console().print(table(f"{a.name} and {b.name}", ("task", "GPU kind", "batch", "first", "second", "ratio"), rows))
    if alone:
        console().print(f"in one of them only: {', '.join(alone)}")


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def main() -> None:
    """Entry point of stagebreaker-profile."""
    run_app(app)


if __name__ == "__main__":
    main()
