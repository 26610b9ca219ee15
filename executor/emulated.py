"""The emulated backend: light Ray actors, one per planned GPU, whose tasks sleep for the profiled time, scaled.

It exercises the real control plane at any size on a laptop: the paper's six GPUs, or sixty. Results are None, only time
is real. The judge keeps its serving contract: n active requests advance at 1/t(n) each and pause while their GPU runs
another task. Links are kept by this process: a transfer that ends is a timer that rings. A timer that rings late is the
laptop's fault, not the plan's: a task ends when it was due, and what was waiting behind it on that GPU starts then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from stagebreaker.executor.backends import Done, RayBackend
from stagebreaker.executor.cluster import now_us
from stagebreaker.sim.dataflow import Lane, Task
from stagebreaker.sim.engine import Costs
from stagebreaker.sim.serving import Service


class Emulated(RayBackend):
    """Light actors that sleep: profiled time x ``time_scale``. Values are None; only time is real."""

    name = "emulated"

    def __init__(self, lanes: Sequence[Lane], costs: Costs, time_scale: float) -> None:
        super().__init__(lanes)
        self._costs, self._scale = costs, time_scale
        self._timers: list[tuple[int, int, Done]] = []
        self._ring = itertools.count()
        self._open = [0] * len(lanes)
        actor = self.ray.remote(_Sleeper).options(num_cpus=0, max_concurrency=1000)
        self._actors = [actor.remote(costs.service(lane), time_scale) for lane in range(len(lanes))]
        self.ray.get([a.clock_us.remote() for a in self._actors])
        self._calibrate()

    def run(self, lane: int, order: Any, token: Any) -> None:
        """Sleep exclusively, or serve one request beside others."""
        task: Task = order.task
        actor = self._actors[lane]
        if task.kind == "request":
            self._open[lane] += 1
            self.start(actor.serve.remote(task.members[0]), (lane, token), task, lane)
            return
        duration_us = self._costs.task_us(task, lane)
        if duration_us or self._open[lane]:
            self._open[lane] += 1
            self.start(actor.sleep.remote(round(duration_us * self._scale)), (lane, token), task, lane)
        else:  # a task of no length on a free lane never leaves this process
            self._due(now_us(), now_us(), token)

    def send(self, source: int, target: int, task: str, data: str, size_bytes: int, token: Any) -> None:
        """The link's profiled time, beside whatever the source's GPU does."""
        start = now_us()
        self._due(start, start + round(self._costs.link.duration_us(size_bytes) * self._scale), token)

    def _due(self, start_us: int, end_us: int, token: Any) -> None:
        heapq.heappush(self._timers, (end_us, next(self._ring), Done(token, None, start_us, end_us)))

    def wait(self) -> list[Done]:
        """What is due, or the first actor that is done."""
        while True:
            done = []
            while self._timers and self._timers[0][0] <= now_us():
                done.append(heapq.heappop(self._timers)[2])
            left_s = max(0, self._timers[0][0] - now_us()) / 1e6 if self._timers else None
            if self._pending:
                for item in self.poll(0 if done else left_s):
                    lane, token = item.token
                    self._open[lane] -= 1
                    done.append(Done(token, item.value, item.start_us, item.end_us))
            elif not done and left_s is not None:
                time.sleep(left_s)
            if done:
                return done

    def call(self, lane: int, method: str, *args: Any) -> Any:
        """There is no engine to call."""
        return None


class _Sleeper:
    """An emulated GPU: exclusive sleeps, and a judge that has its GPU while nothing else runs (sim.serving)."""

    def __init__(self, service: Service, scale: float) -> None:
        self.service, self.scale = service, scale
        self.ends: dict[str, asyncio.Future[int]] = {}
        self.turn = asyncio.Lock()
        self.exclusive = False
        self.free_us = self.since_us = 0
        self.alarm: asyncio.TimerHandle | None = None

    async def clock_us(self) -> int:
        return now_us()

    async def sleep(self, duration_us: int) -> tuple[None, int, int]:
        arrived = now_us()
        async with self.turn:
            start = max(arrived, self.free_us)
            self.free_us = start + duration_us
            self._judge(start, exclusive=True)
            await asyncio.sleep(max(0, self.free_us - now_us()) / 1e6)
            self._judge(self.free_us, exclusive=False)
            return None, start, self.free_us

    async def serve(self, request: str) -> tuple[None, int, int]:
        start = now_us()
        self._judge(start, exclusive=self.exclusive)
        self.service.join(request)
        end = self.ends[request] = asyncio.get_running_loop().create_future()
        self._judge(start, exclusive=self.exclusive)
        return None, start, await end

    def _judge(self, until_us: int, *, exclusive: bool) -> None:
        """Book the judge's progress up to an instant; from then on it advances unless the GPU is taken."""
        while not self.exclusive and (due := self._due_us()) is not None and due <= until_us:
            self._advance(due)
        self._advance(max(self.since_us, until_us))
        self.exclusive = exclusive
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
        due = None if exclusive else self._due_us()
        if due is not None:
            wait_s = max(0, due - now_us()) / 1e6
            self.alarm = asyncio.get_running_loop().call_later(wait_s, self._ring, due)

    def _ring(self, due_us: int) -> None:
        self._judge(due_us, exclusive=False)

    def _due_us(self) -> int | None:
        """When the judge's next change comes if nothing else does."""
        due = self.service.due_us()
        return None if due is None else self.since_us + math.ceil(due * self.scale)

    def _advance(self, until_us: int) -> None:
        done = self.service.advance((until_us - self.since_us) / self.scale, paused=self.exclusive)
        self.since_us = until_us
        for request in done:
            self.ends.pop(request).set_result(until_us)
