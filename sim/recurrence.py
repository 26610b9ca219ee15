"""Max-plus recurrence for fixed orders: start and end of every task by longest paths, no clock.

A task starts at the latest of the end of the task before it in its lane's queue and its inputs' arrivals. A
lane is exclusive, so its tasks end in queue order, and in that order their transfers leave its link: the
link adds one more chain of maxima and sums, never a choice. So the order in which tasks are visited cannot
matter, which makes this an oracle for the engine and for branch and bound: other code, the same times. It does
not know served requests, whose order depends on when they arrive, and refuses graphs with them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stagebreaker.sim.dataflow import (
    CONTROL_KINDS,
    GRADIENT_VECTORS,
    POLICY_KINDS,
    REQUEST,
    Assignment,
    StepGraph,
)
from stagebreaker.sim.engine import Costs, DeadlockError

if TYPE_CHECKING:
    from stagebreaker.sim.dispatch import GraphIndex

_NOWHERE = -1
"""Lane of a task that the controller does itself."""


def recurrence_us(graph: StepGraph | GraphIndex, assignment: Assignment, costs: Costs) -> int:
    """Step time in us: the end of the last task or transfer. Errors as ``Recurrence``."""
    return Recurrence(_plain(graph), costs).step_us(assignment)


def recurrence_times_us(
    graph: StepGraph | GraphIndex, assignment: Assignment, costs: Costs
) -> dict[str, tuple[int, int]]:
    """(start, end) in us of every task, the controller's included. Errors as ``Recurrence``."""
    plain = _plain(graph)
    start_us, end_us, _ = Recurrence(plain, costs).times_us(assignment)
    return {task.id: (start_us[n], end_us[n]) for n, task in enumerate(plain.tasks)}


def _plain(graph: StepGraph | GraphIndex) -> StepGraph:
    return graph if isinstance(graph, StepGraph) else graph.graph


