"""Figures of results: what is drawn are the numbers given, published ranges among them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from builders import SECOND, placement_of, profile_of, simulated, workload_of
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stagebreaker.profiles.document import InputError
from stagebreaker.sim.figures import SWEPT, figure_16, plot_sweep, published_bars
from stagebreaker.sim.palette import SERIES
from stagebreaker.sim.plot import save_figure
from stagebreaker.sim.published import BASELINES, METRICS, PAIRS, Case, Published, published
from stagebreaker.sim.timeline import Row, Timeline


def step(seconds: float) -> Timeline:
    """A step that takes as long as it says."""
    row = Row("update:0", "update", None, "", "", "", 0, "actor0", "actor", 0, 0, round(seconds * SECOND))
    return Timeline((row,), ())


STEPS = {
    case: {name: step((n + 2) * (k + 3)) for n, name in enumerate(("colocated", "async_reward", "stagebreaker"))}
    for k, case in enumerate(Case(pair, 12) for pair in PAIRS)
}


def rows_of(*names: str) -> list[Published]:
    return [row for row in published() if row.id in names]


def bars_of(ax: Axes) -> list[Rectangle]:
    return [p for p in ax.patches if isinstance(p, Rectangle)]


def drawn_texts(ax: Axes) -> Any:
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    FigureCanvasAgg(figure).draw()
    return figure


# -- published bars


def test_a_bar_for_every_pair_and_a_line_at_either_end_of_the_published_range() -> None:
    rows = rows_of("fig9.async_reward_vs_colocated", "fig9.stagebreaker_vs_colocated")
    ax = published_bars(rows, STEPS)
    heights = [bar.get_height() for bar in bars_of(ax)]
    assert heights == pytest.approx([METRICS[row.metric](STEPS[case]) for row in rows for case in row.cases])
    assert heights[:4] == pytest.approx([2 / 3] * 4)
    ends = sorted(
        line.get_ydata()[0] for line in ax.lines if len(line.get_ydata()) == 2 and line.get_color() == "black"
    )  # type: ignore[index, arg-type]
    assert ends == sorted(bound for row in rows for bound in (row.low, row.high))
    assert [t.get_text() for t in ax.texts] == [f"{height:.2f}" for height in heights]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["async_reward\nvs colocated", "stagebreaker\nvs colocated"]
    assert ax.get_ylabel() == "speedup"


def test_bars_of_pairs_differ_in_hatch_and_stand_apart() -> None:
    bars = bars_of(published_bars(rows_of("fig9.async_reward_vs_colocated"), STEPS))
    assert len({bar.get_hatch() for bar in bars}) == 4
    assert all(a.get_x() + a.get_width() <= b.get_x() for a, b in pairwise(bars))


def test_the_whole_of_figure_9_has_no_text_over_another_and_none_cut_off() -> None:
    """With steps of every schedule; colocated slowest, so that bars are of very different height."""
    steps = {case: {name: step(5 - n) for n, name in enumerate((*BASELINES, "stagebreaker"))} for case in STEPS}
    ax = published_bars([row for row in published() if row.id.startswith("fig9.")], steps)
    figure = drawn_texts(ax)
    boxes = [t.get_window_extent() for t in (*ax.texts, *ax.get_xticklabels())]
    boxes += [figure.legends[0].get_window_extent()]
    assert not [n for n, one in enumerate(boxes) for two in boxes[n + 1 :] if one.overlaps(two)]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_bars_on_given_axes_and_none_for_no_rows() -> None:
    ax = Figure().add_subplot()
    assert published_bars(rows_of("fig9.async_reward_vs_colocated"), STEPS, ax=ax) is ax
    with pytest.raises(InputError, match="rows is empty"):
        published_bars([], STEPS)


# -- Figure 16


def test_figure_16_names_step_time_and_speedup_on_one_time_axis() -> None:
    profile = profile_of(generate=10, t0=30, grad_replay=20, loss_replay=5, switch=1)
    made = {
        name: simulated(workload_of(), placement_of(name, scoring="on_arrival"), profile)
        for name in ("colocated", "merged_replay")
    }
    axes = figure_16({name: t for name, (t, _) in made.items()}, {name: g for name, (_, g) in made.items()})
    times = [timeline.makespan_us / SECOND for timeline, _ in made.values()]
    assert [ax.get_title(loc="left") for ax in axes] == [
        f"colocated: {times[0]:.1f} s, 1.00x colocated",
        f"merged_replay: {times[1]:.1f} s, {times[0] / times[1]:.2f}x colocated",
    ]
    assert [ax.get_xlim() for ax in axes] == [(0, pytest.approx(max(times)))] * 2


def test_figure_16_needs_colocated() -> None:
    with pytest.raises(InputError, match="steps holds async_reward; colocated, which speedups refer to, is missing"):
        figure_16({"async_reward": step(1)}, {})


# -- sweeps


def sweep(x: str, values: tuple[Any, ...], schedules: tuple[str, ...] = ("colocated", "stagebreaker")) -> pd.DataFrame:
    usual = {"candidates": 12, "mini_batches": 2, "latent_frames": 21, "resolution": "480p", "policy": "1.3B"}
    return pd.DataFrame(
        {"pair": pair, **usual, x: value, "schedule": name, "step_us": 1, "speedup_vs_colocated": 1 + n + k / 8}
        for pair in PAIRS[:3]
        for n, name in enumerate(schedules)
        for k, value in enumerate(values)
    )


@pytest.mark.parametrize(
    ("x", "values"),
    [
        ("candidates", (6, 12, 24)),
        ("mini_batches", (1, 2, 12)),
        ("latent_frames", (21, 33, 45)),
        ("resolution", ("360p", "480p")),
        ("policy", ("wan2.1-1.3b", "wan2.1-5b")),
    ],
)
def test_a_panel_for_every_pair_and_a_line_for_every_schedule_over_what_varies(x: str, values: tuple[Any, ...]) -> None:
    axes = plot_sweep(sweep(x, values).iloc[::-1])
    assert [ax.get_title(loc="left") for ax in axes] == list(reversed(PAIRS[:3]))
    for ax in axes:
        assert [t.get_text() for t in ax.get_xticklabels()] == [str(v) for v in values]
        lines = {
            line.get_label(): list(line.get_ydata())
            for line in ax.lines
            if line.get_label() in ("colocated", "stagebreaker")
        }
        steps = [k / 8 for k in range(len(values))]
        assert lines == {"colocated": [1 + s for s in steps], "stagebreaker": [2 + s for s in steps]}
    assert axes[0].get_xlabel() == {"latent_frames": "latent frames", "mini_batches": "mini-batches"}.get(x, x)
    assert axes[0].get_ylabel() == "speedup over colocated"


def test_lines_differ_in_marker_and_dashes() -> None:
    assert len({look.marker for look in SERIES}) == len({str(look.dashes) for look in SERIES}) == len(SERIES)
    ax = plot_sweep(sweep("candidates", (6, 12)))[0]
    named = [line for line in ax.lines if line.get_label() in ("colocated", "stagebreaker")]
    assert len({line.get_marker() for line in named}) == 2


def test_one_legend_names_the_schedules_in_their_order() -> None:
    axes = plot_sweep(sweep("candidates", (6, 12), ("stagebreaker", "colocated", "async_reward")))
    (legend,) = axes[0].figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["colocated", "async_reward", "stagebreaker"]


def test_an_absent_value_leaves_a_hole_and_y_may_be_another_column() -> None:
    frame = sweep("candidates", (6, 12, 24)).assign(speedup_vs_async_reward=2.5)
    frame.loc[frame.candidates == 12, "speedup_vs_async_reward"] = None
    ax = plot_sweep(frame, y="speedup_vs_async_reward")[0]
    line = next(line for line in ax.lines if line.get_label() == "stagebreaker")
    assert list(line.get_xdata()) == [0, 2]
    assert ax.get_ylabel() == "speedup over async reward"


def test_a_sweep_on_given_axes() -> None:
    frame = sweep("candidates", (6, 12))
    given = list(Figure().subplots(1, 3))
    assert list(plot_sweep(frame, ax=given)) == given
    one = Figure().add_subplot()
    assert list(plot_sweep(frame[frame.pair == PAIRS[0]], ax=one)) == [one]
    assert one.get_legend() is not None
    with pytest.raises(InputError, match="ax has 1 axes for 3 pairs"):
        plot_sweep(frame, ax=one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="policy"), "column 'policy' is not in the frame"),
        (lambda f: f.iloc[:0], "frame has no rows"),
        (lambda f: f.assign(candidates=12), "the rows vary in nothing"),
        (lambda f: f.assign(mini_batches=f.candidates // 6), "the rows vary in candidates, mini_batches"),
        (lambda f: pd.concat([f, f]), "dancegrpo-urflex, colocated: two rows at candidates=6; keep one"),
        (lambda f: f.assign(schedule=[f"s{n}" for n in range(len(f))]), "frame has 12 schedules; select at most 8"),
    ],
)
def test_a_sweep_that_cannot_be_drawn_is_refused(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plot_sweep(change(sweep("candidates", (6, 12))))
    assert SWEPT[0] == "candidates"


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_figure(plot_sweep(sweep("candidates", (6, 12)))[0].figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
