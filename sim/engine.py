"""The SimPy engine: interprets a step graph with profiled costs and returns the timeline it would take.

One SimPy process per GPU takes the lane's queue in order (``sim.dispatch``); transfers leave a lane's link one by
one; the judge serves requests one at a time, in batches, or continuously, where each of n active requests advances at
1/t(n) and all pause while their GPU runs another task. Times are integer microseconds; events of one instant are
drained before a judge looks at what waits, so the result does not depend on the order tasks were created in.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import simpy
from simpy.events import Timeout

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import LinkCost, Profile
from stagebreaker.sim.dataflow import REQUEST, Assignment, StepGraph, Task
from stagebreaker.sim.dispatch import CONTROL, Dispatch, GraphIndex, Transfer
from stagebreaker.sim.timeline import Row, Timeline
from stagebreaker.sim.workload import Cluster

Process = Generator[simpy.Event, Any, None]
_LAST = 2
"""Event priority behind SimPy's own: runs when everything else of this instant is done."""


class DeadlockError(RuntimeError):
    """The step cannot finish. The message names the waiting tasks and their missing inputs."""


class Costs:
    """Durations in us of a graph's tasks on each lane, and of a judge's batches."""

    def __init__(self, graph: StepGraph, profile: Profile, cluster: Cluster, trained_steps: int) -> None:
        if len(graph.lanes) > len(cluster.gpus):
            raise InputError(
                f"the placement needs {len(graph.lanes)} GPUs, the cluster has {len(cluster.gpus)}: "
                f"missing {len(graph.lanes) - len(cluster.gpus)}"
            )
        self.profile, self.trained_steps = profile, trained_steps
        self.kinds = [cluster.gpus[lane.index].kind for lane in graph.lanes]
        self.link: LinkCost = profile.link
        self.serving = profile.serving
        self._tasks: dict[tuple[str, tuple[int, ...] | None, int], int] = {}
        self._transfers: dict[int, int] = {}
        self._cache: dict[tuple[str, str, int, int], int] = {}

    def task_us(self, task: Task, lane: int) -> int:
        """Duration of one exclusive task on a lane."""
        key = (task.id, task.steps, lane)
        found = self._tasks.get(key)
        if found is None:
            batch, steps = max(1, len(task.members)), len(task.steps or ())
            found = self._tasks[key] = self._lookup(task.kind, self.kinds[lane], batch, steps)
        return found

    def transfer_us(self, size_bytes: int) -> int:
        """Time on the link."""
        found = self._transfers.get(size_bytes)
        if found is None:
            found = self._transfers[size_bytes] = self.link.duration_us(size_bytes)
        return found

    def batch_us(self, size: int, lane: int) -> int:
        """t(b): one scoring batch of ``size`` requests."""
        return self._lookup("score", self.kinds[lane], size, 0)

    def _lookup(self, kind: str, gpu_kind: str, batch: int, steps: int) -> int:
        key = (kind, gpu_kind, batch, steps)
        if key not in self._cache:
            whole = self.profile.duration_us(kind, gpu_kind, batch)
            if steps and steps != self.trained_steps:  # a part pays the context rebuild and its share of the rest
                rebuild = self.profile.duration_us("context_rebuild", gpu_kind)
                whole = rebuild + max(0, whole - rebuild) * steps // self.trained_steps
            self._cache[key] = whole
        return self._cache[key]


def simulate(
    graph: StepGraph, assignment: Assignment, profile: Profile, cluster: Cluster, trained_steps: int
) -> Timeline:
    """The timeline of one step. Raises ``DeadlockError`` if the queues can never be emptied."""
    index = GraphIndex(graph, profile)
    run = _Run(index, assignment, Costs(graph, profile, cluster, trained_steps), record=True)
    run.go()
    return Timeline(in_order(run.rows), graph.lanes)


def step_us(index: GraphIndex, assignment: Assignment, costs: Costs) -> int:
    """Only the step time, without rows: the inner call of an enumeration, which keeps ``index`` and ``costs``."""
    return _Run(index, assignment, costs, record=False).go()


