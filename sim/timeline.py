"""Timeline: one row per span, the same columns for a simulated and a measured step.

On every lane busy + overhead + idle by cause adds up to the makespan. Busy are the tasks of the step, overhead are
engine switches, everything else is idle and blamed on what the lane's next task was waiting for, walking its chain
of latest inputs back through the gap. Requests are a sub-lane of the judge's busy span and count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, pairwise
from typing import Any

import pandas as pd

from stagebreaker.sim.dataflow import CONTROL_KINDS, OVERHEAD_KINDS, REQUEST, Lane, StepGraph

LINK_KINDS = ("transfer", "sync")
LINK_PREFIX = "link:"

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
"""What a lane that waits for a span of this kind waits for."""


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


@dataclass(frozen=True, slots=True)
class Idle:
    """A piece [start_us, end_us) of a lane's idle time, and one of ``IDLE_CAUSES``."""

    cause: str
    start_us: int
    end_us: int


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

    def idle(self, graph: StepGraph) -> dict[str, list[Idle]]:
        """Lane -> its idle time in pieces by cause, in time order."""
        waits = Waits(self, graph)
        return {lane.name: list(self._idle(waits, lane.name)) for lane in self.lanes}

    def use(self, graph: StepGraph) -> list[LaneUse]:
        """Busy, overhead and idle time by cause, per lane; every cause is named."""
        idle = self.idle(graph)
        result = []
        for lane in self.lanes:
            spans = self.spans(lane.name)
            busy = sum(row.end_us - row.start_us for row in spans if row.kind not in OVERHEAD_KINDS)
            overhead = sum(row.end_us - row.start_us for row in spans if row.kind in OVERHEAD_KINDS)
            by_cause = dict.fromkeys(IDLE_CAUSES, 0)
            for piece in idle[lane.name]:
                by_cause[piece.cause] += piece.end_us - piece.start_us
            result.append(LaneUse(lane, busy, overhead, by_cause))
        return result

    def _idle(self, waits: Waits, lane: str) -> Iterator[Idle]:
        clock = 0
        for row in self.spans(lane):
            if row.start_us > clock:
                yield from _gap(waits, row, clock)
            clock = max(clock, row.end_us)
        if clock < self.makespan_us:
            yield Idle("tail", clock, self.makespan_us)

    def utilisation(self, role: str, graph: StepGraph) -> float | None:
        """Busy share of a role's lanes; None when the role has no lane of its own."""
        uses = [use for use in self.use(graph) if use.lane.role in (role, "all")]
        if not uses or not self.makespan_us:
            return None
        return sum(use.busy_us for use in uses) / (len(uses) * self.makespan_us)


def _gap(waits: Waits, row: Row, low_us: int) -> list[Idle]:
    """The gap from ``low_us`` to the start of ``row`` in pieces, by walking back what it waited for."""
    pieces: list[Idle] = []
    high_us, current = row.start_us, waits.latest(row)
    while high_us > low_us:
        # Where nothing was waited for, all inputs were there: only a measured step has such a gap.
        start_us = low_us if current is None else min(max(current.start_us, low_us), high_us)
        cause = "wait:controller" if current is None else _CAUSE[current.kind]
        if pieces and pieces[0].cause == cause:
            pieces[0] = Idle(cause, start_us, pieces[0].end_us)
        elif start_us < high_us:
            pieces.insert(0, Idle(cause, start_us, high_us))
        high_us = start_us
        current = None if current is None else waits.latest(current)
    return pieces


