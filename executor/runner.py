"""The run: a plan's schedule, N times, on a backend; what a user gets out of it.

Each step walks the same graph the plan was simulated with. After each, every GPU that holds the policy must have the
same adapter version with the same checksum, and a checkpoint is written. A failed task or Ctrl-C leaves the last
checkpoint to resume from; the warm-up step changes nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagebreaker.executor import backends
from stagebreaker.executor.backends import Backend, TaskFailedError
from stagebreaker.executor.controller import Step, StepResult, run_step
from stagebreaker.executor.emulated import Emulated
from stagebreaker.executor.record import scaled
from stagebreaker.profiles.cli import RunFailedError
from stagebreaker.profiles.document import InputError, nearest, write_atomic
from stagebreaker.profiles.table import Serving
from stagebreaker.sim.dataflow import REQUEST, Assignment, StepGraph, Task
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs
from stagebreaker.sim.plan import Plan
from stagebreaker.sim.schedules import build
from stagebreaker.sim.timeline import Timeline

BACKENDS = ("ray", "inline", "emulated")


@dataclass(frozen=True)
class Program:
    """One schedule of a plan, ready to walk."""

    plan: Plan
    schedule: str
    graph: StepGraph
    assignment: Assignment
    index: GraphIndex

    @classmethod
    def of(cls, plan: Plan, schedule: str) -> Program:
        """Expand a schedule; ``InputError`` if the plan's task lists are not what its placement expands to."""
        if schedule not in plan.schedules:
            raise InputError(f"schedule {schedule!r} is not in the plan; {nearest(schedule, plan.schedules)}")
        item = plan.schedules[schedule]
        graph, assignment = build(plan.workload, item.placement)
        plan.check_digests()
        if dict(assignment.lane_of) != item.lane_of or dict(assignment.order) != item.order:
            moved = [t for t in assignment.lane_of if item.lane_of.get(t) != assignment.lane_of[t]]
            where = f"task {moved[0]}" if moved else "a queue's order"
            raise InputError(
                f"the plan's {where} is not where its placement puts it; plan again instead of editing lists"
            )
        return cls(plan, schedule, graph, assignment, GraphIndex(graph, plan.profile))

    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Task kinds per lane, so that a worker can load its engines before the clock runs."""
        kinds: dict[str, set[str]] = {lane.name: set() for lane in self.graph.lanes}
        for task, lane in self.assignment.lane_of.items():
            kinds[lane].add(self.graph.by_id[task].kind)
        return {lane: tuple(sorted(names)) for lane, names in kinds.items()}

    def requests(self) -> set[str]:
        """Names of the step's score requests."""
        return {member for task in self.graph.tasks if task.kind in ("score", REQUEST) for member in task.members}

    def policy_lanes(self) -> list[int]:
        """Lanes that hold the adapter, the update's first."""
        from stagebreaker.sim.dispatch import Dispatch

        update = self.index.lanes[self.assignment.lane_of["update:0"]]
        lanes = Dispatch(self.index, self.assignment).policy_lanes
        return [update, *(lane for lane in lanes if lane != update)]

    @property
    def serving(self) -> Serving:
        """How the judge serves requests."""
        return self.plan.profile.serving


@dataclass
class RunResult:
    """What a run measured; one entry per step. Emulated times are at full size."""

    program: Program
    backend: str
    timelines: list[Timeline] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    adapter_sha256: str = ""

    @property
    def step_us(self) -> list[int]:
        """Measured step times."""
        return [timeline.makespan_us for timeline in self.timelines]

    @property
    def predicted_step_us(self) -> int:
        """The plan's prediction."""
        return self.program.plan.schedules[self.program.schedule].step_us


class EmulatedStep:
    """``controller.Step`` for actors that only sleep: an order is the bare task."""

    @dataclass(frozen=True)
    class Order:
        """What ``backends.Emulated`` reads."""

        task: Task

    def order(self, task: Task, values: Mapping[str, Any]) -> EmulatedStep.Order:
        """No values: nothing is computed."""
        return self.Order(task)

    def control(self, task: Task, values: Mapping[str, Any]) -> None:
        """Nothing to compute."""


