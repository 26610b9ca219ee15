"""The critical path: the chain of spans that decides how long a step takes, walked back from its last span.

A span's predecessor is what it waited for last (``timeline.Waits``): an input, with the transfer that brought it;
an input of the controller's task before it; or what its lane, link or judge was doing. In a simulated step nothing
else delays a span, so the pieces touch and cover the makespan to the microsecond. A measured step has time between
them that no span explains; it is a ``gap`` of its own. One path is given where several are equally long, and what a
shorter path would save is not known here: shorten a task and simulate again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagebreaker.sim.dataflow import REQUEST, StepGraph
from stagebreaker.sim.timeline import Row, Timeline, Waits

GAP = "gap"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the path, in us; task and lane are empty for a ``gap``. A request's service is of kind ``score``."""

    task: str
    kind: str
    gpu: str
    start_us: int
    end_us: int


def critical_path(timeline: Timeline, graph: StepGraph) -> tuple[Segment, ...]:
    """Segments in time order that touch one another and cover [0, makespan]; empty for a step of no length."""
    waits = Waits(timeline, graph)
    ends = (node for row in timeline.rows for node in waits.closing(row) if node.end_us > node.start_us)
    row = max(ends, key=lambda r: (r.end_us, r.start_us, r.task), default=None)
    until_us = timeline.makespan_us
    found: list[Segment] = []
    while until_us > 0:
        end_us = 0 if row is None else min(row.end_us, until_us)
        if end_us < until_us:
            found.append(Segment("", GAP, "", end_us, until_us))
        if row is None:
            break
        found += _pieces(timeline, row, end_us)
        until_us = row.start_us
        row = waits.latest(row)
    return tuple(reversed(found))


def _pieces(timeline: Timeline, row: Row, end_us: int) -> Iterator[Segment]:
    """The row up to ``end_us``, last piece first; a request pauses while its GPU runs another task."""
    kind = "score" if row.kind == REQUEST else row.kind
    if row.kind == REQUEST:
        others = [span for span in timeline.spans(row.gpu) if row.task.partition(":")[2] not in span.members.split()]
        pauses = [s for s in others if row.start_us <= s.start_us < s.end_us and s.start_us < end_us]
        for pause in reversed(pauses):
            resumed_us = min(pause.end_us, end_us)
            if resumed_us < end_us:
                yield Segment(row.task, kind, row.gpu, resumed_us, end_us)
            yield Segment(pause.task, pause.kind, pause.gpu, pause.start_us, resumed_us)
            end_us = pause.start_us
    if row.start_us < end_us:
        yield Segment(row.task, kind, row.gpu, row.start_us, end_us)


def by_kind(path: Iterable[Segment]) -> dict[str, int]:
    """Time on the path by kind of task in us, the longest first."""
    total: dict[str, int] = {}
    for piece in path:
        total[piece.kind] = total.get(piece.kind, 0) + piece.end_us - piece.start_us
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