class Waits:
    """What every span waited for: its inputs, over the link where they crossed one, and its lane or link."""

    def __init__(self, timeline: Timeline, graph: StepGraph) -> None:
        self.graph = graph
        self.row = {row.task: row for row in timeline.rows}
        for row in timeline.rows:  # a served batch stands for each of its requests where no request row does
            if row.kind == "score":
                for member in row.members.split():
                    self.row.setdefault(f"{REQUEST}:{member}", row)
        self.arrival: dict[tuple[str, str], Row] = {}
        for row in timeline.rows:
            if row.kind in LINK_KINDS:
                source, data, target = link_ends(row.task)
                self.arrival[f"{source}/{data}", target] = row
        self.before: dict[str, tuple[Row, ...]] = {}
        """What had to be over on the same lane, or link."""
        for lane in timeline.lanes:
            self._note_lane(timeline.spans(lane.name))
            self._note_lane(timeline.spans(LINK_PREFIX + lane.name))

    def _note_lane(self, spans: Sequence[Row]) -> None:
        for earlier, later in pairwise(spans):
            self.before[later.task] = self.closing(earlier)
        served: set[str] = set()
        for n, span in enumerate(spans):  # a request joins when its judge is there for it
            for request in (self.row[f"{REQUEST}:{m}"] for m in span.members.split() if span.kind == "score"):
                if request.kind == REQUEST and request.task not in served:
                    served.add(request.task)
                    if n and span.start_us >= request.start_us:
                        self.before[request.task] = self.closing(spans[n - 1])

    def closing(self, span: Row) -> tuple[Row, ...]:
        """The spans whose end is the end of this one: itself, or the last requests of a judge's busy span.

        None where another task cut the busy span short: then the end was that task's doing.
        """
        requests = [self.row[f"{REQUEST}:{m}"] for m in span.members.split() if span.kind == "score"]
        requests = [row for row in requests if row.kind == REQUEST]
        return tuple(row for row in requests if row.end_us == span.end_us) if requests else (span,)

    def latest(self, row: Row) -> Row | None:
        """The span of some length that ``row`` waited for last; None where it waited for nothing.

        Of several the first is an input rather than the span before, and on the same lane rather than another. Spans
        of no length are looked through: their order within an instant says nothing.
        """
        found: list[tuple[bool, Row]] = []
        seen = {row.task}
        for is_input, first in ((True, chain(*self.inputs(row))), (False, self.before.get(row.task, ()))):
            left = list(first)
            while left:
                earlier = left.pop()
                if earlier.task in seen or earlier.start_us > row.start_us:
                    continue
                seen.add(earlier.task)
                if earlier.start_us == earlier.end_us:
                    left += (*chain(*self.inputs(earlier)), *self.before.get(earlier.task, ()))
                elif earlier.start_us < row.start_us:
                    found.append((is_input, earlier))
        rank = max(
            ((min(e.end_us, row.start_us), is_input, e.gpu == row.gpu, e.start_us, e.task) for is_input, e in found),
            default=None,
        )
        return None if rank is None else self.row[rank[-1]]

    def inputs(self, row: Row) -> list[tuple[Row, ...]]:
        """The spans each input came from: one, or all that the controller's task behind it gathered.

        An input that crossed lanes comes from its transfer, a transfer from the task that made the data.
        """
        if row.kind in LINK_KINDS:
            source = self.row.get(link_ends(row.task)[0])
            return [] if source is None else [(source,)]
        tasks = [row.task] if row.task in self.graph.by_id else [f"{REQUEST}:{m}" for m in row.members.split()]
        return [rows for name in tasks for rows in self._needs(name, row.gpu)]

    def _needs(self, name: str, gpu: str | None) -> Iterator[tuple[Row, ...]]:
        """What brings a task's inputs to ``gpu``; the controller (None) has everything at once."""
        task = self.graph.by_id.get(name)
        for need in task.needs if task else ():
            if self.graph.by_id[need.task].kind in CONTROL_KINDS:
                yield tuple(row for rows in self._needs(need.task, None) for row in rows)
            elif gpu is not None and (f"{need.task}/{need.data}", gpu) in self.arrival:
                yield (self.arrival[f"{need.task}/{need.data}", gpu],)
            elif need.task in self.row:
                yield (self.row[need.task],)


def link_ends(task: str) -> tuple[str, str, str]:
    """(source task, data kind, target lane) of a link row: ``transfer:generate:3/latents>reward1``."""
    route, _, target = task.partition(":")[2].rpartition(">")
    source, _, data = route.rpartition("/")
    return source, data, target
