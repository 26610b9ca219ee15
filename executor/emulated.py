"""The emulated backend: light Ray actors, one per planned GPU, whose tasks sleep for the profiled time, scaled.

It exercises the real control plane at any size on a laptop: the paper's six GPUs, or sixty. Results are None, only time
is real. The judge keeps its serving contract: n active requests advance at 1/t(n) each and pause while their GPU runs
another task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from stagebreaker.executor.backends import Done, RayBackend
from stagebreaker.executor.cluster import now_us
from stagebreaker.sim.dataflow import Lane, Task
from stagebreaker.sim.engine import Costs


class Emulated(RayBackend):
    """Light actors that sleep: profiled time x ``time_scale``. Values are None; only time is real."""

    name = "emulated"

    def __init__(self, lanes: Sequence[Lane], costs: Costs, time_scale: float) -> None:
        super().__init__(lanes)
        self._costs, self._scale = costs, time_scale
        self._at_once: list[Done] = []
        actor = self.ray.remote(_Sleeper).options(num_cpus=0, max_concurrency=1000)
        curves = [
            {b: costs.batch_us(b, lane) * time_scale / 1e6 for b in _measured_batches(costs, lane)}
            for lane in range(len(lanes))
        ]
        self._actors = [actor.remote(curve) for curve in curves]
        self.ray.get([a.clock_us.remote() for a in self._actors])
        self._calibrate()

    def run(self, lane: int, order: Any, token: Any) -> None:
        """Sleep exclusively, or serve one request beside others."""
        task: Task = order.task
        actor = self._actors[lane]
        if task.kind == "request":
            self.start(actor.serve.remote(task.id), token, task, lane)
            return
        duration_us = self._costs.task_us(task, lane)
        if duration_us or any(busy == lane for _, _, busy in self._pending.values()):
            self.start(actor.sleep.remote(duration_us * self._scale / 1e6), token, task, lane)
        else:
            self._at_once.append(Done(token, None, now_us(), now_us()))

    def wait(self) -> list[Done]:
        """Tasks of no length on a free lane first: they never left this process."""
        done, self._at_once = self._at_once, []
        return done or super().wait()

    def send(self, source: int, target: int, task: str, data: str, size_bytes: int, token: Any) -> None:
        """The link's profiled time, beside whatever the source's GPU does."""
        ref = self._actors[source].move.remote(self._costs.link.duration_us(size_bytes) * self._scale / 1e6)
        self.start(ref, token, f"{task}/{data}", source)

    def call(self, lane: int, method: str, *args: Any) -> Any:
        """There is no engine to call."""
        return None


class _Sleeper:
    """An emulated GPU: exclusive sleeps, and a judge that serves n requests at 1/t(n) each while nothing else runs."""

    def __init__(self, curve_s: dict[int, float]) -> None:
        self.curve_s = curve_s
        self.left: dict[str, float] = {}
        self.exclusive = False
        self.turn = asyncio.Lock()
        self.changed = asyncio.Event()
        self.since = time.monotonic()

    async def clock_us(self) -> int:
        return now_us()

    async def move(self, seconds: float) -> tuple[None, int, int]:
        start = now_us()
        await asyncio.sleep(seconds)
        return None, start, now_us()

    async def sleep(self, seconds: float) -> tuple[None, int, int]:
        async with self.turn:
            self._settle()
            self.exclusive = True
            start = now_us()
            await asyncio.sleep(seconds)
            end = now_us()
            self._settle()
            self.exclusive = False
            self._wake()
        return None, start, end

    async def serve(self, request: str) -> tuple[None, int, int]:
        start = now_us()
        self._settle()
        self.left[request] = 1.0
        self._wake()
        while True:
            self._settle()
            if self.left[request] <= 1e-9:
                break
            changed = self.changed
            wait_s = None if self.exclusive else self.left[request] * self._t()
            try:
                await asyncio.wait_for(changed.wait(), wait_s)
            except TimeoutError:
                continue
        del self.left[request]
        self._wake()
        return None, start, now_us()

    def _t(self) -> float:
        """t(n) of the active requests, in seconds."""
        n = sum(left > 1e-9 for left in self.left.values())
        return self.curve_s[max(1, n)]

    def _settle(self) -> None:
        """Book the progress since the last change."""
        now = time.monotonic()
        if not self.exclusive:
            step = (now - self.since) / self._t()
            self.left = {name: max(0.0, left - step) for name, left in self.left.items()}
        self.since = now

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _measured_batches(costs: Costs, lane: int) -> range:
    gpu_kind = costs.kinds[lane]
    if not costs.profile.has("score", gpu_kind):
        return range(1, 1)
    return range(1, max(costs.profile.curve_us("score", gpu_kind)) + 1)
