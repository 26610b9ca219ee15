"""Backends: where tasks really run. One protocol, three of them.

``inline`` runs real workers in this process, one task at a time; ``ray`` runs one worker process per GPU; ``emulated``
runs light Ray actors whose tasks sleep for the profiled time, scaled: the real control plane at any size on a laptop.
All report start and end in one clock, microseconds of this process's monotonic clock. A backend knows neither schedules
nor what a task computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stagebreaker.executor.cluster import is_running, now_us, start_ray
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.dataflow import Lane, Task
from stagebreaker.sim.workload import Workload

PLACEMENT_TIMEOUT_S = 60.0


class TaskFailedError(RuntimeError):
    """A task raised. The message names the task, the GPU and what was raised."""


@dataclass(frozen=True)
class Done:
    """One thing that was started is finished; times in us of the controller's monotonic clock."""

    token: Any
    value: Any
    start_us: int
    end_us: int


class Backend(Protocol):
    """Starts tasks and transfers without blocking, and waits for them. Lanes are numbers in the graph's order."""

    name: str

    def run(self, lane: int, order: Any, token: Any) -> None:
        """Start a task on a lane."""

    def send(self, source: int, target: int, task: str, data: str, size_bytes: int, token: Any) -> None:
        """Start moving one result between lanes."""

    def wait(self) -> list[Done]:
        """Block until something is finished. Raises ``TaskFailedError``."""

    def call(self, lane: int, method: str, *args: Any) -> Any:
        """Call a worker's method outside the step (checkpoints, checksums); blocks."""

    def stop(self) -> None:
        """Release every worker."""


class Inline:
    """Real workers in this process."""

    name = "inline"

    def __init__(
        self,
        workload: Workload,
        lanes: Sequence[Lane],
        kinds: Mapping[str, tuple[str, ...]],
        device: str,
        dtype: str,
    ) -> None:
        from stagebreaker.executor.worker import Worker

        self._workers = [Worker(workload, device, dtype) for _ in lanes]
        self._lanes = lanes
        self._done: deque[Done] = deque()
        for worker, lane in zip(self._workers, lanes, strict=True):
            worker.warm(kinds[lane.name])

    def run(self, lane: int, order: Any, token: Any) -> None:
        """Do the task now."""
        start = now_us()
        try:
            value = self._workers[lane].run(order)
        except Exception as error:
            raise _failed(order.task, self._lanes[lane], error) from error
        self._done.append(Done(token, value, start, now_us()))

    def send(self, source: int, target: int, task: str, data: str, size_bytes: int, token: Any) -> None:
        """Through the same messages as between processes."""
        start = now_us()
        try:
            self._workers[target].receive(task, data, self._workers[source].export(task, data))
        except Exception as error:
            raise _failed(f"{task}/{data}", self._lanes[target], error) from error
        self._done.append(Done(token, None, start, now_us()))

    def wait(self) -> list[Done]:
        """Everything is finished by the time it was started."""
        done = list(self._done)
        self._done.clear()
        return done

    def call(self, lane: int, method: str, *args: Any) -> Any:
        """Call a worker's method."""
        try:
            return getattr(self._workers[lane], method)(*args)
        except InputError:
            raise
        except Exception as error:
            raise _failed(method, self._lanes[lane], error) from error

    def stop(self) -> None:
        """Nothing to release."""


