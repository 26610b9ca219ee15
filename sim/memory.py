"""Memory: what lies on each GPU during a step, line by line, and whether it fits.

A lane holds the engines of its tasks, one video's cache, the activations of its largest task, gradients and versions of
the adapter for as long as ``executor.worker`` keeps them, and what the step stores. It is a static worst case over all
timings of the queues, so a placement that fits cannot run out of what is counted. Engine switches give a lane two
phases, of which the larger counts. It knows neither fragmentation, nor what a framework keeps, nor trajectories of the
step before (``one_step_off``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import POLICY_KINDS, REQUEST, Assignment, StepGraph, Task
from stagebreaker.sim.workload import Cluster, Workload

ACTIVATIONS = {
    "encode_prompt": "encode_prompt_activations",
    "generate": "generate_activations",
    "old_replay": "replay_activations",
    "ref_replay": "replay_activations",
    "loss_replay": "replay_activations",
    "grad_replay": "grad_replay_activations",
    "grad_replay_kl": "grad_replay_activations",
    "generate_train": "grad_replay_activations",
    "vae_decode": "vae_decode_activations",
    "score": "score_activations",
    REQUEST: "score_activations",
}
"""The memory kind of a task's activations, by what it is priced as; other tasks need none."""
_PASSES = ("generate", "old_replay", "ref_replay", "loss_replay", "grad_replay")
_STORED = ("embeddings", "trajectory", "latents", "frames", "reference")
UPDATE_VECTORS = 5
"""What an update takes: the sum, its mean, the optimizer's copy of that, and two temporaries of AdamW."""
_WORK = {
    "unit buffers": "gradients of single units while one candidate is replayed",
    "accumulator": "the sum of A g, or what is added to it",
    "update buffers": "the sum, its mean, the optimizer's copy and its temporaries",
}


class Line(NamedTuple):
    """One part of a budget."""

    name: str
    size_bytes: int
    why: str


@dataclass(frozen=True)
class Budget:
    """What one lane holds at most; ``capacity_bytes`` of 0 is not known and never too little.

    ``phase`` is "policy" or "judge" where the lane switches engines: the lines are those of the larger phase.
    """

    lane: str
    phase: str
    lines: tuple[Line, ...]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the lines."""
        return sum(line.size_bytes for line in self.lines)

    @property
    def over_bytes(self) -> int:
        """How much does not fit; negative: room that is left (0 where the capacity is not known)."""
        return self.total_bytes - self.capacity_bytes if self.capacity_bytes else 0

    @property
    def fits(self) -> bool:
        """Whether the GPU can hold it."""
        return self.over_bytes <= 0

    def short(self, most: int = 4) -> str:
        """One line: total, capacity and the largest lines."""
        largest = sorted(self.lines, key=lambda line: -line.size_bytes)[:most]
        parts = ", ".join(f"{line.name} {gigabytes(line.size_bytes)}" for line in largest)
        of = f" of {gigabytes(self.capacity_bytes)}" if self.capacity_bytes else ""
        return f"{self.lane} needs {gigabytes(self.total_bytes)}{of}: {parts}"


def gigabytes(size_bytes: int) -> str:
    """Bytes for people: 10^9 each; small sizes keep a digit that is not 0."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 10_000_000 or not size_bytes else f"{size_bytes / 1e6:.2g} MB"


def budgets(
    workload: Workload, graph: StepGraph, assignment: Assignment, profile: Profile, cluster: Cluster
) -> tuple[Budget, ...]:
    """One budget per lane, in lane order; none if the profile knows no memory. See ``Memory`` for the bound."""
    return Memory(workload, graph, profile, cluster).budgets(assignment)


class _Source(NamedTuple):
    """A task that makes a gradient: vectors it stores, vectors it needs beside them while it runs, where it goes."""

    batch: int
    vectors: int
    units: int
    fold: str | None


class _Fold(NamedTuple):
    """The gradients (parts) of one candidate; ``scaled``: vectors that A times them takes beside them."""

    batch: int
    parts: tuple[str, ...]
    scaled: int


class _Moment(NamedTuple):
    """Vectors of own replays (``kept`` of them until the step ends), from other lanes and at work under a name.

    ``versions``: of the adapter.
    """

    batch: int
    own: int
    kept: int
    received: int
    name: str
    work: int
    versions: int


