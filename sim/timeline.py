"""Timeline: one row per span, the same columns for a simulated and a measured step.

On every lane busy + overhead + idle by cause adds up to the makespan. Busy are the tasks of the step, overhead are
engine switches, everything else is idle and blamed on what the lane's next task was waiting for, walking its chain
of latest inputs back through the gap. Requests are a sub-lane of the judge's busy span and count as nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import pandas as pd

from stagebreaker.sim.dataflow import CONTROL_KINDS, OVERHEAD_KINDS, REQUEST, Lane, StepGraph

IDLE_CAUSES = (
    "wait:reward",
    "wait:latents",
    "wait:frames",
    "wait:update",
    "wait:barrier",
    "wait:replay",
    "wait:transfer",
    "wait:prompt",
    "wait:controller",
    "tail",
)
_CAUSE = {
    "score": "wait:reward",
    REQUEST: "wait:reward",
    "generate": "wait:latents",
    "vae_decode": "wait:frames",
    "grad_replay": "wait:update",
    "fold": "wait:update",
    "update": "wait:update",
    "loss_replay": "wait:barrier",
    "old_replay": "wait:replay",
    "ref_replay": "wait:replay",
    "encode_prompt": "wait:prompt",
    "switch": "wait:barrier",
    "sync": "wait:transfer",
    "transfer": "wait:transfer",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One span. ``gpu`` is the lane's name; a transfer's is its egress, ``link:<lane>``."""

    task: str
    kind: str
    candidate: int | None
    steps: str
    chunks: str
    members: str
    mini_batch: int | None
    gpu: str
    role: str
    ready_us: int
    start_us: int
    end_us: int


COLUMNS = tuple(f.name for f in fields(Row))


@dataclass(frozen=True)
class LaneUse:
    """Where a lane's time went, in us; ``busy + overhead + sum(idle) == makespan``."""

    lane: Lane
    busy_us: int
    overhead_us: int
    idle_us: dict[str, int]


@dataclass(frozen=True)
class Timeline:
    """The rows of one step and the lanes they ran on."""

    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]

    @property
    def makespan_us(self) -> int:
        """End of the last span, adapter synchronisation included."""
        return max((row.end_us for row in self.rows), default=0)

    @classmethod
    def of_frame(cls, frame: pd.DataFrame, lanes: Sequence[Lane]) -> Timeline:
        """The inverse of ``frame``; lanes come from the graph."""
        optional = ("candidate", "mini_batch")
        rows = []
        for record in frame.to_dict("records"):
            cells: dict[str, Any] = {str(name): value for name, value in record.items()}
            cells.update({name: None if pd.isna(cells[name]) else int(cells[name]) for name in optional})
            rows.append(Row(**cells))
        return cls(tuple(rows), tuple(lanes))

    def frame(self) -> pd.DataFrame:
        """One row per span, columns ``COLUMNS``; absent numbers are <NA>."""
        frame = pd.DataFrame([asdict(row) for row in self.rows], columns=list(COLUMNS))
        return frame.astype({"candidate": "Int64", "mini_batch": "Int64"})

    def spans(self, lane: str) -> list[Row]:
        """Exclusive spans of a lane in time order (no requests)."""
        rows = [row for row in self.rows if row.gpu == lane and row.kind != REQUEST]
        return sorted(rows, key=lambda row: (row.start_us, row.end_us))  # stable: tasks of no length keep their order

    def use(self, graph: StepGraph) -> list[LaneUse]:
        """Busy, overhead and idle time by cause, per lane."""
        blame = _Blame(self, graph)
        result = []
        for lane in self.lanes:
            spans = self.spans(lane.name)
            busy = sum(row.end_us - row.start_us for row in spans if row.kind not in OVERHEAD_KINDS)
            overhead = sum(row.end_us - row.start_us for row in spans if row.kind in OVERHEAD_KINDS)
            result.append(LaneUse(lane, busy, overhead, blame.idle(spans, self.makespan_us)))
        return result

    def utilisation(self, role: str, graph: StepGraph) -> float | None:
        """Busy share of a role's lanes; None when the role has no lane of its own."""
        uses = [use for use in self.use(graph) if use.lane.role in (role, "all")]
        if not uses or not self.makespan_us:
            return None
        return sum(use.busy_us for use in uses) / (len(uses) * self.makespan_us)