def emulate(
    program: Program, steps: int, time_scale: float, out: Path, tick: Callable[[int], None] = lambda _: None
) -> RunResult:
    """Run on sleeping actors, ``time_scale`` of real time. The first step is a warm-up and not kept."""
    costs = Costs(program.graph, program.plan.profile, program.plan.cluster, program.plan.workload.trained_steps)
    backend = Emulated(program.graph.lanes, costs, time_scale)
    result = RunResult(program, backend.name)
    try:
        for n in range(steps + 1):
            done = run_step(program.index, program.assignment, program.serving, backend, EmulatedStep())
            if n:
                result.timelines.append(scaled(done.timeline, 1 / time_scale))
                result.metrics.append(
                    {"step": n, "timing_s/step": result.step_us[-1] / 1e6, "sb/time_scale": time_scale}
                )
                append_metrics(out, result.metrics[-1])
            tick(1)
    finally:
        backend.stop()
    return result


@dataclass(frozen=True)
class RunOptions:
    """How to run on real engines. ``recorded`` holds rewards by request name, one mapping per step."""

    steps: int
    out: Path
    device: str = "cpu"
    dtype: str = "float32"
    resume: bool = False
    warmup: bool = True
    recorded: Sequence[Mapping[str, float | None]] | None = None


def train(
    program: Program, backend_name: str, options: RunOptions, tick: Callable[[int], None] = lambda _: None
) -> RunResult:
    """Run on real engines. Raises ``RunFailedError`` with the task, the GPU and how to resume."""
    from stagebreaker.executor.worker import check_executable, check_models

    check_executable(program.plan.workload, program.schedule)
    check_models(program.plan.workload)
    make = backends.Inline if backend_name == "inline" else backends.RayWorkers
    backend = make(program.plan.workload, program.graph.lanes, program.kinds(), options.device, options.dtype)
    try:
        return _Training(program, backend, options, tick).go()
    finally:
        backend.stop()


class _Training:
    def __init__(self, program: Program, backend: Backend, options: RunOptions, tick: Callable[[int], None]) -> None:
        from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
        from stagebreaker.executor.models.prompts import load_prompts

        w = program.plan.workload
        self.program, self.backend, self.options, self.tick = program, backend, options, tick
        self.algorithm = DanceGRPO(w.trained_steps, w.clip_low, w.clip_high, w.advantage_clamp, w.advantage_eps)
        self.prompts = load_prompts()
        self.update_lane, *self.other_lanes = program.policy_lanes()
        self.result = RunResult(program, backend.name)

    def go(self) -> RunResult:
        if self.options.resume:
            self._newest()
        if self.options.warmup:
            self._guard(0, lambda: self._step(0))
            for lane in (self.update_lane, *self.other_lanes):
                self.backend.call(lane, "reset")
            self.tick(1)
        first = self._resume() if self.options.resume else 0
        for n in range(first, self.options.steps):
            self._guard(n, lambda n=n: self._finish(n, *self._step(n)))  # type: ignore[misc]
            self.tick(1)
        self.result.adapter_sha256 = self._adapter_state()[1]
        return self.result

    def _newest(self) -> tuple[int, Path]:
        from stagebreaker.executor import checkpoint

        found = checkpoint.latest(self.options.out)
        if found is None:
            raise InputError(f"--resume: {self.options.out} holds no checkpoint; run without --resume")
        return found

    def _resume(self) -> int:
        step, folder = self._newest()
        keep_metrics(self.options.out, step)
        self.backend.call(self.update_lane, "restore", str(folder))
        message = self.backend.call(self.update_lane, "export", "", "adapter")
        for lane in self.other_lanes:
            self.backend.call(lane, "receive", "", "adapter", message)
            self.backend.call(lane, "end_step")
        return step

    def _step(self, n: int) -> tuple[StepResult, Any]:
        from stagebreaker.executor.rl import RLStep, prompts_of_step

        workload, recorded = self.program.plan.workload, self.options.recorded
        step = RLStep(
            workload,
            self.program.graph,
            self.algorithm,
            n,
            self._adapter_state()[0],
            prompts_of_step(self.prompts, workload, n),
            recorded[n] if recorded is not None else None,
        )
        walk: Step = step
        return run_step(self.program.index, self.program.assignment, self.program.serving, self.backend, walk), step

    def _adapter_state(self) -> tuple[int, str]:
        """(version, checksum), equal on every GPU with a policy, else ``TaskFailedError``."""
        states = [self.backend.call(lane, "adapter_state") for lane in (self.update_lane, *self.other_lanes)]
        for lane, state in zip(self.other_lanes, states[1:], strict=True):
            if state != states[0]:
                name = self.program.graph.lanes[lane].name
                raise TaskFailedError(
                    f"{name} has adapter version {state[0]} ({state[1][:12]}), "
                    f"the update GPU {states[0][0]} ({states[0][1][:12]})"
                )
        version, digest = states[0]
        return version, digest

    def _finish(self, n: int, done: StepResult, step: Any) -> None:
        from stagebreaker.executor import checkpoint

        for lane in range(len(self.program.graph.lanes)):
            self.backend.call(lane, "end_step")
        self.result.timelines.append(done.timeline)
        self.result.metrics.append(step_metrics(n + 1, done, step, self._adapter_state()))
        folder = checkpoint.folder_of(self.options.out, n + 1)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.backend.call(self.update_lane, "save", str(folder.resolve()), n + 1)
        append_metrics(self.options.out, self.result.metrics[-1])

    def _guard(self, n: int, run: Callable[[], object]) -> None:
        try:
            run()
        except (RuntimeError, ValueError) as error:
            from stagebreaker.executor import checkpoint

            found = checkpoint.latest(self.options.out)
            how = (
                f"resume after step {found[0]} with --resume --out {self.options.out}"
                if found
                else "no step was finished: run again"
            )
            raise RunFailedError(f"step {n + 1}: {error}; {how}") from error


