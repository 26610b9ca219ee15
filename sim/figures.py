"""Figures of results: the published Figures 3, 9 and 16 beside what was reproduced, and speedups along one axis.

``published_bars`` draws a published range as an interval and what each pair of algorithm and judge gives as a bar;
``figure_16`` draws five systems on one time axis. ``plot_sweep`` draws any rows with the columns of
docs/predictions.csv. Series differ in hatch, marker and dashes, so that grey print and colour-blind readers lose
nothing. What the costs were fitted to, or whether anything was measured, is not known here: say it in the caption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.palette import INK, SERIES
from stagebreaker.sim.plot import PAGE_IN, figure_of, gantts
from stagebreaker.sim.published import METRICS, PAIRS, Case, Published, Steps, speedup
from stagebreaker.sim.schedules import SCHEDULES

SWEPT = ("candidates", "mini_batches", "latent_frames", "resolution", "policy")
"""What a sweep may vary, in the order of the columns."""
_AXIS_NAMES = {"latent_frames": "latent frames", "mini_batches": "mini-batches"}
_FONT = 7.0
_RC: dict[Any, Any] = {"hatch.linewidth": 0.5, "svg.hashsalt": "stagebreaker"}
_METRIC_NAMES = {
    "reward_train_share": "rewards and training,\nshare of the step",
    "redundant_replay_share": "redundant replay,\nshare of the GPU time",
}


# -- published results


@mpl.rc_context(_RC)
def published_bars(
    rows: Sequence[Published], steps: Mapping[Case, Steps], ax: Axes | None = None, ylabel: str = "speedup"
) -> Axes:
    """For every row its published range (an interval) and, per pair, what the simulated ``steps`` give (bars).

    Speedups are ratios of step times, shares are of 1. Raises ``InputError`` for no rows.
    """
    if not rows:
        raise InputError("rows is empty; give at least one published row to draw")
    if ax is None:
        figure = Figure(figsize=(min(PAGE_IN, 2.0 + 1.0 * len(rows)), 2.7), layout="constrained")
        ax = figure.add_subplot()
    pairs = [pair for pair in PAIRS if any(case.pair == pair for row in rows for case in row.cases)]
    width, top = 0.8 / len(pairs), 0.0
    values: list[tuple[float, float]] = []
    for n, row in enumerate(rows):
        ax.fill_between((n - 0.46, n + 0.46), row.low, row.high, color="#D9D9D9", linewidth=0, zorder=1)
        for bound in {row.low, row.high}:
            ax.plot((n - 0.46, n + 0.46), (bound, bound), color="black", linewidth=1.1, zorder=4)
        for case in row.cases:
            k = pairs.index(case.pair)
            value = METRICS[row.metric](steps[case])
            at, top = n + (k - (len(pairs) - 1) / 2) * width, max(top, value, row.high)
            look = SERIES[1 + k]
            values.append((at, value))
            ax.bar(at, value, 0.9 * width, color=look.colour, edgecolor=INK, linewidth=0.5, hatch=look.hatch, zorder=2)
    _bars_axes(ax, [_METRIC_NAMES.get(r.metric, _versus(r)) for r in rows], 1.04 * top, ylabel)
    for at, value in values:  # at the foot of its bar, or on top of one that is too short
        foot = value > 0.15 * top
        ax.text(at, 0.02 * top if foot else value + 0.01 * top, f"{value:.2f}", rotation=90 * foot, **_VALUE)
    handles = [
        Patch(facecolor=SERIES[1 + k].colour, edgecolor=INK, linewidth=0.5, hatch=SERIES[1 + k].hatch, label=pair)
        for k, pair in enumerate(pairs)
    ]
    handles.append(Patch(facecolor="#D9D9D9", edgecolor="black", linewidth=1.1, label="published range"))
    ax.figure.legend(
        handles=handles, loc="outside upper center", ncols=3, fontsize=_FONT, frameon=False, handlelength=2.4
    )
    return ax


_VALUE: dict[str, Any] = {
    "ha": "center",
    "va": "bottom",
    "fontsize": 5.5,
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
}


def _versus(row: Published) -> str:
    name, _, over = row.metric.partition("_vs_")
    return f"{name}\nvs {over}" + ("\n(largest)" if row.id.endswith("_max") else "")


def _bars_axes(ax: Axes, names: Sequence[str], top: float, ylabel: str) -> None:
    ax.set_xticks(range(len(names)), list(names), fontsize=5.8 if len(names) > 4 else _FONT)
    ax.set_xlim(-0.55, len(names) - 0.45)
    ax.set_ylim(0, top)
    if ylabel == "speedup":
        ax.axhline(1, color=INK, linewidth=0.7, linestyle=(0, (4, 2)), zorder=1.5)
    ax.set_ylabel(ylabel, fontsize=_FONT)
    ax.tick_params(axis="y", labelsize=_FONT)
    ax.tick_params(axis="x", length=0)
    ax.spines[["top", "right"]].set_visible(False)


def figure_16(
    steps: Steps, graphs: Mapping[str, StepGraph], ax: Sequence[Axes] | None = None, width_in: float = PAGE_IN
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """GPU timelines of the systems in ``steps`` on one time axis, each with step time and speedup over ``colocated``.

    Waiting and the critical path are drawn; ``ax`` takes one Axes per system. Returns the array of Axes.
    """
    if "colocated" not in steps:
        raise InputError(f"steps holds {', '.join(steps) or 'nothing'}; colocated, which speedups refer to, is missing")
    remarks = {name: f"{speedup(steps, name, 'colocated'):.2f}x colocated" for name in steps}
    return gantts(steps, graphs, ax=ax, remarks=remarks, width_in=width_in)


# -- sweeps


@mpl.rc_context(_RC)
def plot_sweep(
    frame: pd.DataFrame,
    ax: Axes | Sequence[Axes] | None = None,
    x: str | None = None,
    y: str = "speedup_vs_colocated",
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """One panel per pair, one line per schedule, over the one column of ``SWEPT`` that varies (or ``x``).

    ``frame`` has the columns pair, schedule, ``SWEPT`` and ``y``; rows where ``y`` is absent are not drawn. ``ax``
    takes one Axes per pair. Returns the array of Axes. Raises ``InputError`` where columns are missing, where no or
    more than one column varies, or where a schedule has two values at one point.
    """
    _has(frame, ("pair", "schedule", *SWEPT, y))
    x = x or _varied(frame)
    pairs = list(dict.fromkeys(frame["pair"]))
    schedules = [name for name in SCHEDULES if name in set(frame["schedule"])]
    schedules += sorted(set(frame["schedule"]) - set(schedules))
    if len(schedules) > len(SERIES):
        raise InputError(
            f"frame has {len(schedules)} schedules; select at most {len(SERIES)}, more cannot be told apart"
        )
    axes = [ax] if isinstance(ax, Axes) else list(ax) if ax is not None else _panels(len(pairs))
    if len(axes) != len(pairs):
        raise InputError(f"ax has {len(axes)} axes for {len(pairs)} pairs; give one for each")
    places = {value: n for n, value in enumerate(_ordered(frame[x]))}
    for panel, pair in zip(axes, pairs, strict=True):
        rows = frame[frame["pair"] == pair]
        for look, name in zip(SERIES, schedules, strict=False):
            line = rows[(rows["schedule"] == name) & rows[y].notna()]
            if line[x].duplicated().any():
                raise InputError(f"{pair}, {name}: two rows at {x}={line[x][line[x].duplicated()].iloc[0]}; keep one")
            line = line.assign(place=line[x].map(places)).sort_values("place")
            panel.plot(
                line["place"],
                line[y],
                color=look.colour,
                marker=look.marker,
                linestyle=look.dashes,
                **_LINE,
                label=name,
            )
        _sweep_axes(panel, pair, x, list(places))
    for panel in axes if ax is not None else axes[::2]:
        panel.set_ylabel(y.replace("_vs_", " over ").replace("_", " "), fontsize=_FONT)
    _line_legend(axes, schedules)
    result = np.empty(len(axes), dtype=object)
    result[:] = axes
    return result


_LINE: dict[str, Any] = {"linewidth": 1.2, "markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.4}


def _has(frame: pd.DataFrame, columns: Iterable[str]) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise InputError(f"column {missing[0]!r} is not in the frame; {nearest(missing[0], frame.columns)}")
    if frame.empty:
        raise InputError("frame has no rows; select at least one")


def _varied(frame: pd.DataFrame) -> str:
    """The column whose values differ within a pair."""
    varied = [column for column in SWEPT if (frame.groupby("pair")[column].nunique() > 1).any()]
    if len(varied) != 1:
        what = ", ".join(varied) or "nothing"
        raise InputError(f"the rows vary in {what}; select rows that vary in one of {', '.join(SWEPT)}, or give x")
    return varied[0]


def _ordered(values: pd.Series[Any]) -> list[Any]:
    """Distinct values by the numbers in them (360p before 480p, 1.3B before 5B), as equally spaced places."""

    def key(value: Any) -> tuple[tuple[float, ...], str]:
        numbers = pd.Series([str(value)]).str.findall(r"\d+(?:\.\d+)?").iloc[0]
        return tuple(float(number) for number in numbers), str(value)

    return sorted(values.unique(), key=key)


def _panels(count: int) -> list[Axes]:
    rows = -(-count // 2)
    columns = min(count, 2)
    figure = Figure(figsize=(3.5 * columns, 0.7 + 1.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for spare in panels[count:]:
        spare.remove()
    return list(panels[:count])


def _sweep_axes(ax: Axes, pair: str, x: str, values: Sequence[Any]) -> None:
    ax.set_title(pair, loc="left", fontsize=_FONT + 1, fontweight="bold")
    ax.set_xticks(range(len(values)), [str(value) for value in values])
    ax.set_xlim(-0.3, len(values) - 0.7)
    ax.axhline(1, color="#9A9A9A", linewidth=0.7, zorder=0.5)
    ax.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel(_AXIS_NAMES.get(x, x), fontsize=_FONT, labelpad=2)
    ax.tick_params(labelsize=_FONT, labelleft=True)
    ax.spines[["top", "right"]].set_visible(False)


def _line_legend(axes: Sequence[Axes], schedules: Sequence[str]) -> None:
    """One legend above a figure with constrained layout, else inside the first axes."""
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dashes, **_LINE, label=name)
        for look, name in zip(SERIES, schedules, strict=False)
    ]
    style: dict[str, Any] = {"handles": handles, "fontsize": _FONT, "frameon": False, "handlelength": 3.6}
    figure = figure_of(axes[0])
    if figure.get_layout_engine() is not None:
        columns = 4 if len(axes) > 1 else 2
        figure.legend(loc="outside upper center", ncols=min(columns, len(schedules)), **style)
    else:
        axes[0].legend(loc="best", **style)
