"""Schedules: workload x placement -> step graph and assignment.

A schedule is a row of choices (who rolls out, when training may start, how often a trajectory is replayed, whether
tasks may move, ...), from which one builder makes the graph; neither interpreter knows a schedule by name.
Numbering is canonical: candidate i has group i // group_size, actor i mod a, reward GPU i mod r; every lane takes
its tasks in candidate order. The edges follow the paper's Sections 3 and 4; baselines replay no more than they do.
Where rewards select who is trained (``train_per_group``), schedules that train after the scores replay the selected
alone, dealt to their GPUs anew; the others replay all and drop what was not selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.sim.dataflow import CONTROL_KINDS, REQUEST, Assignment, Lane, Need, StepGraph, Task
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of the schedule table."""

    name: str
    everywhere: bool
    """Every GPU rolls out, scores and trains, stage by stage, switching engines in between."""
    early: bool
    """Training starts when the rollout is over; else after the last score."""
    merged: bool
    """One replay (grad) per trajectory; else loss and grad with a barrier between them."""
    movable: bool = False
    """Decodes and replays may move to reward GPUs."""
    ours: bool = False
    """Needs reward-asynchronous training, so a user cannot have it without StageBreaker."""
    lean: bool = False
    """Mini-batch 1 is back-propagated while it is rolled out, as LeanGRPO does; the others are replayed."""
    off_policy: bool = False
    """Rolls out the next batch with the adapter from before this step's updates: other mathematics, never compared."""
    runs: bool = True
    """Real engines run it; else it is a what-if of the simulator and of the emulated backend."""

    @property
    def eligible(self) -> bool:
        """May be a plan's best schedule or a baseline."""
        return self.runs and not self.off_policy

    @property
    def waits(self) -> bool:
        """Training waits for scores of this step."""
        return not self.early and not self.off_policy


SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule("colocated", everywhere=True, early=False, merged=False),
        Schedule("async_reward", everywhere=False, early=False, merged=False),
        Schedule("async_train", everywhere=False, early=True, merged=False, ours=True),
        Schedule("merged_replay", everywhere=False, early=True, merged=True, ours=True),
        Schedule("stagebreaker", everywhere=False, early=True, merged=True, movable=True, ours=True),
        Schedule("colocated_merged", everywhere=True, early=False, merged=True),
        Schedule("async_reward_merged", everywhere=False, early=False, merged=True),
        Schedule("lean", everywhere=False, early=True, merged=True, ours=True, lean=True, runs=False),
        Schedule("one_step_off", everywhere=False, early=False, merged=True, off_policy=True, runs=False),
    )
}


def schedule_named(name: str) -> Schedule:
    """Look a schedule up; ``InputError`` names the nearest known one."""
    if name not in SCHEDULES:
        raise InputError(f"schedule {name!r} is unknown; {nearest(name, SCHEDULES)}")
    return SCHEDULES[name]


def why_not(name: str, workload: Workload) -> str | None:
    """Why a workload cannot have a schedule; None where it can.

    Back-propagation during rollout is exact only where the rollout's forward is the one that is trained, at a ratio
    of 1 (LeanGRPO, Sections 3 and 4).
    """
    if not schedule_named(name).lean:
        return None
    rule = f"schedule {name} back-propagates mini-batch 1 during rollout: "
    if workload.algorithm == "kvpo":
        return rule + "algorithm='kvpo' trains other forward passes than it rolls out; use dancegrpo or flow_grpo"
    if workload.old_logprob_source == "recompute":
        return rule + "old_logprob_source='recompute' must be 'rollout' or 'first_replay'"
    if workload.reference_replay:
        return rule + "reference_replay=true comes too late for it; set it to false"
    return None


def build(workload: Workload, placement: Placement) -> tuple[StepGraph, Assignment]:
    """The step graph of a placement and where its tasks run."""
    placement.check(workload)
    graph = build_graph(workload, placement)
    return graph, assign(workload, placement, graph)


def build_graph(workload: Workload, placement: Placement) -> StepGraph:
    """The graph alone. It depends on schedule, GPU split, scoring mode and splits, not on the counts moved."""
    schedule = schedule_named(placement.schedule)
    if (problem := why_not(placement.schedule, workload)) is not None:
        raise InputError(problem)
    lanes = lanes_of(schedule, placement)
    builder = _Builder(workload, schedule, placement)
    _check_split_lanes(placement, [lane.name for lane in lanes])
    for split in placement.splits if schedule.lean else ():
        if workload.mini_batch_of(split.candidate) == 0:
            raise InputError(
                f"splits: candidate {split.candidate} has no grad_replay under {schedule.name}; leave it out"
            )
    builder.rollout()
    builder.scoring()
    builder.training()
    return StepGraph(tuple(builder.tasks), lanes)


