"""Timelines as files: CSV or parquet for tables, Chrome trace JSON for https://ui.perfetto.dev.

In a trace every timeline is a process and every GPU a thread, in the order of the lanes; the requests that a
judge serves side by side lie on threads of their own beneath their GPU, links come last. Every dependency is
an arrow; where data crosses lanes it is two, from the task that made it to its transfer and from there to each task
that uses it. Equal timelines give equal bytes. Times are integer microseconds, the trace format's own unit; a trace
does not know what idle time was spent on.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stagebreaker.profiles.document import InputError, write_atomic
from stagebreaker.sim.dataflow import REQUEST, StepGraph
from stagebreaker.sim.timeline import COLUMNS, LINK_KINDS, LINK_PREFIX, Row, Timeline, Waits

Event = dict[str, Any]

_INTEGERS = ("ready_us", "start_us", "end_us")
_OPTIONAL = ("candidate", "mini_batch")
_TYPES = {c: "int64" if c in _INTEGERS else "Int64" if c in _OPTIONAL else "str" for c in COLUMNS}


# -- tables


def write_csv(timeline: Timeline, path: Path) -> None:
    """Write one row per span, columns ``COLUMNS``, times in us; parquet where ``path`` ends in ``.parquet``.

    Raises ``InputError`` when parquet is asked for and pyarrow is not installed.
    """
    frame = timeline.frame()
    if path.suffix == ".parquet":
        _needs_pyarrow(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path, engine="pyarrow", index=False)
        return
    write_atomic(path, frame.to_csv(index=False, lineterminator="\n"))


def read_csv(path: Path) -> pd.DataFrame:
    """Read what ``write_csv`` wrote: times int64 in us, candidate and mini_batch Int64, the rest text.

    Raises ``InputError`` for a missing file, other columns, or numbers that are not whole.
    """
    try:
        if path.suffix == ".parquet":
            _needs_pyarrow(path)
            frame = pd.read_parquet(path, engine="pyarrow")
        else:
            frame = pd.read_csv(path, dtype="str", keep_default_na=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of a timeline.csv") from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path}: not a timeline ({str(error).strip()}); write it again") from None
    if tuple(frame.columns) != COLUMNS:
        given = ",".join(str(c) for c in frame.columns)
        raise InputError(f"{path}: columns {given} must be {','.join(COLUMNS)}; write the file again")
    return frame if path.suffix == ".parquet" else _typed(frame, path)


def _typed(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Text columns to the dtypes of ``Timeline.frame``."""
    for column in (*_INTEGERS, *_OPTIONAL):
        text = frame[column]
        absent = text == "" if column in _OPTIONAL else text != text  # a time is never absent
        bad = text[~(text.str.fullmatch(r"-?\d+") | absent)]
        if len(bad):
            where = f"{path}:{int(bad.index[0]) + 2}"
            raise InputError(f"{where}: {column}={bad.iloc[0]!r} must be a whole number; mend that line")
        frame[column] = pd.to_numeric(text.where(~absent, None)).astype("Int64")
    return frame.astype(_TYPES)


