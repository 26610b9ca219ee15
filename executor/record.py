"""Measured against predicted: the same task ids on both sides, so every task can be compared.

Tasks are matched by id; judge batches that were formed on the fly are matched by their requests. It computes ratios and
tables and keeps no opinion on what is close enough.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagebreaker.sim.dataflow import REQUEST
from stagebreaker.sim.timeline import Row, Timeline


@dataclass(frozen=True)
class KindComparison:
    """One kind of task: count, and the median duration in us on either side."""

    kind: str
    tasks: int
    predicted_us: int
    measured_us: int

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_us / self.predicted_us if self.predicted_us else None


@dataclass(frozen=True)
class Comparison:
    """One measured step beside its prediction; ``unmatched`` names tasks found on one side only."""

    kinds: tuple[KindComparison, ...]
    matched: int
    unmatched: tuple[str, ...]


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Match spans task by task."""
    served = any(row.kind == REQUEST for row in (*predicted.rows, *measured.rows))
    before, after = (_by_task(timeline, served) for timeline in (predicted, measured))
    both = [task for task in before if task in after]
    kinds: dict[str, list[tuple[int, int]]] = {}
    for task in both:
        pair = (_length(before[task]), _length(after[task]))
        kinds.setdefault(before[task].kind, []).append(pair)
    table = tuple(
        KindComparison(
            kind,
            len(pairs),
            int(statistics.median(p for p, _ in pairs)),
            int(statistics.median(m for _, m in pairs)),
        )
        for kind, pairs in kinds.items()
    )
    unmatched = sorted({*before, *after} - set(both))
    return Comparison(table, len(both), tuple(unmatched))


def _by_task(timeline: Timeline, served: bool) -> dict[str, Row]:
    """Spans by id, in time order; where requests are served, they stand for their batches."""
    return {row.task: row for row in timeline.rows if not (served and row.kind == "score")}


def _length(row: Row) -> int:
    return row.end_us - row.start_us


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The timeline with every time multiplied: an emulated step back at full size."""
    rows = tuple(
        replace(
            row,
            ready_us=round(row.ready_us * factor),
            start_us=round(row.start_us * factor),
            end_us=round(row.end_us * factor),
        )
        for row in timeline.rows
    )
    return Timeline(rows, timeline.lanes)


def middle(timelines: Sequence[Timeline]) -> int:
    """Index of the step with the median makespan (the lower one of two)."""
    order = sorted(range(len(timelines)), key=lambda n: (timelines[n].makespan_us, n))
    return order[(len(order) - 1) // 2]
