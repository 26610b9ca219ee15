"""Pictures of timelines: one lane per GPU in the manner of the paper's Figure 16, and comparison bars.

Colours, hatches and labels are those of ``sim.palette``; a label that does not fit its bar is left out. Requests
that a judge serves side by side are thin bars beneath its busy span. With the step graph, waiting is a pale half-high
bar and the critical path (``sim.critical``) a black outline that goes from lane to lane. Transfers are too short to
see and are left to the trace (``sim.export``), though they count towards the makespan. Figures are made for a screen,
for a page (7 in) or for one of its two columns (3.35 in), without pyplot: nothing is shown, and the same timeline
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.canvas import (
    AXIS_IN,
    COLUMN_IN,
    PAGE_IN,
    RC,
    SCREEN_IN,
    Size,
    figure_of,
    save_figure,
    size_of,
    text_us,
    unit_of,
)
from stagebreaker.sim.critical import GAP, Segment, critical_path
from stagebreaker.sim.dataflow import REQUEST, StepGraph
from stagebreaker.sim.export import packed
from stagebreaker.sim.palette import BAR_FILL, BASELINE_FILL, INK, STYLES, WAITS, Style, labels, text_points, waiting
from stagebreaker.sim.timeline import LINK_KINDS, LINK_PREFIX, Row, Timeline, link_ends

_BAR_TOP, _BAR = 0.1, 0.8
"""Where a bar lies in its lane."""
CRITICAL = "critical path"


def gantt(
    timeline: Timeline,
    graph: StepGraph | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    width_in: float = SCREEN_IN,
) -> Axes:
    """One lane per GPU over time; with ``graph`` also waiting, busy shares and the critical path.

    Without ``ax`` a figure ``width_in`` inches wide and of a fitting height is made (``ax.figure``). ``InputError``
    for a row on no lane.
    """
    if ax is None:
        ax = _figure([timeline], [graph], width_in)[0]
    unit = unit_of(timeline.makespan_us)
    _draw(ax, timeline, graph, unit, timeline.makespan_us)
    _time_axis(ax, unit)
    _legend(ax, [timeline], [graph])
    if title is not None:
        _title(ax, title)
    return ax


def gantts(
    timelines: Mapping[str, Timeline],
    graphs: Mapping[str, StepGraph] | None = None,
    ax: Sequence[Axes] | None = None,
    remarks: Mapping[str, str] | None = None,
    width_in: float = SCREEN_IN,
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """One panel per schedule on one time axis, in the mapping's order, each with its makespan in the title.

    ``ax`` takes one Axes per timeline; ``remarks`` go behind the makespan. Returns the array of Axes.
    """
    if not timelines:
        raise InputError("timelines is empty; give at least one timeline to draw")
    if ax is not None and len(ax) != len(timelines):
        raise InputError(f"ax has {len(ax)} axes for {len(timelines)} timelines; give one for each")
    given = [(graphs or {}).get(name) for name in timelines]
    axes = list(ax) if ax is not None else _figure(list(timelines.values()), given, width_in)
    longest_us = max(timeline.makespan_us for timeline in timelines.values())
    unit = unit_of(longest_us)
    for panel, (name, timeline), graph in zip(axes, timelines.items(), given, strict=True):
        _draw(panel, timeline, graph, unit, longest_us)
        remark = (remarks or {}).get(name)
        _title(panel, f"{name}: {text_us(timeline.makespan_us)}" + (f", {remark}" if remark else ""))
        panel.tick_params(labelbottom=panel is axes[-1])
    _time_axis(axes[-1], unit)
    _legend(axes[-1], list(timelines.values()), given)
    result = np.empty(len(axes), dtype=object)
    result[:] = axes
    return result


def _figure(timelines: Sequence[Timeline], graphs: Sequence[StepGraph | None], width_in: float) -> list[Axes]:
    """Fresh axes stacked in one figure; every lane has the same height in inches."""
    figure = Figure(figsize=(width_in, 1))
    size = size_of(figure)
    rows = -(-len(_looks(timelines, graphs)) // size.legend_columns)
    heights = [_Layout(t).height * size.lane_in for t in timelines]
    bottom = AXIS_IN + rows * size.legend_row_in + 0.15
    total = sum(heights) + size.title_in * len(timelines) + bottom
    figure.set_figheight(total)
    axes: list[Axes] = []
    top = total
    for height in heights:
        top -= size.title_in + height
        box = (size.left_in / width_in, top / total, 1 - (size.left_in + size.right_in) / width_in, height / total)
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


@mpl.rc_context(RC)
def _draw(ax: Axes, timeline: Timeline, graph: StepGraph | None, unit: tuple[str, int], end_us: int) -> None:
    """Lanes, bars, labels and update marks; x is in ``unit`` and ends at ``end_us``."""
    layout, scale = _Layout(timeline), unit[1]
    ax.set_xlim(0, max(end_us, 1) / scale)
    ax.set_ylim(layout.height, 0)
    figure = figure_of(ax)
    per_unit = ax.get_window_extent().width / ax.get_xlim()[1] * 72 / figure.dpi  # points per unit of time
    for lane in timeline.lanes:
        top = layout.top[lane.name]
        for row in timeline.spans(lane.name):
            _bar(ax, row, top + _BAR_TOP, _BAR, scale, per_unit)
        lines = layout.requests[lane.name]
        for n, line in enumerate(lines):
            height = (layout.sub_height(lane.name) - 0.05) / len(lines)
            for row in line:
                _bar(ax, row, top + 0.95 + n * height, height, scale, per_unit)
    _lanes(ax, timeline, layout)
    _updates(ax, timeline, scale, per_unit)
    if graph is not None:
        _waiting(ax, timeline, graph, layout, scale)
        _shares(ax, timeline, graph, layout)
        _critical(ax, critical_path(timeline, graph), layout, scale)


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
    fonts = size_of(figure_of(ax)).fonts
    fitting = ((t, size) for t in labels(row) for size in fonts if text_points(t, size) + 2 <= points)
    text, size = next(fitting, ("", 0.0))
    if text:
        ax.text(
            start + width / 2,
            top + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=size,
            zorder=6,
            path_effects=[withStroke(linewidth=1.8, foreground="white")],
            clip_on=True,
        )


def _lanes(ax: Axes, timeline: Timeline, layout: _Layout) -> None:
    """Lane names and lines between lanes, a strong one where the role changes."""
    ax.set_yticks([layout.top[lane.name] + 0.5 for lane in timeline.lanes], [lane.name for lane in timeline.lanes])
    ax.tick_params(axis="y", length=0, labelsize=size_of(figure_of(ax)).axis_font)
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
    font = size_of(figure_of(ax)).note_font
    for row in sorted((r for r in timeline.rows if r.kind == "update"), key=lambda r: r.end_us):
        at = row.end_us / scale
        ax.axvline(at, color=STYLES["update"].fill, linewidth=1, linestyle=(0, (4, 2)), zorder=3, clip_on=False)
        text = f"update {row.mini_batch}"
        width = text_points(text, font) / per_unit
        if at - width / 2 >= taken:
            ax.annotate(
                text,
                (at, 1),
                (0, 2),
                xycoords=ax.get_xaxis_transform(),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=font,
                color=STYLES["update"].line,
            )
            taken = at + width / 2


def _shares(ax: Axes, timeline: Timeline, graph: StepGraph, layout: _Layout) -> None:
    """Beside each lane: busy share of the makespan, and the largest cause of idle time from 1 % on."""
    whole = max(timeline.makespan_us, 1)
    size = size_of(figure_of(ax))
    for use in timeline.use(graph):
        cause, idle_us = max(use.idle_us.items(), key=lambda item: item[1])
        text = f"{use.busy_us / whole:.0%}"
        if size.causes:
            text += " busy" + (f", {idle_us / whole:.0%} {cause}" if idle_us >= whole / 100 else "")
        _beside(ax, layout.top[use.lane.name] + 0.5, text, size)
    if not size.causes:  # the head of the column stands above the names of updates
        _beside(ax, 0, "busy", size, 1.6 * size.note_font + 4)


def _beside(ax: Axes, lane: float, text: str, size: Size, up: float = 0) -> None:
    ax.annotate(
        text,
        (1, lane),
        (6 if size.causes else 4, up),
        xycoords=ax.get_yaxis_transform(),
        textcoords="offset points",
        ha="left",
        va="center",
        fontsize=size.note_font,
        color=INK,
    )


def _waiting(ax: Axes, timeline: Timeline, graph: StepGraph, layout: _Layout, scale: int) -> None:
    """Half-high pale bars where a lane has something left to do and waits for it."""
    found: dict[str, list[Rectangle]] = {name: [] for name in WAITS}
    for lane, pieces in timeline.idle(graph).items():
        for piece in pieces:
            name = waiting(piece.cause)
            if name is not None:
                width = (piece.end_us - piece.start_us) / scale
                found[name].append(Rectangle((piece.start_us / scale, layout.top[lane] + 0.28), width, 0.44))
    for name, boxes in found.items():
        style = WAITS[name]
        drawn = PatchCollection(boxes, facecolor=style.fill, edgecolor=style.line, linewidth=0.4, hatch=style.hatch)
        drawn.set_zorder(1.5)
        drawn.set_gid(name)
        ax.add_collection(drawn)


def _critical(ax: Axes, path: Sequence[Segment], layout: _Layout, scale: int) -> None:
    """A black outline around the critical path's stay on each lane, and lines where it goes to another.

    A gap of a measured step is bridged by such a line, or left open where the path stays on its lane.
    """
    stays: list[tuple[str, float, float]] = []  # lane, start and end
    lines: list[list[tuple[float, float]]] = []
    left: tuple[str, float] | None = None  # lane and time of the end before
    for piece in path:
        start, end = piece.start_us / scale, piece.end_us / scale
        if piece.kind == GAP:
            continue
        if piece.kind in LINK_KINDS:
            left = left or (piece.gpu.removeprefix(LINK_PREFIX), start)
        else:
            if left == (piece.gpu, start):
                stays[-1] = (piece.gpu, stays[-1][1], end)
            else:
                stays.append((piece.gpu, start, end))
                if left is not None and left[0] != piece.gpu:
                    lines.append(_joint(left, (piece.gpu, start), layout))
            left = (piece.gpu, end)
    if path and path[-1].kind in LINK_KINDS and left is not None:
        lines.append(_joint(left, (link_ends(path[-1].task)[2], path[-1].end_us / scale), layout))
    for lane, start, end in stays:
        top, bottom = layout.top[lane] + _BAR_TOP, layout.top[lane] + _BAR_TOP + _BAR
        lines.append([(start, top), (end, top), (end, bottom), (start, bottom), (start, top)])
    black, casing = (1.3, 2.3) if size_of(figure_of(ax)).causes else (0.9, 1.7)
    drawn = LineCollection(lines, colors="black", linewidths=black, zorder=5, capstyle="projecting", clip_on=False)
    drawn.set_path_effects([withStroke(linewidth=casing, foreground="white")])
    drawn.set_gid(CRITICAL)
    ax.add_collection(drawn)


def _joint(leaves: tuple[str, float], reaches: tuple[str, float], layout: _Layout) -> list[tuple[float, float]]:
    """From the edge of one lane's bar to the nearer edge of another's."""
    one, two = layout.top[leaves[0]] + _BAR_TOP, layout.top[reaches[0]] + _BAR_TOP
    down = one < two
    return [(leaves[1], one + _BAR * down), (reaches[1], two + _BAR * (not down))]


def _looks(timelines: Sequence[Timeline], graphs: Sequence[StepGraph | None]) -> dict[str, Style | None]:
    """What the legend explains: the kinds that occur, and what is drawn with a step graph (the path has no fill)."""
    found = {row.kind for t in timelines for row in t.rows if not row.gpu.startswith(LINK_PREFIX)}
    looks: dict[str, Style | None] = {k.replace("_", " "): style for k, style in STYLES.items() if k in found}
    explained = [t.idle(graph) for t, graph in zip(timelines, graphs, strict=True) if graph is not None]
    waits = {waiting(piece.cause) for idle in explained for pieces in idle.values() for piece in pieces}
    looks.update({name: style for name, style in WAITS.items() if name in waits})
    return {**looks, CRITICAL: None} if explained else looks


@mpl.rc_context(RC)
def _legend(ax: Axes, timelines: Sequence[Timeline], graphs: Sequence[StepGraph | None]) -> None:
    """The kinds that occur, below the time axis."""
    handles: list[Patch] = [
        Patch(facecolor=s.fill, edgecolor=s.line, hatch=s.hatch, linewidth=0.5, label=name)
        if s is not None
        else Patch(facecolor="white", edgecolor="black", linewidth=1.3, label=name)
        for name, s in _looks(timelines, graphs).items()
    ]
    size = size_of(figure_of(ax))
    rows = -(-len(handles) // size.legend_columns)
    below = ax.transAxes + ScaledTranslation(0, -AXIS_IN, figure_of(ax).dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0 if size.causes else -0.15, 0),
        bbox_transform=below,
        borderaxespad=0,
        ncols=-(-len(handles) // max(rows, 1)),
        fontsize=size.axis_font,
        frameon=False,
        handlelength=2.4,
        handleheight=1.1,
        columnspacing=1.6 if size.causes else 1.0,
        labelspacing=0.4,
    )


def _title(ax: Axes, text: str) -> None:
    size = size_of(figure_of(ax))
    ax.set_title(text, loc="left", fontsize=size.title_font, fontweight="bold", pad=size.note_font + 5)


def _time_axis(ax: Axes, unit: tuple[str, int]) -> None:
    size = size_of(figure_of(ax))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12 if size.causes else 6, steps=[1, 2, 2.5, 5, 10]))
    ax.tick_params(axis="x", labelsize=size.axis_font)
    ax.set_xlabel(f"time ({unit[0]})", fontsize=size.axis_font, labelpad=2)


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
        [f"{s:.2f}x  ({text_us(us)})" for s, us in zip(speedups, step_us.values(), strict=True)],
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


__all__ = [
    "COLUMN_IN",
    "CRITICAL",
    "PAGE_IN",
    "SCREEN_IN",
    "figure_of",
    "gantt",
    "gantts",
    "save_figure",
    "speedup_bars",
]