def lanes_of(schedule: Schedule, placement: Placement) -> tuple[Lane, ...]:
    """Actors first, then reward GPUs; or every GPU in every role."""
    if schedule.everywhere:
        return tuple(Lane(f"gpu{i}", "all", i) for i in range(placement.actors + placement.rewards))
    if not placement.rewards:
        raise InputError(
            f"schedule {schedule.name} needs a reward GPU, but rewards=0; give it at least one of the GPUs"
        )
    a = placement.actors
    actors = (Lane(f"actor{i}", "actor", i) for i in range(a))
    return (*actors, *(Lane(f"reward{i}", "reward", a + i) for i in range(placement.rewards)))


def _check_split_lanes(placement: Placement, lanes: Sequence[str]) -> None:
    for split in placement.splits:
        for lane in split.lanes:
            if lane not in lanes:
                raise InputError(f"splits: candidate {split.candidate} is on {lane!r}; {nearest(lane, lanes)}")


def anchor_name(group: int) -> str:
    """The member name of a group's anchor video."""
    return f"anchor{group}"


def anchored_groups(workload: Workload) -> range:
    """Groups that roll out an anchor video: KVPO's baseline. Other anchored judges compare with a fixed video."""
    return range(workload.groups if workload.algorithm == "kvpo" else 0)


def requests_of(workload: Workload) -> list[tuple[str, tuple[str, ...]]]:
    """(request name, videos it compares), in candidate order (reward_shape)."""
    w = workload
    if w.reward_shape == "all_pairs":
        return [
            (f"{i}-{j}", (str(i), str(j)))
            for g in range(w.groups)
            for i in w.group_members(g)
            for j in range(i + 1, (g + 1) * w.group_size)
        ]
    shared = (lambda i: (anchor_name(w.group_of(i)),)) if anchored_groups(w) else (lambda _: ())
    return [(str(i), (str(i), *shared(i))) for i in range(w.candidates)]


def owner_of(videos: Sequence[str]) -> int:
    """The candidate that a request goes by: reward GPU owner mod r serves it."""
    return int(next(v for v in videos if v.isdigit()))


