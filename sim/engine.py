"""The SimPy engine: interprets a step graph with profiled costs and returns the timeline it would take.

One SimPy process per GPU takes the lane's queue in order (``sim.dispatch``); transfers leave a lane's link one by
one; the judge serves requests one at a time, in batches, or continuously, where each of n active requests advances at
1/t(n) and all pause while their GPU runs another task. Times are integer microseconds; events of one instant are
drained before a judge looks at what waits, so the result does not depend on the order tasks were created in.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import simpy
from simpy.events import Timeout

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import DERIVED_KINDS, LinkCost, Profile
from stagebreaker.sim.dataflow import REQUEST, Assignment, StepGraph, Task
from stagebreaker.sim.dispatch import CONTROL, Dispatch, GraphIndex, Transfer
from stagebreaker.sim.serving import CurveService, Lazy, Service, TokenService, serve_all_us, turns_of
from stagebreaker.sim.timeline import Row, Timeline
from stagebreaker.sim.workload import Cluster

Process = Generator[simpy.Event, Any, None]
_LAST = 2
"""Event priority behind SimPy's own: runs when everything else of this instant is done."""


class DeadlockError(RuntimeError):
    """The step cannot finish. The message names the waiting tasks and their missing inputs."""


def profiled_us(profile: Profile, kind: str, gpu_kind: str, batch: int = 1) -> int:
    """Duration in us of a kind; ``DERIVED_KINDS`` that the profile lacks are made of their parts.

    A backward is grad_replay less its forward (loss_replay). ``generate_train`` adds one to generate, whose forward
    passes it shares; ``grad_replay_kl`` adds a second one to grad_replay, seeded by a Gaussian KL at the means.
    """
    if kind not in DERIVED_KINDS or profile.has(kind, gpu_kind):
        return profile.duration_us(kind, gpu_kind, batch)
    whole, forward = (profile.duration_us(part, gpu_kind) for part in ("grad_replay", "loss_replay"))
    base = profile.duration_us("generate", gpu_kind) if kind == "generate_train" else whole
    return base + max(0, whole - forward)


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
        self._curves = [Lazy(partial(self._lookup, "score", kind, steps=0)) for kind in self.kinds]
        self._steps = [Lazy(partial(self._lookup, "judge_step", kind, steps=0)) for kind in self.kinds]
        self._turns = [Lazy(partial(turns_of, profile, kind)) for kind in self.kinds]
        self._batches: dict[tuple[str, tuple[str, ...]], int] = {}
        self._tasks: dict[tuple[str, tuple[int, ...] | None, int], int] = {}
        self.known_us: list[dict[int, int]] = [{} for _ in self.kinds]
        """Per lane: durations of the graph's tasks by number, as far as they were asked for."""
        self._transfers: dict[int, int] = {}
        self._cache: dict[tuple[str, str, int, int], int] = {}

    def task_us(self, task: Task, lane: int) -> int:
        """Duration of one exclusive task on a lane."""
        if task.kind == "score":
            return self.batch_us(task.members, lane)
        key = (task.id, task.steps, lane)
        found = self._tasks.get(key)
        if found is None:
            kind, batch = task.cost_kind or task.kind, max(1, len(task.members))
            found = self._lookup(kind, self.kinds[lane], batch, steps=len(task.steps or ()))
            self._tasks[key] = found
        return found

    def transfer_us(self, size_bytes: int) -> int:
        """Time on the link."""
        found = self._transfers.get(size_bytes)
        if found is None:
            found = self._transfers[size_bytes] = self.link.duration_us(size_bytes)
        return found

    def batch_us(self, requests: Sequence[str], lane: int) -> int:
        """t(b): the requests as one batch that nothing joins."""
        if self.profile.verdicts is None:
            return self._lookup("score", self.kinds[lane], max(1, len(requests)), steps=0)
        key = (self.kinds[lane], tuple(sorted(requests)))
        if key not in self._batches:
            self._batches[key] = serve_all_us(self.service(lane), requests)
        return self._batches[key]

    def service(self, lane: int) -> Service:
        """An engine for the lane's judge, with nothing to do yet."""
        verdicts = self.profile.verdicts
        if verdicts is None:
            return CurveService(self._curves[lane])
        return TokenService(self._turns[lane], self._steps[lane], verdicts.most_active)

    def _lookup(self, kind: str, gpu_kind: str, batch: int, *, steps: int) -> int:
        key = (kind, gpu_kind, batch, steps)
        if key not in self._cache:
            whole = profiled_us(self.profile, kind, gpu_kind, batch)
            if steps and steps != self.trained_steps:  # a part pays the context rebuild and its share of the rest
                rebuild = self.profile.duration_us("context_rebuild", gpu_kind)
                whole = rebuild + max(0, whole - rebuild) * steps // self.trained_steps
            self._cache[key] = whole
        return self._cache[key]