class _Run:
    """One interpretation of one graph."""

    def __init__(self, index: GraphIndex, assignment: Assignment, costs: Costs, *, record: bool) -> None:
        self.index, self.costs, self.record = index, costs, record
        self.env = simpy.Environment()
        self.dispatch = Dispatch(index, assignment)
        self.egress_free = [0] * len(index.graph.lanes)
        self.wake: list[simpy.Event | None] = [None] * len(index.graph.lanes)
        self.available_us = [0] * len(index.tasks)
        """When the last transfer to a task of a plain lane arrives."""
        self.last_arrival_us = 0
        self.ready_us = [0] * len(index.tasks) if record else []
        self.batches = [0] * len(index.graph.lanes)
        self.end_us = 0
        self.rows: list[Row] = []

    @property
    def now_us(self) -> int:
        """SimPy's clock; every delay is a whole number of us."""
        return self.env.now  # type: ignore[return-value]

    def go(self) -> int:
        """Run to the end; the step time in us."""
        self._control(self.dispatch.begin())
        for lane in range(len(self.egress_free)):
            self.env.process(self._serving(lane) if self.dispatch.serves[lane] else self._plain(lane))
        self.env.run()
        if not all(self.dispatch.finished(lane) for lane in range(len(self.egress_free))):
            raise DeadlockError("; ".join(self.dispatch.blocked()))
        return max(self.end_us, self.last_arrival_us)

    # -- lanes -------------------------------------------------------------------------------------------------

    def _plain(self, lane: int) -> Process:
        """A lane without a judge: its queue in order. Waiting for an arrival and the task itself are one event."""
        dispatch, costs, tasks = self.dispatch, self.costs, self.index.tasks
        for n in dispatch.queue[lane]:
            while dispatch.missing[n]:
                yield self._sleep(lane)
            dispatch.take_task(lane)
            now = self.now_us
            start = max(now, self.available_us[n])
            end = start + costs.task_us(tasks[n], lane)
            if end > now:
                yield Timeout(self.env, end - now)
            if self.record:
                self._row(tasks[n], lane, self.ready_us[n], start)
            self._complete(n)

    def _serving(self, lane: int) -> Process:
        """A lane with a judge: decodes first, then what waits, as the serving mode says."""
        active: dict[int, float] = {}
        joined_us: dict[int, int] = {}
        while not self.dispatch.finished(lane):
            yield self._drained()
            task = self.dispatch.next_task(lane)
            if task is not None:
                yield from self._exclusive(task, lane)
                continue
            admitted = self.dispatch.take_requests(lane, self.costs.serving)
            if self.costs.serving != "continuous" and admitted:
                yield from self._batch(admitted, lane)
                continue
            for n in admitted:
                active[n] = 1.0
                joined_us[n] = self.now_us
            if active:
                yield from self._advance(active, joined_us, lane)
            else:
                yield self._sleep(lane)

    def _exclusive(self, n: int, lane: int) -> Process:
        self.dispatch.take_task(lane)
        start = self.now_us
        duration = self.costs.task_us(self.index.tasks[n], lane)
        if duration:
            yield self.env.timeout(duration)
        if self.record:
            self._row(self.index.tasks[n], lane, self.ready_us[n], start)
        self._complete(n)

    def _batch(self, requests: list[int], lane: int) -> Process:
        """Serial and dynamic serving: the admitted requests run as one batch."""
        start = self.now_us
        yield self.env.timeout(self.costs.batch_us(len(requests), lane))
        self._served(requests, lane, start, dict.fromkeys(requests, start))
        for n in requests:
            self.dispatch.request_done(lane)
            self._complete(n)

    def _advance(self, active: dict[int, float], joined_us: dict[int, int], lane: int) -> Process:
        """Continuous serving until the next request is done or something else happens on this lane."""
        start = self.now_us
        per_request = self.costs.batch_us(len(active), lane)
        due = math.ceil(min(active.values()) * per_request - 1e-6)
        changed = self._sleep(lane)
        Timeout(self.env, due).callbacks.append(lambda _: self._wake(changed))
        yield changed
        self.wake[lane] = None
        elapsed = self.now_us - start
        members = list(active)
        done = [n for n, left in active.items() if left * per_request - elapsed <= 1e-6]
        for n in members:
            active[n] -= elapsed / per_request if per_request else 1.0
        if elapsed or done:
            self._served(members, lane, start, {n: joined_us[n] for n in done})
        for n in done:
            del active[n]
            self.dispatch.request_done(lane)
        for n in done:
            self._complete(n)

    # -- events ------------------------------------------------------------------------------------------------

    def _sleep(self, lane: int) -> simpy.Event:
        event = self.env.event()
        self.wake[lane] = event
        return event

    def _drained(self) -> simpy.Event:
        event = self.env.event()
        event._ok, event._value = True, None
        self.env.schedule(event, priority=_LAST)  # type: ignore[arg-type]
        return event

    def _rouse(self) -> None:
        """Wake the sleeping lanes that can start something that became ready."""
        dispatch, touched = self.dispatch, self.dispatch.touched
        for lane in touched:
            event = self.wake[lane]
            if event is not None and (dispatch.waiting[lane] or dispatch.next_task(lane) is not None):
                self.wake[lane] = None
                self._wake(event)
        touched.clear()

    @staticmethod
    def _wake(event: simpy.Event) -> None:
        if not event.triggered:
            event.succeed()

    def _complete(self, n: int) -> None:
        self.end_us = self.now_us
        controls, transfers = self.dispatch.complete(n)
        if self.record:
            self._note_ready(user for user, _, _ in self.index.users[n])
        for transfer in transfers:
            self._send(transfer)
        if controls:
            self._control(controls)
        self._rouse()

    def _control(self, controls: list[int]) -> None:
        for n in controls:
            self._complete(n)

    def _send(self, transfer: Transfer) -> None:
        """Queue a transfer on its lane's link, behind those before it."""
        lane, now = self.dispatch.lane[transfer.source], self.now_us
        start = max(now, self.egress_free[lane])
        end = start + self.costs.transfer_us(transfer.size_bytes)
        self.egress_free[lane] = end
        if self.record:
            self.rows.append(transfer_row(self.index, transfer, lane, now, start, end))
        if end > self.last_arrival_us:
            self.last_arrival_us = end
        if self.dispatch.serves[transfer.target]:  # a judge decides by what has arrived
            event = Timeout(self.env, end - now)
            event.callbacks.append(lambda _: self._receive(transfer))
        else:  # a queue in fixed order only needs to know when
            for user in transfer.users:
                if end > self.available_us[user]:
                    self.available_us[user] = end
            self._receive(transfer)

    def _receive(self, transfer: Transfer) -> None:
        controls = self.dispatch.arrive(transfer)
        if self.record:
            self._note_ready(transfer.users)
        if controls:
            self._control(controls)
        self._rouse()

    # -- rows --------------------------------------------------------------------------------------------------

    def _note_ready(self, users: Any) -> None:
        for user in users:
            if not self.dispatch.missing[user]:
                self.ready_us[user] = max(self.now_us, self.available_us[user])

    def _row(self, task: Task, lane: int, ready: int, start: int) -> None:
        where = self.index.graph.lanes[lane]
        self.rows.append(task_row(task, where.name, where.role, ready, start, self.now_us))

    def _served(self, members: list[int], lane: int, start: int, done: dict[int, int]) -> None:
        """The judge's busy span, joined to the one before if the judge never stopped, and finished requests."""
        if not self.record:
            return
        where = self.index.graph.lanes[lane]
        names = [name for n in members for name in self.index.tasks[n].members]
        last = next(
            (r for r in reversed(self.rows) if r.gpu == where.name and r.kind not in (REQUEST, "transfer")),
            None,
        )
        ready = min(self.ready_us[n] for n in members)
        if last is not None and last.kind == "score" and last.end_us == start and self.costs.serving == "continuous":
            self.rows.remove(last)
            names = sorted(
                {*last.members.split(), *names}, key=lambda m: self.index.turn[self.index.index[f"{REQUEST}:{m}"]]
            )
            start, ready = last.start_us, last.ready_us
        else:
            self.batches[lane] += 1
        batch = Task(f"score:{where.name}#{self.batches[lane] - 1}", "score", members=tuple(names))
        self.rows.append(task_row(batch, where.name, where.role, ready, start, self.now_us))
        for n, joined in done.items():
            self.rows.append(
                task_row(self.index.tasks[n], where.name, where.role, self.ready_us[n], joined, self.now_us)
            )


