"""Dispatch: which task may start next on which lane. The rules both interpreters share.

A lane is exclusive and takes its queue strictly in order; a task starts when all its inputs have arrived. Score
requests stand in no queue: the lane's judge serves them, as its serving mode says, once the decodes before them
leave it free and before the tasks after them. Dispatch keeps the counts; it knows neither clocks nor durations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from stagebreaker.profiles.table import Profile, Serving
from stagebreaker.sim.dataflow import (
    CONTROL_KINDS,
    GRADIENT_VECTORS,
    POLICY_KINDS,
    REQUEST,
    Assignment,
    StepGraph,
)

CONTROL = -1


class Transfer(NamedTuple):
    """Data of ``source`` on its way to lane ``target``; ``users`` may count it as arrived when it gets there."""

    source: int
    target: int
    data: str
    size_bytes: int
    users: tuple[int, ...]


class Route(NamedTuple):
    """Where one task's results go: tasks that have them at once, and transfers in the order of their egress."""

    at_once: tuple[int, ...]
    transfers: tuple[Transfer, ...]


class GraphIndex:
    """A step graph as integer lists, made once and shared by every placement of that graph.

    ``users[t]`` holds (user, data kind or None, bytes) per outgoing edge.
    """

    def __init__(self, graph: StepGraph, profile: Profile) -> None:
        self.graph = graph
        self.tasks = graph.tasks
        self.index = {task.id: n for n, task in enumerate(graph.tasks)}
        self.needs = [len(task.needs) for task in graph.tasks]
        self.users: list[list[tuple[int, str | None, int]]] = [[] for _ in graph.tasks]
        for n, task in enumerate(graph.tasks):
            for need in task.needs:
                size = data_bytes(profile, need.data) if need.data else 0
                self.users[self.index[need.task]].append((n, need.data, size))
        self.control = [task.kind in CONTROL_KINDS for task in graph.tasks]
        self.request = [task.kind == REQUEST for task in graph.tasks]
        self.turn = [tuple(int(v) for v in re.findall(r"\d+", " ".join(task.members))) for task in graph.tasks]
        """Requests of one instant are served by candidate numbers, whatever order tasks were created in."""
        self.queued = self.control.count(False) - self.request.count(True)
        """Number of tasks that stand in a queue."""
        self.update = [task.kind == "update" for task in graph.tasks]
        self.policy = [task.kind in POLICY_KINDS for task in graph.tasks]
        self.lanes = {lane.name: n for n, lane in enumerate(graph.lanes)}
        self.adapter_bytes = data_bytes(profile, "adapter")
        self._ends = [itemgetter(n, *(user for user, _, _ in users)) for n, users in enumerate(self.users)]
        self._routes: list[dict[Any, Route]] = [{} for _ in graph.tasks]
        self.roots = [n for n, count in enumerate(self.needs) if not count]

    def route(self, n: int, lane: Sequence[int], policy_lanes: Sequence[int]) -> Route:
        """The route of task ``n`` when task t is on ``lane[t]``; remembered, since placements share most of them."""
        key = self._ends[n](lane)  # the lanes of both ends of every edge
        if self.update[n]:
            key = (key, *policy_lanes)
        found = self._routes[n].get(key)
        if found is None:
            found = self._routes[n][key] = self._route(n, lane, policy_lanes)
        return found

    def _route(self, n: int, lane: Sequence[int], policy_lanes: Sequence[int]) -> Route:
        here = lane[n]
        at_once: list[int] = []
        away: dict[tuple[int, str], tuple[int, list[int]]] = {}
        for user, data, size in self.users[n]:
            there = lane[user]
            if data is None or there in (here, CONTROL) or here == CONTROL:
                at_once.append(user)
            else:
                away.setdefault((there, data), (size, []))[1].append(user)
        if self.update[n]:  # every lane with a policy gets the new adapter, whether or not a task waits for it
            for there in policy_lanes:
                if there != here:
                    away.setdefault((there, "adapter"), (self.adapter_bytes, []))
        transfers = (
            Transfer(n, there, data, size, tuple(users)) for (there, data), (size, users) in sorted(away.items())
        )
        return Route(tuple(at_once), tuple(transfers))


def data_bytes(profile: Profile, data: str) -> int:
    """Bytes of one object of a data kind; g+ and g- together are two gradients, with a KL part three."""
    vectors = GRADIENT_VECTORS.get(data)
    return vectors * profile.size_bytes("gradient") if vectors else profile.size_bytes(data)