def _needs_pyarrow(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{path}: parquet needs pyarrow, which is not installed; install it or write a .csv")


# -- traces


def write_trace(path: Path, timelines: Mapping[str, Timeline], graph: StepGraph) -> None:
    """Write ``perfetto(timelines, graph)``, one event a line."""
    trace = perfetto(timelines, graph)
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    events = ",\n".join(encode(event) for event in trace["traceEvents"])
    unit = encode(trace["displayTimeUnit"])
    write_atomic(path, f'{{"displayTimeUnit":{unit},"traceEvents":[\n{events}\n]}}\n')


def perfetto(timelines: Mapping[str, Timeline], graph: StepGraph) -> dict[str, Any]:
    """Chrome trace of timelines of one graph, in the mapping's order, e.g. ``predicted`` and ``measured``.

    ``ts`` and ``dur`` are integer us from each step's start.
    """
    events: list[Event] = []
    flows = 0
    for number, (name, timeline) in enumerate(timelines.items(), start=1):
        threads = _threads(timeline)
        events.append(_metadata("process_name", number, 0, name=name))
        events.append(_metadata("process_sort_index", number, 0, sort_index=number))
        tid_of: dict[Row, int] = {}
        for tid, thread in enumerate(threads, start=1):
            events.append(_metadata("thread_name", number, tid, name=thread.name))
            events.append(_metadata("thread_sort_index", number, tid, sort_index=tid))
            tid_of.update(dict.fromkeys(thread.rows, tid))
        spans = [_span(row, number, tid) for row, tid in tid_of.items()]
        events += sorted(spans, key=lambda e: (e["ts"], e["tid"], -e["dur"], e["name"]))
        arrows = _arrows(timeline, graph)
        for flow, (giver, taker) in enumerate(arrows, start=flows + 1):
            events += _flow(flow, number, (giver, tid_of[giver]), (taker, tid_of[taker]))
        flows += len(arrows)
    return {"displayTimeUnit": "ms", "traceEvents": events}


@dataclass(frozen=True, slots=True)
class _Thread:
    """Spans that are drawn on one line."""

    name: str
    rows: tuple[Row, ...]


def _threads(timeline: Timeline) -> list[_Thread]:
    """GPUs in lane order, each followed by its requests; then links in lane order; then what has no lane."""
    by_gpu: dict[str, list[Row]] = {}
    for row in timeline.rows:
        by_gpu.setdefault(row.gpu, []).append(row)
    names = [lane.name for lane in timeline.lanes]
    links = [LINK_PREFIX + name for name in names]
    others = sorted(by_gpu.keys() - {*names, *links})
    threads: list[_Thread] = []
    for name in (*names, *links, *others):
        rows = by_gpu.get(name, [])
        main = packed(row for row in rows if row.kind != REQUEST)
        if not main and name in names:  # a GPU keeps its lane when it has nothing to do
            main = [[]]
        threads += _numbered(name, main)
        threads += _numbered(f"{name} requests", packed(row for row in rows if row.kind == REQUEST))
    return threads


def _numbered(name: str, lines: Sequence[Sequence[Row]]) -> list[_Thread]:
    return [_Thread(name if not n else f"{name} {n + 1}", tuple(rows)) for n, rows in enumerate(lines)]


def packed(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows on as few lines as keep any two on one line apart; each goes to the first line that is free."""
    lines: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: (r.start_us, r.end_us, len(r.task), r.task)):
        line = next((line for line in lines if line[-1].end_us <= row.start_us), None)
        if line is None:
            lines.append([row])
        else:
            line.append(row)
    return lines


def _metadata(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _span(row: Row, pid: int, tid: int) -> Event:
    args: dict[str, object] = {
        "candidate": row.candidate,
        "mini_batch": row.mini_batch,
        "members": row.members,
        "steps": row.steps,
        "chunks": row.chunks,
    }
    args = {key: value for key, value in args.items() if value not in (None, "")}
    return {
        "ph": "X",
        "name": row.task,
        "cat": row.kind,
        "pid": pid,
        "tid": tid,
        "ts": row.start_us,
        "dur": row.end_us - row.start_us,
        "args": {**args, "ready_us": row.ready_us},
    }


def _arrows(timeline: Timeline, graph: StepGraph) -> list[tuple[Row, Row]]:
    """(giver, taker) pairs, one for every dependency; where the controller gathers many, the last of them.

    Spans of no length (a fold that costs nothing) get no arrow: a viewer has nothing to tie it to.
    """
    waits = Waits(timeline, graph)
    arrows: dict[tuple[Row, Row], None] = {}
    for taker in sorted(timeline.rows, key=lambda r: (r.start_us, r.end_us, r.gpu, r.task)):
        if taker.task in graph.by_id or taker.kind in LINK_KINDS or waits.closing(taker) == (taker,):
            for givers in filter(None, waits.inputs(taker)):
                giver = max(givers, key=lambda r: (r.end_us, r.start_us, r.task))
                arrows[giver, taker] = None
    return [
        (giver, taker)
        for giver, taker in arrows
        if giver.start_us < min(giver.end_us, taker.end_us) and taker.start_us < taker.end_us
    ]


def _flow(flow: int, pid: int, giver: tuple[Row, int], taker: tuple[Row, int]) -> tuple[Event, Event]:
    """An arrow's ends; each binds to the span around its ``ts``, so it leaves in the giver's last us.

    It leaves earlier where clocks disagree and the taker is over by then: no arrow goes back in time.
    """
    (origin, origin_tid), (end, end_tid) = giver, taker
    leaves = max(origin.start_us, min(origin.end_us, end.end_us) - 1)
    common = {"name": "dependency", "cat": "flow", "id": flow, "pid": pid}
    return (
        {"ph": "s", **common, "tid": origin_tid, "ts": leaves},
        {"ph": "f", "bp": "e", **common, "tid": end_tid, "ts": max(leaves, end.start_us)},
    )
