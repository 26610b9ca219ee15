"""What-if studies: one thing varies, every schedule is simulated at each value, and the gain is read off.

The headline is the speedup over the best schedule that is not ours on as many GPUs, at the split that suits it best.
Our placement is the optimum where the planner can simulate the whole count space quickly (``EXHAUSTIVE``); elsewhere
what a coarse search finds (``placement.coarse``), simulated exactly but with no proof. Column ``search`` says
which. It knows nothing of where a profile's costs come from: say that beside every figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stagebreaker.placement.coarse import Simulated, coarse_placement
from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.space import SCHEDULE, Space
from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.profiles.judges import find_judge
from stagebreaker.profiles.roofline import hardware_table
from stagebreaker.profiles.table import JUDGE_KINDS, TASK_KINDS, Profile, Serving
from stagebreaker.sim.palette import INK, SERIES
from stagebreaker.sim.plan import SCORING, Placement
from stagebreaker.sim.plot import PAGE_IN
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.workload import Cluster, Workload, predicted_costs

EXHAUSTIVE = 1800
"""Count spaces up to this size, all scoring modes together, are simulated as a whole."""
HEADLINE = "speedup_vs_best_other"
SPEEDUPS = {
    HEADLINE: "the best schedule that is not ours",
    "speedup_vs_colocated": "colocated",
    "speedup_vs_async_reward": "async_reward",
}
"""Column -> over what."""


class Setting(NamedTuple):
    """One point of a study. ``split`` (actor, reward GPUs) fixes ours; it is searched if None."""

    workload: Workload
    profile: Profile
    gpus: int
    split: tuple[int, int] | None = None


# -- comparing schedules ---------------------------------------------------------------------------------------


def compare(
    workload: Workload, profile: Profile, gpus: int | None = None, split: tuple[int, int] | None = None
) -> pd.DataFrame:
    """One row per schedule that a user could run, in the order of the schedule table.

    ``gpus``: the sum of ``split``, or the workload's default, unless given. Columns as the planner's table has them:
    ``step_us`` at the split of our placement (``actors``, ``rewards``), ``best_step_us`` at the schedule's own
    ``best_split``, ``speedup_vs_colocated`` and ``speedup_vs_async_reward`` (of step_us), ``speedup_vs_best_other``
    (over the best_step_us of ``best_other``); and of our placement its ``scoring``, ``decodes_moved``,
    ``replays_moved`` and ``search``, exhaustive or coarse. A number is absent where the schedule does not fit into
    memory. Raises ``InputError`` if ours does not, or the profile is of another workload.
    """
    workload.check_profile(profile)
    count, kind = _gpus(workload, gpus, split), profile.gpu_kinds[0]
    cluster = Cluster.equal(count, kind.name, kind.memory_bytes)
    ours, our_us, search = _our_placement(workload, profile, cluster, split)
    rows = []
    for name in (name for name, schedule in SCHEDULES.items() if schedule.eligible):
        if name == SCHEDULE:
            steps = {(ours.actors, ours.rewards): our_us}
        else:
            steps = _steps_us(name, workload, profile, cluster)
        best = min(steps, key=lambda at: (steps[at], at), default=None)
        rows.append(
            {
                "schedule": name,
                "step_us": steps.get((ours.actors, ours.rewards)),
                "best_step_us": steps[best] if best else None,
                "best_split": None if best is None else "all" if SCHEDULES[name].everywhere else f"{best[0]}+{best[1]}",
            }
        )
    table = pd.DataFrame(rows).astype({"step_us": "Int64", "best_step_us": "Int64"})
    by_name = table.set_index("schedule")
    theirs = by_name["best_step_us"][[n for n in by_name.index if not SCHEDULES[n].ours]].dropna()
    for name in ("colocated", "async_reward"):
        table[f"speedup_vs_{name}"] = (by_name["step_us"][name] / table["step_us"]).astype("Float64")
    table[HEADLINE] = (theirs.min() / table["step_us"]).astype("Float64")
    return table.assign(
        best_other=str(theirs.idxmin()) if len(theirs) else None,
        actors=ours.actors,
        rewards=ours.rewards,
        scoring=ours.scoring,
        decodes_moved=ours.vae_moved,
        replays_moved=sum(ours.train_moved),
        search=search,
    )


def _gpus(workload: Workload, gpus: int | None, split: tuple[int, int] | None) -> int:
    if split is None:
        return workload.default_gpus if gpus is None else gpus
    if min(split) < 1:
        raise InputError(f"split={split[0]}+{split[1]} must have at least one actor and one reward GPU")
    if gpus not in (None, sum(split)):
        raise InputError(f"split={split[0]}+{split[1]} has {sum(split)} GPUs, gpus={gpus}; leave one of them out")
    return sum(split)


def sweep(what: str, values: Iterable[Any], setting: Callable[[Any], Setting]) -> pd.DataFrame:
    """``compare`` of ``setting(value)`` for each value, one below the other; column ``what`` holds the value."""
    tables = []
    for value in values:
        table = compare(*setting(value))
        if what in table.columns:
            raise InputError(f"what={what!r} is already a column of the table; name it otherwise")
        table.insert(0, what, [value] * len(table))
        tables.append(table)
    if not tables:
        raise InputError(f"values of {what} are empty; give at least one")
    return pd.concat(tables, ignore_index=True)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of stagebreaker alone: what it gains, over what, and by which placement."""
    ours = table[table["schedule"] == SCHEDULE].reset_index(drop=True)
    return ours.drop(columns=["schedule", "best_step_us", "best_split"])