@dataclass
class _Builder:
    """Emits tasks in canonical order. ``w`` workload, ``s`` schedule, ``p`` placement."""

    w: Workload
    s: Schedule
    p: Placement
    tasks: list[Task] = field(default_factory=list)
    scores_of: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, name: object, needs: Iterable[Need] = (), **attributes: object) -> str:
        task = Task(f"{kind}:{name}", kind, tuple(needs), **attributes)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task.id

    # -- rollout ---------------------------------------------------------------------------------------------

    def rollout(self) -> None:
        for group in range(self.w.groups):
            self.add("encode_prompt", group, group=group)
        for group in anchored_groups(self.w):
            self._video(anchor_name(group), group, candidate=None)
        for i in range(self.w.candidates):
            self._video(str(i), self.w.group_of(i), candidate=i)

    def _video(self, name: str, group: int, candidate: int | None) -> None:
        where = {"candidate": candidate, "group": group}
        trains = candidate is not None and self._in_rollout(self.w.mini_batch_of(candidate))
        cost = "generate_train" if trains else None
        self.add("generate", name, [Need(f"encode_prompt:{group}", "embeddings")], **where, cost_kind=cost)
        self.add("vae_decode", name, [Need(f"generate:{name}", "latents")], **where)

    # -- scoring ---------------------------------------------------------------------------------------------

    def scoring(self) -> None:
        served = not self.s.everywhere and self.p.scoring == "on_arrival"
        batches: dict[tuple[int, int], list[tuple[str, tuple[str, ...]]]] = {}
        for name, videos in requests_of(self.w):
            owner = owner_of(videos)
            lane = owner % (self.p.actors + self.p.rewards if self.s.everywhere else self.p.rewards)
            if served:
                needs = [Need(f"vae_decode:{v}", "frames") for v in videos]
                self._scored(self.add(REQUEST, name, needs, members=(name,), pinned=f"reward{lane}"), videos)
            else:
                by_mini_batch = self.p.scoring == "per_mini_batch" and not self.s.everywhere
                batch = max(self.w.mini_batch_of(int(v)) for v in videos if v.isdigit()) if by_mini_batch else 0
                batches.setdefault((batch, lane), []).append((name, videos))
        count: dict[int, int] = {}
        for (batch, lane), requests in sorted(batches.items()):
            lane_name = f"gpu{lane}" if self.s.everywhere else f"reward{lane}"
            videos = tuple(dict.fromkeys(v for _, vs in requests for v in vs))
            needs = [Need(f"vae_decode:{v}", "frames") for v in videos]
            names = tuple(name for name, _ in requests)
            if self.s.everywhere:
                needs.append(Need(self.add("switch", f"{lane_name}.judge", pinned=lane_name)))
            task = self.add(
                "score",
                f"{lane_name}#{count.get(lane, 0)}",
                needs,
                members=names,
                pinned=lane_name,
                mini_batch=batch if self.p.scoring == "per_mini_batch" and not self.s.everywhere else None,
            )
            count[lane] = count.get(lane, 0) + 1
            for _, compared in requests:
                self._scored(task, compared)
        if self.s.everywhere:
            for lane in sorted(count):
                self.add("switch", f"gpu{lane}.policy", [Need(f"score:gpu{lane}#0")], pinned=f"gpu{lane}")
        self._advantages()

    def _scored(self, task: str, videos: Iterable[str]) -> None:
        for video in videos:
            tasks = self.scores_of.setdefault(video, [])
            if task not in tasks:
                tasks.append(task)

    def _advantages(self) -> None:
        """One advantage task per group, mini-batch or batch: it needs the scores its mean and deviation run over."""
        w = self.w
        for scope, members in self._scopes():
            groups = sorted({w.group_of(i) for i in members})
            needed = [i for g in groups for i in w.group_members(g)]
            scores = dict.fromkeys(t for i in needed for t in self.scores_of[str(i)])
            self.add(
                "advantage",
                scope,
                [Need(t) for t in scores],
                group=scope if w.advantage_scope == "group" else None,
            )
        if self.s.waits:
            self.add("barrier", "scored", [Need(f"advantage:{scope}") for scope, _ in self._scopes()])

    def _scopes(self) -> list[tuple[int, Sequence[int]]]:
        w = self.w
        if w.advantage_scope == "group":
            return [(g, w.group_members(g)) for g in range(w.groups)]
        if w.advantage_scope == "minibatch":
            return [(m, w.mini_batch_members(m)) for m in range(w.mini_batches)]
        return [(0, range(w.candidates))]

    def _advantage_of(self, i: int) -> str:
        scope = {"group": self.w.group_of(i), "minibatch": self.w.mini_batch_of(i), "batch": 0}
        return f"advantage:{scope[self.w.advantage_scope]}"

    # -- training --------------------------------------------------------------------------------------------

    def training(self) -> None:
        for m in range(self.w.mini_batches):
            trained = self.w.trained_members(m)
            # Who is trained is known when the scores are: before them, everyone may be.
            replayed = self.w.mini_batch_members(m) if self.s.early else trained
            if not self._in_rollout(m):
                self._replays(replayed, m)
            if self.w.algorithm == "kvpo":
                self._group_weights(trained, m)
            for i in trained:
                self._fold(i, m)
            self.add("update", m, [Need(f"fold:{i}", self._fold_data()) for i in trained], mini_batch=m)

    def _replays(self, replayed: Sequence[int], m: int) -> None:
        for i in replayed:
            self._forward_only(i, m)
        if not self.s.merged:
            for i in replayed:
                self.add("loss_replay", i, self._train_needs(i, m), candidate=i, mini_batch=m)
            self.add("barrier", f"loss{m}", [Need(f"loss_replay:{i}") for i in replayed], mini_batch=m)
        for i in replayed:
            self._grad_replays(i, m)

    def _in_rollout(self, m: int) -> bool:
        """The rollout of a mini-batch is also its backward."""
        return self.s.lean and m == 0

    def needs_old_replay(self, m: int) -> bool:
        """old_logprob_source: a task of its own unless the rollout, or the first replay itself, gives the value."""
        return self.w.old_logprob_source == "recompute" or (self.w.old_logprob_source == "first_replay" and m > 0)

    def _forward_only(self, i: int, m: int) -> None:
        needs = self._trajectory(i)
        # Stage by stage this pass comes after the last score; and so it does where the scores say who needs it.
        if self.s.waits and (self.w.selects or not self.s.merged):
            needs.append(Need("barrier:scored"))
        if self.needs_old_replay(m):
            self.add("old_replay", i, needs, candidate=i, mini_batch=m)
        if self.w.reference_replay:
            self.add("ref_replay", i, needs, candidate=i, mini_batch=m)

    def _trajectory(self, i: int) -> list[Need]:
        """Off-policy, this step trains what the one before rolled out: its trajectory and scores are there."""
        return [] if self.s.off_policy else [Need(f"generate:{i}", "trajectory")]

    def _train_needs(self, i: int, m: int, reference: str | None = None) -> list[Need]:
        needs = self._trajectory(i)
        if m > 0:
            needs.append(Need(f"update:{m - 1}", "adapter"))
        if self.s.waits:
            needs.append(Need("barrier:scored"))
        if self.needs_old_replay(m):
            needs.append(Need(f"old_replay:{i}"))
        if self.w.reference_replay:
            needs.append(Need(f"ref_replay:{i}", reference))
        return needs

    def _grad_replays(self, i: int, m: int) -> None:
        needs = self._train_needs(i, m, reference="reference" if self.w.gaussian_kl else None)
        # A KL to means has a seed of its own at the output: a second backward, unless A is known and the seeds add up.
        cost = "grad_replay_kl" if self.w.gaussian_kl and self.s.early else None
        if not self.s.merged:
            needs += [Need(f"loss_replay:{i}"), Need(f"barrier:loss{m}")]
            if not self.s.early:  # the advantage seeds the backward; otherwise g+ and g- wait for it
                needs.append(Need(self._advantage_of(i)))
        for name, steps, lane in self._parts(i):
            where = {"candidate": i, "mini_batch": m, "steps": steps, "pinned": lane}
            self.add("grad_replay", name, needs, **where, cost_kind=cost)

    def _parts(self, i: int) -> list[tuple[str, tuple[int, ...] | None, str | None]]:
        """(task name, steps, lane) of each part of a candidate's grad_replay; one whole part unless it is split."""
        for split in self.p.splits:
            if split.candidate == i:
                return [
                    (f"{i}.k{'-'.join(str(k) for k in dict.fromkeys((part[0], part[-1])))}", part, lane)
                    for part, lane in zip(split.steps, split.lanes, strict=True)
                ]
        return [(str(i), None, None)]

    def _group_weights(self, members: Sequence[int], m: int) -> None:
        for g in dict.fromkeys(self.w.group_of(i) for i in members):
            group = self.w.group_members(g)
            replays = [f"grad_replay:{name}" for i in group for name, _, _ in self._parts(i)]
            needs = [Need(task) for task in (*self._known_from(self._advantage_of(group[0])), *replays)]
            self.add("group_weights", g, needs, group=g, mini_batch=m)

    def _known_from(self, advantage: str) -> list[str]:
        """The task an advantage comes from: none off-policy, where it is known before the step."""
        return [] if self.s.off_policy else [advantage]

    def _fold(self, i: int, m: int) -> None:
        kvpo = self.w.algorithm == "kvpo"
        weights = [f"group_weights:{self.w.group_of(i)}"] if kvpo else self._known_from(self._advantage_of(i))
        replays = [f"grad_replay:{name}" for name, _, _ in self._parts(i)]
        gradients = [Need(t, self._gradients(m)) for t in ([f"generate:{i}"] if self._in_rollout(m) else replays)]
        self.add("fold", i, [*gradients, *(Need(t) for t in weights)], candidate=i, mini_batch=m)

    def _gradients(self, m: int) -> str:
        """What a candidate keeps until its fold (``GRADIENT_VECTORS``).

        Before its advantage is known: g+ and g-, one vector while nothing is clipped (mini-batch 1), and beside them
        the gradient of a KL to means, which A does not scale. That one goes with its candidate and not into a sum per
        GPU, so that folding stays in candidate order and a candidate that is not selected leaves nothing. With the
        advantage known, or with KVPO's unit per branch, whose KL weighs the same gradient, all are one vector.
        """
        if self.w.algorithm == "kvpo" or not self.s.early:
            return "gradient"
        signs = "sign_gradients" if m > 0 else "gradient"
        return f"{signs}_and_kl" if self.w.gaussian_kl else signs

    def _fold_data(self) -> str | None:
        return None if self.w.deterministic else "gradient"


