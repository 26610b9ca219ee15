"""Timelines as files. A trace must hold together: lanes, spans, and arrows that have both their ends."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import fixed_orders, scheduled

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.export import packed, perfetto, read_csv, write_csv, write_trace
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.timeline import IDLE_CAUSES, Row, Timeline
from stagebreaker.sim.workload import Cluster, load_workload

PROFILES = {
    name: Profile.load(Path(str(resources.files("stagebreaker.profiles.data") / f"provisional-{name}.json")))
    for name in ("dancegrpo-vrt", "kvpo-vrt")
}
MOVED = {"vae_moved": 10, "train_moved": (0, 2)}
RECOMPUTE = ("old_logprob_source=recompute",)
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "colocated": ("dancegrpo-vrt", {}, RECOMPUTE, "continuous"),
    "colocated_merged": ("dancegrpo-vrt", {}, (), "continuous"),
    "async_reward": ("dancegrpo-vrt", {"scoring": "on_arrival"}, (), "continuous"),
    "async_train": ("dancegrpo-vrt", {"scoring": "on_arrival"}, (), "dynamic"),
    "merged_replay": ("dancegrpo-vrt", {"scoring": "on_arrival"}, (), "serial"),
    "on_arrival": ("dancegrpo-vrt", {"scoring": "on_arrival", **MOVED}, (), "continuous"),
    "per_mini_batch": ("dancegrpo-vrt", {"scoring": "per_mini_batch", **MOVED}, (), "continuous"),
    "one_batch": ("dancegrpo-vrt", MOVED, (), "continuous"),
    "kvpo": ("kvpo-vrt", {"scoring": "on_arrival"}, (), "continuous"),
}
"""name: (workload, placement, overrides, serving); a name that is no schedule's is stagebreaker's."""


def simulated(case: str) -> tuple[Timeline, StepGraph]:
    workload_name, placed, changes, serving = CASES[case]
    workload = load_workload(workload_name, changes)
    schedule = case if case in SCHEDULES else "stagebreaker"
    placement = Placement(schedule=schedule, actors=4, rewards=2, **placed)
    profile = PROFILES[workload_name].model_copy(update={"serving": serving})
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(6, profile.gpu_kinds[0].name)
    return simulate(graph, assignment, profile, cluster, workload.trained_steps), graph


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def threads(trace: dict[str, Any], pid: int = 1) -> dict[int, str]:
    """tid -> name, in the order of their sort index."""
    named = {e["tid"]: e["args"]["name"] for e in of(trace, "M") if (e["pid"], e["name"]) == (pid, "thread_name")}
    order = {
        e["tid"]: e["args"]["sort_index"] for e in of(trace, "M") if (e["pid"], e["name"]) == (pid, "thread_sort_index")
    }
    assert named.keys() == order.keys()
    assert len(set(order.values())) == len(order)
    return dict(sorted(named.items(), key=lambda item: order[item[0]]))


# -- what a timeline promises


@pytest.mark.parametrize("case", CASES)
def test_exclusive_spans_of_a_lane_do_not_overlap(case: str) -> None:
    timeline, _ = simulated(case)
    for lane in timeline.lanes:
        spans = timeline.spans(lane.name)
        assert spans, f"{lane.name} is empty"
        for earlier, later in pairwise(spans):
            assert earlier.end_us <= later.start_us, (earlier, later)


@pytest.mark.parametrize("case", CASES)
def test_time_of_a_lane_adds_up_to_the_makespan(case: str) -> None:
    timeline, graph = simulated(case)
    uses = timeline.use(graph)
    assert [use.lane for use in uses] == list(timeline.lanes)
    for use in uses:
        assert set(use.idle_us) == set(IDLE_CAUSES)
        assert min(use.idle_us.values()) >= 0
        assert timeline.makespan_us == use.busy_us + use.overhead_us + sum(use.idle_us.values())


@pytest.mark.parametrize("case", CASES)
def test_every_task_with_a_lane_has_a_row_and_no_row_starts_before_it_is_ready(case: str) -> None:
    timeline, graph = simulated(case)
    names = Counter(row.task for row in timeline.rows)
    controls = {"advantage", "barrier", "group_weights"}
    assert {t.id for t in graph.tasks if t.kind not in controls} <= names.keys()
    assert max(names.values()) == 1
    assert all(0 <= row.ready_us <= row.start_us <= row.end_us for row in timeline.rows)


# -- tables


def test_csv_has_the_fixed_columns_and_comes_back_the_same(tmp_path: Path) -> None:
    timeline, _ = simulated("on_arrival")
    path = tmp_path / "deep" / "timeline.csv"
    write_csv(timeline, path)
    header = "task,kind,candidate,steps,chunks,members,mini_batch,gpu,role,ready_us,start_us,end_us"
    assert path.read_text().splitlines()[0] == header
    frame = read_csv(path)
    pd.testing.assert_frame_equal(timeline.frame(), frame)
    assert str(frame.dtypes["candidate"]) == "Int64"
    assert str(frame.dtypes["start_us"]) == "int64"
    update = frame[frame.task == "update:0"].iloc[0]
    assert update.candidate is pd.NA
    assert update.mini_batch == 0
    assert frame.steps.eq("").all(), "absent text is empty, not NaN"


def test_csv_keeps_steps_and_members_as_text(tmp_path: Path) -> None:
    timeline, _ = simulated("on_arrival")
    odd = replace(timeline.rows[0], task="grad_replay:3.k0", steps="0", chunks="007", members="0,1 NA")
    write_csv(replace(timeline, rows=(odd,)), tmp_path / "t.csv")
    row = read_csv(tmp_path / "t.csv").iloc[0]
    assert (row.steps, row.chunks, row.members) == ("0", "007", "0,1 NA")


def test_an_empty_timeline_keeps_its_dtypes(tmp_path: Path) -> None:
    timeline, _ = simulated("on_arrival")
    write_csv(replace(timeline, rows=()), tmp_path / "t.csv")
    frame = read_csv(tmp_path / "t.csv")
    assert len(frame) == 0
    assert str(frame.dtypes["mini_batch"]) == "Int64"
    assert str(frame.dtypes["end_us"]) == "int64"


def test_csv_twice_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        write_csv(simulated("async_reward")[0], tmp_path / name)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("task,kind\na,b\n", "must be task,kind,candidate"),
        ("", "not a timeline"),
        ("{header}\nx:0,x,,,,,,gpu0,all,0,0,1.5\n", "2: end_us='1.5' must be a whole number"),
        ("{header}\nx:0,x,,,,,,gpu0,all,0,0,1\nx:1,x,one,,,,,gpu0,all,0,0,1\n", "3: candidate='one'"),
        ("{header}\nx:0,x,,,,,,gpu0,all,0,,1\n", "start_us='' must be a whole number"),
    ],
)
def test_a_bad_csv_is_refused_with_its_place(tmp_path: Path, given: str, message: str) -> None:
    header = "task,kind,candidate,steps,chunks,members,mini_batch,gpu,role,ready_us,start_us,end_us"
    path = tmp_path / "t.csv"
    path.write_text(given.replace("{header}", header))
    with pytest.raises(InputError, match=message):
        read_csv(path)


def test_a_missing_csv_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_csv(tmp_path / "none.csv")


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="parquet needs pyarrow"):
        write_csv(simulated("one_batch")[0], tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_parquet_comes_back_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    timeline, _ = simulated("one_batch")
    write_csv(timeline, tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(timeline.frame(), read_csv(tmp_path / "t.parquet"))


# -- traces


@pytest.mark.parametrize("case", CASES)
def test_trace_events_are_complete_and_in_whole_microseconds(case: str) -> None:
    timeline, graph = simulated(case)
    trace = json.loads(json.dumps(perfetto({"predicted": timeline}, graph)))
    assert trace["displayTimeUnit"] == "ms"
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "s", "f"}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert all(type(event[key]) is int for key in ("pid", "tid", "ts"))
        assert event["ts"] >= 0
    spans = of(trace, "X")
    for event in spans:
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
        assert type(event["args"]["ready_us"]) is int
    rows = Counter((r.task, r.kind, r.start_us, r.end_us - r.start_us) for r in timeline.rows)
    assert rows == Counter((e["name"], e["cat"], e["ts"], e["dur"]) for e in spans)


def test_gpus_come_first_in_lane_order_each_above_its_requests_and_links_last() -> None:
    timeline, graph = simulated("on_arrival")
    names = list(threads(perfetto({"predicted": timeline}, graph)).values())
    gpus = [lane.name for lane in timeline.lanes]
    assert gpus == [n for n in names if n in gpus], "one thread per GPU, in order"
    above = {n: names[i - 1] for i, n in enumerate(names)}
    assert above["reward0 requests"] == "reward0"
    assert above["reward1 requests"] == "reward1"
    first_link = min(i for i, n in enumerate(names) if n.startswith("link:"))
    assert all(n.startswith("link:") for n in names[first_link:])
    assert names[first_link:] == [f"link:{g}" for g in gpus if f"link:{g}" in names]


def test_requests_are_on_threads_of_their_own() -> None:
    timeline, graph = simulated("on_arrival")
    trace = perfetto({"predicted": timeline}, graph)
    name = threads(trace)
    requests = [e for e in of(trace, "X") if e["cat"] == "request"]
    assert len(requests) == 12
    assert {name[e["tid"]].split(" ")[1] for e in requests} == {"requests"}
    assert all("requests" not in name[e["tid"]] for e in of(trace, "X") if e["cat"] != "request")


def check_trace(timeline: Timeline, graph: StepGraph) -> list[tuple[str, str]]:
    """The trace-event rules a viewer relies on; returns (giver, taker) of every arrow."""
    trace = json.loads(json.dumps(perfetto({"predicted": timeline}, graph)))
    for e in trace["traceEvents"]:
        assert all(type(e[key]) is int and e[key] >= 0 for key in ("pid", "tid", "ts")), e
        assert type(e.get("dur", 0)) is int
        assert e.get("dur", 0) >= 0
    named = threads(trace)
    assert [name for name in named.values() if name in {lane.name for lane in timeline.lanes}] == [
        lane.name for lane in timeline.lanes
    ], "one thread per GPU, in order"
    assert len(set(named.values())) == len(named)
    assert {e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"} == {"predicted"}
    assert {e["tid"] for e in of(trace, "X")} <= named.keys(), "every span lies on a thread with a name"
    for e in of(trace, "X"):
        assert named[e["tid"]].startswith("link:") == (e["cat"] in ("transfer", "sync"))
    spans = {
        tid: sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in of(trace, "X") if e["tid"] == tid)
        for tid in named
    }
    for on_thread in spans.values():
        assert all(one[1] <= other[0] for one, other in pairwise(on_thread)), "spans of a thread nest or follow"
    ids = {phase: [e["id"] for e in of(trace, phase)] for phase in "sf"}
    assert len(set(ids["s"])) == len(ids["s"])
    assert sorted(ids["s"]) == sorted(ids["f"])
    arrows = []
    ends = {e["id"]: e for e in of(trace, "f")}
    for start in of(trace, "s"):
        end = ends[start["id"]]
        assert end["bp"] == "e"
        assert (start["cat"], start["name"], start["pid"]) == (end["cat"], end["name"], end["pid"])
        assert start["ts"] <= end["ts"]
        around = [[n for t0, t1, n in spans[e["tid"]] if t0 <= e["ts"] < t1] for e in (start, end)]
        assert [len(names) for names in around] == [1, 1], "an arrow's end lies in one span"
        arrows.append((around[0][0], around[1][0]))
    return arrows


@pytest.mark.parametrize("case", CASES)
def test_every_dependency_of_a_span_is_an_arrow_and_no_arrow_goes_back_in_time(case: str) -> None:
    timeline, graph = simulated(case)
    arrows = set(check_trace(timeline, graph))
    rows = {row.task: row for row in timeline.rows}
    for task in graph.tasks:
        for need in task.needs:
            giver, taker = rows.get(need.task), rows.get(task.id)
            if giver is None or taker is None or giver.start_us == giver.end_us or taker.start_us == taker.end_us:
                continue
            hops = [r.task for r in timeline.rows if r.task.endswith(f":{need.task}/{need.data}>{taker.gpu}")]
            way = [need.task, *hops, task.id]
            assert arrows >= set(pairwise(way)), way


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=80)
@given(st.one_of(scheduled(), fixed_orders()))
def test_any_step_makes_a_trace_that_holds_together(case: Any) -> None:
    check_trace(case.timeline(), case.graph)


def test_clocks_that_disagree_make_no_arrow_go_back_in_time() -> None:
    timeline, graph = simulated("on_arrival")
    early = {"vae_decode:3": 900_000, "update:0": 400_000}
    rows = tuple(replace(r, start_us=r.start_us - early.get(r.task, 0)) for r in timeline.rows)
    rows = tuple(replace(r, end_us=r.end_us + 300_000) if r.task.startswith("transfer:generate:3") else r for r in rows)
    trace = perfetto({"measured": Timeline(rows, timeline.lanes)}, graph)
    ends = {e["id"]: e["ts"] for e in of(trace, "f")}
    assert all(e["ts"] <= ends[e["id"]] for e in of(trace, "s"))


def test_what_the_controller_gathers_is_an_arrow_from_the_last_of_it() -> None:
    """A barrier in front of every training task: one arrow from the score that was last, not one from each."""
    timeline, graph = simulated("async_reward")
    scores = [r for r in timeline.rows if r.kind == "request"]
    last = max(scores, key=lambda r: (r.end_us, r.start_us, r.task)).task
    arrows = check_trace(timeline, graph)
    assert {giver for giver, taker in arrows if taker == "loss_replay:0"} == {"generate:0", last}


def test_arrows_follow_a_latent_from_its_actor_over_the_link_to_the_decode() -> None:
    timeline, graph = simulated("one_batch")
    trace = perfetto({"predicted": timeline}, graph)
    at = {(e["tid"], t): e["name"] for e in of(trace, "X") for t in (e["ts"], e["ts"] + e["dur"] - 1)}
    starts, ends = ({e["id"]: at[e["tid"], e["ts"]] for e in of(trace, phase)} for phase in "sf")
    arrows = {(starts[flow], ends[flow]) for flow in starts}
    hop = "transfer:generate:3/latents>reward1"
    assert ("generate:3", hop) in arrows
    assert (hop, "vae_decode:3") in arrows
    sync = "sync:update:0/adapter>reward0"
    assert ("update:0", sync) in arrows
    assert {taker for giver, taker in arrows if giver == sync} == {"grad_replay:10"}
    links = [row for row in timeline.rows if row.kind in ("transfer", "sync")]
    assert Counter(taker for _, taker in arrows if taker.split(":")[0] in ("transfer", "sync")) == Counter(
        row.task for row in links
    )


def test_timelines_stand_side_by_side_as_processes() -> None:
    timeline, graph = simulated("on_arrival")
    *rows, last = timeline.rows
    late = Timeline((*rows, replace(last, end_us=last.end_us + 7)), timeline.lanes)
    trace = perfetto({"predicted": timeline, "measured": late}, graph)
    processes = {e["pid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "process_name"}
    assert processes == {1: "predicted", 2: "measured"}
    assert list(threads(trace, 1).values()) == list(threads(trace, 2).values())
    per_process = Counter(e["pid"] for e in of(trace, "X"))
    assert per_process == {1: len(timeline.rows), 2: len(timeline.rows)}
    ids = Counter(e["id"] for e in of(trace, "s"))
    assert max(ids.values()) == 1, "an id used in two timelines would join them"


def test_spans_of_no_length_get_no_arrow() -> None:
    timeline, graph = simulated("one_batch")
    folds = {r.task for r in timeline.rows if r.kind == "fold"}
    assert {r.end_us - r.start_us for r in timeline.rows if r.task in folds} == {0}
    assert not folds & {task for arrow in check_trace(timeline, graph) for task in arrow}
    longer = tuple(replace(r, start_us=r.start_us - 2) if r.task == "fold:6" else r for r in timeline.rows)
    arrows = check_trace(Timeline(longer, timeline.lanes), graph)
    assert {arrow for arrow in arrows if "fold:6" in arrow} >= {("fold:6", "update:1")}
    assert not (folds - {"fold:6"}) & {task for arrow in arrows for task in arrow}


def test_args_leave_out_what_is_absent() -> None:
    timeline, graph = simulated("one_batch")
    args = {e["name"]: e["args"] for e in of(perfetto({"predicted": timeline}, graph), "X")}
    assert args["grad_replay:7"].items() >= {"candidate": 7, "mini_batch": 1}.items()
    assert args["score:reward0#0"]["members"] == "0 2 4 6 8 10"
    assert args["update:0"].keys() == {"mini_batch", "ready_us"}


def test_an_idle_gpu_keeps_its_lane() -> None:
    timeline, graph = simulated("one_batch")
    without = Timeline(tuple(r for r in timeline.rows if r.gpu != "actor2"), timeline.lanes)
    assert "actor2" in threads(perfetto({"measured": without}, graph)).values()


def test_trace_twice_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        timeline, graph = simulated("on_arrival")
        write_trace(tmp_path / name, {"predicted": timeline}, graph)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text()) == perfetto({"predicted": timeline}, graph)


def test_order_of_rows_changes_no_byte(tmp_path: Path) -> None:
    timeline, graph = simulated("on_arrival")
    turned = Timeline(tuple(reversed(timeline.rows)), timeline.lanes)
    assert json.dumps(perfetto({"p": timeline}, graph)) == json.dumps(perfetto({"p": turned}, graph))


def test_packed_uses_as_few_lines_as_overlap() -> None:
    def row(name: str, start: int, end: int) -> Row:
        return Row(name, "request", None, "", "", "", None, "reward0", "reward", start, start, end)

    lines = packed([row("c", 5, 9), row("a", 0, 5), row("b", 3, 8), row("d", 8, 9), row("e", 9, 12)])
    assert [[r.task for r in line] for line in lines] == [["a", "c", "e"], ["b", "d"]]
