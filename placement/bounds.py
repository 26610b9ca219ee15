"""Lower bounds on the step time of any placement in a region of the count space.

Each is a pure function of workload, costs and GPU split and states what it relies on; none can exceed the step time of
a placement in that region, because each drops constraints (queues, transfers, waiting) and keeps only necessary work.
They take whole candidates as the unit of training, unless ``StepCosts.divisible``. Where rewards
select who is trained, only the selected count: what is replayed and then dropped is no necessary work. They say nothing
about schedules that are not eligible (sim.schedules): rollouts that also train, or train another batch, have other
chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagebreaker.placement.space import Region
from stagebreaker.profiles.table import GpuKind, Profile, TaskCost
from stagebreaker.sim.engine import profiled_us
from stagebreaker.sim.schedules import owner_of, requests_of
from stagebreaker.sim.serving import Turn, turns_of
from stagebreaker.sim.workload import Cluster, Workload


@dataclass(frozen=True)
class StepCosts:
    """Durations in us of the tasks of one candidate and of the judge, on one kind of GPU."""

    workload: Workload
    profile: Profile
    gpu_kind: str
    divisible: bool = False
    """A candidate's grad_replay may be split by step; else it is one task."""

    @classmethod
    def on(cls, workload: Workload, profile: Profile, cluster: Cluster, divisible: bool = False) -> StepCosts:
        """Costs on a cluster's GPUs; of several kinds the fastest for each task, which nothing can beat."""
        kinds = tuple(dict.fromkeys(gpu.kind for gpu in cluster.gpus))
        if len(kinds) > 1:
            return cls(workload, fastest_of(profile, kinds), FASTEST, divisible)
        return cls(workload, profile, kinds[0], divisible)

    def us(self, kind: str) -> int:
        """One task."""
        return self.profile.duration_us(kind, self.gpu_kind)

    def dealt(self, judges: int) -> list[list[str]]:
        """Score requests of each of ``judges`` judges, by name."""
        found: list[list[str]] = [[] for _ in range(judges)]
        for name, videos in requests_of(self.workload):
            found[owner_of(videos) % judges].append(name)
        return found

    def score_work_us(self, requests: Sequence[str], fullest: int, gathered: bool) -> int:
        """Least judge time for ``requests`` of which no judge gets more than ``fullest``: the best amortised batch.

        Token by token: prompts are read one by one, tokens written at the best share of a step.
        """
        most = 1 if self.profile.serving == "serial" and not gathered else fullest
        if self.profile.verdicts is None:
            curve = self.profile.curve_us("score", self.gpu_kind)
            sizes = range(1, min(most, max(curve)) + 1)
            return int(len(requests) * min(self.profile.duration_us("score", self.gpu_kind, b) / b for b in sizes))
        most = min(most, self.profile.verdicts.most_active or most, max(self._token_curve))
        share = min(self.profile.duration_us("judge_step", self.gpu_kind, n) / n for n in range(1, most + 1))
        return int(sum(turn.read_us + turn.tokens * share for name in requests for turn in self._turns(name)))

    @property
    def fastest_score_us(self) -> int:
        """No verdict comes sooner than the fastest batch, or than the shortest drawn one at the fastest step."""
        if self.profile.verdicts is None:
            return min(self.profile.curve_us("score", self.gpu_kind).values())
        step = min(self._token_curve.values())
        verdicts = (self._turns(name) for name, _ in requests_of(self.workload))
        return int(min(sum(t.fetch_us + t.read_us + t.tokens * step for t in turns) for turns in verdicts))

    @property
    def _token_curve(self) -> dict[int, int]:
        return self.profile.curve_us("judge_step", self.gpu_kind)

    def _turns(self, request: str) -> tuple[Turn, ...]:
        return turns_of(self.profile, self.gpu_kind, request)

    @property
    def all_needed(self) -> bool:
        """Whether some update waits for every score: not where a whole group is dropped."""
        w = self.workload
        return w.advantage_scope != "group" or all(w.trained_of(g) for g in range(w.groups))

    @property
    def closing_us(self) -> int:
        """What follows the last score that there is."""
        return self.us("fold") + self.us("update") if self.all_needed else 0

    def spread_us(self, work_us: int, gpus: int) -> int:
        """All work but the last update over ``gpus``, and that update: alone at the end if it needs all the rest."""
        update = self.us("update")
        return work_us // gpus + update if self.all_needed else (work_us + update) // gpus

    @property
    def grad_replay_us(self) -> int:
        """One candidate's replay; with a KL to means the cheaper of its two forms, one backward or two."""
        plain = self.us("grad_replay")
        if not self.workload.gaussian_kl:
            return plain
        return min(plain, profiled_us(self.profile, "grad_replay_kl", self.gpu_kind))

    @property
    def least_part_us(self) -> int:
        """The shortest task a candidate's replay can be cut into: one step and the rebuild, or all of it."""
        whole = self.grad_replay_us
        if not self.divisible:
            return whole
        rebuild = self.us("context_rebuild")
        return min(whole, rebuild + max(0, whole - rebuild) // self.workload.trained_steps)

    def forward_only_us(self, mini_batch: int) -> tuple[int, int]:
        """Old and reference replay of one candidate; neither needs the other."""
        w = self.workload
        old = w.old_logprob_source == "recompute" or (w.old_logprob_source == "first_replay" and mini_batch > 0)
        return self.us("old_replay") if old else 0, self.us("ref_replay") if w.reference_replay else 0

    @property
    def videos(self) -> int:
        """Candidates and anchors."""
        return self.workload.candidates + (self.workload.groups if self.workload.algorithm == "kvpo" else 0)


FASTEST = "fastest"


def fastest_of(profile: Profile, kinds: Sequence[str]) -> Profile:
    """A profile of one imaginary kind: each task at each batch size as on the fastest of ``kinds`` that has it.

    Between batch sizes the lesser of two lines lies above the line between their lesser ends, so that interpolating
    there stays below every kind.
    """
    tasks = []
    for task in dict.fromkeys(cost.kind for cost in profile.tasks):
        curves = {kind: profile.curve_us(task, kind) for kind in kinds if profile.has(task, kind)}
        for size in sorted({size for curve in curves.values() for size in curve}):
            having = [kind for kind, curve in curves.items() if min(curve) <= size <= max(curve)]
            least = min(profile.duration_us(task, kind, size) for kind in having)
            tasks.append(TaskCost(kind=task, gpu_kind=FASTEST, batch_size=size, samples_us=(least,)))
    kind = GpuKind(name=FASTEST, model=" or ".join(kinds))
    return profile.model_copy(update={"gpu_kinds": (kind,), "tasks": tuple(tasks)})


def critical_path_us(region: Region, c: StepCosts) -> int:
    """One candidate's longest chain: rollout, then scoring beside training, then every update in turn.

    Relies on: each mini-batch's training needs the update before it; a score needs rollout and decode.
    """
    w = region.workload
    start = c.us("encode_prompt") + c.us("generate")
    train = max(c.forward_only_us(0)) + c.least_part_us
    first = start + max(c.us("vae_decode") + c.fastest_score_us, train)
    return first + _later_mini_batches_us(w, region.actors + region.rewards, c) + c.us("fold") + c.us("update")


def actor_rounds_us(region: Region, c: StepCosts) -> int:
    """Whole rollouts on the actors come in rounds; after the last one its own training or scoring still follows.

    Relies on: rollouts run on actors only and are not split.
    """
    rounds = -(-c.videos // region.actors) * c.us("generate")
    after = c.us("vae_decode") + c.fastest_score_us
    return c.us("encode_prompt") + rounds + after + c.closing_us


def score_end_us(region: Region, c: StepCosts) -> int:
    """The fullest judge cannot end before the first video exists and all its requests are served; an update follows.

    Relies on: requests are dealt to reward GPUs by candidate; an update follows those that it needs.
    """
    start = c.us("encode_prompt") + c.us("generate") + c.us("vae_decode")
    gathered = region.scoring != "on_arrival"
    works = (c.score_work_us(names, len(names), gathered) for names in c.dealt(region.rewards) if names)
    scoring = max(*works, c.fastest_score_us)
    return start + scoring + c.closing_us


def work_us(region: Region, c: StepCosts) -> int:
    """All work spread evenly over all GPUs, which nothing can beat, with the last update alone at the end.

    Relies on: the last update runs on one GPU after everything else that is work.
    """
    rollout = c.videos * (c.us("generate") + c.us("vae_decode"))
    fullest = max(map(len, c.dealt(region.rewards)))
    scoring = c.score_work_us(c.dealt(1)[0], fullest, region.scoring != "on_arrival")
    total = rollout + scoring + _training_us(region.workload, c)
    return c.spread_us(total, region.actors + region.rewards)


def mini_batch_chain_us(region: Region, c: StepCosts) -> int:
    """Later mini-batches train one after another, each in whole candidates over all GPUs, after the first update.

    Relies on: training of mini-batch m needs update m-1; a candidate is trained on one GPU.
    """
    return _chain_us(region.workload, region.actors + region.rewards, c)


def _chain_us(w: Workload, gpus: int, c: StepCosts) -> int:
    rollout = c.us("encode_prompt") + c.us("generate")
    first = max(len(w.trained_members(0)) * c.grad_replay_us // gpus, c.least_part_us)
    return rollout + first + c.us("fold") + c.us("update") + _later_mini_batches_us(w, gpus, c)


def _later_mini_batches_us(w: Workload, gpus: int, c: StepCosts) -> int:
    """Whole candidates come in rounds; parts spread over all GPUs, their rebuilds not counted."""
    total = 0
    for m in range(1, w.mini_batches):
        count = len(w.trained_members(m))
        if c.divisible:
            total += max(count * c.grad_replay_us // gpus, c.least_part_us) + c.us("update")
        else:
            total += -(-count // gpus) * c.grad_replay_us + c.us("update")
    return total


def _training_us(w: Workload, c: StepCosts) -> int:
    """All training work but the last update, which nothing can run beside."""
    each = c.grad_replay_us + c.us("fold")
    replays = sum(len(w.trained_members(m)) * (each + sum(c.forward_only_us(m))) for m in range(w.mini_batches))
    return replays + (w.mini_batches - 1) * c.us("update")


def any_schedule_us(workload: Workload, gpus: int, c: StepCosts) -> int:
    """No schedule of these tasks on ``gpus`` equal GPUs is faster, wherever and in whatever batches they run.

    The largest of: one candidate's chain through every update; all work spread evenly, the judge at its best batch;
    whole candidates of each later mini-batch in rounds after the first update. One replay per trajectory.
    """
    anywhere = Region(workload, gpus, gpus, "one_batch")
    (requests,) = c.dealt(1)
    judge = c.score_work_us(requests, len(requests), gathered=True)
    rollout = c.videos * (c.us("generate") + c.us("vae_decode"))
    work = c.spread_us(rollout + judge + _training_us(workload, c), gpus)
    return max(critical_path_us(anywhere, c), work, _chain_us(workload, gpus, c))


BOUNDS = {
    "critical_path": critical_path_us,
    "actor_rounds": actor_rounds_us,
    "score_end": score_end_us,
    "work": work_us,
    "mini_batch_chain": mini_batch_chain_us,
}


def region_bound(region: Region, c: StepCosts) -> dict[str, int]:
    """Every bound of a region; the largest holds."""
    return {name: bound(region, c) for name, bound in BOUNDS.items()}