def assign(workload: Workload, placement: Placement, graph: StepGraph) -> Assignment:
    """Lanes and queues for ``graph`` (built from the same workload, schedule, split and scoring)."""
    return Assigner(workload, placement, graph)(placement)


class Assigner:
    """Assigns one graph under many placements: what does not depend on the counts moved is worked out once."""

    def __init__(self, workload: Workload, placement: Placement, graph: StepGraph) -> None:
        self.workload, self.graph = workload, graph
        self.schedule = schedule_named(placement.schedule)
        placed = [(_rank(t, self.schedule), n, t) for n, t in enumerate(graph.tasks) if t.kind not in CONTROL_KINDS]
        placed.sort(key=lambda item: item[:2])
        dealt = _dealt(workload, self.schedule)
        apart = () if workload.deterministic else ("fold",)  # otherwise a gradient is scaled where it is
        self.tasks = [
            (
                t.id,
                None if t.pinned else (t.kind, t.candidate),
                _home(t, self.schedule, placement, dealt),
                t.needs[0].task if t.kind in apart else None,
                rank[0] < _SERVE,
            )
            for rank, _, t in placed
            if t.kind != REQUEST
        ]
        self.requests = {t.id: t.pinned for t in graph.of_kind(REQUEST) if t.pinned is not None}
        self.lanes = tuple(lane.name for lane in graph.lanes)

    def __call__(self, placement: Placement) -> Assignment:
        """Where each task runs, and each lane's queue."""
        lane_of = dict(self.requests)
        queues: dict[str, list[str]] = {lane: [] for lane in self.lanes}
        serve_after = dict.fromkeys(self.lanes, 0)
        moved = self._moved(placement) if self.schedule.movable else {}
        for task, movable, home, follows, early in self.tasks:
            lane = lane_of[follows] if follows else moved.get(movable, home) if movable else home
            lane_of[task] = lane
            queues[lane].append(task)
            if early:
                serve_after[lane] += 1
        return Assignment(lane_of, {lane: tuple(queue) for lane, queue in queues.items()}, serve_after)

    def _moved(self, p: Placement) -> dict[tuple[str, int | None], str]:
        """(kind, candidate) -> reward lane: the first decodes, the last replays of each mini-batch."""
        moved: dict[tuple[str, int | None], str] = {
            ("vae_decode", i): f"reward{i % p.rewards}" for i in range(p.vae_moved)
        }
        for kind, counts in (
            ("grad_replay", p.train_moved),
            ("ref_replay", p.ref_moved),
            ("old_replay", p.old_moved),
        ):
            for m, count in enumerate(counts):
                end = self.workload.mini_batch_members(m).stop
                moved.update({(kind, i): f"reward{i % p.rewards}" for i in range(end - count, end)})
        return moved