class RayBackend:
    """What both Ray backends share: one actor per lane, calls by reference, one clock."""

    name = "ray"

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._ours = not is_running()
        self.ray = start_ray(len(lanes))
        self._lanes = lanes
        self._actors: list[Any] = []
        self._pending: dict[Any, tuple[Any, Task | str, int]] = {}
        self._offset_us: list[int] = []

    def _calibrate(self) -> None:
        """Clock offset of each worker's host, by the quickest of a few round trips; 0 on one host but for noise."""
        for actor in self._actors:
            best: tuple[int, int] | None = None
            for _ in range(5):
                before = now_us()
                there = self.ray.get(actor.clock_us.remote())
                after = now_us()
                trip = after - before
                if best is None or trip < best[0]:
                    best = (trip, there - (before + after) // 2)
            assert best is not None
            self._offset_us.append(best[1] if abs(best[1]) > best[0] else 0)

    def start(self, ref: Any, token: Any, what: Task | str, lane: int) -> None:
        self._pending[ref] = (token, what, lane)

    def wait(self) -> list[Done]:
        """Block until at least one call is finished; return all that are."""
        return self.poll(None)

    def poll(self, timeout_s: float | None) -> list[Done]:
        """All calls that are finished, in the order they were sent; waits up to ``timeout_s`` for the first."""
        finished, _ = self.ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if finished and len(self._pending) > 1:
            finished, _ = self.ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        done = []
        for ref in finished:
            token, what, lane = self._pending.pop(ref)
            try:
                value, start, end = self.ray.get(ref)
            except Exception as error:
                raise _failed(what, self._lanes[lane], error) from error
            offset = self._offset_us[lane]
            done.append(Done(token, value, start - offset, end - offset))
        return done

    def call(self, lane: int, method: str, *args: Any) -> Any:
        """Call a worker's method and wait for it."""
        try:
            return self.ray.get(self._actors[lane].call.remote(method, *args))
        except Exception as error:
            cause = _plain(error)
            raise (cause if isinstance(cause, InputError) else _failed(method, self._lanes[lane], error)) from error

    def stop(self) -> None:
        """End the actors and Ray if it is ours."""
        for actor in self._actors:
            self.ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._ours:
            self.ray.shutdown()


class RayWorkers(RayBackend):
    """One process with real engines per GPU."""

    def __init__(
        self,
        workload: Workload,
        lanes: Sequence[Lane],
        kinds: Mapping[str, tuple[str, ...]],
        device: str,
        dtype: str,
    ) -> None:
        super().__init__(lanes)
        need = len(lanes)
        have = int(self.ray.cluster_resources().get("GPU", 0))
        if device == "cuda" and have < need:
            self.stop()
            raise InputError(f"the plan needs {need} GPUs, this Ray cluster has {have}: missing {need - have}")
        actor = self.ray.remote(concurrency_groups={"data": 1, "compute": 1})(_Process)
        options = {"num_cpus": 0, "num_gpus": 1 if device == "cuda" else 0, "max_restarts": 0}
        self._actors = [actor.options(**options).remote(workload, device, dtype, kinds[lane.name]) for lane in lanes]
        warm = [a.warm.options(concurrency_group="compute").remote() for a in self._actors]
        ready, waiting = self.ray.wait(
            warm, num_returns=need, timeout=None if device == "cuda" else 10 * PLACEMENT_TIMEOUT_S
        )
        if waiting:
            self.stop()
            raise InputError(f"{len(waiting)} of {need} workers did not start; look for memory or CPUs taken by others")
        try:
            self.ray.get(ready)
        except Exception as error:
            self.stop()
            raise _plain(error) from error
        self._calibrate()

    def run(self, lane: int, order: Any, token: Any) -> None:
        """Submit the task to its process."""
        ref = self._actors[lane].run.options(concurrency_group="compute").remote(order)
        self.start(ref, token, order.task, lane)

    def send(self, source: int, target: int, task: str, data: str, size_bytes: int, token: Any) -> None:
        """Export on one side, receive on the other; the message goes through Ray's object store by reference."""
        message = self._actors[source].export.options(concurrency_group="data").remote(task, data)
        ref = self._actors[target].receive.options(concurrency_group="data").remote(task, data, message)
        self.start(ref, token, f"{task}/{data}", target)


class _Process:
    """A Worker behind Ray: adds the clock, so that a span is what the worker saw."""

    def __init__(self, workload: Workload, device: str, dtype: str, kinds: tuple[str, ...]) -> None:
        from stagebreaker.executor.worker import Worker

        self.worker = Worker(workload, device, dtype)
        self.kinds = kinds

    def warm(self) -> None:
        self.worker.warm(self.kinds)

    def clock_us(self) -> int:
        return now_us()

    def run(self, order: Any) -> tuple[Any, int, int]:
        start = now_us()
        value = self.worker.run(order)
        return value, start, now_us()

    def export(self, task: str, data: str) -> tuple[int, Any]:
        return now_us(), self.worker.export(task, data)

    def receive(self, task: str, data: str, message: tuple[int, Any]) -> tuple[None, int, int]:
        self.worker.receive(task, data, message[1])
        return None, message[0], now_us()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)


def _failed(what: Task | str, lane: Lane, error: Exception) -> TaskFailedError:
    cause = _plain(error)
    name = what if isinstance(what, str) else what.id
    return TaskFailedError(f"task {name} on {lane.name} failed: {type(cause).__name__}: {cause}")


def _plain(error: Exception) -> Exception:
    """The worker's own exception behind Ray's wrapper."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
