"""Runs small enough for tests: a toy workload, plans with a placement of one's choice, a run on one's own backend.

A worker's judge, VAE and text encoder hold no state, so ``quick_engines`` loads each once per process, and the policy
has one layer of two heads.
"""

from functools import cache, partial

import torch
from builders import profile_of

from stagebreaker.executor import worker
from stagebreaker.executor.models import load
from stagebreaker.executor.rewards.protocol import Scored, Unscorable
from stagebreaker.executor.rewards.rules import rule_outcome
from stagebreaker.executor.runner import Program, RunOptions, train
from stagebreaker.sim.plan import Placement, Plan, ScheduledPlan
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster, load_workload

SMALL = (
    "latent_frames=2",
    "chunk_frames=1",
    "resolution=16x16",
    "denoise_steps=3",
    "trained_steps=2",
    "judge_tokens=2",
    "lora_rank=2",
)
"""Ratios of a second mini-batch differ from 1 by about 1e-3 here."""

PROFILE = profile_of("dynamic", t0=1, t1=1, generate=1, vae_decode=1, loss_replay=1, grad_replay=2, fold=0.1)


def small(**fields):
    """Four candidates in two groups and two mini-batches, unless ``fields`` say otherwise."""
    start = load_workload("tiny-dancegrpo", ("candidates=4", "group_size=2", *SMALL))
    return start.with_(**fields)


def place(schedule, actors=1, rewards=1, **fields):
    """A placement that scores on arrival unless told otherwise."""
    return Placement(schedule=schedule, actors=actors, rewards=rewards, **{"scoring": "on_arrival"} | fields)


def plan_of(workload, *placements, profile=PROFILE, gpus=None, step_us=1):
    """A plan with these placements, one per schedule, the first being the best."""
    scheduled = {}
    for p in placements:
        _, assignment = build(workload, p)
        scheduled[p.schedule] = ScheduledPlan(
            placement=p, step_us=step_us, lane_of=dict(assignment.lane_of), order=dict(assignment.order)
        )
    count = gpus or max(p.actors + p.rewards for p in placements)
    return Plan(
        best=placements[0].schedule,
        lower_bound_us=0,
        workload=workload,
        cluster=Cluster.equal(count, profile.gpu_kinds[0].name),
        profile=profile,
        workload_sha256=workload.digest(),
        profile_sha256=profile.digest(),
        schedules=scheduled,
    )


def program_of(workload, placement, profile=PROFILE):
    """One schedule, ready to run."""
    return Program.of(plan_of(workload, placement, profile=profile), placement.schedule)


def run(workload, placement, out, steps=3, backend="inline", profile=PROFILE, **options):
    """Train; without a warm-up unless asked for."""
    chosen = RunOptions(steps, out, **{"warmup": False} | options)
    return train(program_of(workload, placement, profile), backend, chosen)


def adapter_of(out, step=None):
    """The adapter of a run's checkpoint (default: the newest) as one vector, and its optimizer's state."""
    from safetensors.torch import load_file

    from stagebreaker.executor.checkpoint import folder_of, latest

    folder = latest(out)[1] if step is None else folder_of(out, step)
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    vector = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    return vector, load_file(folder / "optimizer.safetensors")


def rel_difference(got, want):
    return float((got - want).abs().max() / want.abs().max())


def quick_engines(monkeypatch):
    """See the module's docstring. In this process only."""
    torch.set_num_threads(1)
    monkeypatch.setattr(load, "tiny_transformer", partial(load.tiny_transformer, heads=2, layers=1))
    for name in ("load_vae", "load_text_encoder", "load_judge_model"):
        monkeypatch.setattr(worker, name, _cached(name))


@cache
def _cached(name):
    return cache(getattr(load, name))


class Judge:
    """Scores by the rule, except the requests in ``broken``: those it cannot score. ``scores`` overrides the rule."""

    broken = frozenset()
    scores = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, model, processor, tokens):
        self.model = model

    def score(self, requests):
        return [self._one(request) for request in requests]

    def _one(self, request):
        if request.key in self.broken:
            return Unscorable("the judge gave no verdict")
        return Scored(self.scores[request.key]) if request.key in self.scores else rule_outcome(request)


def judged_by(monkeypatch, broken=(), **scores):
    """Workers of this process get a ``Judge``; scores by request name, an underscore for the hyphen of a pair."""
    fields = {"broken": frozenset(broken), "scores": {k.lstrip("c").replace("_", "-"): v for k, v in scores.items()}}
    monkeypatch.setattr(worker, "TinyVlmJudge", type("Stub", (Judge,), fields))