class Memory:
    """The budgets of one graph under many assignments; lanes with equal queues are worked out once.

    A gradient is one vector where its replay is given the advantage, which then seeds the backward, and for KVPO, which
    has no signs. Otherwise it is g+ and g-, whether or not the scores are there by then; one vector at a ratio of 1
    (mini-batch 0 under ``first_replay``), and one more for a KL to means. A lane replays its whole mini-batch before it
    folds the first, in candidate order, so all of them are held, and what other lanes send to be folded may be there as
    well. A worker that sends a gradient keeps its own copy until the step ends, as it keeps that of a candidate which
    is not folded and every version of the adapter. Mini-batches do not overlap: a replay needs the update before.
    Raises ``InputError`` for a memory kind that is needed and absent.
    """

    def __init__(self, workload: Workload, graph: StepGraph, profile: Profile, cluster: Cluster) -> None:
        self.workload, self.graph, self.profile = workload, graph, profile
        self.known = bool(profile.memory_bytes)
        """Whether there are budgets."""
        self._capacity = {lane.name: cluster.gpus[lane.index].memory_bytes for lane in graph.lanes}
        self.limited = self.known and any(self._capacity.values())
        """Whether a budget can be over its GPU's memory."""
        self._updates = graph.of_kind("update")
        self._found: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Budget] = {}
        if not self.known:
            return
        self._sources = self._all_sources()
        self._all_folded = all(source.fold for source in self._sources.values())
        self._folds = {fold.id: self._fold(fold) for fold in graph.of_kind("fold")}
        self._pinned: dict[str, list[Task]] = {lane.name: [] for lane in graph.lanes}
        for task in graph.tasks:
            if task.pinned is not None and task.kind in ("score", REQUEST):
                self._pinned[task.pinned].append(task)
        self._touches = {task.id: {(n.task, n.data) for n in task.needs if n.data in _STORED} for task in graph.tasks}
        """Task -> what it finds or leaves in its worker's store: (task that made it, data kind)."""
        for made in [pair for touched in self._touches.values() for pair in touched]:
            self._touches[made[0]].add(made)
        for task in graph.of_kind("generate"):
            self._touches[task.id] |= {(task.id, "trajectory"), (task.id, "latents")}

    def budgets(self, assignment: Assignment) -> tuple[Budget, ...]:
        """One per lane, in lane order; none if the profile knows no memory."""
        return tuple(self._budget(lane.name, assignment) for lane in self.graph.lanes) if self.known else ()

    def worst(self, assignment: Assignment) -> Budget | None:
        """The budget that is furthest over its GPU's memory; None if all fit or nothing is known."""
        if not self.limited:
            return None
        found = [budget for budget in self.budgets(assignment) if not budget.fits]
        return max(found, key=lambda budget: budget.over_bytes, default=None)

    # -- gradients -------------------------------------------------------------------------------------------

    def _all_sources(self) -> dict[str, _Source]:
        """Replays, and rollouts that back-propagate."""
        fold_of = {need.task: fold.id for fold in self.graph.of_kind("fold") for need in fold.needs if need.data}
        return {
            task.id: _Source(self._batch(task), self._vectors(task), self._units(task), fold_of.get(task.id))
            for task in self.graph.tasks
            if task.kind == "grad_replay" or task.id in fold_of
        }

    def _fold(self, fold: Task) -> _Fold:
        parts = tuple(need.task for need in fold.needs if need.data)
        seeded = all(self._is_seeded(self.graph.by_id[part]) for part in parts)
        return _Fold(self._batch(fold), parts, 0 if seeded else len(parts))

    def _batch(self, task: Task) -> int:
        """Mini-batch; a rollout carries none."""
        return self.workload.mini_batch_of(task.candidate or 0) if task.mini_batch is None else task.mini_batch

    def _is_seeded(self, source: Task) -> bool:
        """The stage-centric kernel: the advantage is in the gradient already, and the fold adds it as it is."""
        return any(self.graph.by_id[need.task].kind == "advantage" for need in source.needs)

    def _vectors(self, source: Task) -> int:
        """Vectors that are stored."""
        w = self.workload
        if self._is_seeded(source):
            return 1
        ratio_is_1 = source.kind == "generate" or (w.old_logprob_source == "first_replay" and source.mini_batch == 0)
        return (1 if w.algorithm == "kvpo" or ratio_is_1 else 2) + w.gaussian_kl

    def _units(self, source: Task) -> int:
        """Vectors beside these while they are made: a unit each, since a ratio is known after the last chunk."""
        if self._is_seeded(source):
            return 0
        if source.kind == "generate" or self.workload.algorithm == "kvpo":
            return 1
        return len(source.steps or ()) or self.workload.trained_steps

    @cached_property
    def _bit(self) -> dict[str, int]:
        return {task.id: 1 << n for n, task in enumerate(self.graph.tasks)}

    @cached_property
    def _before(self) -> dict[str, int]:
        """Bits of everything that is done before a task starts, whatever the timing."""
        before: dict[str, int] = {}
        for task in self.graph.topological:
            found = 0
            for need in task.needs:
                found |= before[need.task] | self._bit[need.task]
            before[task.id] = found
        return before

    # -- one lane --------------------------------------------------------------------------------------------

    def _budget(self, lane: str, assignment: Assignment) -> Budget:
        queue = assignment.order[lane]
        receives = assignment.lane_of["update:0"] == lane or len(self._sources) > self.workload.candidates
        key = (lane, queue, tuple(assignment.lane_of[task] for task in self._sources) if receives else ())
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._worked_out(lane, queue, assignment)
        return found

    def _worked_out(self, lane: str, queue: Sequence[str], assignment: Assignment) -> Budget:
        tasks = [self.graph.by_id[task] for task in queue]
        kinds = {task.kind for task in tasks} | {task.kind for task in self._pinned[lane]}
        priced = {task.cost_kind or task.kind for task in (*tasks, *self._pinned[lane])}
        kept = [*self._kept(kinds), *self._stored(lane, tasks)]
        policy = [
            *self._policy(tasks, kinds),
            *self._gradients(lane, tasks, kinds, assignment),
        ]
        judge = self._judge(lane)
        judging = {"score", REQUEST}
        if "switch" not in kinds:
            phases = {"": [*policy, *judge, *kept, *self._activations(priced)]}
        else:
            phases = {
                "policy": [*policy, *kept, *self._activations(priced - judging)],
                "judge": [
                    *judge,
                    *self._early(lane, tasks, assignment),
                    *kept,
                    *self._activations(priced & judging),
                ],
            }
        phase = max(phases, key=lambda name: sum(line.size_bytes for line in phases[name]))
        return Budget(lane, phase, tuple(line for line in phases[phase] if line.size_bytes), self._capacity[lane])

    def _kept(self, kinds: set[str]) -> Iterator[Line]:
        """What an engine switch does not move."""
        if "update" in kinds:
            size = self.profile.held_bytes("optimizer") + self.profile.held_bytes("adapter")
            yield Line("optimizer", size, "moments and its own copy of the adapter, on the update GPU")
        if "encode_prompt" in kinds:
            yield Line("text encoder", self.profile.held_bytes("text_encoder_weights"), "weights")

    def _versions(self, count: int, in_model: int) -> Line:
        """Copies of the adapter; ``in_model``: 1 where the policy is there, whose layers are one."""
        why = f"the initial one and {count} version{'s' * (count > 1)} of this step"
        size = (1 + count + in_model) * self.profile.held_bytes("adapter")
        return Line("adapter", size, f"in the policy, {why}" if in_model else why)

    def _early(self, lane: str, tasks: Sequence[Task], assignment: Assignment) -> Iterator[Line]:
        """What can come from other lanes while the judge is here: it needs no task that follows the switch back."""
        last = max(n for n, task in enumerate(tasks) if task.kind == "switch")
        after = sum(self._bit[task.id] for task in tasks[last + 1 :])
        found = {
            need.task: self._sources[need.task].vectors if task.kind == "fold" else len(self._folds[need.task].parts)
            for task in tasks[last + 1 :]
            for need in task.needs
            if task.kind in ("fold", "update") and need.data and assignment.lane_of[need.task] != lane
        }
        count = sum(vectors for source, vectors in found.items() if not self._before[source] & after)
        if count:
            size = count * self.profile.held_bytes("gradient_buffer")
            yield Line("received gradients", size, f"{_vectors(count)} from GPUs that are back at training already")
        updates = sum(not (self._before[update.id] | self._bit[update.id]) & after for update in self._updates)
        yield self._versions(1 + updates, 0)

    def _stored(self, lane: str, tasks: Sequence[Task]) -> Iterator[Line]:
        """Trajectories, latents and frames made or used here, until the step ends."""
        held = set().union(*(self._touches[task.id] for task in (*tasks, *self._pinned[lane])))
        counts = Counter(data for _, data in held)
        size = sum(count * self.profile.size_bytes(data) for data, count in counts.items())
        if size:
            yield Line("stored", size, ", ".join(f"{counts[data]} {data}" for data in _STORED if counts[data]))

    def _policy(self, tasks: Sequence[Task], kinds: set[str]) -> Iterator[Line]:
        if kinds & set(POLICY_KINDS):
            yield Line("policy", self.profile.held_bytes("policy_weights"), "weights")
        if kinds & set(_PASSES):
            yield Line("KV cache", self.profile.held_bytes("kv_cache"), "one video at a time")
        if "vae_decode" in kinds:
            count = sum(task.kind == "vae_decode" for task in tasks)
            yield Line("VAE", self.profile.held_bytes("vae_weights"), f"weights; decodes here: {count}")

    def _judge(self, lane: str) -> Iterator[Line]:
        tasks = self._pinned[lane]
        if not tasks:
            return
        served = sum(task.kind == REQUEST for task in tasks)
        at_once = min(served, 1) if self.profile.serving == "serial" else served
        at_once = max(at_once, *(len(task.members) for task in tasks if task.kind == "score"), 0)
        if self.profile.verdicts is not None and self.profile.verdicts.most_active is not None:
            at_once = min(at_once, self.profile.verdicts.most_active)
        yield Line("judge", self.profile.held_bytes("judge_weights"), "weights")
        size = at_once * self.profile.held_bytes("judge_reserve")
        yield Line("judge reserve", size, f"caches of up to {at_once} requests at once")

    def _activations(self, kinds: set[str]) -> Iterator[Line]:
        needed = {kind: self.profile.held_bytes(ACTIVATIONS[kind]) for kind in sorted(kinds & set(ACTIVATIONS))}
        if needed:
            kind = max(needed, key=lambda name: needed[name])
            yield Line("activations", needed[kind], f"largest of its tasks: {'score' if kind == REQUEST else kind}")

    def _gradients(self, lane: str, tasks: Sequence[Task], kinds: set[str], assignment: Assignment) -> Iterator[Line]:
        """Vectors and versions in the moment when they are most."""
        if not kinds & {*POLICY_KINDS, "fold"}:
            return
        vector, version = self.profile.held_bytes("gradient_buffer"), self.profile.held_bytes("adapter")
        most = max(
            self._moments(lane, tasks, assignment),
            key=lambda m: (m.own + m.received + m.work) * vector + m.versions * version,
        )
        if most.own:
            until = (most.own - most.kept, "until they are folded here"), (most.kept, "until the step ends")
            why = f"of replays here up to mini-batch {most.batch}: {', '.join(f'{n} {when}' for n, when in until if n)}"
            yield Line("gradient buffers", most.own * vector, why)
        if most.received:
            why = f"{_vectors(most.received)} of mini-batch {most.batch} from other GPUs, until they are added"
            yield Line("received gradients", most.received * vector, why)
        if most.work:
            yield Line(most.name, most.work * vector, f"{_vectors(most.work)}: {_WORK[most.name]}")
        yield self._versions(most.versions, 1)

    def _moments(self, lane: str, tasks: Sequence[Task], assignment: Assignment) -> Iterator[_Moment]:
        """Per mini-batch when its last replay runs, its first fold, and its update; and the end of the step."""
        batches, lane_of, sums = self.workload.mini_batches, assignment.lane_of, not self.workload.deterministic
        updates = lane_of["update:0"] == lane
        own, kept, units, received, adds, scaled = ([0] * batches for _ in range(6))
        folds = [False] * batches
        for task in tasks:
            if (source := self._sources.get(task.id)) is not None:
                own[source.batch] += source.vectors
                units[source.batch] = max(units[source.batch], source.units)
                if source.fold is None or lane_of[source.fold] != lane:
                    kept[source.batch] += source.vectors
            elif (fold := self._folds.get(task.id)) is not None:
                received[fold.batch] += sum(self._sources[p].vectors for p in fold.parts if lane_of[p] != lane)
                folds[fold.batch] = True
                adds[fold.batch] = max(adds[fold.batch], fold.scaled, not sums)
                scaled[fold.batch] += len(fold.parts) if sums else 0
        sent = [0] * batches
        if updates and sums:
            for name, fold in self._folds.items():
                sent[fold.batch] += len(fold.parts) if lane_of[name] != lane else 0
        before = most_units = 0
        for m in range(batches):
            held, left, there = before + own[m], before + kept[m], received[m] + sent[m]
            most_units = max(most_units, units[m])  # a replay that is never folded may be late
            versions = 1 + (m if updates or self._all_folded else batches)
            if own[m]:
                yield _Moment(m, held, left, there, "unit buffers", most_units, versions)
            if folds[m]:
                yield _Moment(m, held, left, there, "accumulator", adds[m], versions)
            if updates and sums:
                yield _Moment(m, left + scaled[m], left, sent[m], "accumulator", 1, versions)
            if updates:
                yield _Moment(m, left, left, 0, "update buffers", UPDATE_VECTORS, versions)
            before += kept[m] + (0 if updates else scaled[m])
        yield _Moment(batches - 1, before, before, 0, "", 0, 1 + batches)


def _vectors(count: int) -> str:
    return "1 vector" if count == 1 else f"{count} vectors"
