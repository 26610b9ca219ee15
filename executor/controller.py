"""The controller: walks a step graph on a backend, by the same dispatch rules as the simulator.

It holds queues, counts and small values, no tensors and no mathematics: what an advantage is, and what a task needs to
know, it asks of a ``Step`` object. Every span goes into a timeline with the simulator's schema, task by task, so that a
prediction can be laid beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stagebreaker.executor.backends import Backend, Done
from stagebreaker.executor.cluster import now_us
from stagebreaker.profiles.table import Serving
from stagebreaker.sim.dataflow import REQUEST, Assignment, Task
from stagebreaker.sim.dispatch import Dispatch, GraphIndex, Transfer
from stagebreaker.sim.engine import DeadlockError, in_order, task_row, transfer_row
from stagebreaker.sim.timeline import Row, Timeline


class Step(Protocol):
    """What one RL step means; the controller only knows how to walk it."""

    def order(self, task: Task, values: Mapping[str, Any]) -> Any:
        """What a worker gets for ``task``, given the small results of the tasks it needs."""

    def control(self, task: Task, values: Mapping[str, Any]) -> Any:
        """The controller's own task: an advantage, a barrier."""


@dataclass
class _Lane:
    """What runs on one lane now."""

    running: list[int | None] = field(default_factory=list)
    """Exclusive work in the order it was sent: task numbers, None for a batch; never more than two."""
    active: set[int] = field(default_factory=set)
    batches: int = 0
    span_start_us: int = 0
    span_members: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """A finished step: its timeline (us from its start) and every task's small result by id."""

    timeline: Timeline
    values: Mapping[str, Any]


def run_step(index: GraphIndex, assignment: Assignment, serving: Serving, backend: Backend, step: Step) -> StepResult:
    """Run one step to its end. Raises ``TaskFailedError`` or ``DeadlockError``."""
    return _Walk(index, assignment, serving, backend, step).go()


