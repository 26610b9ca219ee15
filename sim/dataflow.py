"""The step graph: the tasks of one RL step and the true data dependencies between them.

A ``StepGraph`` is what both interpreters walk: the SimPy engine with profiled costs, the controller with real
engines. It is placement-free: it says what needs what, an ``Assignment`` says which lane runs each task and in
which order. A lane is one GPU in its role. Data that an edge carries costs a transfer only where the two ends sit
on different lanes; whether and when that happens is the interpreter's business, not the graph's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Role = Literal["actor", "reward", "all"]

CONTROL_KINDS = ("advantage", "barrier", "group_weights")
"""Kinds that the controller does itself, at once, on no GPU."""

REQUEST = "request"
"""A score request served by the lane's judge in its own way (sim.dispatch); it has a lane but no place in its order."""

OVERHEAD_KINDS = ("switch", "sync", "transfer")
"""Kinds that are neither work of the step nor idle time."""

POLICY_KINDS = ("generate", "old_replay", "ref_replay", "loss_replay", "grad_replay", "update")
"""Kinds that need the policy and therefore the adapter."""


GRADIENT_VECTORS = {"gradient": 1, "sign_gradients": 2, "gradient_and_kl": 2, "sign_gradients_and_kl": 3}
"""Data kinds of a replay's result -> vectors of the adapter's length in it: g, or g+ and g-, and the KL part, which the
advantage does not scale, so that it cannot be added to them before that is known."""


@dataclass(frozen=True, slots=True)
class Need:
    """One incoming edge: the task it comes from and the data kind it carries (None: order or a few scalars)."""

    task: str
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One node. ``steps`` (denoising steps) and ``chunks`` are set where a replay covers only a part.

    ``cost_kind``: the profile's kind it is priced as, where that is not its own (``profiles.table.DERIVED_KINDS``).
    """

    id: str
    kind: str
    needs: tuple[Need, ...] = ()
    candidate: int | None = None
    mini_batch: int | None = None
    group: int | None = None
    steps: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    members: tuple[str, ...] = ()
    pinned: str | None = None
    cost_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """One GPU in its role. ``index`` is its place in the cluster's list."""

    name: str
    role: Role
    index: int


@dataclass(frozen=True)
class StepGraph:
    """Tasks in canonical order, lanes in cluster order. ``ValueError`` for unknown, double or cyclic needs."""

    tasks: tuple[Task, ...]
    lanes: tuple[Lane, ...]
    by_id: Mapping[str, Task] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {task.id: task for task in self.tasks}
        if len(by_id) != len(self.tasks):
            seen: set[str] = set()
            twice = next(t.id for t in self.tasks if t.id in seen or seen.add(t.id))  # type: ignore[func-returns-value]
            raise ValueError(f"task {twice} stands twice in the step graph")
        for task in self.tasks:
            for need in task.needs:
                if need.task not in by_id:
                    raise ValueError(f"task {task.id} needs {need.task}, which is not in the step graph")
        object.__setattr__(self, "by_id", by_id)
        self.topological  # noqa: B018 - raises for a cycle

    @cached_property
    def topological(self) -> tuple[Task, ...]:
        """Tasks in an order that respects every need; ties in canonical order."""
        missing = {t.id: len(t.needs) for t in self.tasks}
        users: dict[str, list[Task]] = {t.id: [] for t in self.tasks}
        for task in self.tasks:
            for need in task.needs:
                users[need.task].append(task)
        ready = [t for t in self.tasks if not t.needs]
        done: list[Task] = []
        while ready:
            task = ready.pop()
            done.append(task)
            for user in users[task.id]:
                missing[user.id] -= 1
                if not missing[user.id]:
                    ready.append(user)
        if len(done) != len(self.tasks):
            stuck = sorted(name for name, count in missing.items() if count)
            raise ValueError(f"the step graph has a cycle through {', '.join(stuck[:5])}")
        return tuple(done)

    def of_kind(self, kind: str) -> tuple[Task, ...]:
        """All tasks of a kind, in canonical order."""
        return tuple(task for task in self.tasks if task.kind == kind)


@dataclass(frozen=True)
class Assignment:
    """Where and in which order: task id -> lane name for every task with a lane; lane name -> its queue.

    Requests have a lane and stand in no queue: the lane's judge serves them after the first ``serve_after`` tasks of
    its queue have been taken (decodes come first) and before the rest.
    """

    lane_of: Mapping[str, str]
    order: Mapping[str, tuple[str, ...]]
    serve_after: Mapping[str, int] = field(default_factory=dict)
