"""Profiling: times every task of a workload with the worker that will run it.

Each task runs on real inputs made by the tasks before it, after a warm-up, several times; nothing is estimated. Batches
of the judge are measured at powers of two up to the largest a plan could ask for, data sizes are those of the messages
workers really send, and the link is timed between two processes. CPU workers share caches and memory bandwidth, so
they are timed beside busy neighbours, as many as the plan will run. What this device cannot tell (peak memory on a
CPU) stays empty.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stagebreaker.executor.cluster import link_samples
from stagebreaker.executor.messages import size_bytes
from stagebreaker.executor.models.prompts import load_prompts
from stagebreaker.executor.rl import prompts_of_step
from stagebreaker.executor.worker import Order, Worker
from stagebreaker.profiles.measure import Measurement, measure
from stagebreaker.profiles.table import GpuKind, LinkCost, Profile, TaskCost
from stagebreaker.sim.dataflow import Need, Task
from stagebreaker.sim.workload import Workload

LINK_BYTES = (1_000, 8_000_000)
"""A message of latency and one of bandwidth."""

ENGINES = ("torch", "diffusers", "transformers", "peft", "ray")


def profile_workload(
    workload: Workload,
    device: str,
    dtype: str,
    repeats: int,
    neighbours: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> Profile:
    """Measure everything beside ``neighbours`` busy processes; ``tick(1)`` after each of ``count(workload)``."""
    worker = Worker(workload, device, dtype)
    worker.warm(("encode_prompt", "generate", "vae_decode", "score", "update"))  # before any neighbour meets bad input
    with _neighbours(workload, device, dtype, neighbours):
        return _profile(worker, repeats, neighbours, tick)


def _profile(worker: Worker, repeats: int, neighbours: int, tick: Callable[[int], None]) -> Profile:
    workload = worker.workload
    kind = gpu_kind(worker.device)
    bench = _Bench(worker, kind.name, repeats, tick)
    bench.rollout()
    bench.scoring(batch_sizes(workload))
    bench.training()
    link = _link()
    tick(1)
    return Profile(
        name=f"{workload.name}-{kind.name}",
        provenance="measured",
        source=f"stagebreaker-profile, {repeats} repeats after one warm-up, beside {neighbours} busy neighbours",
        workload=workload.name,
        serving="dynamic",
        dtype=str(worker.dtype).removeprefix("torch."),
        settings=workload.cost_settings(),
        versions={"python": platform.python_version(), **{name: version(name) for name in ENGINES}},
        gpu_kinds=(kind,),
        link=link,
        sizes_bytes=bench.sizes(),
        tasks=tuple(bench.costs),
    )


@contextmanager
def _neighbours(workload: Workload, device: str, dtype: str, count: int) -> Iterator[None]:
    """Processes that do a worker's work over and over while the block runs."""
    spawn = multiprocessing.get_context("spawn")
    busy = [spawn.Event() for _ in range(count)]
    processes = [spawn.Process(target=_work, args=(workload, device, dtype, event), daemon=True) for event in busy]
    try:
        for process in processes:
            process.start()
        for process, event in zip(processes, busy, strict=True):
            while not event.wait(1.0):
                if not process.is_alive():
                    raise RuntimeError(f"a neighbour process ended with exit code {process.exitcode}")
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(workload: Workload, device: str, dtype: str, busy: Any) -> None:
    """A neighbour: rolls out, decodes and replays until it is killed."""
    bench = _Bench(Worker(workload, device, dtype), "", 1, lambda _: None)
    bench.prompt()
    while True:
        bench.candidate(0)
        busy.set()