class _Walk:
    def __init__(
        self, index: GraphIndex, assignment: Assignment, serving: Serving, backend: Backend, step: Step
    ) -> None:
        self.index, self.serving, self.backend, self.step = index, serving, backend, step
        self.dispatch = Dispatch(index, assignment)
        self.lanes = [_Lane() for _ in index.graph.lanes]
        self.egress: list[deque[tuple[Transfer, int]]] = [deque() for _ in index.graph.lanes]
        self.values: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.in_flight = 0
        self.zero = 0

    def go(self) -> StepResult:
        self.zero = now_us()
        self._control(self.dispatch.begin())
        while True:
            for lane in range(len(self.lanes)):
                self._fill(lane)
            if not self.in_flight:
                break
            for done in self.backend.wait():
                self.in_flight -= 1
                done.token[0](done, *done.token[1:])
        if not all(self.dispatch.finished(lane) for lane in range(len(self.lanes))):
            raise DeadlockError("; ".join(self.dispatch.blocked()))
        return StepResult(Timeline(in_order(self.rows), self.index.graph.lanes), self.values)

    # -- starting ----------------------------------------------------------------------------------------------

    def _fill(self, lane: int) -> None:
        """Start what may start on a lane: the head of its queue, else the requests that wait."""
        state = self.lanes[lane]
        if state.running:
            self._send_ahead(lane)
            return
        n = self.dispatch.next_task(lane)
        if n is not None:
            self._take(lane, n)
            self._send_ahead(lane)
            return
        if not self.dispatch.waiting[lane] or (state.active and self.serving != "continuous"):
            return
        taken = self.dispatch.take_requests(lane, self.serving)
        if self.serving == "continuous":
            for n in taken:
                self._join(lane, n)
        else:
            state.running.append(None)
            batch = self._batch(lane, taken)
            self._run(lane, batch, (self._batch_done, lane, taken, batch))

    def _take(self, lane: int, n: int) -> None:
        self.dispatch.take_task(lane)
        self.lanes[lane].running.append(n)
        self._close_span(lane, now_us() - self.zero)
        task = self.index.tasks[n]
        self._run(lane, task, (self._task_done, lane, n, task))

    def _send_ahead(self, lane: int) -> None:
        """Keep one task waiting at the worker, so that it need not wait for this process between two tasks."""
        running = self.lanes[lane].running
        if len(running) == 1 and running[0] is not None:
            n = self.dispatch.follower(lane, running[0])
            if n is not None:
                self._take(lane, n)

    def _run(self, lane: int, task: Task, token: tuple[Any, ...]) -> None:
        values = {need.task: self.values[need.task] for need in task.needs if self.values.get(need.task) is not None}
        self.in_flight += 1
        self.backend.run(lane, self.step.order(task, values), token)

    def _batch(self, lane: int, requests: list[int]) -> Task:
        state = self.lanes[lane]
        name = f"score:{self.index.graph.lanes[lane].name}#{state.batches}"
        state.batches += 1
        tasks = [self.index.tasks[n] for n in requests]
        needs = tuple(dict.fromkeys(need for task in tasks for need in task.needs))
        return Task(name, "score", needs, members=tuple(m for task in tasks for m in task.members))

    def _join(self, lane: int, n: int) -> None:
        """Continuous serving: a request joins those that are active."""
        state = self.lanes[lane]
        if not state.active:
            state.span_start_us = now_us() - self.zero
        state.active.add(n)
        state.span_members += self.index.tasks[n].members
        self._run(lane, self.index.tasks[n], (self._request_done, lane, n))

    # -- finishing ---------------------------------------------------------------------------------------------

    def _task_done(self, done: Done, lane: int, n: int, task: Task) -> None:
        self.lanes[lane].running.remove(n)
        self._row(task, lane, self.dispatch.available_us[n], done)
        self.values[task.id] = done.value
        self._reopen_span(lane, done.end_us - self.zero)
        self._complete(n)

    def _batch_done(self, done: Done, lane: int, requests: list[int], task: Task) -> None:
        self.lanes[lane].running.remove(None)
        self._row(task, lane, min(self.dispatch.available_us[n] for n in requests), done)
        for n in requests:
            request = self.index.tasks[n]
            self._row(request, lane, self.dispatch.available_us[n], done)
            self.values[request.id] = done.value
            self.dispatch.request_done(lane)
            self._complete(n)

    def _request_done(self, done: Done, lane: int, n: int) -> None:
        state = self.lanes[lane]
        state.active.discard(n)
        self._row(self.index.tasks[n], lane, self.dispatch.available_us[n], done)
        self.values[self.index.tasks[n].id] = done.value
        if not state.active:
            self._close_span(lane, done.end_us - self.zero)
        self.dispatch.request_done(lane)
        self._complete(n)

    def _close_span(self, lane: int, end_us: int) -> None:
        """The judge's busy span ends: its last request is done, or its GPU turns to another task."""
        state = self.lanes[lane]
        if not state.span_members:
            return
        where = self.index.graph.lanes[lane]
        name = f"score:{where.name}#{state.batches}"
        state.batches += 1
        batch = Task(name, "score", members=tuple(dict.fromkeys(state.span_members)))
        self.rows.append(task_row(batch, where.name, where.role, state.span_start_us, state.span_start_us, end_us))
        state.span_members = []

    def _reopen_span(self, lane: int, start_us: int) -> None:
        state = self.lanes[lane]
        if state.active:
            state.span_start_us = start_us
            state.span_members = [m for n in sorted(state.active) for m in self.index.tasks[n].members]

    def _complete(self, n: int) -> None:
        ready, transfers = self.dispatch.complete(n, now_us() - self.zero)
        for transfer in transfers:
            source = self.dispatch.lane[transfer.source]
            self.egress[source].append((transfer, now_us() - self.zero))
            if len(self.egress[source]) == 1:
                self._send(source)
        self._control(ready)

    def _send(self, source: int) -> None:
        transfer, _ = self.egress[source][0]
        self.in_flight += 1
        task = self.index.tasks[transfer.source].id
        self.backend.send(source, transfer.target, task, transfer.data, transfer.size_bytes, (self._sent, source))

    def _sent(self, done: Done, source: int) -> None:
        transfer, due = self.egress[source].popleft()
        start, end = done.start_us - self.zero, done.end_us - self.zero
        self.rows.append(transfer_row(self.index, transfer, source, min(due, start), start, end))
        if self.egress[source]:
            self._send(source)
        self._control(self.dispatch.arrive(transfer.users, now_us() - self.zero))

    def _control(self, ready: Sequence[int]) -> None:
        """Do what is the controller's own among the tasks that became ready."""
        for n in ready:
            if not self.index.control[n]:
                continue
            task = self.index.tasks[n]
            values = {need.task: self.values.get(need.task) for need in task.needs}
            self.values[task.id] = self.step.control(task, values)
            self._complete(n)

    def _row(self, task: Task, lane: int, ready: int, done: Done) -> None:
        where = self.index.graph.lanes[lane]
        start, end = done.start_us - self.zero, done.end_us - self.zero
        self.rows.append(task_row(task, where.name, where.role, min(ready, start), start, end))


__all__ = ["REQUEST", "Step", "StepResult", "run_step"]