# -- drawing ---------------------------------------------------------------------------------------------------


def plot_gains(
    tables: pd.DataFrame | Mapping[str, pd.DataFrame],
    ax: Axes | Sequence[Axes] | None = None,
    xlabel: str | None = None,
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Stagebreaker's three speedups over the values of one ``sweep``, or of several (title -> table), a panel for each.

    A table's first column is the horizontal axis; values stand at equal distances, each with the GPU split of our
    placement beneath it. Below the line at 1 another schedule is faster, and the planner would take that one. ``ax``
    takes one Axes per panel. Returns the array of Axes.
    """
    panels = {"": tables} if isinstance(tables, pd.DataFrame) else dict(tables)
    if not panels:
        raise InputError("tables is empty; give at least one sweep to draw")
    axes = _panels(len(panels)) if ax is None else [ax] if isinstance(ax, Axes) else list(ax)
    if len(axes) != len(panels):
        raise InputError(f"ax has {len(axes)} axes for {len(panels)} tables; give one for each")
    for panel, (title, table) in zip(axes, panels.items(), strict=True):
        _draw(panel, table, xlabel)
        panel.set_title(title, loc="left", fontsize=8, fontweight="bold")
    axes[0].set_ylabel("speedup of stagebreaker", fontsize=7.5)
    handles = axes[0].get_lines()[: len(SPEEDUPS)]
    if ax is None:
        axes[0].figure.legend(handles=handles, loc="outside upper center", **_LEGEND)
    else:
        axes[0].legend(handles=handles, loc="best", **{**_LEGEND, "ncols": 1})
    result = np.empty(len(axes), dtype=object)
    result[:] = axes
    return result


_LEGEND: dict[str, Any] = {"ncols": 3, "fontsize": 7, "frameon": False, "handlelength": 3.4}


def _panels(count: int) -> list[Axes]:
    figure = Figure(figsize=(max(5.6, min(PAGE_IN, 3.5 * count)), 2.9), layout="constrained")
    return list(figure.subplots(1, count, sharey=True, squeeze=False).ravel())


def _draw(ax: Axes, table: pd.DataFrame, xlabel: str | None) -> None:
    rows, what = gains(table), str(table.columns[0])
    places = range(len(rows))
    for (column, over), look in zip(SPEEDUPS.items(), SERIES, strict=False):
        line: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
        line |= {"linewidth": 1.9 if column == HEADLINE else 1.1, "markersize": 4}
        ax.plot(places, rows[column].astype(float), **line, label=f"over {over}")
    ax.axhline(1, color=INK, linewidth=0.8, zorder=1)
    splits = zip(rows[what], rows["actors"], rows["rewards"], strict=True)
    ax.set_xticks(places, [f"{_text(value)}\n{a}+{r}" for value, a, r in splits])
    ax.set_xlim(-0.3, len(rows) - 0.7)
    ax.set_xlabel(f"{xlabel or what}\n(actor + reward GPUs)", fontsize=7)
    ax.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=7, labelleft=True)
    ax.spines[["top", "right"]].set_visible(False)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- simulating ------------------------------------------------------------------------------------------------


def _steps_us(name: str, workload: Workload, profile: Profile, cluster: Cluster) -> dict[tuple[int, int], int]:
    """Split -> step time in us of a schedule in which nothing moves; where it fits."""
    splits = [(a, len(cluster.gpus) - a) for a in range(1, len(cluster.gpus))]
    found: dict[tuple[int, int], int] = {}
    for actors, rewards in splits:
        if found and SCHEDULES[name].everywhere:  # all splits are alike
            return dict.fromkeys(splits, next(iter(found.values())))
        base = Placement(schedule=name, actors=actors, rewards=rewards, scoring="on_arrival")
        step = Simulated(base, workload, profile, cluster).step_us(base)
        if step is not None:
            found[actors, rewards] = step
    return found


def _our_placement(
    workload: Workload, profile: Profile, cluster: Cluster, split: tuple[int, int] | None
) -> tuple[Placement, int, str]:
    """(placement, step time in us, how it was found)."""
    space = Space.of(workload, len(cluster.gpus), split, SCORING)
    if space.size <= EXHAUSTIVE:
        planned = make_plan(workload, cluster, profile, split, SCORING)
        if SCHEDULE in planned.unfit:
            raise InputError(planned.result.nothing_fits())
        ours = planned.plan.schedules[SCHEDULE]
        return ours.placement, ours.step_us, "exhaustive"
    found = coarse_placement(workload, profile, cluster, space)
    return *found, "coarse"


# -- what to vary ----------------------------------------------------------------------------------------------


def scaled(profile: Profile, kind: str, factor: float) -> Profile:
    """``profile`` with all durations of one task kind times ``factor``; its source says so."""
    if not any(task.kind == kind for task in profile.tasks):
        raise InputError(f"profile {profile.name!r} has no task {kind!r}; {nearest(kind, TASK_KINDS)}")
    if kind == "score" and profile.verdicts is not None:
        raise InputError(f"profile {profile.name!r} makes a score of tokens; scale {', '.join(JUDGE_KINDS)} instead")
    if not 0 <= factor < math.inf:
        raise InputError(f"factor={factor} must be a finite number of at least 0")
    tasks = [
        task.model_copy(update={"samples_us": tuple(round(us * factor) for us in task.samples_us)})
        if task.kind == kind
        else task
        for task in profile.tasks
    ]
    source = f"{kind} times {factor:g} for a what-if. {profile.source}"
    return profile.model_copy(update={"tasks": tuple(tasks), "source": source})


def served(profile: Profile, serving: str) -> Profile:
    """``profile`` whose judge serves as ``serving`` says: serial, dynamic or continuous."""
    modes = get_args(Serving)
    if serving not in modes:
        raise InputError(f"serving={serving!r} is no serving mode; {nearest(serving, modes)}")
    return profile.model_copy(update={"serving": serving})


def predicted(workload: Workload, hardware: str, sigma: float | None = None, seed: int = 0) -> Profile:
    """What the roofline formulas alone say of a workload on a GPU of the hardware table.

    With ``sigma`` the judge serves token by token: lengths of verdicts are log-normal with that standard deviation of
    the logarithm, drawn by ``seed``, and ``judge_tokens`` stays their mean, so that only their spread varies.
    """
    judge = find_judge(workload.judge)
    profile = predicted_costs(workload, hardware_table().find(hardware), sigma=sigma)
    if profile.verdicts is None or sigma is None:
        return profile
    mean = workload.judge_tokens / len(judge.rounds)
    median = max(1, round(mean * math.exp(-(sigma**2) / 2)))
    lengths = {"tokens_per_turn": median, "max_tokens": max(1, round(8 * mean)), "seed": seed}
    return profile.model_copy(update={"verdicts": profile.verdicts.model_copy(update=lengths)})
