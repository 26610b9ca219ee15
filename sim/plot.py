"""Pictures of timelines: one lane per GPU in the manner of the paper's Figure 16, and comparison bars.

A lane is white where its GPU is idle. Colours, hatches and labels are those of ``sim.palette``; a label that
does not fit its bar is left out. Requests that a judge serves side by side are thin bars beneath its busy
span. Transfers are too short to see and are left to the trace (``sim.export``), though they count towards the
makespan. Figures are made without pyplot: nothing is shown, and the same timeline gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.dataflow import REQUEST, StepGraph
from stagebreaker.sim.export import LINK_PREFIX, packed
from stagebreaker.sim.palette import BAR_FILL, BASELINE_FILL, INK, STYLES, labels, text_points
from stagebreaker.sim.timeline import Row, Timeline

_LANE_IN, _TITLE_IN, _AXIS_IN, _LEGEND_ROW_IN = 0.34, 0.42, 0.42, 0.2
_LEFT_IN, _RIGHT_IN, _WIDTH_IN = 0.8, 1.75, 13.0
_FONTS = (7.0, 6.0)
_LEGEND_COLUMNS = 6
_RC: dict[Any, Any] = {"hatch.linewidth": 0.6, "svg.hashsalt": "stagebreaker"}


def gantt(timeline: Timeline, graph: StepGraph | None = None, ax: Axes | None = None, title: str | None = None) -> Axes:
    """One lane per GPU over time; with ``graph`` also each lane's busy share and main cause of idle time.

    Without ``ax`` a figure of a fitting size is made (``ax.figure``). ``InputError`` for a row on no lane.
    """
    if ax is None:
        ax = _figure([timeline])[0]
    unit = _unit(timeline.makespan_us)
    _draw(ax, timeline, graph, unit, timeline.makespan_us)
    _time_axis(ax, unit)
    _legend(ax, [timeline])
    if title is not None:
        _title(ax, title)
    return ax


def gantts(
    timelines: Mapping[str, Timeline],
    graphs: Mapping[str, StepGraph] | None = None,
    ax: Sequence[Axes] | None = None,
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """One panel per schedule on one time axis, in the mapping's order, each with its makespan in the title.

    ``ax`` takes one Axes per timeline. Returns the array of Axes.
    """
    if not timelines:
        raise InputError("timelines is empty; give at least one timeline to draw")
    if ax is not None and len(ax) != len(timelines):
        raise InputError(f"ax has {len(ax)} axes for {len(timelines)} timelines; give one for each")
    axes = list(ax) if ax is not None else _figure(list(timelines.values()))
    longest_us = max(timeline.makespan_us for timeline in timelines.values())
    unit = _unit(longest_us)
    for panel, (name, timeline) in zip(axes, timelines.items(), strict=True):
        _draw(panel, timeline, (graphs or {}).get(name), unit, longest_us)
        _title(panel, f"{name}: {_text_us(timeline.makespan_us)}")
        panel.tick_params(labelbottom=panel is axes[-1])
    _time_axis(axes[-1], unit)
    _legend(axes[-1], list(timelines.values()))
    result = np.empty(len(axes), dtype=object)
    result[:] = axes
    return result


def _figure(timelines: Sequence[Timeline]) -> list[Axes]:
    """Fresh axes stacked in one figure; every lane has the same height in inches."""
    rows = -(-len(_kinds(timelines)) // _LEGEND_COLUMNS)
    heights = [_Layout(t).height * _LANE_IN for t in timelines]
    bottom = _AXIS_IN + rows * _LEGEND_ROW_IN + 0.15
    total = sum(heights) + _TITLE_IN * len(timelines) + bottom
    figure = Figure(figsize=(_WIDTH_IN, total))
    axes: list[Axes] = []
    top = total
    for height in heights:
        top -= _TITLE_IN + height
        box = (_LEFT_IN / _WIDTH_IN, top / total, 1 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN, height / total)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes else None))
    return axes


class _Layout:
    """Where lanes lie on the y axis, downwards from 0 in lanes; a judge's requests need extra room."""

    def __init__(self, timeline: Timeline) -> None:
        names = [lane.name for lane in timeline.lanes]
        for row in timeline.rows:
            if row.gpu not in names and not row.gpu.startswith(LINK_PREFIX):
                raise InputError(f"task {row.task} ran on {row.gpu!r}; {nearest(row.gpu, names)}")
        self.requests: dict[str, list[list[Row]]] = {}
        self.top: dict[str, float] = {}
        self.height = 0.0
        for name in names:
            self.requests[name] = packed(r for r in timeline.rows if r.gpu == name and r.kind == REQUEST)
            self.top[name] = self.height
            self.height += 1 + self.sub_height(name)

    def sub_height(self, name: str) -> float:
        """Height of a lane's requests: thin, and never more than a lane and a half."""
        return min(1.5, 0.16 * len(self.requests[name]) + 0.05) if self.requests[name] else 0.0


