"""Memory: what lies on each GPU during a step, line by line, and whether it fits.

A lane holds the engines of its tasks, one video's cache, the activations of its largest task, the gradients that wait
for their advantage, and what the step stores. It is a static worst case over all timings of the queues, so a placement
that fits cannot run out of what is counted. Engine switches give a lane two phases, of which the larger counts.
It knows neither fragmentation, nor what a framework keeps, nor a judge that would rather queue than serve at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import CONTROL_KINDS, POLICY_KINDS, REQUEST, Assignment, StepGraph, Task
from stagebreaker.sim.timeline import Timeline
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
_STORED = ("trajectory", "latents", "frames", "reference")


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
    workload: Workload,
    graph: StepGraph,
    assignment: Assignment,
    profile: Profile,
    cluster: Cluster,
    timeline: Timeline | None = None,
) -> tuple[Budget, ...]:
    """One budget per lane, in lane order; none if the profile knows no memory. See ``Memory`` for the bound."""
    return Memory(workload, graph, profile, cluster, timeline).budgets(assignment)


class Memory:
    """The budgets of one graph under many assignments; lanes with equal queues are worked out once.

    Gradients that wait: between two updates, every replay of the mini-batch on the lane whose advantage (KVPO: group
    weights) may be unknown when it starts. It is known in every timing if each score it depends on is an ancestor of
    the replay in the graph, or is given on the replay's own lane, where scoring comes before training. So it is an
    upper bound over all timings, reached if no other score comes before the mini-batch's replays end. Given a
    ``timeline``, only those count whose scores came after their start in it. A waiting replay keeps g+ and g-; one
    vector where both are the same (mini-batch 0 under ``first_replay``) or the algorithm has no signs (KVPO). The
    update GPU also holds what the others send, since it folds in candidate order: scaled already where the advantage
    was known. Raises ``InputError`` for a memory kind that is needed and absent.
    """

    def __init__(
        self,
        workload: Workload,
        graph: StepGraph,
        profile: Profile,
        cluster: Cluster,
        timeline: Timeline | None = None,
    ) -> None:
        self.workload, self.graph, self.profile = workload, graph, profile
        self.known = bool(profile.memory_bytes)
        """Whether there are budgets."""
        self._capacity = {lane.name: cluster.gpus[lane.index].memory_bytes for lane in graph.lanes}
        self.limited = self.known and any(self._capacity.values())
        """Whether a budget can be over its GPU's memory."""
        self._found: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Budget] = {}
        self._waiting: dict[tuple[str, str], bool] = {}
        if not self.known:
            return
        self._bit = {task.id: 1 << n for n, task in enumerate(graph.tasks)}
        self._before = self._ancestors()
        self._awaited = self._awaited_scores()
        self._sources = [task for task in graph.tasks if task.id in self._awaited]
        """Tasks that make a gradient: replays, and rollouts that back-propagate."""
        self._pinned: dict[str, list[Task]] = {lane.name: [] for lane in graph.lanes}
        for task in graph.tasks:
            if task.pinned is not None and task.kind in ("score", REQUEST):
                self._pinned[task.pinned].append(task)
        self._given = {lane: self._mask(task.id for task in tasks) for lane, tasks in self._pinned.items()}
        self._makes: dict[str, set[str]] = {task.id: set() for task in graph.tasks}
        for task in graph.tasks:
            for need in task.needs:
                if need.data in _STORED:
                    self._makes[need.task].add(str(need.data))
        self._start_us = {row.task: row.start_us for row in timeline.rows} if timeline else {}
        self._end_us = {row.task: row.end_us for row in timeline.rows} if timeline else {}

    def budgets(self, assignment: Assignment) -> tuple[Budget, ...]:
        """One per lane, in lane order; none if the profile knows no memory."""
        return tuple(self._budget(lane.name, assignment) for lane in self.graph.lanes) if self.known else ()

    def worst(self, assignment: Assignment) -> Budget | None:
        """The budget that is furthest over its GPU's memory; None if all fit or nothing is known."""
        if not self.limited:
            return None
        found = [budget for budget in self.budgets(assignment) if not budget.fits]
        return max(found, key=lambda budget: budget.over_bytes, default=None)

    # -- what may be unknown ---------------------------------------------------------------------------------

    def _mask(self, tasks: Iterable[str]) -> int:
        found = 0
        for task in tasks:
            found |= self._bit[task]
        return found

    def _ancestors(self) -> dict[str, int]:
        """Bits of everything that is done before a task starts, whatever the timing."""
        before: dict[str, int] = {}
        for task in self.graph.topological:
            found = 0
            for need in task.needs:
                found |= before[need.task] | self._bit[need.task]
            before[task.id] = found
        return before

    def _awaited_scores(self) -> dict[str, tuple[str, ...]]:
        """Task that makes a gradient -> what has to be done before its weight in the fold is known.

        Group weights need the log-probs of all branches; where there is a loss replay, they come from it. A replay that
        is never folded, since rewards did not select it, waits for all that its mini-batch waits for.
        """
        by_id, awaited = self.graph.by_id, {}
        in_batch: dict[int | None, set[str]] = {}
        for fold in self.graph.of_kind("fold"):
            left = [need.task for need in fold.needs if need.data is None]
            found: set[str] = set()
            while left:
                task = by_id[left.pop()]
                if task.kind in CONTROL_KINDS:
                    left += [need.task for need in task.needs]
                    continue
                first = f"loss_replay:{task.candidate}"
                found.add(first if task.kind == "grad_replay" and first in by_id else task.id)
            in_batch.setdefault(fold.mini_batch, set()).update(found)
            awaited.update({need.task: tuple(sorted(found)) for need in fold.needs if need.data is not None})
        for replay in self.graph.of_kind("grad_replay"):
            awaited.setdefault(replay.id, tuple(sorted(in_batch.get(replay.mini_batch, ()))))
        return awaited

    def _waits(self, source: str, lane: str) -> bool:
        """Whether the advantage of a gradient made on this lane may be unknown when its task starts."""
        if (source, lane) not in self._waiting:
            awaited = self._awaited[source]
            waits = bool(self._mask(awaited) & ~(self._before[source] | self._given[lane]))
            if waits and source in self._start_us:
                waits = any(self._end_us[task] > self._start_us[source] for task in awaited)
            self._waiting[source, lane] = waits
        return self._waiting[source, lane]

    def _batch(self, source: Task) -> int:
        """Mini-batch; a rollout carries none."""
        return self.workload.mini_batch_of(source.candidate or 0) if source.mini_batch is None else source.mini_batch

    def _vectors(self, source: Task) -> int:
        """Vectors that a waiting gradient is; one more for a KL to means, which the advantage does not scale."""
        w = self.workload
        ratio_is_1 = source.kind == "generate" or (w.old_logprob_source == "first_replay" and source.mini_batch == 0)
        return (1 if w.algorithm == "kvpo" or ratio_is_1 else 2) + w.gaussian_kl

    # -- one lane --------------------------------------------------------------------------------------------

    def _budget(self, lane: str, assignment: Assignment) -> Budget:
        queue = assignment.order[lane]
        receives = assignment.lane_of["update:0"] == lane or len(self._sources) > self.workload.candidates
        key = (lane, queue, tuple(assignment.lane_of[task.id] for task in self._sources) if receives else ())
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._worked_out(lane, queue, assignment)
        return found

    def _worked_out(self, lane: str, queue: Sequence[str], assignment: Assignment) -> Budget:
        tasks = [self.graph.by_id[task] for task in queue]
        kinds = {task.kind for task in tasks} | {task.kind for task in self._pinned[lane]}
        priced = {task.cost_kind or task.kind for task in (*tasks, *self._pinned[lane])}
        kept = [*self._kept(tasks, kinds), *self._stored(lane, tasks)]
        policy = [*self._policy(tasks, kinds), *self._gradients(lane, tasks, assignment)]
        judge = self._judge(lane)
        judging = {"score", REQUEST}
        if "switch" not in kinds:
            phases = {"": [*policy, *judge, *kept, *self._activations(priced)]}
        else:
            phases = {
                "policy": [*policy, *kept, *self._activations(priced - judging)],
                "judge": [*judge, *kept, *self._activations(priced & judging)],
            }
        phase = max(phases, key=lambda name: sum(line.size_bytes for line in phases[name]))
        return Budget(lane, phase, tuple(line for line in phases[phase] if line.size_bytes), self._capacity[lane])

    def _kept(self, tasks: Sequence[Task], kinds: set[str]) -> Iterator[Line]:
        """What an engine switch does not move."""
        if kinds & {*POLICY_KINDS, "fold"}:
            frozen = any(task.kind == "old_replay" and (task.mini_batch or 0) > 0 for task in tasks)
            why = "the current one, and the one frozen at rollout for old log-probs" if frozen else "the current one"
            yield Line("adapter", (1 + frozen) * self.profile.held_bytes("adapter"), why)
        if "update" in kinds:
            yield Line("optimizer", self.profile.held_bytes("optimizer"), "moments, on the update GPU")
        if "encode_prompt" in kinds:
            yield Line("text encoder", self.profile.held_bytes("text_encoder_weights"), "weights")

    def _stored(self, lane: str, tasks: Sequence[Task]) -> Iterator[Line]:
        """Trajectories, latents and frames made or used here, until the step ends."""
        held = {(task.id, data) for task in tasks for data in self._makes[task.id]}
        for task in (*tasks, *self._pinned[lane]):
            held.update((need.task, need.data) for need in task.needs if need.data in _STORED)
        held -= {(source, "latents") for source, data in held if data == "trajectory"}  # its last point
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
        yield Line("judge", self.profile.held_bytes("judge_weights"), "weights")
        size = at_once * self.profile.held_bytes("judge_reserve")
        yield Line("judge reserve", size, f"caches of up to {at_once} requests at once")

    def _activations(self, kinds: set[str]) -> Iterator[Line]:
        needed = {kind: self.profile.held_bytes(ACTIVATIONS[kind]) for kind in sorted(kinds & set(ACTIVATIONS))}
        if needed:
            kind = max(needed, key=lambda name: needed[name])
            yield Line("activations", needed[kind], f"largest of its tasks: {'score' if kind == REQUEST else kind}")

    def _gradients(self, lane: str, tasks: Sequence[Task], assignment: Assignment) -> Iterator[Line]:
        """Vectors of the adapter's length in the worst mini-batch: of own replays, received, units, accumulator."""
        own = [task for task in tasks if task.id in self._awaited]
        folds = any(task.kind == "fold" for task in tasks)
        if not own and not folds:
            return
        vector = self.profile.held_bytes("gradient_buffer")
        per_batch = []
        for m in range(self.workload.mini_batches):
            waiting = [self._vectors(t) for t in own if self._batch(t) == m and self._waits(t.id, lane)]
            received = self._received(m, lane, tasks, assignment)
            per_batch.append((sum(waiting) + received, -m, len(waiting), sum(waiting), received))
        _, batch, count, kept, received = max(per_batch)
        if kept:
            why = f"{count} in mini-batch {-batch} that may wait for their advantage, {_vectors(kept // count)} each"
            yield Line("gradient buffers", kept * vector, why)
        if received:
            why = f"{_vectors(received)} of mini-batch {-batch} from other GPUs, until they are folded"
            yield Line("received gradients", received * vector, why)
        if own:
            units = max(map(self._units, own))
            yield Line("unit buffers", units * vector, f"{_vectors(units)} while one candidate is replayed")
        if folds:
            yield Line("accumulator", vector, "the sum of A g")

    def _units(self, source: Task) -> int:
        """Unit gradients kept while one is made: a ratio is known after the last chunk; a known seed needs one."""
        seeded = any(self.graph.by_id[need.task].kind == "advantage" for need in source.needs)
        if seeded or source.kind == "generate" or self.workload.algorithm == "kvpo":
            return 1
        return len(source.steps or ()) or self.workload.trained_steps

    def _received(self, m: int, lane: str, tasks: Sequence[Task], assignment: Assignment) -> int:
        """Vectors that other lanes send before they can be added."""
        count = 0
        for task in tasks:
            for need in task.needs if task.mini_batch == m and task.kind in ("fold", "update") else ():
                there = assignment.lane_of[need.task] if need.data is not None else lane
                if there != lane:
                    source = self.graph.by_id[need.task]
                    waits = source.kind != "fold" and self._waits(source.id, there)
                    count += self._vectors(source) if waits else 1
        return count


def _vectors(count: int) -> str:
    return "1 vector" if count == 1 else f"{count} vectors"