def batch_sizes(workload: Workload) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest batch: every request of a step on one judge."""
    n = workload.group_size
    most = workload.groups * n * (n - 1) // 2 if workload.reward_shape == "all_pairs" else workload.candidates
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, most]))


def count(workload: Workload) -> int:
    """Number of measurements, for a progress bar."""
    return 10 + len(batch_sizes(workload))


def gpu_kind(device: str) -> GpuKind:
    """What this device is called."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = properties.name.lower().replace(" ", "-")
        return GpuKind(
            name=name,
            model=properties.name,
            memory_bytes=properties.total_memory,
            driver=str(torch.version.cuda or ""),
        )
    return GpuKind(name="cpu", model=_cpu_model())


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class _Bench:
    """Runs tasks on one worker in dataflow order and keeps their costs."""

    def __init__(self, worker: Worker, gpu_kind: str, repeats: int, tick: Callable[[int], None]) -> None:
        self.worker, self.gpu_kind, self.repeats, self.tick = worker, gpu_kind, repeats, tick
        self.prompts = prompts_of_step(load_prompts(), worker.workload, 0)
        self.costs: list[TaskCost] = []

    def prompt(self) -> None:
        """Conditioning of every group."""
        for group in range(self.worker.workload.groups):
            self.worker.run(self._order(Task(f"encode_prompt:{group}", "encode_prompt", group=group)))

    def candidate(self, i: int) -> None:
        """One candidate's rollout, decode and replay."""
        needs = (Need(f"generate:{i}", "trajectory"),)
        for task in (self._generate(i), self._decode(i), Task(f"grad_replay:{i}", "grad_replay", needs, candidate=i)):
            self.worker.run(self._order(task))

    def rollout(self) -> None:
        """Prompts, and one video per request that the judge will see."""
        self.prompt()
        self._measure("encode_prompt", Task("encode_prompt:0", "encode_prompt", group=0))
        videos = self.worker.workload.candidates
        for i in range(1, videos):
            self.worker.run(self._order(self._generate(i)))
            self.worker.run(self._order(self._decode(i)))
        self._measure("generate", self._generate(0))
        self._measure("vae_decode", self._decode(0))

    def scoring(self, sizes: tuple[int, ...]) -> None:
        """t(b) at each batch size."""
        w = self.worker.workload
        names = [str(i) for i in range(w.candidates)]
        if w.reward_shape == "all_pairs":
            names = [
                f"{i}-{j}"
                for g in range(w.groups)
                for i in w.group_members(g)
                for j in range(i + 1, (g + 1) * w.group_size)
            ]
        for size in sizes:
            task = Task(f"score:{size}", "score", members=tuple(names[:size]))
            self._measure("score", task, batch=size)

    def training(self) -> None:
        """Replays, fold, update and both directions of an engine switch."""
        needs = (Need("generate:0", "trajectory"),)
        for kind in ("loss_replay", "old_replay", "grad_replay"):
            self._measure(kind, Task(f"{kind}:0", kind, needs, candidate=0, mini_batch=0))
        self._add("context_rebuild", 1, self._time(self._rebuild_context))
        gradient = self.worker.store["grad_replay:0", "gradient"]
        fold = Task(
            "fold:0",
            "fold",
            (Need("grad_replay:0", "gradient"), Need("advantage:0")),
            candidate=0,
            mini_batch=0,
        )
        update = Task("update:0", "update", mini_batch=0)
        values = {"advantage:0": {"values": {"0": 1.0}}}

        def folded() -> None:
            self.worker.store["grad_replay:0", "gradient"] = gradient
            self.worker.accumulators.clear()
            self.worker.run(self._order(fold, values, {0: 1}))

        def updated() -> None:
            folded()
            self.worker.run(self._order(update, {}, {0: 1}))
            self.worker.reset_adapter()

        folding = self._time(folded)
        self._add("fold", 1, folding)
        both = self._time(updated)
        alone = tuple(max(0, a - b) for a, b in zip(both.samples_us, sorted(folding.samples_us), strict=True))
        self._add("update", 1, Measurement(alone, both.peak_memory_bytes))
        self._switches()

    def sizes(self) -> dict[str, int]:
        """Bytes of the messages that carry each kind of data."""
        messages = {
            "embeddings": self.worker.export("encode_prompt:0", "embeddings"),
            "latents": self.worker.export("generate:0", "latents"),
            "trajectory": self.worker.export("generate:0", "trajectory"),
            "frames": self.worker.export("vae_decode:0", "frames"),
            "adapter": self.worker.export("", "adapter"),
        }
        sizes = {name: size_bytes(message) for name, message in messages.items()}
        sizes["gradient"] = self.worker.adapter.numel * self.worker.adapter.params[0].element_size()
        return sizes

    def _generate(self, i: int) -> Task:
        group = self.worker.workload.group_of(i)
        return Task(
            f"generate:{i}",
            "generate",
            (Need(f"encode_prompt:{group}", "embeddings"),),
            candidate=i,
            group=group,
        )

    @staticmethod
    def _decode(i: int) -> Task:
        return Task(f"vae_decode:{i}", "vae_decode", (Need(f"generate:{i}", "latents"),), candidate=i)

    def _rebuild_context(self) -> None:
        trajectory, text = self.worker.store["generate:0", "trajectory"]
        cache = self.worker.policy.new_cache()
        for c in range(trajectory.chunks - 1):
            self.worker.policy.commit(trajectory.x_CKDFHW[c, -1][None], text, cache)

    def _switches(self) -> None:
        there, back = (Order(Task(f"switch:gpu0.{to}", "switch"), 0, 0, self.prompts) for to in ("judge", "policy"))
        ways = [0]

        def switch() -> None:
            self.worker.run((there, back)[ways[0] % 2])
            ways[0] += 1

        repeats, self.repeats = self.repeats, 2 * self.repeats
        self._add("switch", 1, self._time(switch))
        self.repeats = repeats
        self.worker.run(back)

    def _order(self, task: Task, values: dict[str, Any] | None = None, parts: dict[int, int] | None = None) -> Order:
        return Order(task, 0, 0, self.prompts, values or {}, parts or {})

    def _measure(self, kind: str, task: Task, batch: int = 1) -> None:
        order = self._order(task)
        self._add(kind, batch, self._time(lambda: self.worker.run(order)))

    def _time(self, call: Callable[[], object]) -> Measurement:
        cuda = self.worker.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        return measure(
            call,
            repeats=self.repeats,
            synchronise=torch.cuda.synchronize if cuda else lambda: None,
            peak_memory_bytes=torch.cuda.max_memory_allocated if cuda else lambda: None,
        )

    def _add(self, kind: str, batch: int, found: Measurement) -> None:
        self.costs.append(
            TaskCost(
                kind=kind,
                gpu_kind=self.gpu_kind,
                batch_size=batch,
                samples_us=found.samples_us,
                peak_memory_bytes=found.peak_memory_bytes,
            )
        )
        self.tick(1)


def _link() -> LinkCost:
    """Latency from the small message, bandwidth from what the large one takes longer."""
    small, large = link_samples(LINK_BYTES)
    extra_us = max(1, large - small)
    return LinkCost(latency_us=small, bytes_per_s=max(1, (LINK_BYTES[1] - LINK_BYTES[0]) * 1_000_000 // extra_us))