@mpl.rc_context(_RC)
def _draw(ax: Axes, timeline: Timeline, graph: StepGraph | None, unit: tuple[str, int], end_us: int) -> None:
    """Lanes, bars, labels and update marks; x is in ``unit`` and ends at ``end_us``."""
    layout, scale = _Layout(timeline), unit[1]
    ax.set_xlim(0, max(end_us, 1) / scale)
    ax.set_ylim(layout.height, 0)
    per_unit = ax.get_window_extent().width / ax.get_xlim()[1] * 72 / ax.figure.dpi  # points per unit of time
    for lane in timeline.lanes:
        top = layout.top[lane.name]
        for row in timeline.spans(lane.name):
            _bar(ax, row, top + 0.1, 0.8, scale, per_unit)
        lines = layout.requests[lane.name]
        for n, line in enumerate(lines):
            height = (layout.sub_height(lane.name) - 0.05) / len(lines)
            for row in line:
                _bar(ax, row, top + 0.95 + n * height, height, scale, per_unit)
    _lanes(ax, timeline, layout)
    _updates(ax, timeline, scale, per_unit)
    if graph is not None:
        _shares(ax, timeline, graph, layout)


def _bar(ax: Axes, row: Row, top: float, height: float, scale: int, per_unit: float) -> None:
    """One span; its ``gid`` is the task id. The label is the first that fits, else there is none."""
    if row.kind not in STYLES:
        raise InputError(f"task {row.task}: kind {row.kind!r} has no style; {nearest(row.kind, STYLES)}")
    style = STYLES[row.kind]
    start, width = row.start_us / scale, (row.end_us - row.start_us) / scale
    points = width * per_unit
    sliver = points < 3  # an outline would be wider: a line of its colour, over its neighbours' outlines
    bar = Rectangle(
        (start, top),
        width,
        height,
        facecolor=style.fill,
        edgecolor=style.fill if sliver else style.line,
        linewidth=0.8 if sliver else 0.5,
        hatch="" if sliver else style.hatch,
        zorder=2.5 if sliver else 2,
        gid=row.task,
    )
    ax.add_patch(bar)
    fitting = ((t, size) for t in labels(row) for size in _FONTS if text_points(t, size) + 2 <= points)
    text, size = next(fitting, ("", 0.0))
    if text:
        ax.text(
            start + width / 2,
            top + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=size,
            zorder=4,
            path_effects=[withStroke(linewidth=1.8, foreground="white")],
            clip_on=True,
        )


def _lanes(ax: Axes, timeline: Timeline, layout: _Layout) -> None:
    """Lane names and lines between lanes, a strong one where the role changes."""
    ax.set_yticks([layout.top[lane.name] + 0.5 for lane in timeline.lanes], [lane.name for lane in timeline.lanes])
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#E3E3E3", linewidth=0.6)
    for above, lane in pairwise(timeline.lanes):
        change = above.role != lane.role
        ax.axhline(layout.top[lane.name], color="#555555" if change else "#D0D0D0", linewidth=1 if change else 0.5)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _updates(ax: Axes, timeline: Timeline, scale: int, per_unit: float) -> None:
    """A dashed line at the end of every update, named above the lanes where there is room."""
    taken = -np.inf
    for row in sorted((r for r in timeline.rows if r.kind == "update"), key=lambda r: r.end_us):
        at = row.end_us / scale
        ax.axvline(at, color=STYLES["update"].fill, linewidth=1, linestyle=(0, (4, 2)), zorder=3, clip_on=False)
        text = f"update {row.mini_batch}"
        width = text_points(text, _FONTS[0]) / per_unit
        if at - width / 2 >= taken:
            ax.annotate(
                text,
                (at, 1),
                (0, 2),
                xycoords=ax.get_xaxis_transform(),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=_FONTS[0],
                color=STYLES["update"].line,
            )
            taken = at + width / 2