def append_metrics(out: Path, line: Mapping[str, Any]) -> None:
    """One line of metrics.jsonl, as soon as its step is finished."""
    with (out / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def keep_metrics(out: Path, steps: int) -> None:
    """Drop the lines of steps that will be made again."""
    file = out / "metrics.jsonl"
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
        write_atomic(file, "".join(f"{line}\n" for line in lines if _step_of(line) <= steps))


def _step_of(line: str) -> float:
    """A line that was cut off when a run ended belongs to a step that will be made again."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def step_metrics(number: int, done: StepResult, step: Any, adapter: tuple[int, str]) -> dict[str, Any]:
    """One line of metrics.jsonl: names verl users know, ours under sb/."""
    timeline, values = done.timeline, done.values
    by_kind: dict[str, int] = {}
    for row in timeline.rows:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.end_us - row.start_us
    rewards = [r for r in step.candidate_rewards.values() if r is not None]
    replays = [v for k, v in values.items() if k.startswith("grad_replay:")]
    updates = [v for k, v in values.items() if k.startswith("update:")]
    ratios = [r for replay in replays for r in replay["ratio"]]
    units = sum(replay["units"] for replay in replays)
    generated = sum(k.startswith("generate:") for k in values)
    group_of = step.workload.group_of
    spreads: dict[int, set[float]] = {}
    for i, reward in step.candidate_rewards.items():
        if reward is not None:
            spreads.setdefault(group_of(i), set()).add(reward)
    return {
        "step": number,
        "timing_s/step": timeline.makespan_us / 1e6,
        **{f"timing_s/{kind}": us / 1e6 for kind, us in sorted(by_kind.items())},
        "critic/rewards/mean": statistics.fmean(rewards) if rewards else None,
        "critic/rewards/min": min(rewards, default=None),
        "critic/rewards/max": max(rewards, default=None),
        "actor/grad_norm": statistics.fmean(u["grad_norm"] for u in updates),
        "actor/ratio_mean": statistics.fmean(ratios),
        "actor/ratio_max_deviation": max(abs(r - 1) for r in ratios),
        "actor/clip_fraction": sum(r["cut_if_positive"] + r["cut_if_negative"] for r in replays) / max(1, units),
        "sb/gradient_buffers": sum(r["buffers"] for r in replays),
        "sb/rollout/started": generated,
        "sb/rollout/finished": generated,
        "sb/rollout/discarded": len(step.masked),
        "sb/reward/failed": sum(r is None for r in step.rewards.values()),
        "sb/reward/zero_std_groups": sum(len(s) == 1 for s in spreads.values()),
        "sb/updates_skipped": sum(u["skipped"] for u in updates),
        "sb/adapter_version": adapter[0],
        "sb/adapter_sha256": adapter[1],
        "sb/rewards": step.rewards,
        "sb/advantages": {str(i): a for i, a in sorted(step.advantages.items())},
        "sb/masked": {str(i): reason for i, reason in sorted(step.masked.items())},
    }
