"""Lower bounds on the step time of any placement in a region of the count space.

Each is a pure function of workload, costs and GPU split and states what it relies on; none can exceed the step time of
a placement in that region, because each drops constraints (queues, transfers, waiting) and keeps only necessary work.
They assume GPUs of one kind and whole candidates as the unit of training.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagebreaker.placement.space import Region
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.workload import Workload


@dataclass(frozen=True)
class StepCosts:
    """Durations in us of the tasks of one candidate and of the judge, on one kind of GPU."""

    workload: Workload
    profile: Profile
    gpu_kind: str

    def us(self, kind: str) -> int:
        """One task."""
        return self.profile.duration_us(kind, self.gpu_kind)

    @property
    def requests(self) -> int:
        """Number of score requests in a step."""
        w = self.workload
        return w.groups * w.group_size * (w.group_size - 1) // 2 if w.reward_shape == "all_pairs" else w.candidates

    def score_work_us(self, requests: int, fullest: int, gathered: bool) -> int:
        """Least judge time for ``requests`` of which no judge gets more than ``fullest``: the best amortised batch."""
        most = 1 if self.profile.serving == "serial" and not gathered else fullest
        curve = self.profile.curve_us("score", self.gpu_kind)
        sizes = range(1, min(most, max(curve)) + 1)
        return int(requests * min(self.profile.duration_us("score", self.gpu_kind, b) / b for b in sizes))

    def fullest_judge(self, rewards: int) -> int:
        """Most requests that one of ``rewards`` judges gets; a request goes by its first candidate (sim.schedules)."""
        w = self.workload
        dealt = [0] * rewards
        for i in range(w.candidates):
            dealt[i % rewards] += w.group_size - 1 - i % w.group_size if w.reward_shape == "all_pairs" else 1
        return max(dealt)

    @property
    def fastest_score_us(self) -> int:
        """No verdict comes sooner than the fastest batch."""
        return min(self.profile.curve_us("score", self.gpu_kind).values())

    def forward_only_us(self, mini_batch: int) -> tuple[int, int]:
        """Old and reference replay of one candidate; neither needs the other."""
        w = self.workload
        old = w.old_logprob_source == "recompute" or (w.old_logprob_source == "first_replay" and mini_batch > 0)
        return self.us("old_replay") if old else 0, self.us("ref_replay") if w.reference_replay else 0

    @property
    def videos(self) -> int:
        """Candidates and anchors."""
        return self.workload.candidates + (self.workload.groups if self.workload.algorithm == "kvpo" else 0)


def critical_path_us(region: Region, c: StepCosts) -> int:
    """One candidate's longest chain: rollout, then scoring beside training, then every update in turn.

    Relies on: each mini-batch's training needs the update before it; a score needs rollout and decode.
    """
    w = region.workload
    start = c.us("encode_prompt") + c.us("generate")
    train = max(c.forward_only_us(0)) + c.us("grad_replay")
    first = start + max(c.us("vae_decode") + c.fastest_score_us, train)
    return first + _later_mini_batches_us(w, region.actors + region.rewards, c) + c.us("fold") + c.us("update")


def actor_rounds_us(region: Region, c: StepCosts) -> int:
    """Whole rollouts on the actors come in rounds; after the last one its own training or scoring still follows.

    Relies on: rollouts run on actors only and are not split.
    """
    rounds = -(-c.videos // region.actors) * c.us("generate")
    after = c.us("vae_decode") + c.fastest_score_us
    return c.us("encode_prompt") + rounds + after + c.us("fold") + c.us("update")


def score_end_us(region: Region, c: StepCosts) -> int:
    """The fullest judge cannot end before the first video exists and all its requests are served; an update follows.

    Relies on: requests are dealt to reward GPUs by candidate and each is needed by some update.
    """
    fullest = c.fullest_judge(region.rewards)
    start = c.us("encode_prompt") + c.us("generate") + c.us("vae_decode")
    scoring = max(c.score_work_us(fullest, fullest, region.scoring != "on_arrival"), c.fastest_score_us)
    return start + scoring + c.us("fold") + c.us("update")


def work_us(region: Region, c: StepCosts) -> int:
    """All work spread evenly over all GPUs, which nothing can beat, with the last update alone at the end.

    Relies on: the last update runs on one GPU after everything else that is work.
    """
    rollout = c.videos * (c.us("generate") + c.us("vae_decode"))
    scoring = c.score_work_us(c.requests, c.fullest_judge(region.rewards), region.scoring != "on_arrival")
    total = rollout + scoring + _training_us(region.workload, c)
    return total // (region.actors + region.rewards) + c.us("update")


def mini_batch_chain_us(region: Region, c: StepCosts) -> int:
    """Later mini-batches train one after another, each in whole candidates over all GPUs, after the first update.

    Relies on: training of mini-batch m needs update m-1; a candidate is trained on one GPU.
    """
    return _chain_us(region.workload, region.actors + region.rewards, c)


def _chain_us(w: Workload, gpus: int, c: StepCosts) -> int:
    rollout = c.us("encode_prompt") + c.us("generate")
    first = max(len(w.mini_batch_members(0)) * c.us("grad_replay") // gpus, c.us("grad_replay"))
    return rollout + first + c.us("fold") + c.us("update") + _later_mini_batches_us(w, gpus, c)


def _later_mini_batches_us(w: Workload, gpus: int, c: StepCosts) -> int:
    rounds = (-(-len(w.mini_batch_members(m)) // gpus) for m in range(1, w.mini_batches))
    return sum(n * c.us("grad_replay") + c.us("update") for n in rounds)


def _training_us(w: Workload, c: StepCosts) -> int:
    """All training work but the last update, which nothing can run beside."""
    each = c.us("grad_replay") + c.us("fold")
    replays = sum(len(w.mini_batch_members(m)) * (each + sum(c.forward_only_us(m))) for m in range(w.mini_batches))
    return replays + (w.mini_batches - 1) * c.us("update")


def any_schedule_us(workload: Workload, gpus: int, c: StepCosts) -> int:
    """No schedule of these tasks on ``gpus`` equal GPUs is faster, wherever and in whatever batches they run.

    The largest of: one candidate's chain through every update; all work spread evenly, the judge at its best batch;
    whole candidates of each later mini-batch in rounds after the first update. One replay per trajectory.
    """
    anywhere = Region(workload, gpus, gpus, "one_batch")
    judge = c.score_work_us(c.requests, c.requests, gathered=True)
    work = (c.videos * (c.us("generate") + c.us("vae_decode")) + judge + _training_us(workload, c)) // gpus + c.us(
        "update"
    )
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