class _Blame:
    """Walks chains of latest inputs backwards to say what an idle lane was waiting for."""

    def __init__(self, timeline: Timeline, graph: StepGraph) -> None:
        self.graph = graph
        self.row = {row.task: row for row in timeline.rows}
        for row in timeline.rows:  # a served batch stands for each of its requests where no request row does
            if row.kind == "score":
                for member in row.members.split():
                    self.row.setdefault(f"{REQUEST}:{member}", row)
        self.arrival: dict[tuple[str, str], Row] = {}
        for row in timeline.rows:
            if row.kind in ("transfer", "sync"):
                source, target = row.task.split(":", 1)[1].rsplit(">", 1)
                self.arrival[source, target] = row
        self.before: dict[str, Row] = {}
        for lane in timeline.lanes:
            spans = timeline.spans(lane.name)
            for earlier, later in pairwise(spans):
                self.before[later.task] = earlier
            ends = [row.end_us for row in spans]
            for row in (row for row in timeline.rows if row.kind == REQUEST and row.gpu == lane.name):
                if place := bisect_right(ends, row.start_us):  # a request waits until the judge is free for it
                    self.before[row.task] = spans[place - 1]

    def idle(self, spans: Sequence[Row], makespan_us: int) -> dict[str, int]:
        """Idle time by cause, every cause named."""
        idle = dict.fromkeys(IDLE_CAUSES, 0)
        clock = 0
        for row in spans:
            if row.start_us > clock:
                for cause, length in self._gap(row, clock, row.start_us):
                    idle[cause] += length
            clock = max(clock, row.end_us)
        idle["tail"] += makespan_us - clock
        return idle

    def _gap(self, row: Row, low: int, high: int) -> Iterable[tuple[str, int]]:
        """(cause, us) pieces of the gap [low, high) in front of ``row``."""
        current: Row | None = row
        while high > low:
            current = self._latest(current) if current is not None else None
            if current is None:
                yield (
                    "wait:controller",
                    high - low,
                )  # its inputs were there: only a measured step has such a gap
                return
            start = min(max(current.start_us, low), high)
            if high > start:
                yield _CAUSE[current.kind], high - start
                high = start

    def _latest(self, row: Row) -> Row | None:
        """The last span of some length that ``row`` waited for: an input, or the span before it on its lane.

        Spans of no length are looked through: their order within an instant says nothing.
        """
        found: list[Row] = []
        left, seen = [row], {row.task}
        while left:
            current = left.pop()
            before = [self.before[current.task]] if current.task in self.before else []
            for earlier in (*self._inputs(current), *before):
                if earlier.end_us <= row.start_us and earlier.task not in seen:
                    seen.add(earlier.task)
                    (found if earlier.start_us < earlier.end_us else left).append(earlier)
        return max(found, key=lambda r: (r.end_us, r.start_us, r.task), default=None)

    def _inputs(self, row: Row) -> Iterable[Row]:
        if row.kind in ("transfer", "sync"):
            source = row.task.split(":", 1)[1].rsplit(">", 1)[0].rsplit("/", 1)[0]
            yield self.row[source]
            return
        tasks = [row.task] if row.task in self.graph.by_id else [f"{REQUEST}:{m}" for m in row.members.split()]
        for name in tasks:
            yield from self._needs(name, row.gpu)

    def _needs(self, name: str, gpu: str) -> Iterable[Row]:
        task = self.graph.by_id.get(name)
        for need in task.needs if task else ():
            if self.graph.by_id[need.task].kind in CONTROL_KINDS:
                yield from self._needs(need.task, gpu)
            elif (f"{need.task}/{need.data}", gpu) in self.arrival:
                yield self.arrival[f"{need.task}/{need.data}", gpu]
            elif need.task in self.row:
                yield self.row[need.task]
