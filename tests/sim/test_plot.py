"""Pictures: what is drawn is what happened, nothing overlaps, and the same timeline gives the same bytes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import resources
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.critical import critical_path
from stagebreaker.sim.dataflow import Lane, StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.palette import STYLES
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.plot import COLUMN_IN, PAGE_IN, SCREEN_IN, gantt, gantts, save_figure, speedup_bars
from stagebreaker.sim.schedules import build
from stagebreaker.sim.timeline import IDLE_CAUSES, Row, Timeline
from stagebreaker.sim.workload import Cluster, load_workload

DATA = resources.files("stagebreaker.profiles.data")
IDLE_OTHER = set(IDLE_CAUSES) - {"wait:reward", "tail"}
PROFILE = Profile.load(Path(str(DATA / "provisional-dancegrpo-vrt.json")))


def simulated(
    schedule: str, candidates: int = 12, actors: int = 4, rewards: int = 2, **placed: Any
) -> tuple[Timeline, StepGraph]:
    workload = load_workload("dancegrpo-vrt", (f"candidates={candidates}", f"group_size={candidates // 2}"))
    placement = Placement(schedule=schedule, actors=actors, rewards=rewards, **placed)
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(actors + rewards, PROFILE.gpu_kinds[0].name)
    return simulate(graph, assignment, PROFILE, cluster, workload.trained_steps), graph


def ours(candidates: int = 12, **placed: Any) -> tuple[Timeline, StepGraph]:
    return simulated("stagebreaker", candidates, scoring="on_arrival", vae_moved=6, train_moved=(0, 2), **placed)


def bars(ax: Axes) -> dict[str, Rectangle]:
    """Bars by task id."""
    found = [p for p in ax.patches if isinstance(p, Rectangle)]
    named = {str(p.get_gid()): p for p in found}
    assert len(named) == len(found)
    return named


def canvas(ax: Axes) -> FigureCanvasAgg:
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return FigureCanvasAgg(figure)


def bar_labels(ax: Axes) -> list[str]:
    return [t.get_text() for t in ax.texts if t.get_path_effects()]


def notes(ax: Axes) -> list[str]:
    return [t.get_text() for t in ax.texts if not t.get_path_effects()]


def legend_of(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [t.get_text() for t in legend.get_texts()]


def row(task: str, gpu: str, start_us: int, end_us: int, candidate: int | None = None, **other: Any) -> Row:
    kind = task.split(":")[0]
    return replace(Row(task, kind, candidate, "", "", "", None, gpu, "actor", 0, start_us, end_us), **other)


def drawn(*rows: Row) -> Axes:
    return gantt(Timeline(rows, (Lane("actor0", "actor", 0), Lane("reward0", "reward", 1))))


# -- Gantt


@pytest.mark.parametrize("schedule", ["colocated", "async_reward", "async_train", "stagebreaker"])
def test_one_bar_for_every_span_on_a_gpu_at_its_own_time(schedule: str) -> None:
    timeline, graph = simulated(schedule, scoring="on_arrival")
    drawn_bars = bars(gantt(timeline, graph))
    rows = {r.task: r for r in timeline.rows if not r.gpu.startswith("link:")}
    assert drawn_bars.keys() == rows.keys()
    for task, bar in drawn_bars.items():
        assert bar.get_x() == pytest.approx(rows[task].start_us / 1e6)
        assert bar.get_width() == pytest.approx((rows[task].end_us - rows[task].start_us) / 1e6)
        assert to_hex(bar.get_facecolor()).upper() == STYLES[rows[task].kind].fill


@pytest.mark.parametrize(("candidates", "gpus"), [(8, (1, 1)), (12, (4, 2)), (24, (12, 4)), (24, (1, 1))])
def test_bars_and_labels_never_cover_one_another(candidates: int, gpus: tuple[int, int]) -> None:
    timeline, graph = simulated("stagebreaker", candidates, *gpus, scoring="on_arrival", vae_moved=6)
    ax = gantt(timeline, graph, title="t")
    for one, two in combinations(bars(ax).values(), 2):
        apart = (
            one.get_x() + one.get_width() <= two.get_x() + 1e-9
            or two.get_x() + two.get_width() <= one.get_x() + 1e-9
            or one.get_y() + one.get_height() <= two.get_y() + 1e-9
            or two.get_y() + two.get_height() <= one.get_y() + 1e-9
        )
        assert apart, (one.get_gid(), two.get_gid())
    canvas(ax).draw()
    legend = ax.get_legend()
    title = next(t for t in ax.get_children() if isinstance(t, Text) and t.get_text() == "t")
    assert legend is not None
    texts = [*ax.texts, *ax.get_yticklabels(), *ax.get_xticklabels(), ax.xaxis.label, title]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    boxes.append(("legend", legend.get_window_extent()))
    assert len(boxes) > candidates
    for (text, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), (text, other)


@pytest.mark.parametrize("candidates", [8, 12, 24])
def test_a_label_lies_within_its_bar(candidates: int) -> None:
    timeline, graph = ours(candidates)
    ax = gantt(timeline, graph)
    renderer = canvas(ax).get_renderer()
    extents = {task: bar.get_window_extent(renderer) for task, bar in bars(ax).items()}
    labels = [t for t in ax.texts if t.get_path_effects()]
    for text in labels:
        box = text.get_window_extent(renderer)
        around = [e for e in extents.values() if e.containsx(box.x0) and e.containsx(box.x1)]
        around = [e for e in around if e.containsy(box.y0) and e.containsy(box.y1)]
        assert len(around) == 1, text.get_text()
    numbers = Counter(t.get_text() for t in labels)
    assert all(numbers[str(i)] >= 2 for i in range(candidates)), "generate and grad_replay of every candidate"


def test_labels_say_candidate_steps_and_members() -> None:
    ax = drawn(
        row("generate:3", "actor0", 0, 400_000, 3),
        row("grad_replay:3.k0-1", "actor0", 400_000, 900_000, 3, steps="0 1"),
        row("grad_replay:4.k0-1", "actor0", 960_000, 975_000, 4, steps="0 1"),
        row("vae_decode:anchor1", "reward0", 0, 300_000),
        row("score:reward0#0", "reward0", 300_000, 800_000, members="3 4"),
        row("score:reward0#1", "reward0", 800_000, 1_000_000, members=" ".join(str(i) for i in range(24))),
    )
    assert bar_labels(ax) == ["3", "3 k0,1", "4", "anchor1", "3, 4", "24 requests"]


def test_a_label_that_does_not_fit_is_left_out() -> None:
    ax = drawn(row("generate:0", "actor0", 0, 996_000, 0), row("generate:1", "actor0", 996_000, 1_000_000, 1))
    assert bar_labels(ax) == ["0"]


def test_requests_are_thin_bars_under_their_judge_and_no_two_on_one_line_overlap() -> None:
    timeline, graph = ours()
    drawn_bars = bars(gantt(timeline, graph))
    judge = drawn_bars["score:reward0#0"]
    requests = [drawn_bars[r.task] for r in timeline.rows if r.kind == "request" and r.gpu == "reward0"]
    assert len(requests) == 6
    below = drawn_bars["vae_decode:1"].get_y()
    for bar in requests:
        assert judge.get_y() + judge.get_height() <= bar.get_y() < bar.get_y() + bar.get_height() < below
        assert bar.get_height() < judge.get_height() / 2


def test_actors_stand_above_reward_gpus_with_their_names() -> None:
    timeline, graph = ours()
    ax = gantt(timeline, graph)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == ["actor0", "actor1", "actor2", "actor3", "reward0", "reward1"]
    heights = [ax.transData.transform((0, y))[1] for y in ax.get_yticks()]
    assert all(above > below for above, below in pairwise(heights))


@pytest.mark.parametrize("schedule", ["colocated", "async_reward", "stagebreaker"])
def test_the_legend_holds_the_kinds_that_occur_and_lies_outside(schedule: str) -> None:
    timeline, graph = simulated(schedule, scoring="on_arrival")
    ax = gantt(timeline, graph)
    occur = {r.kind for r in timeline.rows} - {"transfer", "sync"}
    waits = ["waits for rewards"] * (schedule == "async_reward") + ["other waiting"]
    kinds = [kind.replace("_", " ") for kind in STYLES if kind in occur]
    assert legend_of(gantt(timeline)) == kinds
    assert legend_of(ax) == [*kinds, *waits, "critical path"]
    canvas(ax).draw()
    legend = ax.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y1 <= ax.xaxis.label.get_window_extent().y0
    assert legend.get_window_extent().y0 >= 0, "inside the figure"


def test_no_two_long_kinds_share_a_look_in_colour_or_in_grey() -> None:
    fills = [s.fill for s in STYLES.values()]
    assert len(set(fills)) == len(fills)
    hatches = Counter(s.hatch for s in STYLES.values() if s.hatch)
    assert max(hatches.values()) == 1
    assert {k for k, s in STYLES.items() if not s.hatch} == {"encode_prompt", "generate", "request", "fold"}


def test_updates_are_marked_where_they_end() -> None:
    timeline, graph = ours()
    ax = gantt(timeline, graph)
    ends = [r.end_us / 1e6 for r in timeline.rows if r.kind == "update"]
    dashed = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"]  # type: ignore[index]
    assert dashed == pytest.approx(ends)
    assert [n for n in notes(ax) if n.startswith("update")] == ["update 0", "update 1"]


def test_busy_share_and_cause_of_idle_time_stand_beside_each_lane() -> None:
    timeline, graph = simulated("async_reward", scoring="on_arrival")
    text = notes(gantt(timeline, graph))[-6:]
    use = timeline.use(graph)[0]
    share, wait = use.busy_us / timeline.makespan_us, use.idle_us["wait:reward"] / timeline.makespan_us
    assert text[0] == f"{share:.0%} busy, {wait:.0%} wait:reward"
    assert text[-1].endswith("tail")
    assert not [n for n in notes(gantt(timeline)) if "busy" in n]


def drawn_by(ax: Axes, gid: str) -> list[Any]:
    """Paths of the collection that ``gid`` names, in data coordinates."""
    return [path.vertices for c in ax.collections if c.get_gid() == gid for path in c.get_paths()]


def test_waiting_is_drawn_where_it_is_and_says_whether_for_rewards() -> None:
    timeline, graph = simulated("async_reward", scoring="on_arrival")
    ax = gantt(timeline, graph)
    idle = {(p.cause, p.start_us, p.end_us) for pieces in timeline.idle(graph).values() for p in pieces}
    for gid, causes in (("waits for rewards", {"wait:reward"}), ("other waiting", IDLE_OTHER)):
        expected = {(start, end) for cause, start, end in idle if cause in causes}
        assert {(round(1e6 * v[:, 0].min()), round(1e6 * v[:, 0].max())) for v in drawn_by(ax, gid)} == expected
    assert len(drawn_by(ax, "waits for rewards")) == 4, "one for each actor"
    assert not drawn_by(gantt(timeline), "waits for rewards")


@pytest.mark.parametrize("schedule", ["colocated", "async_reward", "stagebreaker"])
def test_the_critical_path_is_one_line_from_the_first_span_to_the_last(schedule: str) -> None:
    """Outlines and the lines between them touch at their ends, from 0 to the makespan."""
    timeline, graph = simulated(schedule, scoring="on_arrival")
    lines = drawn_by(gantt(timeline, graph), "critical path")
    outlines = sorted((v[:, 0].min(), v[:, 0].max()) for v in lines if len(v) == 5)
    path = critical_path(timeline, graph)
    on_gpus = sum(p.end_us - p.start_us for p in path if p.kind not in ("transfer", "sync")) / 1e6
    assert sum(end - start for start, end in outlines) == pytest.approx(on_gpus)
    assert outlines[0][0] == 0
    joints = [v for v in lines if len(v) == 2]
    assert len(joints) >= len(outlines) - 1
    for start, end in outlines[1:]:
        assert any(v[1, 0] == start for v in joints), (start, end)
    assert max(v[:, 0].max() for v in lines) == pytest.approx(timeline.makespan_us / 1e6)
    assert not drawn_by(gantt(timeline), "critical path")


def test_a_gap_of_a_measured_step_is_bridged_to_another_lane_and_open_on_the_same() -> None:
    timeline, graph = simulated("merged_replay", scoring="on_arrival")
    shifts = {"grad_replay": 10, "update": 20, "sync": 30}
    rows = [
        r for r in timeline.rows if r.kind in ("encode_prompt", "generate") or (r.kind in shifts and r.mini_batch == 0)
    ]
    late = [replace(r, start_us=r.start_us + s, end_us=r.end_us + s) for r in rows for s in [shifts.get(r.kind, 0)]]
    measured = Timeline(tuple(late), timeline.lanes)
    path = critical_path(measured, graph)
    lines = drawn_by(gantt(measured, graph), "critical path")
    assert {"gap"} < {piece.kind for piece in path}
    stays = sorted((v[:, 0].min(), v[:, 0].max()) for v in lines if len(v) == 5)
    covered = sum(end - start for start, end in stays)
    on_gpus = sum(p.end_us - p.start_us for p in path if p.kind not in ("gap", "transfer", "sync")) / 1e6
    assert covered == pytest.approx(on_gpus), "a gap is in no outline"
    assert any(v[0, 0] < v[1, 0] for v in lines if len(v) == 2)


@pytest.mark.parametrize("width_in", [COLUMN_IN, PAGE_IN, SCREEN_IN])
def test_24_candidates_on_6_gpus_are_legible_at_every_width(width_in: float) -> None:
    """No two texts overlap, none is smaller than 4.5 points, nothing leaves the figure, and work has its numbers."""
    timeline, graph = ours(24)
    ax = gantt(timeline, graph, title="stagebreaker", width_in=width_in)
    figure = canvas(ax).figure
    canvas(ax).draw()
    legend = ax.get_legend()
    assert legend is not None
    assert figure.get_figwidth() == width_in
    ticks = [t for t in ax.get_xticklabels() if t.get_position()[0] <= ax.get_xlim()[1]]
    texts = [t for t in (*ax.texts, *ax.get_yticklabels(), *ticks, ax.xaxis.label) if t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts] + [("legend", legend.get_window_extent())]
    for (text, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), (text, other)
    assert min(t.get_fontsize() for t in [*texts, *legend.get_texts()]) >= 4.5
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
    numbers = Counter(bar_labels(ax))
    assert all(numbers[str(i)] >= 1 for i in range(24))


def test_in_a_column_only_the_busy_share_stands_beside_a_lane() -> None:
    timeline, graph = simulated("async_reward", scoring="on_arrival")
    text = notes(gantt(timeline, graph, width_in=COLUMN_IN))
    share = timeline.use(graph)[0].busy_us / timeline.makespan_us
    assert text[-7:][0] == f"{share:.0%}"
    assert text[-1] == "busy"


@pytest.mark.parametrize(
    ("makespan_us", "unit", "limit"),
    [(900, "us", 900), (2_500, "ms", 2.5), (1_999_999, "ms", 1999.999), (2_000_000, "s", 2), (0, "us", 1)],
)
def test_the_axis_has_a_sensible_unit(makespan_us: int, unit: str, limit: float) -> None:
    ax = drawn(row("generate:0", "actor0", 0, makespan_us, 0))
    assert ax.get_xlabel() == f"time ({unit})"
    assert ax.get_xlim() == (0, pytest.approx(limit))


def test_a_span_that_has_no_lane_or_no_style_is_refused() -> None:
    with pytest.raises(InputError, match="generate:0 ran on 'actor7'; did you mean 'actor0'"):
        drawn(row("generate:0", "actor7", 0, 10, 0))
    with pytest.raises(InputError, match="kind 'generat' has no style; did you mean 'generate'"):
        drawn(row("generat:0", "actor0", 0, 10, 0))


def test_draws_on_given_axes() -> None:
    ax = Figure().add_subplot()
    timeline, graph = ours()
    assert gantt(timeline, graph, ax=ax, title="mine") is ax
    assert ax.get_title(loc="left") == "mine"
    assert len(bars(ax)) == len([r for r in timeline.rows if not r.gpu.startswith("link:")])


# -- several


def test_panels_share_the_time_axis_and_name_their_makespan() -> None:
    schedules = ("colocated", "async_reward", "stagebreaker")
    made = {s: simulated(s, scoring="on_arrival") for s in schedules}
    timelines = {s: t for s, (t, _) in made.items()}
    axes = gantts(timelines, {s: g for s, (_, g) in made.items()})
    assert axes.shape == (3,)
    longest = max(t.makespan_us for t in timelines.values()) / 1e6
    for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
        assert ax.get_title(loc="left") == f"{name}: {timeline.makespan_us / 1e6:.1f} s"
        assert ax.get_xlim() == (0, pytest.approx(longest))
        assert len(bars(ax)) == len([r for r in timeline.rows if not r.gpu.startswith("link:")])
    assert [ax.get_xlabel() for ax in axes] == ["", "", "time (s)"]
    assert [bool(legend_of(ax)) for ax in axes] == [False, False, True]
    assert {"switch", "request", "loss replay"} <= set(legend_of(axes[-1])), "kinds of every panel"
    boxes = [ax.get_position() for ax in axes]
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes))
    lanes = [box.height / ax.get_ylim()[0] for ax, box in zip(axes, boxes, strict=True)]
    assert lanes == pytest.approx([lanes[0]] * 3), "a lane is as high in every panel"


def test_panels_on_given_axes() -> None:
    given = list(Figure().subplots(2, 1))
    timeline, _ = ours()
    assert list(gantts({"a": timeline, "b": timeline}, ax=given)) == given
    with pytest.raises(InputError, match="2 axes for 1 timelines"):
        gantts({"a": timeline}, ax=given)
    with pytest.raises(InputError, match="timelines is empty"):
        gantts({})


# -- comparison bars


def test_each_schedule_has_a_bar_with_its_speedup() -> None:
    ax = speedup_bars({"colocated": 3_000_000, "async_reward": 4_000_000, "ours": 2_000_000}, "colocated")
    widths = [p.get_width() for p in ax.patches if isinstance(p, Rectangle)]
    assert widths == pytest.approx([1, 0.75, 1.5])
    assert [t.get_text() for t in ax.texts] == ["1.00x  (3.0 s)", "0.75x  (4.0 s)", "1.50x  (2.0 s)"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["colocated", "async_reward", "ours"]
    assert ax.get_xlabel() == "speedup over colocated"
    canvas(ax).draw()
    assert all(t.get_window_extent().x1 <= ax.get_window_extent().x1 for t in ax.texts)
    below, above = ax.get_ylim()
    assert below > above, "the first schedule is on top"


def test_bars_refuse_an_unknown_baseline_and_a_step_of_no_length() -> None:
    with pytest.raises(InputError, match="baseline 'colocate' has no step time; did you mean 'colocated'"):
        speedup_bars({"colocated": 1}, "colocate")
    with pytest.raises(InputError, match=r"step_us\['b'\]=0 must be > 0"):
        speedup_bars({"a": 1, "b": 0}, "a")


# -- files


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    for name in ("a", "b"):
        timeline, graph = simulated("stagebreaker", 8, 1, 1, scoring="on_arrival", vae_moved=6)
        save_figure(gantts({"x": timeline}, {"x": graph})[0].figure, tmp_path / "deep" / f"{name}.{ending}")
    one, two = ((tmp_path / "deep" / f"{name}.{ending}").read_bytes() for name in "ab")
    assert one == two
    assert not [word for word in (b"CreationDate", b"<dc:date>", b"Software") if word in one]


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot draw '\.bmp'; give a name ending in \.png, \.pdf, \.svg"):
        save_figure(Figure(), tmp_path / "a.bmp")


def test_importing_and_drawing_load_no_pyplot() -> None:
    code = (
        "import sys\n"
        "from stagebreaker.sim.plot import speedup_bars\n"
        "speedup_bars({'a': 1}, 'a')\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