def simulate(
    graph: StepGraph, assignment: Assignment, profile: Profile, cluster: Cluster, trained_steps: int
) -> Timeline:
    """The timeline of one step. Raises ``DeadlockError`` if the queues can never be emptied."""
    return run(GraphIndex(graph, profile), assignment, Costs(graph, profile, cluster, trained_steps))


def run(index: GraphIndex, assignment: Assignment, costs: Costs) -> Timeline:
    """The timeline of one step, from what several steps of one graph share. Raises ``DeadlockError``."""
    step = _Run(index, assignment, costs, record=True)
    step.go()
    return Timeline(in_order(step.rows), index.graph.lanes)


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
        self.available_us = self.dispatch.available_us
        self.batches = [0] * len(index.graph.lanes)
        self.end_us = 0
        self.rows: list[Row] = []
        self.judges = any(self.dispatch.serves)
        self.told_late = [lane != CONTROL and self.dispatch.serves[lane] for lane in self.dispatch.lane]
        """Tasks on lanes with a judge, which looks at what has arrived by now."""

    @property
    def now_us(self) -> int:
        """SimPy's clock; every delay is a whole number of us."""
        return self.env.now  # type: ignore[return-value]

    def go(self) -> int:
        """Run to the end; the step time in us."""
        for n in self.dispatch.begin():
            if self.index.control[n]:
                self._complete(n, 0)
        for lane in range(len(self.egress_free)):
            self.env.process(self._serving(lane) if self.dispatch.serves[lane] else self._plain(lane))
        self.env.run()
        if not all(self.dispatch.finished(lane) for lane in range(len(self.egress_free))):
            raise DeadlockError("; ".join(self.dispatch.blocked()))
        return self.end_us

    # -- lanes -------------------------------------------------------------------------------------------------

    def _plain(self, lane: int) -> Process:
        """A lane without a judge: its queue in order.

        What happens on it is certain as soon as the inputs are, so it runs ahead of the clock and sleeps only where a
        task lacks an input; a judge, which decides by what has arrived, is told of its results when they are due.
        """
        dispatch, tasks, known_us = self.dispatch, self.index.tasks, self.costs.known_us[lane]
        missing, available_us, end = dispatch.missing, self.available_us, 0
        for n in dispatch.queue[lane]:
            while missing[n]:
                yield self._sleep(lane)
            dispatch.take_task(lane)
            start = available_us[n]
            if end > start:
                start = end
            duration = known_us.get(n)
            if duration is None:
                duration = known_us[n] = self.costs.task_us(tasks[n], lane)
            end = start + duration
            if self.record:
                self._row(tasks[n], lane, available_us[n], start, end)
            self._complete(n, end)

    def _serving(self, lane: int) -> Process:
        """A lane with a judge: decodes first, then what waits, as the serving mode says."""
        service = self.costs.service(lane)
        active: dict[str, int] = {}
        joined_us: dict[int, int] = {}
        while not self.dispatch.finished(lane):
            yield self._drained()
            task = self.dispatch.next_task(lane)
            if task is not None:
                start = self.now_us
                yield from self._exclusive(task, lane)
                service.advance(self.now_us - start, paused=True)
                continue
            admitted = self.dispatch.take_requests(lane, self.costs.serving)
            if self.costs.serving != "continuous" and admitted:
                yield from self._batch(admitted, lane)
                continue
            for n in admitted:
                request = self.index.tasks[n].members[0]
                service.join(request)
                active[request] = n
                joined_us[n] = self.now_us
            if active:
                yield from self._advance(service, active, joined_us, lane)
            else:
                yield self._sleep(lane)

    def _exclusive(self, n: int, lane: int) -> Process:
        self.dispatch.take_task(lane)
        start = self.now_us
        duration = self.costs.task_us(self.index.tasks[n], lane)
        if duration:
            yield self.env.timeout(duration)
        if self.record:
            self._row(self.index.tasks[n], lane, self.available_us[n], start, self.now_us)
        self._complete(n, self.now_us)

    def _batch(self, requests: list[int], lane: int) -> Process:
        """Serial and dynamic serving: the admitted requests run as one batch."""
        start = self.now_us
        names = [self.index.tasks[n].members[0] for n in requests]
        yield self.env.timeout(self.costs.batch_us(names, lane))
        self._served(requests, lane, start, dict.fromkeys(requests, start))
        for n in requests:
            self.dispatch.request_done(lane)
            self._complete(n, self.now_us)

    def _advance(self, service: Service, active: dict[str, int], joined_us: dict[int, int], lane: int) -> Process:
        """Continuous serving until the judge's next change or until something else happens on this lane."""
        start = self.now_us
        due = service.due_us()
        assert due is not None  # something is active
        changed = self._sleep(lane)
        Timeout(self.env, due).callbacks.append(lambda _: self._wake(changed))
        yield changed
        self.wake[lane] = None
        elapsed = self.now_us - start
        members = list(active.values())
        done = [active.pop(request) for request in service.advance(elapsed)]
        if elapsed or done:
            self._served(members, lane, start, {n: joined_us[n] for n in done})
        for _ in done:
            self.dispatch.request_done(lane)
        for n in done:
            self._complete(n, self.now_us)

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

    @staticmethod
    def _wake(event: simpy.Event) -> None:
        if not event.triggered:
            event.succeed()

    def _complete(self, n: int, at_us: int) -> None:
        """Task ``n`` ends at ``at_us``, now or on a lane that runs ahead."""
        if at_us > self.end_us:
            self.end_us = at_us
        route = self.dispatch.finish(n)
        if route.at_once:
            self._deliver(route.at_once, at_us)
        for transfer in route.transfers:
            self._send(transfer, at_us)

    def _send(self, transfer: Transfer, at_us: int) -> None:
        """Queue a transfer on its lane's link, behind those before it."""
        lane = self.dispatch.lane[transfer.source]
        start = max(at_us, self.egress_free[lane])
        end = self.egress_free[lane] = start + self.costs.transfer_us(transfer.size_bytes)
        if self.record:
            self.rows.append(transfer_row(self.index, transfer, lane, at_us, start, end))
        if end > self.end_us:
            self.end_us = end
        self._deliver(transfer.users, end)

    def _deliver(self, users: tuple[int, ...], at_us: int) -> None:
        """An input of each user arrives at ``at_us``: judges learn of it then, all others may know before."""
        dispatch = self.dispatch
        if self.judges and at_us > self.now_us:
            later = tuple(user for user in users if self.told_late[user])
            if later:
                event = Timeout(self.env, at_us - self.now_us)
                event.callbacks.append(lambda _: self._deliver(later, at_us))
                users = tuple(user for user in users if not self.told_late[user])
        for n in dispatch.arrive(users, at_us):
            lane = dispatch.lane[n]
            if lane == CONTROL:
                self._complete(n, self.available_us[n])
                continue
            asleep = self.wake[lane]
            if asleep is not None and (dispatch.waiting[lane] or dispatch.next_task(lane) is not None):
                self.wake[lane] = None
                self._wake(asleep)

    # -- rows --------------------------------------------------------------------------------------------------

    def _row(self, task: Task, lane: int, ready: int, start: int, end: int) -> None:
        where = self.index.graph.lanes[lane]
        self.rows.append(task_row(task, where.name, where.role, ready, start, end))

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
        ready = min(self.available_us[n] for n in members)
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
                task_row(self.index.tasks[n], where.name, where.role, self.available_us[n], joined, self.now_us)
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


__all__ = [
    "CONTROL",
    "Costs",
    "DeadlockError",
    "in_order",
    "profiled_us",
    "run",
    "simulate",
    "step_us",
    "task_row",
    "transfer_row",
]