class Dispatch:
    """The state of one step under one assignment."""

    def __init__(self, index: GraphIndex, assignment: Assignment) -> None:
        names, lanes = index.index, index.lanes
        self.index = index
        self.lane = [CONTROL] * len(index.tasks)
        for task, lane in assignment.lane_of.items():
            self.lane[names[task]] = lanes[lane]
        self.queue = [[names[task] for task in assignment.order[lane]] for lane in lanes]
        self.serve_after = [assignment.serve_after.get(lane, 0) for lane in lanes]
        self._check()
        self.missing = list(index.needs)
        self.available_us = [0] * len(index.tasks)
        """When the last input so far of each task arrived, as the interpreter says."""
        self.done = [False] * len(index.tasks)
        self.position = [0] * len(lanes)
        self.waiting: list[list[int]] = [[] for _ in lanes]
        self.open_requests = [0] * len(lanes)
        for n, is_request in enumerate(index.request):
            if is_request:
                self.open_requests[self.lane[n]] += 1
        self.serves = [count > 0 for count in self.open_requests]
        used = [False] * len(lanes)
        for n, lane_number in enumerate(self.lane):
            if index.policy[n] and lane_number != CONTROL:
                used[lane_number] = True
        self.policy_lanes = [n for n, has in enumerate(used) if has]

    def _check(self) -> None:
        """Every task but the controller's has a lane and, requests apart, stands in that lane's queue once."""
        index, lane = self.index, self.lane
        queued = [n for queue in self.queue for n in queue]
        astray = [n for number, queue in enumerate(self.queue) for n in queue if lane[n] != number or index.request[n]]
        if len(queued) == index.queued and len(set(queued)) == len(queued) and not astray:
            return
        free = (n for n in range(len(lane)) if not index.control[n] and not index.request[n] and n not in queued)
        odd = next(iter([*astray, *free, *(n for n in queued if queued.count(n) > 1)]))
        raise ValueError(f"task {index.tasks[odd].id} must have a lane and stand in that lane's queue once")

    def begin(self) -> list[int]:
        """Tasks that are ready before anything has run."""
        for n in self.index.roots:
            if self.index.request[n]:
                self.waiting[self.lane[n]].append(n)
        return self.index.roots

    def complete(self, n: int, at_us: int) -> tuple[list[int], tuple[Transfer, ...]]:
        """Task ``n`` is done: (tasks now ready, transfers now due in the order of their egress)."""
        route = self.finish(n)
        return self.arrive(route.at_once, at_us), route.transfers

    def finish(self, n: int) -> Route:
        """Task ``n`` is done; the caller sees to it that its results arrive."""
        self.done[n] = True
        return self.index.route(n, self.lane, self.policy_lanes)

    def arrive(self, users: Sequence[int], at_us: int) -> list[int]:
        """One more input of each user is there: tasks now ready. Requests among them wait for their judge."""
        ready = []
        missing, available_us = self.missing, self.available_us
        for user in users:
            if at_us > available_us[user]:
                available_us[user] = at_us
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
                if self.index.request[user]:
                    self.waiting[self.lane[user]].append(user)
        return ready

    def next_task(self, lane: int) -> int | None:
        """Head of the lane's queue if it may start now. Take it with ``take_task``."""
        position = self.position[lane]
        queue = self.queue[lane]
        if position == len(queue) or (position >= self.serve_after[lane] and self.open_requests[lane]):
            return None
        head = queue[position]
        return None if self.missing[head] else head

    def follower(self, lane: int, running: int) -> int | None:
        """Head of the queue if it may be sent to the lane behind ``running``: all it still lacks is that task's data.

        Where results are only known to the controller (an edge without data), it has to wait.
        """
        position, queue = self.position[lane], self.queue[lane]
        if position == len(queue) or self.open_requests[lane]:
            return None
        head = queue[position]
        local = sum(user == head and data is not None for user, data, _ in self.index.users[running])
        return head if self.missing[head] == local else None

    def take_task(self, lane: int) -> None:
        """The head has started."""
        self.position[lane] += 1

    def take_requests(self, lane: int, serving: Serving) -> list[int]:
        """Requests the judge admits now: serial the first that waits, otherwise all that wait."""
        waiting = self.waiting[lane]
        taken = sorted(waiting, key=lambda n: self.index.turn[n])[: 1 if serving == "serial" else None]
        self.waiting[lane] = [n for n in waiting if n not in taken]
        return taken

    def request_done(self, lane: int) -> None:
        """One request of the lane has its score (call ``complete`` for it too)."""
        self.open_requests[lane] -= 1

    def finished(self, lane: int) -> bool:
        """Nothing is left to start on this lane."""
        return self.position[lane] == len(self.queue[lane]) and not self.open_requests[lane]

    def blocked(self) -> list[str]:
        """One line per lane that still has work: what it waits for and which inputs are missing."""
        lines = []
        names = [lane.name for lane in self.index.graph.lanes]
        for lane, name in enumerate(names):
            if self.finished(lane):
                continue
            position = self.position[lane]
            heads = [
                n for n in range(len(self.lane)) if self.index.request[n] and self.lane[n] == lane and self.missing[n]
            ]
            if position < len(self.queue[lane]):
                heads.insert(0, self.queue[lane][position])
            for head in heads[:3]:
                task = self.index.tasks[head]
                missing = [need.task for need in task.needs if not self.done[self.index.index[need.task]]]
                why = f"missing: {', '.join(missing)}" if missing else "its inputs are there"
                lines.append(f"{name} waits for {task.id} ({why})")
        return lines