def _shares(ax: Axes, timeline: Timeline, graph: StepGraph, layout: _Layout) -> None:
    """Beside each lane: busy share of the makespan, and the largest cause of idle time from 1 % on."""
    whole = max(timeline.makespan_us, 1)
    for use in timeline.use(graph):
        cause, idle_us = max(use.idle_us.items(), key=lambda item: item[1])
        text = f"{use.busy_us / whole:.0%} busy"
        if idle_us >= whole / 100:
            text += f", {idle_us / whole:.0%} {cause}"
        ax.annotate(
            text,
            (1, layout.top[use.lane.name] + 0.5),
            (6, 0),
            xycoords=ax.get_yaxis_transform(),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=_FONTS[0],
            color=INK,
        )


def _kinds(timelines: Iterable[Timeline]) -> list[str]:
    found = {row.kind for t in timelines for row in t.rows if not row.gpu.startswith(LINK_PREFIX)}
    return [kind for kind in STYLES if kind in found]


@mpl.rc_context(_RC)
def _legend(ax: Axes, timelines: Sequence[Timeline]) -> None:
    """The kinds that occur, below the time axis."""
    handles = [
        Patch(facecolor=s.fill, edgecolor=s.line, hatch=s.hatch, linewidth=0.5, label=kind.replace("_", " "))
        for kind, s in ((kind, STYLES[kind]) for kind in _kinds(timelines))
    ]
    rows = -(-len(handles) // _LEGEND_COLUMNS)
    below = ax.transAxes + ScaledTranslation(0, -_AXIS_IN, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=below,
        borderaxespad=0,
        ncols=-(-len(handles) // max(rows, 1)),
        fontsize=8,
        frameon=False,
        handlelength=2.4,
        handleheight=1.1,
        columnspacing=1.6,
    )


def _title(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=10, fontweight="bold", pad=12)


def _time_axis(ax: Axes, unit: tuple[str, int]) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel(f"time ({unit[0]})", fontsize=8, labelpad=2)


def _unit(makespan_us: int) -> tuple[str, int]:
    """(name, us per unit) of the largest unit that leaves at least two of it."""
    return next((u for u in (("s", 1_000_000), ("ms", 1_000)) if makespan_us >= 2 * u[1]), ("us", 1))


def _text_us(duration_us: int) -> str:
    name, scale = _unit(duration_us)
    return f"{duration_us / scale:.1f} {name}" if scale > 1 else f"{duration_us} us"


def speedup_bars(step_us: Mapping[str, int], baseline: str, ax: Axes | None = None) -> Axes:
    """Speedup of each schedule over ``baseline``, in the mapping's order, from step times in us.

    Raises ``InputError`` for an unknown baseline or a step time that is not positive.
    """
    if baseline not in step_us:
        raise InputError(f"baseline {baseline!r} has no step time; {nearest(baseline, step_us)}")
    for name, duration in step_us.items():
        if duration <= 0:
            raise InputError(f"step_us[{name!r}]={duration} must be > 0")
    if ax is None:
        figure = Figure(figsize=(7, 0.9 + 0.36 * len(step_us)), layout="constrained")
        ax = figure.add_subplot()
    speedups = [step_us[baseline] / duration for duration in step_us.values()]
    fills = [BASELINE_FILL if name == baseline else BAR_FILL for name in step_us]
    bars = ax.barh(range(len(step_us)), speedups, height=0.7, color=fills, edgecolor=INK, linewidth=0.6)
    ax.bar_label(
        bars,
        [f"{s:.2f}x  ({_text_us(us)})" for s, us in zip(speedups, step_us.values(), strict=True)],
        padding=4,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    ax.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0.5)
    ax.set_yticks(range(len(step_us)), list(step_us), fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * max(speedups))
    ax.set_xlabel(f"speedup over {baseline}", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def save_figure(figure: Figure, path: Path) -> None:
    """Write png, pdf or svg, by the ending of ``path``, at 150 dpi, undated: equal figures, equal bytes."""
    metadata: dict[str, dict[str, None]] = {
        ".png": {"Software": None},
        ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        ".svg": {"Date": None, "Creator": None},
    }
    if path.suffix not in metadata:
        raise InputError(f"{path}: cannot draw {path.suffix!r}; give a name ending in {', '.join(metadata)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_RC):
        figure.savefig(path, dpi=150, metadata=metadata[path.suffix], bbox_inches="tight")
