"""Figures before anything is on them: their widths, the sizes that go with each, and how they are written.

A figure is made for a screen, for a page (7 in) or for one of its two columns (3.35 in); fonts and lengths follow
from its width. Files hold no date and no version: equal figures give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stagebreaker.profiles.document import InputError

SCREEN_IN, PAGE_IN, COLUMN_IN = 13.0, 7.0, 3.35
"""Widths of a figure in inches."""
AXIS_IN = 0.36
"""Room for the time axis."""
RC: dict[Any, Any] = {"hatch.linewidth": 0.6, "svg.hashsalt": "stagebreaker"}


class Size(NamedTuple):
    """Lengths in inches and fonts in points of one width of figure."""

    lane_in: float
    title_in: float
    left_in: float
    right_in: float
    fonts: tuple[float, ...]
    axis_font: float
    note_font: float
    title_font: float
    legend_columns: int
    causes: bool
    """Whether there is room beside a lane for its main cause of idle time."""

    @property
    def legend_row_in(self) -> float:
        """Height of one row of the legend."""
        return self.axis_font * 1.8 / 72


_SIZES = {
    10.0: Size(0.34, 0.42, 0.8, 1.75, (7.0, 6.0), 8.0, 7.0, 10.0, 6, True),
    5.0: Size(0.22, 0.34, 0.55, 1.3, (6.0, 5.0), 7.0, 6.0, 8.0, 5, True),
    0.0: Size(0.18, 0.3, 0.45, 0.4, (5.5, 4.5), 6.0, 5.5, 7.0, 3, False),
}
"""From this width of the figure on, in inches."""


def size_of(figure: Figure) -> Size:
    """Sizes that go with a figure's width."""
    return next(size for least_in, size in _SIZES.items() if figure.get_figwidth() >= least_in)


def figure_of(ax: Axes) -> Figure:
    """The whole figure that an Axes is in, also where it is in a part of it."""
    figure = ax.figure.figure
    assert isinstance(figure, Figure)
    return figure


def unit_of(makespan_us: int) -> tuple[str, int]:
    """(name, us per unit) of the largest unit that leaves at least two of it."""
    return next((u for u in (("s", 1_000_000), ("ms", 1_000)) if makespan_us >= 2 * u[1]), ("us", 1))


def text_us(duration_us: int) -> str:
    """A duration in its unit, to a tenth."""
    name, scale = unit_of(duration_us)
    return f"{duration_us / scale:.1f} {name}" if scale > 1 else f"{duration_us} us"


def save_figure(figure: Figure, path: Path) -> None:
    """Write png, pdf or svg, by the ending of ``path``, undated: equal figures, equal bytes.

    A png has 150 dots per inch, one that is narrow enough for print 300.
    """
    metadata: dict[str, dict[str, None]] = {
        ".png": {"Software": None},
        ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        ".svg": {"Date": None, "Creator": None},
    }
    if path.suffix not in metadata:
        raise InputError(f"{path}: cannot draw {path.suffix!r}; give a name ending in {', '.join(metadata)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(RC):
        figure.savefig(
            path,
            dpi=150 if figure.get_figwidth() > PAGE_IN else 300,
            metadata=metadata[path.suffix],
            bbox_inches="tight",
        )