def _dealt(w: Workload, s: Schedule) -> dict[int, int]:
    """Selected candidate -> its number among the selected, where the scores are known before they go to their GPUs."""
    if not (w.selects and s.waits):
        return {}
    return {i: n for n, i in enumerate(i for m in range(w.mini_batches) for i in w.trained_members(m))}


def _home(task: Task, s: Schedule, p: Placement, dealt: Mapping[int, int]) -> str:
    """The lane a task has when nothing moves."""
    if task.pinned is not None:
        return task.pinned
    lane, count = ("gpu", p.actors + p.rewards) if s.everywhere else ("actor", p.actors)
    if task.kind in ("fold", "update"):
        return f"{lane}0"
    owner = task.group or 0 if task.candidate is None else task.candidate  # prompts and anchors go by group
    if task.mini_batch is not None:  # a replay
        owner = dealt.get(owner, owner)
    return f"{lane}{owner % count}"


_SERVE = 2
"""Rank of scoring in a lane's queue: what ranks lower (prompts, rollout, decodes) is taken first."""


def _rank(task: Task, s: Schedule) -> tuple[int, ...]:
    """Place of a task in its lane's queue, before candidate order: prompts, rollout, scoring, then training.

    Forward-only replays of later mini-batches fill the wait before the first update, except stage by stage.
    """
    if task.kind == "encode_prompt":
        return (0, 0, 0)
    if task.kind in ("generate", "vae_decode"):
        return (1, -1 if task.candidate is None else task.candidate, 0)
    if task.kind in ("score", "switch", REQUEST):
        return (_SERVE, 0, 0)
    m = task.mini_batch or 0
    stage = {"old_replay": 0, "ref_replay": 0, "loss_replay": 1, "grad_replay": 2, "fold": 4, "update": 5}[task.kind]
    if stage == 0 and not s.merged and not s.early:
        return (3, 0, 0)
    if stage == 0 and m > 0:
        return (4, 0, 3)
    return (4, m, stage)