def in_order(rows: list[Row]) -> tuple[Row, ...]:
    """Rows by time and lane. The sort is stable: on a lane, tasks of no length stay in the order they ran."""
    return tuple(sorted(rows, key=lambda row: (row.start_us, row.end_us, row.gpu)))


def task_row(task: Task, lane: str, role: str, ready_us: int, start_us: int, end_us: int) -> Row:
    """A timeline row of one task or batch."""
    return Row(
        task.id,
        task.kind,
        task.candidate,
        _ranges(task.steps),
        _ranges(task.chunks),
        " ".join(task.members),
        task.mini_batch,
        lane,
        role,
        ready_us,
        start_us,
        end_us,
    )


def transfer_row(index: GraphIndex, transfer: Transfer, lane: int, ready: int, start: int, end: int) -> Row:
    """A row of the lane's link: ``transfer:<task>/<data>><lane>``, ``sync:`` for an adapter."""
    source, lanes = index.tasks[transfer.source], index.graph.lanes
    kind = "sync" if transfer.data == "adapter" else "transfer"
    name = f"{kind}:{source.id}/{transfer.data}>{lanes[transfer.target].name}"
    return Row(
        name,
        kind,
        source.candidate,
        "",
        "",
        "",
        source.mini_batch,
        f"link:{lanes[lane].name}",
        lanes[lane].role,
        ready,
        start,
        end,
    )


def _ranges(numbers: tuple[int, ...] | None) -> str:
    return "" if numbers is None else " ".join(str(n) for n in numbers)


__all__ = ["CONTROL", "Costs", "DeadlockError", "in_order", "simulate", "step_us", "task_row", "transfer_row"]