class Recurrence:
    """One graph under many assignments. Raises ``ValueError`` for a graph with requests.

    ``edges[n]`` holds (user, data kind or None) for every outgoing edge of task n.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        served = [task.id for task in graph.tasks if task.kind == REQUEST]
        if served:
            raise ValueError(
                f"{len(served)} tasks from {served[0]} on are requests, served in the order they arrive; the "
                f"recurrence needs fixed orders: simulate this graph, or build it with another scoring mode"
            )
        self.graph, self.costs = graph, costs
        self.number = {task.id: n for n, task in enumerate(graph.tasks)}
        self.lane_number = {lane.name: n for n, lane in enumerate(graph.lanes)}
        self.edges: list[list[tuple[int, str | None]]] = [[] for _ in graph.tasks]
        for n, task in enumerate(graph.tasks):
            for need in task.needs:
                self.edges[self.number[need.task]].append((n, need.data))
        self.need_count = [len(task.needs) for task in graph.tasks]
        self.controlled = [task.kind in CONTROL_KINDS for task in graph.tasks]
        self.update = [task.kind == "update" for task in graph.tasks]
        self.policy = [n for n, task in enumerate(graph.tasks) if task.kind in POLICY_KINDS]
        self.sends = [self.update[n] or any(data for _, data in out) for n, out in enumerate(self.edges)]
        self._link_us: dict[str, int] = {}
        self._duration_us: dict[tuple[int, int], int] = {}

    def step_us(self, assignment: Assignment) -> int:
        """Step time in us. Errors as ``times_us``."""
        return self.times_us(assignment)[2]

    def times_us(self, assignment: Assignment) -> tuple[list[int], list[int], int]:
        """Starts, ends and step time in us.

        Raises ``DeadlockError`` where queues contradict needs, ``ValueError`` for a task in no queue or two.
        """
        lane, queues = self._lanes(assignment)
        missing = self.need_count.copy()
        next_in_queue: dict[int, int] = {}
        for queue in queues:
            for before, after in pairwise(queue):
                next_in_queue[before] = after
                missing[after] += 1
        policy_lanes = {lane[n] for n in self.policy}
        start_us, end_us, link_free_us = [0] * len(lane), [0] * len(lane), [0] * len(queues)
        last_us, count = 0, 0
        ready = [n for n, left in enumerate(missing) if not left]
        while ready:
            n = ready.pop()
            count += 1
            end = end_us[n] = start_us[n] + self._task_us(n, lane[n])
            arrival_us = self._send(n, lane, end, link_free_us, policy_lanes) if self.sends[n] else {}
            last_us = max(last_us, end, *arrival_us.values())
            inputs = [(user, arrival_us.get((lane[user], data or ""), end)) for user, data in self.edges[n]]
            if n in next_in_queue:
                inputs.append((next_in_queue[n], end))
            for user, at_us in inputs:
                start_us[user] = max(start_us[user], at_us)
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        if count != len(lane):
            raise DeadlockError(self._stuck(queues, missing))
        return start_us, end_us, last_us

    def _send(
        self, n: int, lane: list[int], end_us: int, link_free_us: list[int], policy_lanes: set[int]
    ) -> dict[tuple[int, str], int]:
        """(target lane, data kind) -> arrival in us of what task n sends, its link busy meanwhile."""
        here = lane[n]
        if here == _NOWHERE:
            return {}
        parcels = {(lane[user], data) for user, data in self.edges[n] if data}
        if self.update[n]:  # the new adapter goes to every lane that holds the policy
            parcels.update((there, "adapter") for there in policy_lanes)
        arrival_us = {}
        for there, data in sorted(parcels):
            if there not in (here, _NOWHERE):
                link_free_us[here] = max(link_free_us[here], end_us) + self._transfer_us(data)
                arrival_us[there, data] = link_free_us[here]
        return arrival_us

    def _task_us(self, n: int, lane: int) -> int:
        if lane == _NOWHERE:
            return 0
        if (n, lane) not in self._duration_us:
            self._duration_us[n, lane] = self.costs.task_us(self.graph.tasks[n], lane)
        return self._duration_us[n, lane]

    def _transfer_us(self, data: str) -> int:
        if data not in self._link_us:
            # g+, g- and a KL part travel together
            count, kind = (GRADIENT_VECTORS[data], "gradient") if data in GRADIENT_VECTORS else (1, data)
            self._link_us[data] = self.costs.link.duration_us(count * self.costs.profile.size_bytes(kind))
        return self._link_us[data]

    def _lanes(self, assignment: Assignment) -> tuple[list[int], list[list[int]]]:
        """Lane of every task and the queues, as numbers; only the controller's tasks have no queue."""
        lane = [_NOWHERE] * len(self.number)
        queues = []
        for name, there in self.lane_number.items():
            queue = [self.number[task] for task in assignment.order[name]]
            for n in queue:
                if lane[n] != _NOWHERE:
                    raise ValueError(f"task {self.graph.tasks[n].id} is queued twice; leave it in one place")
                lane[n] = there
            queues.append(queue)
        for n, there in enumerate(lane):
            if (there == _NOWHERE) != self.controlled[n]:
                what = "in no queue" if there == _NOWHERE else "the controller's but in a queue"
                raise ValueError(f"task {self.graph.tasks[n].id} is {what}; queue all other tasks once")
        return lane, queues

    def _stuck(self, queues: list[list[int]], missing: list[int]) -> str:
        """The first waiting task of every lane that cannot go on, with the inputs that never come."""
        lines = []
        tasks = self.graph.tasks
        for lane, queue in zip(self.graph.lanes, queues, strict=True):
            head = next((n for n in queue if missing[n]), None)
            if head is not None:
                inputs = [need.task for need in tasks[head].needs if missing[self.number[need.task]]]
                names = ", ".join(inputs) or "nothing"
                lines.append(f"{lane.name} waits for {tasks[head].id}, missing {names}")
        return "; ".join(lines)
